"""How the doctor finds its facts: the probe's file on disks that fail, mounts, locks, torch in another process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.fakes import FakeDirectory, Operation

from ckpt_service import locate, ownership
from ckpt_service.doctor import gather, probe
from ckpt_service.doctor.facts import Locks, Mount

NAMES = [".ckpt-doctor-cafe.made", ".ckpt-doctor-cafe.renamed"]
STEPS = ["creating a file", "writing", "fsync", "rename", "fsync of the directory"]


def exclusive(path: str) -> Locks:
    return Locks(True)


# --- the probe --------------------------------------------------------------------------------------------------------


def test_a_real_directory(tmp_path: Path) -> None:
    found = probe.try_out(str(tmp_path))
    assert (found.failure, found.locks) == (None, Locks(True))
    assert found.direct is not None
    assert found.clock_ahead_seconds is not None
    assert abs(found.clock_ahead_seconds) < 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", range(5))
def test_the_step_that_fails_is_named_and_nothing_is_left(number: int) -> None:
    directory = FakeDirectory(failures={number: errno.EIO})
    found = probe.try_out_in(directory, "cafe", exclusive)
    assert found.failure is not None
    assert (found.failure.op, found.failure.code) == (STEPS[number], "EIO")
    assert (found.direct, found.locks) == (None, None)
    assert directory.disk() == {}


def test_only_its_own_files_are_touched_in_the_order_of_a_commit() -> None:
    directory = FakeDirectory()
    directory.put("ckpt_step_1_epoch_0.pt", b"theirs")
    assert probe.try_out_in(directory, "cafe", exclusive).failure is None
    assert directory.disk() == {"ckpt_step_1_epoch_0.pt": b"theirs"}
    kinds = [operation.kind for operation in directory.operations]
    assert kinds == ["create", "write", "sync", "replace", "sync_directory", "remove", "remove"]
    assert {operation.name for operation in directory.operations} <= {*NAMES, ""}


@pytest.mark.parametrize("kind", ["write", "sync", "replace", "sync_directory"])
def test_ctrl_c_at_any_moment_leaves_nothing(kind: str) -> None:
    def interrupt(operation: Operation) -> None:
        if operation.kind == kind:
            raise KeyboardInterrupt

    directory = FakeDirectory(before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe.try_out_in(directory, "cafe", exclusive)
    assert directory.disk() == {}


def test_ctrl_c_while_locks_are_tried_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(path: str) -> Locks:
        assert os.path.exists(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe.try_out(str(tmp_path), interrupt)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    found = probe.try_out(str(tmp_path / "gone")).failure
    assert found is not None
    assert (found.op, found.code) == ("opening the directory", "ENOENT")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 12", "a second process got the same lock"),
        ("exit 1", "a second process got an error"),
    ],
)
def test_a_second_process_that_is_not_refused(script: str, problem: str, tmp_path: Path) -> None:
    other = tmp_path / "interpreter"
    other.write_text(f"#!/bin/sh\n{script}\n")
    other.chmod(0o700)
    (tmp_path / "file").touch()
    assert probe.locks_at(str(tmp_path / "file"), str(other)) == Locks(False, problem)


def test_locks_that_cannot_be_tried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be run" in str(probe.locks_at(str(tmp_path / "file"), str(tmp_path / "none")).problem)
    assert "cannot be opened again" in str(probe.locks_at(str(tmp_path / "none")).problem)


# --- who holds a lock -------------------------------------------------------------------------------------------------


def test_the_holder_of_a_lock_is_seen_by_another_process_only_while_it_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert ownership.lock_holder(str(path)) is None
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        asks = f"from ckpt_service.ownership import lock_holder; print(lock_holder({str(path)!r}))"
        other = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == str(os.getpid())
    assert ownership.lock_holder(str(path)) is None


# --- mounts -----------------------------------------------------------------------------------------------------------

MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:40 / /data rw shared:2 master:1 - nfs4 server:/export rw,vers=4.2,nolock
24 23 0:41 /sub /data/a\040b rw - xfs /dev/sdb rw
25 22 0:42 / /data rw - lustre 10.0.0.1@tcp:/fs rw,flock
nonsense
26 22 0:43 /
"""


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/", "ext4", "/"),
        ("/database", "ext4", "/"),
        ("/data", "lustre", "/data"),
        ("/data/runs", "lustre", "/data"),
        ("/data/a b/c", "xfs", "/data/a b"),
    ],
)
def test_what_a_path_lies_on(path: str, kind: str, point: str) -> None:
    found = gather.mount_of(path, MOUNTINFO)
    assert found is not None
    assert (found.type, found.point) == (kind, point)


def test_mount_options_of_both_kinds_are_known() -> None:
    assert gather.mount_of("/data", MOUNTINFO.replace("25 22", "25")) == Mount(
        "nfs4", "/data", frozenset({"rw", "vers=4.2", "nolock"})
    )
    assert gather.mount_of("/data", "") is None


# --- torch in another process -----------------------------------------------------------------------------------------


def environment(tmp_path: Path, body: str) -> dict[str, str]:
    (tmp_path / "torch.py").write_text(textwrap.dedent(body))
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    body = """
    print("chatter")
    class version: cuda = "12.8"
    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 4)
    """
    found = gather.look_at_torch(environment(tmp_path, body), 60)
    assert (found.problem, found.devices, found.cuda) == (None, 4, "12.8")


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    found = gather.look_at_torch(environment(tmp_path, "raise OSError('libcuda.so.1: no such file')"), 60)
    assert found.problem == "it cannot be imported: OSError: libcuda.so.1: no such file"


def test_a_torch_that_never_answers_is_given_up(tmp_path: Path) -> None:
    found = gather.look_at_torch(environment(tmp_path, "import signal; signal.pause()"), 0.5)
    assert "took more than" in str(found.problem)


# --- where the socket would lie ---------------------------------------------------------------------------------------


def survey(runtime: Path) -> list[locate.Place]:
    return list(locate.survey("/runs/a", None, "node", {"XDG_RUNTIME_DIR": str(runtime)}))


def test_the_place_of_the_socket_is_looked_at_and_not_made(tmp_path: Path) -> None:
    mine = tmp_path / "ckpt-service"
    assert survey(tmp_path)[0] == locate.Place(str(mine), None)
    assert not mine.exists()
    mine.mkdir(mode=0o755)
    mine.chmod(0o755)
    assert survey(tmp_path)[0] == locate.Place(str(mine), None, is_open=True)
    assert mine.stat().st_mode & 0o777 == 0o755
    mine.chmod(0o700)
    assert survey(tmp_path)[0] == locate.Place(str(mine), None)
    mine.rmdir()
    mine.write_text("")
    assert survey(tmp_path)[0].problem == f"{mine} is not a directory of this user"
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert survey(long)[0].problem == f"{long}/ckpt-service is too long for a socket"
