"""``drain``: have the daemon of this host write everything, then leave."""

from __future__ import annotations

from ckpt_service.cli.common import Postfix, Root, Timeout
from ckpt_service.cli.leaving import leave


def drain(root: Root = ".", postfix: Postfix = None, timeout: Timeout = None) -> None:
    """Have the daemon of this host write all that was handed over, however long it takes, and then leave.

    Use this before an upgrade, a reboot or unmounting: nothing is lost. `stop` also ends it if the writes hang or take
    longer than its grace time. Waits for the end; after --timeout the daemon still goes on (exit 7). Exit 1 names what
    could not be written.

    What trainers save meanwhile stays with them until the daemon has left. A trainer that lives on then starts another
    one (service="auto"), or waits for the next one at the socket that it was given: end the trainers first if none
    should run.

    What systemd or another supervisor runs is to be stopped there: it may start the daemon again.
    """
    leave(root, postfix, patient=True, timeout=timeout)
