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
    identity,
    moment,
    print_json,
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
    root = absolute_root(root)
    catalog = load_catalog(root, checked_postfix(postfix))
    newest = catalog.newest_complete()
    if (newer := unreadable_newest(catalog)) is not None:
        complain(f"step {newer.id.step} epoch {newer.id.epoch} may be newer: {newer.reason}")
    if newest is None:
        complain(f"{root} has no complete checkpoint; `ckpt-service ls {root}` lists what is there")
        sys.exit(Exit.NO_CHECKPOINT)
    if as_json:
        paths = [{"stage": s.stage, "tp_rank": s.tp_rank, "path": s.path} for s in newest.shards]
        document = {"schema_version": SCHEMA_VERSION, "root": root, **identity(newest)}
        print_json({**document, "committed_at": moment(newest.modified), "paths": paths})
    elif path:
        for shard in newest.shards:
            typer.echo(shard.path)
    else:
        typer.echo(
            f"step {newest.id.step} epoch {newest.id.epoch} (attempt {newest.id.attempt}), {moment(newest.modified)}"
        )
