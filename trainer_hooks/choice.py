"""Which checkpoints a resume tries, in which order. Pure: catalog in, choice out.

All ranks call this with the same evidence, so all come to the same choice, or to the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_service.catalog import Catalog, Checkpoint, CheckpointId, Shard, State
from ckpt_service.errors import LayoutMismatch, NewerFormat
from ckpt_service.newer import may_be_newer, unreadable_newest
from trainer_hooks.topology import Topology

Skipped = tuple[CheckpointId, str]


@dataclass(frozen=True)
class Choice:
    """The checkpoints to try, best first, and those that are out of the question, with the reason."""

    candidates: Sequence[Checkpoint]
    skipped: Sequence[Skipped]


def candidates(catalog: Catalog, topology: Topology, step: int | None, epoch: int | None) -> Choice:
    """Choose what a resume tries: the complete ones of the lineage, newest first, or the one that is named.

    Raises:
        ValueError: the named one is not there, or the step alone does not name one.
        LayoutMismatch: what would be tried was saved with another pp or tp.
        NewerFormat: none is named, and the newest was saved by a newer release.
    """
    history = catalog.of_kind("train")
    usable = [checkpoint for checkpoint in history if checkpoint.state is State.COMPLETE]
    legacy = [c for c in history if c.state is State.LEGACY and c.ranks == _all(topology)]
    if step is not None:
        named = _named(usable or legacy, history, step, epoch)
        _require_layout(named, topology)
        return Choice([named], [])
    _require_readable(catalog)
    if usable:
        _require_layout(usable[0], topology)
    else:
        if partial := [checkpoint for checkpoint in history if checkpoint.state in (State.PARTIAL, State.DEAD)]:
            _require_layout(partial[0], topology)  # it may look partial only because there are other ranks now
        # Nobody can tell how many files the old trainer wrote, but every rank needs one, or they would part ways here.
        usable = legacy
    damaged = [checkpoint for checkpoint in history if checkpoint.state is State.DAMAGED]
    passed = [c for c in damaged if not usable or may_be_newer(c, usable[0])]
    return Choice(usable, [(c.id, c.reason or "damaged") for c in passed])


def _require_readable(catalog: Catalog) -> None:
    """Going back to what this release can read would lose what a newer one has saved: the user has to decide."""
    newest = unreadable_newest(catalog)
    if newest is None:
        return
    raise NewerFormat(
        f"step {newest.id.step} epoch {newest.id.epoch} was saved by a newer release: {newest.reason}",
        op="resume",
        step=newest.id.step,
        path=newest.shards[0].path,
        hint="or go back on purpose, with resume(step=...)",
    )


def _mine(topology: Topology) -> tuple[int, int]:
    return (topology.stage, topology.tp_rank)


def _all(topology: Topology) -> frozenset[tuple[int, int]]:
    return frozenset((stage, tp_rank) for stage in range(topology.pp) for tp_rank in range(topology.tp))


def own_shard(checkpoint: Checkpoint, topology: Topology) -> Shard:
    """Return this rank's file of a complete checkpoint."""
    return next(shard for shard in checkpoint.shards if (shard.stage, shard.tp_rank) == _mine(topology))


def _named(usable: Sequence[Checkpoint], history: Sequence[Checkpoint], step: int, epoch: int | None) -> Checkpoint:
    what = f"step={step}" + ("" if epoch is None else f", epoch={epoch}")

    def fits(checkpoint: Checkpoint) -> bool:
        return checkpoint.id.step == step and epoch in (None, checkpoint.id.epoch)

    found = [checkpoint for checkpoint in usable if fits(checkpoint)]
    if not found:
        others = [f"it is {c.state.value}: {c.reason}" for c in history if fits(c)]
        there = ", ".join(f"{c.id.step}:{c.id.epoch}" for c in usable) or "none"
        raise ValueError(
            f"{what}: no such complete checkpoint; {'; '.join(others) or f'there are (step:epoch) {there}'}"
        )
    epochs = sorted({checkpoint.id.epoch for checkpoint in found})
    if len(epochs) > 1:
        raise ValueError(f"{what}: give the epoch as well, there are {epochs}")
    return found[0]


def _require_layout(checkpoint: Checkpoint, topology: Topology) -> None:
    manifest = checkpoint.shards[0].manifest
    if manifest is None:
        return  # a legacy file does not say how it was split
    if (manifest.pp, manifest.tp) != (topology.pp, topology.tp):
        raise LayoutMismatch(
            f"step {checkpoint.id.step} was saved with pp={manifest.pp} tp={manifest.tp}, "
            f"and this run has pp={topology.pp} tp={topology.tp}",
            op="resume",
            step=checkpoint.id.step,
            hint="start with the sizes it was saved with, or in another root",
        )
