"""What a leg is: one start of all training processes of a run, the kill in store for it, and where its files lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer_hooks.demo.journal import JOURNAL
from trainer_hooks.demo.recipe import Recipe

_RATE_LIMIT = "CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND"
_CHUNK = "CKPT_SERVICE_CHUNK_BYTES"
_CHUNKS = 16
_ALIGNMENT = 4096
_LARGEST_CHUNK = 16 << 20

_POLL_SECONDS = 0.05
_LOG_LINES = 15


class DemoFailed(Exception):
    """Something did not happen as the demo claims. The message is for the person who ran it."""


@dataclass(frozen=True)
class RunPaths:
    """Where one run lives: its checkpoints in `root`, the demo's own notes about it in `records`."""

    name: str
    legs: int
    root: Path
    records: Path

    @property
    def journal(self) -> Path:
        """What its legs note, all ranks in one file."""
        return self.records / JOURNAL

    def log(self, leg: int, rank: int) -> Path:
        """What one rank of a leg printed."""
        return self.records / f"leg_{leg}_rank_{rank}.log"


@dataclass(frozen=True)
class SlowWrites:
    """How the daemon is told to take `seconds` for the files of one save, a little at a time.

    The time is that of several training steps, so that training visibly goes on beside a write and a kill finds the
    middle of it. Left alone, a write is over in milliseconds.
    """

    shard_bytes: int
    shards: int
    seconds: float

    def environment(self) -> dict[str, str]:
        """Settings of the daemon, which inherits them from the trainer that starts it."""
        chunk = self.shard_bytes // _CHUNKS // _ALIGNMENT * _ALIGNMENT
        return {
            _RATE_LIMIT: str(max(1, int(self.shard_bytes * self.shards / self.seconds))),
            _CHUNK: str(min(max(chunk, _ALIGNMENT), _LARGEST_CHUNK)),
        }


SLOWING = (_RATE_LIMIT, _CHUNK)
"""The variables of `SlowWrites.environment()`."""


@dataclass(frozen=True)
class KillPlan:
    """Whom to kill in the write of which save: the trainers of all ranks, and maybe their daemon."""

    save_step: int
    daemon_too: bool


@dataclass(frozen=True)
class Leg:
    """One start of the trainers. `tiny` and `single` are the options that `recipe` was made with."""

    paths: RunPaths
    number: int
    recipe: Recipe
    tiny: bool
    single: bool
    kill: KillPlan | None = None
    slow_writes: SlowWrites | None = None

    @property
    def title(self) -> str:
        """How it is called on the screen and in the table."""
        return f"{self.paths.name}, leg {self.number}" if self.paths.legs > 1 else self.paths.name

    def log_tail(self, rank: int = 0) -> str:
        """The last lines of a rank's output, indented, for an error message."""
        lines = self.paths.log(self.number, rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(f"\n    {line}" for line in lines)


def trainers(recipe: Recipe) -> str:
    """How the training processes of a leg are called in a sentence."""
    return "the trainer" if recipe.ranks == 1 else f"all {recipe.ranks} trainers"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll what other processes do to files until it holds. False when the time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
