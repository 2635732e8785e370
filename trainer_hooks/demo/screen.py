"""Shows a running demo on stderr: a progress bar with rate and time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainer_hooks.demo.journal import Event, Killed, Saved, Started, Stepped
from trainer_hooks.demo.legs import Leg


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
        self._loss = float("nan")

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
        """Say what a person wants to know of an event, and move the bar."""
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
            case Killed():
                self._say_killed(event)

    def _begin(self, leg: Leg, step: int, how: str) -> None:
        self.say(f"{leg.title}: {how}")
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(leg.title, total=leg.steps, completed=step, rate="", loss="")

    def _move(self, event: Stepped) -> None:
        self._loss = event.loss
        if self._task is not None:
            rate = f"{1 / event.seconds:.1f}/s"
            self._bar.update(self._task, completed=event.step, rate=rate, loss=f"{event.loss:.3f}")

    def _say_saved(self, event: Saved) -> None:
        if not self._console.is_terminal:
            self.say(f"  step {event.step}: loss {self._loss:.3f}, save() took {event.seconds * 1e3:.1f} ms")

    def _say_killed(self, event: Killed) -> None:
        whom = "the trainer" if event.daemon_pid is None else f"the daemon, pid {event.daemon_pid}, and the trainer"
        self.say(
            f"  SIGKILL of {whom} after step {event.step}, in the middle of the write of step {event.save_step} "
            f"({event.bytes:,} bytes so far in {event.partial})"
        )
