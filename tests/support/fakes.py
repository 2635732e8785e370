"""A directory in memory that records what is done to it, fails when told to, and forgets what was not synced.

It implements the protocols of :mod:`ckpt_service.storage`, and the contract tests hold it to what the real directory
does. What a power cut leaves is modelled as POSIX allows it: the content of a file as it was at its last successful
sync plus any part of what was written since, and the names as they were at the last sync of the directory plus any
prefix of what was done to them since. A failed sync drops what it should have saved, and the next one says that all
is well: so kernels do it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Disk = dict[str, bytes]
"""Names and contents, as a reader finds them."""


@dataclass(frozen=True)
class Operation:
    """One call, in the order in which they came. ``kind`` is the method; ``name`` the file, "" for the directory."""

    kind: str
    name: str


@dataclass(eq=False)
class Inode:
    """A file, by whatever names it has. ``durable`` is what is sure to survive, ``written`` what readers see now."""

    mode: int
    written: bytes = b""
    durable: bytes = b""
    dirty: bool = False
    dropped: bool = False
    writers: int = 0
    is_link: bool = False

    def remains(self) -> Iterator[bytes]:
        """Yield what may be found after a power cut: nothing new, a part of it, its size only, all of it."""
        yield self.durable
        if self.dirty and not self.dropped:
            half = self.written[: len(self.written) // 2]
            yield half + bytes(len(self.written) - len(half))
            yield bytes(len(self.written))
            yield self.written


Names = dict[str, Inode]


@dataclass(eq=False)
class FakeFile:
    """A file that is being written; see :class:`ckpt_service.storage.NewFile`."""

    directory: FakeDirectory
    name: str
    inode: Inode
    direct: bool
    open: bool = True

    def allocate(self, nbytes: int) -> None:
        """Fail if that is more than the directory's ``room``; nothing else comes of it."""
        if nbytes > self.directory.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write ``data``, in as many operations as the directory's ``short_bytes`` makes of it."""
        step = self.directory.short_bytes or max(1, len(data))
        for start in range(0, len(data), step):
            part = bytes(data[start : start + step])
            with self.directory.operation("write", self.name):
                content = bytearray(self.inode.written.ljust(offset + start, b"\0"))
                content[offset + start : offset + start + len(part)] = part
                self.inode.written = bytes(content)
                self.inode.dirty = True

    def sync(self) -> None:
        """Make the content durable; after a failure it never will be, whatever a later sync says."""
        try:
            with self.directory.operation("sync", self.name):
                if not self.inode.dropped:
                    self.inode.durable = self.inode.written
                    self.inode.dirty = False
        except OSError:
            self.inode.dropped = True
            raise

    def close(self) -> None:
        """Give up the lock; twice is fine."""
        self.inode.writers -= self.open
        self.open = False


@dataclass(eq=False)
class FakeDirectory:
    """A directory in memory; see :class:`ckpt_service.storage.Directory`.

    Attributes:
        path: what error messages say.
        failures: the operation (counted from 0) that fails, and the errno that it fails with.
        short_bytes: the most that one write takes, 0 for all.
        free: what :meth:`free_bytes` returns.
        room: how many bytes a file can be allocated.
        inodes: what :meth:`has_inodes` returns.
        before: called before each operation, with the directory as it is at that moment.
        operations: everything that was done.
    """

    path: str = "/fake"
    failures: dict[int, int] = field(default_factory=dict)
    short_bytes: int = 0
    free: int = 1 << 40
    room: int = 1 << 40
    inodes: bool = True
    before: Callable[[Operation], None] = lambda operation: None
    operations: list[Operation] = field(default_factory=list)
    _current: Names = field(default_factory=dict)
    _history: list[Names] = field(default_factory=lambda: [{}])  # the durable names, and those after each change since
    _mutex: threading.RLock = field(default_factory=threading.RLock)
    _renaming: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def operation(self, kind: str, name: str = "") -> Iterator[None]:
        """Record an operation, and let it fail before it does anything if that was asked for."""
        with self._mutex:
            done = Operation(kind, name)
            self.before(done)
            number = len(self.operations)
            self.operations.append(done)
            if number in self.failures:
                code = self.failures[number]
                raise OSError(code, os.strerror(code), name)
            yield
            if self._current != self._history[-1]:
                self._history.append(dict(self._current))

    def create(self, name: str, *, mode: int, direct: bool) -> FakeFile:
        """Create a file that must not exist yet."""
        with self.operation("create", name):
            if name in self._current:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            inode = self._current[name] = Inode(mode, writers=1)
            return FakeFile(self, name, inode, direct)

    def replace(self, old: str, new: str) -> None:
        """Rename, replacing what is there."""
        with self.operation("replace", new):
            inode = self._existing(old)
            del self._current[old]
            self._current[new] = inode

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        with self.operation("link", new):
            if new in self._current:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            self._current[new] = self._existing(old)

    def remove(self, name: str) -> bool:
        """Delete a name."""
        with self.operation("remove", name):
            return self._current.pop(name, None) is not None

    def sync(self) -> None:
        """Make the names durable."""
        with self.operation("sync_directory"):
            self._history = [dict(self._current)]

    def names(self) -> list[str]:
        """List it."""
        with self.operation("names"):
            return list(self._current)

    def head(self, name: str, nbytes: int) -> bytes | None:
        """Read the start of a file."""
        with self.operation("head", name):
            if name not in self._current:
                return None
            return self._regular(name).written[:nbytes]

    def is_abandoned(self, name: str) -> bool:
        """Whether nobody has the file open for writing."""
        with self.operation("is_abandoned", name):
            inode = self._current.get(name)
            return inode is not None and not inode.is_link and inode.writers == 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads out."""
        with self.operation("lock"):
            pass
        with self._renaming:
            yield
            with self._mutex:
                self.operations.append(Operation("unlock", ""))

    @contextlib.contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        """Do nothing: deletions are quick here."""
        yield

    def free_bytes(self) -> int:
        """Return what was set."""
        return self.free

    def has_inodes(self) -> bool:
        """Return what was set."""
        return self.inodes

    # --- for tests ----------------------------------------------------------------------------------------------------

    def put(self, name: str, content: bytes, *, mode: int = 0o644) -> None:
        """Put a durable file there."""
        self._current[name] = Inode(mode, content, content)
        self._history = [dict(self._current)]

    def put_link(self, name: str) -> None:
        """Put a symbolic link there."""
        self._current[name] = Inode(0o777, is_link=True)

    def disk(self) -> Disk:
        """Return what a reader finds now: what is left when only the process dies."""
        return {name: inode.written for name, inode in self._current.items()}

    def mode(self, name: str) -> int:
        """Return the permission bits of a file."""
        return self._current[name].mode

    def after_power_cut(self) -> Iterator[Disk]:
        """Yield every disk that a power cut may leave at this moment."""
        for names in self._history:
            unsure = [inode for inode in set(names.values()) if inode.dirty]
            for choice in range(4 if unsure else 1):
                yield {name: _nth(inode, choice) for name, inode in names.items()}

    def did(self, kind: str) -> list[str]:
        """Return the names in the operations of one kind."""
        return [operation.name for operation in self.operations if operation.kind == kind]

    def _existing(self, name: str) -> Inode:
        if name not in self._current:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._current[name]

    def _regular(self, name: str) -> Inode:
        inode = self._existing(name)
        if inode.is_link:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        return inode


def _nth(inode: Inode, choice: int) -> bytes:
    remains = list(inode.remains())
    return remains[min(choice, len(remains) - 1)]
