"""What ``drain`` and ``stop`` share: find the daemon of this host, ask it to leave, and wait for its end.

It is asked over its socket, where its answer names what was lost; a signal carries no answer. Where the socket does not
answer, ``stop`` signals the process, through a pidfd, so that no other process can be hit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_service import ownership
from ckpt_service.ask import Asker
from ckpt_service.cli.common import Exit, absolute_root, checked_postfix, complain, deadline_after, time_left
from ckpt_service.cli.daemons import live_daemons, name, work_line
from ckpt_service.cli.progress import ProgressLine
from ckpt_service.config import load_config
from ckpt_service.errors import ProtocolError, ServiceUnavailable
from ckpt_service.records import ServiceStatus

_LOOK_SECONDS = 0.3


def leave(root: str, postfix: str | None, *, patient: bool, timeout: float | None) -> None:
    """Have the daemon of this host leave; ``patient``: once all is written, else within its grace time."""
    deadline = deadline_after(timeout)
    root, postfix = absolute_root(root), checked_postfix(postfix)
    config = load_config(os.environ)
    daemons = live_daemons(root, postfix, config.stale_seconds)
    if daemons.here is None:
        if daemons.elsewhere:
            complain(f"no daemon of this host serves {root}; run this on {daemons.hosts_elsewhere}")
            sys.exit(Exit.FAILED)
        complain(f"no daemon serves {root}: nothing to do")
        return
    with _process(daemons.here) as process:
        if process is None:
            complain(f"{name(daemons.here)} has just left: nothing to do")
            return
        asker = _ask(daemons.here, postfix, process, patient=patient, patience_seconds=config.notice_seconds)
        _await_end(daemons.here, postfix, process, deadline)
    _say_outcome(daemons.here, asker)
    if daemons.elsewhere:
        complain(f"daemons of other hosts serve {root} as well; run this on {daemons.hosts_elsewhere} too")


@contextmanager
def _process(status: ServiceStatus) -> Iterator[int | None]:
    pidfd = ownership.open_process(status.daemon.pid, status.daemon.pid_start)
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _ask(
    status: ServiceStatus, postfix: str | None, process: int, *, patient: bool, patience_seconds: float
) -> Asker | None:
    """Ask over the socket; a daemon that does not answer there gets SIGTERM, unless that would cut it short."""
    try:
        asker = Asker(status.daemon.socket, status.root, postfix, patience_seconds)
        asker.ask_to_leave(patient=patient)
    except (ServiceUnavailable, ProtocolError) as error:
        if patient:
            raise
        complain(f"{error}; sending SIGTERM instead")
        signal.pidfd_send_signal(process, signal.SIGTERM)
        return None
    return asker


def _await_end(status: ServiceStatus, postfix: str | None, process: int, deadline: float | None) -> None:
    """Wait until the process has ended; exit 7 at the deadline, and the daemon goes on with what it was asked."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    with ProgressLine() as line:
        while not poll.poll(1000 * time_left(deadline, _LOOK_SECONDS)):
            out_of_time = time_left(deadline, 1) == 0
            if not (line.wanted or out_of_time):
                continue
            seen = live_daemons(status.root, postfix, _LOOK_SECONDS).here
            work = work_line([seen]) if seen is not None else ""
            line.show(f"{name(status)} is leaving: {work or 'nothing to write any more'}")
            if out_of_time:
                line.show("")
                complain(f"{name(status)} has not left yet ({work or 'it waits for its trainers'}); it goes on")
                sys.exit(Exit.TIMEOUT)


def _say_outcome(status: ServiceStatus, asker: Asker | None) -> None:
    """Say whether all was written; exit 1 if it was not, or if nobody can tell."""
    if asker is None:
        complain(f"{name(status)} has left; `ckpt-service status {status.root}` says whether all was written")
        return
    lost = asker.last_words()
    asker.close()
    if lost is None:
        complain(f"{name(status)} ended without a word; `ckpt-service ls {status.root}` lists what is safe")
        sys.exit(Exit.FAILED)
    for loss in lost:
        complain(f"lost: {loss}")
    if lost:
        sys.exit(Exit.FAILED)
    complain(f"{name(status)} has left; all that was handed over is written")
