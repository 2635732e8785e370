"""Who owns what in a run directory: starts of the trainer (attempts), the locks of the daemon and of the run. Shell."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ckpt_service import naming, scan
from ckpt_service.errors import CkptError, RunDirectoryBusy
from ckpt_service.records import Attempt, Origin, TopologyRecord
from ckpt_service.storage import create_small, make_directories, write_small

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name under which this host's files are written: ``CKPT_SERVICE_HOST`` or the host name."""
    return environ.get("CKPT_SERVICE_HOST") or os.uname().nodename


def pid_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (proc(5), field 22 of stat); None if it has ended.

    Together with the pid it names a process for good, since pids are used again. A zombie has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def open_process(pid: int, start: int) -> int | None:
    """Return a pidfd of the process of this pid and start (see :func:`pid_start`), None if it has ended.

    A signal sent through it reaches this process or none. The caller closes it.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if pid_start(pid) != start:
        os.close(descriptor)
        return None
    return descriptor


def service_path(root: str, postfix: str | None) -> str:
    """Return the directory of everything of ours that is not a checkpoint."""
    return os.path.join(root, naming.service_directory(postfix))


def lock_holder(path: str) -> int | None:
    """Return the pid that holds a record lock on a file (0 where it is not visible), None if nobody does; only looks.

    Not for a process that holds one on that file itself: closing it here would let go of that (fcntl(2), F_GETLK).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    finally:
        os.close(fd)
    kind, _, _, _, pid = _FLOCK.unpack(found)
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))


@dataclass(frozen=True)
class Start:
    """What is known about a start of the trainer before it has a number."""

    host: str
    pid: int
    topology: TopologyRecord
    slots: int
    started_at: datetime
    launch: str | None = None


def take_attempt(root: str, postfix: str | None, start: Start) -> Attempt:
    """Create the record of this start, exclusively and durably; its number is above all that were ever used here."""
    directory = os.path.join(service_path(root, postfix), naming.ATTEMPTS)
    make_directories(directory)
    while True:
        known = scan.load_attempts(root, postfix)
        written = [shard.manifest for shard in scan.scan_run(root, postfix) if shard.manifest is not None]
        newest = max(written, key=lambda manifest: (manifest.attempt, manifest.sequence), default=None)
        used = [naming.parse_attempt_file(name) or 0 for name in os.listdir(directory)]
        run_id = known[-1].run_id if known else newest.run_id if newest else secrets.token_hex(4)
        attempt = Attempt(
            run_id=run_id,
            n=1 + max([*used, newest.attempt if newest else 0], default=0),
            launch=start.launch,
            host=start.host,
            pid=start.pid,
            pid_start=pid_start(start.pid) or 0,
            topology=start.topology,
            slots=start.slots,
            started_at=start.started_at,
        )
        if create_small(_attempt_path(directory, attempt.n), attempt.model_dump_json(indent=1).encode()):
            return attempt


def record_resume(root: str, postfix: str | None, attempt: Attempt, origin: Origin) -> Attempt:
    """Note durably what this attempt resumed from; from here on the lineage follows it."""
    directory = os.path.join(service_path(root, postfix), naming.ATTEMPTS)
    resumed = attempt.model_copy(update={"resumed_from": origin})
    write_small(_attempt_path(directory, attempt.n), resumed.model_dump_json(indent=1).encode())
    return resumed


def adopt_attempt(root: str, postfix: str | None, attempt: Attempt) -> bool:
    """Have the record of an attempt here as well, where the directory of rank 0 is not shared.

    Returns whether it was here already, as it is: then the directory is shared.
    """
    directory = os.path.join(service_path(root, postfix), naming.ATTEMPTS)
    if attempt in scan.load_attempts(root, postfix):
        return True
    make_directories(directory)
    write_small(_attempt_path(directory, attempt.n), attempt.model_dump_json(indent=1).encode())
    return False


def _attempt_path(directory: str, number: int) -> str:
    return os.path.join(directory, naming.attempt_file(number))


class DaemonLock:
    """The right to be the daemon of a run directory on this host.

    A POSIX record lock: the kernel frees it the moment the process is dead, and a forked child does not hold it. The
    file says who holds it. It is opened once: closing any other descriptor of it would free the lock.
    """

    def __init__(self, root: str, postfix: str | None, host: str) -> None:
        self.path = os.path.join(service_path(root, postfix), naming.daemon_lock(host))
        self._fd = -1

    def acquire(self, socket: str) -> None:
        """Take the lock.

        Raises:
            RunDirectoryBusy: another daemon holds it; names host, pid and socket.
        """
        make_directories(os.path.dirname(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner(fd)
            os.close(fd)
            raise RunDirectoryBusy(f"another daemon serves this run directory: {owner}", path=self.path) from error
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        mine = {"host": os.uname().nodename, "pid": os.getpid(), "pid_start": pid_start(os.getpid()), "socket": socket}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(mine).encode() + b"\n", 0)

    def release(self) -> None:
        """Give the lock back. The file stays: deleting it would let two daemons lock two files of one name."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


_RUN_HEARTBEAT_SECONDS = 5.0
_RUN_STALE_SECONDS = 15.0
_run_locks: set[str] = set()  # record locks do not exclude a second holder in one process


class RunLock:
    """The right to train on a run directory; held by rank 0 of the live attempt.

    Two nets: a POSIX record lock, which is free the moment its holder is dead (and does not pass to forked data-loader
    workers), and a record of the owner with a heartbeat, for hosts between which locks do not work.
    """

    def __init__(self, root: str, postfix: str | None) -> None:
        self.path = os.path.join(service_path(root, postfix), naming.run_lock())
        self._fd = -1
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None

    def acquire(self, host: str) -> None:
        """Take the lock.

        Raises:
            RunDirectoryBusy: a live run has it; names host and pid.
        """
        if self.path in _run_locks:
            raise RunDirectoryBusy(f"this process (pid {os.getpid()}) trains on it already", path=self.path)
        make_directories(os.path.dirname(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if not _locked(fd) or (_owner_host(fd) not in (None, host) and _beats(fd)):
                raise RunDirectoryBusy(
                    f"another run trains on this directory: {_owner(fd)}",
                    path=self.path,
                    hint="stop it, or use another root",
                )
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _run_locks.add(self.path)
        self._note(host, beat=0)
        self._beating = threading.Thread(target=self._beat, args=(host,), name="ckpt-run-lock", daemon=True)
        try:
            self._beating.start()
        except RuntimeError as error:  # no more threads
            self._beating = None
            self.release()
            raise CkptError(
                f"the run lock cannot be kept alive: {error}",
                op="start",
                path=self.path,
                hint="raise the limit of processes (ulimit -u)",
            ) from error

    def release(self) -> None:
        """Give the lock back.

        A beat that hangs in the disk keeps it until the process ends: the number of a closed descriptor may be that of
        another file by the time the beat is written.
        """
        self._stop.set()
        if self._beating is not None:
            self._beating.join(_RUN_HEARTBEAT_SECONDS)
            if self._beating.is_alive():
                return
        if self._fd >= 0:
            _run_locks.discard(self.path)
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _note(self, host: str, beat: int) -> None:
        """Write down who owns it; a disk that fails meanwhile costs the second net only."""
        pid = os.getpid()
        record = json.dumps({"host": host, "pid": pid, "pid_start": pid_start(pid), "beat": beat})
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, record.ljust(200).encode() + b"\n", 0)

    def _beat(self, host: str) -> None:
        """Renew the record until the end."""
        beat = 0
        while not self._stop.wait(_RUN_HEARTBEAT_SECONDS):
            beat += 1
            self._note(host, beat)


def _locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def live_run(root: str, postfix: str | None) -> str | None:
    """Return who trains on a run directory, for people to read; None if nobody does, as far as locks can tell.

    The lock is only looked at, never taken: a trainer that wants it at this moment gets it.
    """
    try:
        fd = os.open(os.path.join(service_path(root, postfix), naming.run_lock()), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # fcntl(2), F_GETLK: who keeps us from this lock?
        held = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return _owner(fd) if held[0] != fcntl.F_UNLCK else None
    except OSError:
        return None
    finally:
        os.close(fd)


_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def _owner(fd: int) -> str:
    """Say who holds a lock, from the record in its file."""
    try:
        record = json.loads(os.pread(fd, 4096, 0))
        parts = [f"{key} {record[key]}" for key in ("host", "pid", "socket") if record.get(key) is not None]
    except (ValueError, AttributeError):
        parts = []  # it was just taken, or just given back
    return ", ".join(parts) or "its owner is not known yet"


def _owner_host(fd: int) -> str | None:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["host"])
    except (ValueError, KeyError, TypeError):
        return None


def _beats(fd: int) -> bool:
    """Return whether the owner on another host renews its record; takes as long as it may pause, if it does not."""
    seen = os.pread(fd, 4096, 0)
    deadline = time.monotonic() + _RUN_STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if os.pread(fd, 4096, 0) != seen:
            return True
    return False
