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
    legacy = [c for c in history if is_whole_legacy(c, topology)]
    if step is not None:
        named = _named([*usable, *legacy], history, topology, step, epoch)
        require_layout(named, topology)
        return Choice([named], [])
    _require_readable(catalog)
    if usable:
        require_layout(usable[0], topology)
    else:
        if partial := [checkpoint for checkpoint in history if checkpoint.state in (State.PARTIAL, State.DEAD)]:
            require_layout(partial[0], topology)  # it may look partial only because there are other ranks now
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


def whose_is_unknown(checkpoint: Checkpoint, topology: Topology) -> str | None:
    """Return the file of an old trainer that all tensor-parallel ranks wrote, so that only the last one's is there."""
    legacy = checkpoint.shards if checkpoint.state is State.LEGACY and topology.tp > 1 else ()
    return next((shard.path for shard in legacy if shard.name.tp_rank is None), None)


def is_whole_legacy(checkpoint: Checkpoint, topology: Topology) -> bool:
    """Return whether an old trainer left a file for every rank."""
    whole = checkpoint.state is State.LEGACY and checkpoint.ranks == _all(topology)
    return whole and whose_is_unknown(checkpoint, topology) is None


def why_unusable(checkpoint: Checkpoint, topology: Topology) -> str:
    """Say why a checkpoint that is not complete cannot be loaded."""
    if path := whose_is_unknown(checkpoint, topology):
        return f"{path} holds the part of one of the {topology.tp} tensor-parallel ranks, and nothing says of which"
    return f"it is {checkpoint.state.value}: {checkpoint.reason}"


def saved_beside(found: Sequence[Checkpoint], topology: Topology, step: int, epoch: int, where: str) -> Checkpoint:
    """Choose among checkpoints of a kind that has no lineage (LoRA): whole ones, this run's first, old ones last.

    Raises:
        ValueError: there is none of this step and epoch; says ``where`` it was looked for, and what is there instead.
        LayoutMismatch: it was saved with another pp or tp.
    """
    named = [checkpoint for checkpoint in found if (checkpoint.id.step, checkpoint.id.epoch) == (step, epoch)]
    for checkpoint in named:
        require_layout(checkpoint, topology)
    order = (State.COMPLETE, State.FOREIGN, State.LEGACY)
    whole = [c for c in named if c.state in order and c.ranks == _all(topology)]
    usable = [c for c in whole if whose_is_unknown(c, topology) is None]
    if not usable:
        there = "; ".join(why_unusable(c, topology) for c in named) or "no such file"
        raise ValueError(f"step={step}, epoch={epoch}: nothing to load in {where}: {there}")
    return min(usable, key=lambda checkpoint: order.index(checkpoint.state))


def _named(
    usable: Sequence[Checkpoint], history: Sequence[Checkpoint], topology: Topology, step: int, epoch: int | None
) -> Checkpoint:
    what = f"step={step}" + ("" if epoch is None else f", epoch={epoch}")

    def fits(checkpoint: Checkpoint) -> bool:
        return checkpoint.id.step == step and epoch in (None, checkpoint.id.epoch)

    found = [checkpoint for checkpoint in usable if fits(checkpoint)]
    if not found:
        others = [why_unusable(c, topology) for c in history if fits(c)]
        there = ", ".join(f"{c.id.step}:{c.id.epoch}" for c in usable) or "none"
        raise ValueError(
            f"{what}: no such complete checkpoint; {'; '.join(others) or f'there are (step:epoch) {there}'}"
        )
    epochs = sorted({checkpoint.id.epoch for checkpoint in found})
    if len(epochs) > 1:
        raise ValueError(f"{what}: give the epoch as well, there are {epochs}")
    return found[0]


def require_layout(checkpoint: Checkpoint, topology: Topology) -> None:
    """Raise ``LayoutMismatch`` if a checkpoint was saved with another pp or tp."""
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
