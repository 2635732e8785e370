"""Samples to figures: medians, spreads and ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import CONTENDERS

Document = dict[str, Any]
"""What a run stores as JSON."""

OURS = "ours"


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and the least and the greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Column:
    """A figure of each contender: its heading, how it is read from a sample, and its unit as a factor and a format."""

    heading: str
    values: Callable[[Document], Sequence[float]]
    factor: float = 1.0
    form: str = ".2f"


COLUMNS = (
    Column("call, ms", lambda s: s["calls"], 1e3, ".1f"),
    Column("first call, ms", lambda s: [s["first_call"]], 1e3, ".0f"),
    Column("training lost per save, ms", lambda s: s["lost"], 1e3, ".0f"),
    Column("worst step, ms", lambda s: s["worst_step"], 1e3, ".0f"),
    Column("durable after, s", lambda s: s["durable"]),
    Column("without the fsync that was added, s", lambda s: s["done"]),
    Column("durable after, no training beside, s", lambda s: s["quiet_durable"]),
    Column("CPU s per GB", lambda s: [s["cpu_per_gigabyte"]]),
    Column("memory, states", lambda s: [s["memory"] / s["state_bytes"]]),
    Column("descriptors", lambda s: [s["descriptors"]], 1, ".0f"),
)
COMPARED = (
    "call, ms",
    "training lost per save, ms",
    "durable after, s",
    "durable after, no training beside, s",
    "CPU s per GB",
    "memory, states",
)


def samples_of(document: Document, name: str) -> list[Document]:
    """Return the samples of one contender."""
    return [sample for sample in document["samples"] if sample["contender"] == name]


def measured(document: Document) -> list[str]:
    """Return the names of those that were measured, in the order of the list of contenders."""
    return [name for name in CONTENDERS if samples_of(document, name)]


def spread(document: Document, name: str, column: Column) -> Spread:
    """Return a figure of one contender over all its rounds, in the unit of the column."""
    return Spread.of(value * column.factor for sample in samples_of(document, name) for value in column.values(sample))


def modes(document: Document, name: str) -> str:
    """Return how it wrote; more than one word if that differed."""
    return ", ".join(sorted({sample["mode"] for sample in samples_of(document, name)}))


def ratio(document: Document, name: str, heading: str) -> float | None:
    """Return the median of another divided by ours; None where ours is not above zero, since noise was larger."""
    (column,) = (column for column in COLUMNS if column.heading == heading)
    ours = spread(document, OURS, column).median
    return spread(document, name, column).median / ours if ours > 0 else None


def unfinished(document: Document) -> dict[str, int]:
    """Return how many loops ended before their save was durable, of those that had any."""
    counts = {name: sum(s["unfinished"] for s in samples_of(document, name)) for name in measured(document)}
    return {name: count for name, count in counts.items() if count}


def ceiling(document: Document, kind: str) -> Spread | None:
    """Return the bytes a second of "direct" or "buffered" writes; None where the filesystem takes none."""
    rates = [each[kind]["nbytes"] / each[kind]["seconds"] for each in document["ceiling"] if each[kind] is not None]
    return Spread.of(rates) if rates else None


def writing(document: Document, name: str) -> Spread:
    """Return the bytes a second from the call to durable, with no training beside it."""
    return Spread.of(
        sample["state_bytes"] / seconds for sample in samples_of(document, name) for seconds in sample["quiet_durable"]
    )


def loads(document: Document) -> dict[str, dict[bool, Spread]]:
    """Return the bytes a second of each way to load, cold (True) and warm (False)."""
    found: dict[str, dict[bool, list[float]]] = {}
    for load in document["loads"]:
        rates = found.setdefault(load["way"], {}).setdefault(load["cold"], [])
        rates.append(load["nbytes"] / load["seconds"])
    return {way: {cold: Spread.of(rates) for cold, rates in by.items()} for way, by in found.items()}
