"""The random numbers of the demo that do not come from torch, and the state of every global generator.

NumPy is used where it is installed, as in most training code; torch runs without it, and so does the demo.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from trainer_hooks import Topology

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]


def seed_everything(seed: int, topology: Topology) -> None:
    """Seed the global generators of Python, torch and, where installed, NumPy.

    Torch draws the dropout, another one on each rank. Python and NumPy draw what happens to the samples: alike on the
    tensor-parallel ranks of a replica, which must see the same data, and differently on each replica.
    """
    torch.manual_seed(seed + topology.rank)
    random.seed(seed + topology.dp_rank)
    if numpy is not None:
        numpy.random.seed(seed + topology.dp_rank)


def draw(count: int, below: int) -> list[int]:
    """`count` numbers from 0 to `below` - 1, by NumPy's global generator, or by Python's where NumPy is missing."""
    if numpy is None:
        return [random.randrange(below) for _ in range(count)]
    drawn: list[int] = numpy.random.randint(0, below, count).tolist()
    return drawn


def rng_states() -> dict[str, Any]:
    """The states of all global generators, as plain values and tensors."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = (name, [int(key) for key in keys], *rest)
    return states
