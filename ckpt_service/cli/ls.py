"""``ls``: every checkpoint with its state, and the reason for it."""

from __future__ import annotations

from typing import Any

import typer

from ckpt_service.catalog import Checkpoint
from ckpt_service.cli.common import (
    Json,
    Postfix,
    Root,
    absolute_root,
    checked_postfix,
    complain,
    elsewhere,
    identity,
    moment,
    print_json,
    size,
)
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.scan import load_catalog, load_lora


def ls(root: Root = ".", postfix: Postfix = None, as_json: Json = False) -> None:
    """List the checkpoints of a run, newest first, and then the LoRA checkpoints below the root."""
    root, postfix = absolute_root(root), checked_postfix(postfix)
    found = [(checkpoint, "") for checkpoint in load_catalog(root, postfix).checkpoints]
    for name, catalog in load_lora(root, postfix).items():
        found += [(checkpoint, f"LoRA, {name}") for checkpoint in catalog.checkpoints]
    if as_json:
        rows = [_row(checkpoint) for checkpoint, _ in found]
        print_json({"schema_version": SCHEMA_VERSION, "root": root, "checkpoints": rows})
        return
    if not found:
        complain(f"no checkpoints in {root}{elsewhere(root, postfix)}")
        return
    lines: list[tuple[str, ...]] = [("STEP", "EPOCH", "STATE", "RANKS", "SIZE", "COMMITTED", "ATTEMPT", "NOTE")]
    lines += [_columns(checkpoint, kind) for checkpoint, kind in found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        **identity(checkpoint),
        "state": checkpoint.state.value,
        "reason": checkpoint.reason,
        "ranks_committed": len(checkpoint.ranks),
        "ranks_expected": checkpoint.expected,
        "bytes": checkpoint.bytes,
        "committed_at": moment(checkpoint.modified),
        "pinned": checkpoint.pinned,
    }


def _columns(checkpoint: Checkpoint, kind: str) -> tuple[str, ...]:
    note = [kind] if kind else []
    note += [checkpoint.reason] if checkpoint.reason else []
    note += ["pinned"] if checkpoint.pinned else []
    return (
        str(checkpoint.id.step),
        str(checkpoint.id.epoch),
        checkpoint.state.value,
        f"{len(checkpoint.ranks)}/{checkpoint.expected or '?'}",
        size(checkpoint.bytes),
        moment(checkpoint.modified),
        str(checkpoint.id.attempt),
        "; ".join(note),
    )
