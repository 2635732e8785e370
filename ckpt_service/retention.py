"""Which files of one shard may go. Pure: policy and catalog in, plan out.

A plan only ever names files of one (kind, stage, tp rank), only of this run's lineage, and never of the newest complete
checkpoint or of a set that can still complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_service.catalog import Catalog, Checkpoint, Shard, State
from ckpt_service.naming import Kind


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the newest ``keep_last`` complete checkpoints, and every one whose step is divisible by ``keep_every``."""

    keep_last: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last!r}: it must be a whole number of at least 1")
        every = self.keep_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"keep_every={every!r}: it must be None or a whole number of at least 1")


@dataclass(frozen=True)
class Decision:
    """What happens to one file, and why."""

    shard: Shard
    keep: bool
    reason: str


@dataclass(frozen=True)
class RetentionPlan:
    """A decision for each file of one shard's history, oldest first."""

    decisions: tuple[Decision, ...]

    @property
    def delete(self) -> tuple[Shard, ...]:
        """The files to delete, oldest first."""
        return tuple(decision.shard for decision in self.decisions if not decision.keep)

    @property
    def keep(self) -> tuple[Shard, ...]:
        """The files that stay, oldest first."""
        return tuple(decision.shard for decision in self.decisions if decision.keep)


def plan(policy: RetentionPolicy, catalog: Catalog, *, kind: Kind, stage: int, tp_rank: int) -> RetentionPlan:
    """Decide for each file of this (kind, stage, tp rank) whether it stays."""
    history = [checkpoint for checkpoint in catalog.checkpoints if checkpoint.kind == kind]
    complete = [checkpoint for checkpoint in history if checkpoint.state is State.COMPLETE]
    counted = [checkpoint for checkpoint in complete if not checkpoint.pinned]
    newest = complete[0] if complete else None
    last = set(counted[: policy.keep_last])
    decisions = []
    for checkpoint in reversed(history):
        keep, reason = _decide(policy, checkpoint, newest, last, head=catalog.head)
        own = (shard for shard in checkpoint.shards if (shard.stage, shard.tp_rank) == (stage, tp_rank))
        decisions += [Decision(shard, keep, reason) for shard in own]
    return RetentionPlan(tuple(decisions))


def _decide(
    policy: RetentionPolicy, checkpoint: Checkpoint, newest: Checkpoint | None, last: set[Checkpoint], head: int | None
) -> tuple[bool, str]:
    step = checkpoint.id.step
    match checkpoint.state:
        case _ if checkpoint.pinned:
            return True, "pinned"
        case State.COMPLETE if checkpoint is newest:
            return True, "the newest complete checkpoint"
        case State.COMPLETE if checkpoint in last:
            return True, f"one of the last {policy.keep_last}"
        case State.COMPLETE if policy.keep_every is not None and step % policy.keep_every == 0:
            return True, f"step divisible by {policy.keep_every}"
        case State.COMPLETE:
            return False, f"older than the last {policy.keep_last}"
        case State.PARTIAL:
            return True, "it can still complete"
        case State.DEAD:
            return False, "it can no longer complete"
        case State.ABANDONED if newest is not None and newest.id.attempt == head:
            return False, checkpoint.reason or "abandoned"
        case State.DAMAGED if newest is not None and checkpoint.id.attempt and checkpoint.order < newest.order:
            return False, "damaged, and a newer checkpoint is complete"
        case _:
            return True, checkpoint.reason or checkpoint.state.value
