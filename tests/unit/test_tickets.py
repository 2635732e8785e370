"""Tickets: whoever waits for one hears of a failure last."""

from __future__ import annotations

from ckpt_service.errors import SaveFailed
from trainer_hooks import SaveTicket


def test_a_failure_is_noted_before_anybody_who_waits_learns_of_it() -> None:
    """Else the save that comes right after the wait might not warn of it."""
    noted = []
    ticket = SaveTicket(1, 0, lambda error: noted.append((error, ticket.committed.done())))
    lost, later = SaveFailed("lost"), SaveFailed("later")
    ticket.fail(lost)
    ticket.fail(later)
    assert noted == [(lost, False)]
    assert ticket.committed.exception() is lost
