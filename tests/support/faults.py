"""Faults on demand in a real process: calls of ``ckpt_service.storage`` that fail, fall short, or hang.

The process runs :data:`FAULTY` before anything else, or is the daemon :data:`DAEMON`; the test holds :class:`Faults`
and says in a control file what goes wrong from now on. The process reads the file at each call, so everything happens
at a place that the test has chosen, and nothing waits for a clock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ckpt_service import ownership, scan, storage
from ckpt_service.records import ErrorEntry, ServiceStatus
from support.processes import RunDirectory, Trainer, wait_for

CALLS = (
    "open",
    "write",
    "pwrite",
    "pread",
    "fsync",
    "close",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "listdir",
    "fchmod",
    "ftruncate",
)

FAULTY = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support import faults
faults.install(Path(os.environ["FAULTS"]))
"""
DAEMON = f"""
{FAULTY}
import logging
from ckpt_service import daemon
from ckpt_service.config import load_config
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
os.makedirs(root, exist_ok=True)
daemon.leave(daemon.serve(root, None, load_config(os.environ), os.environ, stays=False))
"""
"""A daemon like any other, but for the faults; its log goes to stderr."""


TWICE = {"CKPT_SERVICE_MAX_TRIES": "2", "CKPT_SERVICE_WRITER_THREADS": "1"}
"""Settings under which a write is tried twice, by one thread, so that faults can be counted."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong: the call of this name on a path in which ``path`` (a regular expression) is found.

    A rename or link is at ``old -> new``; the call "thread" is the start of a thread of that name. ``thread`` restricts
    it to calls on threads of such names. One of ``code`` (a symbolic errno), ``hangs`` (until the fault is taken away)
    and ``short`` (so many bytes are written at most) says how; ``times``, how often: -1 is for ever.
    """

    call: str
    path: str
    code: str = ""
    hangs: bool = False
    short: int | None = None
    times: int = -1
    thread: str = ""


@dataclass
class Faults:
    """The test's end of the control file."""

    control: Path

    @property
    def env(self) -> dict[str, str]:
        """What the processes need in their environment."""
        return {"FAULTS": str(self.control)}

    def set(self, *faults: Fault) -> None:
        """Have exactly these happen from now on; counts begin anew."""
        beside = self.control.with_suffix(".new")
        beside.write_text(
            json.dumps([{**asdict(fault), "id": time.monotonic_ns() + n} for n, fault in enumerate(faults)])
        )
        beside.rename(self.control)

    def clear(self) -> None:
        """Let everything work again; what hangs goes on."""
        self.set()

    def met(self, call: str = "") -> int:
        """Return how often a fault has happened, of one call or at all."""
        hits = self.control.with_suffix(".hits")
        return sum(line.startswith(call) for line in hits.read_text().splitlines()) if hits.exists() else 0

    def wait_met(self, times: int = 1, call: str = "") -> None:
        """Wait until faults have happened that often."""
        wait_for(lambda: self.met(call) >= times, f"{times} faults happen")


@dataclass(frozen=True)
class Outcome:
    """What a save came to: the error on its ticket, and the warnings that ``save()`` gave about earlier ones."""

    kind: str
    message: str
    warned: list[str]
    code: str | None
    hint: str | None
    step: int | None
    path: str | None

    @property
    def committed(self) -> bool:
        return self.kind == "NoneType"


@dataclass
class Saver:
    """A trainer that saves when it is told."""

    trainer: Trainer

    def save(self, step: int, wait: float = 60) -> Outcome:
        """Save a step and wait for its fate, or so many seconds."""
        self.trainer.hears(f"save({step}, {wait})")
        return Outcome(**json.loads(self.trainer.says("saved")))

    def ends(self, code: int = 0) -> None:
        """Close the input and wait for the end of the process."""
        self.trainer.ends(code)


def start_daemon(run: RunDirectory, faults: Faults, **env: str) -> Trainer:
    """Start a daemon that obeys, and wait until it serves."""
    daemon = run.trainer(DAEMON, **faults.env, **env)
    wait_for(lambda: _serving(run, daemon), "the daemon serves")
    return daemon


def _serving(run: RunDirectory, daemon: Trainer) -> bool:
    status = run.status()
    return status is not None and status.daemon.pid == daemon.pid


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {name: (run.root / "checkpoint_0" / name).read_bytes() for name in run.files()}


def errors(run: RunDirectory) -> list[ErrorEntry]:
    status = run.status()
    assert status is not None
    return status.errors


def told(run: RunDirectory, code: str, step: int) -> list[ErrorEntry]:
    return [error for error in errors(run) if (error.code, error.step) == (code, step)]


def name_of(step: int) -> str:
    return f"ckpt_step_{step}_epoch_0.pt"


def settle(run: RunDirectory, commits: int) -> None:
    """Wait until so many saves are committed and retention is through with the last of them."""

    def is_settled() -> bool:
        status = run.status()
        assert status is not None
        return status.totals.committed == commits and not status.writing and len(run.files()) <= 2

    wait_for(is_settled, "the daemon rests")


def copy_of_the_status(run: RunDirectory) -> ServiceStatus:
    """Read the copy beside the socket."""
    path = Path(run.daemon().socket.removesuffix(".sock") + ".status.json")
    return ServiceStatus.model_validate_json(path.read_text())


# --- in the faulty process --------------------------------------------------------------------------------------------


def install(control: Path) -> None:
    """Put the faults of a control file between our modules and the operating system."""
    obedient = _Obedient(control)
    operating_system = _Wrapped(os, CALLS, obedient)
    of_a_trainer = filter(None, [sys.modules.get("trainer_hooks.start")])  # torch is not for a daemon to import
    for module in (storage, scan, ownership, *of_a_trainer):
        module.os = operating_system  # type: ignore[attr-defined]
    storage.fcntl = _Wrapped(fcntl, ("flock",), obedient)  # type: ignore[assignment]
    start = threading.Thread.start
    threading.Thread.start = (  # type: ignore[method-assign]
        lambda thread: obedient.wrap("thread", lambda name: start(thread))(thread.name)
    )


class _Wrapped:
    """A module some of whose functions obey."""

    def __init__(self, module: ModuleType, names: tuple[str, ...], obedient: _Obedient) -> None:
        self._module = module
        for name in names:
            setattr(self, name, obedient.wrap(name, getattr(module, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Obedient:
    def __init__(self, control: Path) -> None:
        self._control = control
        self._counts: dict[int, int] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def obeying(*args: Any, **kwargs: Any) -> Any:
            fault = self._due(name, lambda: _path_of(name, args, kwargs))
            if fault is None:
                return function(*args, **kwargs)
            if name == "thread":
                raise RuntimeError("can't start new thread")
            if fault["code"]:
                number = getattr(errno, fault["code"])
                raise OSError(number, os.strerror(number))
            if fault["hangs"]:
                while fault in self._faults():
                    time.sleep(0.005)
                return function(*args, **kwargs)
            return function(args[0], args[1][: fault["short"]], *args[2:])  # a write, of less

        return obeying

    def _due(self, name: str, path: Callable[[], str]) -> dict[str, Any] | None:
        for fault in self._faults():
            if fault["call"] != name or not re.search(fault["path"], path()):
                continue
            if not re.search(fault["thread"], threading.current_thread().name):
                continue
            count = self._counts.get(fault["id"], 0)
            if fault["times"] < 0 or count < fault["times"]:
                self._counts[fault["id"]] = count + 1
                with open(self._control.with_suffix(".hits"), "a") as hits:
                    hits.write(f"{name} {path()}\n")
                return fault
        return None

    def _faults(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = json.loads(self._control.read_text())
        except FileNotFoundError:
            return []
        return found


def _path_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    first = _at(args[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
    return f"{first} -> {_at(args[1], kwargs.get('dst_dir_fd'))}" if name in ("rename", "link") else first


def _at(path: Any, directory: int | None) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if directory is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
    return str(path)
