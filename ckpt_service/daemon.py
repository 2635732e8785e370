"""From a command line to a running daemon: lock, socket, log, event loop, and (detached) its own session. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from ckpt_service import naming, ownership
from ckpt_service.config import ServiceConfig
from ckpt_service.connection import listen
from ckpt_service.locate import socket_path, status_beside, sweep
from ckpt_service.server import Server, ServerPaths
from ckpt_service.storage import make_directories

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
LOG_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
_LOG_BYTES = 1 << 20


def serve(
    root: str,
    postfix: str | None,
    config: ServiceConfig,
    environ: Mapping[str, str],
    *,
    socket: str | None = None,
    stays: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Run the daemon of a run directory in this process until it is not needed any more; return its exit code.

    Args:
        root: absolute path of the run directory's root.
        postfix: the run's postfix, or None.
        config: all settings.
        environ: where ``CKPT_SERVICE_HOST`` and ``XDG_RUNTIME_DIR`` are looked up.
        socket: path to listen at; by default a short one that clients find by themselves.
        stays: keep serving when no client is connected.
        ready: called once, when clients can connect.

    Raises:
        RunDirectoryBusy: another daemon of this host serves the run directory.
        ServiceUnavailable: there is no place for a socket.
    """
    host = ownership.host_name(environ)
    where = socket or socket_path(root, postfix, host, environ)
    service = ownership.service_path(root, postfix)
    make_directories(service)
    lock = ownership.DaemonLock(root, postfix, host)
    lock.acquire(where)
    try:
        status = [os.path.join(service, naming.status_file(host)), status_beside(where)]
        server = Server(ServerPaths(root, postfix, host, where, status), config, stays=stays)
        listener = listen(where, ours=socket is None)
        if socket is None:
            _sweep(os.path.dirname(where), host)
        try:
            return asyncio.run(server.run(listener, ready))
        finally:
            listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(status[1])
    finally:
        lock.release()


def _sweep(directory: str, host: str) -> None:
    try:
        dead = sweep(directory, host, time.time())
    except OSError as error:  # litter costs nothing but space
        logging.warning("%s could not be swept: %s", directory, error)
        return
    if dead:
        logging.info("removed the sockets of %d daemons that were killed", len(dead))


def detach(log_path: str, run: Callable[[Callable[[], None]], int]) -> int:
    """Run ``run(ready)`` in a process of its own session; return 0 once it called ``ready``, else its exit code.

    The daemon gets no terminal and nothing of the caller's process group, so neither Ctrl-C nor a launcher that kills
    the group reaches it. Its output goes to the log.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_daemon(log_path, run, writer)
    os.close(writer)
    with open(reader, "rb") as told:
        if told.read(1):
            return 0
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) or 1


def _be_the_daemon(log_path: str, run: Callable[[Callable[[], None]], int], writer: int) -> NoReturn:
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def ready() -> None:
        _redirect(log_path)
        os.write(writer, b"1")
        os.close(writer)

    code = 1
    try:
        code = run(ready)
    except BaseException:
        logging.exception("the daemon ends")
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process at once: a thread that hangs in a write must not keep it, and all that matters is closed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _redirect(log_path: str) -> None:
    """Give up the caller's terminal and pipes: whoever reads them would wait for this process to end.

    The log is bounded: a full one is set aside, in place of the one before.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    handler = logging.handlers.RotatingFileHandler(log_path, maxBytes=_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, LOG_DATE_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.raiseExceptions = False  # a full disk must not cost more than the line
