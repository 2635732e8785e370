"""A file on disk, checked byte by byte: structure, identity and every CRC. Shell; needs no torch."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

from ckpt_service import image
from ckpt_service.catalog import Shard
from ckpt_service.checksum import verify_records
from ckpt_service.errors import DamagedCheckpoint


@dataclass(frozen=True)
class FileReport:
    """What the check of one file found; ``problem`` is None for a good one.

    ``checkable`` is False for a file without a manifest: there is nothing to hold it against.
    """

    path: str
    records: int
    bytes: int
    seconds: float
    problem: str | None
    checkable: bool = True

    @property
    def ok(self) -> bool | None:
        """Whether the file is whole and undamaged; None if nobody can tell."""
        return self.problem is None if self.checkable else None


def verify_shard(shard: Shard) -> FileReport:
    """Check one file; legacy files carry no identity, and their CRCs are checked by ``unzip -t`` only."""
    began = time.monotonic()
    records, problem = 0, shard.problem
    checkable = problem is not None or shard.manifest is not None
    if not checkable:
        problem = "written without a manifest: its bytes cannot be checked"
    if problem is None:
        records, problem = _verify_bytes(shard.path)
    return FileReport(shard.path, records, shard.bytes, time.monotonic() - began, problem, checkable)


def _verify_bytes(path: str) -> tuple[int, str | None]:
    records = 0
    try:
        with open(path, "rb") as file:
            # Not closed here: an error that is under way holds parts of it, and then closing it would be another error.
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        layout = image.parse(view)
        records = len(layout.records)
        verify_records(view, layout)
    except DamagedCheckpoint as error:
        return records, str(error)
    except (OSError, ValueError) as error:
        return records, f"cannot be read: {error}"
    return records, None
