"""How a training may end: its last write is waited for, a loss is in the exit code, and Ctrl-C breaks nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from support.processes import PRELUDE, RunDirectory, Trainer, wait_for

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(1 << 20)}

FAILS = """
import resource
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def make_failing(root):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))  # the daemon inherits it
    checkpointer = Checkpointer(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return checkpointer
"""


INTERRUPT = """
import os, signal, sys, threading, time
def interrupt_the_wait():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "wait":
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
def interrupt_soon():
    threading.Thread(target=interrupt_the_wait).start()
"""
"""Ctrl-C as soon as the main thread waits for something: not before, when it would prove nothing."""


def finished(run: RunDirectory, *names: str) -> None:
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert run.files("*") == list(names)


# --- the exit code ----------------------------------------------------------------------------------------------------


def test_the_loss_of_one_session_costs_no_other_and_none_of_what_a_script_does_at_its_end(run: RunDirectory) -> None:
    other = RunDirectory(run.root.parent / "other")
    trainer = run.trainer(
        FAILS
        + f"""
import atexit
atexit.register(say, "tidied")
good = Checkpointer({str(other.root)!r})
bad = make_failing(root)
good.save(1, state=state(1, megabytes=4))
bad.save(1, state=state(1, megabytes=8))
""",
    )
    out, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 1
    assert "tidied" in out
    assert "ckpt-service: the last save was lost: writing step 1 failed: File too large" in errors
    other.status()
    finished(other, "ckpt_step_1_epoch_0.pt")
    finished(run)


def test_an_exception_of_the_training_is_printed_beside_a_lost_save(run: RunDirectory) -> None:
    trainer = run.trainer(FAILS + "make_failing(root).save(1, state=state(1, megabytes=8))\nraise KeyError('mine')\n")
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 1
    assert "KeyError: 'mine'" in errors
    assert "the last save was lost" in errors


CHILDREN = """
import multiprocessing, sys
import torch
from trainer_hooks import Checkpointer

{fails}

def work(root, end):
    if end == "returns":
        Checkpointer(root).save(1, state={{"value": torch.ones(4, 1 << 18)}})
    else:
        make_failing(root).save(1, state={{"value": torch.ones(8, 1 << 18)}})
    if end == "raises":
        raise KeyError("mine")

if __name__ == "__main__":
    method, root, *ends = sys.argv[1:]
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["torch", "trainer_hooks"])
    mine = Checkpointer(root)
    mine.save(0, state={{}})
    children = [context.Process(target=work, args=(f"{{root}}-{{end}}", end)) for end in ends]
    for child in children:
        child.start()
    for child in children:
        child.join()
    mine.save(1, state={{}})
    mine.close()
    print("codes", [child.exitcode for child in children])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_waits_for_its_own_saves(method: str, run: RunDirectory) -> None:
    script = run.root.parent / "children.py"
    script.write_text(CHILDREN.format(fails=FAILS))
    ends = ("returns", "loses", "raises") if method == "fork" else ("returns", "loses")
    trainer = run.interpreter(str(script), method, str(run.root), *ends, **SLOW)
    out, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 0, errors
    assert out == f"codes {[0, 1, 1][: len(ends)]}\n"
    assert ("KeyError: 'mine'" in errors) == ("raises" in ends)
    assert errors.count("the last save was lost") == len(ends) - 1
    assert os.listdir(f"{run.root}-returns/checkpoint_0") == ["ckpt_step_1_epoch_0.pt"], "waited for"
    run.status()
    finished(run, "ckpt_step_0_epoch_0.pt", "ckpt_step_1_epoch_0.pt")


# --- signals to a whole job -------------------------------------------------------------------------------------------


def test_a_group_that_is_told_to_end_with_its_daemon_loses_only_what_is_named(run: RunDirectory) -> None:
    run.root.mkdir()
    socket = run.root.parent / "service.sock"
    job = f"""
{sys.executable} -m ckpt_service run {run.root} --socket {socket} &
echo $! > daemon.pid
{sys.executable} train.py; echo trainer $?
wait $(cat daemon.pid); echo daemon $?
"""
    (run.root.parent / "train.py").write_text(
        f"{PRELUDE}\n"
        + textwrap.dedent(
            f"""
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            while not os.path.exists({str(socket)!r}):
                time.sleep(0.01)
            checkpointer = Checkpointer({str(run.root)!r}, service={str(socket)!r}, slots=3)
            checkpointer.save(1, state=state(1, megabytes=2))
            checkpointer.save(2, state=state(2, megabytes=64)).accepted.result(30)
            Path("ready").touch()
            time.sleep(60)
            """
        )
    )
    env = {**os.environ, **SLOW, "CKPT_SERVICE_GRACE_SECONDS": "1.5", "CKPT_SERVICE_SHARDS_AT_ONCE": "1"}
    env |= {"CKPT_SERVICE_STALL_SECONDS": "2", "CKPT_SERVICE_START_SECONDS": "1"}
    # The shell that stands for the launcher lives on, to tell the exit codes.
    process = subprocess.Popen(
        ["sh", "-c", f"trap : TERM\n{job}"],
        cwd=run.root.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run.trainers.append(Trainer(process))
    wait_for((run.root.parent / "ready").exists, "both are accepted")
    run.status()
    os.killpg(process.pid, signal.SIGTERM)
    began = time.monotonic()
    out, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert "trainer 1" in out, (out, errors)
    assert "the last save was lost" in errors
    assert "step 2" in errors
    finished(run, "ckpt_step_1_epoch_0.pt")
    status = run.status()
    assert status is not None
    assert "step 2 was not written before the daemon had to leave" in [error.message for error in status.errors][-1]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_may_break_off_any_wait_and_the_session_goes_on(run: RunDirectory) -> None:
    trainer = run.trainer(
        INTERRUPT
        + """
checkpointer = Checkpointer(root, slots=1, keep_last=9)
def broken_off(work):
    try:
        interrupt_soon()
        work()
    except KeyboardInterrupt:
        say("broken")
checkpointer.save(1, state=state(1, megabytes=12))
broken_off(lambda: checkpointer.save(2, state=state(2, megabytes=12)))
broken_off(checkpointer.drain)
checkpointer.save(3, state=state(3, megabytes=12))
broken_off(checkpointer.close)
checkpointer.close()
with Checkpointer(root, keep_last=9) as checkpointer:  # the run lock is free
    say("from", checkpointer.resume().step)
    checkpointer.save(4, state=state(4, megabytes=1))
""",
        **SLOW,
    )
    for _ in ("save", "drain", "close"):
        trainer.says("broken")
    assert trainer.says("from") == "3"
    trainer.ends()
    run.status()
    finished(run, *[f"ckpt_step_{step}_epoch_0.pt" for step in (1, 3, 4)])


@pytest.mark.parametrize(
    ("where", "asynchronous"),
    [
        ("saving.capture.stage", True),
        ("saving.capture.finish", True),
        ("client.ServiceClient._post", True),
        ("saving.capture.finish", False),
    ],
)
def test_ctrl_c_inside_a_save_costs_no_slot(where: str, asynchronous: bool, run: RunDirectory) -> None:
    trainer = run.trainer(
        f"""
        import trainer_hooks.client, trainer_hooks.saving
        from trainer_hooks.client import Pending
        checkpointer = Checkpointer(root, slots=2, async_ckpt={asynchronous}, keep_last=9)
        *owner, name = {where!r}.split(".")
        target = trainer_hooks
        for part in owner:
            target = getattr(target, part)
        real = getattr(target, name)
        def interrupted(*args):
            if name == "_post" and not isinstance(args[-1], Pending):
                return real(*args)
            setattr(target, name, real)
            raise KeyboardInterrupt
        for step in range(3):
            setattr(target, name, interrupted)
            try:
                checkpointer.save(step, state=state(step, megabytes=1))
            except KeyboardInterrupt:
                say("broken", step)
            setattr(target, name, real)
        checkpointer.drain(20)
        for step in range(3, 6):
            checkpointer.save(step, state=state(step, megabytes=1)).wait_committed(20)
        checkpointer.close()
        """,
        CKPT_SERVICE_STALL_SECONDS="5",
    )
    assert [trainer.says("broken") for _ in range(3)] == ["0", "1", "2"]
    handed_over = [0, 1, 2] if "_post" in where else []
    trainer.ends()
    run.status()
    assert run.files("*") == [f"ckpt_step_{step}_epoch_0.pt" for step in (*handed_over, 3, 4, 5)]


def test_a_save_that_cannot_be_carried_out_here_costs_no_slot_and_is_no_exception(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import trainer_hooks.saving
        checkpointer = Checkpointer(root, slots=1, async_ckpt=False)
        real = trainer_hooks.saving.writer.commit
        def fails(*args, **kwargs):
            raise RuntimeError("can't start new thread")
        trainer_hooks.saving.writer.commit = fails
        say("lost", checkpointer.save(1, state=state(1, megabytes=1)).committed.exception(0))
        trainer_hooks.saving.writer.commit = real
        warnings.simplefilter("ignore")
        checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(0)
        checkpointer.close()
        """
    )
    assert trainer.says("lost") == "step 1 was not saved: can't start new thread"
    trainer.ends()
    assert run.files("*") == ["ckpt_step_2_epoch_0.pt"]


# --- interpreters and threads -----------------------------------------------------------------------------------------


def test_a_session_typed_into_a_prompt(run: RunDirectory) -> None:
    (run.root.parent / "interrupts.py").write_text(INTERRUPT)
    trainer = run.interpreter("-c", "import code; code.interact()", **SLOW)
    typed = f"""
from trainer_hooks import Checkpointer
import interrupts, torch
checkpointer = Checkpointer({str(run.root)!r}, slots=1)
ticket = checkpointer.save(1, state={{"value": torch.ones(24, 1 << 18)}})
interrupts.interrupt_soon(); checkpointer.save(2, state={{"value": torch.ones(24, 1 << 18)}})
ticket = checkpointer.save(3, state={{"value": torch.ones(1, 1 << 18)}})
"""
    _, errors = trainer.process.communicate(typed.lstrip(), timeout=60)
    assert trainer.process.returncode == 0, errors
    assert "KeyboardInterrupt" in errors
    run.status()
    finished(run, "ckpt_step_1_epoch_0.pt", "ckpt_step_3_epoch_0.pt")


def test_a_session_in_a_thread(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import threading
        def train():
            global checkpointer
            checkpointer = Checkpointer(root)
            checkpointer.save(1, state=state(1, megabytes=4))
        thread = threading.Thread(target=train)
        thread.start()
        """,
        **SLOW,
    )
    trainer.ends()
    run.status()
    finished(run, "ckpt_step_1_epoch_0.pt")
