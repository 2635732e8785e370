"""``show``: one checkpoint in full."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from ckpt_service.catalog import Checkpoint, Shard
from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    Root,
    Step,
    absolute_root,
    checked_postfix,
    complain,
    elsewhere,
    identity,
    moment,
    print_json,
    size,
)
from ckpt_service.cli.steps import Choice, choose, parse_step
from ckpt_service.records import SCHEMA_VERSION, Attempt, ShardManifest
from ckpt_service.scan import load_attempts, load_catalogs


def show(step: Step, root: Root = ".", postfix: Postfix = None, as_json: Json = False) -> None:
    """Show one checkpoint in full: its state, its files, and the start of the trainer that saved it.

    Where several have this step, the one that counts is shown, and the others are named.
    """
    name = parse_step(step)
    root, postfix = absolute_root(root), checked_postfix(postfix)
    checkpoints = [checkpoint for catalog in load_catalogs(root, postfix) for checkpoint in catalog.checkpoints]
    if not checkpoints:
        complain(f"{root} has no checkpoint{elsewhere(root, postfix)}")
        sys.exit(Exit.NO_CHECKPOINT)
    choice = choose(checkpoints, name, root)
    attempt = _attempt_of(choice.checkpoint, load_attempts(root, postfix))
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "root": root, **_document(choice, attempt)})
    else:
        for line in _lines(choice, attempt):
            typer.echo(line)


def _attempt_of(checkpoint: Checkpoint, attempts: Iterable[Attempt]) -> Attempt | None:
    """Return the start that saved a checkpoint, None if its record is not here."""
    mine = (checkpoint.run_id, checkpoint.id.attempt)
    return next((attempt for attempt in attempts if (attempt.run_id, attempt.n) == mine), None)


def _manifest(checkpoint: Checkpoint) -> ShardManifest | None:
    return next((shard.manifest for shard in checkpoint.shards if shard.manifest is not None), None)


def _absent_replicas(manifest: ShardManifest | None) -> list[int]:
    """Return the data-parallel ranks whose own state (random numbers, loader position) did not come in time."""
    said = str(manifest.user.get("absent_replicas") or "") if manifest else ""
    return [int(rank) for rank in said.split() if rank.isascii() and rank.isdigit()]


# --- for programs -----------------------------------------------------------------------------------------------------


def _document(choice: Choice, attempt: Attempt | None) -> dict[str, Any]:
    checkpoint = choice.checkpoint
    manifest = _manifest(checkpoint)
    sizes = {"pp": manifest.pp, "tp": manifest.tp, "dp": manifest.dp} if manifest else None
    return {
        **identity(checkpoint),
        **_state(checkpoint),
        "ranks_committed": len(checkpoint.ranks),
        "ranks_expected": checkpoint.expected,
        "bytes": checkpoint.bytes,
        "committed_at": moment(checkpoint.modified),
        "pinned": checkpoint.pinned,
        "run_id": checkpoint.run_id,
        "topology": sizes,
        "attempt_record": attempt.model_dump(mode="json") if attempt else None,
        "shards": [_shard_document(shard) for shard in checkpoint.shards],
        "others": [{**identity(other), **_state(other)} for other in choice.others],
    }


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"state": checkpoint.state.value, "reason": checkpoint.reason}


def _shard_document(shard: Shard) -> dict[str, Any]:
    manifest = shard.manifest
    said = manifest.model_dump(mode="json") if manifest else {}
    return {
        "stage": shard.stage,
        "tp_rank": shard.tp_rank,
        "path": shard.path,
        "bytes": shard.bytes,
        "problem": shard.problem,
        **{key: said.get(key) for key in ("sequence", "created_at", "producer", "tensors", "user")},
        "absent_replicas": _absent_replicas(manifest),
    }


# --- for people -------------------------------------------------------------------------------------------------------


def _lines(choice: Choice, attempt: Attempt | None) -> Iterator[str]:
    checkpoint = choice.checkpoint
    manifest = _manifest(checkpoint)
    state = checkpoint.state.value + (f": {checkpoint.reason}" if checkpoint.reason else "")
    yield f"step {checkpoint.id.step} epoch {checkpoint.id.epoch}, {state}"
    yield f"  kind       {checkpoint.kind}{', pinned' if checkpoint.pinned else ''}"
    yield f"  committed  {moment(checkpoint.modified)}, {size(checkpoint.bytes)} in {_files(checkpoint)}"
    if manifest is not None:
        yield f"  saved by   {manifest.producer}, pp {manifest.pp}, dp {manifest.dp}, tp {manifest.tp}"
        yield f"  run        {manifest.run_id}, attempt {manifest.attempt}, save {manifest.sequence}"
        yield f"  attempt    {_origin(attempt)}"
    for shard in checkpoint.shards:
        yield from _shard_lines(shard)
    for other in choice.others:
        reason = f": {other.reason}" if other.reason else ""
        where = f"epoch {other.id.epoch}, attempt {other.id.attempt}, {other.kind}"
        yield f"  another one of this step: {where}, {other.state.value}{reason}"


def _files(checkpoint: Checkpoint) -> str:
    there, expected = len(checkpoint.shards), checkpoint.expected
    return f"{there} of {expected} files" if expected else f"{there} files"


def _origin(attempt: Attempt | None) -> str:
    if attempt is None:
        return "its record is not here"
    started = f"started {moment(attempt.started_at.timestamp())} on {attempt.host} (pid {attempt.pid})"
    origin = attempt.resumed_from
    if origin is None:
        return f"{started}, resumed from nothing"
    how = ", as it was told to" if origin.explicit else ""
    return f"{started}, resumed from attempt {origin.attempt} save {origin.sequence}{how}"


def _shard_lines(shard: Shard) -> Iterator[str]:
    yield f"  stage {shard.stage} tp {shard.tp_rank}: {shard.path}"
    manifest = shard.manifest
    made = f", {manifest.tensors} tensors, copied {moment(manifest.created_at.timestamp())}" if manifest else ""
    yield f"    {size(shard.bytes)}{made}"
    if shard.problem:
        yield f"    {shard.problem}"
    if absent := _absent_replicas(manifest):
        yield f"    without the own state of data-parallel ranks {', '.join(map(str, absent))}"
