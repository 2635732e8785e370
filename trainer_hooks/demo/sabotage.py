"""Kills a training process in the middle of a checkpoint write, as a crash would: SIGKILL, no clean-up, no warning.

Takes a `KillPlan`; watches the directory from a thread, and strikes once the daemon has accepted the chosen save,
some of its bytes are on disk, and training has gone on meanwhile. It writes its last words to the journal first, so
that the parent can check the death against them. Never part of a real training loop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from trainer_hooks import SaveTicket
from trainer_hooks.demo.files import PartialFile, begun_partial, daemon_of
from trainer_hooks.demo.journal import JournalWriter, Killed, Missed

_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class KillPlan:
    """Whom to kill in the write of which save, and how far to let training go on meanwhile.

    Once bytes are on disk, the trainer gets `patience_seconds` to finish one more step. It never gets past
    `hold_step`, where its next save is due: nothing newer than `save_step` is submitted before its death.
    """

    save_step: int
    hold_step: int
    daemon_too: bool
    patience_seconds: float


class Saboteur:
    """Carries out one plan. Told of every save and every step by the training process that it will kill."""

    def __init__(self, plan: KillPlan, root: Path, journal: JournalWriter, leg: int) -> None:
        self._plan = plan
        self._root = root
        self._journal = journal
        self._leg = leg
        self._step = 0
        self._watching = False
        self._stepped_on = threading.Event()
        self._missed = threading.Event()

    def after_step(self, step: int) -> None:
        """A step is done. After the chosen save this lets the kill come, and waits for it at the hold step."""
        self._step = step
        if step > self._plan.save_step:
            self._stepped_on.set()
        if self._watching and step >= self._plan.hold_step:
            self._missed.wait()

    def after_save(self, step: int, ticket: SaveTicket) -> None:
        """A save was submitted; if it is the chosen one, begin to watch its write."""
        if step == self._plan.save_step:
            self._watching = True
            threading.Thread(target=self._strike, args=(ticket,), name="saboteur", daemon=True).start()

    def _strike(self, ticket: SaveTicket) -> None:
        seen = self._await_partial(ticket)
        if seen is not None:
            self._stepped_on.wait(self._plan.patience_seconds)
        left = begun_partial(self._root, self._plan.save_step)
        if left is None or ticket.committed.done():
            self._journal.write(Missed(self._leg, self._plan.save_step, _why_missed(ticket)))
            self._missed.set()
        else:
            self._kill(left)

    def _await_partial(self, ticket: SaveTicket) -> PartialFile | None:
        """Poll until an accepted save has bytes on disk; None if it is finished before any were seen."""
        while not ticket.committed.done():
            if ticket.accepted.done():
                partial = begun_partial(self._root, self._plan.save_step)
                if partial is not None:
                    return partial
            time.sleep(_POLL_SECONDS)
        return None

    def _kill(self, partial: PartialFile) -> None:
        daemon = daemon_of(self._root) if self._plan.daemon_too else None
        pid = None if daemon is None else daemon.pid
        self._journal.write(Killed(self._leg, self._plan.save_step, self._step, partial.path.name, partial.bytes, pid))
        if daemon is not None:
            daemon.signal(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _why_missed(ticket: SaveTicket) -> str:
    error = ticket.committed.exception() if ticket.committed.done() else None
    return "its write was over before the kill" if error is None else f"the save failed: {error}"
