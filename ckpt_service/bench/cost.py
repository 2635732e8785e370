"""What saves cost the training, and how often that is worth it. Pure.

The model. A save of ``B`` bytes costs the training

    stall      = PLAN_SECONDS + B / copy rate
    contention = B * CPU seconds per byte / cores
    lost       = stall + contention

*Stall*: the training thread waits while the whole state is copied into shared memory, at the speed at which memory is
copied here; ``PLAN_SECONDS`` is for the structure of a state of a few thousand tensors. What is copied behind the next
step costs less; a state on a GPU comes over its bus, whose speed is not measured here.

*Contention*: while the daemon writes, it takes CPU time, as measured here with the real writer. A training that keeps
all cores busy loses that time, divided by the cores; one that leaves cores free, as on a GPU, loses less.

A save every ``T`` seconds then costs ``lost / T`` of the training. ``T`` is also at least the time of one write: what
is saved more often than the disk can take has to wait.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAN_SECONDS = 0.04
SHARE = 0.03
"""The part of the training that saves may cost."""


@dataclass(frozen=True)
class Host:
    """What was measured: rates in bytes a second, the CPU time of the writer in seconds per byte."""

    cores: int
    copy_rate: float
    write_rate: float
    cpu_seconds_per_byte: float


@dataclass(frozen=True)
class Cost:
    """What one save takes, in seconds: of the training (stall and contention), and until it is durable."""

    nbytes: int
    stall_seconds: float
    contention_seconds: float
    write_seconds: float

    @property
    def lost_seconds(self) -> float:
        """Training time that one save costs."""
        return self.stall_seconds + self.contention_seconds

    def shortest_interval_seconds(self, share: float = SHARE) -> float:
        """Return the seconds from save to save at which the saves cost ``share`` of the training."""
        return max(self.lost_seconds / share, self.write_seconds)


def cost_of(nbytes: int, host: Host) -> Cost:
    """Return what a save of ``nbytes`` bytes costs by the model above."""
    return Cost(
        nbytes,
        stall_seconds=PLAN_SECONDS + nbytes / host.copy_rate,
        contention_seconds=nbytes * host.cpu_seconds_per_byte / host.cores,
        write_seconds=nbytes / host.write_rate,
    )
