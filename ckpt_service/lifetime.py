"""How long a daemon is needed. Pure; times are monotonic seconds.

A daemon that was started for trainers leaves by itself: at once when the last of them has said goodbye and all is
written; after ``linger_seconds`` when the last one died, since it will probably be started again; after
``start_seconds`` when none ever came. A signal bounds everything by ``grace_seconds``. Somebody may also ask it to
leave once all is written, however long that takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FOREVER = float("inf")


@dataclass
class Lifetime:
    """What decides whether the daemon stays. ``stays``: it was not started for trainers, and waits for them."""

    stays: bool
    linger_seconds: float
    grace_seconds: float
    needed_until: float
    drain_until: float | None = field(default=None, init=False)
    finishing: bool = field(default=False, init=False)

    @property
    def draining(self) -> bool:
        """Whether the daemon has been asked to leave."""
        return self.finishing or self.drain_until is not None

    def trainer_came(self) -> None:
        """Note that a trainer has said hello."""
        self.needed_until = _FOREVER

    def trainer_left(self, now: float, *, cleanly: bool) -> None:
        """Note that a trainer's connection has ended, or will after its goodbye."""
        self.needed_until = now + (0 if cleanly else self.linger_seconds)

    def drain(self, now: float) -> None:
        """Note the signal; a second one changes nothing."""
        if self.drain_until is None:
            self.drain_until = now + self.grace_seconds

    def finish(self) -> None:
        """Note that somebody asks the daemon to write all that it holds and then to leave, whoever is connected."""
        self.finishing = True

    def seconds_needed(self, now: float, *, trainers: int, jobs: int) -> float:
        """Return how long the daemon is needed at least, as far as can be known now; 0 or less: not any more.

        After a signal, trainers that are still there may hand over a last snapshot, so they are waited for as well.
        """
        if self.finishing and not jobs:
            return 0
        if self.drain_until is not None:
            return self.drain_until - now if jobs or trainers else 0
        if self.finishing or self.stays or trainers or jobs:
            return _FOREVER
        return self.needed_until - now
