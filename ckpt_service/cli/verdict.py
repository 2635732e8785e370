"""Whether a wait is over, and how it ended. Pure: what the files say in, a judgement out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from ckpt_service.catalog import Catalog, Checkpoint, State
from ckpt_service.cli.steps import StepName, UnknownStep, choose
from ckpt_service.naming import Kind
from ckpt_service.records import (
    PendingStatus,
    ServiceStatus,
    WritingStatus,
    save_of,
)

_LOST = (State.DEAD, State.DAMAGED)


class Verdict(Enum):
    """How a wait stands."""

    WAIT = "wait"
    COMPLETE = "complete"
    FAILED = "failed"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Scene:
    """What is known at one moment.

    Read in this order: first the statuses, then the files, so that what a status lists no more is among the files.
    ``runs``: a daemon or a trainer lives. ``since``: when the newest attempt started; earlier errors are not its.
    """

    root: str
    catalog: Catalog
    statuses: Sequence[ServiceStatus]
    runs: bool
    since: datetime | None = None

    def pending(self) -> list[WritingStatus | PendingStatus]:
        """Return what is being written and what waits."""
        works: list[WritingStatus | PendingStatus] = []
        for status in self.statuses:
            works += [*status.writing, *status.pending]
        return works

    def error(self, step: int) -> str | None:
        """Return why the save of a step failed, None if no status says so."""
        errors = [error for status in self.statuses for error in status.errors]
        mine = [e for e in errors if e.step == step and (self.since is None or e.at >= self.since)]
        if not mine:
            return None
        return f"{mine[-1].message}; {mine[-1].hint}" if mine[-1].hint else mine[-1].message


@dataclass(frozen=True)
class Target:
    """One save that is waited for."""

    kind: Kind
    attempt: int
    sequence: int
    epoch: int
    step: int

    @property
    def order(self) -> tuple[int, int]:
        """What saves are sorted by."""
        return (self.attempt, self.sequence)


@dataclass(frozen=True)
class Judgement:
    """A verdict, why, and the checkpoint where there is one."""

    verdict: Verdict
    reason: str = ""
    checkpoint: Checkpoint | None = None


def pending_targets(scene: Scene) -> frozenset[Target]:
    """Return the saves that are pending now; where none is, the newest of the lineage."""
    found = frozenset(_target(work) for work in scene.pending())
    if found:
        return found
    newest = next((c for c in scene.catalog.checkpoints if c.state in (State.COMPLETE, State.PARTIAL)), None)
    if newest is None:
        return frozenset()
    name = newest.id
    return frozenset({Target(newest.kind, name.attempt, name.sequence, name.epoch, name.step)})


def judge_saves(targets: Iterable[Target], scene: Scene) -> Judgement:
    """Judge several saves together: over when all are, failed when any is."""
    found = [judge_save(target, scene) for target in sorted(targets, key=lambda target: target.order)]
    if not found:
        if scene.runs:
            return Judgement(Verdict.WAIT, "no save has begun yet")
        return Judgement(Verdict.NOTHING, "there is no checkpoint, and nothing runs that would save one")
    for verdict in (Verdict.WAIT, Verdict.FAILED, Verdict.NOTHING):
        if (first := next((j for j in found if j.verdict is verdict), None)) is not None:
            return first
    return found[-1]


def judge_save(target: Target, scene: Scene) -> Judgement:
    """Judge one save that was pending at some time."""
    name = f"step {target.step} epoch {target.epoch}"
    there = [c for c in scene.catalog.of_kind(target.kind) if _is(c, target)]
    pending = any(_target(work) == target for work in scene.pending())
    if pending and scene.runs:
        return Judgement(Verdict.WAIT, f"{name} is being written")
    whole = next((c for c in there if c.state is State.COMPLETE), None)
    if whole is not None and whole.id.sequence >= target.sequence:
        return Judgement(Verdict.COMPLETE, checkpoint=whole)
    if (error := scene.error(target.step)) is not None:
        return Judgement(Verdict.FAILED, error)
    if whole is not None or target.kind != "train":  # other kinds may lie anywhere: the status is all there is
        return Judgement(Verdict.COMPLETE if scene.runs or whole else Verdict.FAILED, f"{name}: {target.kind}", whole)
    lost = next((c for c in there if c.state in _LOST), None)
    if lost is not None:
        return Judgement(Verdict.FAILED, f"{name} is {lost.state.value}: {lost.reason}")
    newest = scene.catalog.newest_complete(target.kind)
    if newest is not None and (newest.id.attempt, newest.id.sequence) > target.order:
        return Judgement(Verdict.COMPLETE, checkpoint=newest)  # it gave way to this one, or was pruned since
    if scene.runs:
        return Judgement(Verdict.WAIT, f"{name} is not complete")
    verdict = Verdict.FAILED if newest is not None or pending else Verdict.NOTHING
    return Judgement(verdict, f"{name} is not complete, and nothing runs that would complete it")


def judge_step(name: StepName, scene: Scene) -> Judgement:
    """Judge the wait for a step that a person named.

    Raises:
        ValueError: several epochs have this step.
    """
    pending = [target for target in map(_target, scene.pending()) if name.means(target.step, target.epoch)]
    pending = [target for target in pending if target.kind == "train"]
    if pending:
        return judge_save(max(pending, key=lambda target: target.order), scene)
    checkpoint = _chosen(name, scene)
    if checkpoint is not None and checkpoint.state is State.COMPLETE:
        return Judgement(Verdict.COMPLETE, checkpoint=checkpoint)
    state = f"{name} is {checkpoint.state.value}" if checkpoint else f"there is no {name}"
    if (error := scene.error(name.step)) is not None:
        return Judgement(Verdict.FAILED, error)
    if checkpoint is not None and checkpoint.state in _LOST:
        return Judgement(Verdict.FAILED, f"{state}: {checkpoint.reason}")
    if scene.runs:
        return Judgement(Verdict.WAIT, state)
    return Judgement(Verdict.NOTHING, f"{state}, and nothing runs that would save it")


def _chosen(name: StepName, scene: Scene) -> Checkpoint | None:
    try:
        return choose(scene.catalog.checkpoints, name, scene.root).checkpoint
    except UnknownStep:
        return None


def _target(work: WritingStatus | PendingStatus) -> Target:
    attempt, sequence = save_of(work.snapshot_id)
    return Target(work.kind, attempt, sequence, work.epoch, work.step)


def _is(checkpoint: Checkpoint, target: Target) -> bool:
    found = checkpoint.id
    return (found.attempt, found.epoch, found.step) == (target.attempt, target.epoch, target.step)
