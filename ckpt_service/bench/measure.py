"""Measures a disk and this host within a bound of space and time. Shell.

All files lie in one directory of our own and are deleted one by one; the directory goes whatever happens, Ctrl-C
included (only SIGKILL leaves it: a hidden directory ``.ckpt-bench-*`` that may be deleted at any time).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt_service import memory, naming
from ckpt_service.bench import disk, trial
from ckpt_service.bench.cost import Host
from ckpt_service.bench.disk import Rate
from ckpt_service.bench.trial import Trial
from ckpt_service.errors import CkptError, SaveFailed, from_os_error
from ckpt_service.memory import Room, gigabytes
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import WriteOptions

_IMAGE_BYTES = 512 << 20
_PARTS = 6  # direct write, buffered write, the writer, direct read, and the two passes of the warm read


@dataclass(frozen=True)
class Limits:
    """At most this much disk at any moment, and about this much time."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What was found; None where the filesystem takes no direct I/O. ``sync_seconds`` is the median of some."""

    direct_write: Rate | None
    buffered_write: Rate
    sync_seconds: float
    direct_read: Rate | None
    warm_read: Rate
    trial: Trial
    cores: int

    def host(self) -> Host:
        """Return the figures that the model of costs takes."""
        return Host(
            cores=self.cores,
            copy_rate=self.trial.copied.bytes_per_second,
            write_rate=self.trial.written.bytes_per_second,
            cpu_seconds_per_byte=self.trial.cpu_seconds / self.trial.written.nbytes,
        )


class NoSpace(CkptError):
    """There is not enough space for the scratch files."""


def measure(path: str, limits: Limits, options: WriteOptions, tell: Callable[[str], None]) -> Measured:
    """Measure the disk under the directory ``path``; ``tell`` hears what comes next.

    Raises:
        NoSpace: the scratch files do not fit, or did not in the end.
        CkptError: the disk failed.
    """
    _require_space(path, limits.nbytes)
    try:
        with _scratch(path) as place:
            return _measure(place, limits, options, tell)
    except OSError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else CkptError
        raise from_os_error(error, op="bench", kind=kind, path=path) from error
    except SaveFailed as error:
        if error.code in ("ENOSPC", "EDQUOT"):
            raise NoSpace(str(error), op="bench", path=path, code=error.code) from error
        raise


def _measure(place: str, limits: Limits, options: WriteOptions, tell: Callable[[str], None]) -> Measured:
    share = limits.seconds / _PARTS
    tell("direct write")
    direct_write = disk.write_direct(os.path.join(place, "direct"), limits.nbytes, share)
    tell("buffered write and fsync")
    pilot = direct_write or disk.write_buffered(os.path.join(place, "pilot"), min(limits.nbytes, 64 << 20), share)
    nbytes = affordable_bytes(limits.nbytes, pilot, share)
    buffered_write = disk.write_buffered(os.path.join(place, "buffered"), nbytes, share)
    tell("fsync of a small file")
    syncs = disk.sync_small(os.path.join(place, "small"), seconds=share)
    tell("the writer, on an image in memory")
    with LocalDirectory.open(place) as directory:
        tried = trial.try_writer(directory, min(nbytes, image_bytes(memory.room())), options)
    tell("reading it back")
    file = os.path.join(place, tried.name)
    disk.forget(file)
    direct_read = disk.read_direct(file, share)
    warm_read = disk.read_warm(file, share)
    cores = len(os.sched_getaffinity(0))
    sync_seconds = statistics.median(syncs)
    return Measured(direct_write, buffered_write, sync_seconds, direct_read, warm_read, tried, cores)


def affordable_bytes(most: int, pilot: Rate, seconds: float) -> int:
    """Return how much to write at the rate of the pilot so that it takes ``seconds``; a chunk at least."""
    whole_chunks = int(pilot.bytes_per_second * seconds) // disk.CHUNK_BYTES * disk.CHUNK_BYTES
    return min(most, max(whole_chunks, disk.CHUNK_BYTES))


def image_bytes(room: Room | None) -> int:
    """Return the size of the scratch image: a quarter of the memory that can be had, within bounds."""
    return _IMAGE_BYTES if room is None else max(1 << 20, min(_IMAGE_BYTES, room.bytes // 4))


def _require_space(path: str, nbytes: int) -> None:
    with LocalDirectory(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path) as directory:
        free = directory.free_bytes()
    if free < nbytes:
        raise NoSpace(
            f"the scratch files take up to {gigabytes(nbytes)}, and {gigabytes(free)} are free in {path}",
            op="bench",
            path=path,
            hint="free space there, or give less with --scratch-gigabytes",
        )


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    place = os.path.join(path, naming.bench_directory(secrets.token_hex(4)))
    try:
        os.mkdir(place, 0o700)
        yield place
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)
