"""The snapshots that a daemon holds, from the offer to the end. Shell; everything here runs on the event loop.

Gives every event to the :class:`~ckpt_service.jobs.JobBook` and carries out what it answers. What may block (checking
an image, writing, deleting) runs on threads and comes back as an event.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ckpt_service import intake, jobs, messages
from ckpt_service.committer import Committer
from ckpt_service.config import ServiceConfig
from ckpt_service.errors import CkptError, ProtocolError, SnapshotSuperseded
from ckpt_service.intake import Held
from ckpt_service.jobs import Job, JobBook, JobKey, Phase
from ckpt_service.ledger import Ledger
from ckpt_service.messages import DaemonMessage, Offer, Settle
from ckpt_service.retainer import Retainer
from ckpt_service.threads import started_pool
from ckpt_service.writer import CommitResult, RateLimit, Stopped, Watcher, WriteOptions

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.2
_WHY_ENDED = {
    Phase.FAILED: "the daemon had to leave",
    Phase.CANCELLED: "a newer attempt has started",
    Phase.SUPERSEDED: "it gave way to a newer snapshot before its write began",
}


@dataclass(frozen=True)
class Surroundings:
    """What the workshop needs of the daemon around it.

    ``tell`` sends to a client by its number, and returns whether it is there; ``spawn`` runs a coroutine beside the
    rest; ``changed`` has the status published soon; ``publish`` waits for that, for a bounded time; ``on_thread`` does
    what may block; ``is_draining`` says whether the daemon was told to leave.
    """

    tell: Callable[[int, DaemonMessage], bool]
    spawn: Callable[[Coroutine[None, None, None]], None]
    changed: Callable[[], None]
    publish: Callable[[], Coroutine[None, None, None]]
    on_thread: Callable[[Callable[[], Held]], Coroutine[Any, Any, Held]]
    is_draining: Callable[[], bool]


class Workshop:
    """Takes snapshots and brings them to the disk. ``lost``: what could not be written since the daemon drains."""

    def __init__(
        self, root: str, postfix: str | None, host: str, config: ServiceConfig, ledger: Ledger, around: Surroundings
    ) -> None:
        self.lost: list[str] = []
        self._config = config
        self._ledger = ledger
        self._around = around
        self._book = JobBook(config.shards_at_once, config.max_tries, config.orphan_seconds)
        self._held: dict[JobKey, Held] = {}
        self._fates: dict[JobKey, CkptError] = {}
        limit = RateLimit(config.rate_limit_bytes_per_second)
        options = WriteOptions(config.writer_threads, config.chunk_bytes, config.direct_io, limit)
        self._committer = Committer(host, options)
        self._retainer = Retainer(root, postfix, ledger, around.changed)
        self._commits = started_pool(config.shards_at_once, "ckpt-commit")
        self._turned_away: set[int] = set()
        self._asked: dict[int, Settle] = {}
        self._progress_at = 0.0
        self._leaving = False

    @property
    def work(self) -> Sequence[tuple[Job, Held]]:
        """The jobs with their snapshots, oldest first."""
        return [(job, self._held[key]) for key, job in sorted(self._book.jobs.items())]

    @property
    def is_closed(self) -> bool:
        """Whether no more snapshots are taken: the daemon leaves."""
        return self._leaving

    # --- what clients ask for -----------------------------------------------------------------------------------------

    async def offer(self, client: int, offer: Offer, descriptors: list[int], *, finishing: bool) -> None:
        """Take a snapshot over, with its descriptors; ``finishing``: the daemon takes no new ones any more.

        Raises:
            ProtocolError: it is not what the offer says, or there was nothing to take it with.
        """
        known = self._held.get(intake.job_key(offer))
        if self._leaving or (finishing and known is None):
            # Not accepted: the trainer hands it to the next daemon. Taking it could put off our end for ever.
            self._turned_away.add(client)
            intake.close_all(descriptors)
            return
        if known is not None and known.offer.manifest == offer.manifest:
            intake.close_all(descriptors)  # it is the same memory, which we hold already
            self.handle(jobs.Offered(known.key, offer.manifest.bytes, client))
            return
        try:
            held = await self._take(offer, descriptors)
        except ProtocolError as error:
            intake.close_all(descriptors)
            self._ledger.failed(offer.manifest, error, datetime.now(timezone.utc), final=True)
            raise
        if self._leaving:
            held.release()
            return
        if held.key in self._held:
            held.release()  # it is the same memory, which we hold already
        else:
            self._held[held.key] = held
            self._ledger.submitted(offer.manifest)
        self.handle(jobs.Offered(held.key, offer.manifest.bytes, client))

    async def _take(self, offer: Offer, descriptors: list[int]) -> Held:
        """Take a snapshot over; for want of memory or descriptors it is tried again, with growing pauses."""
        for tries in itertools.count(1):
            try:
                return await self._around.on_thread(functools.partial(intake.take, offer, descriptors))
            except ProtocolError as error:
                if not error.retryable or tries >= self._config.max_tries or self._leaving:
                    raise
                self._ledger.failed(offer.manifest, error, datetime.now(timezone.utc), final=False)
                self._around.changed()
            await asyncio.sleep(jobs.retry_pause(tries))
        raise AssertionError("never reached")

    def park(self, client: int, name: str) -> bool:
        """Keep the write of a snapshot of this client from beginning; return whether that worked."""
        key = self._key_of(client, name)
        if key is None or not self._book.can_park(key):
            return False
        self.handle(jobs.Parked(key))
        return True

    def unpark(self, client: int, name: str, *, drop: bool) -> None:
        """Drop a parked snapshot, or let it be written after all."""
        key = self._key_of(client, name)
        if key is not None and self._book.is_parked(key):
            self.handle(jobs.Dropped(key) if drop else jobs.Unparked(key))

    def _key_of(self, client: int, name: str) -> JobKey | None:
        """Return the job of this client that has this name."""
        mine = (key for key, job in self._book.jobs.items() if job.client == client)
        return next((key for key in mine if self._snapshot_id(key) == name), None)

    async def settle(self, client: int, settle: Settle) -> None:
        """Tell the client how much older attempts of its shard have to write yet, until that is nothing.

        Or until it asks anew: it has given up waiting for this answer.
        """
        self._asked[client] = settle
        while self._asked.get(client) is settle:
            older = self._book.left_by_older(settle.stage, settle.tp_rank, settle.attempt)
            done = sum(self._held[job.key].bytes_done for job in older)
            is_there = self._around.tell(client, messages.Settled(pending=len(older), bytes_done=done))
            if not older or not is_there:
                del self._asked[client]
                return
            if settle.cancel:
                for job in older:
                    self.handle(jobs.Cancelled(job.key))
            await asyncio.sleep(_PROGRESS_SECONDS)

    def give_up(self) -> None:
        """Stop all writes; what is not written is lost here, and named."""
        for key in sorted(self._book.jobs):
            held = self._held[key]
            held.stop.set()
            error = CkptError(
                f"step {held.offer.manifest.step} was not written before the daemon had to leave",
                op="drain",
                hint="a trainer that is alive hands it over again",
            )
            self._ledger.failed(held.offer.manifest, error, datetime.now(timezone.utc), final=True)
            self.lost.append(str(error.args[0]))

    def close(self) -> None:
        """Take no more snapshots."""
        self._leaving = True

    async def retain(self) -> None:
        """Have what is too old deleted, for a bounded time."""
        await self._retainer.retain(self._config.notice_seconds)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def handle(self, event: jobs.Event) -> None:
        """Have the book react to an event, and do what it answers."""
        for instruction in self._book.handle(event):
            self._carry_out(instruction)
        self._book.check()
        self._around.changed()

    def _carry_out(self, instruction: jobs.Instruction) -> None:
        match instruction:
            case jobs.Accept(key, client):
                self._tell(client, messages.Accepted(snapshot_id=self._snapshot_id(key)))
            case jobs.Start(key):
                self._around.spawn(self._commit(self._held[key]))
            case jobs.Abort(key):
                self._held[key].stop.set()
            case jobs.Pause(key, seconds):
                asyncio.get_running_loop().call_later(seconds, self._retry, key)
            case jobs.Prune(key):
                self._around.spawn(self._prune(self._held[key]))
            case jobs.Report(key, client, phase):
                self._report(key, client, phase)
            case jobs.Forget(key):
                self._held.pop(key).release()

    def _retry(self, key: JobKey) -> None:
        if key in self._book.jobs and self._book.jobs[key].phase is Phase.WAITING:
            self.handle(jobs.RetryDue(key))

    def _report(self, key: JobKey, client: int | None, phase: Phase) -> None:
        held = self._held[key]
        snapshot_id = self._snapshot_id(key)
        error = self._fates.pop(key, None)
        if phase is Phase.COMMITTED:
            seconds = time.monotonic() - held.submitted_at
            self._tell(client, messages.Committed(snapshot_id=snapshot_id, path=held.path, seconds=seconds))
            return
        reason: messages.FailureReason = "cancelled" if phase is Phase.CANCELLED else "error"
        if phase is Phase.SUPERSEDED or isinstance(error, SnapshotSuperseded):
            reason = "superseded"
            self._ledger.counts["superseded"] += 1
        message = str(error.args[0]) if error else f"step {held.offer.manifest.step}: {_WHY_ENDED[phase]}"
        code, hint = (error.code, error.hint) if error else (None, None)
        self._tell(
            client, messages.Failed(snapshot_id=snapshot_id, reason=reason, message=message, code=code, hint=hint)
        )

    def _tell(self, client: int | None, message: messages.DaemonMessage) -> None:
        if client is not None:
            self._around.tell(client, message)

    def _snapshot_id(self, key: JobKey) -> str:
        return self._held[key].offer.manifest.snapshot_id

    async def _commit(self, held: Held) -> None:
        loop = asyncio.get_running_loop()
        held.bytes_done, held.write_began_at = 0, time.monotonic()

        def post(event: jobs.Event) -> None:
            loop.call_soon_threadsafe(self.handle, event)

        def wrote(nbytes: int) -> None:
            loop.call_soon_threadsafe(self._on_bytes, held, nbytes)

        watcher = Watcher(wrote, lambda: post(jobs.Synced(held.key)), lambda: post(jobs.Renaming(held.key)), held.stop)
        try:
            result = await loop.run_in_executor(self._commits, functools.partial(self._committer.commit, held, watcher))
        except Stopped:
            self.handle(jobs.Broke(held.key, retryable=False, at=time.monotonic()))
        except CkptError as error:
            self._on_broken(held, error)
        else:
            self._on_committed(held, result)

    def _on_bytes(self, held: Held, nbytes: int) -> None:
        """Tell everybody who waits that the disk moves, also those whose turn has not come."""
        held.bytes_done += nbytes
        self._around.changed()
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_SECONDS:
            return
        self._progress_at = now
        progress = messages.Progress(snapshot_id=held.offer.manifest.snapshot_id, bytes_done=held.bytes_done)
        for client in self._turned_away.union(job.client for job in self._book.jobs.values() if job.client is not None):
            self._tell(client, progress)

    def _on_broken(self, held: Held, error: CkptError) -> None:
        before = self._book.jobs[held.key].tries
        self._fates[held.key] = error
        self.handle(jobs.Broke(held.key, error.retryable, time.monotonic()))
        final = held.key not in self._book.jobs
        if not isinstance(error, SnapshotSuperseded):
            self._ledger.failed(held.offer.manifest, error, datetime.now(timezone.utc), final=final)
            if final and self._around.is_draining():
                self.lost.append(str(error))
        log.warning("step %d, try %d: %s", held.offer.manifest.step, before + 1, error)

    def _on_committed(self, held: Held, result: CommitResult) -> None:
        now = datetime.now(timezone.utc)
        seconds = time.monotonic() - held.submitted_at
        self._ledger.committed(held.offer.manifest, path=held.path, at=now, seconds=seconds, written=result.written)
        log.info("committed %s in %.2f s (%s)", held.path, seconds, "direct" if result.direct else "buffered")
        self.handle(jobs.Landed(held.key))

    async def _prune(self, held: Held) -> None:
        """Publish that the newer file is safe, then delete what is too old. Neither failing undoes the commit."""
        await self._around.publish()
        self._retainer.committed(held.offer.manifest, held.directory, held.offer.retention)
        await self.retain()
        self.handle(jobs.Pruned(held.key))
