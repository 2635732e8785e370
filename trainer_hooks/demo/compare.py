"""Says where two runs differ: tensors by their bits, everything else by type and value.

Takes state files and trajectories; gives the first difference with its place (`optimizer.state.3.exp_avg`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_hooks.demo.journal import Stepped

_MEASURED = ("leg", "seconds")
"""Fields of a step that say how it was run, not what it computed."""


@dataclass(frozen=True)
class Verdict:
    """`difference` is None when all is equal; the counts say how much was looked at."""

    difference: str | None
    tensors: int
    steps: int


def compare_runs(
    reference: Path, resumed: Path, reference_steps: Mapping[int, Stepped], resumed_steps: Mapping[int, Stepped]
) -> Verdict:
    """Compare the states after the last step (files of `live_state()`), then every step of the two trajectories."""
    expected = torch.load(reference, weights_only=True)
    differences = [
        *differing(_computed(reference_steps), _computed(resumed_steps), "step"),
        *differing(expected, torch.load(resumed, weights_only=True), ""),
    ]
    return Verdict(next(iter(differences), None), count_tensors(expected), len(reference_steps))


def compare_checkpoint(checkpoint: Path, final_state: Path) -> str | None:
    """Load a checkpoint with plain `torch.load` and compare it with the state its trainer ended with.

    Gives the first difference in weights and optimizer, or None.
    """
    saved = torch.load(checkpoint, weights_only=True)
    state = torch.load(final_state, weights_only=True)
    expected = {"stage_state_dict": state["model"], "optimizer_state_dict": state["optimizer"]}
    return next(differing(expected, {name: saved[name] for name in expected}, checkpoint.name), None)


def differing(a: Any, b: Any, place: str) -> Iterator[str]:
    """Every place where two nested states differ, in order."""
    if type(a) is not type(b):
        yield f"{place}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, Tensor):
        yield from _differing_tensors(a, b, place)
    elif isinstance(a, Mapping):
        yield from _differing_mappings(a, b, place)
    elif isinstance(a, (list, tuple)):
        yield from _differing_mappings(dict(enumerate(a)), dict(enumerate(b)), place)
    elif a != b and not (a != a and b != b):  # two NaNs are the same loss
        yield f"{place}: {a!r} and {b!r}"


def count_tensors(state: Any) -> int:
    """Tensors in a nested state; one that appears under two names counts twice."""
    if isinstance(state, Tensor):
        return 1
    if isinstance(state, Mapping):
        return sum(count_tensors(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(count_tensors(value) for value in state)
    return 0


def _differing_mappings(a: Mapping[Any, Any], b: Mapping[Any, Any], place: str) -> Iterator[str]:
    for key in [*a, *(key for key in b if key not in a)]:
        inner = f"{place}.{key}" if place else str(key)
        if key not in a or key not in b:
            yield f"{inner}: only in the {'resumed' if key in b else 'uninterrupted'} one"
        else:
            yield from differing(a[key], b[key], inner)


def _differing_tensors(a: Tensor, b: Tensor, place: str) -> Iterator[str]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{place}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    elif not torch.equal(_bits(a), _bits(b)):
        unequal = int((a != b).sum())
        largest = float((a.double() - b.double()).abs().max())
        yield f"{place}: {unequal} of {a.numel()} values differ, by up to {largest:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _computed(steps: Mapping[int, Stepped]) -> dict[int, dict[str, Any]]:
    names = [field.name for field in fields(Stepped) if field.name not in _MEASURED]
    return {number: {name: getattr(step, name) for name in names} for number, step in sorted(steps.items())}
