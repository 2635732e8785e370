"""What survives which death, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
from support.processes import RunDirectory, wait_for

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(32 << 20)}


def test_an_accepted_snapshot_survives_kill_9_of_the_trainer(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(7, state=state(7)).accepted.result(30)
        say("accepted")
        time.sleep(60)
        """,
        **SLOW,
        CKPT_SERVICE_LINGER_SECONDS="0.5",
    )
    trainer.says("accepted")
    trainer.kill()
    assert run.files() == []
    wait_for(lambda: run.files() == ["ckpt_step_7_epoch_0.pt"], "the daemon commits what it accepted")
    loaded = torch.load(run.root / "checkpoint_0" / "ckpt_step_7_epoch_0.pt", weights_only=True)
    assert torch.equal(loaded["value"], torch.full((32, 1 << 18), 7.0))
    wait_for(run.daemon_has_left, "the daemon leaves after lingering")


def test_a_snapshot_survives_kill_9_of_the_daemon_in_mid_write(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        ticket = checkpointer.save(7, state=state(7))
        say("saved")
        say("committed", ticket.wait_committed(60))
        checkpointer.close()
        """,
        **SLOW,
    )
    trainer.says("saved")
    wait_for(run.being_written, "the write has begun")
    first = run.signal_daemon(signal.SIGKILL)
    assert trainer.says("committed") == str(run.root / "checkpoint_0" / "ckpt_step_7_epoch_0.pt")
    assert run.daemon().pid != first
    trainer.ends()
    assert run.files() == ["ckpt_step_7_epoch_0.pt"]
    assert run.partials() == [], "the dead daemon's temporary file is swept"
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_training_goes_on_while_the_daemon_is_stopped(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        say("started")
        hear("save")
        ticket = checkpointer.save(1, state=state(1))
        model = torch.nn.Linear(64, 64)
        for step in range(100):
            model(torch.randn(8, 64)).sum().backward()
        say("trained", ticket.committed.done())
        say("committed", ticket.wait_committed(60))
        checkpointer.close()
        """
    )
    trainer.says("started")
    run.signal_daemon(signal.SIGSTOP)
    trainer.hears("save")
    assert trainer.says("trained") == "False"
    run.signal_daemon(signal.SIGCONT)
    trainer.says("committed")
    trainer.ends()


def test_every_reader_reads_the_files(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        with Checkpointer(root) as checkpointer:
            checkpointer.track(model=model, optimizer=optimizer, scheduler=None)
            checkpointer.save(1)
        """
    )
    trainer.ends()
    path = run.root / "checkpoint_0" / "ckpt_step_1_epoch_0.pt"
    plain = torch.load(path, weights_only=True)
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert plain.keys() == {"epoch", "step", "stage", "stage_state_dict", "optimizer_state_dict", "rng_state"}
    for name, tensor in plain["stage_state_dict"].items():
        assert torch.equal(tensor, mapped["stage_state_dict"][name])
    assert zipfile.ZipFile(path).testzip() is None
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(path)], check=True, capture_output=True)
    subprocess.run(["unzip", "-tq", str(path)], check=True, capture_output=True)


@pytest.mark.parametrize("end", ["checkpointer.close()", "pass"], ids=["close", "end of the interpreter"])
def test_nothing_is_left_after_a_clean_end(run: RunDirectory, end: str) -> None:
    trainer = run.trainer(
        f"""
        checkpointer = Checkpointer(root)
        for step in range(3):
            checkpointer.save(step, state=state(step, megabytes=1))
        {end}
        """
    )
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert run.files() == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]
    assert run.files(".*") == []
    daemon = run.daemon()
    assert daemon.state == "stopped"
    assert not os.path.exists(daemon.socket)
    assert not os.path.exists(daemon.socket.replace(".sock", ".status.json"))
