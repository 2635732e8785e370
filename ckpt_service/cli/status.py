"""``status``: what the daemons of a run are doing, from the files that they publish."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone

import typer

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
from ckpt_service.config import load_config
from ckpt_service.ownership import host_name, pid_start
from ckpt_service.records import SCHEMA_VERSION, ServiceStatus
from ckpt_service.scan import load_statuses, unreadable_statuses


def status(root: Root = ".", postfix: Postfix = None, as_json: Json = False) -> None:
    """Show what is queued, being written, safe, and failed."""
    root, postfix = absolute_root(root), checked_postfix(postfix)
    stale_seconds = load_config(os.environ).stale_seconds
    found = load_statuses(root, postfix)
    now = datetime.now(timezone.utc)
    unreadable = unreadable_statuses(root, postfix)
    for problem in unreadable:
        complain(problem)
    if as_json:
        hosts = [document.model_dump(mode="json") for document in found]
        print_json({"schema_version": SCHEMA_VERSION, "hosts": hosts})
    elif not found and not unreadable:
        hint = elsewhere(root, postfix) or " (with async_ckpt=False there is none)"
        complain(f"no daemon has served {root} yet: there is no status file{hint}")
    else:
        for document in found:
            _print(document, now, stale_seconds)
    sys.exit(max((judge(document, now, stale_seconds) for document in found), default=Exit.DOWN))


def judge(document: ServiceStatus, now: datetime, stale_seconds: float) -> Exit:
    """Return the exit code that one host's document stands for."""
    shards = document.shards
    failed = document.daemon.state == "degraded" or any(shard.consecutive_failures for shard in shards)
    held_back = any(peer.behind > 1 for shard in shards for peer in shard.held_back_by)
    stopped = document.daemon.state == "stopped"
    if stopped and not failed and not document.pending and not document.writing:
        return Exit.OK
    if stopped or _age(document, now) > stale_seconds or is_dead(document):
        return Exit.DOWN
    return Exit.DEGRADED if failed or held_back else Exit.OK


def is_dead(document: ServiceStatus) -> bool:
    """Return whether the daemon has ended without saying so; only on its own host can one tell before it is stale."""
    if document.daemon.state == "stopped" or document.host != host_name(os.environ):
        return False
    return pid_start(document.daemon.pid) != document.daemon.pid_start


def _age(document: ServiceStatus, now: datetime) -> float:
    return (now - document.daemon.heartbeat_at).total_seconds()


def _print(document: ServiceStatus, now: datetime, stale_seconds: float) -> None:
    daemon, age = document.daemon, _age(document, now)
    stale = "" if daemon.state == "stopped" or age <= stale_seconds else f", STALE for {age:.0f} s"
    state = "DEAD, it left no word" if is_dead(document) else daemon.state
    trainers = ", no trainer connected" if document.queue.capacity == 0 and daemon.state != "stopped" else ""
    typer.echo(f"{document.host}: {state} (pid {daemon.pid}){trainers}{stale}")
    if document.last_complete is None:
        typer.echo("  no complete checkpoint yet")
    else:
        last = document.last_complete
        typer.echo(f"  last complete: step {last.step} epoch {last.epoch}, {last.committed_at:%Y-%m-%d %H:%M:%S %Z}")
    for write in document.writing:
        share = 100 * write.bytes_done // max(write.bytes_total, 1)
        rate = f" at {size(write.bytes_per_second)}/s" if write.bytes_per_second else ""
        where = f"stage {write.stage} tp {write.tp_rank}"
        typer.echo(f"  {write.phase}: step {write.step}, {where}, {share} % of {size(write.bytes_total)}{rate}")
    for waiting in document.pending:
        typer.echo(
            f"  queued: step {waiting.step}, stage {waiting.stage} tp {waiting.tp_rank}, {size(waiting.bytes_total)}"
        )
    for shard in document.shards:
        for peer in shard.held_back_by:
            late = f"stage {peer.stage} tp {peer.tp_rank}, {peer.behind} saves behind"
            typer.echo(f"  stage {shard.stage} tp {shard.tp_rank} keeps files for {late}")
    totals = document.totals
    typer.echo(f"  {totals.committed} committed, {totals.failed} failed, {totals.pruned} pruned since it started")
    if document.storage is not None:
        typer.echo(f"  {size(document.storage.free_bytes)} free")
    for error in document.errors[-3:]:
        hint = f"; {error.hint}" if error.hint else ""
        typer.echo(f"  error at {error.at:%H:%M:%S}: {error.message}{hint}")
