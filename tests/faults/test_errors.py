"""A write that fails: the trainer and the status are told, nothing else is touched, and the next save works."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.faults import TWICE, Fault, Faults, Saver, contents, errors, name_of, settle, start_daemon, told
from support.processes import RunDirectory, wait_for

from ckpt_service import naming
from ckpt_service.ownership import host_name

# What a commit does with its file and its directory, in this order: the call, and where it is met.
PLACES = {
    "open": ("open", r"\.partial$"),
    "lock": ("flock", r"\.partial$"),
    "mode": ("fchmod", r"\.partial$"),
    "write": ("pwrite", r"\.partial$"),
    "fsync": ("fsync", r"\.partial$"),
    "directory lock": ("open", r"checkpoint_0/\.$"),
    "rename": ("rename", r"\.partial -> .*\.pt$"),
    "close": ("close", r"/ckpt_step_\d*5_.*\.pt$"),
    "directory fsync": ("fsync", r"checkpoint_0$"),
}
RENAMED = ("close", "directory fsync")
SPACE = ["ENOSPC", "EDQUOT", "EFBIG"]
PASSING = ["EIO", "EMFILE", "ENOMEM", "EINTR"]
FINAL = [*SPACE, "EROFS", "EACCES"]


@pytest.mark.parametrize("place", PLACES)
def test_a_save_fails_and_the_next_one_works(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], place: str
) -> None:
    daemon = start_daemon(run, faults, **TWICE)
    trainer = saver()
    assert trainer.save(1).committed
    call, path = PLACES[place]
    codes = [*FINAL, "EIO", "ENOMEM"] if place == "write" else ["ENOSPC", "EIO"]
    for commits, code in enumerate(codes, start=1):
        step = 10 * commits + 5
        settle(run, commits)
        before, met = contents(run), faults.met()
        faults.set(Fault(call, path, code=code))
        failed = trainer.save(step)
        faults.clear()
        assert (failed.kind, failed.code, failed.step) == ("SaveFailed", code, step)
        assert name_of(step) in failed.message
        assert ("bytes needed" in failed.message and " free" in failed.message) == (code in SPACE)
        assert faults.met() - met == (1 if code in FINAL else 2), "only what may pass is tried again"
        wait_for(lambda code=code, step=step: told(run, code, step), f"the status tells of {code}")  # type: ignore[misc]
        entry = told(run, code, step)[-1]
        assert f"writing step {step} failed" in entry.message
        assert entry.hint == failed.hint is not None
        left = contents(run)
        if place in RENAMED:
            left.pop(name_of(step), None)
        assert left == before, "former checkpoints"
        assert run.partials() == []
        good = trainer.save(step + 1)
        assert good.committed, (code, good)
        assert len(good.warned) == 1
        assert f"step {step}" in good.warned[0]
    settle(run, 1 + len(codes))
    assert name_of(step + 1) in run.files()
    assert run.daemon().pid == daemon.pid


def test_what_passes_is_tried_again(run: RunDirectory, faults: Faults, saver: Callable[..., Saver]) -> None:
    start_daemon(run, faults, **TWICE)
    trainer = saver()
    for step, code in enumerate(PASSING):
        faults.set(Fault("pwrite", r"\.partial$", code=code, times=1))
        assert trainer.save(step).committed
        assert told(run, code, step), "the status told of it before the next try"
    status = run.status()
    assert status is not None
    assert (status.totals.retried, status.totals.failed) == (len(PASSING), 0)
    assert status.daemon.state != "degraded"
    assert faults.met() == len(PASSING)


@pytest.mark.parametrize("short", [4096, 1000, 1])
def test_a_short_write_goes_on_where_it_ended(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], short: int
) -> None:
    start_daemon(run, faults, **TWICE)
    faults.set(Fault("pwrite", r"\.partial$", short=short, times=50))
    trainer = saver()
    assert trainer.save(1).committed
    assert faults.met() == 50
    assert run.cli("verify", str(run.root)).returncode == 0


def test_a_write_of_nothing_is_an_error(run: RunDirectory, faults: Faults, saver: Callable[..., Saver]) -> None:
    start_daemon(run, faults, **TWICE)
    faults.set(Fault("pwrite", r"\.partial$", short=0))
    trainer = saver()
    assert trainer.save(1).code == "EIO"
    faults.clear()
    assert trainer.save(2).committed


@pytest.mark.parametrize(("call", "path"), [("link", r"\.kept$"), ("pread", "_1_epoch_0")])
def test_a_file_that_cannot_be_set_aside_is_not_replaced(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], call: str, path: str
) -> None:
    daemon = start_daemon(run, faults)
    first = saver()
    assert first.save(1).committed
    first.ends()
    daemon.ends()
    start_daemon(run, faults, **TWICE)
    before = contents(run)
    second = saver()
    faults.set(Fault(call, path, code="EACCES"))
    assert second.save(1).code == "EACCES"
    assert contents(run) == before
    assert run.partials() == []
    faults.clear()
    assert second.save(1).committed
    assert contents(run) != before


def test_what_cannot_be_deleted_is_deleted_later(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    start_daemon(run, faults)
    trainer = saver()
    for step in (1, 2):
        assert trainer.save(step).committed
    settle(run, 2)
    faults.set(Fault("unlink", r"\.pt$", code="EACCES"))
    for step in (3, 4):
        assert trainer.save(step).committed
        wait_for(lambda step=step: told(run, "EACCES", step), "the status tells")  # type: ignore[misc]
    assert "deleting an old checkpoint failed" in told(run, "EACCES", 4)[-1].message
    assert len(run.files()) == 4
    faults.clear()
    assert trainer.save(5).committed
    settle(run, 5)
    assert run.files() == [name_of(4), name_of(5)]


@pytest.mark.parametrize(
    ("call", "path", "deleted"),
    [
        ("listdir", "checkpoint_0$", False),
        ("open", r"step_3_epoch_0\.pt$", False),
        ("open", r"checkpoint_0/\.$", False),
        ("fsync", "checkpoint_0$", True),
    ],
    ids=["list", "read", "lock", "sync"],
)
def test_retention_that_fails_is_made_up_for(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], call: str, path: str, deleted: bool
) -> None:
    start_daemon(run, faults)
    trainer = saver()
    for step in (1, 2):
        assert trainer.save(step).committed
    settle(run, 2)
    faults.set(Fault(call, path, code="EIO", thread="ckpt-prune"))
    assert trainer.save(3).committed
    faults.wait_met()
    faults.clear()
    assert (run.files() == [name_of(2), name_of(3)]) == deleted
    wait_for(lambda: len(errors(run)) == 1, "the status tells")
    assert trainer.save(4).committed
    settle(run, 4)
    assert run.files() == [name_of(3), name_of(4)]


def test_a_temporary_file_that_cannot_be_removed_goes_with_the_next_save(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    start_daemon(run, faults, **TWICE)
    trainer = saver()
    assert trainer.save(1).committed
    faults.set(Fault("fsync", r"\.partial$", code="EIO"), Fault("unlink", r"\.partial$", code="EIO"))
    assert trainer.save(2).code == "EIO"
    assert len(run.partials()) == 2, "one for each try"
    faults.clear()
    assert trainer.save(3).committed
    assert run.partials() == []


def test_a_sweep_that_fails_costs_space_only(run: RunDirectory, faults: Faults, saver: Callable[..., Saver]) -> None:
    dead = naming.partial(name_of(9), attempt=1, sequence=9, host=host_name(os.environ), token="00000000")
    (run.root / "checkpoint_0").mkdir(parents=True)
    (run.root / "checkpoint_0" / dead).write_bytes(b"half")
    daemon = start_daemon(run, faults)
    faults.set(Fault("unlink", r"\.partial$", code="EIO"))
    trainer = saver()
    for step in (1, 2, 3):
        assert trainer.save(step).committed
    assert [path.name for path in run.partials()] == [dead]
    trainer.ends()
    daemon.ends()
    faults.clear()
    start_daemon(run, faults)
    assert saver().save(4).committed
    assert run.partials() == []
