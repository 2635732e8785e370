"""The user's function that is told of commits. Shell.

It runs on a thread of its own, in the order of the commits: neither the training nor the connection to the daemon waits
for it. What it raises is kept until somebody can be told.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from trainer_hooks.tickets import SaveTicket

OnCommitted = Callable[[SaveTicket], object]
"""Called with the ticket of a save whose file is durable: ``ticket.committed.result()`` is its path."""

log = logging.getLogger(__name__)


class Announcer:
    """Calls ``function`` for every ticket that :meth:`watch` was given and that ends in a file."""

    def __init__(self, function: OnCommitted) -> None:
        self._function = function
        self._committed: queue.SimpleQueue[SaveTicket | None] = queue.SimpleQueue()
        self._failures: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name="ckpt-callback", daemon=True)
        self._thread.start()

    def watch(self, ticket: SaveTicket) -> None:
        """Announce this save once it is committed; one that fails, or writes nothing here, is not announced."""
        ticket.committed.add_done_callback(lambda future: self._ended(ticket, future))

    def new_failures(self) -> list[str]:
        """Return what calls of the function have raised since this was last asked."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self, patience_seconds: float) -> bool:
        """Wait until all commits so far are announced; False if the function takes longer than that."""
        self._committed.put(None)
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    def _ended(self, ticket: SaveTicket, future: Future[Path | None]) -> None:
        if future.exception() is None and future.result() is not None:
            self._committed.put(ticket)

    def _run(self) -> None:
        while (ticket := self._committed.get()) is not None:
            began = time.monotonic()
            try:
                self._function(ticket)
            except BaseException as error:
                log.exception("on_committed, step %d", ticket.step)
                self._failures.append(f"on_committed, step {ticket.step}: {type(error).__name__}: {error}")
            log.debug("on_committed, step %d: %.3f s", ticket.step, time.monotonic() - began)
