"""Real trainers and daemons for system tests: started, watched through files, and ended by pid only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckpt_service.ownership import host_name, pid_start
from ckpt_service.records import DaemonStatus, ServiceStatus
from support import nursery
from support.nursery import Forked

PRELUDE = """
import os, signal, sys, time, warnings
from pathlib import Path
import torch
from trainer_hooks import Checkpointer
torch.set_num_threads(1)
def say(*words):
    print(*words, flush=True)
def hear(word):
    line = sys.stdin.readline().strip()
    assert line == word, line
def state(value, megabytes=32):
    return {"value": torch.full((megabytes, 1 << 18), float(value)), "step": torch.tensor(float(value))}
"""

RANKS = """
from trainer_hooks import Topology
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = Topology.from_env(pp=int(os.environ["PP"]), tp=int(os.environ["TP"]))
"""
GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""
OBEY = """
for line in sys.stdin:
    exec(line)
"""
"""The end of a script that does what it hears, line by line, until its input ends."""

Meeting = Literal["gloo", "launch"]
"""How ranks find each other: ``torch.distributed``, or a launch id and nothing else."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Poll until ``condition`` holds; the condition is about other processes, so there is nothing to wait on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def daemons_of(root: Path) -> list[int]:
    """Return the pids of all daemons that serve ``root``, by their command lines."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _serves(pid, root)]


@dataclass
class Trainer:
    """A trainer process: a script that talks over its standard streams."""

    process: subprocess.Popen[str] | Forked

    @property
    def pid(self) -> int:
        return self.process.pid

    def hears(self, word: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def says(self, word: str) -> str:
        """Read lines until one starts with ``word``; return the rest of it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[:1] == [word]:
                return line[len(word) :].strip()
        raise AssertionError(f"the trainer ended (code {self.process.wait()}) without saying {word}: {self.errors()}")

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(30)

    def ends(self, code: int = 0) -> str:
        """Wait for the end; return the rest of what it said."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, (self.process.returncode, out, err)
        return out


@dataclass
class Ranks:
    """The trainers of one start, by rank."""

    trainers: list[Trainer]

    def __getitem__(self, rank: int) -> Trainer:
        return self.trainers[rank]

    def hear(self, word: str) -> None:
        """Send a line to all of them."""
        for trainer in self.trainers:
            trainer.hears(word)

    def say(self, word: str) -> list[str]:
        """Return what each of them says, as :meth:`Trainer.says`."""
        return [trainer.says(word) for trainer in self.trainers]

    def kill(self) -> None:
        """SIGKILL all of them, and wait for the end."""
        for trainer in self.trainers:
            trainer.process.kill()
        for trainer in self.trainers:
            trainer.kill()

    def end(self) -> list[str]:
        """Close their input and wait for the end of all; return the rest of what each said."""
        with ThreadPoolExecutor(len(self.trainers)) as at_once:
            return list(at_once.map(Trainer.ends, self.trainers))


@dataclass
class RunDirectory:
    """A root and the processes that a test starts on it."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)

    def trainer(self, body: str, **env: str) -> Trainer:
        """Start a process that runs ``PRELUDE`` and ``body``, with ``root`` defined, beside this root."""
        script = f"{PRELUDE}\nroot = {str(self.root)!r}\n{textwrap.dedent(body)}"
        return self._add(nursery.start(script, env={**os.environ, **self.env, **env}, cwd=str(self.root.parent)))

    def ranks(
        self,
        body: str,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        meet: Meeting = "gloo",
        launch: str = "launch",
        each: Callable[[int], dict[str, str]] = lambda rank: {},
        **env: str,
    ) -> Ranks:
        """Start a process for each rank; ``body`` finds its ``place``, ``rank`` and ``world_size``.

        ``launch`` is the launch id where the ranks meet by one; ``each`` gives what is special about a rank's
        environment, of which ``ROOT`` is where its own host has the run directory.
        """
        world_size = pp * dp * tp
        common = {"WORLD_SIZE": str(world_size), "PP": str(pp), "TP": str(tp), **env}
        if meet == "gloo":
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        else:
            common |= {"CKPT_SERVICE_LAUNCH": launch}
        script = RANKS + (GLOO if meet == "gloo" else "") + textwrap.dedent(body)
        trainers = []
        for rank in range(world_size):
            special = {"ROOT": str(self.root), **each(rank)}
            own = f"root = {special.pop('ROOT')!r}\n{script}"
            trainers.append(self.trainer(own, **{**common, "RANK": str(rank), **special}))
        return Ranks(trainers)

    def rank(self, number: int, body: str, *, pp: int = 1, dp: int = 1, tp: int = 1, launch: str = "launch") -> Trainer:
        """Start one rank alone, in a launch that may be under way."""
        environment = {"WORLD_SIZE": str(pp * dp * tp), "PP": str(pp), "TP": str(tp), "RANK": str(number)}
        return self.trainer(RANKS + textwrap.dedent(body), **environment, CKPT_SERVICE_LAUNCH=launch)

    def interpreter(self, *arguments: str, **env: str) -> Trainer:
        """Start a fresh interpreter, beside this root; for tests in which it matters how it was started."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **self.env, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root.parent,
        )
        return self._add(process)

    def _add(self, process: subprocess.Popen[str] | Forked) -> Trainer:
        trainer = Trainer(process)
        self.trainers.append(trainer)
        return trainer

    def cli(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of the command line to its end."""
        return subprocess.run(
            [sys.executable, "-m", "ckpt_service", *arguments],
            env={**os.environ, **self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def status(self) -> ServiceStatus | None:
        """Return what the status file says now."""
        path = self.root / ".ckpt_service" / f"status.{host_name(os.environ)}.json"
        if not path.exists():
            return None
        status = ServiceStatus.model_validate_json(path.read_text())
        self.seen[status.daemon.pid] = status.daemon.pid_start
        return status

    def daemon(self) -> DaemonStatus:
        """Return the daemon that the status file names."""
        status = self.status()
        assert status is not None
        return status.daemon

    def signal_daemon(self, number: signal.Signals) -> int:
        """Signal the daemon, if the process of that pid is still the one; return its pid."""
        daemon = self.daemon()
        assert pid_start(daemon.pid) == daemon.pid_start, "the daemon is not running"
        os.kill(daemon.pid, number)
        return daemon.pid

    def daemon_has_left(self) -> bool:
        """Whether no daemon that was ever seen here is alive."""
        self.status()
        return not any(_alive(pid, start) for pid, start in self.seen.items())

    def files(self, pattern: str = "*.pt") -> list[str]:
        """Return the names in the directory of stage 0 that match."""
        return sorted(path.name for path in (self.root / "checkpoint_0").glob(pattern))

    def partials(self) -> list[Path]:
        """Return the files that are being written."""
        return sorted((self.root / "checkpoint_0").glob(".*.partial"))

    def being_written(self, nbytes: int = 1) -> bool:
        """Whether a file is being written and has at least this size."""
        return any(_size(path) >= nbytes for path in self.partials())

    def clean_up(self) -> None:
        """End what is still running."""
        for trainer in self.trainers:
            if trainer.process.poll() is None:
                trainer.kill()
            for stream in (trainer.process.stdin, trainer.process.stdout, trainer.process.stderr):
                if stream is not None:
                    stream.close()
        self.status()
        for pid, start in self.seen.items():
            if _alive(pid, start):
                os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serves(pid: int, root: Path) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return arguments[1:5] == ["-m", "ckpt_service", "run", str(root)] and _state(pid) != "Z"


def _alive(pid: int, start: int) -> bool:
    return pid_start(pid) == start and _state(pid) != "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
