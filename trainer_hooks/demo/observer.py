"""Takes notes for the demo's report: what the training loop does and how long each `save()` takes.

Only the demo needs this. It stands between the loop and the journal so that the loop stays short enough to copy.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

from trainer_hooks import ResumePoint, SaveTicket
from trainer_hooks.demo.journal import Committed, Failed, JournalWriter, Saved, Started, Stepped
from trainer_hooks.demo.sabotage import KillPlan, Saboteur

_NOTE_SECONDS = 10.0


class Observer:
    """Writes events of one leg to the journal and passes steps and saves on to the saboteur, if there is a plan."""

    def __init__(self, leg: int, root: Path, journal: Path, plan: KillPlan | None) -> None:
        self._leg = leg
        self._journal = JournalWriter(journal)
        self._saboteur = None if plan is None else Saboteur(plan, root, self._journal, leg)
        self._notes: list[threading.Event] = []
        self._mark = time.perf_counter()

    def started(self, point: ResumePoint | None) -> None:
        """`resume()` has answered."""
        seconds = time.perf_counter() - self._mark
        if point is None:
            event = Started(self._leg, None, None, [], seconds)
        else:
            skipped = [f"{found}: {reason}" for found, reason in point.skipped]
            event = Started(self._leg, point.step, point.source, skipped, seconds)
        self._journal.write(event)

    def step_begins(self) -> None:
        """The time of a step runs from here to `stepped()`."""
        self._mark = time.perf_counter()

    def stepped(self, step: int, epoch: int, loss: float, lr: float, batch: list[int]) -> None:
        """One step is done; what follows until `saved()` is the time of a `save()` call."""
        now = time.perf_counter()
        self._journal.write(Stepped(self._leg, step, epoch, loss, lr, batch, now - self._mark))
        if self._saboteur is not None:
            self._saboteur.after_step(step)
        self._mark = time.perf_counter()

    def saved(self, step: int, epoch: int, ticket: SaveTicket) -> None:
        """`save()` has returned; note its time now, and the commit when it comes."""
        called = self._mark
        self._journal.write(Saved(self._leg, step, epoch, time.perf_counter() - called))
        noted = threading.Event()
        self._notes.append(noted)
        ticket.committed.add_done_callback(lambda future: self._settled(step, called, future, noted))
        if self._saboteur is not None:
            self._saboteur.after_save(step, ticket)

    def finish(self) -> None:
        """After `close()`: wait until the last commit is noted too, by the thread that brings the news."""
        for noted in self._notes:
            noted.wait(_NOTE_SECONDS)

    def _settled(self, step: int, called: float, future: Future[Path | None], noted: threading.Event) -> None:
        seconds = time.perf_counter() - called
        error = future.exception()
        path = None if error is not None else future.result()
        if path is None:
            self._journal.write(Failed(self._leg, step, str(error)))
        else:
            self._journal.write(Committed(self._leg, step, str(path), path.stat().st_size, seconds))
        noted.set()
