"""What a loop is told (on_committed), and what tells a loop to end (signals), with real processes."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import RunDirectory, wait_for
from support.states import manifest_in


@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_committed_is_told_of_durable_files_and_its_errors_are_warnings(
    run: RunDirectory, asynchronous: bool
) -> None:
    trainer = run.trainer(
        f"""
        told = []
        def on_committed(ticket):
            assert ticket.committed.result().exists()
            told.append(ticket.step)
            if ticket.step == 1:
                raise OSError("the bucket is gone")
        checkpointer = Checkpointer(root, async_ckpt={asynchronous}, on_committed=on_committed)
        """
        """
        checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
        while not told:
            time.sleep(0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpointer.save(2, state=state(2, megabytes=1))
        say("warned", *(warning.message for warning in caught))
        checkpointer.save(3, state=state(3, megabytes=1))
        checkpointer.close()
        say("told", *told)
        """
    )
    assert trainer.says("warned") == "on_committed, step 1: OSError: the bucket is gone"
    assert trainer.says("told") == "1 2 3"
    trainer.ends()


PREEMPTED = """
from trainer_hooks import Preemption
import torch.distributed as dist
former = signal.signal(signal.SIGUSR1, lambda number, frame: say("mine"))
with Checkpointer(root, topology=place) as checkpointer, Preemption(checkpointer, every=2) as preemption:
    say("training")
    for step in range(1, 1_000_000):
        if preemption.reached():
            ticket = checkpointer.save(step, state=state(step, megabytes=1), final=True)
            break
say("ended", step, preemption.signal)
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_is_a_save_of_the_same_step_on_all(run: RunDirectory, number: signal.Signals) -> None:
    ranks = run.ranks(PREEMPTED, tp=2)
    ranks.say("training")
    os.kill(ranks[1].pid, number)
    first, second = ranks.say("ended")
    step = int(first.split()[0])
    assert first == f"{step} None"
    assert second == f"{step} {int(number)}"
    assert step % 2 == 0, "they ask each other at every second step"
    assert ranks.say("mine") == ["", ""], "the former handler is back"
    ranks.end()
    paths = [run.root / "checkpoint_0" / f"ckpt_step_{step}_epoch_0_tp{tp}.pt" for tp in (0, 1)]
    assert [manifest_in(path).step for path in paths] == [step, step]


def test_the_whole_job_is_signalled_and_the_last_step_is_safe(run: RunDirectory) -> None:
    """As a scheduler does it: every process of the job, the daemon too, gets the signal at once."""
    ranks = run.ranks(PREEMPTED, tp=2)
    ranks.say("training")
    daemon = run.signal_daemon(signal.SIGTERM)
    for trainer in ranks.trainers:
        os.kill(trainer.pid, signal.SIGTERM)
    steps = {said.split()[0] for said in ranks.say("ended")}
    ranks.end()
    (step,) = steps
    assert run.cli("latest", str(run.root)).stdout.startswith(f"step {step} epoch 0 ")
    wait_for(run.daemon_has_left, f"the daemon {daemon} leaves")
