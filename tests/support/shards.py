"""Snapshots, shard files and sealed memory made without torch, small and with known content."""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpt_service import image
from ckpt_service.image import RecordSize
from ckpt_service.records import (
    Attempt,
    Origin,
    ShardManifest,
    TopologyRecord,
)
from ckpt_service.storage import LocalDirectory, make_directories
from ckpt_service.writer import Snapshot, Watcher, WriteOptions, commit

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
BUFFERED = WriteOptions(threads=1, direct=False)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
LOADABLE = {
    "data/0": bytes(range(256)) * 64,
    image.PICKLE: pickle.dumps({}, 2),
    image.BYTEORDER: b"little",
    image.SERIALIZATION_ID: b"0" * 40,
}
"""The records of a shard that can be loaded: an empty state."""


def manifest(**changes: Any) -> ShardManifest:
    """Return a manifest of attempt 1, sequence 1, step 100, epoch 0 on one rank, with ``changes``."""
    values: dict[str, Any] = {
        "kind": "train",
        "run_id": "run",
        "attempt": 1,
        "sequence": 1,
        "step": 100,
        "epoch": 0,
        "stage": 0,
        "tp_rank": 0,
        "pp": 1,
        "tp": 1,
        "dp": 1,
        "created_at": MOMENT,
        "producer": "test",
        "bytes": 0,
        "tensors": 0,
    }
    return ShardManifest.model_validate(values | changes)


def snapshot(records: Mapping[str, bytes] | None = None, **changes: Any) -> Snapshot:
    """Return an image that holds ``records`` behind its manifest; those below ``data/`` are aligned."""
    content = {"data/0": b"weights" * 100} if records is None else dict(records)
    sizes = [RecordSize(image.MANIFEST, image.manifest_capacity())]
    sizes += [RecordSize(name, len(data), aligned=name.startswith("data/")) for name, data in content.items()]
    layout = image.lay_out([*sizes, RecordSize(image.VERSION, 2)])
    said = manifest(**({"bytes": layout.nbytes, "tensors": len(content)} | changes))
    content |= {image.MANIFEST: said.model_dump_json().encode().ljust(image.manifest_capacity()), image.VERSION: b"3\n"}
    view = memoryview(mmap.mmap(-1, layout.nbytes))  # at a page, as direct I/O wants it
    for position, part in image.structure(layout):
        view[position : position + len(part)] = part
    for name, data in content.items():
        record = layout.find(name)
        assert record is not None
        view[record.offset : record.end] = data
    return Snapshot(said, layout, view)


def write_shard(directory: Path, records: Mapping[str, bytes] | None = None, **changes: Any) -> Path:
    """Commit a small shard to a directory; return its path."""
    made = snapshot(records, **changes)
    with LocalDirectory.open(str(directory)) as opened:
        commit(made, opened, mode=0o644, host="host", token="0", options=BUFFERED, watcher=Watcher())
    return directory / made.final_name


def write_stage_shard(root: Path, **changes: Any) -> Path:
    """Commit a small shard that can be loaded to its stage directory below ``root``; return its path."""
    return write_shard(root / f"checkpoint_{changes.get('stage', 0)}", LOADABLE, **changes)


def image_of(stated: ShardManifest) -> bytearray:
    """Return a loadable image that says ``stated`` of itself; its CRCs are not filled in yet."""
    return bytearray(snapshot(LOADABLE, **stated.model_dump()).view)


def write_attempt(root: Path, number: int, resumed_from: tuple[int, int] | None = None, **changes: Any) -> Attempt:
    """Record a start of the trainer; ``explicit`` says whether its resume was a roll-back."""
    explicit = changes.pop("explicit", False)
    origin = resumed_from and Origin(attempt=resumed_from[0], sequence=resumed_from[1], explicit=explicit)
    values: dict[str, Any] = {
        "run_id": "run",
        "n": number,
        "host": "host",
        "pid": 1,
        "pid_start": 1,
        "topology": TopologyRecord(pp=1, dp=1, tp=1),
        "slots": 2,
        "started_at": MOMENT,
        "resumed_from": origin,
    }
    attempt = Attempt.model_validate(values | changes)
    directory = root / ".ckpt_service" / "attempts"
    make_directories(str(directory))
    (directory / f"{number}.json").write_text(attempt.model_dump_json())
    return attempt


def memory(content: bytes | bytearray, *, seals: int = SEALS) -> int:
    """Return a descriptor of memory with this content and these seals; the caller closes it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def data_offset(path: Path, name: str = "data/0") -> int:
    """Return where the data of a record lies in a shard file."""
    record = image.parse(memoryview(path.read_bytes())).find(name)
    assert record is not None
    return record.offset
