"""Image to committed file. Shell; runs on threads, of the daemon or (``async_ckpt=False``) of the trainer.

The order of a commit, and the crash that each step is there for, stands in :func:`commit`. CRCs are computed from the
same memory that is written, and put into the image before the page that holds them goes to the disk; nothing is ever
patched in the file afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckpt_service import image, naming, scan
from ckpt_service.checksum import crc32
from ckpt_service.errors import DamagedCheckpoint, NewerFormat, SaveFailed, SnapshotSuperseded, from_os_error
from ckpt_service.image import Layout
from ckpt_service.records import FORMAT_VERSION, ShardManifest
from ckpt_service.storage import Directory, NewFile


class Stopped(Exception):
    """The write was told to stop."""


@dataclass
class RateLimit:
    """Lets ``bytes_per_second`` pass, over all threads that share it; 0 lets everything pass."""

    bytes_per_second: int
    clock: Callable[[], float] = time.monotonic
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int, stop: threading.Event) -> None:
        """Wait until ``nbytes`` may be written; raise :class:`Stopped` when ``stop`` is set meanwhile."""
        if not self.bytes_per_second:
            return
        with self._lock:
            now = self.clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self.bytes_per_second
            pause = self._free_at - now
        if stop.wait(pause):
            raise Stopped


@dataclass(frozen=True)
class WriteOptions:
    """How images are written: threads for one image, bytes of one write, direct I/O where it can be had."""

    threads: int = 2
    chunk_bytes: int = 16 << 20
    direct: bool = True
    limit: RateLimit = field(default_factory=lambda: RateLimit(0))


@dataclass(frozen=True)
class Watcher:
    """How a commit tells of itself and is told to stop. The callbacks run on the writing threads and must be quick."""

    wrote: Callable[[int], None] = lambda nbytes: None
    syncing: Callable[[], None] = lambda: None
    renaming: Callable[[], None] = lambda: None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Snapshot:
    """A finished image in memory and what it is. ``view`` is the whole image; CRC fields in it are written to."""

    manifest: ShardManifest
    layout: Layout
    view: memoryview

    @property
    def final_name(self) -> str:
        """The name that it will have inside its directory."""
        m = self.manifest
        return naming.shard(m.kind, stage=m.stage, tp_rank=m.tp_rank, tp=m.tp, step=m.step, epoch=m.epoch)


@dataclass(frozen=True)
class CommitResult:
    """What a commit did. ``direct``: all bytes went past the page cache."""

    direct: bool
    written: int


class _Checksummer:
    """Hands out the chunks of an image in order, each with all CRC fields in it filled in.

    A record's CRC stands behind its data, so when a chunk is handed out all data before its end has been read; running
    through the image in order under one lock costs little, since a CRC is several times faster than a disk.
    """

    def __init__(self, snapshot: Snapshot, chunk_bytes: int) -> None:
        self._view = snapshot.view
        self._records = snapshot.layout.records
        self._total = snapshot.layout.nbytes
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._position = 0
        self._record = 0
        self._crc = 0

    def next_chunk(self) -> tuple[int, int] | None:
        """Return (start, end) of the next chunk, ready to be written, or None behind the last."""
        with self._lock:
            start = self._position
            if start >= self._total:
                return None
            end = min(start + self._chunk_bytes, self._total)
            self._checksum(start, end)
            self._position = end
            return start, end

    def _checksum(self, start: int, end: int) -> None:
        while self._record < len(self._records):
            record = self._records[self._record]
            first, last = max(record.offset, start), min(record.end, end)
            if first < last:
                self._crc = crc32(self._view[first:last], self._crc)
            if record.end > end:
                return
            for position in record.crc_fields:
                self._view[position : position + 4] = self._crc.to_bytes(4, "little")
            self._record += 1
            self._crc = 0


def write_image(snapshot: Snapshot, file: NewFile, options: WriteOptions, watcher: Watcher) -> None:
    """Write the whole image with several threads.

    Raises:
        OSError: the first error of any thread; the others have stopped.
        Stopped: the watcher said so.
    """
    chunks = _Checksummer(snapshot, options.chunk_bytes)
    failures: list[BaseException] = []
    done: list[int] = []

    def work() -> None:
        try:
            while not failures and (chunk := chunks.next_chunk()):
                if watcher.stop.is_set():
                    raise Stopped
                start, end = chunk
                options.limit.take(end - start, watcher.stop)
                # Released at once: an error's traceback would keep it, and so the image, from being let go.
                with snapshot.view[start:end] as part:
                    file.write_at(part, start)
                done.append(end - start)
                watcher.wrote(end - start)
        except (OSError, MemoryError, Stopped) as error:
            failures.append(error)

    helpers = [threading.Thread(target=work, name="ckpt-write", daemon=True) for _ in range(options.threads - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: fewer do as well
            for helper in helpers:
                helper.start()
        work()
    except BaseException as error:
        failures.append(error)  # a signal handler may raise here: the helpers must be gone before the image is
        raise
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if failures:
        raise failures[0]
    # A file with a hole loads as zeros without an error, so what was written is counted.
    assert sum(done) == snapshot.layout.nbytes, "bytes of the image were not written"


def commit(
    snapshot: Snapshot,
    directory: Directory,
    *,
    mode: int,
    host: str,
    token: str,
    options: WriteOptions,
    watcher: Watcher,
) -> CommitResult:
    """Write a snapshot and give it its final name. When this returns, the file survives any crash.

    A snapshot whose file is there already (a daemon died between its rename and its answer) is written anew and
    replaces itself: nobody can tell whether a sync of that file or of its directory has failed before, and one that
    has failed proves nothing when it is repeated.

    Raises:
        SnapshotSuperseded: a newer snapshot has this name already.
        SaveFailed: the write failed; the temporary file is gone and former checkpoints are untouched.
        Stopped: the watcher said so; the temporary file is gone.
    """
    manifest, final = snapshot.manifest, snapshot.final_name
    partial = naming.partial(final, attempt=manifest.attempt, sequence=manifest.sequence, host=host, token=token)
    with _saying(snapshot, directory):
        # A name that nobody looks for, in the final directory: a crash leaves litter, never half a checkpoint.
        file = directory.create(partial, mode=mode, direct=options.direct)
        try:
            file.allocate(snapshot.layout.nbytes)
            write_image(snapshot, file, options, watcher)
            # Content before name: after a power cut the final name must not point at blocks never written.
            watcher.syncing()
            file.sync()
            if watcher.stop.is_set():
                raise Stopped
            watcher.renaming()
            _rename(snapshot, partial, directory)
        except BaseException:
            with contextlib.suppress(OSError):  # the next start sweeps it
                directory.remove(partial)
            raise
        finally:
            direct = file.direct
            file.close()  # only now: its lock keeps a sweep away from the temporary name
        # The name itself is durable only now; before this, a power cut may bring the old directory back.
        directory.sync()
    return CommitResult(direct, snapshot.layout.nbytes)


def _rename(snapshot: Snapshot, partial: str, directory: Directory) -> None:
    """Give the file its final name. One process at a time looks what is there and renames."""
    with directory.locked():
        there = _look_at(directory, snapshot.final_name)
        _give_way(snapshot, there, directory)
        _set_aside(snapshot, there, directory)
        directory.replace(partial, snapshot.final_name)


def sweep(directory: Directory, is_dead: Callable[[naming.PartialName], bool]) -> list[str]:
    """Delete the temporary files for which ``is_dead`` holds and that no live process holds; return their names."""
    swept = []
    for name in directory.names():
        parsed = naming.parse_partial(name)
        if parsed is not None and is_dead(parsed) and directory.is_abandoned(name) and directory.remove(name):
            swept.append(name)
    return swept


def _give_way(snapshot: Snapshot, there: ShardManifest | Literal["legacy"] | None, directory: Directory) -> None:
    mine = snapshot.manifest
    if there is None or there == "legacy" or there.run_id != mine.run_id:
        return
    if (there.attempt, there.sequence) > (mine.attempt, mine.sequence):
        raise SnapshotSuperseded(
            f"step {mine.step}: attempt {there.attempt} has written {snapshot.final_name} since",
            op="commit",
            step=mine.step,
            path=os.path.join(directory.path, snapshot.final_name),
        )


def _set_aside(snapshot: Snapshot, there: ShardManifest | Literal["legacy"] | None, directory: Directory) -> None:
    """Keep the shard that is about to be replaced: its set may be the only complete one until ours is.

    A set of one file is complete with the rename itself, so nothing has to be kept of an earlier save of the same
    attempt; what another attempt (maybe of another run) or the old trainer wrote is kept until retention decides.
    """
    mine, final = snapshot.manifest, snapshot.final_name
    if there is None or there == mine:
        return
    attempt, sequence = (0, 0) if there == "legacy" else (there.attempt, there.sequence)
    if there != "legacy" and there.format_version <= FORMAT_VERSION and _outdates(mine, there):
        return
    with contextlib.suppress(FileExistsError):  # a crash came between this link and the rename
        directory.link(final, naming.kept(final, attempt=attempt, sequence=sequence))
    directory.sync()  # the second name before the first is taken: a power cut may keep any one of two changes


def _outdates(mine: ShardManifest, there: ShardManifest) -> bool:
    return mine.pp * mine.tp == there.pp * there.tp == 1 and there.attempt == mine.attempt


def _look_at(directory: Directory, name: str) -> ShardManifest | Literal["legacy"] | None:
    """Return the manifest of the shard that has this name, "legacy" if the old trainer wrote it, None for all else."""
    head = directory.head(name, image.MANIFEST_END)
    if head is None:
        return None
    try:
        return scan.parse_manifest(head) or ("legacy" if scan.is_legacy(head) else None)
    except NewerFormat:
        return scan.newer_manifest(head) or "legacy"  # a newer release may load it, so it is set aside
    except DamagedCheckpoint:
        return None  # whatever it is, it is not a checkpoint of ours that anybody could load


@contextlib.contextmanager
def _saying(snapshot: Snapshot, directory: Directory) -> Iterator[None]:
    """Turn an ``OSError`` into one that names step, path and, when space ran out, the bytes needed and free."""
    try:
        yield
    except (OSError, MemoryError) as error:
        step = snapshot.manifest.step
        path = os.path.join(directory.path, snapshot.final_name)
        cause = error if isinstance(error, OSError) else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        failure = from_os_error(cause, op=f"writing step {step}", kind=SaveFailed, path=path, step=step)
        if failure.code in ("ENOSPC", "EDQUOT", "EFBIG"):
            failure.args = (f"{failure.args[0]}: {_space(snapshot.layout.nbytes, directory)}",)
        raise failure from error


def _space(needed_bytes: int, directory: Directory) -> str:
    """Say what a file needs and what there is; a filesystem may be full of files, and not of bytes."""
    try:
        inodes = "" if directory.has_inodes() else ", and no more files (the filesystem is out of inodes)"
        return f"{needed_bytes} bytes needed, {directory.free_bytes()} free{inodes}"
    except OSError:
        return f"{needed_bytes} bytes needed"
