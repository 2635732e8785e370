"""Limits met in earnest: file size, descriptors, threads, a full or read-only filesystem, permissions."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.faults import DAEMON, Fault, Faults, Saver, contents, errors, name_of, settle, start_daemon
from support.processes import PRELUDE, RunDirectory, wait_for

from ckpt_service import wire
from ckpt_service.messages import Hello, Peers
from ckpt_service.records import RankHolds


@contextmanager
def limited(pid: int, which: int, value: int) -> Iterator[None]:
    """Lower a limit of a running process, and raise it again."""
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (value, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, before)


def descriptors(pid: int) -> int:
    """Return one more than the highest descriptor of a process."""
    return 1 + max(map(int, os.listdir(f"/proc/{pid}/fd")))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_file_larger_than_the_limit(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    trainer = saver()
    assert trainer.save(1).committed
    settle(run, 1)
    before = contents(run)
    with limited(run.daemon().pid, resource.RLIMIT_FSIZE, 256 << 10):
        failed = trainer.save(2)
    assert (failed.code, failed.step) == ("EFBIG", 2)
    assert "bytes needed" in failed.message
    assert "ulimit -f" in str(failed.hint)
    assert contents(run) == before
    assert run.partials() == []
    assert trainer.save(3).committed
    trainer.ends()


def test_a_daemon_without_descriptors_loses_nothing(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    """It cannot even take a snapshot over; the trainer hands it over again, with pauses, until there are some."""
    trainer = saver(CKPT_SERVICE_NOTICE_SECONDS="0.5")
    assert trainer.save(1).committed
    settle(run, 1)
    pid = run.daemon().pid
    used = cpu_seconds(pid)
    with limited(pid, resource.RLIMIT_NOFILE, 3):
        pending = trainer.save(2, wait=2)
        assert pending.kind == "TimeoutError"
        assert cpu_seconds(pid) - used < 1, "it does not spin"
    assert trainer.save(3).committed
    wait_for(lambda: any(error.code == "EMFILE" for error in errors(run)), "the status told of it")
    settle(run, 3)
    assert run.files() == [name_of(2), name_of(3)]
    assert run.daemon().pid == pid
    trainer.ends()


def test_a_daemon_without_descriptors_takes_a_client_later(run: RunDirectory, saver: Callable[..., Saver]) -> None:
    trainer = saver()
    assert trainer.save(1).committed
    pid = run.daemon().pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        late.settimeout(30)
        used = cpu_seconds(pid)
        with limited(pid, resource.RLIMIT_NOFILE, 3):
            late.connect(run.daemon().socket)
            late.settimeout(1.5)
            hello = Hello(version="0", role="tool", pid=os.getpid(), root=str(run.root), postfix=None)
            late.sendall(wire.encode(hello))
            with pytest.raises(TimeoutError):
                late.recv(1)
            assert cpu_seconds(pid) - used < 0.75, "it does not spin"
        late.settimeout(30)
        assert late.recv(1), "it answers"
    wait_for(lambda: any("accepting a client failed" in error.message for error in errors(run)), "the status tells")
    assert sum("accepting a client" in error.message for error in errors(run)) == 1
    trainer.ends()


def test_a_daemon_that_cannot_have_its_threads_says_so(run: RunDirectory, faults: Faults) -> None:
    faults.set(Fault("thread", "ckpt-commit_2"))
    daemon = run.trainer(DAEMON, **faults.env)
    _, said = daemon.process.communicate(timeout=30)
    assert daemon.process.returncode != 0
    assert "4 threads (ckpt-commit) cannot be started: can't start new thread" in said
    assert "ulimit -u" in said


def test_a_daemon_needs_no_more_threads_than_it_has(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver]
) -> None:
    daemon = start_daemon(run, faults)
    faults.set(Fault("thread", ""))
    trainer = saver()
    for step in range(3):
        assert trainer.save(step).committed
    settle(run, 3)
    assert run.files() == [name_of(1), name_of(2)]
    trainer.ends()
    daemon.ends()


# --- what other hosts hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_peers_file_that_cannot_be_written_stops_no_snapshot(
    run: RunDirectory, faults: Faults, saver: Callable[..., Saver], how: str
) -> None:
    start_daemon(run, faults, CKPT_SERVICE_NOTICE_SECONDS="0.3", CKPT_SERVICE_GRACE_SECONDS="0.5")
    peers_file = Fault("fsync", r"/\.peers[^/]*new$", code="" if how == "hangs" else "EIO", hangs=how == "hangs")
    faults.set(peers_file)
    trainer = saver()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(run.daemon().socket)
        hello = Hello(version="0", role="trainer", pid=os.getpid(), root=str(run.root), postfix=None)
        other.sendall(wire.encode(hello))
        for step in range(8):  # more than there are threads
            other.sendall(wire.encode(Peers(ranks=[RankHolds(stage=9, tp_rank=0, holds=[(1, step)])])))
        faults.wait_met()
        for step in range(3):
            assert trainer.save(step).committed
        if how == "fails":
            wait_for(lambda: any("what other hosts hold" in error.message for error in errors(run)), "it is told")
        pid = run.daemon().pid
        os.kill(pid, 15)
        wait_for(run.daemon_has_left, "the daemon leaves", 10)


# --- filesystems ------------------------------------------------------------------------------------------------------

OUTCOMES = """
import json, subprocess
def save(checkpointer, step, megabytes=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ticket = checkpointer.save(step, state=state(step, megabytes))
    error = ticket.committed.exception(60)
    return {
        "committed": error is None,
        "code": getattr(error, "code", None),
        "message": str(error),
        "warned": [str(warning.message) for warning in caught],
        "files": sorted(path.name for path in Path(root, "checkpoint_0").glob("*.pt")),
        "partials": len(list(Path(root, "checkpoint_0").glob(".*.partial"))),
    }
def run(*command):
    subprocess.run(command, check=True)
def settled(count):
    while len(list(Path(root, "checkpoint_0").glob("*.pt"))) != count:
        time.sleep(0.01)
def statuses():
    return [json.loads(path.read_text()) for path in Path(root, ".ckpt_service").glob("status.*.json")]
"""


def apart(run: RunDirectory, body: str, *command: str, **env: str) -> dict[str, object]:
    """Run a trainer and its daemon under ``command`` (with mounts or rights of their own); return what it prints."""
    script = f"{PRELUDE}\nroot = {str(run.root)!r}\n{OUTCOMES}\n{textwrap.dedent(body)}"
    run.root.mkdir()
    done = subprocess.run(
        [*command, sys.executable, "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=run.root.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def mounted(run: RunDirectory, options: str) -> tuple[str, ...]:
    """Return a command that mounts a tmpfs at the root, for itself alone."""
    return ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs "{run.root}" && exec "$@"', "sh")


def test_a_disk_that_is_full_and_has_room_again(run: RunDirectory) -> None:
    """Nothing old is deleted to make room; log and status are on the same disk, and must not matter."""
    found = apart(
        run,
        """
        checkpointer = Checkpointer(root, keep_last=2)
        said = {step: save(checkpointer, step) for step in (1, 2, 3)}
        settled(2)
        log = next(Path(root, ".ckpt_service").glob("daemon.*.log"))
        with open(Path(root, "filler"), "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                pass
        said[4] = save(checkpointer, 4)
        os.unlink(Path(root, "filler"))
        said[5] = save(checkpointer, 5)
        checkpointer.close()
        while not any(status["daemon"]["state"] == "stopped" for status in statuses()):
            time.sleep(0.01)
        names = sorted(path.name for path in Path(root, "checkpoint_0").glob("*.pt"))
        print(json.dumps([said, names, statuses()[0]["errors"], log.read_text()[-400:]]))
        """,
        *mounted(run, "size=8m"),
    )
    said, names, told_errors, logged = found  # type: ignore[misc]
    assert [said[step]["committed"] for step in "12345"] == [True, True, True, False, True]
    assert said["4"]["code"] == "ENOSPC"
    assert "bytes needed" in said["4"]["message"]
    assert said["4"]["files"] == [name_of(2), name_of(3)]
    assert said["4"]["partials"] == 0
    assert "step 4 failed" in said["5"]["warned"][0]
    assert names == [name_of(3), name_of(5)]
    assert [error["code"] for error in told_errors if error["step"] == 4] == ["ENOSPC"]
    assert "committed" in logged, "the log goes on as well"


def test_a_filesystem_without_inodes_says_that_it_is_them(run: RunDirectory) -> None:
    found = apart(
        run,
        """
        checkpointer = Checkpointer(root)
        said = [save(checkpointer, 1)]
        filler = Path(root, "filler")
        filler.mkdir()
        try:
            for number in range(1000):
                (filler / str(number)).touch()
        except OSError:
            pass
        said.append(save(checkpointer, 2))
        run("rm", "-r", str(filler))
        said.append(save(checkpointer, 3))
        checkpointer.close()
        print(json.dumps(said))
        """,
        *mounted(run, "size=32m,nr_inodes=64"),
    )
    first, second, third = found  # type: ignore[misc]
    assert (first["committed"], second["code"], third["committed"]) == (True, "ENOSPC", True)
    assert "out of inodes" in second["message"]
    assert second["partials"] == 0


def test_a_directory_that_becomes_read_only_and_writable_again(run: RunDirectory) -> None:
    found = apart(
        run,
        """
        checkpointer = Checkpointer(root)
        said = [save(checkpointer, 1)]
        place = os.path.join(root, "checkpoint_0")
        run("mount", "--bind", place, place)
        run("mount", "-o", "remount,bind,ro", place)
        said.append(save(checkpointer, 2))
        run("umount", place)
        said.append(save(checkpointer, 3))
        checkpointer.close()
        print(json.dumps(said))
        """,
        *mounted(run, "size=32m"),
    )
    first, second, third = found  # type: ignore[misc]
    assert (first["committed"], second["code"], third["committed"]) == (True, "EROFS", True)
    assert "mount the filesystem read-write" in second["message"]


def test_a_directory_without_permission(run: RunDirectory) -> None:
    without_capabilities = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    found = apart(
        run,
        """
        checkpointer = Checkpointer(root)
        said = [save(checkpointer, 1)]
        place = os.path.join(root, "checkpoint_0")
        os.chmod(place, 0o500)
        said.append(save(checkpointer, 2))
        os.chmod(place, 0o700)
        said.append(save(checkpointer, 3))
        checkpointer.close()
        print(json.dumps(said))
        """,
        *without_capabilities,
    )
    first, second, third = found  # type: ignore[misc]
    assert (first["committed"], second["code"], third["committed"]) == (True, "EACCES", True)
    assert "write permission" in second["message"]
