"""The real writer on a scratch image: what one save takes here. Shell."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from datetime import datetime, timezone

from ckpt_service import __version__, image
from ckpt_service.bench.disk import Rate
from ckpt_service.image import Layout, RecordSize
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Snapshot, Watcher, WriteOptions, commit

_RECORD_BYTES = 4 << 20  # the size of a common weight
_AROUND_BYTES = 32 << 10  # more than headers, padding and directory take, even where there is one record only
_PATTERN_BYTES = 16 << 20
_SOURCE_BYTES = 256 << 20  # larger than caches, or the copy would be flattered


@dataclass(frozen=True)
class Trial:
    """What a save took.

    Attributes:
        copied: copying the state into shared memory that was touched before.
        written: from the image to a durable file.
        cpu_seconds: of this process while it was written.
        direct: all bytes went past the page cache.
        name: of the file in its directory.
    """

    copied: Rate
    written: Rate
    cpu_seconds: float
    direct: bool
    name: str


def try_writer(directory: LocalDirectory, nbytes: int, options: WriteOptions) -> Trial:
    """Fill an image of ``nbytes`` bytes or a little less, and commit it to ``directory``, where the file stays.

    Takes that much memory, and up to ``_SOURCE_BYTES`` for what is copied.

    Raises:
        SaveFailed: the write failed.
    """
    layout = image.lay_out(_records(nbytes))
    pages = mmap.mmap(-1, layout.nbytes)  # shared, as the slots of a trainer
    view = memoryview(pages)
    try:
        source = os.urandom(_PATTERN_BYTES) * max(1, min(nbytes, _SOURCE_BYTES) // _PATTERN_BYTES)
        _copy(source, view)  # the first touch of memory is no part of a steady state
        began = time.monotonic()
        _copy(source, view)
        copied = Rate(len(view), time.monotonic() - began)
        snapshot = Snapshot(_manifest(layout), layout, view)
        _fill_in(snapshot)
        began, cpu = time.monotonic(), time.process_time()
        result = commit(snapshot, directory, mode=0o600, host="bench", token="0", options=options, watcher=Watcher())
        written = Rate(result.written, time.monotonic() - began)
        return Trial(copied, written, time.process_time() - cpu, result.direct, snapshot.final_name)
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # the traceback of an error still looks at it; it goes with that
            pages.close()


def _records(nbytes: int) -> list[RecordSize]:
    count = max(1, nbytes // _RECORD_BYTES)
    data_bytes = nbytes // count - _AROUND_BYTES
    sizes = [RecordSize(image.MANIFEST, image.manifest_capacity())]
    sizes += [RecordSize(f"data/{number}", data_bytes, aligned=True) for number in range(count)]
    return [*sizes, RecordSize(image.VERSION, 2)]


def _manifest(layout: Layout) -> ShardManifest:
    return ShardManifest(
        kind="train",
        run_id="bench",
        attempt=1,
        sequence=1,
        step=0,
        epoch=0,
        stage=0,
        tp_rank=0,
        dp_rank=0,
        pp=1,
        tp=1,
        dp=1,
        created_at=datetime.now(timezone.utc),
        producer=f"ckpt-service {__version__} bench",
        bytes=layout.nbytes,
        tensors=len(layout.records) - 2,
    )


def _fill_in(snapshot: Snapshot) -> None:
    """Put headers, directory and manifest around the data."""
    for position, content in image.structure(snapshot.layout):
        snapshot.view[position : position + len(content)] = content
    record = snapshot.layout.records[0]
    snapshot.view[record.offset : record.end] = snapshot.manifest.model_dump_json().encode().ljust(record.nbytes)


def _copy(source: bytes, target: memoryview) -> None:
    for start in range(0, len(target), len(source)):
        part = target[start : start + len(source)]
        part[:] = memoryview(source)[: len(part)]
