"""The demo's result as one value, and the table that is printed of it.

Takes how the legs ended and the verdict of the comparison. All times are measured by the training processes: those of
`Timing` in the run whose writes were not slowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from trainer_hooks.demo.compare import Verdict
from trainer_hooks.demo.journal import Committed, Saved, Started, Stepped, events_of
from trainer_hooks.demo.leg import trainers
from trainer_hooks.demo.legs import LegEnd
from trainer_hooks.demo.recipe import Recipe

_WIDTH_OF_A_FILE = 132


@dataclass(frozen=True)
class LegRow:
    """One line of the table."""

    leg: str
    ranks: str
    steps: str
    happened: str
    resumed: str
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Medians of rank 0 of the uninterrupted run. The step after a save is looked at apart: it may wait for the copy.

    `durable_seconds` is the median over the shards.
    """

    shards: int
    shard_bytes: int
    save_seconds: float
    durable_seconds: float
    step_seconds: float
    step_after_save_seconds: float


@dataclass(frozen=True)
class Report:
    """All that the demo says at the end."""

    rows: tuple[LegRow, ...]
    timing: Timing
    slowed_write_seconds: float
    verdict: Verdict

    @property
    def equal(self) -> bool:
        """Whether the two runs ended alike, bit for bit."""
        return self.verdict.difference is None


def make_report(reference: LegEnd, ends: Sequence[LegEnd], slowed_write_seconds: float, verdict: Verdict) -> Report:
    """Put the report together from how the legs ended, the uninterrupted run (`reference`) first."""
    rows = tuple(_row(end) for end in [reference, *ends])
    return Report(rows, _timing(reference), slowed_write_seconds, verdict)


def print_report(report: Report, console: Console) -> None:
    """Print the table, the times and the verdict. Into a file or pipe the lines are wide rather than folded."""
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    table = Table(box=box.ASCII2 if not console.is_terminal else box.ROUNDED)
    for heading in ("leg", "ranks", "steps", "what happened", "resumed from"):
        table.add_column(heading, no_wrap=heading != "what happened")
    table.add_column("seconds", justify="right")
    for row in report.rows:
        table.add_row(row.leg, row.ranks, row.steps, row.happened, row.resumed, f"{row.seconds:.1f}")
    console.print(table)
    for line in _summary(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary(report: Report) -> Iterable[str]:
    timing = report.timing
    shards = "" if timing.shards == 1 else f"{timing.shards} shards of "
    yield (
        f"save() call: {_ms(timing.save_seconds)}, durable on disk after: {_ms(timing.durable_seconds)} "
        f"({shards}{timing.shard_bytes / 1e6:.1f} MB; medians of the uninterrupted run)"
    )
    yield f"training step: {_ms(timing.step_seconds)}, right after a save: {_ms(timing.step_after_save_seconds)}"
    yield f"killed run: writes slowed to {report.slowed_write_seconds:.1f} s each until the second kill"
    yield str(report.verdict)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _row(end: LegEnd) -> LegRow:
    steps = [event.step for event in events_of(Stepped, end.events, rank=0)]
    starts = events_of(Started, end.events)
    sources = sorted({event.source for event in starts if event.source is not None})
    return LegRow(
        leg=end.leg.title,
        ranks=_ranks(end.leg.recipe),
        steps=f"{steps[0]} to {steps[-1]}",
        happened=_happened(end),
        resumed="" if starts[0].step is None else f"step {starts[0].step}, {' and '.join(sources)}",
        seconds=end.seconds,
    )


def _ranks(recipe: Recipe) -> str:
    return "1" if recipe.ranks == 1 else f"{recipe.ranks} (tp {recipe.tp}, dp {recipe.dp})"


def _happened(end: LegEnd) -> str:
    if end.killed is None:
        return "ran to the end"
    whom = trainers(end.leg.recipe).removeprefix("the ")
    if end.killed.daemon_pid is not None:
        whom = f"daemon and {whom}"
    return f"{whom} killed in the write of step {end.killed.save_step}"


def _timing(end: LegEnd) -> Timing:
    saves = events_of(Saved, end.events, rank=0)
    steps = events_of(Stepped, end.events, rank=0)
    commits = events_of(Committed, end.events)
    after = {event.step + 1 for event in saves}
    return Timing(
        shards=end.leg.recipe.tp,
        shard_bytes=max(event.bytes for event in commits),
        save_seconds=median(event.seconds for event in saves),
        durable_seconds=median(event.seconds for event in commits),
        step_seconds=median(event.seconds for event in steps),
        step_after_save_seconds=median(event.seconds for event in steps if event.step in after),
    )
