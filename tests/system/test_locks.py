"""Who may work on a run directory: one live run, any number of readers, one daemon on a host."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import OBEY, RunDirectory, daemons_of, wait_for

from trainer_hooks import Checkpointer

SAVED = """
checkpointer = Checkpointer(root)
checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
say("saved")
"""
REFUSED = """
try:
    Checkpointer(root, topology=place)
except Exception as error:
    say("refused", type(error).__name__, error)
"""


def test_a_second_live_run_is_refused_and_a_reader_is_not(run: RunDirectory) -> None:
    owner = run.trainer(SAVED + OBEY)
    owner.says("saved")
    ranks = run.ranks(REFUSED, tp=2)
    for rank, said in enumerate(ranks.say("refused")):
        assert said.startswith(
            "RunDirectoryBusy " + ("rank 0: " if rank else "") + "another run trains on this directory"
        )
        assert f"host {os.uname().nodename}, pid {owner.pid}" in said
    ranks.end()
    with Checkpointer(run.root, async_ckpt=False) as reader:
        point = reader.resume()
        latest = reader.latest()
    assert point is not None
    assert latest is not None
    assert (point.step, latest.step) == (1, 1)
    # None of them disturbed the owner: it goes on, in its attempt, with its daemon.
    owner.hears("checkpointer.save(2, state={}).wait_committed(60); say('saved')")
    owner.says("saved")
    assert [path.name for path in (run.root / ".ckpt_service" / "attempts").iterdir()] == ["1.json"]
    assert daemons_of(run.root) == [run.daemon().pid]
    owner.kill()


FORKED_BY_PYTHON = """
worker = os.fork()
if worker == 0:
    signal.pause()
"""
FORKED_BEHIND_PYTHONS_BACK = """
import ctypes
libc = ctypes.PyDLL(None)
worker = libc.fork()  # none of Python's hooks runs in the child, so it keeps the trainer's socket
if worker == 0:
    libc.pause()
"""


@pytest.mark.parametrize("fork", [FORKED_BY_PYTHON, FORKED_BEHIND_PYTHONS_BACK])
def test_a_worker_that_outlives_its_trainer_holds_nothing(run: RunDirectory, fork: str) -> None:
    trainer = run.trainer(f'{SAVED}\n{fork}\nsay("worker", worker)\nhear("never")')
    worker = int(trainer.says("worker"))
    try:
        daemon = run.daemon()
        trainer.kill()
        successor = run.trainer(
            "began = time.monotonic()\n"
            + SAVED
            + """
say("took", time.monotonic() - began)
checkpointer.close()
"""
        )
        assert float(successor.says("took")) < 10, "it waited for a heartbeat although the owner was dead"
        assert run.daemon().pid == daemon.pid, "the daemon lingers for its next trainer"
        successor.ends()
        wait_for(run.daemon_has_left, "the daemon knows that the first one is dead")
    finally:
        os.kill(worker, signal.SIGKILL)


def test_ranks_that_start_at_once_have_one_daemon(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
        with Checkpointer(root, topology=place) as checkpointer:
            say("path", checkpointer.save(1, state={"rank": rank}).wait_committed(60))
            hear("end")
        """,
        tp=8,
        meet="launch",
    )
    names = [f"ckpt_step_1_epoch_0_tp{rank}.pt" for rank in range(8)]
    assert ranks.say("path") == [str(run.root / "checkpoint_0" / name) for name in names]
    assert daemons_of(run.root) == [run.daemon().pid]

    def committed() -> list[int]:
        status = run.status()
        assert status is not None
        return sorted(shard.tp_rank for shard in status.shards if shard.last_committed is not None)

    wait_for(lambda: committed() == list(range(8)), "the one daemon has written all of them")
    ranks.hear("end")
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert daemons_of(run.root) == []
    assert run.files("*") == names
