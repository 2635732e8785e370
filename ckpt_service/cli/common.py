"""What the verbs share: options, exit codes, and how things are shown."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from datetime import datetime, timezone
from enum import IntEnum
from typing import Annotated, Any, NoReturn

import typer

from ckpt_service import naming, scan
from ckpt_service.catalog import Checkpoint
from ckpt_service.naming import Kind


class Exit(IntEnum):
    """The exit codes, the same for all verbs."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3
    DOWN = 4
    NO_CHECKPOINT = 5
    DAMAGED = 6
    TIMEOUT = 7
    NO_SPACE = 8


def complete_step_or_root(context: typer.Context, incomplete: str) -> list[str]:
    """Return steps and directories, where either may come first."""
    directory, _, begun = incomplete.rpartition("/")
    where = directory or ("/" if incomplete.startswith("/") else ".")
    prefix = f"{directory}/" if "/" in incomplete else ""
    names = os.listdir(where) if os.path.isdir(where) else []
    roots = [f"{prefix}{name}" for name in sorted(names) if name.startswith(begun) and os.path.isdir(f"{where}/{name}")]
    return _complete_step(context, incomplete) + roots


def _complete_step(context: typer.Context, incomplete: str) -> list[str]:
    """Return the steps in the names of the files; none of them is opened."""
    params = context.params
    steps = scan.named_steps(params.get("root") or ".", params.get("postfix"))
    return [text for step in reversed(steps) if (text := str(step)).startswith(incomplete)]


def _complete_postfix(context: typer.Context, incomplete: str) -> list[str]:
    root = context.params.get("root") or "."
    return [postfix for postfix in scan.postfixes(root) if postfix.startswith(incomplete)]


Root = Annotated[str, typer.Argument(metavar="ROOT", help="The directory that the trainer saves to.")]
Postfix = Annotated[
    str | None, typer.Option(help="The postfix of the run, if it has one.", autocompletion=_complete_postfix)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP[:EPOCH]",
        help="The step; with :EPOCH where several epochs have it.",
        autocompletion=_complete_step,
    ),
]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Give up waiting after so long (exit 7); without it, wait on.")
]


def absolute_root(root: str) -> str:
    """Return the root as an absolute path.

    Raises:
        ValueError: it is not a directory.
    """
    if not os.path.isdir(root):
        raise ValueError(f"ROOT={root}: there is no such directory")
    return os.path.abspath(root)


def checked_postfix(postfix: str | None) -> str | None:
    """Return the postfix, None for an empty one; raises ``ValueError`` if it cannot be one."""
    return naming.check_postfix(postfix)


def elsewhere(root: str, postfix: str | None) -> str:
    """Return a hint that names the other runs of a root, for one that has nothing; empty if there are none."""
    others = [f"with --postfix {shlex.quote(other)}" for other in scan.postfixes(root) if other != postfix]
    if postfix is not None and scan.stage_directories(root, None):
        others.insert(0, "without --postfix")
    return f"; it has runs {', '.join(others)}" if others else ""


def deadline_after(timeout: float | None) -> float | None:
    """Return the monotonic time at which ``timeout`` seconds are over, None for no bound.

    Raises:
        ValueError: it is negative, or not a number.
    """
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"--timeout {timeout}: it must be a number of seconds, 0 or more")
    return time.monotonic() + timeout


def time_left(deadline: float | None, at_most: float) -> float:
    """Return the seconds until a deadline, between 0 and ``at_most``."""
    return at_most if deadline is None else min(at_most, max(0.0, deadline - time.monotonic()))


def end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does, so that what is under way cleans up after itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def complain(message: str) -> None:
    """Say what went wrong, on standard error."""
    typer.echo(f"ckpt-service: {message}", err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print a document on standard output."""
    import json

    typer.echo(json.dumps(document, indent=1))


def document_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint with its files, as the documents of ``latest`` and ``wait`` show it."""
    paths = [{"stage": s.stage, "tp_rank": s.tp_rank, "path": s.path} for s in checkpoint.shards]
    return {**identity(checkpoint), "committed_at": moment(checkpoint.modified), "paths": paths}


def summary(checkpoint: Checkpoint) -> str:
    """Return a checkpoint in one line."""
    name = checkpoint.id
    return f"step {name.step} epoch {name.epoch} (attempt {name.attempt}), {moment(checkpoint.modified)}"


def moment(seconds: float) -> str:
    """Return a time in seconds since the epoch as UTC ISO 8601."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def size(nbytes: float) -> str:
    """Return a size for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields by which every document names a checkpoint."""
    kind: Kind = checkpoint.kind
    return {
        "kind": kind,
        "attempt": checkpoint.id.attempt,
        "sequence": checkpoint.id.sequence,
        "epoch": checkpoint.id.epoch,
        "step": checkpoint.id.step,
    }
