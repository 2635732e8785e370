"""The end of a process that has not called ``close()``: the last writes are waited for, and the exit code tells. Shell.

Children of ``multiprocessing`` that were forked never come to ``atexit``; they run finalizers of their own.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize

_BEFORE_OTHERS, _AFTER_OTHERS = 100, -100

_failed_in = 0  # the pid, since a forked child inherits this
_child_tells = 0


def at_end(wait: Callable[[], None]) -> Callable[[], None]:
    """Have ``wait`` called when this process ends; return what takes that back."""
    atexit.register(wait)
    if multiprocessing.parent_process() is None:
        return lambda: atexit.unregister(wait)
    _have_child_tell()
    finalizer = Finalize(None, wait, exitpriority=_BEFORE_OTHERS)

    def take_back() -> None:
        atexit.unregister(wait)
        finalizer.cancel()

    return take_back


def fail() -> None:
    """Make the exit code of this process non-zero, once everything that others do at its end is done."""
    global _failed_in
    _failed_in = os.getpid()


def _tell() -> None:
    """End an interpreter in which something was lost: an exception here would be printed, and the exit code be 0."""
    if _failed_in == os.getpid():
        logging.shutdown()  # it was registered before us, so its turn would come after ours
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


def _have_child_tell() -> None:
    global _child_tells
    if _child_tells != os.getpid():
        _child_tells = os.getpid()
        Finalize(None, _tell_in_child, exitpriority=_AFTER_OTHERS)


def _tell_in_child() -> None:
    """Give a child of multiprocessing its exit code, unless an exception, which is printed after this, will do so."""
    ended_by = sys.exc_info()[1]
    if _failed_in == os.getpid() and (ended_by is None or (isinstance(ended_by, SystemExit) and not ended_by.code)):
        raise SystemExit(1)


# Registered when this is imported, so it comes after whatever a script registers later.
atexit.register(_tell)
