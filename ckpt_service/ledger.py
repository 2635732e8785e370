"""What happened since the daemon started, as the status shows it. Pure; kept on the event loop only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ckpt_service.catalog import Catalog
from ckpt_service.errors import CkptError
from ckpt_service.messages import Hello
from ckpt_service.naming import Kind
from ckpt_service.prune import Retained
from ckpt_service.records import (
    CheckpointRef,
    CommittedRef,
    CompleteRef,
    ErrorEntry,
    HeldBack,
    ShardManifest,
    ShardStatus,
    Totals,
)
from ckpt_service.retention import held_back

_ERRORS_SHOWN = 20


def reference(manifest: ShardManifest) -> CheckpointRef:
    """Return which checkpoint a shard belongs to."""
    return CheckpointRef(attempt=manifest.attempt, sequence=manifest.sequence, epoch=manifest.epoch, step=manifest.step)


@dataclass
class ShardRecord:
    """What happened to one (kind, stage, tp rank) since the daemon started."""

    submitted: CheckpointRef | None = None
    committed: CommittedRef | None = None
    kept: tuple[CheckpointRef, ...] = ()
    held_back_by: tuple[HeldBack, ...] = ()
    failures: int = 0
    last_error: str | None = None


@dataclass
class Ledger:
    """Counts and last events, as the status shows them."""

    shards: dict[tuple[Kind, int, int], ShardRecord] = field(default_factory=dict)
    errors: deque[ErrorEntry] = field(default_factory=lambda: deque(maxlen=_ERRORS_SHOWN))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Totals.model_fields, 0))
    last_complete: CompleteRef | None = None
    failed_since_commit: bool = False
    blocked_seconds: float = 0.0
    newest_trainer: Hello | None = None
    _odd: set[tuple[int, int]] = field(default_factory=set)

    def greeted(self, hello: Hello) -> None:
        """Note a trainer; the newest attempt is the one that the status is about, also when it has left."""
        if self.newest_trainer is None or hello.attempt >= self.newest_trainer.attempt:
            self.newest_trainer = hello

    def submitted(self, manifest: ShardManifest) -> None:
        """Note an accepted snapshot."""
        self._shard(manifest).submitted = reference(manifest)
        self.counts["submitted"] += 1

    def committed(self, manifest: ShardManifest, *, path: str, at: datetime, seconds: float, written: int) -> None:
        """Note a durable shard."""
        shard = self._shard(manifest)
        shard.committed = CommittedRef(
            **dict(reference(manifest)), path=path, bytes=manifest.bytes, committed_at=at, seconds=seconds
        )
        shard.failures = 0
        self.failed_since_commit = False
        self.counts["committed"] += 1
        self.counts["bytes_written"] += written

    def failed(self, manifest: ShardManifest, error: CkptError, at: datetime, *, final: bool) -> None:
        """Note a failure; ``final`` when the snapshot is lost, else it is tried again."""
        shard = self._shard(manifest)
        shard.last_error = str(error)
        if final:
            shard.failures += 1
            self.failed_since_commit = True
        self.counts["failed" if final else "retried"] += 1
        self.complain(error, at, manifest)

    def complain(self, error: CkptError, at: datetime, manifest: ShardManifest | None = None) -> None:
        """Note an error that a person should see."""
        self.errors.append(
            ErrorEntry(
                at=at,
                code=error.code,
                message=str(error.args[0]),
                hint=error.hint,
                step=manifest.step if manifest else None,
                stage=manifest.stage if manifest else None,
                tp_rank=manifest.tp_rank if manifest else None,
            )
        )

    def retained(self, retained: Retained) -> None:
        """Note what retention left of a shard's history, how much it deleted, and who keeps it from deleting more."""
        kind, stage, tp_rank = retained.history.key
        shard = self.shards.setdefault((kind, stage, tp_rank), ShardRecord())
        kept = (found.manifest for found in retained.plan.keep)
        shard.kept = tuple(reference(manifest) for manifest in kept if manifest is not None)
        waiting = held_back(retained.catalog, kind=kind, stage=stage, tp_rank=tp_rank)
        shard.held_back_by = tuple(HeldBack(stage=s, tp_rank=t, behind=n) for (s, t), n in sorted(waiting.items()))
        self.counts["pruned"] += retained.deleted
        if kind == "train":
            self.seen(retained.catalog)

    def seen(self, catalog: Catalog) -> None:
        """Note the newest complete checkpoint, and complain once if there is something odd about it."""
        newest = catalog.newest_complete()
        if newest is None:
            self.last_complete = None
            return
        odd = (newest.id.attempt, newest.id.sequence)
        if newest.reason is not None and odd not in self._odd:
            self._odd.add(odd)
            error = CkptError(f"step {newest.id.step} is complete, but {newest.reason}", op="save")
            self.complain(error, datetime.now(timezone.utc), newest.shards[0].manifest)
        self.last_complete = CompleteRef(
            attempt=newest.id.attempt,
            sequence=newest.id.sequence,
            epoch=newest.id.epoch,
            step=newest.id.step,
            ranks_committed=len(newest.ranks),
            ranks_expected=newest.expected,
            committed_at=datetime.fromtimestamp(newest.modified).astimezone(),
        )

    def shard_statuses(self) -> list[ShardStatus]:
        """Return the history of every shard, as the status file shows it."""
        return [
            ShardStatus(
                kind=kind,
                stage=stage,
                tp_rank=tp_rank,
                last_submitted=record.submitted,
                last_committed=record.committed,
                kept=list(record.kept),
                held_back_by=list(record.held_back_by),
                consecutive_failures=record.failures,
                last_error=record.last_error,
            )
            for (kind, stage, tp_rank), record in sorted(self.shards.items())
        ]

    def _shard(self, manifest: ShardManifest) -> ShardRecord:
        return self.shards.setdefault((manifest.kind, manifest.stage, manifest.tp_rank), ShardRecord())
