"""The STEP of a command line: how it is written, and which checkpoint it means. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_service.catalog import Checkpoint, State
from ckpt_service.errors import CkptError
from ckpt_service.naming import KINDS

_STEP = re.compile(r"([0-9]{1,18})(?::([0-9]{1,18}))?", re.ASCII)
_LINEAGE = (State.COMPLETE, State.PARTIAL, State.DAMAGED, State.DEAD)
_PREFERRED = (*_LINEAGE, State.ABANDONED, State.FOREIGN, State.LEGACY)
_NAMED = 8


class UnknownStep(CkptError):
    """No checkpoint has this step."""


@dataclass(frozen=True)
class StepName:
    """What a person calls a checkpoint: STEP or STEP:EPOCH."""

    step: int
    epoch: int | None = None

    def __str__(self) -> str:
        return f"step {self.step}" if self.epoch is None else f"step {self.step} epoch {self.epoch}"

    def means(self, step: int, epoch: int) -> bool:
        """Return whether a checkpoint of this step and epoch is meant."""
        return self.step == step and self.epoch in (None, epoch)


def is_step(text: str) -> bool:
    """Return whether a word of the command line can be a STEP."""
    return _STEP.fullmatch(text) is not None


def parse_step(text: str) -> StepName:
    """Return what STEP or STEP:EPOCH says; raises ``ValueError`` if it is neither."""
    match = _STEP.fullmatch(text)
    if match is None:
        raise ValueError(f"STEP={text}: not a number; write it as STEP or STEP:EPOCH, as in 300 or 300:2")
    return StepName(int(match[1]), None if match[2] is None else int(match[2]))


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is meant, and the ``others`` that share its step (and epoch, where one was given)."""

    checkpoint: Checkpoint
    others: tuple[Checkpoint, ...]


def choose(checkpoints: Sequence[Checkpoint], name: StepName, root: str) -> Choice:
    """Return the checkpoint that ``name`` means: one of the lineage before all others, then the newest.

    Args:
        checkpoints: all that are known, newest first.
        name: what was asked for.
        root: where, for the messages.

    Raises:
        UnknownStep: there is none; says which steps there are.
        ValueError: several epochs have this step; names the candidates.
    """
    found = [c for c in checkpoints if name.means(c.id.step, c.id.epoch)]
    if not found:
        raise UnknownStep(f"{root} has no checkpoint of {name}", path=root, hint=_what_there_is(checkpoints, root))
    candidates = [c for c in found if c.state in _LINEAGE and c.id.attempt > 0] or found
    epochs = sorted({c.id.epoch for c in candidates})
    if len(epochs) > 1:
        names = ", ".join(f"{name.step}:{epoch}" for epoch in epochs)
        raise ValueError(f"STEP={name.step}: several checkpoints of {root} have this step; say which: {names}")
    chosen = min(candidates, key=lambda c: (KINDS.index(c.kind), _PREFERRED.index(c.state)))
    return Choice(chosen, tuple(c for c in found if c is not chosen))


def _what_there_is(checkpoints: Sequence[Checkpoint], root: str) -> str:
    steps = list(dict.fromkeys(f"{c.id.step}:{c.id.epoch}" for c in checkpoints))
    if len(steps) > _NAMED:
        return f"the newest are {', '.join(steps[:_NAMED])}; `ckpt-service ls {root}` lists all"
    return f"there are {', '.join(steps)}" if steps else "there is none at all"
