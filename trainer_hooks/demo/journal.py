"""What happened in one run, as lines of JSON that its training processes append and the parent reads.

A line is written by one `write` to a file opened for appending: a process that is killed leaves whole lines, and
threads need no lock. The parent may read while a leg writes; a line without its end is left for the next read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter


@dataclass(frozen=True)
class Started:
    """A leg has its model, and `resume()` has answered. `step` is None where nothing was found."""

    leg: int
    step: int | None
    source: str | None
    skipped: list[str]
    seconds: float
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Stepped:
    """One training step. `loss` and `lr` go through JSON and come back as the same bits."""

    leg: int
    step: int
    epoch: int
    loss: float
    lr: float
    batch: list[int]
    seconds: float
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class Saved:
    """`save()` has returned, after `seconds`."""

    leg: int
    step: int
    epoch: int
    seconds: float
    kind: Literal["save"] = "save"


@dataclass(frozen=True)
class Committed:
    """A save has become durable, `seconds` after `save()` was called. `bytes` is the size of its file."""

    leg: int
    step: int
    path: str
    bytes: int
    seconds: float
    kind: Literal["committed"] = "committed"


@dataclass(frozen=True)
class Failed:
    """A save did not land."""

    leg: int
    step: int
    error: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Killed:
    """The last words of a leg: it saw `partial` of its save `save_step` on disk, and ends itself now, in `step`."""

    leg: int
    save_step: int
    step: int
    partial: str
    bytes: int
    daemon_pid: int | None
    kind: Literal["killed"] = "killed"


@dataclass(frozen=True)
class Missed:
    """The write that a kill was meant for was over, or never began."""

    leg: int
    save_step: int
    reason: str
    kind: Literal["missed"] = "missed"


Event = Started | Stepped | Saved | Committed | Failed | Killed | Missed

_Kind = TypeVar("_Kind", bound=Event)

_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


class JournalWriter:
    """Appends events to one file. Used by one process, from any of its threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        """Append one whole line."""
        os.write(self._descriptor, _EVENTS.dump_json(event) + b"\n")


class JournalReader:
    """Reads what was appended since the last call. A file that does not exist yet is an empty one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """The whole lines since the last call, as events."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_EVENTS.validate_json(line) for line in whole.splitlines()]


def events_of(kind: type[_Kind], events: Iterable[Event]) -> list[_Kind]:
    """Those of one kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def final_trajectory(events: Sequence[Event]) -> dict[int, Stepped]:
    """The steps that count, by number: a step that was run again replaces its earlier self."""
    return {event.step: event for event in events_of(Stepped, events)}
