"""What a training loop holds: track, save, resume. The facade over everything else in this package."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

from ckpt_service import memory, naming, ownership, scan
from ckpt_service.catalog import CheckpointId
from ckpt_service.errors import CkptError, SaveFailed, ServiceUnavailable
from ckpt_service.messages import Retention
from ckpt_service.records import OnFull
from ckpt_service.retention import RetentionPolicy
from trainer_hooks import ending
from trainer_hooks.beside import Wanted, load_beside
from trainer_hooks.callbacks import Announcer, OnCommitted
from trainer_hooks.client import ServiceClient
from trainer_hooks.launch import Service
from trainer_hooks.overlap import StepGate
from trainer_hooks.peers import PeerNews
from trainer_hooks.restoring import Restorer
from trainer_hooks.resume import ResumePoint
from trainer_hooks.saves import Saves
from trainer_hooks.saving import Saver, Target
from trainer_hooks.start import Run, absolute_root, settings
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
        retention: the whole policy, instead of ``keep_last``. ``RetentionPolicy(keep_last=2, keep_every=1000)`` also
            keeps every checkpoint whose step is divisible by 1000.
        slots: how many snapshots may be on their way at once; each takes the size of the state in shared memory.
        on_full: what ``save`` does when all slots are taken. "block" waits for the disk; "skip" drops the new snapshot;
            "replace" drops the oldest one whose write has not begun. Both drop it on all ranks or on none, for which
            ``save`` becomes collective on the ranks that write.
        staging: "overlap" lets ``save`` return before the parameters and moments of tracked optimizers are copied; the
            next ``optimizer.step()`` waits for that, and whatever else changes them has to call
            ``ticket.wait_staged()`` first (CUDA tensors are copied at once). "blocking" copies all before it returns.
        service: "auto" finds or starts this user's daemon for the run directory; a path is the socket of another one.
        trust: classes, beyond plain values, that a state may hold.
        on_committed: called with the ticket of each save whose file has become durable, on a thread of its own in this
            process. What it raises is a warning at the next ``save``, or at ``close()``.

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
        on_committed: OnCommitted | None = None,
    ) -> None:
        _one_of("on_full", on_full, ("block", "skip", "replace"))
        _one_of("staging", staging, ("overlap", "blocking"))
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots={slots!r}: it must be a whole number of at least 1")
        _instance("topology", topology, Topology)
        _instance("retention", retention, RetentionPolicy)
        if service == "":
            raise ValueError('service="": it must be "auto" or the path of a socket')
        if not isinstance(async_ckpt, bool):
            raise ValueError(f"async_ckpt={async_ckpt!r}: it must be True or False")
        if on_committed is not None and not callable(on_committed):
            raise ValueError(f"on_committed={on_committed!r}: it must be a function that takes a ticket")
        postfix = naming.check_postfix(postfix)
        policy = retention or RetentionPolicy(keep_last)
        place = topology or Topology()
        config, problem = settings(os.environ)
        self._asynchronous = async_ckpt
        self._closed = False
        self._pid = os.getpid()
        self._tracked = Tracked()
        allowed = Allowed(trust)
        host = ownership.host_name(os.environ)
        self._run = Run(absolute_root(root), postfix, host, place, slots, on_full, config, problem)
        keep = Retention(keep_last=policy.keep_last, keep_every=policy.keep_every)
        self._target = Target("train", self._run.stage_directory, keep)
        client: ServiceClient | None = None
        try:
            if place.world_size == 1:
                self._run.open()  # several ranks meet in the constructor only if it is collective
            client = self._connected(service) if async_ckpt else None
            self._saver = Saver(self._run, client)
        except BaseException:
            if client is not None:
                client.close()
            self._run.end()
            raise
        overlaps = staging == "overlap" and client is not None
        self._gate = StepGate(config.stall_seconds, self._prepare, overlaps=overlaps)
        self._saves = Saves(self._run, self._saver, self._tracked, allowed, self._gate)
        self._restorer = Restorer(self._run, self._saver, self._saves, self._tracked, allowed)
        self._announcer = Announcer(on_committed) if on_committed is not None else None
        self._waiting_for_the_end = ending.at_end(self._at_exit)

    # --- what a loop calls --------------------------------------------------------------------------------------------

    def track(self, **stateful: Any) -> None:
        """Name the objects whose state ``save`` collects and ``resume`` restores; None values are left out.

        Raises:
            ValueError: an object has no ``state_dict`` and ``load_state_dict``.
        """
        for name, thing in stateful.items():
            if thing is not None:
                self._tracked.add(name, thing)
                self._gate.watch(name, thing)
        slots = self._run.slots
        lack = memory.shortage(slots * self._tracked.known_bytes(), memory.room())
        if lack is not None and self._run.topology.is_writer:
            warnings.warn(f"slots={slots}: not all slots will fit into memory: {lack}", stacklevel=2)

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
        return self.save_to(self._target, step, epoch, state, final=final)

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
        return self._restorer.resume(step, epoch, strict=strict)

    def load_beside(self, wanted: Wanted, *, check: Callable[[Any], None], restore: Callable[[Any], None]) -> str:
        """Load a checkpoint of another kind into live objects, for trainers that have such; collective on all ranks.

        Nothing is touched unless ``check`` finds on every rank that it fits. Returns the path of this rank's file.

        Raises:
            ValueError: there is no such complete checkpoint.
            CkptError: it is damaged, has another layout, or does not fit.
        """
        self._require_usable()
        return load_beside(self._run, self._saver, wanted, check=check, restore=restore)

    def latest(self) -> CheckpointId | None:
        """Return the newest complete checkpoint of this run as this host sees it, or None."""
        newest = scan.load_catalog(self._run.root, self._run.postfix).newest_complete()
        return newest.id if newest else None

    def any_rank(self, mine: bool) -> bool:
        """Return whether ``mine`` is true on some rank; collective on all ranks, over the CPU group.

        Raises:
            CkptError: a rank has died.
        """
        self._require_usable()
        return b"1" in self._run.agree(lambda: b"1" if mine else b"0", b"", kind=CkptError)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until everything saved so far is committed or has failed.

        Raises:
            TimeoutError: ``timeout`` seconds are over.
            SaveFailed: nothing has moved for ``stall_seconds``; names what is not safe.
        """
        if not self._closed:
            self._require_usable()
            self._saver.drain(timeout)

    def close(self) -> None:
        """Wait for what is pending and leave. Twice is fine.

        Raises:
            SaveFailed: the last save did not become a checkpoint.
        """
        if self._closed or self._pid != os.getpid():
            return
        problem: SaveFailed | None = None
        with ExitStack() as leaving:  # all of it, also when Ctrl-C breaks a wait off: the run lock must be free again
            for part in (self._end_callbacks, self._run.end, self._saver.close, self._gate.close, self._mark_closed):
                leaving.callback(part)
            try:
                self.drain()
            except SaveFailed as error:
                problem = error
        last = self._saves.last
        if problem is None and last is not None and last.committed.done():
            failure = last.committed.exception()
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
        run.begin()
        client: ServiceClient | None = None
        if place.is_writer:
            peers = PeerNews(run, run.exchange) if run.exchange is not None and not run.is_shared else None
            socket = None if service == "auto" else os.path.abspath(service)
            daemon = Service(run.root, run.postfix, run.host, socket, os.environ)
            client = ServiceClient(daemon, run.hello(), run.config, peers)

        def start() -> bytes:
            if client is not None:
                client.start()
            return b""

        try:
            run.agree(start, b"", kind=ServiceUnavailable)
        except CkptError:
            if client is not None:
                client.close()
            raise
        return client

    def save_to(self, target: Target, step: int, epoch: int, state: Any, *, final: bool) -> SaveTicket:
        """Save to another history than that of the training, for trainers with files of their own kinds; else as save.

        Each kind counts its saves by itself, and every rank has to save the same kinds in the same order.
        """
        self._require_usable()
        ticket = self._saves.save(target, step, epoch, state, final=final)
        if self._announcer is not None:
            self._announcer.watch(ticket)
            for failure in self._announcer.new_failures():
                warnings.warn(failure, stacklevel=3)
        return ticket

    def _prepare(self) -> None:
        """Have the memory ready before the first save, as soon as one can tell how much it will be."""
        if self._run.topology.is_writer and self._asynchronous:
            self._saver.prepare(self._tracked.image_bytes())

    # --- life ---------------------------------------------------------------------------------------------------------

    def _require_usable(self) -> None:
        if self._closed:
            raise ValueError("this Checkpointer is closed")
        if self._pid != os.getpid():
            raise ValueError(f"this Checkpointer belongs to process {self._pid}; make one after the fork")

    def _mark_closed(self) -> None:
        self._closed = True
        self._waiting_for_the_end()

    def _end_callbacks(self) -> None:
        if self._announcer is None:
            return
        if not self._announcer.close(self._run.config.stall_seconds):
            log.error("on_committed has not returned for %g s and is left behind", self._run.config.stall_seconds)
        for failure in self._announcer.new_failures():
            warnings.warn(failure, stacklevel=4)

    def _at_exit(self) -> None:
        """Wait for what is pending at the end of an interpreter that did not call ``close()``."""
        if self._pid != os.getpid():
            return
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, the exit code has to tell
            print(f"ckpt-service: the last save was lost: {error}", file=sys.stderr, flush=True)
            ending.fail()


def _one_of(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r}: it must be one of {', '.join(map(repr, known))}")


def _instance(option: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{option}={value!r}: it must be a {kind.__name__}")
