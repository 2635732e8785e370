"""Tensor and data parallelism as far as the demo needs them: two linear layers that are split, and three sums.

Tensor-parallel ranks hold different parts of one model and see the same samples; data-parallel replicas hold the same
model and see different samples. A column-parallel layer followed by a row-parallel one costs one sum over the
tensor-parallel ranks each way: the scheme of Megatron-LM (Shoeybi et al. 2019, section 3). With one rank nothing here
communicates. Nothing here knows about checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainer_hooks import Topology


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the groups in which it sums; None where it would be alone."""

    topology: Topology
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, topology: Topology) -> Mesh:
        """Meet the other ranks at `MASTER_ADDR` and `MASTER_PORT`; collective on all of them."""
        if topology.world_size == 1:
            return cls(topology)
        dist.init_process_group("gloo")
        rows = [[dp * topology.tp + tp for tp in range(topology.tp)] for dp in range(topology.dp)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        return cls(topology, _own_group(rows, topology.rank), _own_group(columns, topology.rank))

    def leave(self) -> None:
        """Let go of the groups."""
        if self.topology.world_size > 1:
            dist.destroy_process_group()

    def part_of(self, full: Tensor, dim: int) -> Tensor:
        """This tensor-parallel rank's equal share of a tensor, as a copy."""
        return full.chunk(self.topology.tp, dim)[self.topology.tp_rank].clone()


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Make all groups, as every rank must, and give the one that the rank is in; None if it is alone there."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups if len(ranks) > 1}
    return next((group for ranks, group in made.items() if rank in ranks), None)


class ColumnParallelLinear(nn.Module):
    """(..., inputs) on every rank -> (..., outputs / tp), this rank's share of the outputs."""

    sharded = ("weight", "bias")

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, generator: torch.Generator) -> None:
        super().__init__()
        self._group = mesh.tp_group
        self.weight = nn.Parameter(mesh.part_of(_drawn(outputs, inputs, generator), dim=0))
        self.bias = nn.Parameter(mesh.part_of(torch.zeros(outputs), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        """Each rank computes its rows of the product; going back, the parts of the input's gradient are summed."""
        return functional.linear(_copy_to_ranks(x, self._group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """(..., inputs / tp), a different share on each rank -> (..., outputs), the same on every rank."""

    sharded = ("weight",)

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, generator: torch.Generator) -> None:
        super().__init__()
        self._group = mesh.tp_group
        self.weight = nn.Parameter(mesh.part_of(_drawn(outputs, inputs, generator), dim=1))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Each rank computes a part of every output; they are summed, and the bias is added once."""
        return _sum_of_ranks(functional.linear(x, self.weight), self._group) + self.bias


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Replace each gradient by its mean over the data-parallel replicas, in one message."""
    if mesh.dp_group is None:
        return
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    mean = _summed(torch.cat([gradient.reshape(-1) for gradient in gradients]), mesh.dp_group) / mesh.topology.dp
    for gradient, part in zip(gradients, torch.split(mean, [gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(model: nn.Module, limit: float, mesh: Mesh) -> float:
    """Scale the gradients so that the norm over the whole model is at most `limit`; gives the norm before.

    What is split counts on every tensor-parallel rank, what all of them hold counts once.
    """
    split = {id(parameter) for parameter in sharded_parameters(model)}
    squares = {True: torch.zeros(()), False: torch.zeros(())}
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares[id(parameter) in split] += parameter.grad.square().sum()
    norm = math.sqrt(float(_summed(squares[True], mesh.tp_group) + squares[False]))
    for parameter in model.parameters():
        if parameter.grad is not None and norm > limit:
            parameter.grad.mul_(limit / norm)
    return norm


def sharded_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of which each tensor-parallel rank holds a different part."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            yield from (module.get_parameter(name) for name in module.sharded)


class _CopyToRanks(torch.autograd.Function):
    """Forward: the same tensor. Backward: the sum of what the ranks found (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    """Forward: the sum of what the ranks hold. Backward: the same gradient for each (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _copy_to_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x
    result: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _sum_of_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x
    result: Tensor = _SumOfRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over a group; the tensor itself stays as it is."""
    if group is None:
        return x
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def _drawn(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """The whole weight, the same on every rank, of which each then keeps its part."""
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
