"""What happened in one run, as lines of JSON that its training processes append and the parent reads.

A line is written by one `write` to a file opened for appending: a process that is killed leaves whole lines, and
neither threads nor ranks need a lock. The parent may read while a leg writes; a line without its end is left for the
next read. The names of the files in a run's records are given here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter

JOURNAL = "journal.jsonl"
FINAL_STATES = "final_state_rank_*.pt"


def final_state_name(rank: int) -> str:
    """The file of a rank's state after the last step, written without the service."""
    return FINAL_STATES.replace("*", str(rank))


@dataclass(frozen=True)
class Started:
    """A rank has its model, and `resume()` has answered. `step` is None where nothing was found."""

    leg: int
    rank: int
    step: int | None
    source: str | None
    skipped: list[str]
    seconds: float
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Stepped:
    """One training step of one rank. `loss` and `lr` go through JSON and come back as the same bits."""

    leg: int
    rank: int
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
    rank: int
    step: int
    epoch: int
    seconds: float
    kind: Literal["save"] = "save"


@dataclass(frozen=True)
class Accepted:
    """The daemon holds this rank's shard of a save; noted by ranks that write."""

    leg: int
    rank: int
    step: int
    kind: Literal["accepted"] = "accepted"


@dataclass(frozen=True)
class Committed:
    """A rank's shard has become durable, `seconds` after `save()` was called. `bytes` is the size of its file."""

    leg: int
    rank: int
    step: int
    path: str
    bytes: int
    seconds: float
    kind: Literal["committed"] = "committed"


@dataclass(frozen=True)
class Failed:
    """A save did not land."""

    leg: int
    rank: int
    step: int
    error: str
    kind: Literal["failed"] = "failed"


Event = Started | Stepped | Saved | Accepted | Committed | Failed

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


def events_of(kind: type[_Kind], events: Iterable[Event], rank: int | None = None) -> list[_Kind]:
    """Those of one kind, in order; of one rank, or of all."""
    return [event for event in events if isinstance(event, kind) and rank in (None, event.rank)]


def final_trajectory(events: Sequence[Event], rank: int) -> dict[int, Stepped]:
    """The steps of a rank that count, by number: a step that was run again replaces its earlier self."""
    return {event.step: event for event in events_of(Stepped, events, rank)}
