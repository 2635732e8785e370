"""A process with torch loaded that forks itself into trainers: 1.6 s of imports once instead of in every test.

A trainer from here is a process of its own like any other: own session, streams, environment and ``__main__``. Run as
a script, this file is the nursery; imported, it gives :func:`start`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from typing import IO

_ORDER_BYTES = 1 << 20


class Forked:
    """A forked trainer, with the parts of ``subprocess.Popen`` that tests use."""

    def __init__(self, stdin: IO[str], stdout: IO[str], stderr: IO[str], report: int) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._report = report
        self._reported = b""
        while b"\n" not in self._reported:
            self._read()
        first, _, self._reported = self._reported.partition(b"\n")
        self.pid = int(first)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; a signal's number is negative."""
        while self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("trainer", timeout or 0)
            self._read()
            if self._reported.endswith(b"\n"):
                self.returncode = int(self._reported)
                os.close(self._report)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and the report is on its way
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Give it its last input; return the rest of its output and errors once it has ended."""
        self.stdin.write(input or "")
        self.stdin.close()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        killer = threading.Timer(timeout or 3600, self.kill)
        killer.start()
        try:
            out = self.stdout.read()
            reader.join()
            self.wait(timeout)
        finally:
            killer.cancel()
        return out, errors[0]

    def _read(self) -> None:
        data = os.read(self._report, 64)
        if not data:
            raise AssertionError("the nursery is gone")
        self._reported += data


def start(script: str, *, env: Mapping[str, str], cwd: str) -> Forked:
    """Run ``script`` as the main module of a new process that talks over pipes."""
    order = json.dumps({"script": script, "env": dict(env), "cwd": cwd}).encode()
    assert len(order) < _ORDER_BYTES
    theirs, ours = zip(os.pipe(), *(os.pipe()[::-1] for _ in range(3)), strict=True)
    try:
        socket.send_fds(_control(), [order], list(theirs))
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    stdin, stdout, stderr, report = ours
    return Forked(open(stdin, "w"), open(stdout), open(stderr), report)


@functools.cache
def _control() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ORDER_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop() -> None:
        ours.close()
        process.wait(30)

    atexit.register(stop)
    return ours


# --- in the nursery ---------------------------------------------------------------------------------------------------


def _await_order(control: socket.socket) -> str | None:
    """Serve; return the script in the process that is to run it, and None in the nursery when it is not needed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who watch the trainers are not waited for
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, _ORDER_BYTES, 4)
        if not order:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            return _become_trainer(json.loads(order), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become_trainer(order: dict[str, object], descriptors: list[int]) -> str:
    """Fork the trainer, watch it and report pid and exit code; return only in the trainer."""
    *streams, report = descriptors
    pid = os.fork()
    if pid:
        for descriptor in streams:
            os.close(descriptor)
        os.write(report, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(report)
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    os.chdir(str(order["cwd"]))
    return str(order["script"])


if __name__ == "__main__":
    # What a trainer needs is what this process is for; optimizers import dynamo when they are first used.
    import importlib

    importlib.import_module("torch._dynamo")
    importlib.import_module("trainer_hooks")
    _script = _await_order(socket.socket(fileno=int(sys.argv[1])))
    if _script is not None:
        sys.argv = ["-c"]
        sys.path[0] = ""
        _main = types.ModuleType("__main__")
        _nursery, sys.modules["__main__"] = sys.modules["__main__"], _main
        exec(compile(_script, "<trainer>", "exec"), _main.__dict__)
