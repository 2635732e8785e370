"""What a training loop holds: track, save, resume. The facade over everything else in this package."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ckpt_service import __version__, naming, ownership, prune, scan, writer
from ckpt_service.catalog import CheckpointId, State
from ckpt_service.config import load_config
from ckpt_service.errors import CkptError, SaveFailed, from_os_error
from ckpt_service.naming import Kind
from ckpt_service.records import Attempt, Hello, Offer, Origin, Retention, ShardManifest, TopologyRecord
from ckpt_service.retention import RetentionPolicy
from ckpt_service.storage import LocalDirectory, make_directories
from ckpt_service.writer import RateLimit, Snapshot, Watcher, WriteOptions
from trainer_hooks import layout, resume
from trainer_hooks.capture import Blueprint, blueprint, capture
from trainer_hooks.client import Pending, ServiceClient
from trainer_hooks.launch import Service
from trainer_hooks.resume import ResumePoint
from trainer_hooks.slots import Slot, SlotPool
from trainer_hooks.tickets import SaveTicket
from trainer_hooks.topology import Topology
from trainer_hooks.tracking import Tracked
from trainer_hooks.values import Allowed

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training loop without stopping it, and resumes from the last checkpoint that is whole.

    Args:
        root: the directory of the run; made if it is not there.
        topology: the place of this rank.
        postfix: tells several runs in one root apart; part of the directory names.
        async_ckpt: hand snapshots to the daemon. False writes the same bytes at the same names before ``save`` returns.
        keep_last: how many complete checkpoints to keep, at least 1.
        retention: the whole policy, instead of ``keep_last``.
        slots: how many snapshots may be on their way at once; each takes the size of the state in shared memory.
        on_full: what ``save`` does when all slots are taken; "block" waits for the disk.
        staging: "overlap" or "blocking". Both copy the state before ``save`` returns in this release.
        service: "auto" finds or starts this user's daemon for the run directory; a path is the socket of an external
        one. trust: classes, beyond plain values, that a state may hold.

    Raises:
        ValueError: an option is wrong; names it.
        ServiceUnavailable: no daemon answers.
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
        on_full: Literal["block"] = "block",
        staging: Literal["overlap", "blocking"] = "overlap",
        service: str | os.PathLike[str] = "auto",
        trust: Iterable[type] = (),
    ) -> None:
        _one_of("on_full", on_full, ("block",))
        _one_of("staging", staging, ("overlap", "blocking"))
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots={slots!r}: it must be a whole number of at least 1")
        self._topology = topology or Topology()
        if self._topology.world_size > 1:
            raise ValueError(f"topology={self._topology}: this release saves from one rank only")
        self._postfix = naming.check_postfix(postfix)
        self._policy = retention or RetentionPolicy(keep_last)
        self._allowed = Allowed(trust)
        self._config = load_config(os.environ)
        self._host = ownership.host_name(os.environ)
        self._root = _prepared_root(root, self._postfix)
        self._async = async_ckpt
        self._tracked = Tracked()
        self._pool = SlotPool(slots)
        self._sequences: Counter[Kind] = Counter()
        self._repeats: Counter[tuple[Kind, int, int]] = Counter()
        self._failures: deque[SaveFailed] = deque()
        self._last: SaveTicket | None = None
        self._attempt: Attempt | None = None
        self._origin: Origin | None = None
        self._client: ServiceClient | None = None
        self._closed = False
        self._pid = os.getpid()
        if async_ckpt:
            self._start(slots, None if service == "auto" else os.path.abspath(service))
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
            final: this is the last save of the run.

        Returns:
            The ticket. A failure of the write is found there, as a warning at the next ``save``, and in the status;
            it never ends the training.

        Raises:
            ValueError: step or epoch is not a whole number, or (``StateRefused``) the state holds something that could
                not be loaded again; names the key path.
        """
        self._sequences["train"] += 1
        self._require_usable()
        _require_count("step", step)
        _require_count("epoch", epoch)
        self._warn_of_failures()
        if state is None:
            state = self._collected(step, epoch)
        ticket = SaveTicket(step, epoch)
        self._last = ticket
        plan = blueprint(layout.plan(state, self._allowed))
        try:
            manifest = self._manifest(plan, step, epoch)
            if self._async:
                self._hand_over(plan, manifest, ticket)
            else:
                self._write(plan, manifest, ticket)
        except SaveFailed as error:
            self._failed(ticket, error)
        return ticket

    def resume(self, step: int | None = None, epoch: int | None = None, *, strict: bool = True) -> ResumePoint | None:
        """Load the newest complete checkpoint of this run, or the one that is named, into the tracked objects.

        Args:
            step: roll back to this step; what was saved after it counts no longer.
            epoch: tells checkpoints of the same step apart.
            strict: raise when the checkpoint lacks the state of something that is tracked, instead of warning.

        Returns:
            Where training goes on, or None when there is nothing to resume from.

        Raises:
            ValueError: the named checkpoint is not there.
            NoUsableCheckpoint: there are checkpoints, and all are damaged.
            LayoutMismatch: they were saved with another pp or tp.
            StateMismatch: the checkpoint does not fit what is tracked; nothing was touched.
        """
        self._require_usable()
        if step is None and epoch is not None:
            raise ValueError("epoch: give the step as well")
        self._settle()
        catalog = scan.load_catalog(self._root, self._postfix)
        choice = resume.candidates(catalog, self._topology, step, epoch)
        point = resume.load_first(choice, self._topology, self._allowed, explicit=step is not None)
        if point is None:
            partial = [c.id.step for c in catalog.of_kind("train") if c.state in (State.PARTIAL, State.DEAD)]
            if partial:
                warnings.warn(f"nothing to resume from: only partial checkpoints, of steps {partial}", stacklevel=2)
            return None
        if self._tracked:
            self._tracked.check(point.state, strict=strict)
        if point.attempt:
            self._origin = Origin(attempt=point.attempt, sequence=point.sequence, explicit=step is not None)
        if self._attempt is not None and self._origin is not None:
            self._attempt = ownership.record_resume(self._root, self._postfix, self._attempt, self._origin)
        self._tracked.restore(point.state)
        return point

    def latest(self) -> CheckpointId | None:
        """Return the newest complete checkpoint of this run, or None."""
        newest = scan.load_catalog(self._root, self._postfix).newest_complete()
        return newest.id if newest else None

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything saved so far is committed or has failed.

        Raises:
            TimeoutError: ``timeout`` seconds are over.
            SaveFailed: nothing has moved for ``stall_seconds``; names what is not safe.
        """
        if self._client is not None and not self._closed:
            self._client.wait_idle(timeout)

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
            if self._client is not None:
                self._client.close()
            self._pool.close()
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

    def _start(self, slots: int, socket: str | None) -> None:
        attempt = self._take_attempt(slots)
        hello = Hello(
            version=__version__,
            role="trainer",
            pid=os.getpid(),
            root=self._root,
            postfix=self._postfix,
            run_id=attempt.run_id,
            attempt=attempt.n,
            stage=self._topology.stage,
            tp_rank=self._topology.tp_rank,
            slots=slots,
        )
        service = Service(self._root, self._postfix, self._host, socket, os.environ)
        self._client = ServiceClient(service, hello, self._config)
        self._client.start()

    def _take_attempt(self, slots: int) -> Attempt:
        place = self._topology
        start = ownership.Start(
            host=self._host,
            pid=os.getpid(),
            topology=TopologyRecord(pp=place.pp, dp=place.dp, tp=place.tp),
            slots=slots,
            started_at=_now(),
        )
        attempt = ownership.take_attempt(self._root, self._postfix, start)
        if self._origin is not None:  # resumed before this object had written anything
            attempt = ownership.record_resume(self._root, self._postfix, attempt, self._origin)
        self._attempt = attempt
        return attempt

    def _settle(self) -> None:
        """Let older attempts finish what the daemon holds of theirs, then clear away what they left half written."""
        if self._client is None or self._attempt is None:
            return
        if not self._client.settle():
            warnings.warn(
                f"older snapshots were not written within {self._config.resume_wait_seconds} s and are dropped",
                stacklevel=3,
            )
        number = self._attempt.n
        try:
            with LocalDirectory.open(self._directory()) as directory:
                writer.sweep(directory, lambda name: name.attempt < number and self._is_mine(name.final))
        except OSError as error:
            log.warning("temporary files could not be cleared away: %s", error)

    def _is_mine(self, final: str) -> bool:
        parsed = naming.parse_shard(final)
        return parsed is not None and (parsed.tp_rank or 0) == self._topology.tp_rank

    # --- save ---------------------------------------------------------------------------------------------------------

    def _collected(self, step: int, epoch: int) -> dict[str, Any]:
        if not self._tracked:
            raise ValueError("state: give a state to save, or name objects with track() first")
        return {"epoch": epoch, "step": step, "stage": self._topology.stage, **self._tracked.collect()}

    def _manifest(self, plan: Blueprint, step: int, epoch: int) -> ShardManifest:
        attempt = self._attempt or self._take_attempt(self._pool.count)
        if not self._repeats:
            self._warn_of_strangers(attempt)
        place = self._topology
        self._repeats[("train", step, epoch)] += 1
        return ShardManifest(
            kind="train",
            run_id=attempt.run_id,
            attempt=attempt.n,
            sequence=self._sequences["train"],
            repeat=self._repeats[("train", step, epoch)] - 1,
            step=step,
            epoch=epoch,
            stage=place.stage,
            tp_rank=place.tp_rank,
            dp_rank=place.dp_rank,
            pp=place.pp,
            tp=place.tp,
            dp=place.dp,
            created_at=_now(),
            producer=f"ckpt-service {__version__}",
            bytes=plan.layout.nbytes,
            tensors=plan.plan.tensors,
        )

    def _hand_over(self, plan: Blueprint, manifest: ShardManifest, ticket: SaveTicket) -> None:
        client = self._client
        assert client is not None
        began = time.monotonic()
        slot = self._pool.take(plan.layout.nbytes, lambda: not client.is_stalled(began))
        if slot is None:
            raise SaveFailed(
                f"step {manifest.step} was not saved: all {self._pool.count} slots are taken and nothing has moved "
                f"for {self._config.stall_seconds} s",
                op="save",
                step=manifest.step,
                hint="look at the status file and the daemon's log",
            )
        self._captured(plan, manifest, slot).view.release()
        ticket.staged.set_result(None)
        ticket.committed.add_done_callback(lambda future: self._note(future.exception()))
        offer = Offer(manifest=manifest, directory=self._directory(), umask=_umask(), retention=self._retention())
        client.submit(Pending(offer, slot.fd, ticket, lambda reusable: self._pool.give_back(slot, reusable=reusable)))

    def _write(self, plan: Blueprint, manifest: ShardManifest, ticket: SaveTicket) -> None:
        """Do here and now what the daemon would do."""
        slot = self._pool.take(plan.layout.nbytes, lambda: False)
        assert slot is not None, "a synchronous save gives its slot back before it returns"
        snapshot = self._captured(plan, manifest, slot)
        try:
            with LocalDirectory.open(self._directory()) as directory:
                writer.commit(
                    snapshot,
                    directory,
                    mode=0o666 & ~_umask(),
                    host=self._host,
                    token=os.urandom(4).hex(),
                    options=WriteOptions(
                        self._config.writer_threads,
                        self._config.chunk_bytes,
                        self._config.direct_io,
                        RateLimit(self._config.rate_limit_bytes_per_second),
                    ),
                    watcher=Watcher(),
                )
                ticket.resolve(Path(directory.path, snapshot.final_name))
                self._retain(manifest, directory)
        except OSError as error:
            raise from_os_error(error, op=f"saving step {manifest.step}", kind=SaveFailed) from error
        finally:
            snapshot.view.release()
            self._pool.give_back(slot)

    def _retain(self, manifest: ShardManifest, directory: LocalDirectory) -> None:
        """Delete what is too old. What cannot be deleted is tried again after the next save; the commit stands."""
        try:
            errors = prune.retain(self._root, self._postfix, manifest, directory, self._retention()).errors
        except OSError as error:
            errors = (from_os_error(error, op="retention", kind=CkptError, path=directory.path),)
        for problem in errors:
            warnings.warn(str(problem), stacklevel=5)

    def _captured(self, plan: Blueprint, manifest: ShardManifest, slot: Slot) -> Snapshot:
        try:
            return capture(plan, manifest, slot)
        except BaseException:
            self._pool.give_back(slot)
            raise

    def _retention(self) -> Retention:
        return Retention(keep_last=self._policy.keep_last, keep_every=self._policy.keep_every)

    def _directory(self) -> str:
        return os.path.join(self._root, naming.stage_directory(self._topology.stage, self._postfix))

    # --- failures -----------------------------------------------------------------------------------------------------

    def _failed(self, ticket: SaveTicket, error: SaveFailed) -> None:
        ticket.fail(error)
        self._note(error)

    def _note(self, error: BaseException | None) -> None:
        if isinstance(error, SaveFailed):
            log.error("%s", error)
            self._failures.append(error)

    def _warn_of_failures(self) -> None:
        while self._failures:
            warnings.warn(f"an earlier save failed: {self._failures.popleft()}", stacklevel=3)

    def _warn_of_strangers(self, attempt: Attempt) -> None:
        """Tell a user who starts afresh in a used directory what lies there; resume() would have continued it."""
        if attempt.resumed_from is not None:
            return
        there = scan.load_catalog(self._root, self._postfix).of_kind("train")
        if there:
            newest = there[0].id
            warnings.warn(
                f"{self._root} holds {len(there)} checkpoints of earlier runs (the newest: step {newest.step} epoch "
                f"{newest.epoch}) and resume() was not called: they stay, and this run starts a history of its own",
                stacklevel=4,
            )

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


def _prepared_root(root: str | os.PathLike[str], postfix: str | None) -> str:
    """Make the root absolute, free of links, and prove that it can be written."""
    path = os.path.realpath(os.fspath(root))
    service = ownership.service_path(path, postfix)
    probe = os.path.join(service, f".probe.{os.getpid()}")
    try:
        make_directories(service)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
    except OSError as error:
        raise from_os_error(error, op="preparing the root", kind=CkptError, path=path) from error
    return path


def _umask() -> int:
    """Return the umask of this process, which can only be read by setting it, or from proc(5)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _now() -> datetime:
    """Return the time in UTC, in the milliseconds that the manifest holds."""
    now = datetime.now(timezone.utc)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def _one_of(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r}: it must be one of {', '.join(map(repr, known))}")


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 0")
