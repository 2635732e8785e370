"""A state to the plan of its image: the pickled structure, and which bytes of which storages it needs.

The pickle is the one that ``torch.save`` writes (protocol 2, storages as persistent ids), so that ``torch.load``
reads it. What differs: of each storage only the smallest span that covers its views is stored, and every class or
function that would have to be looked up on loading is checked against :mod:`trainer_hooks.values` first.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from ckpt_service.errors import StateRefused
from trainer_hooks.values import REBUILD, REBUILD_PARAMETER, Allowed

_PROTOCOL = 2  # the one that torch.load expects
_NARROW = frozenset(getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8))


@dataclass(frozen=True)
class StorageSpan:
    """The bytes of a live storage that a state needs, from ``start``; record ``data/<key>`` of the image."""

    key: int
    storage: UntypedStorage
    start: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What an image of a state consists of. ``spans`` refer to the live storages: copy them before they change."""

    pickled: bytes
    spans: tuple[StorageSpan, ...]
    tensors: int


def plan(state: Any, allowed: Allowed) -> Plan:
    """Pickle the structure of ``state`` and find the bytes that it needs.

    Raises:
        StateRefused: it holds something that cannot be saved, or not be loaded again; names the key path.
    """
    pickled, table = _pickle(state, allowed, {})
    if any(found.is_trimmed for found in table.found.values()):
        # Sizes and offsets depend on the spans, which are known only after the first pass (it takes whole storages).
        spans = {handle: (found.low, found.high) for handle, found in table.found.items()}
        pickled, table = _pickle(state, allowed, spans)
    needed = (StorageSpan(int(found.key), found.storage, found.begin, found.nbytes) for found in table.found.values())
    return Plan(pickled, tuple(needed), table.tensors)


@dataclass
class _Found:
    """A storage met while pickling: the bytes [low, high) of it that were needed so far, and those that are stored.

    What is stored, ``nbytes`` from ``begin``, is fixed before the pickling, and the pickle refers to it.
    """

    key: str
    storage: UntypedStorage
    dtype: torch.dtype
    low: int
    high: int
    begin: int
    nbytes: int

    @property
    def is_trimmed(self) -> bool:
        return self.high - self.low != self.storage.nbytes()


@dataclass(frozen=True)
class _Reference:
    """Stands for a storage in the pickle, where :meth:`_Pickler.persistent_id` turns it into torch's tuple."""

    kind: type
    key: str
    count: int


class _Table:
    """The storages of one pickle, by torch's handle, in the order in which they are met."""

    def __init__(self, spans: Mapping[int, tuple[int, int]]) -> None:
        self._spans = spans
        self.found: dict[int, _Found] = {}
        self.tensors = 0

    def note(self, storage: UntypedStorage, dtype: torch.dtype, low: int, high: int) -> _Found:
        handle = storage._cdata
        known = self.found.get(handle)
        if known is None:
            # One that the first pass has not met (an object may make new tensors each time) is stored whole.
            begin, end = self._spans.get(handle, (0, storage.nbytes()))
            known = _Found(str(len(self.found)), storage, dtype, low, high, begin, end - begin)
            self.found[handle] = known
        elif known.dtype != dtype:
            raise _Refusal(f"a tensor of {dtype} shares memory with one of {known.dtype}; save a clone of one of them")
        elif high > low:
            empty = known.high == known.low
            known.low = low if empty else min(known.low, low)
            known.high = high if empty else max(known.high, high)
        return known


class _Refusal(Exception):
    """What is wrong with the object that is being pickled; the key path is found afterwards."""


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, allowed: Allowed, spans: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(buffer, protocol=_PROTOCOL, fix_imports=False)  # names of Python 3 only
        self.table = _Table(spans)
        self.current: Any = None
        self.trusting = False
        self._allowed = allowed

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not _Reference:
            return None
        return ("storage", obj.kind, obj.key, "cpu", obj.count)

    def reducer_override(self, obj: Any) -> Any:
        """Check whatever is not a plain builtin value; rebuild tensors from spans."""
        self.current = obj
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, (torch.dtype, torch.layout, torch.qscheme)):
            return NotImplemented
        named = obj if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)) else type(obj)
        if not self._allowed.holds(named):
            raise _Refusal(_untrusted(named))
        self.trusting |= self._allowed.trusts(named)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "meta":
            raise _Refusal("a tensor on the meta device has no data")
        if tensor.dtype in _NARROW:
            raise _Refusal(f"{tensor.dtype} is not supported; save it as int8 or uint8")
        rebuild, arguments = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
        if rebuild.__name__ in REBUILD_PARAMETER:
            return rebuild, arguments
        if rebuild.__name__ == "_rebuild_from_type_v2":
            inner, cls, inner_arguments, state = arguments
            if cls is torch.Tensor and inner.__name__ in REBUILD:
                return rebuild, (inner, cls, self._with_reference(tensor, inner_arguments), state)
        elif rebuild.__name__ in REBUILD:
            return rebuild, self._with_reference(tensor, arguments)
        raise _Refusal(f"tensors of class {type(tensor).__qualname__} ({rebuild.__name__}) are not supported")

    def _with_reference(self, tensor: torch.Tensor, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.table.tensors += 1
        storage = arguments[0]
        if not isinstance(storage, (TypedStorage, UntypedStorage)):
            return arguments  # a sparse tensor: its indices and values are tensors that follow
        kind: type = UntypedStorage
        untyped, unit = tensor.untyped_storage(), 1
        if isinstance(storage, TypedStorage):
            kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]
            unit = tensor.element_size()
        low, high = _span(tensor)
        found = self.table.note(untyped, tensor.dtype, low, high)
        offset = arguments[1] - found.begin // tensor.element_size() if high > low else 0
        return (_Reference(kind, found.key, found.nbytes // unit), offset, *arguments[2:])


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [low, high) of its storage that a strided tensor views; (0, 0) if it has no elements."""
    if tensor.numel() == 0:
        return 0, 0
    offset = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return offset * tensor.element_size(), (offset + reach + 1) * tensor.element_size()


def _pickle(state: Any, allowed: Allowed, spans: Mapping[int, tuple[int, int]]) -> tuple[bytes, _Table]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, allowed, spans)
    try:
        pickler.dump(state)
        pickled = buffer.getvalue()
        if pickler.trusting:
            _try_to_load(pickled, allowed)
    except _Refusal as refusal:
        raise _refused(_path_of(state, pickler.current, allowed), str(refusal)) from None
    except RecursionError as error:
        raise _refused("state", "it is nested too deeply to be pickled") from error
    except Exception as error:
        path = _path_of(state, pickler.current, allowed)
        raise _refused(path, f"it cannot be pickled: {type(error).__name__}: {error}") from error
    return pickled, pickler.table


def _try_to_load(pickled: bytes, allowed: Allowed) -> None:
    """Load the structure once, without data: a trusted class may pickle itself and yet fail to come back."""

    class Trial(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = allowed.find(module, name)
            return (lambda *_: torch.empty(0)) if name.startswith("_rebuild_") else found

        def persistent_load(self, pid: Any) -> Any:
            return pid

    try:
        Trial(io.BytesIO(pickled)).load()
    except Exception as error:
        raise _Refusal(f"it would not load again: {type(error).__name__}: {error}") from error


def _untrusted(named: Any) -> str:
    name = f"{named.__module__}.{named.__qualname__}"
    if isinstance(named, type) and "<locals>" not in name:
        return f"{name} is not a plain value; save a plain form of it, or allow it with trust=[{named.__qualname__}]"
    return f"{name} cannot be saved; save a plain value instead"


def _refused(path: str, problem: str) -> StateRefused:
    return StateRefused(f"{path}: {problem}", op="capture")


def _path_of(state: Any, culprit: Any, allowed: Allowed) -> str:
    """Return the key path of what cannot be saved."""
    exact = next((path for path, value in _walk(state) if culprit is not None and value is culprit), None)
    if exact is not None:
        return exact
    # It was made while pickling something else; the innermost value that cannot be saved by itself made it.
    return next((path for path, value in reversed(list(_walk(state))) if not _is_savable(value, allowed)), "state")


def _is_savable(value: Any, allowed: Allowed) -> bool:
    with contextlib.suppress(Exception):
        _Pickler(io.BytesIO(), allowed, {}).dump(value)
        return True
    return False


def _walk(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield every object inside ``state`` with its key path, the outer before the inner ones."""
    seen: set[int] = set()
    waiting = [("state", state)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        waiting += reversed(list(_inside(path, value)))


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}: key {key!r}", key
            yield f"{path}[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    if hasattr(value, "__dict__") and not isinstance(value, type):
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())
