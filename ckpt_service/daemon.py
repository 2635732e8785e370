"""From a command line to a running daemon: lock, socket, log, event loop, and (detached) its own session. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import queue
import select
import signal
import sys
import threading
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
_LOG_LINES_WAITING = 1000
_CLOSING_SECONDS = 1.0


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
        _within(_CLOSING_SECONDS, lock.release)  # the end of the process frees it, whatever the disk does


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
    served = threading.Event()

    def ready() -> None:
        _redirect(log_path)
        served.set()
        os.write(writer, b"1")
        os.close(writer)

    code = 1
    try:
        threading.Thread(target=_leave_unwanted, args=(writer, served), name="ckpt-wanted", daemon=True).start()
        code = run(ready)
    except BaseException:
        logging.exception("the daemon ends")
    leave(code)


def _leave_unwanted(writer: int, served: threading.Event) -> None:
    """End a start that hangs in the disk and that nobody waits for any more: each new try would leave one behind."""
    poll = select.poll()
    poll.register(writer, 0)  # an error is reported always: here, that the other end of the pipe is closed
    poll.poll()
    if not served.is_set():
        os._exit(1)


def leave(code: int) -> NoReturn:
    """End the process at once: a thread that hangs in a write must not keep it, and all that matters is closed."""
    _within(_CLOSING_SECONDS, _flush)
    os._exit(code)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LogThread):
            handler.finish()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do what may hang in the disk, for a bounded time; then the process ends without it."""
    thread = threading.Thread(target=work, name="ckpt-closing", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        return
    thread.join(seconds)


class _LogThread(logging.handlers.QueueHandler):
    """Passes lines on to ``target`` on a thread of its own, so that a disk that hangs costs lines and nothing else."""

    def __init__(self, target: logging.Handler) -> None:
        lines: queue.Queue[logging.LogRecord] = queue.Queue(_LOG_LINES_WAITING)
        super().__init__(lines)
        self._listener = logging.handlers.QueueListener(lines, target)
        self._listener.start()

    def finish(self) -> None:
        """Wait until all lines are written."""
        self._listener.stop()


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
    logging.basicConfig(level=logging.INFO, handlers=[_LogThread(handler)], force=True)
    logging.raiseExceptions = False  # a full disk must not cost more than the line
