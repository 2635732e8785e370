"""Which classes and functions a checkpoint may name: the one list that both save and load hold to.

A pickle can call whatever it names. So ours name only what stands here: what torch's own ``weights_only`` loader
accepts, plain value types of the standard library and NumPy, and the classes that the user trusts. Nothing here runs
code of a file's choosing. The same list at both ends means that nothing is saved which could not be loaded again.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QUInt8Storage": torch.quint8,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
"""The storage classes that torch's format names, and the dtype that each stands for."""

REBUILD = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor", "_rebuild_sparse_tensor")
REBUILD_PARAMETER = ("_rebuild_parameter", "_rebuild_parameter_with_state")

_PLAIN = (
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "range",
    "set",
    "slice",
    "str",
    "tuple",
)
_VALUES = (
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("types", "SimpleNamespace"),
    ("uuid", "UUID"),
)
_NUMPY_FUNCTIONS = ("_reconstruct", "scalar")


class Allowed:
    """The names that may stand in a pickle, and what they mean."""

    def __init__(self, trust: Iterable[type] = ()) -> None:
        self._trusted: dict[str, type] = {}
        if isinstance(trust, type) or not isinstance(trust, Iterable):
            raise ValueError(f"trust={trust!r}: it must be a list of classes")
        for cls in trust:
            if not isinstance(cls, type) or "<locals>" in _name(cls):
                shown = _name(cls) if isinstance(cls, type) else repr(cls)
                raise ValueError(f"trust={shown}: it must hold classes that can be imported by their name")
            self._trusted[_name(cls)] = cls

    @property
    def trusted(self) -> tuple[type, ...]:
        """The classes that the user vouches for."""
        return tuple(self._trusted.values())

    def find(self, module: str, name: str) -> Any | None:
        """Return what ``module.name`` stands for, or None if it may not be named."""
        full = f"{module}.{name}"
        known = self._trusted.get(full)
        return known if known is not None else _fixed().get(full) or _numpy(full)

    def holds(self, thing: Any) -> bool:
        """Return whether this class or function may be named."""
        module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
        return isinstance(module, str) and isinstance(name, str) and self.find(module, name) is thing

    def trusts(self, thing: Any) -> bool:
        """Return whether the user, not we, vouches for this class."""
        return isinstance(thing, type) and self._trusted.get(_name(thing)) is thing


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"


@lru_cache(maxsize=1)
def _fixed() -> dict[str, Any]:
    table: dict[str, Any] = {f"builtins.{name}": getattr(builtins, name) for name in _PLAIN}
    for module, name in _VALUES:
        thing = getattr(importlib.import_module(module), name)
        table[f"{module}.{name}"] = thing
        table[_name(thing)] = thing  # where this Python keeps it (pathlib has moved its classes into a submodule)
    table |= {f"torch.{name}": getattr(torch, name) for name in STORAGE_DTYPES}
    table |= {f"torch._utils.{name}": getattr(torch._utils, name) for name in REBUILD + REBUILD_PARAMETER}
    table |= {str(value): value for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.qscheme))}
    table |= {_name(cls): cls for cls in (torch.Size, torch.device, torch.Tensor, torch.nn.Parameter)}
    table["torch.storage.UntypedStorage"] = torch.storage.UntypedStorage
    table["torch._tensor._rebuild_from_type_v2"] = torch._tensor._rebuild_from_type_v2
    table["torch.serialization._get_layout"] = torch.serialization._get_layout
    return table


def _numpy(full: str) -> Any | None:
    """Look among NumPy's array, dtype and scalar types; only where NumPy is imported already or the file names it."""
    package, _, rest = full.partition(".")
    if package != "numpy":
        return None
    if "numpy" not in sys.modules:
        try:
            importlib.import_module("numpy")
        except ImportError:
            return None
    numpy = sys.modules["numpy"]
    module, _, name = rest.rpartition(".")
    if module in ("core.multiarray", "_core.multiarray") and name in _NUMPY_FUNCTIONS:
        return getattr(importlib.import_module(_numpy_core()), name)
    if module == "dtypes":
        found = getattr(numpy.dtypes, name, None)
        return found if isinstance(found, type) and issubclass(found, numpy.dtype) else None
    found = getattr(numpy, rest, None)
    return found if found in (numpy.ndarray, numpy.dtype) or _is_scalar_type(numpy, found) else None


def _is_scalar_type(numpy: Any, found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, numpy.generic)


def _numpy_core() -> str:
    """Return the module that holds NumPy's rebuilding functions; NumPy 2 has moved it."""
    return (
        "numpy._core.multiarray"
        if int(sys.modules["numpy"].__version__.split(".")[0]) >= 2
        else "numpy.core.multiarray"
    )
