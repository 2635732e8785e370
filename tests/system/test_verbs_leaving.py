"""``drain`` and ``stop``: the daemon of this host writes what it holds and leaves, and whoever asked is told."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from support.processes import OBEY, RunDirectory, daemons_of, wait_for

from ckpt_service.records import ServiceStatus

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20)}
ACCEPTED = """
checkpointer = Checkpointer(root)
checkpointer.save(1, state=state(1, megabytes=24)).accepted.result(30)
say("accepted")
"""


def test_drain_writes_all_and_leaves_although_a_trainer_lives(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + OBEY, **SLOW)
    trainer.says("accepted")
    first = run.daemon()
    assert run.files() == []
    done = run.cli("drain", str(run.root))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"pid {first.pid}" in done.stderr
    assert run.files() == ["ckpt_step_1_epoch_0.pt"]
    assert first.pid not in daemons_of(run.root)
    # The trainer has noticed nothing but a new daemon.
    trainer.hears("checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(60); say('saved')")
    trainer.says("saved")
    assert run.daemon().pid != first.pid
    trainer.hears("checkpointer.close(); say('closed')")
    trainer.says("closed")


def test_drain_gives_up_waiting_and_the_daemon_goes_on(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + OBEY, **SLOW)
    trainer.says("accepted")
    pid = run.daemon().pid
    done = run.cli("drain", str(run.root), "--timeout", "0.2")
    assert done.returncode == 7
    assert "step 1" in done.stderr
    wait_for(lambda: pid not in daemons_of(run.root), "it leaves when all is written")
    assert run.files() == ["ckpt_step_1_epoch_0.pt"]
    trainer.kill()


def test_drain_names_what_could_not_be_written(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=24)).accepted.result(30)
        say("accepted")
        hear("end")
        os._exit(0)
        """,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(4 << 20),
        CKPT_SERVICE_CHUNK_BYTES=str(1 << 20),
    )
    trainer.says("accepted")
    pid = run.daemon().pid
    command = [sys.executable, "-m", "ckpt_service", "drain", str(run.root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as draining:
        wait_for(lambda: run.daemon().state == "draining", "it finishes what it has")
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, hard))  # while the file is being written
        _, told = draining.communicate(timeout=60)
    assert draining.returncode == 1, told
    assert "lost: writing step 1 failed" in told
    assert "ulimit -f" in told
    trainer.hears("end")


def test_stop_ends_with_the_grace_time_and_names_what_is_left(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + OBEY, CKPT_SERVICE_GRACE_SECONDS="0.3", **SLOW)
    trainer.says("accepted")
    pid = run.daemon().pid
    done = run.cli("stop", str(run.root))
    assert done.returncode == 1, done.stderr
    assert "lost: step 1 was not written before the daemon had to leave" in done.stderr
    assert pid not in daemons_of(run.root)
    # It is lost only if its trainer is: this one hands it over again.
    wait_for(lambda: run.files() == ["ckpt_step_1_epoch_0.pt"], "another daemon writes it")
    trainer.kill()


def test_stop_waits_for_what_fits_into_the_grace_time(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + "os.kill(os.getpid(), signal.SIGKILL)", **SLOW)
    trainer.says("accepted")
    trainer.process.wait(30)
    done = run.cli("stop", str(run.root))
    assert (done.returncode, run.files()) == (0, ["ckpt_step_1_epoch_0.pt"]), done.stderr
    assert daemons_of(run.root) == []


def test_stop_reaches_a_daemon_whose_socket_is_gone(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + OBEY)
    trainer.says("accepted")
    daemon = run.daemon()
    os.unlink(daemon.socket)
    assert run.cli("drain", str(run.root)).returncode == 1, "only the socket can ask for that"
    assert daemon.pid in daemons_of(run.root)
    trainer.kill()
    done = run.cli("stop", str(run.root))
    assert done.returncode == 0, done.stderr
    assert "SIGTERM" in done.stderr
    assert daemon.pid not in daemons_of(run.root)


def test_nobody_else_is_ever_signalled(run: RunDirectory) -> None:
    """The pid of a daemon that was killed has been given to another process."""
    trainer = run.trainer(ACCEPTED + "checkpointer.close()")
    trainer.says("accepted")
    wait_for(run.daemon_has_left, "the daemon has left", 90)
    status = run.status()
    assert status is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        daemon = status.daemon.model_copy(update={"pid": stranger.pid, "state": "writing"})
        _publish(run, status.model_copy(update={"daemon": daemon}))
        for verb in ("stop", "drain"):
            done = run.cli(verb, str(run.root))
            assert done.returncode == 0
            assert "nothing to do" in done.stderr
        assert stranger.poll() is None
        stranger.communicate(b"\n")
        assert stranger.returncode == 0


def _publish(run: RunDirectory, status: ServiceStatus) -> None:
    path = run.root / ".ckpt_service" / f"status.{status.host}.json"
    path.write_text(status.model_dump_json())


def test_another_host_is_named(run: RunDirectory) -> None:
    trainer = run.trainer(ACCEPTED + OBEY)
    trainer.says("accepted")
    for verb in ("stop", "drain"):
        done = run.cli(verb, str(run.root), CKPT_SERVICE_HOST="elsewhere")
        assert done.returncode == 1
        assert f"run this on {os.uname().nodename}" in done.stderr
    assert daemons_of(run.root) == [run.daemon().pid]
    trainer.kill()


def test_without_a_daemon_there_is_nothing_to_do(run: RunDirectory) -> None:
    run.root.mkdir()
    for verb in ("stop", "drain"):
        done = run.cli(verb, str(run.root))
        assert (done.returncode, done.stdout) == (0, "")
        assert "nothing to do" in done.stderr
        assert run.cli(verb, str(run.root), "--timeout", "-1").returncode == 2
    assert list(run.root.iterdir()) == []


def test_nothing_is_lost_to_drains_under_a_trainer_that_goes_on_saving(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import threading
        checkpointer = Checkpointer(root, keep_last=10_000)
        told = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
        tickets = [checkpointer.save(0, state=state(0, 1))]
        say("saving")
        while not told.is_set():
            tickets.append(checkpointer.save(len(tickets), state=state(len(tickets), 1)))
            tickets[-1].accepted.result(60)
        paths = [ticket.wait_committed(60) for ticket in tickets]
        say("committed", len(paths), all(path.exists() for path in paths))
        checkpointer.close()
        """
    )
    trainer.says("saving")
    pids = set()
    for _ in range(4):
        wait_for(lambda: daemons_of(run.root) and not pids & set(daemons_of(run.root)), "another daemon serves")
        wait_for(lambda: (status := run.status()) and status.daemon.pid not in pids, "it says so")
        pids.add(run.daemon().pid)
        done = run.cli("drain", str(run.root))
        assert done.returncode == 0, done.stderr
    trainer.hears("end")
    count, there = trainer.says("committed").split()
    assert there == "True"
    assert len(run.files()) == int(count)
    trainer.ends()
    assert run.cli("verify", "--all", str(run.root)).returncode == 0
