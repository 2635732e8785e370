"""The trainer's side of the socket: hands snapshots over, follows their fate, and outlives the daemon. Shell.

One thread owns the connection. A snapshot stays here, with the memory that it lies in, until it is committed or has
failed; so when the daemon dies, another one is found or started and everything pending is handed over again, in order.
Nothing here ever raises into training: the fate of a snapshot goes to its ticket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_service import wire
from ckpt_service.config import ServiceConfig
from ckpt_service.errors import (
    CkptError,
    SaveFailed,
    SnapshotSkipped,
    SnapshotSuperseded,
    from_os_error,
)
from ckpt_service.messages import (
    Accepted,
    Blocked,
    Committed,
    DaemonMessage,
    Failed,
    Goodbye,
    Hello,
    Lost,
    Offer,
    Park,
    Parked,
    Progress,
    Refused,
    Settle,
    Settled,
    Unpark,
    Welcome,
)
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from trainer_hooks.launch import Channel, Service, connect
from trainer_hooks.peers import PeerNews
from trainer_hooks.tickets import SaveTicket

log = logging.getLogger(__name__)

_RECONNECT_PAUSES_SECONDS = (0.2, 5.0)  # the first, and the longest
_OPEN_PAUSES_SECONDS = (0.1, 0.4, 1.0)


@dataclass(frozen=True)
class Pending:
    """A snapshot that is not safe yet.

    ``final`` ones never give way. ``memory`` is the descriptor of its slot. ``done`` lets go of the slot; with True if
    the daemon has said that it is done with it, so that it can be used again.
    """

    offer: Offer
    memory: int
    ticket: SaveTicket
    final: bool
    done: Callable[[bool], None]


Save = tuple[int, str]
"""The (sequence, kind) of a save: the same on all ranks, and each kind counts by itself."""

_Outgoing = Hello | Pending | Settle | Park | Unpark | Lost | Blocked | Goodbye


class ServiceClient:
    """The connection of one trainer process to its daemon; ``peers`` where other ranks' files cannot be seen."""

    def __init__(self, service: Service, hello: Hello, config: ServiceConfig, peers: PeerNews | None = None) -> None:
        self._service = service
        self._peers = peers
        self._hello = hello
        self._config = config
        self._channel: Channel | None = None
        self._pending: dict[str, Pending] = {}
        self._ending = 0  # those that are not pending any more, and whose tickets do not say so yet
        self._outbox: deque[_Outgoing] = deque()
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()
        self._reached: dict[str, int] = {}
        self._reached_before: dict[str, int] = {}
        self._pause_seconds = 0.0
        self._asked: Settle | None = None
        self._settled: Settled | None = None
        self._parked: Parked | None = None
        self._closing = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="ckpt-client", daemon=True)
        _clients.add(self)

    def start(self) -> None:
        """Connect, starting a daemon if need be; raises ``ServiceUnavailable``."""
        self._channel = connect(self._service, self._hello, self._config)
        self._thread.start()

    def begin(self, hello: Hello) -> None:
        """Go on under another attempt; nothing may be pending."""
        assert not self._pending, "what is pending belongs to the attempt before"
        with self._changed:
            self._hello = hello
            self._post(hello)  # also an unchanged one: what was resumed decides what counts as the newest

    def submit(self, pending: Pending) -> None:
        """Hand a snapshot over; returns at once."""
        with self._changed:
            if not self._pending:
                self._progress_at = time.monotonic()
            self._pending[pending.offer.manifest.snapshot_id] = pending
        self._post(pending)

    def has(self, snapshot_id: str) -> bool:
        """Whether this snapshot, with its slot, is this client's."""
        with self._changed:
            return snapshot_id in self._pending

    def hand_over_again(self, snapshot_id: str) -> None:
        """See to it that a pending snapshot is on its way; twice does no harm."""
        with self._changed:
            pending = self._pending.get(snapshot_id)
        if pending is not None:
            self._post(pending)

    def report_lost(self, manifest: ShardManifest, error: CkptError) -> None:
        """Have the status say that a save failed, or was skipped, before it could be handed over."""
        skipped = isinstance(error, SnapshotSkipped)
        message = str(error.args[0])
        self._post(Lost(manifest=manifest, skipped=skipped, message=message, code=error.code, hint=error.hint))

    def report_blocked(self, seconds: float) -> None:
        """Have the status say how long a save has waited for a slot."""
        self._post(Blocked(seconds=seconds))

    def is_stalled(self, since: float) -> bool:
        """Return whether nothing has moved for ``stall_seconds``, counted from ``since`` at the earliest."""
        return time.monotonic() - max(self._progress_at, since) > self._config.stall_seconds

    def wait_idle(self, timeout: float | None) -> None:
        """Wait until nothing is pending.

        Raises:
            TimeoutError: ``timeout`` seconds are over.
            SaveFailed: nothing has moved for ``stall_seconds``; names what is not safe.
        """
        began = time.monotonic()
        with self._changed:
            while self._pending or self._ending:
                names = ", ".join(str(p.offer.manifest.step) for p in self._pending.values())
                if timeout is not None and time.monotonic() - began >= timeout:
                    raise TimeoutError(f"not committed after {timeout} s: step {names}")
                if self.is_stalled(began):
                    raise SaveFailed(
                        f"the daemon has not moved for {self._config.stall_seconds} s; not committed: step {names}",
                        op="drain",
                        hint="look at the status file and the daemon's log",
                    )
                self._changed.wait(0.1)

    def settle(self) -> bool:
        """Wait until nothing of older attempts is pending for this shard; True when that is so.

        After ``resume_wait_seconds`` without progress the rest is cancelled, which returns False.
        """
        request = Settle(attempt=self._hello.attempt, stage=self._hello.stage, tp_rank=self._hello.tp_rank)
        if self._settles_within(request, self._config.resume_wait_seconds):
            return True
        patience = min(self._config.notice_seconds, self._config.resume_wait_seconds)
        self._settles_within(request.model_copy(update={"cancel": True}), patience)
        return False

    def _settles_within(self, request: Settle, patience_seconds: float) -> bool:
        with self._changed:
            self._asked, self._settled = request, None
        self._post(request)
        seen: Settled | None = None
        moved = time.monotonic()
        with self._changed:
            while time.monotonic() - moved < patience_seconds:
                if self._settled is not None and self._settled.pending == 0:
                    self._asked = None
                    return True
                if self._settled != seen:
                    seen, moved = self._settled, time.monotonic()
                self._changed.wait(0.1)
        return False

    def replaceable(self) -> list[Save]:
        """Return the pending snapshots that may give way to a newer one."""
        with self._changed:
            return [_save_of(pending) for pending in self._pending.values() if not pending.final]

    def park(self, save: Save) -> bool:
        """Keep the daemon from beginning to write a snapshot; False if it has begun or does not answer in time."""
        name = self._name_of(save)
        if name is None:
            return False
        with self._changed:
            self._parked = None
        self._post(Park(snapshot_id=name))
        deadline = time.monotonic() + self._config.notice_seconds
        with self._changed:
            while self._parked is None or self._parked.snapshot_id != name:
                if time.monotonic() > deadline:
                    self._post(Unpark(snapshot_id=name, drop=False))
                    return False
                self._changed.wait(0.05)
            return self._parked.ok

    def unpark(self, save: Save, *, drop: bool) -> None:
        """Drop a parked snapshot, or let it be written after all."""
        name = self._name_of(save)
        if name is not None:
            self._post(Unpark(snapshot_id=name, drop=drop))

    def _name_of(self, save: Save) -> str | None:
        with self._changed:
            return next((name for name, pending in self._pending.items() if _save_of(pending) == save), None)

    def close(self) -> None:
        """Say goodbye and end the thread; what is still pending fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._post(Goodbye())
        if self._thread.ident is not None:
            self._thread.join(self._config.notice_seconds)
        if not self._thread.is_alive():
            self._close_pipe()
        for pending in self._take_all():
            step = pending.offer.manifest.step
            lost = SaveFailed(f"step {step} was not committed before the end", op="close", step=step)
            self._end(pending, lost, by_daemon=False)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if self._channel is None and not self._reconnect():
                break
            try:
                if not self._serve():
                    break
            except Exception as error:  # noqa: BLE001 - without this thread no save would ever end
                log.log(logging.INFO if isinstance(error, OSError) else logging.ERROR, "lost the daemon: %s", error)
                self._disconnect()
        self._disconnect()

    def _serve(self) -> bool:
        """Send what is to be sent and handle what has come; False after the goodbye."""
        assert self._channel is not None
        while self._outbox:
            message = self._outbox[0]  # taken out when it is sent: the daemon may die meanwhile
            if isinstance(message, Pending):
                self._offer(message)
            else:
                if isinstance(message, Goodbye):
                    self._pass_news_on()
                self._channel.send(wire.encode(message), [])
            self._outbox.popleft()
            if isinstance(message, Goodbye):
                return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake_reader, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll()}
        if self._wake_reader in readable:
            os.read(self._wake_reader, 4096)
        if self._channel.fileno() in readable:
            for received in self._channel.receive():
                self._on_message(received)
        return True

    def _offer(self, pending: Pending) -> None:
        assert self._channel is not None
        if pending.offer.manifest.snapshot_id not in self._pending:
            return  # given up meanwhile: its memory is somebody else's
        try:
            directory = self._opened(pending.offer.directory)
        except OSError as error:
            manifest = pending.offer.manifest
            failure = from_os_error(error, op=f"saving step {manifest.step}", kind=SaveFailed, step=manifest.step)
            self.report_lost(manifest, failure)
            self._conclude(manifest.snapshot_id, failure, by_daemon=False)
            return
        self._pass_news_on()
        with directory:
            self._channel.send(wire.encode(pending.offer, 2), [pending.memory, directory.fd])

    def _opened(self, path: str) -> LocalDirectory:
        """Open the final directory; what may pass (no descriptors, a stale handle) is tried again, a little later."""
        for pause in _OPEN_PAUSES_SECONDS:
            try:
                return LocalDirectory.open(path)
            except OSError as error:
                if not from_os_error(error, op="opening").retryable:
                    raise
                time.sleep(pause)
        return LocalDirectory.open(path)

    def _pass_news_on(self) -> None:
        for news in self._peers.news() if self._peers is not None else ():
            if self._channel is not None:
                self._channel.send(wire.encode(news), [])

    def _reconnect(self) -> bool:
        """Get a daemon again and hand everything over again; False when this client is closing.

        The first try comes at once; then with pauses that grow until a daemon gets on with something.
        """
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, self._pause_seconds)
            first, longest = _RECONNECT_PAUSES_SECONDS
            self._pause_seconds = min(max(first, 2 * self._pause_seconds), longest)
            greeted = self._hello
            try:
                self._channel = connect(self._service, greeted, self._config)
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("no daemon: %s", error)
                continue
            self._begin_again(greeted)
            return True
        return False

    def _begin_again(self, greeted: Hello) -> None:
        """Have a new daemon told what the one before knew, or was to be told: all that is pending, and the failures.

        ``greeted`` is what it was greeted with; another attempt may have begun meanwhile.
        """
        if self._peers is not None:
            self._peers.forget()
        with self._changed:
            hello = [self._hello] if self._hello != greeted else []
            self._reached_before = dict(self._reached)
            told = [message for message in self._outbox if isinstance(message, Lost | Blocked)]
            asked = [self._asked] if self._asked is not None else []
            waiting = [message for message in self._outbox if isinstance(message, Goodbye)]
            self._outbox.clear()
            self._outbox.extend([*hello, *told, *self._pending.values(), *asked, *waiting])

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _on_message(self, message: DaemonMessage) -> None:
        with self._changed:
            if self._is_progress(message):
                self._progress_at = time.monotonic()
                self._pause_seconds = 0.0
            if isinstance(message, Settled):
                self._settled = message
            if isinstance(message, Parked):
                self._parked = message
            self._changed.notify_all()
        match message:
            case Accepted(snapshot_id=name) if name in self._pending:
                accepted = self._pending[name].ticket.accepted
                if not accepted.done():
                    accepted.set_result(None)
            case Committed(snapshot_id=name, path=path):
                self._conclude(name, Path(path))
                if self._peers is not None:
                    self._peers.publish()
            case Failed():
                self._conclude(message.snapshot_id, _as_error(message, self._pending.get(message.snapshot_id)))
            case Refused(snapshot_id=str(name), message=reason, code=code, hint=hint):
                refusal = SaveFailed(f"the daemon refused the snapshot: {reason}", op="offer", code=code, hint=hint)
                self._conclude(name, refusal, by_daemon=False)
            case Refused(message=reason):
                raise SaveFailed(f"the daemon refused: {reason}")
            case Progress():
                pass

    def _is_progress(self, message: DaemonMessage) -> bool:
        """Return whether something moves. What an earlier daemon had reached does not: it may die there every time."""
        match message:
            case Accepted(snapshot_id=name):
                reached = 0
            case Progress(snapshot_id=name, bytes_done=reached):
                pass
            case Refused() | Parked() | Settled() | Welcome():
                return False  # answers to questions: whoever asks again and again must not take that for movement
            case _:
                return True
        if name in self._pending:
            self._reached[name] = max(reached, self._reached.get(name, 0))
        return reached > self._reached_before.get(name, -1)

    def _conclude(self, name: str, outcome: Path | CkptError, *, by_daemon: bool = True) -> None:
        with self._changed:
            pending = self._pending.pop(name, None)
            self._reached.pop(name, None)
            self._ending += 1
        try:
            if pending is not None:
                self._end(pending, outcome, by_daemon=by_daemon)
        finally:
            with self._changed:
                self._ending -= 1
                self._changed.notify_all()

    def _end(self, pending: Pending, outcome: Path | CkptError, *, by_daemon: bool) -> None:
        pending.done(by_daemon)
        if isinstance(outcome, Path):
            pending.ticket.resolve(outcome)
        else:
            pending.ticket.fail(outcome)

    def _take_all(self) -> list[Pending]:
        with self._changed:
            pending = list(self._pending.values())
            self._pending.clear()
        return pending

    def _post(self, message: _Outgoing) -> None:
        with self._changed:
            self._outbox.append(message)
            # Not after the pipe is closed: its number may be that of another file by then.
            if self._wake_writer >= 0:
                with contextlib.suppress(BlockingIOError):  # it has enough reasons to wake up
                    os.write(self._wake_writer, b"1")

    def _close_pipe(self) -> None:
        with self._changed:
            if self._wake_writer >= 0:
                os.close(self._wake_writer)
                os.close(self._wake_reader)
                self._wake_reader = self._wake_writer = -1

    def _forget_in_child(self) -> None:
        self._changed = threading.Condition()  # the thread that held it may not be in this process
        self._disconnect()
        self._pending.clear()
        self._closing = True


def _save_of(pending: Pending) -> Save:
    return pending.offer.manifest.sequence, pending.offer.manifest.kind


def _as_error(message: Failed, pending: Pending | None) -> SaveFailed:
    kind = SnapshotSuperseded if message.reason == "superseded" else SaveFailed
    step, path = (pending.offer.manifest.step, pending.offer.directory) if pending is not None else (None, None)
    return kind(message.message, op="commit", step=step, path=path, code=message.code, hint=message.hint)


_clients: weakref.WeakSet[ServiceClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
