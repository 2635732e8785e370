"""The training processes of one leg: started as torchrun starts them, ended all at once.

Each is a process group of its own, so that neither Ctrl-C nor a signal meant for one reaches another by accident.
Promises that none is left running when the block that holds them is left, however that happens.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType

from trainer_hooks.demo.leg import SLOWING, Leg

_NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"
"""Torch says so on import where NumPy is missing; neither it nor the demo needs NumPy."""

_ADDRESS = "127.0.0.1"


class Ranks:
    """Used as a context manager: processes run inside the block."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ranks:
        port = _free_port()
        try:
            for rank in range(self._leg.recipe.ranks):
                self._processes.append(_start(self._leg, rank, port))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def statuses(self) -> list[int | None]:
        """Exit statuses by rank, as `subprocess` gives them (-9 for SIGKILL); None for one that runs."""
        return [process.poll() for process in self._processes]

    def ended(self, within_seconds: float) -> bool:
        """Whether all have ended, waiting for it up to some time."""
        deadline = time.monotonic() + within_seconds
        with suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        return None not in self.statuses()

    def kill(self) -> None:
        """SIGKILL to every process that has not been seen to end, one right after the other; nothing is waited for."""
        for process in self._processes:
            if process.returncode is None:  # until its status is collected, the number is still its own
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self.kill()
        for process in self._processes:
            process.wait()


def _start(leg: Leg, rank: int, port: int) -> subprocess.Popen[bytes]:
    with ExitStack() as stack:
        log = stack.enter_context(leg.paths.log(leg.number, rank).open("wb"))
        return subprocess.Popen(
            _command(leg),
            env=_environment(leg, rank, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _command(leg: Leg) -> list[str]:
    recipe, paths = leg.recipe, leg.paths
    command = [sys.executable, "-W", _NO_NUMPY, "-m", "trainer_hooks.demo.train", "--leg", str(leg.number)]
    command += ["--steps", str(recipe.steps), "--root", str(paths.root), "--records", str(paths.records)]
    if leg.tiny:
        command.append("--tiny")
    if leg.single:
        command.append("--single")
    if leg.kill is not None:
        command += ["--hold-at", str(leg.kill.save_step + recipe.save_every)]
    return command


def _environment(leg: Leg, rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, and what makes writes slow, which only the demo decides; the rest is this process's own."""
    size = str(leg.recipe.ranks)
    result = {name: value for name, value in os.environ.items() if name not in SLOWING}
    result.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this host, whatever its name resolves to
    result.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    result.update(MASTER_ADDR=_ADDRESS, MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    return result | (leg.slow_writes.environment() if leg.slow_writes else {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port
