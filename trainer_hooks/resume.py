"""Which checkpoint to go on from, and its state. Works with no daemon.

Choosing is pure: :func:`candidates` takes the catalog and gives the checkpoints to try, best first. Loading tries
them one after the other; one that is damaged is skipped, with a reason, never half loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckpt_service.catalog import Catalog, Checkpoint, CheckpointId, Shard, State
from ckpt_service.errors import DamagedCheckpoint, LayoutMismatch, NoUsableCheckpoint
from trainer_hooks.load import load_legacy, load_shard
from trainer_hooks.topology import Topology
from trainer_hooks.values import Allowed

Skipped = tuple[CheckpointId, str]


@dataclass(frozen=True)
class ResumePoint:
    """What training goes on from.

    Attributes:
        step, epoch, attempt, sequence: the checkpoint; attempt and sequence are 0 for a legacy file.
        path: this rank's file.
        source: where the bytes came from.
        state: the whole state of this rank. Its tensors may be the very ones that tracked optimizers hold from now on.
        skipped: newer checkpoints that were passed over, each with the reason.
    """

    step: int
    epoch: int
    attempt: int
    sequence: int
    path: Path
    source: Literal["memory", "disk"]
    state: Any
    skipped: list[Skipped]


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
    """
    history = catalog.of_kind("train")
    usable = [checkpoint for checkpoint in history if checkpoint.state is State.COMPLETE]
    if step is not None:
        named = [_named(usable, history, step, epoch)]
        _require_layout(named[0], topology)
        return Choice(named, [])
    if not usable:
        usable = [checkpoint for checkpoint in history if checkpoint.state is State.LEGACY]
    elif usable[0].state is State.COMPLETE:
        _require_layout(usable[0], topology)
    newest = usable[0].order if usable else None
    passed = [c for c in history if c.state is State.DAMAGED and (newest is None or c.order > newest)]
    return Choice([c for c in usable if _fits(c, topology)], [(c.id, c.reason or "damaged") for c in passed])


def load_first(choice: Choice, topology: Topology, allowed: Allowed, *, explicit: bool) -> ResumePoint | None:
    """Load the first candidate that is whole; None if there is none at all.

    Raises:
        NoUsableCheckpoint: there are some, and all are damaged.
        DamagedCheckpoint: the one that the user named is damaged.
    """
    skipped = list(choice.skipped)
    for checkpoint in choice.candidates:
        shard = own_shard(checkpoint, topology)
        try:
            state = (
                load_legacy(shard.path) if shard.manifest is None else load_shard(shard.path, shard.manifest, allowed)
            )
        except DamagedCheckpoint as error:
            if explicit:
                raise
            skipped.append((checkpoint.id, str(error)))
            continue
        _warn(skipped, checkpoint.id)
        found = checkpoint.id
        return ResumePoint(
            found.step, found.epoch, found.attempt, found.sequence, Path(shard.path), "disk", state, skipped
        )
    if skipped:
        reasons = "; ".join(f"step {found.step} epoch {found.epoch}: {reason}" for found, reason in skipped)
        raise NoUsableCheckpoint(f"every checkpoint is damaged: {reasons}", op="resume")
    return None


def own_shard(checkpoint: Checkpoint, topology: Topology) -> Shard:
    """Return this rank's file of a complete checkpoint."""
    mine = (topology.stage, topology.tp_rank)
    return next(shard for shard in checkpoint.shards if (shard.stage, shard.tp_rank) == mine)


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


def _fits(checkpoint: Checkpoint, topology: Topology) -> bool:
    return (topology.stage, topology.tp_rank) in checkpoint.ranks


def _require_layout(checkpoint: Checkpoint, topology: Topology) -> None:
    manifest = checkpoint.shards[0].manifest
    assert manifest is not None
    if (manifest.pp, manifest.tp) != (topology.pp, topology.tp):
        raise LayoutMismatch(
            f"step {checkpoint.id.step} was saved with pp={manifest.pp} tp={manifest.tp}, "
            f"and this run has pp={topology.pp} tp={topology.tp}",
            op="resume",
            step=checkpoint.id.step,
            hint="start with the sizes it was saved with, or in another root",
        )


def _warn(skipped: Sequence[Skipped], taken: CheckpointId) -> None:
    for found, reason in skipped:
        warnings.warn(
            f"resuming from step {taken.step}: passed over step {found.step} epoch {found.epoch}: {reason}",
            stacklevel=5,
        )
