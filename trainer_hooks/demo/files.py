"""What a run directory shows from outside: finished shards, unfinished ones, and which process is its daemon.

Reads names, the status file and `/proc`; promises to signal no process but a daemon of this run directory, and only if
it is still that process (pid and start time agree).
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_service import naming
from ckpt_service.records import ServiceStatus


@dataclass(frozen=True)
class PartialFile:
    """A shard that is being written, or was when its writer died."""

    path: Path
    bytes: int


@dataclass(frozen=True)
class DaemonProcess:
    """A process by number and start time (field 22 of `/proc/<pid>/stat`): a number alone may be reused."""

    pid: int
    start: int

    def alive(self) -> bool:
        """Whether this very process runs; one whose exit status waits to be collected does not."""
        return _start_of(self.pid) == self.start

    def signal(self, number: signal.Signals) -> bool:
        """Send it, if the process is still the same one. False if it is gone."""
        if not self.alive():
            return False
        os.kill(self.pid, number)
        return True


def shard_path(root: Path, step: int, epoch: int, *, tp_rank: int, tp: int) -> Path:
    """The final name of one shard of a checkpoint of the demo, which has one pipeline stage."""
    return _directory(root) / naming.shard("train", stage=0, tp_rank=tp_rank, tp=tp, step=step, epoch=epoch)


def complete_steps(root: Path, tp: int) -> list[int]:
    """Steps of which all shards are there at their final names, ascending."""
    parsed = [naming.parse_shard(name) for name in _names(_directory(root))]
    counts = Counter(shard.step for shard in parsed if shard is not None and shard.step is not None)
    return sorted(step for step, count in counts.items() if count == tp)


def partial_files(root: Path, step: int | None = None) -> list[PartialFile]:
    """Unfinished shards: of one step, or of all."""
    found = []
    for name in _names(_directory(root)):
        partial = naming.parse_partial(name)
        shard = None if partial is None else naming.parse_shard(partial.final)
        if shard is None or step not in (None, shard.step):
            continue
        with suppress(FileNotFoundError):  # renamed since it was listed
            found.append(PartialFile(_directory(root) / name, (_directory(root) / name).stat().st_size))
    return found


def daemon_of(root: Path) -> DaemonProcess | None:
    """The daemon that the run directory's status file names, alive or not. None before there is one."""
    directory = root / naming.service_directory(None)
    for name in _names(directory):
        if naming.parse_status_file(name) is not None:
            daemon = ServiceStatus.model_validate_json((directory / name).read_bytes()).daemon
            return DaemonProcess(daemon.pid, daemon.pid_start)
    return None


def serving(root: Path) -> list[DaemonProcess]:
    """Whatever process runs as the daemon of this run directory, or is about to, by its command line."""
    found = []
    for name in _names(Path("/proc")):
        if not name.isdigit():
            continue
        start = _start_of(int(name))  # before the command line: if the number is used again, it no longer agrees
        with suppress(OSError):
            arguments = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            if start is not None and arguments[1:5] == [b"-m", b"ckpt_service", b"run", os.fsencode(root)]:
                found.append(DaemonProcess(int(name), start))
    return found


def _directory(root: Path) -> Path:
    return root / naming.stage_directory(0, None)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _start_of(pid: int) -> int | None:
    """Start time of a process, None if there is none or only its exit status is left to be collected."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
