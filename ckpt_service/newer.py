"""Checkpoints that only a newer release can read: how they stand to those that this one can. Pure.

They are nobody's damage. Passing over them would train on from older weights although better ones are there, so who
looks for the newest checkpoint asks here first, and the user decides: upgrade, or name an older one.
"""

from __future__ import annotations

from ckpt_service.catalog import Catalog, Checkpoint, State
from ckpt_service.naming import Kind


def may_be_newer(doubtful: Checkpoint, taken: Checkpoint) -> bool:
    """Return whether a checkpoint that cannot be read may be newer than another.

    A file that lost its manifest lost its place in the order too; then the numbers in the names have to do.
    """
    if doubtful.id.attempt == 0 < taken.id.attempt:
        return (doubtful.id.epoch, doubtful.id.step) > (taken.id.epoch, taken.id.step)
    return doubtful.order > taken.order


def unreadable_newest(catalog: Catalog, kind: Kind = "train") -> Checkpoint | None:
    """Return a checkpoint of a newer format that is, or may be, newer than the newest complete one; None if none is."""
    newest = catalog.newest_complete(kind)
    for checkpoint in catalog.of_kind(kind):
        if checkpoint.state is not State.DAMAGED or not any(shard.newer_format for shard in checkpoint.shards):
            continue  # an abandoned or foreign one would not be resumed by a newer release either
        if newest is None or may_be_newer(checkpoint, newest):
            return checkpoint
    return None
