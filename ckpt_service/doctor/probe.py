"""Tries a directory out with a file of our own, step by step as a commit goes. Shell.

The file has a name that nobody else uses and no reader takes for anything, and it goes whatever happens, Ctrl-C
included. Nothing of a run is opened, locked or changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from ckpt_service import naming
from ckpt_service.doctor.facts import Failure, Locks, Probe
from ckpt_service.storage import Directory, LocalDirectory

_PROBE_BYTES = 1 << 16
_SECOND_SECONDS = 10.0
_REFUSED, _GRANTED = 10, 12
_SECOND = f"""
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit({_REFUSED})
sys.exit({_GRANTED})
"""


class _Failed(Exception):
    """A step failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@contextlib.contextmanager
def _doing(op: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        raise _Failed(Failure(op, errno.errorcode.get(number), os.strerror(number))) from error


def try_out(path: str, try_locks: Callable[[str], Locks] | None = None) -> Probe:
    """Return what came of making, writing, syncing and renaming a file in the directory at ``path``."""
    try:
        with _doing("opening the directory"):
            directory = LocalDirectory(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)
    except _Failed as failed:
        return Probe(failed.failure)
    with directory:
        return try_out_in(directory, secrets.token_hex(8), try_locks or locks_at)


def try_out_in(directory: Directory, token: str, try_locks: Callable[[str], Locks]) -> Probe:
    """Return what came of it in an open directory; ``token`` makes the names unique."""
    made, renamed = naming.probe_files(token)
    try:
        direct = _write(directory, made)
        began = time.monotonic()
        with _doing("rename"):
            directory.replace(made, renamed)
        with _doing("fsync of the directory"):
            directory.sync()
        seconds = time.monotonic() - began + direct[1]
        path = os.path.join(directory.path, renamed)
        return Probe(None, direct[0], seconds, try_locks(path), _clock_ahead(path))
    except _Failed as failed:
        return Probe(failed.failure)
    finally:
        for name in (made, renamed):
            with contextlib.suppress(OSError):
                directory.remove(name)


def _write(directory: Directory, name: str) -> tuple[bool, float]:
    """Write a file; return whether it went past the page cache, and the seconds that it took to be durable.

    Only a write can tell: a filesystem may open a file for direct I/O and then refuse to write to it so.
    """
    with mmap.mmap(-1, _PROBE_BYTES) as pages, memoryview(pages) as view:  # at a page, as direct I/O wants it
        with _doing("creating a file"):
            file = directory.create(name, mode=0o600, direct=True)
        try:
            began = time.monotonic()
            with _doing("writing"):
                file.write_at(view, 0)
            with _doing("fsync"):
                file.sync()
            return file.direct, time.monotonic() - began
        finally:
            file.close()


def _clock_ahead(path: str) -> float | None:
    """Return how far the clock that gave the file its times is ahead of ours: on a network it is the server's."""
    now = time.time()
    try:
        os.utime(path)  # by the filesystem's clock, just now
        return os.stat(path).st_mtime - now
    except OSError:
        return None


def locks_at(path: str, interpreter: str = sys.executable) -> Locks:
    """Take a record lock on a file and have a second process try the same."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return Locks(False, f"the file cannot be opened again: {error.strerror}")
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _second(interpreter, path)
    except OSError as error:
        return Locks(False, f"none was given: {error.strerror}")
    finally:
        os.close(fd)


def _second(interpreter: str, path: str) -> Locks:
    try:
        code = subprocess.run(
            [interpreter, "-I", "-S", "-c", _SECOND, path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECOND_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return Locks(False, f"a second process got no answer within {_SECOND_SECONDS:.0f} s")
    except OSError as error:
        return Locks(False, f"{interpreter} cannot be run to try a second one: {error.strerror}")
    if code == _REFUSED:
        return Locks(True)
    return Locks(False, "a second process got the same lock" if code == _GRANTED else "a second process got an error")
