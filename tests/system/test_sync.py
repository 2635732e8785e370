"""``async_ckpt=False``: the same bytes at the same names, written before ``save`` returns, and how it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from support.processes import RunDirectory, daemons_of, wait_for

from ckpt_service import image
from trainer_hooks import Checkpointer


def state() -> dict[str, Any]:
    base = torch.arange(70000, dtype=torch.float32)
    return {
        "base": base,
        "row": base[100:200],
        "tied": base,
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "nested": {"list": [1, 2.5, "x", None, (True, b"y")], "scalar": torch.tensor(7)},
    }


def stripped(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the file with all zeroed that may differ between two runs, and the manifest without that."""
    content = bytearray(path.read_bytes())
    layout = image.parse(memoryview(bytes(content)))
    stated: dict[str, Any] = {}
    for name in (image.MANIFEST, image.SERIALIZATION_ID):
        record = layout.find(name)
        assert record is not None
        if name == image.MANIFEST:
            stated = json.loads(content[record.offset : record.end])
        content[record.offset : record.end] = bytes(record.nbytes)
        for field in record.crc_fields:
            content[field : field + 4] = bytes(4)
    return bytes(content), {key: value for key, value in stated.items() if key not in ("run_id", "created_at")}


def test_both_ways_write_the_same_files(run: RunDirectory) -> None:
    quiet = run.root.parent / "quiet"
    with Checkpointer(run.root, keep_last=2) as checkpointer:
        run.status()
        for step in (1, 2, 3):
            checkpointer.save(step, step, state())
    with Checkpointer(quiet, async_ckpt=False, keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            ticket = checkpointer.save(step, step, state())
            assert ticket.staged.done()
            assert ticket.accepted.done()
            assert ticket.committed.result(0) == quiet / "checkpoint_0" / f"ckpt_step_{step}_epoch_{step}.pt"
        assert daemons_of(quiet) == []
        assert not list(quiet.glob(".ckpt_service*/status*"))
        assert not list(quiet.glob(".ckpt_service*/daemon*"))
    names = sorted(path.name for path in (quiet / "checkpoint_0").iterdir())
    assert names == run.files("*") == ["ckpt_step_2_epoch_2.pt", "ckpt_step_3_epoch_3.pt"]
    for name in names:
        mine, theirs = (stripped(root / "checkpoint_0" / name) for root in (quiet, run.root))
        assert mine[1] == theirs[1]
        assert mine[0] == theirs[0]
    loaded = torch.load(quiet / "checkpoint_0" / names[0], weights_only=True)
    assert torch.equal(loaded["base"], state()["base"])
    assert loaded["base"].untyped_storage().data_ptr() == loaded["tied"].untyped_storage().data_ptr()
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_an_object_that_only_reads_leaves_no_trace(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_ckpt=False) as checkpointer:
        assert checkpointer.resume() is None
        assert checkpointer.latest() is None
    assert not list(tmp_path.rglob("*.json"))


LIMITED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
checkpointer = Checkpointer(root, async_ckpt=False)
checkpointer.save(1, state=state(1, megabytes=8))
limit(4 << 20)
lost = checkpointer.save(2, state=state(2, megabytes=8))
say("lost", type(lost.committed.exception(0)).__name__, lost.committed.exception(0))
"""


def test_a_save_that_fails_is_told_and_the_next_one_works(run: RunDirectory) -> None:
    trainer = run.trainer(
        LIMITED
        + """
limit(hard)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ticket = checkpointer.save(3, state=state(3, megabytes=8))
say("warned", len(caught), caught[0].message)
say("path", ticket.wait_committed(0))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    checkpointer.save(4, state=state(4, megabytes=8))
checkpointer.close()
"""
    )
    lost = trainer.says("lost")
    assert lost.startswith("SaveFailed writing step 2 failed: File too large")
    assert "ulimit -f" in lost
    warned = trainer.says("warned")
    assert warned.startswith("1 ")
    assert "step 2" in warned
    assert trainer.says("path").endswith("ckpt_step_3_epoch_0.pt")
    trainer.ends()
    assert run.files("*") == ["ckpt_step_3_epoch_0.pt", "ckpt_step_4_epoch_0.pt"], "no stump is left"


def test_close_raises_when_the_last_save_is_lost(run: RunDirectory) -> None:
    trainer = run.trainer(
        LIMITED
        + """
try:
    checkpointer.close()
except Exception as error:
    say("raised", type(error).__name__, error)
checkpointer.close()  # twice is fine
"""
    )
    assert "step 2" in trainer.says("raised")
    trainer.ends()
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt"], "the one before is untouched"


def test_without_close_the_exit_code_tells(run: RunDirectory) -> None:
    trainer = run.trainer(LIMITED)
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode not in (0, None)
    assert "the last save was lost" in errors
    assert "step 2" in errors


def test_whatever_goes_wrong_at_the_end_the_exit_code_tells(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1))
        def drain(timeout=None):
            raise MemoryError("no memory at the end")
        checkpointer.drain = drain
        """
    )
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 1
    assert "ckpt-service: the last save was lost: no memory at the end" in errors


def test_an_exception_of_the_body_matters_more_than_a_lost_save(run: RunDirectory) -> None:
    trainer = run.trainer(LIMITED + "\nwith checkpointer:\n    raise KeyError('mine')\n")
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 1
    assert errors.strip().endswith("KeyError: 'mine'")


def test_retention_that_cannot_delete_is_a_warning(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint_0"
    with Checkpointer(tmp_path, async_ckpt=False, keep_last=1) as checkpointer:
        first = checkpointer.save(1, state=state()).wait_committed(0)
        assert first is not None
        first.unlink()  # somebody was faster
        assert checkpointer.save(2, state=state()).wait_committed(0) is not None
        assert checkpointer.save(3, state=state()).wait_committed(0) is not None
    assert os.listdir(directory) == ["ckpt_step_3_epoch_0.pt"]
