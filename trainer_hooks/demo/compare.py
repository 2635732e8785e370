"""Says where two runs differ: tensors by their bits, everything else by type and value, on every rank.

Takes the records of two runs (final states and journal); gives the first difference with its place
(`rank 3: optimizer.state.3.exp_avg`). `python -m trainer_hooks.demo.compare DIR DIR` does the same for two runs that
the demo has kept, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_hooks.demo.journal import FINAL_STATES, JOURNAL, JournalReader, Stepped, final_state_name, final_trajectory

_MEASURED = ("leg", "seconds")
"""Fields of a step that say how it was run, not what it computed."""


@dataclass(frozen=True)
class Verdict:
    """`difference` is None when all is equal; the counts, over all ranks, say how much was looked at."""

    difference: str | None
    ranks: int
    tensors: int
    steps: int

    def __str__(self) -> str:
        if self.difference is not None:
            return f"bit-equal: no: {self.difference}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"bit-equal: yes, on {ranks} ({self.tensors} tensors, RNG states, scheduler, sampler; "
            f"loss, lr and batch of {self.steps} steps)"
        )


def compare_runs(reference: Path, resumed: Path) -> Verdict:
    """Compare the records of two runs: rank by rank each step's loss, lr and batch, then the states after the last.

    Raises:
        ValueError: a directory has no final states.
    """
    ranks = _count_ranks(reference)
    if _count_ranks(resumed) != ranks:
        return Verdict(f"{ranks} and {_count_ranks(resumed)} ranks", ranks, 0, 0)
    differences: list[str] = []
    tensors = steps = 0
    journals = [JournalReader(records / JOURNAL).read_new() for records in (reference, resumed)]
    for rank in range(ranks):
        expected, found = ([*final_trajectory(events, rank).values()] for events in journals)
        state = _load(reference / final_state_name(rank))
        differences += differing(_computed(expected), _computed(found), f"rank {rank}: step")
        differences += differing(state, _load(resumed / final_state_name(rank)), f"rank {rank}: ")
        tensors += count_tensors(state)
        steps += len(expected)
    return Verdict(next(iter(differences), None), ranks, tensors, steps)


def compare_checkpoint(checkpoint: Path, final_state: Path) -> str | None:
    """Load a shard with plain `torch.load` and compare it with the state that its rank ended with.

    Gives the first difference in weights and optimizer, or None.
    """
    saved = _load(checkpoint)
    state = _load(final_state)
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
        inner = f"{place}{'' if place.endswith(' ') else '.'}{key}"
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


def _computed(steps: list[Stepped]) -> dict[int, dict[str, Any]]:
    names = [field.name for field in fields(Stepped) if field.name not in _MEASURED]
    return {step.step: {name: getattr(step, name) for name in names} for step in sorted(steps, key=lambda s: s.step)}


def _count_ranks(records: Path) -> int:
    count = len(list(records.glob(FINAL_STATES)))
    if not count:
        raise ValueError(f"{records}: no {FINAL_STATES} in it")
    return count


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def main(arguments: list[str] | None = None) -> int:
    """Compare two runs' records and say how; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer_hooks.demo.compare", description="Are two runs bit-equal?")
    parser.add_argument("reference", type=Path, help="records of one run: DIR/records/uninterrupted")
    parser.add_argument("resumed", type=Path, help="records of the other: DIR/records/killed")
    options = parser.parse_args(arguments)
    try:
        verdict = compare_runs(options.reference, options.resumed)
    except ValueError as error:
        parser.error(str(error))
    print(verdict)
    return 0 if verdict.difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
