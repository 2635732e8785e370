"""Find the daemon of a run directory on this host, or start it. Shell.

The socket is looked for where the status file says and where the environment puts it, and only while somebody holds the
daemon's lock: a socket without that is one of a dead daemon, or by now one of another program. Starting runs
``python -m ckpt_service run ROOT --detach`` in a directory of its own, so no script of the user is imported again; the
daemon then lives in its own session. If several ranks do this at once, the daemon lock lets one through and all
connect to it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ckpt_service
from ckpt_service import naming, ownership, wire
from ckpt_service.config import ServiceConfig
from ckpt_service.errors import CkptError, ProtocolError, ServiceUnavailable
from ckpt_service.locate import socket_path
from ckpt_service.messages import (
    DaemonMessage,
    Hello,
    Refused,
    Welcome,
    daemon_messages,
)
from ckpt_service.scan import load_statuses

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Service:
    """Which daemon to talk to. ``socket`` is None for the one that is found or started for this run directory."""

    root: str
    postfix: str | None
    host: str
    socket: str | None
    environ: Mapping[str, str]

    def holder(self) -> int | None:
        """Return the pid of the daemon of this run directory, 0 where it cannot be told, None if there is none."""
        if self.socket is not None:
            return 0
        service = ownership.service_path(self.root, self.postfix)
        return ownership.lock_holder(os.path.join(service, naming.daemon_lock(self.host)))

    def sockets(self) -> Iterator[str]:
        """Yield the paths at which it may listen."""
        if self.socket is not None:
            yield self.socket
            return
        if self.holder() is None:
            return
        statuses = load_statuses(self.root, self.postfix)
        # A copy of a run directory holds the status of the original's daemon.
        known = [s.daemon.socket for s in statuses if (s.host, s.root) == (self.host, self.root)]
        yield from dict.fromkeys([*known, socket_path(self.root, self.postfix, self.host, self.environ)])


class Refusal(ProtocolError):
    """The daemon that answers refuses. ``pid`` is 0 where its process cannot be seen from here; ``is_older``: it speaks
    an older protocol."""

    def __init__(self, message: str, pid: int, *, is_older: bool) -> None:
        super().__init__(message, op="connect")
        self.pid = pid
        self.is_older = is_older


class Channel:
    """A connected socket on which the daemon has said welcome. Used by one thread at a time; ``fileno`` to wait on."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = wire.Decoder()

    def fileno(self) -> int:
        """The descriptor, readable when there is something to receive."""
        return self._socket.fileno()

    def send(self, frame: bytes, descriptors: list[int]) -> None:
        """Send one frame with its descriptors; raises ``OSError`` when the daemon is gone or takes nothing."""
        sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else 0
        self._socket.sendall(frame[sent:])

    def receive(self) -> list[DaemonMessage]:
        """Return what has arrived (waits for something); raises ``OSError`` or ``ProtocolError`` at the end."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        try:
            return [daemon_messages.validate_json(frame.body) for frame in self._decoder.feed(data)]
        except ValueError as error:
            raise ProtocolError(f"the daemon sent something that is not of this protocol: {error}") from error

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def connect(service: Service, hello: Hello, config: ServiceConfig) -> Channel:
    """Return a channel to the daemon; start one if none answers and it is ours to start.

    A daemon that an older release has left behind is asked to finish and leave, and gives way to one of this release.
    It holds nothing that is needed yet but what it still writes: the run lock is ours, so no other run has use for it.

    Raises:
        ServiceUnavailable: after ``start_seconds``; says what was tried and why it failed.
    """
    deadline = time.monotonic() + config.start_seconds
    problem = "nothing listens"
    may_relieve = service.socket is None
    while True:
        for path in service.sockets():
            try:
                return _greet(path, hello, deadline, config.notice_seconds)
            except Refusal as error:
                problem = f"{path}: {error}"
                if not _concerns(error, service):
                    continue
                if not (error.is_older and error.pid and may_relieve):
                    raise ServiceUnavailable(f"the daemon refuses: {error}", op="connect", path=path) from error
                may_relieve = False  # once: whatever brings it back will do so again
                _relieve(error, service, config.grace_seconds + config.notice_seconds)
                deadline = time.monotonic() + config.start_seconds
                break
            except (OSError, CkptError) as error:
                problem = f"{path}: {error}"
                if service.socket is not None and isinstance(error, ProtocolError):
                    raise ServiceUnavailable(f"no daemon listens there: {error}", op="connect", path=path) from error
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            hint = (
                "start it, or look into its log" if service.socket else "look into daemon.<host>.log in .ckpt_service"
            )
            raise ServiceUnavailable(
                f"no daemon answered within {config.start_seconds} s: {problem}",
                op="connect",
                path=service.root,
                hint=hint,
            )
        if service.socket is None and (reason := _start(service, remaining)):
            problem = reason
        time.sleep(_RETRY_SECONDS)


def _greet(path: str, hello: Hello, deadline: float, notice_seconds: float) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not all the time there is: what listens there may be a program that never answers.
        sock.settimeout(max(0.1, min(notice_seconds, deadline - time.monotonic())))
        sock.connect(path)
        channel = Channel(sock)
        channel.send(wire.encode(hello), [])
        while True:
            for message in channel.receive():
                match message:
                    case Welcome():
                        sock.settimeout(notice_seconds)  # a daemon that takes nothing for so long is given up
                        return channel
                    case Refused(message=reason, protocol=spoken):
                        raise Refusal(reason, _peer_pid(sock), is_older=spoken < hello.protocol)
                    case _:
                        continue
    except BaseException:
        sock.close()
        raise


def _peer_pid(sock: socket.socket) -> int:
    """Return the pid of the process that listens at the other end (unix(7), SO_PEERCRED), 0 if it is not visible."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _concerns(refusal: Refusal, service: Service) -> bool:
    """Whether it is the daemon of this run directory that refuses, and not one that got its former socket's name."""
    return 0 in (refusal.pid, service.holder()) or refusal.pid == service.holder()


def _relieve(daemon: Refusal, service: Service, patience_seconds: float) -> None:
    """Have a daemon finish what it holds and leave; returns when it has ended.

    Raises:
        ServiceUnavailable: it has not, or it is not ours to end.
    """
    log.warning("%s; pid %d is asked to finish its writes and leave", daemon.args[0], daemon.pid)
    try:
        process = os.pidfd_open(daemon.pid)
    except ProcessLookupError:
        return
    try:
        if service.holder() not in (0, daemon.pid):  # only now: the pid cannot become that of another process any more
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        if not poll.poll(patience_seconds * 1000):
            raise ServiceUnavailable(
                f"{daemon.args[0]}: pid {daemon.pid} was asked to leave, and has not in {patience_seconds:.0f} s",
                op="connect",
                hint="start again once it has left",
            )
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def _start(service: Service, patience_seconds: float) -> str | None:
    """Start the daemon; return None when it serves, else why it does not."""
    command = [sys.executable, "-m", "ckpt_service", "run", service.root, "--detach"]
    if service.postfix:
        command += ["--postfix", service.postfix]
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=_environment(service.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=patience_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the daemon did not start within {patience_seconds:.0f} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error}"
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment: the trainer's, and this very package importable even if it is not installed."""
    home = str(Path(ckpt_service.__file__).parents[1])
    result = dict(environ)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        result["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), home)))
    return result
