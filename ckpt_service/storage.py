"""The only module that creates, syncs, renames, links or deletes files of a run directory.

:class:`Directory` and :class:`NewFile` are what the rest of the code sees; :class:`LocalDirectory` is the real thing.
All work is relative to an open directory, and no link is followed: whoever plants a link cannot redirect a write.
Errors come out as ``OSError``; the callers know what was meant and say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_libc = ctypes.CDLL(None, use_errno=True)
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class NewFile(Protocol):
    """A file that is being written and has no final name yet."""

    @property
    def direct(self) -> bool:
        """Whether writes still go past the page cache."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Have room on the disk for so many bytes, where the filesystem can say so beforehand."""
        ...

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``; may be called from several threads at once."""
        ...

    def sync(self) -> None:
        """Make the content durable. A failure is final: the content may be lost although a second sync says 0."""
        ...

    def close(self) -> None:
        """Release the descriptors."""
        ...


class Directory(Protocol):
    """An open directory of a run."""

    @property
    def path(self) -> str:
        """Its path, for people to read; no call uses it."""
        ...

    def create(self, name: str, *, mode: int, direct: bool) -> NewFile:
        """Create a file that must not exist yet; ``mode`` is its exact permission bits."""
        ...

    def replace(self, old: str, new: str) -> None:
        """Rename, replacing what is there; durable after :meth:`sync`."""
        ...

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; durable after :meth:`sync`."""
        ...

    def remove(self, name: str) -> bool:
        """Delete a file; return False if it was gone already."""
        ...

    def keeping(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keep a file alive while its name is deleted, so that freeing its blocks is waited for only at the end."""
        ...

    def sync(self) -> None:
        """Make creations, renames and deletions durable."""
        ...

    def names(self) -> list[str]:
        """Return the names in it."""
        ...

    def head(self, name: str, nbytes: int) -> bytes | None:
        """Return the first ``nbytes`` bytes of a regular file, None if there is none of this name."""
        ...

    def is_abandoned(self, name: str) -> bool:
        """Return whether no process holds this temporary file open for writing any more."""
        ...

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes that also ask for it from renaming here."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that an unprivileged user may still write on this filesystem."""
        ...

    def has_inodes(self) -> bool:
        """Return whether this filesystem takes any more files, however small."""
        ...


@dataclass
class LocalFile:
    """A new file on a local or network filesystem.

    Two descriptors: ``fd`` holds the lock that tells others the writer lives, and takes buffered writes; ``direct_fd``
    (None where direct I/O is not to be had) takes those that are aligned. Both stay open until :meth:`close`, since
    another thread may be about to use a number that the kernel would give to someone else's file.
    """

    fd: int
    direct_fd: int | None
    _fell_back: bool = False

    @property
    def direct(self) -> bool:
        """Whether writes still go past the page cache."""
        return self.direct_fd is not None and not self._fell_back

    def allocate(self, nbytes: int) -> None:
        """fallocate(2): a full disk is known before anything is written, and writes need not extend the file.

        Not ``os.posix_fallocate``: where the filesystem cannot, that writes zeros instead.
        """
        if _libc.fallocate(self.fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
            number = ctypes.get_errno()
            if number not in (*_NOT_DIRECT, errno.EINTR):
                raise OSError(number, os.strerror(number))

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, directly if possible, else buffered from here on."""
        done = 0
        if self.direct_fd is not None and not self._fell_back:
            try:
                done = os.pwrite(self.direct_fd, data, offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._fell_back = True
        while done < len(data):  # a raw write may be short, and the rest of a direct one unaligned
            done += _some(os.pwrite(self.fd, data[done:], offset + done))

    def sync(self) -> None:
        """fsync; it covers what either descriptor wrote."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close both descriptors; the lock goes with them."""
        direct, self.direct_fd = self.direct_fd, None
        if direct is not None:
            os.close(direct)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class LocalDirectory:
    """A directory on a local or network filesystem; owns its descriptor."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self._path = path

    @classmethod
    def open(cls, path: str) -> LocalDirectory:
        """Open a directory, making it (and its parents, each durably) if it is not there."""
        make_directories(path)
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    @property
    def path(self) -> str:
        """Its path when it was opened."""
        return self._path

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LocalDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, name: str, *, mode: int, direct: bool) -> LocalFile:
        """Create ``name`` exclusively, lock it as a sign of life, and open it a second time for direct writes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        file = LocalFile(fd, None)
        try:
            with _tolerating_no_locks():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, mode)
            if direct:
                file.direct_fd = self._open_direct(name)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong first matters more
                os.unlink(name, dir_fd=self.fd)
            file.close()
            raise
        return file

    def _open_direct(self, name: str) -> int | None:
        try:
            return os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _NOT_DIRECT:
                return None
            raise

    def replace(self, old: str, new: str) -> None:
        """Rename within this directory."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link(self, old: str, new: str) -> None:
        """Hard-link within this directory."""
        os.link(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Unlink; a file that is gone already is no error."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        """Hold it open; where that cannot be, its deletion takes as long as it takes."""
        fd = -1
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        try:
            yield
        finally:
            if fd >= 0:
                os.close(fd)

    def sync(self) -> None:
        """fsync the directory itself."""
        os.fsync(self.fd)

    def names(self) -> list[str]:
        """List the directory."""
        return os.listdir(self.fd)

    def head(self, name: str, nbytes: int) -> bytes | None:
        """Read the start of a regular file."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        try:
            return os.pread(fd, nbytes, 0)
        finally:
            os.close(fd)

    def is_abandoned(self, name: str) -> bool:
        """Try the lock that a live writer holds; where locks are not to be had, nothing counts as abandoned."""
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock on the directory, by a descriptor of its own: threads exclude each other too."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with _tolerating_no_locks():
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """Ask the filesystem."""
        found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def has_inodes(self) -> bool:
        """Ask the filesystem; one that does not count them has no limit."""
        found = os.fstatvfs(self.fd)
        return found.f_files == 0 or found.f_favail > 0


@contextlib.contextmanager
def _tolerating_no_locks() -> Iterator[None]:
    """Go on where the filesystem knows no locks; they keep company, and a single writer is safe without."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def make_directories(path: str) -> None:
    """Make a directory and its missing parents; sync the parent of each new one, so that it survives a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_path(parent)


def sync_path(path: str) -> None:
    """fsync a directory by its path."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_small(path: str, content: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a small file as a whole: write beside it, sync, rename, sync the directory."""
    temporary = _write_beside(path, content, mode, durable)
    try:
        os.rename(temporary, path)
    except BaseException:
        _drop(temporary)
        raise
    if durable:
        sync_path(os.path.dirname(path))


def create_small(path: str, content: bytes, *, mode: int = 0o644) -> bool:
    """Create a small file as a whole and durably; return False if one of this name exists."""
    temporary = _write_beside(path, content, mode, durable=True)
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        _drop(temporary)
    sync_path(os.path.dirname(path))
    return True


def remove_small(path: str) -> bool:
    """Delete a small file durably; return False if there was none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    sync_path(os.path.dirname(path))
    return True


def _write_beside(path: str, content: bytes, mode: int, durable: bool) -> str:
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[_some(os.write(fd, view)) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _drop(temporary)
        raise
    return temporary


def _drop(temporary: str) -> None:
    """Delete a temporary file, if that is possible: what went wrong before matters more."""
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _some(written: int) -> int:
    """Return what was written, which is never nothing: asking again would go on for ever."""
    if written <= 0:
        raise OSError(errno.EIO, "the filesystem takes no bytes and says no reason")
    return written
