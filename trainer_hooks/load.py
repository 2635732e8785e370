"""A shard file back to a state: every byte checked, then unpickled from the very memory that was checked.

Each storage gets memory of its own, read in place; ties between tensors survive, since they share a record. Only what
:mod:`trainer_hooks.values` allows is ever called. Runs without a daemon and without ``torch.load``.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from ckpt_service import image
from ckpt_service.checksum import crc32
from ckpt_service.errors import DamagedCheckpoint, UntrustedClass
from ckpt_service.image import Layout, Record
from ckpt_service.records import ShardingRecord, ShardManifest
from ckpt_service.scan import parse_manifest
from trainer_hooks.sharding import Keys, Sharding, shardings_in
from trainer_hooks.values import STORAGE_DTYPES, Allowed

_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class LoadedShard:
    """What a rank finds in a shard file: the state, and what only its own replica had (None if nothing was saved).

    ``shardings`` says which plain tensors of the state were parts of split ones, by the keys that lead to them.
    """

    state: Any
    replica: LoadedShard | None = None
    shardings: Mapping[Keys, Sharding] = field(default_factory=dict)

    def own(self) -> LoadedShard:
        """Return the state of this rank: with what its replica had of its own in the place of what the writer had."""
        if self.replica is None:
            return self
        theirs = {keys: found for keys, found in self.shardings.items() if not {*keys[:1]} & self.replica.state.keys()}
        return LoadedShard({**self.state, **self.replica.state}, shardings={**theirs, **self.replica.shardings})


def load_shard(path: str, expected: ShardManifest, allowed: Allowed) -> Any:
    """Return the state in a shard file; its tensors are on the CPU and belong to the caller.

    Args:
        path: the file.
        expected: the manifest that the listing found; a file that was replaced since is not taken for it.
        allowed: what may be looked up.

    Raises:
        DamagedCheckpoint: the file is short, a CRC does not fit, or it is another one; names file and record.
        UntrustedClass: it is whole and names something that is not allowed.
    """
    return load_rank(path, expected, allowed, dp_rank=0).state


def load_rank(path: str, expected: ShardManifest, allowed: Allowed, *, dp_rank: int) -> LoadedShard:
    """Return the state in a shard file, and what the replica ``dp_rank`` had of its own; see :func:`load_shard`."""
    with _saying(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            records = _Records(fd)
            if records.manifest() != expected:
                raise DamagedCheckpoint("its manifest is not the one that was listed")
            return LoadedShard(_unpickle(records, allowed), _replica(records, dp_rank, allowed), _shardings(records))
        finally:
            os.close(fd)


def _shardings(records: _Records) -> Mapping[Keys, Sharding]:
    if not records.has(image.SHARDING):
        return {}
    return shardings_in(ShardingRecord.model_validate_json(bytes(records.read(image.SHARDING))))


def _replica(records: _Records, dp_rank: int, allowed: Allowed) -> LoadedShard | None:
    """Return the state in the image that a replica has contributed."""
    name = image.replica(dp_rank)
    if dp_rank == 0 or not records.has(name):
        return None
    fd = os.memfd_create("ckpt-replica", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, records.read(name), 0)
        own = _Records(fd)
        return LoadedShard(_unpickle(own, allowed), shardings=_shardings(own))
    finally:
        os.close(fd)


def load_legacy(path: str, trust: Iterable[type] = ()) -> Any:
    """Return the state in a file that ``torch.save`` wrote; only torch's own safe types, and ``trust``, are loaded.

    Raises:
        DamagedCheckpoint: torch cannot read it.
    """
    with _saying(path), torch.serialization.safe_globals(list(trust)):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _saying(path: str) -> Iterator[None]:
    # A damaged pickle raises nearly anything; each of these means: a bad file, take an older one.
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{path}: {error}", op="load", path=path) from error
    except UntrustedClass as error:
        raise UntrustedClass(f"{path}: {error}", op="load", path=path) from error
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path}: cannot be read: {str(error) or type(error).__name__}", op="load", path=path
        ) from error


class _Records:
    """The records of an open file, each read and checked when it is asked for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        size = os.fstat(fd).st_size
        self._head = os.pread(fd, image.MANIFEST_END, 0)
        self.layout = _layout(fd, size)
        self._by_name = {record.name: record for record in self.layout.records}

    def manifest(self) -> ShardManifest | None:
        return parse_manifest(self._head)

    def has(self, name: str) -> bool:
        return f"{image.ARCHIVE}/{name}" in self._by_name

    def read(self, name: str, into: memoryview | None = None) -> memoryview:
        """Return the data of a record, in ``into`` if given, after its CRC was found right."""
        record = self._by_name.get(f"{image.ARCHIVE}/{name}")
        if record is None:
            raise DamagedCheckpoint(f"record {name} is missing")
        data = into if into is not None else memoryview(bytearray(record.nbytes))
        if len(data) != record.nbytes:
            raise DamagedCheckpoint(f"record {name} has {record.nbytes} bytes instead of {len(data)}")
        found = self._fill(record, data)
        stated = self._stated(record)
        if found != stated:
            raise DamagedCheckpoint(f"record {name}: CRC {found:08x}, expected {stated:08x}")
        return data

    def _fill(self, record: Record, data: memoryview) -> int:
        crc, done = 0, 0
        while done < len(data):
            part = data[done : done + _READ_BYTES]
            count = os.preadv(self._fd, [part], record.offset + done)
            if count == 0:
                raise DamagedCheckpoint(f"the file ends within record {record.name}")
            crc = crc32(part[:count], crc)
            done += count
        return crc

    def _stated(self, record: Record) -> int:
        stated = {os.pread(self._fd, 4, field) for field in record.crc_fields} or {bytes(4)}
        if len(stated) > 1:
            raise DamagedCheckpoint(f"record {record.name}: two different CRCs are stated")
        return int.from_bytes(stated.pop(), "little")


def _layout(fd: int, size: int) -> Layout:
    if size == 0:
        raise DamagedCheckpoint("the file is empty")
    # Not closed here: an error that is under way holds parts of it, and then closing it would be another error.
    return image.parse(memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ)))


def _unpickle(records: _Records, allowed: Allowed) -> Any:
    if bytes(records.read(image.BYTEORDER)) != b"little":
        raise DamagedCheckpoint("its byte order is not little-endian")
    storages: dict[str, UntypedStorage] = {}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = allowed.find(module, name)
            if found is None:
                hint = f"if you trust it, make the Checkpointer with trust=[{name}]; nothing was loaded"
                raise UntrustedClass(f"it names {module}.{name}, which is not allowed", op="load", hint=hint)
            return found

        def persistent_load(self, pid: Any) -> Any:
            _, kind, key, _, count = pid
            dtype = torch.uint8 if kind is UntypedStorage else STORAGE_DTYPES[kind.__name__]
            if key not in storages:
                storages[key] = _storage(records, key, count * dtype.itemsize)
            return TypedStorage(wrap_storage=storages[key], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    try:
        state = Unpickler(io.BytesIO(records.read(image.PICKLE))).load()
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
    finally:
        torch._utils._sparse_tensors_to_validate.clear()  # torch holds on to what it rebuilds until it is validated
    for record in records.layout.records:  # small records that no tensor refers to are checked as well
        name = record.name.partition("/")[2]
        if not name.startswith("data/") and name not in (image.PICKLE, image.BYTEORDER):
            records.read(name)
    return state


def _storage(records: _Records, key: str, nbytes: int) -> UntypedStorage:
    storage = UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    if nbytes == 0:
        return storage
    # A plain view of its memory; the storage outlives it.
    raw = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
    records.read(f"data/{key}", memoryview(raw).cast("B"))
    return storage
