"""``status``: what the daemons of a run are doing, from the files that they publish."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
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
    elsewhere,
    print_json,
    size,
)
from ckpt_service.config import load_config
from ckpt_service.ownership import host_name, pid_start
from ckpt_service.records import SCHEMA_VERSION, ServiceStatus
from ckpt_service.scan import load_statuses, unreadable_statuses

_LOOK_SECONDS = 1.0


def status(
    root: Root = ".",
    postfix: Postfix = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C or the daemons have left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is queued, being written, safe, and failed (exit 3: degraded, 4: daemon down)."""
    if watch and as_json:
        raise ValueError("--watch: it is for people; read the status file itself, or call --json again and again")
    root, postfix = absolute_root(root), checked_postfix(postfix)
    look = partial(_look, root, postfix, load_config(os.environ).stale_seconds)
    view = _watched(look) if watch else look()
    for problem in view.problems:
        complain(problem)
    if as_json:
        hosts = [document.model_dump(mode="json") for document in view.documents]
        print_json({"schema_version": SCHEMA_VERSION, "hosts": hosts})
    elif view.documents:
        typer.echo("\n".join(view.lines))
    elif not view.problems:
        hint = elsewhere(root, postfix) or " (with async_ckpt=False there is none)"
        complain(f"no daemon has served {root} yet: there is no status file{hint}")
    sys.exit(view.code)


@dataclass(frozen=True)
class _View:
    """What the status files of a run say at one moment, and what that means."""

    documents: list[ServiceStatus]
    problems: list[str]
    lines: list[str]
    code: Exit

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more: every daemon has said that it leaves."""
        return bool(self.documents) and all(document.daemon.state == "stopped" for document in self.documents)


def _look(root: str, postfix: str | None, stale_seconds: float) -> _View:
    found, problems = load_statuses(root, postfix), unreadable_statuses(root, postfix)
    now = datetime.now(timezone.utc)
    lines = [line for document in found for line in _lines(document, now, stale_seconds)]
    code = max((judge(document, now, stale_seconds) for document in found), default=Exit.DOWN)
    return _View(found, problems, lines, code)


def _watched(look: Callable[[], _View]) -> _View:
    """Show the status until it does not change any more; return the last one."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, transient=True) as live:
        while not (view := look()).is_over:
            moment = f"{datetime.now():%H:%M:%S}"
            live.update(Text("\n".join([*(view.lines or ["no daemon yet"]), f"  seen at {moment}"])), refresh=True)
            time.sleep(_LOOK_SECONDS)
    return view


def judge(document: ServiceStatus, now: datetime, stale_seconds: float) -> Exit:
    """Return the exit code that one host's document stands for."""
    shards = document.shards
    failed = document.daemon.state == "degraded" or any(shard.consecutive_failures for shard in shards)
    held_back = any(peer.behind > 1 for shard in shards for peer in shard.held_back_by)
    stopped = document.daemon.state == "stopped"
    if stopped and not document.pending and not document.writing:
        return Exit.DEGRADED if failed else Exit.OK
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


def _lines(document: ServiceStatus, now: datetime, stale_seconds: float) -> Iterator[str]:
    daemon, age = document.daemon, _age(document, now)
    stale = "" if daemon.state == "stopped" or age <= stale_seconds else f", STALE for {age:.0f} s"
    state = "DEAD, it left no word" if is_dead(document) else daemon.state
    trainers = ", no trainer connected" if document.queue.capacity == 0 and daemon.state != "stopped" else ""
    yield f"{document.host}: {state} (pid {daemon.pid}){trainers}{stale}"
    if document.last_complete is None:
        yield "  no complete checkpoint yet"
    else:
        last = document.last_complete
        yield f"  last complete: step {last.step} epoch {last.epoch}, {last.committed_at:%Y-%m-%d %H:%M:%S %Z}"
    for write in document.writing:
        share = 100 * write.bytes_done // max(write.bytes_total, 1)
        rate = f" at {size(write.bytes_per_second)}/s" if write.bytes_per_second else ""
        where = f"stage {write.stage} tp {write.tp_rank}"
        yield f"  {write.phase}: step {write.step}, {where}, {share} % of {size(write.bytes_total)}{rate}"
    for waiting in document.pending:
        yield (
            f"  queued: step {waiting.step}, stage {waiting.stage} tp {waiting.tp_rank}, {size(waiting.bytes_total)}"
        )
    for shard in document.shards:
        for peer in shard.held_back_by:
            late = f"stage {peer.stage} tp {peer.tp_rank}, {peer.behind} saves behind"
            yield f"  stage {shard.stage} tp {shard.tp_rank} keeps files for {late}"
    totals = document.totals
    dropped = f", {totals.skipped + totals.superseded} dropped" if totals.skipped + totals.superseded else ""
    yield f"  {totals.committed} committed, {totals.failed} failed{dropped}, {totals.pruned} pruned since it started"
    if document.queue.blocked_seconds:
        yield f"  saves have waited {document.queue.blocked_seconds:.1f} s for a free slot"
    if document.storage is not None:
        yield f"  {size(document.storage.free_bytes)} free"
    for error in document.errors[-3:]:
        hint = f"; {error.hint}" if error.hint else ""
        yield f"  error at {error.at:%H:%M:%S}: {error.message}{hint}"
