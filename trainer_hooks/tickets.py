"""What ``save()`` gives back: three moments of one snapshot, each a future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


class SaveTicket:
    """One save on its way.

    Attributes:
        step: what was given to ``save()``.
        epoch: what was given to ``save()``.
        staged: done when the private copy is whole; the live state may change.
        accepted: done when the daemon holds the snapshot; it survives this process.
        committed: done when the file is durable under its final name; the result is its absolute path.

    On a rank that does not write all three are done at once, and the result of ``committed`` is None. After a failure
    the futures that are not done yet hold the exception.
    """

    def __init__(self, step: int, epoch: int) -> None:
        self.step = step
        self.epoch = epoch
        self.staged: Future[None] = Future()
        self.accepted: Future[None] = Future()
        self.committed: Future[Path | None] = Future()
        self._note_failure: Callable[[Exception], None] = lambda error: None

    def __repr__(self) -> str:
        failed = self.committed.done() and self.committed.exception() is not None
        done = [self.committed.done(), self.accepted.done(), self.staged.done(), True]
        reached = ("committed", "accepted", "staged", "being staged")[done.index(True)]
        return f"SaveTicket(step={self.step}, epoch={self.epoch}, {'failed' if failed else reached})"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the live state may change; raises what went wrong, or TimeoutError after ``timeout`` seconds."""
        _result(self.staged, timeout, f"step {self.step} is not staged yet")

    def wait_committed(self, timeout: float | None = None) -> Path | None:
        """Wait for the path of the durable file; raises what went wrong, or TimeoutError after ``timeout`` seconds."""
        return _result(self.committed, timeout, f"step {self.step} is not committed yet")

    def resolve(self, path: Path | None) -> None:
        """Mark everything as done."""
        for future in (self.staged, self.accepted):
            with suppress(InvalidStateError):
                future.set_result(None)
        with suppress(InvalidStateError):
            self.committed.set_result(path)

    def note_failure_with(self, note: Callable[[Exception], None]) -> None:
        """Have ``note`` called before anybody who waits here learns of a failure, so that the next save warns of it."""
        self._note_failure = note

    def fail(self, error: Exception) -> None:
        """Give ``error`` to every moment that has not come yet."""
        if not self.committed.done():
            self._note_failure(error)
        for future in (self.staged, self.accepted, self.committed):
            with suppress(InvalidStateError):
                future.set_exception(error)


def _result(future: Future[_T], timeout: float | None, late: str) -> _T:
    try:
        return future.result(timeout)
    except FutureTimeoutError as error:
        if future.done():
            raise  # the save itself failed with a timeout
        raise TimeoutError(f"{late} after {timeout} s") from error
