"""Live state to snapshot: lay out the image in a slot and copy every byte that the plan needs. Shell.

When :func:`capture` returns, the snapshot shares nothing with the live state: training may go on.
"""

from __future__ import annotations

import ctypes
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from ckpt_service import image
from ckpt_service.image import Layout, RecordSize
from ckpt_service.records import ShardManifest
from ckpt_service.writer import Snapshot
from trainer_hooks.layout import Plan, StorageSpan
from trainer_hooks.slots import Slot

_SMALL = {image.VERSION: b"3\n"}
_PICKLE_ROOM_BYTES = 4096


@dataclass(frozen=True)
class Blueprint:
    """Where everything of a plan goes; the storages' offsets depend on their sizes only."""

    plan: Plan
    layout: Layout


@dataclass(frozen=True)
class _Sizes:
    """All that a layout depends on, in bytes: storages in pickle order, pickle, sharding record, replicas by rank."""

    storages: tuple[int, ...]
    pickle: int
    sharding: int
    replicas: tuple[tuple[int, int], ...]


def blueprint(plan: Plan, replicas: Mapping[int, bytes] | None = None) -> Blueprint:
    """Lay out the image of a plan; as long as the structure of a state stays, so does its layout (the same object).

    ``replicas`` are the images that other data-parallel replicas contribute, by their rank. Where the storages lie does
    not depend on them, so they may come later than the copy.
    """
    contributed = tuple((rank, len(content)) for rank, content in sorted((replicas or {}).items()))
    storages = tuple(span.nbytes for span in plan.spans)
    return Blueprint(plan, _lay_out(_Sizes(storages, _with_room(plan.pickled), len(plan.sharding), contributed)))


def _with_room(pickled: bytes) -> int:
    """Return the size of the pickle's record: numbers in it take more or fewer bytes from save to save."""
    return len(pickled) + -len(pickled) % _PICKLE_ROOM_BYTES


@lru_cache(maxsize=4)
def _lay_out(sizes: _Sizes) -> Layout:
    """Manifest, storages in pickle order, the pickle, how tensors are split, replicas, torch's small records."""
    records = [RecordSize(image.MANIFEST, image.manifest_capacity())]
    records += [RecordSize(f"data/{key}", nbytes, aligned=True) for key, nbytes in enumerate(sizes.storages)]
    records += [RecordSize(image.PICKLE, sizes.pickle), RecordSize(image.BYTEORDER, len(sys.byteorder))]
    if sizes.sharding:
        records += [RecordSize(image.SHARDING, sizes.sharding)]
    records += [RecordSize(image.replica(rank), nbytes) for rank, nbytes in sizes.replicas]
    records += [RecordSize(image.VERSION, len(_SMALL[image.VERSION])), RecordSize(image.SERIALIZATION_ID, 40)]
    return image.lay_out(records)


def stage(blueprint: Blueprint, slot: Slot, later: frozenset[int] = frozenset()) -> list[tuple[StorageSpan, int]]:
    """Copy every storage to its place in the slot, but those whose handle is among ``later``.

    Returns the spans that were not copied, each with the address that it has to go to.
    """
    layout, spans = blueprint.layout, [span for span in blueprint.plan.spans if span.nbytes]
    if slot.structure is not layout:
        slot.structure = None  # what stands around the storages of another layout is about to be overwritten
    if slot.places is None or slot.places[0] is not layout:
        slot.places = (layout, _places(layout, len(blueprint.plan.spans), slot))
    left = []
    with torch.no_grad():
        for span, place in zip(spans, slot.places[1], strict=True):
            if span.storage._cdata in later:
                left.append((span, place.data_ptr()))
            elif span.storage.device.type == "cpu":
                # Not torch's copy: its threads spin while they wait, and take the cores from the training.
                ctypes.memmove(place.data_ptr(), span.address, span.nbytes)
            else:
                place.copy_(_bytes_of(span))
    return left


def _places(layout: Layout, count: int, slot: Slot) -> list[torch.Tensor]:
    """Return where the storages go: behind the manifest they come first, in the order of their keys."""
    whole = torch.frombuffer(slot.mapping, dtype=torch.uint8)
    return [whole[record.offset : record.end] for record in layout.records[1 : 1 + count] if record.nbytes]


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
    if slot.structure is not layout:
        for position, content in image.structure(layout):
            view[position : position + len(content)] = content
        slot.structure = layout
    small = {
        image.MANIFEST: _padded(manifest),
        image.PICKLE: plan.pickled.ljust(_with_room(plan.pickled), b"\0"),  # unpicklers end at the STOP before it
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


def _bytes_of(span: StorageSpan) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
    return empty.set_(span.storage, span.start, (span.nbytes,), (1,))
