"""What a training loop holds: track, save, resume. The facade over everything else in this package."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

from ckpt_service import __version__, naming, ownership, scan, writer
from ckpt_service.catalog import CheckpointId, State, build
from ckpt_service.config import load_config
from ckpt_service.errors import CkptError, RunDirectoryBusy, SaveFailed, ServiceUnavailable, StateMismatch
from ckpt_service.records import Hello, Origin, ShardManifest
from ckpt_service.retention import RetentionPolicy
from ckpt_service.storage import LocalDirectory
from trainer_hooks import layout, replicas, resume
from trainer_hooks.admission import OnFull
from trainer_hooks.capture import blueprint
from trainer_hooks.choice import candidates
from trainer_hooks.client import ServiceClient
from trainer_hooks.launch import Service
from trainer_hooks.load import LoadedShard
from trainer_hooks.peers import PeerNews
from trainer_hooks.resume import ResumePoint
from trainer_hooks.saving import Saver
from trainer_hooks.start import Run, prepare_root, utc_now
from trainer_hooks.tickets import SaveTicket
from trainer_hooks.topology import Topology
from trainer_hooks.tracking import Tracked
from trainer_hooks.values import Allowed

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training loop without stopping it, and resumes from the last checkpoint that all ranks have.

    Making one is collective on all ranks with ``async_ckpt=True``, and so are ``resume`` and, with
    ``async_ckpt=False``, the first ``save``. Everything else is local.

    Args:
        root: the directory of the run; made if it is not there.
        topology: the place of this rank; by default it is the only one.
        postfix: tells several runs in one root apart; part of the directory names.
        async_ckpt: hand snapshots to the daemon. False writes the same bytes at the same names before ``save`` returns.
        keep_last: how many complete checkpoints to keep, at least 1.
        retention: the whole policy, instead of ``keep_last``.
        slots: how many snapshots may be on their way at once; each takes the size of the state in shared memory.
        on_full: what ``save`` does when all slots are taken. "block" waits for the disk; "skip" drops the new snapshot;
            "replace" drops the oldest one whose write has not begun. Both drop it on all ranks or on none, for which
            ``save`` becomes collective on the ranks that write.
        staging: "overlap" or "blocking". Both copy the state before ``save`` returns in this release.
        service: "auto" finds or starts this user's daemon for the run directory; a path is the socket of another one.
        trust: classes, beyond plain values, that a state may hold.

    Raises:
        ValueError: an option is wrong; names it.
        ServiceUnavailable: no daemon answers on some rank.
        RunDirectoryBusy: another run trains on this root, or this rank has restarted alone.
        CkptError: the root cannot be written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] = ".",
        *,
        topology: Topology | None = None,
        postfix: str | None = None,
        async_ckpt: bool = True,
        keep_last: int = 2,
        retention: RetentionPolicy | None = None,
        slots: int = 2,
        on_full: OnFull = "block",
        staging: Literal["overlap", "blocking"] = "overlap",
        service: str | os.PathLike[str] = "auto",
        trust: Iterable[type] = (),
    ) -> None:
        _one_of("on_full", on_full, ("block", "skip", "replace"))
        _one_of("staging", staging, ("overlap", "blocking"))
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots={slots!r}: it must be a whole number of at least 1")
        postfix = naming.check_postfix(postfix)
        policy = retention or RetentionPolicy(keep_last)
        place = topology or Topology()
        config = load_config(os.environ)
        self._allowed = Allowed(trust)
        self._tracked = Tracked()
        self._sequence = 0
        self._repeats: Counter[tuple[int, int]] = Counter()
        self._last: SaveTicket | None = None
        self._closed = False
        self._resumed = False
        self._pid = os.getpid()
        host = ownership.host_name(os.environ)
        self._run = Run(prepare_root(root, postfix), postfix, host, place, slots, config)
        client: ServiceClient | None = None
        try:
            client = self._connected(service) if async_ckpt else None
            self._saver = Saver(self._run, policy, client, on_full)
        except BaseException:
            if client is not None:
                client.close()
            self._run.end()
            raise
        atexit.register(self._at_exit)

    # --- what a loop calls --------------------------------------------------------------------------------------------

    def track(self, **stateful: Any) -> None:
        """Name the objects whose state ``save`` collects and ``resume`` restores; None values are left out.

        Raises:
            ValueError: an object has no ``state_dict`` and ``load_state_dict``.
        """
        for name, thing in stateful.items():
            if thing is not None:
                self._tracked.add(name, thing)

    def save(self, step: int, epoch: int = 0, state: Any = None, *, final: bool = False) -> SaveTicket:
        """Snapshot the state and return; the write goes on in the background.

        Args:
            step: the training step, part of the file's name.
            epoch: the epoch, part of the file's name.
            state: what to write, exactly. Without it: the tracked objects, their RNG, ``epoch``, ``step``, ``stage``.
            final: this is the last save of the run; it is neither skipped nor replaced.

        Returns:
            The ticket; on a rank that does not write it is done at once. A failure of the write is found there, as a
            warning at the next ``save``, and in the status; it never ends the training.

        Raises:
            ValueError: step or epoch is not a whole number, or (``StateRefused``) the state holds something that could
                not be loaded again; names the key path.
        """
        self._sequence += 1
        self._require_usable()
        _require_count("step", step)
        _require_count("epoch", epoch)
        self._repeats[(step, epoch)] += 1
        if state is None and not self._tracked:
            raise ValueError("state: give a state to save, or name objects with track() first")
        self._saver.warn_of_failures()
        ticket = SaveTicket(step, epoch)
        if self._run.attempt is None:
            try:
                self._run.begin()
            except RunDirectoryBusy:
                raise
            except CkptError as error:
                self._last = ticket
                self._saver.fail(ticket, SaveFailed(f"step {step} was not saved: {error}", op="save", step=step))
                return ticket
        self._warn_of_strangers()
        manifest = self._manifest(step, epoch)
        if not self._run.topology.is_writer:
            self._contribute(manifest, tracked=state is None)
            ticket.resolve(None)
            return ticket
        if not self._saver.admit(
            manifest, ticket, final=final
        ):  # before anything that may fail on this rank alone: it may vote
            self._last = ticket
            return ticket
        shared = state is None and manifest.dp > 1
        if state is None:
            state = {"epoch": epoch, "step": step, "stage": manifest.stage, **self._tracked.collect()}
        plan = blueprint(layout.plan(state, self._allowed))
        self._last = ticket
        self._saver.save(plan, manifest, ticket, with_replicas=shared, final=final)
        return ticket

    def resume(self, step: int | None = None, epoch: int | None = None, *, strict: bool = True) -> ResumePoint | None:
        """Load the newest checkpoint that all ranks have, or the one that is named, into the tracked objects.

        Collective: all ranks load the same one, or all raise, and then nothing has been touched anywhere.

        Args:
            step: roll back to this step; what was saved after it counts no longer.
            epoch: tells checkpoints of the same step apart.
            strict: raise when the checkpoint lacks the state of something that is tracked, instead of warning.

        Returns:
            Where training goes on, or None when there is nothing to resume from.

        Raises:
            ValueError: the named checkpoint is not there.
            NoUsableCheckpoint: there are checkpoints, and all are damaged.
            NewerFormat: the newest was saved by a newer release, and none is named.
            UntrustedClass: the checkpoint holds an object of a class that ``trust`` does not name.
            LayoutMismatch: they were saved with another pp or tp.
            StateMismatch: on some rank the checkpoint does not fit what is tracked.
        """
        self._require_usable()
        if step is None and epoch is not None:
            raise ValueError("epoch: give the step as well")
        self._settle()
        found = build(resume.evidence(self._run))
        choice = candidates(found, self._run.topology, step, epoch)
        taken = resume.load_agreed(self._run, choice, self._allowed, explicit=step is not None)
        if taken is None:
            lacking = (State.PARTIAL, State.DEAD, State.LEGACY)  # legacy ones with a file for every rank are taken
            partial = [c.id.step for c in found.of_kind("train") if c.state in lacking]
            if partial:
                warnings.warn(f"nothing to resume from: only partial checkpoints, of steps {partial}", stacklevel=2)
            return None
        point, loaded = taken
        self._resumed = True  # in strict mode it may still be refused; the user has looked at what is there
        mine = self._with_replica(loaded, point)
        self._run.agree(lambda: self._checked(mine, strict=strict), b"", kind=StateMismatch)
        if point.attempt:
            self._run.note_origin(Origin(attempt=point.attempt, sequence=point.sequence, explicit=step is not None))
        self._run.agree(lambda: self._restored(mine), b"", kind=StateMismatch)
        if loaded.replica is None and self._run.topology.dp_rank > 0 and self._tracked:
            self._seed(point)
        return point

    def latest(self) -> CheckpointId | None:
        """Return the newest complete checkpoint of this run as this host sees it, or None."""
        newest = scan.load_catalog(self._run.root, self._run.postfix).newest_complete()
        return newest.id if newest else None

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything saved so far is committed or has failed.

        Raises:
            TimeoutError: ``timeout`` seconds are over.
            SaveFailed: nothing has moved for ``stall_seconds``; names what is not safe.
        """
        if not self._closed:
            self._saver.drain(timeout)

    def close(self) -> None:
        """Wait for what is pending and leave. Twice is fine.

        Raises:
            SaveFailed: the last save did not become a checkpoint.
        """
        if self._closed or self._pid != os.getpid():
            return
        problem: SaveFailed | None = None
        try:
            self.drain()
        except SaveFailed as error:
            problem = error
        finally:
            self._closed = True
            atexit.unregister(self._at_exit)
            self._saver.close()
            self._run.end()
        if problem is None and self._last is not None and self._last.committed.done():
            failure = self._last.committed.exception()
            problem = failure if isinstance(failure, SaveFailed) else None
        if problem is not None:
            raise problem

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except SaveFailed as failure:
            if error is None:
                raise
            log.error("%s", failure)  # what ended the body matters more

    # --- start --------------------------------------------------------------------------------------------------------

    def _connected(self, service: str | os.PathLike[str]) -> ServiceClient | None:
        """Take the attempt and connect the writers to their daemons; all ranks succeed or all raise."""
        run, place = self._run, self._run.topology
        attempt = run.begin()
        hello = Hello(
            version=__version__,
            role="trainer",
            pid=os.getpid(),
            root=run.root,
            postfix=run.postfix,
            run_id=attempt.run_id,
            attempt=attempt.n,
            stage=place.stage,
            tp_rank=place.tp_rank,
            slots=run.slots,
        )
        peers = PeerNews(run, run.exchange) if run.exchange is not None and not run.is_shared else None
        socket = None if service == "auto" else os.path.abspath(service)
        daemon = Service(run.root, run.postfix, run.host, socket, os.environ)
        client = ServiceClient(daemon, hello, run.config, peers)

        def start() -> bytes:
            if place.is_writer:
                client.start()
            return b""

        try:
            run.agree(start, b"", kind=ServiceUnavailable)
        except CkptError:
            client.close()
            raise
        return client if place.is_writer else None

    # --- save ---------------------------------------------------------------------------------------------------------

    def _manifest(self, step: int, epoch: int) -> ShardManifest:
        """Return the manifest of this save; its size and its count of tensors are filled in with the image."""
        attempt, place = self._run.attempt, self._run.topology
        assert attempt is not None
        return ShardManifest(
            kind="train",
            run_id=attempt.run_id,
            attempt=attempt.n,
            sequence=self._sequence,
            repeat=self._repeats[(step, epoch)] - 1,
            step=step,
            epoch=epoch,
            stage=place.stage,
            tp_rank=place.tp_rank,
            dp_rank=place.dp_rank,
            pp=place.pp,
            tp=place.tp,
            dp=place.dp,
            created_at=utc_now(),
            producer=f"ckpt-service {__version__}",
            bytes=0,
            tensors=0,
        )

    def _contribute(self, manifest: ShardManifest, *, tracked: bool) -> None:
        """Leave for the writer what only this replica has; without it the save goes on, and says who is absent."""
        exchange = self._run.exchange
        if not tracked or exchange is None:
            return
        content = replicas.packed(self._tracked.collect_own(), manifest, self._allowed)
        try:
            exchange.take(replicas.key(manifest, manifest.dp_rank, saves_ago=self._run.slots + 2))  # nobody wanted it
            exchange.put(replicas.key(manifest, manifest.dp_rank), content)
        except (RuntimeError, OSError) as error:
            warnings.warn(f"step {manifest.step}: this replica's random numbers are not saved: {error}", stacklevel=3)

    def _warn_of_strangers(self) -> None:
        """Tell a user who starts afresh in a used directory what lies there; resume() would have continued it."""
        if self._sequence > 1 or self._resumed or self._run.topology.rank > 0:
            return
        try:
            there = scan.load_catalog(self._run.root, self._run.postfix).of_kind("train")
        except OSError as error:
            log.warning("what lies in %s could not be listed: %s", self._run.root, error)
            return
        if there:
            newest = there[0].id
            warnings.warn(
                f"{self._run.root} holds {len(there)} checkpoints of earlier runs (the newest: step {newest.step} "
                f"epoch {newest.epoch}) and resume() was not called: they stay, and this run has a history of its own",
                stacklevel=3,
            )

    # --- resume -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let older attempts finish what the daemon holds of theirs, then clear away what they left half written."""
        attempt, place = self._run.attempt, self._run.topology
        if attempt is None or not place.is_writer:
            return
        if not self._saver.settle():
            seconds = self._run.config.resume_wait_seconds
            warnings.warn(f"older snapshots were not written within {seconds} s and are dropped", stacklevel=3)
        try:
            with LocalDirectory.open(self._run.stage_directory) as directory:
                writer.sweep(directory, lambda name: name.attempt < attempt.n and _tp_rank(name.final) == place.tp_rank)
        except OSError as error:
            log.warning("temporary files could not be cleared away: %s", error)

    def _with_replica(self, loaded: LoadedShard, point: ResumePoint) -> Any:
        return loaded.state if loaded.replica is None else {**loaded.state, **loaded.replica}

    def _checked(self, state: Any, *, strict: bool) -> bytes:
        if self._tracked:
            self._tracked.check(state, strict=strict)
        return b""

    def _restored(self, state: Any) -> bytes:
        self._tracked.restore(state)
        return b""

    def _seed(self, point: ResumePoint) -> None:
        """Give a replica that the checkpoint does not know random numbers of its own."""
        attempt = self._run.attempt
        run_id = attempt.run_id if attempt else self._run.root
        replicas.seed_all(replicas.derived_seed(run_id, point.sequence, self._run.topology))
        warnings.warn(
            f"step {point.step} holds no random numbers of data-parallel rank {self._run.topology.dp_rank}: it starts "
            "from a seed derived from the run and the rank",
            stacklevel=3,
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def _require_usable(self) -> None:
        if self._closed:
            raise ValueError("this Checkpointer is closed")
        if self._pid != os.getpid():
            raise ValueError(f"this Checkpointer belongs to process {self._pid}; make one after the fork")

    def _at_exit(self) -> None:
        """Wait for what is pending at the end of an interpreter that did not call ``close()``."""
        if self._pid != os.getpid():
            return
        try:
            self.close()
        except SaveFailed as error:
            print(f"ckpt-service: the last save was lost: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)  # an exception here would be printed, and the exit code stay 0


def _tp_rank(final: str) -> int | None:
    parsed = naming.parse_shard(final)
    return (parsed.tp_rank or 0) if parsed is not None else None


def _one_of(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r}: it must be one of {', '.join(map(repr, known))}")


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 0")
