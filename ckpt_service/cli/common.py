"""What the verbs share: options, exit codes, and how things are shown."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from enum import IntEnum
from typing import Annotated, Any

import typer

from ckpt_service import naming
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
    NO_SPACE = 8


Root = Annotated[str, typer.Argument(metavar="[ROOT]", help="The directory that the trainer saves to.")]
Postfix = Annotated[str | None, typer.Option(help="The postfix of the run, if it has one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


def complain(message: str) -> None:
    """Say what went wrong, on standard error."""
    typer.echo(f"ckpt-service: {message}", err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print a document on standard output."""
    import json

    typer.echo(json.dumps(document, indent=1))


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
