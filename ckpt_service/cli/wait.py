"""``wait``: until a checkpoint is complete."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from ckpt_service import ownership
from ckpt_service.catalog import build
from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    Timeout,
    absolute_root,
    checked_postfix,
    complain,
    complete_step_or_root,
    deadline_after,
    document_of,
    elsewhere,
    print_json,
    summary,
    time_left,
)
from ckpt_service.cli.daemons import live_daemons, work_line
from ckpt_service.cli.progress import ProgressLine
from ckpt_service.cli.steps import is_step, parse_step
from ckpt_service.cli.verdict import Judgement, Scene, Target, Verdict, judge_saves, judge_step, pending_targets
from ckpt_service.config import load_config
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.scan import Memory, load_evidence, load_statuses

_LOOK_SECONDS = 0.2


def wait(
    step_or_root: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP[:EPOCH]",
            help="The step to wait for; by default all that is pending now, or else the newest checkpoint.",
            autocompletion=complete_step_or_root,
        ),
    ] = None,
    root: Annotated[str | None, typer.Argument(metavar="ROOT", help="The directory that the trainer saves to.")] = None,
    postfix: Postfix = None,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Wait until a checkpoint is complete: all ranks have it, durably.

    Exit 1: its save failed. 5: nothing runs that would save it, and there is none. 7: --timeout is over.
    A ROOT whose name is a number is written as ./300.
    """
    step, where = _words(step_or_root, root)
    deadline = deadline_after(timeout)
    name = parse_step(step) if step is not None else None
    where, postfix = absolute_root(where), checked_postfix(postfix)
    look = _looker(where, postfix)
    targets: frozenset[Target] = frozenset()
    with ProgressLine() as line:
        while True:
            scene = look()
            targets = targets or pending_targets(scene)
            found = judge_step(name, scene) if name is not None else judge_saves(targets, scene)
            if found.verdict is not Verdict.WAIT or time_left(deadline, 1) == 0:
                break
            line.show(f"waiting: {work_line(scene.statuses) or found.reason}")
            time.sleep(time_left(deadline, _LOOK_SECONDS))
    _finish(found, where, postfix, as_json=as_json)


def _words(first: str | None, second: str | None) -> tuple[str | None, str]:
    """Return (STEP, ROOT) of a command line on which the first may be left out."""
    if first is None or second is not None or is_step(first):
        return first, second or "."
    if not os.path.isdir(first):
        raise ValueError(f"{first}: neither a STEP (as in 300 or 300:2) nor a directory")
    return None, first


def _looker(root: str, postfix: str | None) -> Callable[[], Scene]:
    """Return what looks around; it does not read a file again that has not changed."""
    stale_seconds = load_config(os.environ).stale_seconds
    memory = Memory()

    def look() -> Scene:
        daemons = live_daemons(root, postfix, stale_seconds)
        runs = daemons.any or ownership.live_run(root, postfix) is not None
        statuses = load_statuses(root, postfix)  # before the files: what is not listed any more is there
        evidence = load_evidence(root, postfix, memory)
        since = evidence.attempts[-1].started_at if evidence.attempts else None
        return Scene(root, build(evidence), statuses, runs, since)

    return look


def _finish(found: Judgement, root: str, postfix: str | None, *, as_json: bool) -> None:
    match found.verdict:
        case Verdict.COMPLETE if as_json:
            checkpoint = document_of(found.checkpoint) if found.checkpoint is not None else None
            print_json({"schema_version": SCHEMA_VERSION, "root": root, "checkpoint": checkpoint})
        case Verdict.COMPLETE:
            typer.echo(summary(found.checkpoint) if found.checkpoint is not None else f"written: {found.reason}")
        case Verdict.FAILED:
            complain(found.reason)
            sys.exit(Exit.FAILED)
        case Verdict.NOTHING:
            complain(f"{root}: {found.reason}{elsewhere(root, postfix)}")
            sys.exit(Exit.NO_CHECKPOINT)
        case Verdict.WAIT:
            complain(f"{root}: not complete in time: {found.reason}")
            sys.exit(Exit.TIMEOUT)
