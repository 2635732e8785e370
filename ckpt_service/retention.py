"""Which files of one shard may go. Pure: policy and catalog in, plan out.

A plan only ever deletes files of one (kind, stage, tp rank), never foreign or legacy ones, a stranger's copies or files
of a newer format, and never of the newest complete checkpoint, of the one that the running attempt started from before
it has a complete one of its own, or of a set that can still complete.
"""

from __future__ import annotations

from collections import Counter
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

    def keeps_step(self, step: int) -> bool:
        """Return whether ``keep_every`` asks for this step."""
        return self.keep_every is not None and step % self.keep_every == 0


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
    history = catalog.of_kind(kind)
    complete = [checkpoint for checkpoint in history if checkpoint.state is State.COMPLETE]
    newest: dict[object, Checkpoint] = {}
    for checkpoint in complete:
        newest.setdefault(_place(checkpoint), checkpoint)
    counted = [c for c in complete if not c.pinned and newest[_place(c)] is c]
    abandoned = [c for c in history if c.state is State.ABANDONED and not c.pinned]
    last = counted[: policy.keep_last]
    room = policy.keep_last - sum(not policy.keeps_step(c.id.step) for c in last)
    view = _View(
        policy,
        newest=complete[0] if complete else None,
        last=frozenset(last),
        spared=frozenset(abandoned[:room]),
        replaced=frozenset(c for c in complete if newest[_place(c)] is not c),
        origin=catalog.origin if kind == "train" else None,
    )
    decisions = []
    for checkpoint in reversed(history):
        keep, reason = _decide(checkpoint, view)
        files = (*checkpoint.shards, *checkpoint.copies)
        own = (shard for shard in files if (shard.stage, shard.tp_rank) == (stage, tp_rank))
        decisions += [_spare_newer(Decision(shard, keep, reason)) for shard in own]
    return RetentionPlan(tuple(decisions))


def _spare_newer(decision: Decision) -> Decision:
    """Keep a file that only a newer release can read: what it is worth can only be told there."""
    if not decision.shard.newer_format:
        return decision
    return Decision(decision.shard, keep=True, reason=decision.shard.problem or decision.reason)


@dataclass(frozen=True)
class _View:
    """What a decision looks at besides the checkpoint itself."""

    policy: RetentionPolicy
    newest: Checkpoint | None
    last: frozenset[Checkpoint]
    spared: frozenset[Checkpoint]
    replaced: frozenset[Checkpoint]
    origin: tuple[int, int] | None

    def is_outlived(self, checkpoint: Checkpoint) -> bool:
        """Return whether something newer of this run is complete, so that nobody will ask for this one."""
        return self.newest is not None and checkpoint.id.attempt > 0 and checkpoint.order < self.newest.order


def _place(checkpoint: Checkpoint) -> object:
    """Return what two checkpoints share when the later one replaces the earlier one: the names of their files."""
    return None if checkpoint.kind == "hf" else (checkpoint.id.epoch, checkpoint.id.step)


def _decide(checkpoint: Checkpoint, view: _View) -> tuple[bool, str]:
    policy, step = view.policy, checkpoint.id.step
    match checkpoint.state:
        case _ if checkpoint.pinned:
            return True, "pinned"
        case State.COMPLETE if checkpoint is view.newest:
            return True, "the newest complete checkpoint"
        case State.FOREIGN | State.LEGACY:
            return True, checkpoint.reason or checkpoint.state.value
        case _ if view.origin == (checkpoint.id.attempt, checkpoint.id.sequence):
            return True, "the running attempt started from it"
        case State.COMPLETE if checkpoint in view.replaced:
            return False, "saved again since"
        case State.COMPLETE if checkpoint in view.last:
            return True, f"one of the last {policy.keep_last}"
        case State.COMPLETE if policy.keeps_step(step):
            return True, f"step divisible by {policy.keep_every}"
        case State.COMPLETE:
            return False, f"older than the last {policy.keep_last}"
        case State.PARTIAL:
            return True, "it can still complete"
        case State.DEAD:
            return False, "it can no longer complete"
        case State.ABANDONED if view.is_outlived(checkpoint) or checkpoint not in view.spared:
            return False, checkpoint.reason or "abandoned"
        case State.DAMAGED if view.is_outlived(checkpoint):
            return False, "damaged, and a newer checkpoint is complete"
        case _:
            return True, checkpoint.reason or checkpoint.state.value


def held_back(catalog: Catalog, *, kind: Kind, stage: int, tp_rank: int) -> dict[tuple[int, int], int]:
    """Return the ranks that this one waits for, and how many of its saves they are behind."""
    behind: Counter[tuple[int, int]] = Counter()
    for checkpoint in catalog.of_kind(kind):
        if checkpoint.state is State.PARTIAL and (stage, tp_rank) in checkpoint.ranks:
            behind.update(checkpoint.awaited)
    return dict(behind)
