"""What a run directory holds: listing, manifests and attempts in; checkpoints with a state and a reason out. Pure.

This is the one definition of *complete*. Retention, status, command line and resume all ask here, and nothing else on
disk (no pointer file, no modification time) has a say.

A checkpoint is the set of shards that agree on (run_id, attempt, kind, epoch, step, repeat), one for each (stage, tp
rank) of the pp and tp in their manifests. Checkpoints are ordered by (attempt, sequence), where the lowest (stage, tp
rank) gives the sequence of the set. Legacy files (without a manifest) come before all of ours, by (epoch, step).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from ckpt_service.naming import Kind, ShardName
from ckpt_service.records import Attempt, ShardManifest

Rank = tuple[int, int]
"""(stage, tp rank)"""

Reach = float
"""The highest sequence of an attempt that counts; infinity for the whole attempt."""

_WHOLE: Reach = float("inf")


class State(str, Enum):
    """What a checkpoint is good for."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    DEAD = "dead"
    ABANDONED = "abandoned"
    FOREIGN = "foreign"
    DAMAGED = "damaged"
    LEGACY = "legacy"


@dataclass(frozen=True)
class Shard:
    """One file: what its name says and, unless it is legacy or damaged, what its manifest says.

    ``bytes`` is the size found, ``modified`` the time of its last change in seconds since the epoch (shown to people,
    never used for a decision). ``problem`` says why a damaged file is damaged.
    """

    path: str
    name: ShardName
    stage: int
    bytes: int
    modified: float
    manifest: ShardManifest | None = None
    problem: str | None = None

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank; 0 when there is no tensor parallelism."""
        return self.name.tp_rank or 0


@dataclass(frozen=True, order=True)
class CheckpointId:
    """A checkpoint, by its order and by the numbers that the user knows. Legacy ones have attempt and sequence 0."""

    attempt: int
    sequence: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Checkpoint:
    """A set of shards with a state. ``expected`` is how many shards make it whole, 0 where nobody can tell."""

    id: CheckpointId
    kind: Kind
    state: State
    reason: str | None
    shards: tuple[Shard, ...]
    expected: int
    run_id: str | None = None
    pinned: bool = False

    @property
    def order(self) -> tuple[int, int, int, int]:
        """What checkpoints of one run directory are sorted by."""
        return (self.id.attempt, self.id.sequence, self.id.epoch, self.id.step)

    @cached_property
    def ranks(self) -> frozenset[Rank]:
        """The (stage, tp rank) that are there."""
        return frozenset((shard.stage, shard.tp_rank) for shard in self.shards)

    @property
    def bytes(self) -> int:
        """The size of all shards together."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def modified(self) -> float:
        """When the last shard came, in seconds since the epoch; for people to read."""
        return max(shard.modified for shard in self.shards)

    def __hash__(self) -> int:
        return hash((self.kind, self.id))


@dataclass(frozen=True)
class Catalog:
    """All checkpoints, newest first. ``head`` is the attempt whose lineage counts, None before the first."""

    checkpoints: tuple[Checkpoint, ...]
    head: int | None

    def newest_complete(self, kind: Kind = "train") -> Checkpoint | None:
        """Return what a resume would take first, or None."""
        return next((c for c in self.checkpoints if c.kind == kind and c.state is State.COMPLETE), None)

    def of_kind(self, kind: Kind) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of one kind, newest first."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.kind == kind)


@dataclass(frozen=True)
class Evidence:
    """Everything that a catalog is derived from.

    ``committed``: the newest (attempt, sequence) known to be committed by a rank, for ranks whose files are not listed
    (another host's); ``slots`` bounds how far a set may fall behind and still count as coming.
    """

    shards: Sequence[Shard]
    attempts: Sequence[Attempt] = ()
    pins: frozenset[tuple[int, int]] = frozenset()
    committed: Mapping[tuple[Kind, int, int], tuple[int, int]] = field(default_factory=dict)
    slots: int = 2


def build(evidence: Evidence) -> Catalog:
    """Derive the catalog."""
    attempts = {attempt.n: attempt for attempt in evidence.attempts}
    whole = [shard for shard in evidence.shards if shard.manifest is not None and shard.problem is None]
    sets = [_as_set(shards) for shards in _grouped(whole)]
    found = sorted(attempts.keys() | {checkpoint.id.attempt for checkpoint in sets})
    filled = {checkpoint.id.attempt for checkpoint in sets}
    complete = {checkpoint.id.attempt for checkpoint in sets if checkpoint.state is State.COMPLETE}
    lineage = Lineage.derive(attempts, found, filled, complete)
    last_attempt = found[-1] if found else 0
    judged = [_judge(checkpoint, lineage, evidence, sets, last_attempt) for checkpoint in sets]
    judged += [_single(shard) for shard in evidence.shards if shard.manifest is None or shard.problem is not None]
    pinned = [replace(c, pinned=(c.id.attempt, c.id.sequence) in evidence.pins and c.id.attempt > 0) for c in judged]
    return Catalog(tuple(sorted(pinned, key=lambda c: c.order, reverse=True)), lineage.head)


# --- sets -------------------------------------------------------------------------------------------------------------


def _grouped(shards: Iterable[Shard]) -> Iterable[list[Shard]]:
    groups: dict[object, list[Shard]] = defaultdict(list)
    for shard in shards:
        m = shard.manifest
        assert m is not None
        groups[(m.run_id, m.attempt, m.kind, m.epoch, m.step, m.repeat)].append(shard)
    return groups.values()


def _as_set(shards: list[Shard]) -> Checkpoint:
    """Put the shards of one checkpoint together: complete, or partial with the missing ranks named."""
    ordered = tuple(sorted(shards, key=lambda shard: (shard.stage, shard.tp_rank)))
    first = ordered[0].manifest
    assert first is not None
    identity = CheckpointId(first.attempt, first.sequence, first.epoch, first.step)
    sizes = {(s.manifest.pp, s.manifest.tp) for s in ordered if s.manifest is not None}
    ranks = {(shard.stage, shard.tp_rank) for shard in ordered}
    missing = sorted({(stage, tp) for stage in range(first.pp) for tp in range(first.tp)} - ranks)
    state, reason = State.COMPLETE, None
    if len(sizes) > 1 or len(ranks) < len(ordered):
        state, reason = State.DAMAGED, "its shards disagree on the pipeline and tensor parallel sizes"
    elif missing:
        state, reason = State.PARTIAL, "; ".join(f"stage {stage} tp {tp} not committed yet" for stage, tp in missing)
    return Checkpoint(identity, first.kind, state, reason, ordered, first.pp * first.tp, run_id=first.run_id)


def _single(shard: Shard) -> Checkpoint:
    """List a file that belongs to no set: legacy, or damaged."""
    manifest = shard.manifest
    step, epoch = shard.name.step or 0, shard.name.epoch or 0
    identity = CheckpointId(0, 0, epoch, step)
    if manifest is not None:
        identity = CheckpointId(manifest.attempt, manifest.sequence, manifest.epoch, manifest.step)
    state = State.LEGACY if shard.problem is None else State.DAMAGED
    reason = shard.problem or "written without a manifest"
    expected = manifest.pp * manifest.tp if manifest else 0
    return Checkpoint(identity, shard.name.kind, state, reason, (shard,), expected)


# --- lineage ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """Which attempts count, and how far: ``reach`` maps an attempt to the highest sequence that counts.

    ``parents`` holds for every attempt the (attempt, sequence) that it resumed from, None for a fresh start.
    """

    head: int | None
    reach: Mapping[int, Reach]
    parents: Mapping[int, tuple[int, int] | None]

    @classmethod
    def derive(
        cls, attempts: Mapping[int, Attempt], found: Sequence[int], filled: set[int], complete: set[int]
    ) -> Lineage:
        """Follow the resumes back from the head, the newest attempt that has resumed or has a file."""
        parents: dict[int, tuple[int, int] | None] = {}
        for number in found:
            attempt = attempts.get(number)
            origin = attempt.resumed_from if attempt else None
            parents[number] = (origin.attempt, origin.sequence) if origin else None
        heads = [n for n in found if n in filled or parents[n] is not None]
        head = heads[-1] if heads else None
        reach = _reach(head, heads, attempts, parents, complete) if head is not None else {}
        return cls(head, reach, parents)

    def includes(self, identity: CheckpointId) -> bool:
        """Return whether a checkpoint counts."""
        return identity.sequence <= self.reach.get(identity.attempt, -1)

    def is_branch(self, attempt: int) -> bool:
        """Return whether an attempt grew out of one that counts (or is one): its checkpoints are abandoned."""
        current: int | None = attempt
        while current is not None:
            if current in self.reach:
                return True
            parent = self.parents.get(current)
            current = parent[0] if parent is not None and parent[0] < current else None
        return False

    def departure(self, attempt: int) -> str:
        """Say which resume left the checkpoints of ``attempt`` behind."""
        for number in sorted(self.reach, reverse=True):
            parent = self.parents.get(number)
            if parent is not None and number > attempt >= parent[0]:
                return f"attempt {number} resumed from attempt {parent[0]} sequence {parent[1]}"
        return f"attempt {self.head} went on without it"


def _reach(
    head: int,
    heads: Sequence[int],
    attempts: Mapping[int, Attempt],
    parents: Mapping[int, tuple[int, int] | None],
    complete: set[int],
) -> dict[int, Reach]:
    """Return the reach seen from ``head``.

    A roll-back that the user asked for cuts at once. A resume that nobody steered (it may have fallen back because a
    file was unreadable for a moment) cuts only once the new attempt has a complete checkpoint; until then all that
    counted before counts still. An attempt whose record is lost is taken to follow the one before it.
    """
    reach: dict[int, Reach] = {head: _WHOLE}
    record = attempts.get(head)
    origin = record.resumed_from if record else None
    before = [n for n in heads if n < head]
    undecided = record is None or (origin is not None and not origin.explicit and head not in complete)
    if undecided and before:
        reach.update(_reach(before[-1], heads, attempts, parents, complete))
        return reach
    number = head
    while (parent := parents.get(number)) is not None and parent[0] < number:
        number = parent[0]
        reach[number] = parent[1]
    if attempts.get(number) is None and number != head:
        reach.update({n: _WHOLE for n in heads if n < number and attempts.get(n) is None})
    return reach


# --- states -----------------------------------------------------------------------------------------------------------


def _judge(
    checkpoint: Checkpoint, lineage: Lineage, evidence: Evidence, sets: Sequence[Checkpoint], last_attempt: int
) -> Checkpoint:
    """Return the checkpoint with its final state and the reason for it."""
    attempt = checkpoint.id.attempt
    if not lineage.includes(checkpoint.id):
        if lineage.is_branch(attempt):
            return replace(checkpoint, state=State.ABANDONED, reason=lineage.departure(attempt))
        return replace(checkpoint, state=State.FOREIGN, reason=f"attempt {attempt} is not one that this run came from")
    if checkpoint.state is not State.PARTIAL:
        return checkpoint
    death = _death(checkpoint, evidence, sets, last_attempt)
    return replace(checkpoint, state=State.DEAD, reason=f"{checkpoint.reason}, and {death}") if death else checkpoint


def _death(checkpoint: Checkpoint, evidence: Evidence, sets: Sequence[Checkpoint], last_attempt: int) -> str | None:
    """Return why a partial set can no longer complete, or None if it can."""
    attempt, sequence = checkpoint.id.attempt, checkpoint.id.sequence
    if attempt < last_attempt:
        return f"attempt {attempt} has ended"
    same = [c for c in sets if c.kind == checkpoint.kind and c.id.attempt == attempt]
    later = [c for c in same if c.id.sequence > sequence]
    if len(later) > evidence.slots + 1:
        return f"{len(later)} newer saves have come since"
    committed: dict[Rank, int] = {}
    for other in later:
        for shard in other.shards:
            rank = (shard.stage, shard.tp_rank)
            committed[rank] = max(committed.get(rank, 0), other.id.sequence)
    for (kind, stage, tp_rank), (peer_attempt, peer_sequence) in evidence.committed.items():
        if kind == checkpoint.kind and peer_attempt == attempt and peer_sequence > sequence:
            committed.setdefault((stage, tp_rank), peer_sequence)
    passed = sorted(rank for rank in committed.keys() - checkpoint.ranks)
    if passed:
        stage, tp = passed[0]
        return f"stage {stage} tp {tp} has committed a later one"
    return None
