"""The start of a trainer on a run directory: the root, the group of ranks, the run lock, and the attempt. Shell."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from ckpt_service import __version__, naming, ownership
from ckpt_service.config import ServiceConfig, load_config, unknown_variables
from ckpt_service.errors import CkptError, RunDirectoryBusy, from_os_error
from ckpt_service.messages import Hello
from ckpt_service.ownership import RunLock
from ckpt_service.records import (
    Attempt,
    OnFull,
    Origin,
    TopologyRecord,
)
from ckpt_service.storage import make_directories
from trainer_hooks import group as groups
from trainer_hooks.exchange import Exchange, take_all
from trainer_hooks.group import Group
from trainer_hooks.topology import Topology

_OK, _FAILED, _BUSY = b"+", b"-", b"!"


@dataclass
class Run:
    """A run directory as one rank sees it. ``attempt`` is None until this start has written or means to.

    ``problem`` is what is wrong with the settings of this host. ``exchange`` is there from :meth:`begin` on where ranks
    have something to leave for each other. ``origin`` is what was resumed from; it goes into the record of the attempt.
    ``is_shared``: all ranks see one directory.
    """

    root: str
    postfix: str | None
    host: str
    topology: Topology
    slots: int
    on_full: OnFull
    config: ServiceConfig
    problem: ValueError | None = None
    attempt: Attempt | None = None
    origin: Origin | None = None
    is_shared: bool = True
    exchange: Exchange | None = field(default=None, repr=False)
    _group: Group | None = field(default=None, repr=False)
    _lock: RunLock | None = field(default=None, repr=False)
    _is_open: bool = field(default=False, repr=False)

    @property
    def stage_directory(self) -> str:
        """The directory of this rank's training shards."""
        return os.path.join(self.root, naming.stage_directory(self.topology.stage, self.postfix))

    def hello(self) -> Hello:
        """Return how this rank introduces itself to its daemon, under the present attempt."""
        assert self.attempt is not None
        return Hello(
            version=__version__,
            role="trainer",
            pid=os.getpid(),
            root=self.root,
            postfix=self.postfix,
            run_id=self.attempt.run_id,
            attempt=self.attempt.n,
            stage=self.topology.stage,
            tp_rank=self.topology.tp_rank,
            slots=self.slots,
            on_full=self.on_full,
        )

    @property
    def group(self) -> Group:
        """The ranks of this start; collective on all of them when it is first asked for."""
        if self._group is None:
            self._group = groups.join(self.root, self.postfix, self.topology, self.config, os.environ)
        return self._group

    def writers(self) -> Group:
        """Return the group of the ranks that write; collective on all ranks.

        Raises:
            ValueError: without ``torch.distributed`` there is none.
        """
        place = self.topology
        ranks = [rank for rank in range(place.world_size) if replace(place, rank=rank).is_writer]
        return groups.subset(self.group, ranks)

    def open(self) -> None:
        """Prove on every rank that the settings are sound and that the root can be written; collective, once.

        Raises:
            ValueError: the settings of this host are wrong; the other ranks raise ``CkptError``.
            CkptError: the root cannot be made or written, on some rank.
        """
        if not self._is_open:
            self.agree(self._prepared, b"", kind=CkptError)
            self._is_open = True

    def begin(self) -> Attempt:
        """Take the run lock and an attempt; collective on all ranks.

        Raises:
            RunDirectoryBusy: another run is alive on this directory; on all ranks.
            CkptError: lock or attempt could not be written; on all ranks.
        """
        self.open()
        if self.attempt is None:
            mine = self.agree(lambda: self._take().model_dump_json().encode(), b"", on=(0,), kind=CkptError)
            self.attempt = Attempt.model_validate_json(mine[0])
            self.is_shared = self._adopted()
            if self.topology.dp > 1 or not self.is_shared:
                self._open_exchange()
        return self.attempt

    def note_origin(self, origin: Origin, *, used: bool) -> None:
        """Write down durably what this start resumed from; collective, so that no rank goes on before it is written.

        ``used`` says that this attempt has saved already. Then another one begins with the resume: what the attempt has
        saved since the origin lies on a branch that is left, and an attempt cannot be on two branches.
        """
        self.origin = origin
        if self.attempt is not None:
            work = self._new_attempt if used else self._record_origin
            mine = self.agree(lambda: work().model_dump_json().encode(), b"", on=(0,), kind=CkptError)
            self.attempt = Attempt.model_validate_json(mine[0])
            self._adopted()

    def part(self) -> None:
        """Say that this rank needs the exchange no longer. Rank 0, where it lives, waits for all, bounded."""
        if self.exchange is None:
            return
        if self.topology.rank == 0:
            others = {rank: f"parted/{rank}" for rank in range(1, self.topology.world_size)}
            take_all(self.exchange, others, self.config.replica_seconds)
            return
        with suppress(RuntimeError, OSError):  # rank 0 has gone
            self.exchange.put(f"parted/{self.topology.rank}", b"")

    def _open_exchange(self) -> None:
        """Make the exchange on rank 0 and reach it from the others; collective."""

        def host() -> bytes:
            self.exchange, address = self.group.host_exchange()
            return address

        def reach() -> bytes:
            if self.topology.rank > 0:
                self.exchange = self.group.reach_exchange(address)
            return b""

        address = self.agree(host, b"", on=(0,), kind=CkptError)[0]
        self.agree(reach, b"", kind=CkptError)

    def _adopted(self) -> bool:
        """Have the record of the attempt on every host; return whether all ranks share one directory. Collective."""

        def adopt() -> bytes:
            assert self.attempt is not None
            return _OK if ownership.adopt_attempt(self.root, self.postfix, self.attempt) else _FAILED

        return _FAILED not in self.agree(adopt, b"", kind=CkptError)

    def agree(
        self, work: Callable[[], bytes], absent: bytes, *, on: tuple[int, ...] | None = None, kind: type[CkptError]
    ) -> list[bytes]:
        """Do ``work`` on the ranks ``on`` (all by default) and return what each gave; collective.

        Raises:
            CkptError: it failed on some rank; raised on all of them, as ``kind`` where it happened elsewhere (a run
                directory that is busy is that everywhere).
        """
        group = self.group  # before any work: who cannot meet the others must not leave traces
        failure: Exception | None = None
        mine = _OK + absent
        if on is None or self.topology.rank in on:
            try:
                mine = _OK + work()
            except CkptError as error:
                mark = _BUSY if isinstance(error, RunDirectoryBusy) else _FAILED
                failure, mine = error, mark + str(error).encode()
            except OSError as error:
                failure = from_os_error(error, op="starting", kind=kind)
                mine = _FAILED + str(failure).encode()
            except Exception as error:  # noqa: BLE001 - a user's state_dict() may raise anything; the others wait
                failure, mine = error, _FAILED + f"{type(error).__name__}: {error}".encode()
        answers = group.gather(mine)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer[:1] != _OK:
                told = RunDirectoryBusy if answer[:1] == _BUSY else kind
                raise told(f"rank {rank}: {answer[1:].decode()}")
        return [answer[1:] for answer in answers]

    def end(self) -> None:
        """Leave the group and give the run lock back."""
        self.exchange = None  # a store that is only let go of while the interpreter ends may abort the process
        if self._lock is not None:
            self._lock.release()
        if self._group is not None:
            self._group.close()

    def _take(self) -> Attempt:
        lock = RunLock(self.root, self.postfix)
        lock.acquire(self.host)
        try:
            attempt = self._new_attempt()
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        return attempt

    def _new_attempt(self) -> Attempt:
        place = self.topology
        attempt = ownership.take_attempt(
            self.root,
            self.postfix,
            ownership.Start(
                host=self.host,
                pid=os.getpid(),
                topology=TopologyRecord(pp=place.pp, dp=place.dp, tp=place.tp),
                slots=self.slots,
                started_at=utc_now(),
                launch=groups.launch_id(os.environ),
            ),
        )
        if self.origin is not None:  # it resumed before it had anything to write
            attempt = ownership.record_resume(self.root, self.postfix, attempt, self.origin)
        return attempt

    def _record_origin(self) -> Attempt:
        assert self.attempt is not None
        assert self.origin is not None
        return ownership.record_resume(self.root, self.postfix, self.attempt, self.origin)

    def _prepared(self) -> bytes:
        if self.problem is not None:
            raise self.problem
        prepare_root(self.root, self.postfix)
        return b""


def absolute_root(root: str | os.PathLike[str]) -> str:
    """Return the root as an absolute path without links.

    Raises:
        ValueError: it is no path, or one that is not text.
    """
    if not isinstance(root, (str, os.PathLike)):
        raise ValueError(f"root={root!r}: it must be a path")
    path = os.path.realpath(os.fspath(root))
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"root={path!r}: its name is not valid UTF-8, and the daemon is told it as text") from error
    return path


def prepare_root(root: str, postfix: str | None) -> None:
    """Make the root if need be, and prove that it can be written.

    Raises:
        CkptError: it cannot; says why.
    """
    service = ownership.service_path(root, postfix)
    probe = os.path.join(service, f".probe.{os.uname().nodename}.{os.getpid()}")
    try:
        make_directories(service)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
    except OSError as error:
        raise from_os_error(error, op="preparing the root", kind=CkptError, path=root) from error


def settings(environ: Mapping[str, str]) -> tuple[ServiceConfig, ValueError | None]:
    """Return the settings of this host, or the defaults and what is wrong with them.

    A mistake on one host must not keep its ranks from meeting the others, who would wait for them.
    """
    for message in unknown_variables(environ):
        warnings.warn(message, stacklevel=3)
    try:
        return load_config(environ), None
    except ValueError as error:
        return load_config({}), error


def utc_now() -> datetime:
    """Return the time in UTC, in the milliseconds that files hold."""
    now = datetime.now(timezone.utc)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)
