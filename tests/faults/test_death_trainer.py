"""The trainer dies: what was accepted is finished, what was half copied is nothing, and nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from support.processes import RunDirectory, daemons_of, wait_for

from ckpt_service.locate import status_beside

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(32 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(1 << 20)}
LEAVES_SOON = {"CKPT_SERVICE_LINGER_SECONDS": "0.3"}

WAYS = {
    "an exception": ("raise KeyError('mine')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(3)", 3),
    "a signal": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


def nothing_stays(run: RunDirectory, socket: str) -> None:
    """Assert that the daemon leaves, and nothing of it or of the trainer stays but what is documented."""
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert daemons_of(run.root) == []
    assert run.partials() == []
    assert not os.path.exists(socket)
    assert not os.path.exists(status_beside(socket))
    service = run.root / ".ckpt_service"
    assert not [
        path.name for path in service.iterdir() if path.name.endswith((".tmp", ".partial")) or "probe" in path.name
    ]
    assert not [path for path in Path("/dev/shm").iterdir() if "ckpt-slot" in path.name]


@pytest.mark.parametrize(("end", "code"), WAYS.values(), ids=WAYS)
def test_what_was_accepted_is_finished_when_the_trainer_ends_by(end: str, code: int, run: RunDirectory) -> None:
    trainer = run.trainer(
        f"""
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=16)).accepted.result(30)
        say("accepted")
        {end}
        """,
        **SLOW,
        **LEAVES_SOON,
    )
    trainer.says("accepted")
    socket = run.daemon().socket
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == code, errors
    if code == 1:
        assert errors.strip().endswith("KeyError: 'mine'")
    nothing_stays(run, socket)
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt"]
    loaded = torch.load(run.root / "checkpoint_0" / "ckpt_step_1_epoch_0.pt", weights_only=True)
    assert torch.equal(loaded["value"], torch.full((16, 1 << 18), 1.0))


def test_what_was_half_copied_is_never_committed(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import threading
        def slot_pages():
            with open("/proc/self/smaps") as file:
                lines = iter(file)
                slots = (line for line in lines if "ckpt-slot" in line)
                return sum(int(next(field for field in lines if field.startswith("Rss:")).split()[1]) for _ in slots)
        def die_in_the_copy():
            while not slot_pages():
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer = Checkpointer(root)
        big = state(2, megabytes=256)
        threading.Thread(target=die_in_the_copy).start()
        checkpointer.save(2, state=big)
        say("survived")
        """,
        **LEAVES_SOON,
    )
    wait_for(lambda: run.status() is not None, "the daemon serves")
    socket = run.daemon().socket
    with pytest.raises(AssertionError, match="code -9"):
        trainer.says("survived")
    nothing_stays(run, socket)
    assert run.files("*") == []
    status = run.status()
    assert status is not None
    assert status.totals.submitted == 0
