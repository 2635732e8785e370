"""Runs one leg after another: starts its ranks, follows their journal, strikes if a kill is planned, sees them end.

The parent learns about a leg from its journal, its exit statuses and the files it leaves; what a rank prints goes to a
log. Promises that no rank is left running when `run_leg` has returned or raised.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from trainer_hooks.demo.files import PartialFile, partial_files
from trainer_hooks.demo.journal import Event, JournalReader
from trainer_hooks.demo.leg import DemoFailed, Leg
from trainer_hooks.demo.ranks import Ranks
from trainer_hooks.demo.sabotage import Killed, Saboteur

_POLL_SECONDS = 0.05
_STALL_SECONDS = 120.0
_FOLLOW_SECONDS = 10.0


@dataclass(frozen=True)
class LegEnd:
    """How a leg ended. `partials` is what lay unfinished on disk at that moment.

    `failed_rank` is the first that was seen to end with another status than 0, unless all were killed on purpose.
    """

    leg: Leg
    exit_statuses: tuple[int | None, ...]
    failed_rank: int | None
    killed: Killed | None
    seconds: float
    events: tuple[Event, ...]
    partials: tuple[PartialFile, ...]


class Audience(Protocol):
    """Is shown what happens in a leg."""

    def show(self, leg: Leg, event: Event) -> None:
        """Take one event; called in order."""

    def show_kill(self, leg: Leg, killed: Killed) -> None:
        """The trainers have just been killed on purpose."""


def run_leg(leg: Leg, reader: JournalReader, audience: Audience) -> LegEnd:
    """Start a leg, follow it, and return when all of its processes have ended, however they did.

    Raises:
        DemoFailed: they made no progress for minutes, or a planned kill came too late; they have been killed.
    """
    begun = time.monotonic()
    with Ranks(leg) as ranks:
        follower = _Follower(leg, ranks, reader, audience)
        follower.run()
    partials = tuple(partial_files(leg.paths.root))
    follower.read()
    seconds = time.monotonic() - begun
    return LegEnd(
        leg=leg,
        exit_statuses=tuple(ranks.statuses()),
        failed_rank=follower.failed_rank,
        killed=follower.killed,
        seconds=seconds,
        events=tuple(follower.events),
        partials=partials,
    )


class _Follower:
    """Watches a leg that runs."""

    def __init__(self, leg: Leg, ranks: Ranks, reader: JournalReader, audience: Audience) -> None:
        self._leg = leg
        self._ranks = ranks
        self._reader = reader
        self._audience = audience
        self._saboteur = None if leg.kill is None else Saboteur(leg, leg.kill, ranks.kill)
        self._progress = time.monotonic()
        self.events: list[Event] = []
        self.killed: Killed | None = None
        self.failed_rank: int | None = None

    def run(self) -> None:
        """Return when all ranks have ended, or when some have failed and the others do not follow."""
        while not self._ranks.ended(_POLL_SECONDS):
            self.read()
            self._strike()
            if self.killed is None and self._has_failed() and not self._ranks.ended(_FOLLOW_SECONDS):
                return
            if time.monotonic() - self._progress > _STALL_SECONDS:
                raise DemoFailed(f"{self._leg.title} did nothing for {_STALL_SECONDS:.0f} s{self._leg.log_tail()}")
        if self.killed is None:
            self._has_failed()

    def read(self) -> None:
        """Take and show what is new in the journal."""
        new = self._reader.read_new()
        for event in new:
            self._audience.show(self._leg, event)
        self.events += new
        if new:
            self._progress = time.monotonic()

    def _strike(self) -> None:
        if self._saboteur is not None and self.killed is None:
            self.killed = self._saboteur.look(self.events)
            if self.killed is not None:
                self._audience.show_kill(self._leg, self.killed)

    def _has_failed(self) -> bool:
        if self.failed_rank is None:
            self.failed_rank = next((rank for rank, status in enumerate(self._ranks.statuses()) if status), None)
        return self.failed_rank is not None
