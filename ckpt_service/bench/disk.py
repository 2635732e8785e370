"""What a disk gives to plain reads and writes: the ceilings that a checkpoint is measured by. Shell.

Two threads move ``CHUNK_BYTES`` at a time, as the writer does, but with no checksums and nothing else to do. A write
counts only with its fsync. Errors come out as ``OSError``; Ctrl-C ends the threads before it goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

CHUNK_BYTES = 16 << 20
THREADS = 2
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Rate:
    """``nbytes`` bytes in ``seconds``."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds if self.seconds > 0 else inf


def write_direct(path: str, nbytes: int, seconds: float = inf) -> Rate | None:
    """Write a new file past the page cache and sync it; begin no chunk after ``seconds``. Whole pages are written.

    Its blocks are allocated first, which counts too: where each write makes the file longer, they wait for each other.
    Returns None where the filesystem takes no direct writes: some open a file so and then refuse to write to it.
    """
    nbytes = max(nbytes - nbytes % mmap.PAGESIZE, mmap.PAGESIZE)  # else the last write would be refused
    with _removing(path), contextlib.closing(_Buffers(os.urandom(CHUNK_BYTES))) as buffers:
        began = time.monotonic()
        try:
            with _opened(path, _NEW | os.O_DIRECT) as fd:
                _preallocate(fd, nbytes)
                done = _spread(nbytes, began + seconds, buffers, lambda part, at: _write_all(fd, part, at))
                os.fsync(fd)
        except OSError as error:
            if error.errno in _NOT_DIRECT:
                return None
            raise
        return Rate(done, time.monotonic() - began)


def write_buffered(path: str, nbytes: int, seconds: float = inf) -> Rate:
    """Write a new file through the page cache with one thread, as programs do, and sync it."""
    with _removing(path), contextlib.closing(_Buffers(os.urandom(CHUNK_BYTES), count=1)) as buffers:
        began = time.monotonic()
        with _opened(path, _NEW) as fd:
            done = _spread(nbytes, began + seconds, buffers, lambda part, at: _write_all(fd, part, at))
            os.fsync(fd)
        return Rate(done, time.monotonic() - began)


def sync_small(path: str, times: int = 20, seconds: float = inf) -> list[float]:
    """Write one page and fsync, again and again; return the seconds of each (at least one)."""
    found: list[float] = []
    began = time.monotonic()
    with _removing(path), _opened(path, _NEW) as fd:
        while not found or (len(found) < times and time.monotonic() < began + seconds):
            start = time.monotonic()
            os.pwrite(fd, os.urandom(mmap.PAGESIZE), 0)
            os.fsync(fd)
            found.append(time.monotonic() - start)
    return found


def read_direct(path: str, seconds: float = inf) -> Rate | None:
    """Read a file past the page cache; None where the filesystem cannot."""
    with contextlib.closing(_Buffers()) as buffers:
        began = time.monotonic()
        try:
            with _opened(path, _READ | os.O_DIRECT) as fd:
                nbytes = os.fstat(fd).st_size
                nbytes += -nbytes % mmap.PAGESIZE  # whole pages are asked for, and the last one may come short
                done = _spread(nbytes, began + seconds, buffers, lambda part, at: _read_all(fd, part, at))
        except OSError as error:
            if error.errno in _NOT_DIRECT:
                return None
            raise
        return Rate(done, time.monotonic() - began)


def read_buffered(path: str, seconds: float = inf) -> Rate:
    """Read a file through the page cache."""
    with contextlib.closing(_Buffers()) as buffers:
        began = time.monotonic()
        with _opened(path, _READ) as fd:
            nbytes = os.fstat(fd).st_size
            done = _spread(nbytes, began + seconds, buffers, lambda part, at: _read_all(fd, part, at))
        return Rate(done, time.monotonic() - began)


def read_warm(path: str, seconds: float = inf) -> Rate:
    """Read a file twice through the page cache; return how fast the second time was."""
    read_buffered(path, seconds)
    return read_buffered(path, seconds)


def forget(path: str) -> None:
    """Have the page cache let go of a file: what is read next comes from the disk."""
    with _opened(path, _READ) as fd:
        os.fsync(fd)  # only what is clean can be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


# --- threads and chunks -----------------------------------------------------------------------------------------------


class _Buffers:
    """Memory of a chunk for each thread, at the start of a page as direct I/O wants it, touched beforehand."""

    def __init__(self, content: bytes = bytes(CHUNK_BYTES), count: int = THREADS) -> None:
        self._pages = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(count)]
        self.views = [memoryview(pages) for pages in self._pages]
        for view in self.views:
            view[:] = content

    def close(self) -> None:
        """Give the memory back."""
        for view, pages in zip(self.views, self._pages, strict=True):
            view.release()
            with contextlib.suppress(BufferError):  # the traceback of an error still looks at it; it goes with that
                pages.close()


class _Chunks:
    """Hands out (start, length) of the chunks in order, until all are out, time is up, or somebody stops."""

    def __init__(self, nbytes: int, deadline: float) -> None:
        self._nbytes = nbytes
        self._deadline = deadline
        self._position = 0
        self._lock = threading.Lock()
        self.stopped = False

    def take(self) -> tuple[int, int] | None:
        with self._lock:
            start = self._position
            late = start > 0 and time.monotonic() > self._deadline  # the first one goes always: a rate needs bytes
            if self.stopped or late or start >= self._nbytes:
                return None
            length = min(CHUNK_BYTES, self._nbytes - start)
            self._position += length
            return start, length


def _spread(nbytes: int, deadline: float, buffers: _Buffers, move: Callable[[memoryview, int], None]) -> int:
    """Move all chunks, one thread for each buffer, this one included; return the bytes that were moved."""
    chunks = _Chunks(nbytes, deadline)
    failures: list[OSError] = []
    done: list[int] = []

    def work(buffer: memoryview) -> None:
        try:
            while (chunk := chunks.take()) is not None:
                start, length = chunk
                move(buffer[:length], start)
                done.append(length)
        except OSError as error:
            chunks.stopped = True
            failures.append(error)

    helpers = [threading.Thread(target=work, args=[view], daemon=True) for view in buffers.views[1:]]
    try:
        for helper in helpers:
            helper.start()
        work(buffers.views[0])
    finally:
        chunks.stopped = True
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
    if failures:
        raise failures[0]
    return sum(done)


def _write_all(fd: int, part: memoryview, position: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(fd, part[done:], position + done)


def _read_all(fd: int, part: memoryview, position: int) -> None:
    done = 0
    while done < len(part) and (count := os.preadv(fd, [part[done:]], position + done)):
        done += count


# --- files ------------------------------------------------------------------------------------------------------------


def _preallocate(fd: int, nbytes: int) -> None:
    """Give a file its blocks, where the filesystem can: not by ``os.posix_fallocate``, which else writes to each."""
    ctypes.CDLL(None, use_errno=True).fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _removing(path: str) -> Iterator[None]:
    """Delete the file that the body makes, whatever happens."""
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
