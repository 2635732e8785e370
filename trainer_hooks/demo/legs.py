"""Starts the training processes of a run, one leg after another, and watches each to its end.

A leg is a subprocess of this Python. The parent learns about it from its journal, its exit status and the files it
leaves; its output goes to a log. Promises that no leg is left running when `run_leg` has returned or raised.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer_hooks.demo.files import PartialFile, partial_files
from trainer_hooks.demo.journal import Event, JournalReader

_RATE_LIMIT = "CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND"
_CHUNK = "CKPT_SERVICE_CHUNK_BYTES"
_CHUNKS = 16
_ALIGNMENT = 4096
_LARGEST_CHUNK = 16 << 20

_POLL_SECONDS = 0.05
_STALL_SECONDS = 180.0
_LOG_LINES = 15


class DemoFailed(Exception):
    """Something did not happen as the demo claims. The message is for the person who ran it."""


@dataclass(frozen=True)
class RunPaths:
    """Where one run lives: its checkpoints in `root`, the demo's own notes about it in `records`."""

    name: str
    legs: int
    root: Path
    records: Path

    @property
    def journal(self) -> Path:
        """What its legs note, all in one file."""
        return self.records / "journal.jsonl"

    @property
    def final_state(self) -> Path:
        """The state after the last step, written without the service."""
        return self.records / "final_state.pt"

    def log(self, leg: int) -> Path:
        """What a leg printed."""
        return self.records / f"leg_{leg}.log"


@dataclass(frozen=True)
class SlowWrites:
    """How the daemon is told to take `seconds` for the write of a file of `file_bytes`, a little at a time.

    The time is that of several training steps, so that training visibly goes on beside a write and a kill finds the
    middle of it. Left alone, a write is over in milliseconds.
    """

    file_bytes: int
    seconds: float

    def environment(self) -> dict[str, str]:
        """Settings of the daemon, which inherits them from the trainer that starts it."""
        chunk = self.file_bytes // _CHUNKS // _ALIGNMENT * _ALIGNMENT
        return {
            _RATE_LIMIT: str(max(1, int(self.file_bytes / self.seconds))),
            _CHUNK: str(min(max(chunk, _ALIGNMENT), _LARGEST_CHUNK)),
        }


@dataclass(frozen=True)
class Leg:
    """One start of the trainer, and the kill in store for it, if any."""

    paths: RunPaths
    number: int
    steps: int
    tiny: bool
    kill_in_save: int = 0
    kill_daemon: bool = False
    slow_writes: SlowWrites | None = None

    @property
    def title(self) -> str:
        """How it is called on the screen and in the table."""
        return f"{self.paths.name}, leg {self.number}" if self.paths.legs > 1 else self.paths.name


@dataclass(frozen=True)
class LegEnd:
    """How a leg ended. `partials` is what lay unfinished on disk at that moment."""

    leg: Leg
    exit_status: int
    seconds: float
    events: tuple[Event, ...]
    partials: tuple[PartialFile, ...]


class Audience(Protocol):
    """Is shown every event of a leg as it is read."""

    def show(self, leg: Leg, event: Event) -> None:
        """Take one event; called in order."""


def run_leg(leg: Leg, reader: JournalReader, audience: Audience) -> LegEnd:
    """Start a leg, follow its journal, and return when the process has ended, however it did.

    Raises:
        DemoFailed: the process made no progress for minutes; it has been killed.
    """
    begun = time.monotonic()
    with leg.paths.log(leg.number).open("wb") as log:
        process = subprocess.Popen(
            _command(leg), env=_environment(leg), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            events = _follow(process, leg, reader, audience)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    partials = tuple(partial_files(leg.paths.root))
    events += _read(leg, reader, audience)
    return LegEnd(leg, process.returncode, time.monotonic() - begun, tuple(events), partials)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll what other processes do to files until it holds. False when the time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def log_tail(leg: Leg) -> str:
    """The last lines of a leg's output, indented, for an error message."""
    lines = leg.paths.log(leg.number).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(f"\n    {line}" for line in lines)


def _follow(process: subprocess.Popen[bytes], leg: Leg, reader: JournalReader, audience: Audience) -> list[Event]:
    events: list[Event] = []
    progress = time.monotonic()
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return events
        except subprocess.TimeoutExpired:
            pass
        new = _read(leg, reader, audience)
        events += new
        if new:
            progress = time.monotonic()
        elif time.monotonic() - progress > _STALL_SECONDS:
            raise DemoFailed(f"{leg.title} did nothing for {_STALL_SECONDS:.0f} s{log_tail(leg)}")


def _read(leg: Leg, reader: JournalReader, audience: Audience) -> list[Event]:
    events = reader.read_new()
    for event in events:
        audience.show(leg, event)
    return events


def _command(leg: Leg) -> list[str]:
    paths = leg.paths
    command = [sys.executable, "-m", "trainer_hooks.demo.train", "--leg", str(leg.number), "--steps", str(leg.steps)]
    command += ["--root", str(paths.root), "--journal", str(paths.journal), "--final-state", str(paths.final_state)]
    if leg.tiny:
        command.append("--tiny")
    if leg.kill_in_save:
        command += ["--kill-in-save", str(leg.kill_in_save)]
    if leg.slow_writes:
        command += ["--patience", str(leg.slow_writes.seconds / 4)]
    if leg.kill_daemon:
        command.append("--kill-daemon")
    return command


def _environment(leg: Leg) -> dict[str, str]:
    """This process's own, except for what makes writes slow: only the demo decides that."""
    kept = {name: value for name, value in os.environ.items() if name not in (_RATE_LIMIT, _CHUNK)}
    return kept | (leg.slow_writes.environment() if leg.slow_writes else {})
