"""``prune``: retention by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from ckpt_service import ownership
from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    Root,
    absolute_root,
    checked_postfix,
    complain,
    elsewhere,
    print_json,
    size,
)
from ckpt_service.errors import RunDirectoryBusy
from ckpt_service.prune import HandPass, carry_out, plan_by_hand
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.retention import Decision, RetentionPolicy
from ckpt_service.scan import load_attempts, load_catalog


def prune(
    keep: Annotated[int, typer.Option(metavar="N", help="Keep the newest N complete checkpoints, at least 1.")],
    root: Root = ".",
    postfix: Postfix = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="K", help="Keep those as well whose step is divisible by K.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints of all ranks and kinds that lie here, and say for each file why it goes or stays.

    The rules are those of the daemon: the newest complete checkpoint, sets that can still complete, pinned ones, those
    of other runs and those of the old trainer stay. What a trainer keeps by its keep_every is not known here: name it
    again with --keep-every, or pin it. It may be used while a daemon works.
    """
    policy = _policy(keep, keep_every)
    root, postfix = absolute_root(root), checked_postfix(postfix)
    _require_no_start(root, postfix)
    plans = plan_by_hand(root, postfix, policy)
    done = [HandPass(plan, plan.delete) if dry_run else carry_out(root, postfix, plan) for plan in plans]
    if as_json:
        files = [_row(decision) for plan in plans for decision in plan.decisions]
        freed = sum(shard.bytes for made in done for shard in made.deleted)
        document = {"schema_version": SCHEMA_VERSION, "root": root, "dry_run": dry_run, "files": files}
        print_json({**document, "bytes_deleted": freed})
    else:
        _print(done, dry_run=dry_run)
    if not plans:
        complain(f"no checkpoints in {root}{elsewhere(root, postfix)}")
    errors = [error for made in done for error in made.errors]
    for error in errors:
        complain(str(error))
    if errors:
        sys.exit(Exit.FAILED)


def _policy(keep: int, keep_every: int | None) -> RetentionPolicy:
    for option, value in (("--keep", keep), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value}: it must be at least 1")
    return RetentionPolicy(keep, keep_every)


def _require_no_start(root: str, postfix: str | None) -> None:
    """Refuse while a run is starting: it may have chosen one of these to load, and has not written down which."""
    owner = ownership.live_run(root, postfix)
    attempts = load_attempts(root, postfix)
    if owner is None or not attempts or attempts[-1].resumed_from is not None:
        return
    if not any(c.id.attempt == attempts[-1].n for c in load_catalog(root, postfix).checkpoints):
        raise RunDirectoryBusy(
            f"a run is starting on {root} ({owner}) and may be about to load what would be deleted",
            path=root,
            hint="prune again once it has resumed or saved",
        )


def _row(decision: Decision) -> dict[str, Any]:
    shard, manifest = decision.shard, decision.shard.manifest
    return {
        "path": shard.path,
        "kind": shard.name.kind,
        "step": manifest.step if manifest else shard.name.step,
        "epoch": manifest.epoch if manifest else shard.name.epoch,
        "stage": shard.stage,
        "tp_rank": shard.tp_rank,
        "bytes": shard.bytes,
        "delete": not decision.keep,
        "reason": decision.reason,
    }


def _print(done: Iterable[HandPass], *, dry_run: bool) -> None:
    verb = "delete" if dry_run else "deleted"
    count, freed = 0, 0
    for made in done:
        gone = {shard.path for shard in made.deleted}
        for decision in made.plan.decisions:
            fate = "keep" if decision.keep else "left" if decision.shard.path not in gone else verb
            typer.echo(f"{fate:<7} {decision.shard.path}: {decision.reason}")
        count += len(made.deleted)
        freed += sum(shard.bytes for shard in made.deleted)
    typer.echo(f"{'would delete' if dry_run else 'deleted'} {count} files, {size(freed)}", err=True)
