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
    require_stump,
    require_swept,
)
from trainer_hooks.demo.compare import Verdict, compare_checkpoint, compare_runs
from trainer_hooks.demo.files import DaemonProcess, daemon_of, finished_steps, shard_path
from trainer_hooks.demo.journal import Committed, JournalReader, Stepped, events_of, final_trajectory
from trainer_hooks.demo.legs import Leg, LegEnd, RunPaths, SlowWrites, run_leg, wait_until
from trainer_hooks.demo.recipe import Recipe
from trainer_hooks.demo.report import Report, make_report
from trainer_hooks.demo.screen import Screen

_SHORTEST_WRITE_SECONDS = 1.0
_STEPS_IN_A_WRITE = 8
_STOP_SECONDS = 30.0


def play(recipe: Recipe, base: Path, *, tiny: bool, screen: Screen) -> Report:
    """Run both runs under `base` and compare them.

    Raises:
        DemoFailed: something did not go as claimed.
    """
    alone = _paths(base, "uninterrupted", legs=1)
    killed = _paths(base, "killed", legs=3)
    with _no_daemon_left((alone.root, killed.root), screen):
        reference = _uninterrupted(Leg(alone, 1, recipe.steps, tiny), screen)
        slow = _slow_writes(reference)
        ends = _killed_twice(Leg(killed, 1, recipe.steps, tiny), recipe, slow, screen)
    screen.say("comparing the two runs")
    return make_report(reference, ends, slow.seconds, _verdict(reference, ends))


def _uninterrupted(leg: Leg, screen: Screen) -> LegEnd:
    end = run_leg(leg, JournalReader(leg.paths.journal), screen)
    require_clean_end(end)
    require_daemon_left(leg.paths.root)
    return end


def _killed_twice(first: Leg, recipe: Recipe, slow: SlowWrites, screen: Screen) -> list[LegEnd]:
    """The three legs of the killed run. The second and third must go on from what the kill before them left."""
    reader = JournalReader(first.paths.journal)
    slowed = replace(first, slow_writes=slow)

    one = run_leg(replace(slowed, kill_in_save=recipe.first_kill_step), reader, screen)
    require_killed_in_write(one)
    daemon = require_daemon_finishes(one, 30 + 10 * slow.seconds)
    screen.say(f"its daemon, pid {daemon.pid}, has finished the write of step {recipe.first_kill_step} without it")

    leg = replace(slowed, number=2, kill_in_save=recipe.second_kill_step, kill_daemon=True)
    two = run_leg(leg, reader, screen)
    require_resumed(two, recipe.first_kill_step)
    require_killed_in_write(two)
    stump = require_stump(two)
    screen.say(
        f"nobody is left to finish step {recipe.second_kill_step}: its {stump.bytes:,} bytes stay as {stump.path.name}"
    )

    newest = finished_steps(first.paths.root)[-1]
    three = run_leg(replace(first, number=3), reader, screen)
    require_resumed(three, newest)
    require_clean_end(three)
    require_swept(three)
    require_daemon_left(first.paths.root)
    return [one, two, three]


def _verdict(reference: LegEnd, ends: Sequence[LegEnd]) -> Verdict:
    """Compare states and trajectories, then the killed run's last checkpoint with the state its last leg ended in."""
    expected = final_trajectory(reference.events)
    found = final_trajectory([event for end in ends for event in end.events])
    paths = ends[-1].leg.paths
    verdict = compare_runs(reference.leg.paths.final_state, paths.final_state, expected, found)
    if verdict.difference is not None:
        return verdict
    last = found[reference.leg.steps]
    checkpoint = shard_path(paths.root, last.step, last.epoch)
    return replace(verdict, difference=compare_checkpoint(checkpoint, paths.final_state))


def _slow_writes(reference: LegEnd) -> SlowWrites:
    """By the measures of the run that was not slowed."""
    step_seconds = median(event.seconds for event in events_of(Stepped, reference.events))
    size = max(event.bytes for event in events_of(Committed, reference.events))
    return SlowWrites(size, max(_SHORTEST_WRITE_SECONDS, _STEPS_IN_A_WRITE * step_seconds))


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
            daemon = daemon_of(root)
            if daemon is not None and daemon.alive():
                _stop(daemon, screen)


def _stop(daemon: DaemonProcess, screen: Screen) -> None:
    screen.say(f"stopping the daemon, pid {daemon.pid}")
    daemon.signal(signal.SIGTERM)
    if not wait_until(lambda: not daemon.alive(), _STOP_SECONDS):
        screen.say(f"the daemon, pid {daemon.pid}, was told to stop, but has not yet")
