"""The life of the daemon: where it runs, when it stays, when it leaves, and who brings it back."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import textwrap
import time
from pathlib import Path

import pytest
from support.processes import PRELUDE, RunDirectory, Trainer, daemons_of, wait_for

from ckpt_service.ownership import host_name
from trainer_hooks import Checkpointer

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20)}
LEAVES_SOON = {"CKPT_SERVICE_LINGER_SECONDS": "0.3"}

WAITS = """
checkpointer = Checkpointer(root)
say("started")
hear("end")
checkpointer.close()
say("closed")
hear("exit")
"""

OWN = ("socket:", "anon_inode:[eventpoll]", "anon_inode:[pidfd]")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_daemon_has_nothing_of_the_trainer(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        os.set_inheritable(os.open("/etc/hostname", os.O_RDONLY), True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        """
        + WAITS.replace("\n", "\n        ")
    )
    trainer.says("started")
    pid = run.daemon().pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert os.getsid(pid) != os.getsid(trainer.pid)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[4] == "0", "no terminal"
    assert fields[1] != str(trainer.pid), "not our child"
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    service = run.root / ".ckpt_service"
    host = host_name(os.environ)
    known = {"/dev/null", str(service / f"daemon.{host}.log"), str(service / f"daemon.{host}.lock")}

    def strange() -> list[str]:
        found = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(entry))
        return [
            t
            for t in found
            if t not in known and not t.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[pidfd]"))
        ]

    wait_for(lambda: not strange(), f"it has only its own, apart from what it is just publishing: {strange()}", 5)
    socket = Path(run.daemon().socket)
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    trainer.hears("end")
    trainer.says("closed")
    began = time.monotonic()
    wait_for(run.daemon_has_left, "the daemon leaves at once, although the trainer lives on", 5)
    assert time.monotonic() - began < 5
    trainer.hears("exit")
    trainer.ends()


def test_the_signals_of_a_job_do_not_reach_the_daemon(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=24)).accepted.result(30)
        say("accepted")
        time.sleep(60)
        """,
        **SLOW,
        **LEAVES_SOON,
    )
    trainer.says("accepted")
    pid = run.daemon().pid
    os.killpg(trainer.pid, signal.SIGTERM)
    trainer.process.wait(30)
    assert is_alive(pid)
    wait_for(lambda: run.files() == ["ckpt_step_1_epoch_0.pt"], "what was accepted is committed")
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_it_lingers_for_a_trainer_that_was_lost_and_serves_the_next(run: RunDirectory) -> None:
    first = run.trainer(WAITS, CKPT_SERVICE_LINGER_SECONDS="3")
    first.says("started")
    pid = run.daemon().pid
    first.kill()
    wait_for(lambda: (status := run.status()) and status.queue.capacity == 0, "the loss is noticed", 3)
    assert is_alive(pid)
    second = run.trainer(WAITS)
    second.says("started")
    assert run.daemon().pid == pid
    second.kill()
    wait_for(run.daemon_has_left, "it leaves when nobody comes", 15)
    assert run.daemon().state == "stopped"


def test_a_second_daemon_is_refused_naming_the_first(run: RunDirectory) -> None:
    trainer = run.trainer(WAITS)
    trainer.says("started")
    daemon = run.daemon()
    done = run.cli("run", str(run.root))
    assert done.returncode == 1
    assert f"host {os.uname().nodename}, pid {daemon.pid}, socket {daemon.socket}" in done.stderr
    assert "Traceback" not in done.stderr
    assert Path(daemon.socket).exists(), "the first one's socket is not touched"
    trainer.hears("end")
    trainer.says("closed")


def test_trainers_of_different_roots_have_different_daemons(run: RunDirectory) -> None:
    other = RunDirectory(run.root.parent / "other")
    try:
        trainers = [run.trainer(WAITS), other.trainer(WAITS)]
        for trainer in trainers:
            trainer.says("started")
        assert run.daemon().pid != other.daemon().pid
        assert (len(daemons_of(run.root)), len(daemons_of(other.root))) == (1, 1)
        for trainer in trainers:
            trainer.hears("end")
            trainer.says("closed")
        wait_for(run.daemon_has_left, "one leaves")
        wait_for(other.daemon_has_left, "the other one leaves")
    finally:
        other.clean_up()


def test_one_process_may_have_several_sessions(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        for session in range(3):
            with Checkpointer(root) as checkpointer:
                point = checkpointer.resume()
                say("from", point and point.step)
                checkpointer.save(session, state=state(session, megabytes=1))
        """
    )
    assert [trainer.says("from") for _ in range(3)] == ["None", "0", "1"]
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]


def test_a_forked_child_neither_keeps_the_daemon_nor_breaks_the_parent(run: RunDirectory) -> None:
    script = textwrap.dedent(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1))
        if os.fork() == 0:
            sys.exit(0)  # with all that an interpreter does at its end
        assert os.wait()[1] == 0
        sleeper = os.fork()
        if sleeper == 0:
            try:
                checkpointer.save(9, state=state(9, megabytes=1))
            except ValueError as error:
                Path("child.new").write_text(str(error))  # its output is its parent's
                os.rename("child.new", "child")
            time.sleep(60)
            os._exit(0)
        say("sleeper", sleeper)
        hear("go")
        say("committed", checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(30))
        time.sleep(60)
        """
    )
    # A fresh interpreter, not one forked from a process that has run much else: its end is what is looked at.
    trainer = run.interpreter("-c", f"{PRELUDE}\nroot = {str(run.root)!r}\n{script}", **LEAVES_SOON)
    sleeper = int(trainer.says("sleeper"))
    try:
        told = run.root.parent / "child"
        wait_for(told.exists, "the child is told that this is not its own")
        assert "make one after the fork" in told.read_text()
        trainer.hears("go")
        trainer.says("committed")
        run.status()
        trainer.kill()
        wait_for(run.daemon_has_left, "the daemon notices the death behind the child's back", 10)
        assert is_alive(sleeper)
    finally:
        os.kill(sleeper, signal.SIGKILL)
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_daemon_that_is_told_to_leave_finishes_and_another_one_comes(
    run: RunDirectory, number: signal.Signals
) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        ticket = checkpointer.save(1, state=state(1, megabytes=12))
        ticket.accepted.result(30)
        say("accepted")
        say("committed", ticket.wait_committed(60))
        hear("more")
        checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(60)
        checkpointer.close()
        """,
        **SLOW,
        CKPT_SERVICE_GRACE_SECONDS="1.8",
    )
    trainer.says("accepted")
    first = run.signal_daemon(number)
    wait_for(lambda: run.daemon().state == "draining" or not is_alive(first), "the status says so", 5)
    os.kill(first, number)  # twice in a row, as impatient people do
    trainer.says("committed")
    assert is_alive(first), "the one that was told has written it"
    wait_for(lambda: not is_alive(first), "it leaves within its grace")
    trainer.hears("more")
    trainer.ends()
    assert run.daemon().pid != first
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]


def test_what_does_not_fit_into_the_grace_is_handed_to_the_next_daemon(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        ticket = checkpointer.save(1, state=state(1, megabytes=32))
        ticket.accepted.result(30)
        say("accepted")
        say("committed", ticket.wait_committed(60))
        checkpointer.close()
        """,
        **SLOW,
        CKPT_SERVICE_GRACE_SECONDS="0.5",
    )
    trainer.says("accepted")
    first = run.signal_daemon(signal.SIGTERM)
    wait_for(lambda: not is_alive(first), "it leaves within its grace", 10)
    trainer.says("committed")
    trainer.ends()
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt"]


def test_a_daemon_may_be_killed_again_and_again(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        tickets = [checkpointer.save(step, state=state(step, megabytes=12)) for step in (1, 2)]
        say("saved")
        for ticket in tickets:
            ticket.wait_committed(60)
        checkpointer.close()
        """,
        **SLOW,
    )
    trainer.says("saved")
    seen = set()
    for _ in range(2):

        def is_new() -> bool:
            status = run.status()
            return status is not None and status.daemon.pid not in seen and bool(status.writing)

        wait_for(is_new, "a new daemon writes")
        seen.add(run.signal_daemon(signal.SIGKILL))
    trainer.ends()
    assert len(seen) == 2
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]


SCRIPT = """
import os
with open(os.environ["COUNT"], "a") as file:
    file.write("ran\\n")
import torch
from trainer_hooks import Checkpointer
checkpointer = Checkpointer(os.environ["ROOT"])
checkpointer.save(1, state={"value": torch.ones(10)})
"""


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_script_without_a_guard_runs_once(run: RunDirectory, way: str) -> None:
    count, script = run.root.parent / "count", run.root.parent / "script.py"
    script.write_text(SCRIPT)
    trainer = run.interpreter(str(script) if way == "file" else "-", COUNT=str(count), ROOT=str(run.root))
    out, errors = trainer.process.communicate(SCRIPT if way == "stdin" else None, timeout=60)
    assert (trainer.process.returncode, out, errors) == (0, "", "")
    assert count.read_text() == "ran\n"
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt"]
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_a_long_temporary_directory_is_no_obstacle(run: RunDirectory) -> None:
    long = run.root.parent / ("t" * 120)
    long.mkdir()
    script = run.root.parent / "script.py"
    script.write_text(SCRIPT)
    env = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": "", "COUNT": os.devnull, "ROOT": str(run.root)}
    run.interpreter(str(script), **env).ends()
    assert len(os.fsencode(run.daemon().socket)) <= 107
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt"]
    wait_for(run.daemon_has_left, "the daemon leaves")


def test_any_name_will_do_for_a_root(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a b%20[c]*?{d} 한국어 🚀 '\"$x")
    try:
        trainer = run.trainer(
            """
            with Checkpointer(root) as checkpointer:
                say("path", checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(30))
                say("from", checkpointer.resume().step)
            """
        )
        assert trainer.says("path") == str(run.root / "checkpoint_0" / "ckpt_step_1_epoch_0.pt")
        assert trainer.says("from") == "1"
        trainer.ends()
        done = run.cli("latest", "--path", str(run.root))
        assert done.stdout == f"{run.root}/checkpoint_0/ckpt_step_1_epoch_0.pt\n"
        wait_for(run.daemon_has_left, "the daemon leaves")
    finally:
        run.clean_up()


# --- an external service ----------------------------------------------------------------------------------------------


class External:
    """A daemon that somebody starts and stops by hand."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.socket = run.root.parent / "service.sock"
        self.daemon: Trainer | None = None

    def start(self, **env: str) -> int:
        self.socket.unlink(missing_ok=True)
        self.run.root.mkdir(exist_ok=True)
        command = ("-m", "ckpt_service", "run", str(self.run.root), "--socket", str(self.socket))
        self.daemon = self.run.interpreter(*command, **env)
        wait_for(self.socket.exists, "it listens")
        return self.daemon.pid

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()

    def stop(self) -> None:
        assert self.daemon is not None
        os.kill(self.daemon.pid, signal.SIGTERM)
        self.daemon.ends()


@pytest.fixture
def external(run: RunDirectory) -> External:
    return External(run)


def test_an_external_service_may_be_restarted_by_hand(run: RunDirectory, external: External) -> None:
    external.start(**SLOW)
    trainer = run.trainer(
        f"""
        checkpointer = Checkpointer(root, service={str(external.socket)!r})
        ticket = checkpointer.save(1, state=state(1, megabytes=24))
        ticket.accepted.result(30)
        say("accepted")
        hear("save")
        second = checkpointer.save(2, state=state(2, megabytes=1))  # with nobody there to take it
        say("pending", ticket.committed.done(), second.accepted.done())
        ticket.wait_committed(60)
        second.wait_committed(60)
        checkpointer.close()
        """
    )
    trainer.says("accepted")
    external.kill()
    trainer.hears("save")
    assert trainer.says("pending") == "False False"
    assert daemons_of(run.root) == [], "nobody but its owner starts an external service"
    external.start()
    trainer.ends()
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]
    assert external.daemon is not None
    assert is_alive(external.daemon.pid), "it stays when its trainers have left"
    external.stop()
    assert run.daemon().state == "stopped"


def test_saving_to_a_service_that_is_dead_never_raises(run: RunDirectory, external: External) -> None:
    external.start()
    trainer = run.trainer(
        f"""
        checkpointer = Checkpointer(root, service={str(external.socket)!r}, slots=2)
        say("started")
        hear("save")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tickets = [checkpointer.save(step, state=state(step, megabytes=1)) for step in range(4)]
        say("lost", [type(t.committed.exception(0)).__name__ for t in tickets if t.committed.done()])
        say("warned", len(caught))
        try:
            checkpointer.close()
        except Exception as error:
            say("raised", type(error).__name__)
        """,
        CKPT_SERVICE_STALL_SECONDS="0.5",
        CKPT_SERVICE_NOTICE_SECONDS="0.5",
    )
    trainer.says("started")
    external.kill()
    trainer.hears("save")
    assert trainer.says("lost") == "['SaveFailed', 'SaveFailed']"
    assert trainer.says("warned") == "1"
    assert trainer.says("raised") == "SaveFailed"
    trainer.ends()


def test_an_external_service_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SERVICE_START_SECONDS", "0.2")
    with pytest.raises(Exception, match=r"no daemon answered within 0\.2 s: .*nowhere\.sock.*start it") as caught:
        Checkpointer(tmp_path / "run", service=tmp_path / "nowhere.sock")
    assert type(caught.value).__name__ == "ServiceUnavailable"


def test_a_socket_that_cannot_be_made_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    for socket in (tmp_path / "missing" / "s", tmp_path / ("s" * 120)):
        done = run.cli("run", str(run.root), "--socket", str(socket))
        assert done.returncode == 1
        assert str(socket) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_failed_save_is_told_three_times(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
        checkpointer = Checkpointer(root)  # its daemon inherits the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        say("lost", checkpointer.save(1, state=state(1, megabytes=8)).committed.exception(60))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            small = checkpointer.save(2, state=state(2, megabytes=1))
        say("warned", len(caught), caught[0].message)
        say("committed", small.wait_committed(60))
        checkpointer.save(3, state=state(3, megabytes=8))
        try:
            checkpointer.close()
        except Exception as error:
            say("raised", type(error).__name__, error)
        """
    )
    assert trainer.says("lost").startswith("writing step 1 failed: File too large")
    daemon = run.daemon().pid
    assert "step 1" in trainer.says("warned")
    trainer.says("committed")
    assert trainer.says("raised").startswith("SaveFailed writing step 3 failed")
    trainer.ends()
    assert run.files("*") == ["ckpt_step_2_epoch_0.pt"]
    assert run.daemon().pid == daemon, "a failed write is no reason to die"
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert run.cli("status", str(run.root)).returncode == 3, "it left as it should; the last save failed"
    assert "CRITICAL" not in next((run.root / ".ckpt_service").glob("daemon.*.log")).read_text()


def test_a_save_that_fails_in_the_trainer_is_in_the_status(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state={}).wait_committed(60)
        os.rename(root + "/checkpoint_0", root + "/moved")
        Path(root, "checkpoint_0").write_text("in the way")
        ticket = checkpointer.save(2, state={})
        say("failed", ticket.committed.exception(60))
        hear("mend")
        os.unlink(root + "/checkpoint_0")
        say("path", checkpointer.save(3, state={}).wait_committed(60))
        checkpointer.close()
        """
    )
    assert "checkpoint_0" in trainer.says("failed")
    wait_for(lambda: run.cli("status", str(run.root)).returncode == 3, "the status says so")
    status = run.status()
    assert status is not None
    assert (status.totals.failed, status.errors[-1].step) == (1, 2)
    trainer.hears("mend")
    trainer.says("path")
    trainer.ends()
    assert run.cli("status", str(run.root)).returncode == 0


def test_a_killed_daemon_is_called_dead_at_once_on_its_own_host(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        say("started")
        time.sleep(60)
        """
    )
    trainer.says("started")
    assert run.cli("status", str(run.root)).returncode == 0
    pid = run.daemon().pid
    trainer.kill()
    run.signal_daemon(signal.SIGKILL)
    wait_for(run.daemon_has_left, "it is gone")
    done = run.cli("status", str(run.root))
    assert done.returncode == 4
    assert f"DEAD, it left no word (pid {pid})" in done.stdout


def test_a_daemon_that_drains_does_not_wait_for_a_trainer_beyond_its_grace(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        say("started")
        hear("end")
        os._exit(0)
        """,
        CKPT_SERVICE_GRACE_SECONDS="0.5",
    )
    trainer.says("started")
    pid = run.signal_daemon(signal.SIGTERM)
    wait_for(lambda: run.daemon().pid != pid, "the trainer, which lives on, has another daemon")
    log = run.root / ".ckpt_service" / f"daemon.{host_name(os.environ)}.log"
    assert "left, with 0 snapshots not written" in log.read_text()
    assert "Traceback" not in log.read_text()
    trainer.hears("end")
    trainer.ends()
