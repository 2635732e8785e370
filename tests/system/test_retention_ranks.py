"""Retention over several ranks: bounded after every crash, never past the last checkpoint that all ranks have."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from support.processes import OBEY, Ranks, RunDirectory, daemons_of, wait_for
from support.shards import write_stage_shard

from ckpt_service import scan
from ckpt_service.catalog import CheckpointId

KEEP_LAST, SLOTS = 2, 2
BOUND = KEEP_LAST + SLOTS + 2

TRAINING = """
def resume():
    point = checkpointer.resume()
    say("from", point and point.step)
def save(*steps):
    for step in steps:
        checkpointer.save(step, state={"value": torch.full((9000,), float(step))})
        say("saved", step)
say("started")
checkpointer = Checkpointer(root, topology=place)
"""


def steps(directory: Path, suffix: str = "") -> list[int]:
    """Return the steps of which there is a file of ours with this suffix, set aside or not."""
    names = [path.name.removeprefix(".") for path in directory.glob(f"*ckpt_step_*_epoch_0{suffix}.pt*")]
    return sorted(int(name.split("_")[2]) for name in names if not name.endswith(".partial"))


def newest(run: RunDirectory) -> CheckpointId | None:
    found = scan.load_catalog(str(run.root), None).newest_complete()
    return found.id if found is not None else None


def strangers(directory: Path) -> dict[Path, bytes]:
    """Make files that this run must never touch: a user's own, an old trainer's, and of ranks that are no more."""
    directory.mkdir(parents=True)
    for name in ("best.pt", "ckpt_step_01_epoch_0_tp0.pt", "ckpt_step_1_epoch_0_tp1.pt.bak"):
        (directory / name).write_bytes(b"mine")
    torch.save({"step": 1}, directory / "ckpt_step_1_epoch_0.pt")
    for tp_rank in (2, 3):
        write_stage_shard(directory.parent, run_id="cafe0002", step=1, tp=4, tp_rank=tp_rank)
    return {path: path.read_bytes() for path in directory.iterdir()}


def kill_all(run: RunDirectory, ranks: Ranks, order: list[int]) -> None:
    """SIGKILL the trainers and the daemon (-1) in this order, and any daemon that a trainer started meanwhile."""
    for victim in order:
        if victim >= 0:
            ranks[victim].process.kill()
        for pid in daemons_of(run.root) if victim < 0 else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    ranks.kill()
    while pids := daemons_of(run.root):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_ten_crashes_leave_no_more_than_the_bound_and_rest_leaves_keep_last(run: RunDirectory) -> None:
    directory = run.root / "checkpoint_0"
    others = strangers(directory)
    moments = random.Random(20261201)
    slow = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(1 << 20)}
    before: CheckpointId | None = None
    for start in range(10):
        ranks = run.ranks(TRAINING + OBEY, tp=2, meet="launch", launch=f"start {start}", **slow)
        ranks.say("started")
        if before is None:
            first = 1001
        else:
            ranks.hear("resume()")
            assert ranks.say("from") == [str(before.step)] * 2
            first = before.step + 1
        ranks.hear(f"save({first}, {first + 1}, {first + 2})")
        if before is None:
            wait_for(lambda: newest(run), "the first complete checkpoint")
        else:
            ranks.say("saved")
        time.sleep(moments.uniform(0, 0.4))  # any moment will do
        kill_all(run, ranks, moments.sample([0, 1, -1], 3))
        for suffix in ("_tp0", "_tp1"):
            assert len(steps(directory, suffix)) <= BOUND, f"after start {start}"
        after = newest(run)
        assert after is not None
        assert before is None or after >= before, f"after start {start}"
        before = after
    assert before is not None
    assert before.attempt > 3, "hardly any start came to a checkpoint: this shows nothing"
    ranks = run.ranks(TRAINING + OBEY, tp=2, meet="launch", launch="the last start")
    ranks.hear("resume()")
    ranks.say("from")
    ranks.hear("save(2001, 2002, 2003)")
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")
    left = {path for path in directory.iterdir() if path not in others}
    assert left == {directory / f"ckpt_step_{step}_epoch_0_tp{rank}.pt" for step in (2002, 2003) for rank in (0, 1)}
    assert {path: path.read_bytes() for path in others} == others


FAILING = """
import resource
warnings.simplefilter("ignore")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))  # the daemon inherits it
checkpointer = Checkpointer(root, topology=place)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
def save(step, megabytes=1):
    try:
        ticket = checkpointer.save(step, state=state(step, megabytes))
        say("saved", ticket.wait_committed(60) is not None)
    except Exception as error:
        say("saved", type(error).__name__, error)
def resume():
    say("from", checkpointer.resume().step)
"""


def test_a_rank_that_fails_neither_fills_the_disk_nor_costs_the_last_common_step(run: RunDirectory) -> None:
    directories = [run.root / f"checkpoint_{stage}" for stage in (0, 1)]

    def both(condition: Callable[[list[list[int]]], bool]) -> Callable[[], bool]:
        return lambda: condition([steps(directory) for directory in directories])

    ranks = run.ranks(FAILING + OBEY, pp=2)
    for step in (1, 2):
        ranks.hear(f"save({step})")
        assert ranks.say("saved") == ["True", "True"]
    for step in range(3, 11):
        ranks[0].hears(f"save({step})")
        ranks[1].hears(f"save({step}, megabytes=8)")
        first, second = ranks.say("saved")
        assert first == "True"
        assert second.startswith(f"SaveFailed writing step {step} failed: File too large")
        wait_for(both(lambda found: len(found[0]) <= BOUND), f"rank 0 is bounded after step {step}")
        assert both(lambda found: found[0][:2] == found[1] == [1, 2])(), "the newest common one stays"
        common = newest(run)
        assert common is not None
        assert common.step == 2
    assert steps(directories[0]) == [1, 2, 7, 8, 9, 10]

    def stages() -> list[tuple[list[tuple[int, int]], int]]:
        status = run.status()
        assert status is not None
        return [
            ([(peer.stage, peer.behind) for peer in shard.held_back_by], shard.consecutive_failures)
            for shard in status.shards
        ]

    wait_for(lambda: stages() == [([(1, 4)], 0), ([], 8)], "the status says whom stage 0 waits for, and why")
    status = run.status()
    assert status is not None
    assert "File too large" in (status.shards[1].last_error or "")
    assert status.last_complete is not None
    assert status.last_complete.step == 2

    # It recovers: what it lacks cannot complete any more and goes, on the other rank as well.
    ranks.hear("save(11)")
    assert ranks.say("saved") == ["True", "True"]
    wait_for(both(lambda found: found == [[2, 11], [2, 11]]), "what only one of them had is pruned")

    # It fails once more, and everything dies: both go on from what both have.
    ranks[0].hears("save(12)")
    ranks[1].hears("save(12, megabytes=8)")
    ranks.say("saved")
    kill_all(run, ranks, [-1, 0, 1])
    ranks = run.ranks(FAILING + OBEY, pp=2)
    ranks.hear("resume()")
    assert ranks.say("from") == ["11", "11"]
    ranks.hear("save(12)")
    assert ranks.say("saved") == ["True", "True"]
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert both(lambda found: found == [[11, 12], [11, 12]])()
    assert all(not list(directory.glob(".*")) for directory in directories)
