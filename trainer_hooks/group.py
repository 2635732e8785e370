"""The ranks of one start, able to agree with each other. Shell.

All that is needed is one collective: every rank gives some bytes and gets everybody's. With ``torch.distributed`` it
runs over a CPU (gloo) group of our own, never the default group, which may be NCCL. Without it, the ranks of one launch
meet in a directory of the run; what tells one launch from another is a launch id.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ckpt_service import naming, ownership
from ckpt_service.config import ServiceConfig
from ckpt_service.errors import CkptError, RunDirectoryBusy, from_os_error
from ckpt_service.storage import create_small, make_directories, write_small
from trainer_hooks.exchange import Exchange, FileExchange, StoreExchange
from trainer_hooks.topology import Topology

_POLL_SECONDS = 0.02
_CHUNK_BYTES = 16 << 20


class Group(Protocol):
    """The ranks of one start."""

    def gather(self, value: bytes) -> list[bytes]:
        """Return what every rank gave, by rank; to be called by all ranks, in the same order.

        Raises:
            CkptError: a rank has died, or does not answer.
        """
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

    def host_exchange(self) -> tuple[Exchange, bytes]:
        """Make a place where ranks leave values for each other; for rank 0. Returns its address as well."""
        ...

    def reach_exchange(self, address: bytes) -> Exchange:
        """Return the exchange that rank 0 has made."""
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

    def host_exchange(self) -> tuple[Exchange, bytes]:
        """Never called: there is nobody else."""
        raise AssertionError("a single rank exchanges nothing")

    def reach_exchange(self, address: bytes) -> Exchange:
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

    def gather(self, value: bytes) -> list[bytes]:
        """all_gather over the CPU group: first the lengths, then the bytes, all as long as the longest.

        Not ``all_gather_object``: it needs NumPy, which torch runs without.
        """
        try:
            return self._gathered(value)
        except RuntimeError as error:
            hint = "restart all ranks together"
            raise CkptError(f"a rank has died or does not answer: {error}", op="agree", hint=hint) from error

    def _gathered(self, value: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(lengths, torch.tensor([len(value)]), group=self._group)
        longest = max(1, *(int(length) for length in lengths))
        values = [bytearray(longest) for _ in range(self._size)]
        mine = torch.frombuffer(bytearray(value.ljust(longest, b"\0")), dtype=torch.uint8)
        dist.all_gather([torch.frombuffer(each, dtype=torch.uint8) for each in values], mine, group=self._group)
        return [bytes(each[: int(length)]) for each, length in zip(values, lengths, strict=True)]

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Send in chunks, to one rank after the other."""
        for rank in ranks:
            for start in range(0, len(data), _CHUNK_BYTES):
                dist.send(torch.frombuffer(data[start : start + _CHUNK_BYTES], dtype=torch.uint8), rank, self._group)

    def receive(self, into: memoryview, source: int) -> None:
        """Receive in the same chunks."""
        for start in range(0, len(into), _CHUNK_BYTES):
            dist.recv(torch.frombuffer(into[start : start + _CHUNK_BYTES], dtype=torch.uint8), source, self._group)

    def host_exchange(self) -> tuple[Exchange, bytes]:
        """Serve a store in this process."""
        host = os.environ.get("MASTER_ADDR") or os.uname().nodename
        try:
            exchange, port = StoreExchange.serve(host, self.patience_seconds)
        except RuntimeError as error:
            raise CkptError(f"no store can be served at {host}: {error}", op="start") from error
        return exchange, json.dumps([host, port]).encode()

    def reach_exchange(self, address: bytes) -> Exchange:
        """Connect to the store of rank 0."""
        host, port = json.loads(address)
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

    @property
    def is_another(self) -> bool:
        """Whether it is another process of this host, and lives."""
        return self.is_here and self.is_alive and self.pid != os.getpid()


_joined: set[str] = set()  # the sessions that this process has been in


class LaunchGroup:
    """The ranks of one launch without ``torch.distributed``: they meet in a directory that all of them see.

    Rank 0 announces a session; each other rank claims its place in it, once: a rank that restarts alone finds its place
    taken, or rank 0 the places of the others, and is refused, since the others still hold the state of before. Who
    leaves says so; what a rank has answered stays for those that have yet to read it, and the last one clears it away.
    """

    can_send = False

    def __init__(self, directory: str, topology: Topology, patience_seconds: float) -> None:
        self._directory = directory
        self._topology = topology
        self._patience_seconds = patience_seconds
        self._round = 0
        try:
            make_directories(directory)
        except OSError as error:
            raise from_os_error(error, op="preparing the root", kind=CkptError, path=directory) from error
        self._nonce = self._announce() if topology.rank == 0 else self._join()

    def gather(self, value: bytes) -> list[bytes]:
        """Write one file and read everybody's."""
        self._round += 1
        write_small(self._file(self._topology.rank), value, durable=False)
        answers = [self._await(rank) for rank in range(self._topology.world_size)]
        # Who has answered this round has read all of the one before, so nobody needs what came before that.
        with contextlib.suppress(OSError):
            os.unlink(self._file(self._topology.rank, rounds_ago=2))
        return answers

    def send(self, data: memoryview, ranks: list[int]) -> None:
        """Never called: all ranks see one directory."""
        raise AssertionError("ranks without torch.distributed share the directory")

    def receive(self, into: memoryview, source: int) -> None:
        """Never called: all ranks see one directory."""
        raise AssertionError("ranks without torch.distributed share the directory")

    def host_exchange(self) -> tuple[Exchange, bytes]:
        """Files in the meeting place."""
        return self.reach_exchange(b""), b""

    def reach_exchange(self, address: bytes) -> Exchange:
        """Files in the meeting place."""
        return FileExchange(self._directory, prefix=f"{self._nonce}.value")

    def close(self) -> None:
        """Leave; the last one takes the session's files away, and the meeting place if nobody meets there again."""
        with contextlib.suppress(OSError):  # what stays is swept by a later start
            if self._topology.rank == 0 and _Member.read(self._path("session")) == _Member.me(self._nonce):
                os.unlink(self._path("session"))
            write_small(self._left(self._topology.rank), b"", durable=False)
            if all(os.path.exists(self._left(rank)) for rank in range(self._topology.world_size)):
                # The marks of leaving go last: as long as a claim is seen, so is that its session is over.
                mine = [name for name in os.listdir(self._directory) if name.startswith(f"{self._nonce}.")]
                for name in sorted(mine, key=lambda name: ".left." in name):
                    with contextlib.suppress(FileNotFoundError):  # another rank is clearing away as well
                        os.unlink(self._path(name))
                os.rmdir(self._directory)

    def _announce(self) -> str:
        known = _Member.read(self._path("session"))
        again = known is not None and known == _Member.me(known.nonce)  # this process, after a Checkpointer before
        if not again and any(member.is_another for member in _members(self._directory, closed=False)):
            raise self._taken()
        _sweep(os.path.dirname(self._directory))
        mine = _Member.me(secrets.token_hex(8))
        while True:
            make_directories(self._directory)
            with contextlib.suppress(FileNotFoundError):  # the last one of an earlier session has just taken it away
                write_small(self._path("session"), mine.content, durable=False)
                return mine.nonce

    def _join(self) -> str:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            session = _Member.read(self._path("session"))
            # One that this process was in before is over, or about to be: rank 0 has yet to begin again.
            if session is not None and session.nonce not in _joined and (session.is_alive or not session.is_here):
                claim = self._path(f"{session.nonce}.claim.{self._topology.rank}")
                with contextlib.suppress(FileNotFoundError):  # rank 0 sweeps what an earlier launch has left
                    if create_small(claim, _Member.me(session.nonce).content):
                        _joined.add(session.nonce)
                        return session.nonce
                    if session.is_here:
                        raise self._taken()
            time.sleep(_POLL_SECONDS)
        raise CkptError(
            f"rank {self._topology.rank} waited {self._patience_seconds:g} s for rank 0 of this launch",
            op="start",
            path=self._directory,
            hint="start all ranks together, with the same launch id",
        )

    def _taken(self) -> RunDirectoryBusy:
        return RunDirectoryBusy(
            f"rank {self._topology.rank} has started already in this launch, or others of it are still alive",
            path=self._directory,
            hint="restart all ranks together; the others hold the state of before",
        )

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _left(self, rank: int) -> str:
        return self._path(f"{self._nonce}.left.{rank}")

    def _file(self, rank: int, *, rounds_ago: int = 0) -> str:
        return self._path(f"{self._nonce}.{self._round - rounds_ago}.{rank}")

    def _await(self, rank: int) -> bytes:
        """Wait for a rank's file: as long as it lives, if that can be seen, else for a bounded time."""
        member = self._path(f"{self._nonce}.claim.{rank}" if rank else "session")
        deadline = time.monotonic() + self._patience_seconds
        while True:
            has_left = os.path.exists(self._left(rank))  # looked for first: it answers before it leaves
            try:
                with open(self._file(rank), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                known = _Member.read(member)
                lives = known is not None and known.is_here and known.is_alive
                if has_left or (not lives and time.monotonic() > deadline):
                    break
                time.sleep(_POLL_SECONDS)
        why = "has left" if has_left else f"did not answer within {self._patience_seconds:g} s"
        raise CkptError(f"rank {rank} {why}", op="agree", hint="restart all ranks together")


def _members(directory: str, *, closed: bool) -> list[_Member]:
    """Return all processes that have announced or claimed something in a meeting place, also in ``closed`` sessions."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    over = {name.partition(".")[0] for name in names if name.endswith(".left.0")}
    found = [_Member.read(os.path.join(directory, name)) for name in names if name == "session" or ".claim." in name]
    return [member for member in found if member is not None and (closed or member.nonce not in over)]


def _sweep(launches: str) -> None:
    """Take away the meeting places whose ranks have all died on this host."""
    for entry in os.listdir(launches) if os.path.isdir(launches) else []:
        directory = os.path.join(launches, entry)
        members = _members(directory, closed=True)
        if members and all(member.is_here and not member.is_alive for member in members):
            shutil.rmtree(directory, ignore_errors=True)


def join(
    root: str, postfix: str | None, topology: Topology, config: ServiceConfig, environ: Mapping[str, str]
) -> Group:
    """Return the group of this start; collective on all ranks.

    Raises:
        ValueError: there are several ranks and nothing that brings them together; names both ways.
        RunDirectoryBusy: this rank has started already in this launch.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        group = TorchGroup(config.start_seconds)
        _require_one_mesh(group, topology)
        return group
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


def _require_one_mesh(group: Group, topology: Topology) -> None:
    """Raise ``ValueError``, on all ranks, where some rank has another mesh or another place than its rank."""
    sizes = (topology.pp, topology.dp, topology.tp)
    said = [tuple(json.loads(answer)) for answer in group.gather(json.dumps([topology.rank, *sizes]).encode())]
    for rank in sorted(range(len(said)), key=lambda rank: rank != dist.get_rank()):  # one's own mistake first
        claimed, pp, dp, tp = said[rank]
        if (claimed, pp * dp * tp) != (rank, len(said)):
            raise ValueError(
                f"topology: rank {claimed} of {pp * dp * tp}, and torch.distributed says rank {rank} of {len(said)}"
            )
        if (pp, dp, tp) != said[0][1:]:
            raise ValueError(f"topology: rank {rank} has pp, dp, tp = {pp, dp, tp}, and rank 0 has {said[0][1:]}")


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
