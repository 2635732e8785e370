"""Threads that are there before they are needed, and work that comes again and again. Shell."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor

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
        raise _no_threads(count, name, error) from error
    finally:
        released.set()
    return pool


def _no_threads(count: int, name: str, error: RuntimeError) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"{count} threads ({name}) cannot be started: {error}",
        op="start",
        code="EAGAIN",
        hint="raise the limit of processes (ulimit -u) or of the control group (pids.max)",
    )


class Worker:
    """A thread that does what it is given, one after the other.

    Unlike an executor it works until the very end of the interpreter: a session in a thread of the user may begin when
    the main thread has ended, and then executors take nothing any more.

    Raises:
        ServiceUnavailable: the thread is not to be had.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise _no_threads(1, name, error) from error

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have something done; the future says when, or what it raised."""
        done: Future[None] = Future()
        self._queue.put((work, done))
        return done

    def shutdown(self) -> None:
        """Do what was given so far, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, done = given
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for it
                done.set_exception(error)
            else:
                done.set_result(None)
            del given, work, done  # nothing of it is kept alive while there is nothing to do


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
