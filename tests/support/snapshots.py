"""Snapshots without a trainer: images, shard files and sealed memory with a manifest of the test's choosing."""

from __future__ import annotations

import fcntl
import os
import pickle
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpt_service import image, writer
from ckpt_service.image import RecordSize
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Snapshot, Watcher, WriteOptions

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PAYLOAD = bytes(range(256)) * 64
_CONTENT = {
    "data/0": _PAYLOAD,
    image.PICKLE: pickle.dumps({}, 2),
    image.BYTEORDER: b"little",
    image.VERSION: b"3\n",
    image.SERIALIZATION_ID: b"0" * 40,
}
LAYOUT = image.lay_out(
    [
        RecordSize(image.MANIFEST, image.manifest_capacity()),
        *(RecordSize(name, len(content), aligned=name == "data/0") for name, content in _CONTENT.items()),
    ]
)


def manifest(**changes: Any) -> ShardManifest:
    """Return the manifest of a whole single-rank snapshot of this module, apart from ``changes``."""
    plain = {
        "kind": "train",
        "run_id": "cafe0001",
        "attempt": 1,
        "sequence": 1,
        "step": 1,
        "epoch": 0,
        "stage": 0,
        "tp_rank": 0,
        "pp": 1,
        "tp": 1,
        "dp": 1,
        "created_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
        "producer": "tests",
        "bytes": LAYOUT.nbytes,
        "tensors": 1,
    }
    return ShardManifest.model_validate({**plain, **changes})


def image_of(stated: ShardManifest) -> bytearray:
    """Return the image that says ``stated`` of itself; its CRCs are not filled in yet."""
    content = {**_CONTENT, image.MANIFEST: stated.model_dump_json().encode().ljust(image.manifest_capacity())}
    data = bytearray(LAYOUT.nbytes)
    for position, structure in image.structure(LAYOUT):
        data[position : position + len(structure)] = structure
    for name, part in content.items():
        record = LAYOUT.find(name)
        assert record is not None
        data[record.offset : record.end] = part
    return data


def write_shard(root: Path, stated: ShardManifest) -> Path:
    """Commit a shard file to the stage directory below ``root``."""
    with LocalDirectory.open(str(root / f"checkpoint_{stated.stage}")) as directory:
        snapshot = Snapshot(stated, LAYOUT, memoryview(image_of(stated)))
        writer.commit(snapshot, directory, mode=0o644, host="h", token="0", options=WriteOptions(), watcher=Watcher())
        return Path(directory.path, snapshot.final_name)


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
