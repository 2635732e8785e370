"""The training that is disturbed: many experts with AdamW, a few of which are trained at each step.

So the state can be large while a step stays short (50 to 150 ms on two cores), and yet every tensor of the state is
changed now and then, and has moments of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

_BYTES_PER_PARAMETER = 12  # the weight and both moments, each of 4 bytes
_ACTIVE = 2  # experts that one step trains


class Training:
    """A model, its optimizer, and steps. ``guard`` makes the context in which the optimizer steps."""

    def __init__(self, nbytes: int, batch: int) -> None:
        torch.manual_seed(0)
        width = 1024 if nbytes >= 100_000_000 else 64
        parameters = 2 * width * (width + 1)
        experts = max(_ACTIVE, round(nbytes / (_BYTES_PER_PARAMETER * parameters)))
        self.model = nn.ModuleList(_expert(width) for _ in range(experts))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._batch = torch.randn(batch, width)
        self._next = 0

    def step(self) -> None:
        """Train the experts whose turn it is."""
        hidden = self._batch
        for _ in range(_ACTIVE):
            hidden = hidden + self.model[self._next](hidden)
            self._next = (self._next + 1) % len(self.model)
        hidden.square().mean().backward()
        with self.guard():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        """Train every expert once: from then on the optimizer holds all of its state."""
        for _ in range(-(-len(self.model) // _ACTIVE) + 1):
            self.step()

    def state(self) -> dict[str, Any]:
        """Return the whole state as a trainer hands it to a checkpoint library: live tensors."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        """Return the bytes of all tensors in the state."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *moments])


def _expert(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
