"""Where a process stands in the mesh of pipeline stages, data-parallel replicas and tensor-parallel ranks. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Topology:
    """The place of one rank: ``rank = (stage * dp + dp_rank) * tp + tp_rank``.

    Raises:
        ValueError: a size is below 1, or the rank lies outside the mesh.
    """

    rank: int = 0
    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp"):
            _whole(name, getattr(self, name), at_least=1)
        _whole("rank", self.rank, at_least=0)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank={self.rank}: a mesh of pp={self.pp} dp={self.dp} tp={self.tp} has {self.world_size}"
            )

    @classmethod
    def from_env(cls, pp: int = 1, tp: int = 1, environ: Mapping[str, str] = os.environ) -> Topology:
        """Return the place that ``RANK`` and ``WORLD_SIZE`` say (torchrun sets them); dp is what pp and tp leave."""
        try:
            rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        except ValueError as error:
            raise ValueError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
        _whole("pp", pp, at_least=1)
        _whole("tp", tp, at_least=1)
        if world_size % (pp * tp):
            raise ValueError(f"WORLD_SIZE={world_size} cannot be divided by pp * tp = {pp * tp}")
        return cls(rank, pp, world_size // (pp * tp), tp)

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> Topology:
        """Return the place of this process in a ``DeviceMesh`` with dimensions among "pp", "dp" and "tp", in this
        order.

        Dimensions that are absent have size 1.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if [name for name in ("pp", "dp", "tp") if name in names] != list(names):
            raise ValueError(f"mesh: dimensions {names}, and only pp, dp, tp in this order are known")
        sizes = {name: mesh.size(index) for index, name in enumerate(names)}
        place = {name: mesh.get_local_rank(name) for name in names}
        pp, dp, tp = (sizes.get(name, 1) for name in ("pp", "dp", "tp"))
        rank = (place.get("pp", 0) * dp + place.get("dp", 0)) * tp + place.get("tp", 0)
        return cls(rank, pp, dp, tp)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.tp

    @property
    def stage(self) -> int:
        """The pipeline stage."""
        return self.rank // (self.dp * self.tp)

    @property
    def dp_rank(self) -> int:
        """Which replica this is."""
        return self.replica_of(self.rank)

    def replica_of(self, rank: int) -> int:
        """Return which replica another rank of this mesh is."""
        return (rank // self.tp) % self.dp

    @property
    def tp_rank(self) -> int:
        """Which tensor-parallel shard this is."""
        return self.rank % self.tp

    @property
    def is_writer(self) -> bool:
        """Whether this rank saves: replicas are equal, so only the first one does."""
        return self.dp_rank == 0


def _whole(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least {at_least}")
