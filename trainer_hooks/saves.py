"""The saves of a trainer, from the call to an admitted plan: numbers, manifest, vote, plan. Shell.

What happens in this order matters: a save is counted before anything can fail, so that ranks stay in step; and ranks
vote before anything that may fail on one of them alone.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt_service import __version__, scan
from ckpt_service.errors import CkptError, RunDirectoryBusy, SaveFailed
from ckpt_service.naming import Kind
from ckpt_service.records import ShardManifest
from trainer_hooks import layout, replicas
from trainer_hooks.capture import blueprint
from trainer_hooks.overlap import StepGate
from trainer_hooks.saving import Saver, Target
from trainer_hooks.start import Run, utc_now
from trainer_hooks.tickets import SaveTicket
from trainer_hooks.tracking import Tracked
from trainer_hooks.values import Allowed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnDemand:
    """A state that is made once its save has been counted: ranks stay in step also where making it fails on one."""

    make: Callable[[], Any]


@dataclass
class _Counts:
    """How often one kind was saved: ``sequence`` in all, ``repeats`` of each (step, epoch) in this attempt."""

    sequence: int = 0
    repeats: Counter[tuple[int, int]] = field(default_factory=Counter)


class Saves:
    """Numbers the saves of this process and hands them to the saver. ``last`` is the ticket of the newest one.

    ``has_saved``: the present attempt has. ``has_resumed``: the user has looked at what lies in the run directory.
    """

    def __init__(self, run: Run, saver: Saver, tracked: Tracked, allowed: Allowed, gate: StepGate) -> None:
        self.last: SaveTicket | None = None
        self.has_saved = False
        self.has_resumed = False
        self._run = run
        self._saver = saver
        self._tracked = tracked
        self._allowed = allowed
        self._gate = gate
        self._counts: dict[Kind, _Counts] = {}

    def begin_attempt(self) -> None:
        """Count anew what is counted by attempt."""
        self.has_saved = False
        for counts in self._counts.values():
            counts.repeats.clear()

    def save(self, target: Target, step: int, epoch: int, state: Any, *, final: bool) -> SaveTicket:
        """Save ``state``, or what is tracked if it is None; as ``Checkpointer.save``, which describes it.

        Raises:
            ValueError: a number is wrong, there is nothing to save, or (``StateRefused``) it cannot be saved.
            RunDirectoryBusy: another run trains on the run directory.
        """
        counts = self._counts.setdefault(target.kind, _Counts())
        counts.sequence += 1
        _require_count("step", step)
        _require_count("epoch", epoch)
        counts.repeats[(step, epoch)] += 1
        if state is None and not self._tracked:
            raise ValueError("state: give a state to save, or name objects with track() first")
        ticket = self._saver.ticket(step, epoch)
        if not self._has_begun(ticket):
            return ticket
        told = self._strangers()
        manifest = self._manifest(target.kind, counts, step, epoch)
        if not self._run.topology.is_writer:
            if isinstance(state, OnDemand):
                state.make()  # nothing is copied, and a mistake is one on every rank
            self._contribute(manifest, tracked=state is None)
            ticket.resolve(None)
            return ticket
        told += [f"an earlier save failed: {failure}" for failure in self._saver.new_failures()]
        # Before anything that may fail on this rank alone: it may vote.
        if self._saver.admit(manifest, ticket, final=final):
            try:
                self._plan_and_save(target, manifest, ticket, state, final=final)
            except MemoryError as error:
                self._saver.lose(manifest, ticket, error)
        self.last = ticket
        for message in told:  # last of all: where warnings are errors, the save is on its way all the same
            warnings.warn(message, stacklevel=3)
        return ticket

    def _has_begun(self, ticket: SaveTicket) -> bool:
        """Begin the attempt at the first save, where it was not begun before; a failure is one of this save only."""
        if self._run.attempt is None:
            try:
                self._run.begin()
            except RunDirectoryBusy:
                raise
            except CkptError as error:
                self.last = ticket
                step, why = ticket.step, error.args[0]
                ticket.fail(
                    SaveFailed(
                        f"step {step} was not saved: {why}", op="save", step=step, code=error.code, hint=error.hint
                    )
                )
                return False
        self.has_saved = True
        return True

    def _plan_and_save(
        self, target: Target, manifest: ShardManifest, ticket: SaveTicket, state: Any, *, final: bool
    ) -> None:
        with_replicas = state is None and manifest.dp > 1
        later = None
        if isinstance(state, OnDemand):
            state = state.make()
        if state is None:
            numbers = {"epoch": manifest.epoch, "step": manifest.step, "stage": manifest.stage}
            state = {**numbers, **self._tracked.collect()}
            later = self._gate.later()
        plan = blueprint(layout.plan(state, self._allowed, self._run.topology))
        self._saver.save(plan, manifest, target, ticket, with_replicas=with_replicas, final=final, later=later)
        if later is not None:
            self._gate.hold(ticket)

    def _manifest(self, kind: Kind, counts: _Counts, step: int, epoch: int) -> ShardManifest:
        """Return the manifest of this save; its size and its count of tensors are filled in with the image."""
        attempt, place = self._run.attempt, self._run.topology
        assert attempt is not None
        return ShardManifest(
            kind=kind,
            run_id=attempt.run_id,
            attempt=attempt.n,
            sequence=counts.sequence,
            repeat=counts.repeats[(step, epoch)] - 1,
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
        place = self._run.topology
        content = replicas.packed(self._tracked.collect_own(place), manifest, self._allowed, place)
        try:
            exchange.take(replicas.key(manifest, manifest.dp_rank, saves_ago=self._run.slots + 2))  # nobody wanted it
            exchange.put(replicas.key(manifest, manifest.dp_rank), content)
        except (RuntimeError, OSError) as error:
            warnings.warn(f"step {manifest.step}: this replica's random numbers are not saved: {error}", stacklevel=4)

    def _strangers(self) -> list[str]:
        """Return what to tell a user who starts afresh in a used directory; resume() would have continued it."""
        if self.has_resumed or self._run.topology.rank > 0:
            return []
        self.has_resumed = True  # told once
        try:
            there = scan.load_catalog(self._run.root, self._run.postfix).of_kind("train")
        except OSError as error:
            log.warning("what lies in %s could not be listed: %s", self._run.root, error)
            return []
        if not there:
            return []
        newest = there[0].id
        return [
            f"{self._run.root} holds {len(there)} checkpoints of earlier runs (the newest: step {newest.step} "
            f"epoch {newest.epoch}) and resume() was not called: they stay, and this run has a history of its own"
        ]


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 0")
