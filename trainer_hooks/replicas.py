"""What data-parallel replicas do not share: their random numbers and their places in the data. Shell.

Only data-parallel rank 0 writes, and weights and moments are equal on all replicas; generators and loader positions are
not. Each replica leaves those few kilobytes for the writer, which puts them into the file as records of their own.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from ckpt_service.checksum import fill_in
from ckpt_service.records import ShardManifest
from trainer_hooks import capture, layout
from trainer_hooks.exchange import Exchange, take_all
from trainer_hooks.slots import Slot
from trainer_hooks.topology import Topology
from trainer_hooks.values import Allowed


def packed(state: Any, manifest: ShardManifest, allowed: Allowed, place: Topology) -> bytes:
    """Return the image of a replica's own state; ``manifest`` is that of its save.

    Raises:
        StateRefused: it holds something that cannot be saved.
    """
    blueprint = capture.blueprint(layout.plan(state, allowed, place))
    slot = Slot.create(blueprint.layout.nbytes)
    try:
        sized = manifest.model_copy(update={"bytes": blueprint.layout.nbytes, "tensors": blueprint.plan.tensors})
        view = capture.capture(blueprint, sized, slot).view
        fill_in(view, blueprint.layout)
        content = bytes(view)
        view.release()
        return content
    finally:
        slot.close()


def key(manifest: ShardManifest, dp_rank: int, *, saves_ago: int = 0) -> str:
    """Return under which key of the exchange a replica leaves its state of this save, or of an earlier one."""
    return f"replica/{manifest.sequence - saves_ago}/{manifest.stage}/{manifest.tp_rank}/{dp_rank}"


def collect(exchange: Exchange, manifest: ShardManifest, patience_seconds: float) -> dict[int, bytes]:
    """Return what the other replicas of this shard have left, by their rank; those that are late are left out."""
    keys = {dp_rank: key(manifest, dp_rank) for dp_rank in range(1, manifest.dp)}
    return take_all(exchange, keys, patience_seconds)


def derived_seed(run_id: str, sequence: int, place: Topology) -> int:
    """Return a seed for a replica that has no saved generators: the same at every try, another one on every rank."""
    text = f"{run_id} {sequence} {place.stage} {place.dp_rank} {place.tp_rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's (if it is imported) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
