"""Who owns what in a run directory: starts of the trainer (attempts), and the lock of the daemon. Shell."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from ckpt_service import naming, scan
from ckpt_service.errors import RunDirectoryBusy
from ckpt_service.records import Attempt, Origin, TopologyRecord
from ckpt_service.storage import create_small, make_directories, write_small


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name under which this host's files are written: ``CKPT_SERVICE_HOST`` or the host name."""
    return environ.get("CKPT_SERVICE_HOST") or os.uname().nodename


def pid_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (proc(5), field 22 of stat); None if it is gone.

    Together with the pid it names a process for good, since pids are used again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def service_path(root: str, postfix: str | None) -> str:
    """Return the directory of everything of ours that is not a checkpoint."""
    return os.path.join(root, naming.service_directory(postfix))


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
            owner = os.pread(fd, 4096, 0).decode(errors="replace").strip() or "unknown"
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
