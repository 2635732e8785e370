"""Loads, ours and torch's, warm and cold: ``python -m benchmarks.loading DIRECTORY ROUNDS OPTIONS``.

The last line on standard output is a list of :class:`Load` as JSON, those of all rounds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import Options
from benchmarks.training import Training
from ckpt_service.bench import disk
from trainer_hooks import Checkpointer

_PAGE = 4096


@dataclass(frozen=True)
class Load:
    """One load: what did it, whether the file was in the page cache, and the seconds and bytes that it took."""

    way: str
    cold: bool
    seconds: float
    nbytes: int


def main() -> None:
    directory, rounds, options = sys.argv[1:]
    ways = _make_files(directory, Options.from_json(options))
    loads = [load for _ in range(int(rounds)) for cold in (True, False) for load in _load_all(ways, cold=cold)]
    print(json.dumps([asdict(load) for load in loads]))


def _make_files(directory: str, options: Options) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Write the state once in each format; return a path and a function that loads it for each way."""
    training = Training(options.nbytes, options.batch)
    training.warm_up()
    root, plain = os.path.join(directory, "run"), os.path.join(directory, "plain.pt")
    with Checkpointer(root, async_ckpt=False) as checkpointer:
        checkpointer.save(1, state=training.state())
    torch.save(training.state(), plain)
    (ours,) = map(str, Path(root).rglob("*.pt"))
    return {
        "ours: resume(), every CRC checked": (ours, lambda: _resume(root)),
        "torch.load(mmap=True)": (plain, lambda: torch.load(plain, mmap=True)),
        "torch.load(mmap=True), every page read": (plain, lambda: _touch(torch.load(plain, mmap=True))),
        "torch.load": (plain, lambda: torch.load(plain)),
        "torch.load of our file": (ours, lambda: torch.load(ours)),
        "plain reads of our file, two threads": (ours, lambda: disk.read_buffered(ours)),
        "direct reads of our file, two threads": (ours, lambda: disk.read_direct(ours)),
    }


def _load_all(ways: dict[str, tuple[str, Callable[[], Any]]], *, cold: bool) -> Iterator[Load]:
    for way, (path, load) in ways.items():
        if cold:
            disk.forget(path)
        else:
            disk.read_buffered(path)
        gc.collect()
        began = time.monotonic()
        state = load()
        yield Load(way, cold, time.monotonic() - began, os.path.getsize(path))
        del state


def _resume(root: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(root, async_ckpt=False) as checkpointer:
            point = checkpointer.resume()
    assert point is not None
    return point.state


def _touch(state: Any) -> Any:
    """Read a byte of every page: a mapping that nobody reads has loaded nothing."""
    for tensor in _tensors(state):
        tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()
    return state


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


if __name__ == "__main__":
    main()
