"""What ``save()`` does when all slots are taken: block, skip, or replace. Shell.

A set is dropped by all ranks or by none, so "skip" and "replace" vote over the group of writers; "block" asks nobody.
"replace" drops the oldest set whose write has begun on no rank: every rank first has its part parked by its daemon, so
that it cannot begin meanwhile, and only if all could it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import BaseModel

from ckpt_service.errors import CkptError, SaveFailed, SnapshotSkipped
from ckpt_service.records import OnFull
from trainer_hooks.client import Save, ServiceClient
from trainer_hooks.group import Group
from trainer_hooks.slots import SlotPool

_PAUSE_SECONDS = 0.05


class _Ballot(BaseModel):
    """What a rank says of itself in one round: whether it has a slot, may go on waiting, and what it could drop."""

    room: bool
    stalled: bool
    waiting: list[Save]


class Admission:
    """Decides when a snapshot may take a slot. ``voters`` are all ranks that write; alone, a vote is this rank's."""

    def __init__(self, on_full: OnFull, pool: SlotPool, client: ServiceClient | None, voters: Group) -> None:
        self._on_full = on_full
        self._pool = pool
        self._client = client
        self._voters = voters

    def wait(self, step: int, *, final: bool) -> None:
        """Return when a slot is free, or as soon as the policy lets one be waited for.

        Raises:
            SnapshotSkipped: this snapshot is dropped, on all ranks.
            SaveFailed: nothing has moved for ``stall_seconds`` on some rank.
        """
        if self._on_full == "skip" and not final:
            self._skip_if_full(step)
        elif self._on_full == "replace":
            self._make_room(step)

    def may_wait(self, began: float) -> bool:
        """Return whether a slot is still worth waiting for, since ``began`` (monotonic seconds)."""
        return self._client is not None and not self._client.is_stalled(began)

    def _skip_if_full(self, step: int) -> None:
        ballots = self._vote(time.monotonic())
        if not all(ballot.room for ballot in ballots):
            raise SnapshotSkipped(
                f"step {step} was skipped: all {self._pool.count} slots of some rank are taken", op="save", step=step
            )

    def _make_room(self, step: int) -> None:
        """Go round by round, in step with all ranks, until every rank has a slot."""
        began = time.monotonic()
        while True:
            ballots = self._vote(began)
            if all(ballot.room for ballot in ballots):
                return
            if any(ballot.stalled for ballot in ballots):
                raise SaveFailed(
                    f"step {step} was not saved: all slots of some rank are taken and nothing has moved there",
                    op="save",
                    step=step,
                    hint="look at the status file and the daemon's log",
                )
            if not any(self._drop(save) for save in _common([ballot.waiting for ballot in ballots])):
                time.sleep(_PAUSE_SECONDS)  # until a write ends somewhere; the next round asks again

    def _vote(self, began: float) -> list[_Ballot]:
        waiting = self._client.replaceable() if self._client is not None else []
        mine = _Ballot(room=self._pool.has_room(), stalled=not self.may_wait(began), waiting=waiting)
        return [_Ballot.model_validate_json(answer) for answer in self._gather(mine.model_dump_json().encode())]

    def _gather(self, mine: bytes) -> list[bytes]:
        try:
            return self._voters.gather(mine)
        except CkptError as error:
            raise SaveFailed(f"the ranks could not vote on this save: {error}", op="save") from error

    def _drop(self, save: Save) -> bool:
        """Drop a set if every rank could park its part of it."""
        assert self._client is not None
        parked = self._client.park(save)
        drop = False
        try:
            drop = b"0" not in self._gather(b"1" if parked else b"0")
        finally:
            if parked:  # also when a rank has died meanwhile: what is parked would never be written
                self._client.unpark(save, drop=drop)
        return drop


def _common(waiting: Sequence[Sequence[Save]]) -> list[Save]:
    """Return the sets that wait on every rank, oldest first: the same on all, so all try them in the same order."""
    return sorted(set(waiting[0]).intersection(*waiting[1:]))
