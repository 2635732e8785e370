"""The user's function is told of every file, in order, and what it raises is not lost."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ckpt_service.errors import SaveFailed
from trainer_hooks.callbacks import Announcer
from trainer_hooks.tickets import SaveTicket


def resolved(announcer: Announcer, step: int, outcome: Path | Exception | None) -> None:
    ticket = SaveTicket(step, 0)
    announcer.watch(ticket)
    ticket.fail(outcome) if isinstance(outcome, Exception) else ticket.resolve(outcome)


def test_it_is_told_of_what_became_a_file_in_order_on_another_thread() -> None:
    told: list[tuple[int, Path | None, bool]] = []
    here = threading.get_ident()
    announcer = Announcer(lambda t: told.append((t.step, t.committed.result(), threading.get_ident() == here)))
    outcomes = [Path("/1"), SaveFailed("no"), Path("/3"), None, Path("/5")]
    for step, outcome in enumerate(outcomes, 1):
        resolved(announcer, step, outcome)
    assert announcer.close(10)
    assert told == [(step, Path(f"/{step}"), False) for step in (1, 3, 5)]
    assert announcer.new_failures() == []


def test_what_it_raises_is_kept_and_the_next_call_is_made() -> None:
    told: list[int] = []

    def function(ticket: SaveTicket) -> None:
        if ticket.step == 1:
            raise KeyError("bucket")
        told.append(ticket.step)

    announcer = Announcer(function)
    for step in (1, 2):
        resolved(announcer, step, Path("/p"))
    assert announcer.close(10)
    assert told == [2]
    assert announcer.new_failures() == ["on_committed, step 1: KeyError: 'bucket'"]
    assert announcer.new_failures() == [], "each is told once"


def test_even_sys_exit_in_it_ends_nothing() -> None:
    told: list[int] = []

    def function(ticket: SaveTicket) -> None:
        told.append(ticket.step)
        if ticket.step == 1:
            sys.exit(3)

    announcer = Announcer(function)
    for step in (1, 2):
        resolved(announcer, step, Path("/p"))
    assert announcer.close(10)
    assert told == [1, 2]
    assert announcer.new_failures() == ["on_committed, step 1: SystemExit: 3"]


def test_a_function_that_hangs_is_left_behind() -> None:
    done = threading.Event()
    announcer = Announcer(lambda ticket: done.wait(30))
    resolved(announcer, 1, Path("/p"))
    assert not announcer.close(0.05)
    done.set()
    assert announcer.close(10)
