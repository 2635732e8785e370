"""What fails beside the file of a save: the status, the records around it, and what the trainer itself does."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
from support.faults import (
    FAULTY,
    TWICE,
    Fault,
    Faults,
    Saver,
    contents,
    copy_of_the_status,
    errors,
    name_of,
    settle,
    start_daemon,
    told,
)
from support.processes import OBEY, RunDirectory, wait_for


def litter(run: RunDirectory) -> list[str]:
    """Return the temporary files of everything that is not a checkpoint."""
    return [path.name for path in (run.root / ".ckpt_service").rglob(".*")]


# --- the status -------------------------------------------------------------------------------------------------------

STATUS_WRITES = {
    "open": r"\.status.*\.new$",
    "write": r"\.status.*\.new$",
    "fsync": r"\.status.*\.new$",
    "rename": r"\.new -> .*status.*\.json$",
}


@pytest.mark.parametrize("call", STATUS_WRITES)
@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_a_status_that_cannot_be_written_stops_nothing(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], call: str, code: str
) -> None:
    start_daemon(run, faults)
    trainer = saver()
    faults.set(Fault(call, f"{run.root}.*{STATUS_WRITES[call]}", code=code))
    for step in range(4):
        assert trainer.save(step).committed
    wait_for(lambda: run.files() == [name_of(2), name_of(3)], "retention goes on")
    wait_for(lambda: copy_of_the_status(run).totals.committed == 4, "the copy beside the socket goes on")
    entry = copy_of_the_status(run).errors[-1]
    assert entry.code == code
    assert "writing the status failed" in entry.message
    assert str(run.root) in entry.message
    faults.clear()
    settle(run, 4)
    assert [error.code for error in errors(run)] == [code], "said once"
    assert litter(run) == []


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_fails_the_save_only(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    trainer = saver(faulty=True)
    for code in ("ENOSPC", "EACCES", "EROFS"):
        faults.set(Fault("mkdir", "checkpoint_0$", code=code))
        failed = trainer.save(1)
        assert (failed.kind, failed.code, failed.step) == ("SaveFailed", code, 1)
        assert failed.hint is not None
        wait_for(lambda code=code: told(run, code, 1), "the status tells")  # type: ignore[misc]
    faults.set(Fault("mkdir", "checkpoint_0$", code="EMFILE", times=1))
    assert trainer.save(2).committed, "what may pass is tried again"
    trainer.ends()


@pytest.mark.parametrize(
    "place",
    [
        ("pwrite", r"\.partial$"),
        ("rename", r"\.partial"),
        ("fsync", "checkpoint_0$"),
    ],
    ids=" ".join,
)
def test_without_a_daemon_the_same_holds(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], place: tuple[str, str]
) -> None:
    trainer = saver(faulty=True, synchronous=True)
    assert trainer.save(1).committed
    for step, code in ((10, "ENOSPC"), (20, "EIO"), (30, "EROFS")):
        before = contents(run)
        faults.set(Fault(*place, code=code))
        failed = trainer.save(step)
        faults.clear()
        assert (failed.kind, failed.code, failed.step) == ("SaveFailed", code, step)
        assert ("bytes needed" in failed.message) == (code == "ENOSPC")
        left = contents(run)
        assert left.pop(name_of(step), b"") == b"" or place == ("fsync", "checkpoint_0$")
        assert left == before
        assert run.partials() == []
        good = trainer.save(step + 1)
        assert good.committed
        assert f"step {step} failed" in good.warned[0]
    assert name_of(31) in run.files()
    assert len(run.files()) == 2
    trainer.ends()


def test_without_a_daemon_a_deletion_that_fails_is_a_warning(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    trainer = saver(faulty=True, synchronous=True)
    for step in (1, 2):
        assert trainer.save(step).committed
    faults.set(Fault("unlink", r"\.pt$", code="EACCES"))
    late = trainer.save(3)
    assert late.committed
    assert "deleting an old checkpoint failed" in late.warned[0]
    faults.clear()
    assert trainer.save(4).committed
    assert run.files() == [name_of(3), name_of(4)]
    trainer.ends()


ATTEMPT = r"""
def start():
    try:
        checkpointer = Checkpointer(root)
    except Exception as error:
        say("raised", type(error).__name__, getattr(error, "code", None), error)
        return None
    say("attempt", checkpointer._run.attempt.n)
    return checkpointer
"""


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("open", r"attempts/\.1\.json.*new$"),
        ("fsync", r"attempts/\.1\.json.*new$"),
        ("link", r"attempts/1\.json$"),
        ("open", r"run\.lock$"),
        ("thread", r"ckpt-run-lock"),
    ],
)
def test_a_start_that_fails_can_be_tried_again(run: RunDirectory, faults: Faults, call: str, path: str) -> None:
    faults.set(Fault(call, path, code="ENOSPC"))
    trainer = run.trainer(FAULTY + ATTEMPT + OBEY, **faults.env)
    trainer.hears("checkpointer = start()")
    kind, code, message = trainer.says("raised").split(maxsplit=2)
    assert kind == "CkptError"
    assert (code, "can't start new thread" in message) == (("None", True) if call == "thread" else ("ENOSPC", False))
    faults.clear()
    trainer.hears("checkpointer = start()")
    trainer.says("attempt")
    trainer.hears("checkpointer.save(1, state=state(1, 1)); checkpointer.close()")
    trainer.ends()
    assert run.files() == [name_of(1)]
    assert litter(run) == []


def test_without_a_daemon_an_attempt_that_cannot_begin_fails_the_save_only(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    trainer = saver(faulty=True, synchronous=True)
    for path in (r"attempts/\.1\.json", r"run\.lock"):
        faults.set(Fault("open", path, code="ENOSPC"))
        failed = trainer.save(1)
        assert (failed.kind, failed.code, failed.step) == ("SaveFailed", "ENOSPC", 1)
    faults.clear()
    assert trainer.save(2).committed
    trainer.ends()


def test_a_resume_that_cannot_be_written_down_has_not_happened(run: RunDirectory, faults: Faults) -> None:
    body = """
    model = torch.nn.Linear(2, 2)
    def fresh():
        made = Checkpointer(root)
        made.track(model=model)
        return made
    def resume():
        try:
            point = checkpointer.resume()
        except Exception as error:
            say("raised", type(error).__name__, error.code, float(model.bias.sum()))
        else:
            say("resumed", point.step, float(model.bias.sum()))
    def fill(value):
        torch.nn.init.constant_(model.bias, value)
    """
    trainer = run.trainer(FAULTY + textwrap.dedent(body) + OBEY, **faults.env)
    trainer.hears("fill(1); checkpointer = fresh(); checkpointer.save(1); checkpointer.close()")
    trainer.hears("fill(5); checkpointer = fresh(); say('ready')")
    trainer.says("ready")
    faults.set(Fault("rename", r"attempts/2\.json$", code="EIO"))
    trainer.hears("resume()")
    assert trainer.says("raised") == "CkptError EIO 10.0"
    faults.clear()
    trainer.hears("resume()")
    assert trainer.says("resumed") == "1 2.0"
    trainer.hears("checkpointer.close()")
    trainer.ends()
    assert litter(run) == []


def test_a_trainer_short_of_descriptors_loses_only_that_save(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    trainer = saver(CKPT_SERVICE_STALL_SECONDS="20")
    assert trainer.save(1).committed
    trainer.trainer.hears(
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "checkpointer._saver._pool._free.clear(); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, hard))"
    )
    failed = trainer.save(2)
    assert (failed.kind, failed.code) == ("SaveFailed", "EMFILE")
    assert "ulimit -n" in str(failed.hint)
    wait_for(lambda: any(error.code == "EMFILE" for error in errors(run)), "the status tells")
    trainer.trainer.hears("resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))")
    good = trainer.save(3)
    assert good.committed
    assert "EMFILE" in good.warned[0] or "open files" in good.warned[0]
    trainer.ends()


def test_a_trainer_short_of_memory_loses_only_that_save(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    trainer = saver()
    assert trainer.save(1).committed
    trainer.trainer.hears(
        "import resource; small, large = resource.getrlimit(resource.RLIMIT_AS); small_state = state; "
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096; kept = small_state(2, 512); "
        "state = lambda *_: kept; resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), large))"
    )
    failed = trainer.save(2)
    assert (failed.kind, failed.code) == ("SaveFailed", "ENOMEM")
    wait_for(lambda: told(run, "ENOMEM", 2), "the status tells")
    trainer.trainer.hears("resource.setrlimit(resource.RLIMIT_AS, (large, large)); state = small_state")
    assert trainer.save(3).committed
    trainer.ends()


@pytest.mark.parametrize("where", ["planned", "copied"])
def test_memory_that_runs_out_in_the_middle_of_a_save_is_a_failed_save(
    run: RunDirectory, saver: Callable[..., Saver], where: str
) -> None:
    target = {"planned": "trainer_hooks.layout.plan", "copied": "trainer_hooks.capture.stage"}[where]
    module, _, name = target.rpartition(".")
    trainer = saver()
    assert trainer.save(1).committed
    trainer.trainer.hears(f"import {module} as module; kept = module.{name}")
    trainer.trainer.hears("def hungry(*_): raise MemoryError")
    trainer.trainer.hears(f"module.{name} = hungry")
    failed = trainer.save(2)
    assert (failed.kind, failed.code, failed.step) == ("SaveFailed", "ENOMEM", 2)
    wait_for(lambda: told(run, "ENOMEM", 2), "the status tells")
    trainer.trainer.hears(f"module.{name} = kept")
    for step in range(3, 7):
        assert trainer.save(step).committed, "its slot is free again"
    trainer.ends()


# --- what several things at once do -----------------------------------------------------------------------------------


def test_a_full_disk_fails_everything_at_once_and_then_nothing(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    start_daemon(run, faults, **TWICE)
    trainer = saver()
    for step in (1, 2):
        assert trainer.save(step).committed
    settle(run, 2)
    before = contents(run)
    here = str(run.root)
    faults.set(*(Fault(call, here, code="ENOSPC") for call in ("open", "write", "pwrite", "mkdir", "rename", "fsync")))
    for step in (3, 4):
        assert trainer.save(step).code == "ENOSPC"
    wait_for(lambda: [e for e in copy_of_the_status(run).errors if e.step == 4], "the copy tells")
    assert contents(run) == before
    faults.clear()
    assert trainer.save(5).committed
    settle(run, 3)
    assert run.files() == [name_of(2), name_of(5)]
    assert (run.partials(), litter(run)) == ([], [])
