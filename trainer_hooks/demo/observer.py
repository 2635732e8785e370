"""Takes notes for the demo's report: what the training loop does and how long each `save()` takes.

Only the demo needs this. It stands between the loop and the journal so that the loop stays short enough to copy.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

from trainer_hooks import ResumePoint, SaveTicket, Topology
from trainer_hooks.demo.journal import Accepted, Committed, Failed, JournalWriter, Saved, Started, Stepped

_NOTE_SECONDS = 10.0
_HOLD_SECONDS = 120.0


class Observer:
    """Writes the events of one rank in one leg to the journal.

    `hold_at` is the step where a rank that is about to be killed waits for it: its next save is due there, and nothing
    newer than the chosen save shall be submitted before its death. 0 for none.
    """

    def __init__(self, leg: int, topology: Topology, journal: Path, hold_at: int) -> None:
        self._leg = leg
        self._rank = topology.rank
        self._is_writer = topology.is_writer
        self._journal = JournalWriter(journal)
        self._hold_at = hold_at
        self._notes: list[threading.Event] = []
        self._mark = time.perf_counter()

    def started(self, point: ResumePoint | None) -> None:
        """`resume()` has answered."""
        seconds = time.perf_counter() - self._mark
        if point is None:
            event = Started(self._leg, self._rank, None, None, [], seconds)
        else:
            skipped = [f"{found}: {reason}" for found, reason in point.skipped]
            event = Started(self._leg, self._rank, point.step, point.source, skipped, seconds)
        self._journal.write(event)

    def step_begins(self) -> None:
        """The time of a step runs from here to `stepped()`."""
        self._mark = time.perf_counter()

    def stepped(self, step: int, epoch: int, loss: float, lr: float, batch: list[int]) -> None:
        """One step is done; what follows until `saved()` is the time of a `save()` call."""
        seconds = time.perf_counter() - self._mark
        self._journal.write(Stepped(self._leg, self._rank, step, epoch, loss, lr, batch, seconds))
        if step == self._hold_at:
            time.sleep(_HOLD_SECONDS)
            raise TimeoutError(f"held at step {step} to be killed, and nobody did within {_HOLD_SECONDS:.0f} s")
        self._mark = time.perf_counter()

    def saved(self, step: int, epoch: int, ticket: SaveTicket) -> None:
        """`save()` has returned; note its time now, and what becomes of it when it is known."""
        called = self._mark
        self._journal.write(Saved(self._leg, self._rank, step, epoch, time.perf_counter() - called))
        if not self._is_writer:
            return  # its ticket was done at once
        noted = threading.Event()
        self._notes.append(noted)
        ticket.accepted.add_done_callback(lambda future: self._taken(step, future))
        ticket.committed.add_done_callback(lambda future: self._settled(step, called, future, noted))

    def finish(self) -> None:
        """After `close()`: wait until the last commit is noted too, by the thread that brings the news."""
        for noted in self._notes:
            noted.wait(_NOTE_SECONDS)

    def _taken(self, step: int, future: Future[None]) -> None:
        if future.exception() is None:
            self._journal.write(Accepted(self._leg, self._rank, step))

    def _settled(self, step: int, called: float, future: Future[Path | None], noted: threading.Event) -> None:
        seconds = time.perf_counter() - called
        error = future.exception()
        path = None if error is not None else future.result()
        if path is None:
            self._journal.write(Failed(self._leg, self._rank, step, str(error)))
        else:
            self._journal.write(Committed(self._leg, self._rank, step, str(path), path.stat().st_size, seconds))
        noted.set()
