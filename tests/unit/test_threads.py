"""Pools whose threads are there beforehand, and work of which one run waits at most."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref

import pytest

from ckpt_service.errors import ServiceUnavailable
from ckpt_service.threads import Recurring, Worker, started_pool


def test_all_threads_run_already() -> None:
    pool = started_pool(3, "early")
    try:
        assert sum(thread.name.startswith("early") for thread in threading.enumerate()) == 3
        assert pool.submit(threading.current_thread).result().name.startswith("early")
    finally:
        pool.shutdown()


def test_threads_that_are_not_to_be_had_are_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "scarce_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(ServiceUnavailable, match=r"2 threads \(scarce\) .*ulimit -u"):
        started_pool(2, "scarce")


def test_a_worker_does_one_thing_after_the_other_and_tells_of_each() -> None:
    did: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise KeyError(number)
        did.append(number)

    worker = Worker("worker")
    futures = [worker.submit(functools.partial(work, number)) for number in range(3)]
    worker.shutdown()
    assert did == [0, 2]
    assert [type(future.exception(0)) for future in futures] == [type(None), KeyError, type(None)]


def test_a_worker_lets_go_of_what_it_has_done() -> None:
    class State:
        pass

    state = State()
    alive = weakref.ref(state)
    worker = Worker("worker")
    worker.submit(functools.partial(id, state)).result(10)
    del state
    worker.submit(gc.collect).result(10)
    assert alive() is None
    worker.shutdown()


def test_a_worker_that_is_not_to_be_had_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(ServiceUnavailable, match=r"1 threads \(scarce\) .*ulimit -u"):
        Worker("scarce")


async def test_one_run_is_under_way_and_one_waits() -> None:
    began = 0
    gates = [asyncio.Event() for _ in range(3)]

    async def work() -> None:
        nonlocal began
        gate = gates[began]
        began += 1
        await gate.wait()

    recurring = Recurring(work)
    first = recurring.request()
    await asyncio.sleep(0)
    second, third = recurring.request(), recurring.request()
    assert second is third
    assert second is not first
    assert began == 1
    gates[0].set()
    await first
    gates[1].set()
    await second
    assert began == 2
    gates[2].set()
    await recurring.request()
    assert began == 3
