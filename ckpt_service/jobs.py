"""The life of the snapshots that a daemon has accepted: events in, instructions out. Pure.

The book holds one :class:`Job` per accepted snapshot. The shell reports what happened as an event and carries out the
instructions that come back, in order. Which event may meet which phase is the literal table ``TRANSITIONS``; anything
else is our own bug and asserts. Time comes in with the events, in seconds of a monotonic clock.

Rules that live here: the oldest set first; shards of one rank strictly one after the other; several ranks side by side;
what may pass is retried with growing pauses from the image, what cannot pass fails at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from ckpt_service.naming import Kind


class Phase(str, Enum):
    """Where a snapshot is on its way to disk."""

    QUEUED = "queued"
    WRITING = "writing"
    SYNCING = "syncing"
    RENAMING = "renaming"
    PRUNING = "pruning"
    WAITING = "waiting"
    PARKED = "parked"
    COMMITTED = "committed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


ACTIVE = frozenset({Phase.WRITING, Phase.SYNCING, Phase.RENAMING, Phase.PRUNING})
ENDED = frozenset({Phase.COMMITTED, Phase.FAILED, Phase.CANCELLED, Phase.SUPERSEDED})


@dataclass(frozen=True, order=True)
class JobKey:
    """The identity of a snapshot; sorts the oldest set first."""

    attempt: int
    sequence: int
    kind: Kind
    stage: int
    tp_rank: int

    @property
    def shard(self) -> tuple[Kind, int, int]:
        """The history that it belongs to: (kind, stage, tp rank)."""
        return (self.kind, self.stage, self.tp_rank)


@dataclass(frozen=True)
class Job:
    """An accepted snapshot. ``client`` is who waits for it, None once that one is gone."""

    key: JobKey
    nbytes: int
    client: int | None
    phase: Phase = Phase.QUEUED
    tries: int = 0
    orphaned_at: float | None = None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offered:
    """A client hands a snapshot over, for the first time or again."""

    key: JobKey
    nbytes: int
    client: int


@dataclass(frozen=True)
class Synced:
    """All bytes are written; the file is being synced."""

    key: JobKey


@dataclass(frozen=True)
class Renaming:
    """The file is durable and gets its final name."""

    key: JobKey


@dataclass(frozen=True)
class Landed:
    """The final name is durable; retention follows."""

    key: JobKey


@dataclass(frozen=True)
class Pruned:
    """Retention is done, whatever it could delete."""

    key: JobKey


@dataclass(frozen=True)
class Broke:
    """The write failed and its temporary file is gone."""

    key: JobKey
    retryable: bool
    at: float


@dataclass(frozen=True)
class RetryDue:
    """The pause before another try is over."""

    key: JobKey


@dataclass(frozen=True)
class Parked:
    """The trainers consider dropping this snapshot for a newer one; it must not start meanwhile."""

    key: JobKey


@dataclass(frozen=True)
class Unparked:
    """Some other rank could not park its part of the set: this one is written after all."""

    key: JobKey


@dataclass(frozen=True)
class Dropped:
    """All ranks have parked their part of the set, and drop it."""

    key: JobKey


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants this snapshot any more."""

    key: JobKey


@dataclass(frozen=True)
class ClientGone:
    """A client's connection ended."""

    client: int
    at: float


JobEvent = Synced | Renaming | Landed | Pruned | Broke | RetryDue | Parked | Unparked | Dropped | Cancelled
Event = Offered | JobEvent | ClientGone


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accept:
    """Tell the client that its snapshot is held."""

    key: JobKey
    client: int


@dataclass(frozen=True)
class Start:
    """Begin to write."""

    key: JobKey


@dataclass(frozen=True)
class Abort:
    """Stop the write as soon as it can be stopped, and remove its temporary file."""

    key: JobKey


@dataclass(frozen=True)
class Pause:
    """Report :class:`RetryDue` after this many seconds."""

    key: JobKey
    seconds: float


@dataclass(frozen=True)
class Prune:
    """Publish the status, then delete what retention allows, then report :class:`Pruned`."""

    key: JobKey


@dataclass(frozen=True)
class Report:
    """The fate of a snapshot is known; tell the client, if there is one, and count it."""

    key: JobKey
    client: int | None
    phase: Phase


@dataclass(frozen=True)
class Forget:
    """Let go of the image and of everything kept for this snapshot."""

    key: JobKey


Instruction = Accept | Start | Abort | Pause | Prune | Report | Forget

TRANSITIONS: dict[tuple[Phase, type], Phase] = {
    (Phase.QUEUED, Parked): Phase.PARKED,
    (Phase.QUEUED, Cancelled): Phase.CANCELLED,
    (Phase.PARKED, Unparked): Phase.QUEUED,
    (Phase.PARKED, Dropped): Phase.SUPERSEDED,
    (Phase.PARKED, Cancelled): Phase.CANCELLED,
    (Phase.WRITING, Synced): Phase.SYNCING,
    (Phase.WRITING, Broke): Phase.WAITING,
    (Phase.SYNCING, Renaming): Phase.RENAMING,
    (Phase.SYNCING, Broke): Phase.WAITING,
    (Phase.RENAMING, Landed): Phase.PRUNING,
    (Phase.RENAMING, Broke): Phase.WAITING,
    (Phase.PRUNING, Pruned): Phase.COMMITTED,
    (Phase.WAITING, RetryDue): Phase.QUEUED,
    (Phase.WAITING, Cancelled): Phase.CANCELLED,
}
"""What an event makes of a phase. A cancelled write that is under way first breaks, see :class:`Abort`."""


@dataclass
class JobBook:
    """All jobs of a daemon that have not ended."""

    shards_at_once: int
    max_tries: int
    orphan_seconds: float
    jobs: dict[JobKey, Job] = field(default_factory=dict)
    _doomed: set[JobKey] = field(default_factory=set)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in and return what is to be done, in this order."""
        instructions = list(self._react(event))
        instructions += self._start_next()
        return instructions

    def left_by_older(self, stage: int, tp_rank: int, attempt: int) -> list[Job]:
        """Return the jobs that attempts before this one left for a (stage, tp rank)."""
        mine = [job for job in self.jobs.values() if (job.key.stage, job.key.tp_rank) == (stage, tp_rank)]
        return [job for job in mine if job.key.attempt < attempt]

    def can_park(self, key: JobKey) -> bool:
        """Return whether a snapshot is here and its write has not begun."""
        return key in self.jobs and self.jobs[key].phase is Phase.QUEUED

    def is_parked(self, key: JobKey) -> bool:
        """Return whether a snapshot is parked."""
        return key in self.jobs and self.jobs[key].phase is Phase.PARKED

    def check(self) -> None:
        """Assert what must hold between any two events."""
        active = [job for job in self.jobs.values() if job.phase in ACTIVE]
        assert len(active) <= self.shards_at_once, "too many writes side by side"
        assert len({job.key.shard for job in active}) == len(active), "two writes of one shard at once"
        assert not any(job.phase in ENDED for job in self.jobs.values()), "an ended job is still in the book"
        assert self._doomed <= {job.key for job in active}, "only a running write can be doomed"

    def _react(self, event: Event) -> Iterator[Instruction]:
        match event:
            case Offered():
                yield from self._offered(event)
            case ClientGone():
                self._client_gone(event)
            case Cancelled() if self.jobs[event.key].phase in ACTIVE:
                if self.jobs[event.key].phase is not Phase.PRUNING:
                    self._doomed.add(event.key)
                    yield Abort(event.key)
            case Broke():
                yield from self._broke(event)
            case Landed():
                job = self._step(event)
                self._doomed.discard(event.key)
                yield Report(job.key, job.client, Phase.COMMITTED)
                yield Prune(job.key)
            case Pruned() | Cancelled() | Dropped():
                yield from self._end(self._step(event))
            case _:
                self._step(event)

    def _step(self, event: JobEvent) -> Job:
        job = self.jobs[event.key]
        assert (job.phase, type(event)) in TRANSITIONS, f"{type(event).__name__} meets a job that is {job.phase.value}"
        moved = replace(job, phase=TRANSITIONS[(job.phase, type(event))])
        self.jobs[event.key] = moved
        return moved

    def _offered(self, event: Offered) -> Iterator[Instruction]:
        known = self.jobs.get(event.key)
        if known is None:
            self.jobs[event.key] = Job(event.key, event.nbytes, event.client)
        else:
            phase = Phase.QUEUED if known.phase is Phase.PARKED else known.phase  # whoever parked it has lost track
            self.jobs[event.key] = replace(known, client=event.client, orphaned_at=None, phase=phase)
        yield Accept(event.key, event.client)
        if known is not None and known.phase is Phase.PRUNING:
            yield Report(event.key, event.client, Phase.COMMITTED)

    def _client_gone(self, event: ClientGone) -> None:
        for key, job in self.jobs.items():
            if job.client == event.client:
                phase = Phase.QUEUED if job.phase is Phase.PARKED else job.phase
                self.jobs[key] = replace(job, client=None, orphaned_at=event.at, phase=phase)

    def _broke(self, event: Broke) -> Iterator[Instruction]:
        job = replace(self._step(event), tries=self.jobs[event.key].tries + 1)
        self.jobs[event.key] = job
        orphaned = job.orphaned_at is not None and event.at - job.orphaned_at > self.orphan_seconds
        if event.key in self._doomed:
            self._doomed.discard(event.key)
            yield from self._end(replace(job, phase=Phase.CANCELLED))
        elif event.retryable and job.tries < self.max_tries and not orphaned:
            yield Pause(job.key, retry_pause(job.tries))
        else:
            yield from self._end(replace(job, phase=Phase.FAILED))

    def _end(self, job: Job) -> Iterator[Instruction]:
        del self.jobs[job.key]
        if job.phase is not Phase.COMMITTED:
            yield Report(job.key, job.client, job.phase)
        yield Forget(job.key)

    def _start_next(self) -> Iterator[Instruction]:
        running = {job.key.shard for job in self.jobs.values() if job.phase in ACTIVE}
        blocked = {job.key.shard for job in self.jobs.values() if job.phase in (Phase.WAITING, Phase.PARKED)}
        for key in sorted(self.jobs):
            if len(running) >= self.shards_at_once:
                return
            if self.jobs[key].phase is Phase.QUEUED and key.shard not in running | blocked:
                self.jobs[key] = replace(self.jobs[key], phase=Phase.WRITING)
                running.add(key.shard)
                yield Start(key)


def retry_pause(tries: int) -> float:
    """Return the seconds to wait before the next try, after this many failed: 0.5, 1, 2, ... at most 30."""
    return float(min(30.0, 0.5 * 2 ** min(tries - 1, 6)))
