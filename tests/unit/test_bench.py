"""The model of what a save costs, and how much is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_service.bench.cost import PLAN_SECONDS, SHARE, Host, cost_of
from ckpt_service.bench.disk import CHUNK_BYTES, Rate
from ckpt_service.bench.measure import affordable_bytes, image_bytes
from ckpt_service.memory import Room

GB = 10**9
HOST = Host(cores=2, copy_rate=5 * GB, write_rate=GB, cpu_seconds_per_byte=0.4 / GB)


def test_a_save_costs_its_copy_and_its_share_of_the_cores() -> None:
    cost = cost_of(10 * GB, HOST)
    assert cost.stall_seconds == pytest.approx(PLAN_SECONDS + 2)
    assert cost.contention_seconds == pytest.approx(2)
    assert cost.write_seconds == pytest.approx(10)
    assert cost.lost_seconds == cost.stall_seconds + cost.contention_seconds


def test_at_the_shortest_interval_saves_cost_the_share() -> None:
    cost = cost_of(10 * GB, HOST)
    interval = cost.shortest_interval_seconds()
    assert interval > cost.write_seconds
    assert cost.lost_seconds / interval == pytest.approx(SHARE)


def test_no_save_is_advised_before_the_last_one_is_written() -> None:
    slow = cost_of(10 * GB, replace(HOST, write_rate=GB / 1000))
    assert slow.shortest_interval_seconds() == slow.write_seconds == pytest.approx(10_000)


def test_more_cores_hide_the_daemon_and_not_the_copy() -> None:
    few, many = cost_of(GB, HOST), cost_of(GB, replace(HOST, cores=200))
    assert few.stall_seconds == many.stall_seconds
    assert many.contention_seconds == few.contention_seconds / 100


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(100.0, 10 * CHUNK_BYTES), (4.5, 4 * CHUNK_BYTES), (0.001, CHUNK_BYTES)],
)
def test_a_slow_disk_is_given_less(seconds: float, expected: int) -> None:
    assert affordable_bytes(10 * CHUNK_BYTES, Rate(CHUNK_BYTES, 1.0), seconds) == expected


def test_never_more_than_was_allowed() -> None:
    assert affordable_bytes(4096, Rate(4096, 1.0), 0.001) == 4096


def test_the_image_leaves_memory_for_others() -> None:
    assert image_bytes(Room(1 << 30, "here")) == 1 << 28
    assert image_bytes(Room(1 << 40, "here")) == image_bytes(None) == 512 << 20
    assert image_bytes(Room(0, "here")) == 1 << 20
