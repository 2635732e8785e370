"""What is known about a machine and a run directory before anything is judged. Pure.

``None`` means that it could not be found out. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_service.memory import Room

# --- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """What a process that imports torch says. ``version`` is None where it is not installed."""

    version: str | None
    problem: str | None = None
    devices: int = 0
    cuda: str | None = None


@dataclass(frozen=True)
class SocketPlace:
    """Where the socket lies. ``refused``: why each place before it is not taken; ``is_open``: others can reach it."""

    directory: str | None
    refused: tuple[str, ...] = ()
    is_open: bool = False


@dataclass(frozen=True)
class Machine:
    """This host and this Python. Limits are None where there is none."""

    python: str
    release: str
    crc: str
    memfd_problem: str | None
    shm_free_bytes: int | None
    room: Room | None
    memlock_bytes: int | None
    open_files: int | None
    torch: Torch
    socket: SocketPlace


# --- the disk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A filesystem: its type, where it is mounted, and how."""

    type: str
    point: str
    options: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Failure:
    """A step that failed: what was done, the symbolic errno, and its text."""

    op: str
    code: str | None
    reason: str


@dataclass(frozen=True)
class Locks:
    """Whether record locks work: ``exclusive`` if a second process was refused, else ``problem`` says what happened."""

    exclusive: bool
    problem: str | None = None


@dataclass(frozen=True)
class Probe:
    """What came of writing a file of our own. What comes after a step that failed was not tried and is None.

    ``clock_ahead_seconds``: how far the filesystem's clock is ahead of ours.
    """

    failure: Failure | None = None
    direct: bool | None = None
    sync_seconds: float | None = None
    locks: Locks | None = None
    clock_ahead_seconds: float | None = None


@dataclass(frozen=True)
class Space:
    """What may still be written; ``free_inodes`` is None on filesystems that do not count files."""

    free_bytes: int
    free_inodes: int | None


@dataclass(frozen=True)
class Disk:
    """The filesystem of the root. ``place`` is the root, or the nearest directory above it that exists.

    ``unwritable``: directories of the run below the root that this user may not write to.
    """

    root: str
    place: str
    user: int
    mount: Mount | None
    probe: Probe
    space: Space | None
    wants_direct: bool = True
    unwritable: tuple[str, ...] = ()


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint. ``here``: the sizes of the shards that this host writes, as far as is known.

    ``known``: the status file says which they are; otherwise all of them are taken to be written here.
    """

    step: int
    epoch: int
    files: int
    bytes: int
    here: tuple[int, ...]
    known: bool


@dataclass(frozen=True)
class Daemon:
    """A daemon by its status. ``age_seconds`` of its last heartbeat (negative: from the future)."""

    host: str
    here: bool
    pid: int
    state: str
    version: str
    protocol: int
    age_seconds: float
    ended: bool


@dataclass(frozen=True)
class Run:
    """What stands in the run directory; ``problem`` says why it cannot be read.

    ``daemon_lock`` and ``run_lock`` are the pids that hold them on this host, None where nobody does.
    ``files_ahead_seconds``: how far the newest file is ahead of our clock. ``newer_format``: what only a newer release
    can read, and which may be the newest.
    """

    slots: int
    newest: Newest | None = None
    daemons: tuple[Daemon, ...] = ()
    unreadable: tuple[str, ...] = ()
    daemon_lock: int | None = None
    run_lock: int | None = None
    files_ahead_seconds: float | None = None
    newer_format: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything that was looked at."""

    machine: Machine
    disk: Disk
    run: Run
