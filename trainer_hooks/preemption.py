"""A signal to "save at the next step boundary, then leave", the same on all ranks. Shell.

Schedulers announce the end with a signal, to every process of a job at a slightly different moment. Ranks that stopped
each at its own step would leave a checkpoint that no step is complete in, so they ask each other at a step boundary.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from trainer_hooks.checkpointer import Checkpointer


class Preemption:
    """Notes signals inside a ``with`` block, for :meth:`reached` to tell; the former handlers come back at its end.

    Args:
        checkpointer: whose ranks stop together.
        signals: what announces the end.
        every: ask the other ranks only at every so many calls of :meth:`reached`, at least 1. With one rank it costs
            nothing; with several, each question is a small collective over the CPU group.

    Raises:
        ValueError: this is not the main thread, which alone may handle signals; or an option is wrong.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1),
        every: int = 1,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Preemption: signals can be handled in the main thread only")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: it must be a whole number of at least 1")
        self.signal: signal.Signals | None = None
        self._checkpointer = checkpointer
        self._signals = signals
        self._every = every
        self._calls = 0
        self._reached = False
        self._former: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    def reached(self) -> bool:
        """Return whether some rank was told to end: then this is the step to save, with ``final=True``.

        To be called by all ranks after each step; all of them get the same answer.

        Raises:
            CkptError: the ranks could not ask each other: one of them has died.
        """
        self._calls += 1
        if not self._reached and self._calls % self._every == 0:
            self._reached = self._checkpointer.any_rank(self.signal is not None)
        return self._reached

    def __enter__(self) -> Preemption:
        for number in self._signals:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, former in self._former.items():
            # None: it was not installed from Python, and cannot be put back from here.
            signal.signal(number, former if former is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked data-loader worker has the handler too, and nothing to save
            self.signal = signal.Signals(number)
