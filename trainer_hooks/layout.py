"""A state to the plan of its image: the pickled structure, and which bytes of which storages it needs.

The pickle is the one that ``torch.save`` writes (protocol 2, storages as persistent ids), so that ``torch.load``
reads it. What differs: of each storage only the spans that its views need are stored, every class or function that
would have to be looked up on loading is checked against :mod:`trainer_hooks.values` first, and a DTensor is the plain
tensor of its local part, with a note beside the pickle of how it is split.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from ckpt_service import image
from ckpt_service.errors import StateRefused
from trainer_hooks import sharding
from trainer_hooks.sharding import Sharding
from trainer_hooks.topology import Topology
from trainer_hooks.values import REBUILD, REBUILD_PARAMETER, Allowed

_PROTOCOL = 2  # the one that torch.load expects
_ALONE = Topology()
_PACKED = frozenset({torch.quint4x2, torch.quint2x4})  # several items in one byte
_NARROW = frozenset(getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8))


@dataclass(frozen=True)
class StorageSpan:
    """The bytes of a live storage that a state needs, from ``start``; record ``data/<key>`` of the image."""

    key: int
    storage: UntypedStorage
    start: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where its bytes lie in the memory of this process; for storages on the CPU."""
        return self.storage.data_ptr() + self.start


@dataclass(frozen=True)
class Plan:
    """What an image of a state consists of. ``spans`` refer to the live storages: copy them before they change.

    ``sharding`` is the JSON of a :class:`ckpt_service.records.ShardingRecord`; empty where no tensor is split.
    """

    pickled: bytes
    spans: tuple[StorageSpan, ...]
    tensors: int
    sharding: bytes = b""


def plan(state: Any, allowed: Allowed, place: Topology = _ALONE) -> Plan:
    """Pickle the structure of ``state`` and find the bytes that it needs.

    Raises:
        StateRefused: it holds something that cannot be saved, or not be loaded again, or that is split over the
            data-parallel replicas of ``place``, of which only one writes; names the key path.
    """
    pickled, table = _pickle(state, allowed, {}, place)
    if table.cuts():
        # Sizes and offsets depend on the spans, which are known only after the first pass (it takes whole storages).
        pickled, table = _pickle(state, allowed, table.cuts(), place)
    needed = (
        StorageSpan(int(found.key), found.storage, found.begin, found.end - found.begin)
        for found in table.found.values()
    )
    return Plan(pickled, tuple(needed), table.tensors, _sharding_of(state, table))


Span = tuple[int, int]
"""The bytes [low, high) of a storage."""


@dataclass(frozen=True)
class _Found:
    """The bytes [begin, end) of a storage: one record of the image, to which the pickle refers by its key."""

    key: str
    storage: UntypedStorage
    begin: int
    end: int


@dataclass(frozen=True)
class _Reference:
    """Stands for a storage in the pickle, where :meth:`_Pickler.persistent_id` turns it into torch's tuple."""

    kind: type
    key: str
    count: int


@dataclass
class _Views:
    """What the tensors of a state view of one storage."""

    storage: UntypedStorage
    dtype: torch.dtype
    spans: list[Span]


class _Table:
    """The storages of one pickle, by torch's handle, cut as ``cuts`` says, in the order in which they are met."""

    def __init__(self, cuts: Mapping[int, list[Span]]) -> None:
        self._cuts = cuts
        self._views: dict[int, _Views] = {}
        self.found: dict[tuple[int, int], _Found] = {}
        self.tensors = 0
        self.split: dict[int, Sharding] = {}

    def note(self, storage: UntypedStorage, dtype: torch.dtype, span: Span) -> _Found:
        """Return the record that holds a view."""
        handle = storage._cdata
        views = self._views.setdefault(handle, _Views(storage, dtype, []))
        if views.dtype != dtype:
            raise _Refusal(f"a tensor of {dtype} shares memory with one of {views.dtype}; save a clone of one of them")
        if span[0] < span[1]:
            views.spans.append(span)
        begin, end = self._part(handle, storage, span)
        found = _Found(str(len(self.found)), storage, begin, end)
        return self.found.setdefault((handle, begin), found)

    def cuts(self) -> dict[int, list[Span]]:
        """Return the spans of those storages that need not be stored whole."""
        needed = {handle: _merged(views.spans) for handle, views in self._views.items()}
        return {handle: s for handle, s in needed.items() if s != [(0, self._views[handle].storage.nbytes())]}

    def _part(self, handle: int, storage: UntypedStorage, span: Span) -> Span:
        # One that the first pass has not met (an object may make new tensors each time) is stored whole.
        spans = self._cuts.get(handle, [(0, storage.nbytes())])
        part = spans[max(0, bisect_right(spans, span[0], key=lambda known: known[0]) - 1)]
        if span[0] < span[1] and not part[0] <= span[0] <= span[1] <= part[1]:
            raise _Refusal("it changes while it is being saved")
        return part


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Put together what overlaps, and what lies so close that a record of its own would cost more than the gap."""
    merged: list[Span] = []
    for low, high in sorted(spans):
        if merged and low - merged[-1][1] < image.ALIGNMENT:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged or [(0, 0)]


class _Refusal(Exception):
    """What is wrong with the object that is being pickled; the key path is found afterwards."""


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, allowed: Allowed, cuts: Mapping[int, list[Span]], place: Topology) -> None:
        super().__init__(buffer, protocol=_PROTOCOL, fix_imports=False)  # names of Python 3 only
        self.table = _Table(cuts)
        self.current: Any = None
        self.trusting = False
        self._allowed = allowed
        self._place = place

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
        if isinstance(obj, (datetime, time)) and obj.fold:
            return obj.__reduce_ex__(4)  # the older protocols drop it
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if sharding.is_dtensor(tensor):
            return self._reduce_tensor(self._local_part(tensor))
        if tensor.device.type == "meta":
            raise _Refusal("a tensor on the meta device has no data")
        if tensor.dtype in _NARROW:
            raise _Refusal(f"{tensor.dtype} is not supported; save it as int8 or uint8")
        if torch.nn.parameter.is_lazy(tensor):
            raise _Refusal("it is not initialised yet; run one forward pass before the first save")
        reason = sharding.refuse_tensor(tensor)
        if reason is not None:
            raise _Refusal(reason)
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

    def _local_part(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self.table.split[id(tensor)] = sharding.describe(tensor, self._place)
        except ValueError as error:
            raise _Refusal(str(error)) from None
        return sharding.local_part(tensor)

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
        low, high = (0, untyped.nbytes()) if tensor.dtype in _PACKED else _span(tensor)
        found = self.table.note(untyped, tensor.dtype, (low, high))
        offset = arguments[1] - found.begin // tensor.element_size() if high > low else 0
        return (_Reference(kind, found.key, (found.end - found.begin) // unit), offset, *arguments[2:])


def _span(tensor: torch.Tensor) -> Span:
    """Return the bytes [low, high) of its storage that a strided tensor views; (0, 0) if it has no elements."""
    if tensor.numel() == 0:
        return 0, 0
    offset = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return offset * tensor.element_size(), (offset + reach + 1) * tensor.element_size()


def _sharding_of(state: Any, table: _Table) -> bytes:
    """Return the JSON of how the DTensors of a state are split, empty if there are none."""
    if not table.split:
        return b""
    found = list(sharding.keys_to(state, table.split))
    lost = table.split.keys() - {id(value) for _, value in found}
    if lost:
        path = next((path for path, value in _walk(state) if id(value) in lost), "state")
        raise _refused(path, "a DTensor must lie below keys that are strings or whole numbers, or in lists and tuples")
    return sharding.record([(keys, table.split[id(value)]) for keys, value in found]).model_dump_json().encode()


def _pickle(state: Any, allowed: Allowed, cuts: Mapping[int, list[Span]], place: Topology) -> tuple[bytes, _Table]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, allowed, cuts, place)
    try:
        pickler.dump(state)
        pickled = buffer.getvalue()
        if pickler.trusting:
            _try_to_load(pickled, allowed)
    except _Refusal as refusal:
        raise _refused(_path_of(state, pickler.current, allowed, place), str(refusal)) from None
    except RecursionError as error:
        raise _refused("state", "it is nested too deeply to be pickled") from error
    except Exception as error:
        path = _path_of(state, pickler.current, allowed, place)
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
    if isinstance(named, type) and _is_importable(named):
        return f"{name} is not a plain value; save a plain form of it, or allow it with trust=[{named.__qualname__}]"
    return f"{name} cannot be saved; save a plain value instead"


def _is_importable(cls: type) -> bool:
    """Whether a class can be found again by its name; locks, generators and local classes cannot."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _refused(path: str, problem: str) -> StateRefused:
    return StateRefused(f"{path}: {problem}", op="capture")


def _path_of(state: Any, culprit: Any, allowed: Allowed, place: Topology) -> str:
    """Return the key path of what cannot be saved."""
    exact = next((path for path, value in _walk(state) if culprit is not None and value is culprit), None)
    if exact is not None:
        return exact
    # It was made while pickling something else; the innermost value that cannot be saved by itself made it.
    inner_first = reversed(list(_walk(state)))
    return next((path for path, value in inner_first if not _is_savable(value, allowed, place)), "state")


def _is_savable(value: Any, allowed: Allowed, place: Topology) -> bool:
    with contextlib.suppress(Exception):
        _Pickler(io.BytesIO(), allowed, {}, place).dump(value)
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
