"""``latest``: the checkpoint that a resume would take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    Root,
    absolute_root,
    checked_postfix,
    complain,
    document_of,
    elsewhere,
    print_json,
    summary,
)
from ckpt_service.newer import unreadable_newest
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.scan import load_catalog


def latest(
    root: Root = ".",
    postfix: Postfix = None,
    path: Annotated[bool, typer.Option("--path", help="Print the paths of its files, one a line.")] = False,
    as_json: Json = False,
) -> None:
    """Print the newest complete checkpoint."""
    root, postfix = absolute_root(root), checked_postfix(postfix)
    catalog = load_catalog(root, postfix)
    newest = catalog.newest_complete()
    if (newer := unreadable_newest(catalog)) is not None:
        complain(f"step {newer.id.step} epoch {newer.id.epoch} may be newer: {newer.reason}")
    if newest is None:
        hint = elsewhere(root, postfix) or f"; `ckpt-service ls {root}` lists what is there"
        complain(f"{root} has no complete checkpoint{hint}")
        sys.exit(Exit.NO_CHECKPOINT)
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "root": root, **document_of(newest)})
    elif path:
        for shard in newest.shards:
            typer.echo(shard.path)
    else:
        typer.echo(summary(newest))
