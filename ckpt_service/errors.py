"""Everything that can go wrong at run time, as one tree of exceptions.

Each error says what was tried, on what, and what to do next. A user's mistake (a wrong option or argument) is a plain
``ValueError`` that names the option; it is not in this tree, except for a state that cannot be saved, which is both.
"""

from __future__ import annotations

import errno
import os

_HINTS = {
    errno.ENOSPC: "free space on this filesystem or lower keep_last",
    errno.EDQUOT: "raise the quota or lower keep_last",
    errno.EFBIG: "raise the file size limit (ulimit -f) of the daemon",
    errno.EROFS: "mount the filesystem read-write",
    errno.EACCES: "give the user of the daemon write permission on this directory",
    errno.EPERM: "give the user of the daemon write permission on this directory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOMEM: "use fewer slots, or raise the limits of memory (ulimit -v, the control group)",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ESTALE: "check the file server, and mount the filesystem again",
    errno.EIO: "check the disk and the kernel log",
}

# What a pause may cure. A file too large or a directory that may not be written stays so, and a retry only hides it.
_PASSING = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    | {errno.ESTALE, errno.ETIMEDOUT}
)


class CkptError(Exception):
    """A failure at run time.

    Attributes:
        op: what was being done ("write", "commit", "connect", "load", ...), or None.
        step: the training step concerned, or None.
        path: the file, directory or socket concerned, or None.
        code: the symbolic errno ("ENOSPC"), or None.
        retryable: whether doing the same again later may succeed.
        hint: what to do next, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        step: int | None = None,
        path: str | None = None,
        code: str | None = None,
        retryable: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.step = step
        self.path = path
        self.code = code
        self.retryable = retryable
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}; {self.hint}" if self.hint else message


class ServiceUnavailable(CkptError):
    """No daemon answers, and none could be started."""


class ProtocolError(CkptError):
    """The other side of a socket broke the protocol, or speaks another version of it."""


class SaveFailed(CkptError):
    """A snapshot did not become a checkpoint."""


class SnapshotSkipped(SaveFailed):
    """A snapshot was not taken because no slot was free."""


class SnapshotSuperseded(SaveFailed):
    """A snapshot gave way to a newer one before its write started."""


class SnapshotDisturbed(SaveFailed):
    """Something was changed between ``save()`` and the next optimizer step, while it was being copied."""


class StateRefused(CkptError, ValueError):
    """The state holds something that cannot be saved, or could not be loaded again; names the key path."""


class DamagedCheckpoint(CkptError):
    """A file is short, fails its checksum, or is not what its name says."""


class NewerFormat(DamagedCheckpoint):
    """A file is of a format that this release cannot read; it may well be whole, so it is never deleted."""


class UntrustedClass(CkptError):
    """The checkpoint is whole and holds an object of a class that ``trust`` does not allow; nothing was loaded."""


class NoUsableCheckpoint(CkptError):
    """There are checkpoints, and every one of them is damaged."""


class LayoutMismatch(CkptError):
    """The checkpoint was saved with another pipeline or tensor parallel size."""


class StateMismatch(CkptError):
    """The checkpoint lacks something that is tracked, or a shape does not fit."""


class RunDirectoryBusy(CkptError):
    """Another live process owns what can have one owner only."""


def from_os_error(
    error: OSError, *, op: str, kind: type[CkptError] = SaveFailed, path: str | None = None, step: int | None = None
) -> CkptError:
    """Return ``error`` as a ``kind``, with its symbolic code, its path and what to do about it."""
    number = error.errno or 0
    where = path or error.filename
    reason = os.strerror(number) if number else str(error)
    return kind(
        f"{op} failed: {reason}" + (f": {where}" if where else ""),
        op=op,
        step=step,
        path=where,
        code=errno.errorcode.get(number),
        retryable=number in _PASSING,
        hint=_HINTS.get(number),
    )
