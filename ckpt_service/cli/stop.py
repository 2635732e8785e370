"""``stop``: have the daemon of this host leave within its grace time."""

from __future__ import annotations

from ckpt_service.cli.common import Postfix, Root, Timeout
from ckpt_service.cli.leaving import leave


def stop(root: Root = ".", postfix: Postfix = None, timeout: Timeout = None) -> None:
    """Have the daemon of this host leave within its grace time (CKPT_SERVICE_GRACE_SECONDS), as SIGTERM does.

    It writes what it can until then, and waits so long for the trainers that are connected; what is left unwritten is
    named, and lost unless its trainer lives (exit 1). `drain` waits for every write instead. Waits for the end.

    A trainer that lives on hands over again what was not written: it starts another daemon (service="auto"), or waits
    for the next one at the socket that it was given. End the trainers first if none should run.

    What systemd or another supervisor runs is to be stopped there: it may start the daemon again.
    """
    leave(root, postfix, patient=False, timeout=timeout)
