"""The story of the demo: one run left alone, one killed twice in the middle of a write, and whether they end alike.

Takes a recipe and an empty directory; gives a `Report`. Every claim on the way is checked (who died, what was left on
disk, where the next leg went on), and `DemoFailed` says which one did not hold. Promises to leave no daemon behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from trainer_hooks.demo.claims import (
    require_clean_end,
    require_daemon_finishes,
    require_daemon_left,
    require_killed_in_write,
    require_resumed,
    require_stumps,
    require_swept,
)
from trainer_hooks.demo.compare import Verdict, compare_checkpoint, compare_runs
from trainer_hooks.demo.files import DaemonProcess, complete_steps, serving, shard_path
from trainer_hooks.demo.journal import (
    Committed,
    JournalReader,
    Stepped,
    events_of,
    final_state_name,
    final_trajectory,
)
from trainer_hooks.demo.leg import KillPlan, Leg, RunPaths, SlowWrites, wait_until
from trainer_hooks.demo.legs import LegEnd, run_leg
from trainer_hooks.demo.recipe import Recipe
from trainer_hooks.demo.report import Report, make_report
from trainer_hooks.demo.screen import Screen

_SHORTEST_WRITE_SECONDS = 1.0
_STEPS_IN_A_WRITE = 8
_STOP_SECONDS = 30.0


def play(recipe: Recipe, base: Path, *, tiny: bool, single: bool, screen: Screen) -> Report:
    """Run both runs under `base` and compare them.

    Raises:
        DemoFailed: something did not go as claimed.
    """
    alone = _paths(base, "uninterrupted", legs=1)
    killed = _paths(base, "killed", legs=3)
    with _no_daemon_left((alone.root, killed.root), screen):
        reference = _uninterrupted(Leg(alone, 1, recipe, tiny, single), screen)
        slow = _slow_writes(reference)
        ends = _killed_twice(Leg(killed, 1, recipe, tiny, single), slow, screen)
    screen.say("comparing the two runs")
    return make_report(reference, ends, slow.seconds, _verdict(reference, ends))


def _uninterrupted(leg: Leg, screen: Screen) -> LegEnd:
    end = run_leg(leg, JournalReader(leg.paths.journal), screen)
    require_clean_end(end)
    require_daemon_left(leg.paths.root)
    return end


def _killed_twice(first: Leg, slow: SlowWrites, screen: Screen) -> list[LegEnd]:
    """The three legs of the killed run. The second and third must go on from what the kill before them left."""
    reader = JournalReader(first.paths.journal)
    recipe, root = first.recipe, first.paths.root
    slowed = replace(first, slow_writes=slow)

    blow = KillPlan(recipe.first_kill_step, daemon_too=False)
    one = run_leg(replace(slowed, kill=blow), reader, screen)
    require_killed_in_write(one, blow)
    daemon = require_daemon_finishes(one, blow.save_step, 30 + 10 * slow.seconds)
    screen.say(f"their daemon, pid {daemon.pid}, has finished the write of step {blow.save_step} without them")

    blow = KillPlan(recipe.second_kill_step, daemon_too=True)
    two = run_leg(replace(slowed, number=2, kill=blow), reader, screen)
    require_resumed(two, recipe.first_kill_step)
    require_killed_in_write(two, blow)
    stumps = require_stumps(two, blow.save_step)
    left = ", ".join(f"{stump.bytes:,} bytes stay as {stump.path.name}" for stump in stumps)
    screen.say(f"nobody is left to finish step {blow.save_step}: {left}")

    newest = complete_steps(root, recipe.tp)[-1]
    three = run_leg(replace(first, number=3), reader, screen)
    require_resumed(three, newest)
    require_clean_end(three)
    require_swept(three)
    require_daemon_left(root)
    return [one, two, three]


def _verdict(reference: LegEnd, ends: Sequence[LegEnd]) -> Verdict:
    """Compare the two runs, then the shards of the killed run's last checkpoint with the state its ranks ended in."""
    recipe, paths = reference.leg.recipe, ends[-1].leg.paths
    verdict = compare_runs(reference.leg.paths.records, paths.records)
    last = final_trajectory(ends[-1].events, rank=0)[recipe.steps]
    for tp_rank in range(recipe.tp):
        if verdict.difference is None:
            shard = shard_path(paths.root, last.step, last.epoch, tp_rank=tp_rank, tp=recipe.tp)
            state = paths.records / final_state_name(tp_rank)  # of data-parallel replica 0, which writes
            verdict = replace(verdict, difference=compare_checkpoint(shard, state))
    return verdict


def _slow_writes(reference: LegEnd) -> SlowWrites:
    """By the measures of the run that was not slowed."""
    step_seconds = median(event.seconds for event in events_of(Stepped, reference.events))
    size = max(event.bytes for event in events_of(Committed, reference.events))
    seconds = max(_SHORTEST_WRITE_SECONDS, _STEPS_IN_A_WRITE * step_seconds)
    return SlowWrites(size, reference.leg.recipe.tp, seconds)


def _paths(base: Path, name: str, *, legs: int) -> RunPaths:
    paths = RunPaths(name, legs, base / name, base / "records" / name)
    paths.root.mkdir(parents=True)
    paths.records.mkdir(parents=True)
    return paths


@contextmanager
def _no_daemon_left(roots: Sequence[Path], screen: Screen) -> Iterator[None]:
    """Whatever happens inside, daemons of these run directories that are still there at the end are told to stop."""
    try:
        yield
    finally:
        for root in roots:
            _stop_daemons(root, screen)


def _stop_daemons(root: Path, screen: Screen) -> None:
    """Tell each once, also one that is only just starting; all trainers have ended before."""
    told: set[DaemonProcess] = set()

    def none_is_left() -> bool:
        there = set(serving(root))
        for daemon in there - told:
            screen.say(f"stopping the daemon, pid {daemon.pid}")
            daemon.signal(signal.SIGTERM)
        told.update(there)
        return not there

    if not wait_until(none_is_left, _STOP_SECONDS):
        pids = ", ".join(str(daemon.pid) for daemon in told)
        screen.say(f"a daemon of {root} was told to stop, but has not yet: pid {pids}")
