"""The status file: built from what the daemon knows, published at every change and as a heartbeat. Shell.

The file is replaced as a whole, at most five times a second, and every second when nothing changes. A copy lies beside
the socket, so that the status can be read while the disk hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import cast

from ckpt_service import __version__, ownership
from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.intake import Held
from ckpt_service.jobs import ACTIVE, Job
from ckpt_service.ledger import Ledger
from ckpt_service.messages import PROTOCOL, Hello
from ckpt_service.records import (
    DaemonState,
    DaemonStatus,
    PendingStatus,
    QueueStatus,
    ServiceStatus,
    ShardStatus,
    StorageStatus,
    Totals,
    WritePhase,
    WritingStatus,
)
from ckpt_service.storage import write_small
from ckpt_service.threads import Recurring, started_pool

_MIN_INTERVAL_SECONDS = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Here:
    """What of a status never changes while the daemon lives."""

    root: str
    host: str
    socket: str
    started_at: datetime


def compose(
    here: Here,
    phase: DaemonState | None,
    trainers: Sequence[Hello],
    work: Sequence[tuple[Job, Held]],
    ledger: Ledger,
    now: float,
) -> ServiceStatus:
    """Return the status document of this moment; where it is published, ``storage`` is filled in.

    Args:
        here: what never changes.
        phase: the state of a daemon that is not simply serving; None derives it from what it does.
        trainers: what the connected trainers said of themselves.
        work: the jobs and their snapshots, oldest first.
        ledger: what happened so far.
        now: a monotonic time in seconds.
    """
    active = [(job, held) for job, held in work if job.phase in ACTIVE]
    waiting = [(job, held) for job, held in work if job.phase not in ACTIVE]
    shards = ledger.shard_statuses()
    newest = ledger.newest_trainer
    doing: DaemonState = "degraded" if ledger.failed_since_commit else "writing" if active else "idle"
    return ServiceStatus(
        host=here.host,
        root=here.root,
        run_id=newest.run_id if newest else None,
        attempt=newest.attempt if newest else None,
        daemon=DaemonStatus(
            pid=os.getpid(),
            pid_start=_own_start(os.getpid()),
            version=__version__,
            protocol=PROTOCOL,
            socket=here.socket,
            state=phase or doing,
            started_at=here.started_at,
            heartbeat_at=datetime.now(timezone.utc),
        ),
        queue=QueueStatus(
            depth=len(waiting),
            capacity=sum(trainer.slots for trainer in trainers),
            bytes=sum(job.nbytes for job, _ in waiting),
            on_full=newest.on_full if newest else "block",
            blocked_seconds=ledger.blocked_seconds,
        ),
        writing=[writing(job, held, now) for job, held in active],
        pending=[pending(held) for _, held in waiting],
        shards=shards,
        last_complete=ledger.last_complete,
        totals=Totals(**ledger.counts),
        storage=None,
        errors=list(ledger.errors),
    )


def writing(job: Job, held: Held, now: float) -> WritingStatus:
    """Describe a snapshot that is being written; ``now`` is a monotonic time in seconds."""
    manifest = held.offer.manifest
    elapsed = now - (held.write_began_at or now)
    rate = held.bytes_done / elapsed if elapsed > 0 and held.bytes_done else None
    return WritingStatus(
        snapshot_id=manifest.snapshot_id,
        kind=manifest.kind,
        step=manifest.step,
        epoch=manifest.epoch,
        stage=manifest.stage,
        tp_rank=manifest.tp_rank,
        phase=cast(WritePhase, job.phase.value),
        bytes_done=held.bytes_done,
        bytes_total=manifest.bytes,
        bytes_per_second=rate,
        eta_seconds=(manifest.bytes - held.bytes_done) / rate if rate else None,
    )


def pending(held: Held) -> PendingStatus:
    """Describe a snapshot that waits for its turn, or for its next try."""
    manifest = held.offer.manifest
    return PendingStatus(
        snapshot_id=manifest.snapshot_id,
        kind=manifest.kind,
        step=manifest.step,
        epoch=manifest.epoch,
        stage=manifest.stage,
        tp_rank=manifest.tp_rank,
        bytes_total=manifest.bytes,
        submitted_at=held.accepted_at,
    )


def storage(found: os.statvfs_result, shards: Iterable[ShardStatus]) -> StorageStatus:
    """Describe a filesystem; ``shards`` say how large one checkpoint of this host is."""
    free = found.f_bavail * found.f_frsize
    needed = sum(shard.last_committed.bytes for shard in shards if shard.last_committed)
    return StorageStatus(
        free_bytes=free,
        total_bytes=found.f_blocks * found.f_frsize,
        checkpoints_left=free // needed if needed else None,
    )


@functools.cache
def _own_start(pid: int) -> int:
    """When this process started; it is looked up once, before the event loop runs."""
    return ownership.pid_start(pid) or 0


class _Space:
    """The filesystem under the root, as it was when it last answered."""

    def __init__(self) -> None:
        self._found: os.statvfs_result | None = None

    def look(self, root: str) -> None:
        """Ask the filesystem; this waits as long as it hangs."""
        with contextlib.suppress(OSError):
            self._found = os.statvfs(root)

    def filled(self, status: ServiceStatus) -> ServiceStatus:
        """Return the status with what is known."""
        known = storage(self._found, status.shards) if self._found is not None else None
        return status.model_copy(update={"storage": known})


Complain = Callable[[CkptError], None]
"""Takes a problem that a person should see."""


class _Place:
    """One file that the status is published in: at most one write under way, and one that waits for it."""

    def __init__(self, path: str, build: Callable[[], ServiceStatus], space: _Space, complain: Complain) -> None:
        self._path = path
        self._build = build
        self._space = space
        self._complain = complain
        self._problem: str | None = None
        self._executor = started_pool(1, "ckpt-status")
        self.writes = Recurring(self._write)

    async def _write(self) -> None:
        status = self._build()
        problem = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._write_now, status)
        except OSError as error:
            problem = from_os_error(error, op="writing the status", kind=CkptError, path=self._path)
        self._note(problem)

    def _note(self, problem: CkptError | None) -> None:
        """Say it once: a disk that is full stays so for many heartbeats."""
        message = str(problem) if problem is not None else None
        if message != self._problem:
            self._problem = message
            if problem is None:
                log.info("the status can be written to %s again", self._path)
            else:
                log.warning("%s", problem)
                self._complain(problem)

    def _write_now(self, status: ServiceStatus) -> None:
        """On the thread of this place."""
        if self._path.startswith(status.root + os.sep):  # elsewhere, a disk that hangs must not be waited for
            self._space.look(status.root)
        content = self._space.filled(status).model_dump_json(indent=1).encode() + b"\n"
        write_small(self._path, content)


class Publisher:
    """Publishes the status in every place. A disk that hangs delays only its own place.

    ``complain`` is called once when a place cannot be written; the other one may still tell of it.
    """

    def __init__(
        self, paths: list[str], build: Callable[[], ServiceStatus], heartbeat_seconds: float, complain: Complain
    ) -> None:
        self._heartbeat_seconds = max(heartbeat_seconds, _MIN_INTERVAL_SECONDS)
        self._changed = asyncio.Event()
        space = _Space()
        self._places = [_Place(path, build, space, complain) for path in paths]
        _own_start(os.getpid())

    def changed(self) -> None:
        """Ask for a publish soon."""
        self._changed.set()

    async def publish(self, patience_seconds: float) -> None:
        """Write the status of this moment to every place; wait for that, for a bounded time."""
        await asyncio.wait([place.writes.request() for place in self._places], timeout=patience_seconds)

    async def run(self) -> None:
        """Publish at every change and at every heartbeat, until cancelled."""
        while True:
            self._changed.clear()
            await self.publish(self._heartbeat_seconds)
            await asyncio.sleep(_MIN_INTERVAL_SECONDS)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_seconds - _MIN_INTERVAL_SECONDS)
