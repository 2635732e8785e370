"""What a run directory holds: listing, manifests and attempts in; checkpoints with a state and a reason out. Pure.

This is the one definition of *complete*. Retention, status, command line and resume all ask here, and nothing else on
disk (no pointer file, no modification time) has a say.

A checkpoint is the set of shards that agree on (run_id, attempt, kind, epoch, step, repeat), one for each (stage, tp
rank) of the pp and tp in their manifests. Checkpoints are ordered by (attempt, sequence), where the lowest (stage, tp
rank) gives the sequence of the set. Legacy files (without a manifest) come before all of ours, by (epoch, step).

A run directory has one run_id, that of its newest attempt; whatever carries another one is foreign. A file whose name
or place is not the one that its manifest says is a stranger's copy: listed as damaged, never part of a set.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from ckpt_service.naming import Kind, ShardName
from ckpt_service.records import Attempt, Origin, ShardManifest

Rank = tuple[int, int]
"""(stage, tp rank)"""

Reports = Mapping[tuple[Kind, int, int], Collection[tuple[int, int]]]
"""Every (attempt, sequence) that a (kind, stage, tp rank) holds."""


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
    never used for a decision). ``problem`` says why a damaged file is damaged;
    ``unread`` that it could not be read just now, which may pass; ``newer_format`` that only a newer release can.
    """

    path: str
    name: ShardName
    stage: int
    bytes: int
    modified: float
    manifest: ShardManifest | None = None
    problem: str | None = None
    unread: bool = False
    newer_format: bool = False

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
    """A set of shards with a state.

    ``shards`` holds one file for each rank, ``copies`` the other files of the same shards (set aside under a second
    name, when a crash came before the rename). ``expected`` is how many shards make it whole, 0 where nobody can tell;
    ``awaited`` the ranks that lack theirs.
    """

    id: CheckpointId
    kind: Kind
    state: State
    reason: str | None
    shards: tuple[Shard, ...]
    expected: int
    run_id: str | None = None
    pinned: bool = False
    copies: tuple[Shard, ...] = ()
    awaited: tuple[Rank, ...] = ()

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
        return hash((self.kind, self.id, self.run_id))


@dataclass(frozen=True)
class Catalog:
    """All checkpoints, newest first. ``head`` is the attempt whose lineage counts, None before the first.

    ``origin``: the (attempt, sequence) that the head resumed from, as long as it has no complete checkpoint itself.
    """

    checkpoints: tuple[Checkpoint, ...]
    head: int | None
    origin: tuple[int, int] | None = None

    def newest_complete(self, kind: Kind = "train") -> Checkpoint | None:
        """Return what a resume would take first, or None."""
        return next((c for c in self.checkpoints if c.kind == kind and c.state is State.COMPLETE), None)

    def files(self) -> Iterator[Shard]:
        """Yield every file that was listed."""
        for checkpoint in self.checkpoints:
            yield from checkpoint.shards
            yield from checkpoint.copies

    def of_kind(self, kind: Kind) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of one kind, newest first."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.kind == kind)


@dataclass(frozen=True)
class Evidence:
    """Everything that a catalog is derived from.

    ``committed``: every (attempt, sequence) that a rank reports to hold, for ranks whose files are not listed (another
    host's). The newest alone would not do: who failed one save and committed the next lacks the one before. A rank
    with neither a file nor an entry is unknown: what it lacks may still come. Where files are listed, they count, and
    reports only add what is newer. ``slots`` bounds how far a set may fall behind and still count as coming.
    ``unread``: the paths of records of attempts that are there and cannot be read; the lineage may be another one.
    ``run_id`` is given where no records are, to say whose the directory is.
    """

    shards: Sequence[Shard]
    attempts: Sequence[Attempt] = ()
    pins: frozenset[tuple[int, int]] = frozenset()
    committed: Reports = field(default_factory=dict)
    slots: int = 2
    unread: tuple[str, ...] = ()
    run_id: str | None = None


def build(evidence: Evidence) -> Catalog:
    """Derive the catalog."""
    groups, legacy, strange = _sorted_out(evidence.shards)
    reports = _believed(evidence)
    sets = [_as_set(shards, reports) for shards in groups]
    run_id = evidence.run_id or _run_id(evidence.attempts, sets)
    own = [checkpoint for checkpoint in sets if checkpoint.run_id == run_id]
    records = {attempt.n: attempt for attempt in evidence.attempts if attempt.run_id == run_id}
    lineage = Lineage.derive(records, own)
    last_attempt = max([*records, *(checkpoint.id.attempt for checkpoint in own)], default=0)
    progress = _Progress.derive(own, reports, evidence.slots, last_attempt)
    found = [_judge(checkpoint, lineage, progress) for checkpoint in own]
    found += [replace(c, state=State.FOREIGN, reason=f"of run {c.run_id}") for c in sets if c.run_id != run_id]
    found = [replace(c, pinned=(c.id.attempt, c.id.sequence) in evidence.pins) for c in found]
    found += [_legacy(shards) for shards in legacy] + [_strange(shard) for shard in strange]
    found.sort(key=lambda c: (c.order, c.run_id or "", c.shards[0].path), reverse=True)
    return Catalog(tuple(found), lineage.head, lineage.origin)


# --- sets -------------------------------------------------------------------------------------------------------------


def _sorted_out(shards: Iterable[Shard]) -> tuple[Iterable[list[Shard]], Iterable[list[Shard]], list[Shard]]:
    """Return the shards of each set of ours, the legacy files of each (kind, epoch, step), and all other files."""
    sets: dict[object, list[Shard]] = defaultdict(list)
    legacy: dict[object, list[Shard]] = defaultdict(list)
    strange: list[Shard] = []
    for shard in shards:
        m = shard.manifest
        if m is not None and _is_in_place(shard, m):
            sets[m.run_id, m.attempt, m.kind, m.epoch, m.step, m.repeat].append(shard)
        elif m is not None or shard.problem is not None:
            strange.append(shard)
        else:
            legacy[shard.name.kind, shard.name.epoch, shard.name.step].append(shard)
    return sets.values(), legacy.values(), strange


def _believed(evidence: Evidence) -> Reports:
    """Return the reports without what the files of the same rank must know better: an older one that is not there."""
    listed: dict[tuple[Kind, int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for m in (shard.manifest for shard in evidence.shards if shard.manifest is not None):
        rank = (m.kind, m.stage, m.tp_rank)
        listed[rank] = max(listed[rank], (m.attempt, m.sequence))
    return {rank: [save for save in saves if save > listed[rank]] for rank, saves in evidence.committed.items()}


def _is_in_place(shard: Shard, manifest: ShardManifest) -> bool:
    """Return whether a file lies where its manifest says, under the name that its manifest gives."""
    if (manifest.kind, manifest.stage, manifest.tp_rank) != (shard.name.kind, shard.stage, shard.tp_rank):
        return False
    if shard.name.kind == "hf":
        return True
    has_suffix = shard.name.tp_rank is not None
    return (manifest.step, manifest.epoch, manifest.tp > 1) == (shard.name.step, shard.name.epoch, has_suffix)


def _as_set(shards: list[Shard], reports: Reports) -> Checkpoint:
    """Put the shards of one checkpoint together: complete, damaged, or partial with the missing ranks named."""
    one_each, copies = _one_for_each_rank(shards)
    m = one_each[0].manifest
    assert m is not None
    identity = CheckpointId(m.attempt, m.sequence, m.epoch, m.step)
    found = Checkpoint(identity, m.kind, State.COMPLETE, None, one_each, m.pp * m.tp, m.run_id, copies=copies)
    sizes = {(shard.manifest.pp, shard.manifest.tp) for shard in one_each if shard.manifest is not None}
    if len(sizes) > 1 or any(stage >= m.pp or tp >= m.tp for stage, tp in found.ranks):
        reason = "its shards disagree on the pipeline and tensor parallel sizes"
        return replace(found, state=State.DAMAGED, reason=reason)
    lacking = sorted({(stage, tp) for stage in range(m.pp) for tp in range(m.tp)} - found.ranks)
    if awaited := [rank for rank in lacking if (m.attempt, m.sequence) not in reports.get((m.kind, *rank), ())]:
        reason = "; ".join(f"stage {stage} tp {tp} not committed yet" for stage, tp in awaited)
        return replace(found, state=State.PARTIAL, reason=reason, awaited=tuple(awaited))
    damaged = [f"stage {shard.stage} tp {shard.tp_rank}: {shard.problem}" for shard in one_each if shard.problem]
    return replace(found, state=State.DAMAGED, reason="; ".join(damaged)) if damaged else _counted(found)


def _counted(checkpoint: Checkpoint) -> Checkpoint:
    """Say if the ranks count their saves differently: one of them has called ``save()`` more often than the others."""
    counts = {(shard.stage, shard.tp_rank): m.sequence for shard in checkpoint.shards if (m := shard.manifest)}
    others = [f"stage {stage} tp {tp} counts {n}" for (stage, tp), n in counts.items() if n != checkpoint.id.sequence]
    if not others:
        return checkpoint
    return replace(checkpoint, reason=f"it is save number {checkpoint.id.sequence}, and {'; '.join(others)}")


def _one_for_each_rank(shards: list[Shard]) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Return one file for each rank, a whole one where there is one, and the other files of the same shards."""
    chosen: dict[Rank, Shard] = {}
    copies = []
    for shard in sorted(shards, key=lambda s: (s.stage, s.tp_rank, s.problem is not None, s.path)):
        if chosen.setdefault((shard.stage, shard.tp_rank), shard) is not shard:
            copies.append(shard)
    return tuple(chosen.values()), tuple(copies)


def _legacy(shards: list[Shard]) -> Checkpoint:
    """List what the old trainer wrote for one step and epoch; how many files make it whole, nobody can tell."""
    one_each, copies = _one_for_each_rank(shards)
    name = one_each[0].name
    identity, reason = CheckpointId(0, 0, name.epoch or 0, name.step or 0), "written without a manifest"
    return Checkpoint(identity, name.kind, State.LEGACY, reason, one_each, 0, copies=copies)


def _strange(shard: Shard) -> Checkpoint:
    """List a file that cannot be put into any set."""
    identity = CheckpointId(0, 0, shard.name.epoch or 0, shard.name.step or 0)
    reason = shard.problem or "its name is not the one that its manifest gives"
    return Checkpoint(identity, shard.name.kind, State.DAMAGED, reason, (shard,), 0)


def _run_id(attempts: Sequence[Attempt], sets: Sequence[Checkpoint]) -> str | None:
    """Return the run that this directory belongs to: its newest start says so, else its newest file."""
    if attempts:
        return max(attempts, key=lambda attempt: attempt.n).run_id
    return max(sets, key=lambda c: (c.id.attempt, c.id.sequence, c.run_id or "")).run_id if sets else None


# --- lineage and states -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """Which attempts count: ``reach`` maps each to the highest sequence that does. The rest is as in ``Catalog``."""

    head: int | None
    reach: Mapping[int, float]
    records: Mapping[int, Attempt]
    origin: tuple[int, int] | None

    @classmethod
    def derive(cls, records: Mapping[int, Attempt], sets: list[Checkpoint]) -> Lineage:
        """Follow the resumes back from the head, the newest attempt that has resumed or has a file.

        A roll-back that the user asked for cuts at once. A resume that nobody steered (it may have fallen back because
        a file was unreadable for a moment) cuts only once the new attempt has a complete checkpoint; until then all
        that counted before counts still.
        """
        heads = sorted({c.id.attempt for c in sets} | {n for n, record in records.items() if record.resumed_from})
        filled = {c.id.attempt for c in sets if c.kind == "train" and c.state is State.COMPLETE}
        if not heads:
            return cls(None, {}, records, None)
        parents = _parents(heads, records, sets)
        reach: dict[int, float] = {}
        since = 0
        for number in reversed(heads):
            if number < since:
                break  # what counted when the one after it resumed has no file left
            ancestor: tuple[int, float] | None = (number, math.inf)
            while ancestor is not None:
                reach[ancestor[0]] = max(ancestor[1], reach.get(ancestor[0], -1))
                ancestor = parents.get(ancestor[0])
            resumed = _resumed(number, records)
            if number in filled or number not in parents or (resumed is not None and resumed.explicit):
                break
            since = parents[number][0]
        start = _resumed(heads[-1], records) if heads[-1] not in filled else None
        return cls(heads[-1], reach, records, (start.attempt, start.sequence) if start else None)

    def includes(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint counts. A resume names a training checkpoint, so only those can be cut off."""
        limit = self.reach.get(checkpoint.id.attempt)
        return limit is not None and (checkpoint.kind != "train" or checkpoint.id.sequence <= limit)

    def is_branch(self, attempt: int) -> bool:
        """Return whether an attempt is one that counts, or is known to have grown out of one."""
        while attempt not in self.reach:
            if (resumed := _resumed(attempt, self.records)) is None:
                return False
            attempt = resumed.attempt
        return True

    def departure(self, attempt: int) -> str:
        """Say which resume left the checkpoints of ``attempt`` behind."""
        number = min(n for n in self.reach if n > attempt)
        resumed = _resumed(number, self.records)
        origin = f"attempt {resumed.attempt} sequence {resumed.sequence}" if resumed else "an unknown place"
        return f"attempt {number} resumed from {origin}"


def _parents(heads: list[int], records: Mapping[int, Attempt], sets: list[Checkpoint]) -> dict[int, tuple[int, float]]:
    """Return what each attempt grew out of, and up to which sequence; fresh starts have no entry.

    An attempt whose record is lost is taken to follow the whole of the one before it, unless that had another layout.
    """
    parents = {n: (origin.attempt, float(origin.sequence)) for n in records if (origin := _resumed(n, records))}
    layouts = {c.id.attempt: (m.pp, m.tp) for c in sets if (m := c.shards[0].manifest) is not None}
    for old, new in pairwise(sorted({*heads, *(attempt for attempt, _ in parents.values())})):
        if new not in records and layouts.get(old, layouts.get(new)) == layouts.get(new, layouts.get(old)):
            parents[new] = (old, math.inf)
    return parents


def _resumed(number: int, records: Mapping[int, Attempt]) -> Origin | None:
    """Return what an attempt resumed from; None for a fresh start, for a lost record, and for nonsense."""
    origin = records[number].resumed_from if number in records else None
    return origin if origin is not None and origin.attempt < number else None


@dataclass(frozen=True)
class _Progress:
    """How far every rank has come; ``newest`` has an entry for each (kind, stage, tp rank) that is known at all."""

    newest: Mapping[tuple[Kind, int, int], tuple[int, int]]
    saves: Mapping[Kind, Sequence[tuple[int, int]]]
    slots: int
    last_attempt: int

    @classmethod
    def derive(cls, sets: Sequence[Checkpoint], reports: Reports, slots: int, last_attempt: int) -> _Progress:
        newest = {rank: max(held, default=(0, 0)) for rank, held in reports.items()}
        saves: dict[Kind, list[tuple[int, int]]] = defaultdict(list)
        for checkpoint in sets:
            save = (checkpoint.id.attempt, checkpoint.id.sequence)
            saves[checkpoint.kind].append(save)
            for stage, tp in checkpoint.ranks:
                rank = (checkpoint.kind, stage, tp)
                newest[rank] = max(newest.get(rank, save), save)
        return cls(newest, saves, slots, last_attempt)

    def death(self, checkpoint: Checkpoint) -> str | None:
        """Return why a partial set can no longer complete, or None if it can."""
        save = (checkpoint.id.attempt, checkpoint.id.sequence)
        for stage, tp in checkpoint.awaited:
            newest = self.newest.get((checkpoint.kind, stage, tp))
            if newest is None:
                continue
            if checkpoint.id.attempt < self.last_attempt:
                return f"attempt {checkpoint.id.attempt} has ended"
            if newest > save:
                return f"stage {stage} tp {tp} has committed a later one"
        later = sum(other > save for other in self.saves[checkpoint.kind])
        return f"{later} newer saves have come since" if later > self.slots + 1 else None


def _judge(checkpoint: Checkpoint, lineage: Lineage, progress: _Progress) -> Checkpoint:
    """Return the checkpoint with its final state and reason."""
    attempt, counts = checkpoint.id.attempt, lineage.includes(checkpoint)
    if not counts and not lineage.is_branch(attempt):
        return replace(checkpoint, state=State.FOREIGN, reason=f"attempt {attempt} is not one that this run came from")
    if checkpoint.state is State.PARTIAL and (death := progress.death(checkpoint)):
        return replace(checkpoint, state=State.DEAD, reason=f"{checkpoint.reason}, and {death}")
    if not counts:
        return replace(checkpoint, state=State.ABANDONED, reason=lineage.departure(attempt))
    return checkpoint
