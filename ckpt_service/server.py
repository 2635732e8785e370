"""The daemon: one per run directory and host. Shell.

Talks with clients over a Unix socket, hands their snapshots to the :class:`~ckpt_service.workshop.Workshop`, publishes
the status, and knows when to leave. All state lives on the event loop; whatever may block runs on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal, TypeVar

from ckpt_service import __version__, intake, jobs, messages, naming, ownership, records, status
from ckpt_service.config import ServiceConfig
from ckpt_service.connection import Connection, other_protocol, peer_uid
from ckpt_service.errors import CkptError, ProtocolError, from_os_error
from ckpt_service.ledger import Ledger
from ckpt_service.lifetime import Lifetime
from ckpt_service.messages import (
    PROTOCOL,
    ClientMessage,
    DaemonMessage,
    Hello,
    Offer,
    Refused,
    Settle,
)
from ckpt_service.records import DaemonState, ServiceStatus
from ckpt_service.scan import load_catalog, load_peers_file
from ckpt_service.status import Publisher
from ckpt_service.storage import write_small
from ckpt_service.threads import Recurring, started_pool
from ckpt_service.workshop import Surroundings, Workshop

log = logging.getLogger(__name__)

_WORKERS = 4
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
        self._clients: dict[int, Client] = {}
        self._ledger = Ledger()
        self._publisher = Publisher(paths.status, self._status, config.heartbeat_seconds, self._complain)
        self._work = started_pool(_WORKERS, "ckpt-work")
        self._peers: dict[tuple[int, int], records.RankHolds] = {}
        self._peers_file = Recurring(self._write_peers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = iter(range(1, 1 << 62))
        self._state: Literal["starting", "recovering", "serving", "stopped"] = "starting"
        self._started_at = datetime.now(timezone.utc)
        first_client_by = time.monotonic() + config.start_seconds
        self._lifetime = Lifetime(stays, config.linger_seconds, config.grace_seconds, needed_until=first_client_by)
        self._wake = asyncio.Event()
        around = Surroundings(
            tell=self._tell,
            spawn=self._spawn,
            changed=self._changed,
            publish=lambda: self._publisher.publish(config.notice_seconds),
            on_thread=self._on_thread,
            is_draining=lambda: self._lifetime.draining,
        )
        self._workshop = Workshop(paths.root, paths.postfix, paths.host, config, self._ledger, around)

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
            self._workshop.handle(jobs.ClientGone(connection.number, time.monotonic()))
            self._client_left(client)

    def _client_left(self, client: Client) -> None:
        if client.trains and not client.left_cleanly and not self._workshop.is_closed:
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
                self._spawn(self._workshop.settle(client.connection.number, message))
            case messages.Park(snapshot_id=name) if client.trains:
                parked = self._workshop.park(client.connection.number, name)
                client.connection.send(messages.Parked(snapshot_id=name, ok=parked))
            case messages.Unpark(snapshot_id=name, drop=drop) if client.trains:
                self._workshop.unpark(client.connection.number, name, drop=drop)
            case messages.Peers(ranks=ranks) if client.trains:
                await self._on_peers(ranks)
            case messages.Lost() if client.trains:
                self._on_lost(message)
            case messages.Blocked(seconds=seconds) if client.trains:
                self._ledger.blocked_seconds += seconds
                self._publisher.changed()
            case messages.Leave(patient=patient) if client.hello is not None:
                self._on_leave(client, patient=patient)
            case messages.Goodbye():
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
            self._spawn(self._look_again())
        client.connection.send(messages.Welcome(version=__version__, pid=os.getpid(), host=self._paths.host))
        self._publisher.changed()

    async def _on_offer(self, client: Client, offer: Offer, descriptors: list[int]) -> None:
        hello, snapshot_id = client.hello, offer.manifest.snapshot_id
        assert hello is not None
        if (offer.manifest.run_id, offer.manifest.attempt) != (hello.run_id, hello.attempt):
            intake.close_all(descriptors)
            client.connection.send(Refused(snapshot_id=snapshot_id, message="it is of another run or attempt"))
            return
        number, finishing = client.connection.number, self._lifetime.finishing
        try:
            await self._workshop.offer(number, offer, descriptors, finishing=finishing)
        except ProtocolError as error:
            refusal = Refused(snapshot_id=snapshot_id, message=str(error.args[0]), code=error.code, hint=error.hint)
            client.connection.send(refusal)

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

    def _on_lost(self, lost: messages.Lost) -> None:
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

    def _tell(self, client: int, message: DaemonMessage) -> bool:
        """Send to a client, if it is still there; return whether it is."""
        if client in self._clients:
            self._clients[client].connection.send(message)
        return client in self._clients

    def _changed(self) -> None:
        """Have the status published, and look whether the daemon is still needed."""
        self._publisher.changed()
        self._wake.set()

    def _complain(self, problem: CkptError) -> None:
        self._ledger.complain(problem, datetime.now(timezone.utc))
        self._publisher.changed()

    # --- the life of the daemon ---------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        root, postfix = self._paths.root, self._paths.postfix
        self._ledger.seen(load_catalog(root, postfix))
        # Trainers tell only what has changed since, and the file is written as a whole.
        self._peers = {(rank.stage, rank.tp_rank): rank for rank in load_peers_file(root, postfix, self._paths.host)}

    async def _look_again(self) -> None:
        """A trainer has begun, or has resumed: what counts as the newest may be another checkpoint now."""
        try:
            self._ledger.seen(
                await self._on_thread(functools.partial(load_catalog, self._paths.root, self._paths.postfix))
            )
        except OSError as error:
            log.warning("%s cannot be listed: %s", self._paths.root, error)
        self._publisher.changed()

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
        return self._lifetime.seconds_needed(time.monotonic(), trainers=trainers, jobs=len(self._workshop.work))

    async def _leave(self, listener: socket.socket) -> int:
        """Close the door, name what is lost, and say goodbye to the world."""
        self._workshop.close()
        unlinking = asyncio.ensure_future(self._on_thread(self._unlink_socket))
        await asyncio.wait([unlinking], timeout=self._config.notice_seconds)
        listener.close()
        self._workshop.give_up()
        lost = self._workshop.lost
        for client in self._clients.values():
            if client.asked_to_leave:
                client.connection.send(messages.Left(lost=lost))
        await asyncio.gather(*(client.connection.close() for client in self._clients.values()))
        await self._workshop.retain()
        self._state = "stopped"
        await self._publisher.publish(self._config.notice_seconds)
        log.info("left, with %d snapshots not written", len(lost))
        return 1 if lost else 0

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
        here = status.Here(self._paths.root, self._paths.host, self._paths.socket, self._started_at)
        phase: DaemonState | None = "draining" if self._lifetime.draining else None
        if self._state != "serving":
            phase = self._state
        return status.compose(here, phase, trainers, self._workshop.work, self._ledger, time.monotonic())
