"""What the demo claims about a leg's death, its resume and its end, each as a check that raises `DemoFailed`.

Takes how a leg ended (`LegEnd`) and looks at the files it left. The message says which claim did not hold, and why.
"""

from __future__ import annotations

import signal
from pathlib import Path

from trainer_hooks.demo.files import DaemonProcess, PartialFile, complete_steps, daemon_of, partial_files
from trainer_hooks.demo.journal import Failed, Started, events_of
from trainer_hooks.demo.leg import DemoFailed, KillPlan, trainers, wait_until
from trainer_hooks.demo.legs import LegEnd
from trainer_hooks.demo.sabotage import Killed

_LEAVE_SECONDS = 30.0
_DIE_SECONDS = 10.0


def require_clean_end(end: LegEnd) -> None:
    """All ranks ran to the end, and every save landed."""
    if end.failed_rank is not None:
        raise DemoFailed(f"{end.leg.title}: {_how_it_failed(end)}")
    for event in events_of(Failed, end.events):
        raise DemoFailed(f"{end.leg.title}: the save of step {event.step} failed: {event.error}")


def require_killed_in_write(end: LegEnd, plan: KillPlan) -> Killed:
    """All ranks died by SIGKILL, and an unfinished file seen before was still on disk right after. Gives the blow."""
    purpose = f"{end.leg.title} was to be killed in the write of step {plan.save_step}"
    killed = end.killed
    if killed is None:
        how = "ended by itself" if end.failed_rank is None else _how_it_failed(end)
        raise DemoFailed(f"{purpose}, but {how}")
    if set(end.exit_statuses) != {-signal.SIGKILL}:
        raise DemoFailed(f"{purpose}, but its ranks ended with statuses {end.exit_statuses}")
    seen = {partial.path for partial in killed.partials}
    if not any(partial.path in seen and partial.bytes > 0 for partial in end.partials):
        names = ", ".join(sorted(path.name for path in seen))
        raise DemoFailed(f"{purpose}, and was, but {names} was not on disk after its death")
    return killed


def require_resumed(end: LegEnd, step: int) -> None:
    """Every rank went on from exactly this step."""
    starts = {event.rank: event.step for event in events_of(Started, end.events)}
    for rank in range(end.leg.recipe.ranks):
        if rank not in starts:
            raise DemoFailed(f"{end.leg.title}: rank {rank} has not resumed: {_how_it_failed(end)}")
        if starts[rank] != step:
            found = "from nothing" if starts[rank] is None else f"from step {starts[rank]}"
            raise DemoFailed(f"{end.leg.title}: rank {rank} should have resumed from step {step}, but did {found}")


def require_daemon_finishes(end: LegEnd, step: int, seconds: float) -> DaemonProcess:
    """The trainers are dead, their daemon is not: the shards it accepted reach their final names. Gives the daemon."""
    root, tp = end.leg.paths.root, end.leg.recipe.tp
    daemon = daemon_of(root)
    if daemon is None or not (daemon.alive() or step in complete_steps(root, tp)):
        raise DemoFailed(f"{end.leg.title}: the daemon did not outlive {trainers(end.leg.recipe)}")
    if not wait_until(lambda: step in complete_steps(root, tp), seconds):
        raise DemoFailed(
            f"{end.leg.title}: the daemon had accepted step {step}, but did not finish it in {seconds:.0f} s"
        )
    return daemon


def require_stumps(end: LegEnd, step: int) -> list[PartialFile]:
    """Trainers and daemon are dead: unfinished files stay behind, the checkpoint is not complete. Gives the files."""
    root = end.leg.paths.root
    daemon = daemon_of(root)
    if daemon is not None and not wait_until(lambda: not daemon.alive(), _DIE_SECONDS):
        raise DemoFailed(f"{end.leg.title}: the daemon (pid {daemon.pid}) is alive after SIGKILL")
    left = partial_files(root, step)
    if not left or step in complete_steps(root, end.leg.recipe.tp):
        raise DemoFailed(f"{end.leg.title}: nobody was left to write step {step}, but no unfinished file stayed")
    return left


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


def _how_it_failed(end: LegEnd) -> str:
    rank = end.failed_rank or 0
    return f"rank {rank} ended with exit status {end.exit_statuses[rank]}{end.leg.log_tail(rank)}"
