"""Which daemons serve a run, by their status files, and what they are doing in one line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from ckpt_service.cli.common import size
from ckpt_service.cli.status import is_dead
from ckpt_service.ownership import host_name
from ckpt_service.records import ServiceStatus
from ckpt_service.scan import load_statuses


@dataclass(frozen=True)
class Daemons:
    """The live daemons of a run: that of this host, None if there is none, and those of other hosts."""

    here: ServiceStatus | None
    elsewhere: tuple[ServiceStatus, ...]

    @property
    def any(self) -> bool:
        """Whether one lives."""
        return self.here is not None or bool(self.elsewhere)

    @property
    def hosts_elsewhere(self) -> str:
        """The names of the other hosts, for a message."""
        return ", ".join(status.host for status in self.elsewhere)


def live_daemons(root: str, postfix: str | None, stale_seconds: float) -> Daemons:
    """Return the daemons that live, as far as this host can tell."""
    now = datetime.now(timezone.utc)
    found = [s for s in load_statuses(root, postfix) if is_alive(s, now, stale_seconds)]
    here = [s for s in found if s.host == host_name(os.environ) and s.root == os.path.realpath(root)]
    return Daemons(here[0] if here else None, tuple(s for s in found if s not in here))


def is_alive(status: ServiceStatus, now: datetime, stale_seconds: float) -> bool:
    """Return whether a daemon lives: on its own host its process tells, elsewhere its heartbeat."""
    if status.daemon.state == "stopped" or is_dead(status):
        return False
    if status.host == host_name(os.environ):
        return True
    return (now - status.daemon.heartbeat_at).total_seconds() <= stale_seconds


def name(status: ServiceStatus) -> str:
    """Return a daemon's name for messages."""
    return f"the daemon of {status.host} (pid {status.daemon.pid})"


def work_line(statuses: Iterable[ServiceStatus]) -> str:
    """Say in one line what is being written and what waits; empty if nothing is."""
    parts, waiting = [], 0
    for status in statuses:
        waiting += len(status.pending)
        for write in status.writing:
            share = 100 * write.bytes_done // max(write.bytes_total, 1)
            rate = f" at {size(write.bytes_per_second)}/s" if write.bytes_per_second else ""
            left = f", {write.eta_seconds:.0f} s left" if write.eta_seconds is not None else ""
            parts.append(f"{write.phase} step {write.step}: {share} % of {size(write.bytes_total)}{rate}{left}")
    parts += [f"{waiting} queued"] if waiting else []
    return "; ".join(parts)
