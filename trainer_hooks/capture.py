"""Live state to snapshot: lay out the image in a slot and copy every byte that the plan needs. Shell.

When :func:`capture` returns, the snapshot shares nothing with the live state: training may go on.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt_service import image
from ckpt_service.image import Layout, RecordSize
from ckpt_service.records import ShardManifest
from ckpt_service.writer import Snapshot
from trainer_hooks.layout import Plan, StorageSpan
from trainer_hooks.slots import Slot

_SMALL = {image.VERSION: b"3\n"}


@dataclass(frozen=True)
class Blueprint:
    """Where everything of a plan goes; the storages' offsets depend on their sizes only."""

    plan: Plan
    layout: Layout


def blueprint(plan: Plan, replicas: Mapping[int, bytes] | None = None) -> Blueprint:
    """Lay out the image of a plan: manifest, storages in pickle order, the pickle, how tensors are split, replicas,
    torch's small records.

    ``replicas`` are the images that other data-parallel replicas contribute, by their rank. Where the storages lie does
    not depend on them, so they may come later than the copy.
    """
    sizes = [RecordSize(image.MANIFEST, image.manifest_capacity())]
    sizes += [RecordSize(f"data/{span.key}", span.nbytes, aligned=True) for span in plan.spans]
    sizes += [RecordSize(image.PICKLE, len(plan.pickled)), RecordSize(image.BYTEORDER, len(sys.byteorder))]
    if plan.sharding:
        sizes += [RecordSize(image.SHARDING, len(plan.sharding))]
    sizes += [RecordSize(image.replica(rank), len(content)) for rank, content in sorted((replicas or {}).items())]
    sizes += [RecordSize(image.VERSION, len(_SMALL[image.VERSION])), RecordSize(image.SERIALIZATION_ID, 40)]
    return Blueprint(plan, image.lay_out(sizes))


def stage(blueprint: Blueprint, slot: Slot) -> None:
    """Copy every storage to its place in the slot. When this returns, the live state may change."""
    view = memoryview(slot.mapping)
    _copy(blueprint.plan.spans, blueprint.layout, view)


def finish(
    blueprint: Blueprint, manifest: ShardManifest, slot: Slot, replicas: Mapping[int, bytes] | None = None
) -> Snapshot:
    """Write all that is not a storage around the staged ones.

    ``manifest.bytes`` and ``.tensors`` must be those of the blueprint.

    Raises:
        ValueError: the manifest is too long.
    """
    layout, plan = blueprint.layout, blueprint.plan
    assert manifest.bytes == layout.nbytes <= slot.nbytes
    view = memoryview(slot.mapping)[: layout.nbytes]
    for position, content in image.structure(layout):
        view[position : position + len(content)] = content
    small = {
        image.MANIFEST: _padded(manifest),
        image.PICKLE: plan.pickled,
        image.BYTEORDER: sys.byteorder.encode(),
        image.SERIALIZATION_ID: str(secrets.randbelow(10**40)).zfill(40).encode(),
        **({image.SHARDING: plan.sharding} if plan.sharding else {}),
        **_SMALL,
        **{image.replica(rank): content for rank, content in (replicas or {}).items()},
    }
    for name, content in small.items():
        record = layout.find(name)
        assert record is not None, name
        assert record.nbytes == len(content), name
        view[record.offset : record.end] = content
    return Snapshot(manifest, layout, view)


def capture(blueprint: Blueprint, manifest: ShardManifest, slot: Slot) -> Snapshot:
    """Stage and finish at once: the whole image of a state."""
    stage(blueprint, slot)
    return finish(blueprint, manifest, slot)


def _padded(manifest: ShardManifest) -> bytes:
    content = manifest.model_dump_json().encode()
    capacity = image.manifest_capacity()
    if len(content) > capacity:
        raise ValueError(f"user: the manifest would take {len(content)} bytes, and there is room for {capacity}")
    return content.ljust(capacity)


def _copy(spans: tuple[StorageSpan, ...], layout: Layout, view: memoryview) -> None:
    """Copy all spans to their places, those of one device together."""
    target = torch.frombuffer(view, dtype=torch.uint8)
    records = layout.records[1:]  # behind the manifest the storages come first, in the order of their keys
    with torch.no_grad():
        for span, record in zip(spans, records, strict=False):
            assert record.nbytes == span.nbytes
            if span.nbytes:
                target[record.offset : record.end].copy_(_bytes_of(span))


def _bytes_of(span: StorageSpan) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
    return empty.set_(span.storage, span.start, (span.nbytes,), (1,))
