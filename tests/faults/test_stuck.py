"""What hangs: training and status go on, every wait ends, other directories are not held up, the daemon can leave."""

from __future__ import annotations

import os
import select
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support.faults import DAEMON, Fault, Faults, Saver, copy_of_the_status, errors, name_of, settle, start_daemon
from support.processes import OBEY, RunDirectory, wait_for

from ckpt_service import wire
from ckpt_service.messages import Accepted, Welcome, client_messages

IMPATIENT = {"CKPT_SERVICE_STALL_SECONDS": "0.7", "CKPT_SERVICE_NOTICE_SECONDS": "0.5"}
LEAVING = {
    "CKPT_SERVICE_NOTICE_SECONDS": "0.3",
    "CKPT_SERVICE_GRACE_SECONDS": "0.5",
    "CKPT_SERVICE_HEARTBEAT_SECONDS": "0.2",
}
A_LITTLE = 5.0  # what a daemon on a busy machine may take beyond its bounds

PLACES = {
    "open": ("open", r"\.partial$"),
    "write": ("pwrite", r"\.partial$"),
    "fsync": ("fsync", r"\.partial$"),
    "directory lock": ("open", r"checkpoint_0/\.$"),
    "rename": ("rename", r"\.partial -> "),
    "directory fsync": ("fsync", r"checkpoint_0$"),
    "sweep": ("listdir", r"checkpoint_0$"),
}


def beats(read: Callable[[], datetime]) -> None:
    """Wait until a heartbeat is newer than now."""
    began = datetime.now(timezone.utc)
    wait_for(lambda: read() > began, "the status goes on", 5)


def both_statuses_beat(run: RunDirectory) -> None:
    beats(lambda: run.daemon().heartbeat_at)
    beats(lambda: copy_of_the_status(run).daemon.heartbeat_at)


@pytest.mark.parametrize("place", ["open", "fsync", "rename", "directory fsync"])
def test_a_disk_that_hangs_stops_neither_training_nor_the_status(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], place: str
) -> None:
    daemon = start_daemon(run, faults, CKPT_SERVICE_HEARTBEAT_SECONDS="0.2")
    trainer = saver(**IMPATIENT)
    faults.set(Fault(*PLACES[place], hangs=True))
    assert trainer.save(1, wait=0).kind == "TimeoutError", "it is pending"
    faults.wait_met()
    assert trainer.save(2, wait=0).kind == "TimeoutError", "the second slot"
    both_statuses_beat(run)
    stalled = trainer.save(3)
    assert stalled.kind == "SaveFailed"
    assert "all 2 slots are taken and nothing has moved for 0.7 s" in stalled.message
    wait_for(lambda: any("step 3" in error.message for error in errors(run)), "the status tells")
    trainer.trainer.hears("drain()")
    assert "not committed: step 1, 2" in trainer.trainer.says("drained")
    faults.clear()
    told = trainer.save(4)
    assert told.committed
    assert "step 3" in told.warned[0]
    settle(run, 3)
    assert run.files() == [name_of(2), name_of(4)]
    assert run.daemon().pid == daemon.pid
    trainer.ends()


def test_a_deletion_that_hangs_stops_no_save(run: RunDirectory, faults: Faults, saver: Callable[..., Saver]) -> None:
    start_daemon(run, faults, CKPT_SERVICE_NOTICE_SECONDS="0.2", CKPT_SERVICE_HEARTBEAT_SECONDS="0.2")
    trainer = saver()
    faults.set(Fault("close", r"\(deleted\)$", hangs=True))  # where the blocks of a large file are freed
    for step in range(1, 7):
        assert trainer.save(step).committed
    faults.wait_met()
    both_statuses_beat(run)
    assert run.files() == [name_of(step) for step in range(2, 7)]
    faults.clear()
    wait_for(lambda: run.files() == [name_of(5), name_of(6)], "retention catches up by itself")


def test_a_late_deletion_spares_what_has_come_to_the_name_since(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    """Two files are to go; while the deletion of the first hangs, the second is saved again."""
    start_daemon(run, faults, CKPT_SERVICE_NOTICE_SECONDS="0.2")
    trainer = saver()
    faults.set(Fault("unlink", r"\.pt$", code="EIO"))
    for step in (1, 2, 3):
        assert trainer.save(step).committed
    faults.set(Fault("open", name_of(1), hangs=True, thread="ckpt-prune"))
    assert trainer.save(4).committed
    faults.wait_met(call="open")
    assert trainer.save(2).committed
    faults.clear()
    settle(run, 5)
    assert run.files() == [name_of(2), name_of(4)]


@pytest.mark.parametrize("place", ["fsync", "sweep", "deletion", "status", "status and write"])
def test_the_daemon_leaves_although_its_threads_hang(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], place: str
) -> None:
    daemon = start_daemon(run, faults, **LEAVING)
    trainer = saver()
    status = Fault("fsync", f"{run.root}.*status.*new$", hangs=True)
    hanging = {
        "deletion": [Fault("unlink", r"\.pt$", hangs=True)],
        "status": [status],
        "status and write": [status, Fault("pwrite", r"\.partial$", hangs=True)],
    }
    faults.set(*hanging.get(place) or [Fault(*PLACES[place], hangs=True)])
    is_written = place in ("deletion", "status")
    for step in range(1, 4 if is_written else 2):
        trainer.save(step, wait=60 if is_written else 0)
    faults.wait_met()
    socket_path = run.daemon().socket
    trainer.trainer.kill()
    began = time.monotonic()
    os.kill(daemon.pid, signal.SIGTERM)
    code = daemon.process.wait(30)
    assert time.monotonic() - began < 0.5 + 5 * 0.3 + 2 + A_LITTLE
    assert code == (0 if is_written else 1)
    assert not os.path.exists(socket_path)
    if "status" not in place:
        assert run.daemon().state == "stopped"
        assert any("before the daemon had to leave" in error.message for error in errors(run)) != is_written


def test_a_status_that_hangs_stops_nothing_but_itself(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    start_daemon(run, faults, CKPT_SERVICE_NOTICE_SECONDS="0.2", CKPT_SERVICE_HEARTBEAT_SECONDS="0.2")
    trainer = saver()
    faults.set(Fault("fsync", f"{run.root}.*status.*new$", hangs=True))
    faults.wait_met()
    for step in range(4):
        assert trainer.save(step).committed
    wait_for(lambda: run.files() == [name_of(2), name_of(3)], "retention goes on")
    beats(lambda: copy_of_the_status(run).daemon.heartbeat_at)
    faults.clear()
    beats(lambda: run.daemon().heartbeat_at)
    trainer.ends()


@pytest.mark.parametrize(
    ("call", "path", "thread"),
    [
        ("fsync", r"checkpoint_0/.*\.partial$", ""),
        ("listdir", r"checkpoint_0$", "ckpt-commit"),
        ("unlink", r"checkpoint_0/.*\.pt$", ""),
    ],
    ids=["write", "sweep", "deletion"],
)
def test_one_directory_that_hangs_does_not_stop_another(
    run: RunDirectory, faults: Faults, call: str, path: str, thread: str
) -> None:
    start_daemon(run, faults, CKPT_SERVICE_NOTICE_SECONDS="0.2")
    body = """
    checkpointer = Checkpointer(root, topology=place, slots=8, keep_last=1)
    def save(step):
        ticket = checkpointer.save(step, state=state(step, 1))
        if rank == 1:
            say("committed", step, ticket.wait_committed(60))
    say("ready")
    """
    ranks = run.ranks(textwrap.dedent(body) + OBEY, pp=2, meet="launch")
    ranks.say("ready")
    faults.set(Fault(call, path, hangs=True, thread=thread))
    for step in range(5):
        ranks.hear(f"save({step})")
        assert ranks[1].says("committed").startswith(str(step))
    faults.wait_met()
    assert (run.root / "checkpoint_1" / name_of(4)).exists()
    assert run.files() != [name_of(4)]
    faults.clear()
    ranks.hear("checkpointer.close()")
    ranks.end()
    wait_for(lambda: run.files() == [name_of(4)], "both catch up")


def test_what_hangs_is_handed_to_the_next_daemon(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    """Somebody kills the daemon in the hang: its temporary file is swept, and nothing is lost."""
    daemon = start_daemon(run, faults)
    trainer = saver()
    faults.set(Fault("fsync", r"\.partial$", hangs=True))
    assert trainer.save(1, wait=0).kind == "TimeoutError"
    faults.wait_met()
    assert len(run.partials()) == 1
    daemon.kill()
    assert trainer.save(2).committed
    wait_for(lambda: run.files() == [name_of(1), name_of(2)], "the next daemon writes both")
    assert run.partials() == []
    trainer.ends()


# --- a daemon that is stopped, or says nothing ------------------------------------------------------------------------


def test_a_stopped_daemon_stops_neither_training_nor_the_end(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    trainer = saver(**IMPATIENT)
    assert trainer.save(1).committed
    pid = run.signal_daemon(signal.SIGSTOP)
    for step in (2, 3):
        assert trainer.save(step, wait=0).kind == "TimeoutError"
    lost = trainer.save(4)
    assert (lost.kind, lost.step) == ("SaveFailed", 4)
    trainer.trainer.hears("drain()")
    assert "not committed: step 2, 3" in trainer.trainer.says("drained")
    os.kill(pid, signal.SIGCONT)
    good = trainer.save(5)
    assert good.committed
    assert "step 4" in good.warned[0]
    assert run.daemon().pid == pid
    trainer.ends()


def test_the_end_of_a_training_does_not_wait_for_a_stopped_daemon(
    run: RunDirectory, saver: Callable[..., Saver]
) -> None:
    trainer = saver(**IMPATIENT)
    assert trainer.save(1).committed
    pid = run.signal_daemon(signal.SIGSTOP)
    assert trainer.save(2, wait=0).kind == "TimeoutError"
    began = time.monotonic()
    _, problems = trainer.trainer.process.communicate(timeout=60)
    assert trainer.trainer.process.returncode == 1
    assert time.monotonic() - began < 1 + 0.5 + A_LITTLE
    assert "the last save was lost" in problems
    assert "not committed: step 2" in problems
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: run.files() == [name_of(1), name_of(2)], "it had been handed over all the same")


class Impostor:
    """A daemon that says only what a test wants. ``came``: how many connections it has taken."""

    def __init__(self, path: Path, answer: Callable[[socket.socket], None]) -> None:
        self.came = 0
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.came += 1
            self._open.append(sock)
            with suppress(OSError):  # the trainer is gone
                self._answer(sock)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            sock.close()


@contextmanager
def impostor(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[Impostor]:
    made = Impostor(path, answer)
    try:
        yield made
    finally:
        made.close()


def silent(sock: socket.socket) -> None:
    """Say nothing."""


def welcome(sock: socket.socket) -> None:
    """Say welcome, and then nothing."""
    sock.sendall(wire.encode(Welcome(version="0", pid=os.getpid(), host="host")))


def accept_and_die(sock: socket.socket) -> None:
    """Say welcome, take one snapshot over, and die."""
    welcome(sock)
    decoder = wire.Decoder()
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            return
        for frame in decoder.feed(data):
            message = client_messages.validate_json(frame.body)
            if message.type == "offer":
                sock.sendall(wire.encode(Accepted(snapshot_id=message.manifest.snapshot_id)))
                sock.shutdown(socket.SHUT_RDWR)
                return


START = """
import time
began = time.monotonic()
try:
    Checkpointer(root, service=os.environ["SERVICE"])
except Exception as error:
    say("raised", round(time.monotonic() - began, 1), type(error).__name__, error)
"""


def test_a_daemon_that_never_answers_the_hello_is_given_up(run: RunDirectory, tmp_path: Path) -> None:
    with impostor(tmp_path / "s", silent):
        trainer = run.trainer(START, SERVICE=str(tmp_path / "s"), CKPT_SERVICE_START_SECONDS="1")
        seconds, kind, message = trainer.says("raised").split(maxsplit=2)
    assert kind == "ServiceUnavailable"
    assert "no daemon answered within 1.0 s" in message
    assert "timed out" in message
    assert 1 <= float(seconds) < 1 + A_LITTLE


def test_a_socket_that_accepts_nothing_is_given_up(run: RunDirectory, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    queued = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
    with listener, queued[0], queued[1]:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        queued[0].connect(str(tmp_path / "s"))  # the only place in its queue
        trainer = run.trainer(START, SERVICE=str(tmp_path / "s"), CKPT_SERVICE_START_SECONDS="1")
        seconds, kind, message = trainer.says("raised").split(maxsplit=2)
    assert kind == "ServiceUnavailable"
    assert "no daemon answered within 1.0 s" in message
    assert 1 <= float(seconds) < 1 + A_LITTLE


@pytest.mark.parametrize("answer", [welcome, accept_and_die])
def test_a_daemon_that_gets_nowhere_after_the_hello_is_given_up(
    run: RunDirectory, tmp_path: Path, saver: Callable[..., Saver], answer: Callable[[socket.socket], None]
) -> None:
    with impostor(tmp_path / "s", answer) as daemon:
        trainer = saver(SERVICE=str(tmp_path / "s"), **IMPATIENT)
        for step in (1, 2):
            assert trainer.save(step, wait=0).kind == "TimeoutError"
        lost = trainer.save(3)
        assert lost.kind == "SaveFailed"
        assert "nothing has moved for 0.7 s" in lost.message
        trainer.trainer.hears("drain()")
        assert "not committed: step 1, 2" in trainer.trainer.says("drained")
        trainer.ends(1)
        assert daemon.came <= 12, "the pauses between tries grow"


def test_a_trainer_that_is_stopped_holds_up_nobody(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    """Two ranks of a daemon: one reads no answers any more, the other commits, and the daemon can leave."""
    body = """
    checkpointer = Checkpointer(root, topology=place, keep_last=1)
    def save(step):
        say("committed", checkpointer.save(step, state=state(step, 1)).wait_committed(60))
    say("ready")
    """
    ranks = run.ranks(textwrap.dedent(body) + OBEY, pp=2, meet="launch", **LEAVING)
    ranks.say("ready")
    os.kill(ranks[0].pid, signal.SIGSTOP)
    for step in range(3):
        ranks[1].hears(f"save({step})")
        ranks[1].says("committed")
    run.signal_daemon(signal.SIGTERM)
    wait_for(run.daemon_has_left, "the daemon leaves", 0.5 + 3 + A_LITTLE)
    ranks.kill()


# --- a start that hangs -----------------------------------------------------------------------------------------------


def test_a_daemon_leaves_that_hangs_while_it_looks_around(run: RunDirectory, faults: Faults) -> None:
    (run.root / ".ckpt_service").mkdir(parents=True)
    faults.set(Fault("listdir", f"{run.root}$", hangs=True))
    daemon = run.trainer(DAEMON, **faults.env, **LEAVING)
    faults.wait_met()
    os.kill(daemon.pid, signal.SIGTERM)
    assert daemon.process.wait(5 * 0.3 + 2 + A_LITTLE) == 0


def test_a_start_that_hangs_ends_with_whoever_waited_for_it(run: RunDirectory, tmp_path: Path) -> None:
    """Else each try of a trainer to get a daemon would leave another process behind, as long as the disk hangs."""
    starter = run.trainer(
        f"""
        from ckpt_service import daemon
        def hang(ready):
            say("pid", os.getpid())
            signal.pause()
        daemon.detach({str(tmp_path / "log")!r}, hang)
        """
    )
    pid = int(starter.says("pid"))
    child = os.pidfd_open(pid)
    try:
        starter.kill()
        poll = select.poll()
        poll.register(child, select.POLLIN)
        assert poll.poll(30_000)
    finally:
        os.close(child)


@pytest.mark.parametrize("policy", ["block", "replace"])
def test_no_policy_waits_for_a_disk_that_hangs_beyond_its_bound(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], policy: str
) -> None:
    """The daemon answers each question of "replace"; that it answers is no progress."""
    start_daemon(run, faults)
    trainer = saver(**IMPATIENT, SLOTS="1", ON_FULL=policy)
    faults.set(Fault(*PLACES["fsync"], hangs=True))
    assert trainer.save(1, wait=0).kind == "TimeoutError"
    faults.wait_met()
    began = time.monotonic()
    assert trainer.save(2).kind == "SaveFailed"
    assert time.monotonic() - began < A_LITTLE
    faults.clear()


def test_a_save_is_given_up_although_an_older_attempt_hangs_on(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    """After a resume that did not wait for it, the daemon goes on telling of it; that is no progress either."""
    start_daemon(run, faults)
    first = saver(**IMPATIENT)
    faults.set(Fault(*PLACES["fsync"], hangs=True))
    assert first.save(1, wait=0).kind == "TimeoutError"
    faults.wait_met()
    first.trainer.kill()
    second = saver(**IMPATIENT, CKPT_SERVICE_RESUME_WAIT_SECONDS="0.5")
    second.trainer.hears("checkpointer.resume(); say('resumed')")
    second.trainer.says("resumed")
    for step in (11, 12):
        second.save(step, wait=0)
    began = time.monotonic()
    assert second.save(13).kind == "SaveFailed"
    assert time.monotonic() - began < A_LITTLE
    faults.clear()
