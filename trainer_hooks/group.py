"""The ranks of one start, able to agree with each other. Shell.

All that is needed is one collective: every rank gives some bytes and gets everybody's. With ``torch.distributed`` it
runs over a CPU (gloo) group of our own, never the default group, which may be NCCL. Without it, the ranks of one launch
meet in a directory of the run; what tells one launch from another is a launch id.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ckpt_service import naming, ownership
from ckpt_service.config import ServiceConfig
from ckpt_service.errors import CkptError, RunDirectoryBusy
from ckpt_service.storage import create_small, make_directories, write_small
from trainer_hooks.topology import Topology

_POLL_SECONDS = 0.02
_CHUNK_BYTES = 16 << 20


class Group(Protocol):
    """The ranks of one start."""

    def gather(self, value: bytes) -> list[bytes]:
        """Return what every rank gave, by rank; to be called by all ranks, in the same order."""
        ...

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Send bytes to other ranks, which call :meth:`receive` meanwhile."""
        ...

    def receive(self, into: memoryview, source: int) -> None:
        """Receive bytes from the rank that sends them."""
        ...

    @property
    def can_send(self) -> bool:
        """Whether bytes can be sent; where not, all ranks see one directory."""
        ...

    def close(self) -> None:
        """Leave; nothing is waited for."""
        ...


class Solo:
    """The group of a single rank."""

    can_send = False

    def gather(self, value: bytes) -> list[bytes]:
        """Return the only value."""
        return [value]

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Never called: there is nobody else."""
        raise AssertionError("a single rank sends nothing")

    def receive(self, into: memoryview, source: int) -> None:
        """Never called: there is nobody else."""
        raise AssertionError("a single rank receives nothing")

    def close(self) -> None:
        """Nothing to leave."""


class TorchGroup:
    """All ranks of ``torch.distributed``, over a gloo group made for this purpose; making it is collective."""

    can_send = True

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def gather(self, value: bytes) -> list[bytes]:
        """all_gather over the CPU group."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Send in chunks, to one rank after the other."""
        for rank in ranks:
            for start in range(0, len(data), _CHUNK_BYTES):
                dist.send(torch.frombuffer(data[start : start + _CHUNK_BYTES], dtype=torch.uint8), rank, self._group)

    def receive(self, into: memoryview, source: int) -> None:
        """Receive in the same chunks."""
        for start in range(0, len(into), _CHUNK_BYTES):
            dist.recv(torch.frombuffer(into[start : start + _CHUNK_BYTES], dtype=torch.uint8), source, self._group)

    def close(self) -> None:
        """Leave the group to torch, which ends it with the process group."""


@dataclass(frozen=True)
class _Session:
    """One start of a launch, as rank 0 announces it."""

    nonce: str
    host: str
    pid: int
    pid_start: int | None

    @property
    def may_live(self) -> bool:
        """Whether its rank 0 may still be running; of another host nobody here can tell."""
        return self.host != os.uname().nodename or ownership.pid_start(self.pid) == self.pid_start


class LaunchGroup:
    """The ranks of one launch without ``torch.distributed``: they meet in a directory that all of them see.

    Rank 0 announces a session; each other rank claims its place in it, once: a rank that restarts alone finds its place
    taken and is refused, since the others still hold the state of before.
    """

    can_send = False

    def __init__(self, directory: str, topology: Topology, patience_seconds: float) -> None:
        self._directory = directory
        self._topology = topology
        self._patience_seconds = patience_seconds
        self._round = 0
        make_directories(directory)
        self._nonce = self._announce() if topology.rank == 0 else self._join()

    def gather(self, value: bytes) -> list[bytes]:
        """Write one file and read everybody's."""
        self._round += 1
        write_small(self._file(self._topology.rank), value, durable=False)
        return [self._await(rank) for rank in range(self._topology.world_size)]

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Never called: all ranks see one directory."""
        raise AssertionError("ranks without torch.distributed share the directory")

    def receive(self, into: memoryview, source: int) -> None:
        """Never called: all ranks see one directory."""
        raise AssertionError("ranks without torch.distributed share the directory")

    def close(self) -> None:
        """Rank 0 takes the meeting place away."""
        if self._topology.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _announce(self) -> str:
        known = self._session()
        if known is not None and known.host == os.uname().nodename and known.may_live and known.pid != os.getpid():
            raise self._taken()
        shutil.rmtree(self._directory, ignore_errors=True)
        make_directories(self._directory)
        pid = os.getpid()
        mine = _Session(secrets.token_hex(8), os.uname().nodename, pid, ownership.pid_start(pid))
        write_small(os.path.join(self._directory, "session"), json.dumps(vars(mine)).encode(), durable=False)
        return mine.nonce

    def _join(self) -> str:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            session = self._session()
            if session is not None and session.may_live:
                claim = os.path.join(self._directory, f"{session.nonce}.claim.{self._topology.rank}")
                if create_small(claim, b""):
                    return session.nonce
                if session.host == os.uname().nodename:
                    raise self._taken()
            time.sleep(_POLL_SECONDS)
        raise CkptError(
            f"rank {self._topology.rank} waited {self._patience_seconds} s for rank 0 of this launch",
            op="start",
            path=self._directory,
            hint="start all ranks together, with the same launch id",
        )

    def _taken(self) -> RunDirectoryBusy:
        return RunDirectoryBusy(
            f"rank {self._topology.rank} of this launch has started already",
            path=self._directory,
            hint="restart all ranks together; the others hold the state of before",
        )

    def _session(self) -> _Session | None:
        try:
            with open(os.path.join(self._directory, "session"), "rb") as file:
                return _Session(**json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return None

    def _file(self, rank: int) -> str:
        return os.path.join(self._directory, f"{self._nonce}.{self._round}.{rank}")

    def _await(self, rank: int) -> bytes:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            try:
                with open(self._file(rank), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                time.sleep(_POLL_SECONDS)
        raise CkptError(f"rank {rank} did not answer within {self._patience_seconds} s", op="agree")


def join(
    root: str, postfix: str | None, topology: Topology, config: ServiceConfig, environ: Mapping[str, str]
) -> Group:
    """Return the group of this start; collective on all ranks.

    Raises:
        ValueError: there are several ranks and nothing that brings them together; names both ways.
        RunDirectoryBusy: this rank has started already in this launch.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.world_size):
            raise ValueError(
                f"topology: rank {topology.rank} of {topology.world_size}, and torch.distributed says rank "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        return TorchGroup()
    if topology.world_size == 1:
        return Solo()
    launch = launch_id(environ)
    if launch is None:
        raise ValueError(
            f"topology: {topology.world_size} ranks need torch.distributed.init_process_group() before the Checkpointer, "
            "or CKPT_SERVICE_LAUNCH set to the same new text on all ranks at every start"
        )
    directory = os.path.join(ownership.service_path(root, postfix), naming.LAUNCHES, naming.launch_directory(launch))
    return LaunchGroup(directory, topology, config.resume_wait_seconds)


def launch_id(environ: Mapping[str, str]) -> str | None:
    """Return what the ranks of one start have in common and no other start has, None if nothing says it."""
    if launch := environ.get("CKPT_SERVICE_LAUNCH"):
        return launch
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchelastic {run} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm {job} {environ.get('SLURM_STEP_ID', '')} {environ.get('SLURM_RESTART_COUNT', '0')}"
    return None
