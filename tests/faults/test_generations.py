"""Old and new: what earlier daemons and trainers have left neither blocks a start nor gets a stranger signalled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import RunDirectory, wait_for

from ckpt_service import locate, naming
from ckpt_service.connection import listen
from ckpt_service.errors import ServiceUnavailable
from ckpt_service.ownership import host_name, pid_start
from ckpt_service.records import ServiceStatus

SAVES = """
began = time.monotonic()
checkpointer = Checkpointer(root)
say("began", time.monotonic() - began)
say("committed", checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(30).name)
checkpointer.close()
"""


@pytest.fixture
def runtime(run: RunDirectory) -> Path:
    """The directory of sockets, for this test alone."""
    directory = run.root.parent / "runtime"
    directory.mkdir()
    run.env["XDG_RUNTIME_DIR"] = str(directory)
    return directory / "ckpt-service"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any of this."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def killed_status(run: RunDirectory) -> ServiceStatus:
    """Have a daemon and its trainer killed; return the status that they leave."""
    trainer = run.trainer(SAVES.replace("checkpointer.close()", "time.sleep(60)"))
    trainer.says("committed")
    run.status()
    trainer.kill()
    run.signal_daemon(signal.SIGKILL)
    wait_for(run.daemon_has_left, "it is gone")
    status = run.status()
    assert status is not None
    return status


def put_status(run: RunDirectory, status: ServiceStatus, **daemon: object) -> None:
    changed = status.model_copy(update={"daemon": status.daemon.model_copy(update=daemon)})
    path = run.root / ".ckpt_service" / naming.status_file(status.host)
    path.write_text(changed.model_dump_json())


def goes_on(run: RunDirectory) -> float:
    """Assert that another trainer starts and saves; return how long its start took, in seconds."""
    trainer = run.trainer(SAVES)
    took = float(trainer.says("began"))
    assert trainer.says("committed") == "ckpt_step_1_epoch_0.pt"
    run.status()
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    return took


def test_a_pid_that_has_become_another_process_is_left_alone(
    run: RunDirectory, runtime: Path, stranger: subprocess.Popen[bytes]
) -> None:
    status = killed_status(run)
    real = pid_start(stranger.pid)
    assert real is not None
    lock = run.root / ".ckpt_service" / naming.daemon_lock(status.host)
    for start in (real, real - 1):
        put_status(run, status, pid=stranger.pid, pid_start=start)
        owner = {"host": status.host, "pid": stranger.pid, "pid_start": start, "beat": 7}
        (run.root / ".ckpt_service" / naming.run_lock()).write_text(json.dumps(owner))
        lock.write_text(json.dumps(owner))
        run.seen.clear()  # what the status names is not ours to end, also not at the end of this test
        if start != real:
            assert run.cli("status", str(run.root)).returncode == 4, "another process is not the daemon"
        run.seen.clear()
        trainer = run.trainer(SAVES)
        trainer.says("committed")
        trainer.ends()
    run.status()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert stranger.poll() is None, "nobody has signalled it"


def taken_by_a_file(path: Path) -> None:
    path.write_text("precious")


def taken_by_a_directory(path: Path) -> None:
    path.mkdir()
    (path / "precious").touch()


def taken_by_a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("take", [taken_by_a_file, taken_by_a_directory, taken_by_a_dangling_link])
def test_what_has_the_name_of_the_socket_stays_and_the_socket_goes_elsewhere(
    take, run: RunDirectory, runtime: Path
) -> None:  # type: ignore[no-untyped-def]
    runtime.mkdir(mode=0o700)
    path = runtime / naming.socket_name(str(run.root), None, host_name(os.environ))
    take(path)
    before = os.lstat(path)
    goes_on(run)
    assert os.lstat(path) == before
    assert run.daemon().socket != str(path)


STRANGER = """
import socket, sys, time
from ckpt_service import wire
from ckpt_service.messages import Refused
listener = socket.socket(socket.AF_UNIX)
listener.bind({path!r})
listener.listen()
print("listens", flush=True)
clients = []
while True:
    client, _ = listener.accept()
    clients.append(client)
    print("asked", flush=True)
    {answer}
"""
ANSWERS = {
    "never": "pass",
    "that it serves another run": "client.sendall(wire.encode(Refused(message='another run')))",
    "that it is of an older release": "client.sendall(wire.encode(Refused(message='too new', protocol=0)))",
}


@pytest.mark.parametrize("place", ["own place", "status"])
def test_another_program_at_the_socket_of_a_dead_daemon_is_not_even_asked(
    place: str, run: RunDirectory, runtime: Path
) -> None:
    status = killed_status(run)
    path = Path(status.daemon.socket)
    if place == "status":
        path = run.root.parent / "other.sock"
        put_status(run, status, socket=str(path))
    path.unlink(missing_ok=True)
    stranger = run.interpreter("-c", STRANGER.format(path=str(path), answer="pass"))
    stranger.says("listens")
    run.seen.clear()
    goes_on(run)
    assert stranger.process.poll() is None
    stranger.kill()
    assert stranger.process.stdout is not None
    assert stranger.process.stdout.read() == ""


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_another_program_at_the_socket_that_the_status_names_is_neither_waited_for_nor_ended(
    answer: str, run: RunDirectory, runtime: Path
) -> None:
    first = run.trainer(SAVES.replace("checkpointer.close()", "time.sleep(60)"))
    first.says("committed")
    daemon = run.daemon()
    first.kill()
    os.kill(daemon.pid, signal.SIGSTOP)  # it holds its lock, and does not write its status anew
    status = run.status()
    assert status is not None
    path = run.root.parent / "other.sock"
    put_status(run, status, socket=str(path))
    stranger = run.interpreter("-c", STRANGER.format(path=str(path), answer=answer))
    stranger.says("listens")
    trainer = run.trainer(SAVES, CKPT_SERVICE_NOTICE_SECONDS="1")
    stranger.says("asked")
    os.kill(daemon.pid, signal.SIGCONT)
    assert float(trainer.says("began")) < 12, "the program would have been waited for 15 s"
    assert trainer.says("committed") == "ckpt_step_1_epoch_0.pt"
    assert run.daemon().pid == daemon.pid
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert stranger.process.poll() is None


def test_a_daemon_of_another_run_at_a_former_socket_does_not_block_a_start(run: RunDirectory, runtime: Path) -> None:
    other = RunDirectory(run.root.parent / "other")
    path = run.root.parent / "service.sock"
    status = killed_status(run)
    put_status(run, status, socket=str(path))
    other.root.mkdir()
    daemon = other.interpreter("-m", "ckpt_service", "run", str(other.root), "--socket", str(path))
    try:
        wait_for(path.exists, "it listens")
        run.seen.clear()
        goes_on(run)
        assert daemon.process.poll() is None
        os.kill(daemon.pid, signal.SIGTERM)
        daemon.ends()
    finally:
        other.clean_up()


# --- a path that somebody types ---------------------------------------------------------------------------------------


def test_a_typed_path_removes_nothing_but_a_dead_socket(tmp_path: Path) -> None:
    precious = tmp_path / "train.py"
    precious.write_text("mine")
    alive = listen(str(tmp_path / "alive"), ours=False)
    dead = listen(str(tmp_path / "dead"), ours=False)
    dead.close()
    with pytest.raises(ServiceUnavailable, match=r"train\.py is there and is not a socket; remove it"):
        listen(str(precious), ours=False)
    with pytest.raises(ServiceUnavailable, match=r"another program listens at .*alive"):
        listen(str(tmp_path / "alive"), ours=False)
    listen(str(tmp_path / "dead"), ours=False).close()
    assert precious.read_text() == "mine"
    assert locate.has_listener(str(tmp_path / "alive"))
    alive.close()
    assert not locate.has_listener(str(tmp_path / "alive"))


# --- dead sockets -----------------------------------------------------------------------------------------------------


def test_a_socket_of_a_killed_daemon_is_removed_by_the_next_one_of_any_run(run: RunDirectory, runtime: Path) -> None:
    status = killed_status(run)
    dead = Path(status.daemon.socket)
    beside = Path(locate.status_beside(str(dead)))
    assert dead.exists()
    assert beside.exists()
    os.utime(dead, (0, 0))
    other = RunDirectory(run.root.parent / "other", env=run.env)
    try:
        goes_on(other)
    finally:
        other.clean_up()
    assert list(runtime.iterdir()) == []


def test_only_what_is_dead_for_sure_is_swept(tmp_path: Path, run: RunDirectory, runtime: Path) -> None:
    status = killed_status(run)
    sockets = {name: tmp_path / f"{name}.sock" for name in ("dead", "alive", "young", "another host's", "unknown")}
    listeners = {name: listen(str(path), ours=True) for name, path in sockets.items()}
    for name, path in sockets.items():
        host = "elsewhere" if name == "another host's" else status.host
        if name != "unknown":
            content = status.model_copy(update={"host": host}).model_dump_json()
            Path(locate.status_beside(str(path))).write_text(content)
        if name != "alive":
            listeners[name].close()
        if name != "young":
            os.utime(path, (0, 0))
    (tmp_path / "file.sock").touch()
    os.utime(tmp_path / "file.sock", (0, 0))
    assert locate.sweep(str(tmp_path), status.host, time.time()) == [str(sockets["dead"])]
    assert not sockets["dead"].exists()
    assert not Path(locate.status_beside(str(sockets["dead"]))).exists()
    assert all(path.exists() for name, path in sockets.items() if name != "dead")
    listeners["alive"].close()
