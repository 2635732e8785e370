"""Pools whose threads are there beforehand, and work of which one run waits at most."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ckpt_service.errors import ServiceUnavailable
from ckpt_service.threads import Recurring, started_pool


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
