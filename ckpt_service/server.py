"""The daemon: one per run directory and host. Shell.

Takes snapshots over a Unix socket, gives every event to the :class:`~ckpt_service.jobs.JobBook` and carries out what it
answers. All state lives on the event loop; whatever may block (checking an image, writing, deleting, the status file)
runs on threads and comes back as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal, TypeVar

from ckpt_service import __version__, intake, jobs, naming, ownership, records, status
from ckpt_service.committer import Committer
from ckpt_service.config import ServiceConfig
from ckpt_service.connection import Connection, other_protocol, peer_uid
from ckpt_service.errors import CkptError, ProtocolError, SnapshotSuperseded, from_os_error
from ckpt_service.intake import Held
from ckpt_service.jobs import JobBook, JobKey, Phase
from ckpt_service.ledger import Ledger
from ckpt_service.lifetime import Lifetime
from ckpt_service.records import (
    PROTOCOL,
    ClientMessage,
    DaemonState,
    Hello,
    Offer,
    Refused,
    ServiceStatus,
    Settle,
)
from ckpt_service.retainer import Retainer
from ckpt_service.scan import load_catalog, load_peers_file
from ckpt_service.status import Publisher
from ckpt_service.storage import write_small
from ckpt_service.threads import Recurring, started_pool
from ckpt_service.writer import CommitResult, RateLimit, Stopped, Watcher, WriteOptions

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.2
_WORKERS = 4
_WHY_ENDED = {
    Phase.FAILED: "the daemon had to leave",
    Phase.CANCELLED: "a newer attempt has started",
    Phase.SUPERSEDED: "it gave way to a newer snapshot before its write began",
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class ServerPaths:
    """The names that a server works under; all absolute. ``postfix`` is None for the run without one."""

    root: str
    postfix: str | None
    host: str
    socket: str
    status: list[str]


@dataclass
class Client:
    """A connected client and what it said of itself."""

    connection: Connection
    hello: Hello | None = None
    left_cleanly: bool = False
    asked_to_leave: bool = False

    @property
    def trains(self) -> bool:
        """Whether it keeps the daemon alive."""
        return self.hello is not None and self.hello.role == "trainer"


class Server:
    """Serves one run directory. ``stays``: do not leave when no client needs the daemon any more."""

    def __init__(self, paths: ServerPaths, config: ServiceConfig, *, stays: bool) -> None:
        self._paths = paths
        self._config = config
        self._book = JobBook(config.shards_at_once, config.max_tries, config.orphan_seconds)
        self._held: dict[JobKey, Held] = {}
        self._fates: dict[JobKey, CkptError] = {}
        self._clients: dict[int, Client] = {}
        self._ledger = Ledger()
        self._publisher = Publisher(paths.status, self._status, config.heartbeat_seconds, self._complain)
        limit = RateLimit(config.rate_limit_bytes_per_second)
        options = WriteOptions(config.writer_threads, config.chunk_bytes, config.direct_io, limit)
        self._committer = Committer(paths.host, options)
        self._retainer = Retainer(paths.root, paths.postfix, self._ledger, self._publisher.changed)
        self._commits = started_pool(config.shards_at_once, "ckpt-commit")
        self._work = started_pool(_WORKERS, "ckpt-work")
        self._peers: dict[tuple[int, int], records.RankHolds] = {}
        self._peers_file = Recurring(self._write_peers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = iter(range(1, 1 << 62))
        self._state: Literal["starting", "recovering", "serving", "stopped"] = "starting"
        self._started_at = datetime.now(timezone.utc)
        first_client_by = time.monotonic() + config.start_seconds
        self._lifetime = Lifetime(stays, config.linger_seconds, config.grace_seconds, needed_until=first_client_by)
        self._progress_at = 0.0
        self._lost: list[str] = []
        self._leaving = False
        self._turned_away: set[int] = set()
        self._wake = asyncio.Event()

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> int:
        """Serve until nobody needs the daemon or a signal ends it; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._drain, number)
        self._state = "recovering"
        await self._unless_told_to_leave(self._look_around)
        self._state = "serving"
        await self._publisher.publish(self._config.notice_seconds)
        await self._unless_told_to_leave(ready)
        accepting = asyncio.create_task(self._accept(listener))
        publishing = asyncio.create_task(self._publisher.run())
        for task in (accepting, publishing):
            task.add_done_callback(self._finished)
        log.info("serving %s", self._paths.root)
        try:
            await self._until_unneeded()
        finally:
            accepting.cancel()
            publishing.cancel()
        return await self._leave(listener)

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        failing = False
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
                self._admit(sock)
                failing = False
            except OSError as error:
                problem = from_os_error(error, op="accepting a client", kind=CkptError, path=self._paths.socket)
                if not failing:  # once, however long it lasts
                    log.error("%s", problem)
                    self._complain(problem)
                failing = True
                await asyncio.sleep(1)  # out of descriptors: trying again at once would only spin

    def _admit(self, sock: socket.socket) -> None:
        uid = peer_uid(sock)
        if uid == os.getuid():
            self._spawn(self._serve(Connection(next(self._numbers), sock)))
            return
        log.warning("refused a client of user %d", uid)
        sock.close()

    async def _serve(self, connection: Connection) -> None:
        client = Client(connection)
        self._clients[connection.number] = client
        try:
            async for message, descriptors in connection.messages():
                await self._on_message(client, message, descriptors)
        except ProtocolError as error:
            log.warning("client %d: %s", connection.number, error)
            if error.code is not None:  # it is our lack, and not their mistake
                self._complain(error)
            connection.send(Refused(message=str(error), retryable=error.retryable, code=error.code, hint=error.hint))
        finally:
            await connection.close()
            del self._clients[connection.number]
            self._handle(jobs.ClientGone(connection.number, time.monotonic()))
            self._client_left(client)

    def _client_left(self, client: Client) -> None:
        if client.trains and not client.left_cleanly:
            log.warning("the trainer of pid %d left without a goodbye", client.hello.pid if client.hello else 0)
            self._lifetime.trainer_left(time.monotonic(), cleanly=False)
        self._wake.set()

    async def _on_message(self, client: Client, message: ClientMessage, descriptors: list[int]) -> None:
        match message:
            case Offer() if client.trains:
                await self._on_offer(client, message, descriptors)
                return
            case _:
                intake.close_all(descriptors)
        match message:
            case Hello():
                self._on_hello(client, message)
            case Settle() if client.trains:
                self._spawn(self._settle(client, message))
            case records.Park(snapshot_id=name) if client.trains:
                self._on_park(client, name)
            case records.Unpark(snapshot_id=name, drop=drop) if client.trains:
                self._on_unpark(client, name, drop=drop)
            case records.Peers(ranks=ranks) if client.trains:
                await self._on_peers(ranks)
            case records.Lost() if client.trains:
                self._on_lost(message)
            case records.Blocked(seconds=seconds) if client.trains:
                self._ledger.blocked_seconds += seconds
                self._publisher.changed()
            case records.Leave(patient=patient) if client.hello is not None:
                self._on_leave(client, patient=patient)
            case records.Goodbye():
                client.left_cleanly = True
                if client.trains:
                    self._lifetime.trainer_left(time.monotonic(), cleanly=True)
            case _:
                raise ProtocolError("a trainer says hello first")

    def _on_hello(self, client: Client, hello: Hello) -> None:
        mine = (self._paths.root, self._paths.postfix)
        if hello.protocol != PROTOCOL:
            raise other_protocol(hello.version, hello.protocol)
        if (hello.root, hello.postfix) != mine:
            raise ProtocolError(f"this daemon serves {mine}, and the client asks for {(hello.root, hello.postfix)}")
        client.hello = hello
        if client.trains:
            self._lifetime.trainer_came()
            self._ledger.greeted(hello)
        client.connection.send(records.Welcome(version=__version__, pid=os.getpid(), host=self._paths.host))
        self._publisher.changed()

    async def _on_offer(self, client: Client, offer: Offer, descriptors: list[int]) -> None:
        if self._leaving:  # the connection ends in a moment, and the snapshot is handed to another daemon
            intake.close_all(descriptors)
            return
        hello = client.hello
        assert hello is not None
        snapshot_id = offer.manifest.snapshot_id
        if (offer.manifest.run_id, offer.manifest.attempt) != (hello.run_id, hello.attempt):
            intake.close_all(descriptors)
            client.connection.send(Refused(snapshot_id=snapshot_id, message="it is of another run or attempt"))
            return
        known = self._held.get(intake.job_key(offer))
        if self._leaving or (self._lifetime.finishing and known is None):
            # Not accepted: the trainer hands it to the next daemon. Taking it could put off our end for ever.
            self._turned_away.add(client.connection.number)
            intake.close_all(descriptors)
            return
        if known is not None and known.offer.manifest == offer.manifest:
            intake.close_all(descriptors)  # it is the same memory, which we hold already
            self._handle(jobs.Offered(known.key, offer.manifest.bytes, client.connection.number))
            return
        try:
            held = await self._take(offer, descriptors)
        except ProtocolError as error:
            intake.close_all(descriptors)
            self._ledger.failed(offer.manifest, error, datetime.now(timezone.utc), final=True)
            refusal = Refused(snapshot_id=snapshot_id, message=str(error.args[0]), code=error.code, hint=error.hint)
            client.connection.send(refusal)
            return
        if self._leaving:
            held.release()
            return
        if held.key in self._held:
            held.release()  # it is the same memory, which we hold already
        else:
            self._held[held.key] = held
            self._ledger.submitted(offer.manifest)
        self._handle(jobs.Offered(held.key, offer.manifest.bytes, client.connection.number))

    async def _take(self, offer: Offer, descriptors: list[int]) -> Held:
        """Take a snapshot over; for want of memory or descriptors it is tried again, with growing pauses."""
        for tries in itertools.count(1):
            try:
                return await self._on_thread(functools.partial(intake.take, offer, descriptors))
            except ProtocolError as error:
                if not error.retryable or tries >= self._config.max_tries or self._leaving:
                    raise
                self._ledger.failed(offer.manifest, error, datetime.now(timezone.utc), final=False)
                self._publisher.changed()
            await asyncio.sleep(jobs.retry_pause(tries))
        raise AssertionError("never reached")

    def _on_park(self, client: Client, name: str) -> None:
        key = self._key_of(client, name)
        ok = key is not None and self._book.can_park(key)
        if key is not None and ok:
            self._handle(jobs.Parked(key))
        client.connection.send(records.Parked(snapshot_id=name, ok=ok))

    def _on_unpark(self, client: Client, name: str, *, drop: bool) -> None:
        key = self._key_of(client, name)
        if key is not None and self._book.is_parked(key):
            self._handle(jobs.Dropped(key) if drop else jobs.Unparked(key))

    async def _on_peers(self, ranks: list[records.RankHolds]) -> None:
        """Write down what other ranks hold; a disk that hangs must not keep the offers that come next."""
        self._peers |= {(rank.stage, rank.tp_rank): rank for rank in ranks}
        await asyncio.wait([self._peers_file.request()], timeout=self._config.notice_seconds)

    async def _write_peers(self) -> None:
        """Retention and the command line read it there."""
        content = records.PeersFile(ranks=list(self._peers.values())).model_dump_json(indent=1).encode()
        path = os.path.join(
            ownership.service_path(self._paths.root, self._paths.postfix), naming.peers_file(self._paths.host)
        )
        try:
            await self._on_thread(functools.partial(write_small, path, content))
        except OSError as error:
            problem = from_os_error(error, op="writing what other hosts hold", kind=CkptError, path=path)
            log.warning("%s", problem)
            self._complain(problem)

    def _on_lost(self, lost: records.Lost) -> None:
        if lost.skipped:
            self._ledger.counts["skipped"] += 1
        else:
            error = CkptError(lost.message, op="save", code=lost.code, hint=lost.hint)
            self._ledger.failed(lost.manifest, error, datetime.now(timezone.utc), final=True)
        self._publisher.changed()

    def _on_leave(self, client: Client, *, patient: bool) -> None:
        log.info("asked by pid %d to finish what is here and to leave", client.hello.pid if client.hello else 0)
        client.asked_to_leave = True
        if patient:
            self._lifetime.finish()
        else:
            self._lifetime.drain(time.monotonic())
        self._publisher.changed()
        self._wake.set()

    def _key_of(self, client: Client, name: str) -> JobKey | None:
        """Return the job of this client that has this name."""
        mine = (key for key, job in self._book.jobs.items() if job.client == client.connection.number)
        return next((key for key in mine if self._snapshot_id(key) == name), None)

    async def _settle(self, client: Client, settle: Settle) -> None:
        """Tell the client how much older attempts of its shard have to write yet, until that is nothing."""
        while True:
            older = self._book.left_by_older(settle.stage, settle.tp_rank, settle.attempt)
            done = sum(self._held[job.key].bytes_done for job in older)
            client.connection.send(records.Settled(pending=len(older), bytes_done=done))
            if not older or client.connection.number not in self._clients:
                return
            if settle.cancel:
                for job in older:
                    self._handle(jobs.Cancelled(job.key))
            await asyncio.sleep(_PROGRESS_SECONDS)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _handle(self, event: jobs.Event) -> None:
        for instruction in self._book.handle(event):
            self._carry_out(instruction)
        self._book.check()
        self._publisher.changed()
        self._wake.set()

    def _carry_out(self, instruction: jobs.Instruction) -> None:
        match instruction:
            case jobs.Accept(key, client):
                self._tell(client, records.Accepted(snapshot_id=self._snapshot_id(key)))
            case jobs.Start(key):
                self._spawn(self._commit(self._held[key]))
            case jobs.Abort(key):
                self._held[key].stop.set()
            case jobs.Pause(key, seconds):
                asyncio.get_running_loop().call_later(seconds, self._retry, key)
            case jobs.Prune(key):
                self._spawn(self._prune(self._held[key]))
            case jobs.Report(key, client, phase):
                self._report(key, client, phase)
            case jobs.Forget(key):
                self._held.pop(key).release()

    def _retry(self, key: JobKey) -> None:
        if key in self._book.jobs and self._book.jobs[key].phase is Phase.WAITING:
            self._handle(jobs.RetryDue(key))

    def _report(self, key: JobKey, client: int | None, phase: Phase) -> None:
        held = self._held[key]
        snapshot_id = self._snapshot_id(key)
        error = self._fates.pop(key, None)
        if phase is Phase.COMMITTED:
            seconds = time.monotonic() - held.submitted_at
            self._tell(client, records.Committed(snapshot_id=snapshot_id, path=held.path, seconds=seconds))
            return
        reason: records.FailureReason = "cancelled" if phase is Phase.CANCELLED else "error"
        if phase is Phase.SUPERSEDED or isinstance(error, SnapshotSuperseded):
            reason = "superseded"
            self._ledger.counts["superseded"] += 1
        message = str(error.args[0]) if error else _WHY_ENDED[phase]
        code, hint = (error.code, error.hint) if error else (None, None)
        self._tell(
            client, records.Failed(snapshot_id=snapshot_id, reason=reason, message=message, code=code, hint=hint)
        )

    def _tell(self, client: int | None, message: records.DaemonMessage) -> None:
        if client in self._clients:
            self._clients[client].connection.send(message)

    def _snapshot_id(self, key: JobKey) -> str:
        return self._held[key].offer.manifest.snapshot_id

    async def _commit(self, held: Held) -> None:
        loop = asyncio.get_running_loop()
        held.bytes_done, held.write_began_at = 0, time.monotonic()

        def post(event: jobs.Event) -> None:
            loop.call_soon_threadsafe(self._handle, event)

        def wrote(nbytes: int) -> None:
            loop.call_soon_threadsafe(self._on_bytes, held, nbytes)

        watcher = Watcher(wrote, lambda: post(jobs.Synced(held.key)), lambda: post(jobs.Renaming(held.key)), held.stop)
        try:
            result = await loop.run_in_executor(self._commits, functools.partial(self._committer.commit, held, watcher))
        except Stopped:
            self._handle(jobs.Broke(held.key, retryable=False, at=time.monotonic()))
        except CkptError as error:
            self._on_broken(held, error)
        else:
            self._on_committed(held, result)

    def _on_bytes(self, held: Held, nbytes: int) -> None:
        """Tell everybody who waits that the disk moves, also those whose turn has not come."""
        held.bytes_done += nbytes
        self._publisher.changed()
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_SECONDS:
            return
        self._progress_at = now
        progress = records.Progress(snapshot_id=held.offer.manifest.snapshot_id, bytes_done=held.bytes_done)
        for client in self._turned_away.union(job.client for job in self._book.jobs.values() if job.client is not None):
            self._tell(client, progress)

    def _on_broken(self, held: Held, error: CkptError) -> None:
        before = self._book.jobs[held.key].tries
        self._fates[held.key] = error
        self._handle(jobs.Broke(held.key, error.retryable, time.monotonic()))
        final = held.key not in self._book.jobs
        if not isinstance(error, SnapshotSuperseded):
            self._ledger.failed(held.offer.manifest, error, datetime.now(timezone.utc), final=final)
            if final and self._lifetime.draining:
                self._lost.append(str(error))
        log.warning("step %d, try %d: %s", held.offer.manifest.step, before + 1, error)

    def _on_committed(self, held: Held, result: CommitResult) -> None:
        now = datetime.now(timezone.utc)
        seconds = time.monotonic() - held.submitted_at
        self._ledger.committed(held.offer.manifest, path=held.path, at=now, seconds=seconds, written=result.written)
        log.info("committed %s in %.2f s (%s)", held.path, seconds, "direct" if result.direct else "buffered")
        self._handle(jobs.Landed(held.key))

    async def _prune(self, held: Held) -> None:
        """Publish that the newer file is safe, then delete what is too old. Neither failing undoes the commit."""
        await self._publisher.publish(self._config.notice_seconds)
        self._retainer.committed(held.offer.manifest, held.directory, held.offer.retention)
        await self._retainer.retain(self._config.notice_seconds)
        self._handle(jobs.Pruned(held.key))

    def _complain(self, problem: CkptError) -> None:
        self._ledger.complain(problem, datetime.now(timezone.utc))
        self._publisher.changed()

    # --- the life of the daemon ---------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        root, postfix = self._paths.root, self._paths.postfix
        self._ledger.seen(load_catalog(root, postfix))
        # Trainers tell only what has changed since, and the file is written as a whole.
        self._peers = {(rank.stage, rank.tp_rank): rank for rank in load_peers_file(root, postfix, self._paths.host)}

    async def _unless_told_to_leave(self, work: Callable[[], None]) -> None:
        """Do what may block before clients are served; a signal ends the wait."""
        doing = asyncio.ensure_future(self._on_thread(work))
        told = asyncio.create_task(self._wake.wait())
        await asyncio.wait([doing, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if doing.done():
            doing.result()

    def _drain(self, number: int) -> None:
        log.info("%s: finishing what is here, then leaving", signal.Signals(number).name)
        self._lifetime.drain(time.monotonic())
        self._wake.set()

    async def _until_unneeded(self) -> None:
        while (wait := self._seconds_needed()) > 0:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(wait, 3600))

    def _seconds_needed(self) -> float:
        trainers = sum(client.trains and not client.left_cleanly for client in self._clients.values())
        return self._lifetime.seconds_needed(time.monotonic(), trainers=trainers, jobs=len(self._book.jobs))

    async def _leave(self, listener: socket.socket) -> int:
        """Close the door, name what is lost, and say goodbye to the world."""
        self._leaving = True
        unlinking = asyncio.ensure_future(self._on_thread(self._unlink_socket))
        await asyncio.wait([unlinking], timeout=self._config.notice_seconds)
        listener.close()
        lost = sorted(self._book.jobs)
        for key in lost:
            held = self._held[key]
            held.stop.set()
            error = CkptError(
                f"step {held.offer.manifest.step} was not written before the daemon had to leave",
                op="drain",
                hint="a trainer that is alive hands it over again",
            )
            self._ledger.failed(held.offer.manifest, error, datetime.now(timezone.utc), final=True)
            self._lost.append(str(error.args[0]))
        for client in self._clients.values():
            if client.asked_to_leave:
                client.connection.send(records.Left(lost=self._lost))
        await asyncio.gather(*(client.connection.close() for client in self._clients.values()))
        await self._retainer.retain(self._config.notice_seconds)
        self._state = "stopped"
        await self._publisher.publish(self._config.notice_seconds)
        log.info("left, with %d snapshots not written", len(self._lost))
        return 1 if self._lost else 0

    def _unlink_socket(self) -> None:
        with contextlib.suppress(OSError):  # the next daemon replaces it
            os.unlink(self._paths.socket)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        """Do what may block; on threads of our own, since those of the loop are waited for at its end."""
        return await asyncio.get_running_loop().run_in_executor(self._work, work)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a bug: the daemon cannot go on", exc_info=error)
            os.kill(os.getpid(), signal.SIGABRT)  # clients notice, start another daemon and hand over again

    # --- status -------------------------------------------------------------------------------------------------------

    def _status(self) -> ServiceStatus:
        trainers = [client.hello for client in self._clients.values() if client.hello is not None and client.trains]
        work = [(job, self._held[key]) for key, job in sorted(self._book.jobs.items())]
        here = status.Here(self._paths.root, self._paths.host, self._paths.socket, self._started_at)
        phase: DaemonState | None = "draining" if self._lifetime.draining else None
        if self._state != "serving":
            phase = self._state
        return status.compose(here, phase, trainers, work, self._ledger, time.monotonic())
