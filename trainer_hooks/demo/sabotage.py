"""Kills the training processes in the middle of a checkpoint write, as a crash would: SIGKILL, without a warning.

Takes a leg with a `KillPlan`; is told of the leg's events, and strikes from outside once the daemon has accepted every
shard of the chosen save, some of their bytes are on disk, and training has gone on meanwhile.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_hooks.demo.files import PartialFile, daemon_of, partial_files
from trainer_hooks.demo.journal import Accepted, Committed, Event, Failed, Stepped, events_of
from trainer_hooks.demo.leg import DemoFailed, KillPlan, Leg


@dataclass(frozen=True)
class Killed:
    """The blow: which unfinished files were seen right before it, and how far the trainers had come."""

    save_step: int
    step: int
    partials: tuple[PartialFile, ...]
    daemon_pid: int | None


class Saboteur:
    """Carries out one plan, once. `kill_trainers` sends SIGKILL to all of them and does not wait."""

    def __init__(self, leg: Leg, plan: KillPlan, kill_trainers: Callable[[], None]) -> None:
        self._leg = leg
        self._plan = plan
        self._kill_trainers = kill_trainers
        self._patience_seconds = leg.slow_writes.seconds / 4 if leg.slow_writes else 0.0
        self._seen_at: float | None = None

    def look(self, events: Sequence[Event]) -> Killed | None:
        """Strike, if it is time; `events` are all of the leg so far.

        Raises:
            DemoFailed: the write is over already, or the save failed.
        """
        mine = [event for event in events if not isinstance(event, Stepped)]
        accepted = [event for event in events_of(Accepted, mine) if event.step == self._plan.save_step]
        if len(accepted) < self._leg.recipe.tp:
            return None
        self._require_unfinished(mine)
        partials = tuple(p for p in partial_files(self._leg.paths.root, self._plan.save_step) if p.bytes > 0)
        if not partials:
            return None
        step = max(event.step for event in events_of(Stepped, events))
        if self._seen_at is None:
            self._seen_at = time.monotonic()
        if step > self._plan.save_step or time.monotonic() - self._seen_at > self._patience_seconds:
            return self._strike(step, partials)
        return None

    def _require_unfinished(self, events: Sequence[Event]) -> None:
        purpose = f"{self._leg.title} was to be killed in the write of step {self._plan.save_step}"
        for failed in events_of(Failed, events):
            raise DemoFailed(f"{purpose}, but the save of step {failed.step} failed: {failed.error}")
        committed = [event for event in events_of(Committed, events) if event.step == self._plan.save_step]
        if len(committed) == self._leg.recipe.tp:
            raise DemoFailed(f"{purpose}, but its write was over before the kill")

    def _strike(self, step: int, partials: tuple[PartialFile, ...]) -> Killed:
        daemon = daemon_of(self._leg.paths.root) if self._plan.daemon_too else None
        self._kill_trainers()  # first: they would start another daemon
        if daemon is not None:
            daemon.signal(signal.SIGKILL)
        return Killed(self._plan.save_step, step, partials, None if daemon is None else daemon.pid)
