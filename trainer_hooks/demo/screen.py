"""Shows a running demo on stderr: a progress bar with rate and time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainer_hooks.demo.journal import Event, Saved, Started, Stepped
from trainer_hooks.demo.leg import Leg, trainers
from trainer_hooks.demo.sabotage import Killed

_MEAN_STEPS = 10
"""The loss shown is the mean of so many steps of one replica: a batch is small, and so the loss of one step noisy."""


class Screen:
    """Talks to the person who started the demo. Used as a context manager; no thread but rich's own."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[rate]}  loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._losses: deque[float] = deque(maxlen=_MEAN_STEPS)

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, leg: Leg, event: Event) -> None:
        """Say what a person wants to know of an event of rank 0, which speaks for all, and move the bar."""
        if event.rank != 0:
            return
        match event:
            case Started(step=None):
                self._begin(leg, 0, "from the beginning")
            case Started(step=int() as step):
                self._begin(leg, step, f"resumed from step {step}, {event.source}")
                for reason in event.skipped:
                    self.say(f"  passed over {reason}")
            case Stepped():
                self._move(event)
            case Saved():
                self._say_saved(event)

    def show_kill(self, leg: Leg, killed: Killed) -> None:
        """Say who was killed, and in the middle of what."""
        whom = trainers(leg.recipe)
        if killed.daemon_pid is not None:
            whom += f" and of their daemon, pid {killed.daemon_pid},"
        seen = ", ".join(f"{partial.bytes:,} bytes so far in {partial.path.name}" for partial in killed.partials)
        self.say(f"  SIGKILL of {whom} after step {killed.step}, in the middle of the write of step {killed.save_step}")
        self.say(f"  ({seen})")

    def _begin(self, leg: Leg, step: int, how: str) -> None:
        self.say(f"{leg.title}: {how}")
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._losses.clear()
        self._task = self._bar.add_task(leg.title, total=leg.recipe.steps, completed=step, rate="", loss="")

    def _move(self, event: Stepped) -> None:
        self._losses.append(event.loss)
        if self._task is not None:
            rate = f"{1 / event.seconds:.1f}/s"
            self._bar.update(self._task, completed=event.step, rate=rate, loss=f"{self._mean_loss():.3f}")

    def _mean_loss(self) -> float:
        return sum(self._losses) / len(self._losses)

    def _say_saved(self, event: Saved) -> None:
        if not self._console.is_terminal:
            self.say(f"  step {event.step}: loss {self._mean_loss():.3f}, save() took {event.seconds * 1e3:.1f} ms")
