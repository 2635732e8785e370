"""How long a daemon is needed, in the order in which things happen to it."""

from __future__ import annotations

import math

from ckpt_service.lifetime import Lifetime


def needed(lifetime: Lifetime, now: float, trainers: int = 0, jobs: int = 0) -> float:
    return lifetime.seconds_needed(now, trainers=trainers, jobs=jobs)


def made(*, stays: bool = False) -> Lifetime:
    return Lifetime(stays, linger_seconds=60, grace_seconds=25, needed_until=15)


def test_who_is_asked_to_finish_leaves_when_all_is_written_whoever_is_there() -> None:
    for lifetime in (made(), made(stays=True)):
        lifetime.trainer_came()
        assert needed(lifetime, 0, trainers=1) == math.inf
        lifetime.finish()
        assert lifetime.draining
        assert needed(lifetime, 10_000, trainers=1, jobs=1) == math.inf
        assert needed(lifetime, 10_000, trainers=1) == 0


def test_a_signal_bounds_it_and_waits_for_trainers() -> None:
    lifetime = made(stays=True)
    assert needed(lifetime, 0) == math.inf
    lifetime.drain(100)
    lifetime.drain(120)  # a second one changes nothing
    assert needed(lifetime, 110, trainers=1) == 15
    assert needed(lifetime, 110, jobs=1) == 15
    assert needed(lifetime, 110) == 0


def test_a_signal_bounds_a_patient_leave_as_well() -> None:
    lifetime = made()
    lifetime.finish()
    lifetime.drain(100)
    assert needed(lifetime, 120, trainers=1, jobs=1) == 5
    assert needed(lifetime, 120, trainers=1) == 0


def test_nobody_came_nobody_stays() -> None:
    lifetime = made()
    assert needed(lifetime, 5) == 10
    lifetime.trainer_came()
    lifetime.trainer_left(100, cleanly=False)
    assert needed(lifetime, 110) == 50
    assert needed(lifetime, 110, jobs=1) == math.inf
    lifetime.trainer_left(200, cleanly=True)
    assert needed(lifetime, 200) == 0
