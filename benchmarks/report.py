"""A stored result to Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import summary
from benchmarks.contenders import CONTENDERS
from benchmarks.summary import COLUMNS, COMPARED, OURS, Document, Spread

_NOTES = """\
Medians, with the least and the greatest in brackets; one process for each way and round, rounds interleaved.

- *call*: the training thread inside the save. *lost*: a loop of training with a save less the same loop without one,
  in pairs; it holds the call and all that the save took from the steps behind it. *worst step*: beside a save.
- *durable*: from the call until file and directory are synced. For those that do not sync all of it themselves an fsync
  of their files and directories was added; the column beside it is their own word.
- *CPU*: of all processes together, with no training beside it. *memory*: the most of all processes together during a
  save, beyond model and optimizer, as a multiple of the state; what is shared counts once.
"""


def render(document: Document) -> str:
    """Return the whole report."""
    parts = [
        "# What saves cost",
        "\n".join(f"- {line}" for line in _facts(document)),
        "## Saves",
        _table(("", "mode", *(column.heading for column in COLUMNS)), _rows(document)),
        _NOTES.strip(),
        *_warnings(document),
        *_comparison(document),
        "## Disk",
        _table(("", "GB/s"), _disk(document)),
        "## Loads, GB/s",
        _table(("", "cold", "warm"), _loads(document)),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(document: Document) -> list[str]:
    facts, options = document["facts"], document["options"]
    versions = [f"{name} {version}" for name, version in facts["packages"].items() if version is not None]
    steps = [sample["step"] * 1e3 for sample in document["samples"]] or [0.0]
    return [
        f"measured at {facts['measured_at']}, commit {facts['commit']}",
        f"{facts['cores']} cores ({facts['processor']}), {facts['memory_bytes'] / 1e9:.0f} GB of memory, "
        f"{facts['filesystem']}, Linux {facts['kernel']}",
        f"Python {facts['python']}, {', '.join(versions)}",
        f"load average before: {', '.join(map(str, facts['load_average']))}",
        f"a state of {options['gigabytes']:g} GB, {document['rounds']} rounds of {options['saves']} pairs, "
        f"steps of {_spread(Spread.of(steps), '.0f')} ms",
    ]


def _rows(document: Document) -> Iterable[Sequence[str]]:
    for name, entry in CONTENDERS.items():
        if name in document["not_measured"]:
            yield entry.title, f"not measured: {document['not_measured'][name]}", *[""] * len(COLUMNS)
        elif summary.samples_of(document, name):
            cells = (_spread(summary.spread(document, name, column), column.form) for column in COLUMNS)
            yield entry.title, summary.modes(document, name), *cells


def _warnings(document: Document) -> list[str]:
    found = summary.unfinished(document)
    said = ", ".join(f"{CONTENDERS[name].title} {count}" for name, count in found.items())
    return [f"Loops that ended before their save was durable, so that not all that it cost is counted: {said}."] * bool(
        found
    )


def _comparison(document: Document) -> list[str]:
    others = [name for name in summary.measured(document) if name != OURS]
    if not others or not summary.samples_of(document, OURS):
        return []
    rows = [
        (CONTENDERS[name].title, *(_ratio(summary.ratio(document, name, heading)) for heading in COMPARED))
        for name in others
    ]
    headings = (heading.partition(", ms")[0].removesuffix(", s").removesuffix(", states") for heading in COMPARED)
    return ["## As a multiple of ours", _table(("", *headings), rows)]


def _disk(document: Document) -> Iterable[Sequence[str]]:
    direct = summary.ceiling(document, "direct")
    yield "direct writes of 16 MiB, two threads, fsync", "not to be had" if direct is None else _gigabytes(direct)
    buffered = summary.ceiling(document, "buffered")
    assert buffered is not None
    yield "buffered write, fsync", _gigabytes(buffered)
    if summary.samples_of(document, OURS):
        ours = summary.writing(document, OURS)
        part = "" if direct is None else f": {ours.median / direct.median:.2f} of the direct writes"
        yield "ours, from the call to durable, no training beside", _gigabytes(ours) + part


def _loads(document: Document) -> Iterable[Sequence[str]]:
    if not document["loads"]:
        yield "not measured: it failed", "", ""
    for way, rates in summary.loads(document).items():
        yield way, _gigabytes(rates[True]), _gigabytes(rates[False])


def _gigabytes(rates: Spread) -> str:
    return _spread(Spread(rates.median / 1e9, rates.least / 1e9, rates.most / 1e9), ".2f")


def _ratio(value: float | None) -> str:
    return "ours is within the noise" if value is None else f"{round(value, 1) + 0.0:.1f}"


def _spread(spread: Spread, form: str) -> str:
    median, least, most = (format(value, form) for value in (spread.median, spread.least, spread.most))
    return median if least == most else f"{median} ({least} to {most})"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)
