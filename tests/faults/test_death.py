"""The daemon dies at bad moments: while it starts, in each step of its work, and in each call of the trainer."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.processes import RunDirectory, wait_for

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(1 << 20)}

DIES_AT = """
import os, signal, sys
def once(module, name):
    import importlib
    owner = importlib.import_module(module)
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    name = name.split(".")[-1]
    real = getattr(owner, name)
    def dies(*args, **kwargs):
        try:
            os.unlink(os.environ["DEATH"])
        except FileNotFoundError:
            return real(*args, **kwargs)
        if os.environ["WHEN"] == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dies)
if sys.argv[0] == "-m" and os.environ.get("WHERE"):
    once(*os.environ["WHERE"].split(":"))
"""
"""A ``sitecustomize`` for the daemon: it is killed once, when it comes to a function of its own."""


def dying(run: RunDirectory, where: str, when: str = "before") -> dict[str, str]:
    """Return an environment in which the next daemon is killed ``when`` it calls ``where``; only that one."""
    home = run.root.parent / "dying"
    home.mkdir(exist_ok=True)
    (home / "sitecustomize.py").write_text(DIES_AT)
    death = home / "death"
    death.touch()
    return {"PYTHONPATH": str(home), "WHERE": where, "WHEN": when, "DEATH": str(death)}


def has_died(run: RunDirectory) -> bool:
    return not (run.root.parent / "dying" / "death").exists()


AT_START = {
    "its lock is taken": ("ckpt_service.ownership:DaemonLock.acquire", "after"),
    "it listens": ("ckpt_service.daemon:listen", "after"),
    "it looks around": ("ckpt_service.server:load_catalog", "before"),
}
AT_WORK = {
    "it has read the hello": ("ckpt_service.server:Server._on_hello", "before"),
    "it has said welcome": ("ckpt_service.server:Server._on_hello", "after"),
    "it is offered a snapshot": ("ckpt_service.workshop:intake.take", "before"),
    "it sweeps": ("ckpt_service.committer:sweep", "before"),
    "it has swept": ("ckpt_service.committer:sweep", "after"),
    "it has renamed": ("ckpt_service.writer:_rename", "after"),
    "it has committed": ("ckpt_service.workshop:Workshop._on_committed", "before"),
    "it prunes": ("ckpt_service.retainer:Pruner.retain", "before"),
}

SAVES = """
checkpointer = Checkpointer(root, keep_last=2)
tickets = [checkpointer.save(step, state=state(step, megabytes=1)) for step in (1, 2)]
say("committed", *[ticket.wait_committed(30).name for ticket in tickets])
checkpointer.close()
"""


@pytest.mark.parametrize("place", [*AT_START.values(), *AT_WORK.values()], ids=[*AT_START, *AT_WORK])
def test_a_daemon_that_is_killed_when(place: tuple[str, str], run: RunDirectory) -> None:
    """...is replaced, also by one that dies in turn, and each snapshot is one file."""
    trainer = run.trainer(SAVES, **dying(run, *place))
    names = ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]
    assert trainer.says("committed").split() == names
    trainer.ends()
    assert has_died(run)
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert run.files("*") == names


def test_a_daemon_may_be_killed_during_each_call_of_the_trainer(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root, slots=1, keep_last=9)
        for name, work in {
            "save": lambda: checkpointer.save(2, state=state(2, megabytes=6)),
            "drain": checkpointer.drain,
            "resume": lambda: say("from", checkpointer.resume().step),
            "close": checkpointer.close,
        }.items():
            if name != "drain":
                checkpointer.save(1 if name == "save" else 3, state=state(3, megabytes=6))
            say("calls", name)
            began = time.monotonic()
            work()
            say("took", time.monotonic() - began)
        """,
        **SLOW,
    )
    seen: set[int] = set()

    def writes_anew() -> bool:
        status = run.status()
        return status is not None and status.daemon.pid not in seen and run.being_written()

    for call in ("save", "drain", "resume", "close"):
        assert trainer.says("calls") == call
        wait_for(writes_anew, "a daemon writes that was not killed yet")
        seen.add(run.signal_daemon(signal.SIGKILL))
        if call == "resume":
            assert trainer.says("from") == "3"
        assert float(trainer.says("took")) < 20
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert len(seen) == 4
    assert run.files("*") == [f"ckpt_step_{step}_epoch_0.pt" for step in (1, 2, 3)]


def test_a_dead_daemon_is_known_and_replaced_at_once_although_nothing_is_saved(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        say("started")
        hear("end")
        checkpointer.close()
        """
    )
    trainer.says("started")
    first = run.signal_daemon(signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: run.daemon().pid != first, "another one")
    assert time.monotonic() - began < 3 + 15, "3 s to know it, and what a start may take on a busy machine"
    trainer.hears("end")
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_what_was_skipped_while_nobody_was_there_is_told_to_the_next_daemon(run: RunDirectory) -> None:
    socket = run.root.parent / "service.sock"
    run.root.mkdir()
    command = ("-m", "ckpt_service", "run", str(run.root), "--socket", str(socket))
    first = run.interpreter(*command)
    wait_for(socket.exists, "it listens")
    trainer = run.trainer(
        f"""
        checkpointer = Checkpointer(root, service={str(socket)!r}, slots=1, on_full="skip")
        say("started")
        hear("save")
        tickets = [checkpointer.save(step, state=state(step, megabytes=1)) for step in (1, 2, 3)]
        say("fates", [type(t.committed.exception()).__name__ for t in tickets[1:]])
        tickets[0].wait_committed(60)
        try:
            checkpointer.close()
        except Exception as error:
            say("lost", error)
        """
    )
    trainer.says("started")
    first.kill()
    trainer.hears("save")
    assert trainer.says("fates") == "['SnapshotSkipped', 'SnapshotSkipped']"
    second = run.interpreter(*command)
    assert trainer.says("lost").startswith("step 3 was skipped")
    trainer.ends()
    os.kill(second.pid, signal.SIGTERM)
    second.ends()
    status = run.status()
    assert status is not None
    assert (status.totals.committed, status.totals.skipped) == (1, 2)
