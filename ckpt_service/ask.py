"""The socket of a daemon, for a tool that asks it to leave. Shell; blocking, used on one thread.

Takes the path of the socket and who asks; gives the daemon's last words. A tool never keeps a daemon alive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from pydantic import BaseModel

from ckpt_service import __version__, wire
from ckpt_service.errors import ProtocolError, ServiceUnavailable, from_os_error
from ckpt_service.messages import (
    DaemonMessage,
    Hello,
    Leave,
    Left,
    Refused,
    Welcome,
    daemon_messages,
)

_READ_BYTES = 1 << 16


class Asker:
    """A connection to a daemon that has said welcome; owns the socket."""

    def __init__(self, path: str, root: str, postfix: str | None, patience_seconds: float) -> None:
        """Connect and say hello.

        Raises:
            ServiceUnavailable: nobody answers at ``path`` within ``patience_seconds``.
            ProtocolError: the daemon is of another release, or serves another run directory.
        """
        self._path = path
        self._decoder = wire.Decoder()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(patience_seconds)
            self._socket.connect(path)
            hello = Hello(version=__version__, role="tool", pid=os.getpid(), root=root, postfix=postfix)
            self._send(hello)
            if not any(isinstance(message, Welcome) for message in self._receive()):
                raise ProtocolError("the daemon did not say welcome", op="connect", path=path)
        except OSError as error:
            self.close()
            raise from_os_error(error, op="asking the daemon", kind=ServiceUnavailable, path=path) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket; what was asked for goes on."""
        self._socket.close()

    def ask_to_leave(self, *, patient: bool) -> None:
        """Ask the daemon to leave: when all is written (``patient``), or within its grace time.

        Raises:
            ServiceUnavailable: it is gone.
        """
        try:
            self._send(Leave(patient=patient))
        except OSError as error:
            raise from_os_error(error, op="asking the daemon", kind=ServiceUnavailable, path=self._path) from error

    def fileno(self) -> int:
        """The descriptor, readable when the daemon has said something or is gone."""
        return self._socket.fileno()

    def last_words(self) -> list[str] | None:
        """Return what was lost, once the daemon leaves; None if it ended without a word. Waits for either."""
        self._socket.settimeout(None)
        try:
            while True:
                for message in self._receive():
                    if isinstance(message, Left):
                        return message.lost
        except (OSError, ProtocolError):
            return None

    def _send(self, message: BaseModel) -> None:
        self._socket.sendall(wire.encode(message))

    def _receive(self) -> Iterator[DaemonMessage]:
        """Yield what has arrived; waits for something, and raises when the daemon refuses or is gone."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        for frame in self._decoder.feed(data):
            try:
                message = daemon_messages.validate_json(frame.body)
            except ValueError as error:
                raise ProtocolError(f"the daemon sent something that is not of this protocol: {error}") from error
            if isinstance(message, Refused):
                raise ProtocolError(f"the daemon refuses: {message.message}", op="ask", path=self._path)
            yield message
