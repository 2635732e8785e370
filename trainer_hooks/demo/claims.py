"""What the demo claims about a leg's death, its resume and its end, each as a check that raises `DemoFailed`.

Takes how a leg ended (`LegEnd`) and looks at the files it left. The message says which claim did not hold, and why.
"""

from __future__ import annotations

import signal
from pathlib import Path

from trainer_hooks.demo.files import DaemonProcess, PartialFile, daemon_of, finished_steps, partial_files
from trainer_hooks.demo.journal import Failed, Killed, Missed, Started, events_of
from trainer_hooks.demo.legs import DemoFailed, LegEnd, log_tail, wait_until

_LEAVE_SECONDS = 30.0
_DIE_SECONDS = 10.0


def require_clean_end(end: LegEnd) -> None:
    """It ran to the end, and every save landed."""
    if end.exit_status != 0:
        raise DemoFailed(f"{end.leg.title} ended with exit status {end.exit_status}{log_tail(end.leg)}")
    for event in events_of(Failed, end.events):
        raise DemoFailed(f"{end.leg.title}: the save of step {event.step} failed: {event.error}")


def require_killed_in_write(end: LegEnd) -> None:
    """It died by SIGKILL, and the partial file that it saw before was still on disk right after its death."""
    purpose = f"{end.leg.title} was to be killed in the write of step {end.leg.kill_in_save}"
    for missed in events_of(Missed, end.events):
        raise DemoFailed(f"{purpose}, but {missed.reason}")
    words = events_of(Killed, end.events)
    if end.exit_status != -signal.SIGKILL or not words:
        raise DemoFailed(f"{purpose}, but ended with exit status {end.exit_status}{log_tail(end.leg)}")
    if not any(partial.path.name == words[0].partial and partial.bytes > 0 for partial in end.partials):
        raise DemoFailed(f"{purpose}, and was, but {words[0].partial} was not on disk after its death")


def require_resumed(end: LegEnd, step: int) -> None:
    """It went on from exactly this step."""
    starts = [event.step for event in events_of(Started, end.events)]
    if starts != [step]:
        found = f"from step {starts[0]}" if starts and starts[0] is not None else "from nothing"
        raise DemoFailed(f"{end.leg.title} should have resumed from step {step}, but did {found}{log_tail(end.leg)}")


def require_daemon_finishes(end: LegEnd, seconds: float) -> DaemonProcess:
    """The trainer is dead, its daemon is not: what it accepted still reaches its final name. Gives the daemon."""
    root, step = end.leg.paths.root, end.leg.kill_in_save
    daemon = daemon_of(root)
    if daemon is None or not (daemon.alive() or step in finished_steps(root)):
        raise DemoFailed(f"{end.leg.title}: the daemon did not outlive its trainer")
    if not wait_until(lambda: step in finished_steps(root), seconds):
        raise DemoFailed(
            f"{end.leg.title}: the daemon had accepted step {step}, but did not finish it in {seconds:.0f} s"
        )
    return daemon


def require_stump(end: LegEnd) -> PartialFile:
    """Trainer and daemon are dead: the partial file stays behind, its checkpoint does not appear. Gives the file."""
    root, step = end.leg.paths.root, end.leg.kill_in_save
    daemon = daemon_of(root)
    if daemon is not None and not wait_until(lambda: not daemon.alive(), _DIE_SECONDS):
        raise DemoFailed(f"{end.leg.title}: the daemon (pid {daemon.pid}) is alive after SIGKILL")
    left = partial_files(root, step)
    if not left or step in finished_steps(root):
        raise DemoFailed(f"{end.leg.title}: nobody was left to write step {step}, but its partial file is gone")
    return left[0]


def require_swept(end: LegEnd) -> None:
    """No unfinished file is left, whoever began it."""
    for partial in partial_files(end.leg.paths.root):
        raise DemoFailed(f"{end.leg.title} should have swept {partial.path}")


def require_daemon_left(root: Path) -> None:
    """After a clean close a daemon leaves by itself when all is written."""
    daemon = daemon_of(root)
    if daemon is None:
        raise DemoFailed(f"{root} has no status file: no daemon served it")
    if not wait_until(lambda: not daemon.alive(), _LEAVE_SECONDS):
        raise DemoFailed(
            f"the daemon of {root} (pid {daemon.pid}) is still there {_LEAVE_SECONDS:.0f} s after a clean close"
        )
