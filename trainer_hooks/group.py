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
from trainer_hooks.exchange import Exchange, FileExchange, StoreExchange
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

    def exchange(self) -> Exchange:
        """Return a place where ranks leave values for each other; collective when it is first asked for."""
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

    def exchange(self) -> Exchange:
        """Never called: there is nobody else."""
        raise AssertionError("a single rank exchanges nothing")

    def close(self) -> None:
        """Nothing to leave."""


class TorchGroup:
    """All ranks of ``torch.distributed``, over a gloo group made for this purpose; making it is collective."""

    can_send = True

    def __init__(self, patience_seconds: float, ranks: list[int] | None = None) -> None:
        self._group = dist.new_group(ranks, backend="gloo")
        self._size = len(ranks) if ranks is not None else dist.get_world_size()
        self.patience_seconds = patience_seconds
        self._exchange: Exchange | None = None

    def gather(self, value: bytes) -> list[bytes]:
        """all_gather over the CPU group."""
        values: list[Any] = [None] * self._size
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

    def exchange(self) -> Exchange:
        """Rank 0 serves a store; the others learn its address over the group."""
        if self._exchange is None:
            self._exchange = self._served() if dist.get_rank() == 0 else self._reached()
        return self._exchange

    def _served(self) -> Exchange:
        host = os.environ.get("MASTER_ADDR") or os.uname().nodename
        exchange, port = StoreExchange.serve(host, self.patience_seconds)
        self.gather(json.dumps([host, port]).encode())
        return exchange

    def _reached(self) -> Exchange:
        host, port = json.loads(self.gather(b"")[0])
        try:
            return StoreExchange.reach(host, port, self.patience_seconds)
        except RuntimeError as error:
            hint = "set MASTER_ADDR to an address of rank 0 that all hosts reach"
            raise CkptError(f"rank 0 cannot be reached at {host}:{port}: {error}", op="start", hint=hint) from error

    def close(self) -> None:
        """Leave the group to torch, which ends it with the process group."""


@dataclass(frozen=True)
class _Member:
    """A process of a session: rank 0 announces the session with it, the others claim their places."""

    nonce: str
    host: str
    pid: int
    pid_start: int | None

    @classmethod
    def me(cls, nonce: str) -> _Member:
        return cls(nonce, os.uname().nodename, os.getpid(), ownership.pid_start(os.getpid()))

    @classmethod
    def read(cls, path: str) -> _Member | None:
        try:
            with open(path, "rb") as file:
                return cls(**json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def content(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host, so that one can tell whether it lives."""
        return self.host == os.uname().nodename

    @property
    def is_alive(self) -> bool:
        return ownership.pid_start(self.pid) == self.pid_start


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

    def exchange(self) -> Exchange:
        """Files in the meeting place."""
        return FileExchange(self._directory)

    def close(self) -> None:
        """Rank 0 takes the meeting place away."""
        if self._topology.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _announce(self) -> str:
        known = _Member.read(self._path("session"))
        if known is not None and known.is_here and known.is_alive and known.pid != os.getpid():
            raise self._taken()
        shutil.rmtree(self._directory, ignore_errors=True)
        make_directories(self._directory)
        mine = _Member.me(secrets.token_hex(8))
        write_small(self._path("session"), mine.content, durable=False)
        return mine.nonce

    def _join(self) -> str:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            session = _Member.read(self._path("session"))
            if session is not None and (session.is_alive or not session.is_here):
                claim = self._path(f"{session.nonce}.claim.{self._topology.rank}")
                if create_small(claim, _Member.me(session.nonce).content):
                    return session.nonce
                if session.is_here:
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

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _file(self, rank: int) -> str:
        return self._path(f"{self._nonce}.{self._round}.{rank}")

    def _await(self, rank: int) -> bytes:
        """Wait for a rank's file: as long as it lives, if that can be seen, else for a bounded time."""
        member = self._path(f"{self._nonce}.claim.{rank}" if rank else "session")
        deadline = time.monotonic() + self._patience_seconds
        while True:
            try:
                with open(self._file(rank), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                known = _Member.read(member)
                lives = known is not None and known.is_here and known.is_alive
                if not lives and time.monotonic() > deadline:
                    break
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
        return TorchGroup(config.start_seconds)
    if topology.world_size == 1:
        return Solo()
    launch = launch_id(environ)
    if launch is None:
        raise ValueError(
            f"topology: {topology.world_size} ranks need torch.distributed.init_process_group() before the "
            "Checkpointer, or CKPT_SERVICE_LAUNCH set to the same new text on all ranks at every start"
        )
    directory = os.path.join(ownership.service_path(root, postfix), naming.LAUNCHES, naming.launch_directory(launch))
    return LaunchGroup(directory, topology, config.resume_wait_seconds)


def subset(group: Group, ranks: list[int]) -> Group:
    """Return the group of some of the ranks; collective on all of them.

    Raises:
        ValueError: the ranks have no ``torch.distributed``.
    """
    if not isinstance(group, TorchGroup):
        raise ValueError('on_full: ranks without torch.distributed cannot vote; use on_full="block"')
    return TorchGroup(group.patience_seconds, ranks)


def launch_id(environ: Mapping[str, str]) -> str | None:
    """Return what the ranks of one start have in common and no other start has, None if nothing says it."""
    if launch := environ.get("CKPT_SERVICE_LAUNCH"):
        return launch
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchelastic {run} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm {job} {environ.get('SLURM_STEP_ID', '')} {environ.get('SLURM_RESTART_COUNT', '0')}"
    return None
