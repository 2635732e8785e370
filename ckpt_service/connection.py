"""One client of the daemon: frames and descriptors in, messages out. Shell.

asyncio's transports cannot receive descriptors, so the socket is our own, with ``loop.add_reader``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator

from pydantic import BaseModel, ValidationError

from ckpt_service._version import __version__
from ckpt_service.errors import ProtocolError, ServiceUnavailable, from_os_error
from ckpt_service.intake import close_all
from ckpt_service.locate import has_listener
from ckpt_service.messages import (
    PROTOCOL,
    Announcement,
    ClientMessage,
    Progress,
    client_messages,
)
from ckpt_service.wire import MAX_DESCRIPTORS, Decoder, Frame, encode

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # unix(7); since Linux 6.5, and not in Python's socket module yet
_READ_BYTES = 1 << 16
_MAX_UNSENT = 1000


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end of a Unix socket (unix(7), SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def peer_process(connection: socket.socket) -> int | None:
    """Return a descriptor that is readable once the process that connected has ended (pidfd_open(2)).

    None where that cannot be told: an old kernel together with a client in another pid namespace, or one that is gone.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


class Connection:
    """A connected client. Owns the socket, and the descriptors that came in and were not handed out.

    It ends with the process that connected, even if a child of that one has inherited the socket: a data-loader worker
    that outlives its trainer must not look like a trainer that lives.
    """

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self._socket = sock
        self._socket.setblocking(False)
        self._closed = False
        self._decoder = Decoder()
        self._descriptors: list[int] = []
        self._incoming: asyncio.Queue[Frame | ProtocolError | None] = asyncio.Queue()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_all())
        self._peer = peer_process(sock)
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._read)
        if self._peer is not None:
            loop.add_reader(self._peer, self._on_peer_ended)

    async def messages(self) -> AsyncIterator[tuple[ClientMessage, list[int]]]:
        """Yield messages with their descriptors (the receiver owns them) until the client is gone.

        Raises:
            ProtocolError: what came is not a message of ours.
        """
        while (frame := await self._incoming.get()) is not None:
            if isinstance(frame, ProtocolError):
                raise frame
            if frame.descriptors > len(self._descriptors):
                raise _lost_descriptors()
            mine, self._descriptors = self._descriptors[: frame.descriptors], self._descriptors[frame.descriptors :]
            try:
                message = client_messages.validate_json(frame.body)
            except ValidationError as error:
                close_all(mine)
                raise _unreadable(frame.body, error) from error
            yield message, mine

    def send(self, message: BaseModel) -> None:
        """Queue a message. Progress is dropped for a client that does not read; one that never reads is cut off."""
        waiting = self._outgoing.qsize()
        if waiting > _MAX_UNSENT:
            self._incoming.put_nowait(None)
        elif not (isinstance(message, Progress) and waiting > 10):
            self._outgoing.put_nowait(encode(message))

    async def close(self, patience_seconds: float = 1.0) -> None:
        """Send what is queued (for a bounded time), then close the socket and all descriptors left over; once."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        self._outgoing.put_nowait(None)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sender, patience_seconds)
        self._socket.close()
        close_all(self._descriptors)
        self._descriptors = []

    def _on_peer_ended(self) -> None:
        """Take what the process has sent before it ended; then this is the end, whoever still has its socket."""
        while self._read():
            pass
        self._stop_reading()
        self._incoming.put_nowait(None)

    def _stop_reading(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        if self._peer is not None:
            loop.remove_reader(self._peer)
            os.close(self._peer)
            self._peer = None

    def _read(self) -> bool:
        """Take what has arrived; return whether there may be more."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _READ_BYTES, 8 * MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, descriptors, flags = b"", [], 0
        self._descriptors += descriptors
        try:
            if flags & socket.MSG_CTRUNC:
                raise _lost_descriptors()
            for frame in self._decoder.feed(data):
                self._incoming.put_nowait(frame)
        except ProtocolError as error:
            self._incoming.put_nowait(error)
            data = b""
        if not data:
            self._stop_reading()
            self._incoming.put_nowait(None)
        return bool(data)

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        while (data := await self._outgoing.get()) is not None:
            try:
                await loop.sock_sendall(self._socket, data)
            except OSError:
                return  # the reader sees the end of the connection as well and reports it


def _lost_descriptors() -> ProtocolError:
    """Return what is said when the kernel had no numbers for descriptors that came (recvmsg(2), MSG_CTRUNC)."""
    return ProtocolError(
        "descriptors of a message got lost: the daemon has too many open files",
        op="offer",
        code="EMFILE",
        retryable=True,
        hint="raise the daemon's limit of open files (ulimit -n)",
    )


def other_protocol(version: str, protocol: int) -> ProtocolError:
    """Return the refusal of a client of another protocol."""
    return ProtocolError(
        f"this daemon ({__version__}) speaks protocol {PROTOCOL}, and {version} speaks {protocol}",
        hint="stop the daemon (`ckpt-service status` names its pid), and use one release of ckpt-service on both sides",
    )


def _unreadable(body: bytes, error: ValidationError) -> ProtocolError:
    """Say what is wrong with a message: most of all that it is the hello of another protocol, with fields unknown here.

    A greeting is understood in this much by every release, so that both can say what has to be upgraded.
    """
    with contextlib.suppress(ValidationError):
        hello = Announcement.model_validate_json(body)
        if hello.protocol != PROTOCOL:
            return other_protocol(hello.version, hello.protocol)
    return ProtocolError(f"not a message of this protocol: {error}")


def listen(path: str, *, ours: bool) -> socket.socket:
    """Return a listening Unix socket at ``path``, for this user only; a dead one of the same name is replaced.

    ``ours``: the name belongs to this daemon alone, so that a socket there is replaced whoever listens at it.

    Raises:
        ServiceUnavailable: it cannot be made there, or the name is taken.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_way(path, ours=ours)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise from_os_error(error, op="listening", kind=ServiceUnavailable, path=path) from error
    except ServiceUnavailable:
        listener.close()
        raise
    return listener


def _make_way(path: str, *, ours: bool) -> None:
    """Remove a dead socket, and nothing else: a path that somebody has typed may be that of anything."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise _taken(f"{path} is there and is not a socket", path)
        if not ours and has_listener(path):
            raise _taken(f"another program listens at {path}", path)
        os.unlink(path)


def _taken(reason: str, path: str) -> ServiceUnavailable:
    return ServiceUnavailable(reason, op="listening", path=path, hint="remove it, or listen at another path")
