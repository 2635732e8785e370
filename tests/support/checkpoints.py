"""Shards, attempts and catalogs made up in memory, for tests of what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

from ckpt_service import naming
from ckpt_service.catalog import Catalog, Checkpoint, Evidence, Rank, Shard, build
from ckpt_service.naming import Kind
from ckpt_service.records import (
    Attempt,
    Origin,
    ShardManifest,
    TopologyRecord,
)
from trainer_hooks.topology import Topology

LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.utc)
RUN = "run-a"
SIZE = 10_000


def shard(
    attempt: int,
    sequence: int,
    step: int,
    epoch: int = 0,
    *,
    stage: int = 0,
    tp_rank: int = 0,
    pp: int = 1,
    tp: int = 1,
    repeat: int = 0,
    kind: Kind = "train",
    run_id: str = RUN,
    modified: float = 0.0,
    set_aside: bool = False,
    problem: str | None = None,
) -> Shard:
    """Return one committed shard file, under the name that belongs to it."""
    final = naming.shard(kind, stage=stage, tp_rank=tp_rank, tp=tp, step=step, epoch=epoch)
    name = naming.parse_shard(final)
    assert name is not None
    file = naming.kept(final, attempt=attempt, sequence=sequence) if set_aside else final
    manifest = ShardManifest(
        kind=kind,
        run_id=run_id,
        attempt=attempt,
        sequence=sequence,
        repeat=repeat,
        step=step,
        epoch=epoch,
        stage=stage,
        tp_rank=tp_rank,
        pp=pp,
        tp=tp,
        dp=1,
        created_at=LONG_AGO,
        producer="test",
        bytes=SIZE,
        tensors=1,
    )
    path = f"/runs/{naming.stage_directory(stage, None)}/{file}"
    return Shard(path, name, stage, SIZE, modified, manifest, problem)


def shards(attempt: int, sequence: int, step: int, epoch: int = 0, *, pp: int = 1, tp: int = 1) -> list[Shard]:
    """Return all shard files of one checkpoint."""
    return [
        shard(attempt, sequence, step, epoch, stage=stage, tp_rank=rank, pp=pp, tp=tp) for stage, rank in ranks(pp, tp)
    ]


def legacy(name: str, *, stage: int = 0, problem: str | None = None, modified: float = 0.0) -> Shard:
    """Return a file without a manifest; with ``problem`` one that is no checkpoint at all."""
    parsed = naming.parse_shard(name)
    assert parsed is not None
    return Shard(f"/runs/{naming.stage_directory(stage, None)}/{name}", parsed, stage, SIZE, modified, None, problem)


def attempt(
    number: int,
    resumed_from: tuple[int, int] | None = None,
    *,
    explicit: bool = False,
    run_id: str = RUN,
    slots: int = 2,
    pp: int = 1,
    tp: int = 1,
) -> Attempt:
    """Return the record of one start of the trainer."""
    origin = Origin(attempt=resumed_from[0], sequence=resumed_from[1], explicit=explicit) if resumed_from else None
    return Attempt(
        run_id=run_id,
        n=number,
        host="host",
        pid=1,
        pid_start=1,
        topology=TopologyRecord(pp=pp, dp=1, tp=tp),
        slots=slots,
        started_at=LONG_AGO,
        resumed_from=origin,
    )


def catalog(
    files: Iterable[Shard], *attempts: Attempt, pins: Iterable[tuple[int, int]] = (), slots: int = 2
) -> Catalog:
    """Derive the catalog of a directory that all ranks share."""
    return build(Evidence(list(files), attempts, frozenset(pins), slots=slots))


def ranks(pp: int, tp: int) -> list[Rank]:
    """Return every (stage, tp rank)."""
    return [(stage, tp_rank) for stage in range(pp) for tp_rank in range(tp)]


def topologies(pp: int = 1, tp: int = 1, dp: int = 1) -> list[Topology]:
    """Return the place of every process."""
    return [Topology(rank, pp, dp, tp) for rank in range(pp * dp * tp)]


def states(found: Catalog) -> dict[int, str]:
    """Return the state of each checkpoint by its step, for tests where every step is saved once."""
    return {checkpoint.id.step: checkpoint.state.value for checkpoint in found.checkpoints}


def step_of(checkpoint: Checkpoint | None) -> int | None:
    """Return the step of a checkpoint, or None."""
    return checkpoint.id.step if checkpoint else None
