"""DTensors: described and taken apart when a state is saved, put together again like the live ones on resume.

A shard file holds the local part of each as a plain tensor, so that any process can read it. How it is split stands
beside it (:class:`ckpt_service.records.ShardingRecord`). Nothing here communicates, and ``torch.distributed.tensor``
is looked at only where the trainer has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_service.records import MeshRecord, ShardingRecord, TensorSharding
from trainer_hooks.topology import Topology

Keys = tuple[str | int, ...]
"""The keys and indices that lead from the top of a state to one value in it."""

_WHOLE_COPY = "gather it on all ranks and give save() a whole state"
_FULL_STATE = f"{_WHOLE_COPY}: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"

_SPLIT_OBJECTS = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _FULL_STATE),
    (
        "torch.distributed.optim",
        "ZeroRedundancyOptimizer",
        f"{_WHOLE_COPY}: consolidate_state_dict(to=rank) and state_dict() on each writing rank",
    ),
)


@dataclass(frozen=True)
class Sharding:
    """How a tensor is split: its mesh, the tensor dimension split along each mesh dimension, and the whole shape."""

    mesh: MeshRecord
    placements: tuple[int | None, ...]
    shape: tuple[int, ...]

    @property
    def cuts(self) -> tuple[tuple[int, int, int], ...]:
        """Which part this rank has: (tensor dimension, parts, which of them), in the order of the cuts.

        Dimensions of the mesh along which all ranks have the same, or that have one rank, do not matter.
        """
        along = zip(self.placements, self.mesh.shape, self.mesh.coordinate, strict=True)
        return tuple((dim, size, at) for dim, size, at in along if dim is not None and size > 1)

    def __str__(self) -> str:
        if not self.cuts:
            return f"a whole {self.shape}"
        parts = ", ".join(f"part {at + 1} of {size} of dimension {dim}" for dim, size, at in self.cuts)
        return f"{parts} of {self.shape}"


# --- saving -----------------------------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def describe(tensor: Any, place: Topology) -> Sharding:
    """Return how a DTensor is split.

    Raises:
        ValueError: its local parts do not make up the whole (Partial), or not all of them would be saved, since it is
            split over data-parallel replicas; says which dimension of the mesh.
    """
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is no part of the mesh of this DTensor; save it on the ranks that are")
    placements = []
    for index, placement in enumerate(tensor.placements):
        where = f"mesh dimension {names[index] if names else index!r}, {placement}"
        if placement.is_partial():
            raise ValueError(f"its ranks hold terms of a sum ({where}); save tensor.redistribute(...) without Partial")
        if not placement.is_replicate() and mesh.size(index) > 1:
            if _crosses_replicas(mesh, coordinate, index, place):
                raise ValueError(
                    f"it is split over data-parallel ranks ({where}), and only the first of them writes; {_FULL_STATE}"
                )
            if not placement.is_shard() or hasattr(placement, "split_factor"):  # strided: parts in another order
                raise ValueError(f"this way of splitting is not supported ({where}); {_FULL_STATE}")
        placements.append(None if placement.is_replicate() else int(placement.dim))
    record = MeshRecord(dim_names=list(names) if names else None, shape=list(mesh.shape), coordinate=list(coordinate))
    return Sharding(record, tuple(placements), tuple(tensor.shape))


def refuse_tensor(tensor: torch.Tensor) -> str | None:
    """Return why a tensor of an older way of splitting cannot be saved; None for all others."""
    name = "FlatParameter" if hasattr(tensor, "_is_flat_param") else type(tensor).__name__
    return f"a {name} is split over ranks; {_FULL_STATE}" if name in ("FlatParameter", "ShardedTensor") else None


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor: a plain tensor, or parameter, on the same memory."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local().detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
    return local.requires_grad_(tensor.requires_grad)


def keys_to(state: Any, wanted: Mapping[int, object]) -> Iterator[tuple[Keys, Any]]:
    """Yield every value in a state whose ``id`` is wanted, with the keys that lead to it, as often as it is there.

    Only keys that are strings or whole numbers are followed, and indices of lists and tuples.
    """

    def descend(value: Any, keys: Keys, above: frozenset[int]) -> Iterator[tuple[Keys, Any]]:
        if id(value) in wanted:
            yield keys, value
        elif id(value) not in above:
            for key, inner in _items(value):
                yield from descend(inner, (*keys, key), above | {id(value)})

    yield from descend(state, (), frozenset())


def record(found: Sequence[tuple[Keys, Sharding]]) -> ShardingRecord:
    """Return the record of these tensors; a mesh that several share is written down once."""
    meshes: list[MeshRecord] = []
    tensors = []
    for keys, sharding in found:
        if sharding.mesh not in meshes:
            meshes.append(sharding.mesh)
        index = meshes.index(sharding.mesh)
        placements, shape = list(sharding.placements), list(sharding.shape)
        tensors.append(TensorSharding(path=list(keys), mesh=index, placements=placements, shape=shape))
    return ShardingRecord(meshes=meshes, tensors=tensors)


def refuse_object(thing: Any) -> str | None:
    """Return why a tracked object cannot be saved, though its class may have a ``state_dict``; None if it can.

    Asked before its ``state_dict()`` is called, which may wait for ranks that do not call it.
    """
    for module, name, way_out in _SPLIT_OBJECTS:
        cls = getattr(sys.modules.get(module), name, None)
        inner = thing.modules() if cls and isinstance(thing, torch.nn.Module) else [thing]
        if cls and any(isinstance(part, cls) for part in inner):
            return f"{name} splits its state over ranks; {way_out}"
    return None


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from ((key, inner) for key, inner in value.items() if type(key) in (str, int))
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def _crosses_replicas(mesh: Any, coordinate: Sequence[int], index: int, place: Topology) -> bool:
    """Whether the ranks along one dimension of a mesh, through this one, are of different data-parallel replicas."""
    line = mesh.mesh.movedim(index, -1)[tuple(at for other, at in enumerate(coordinate) if other != index)]
    return len({place.replica_of(rank) for rank in line.tolist()}) > 1


# --- restoring --------------------------------------------------------------------------------------------------------


def shardings_in(found: ShardingRecord) -> dict[Keys, Sharding]:
    """Return what a record says, by the keys that lead to each tensor."""
    return {
        tuple(tensor.path): Sharding(found.meshes[tensor.mesh], tuple(tensor.placements), tuple(tensor.shape))
        for tensor in found.tensors
    }


def below(shardings: Mapping[Keys, Sharding], key: str) -> dict[Keys, Sharding]:
    """Return what lies below one key of the top, by the rest of the keys."""
    return {keys[1:]: sharding for keys, sharding in shardings.items() if keys[:1] == (key,)}


def rejoined(saved: Any, sharding: Sharding | None, live: Any) -> Any:
    """Return a saved local part as what its live counterpart is: a DTensor with the same mesh and placements.

    Args:
        saved: the plain tensor from the file.
        sharding: what the file says of it; None for one that was not split.
        live: the tensor in whose place it goes, or the parameter that it belongs to.

    Raises:
        ValueError: it is another part than the live one; says what was saved and what is there now.
    """
    if not is_dtensor(live):
        if sharding is not None and sharding.cuts:
            raise ValueError(f"was saved as {sharding}, and is no DTensor now")
        return saved
    mine = describe(live, Topology())
    was = sharding or Sharding(mine.mesh, (None,) * len(mine.placements), tuple(saved.shape))
    if (was.cuts, was.shape) != (mine.cuts, mine.shape):
        raise ValueError(f"was saved as {was}, and is {mine} now")
    if live.to_local().shape != saved.shape:
        raise ValueError(f"was saved with local shape {tuple(saved.shape)} and has {tuple(live.to_local().shape)} now")
    return _on_mesh(saved, live, live.placements, live)


def rejoined_beside(saved: Any, sharding: Sharding | None, parameter: Any) -> Any:
    """Return what an optimizer saved for a parameter as a DTensor on the mesh of the parameter.

    For values that the live optimizer does not have yet: one of the parameter's shape is split like the parameter, and
    any other one must be whole.

    Raises:
        ValueError: it is split in another way than the parameter.
    """
    if sharding is not None and not sharding.cuts and is_dtensor(parameter):
        mine = describe(parameter, Topology())
        if mine.cuts or mine.shape != sharding.shape:
            replicate = sys.modules["torch.distributed.tensor"].Replicate()
            return _on_mesh(saved, parameter, [replicate] * len(parameter.placements), saved)
    return rejoined(saved, sharding, parameter)


def _on_mesh(saved: torch.Tensor, live: Any, placements: Sequence[Any], like: Any) -> Any:
    """Return a local part as a DTensor on the mesh of ``live``, with the whole shape and strides of ``like``."""
    with torch.no_grad():
        local = saved.detach().to(live.to_local().device)
        return type(live).from_local(
            local, live.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
