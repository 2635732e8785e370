"""The shared memory in which snapshots are made: sealed memfds, used again and again. Shell.

A slot belongs to one snapshot from :meth:`SlotPool.take` until that is committed or has failed; then it is used again.
It is never truncated: the seals forbid it, so neither side can be hit by a SIGBUS. Memory is bounded by ``count``
slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ckpt_service import memory
from ckpt_service.errors import SaveFailed, from_os_error
from ckpt_service.image import Layout
from ckpt_service.memory import Room

_ROUND_BYTES = 2 << 20
_TOUCH_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # madvise(2); not in Python's mmap module, whose madvise holds the interpreter besides
_libc = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Slot:
    """Sealed memory of ``nbytes`` bytes; ``fd`` can be handed to the daemon.

    What the last snapshot has left in it, for the next one of the same layout: ``structure`` is the layout whose
    headers and directory stand there, ``places`` are the views that its storages are copied to.
    """

    fd: int
    nbytes: int
    mapping: mmap.mmap
    structure: Layout | None = field(default=None, repr=False)
    places: tuple[Layout, list[torch.Tensor]] | None = field(default=None, repr=False)

    @classmethod
    def create(cls, nbytes: int) -> Slot:
        """Allocate memory, not yet touched."""
        size = nbytes + -nbytes % _ROUND_BYTES
        fd = os.memfd_create("ckpt-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(fd)
            raise
        mapping.madvise(mmap.MADV_DONTFORK)  # a forked data-loader worker must not keep a whole state alive
        return cls(fd, size, mapping)

    def touch(self) -> None:
        """Have every page there, other threads going on meanwhile; without this the first copy pays for it."""
        address = torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()
        for start in range(0, self.nbytes, _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, self.nbytes - start)
            if _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
                continue
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # there is no memory: touching it by hand would end this process
                raise OSError(number, os.strerror(number))
            ctypes.memset(address + start, 0, length)  # before Linux 5.14

    def close(self) -> None:
        """Give the memory back."""
        self.places = None
        with contextlib.suppress(BufferError):  # the traceback of an error still looks at it; it goes with that
            self.mapping.close()
        os.close(self.fd)


class SlotPool:
    """At most ``count`` slots, each as large as the largest state that it held.

    ``room`` says how much memory can be had; it is asked before more is taken, since what is promised and then not
    there ends in the out-of-memory killer, not in an error.
    """

    def __init__(self, count: int, room: Callable[[], Room | None] = memory.room) -> None:
        self.count = count
        self._room = room
        self._preparing = 0
        self._closed = False
        self._free: list[Slot] = []
        self._busy: list[Slot] = []
        self._changed = threading.Condition()
        _pools.add(self)

    def prepare(self, nbytes: int) -> None:
        """Have all slots there, of at least ``nbytes``, with every page of them touched: that is what takes time.

        To be called on a thread of its own. Without enough memory nothing happens; the save says so.
        """
        while self._may_prepare(nbytes):
            slot: Slot | None = None
            try:
                slot = Slot.create(nbytes)
                slot.touch()
            except (OSError, MemoryError) as error:
                log.warning("a slot could not be made ready: %s", error)
            finally:  # a save may wait for this one
                with self._changed:
                    self._preparing -= 1
                    if slot is not None:
                        self._free.append(slot)
                    self._changed.notify_all()
            if slot is None or self._closed:
                break
        if self._closed:
            self.close()

    def _may_prepare(self, nbytes: int) -> bool:
        with self._changed:
            missing = self.count - len(self._free) - len(self._busy) - self._preparing
            may = missing > 0 and not self._closed and memory.shortage(nbytes, self._room()) is None
            self._preparing += may
            return may

    def take(self, nbytes: int, keep_waiting: Callable[[], bool]) -> Slot | None:
        """Return a slot of at least ``nbytes`` for the caller alone.

        While none is free, ``keep_waiting`` is asked every now and then; None when it says no.

        Raises:
            SaveFailed: the memory could not be had.
        """
        with self._changed:
            while self._has_to_wait(nbytes):
                if not keep_waiting():
                    return None
                self._changed.wait(0.1)
            slot = self._fitting(nbytes)
            self._busy.append(slot)
            return slot

    def has_room(self) -> bool:
        """Whether :meth:`take` would return at once."""
        with self._changed:
            return len(self._busy) < self.count

    def give_back(self, slot: Slot, *, reusable: bool = True) -> None:
        """Let a slot be used again; or, if a daemon may still read it, let go of it for good."""
        with self._changed:
            self._busy.remove(slot)
            if reusable:
                self._free.append(slot)
            else:
                slot.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back; no slot may be in use by this process any more."""
        with self._changed:
            self._closed = True
            for slot in self._free + self._busy:
                slot.close()
            self._free, self._busy = [], []

    def _has_to_wait(self, nbytes: int) -> bool:
        ready = any(slot.nbytes >= nbytes for slot in self._free)
        return len(self._busy) >= self.count or (self._preparing > 0 and not ready)

    def _fitting(self, nbytes: int) -> Slot:
        fitting = min((slot for slot in self._free if slot.nbytes >= nbytes), key=lambda s: s.nbytes, default=None)
        if fitting is not None:
            self._free.remove(fitting)
            return fitting
        if self._free and len(self._free) + len(self._busy) >= self.count:
            self._free.pop().close()  # all are too small: the state has grown
        if lack := memory.shortage(nbytes, self._room()):
            raise SaveFailed(f"no memory for a snapshot: {lack}", op="save", code="ENOMEM")
        try:
            return Slot.create(nbytes)
        except OSError as error:
            raise from_os_error(error, op=f"allocating {nbytes} bytes of shared memory", kind=SaveFailed) from error

    def _forget_in_child(self) -> None:
        for slot in self._free + self._busy:
            os.close(slot.fd)
        self._free, self._busy = [], []
        self._preparing = 0
        self._changed = threading.Condition()


_pools: weakref.WeakSet[SlotPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
