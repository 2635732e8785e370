"""Threads that are there before they are needed, and work that comes again and again. Shell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from ckpt_service.errors import ServiceUnavailable


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Return an executor all of whose ``count`` threads run already.

    One that starts its threads later may find that the process can have no more of them, at a place where nobody
    expects it.

    Raises:
        ServiceUnavailable: so many threads are not to be had.
    """
    pool = ThreadPoolExecutor(count, name)
    released = threading.Event()
    try:
        for _ in range(count):  # each occupies a thread until all are there
            pool.submit(released.wait)
    except RuntimeError as error:
        pool.shutdown(wait=False)
        raise ServiceUnavailable(
            f"{count} threads ({name}) cannot be started: {error}",
            op="start",
            code="EAGAIN",
            hint="raise the limit of processes (ulimit -u) or of the control group (pids.max)",
        ) from error
    finally:
        released.set()
    return pool


class Recurring:
    """Work of which one run is under way at most, and one waits for it; more need not be asked for.

    So what hangs is asked once more at most, however often it is wanted meanwhile.
    """

    def __init__(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def request(self) -> asyncio.Task[None]:
        """Return a task that ends with a run that began now, or will begin later."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            return self._running
        if self._next is None:
            self._next = asyncio.create_task(self._run_after(self._running))
        return self._next

    async def _run_after(self, before: asyncio.Task[None]) -> None:
        await asyncio.wait([before])
        self._running, self._next = self._next, None
        await self._run()

    async def _run(self) -> None:
        mine = asyncio.current_task()
        try:
            await self._work()
        finally:
            if self._running is mine:
                self._running = None
