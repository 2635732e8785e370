"""``ckpt-service doctor`` as a person runs it: on small, full, read-only and foreign places, beside a live run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import RunDirectory, wait_for
from support.shards import write_attempt, write_shard

from ckpt_service.ownership import host_name, pid_start

DOCTOR = (sys.executable, "-m", "ckpt_service", "doctor")
NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups") if os.geteuid() == 0 else ()


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can reach."""
    path = Path(tempfile.mkdtemp(prefix="ckpt-doctor-"))
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch takes no time."""
    home = tmp_path / "quick"
    home.mkdir()
    (home / "torch.py").write_text(
        "class version: cuda = None\nclass cuda: is_available = staticmethod(lambda: False)\n"
    )
    return {**os.environ, "PYTHONPATH": str(home)}


def examine(*command: str, env: dict[str, str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run it with ``--json``; return the exit code and the lines by check (of several of one name the last)."""
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"schema_version", "root", "verdict", "checks"}
    for check in document["checks"]:
        assert set(check) == {"check", "verdict", "message", "fix"}
        assert (check["fix"] is None) == (check["verdict"] == "ok")
    worst = max(("ok", "warn", "fail").index(check["verdict"]) for check in document["checks"])
    assert document["verdict"] == ("ok", "warn", "fail")[worst]
    assert (done.returncode == 0) == (document["verdict"] != "fail")
    return done.returncode, {check["check"]: check for check in document["checks"]}


def in_tmpfs(options: str, script: str, env: dict[str, str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run ``script`` (its last command is the doctor) with a tmpfs of our own mounted at ``/mnt``."""
    mount = f"mount -t tmpfs -o {options} tmpfs /mnt"
    whole = f'set -e; {mount}; cd /mnt; {script}; exec {shlex.join(DOCTOR)} /mnt/run "$@"'
    return examine("unshare", "-rm", "sh", "-c", whole, "sh", env=env)


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_root_that_is_not_there_yet_is_not_made(tmp_path: Path, no_torch: dict[str, str]) -> None:
    root = tmp_path / "some" / "where" / "run"
    before = os.listdir(tmp_path)
    code, found = examine(*DOCTOR, str(root), env=no_torch)
    assert code == 0
    assert f"{tmp_path} ({root} does not exist yet)" in found["writing"]["message"]
    assert found["locks"]["verdict"] == "ok"
    assert os.listdir(tmp_path) == before


def test_a_root_that_is_no_directory_is_a_usage_error(run: RunDirectory) -> None:
    run.root.write_text("")
    for root in (run.root, run.root / "below"):
        done = run.cli("doctor", str(root))
        assert done.returncode == 2
        assert f"ROOT={root}: {run.root} is not a directory" in done.stderr


def test_lines_for_people(run: RunDirectory, no_torch: dict[str, str]) -> None:
    run.root.mkdir()
    done = run.cli("doctor", str(run.root), **no_torch)
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        assert line.startswith(("OK    ", "WARN  ", " " * 18 + "fix: ")), line
    assert done.stderr == ""


def test_a_filesystem_too_small_for_two_more_checkpoints(tmp_path: Path, no_torch: dict[str, str]) -> None:
    saved = tmp_path / "run"
    write_attempt(saved, 1)
    write_shard(saved / "checkpoint_0", {"data/0": bytes(1 << 20)})
    copy = f"cp -r {shlex.quote(str(saved))} run"
    code, found = in_tmpfs("size=3M", copy, no_torch)
    assert code == 8
    assert found["space"]["verdict"] == "fail"
    assert "the next 2 checkpoints like step 100 take 2.1 MB" in found["space"]["message"]
    assert found["filesystem"]["message"].startswith("/mnt/run lies on tmpfs at /mnt: ")
    assert in_tmpfs("size=4M", copy, no_torch)[0] == 0


def test_a_full_filesystem_and_one_without_inodes(no_torch: dict[str, str]) -> None:
    code, found = in_tmpfs("size=1M", "mkdir run; head -c 1M /dev/zero > run/full || true", no_torch)
    assert code == 8
    assert "No space left on device" in found["writing"]["message"]
    code, found = in_tmpfs("size=1M,nr_inodes=10", "mkdir run", no_torch)
    assert code == 8
    assert found["inodes"]["verdict"] == "fail"


def test_a_read_only_filesystem(no_torch: dict[str, str]) -> None:
    code, found = in_tmpfs("size=1M", "mkdir run; mount -o remount,ro /mnt", no_torch)
    assert code == 1
    assert "Read-only file system" in found["writing"]["message"]
    assert "read-write" in found["writing"]["fix"]


def test_a_user_who_may_not_write(open_place: Path, no_torch: dict[str, str]) -> None:
    root = open_place / "run"
    write_attempt(root, 1)
    write_shard(root / "checkpoint_0")
    for directory in (root, root / "checkpoint_0", root / ".ckpt_service"):
        directory.chmod(0o555)
    code, found = examine(*NOBODY, *DOCTOR, str(root), env=no_torch)
    root.chmod(0o777)
    assert code == 1
    assert f"creating a file in {root} failed: Permission denied" in found["writing"]["message"]
    assert "write permission" in found["writing"]["fix"]
    code, found = examine(*NOBODY, *DOCTOR, str(root), env=no_torch)
    assert code == 1
    assert f"may not write to {root}/.ckpt_service, {root}/checkpoint_0" in found["writing"]["message"]
    assert sorted(os.listdir(root)) == [".ckpt_service", "checkpoint_0"], "its own file is gone again"
    root.chmod(0o000)
    code, found = examine(*NOBODY, *DOCTOR, str(root), env=no_torch)
    root.chmod(0o755)
    assert code == 1
    assert found["run"]["message"].startswith(str(root))
    assert found["run"]["message"].endswith("cannot be read: Permission denied")


def test_limits_of_the_shell(tmp_path: Path, no_torch: dict[str, str]) -> None:
    script = f'ulimit -n 60; exec {shlex.join(DOCTOR)} {shlex.quote(str(tmp_path))} "$@"'
    code, found = examine("sh", "-c", script, "sh", env=no_torch)
    assert code == 1
    assert found["nofile"]["message"] == "60 files may be open, and 74 are needed"
    assert "ulimit -n to 74" in found["nofile"]["fix"]


# --- beside a run -----------------------------------------------------------------------------------------------------


def test_beside_a_live_run_which_goes_on(run: RunDirectory, no_torch: dict[str, str]) -> None:
    trainer = run.trainer(
        """
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, state=state(1, 1)).wait_committed(20)
            say("saved", os.getpid())
            hear("again")
            checkpointer.save(2, state=state(2, 1)).wait_committed(20)
        """
    )
    pid = trainer.says("saved")
    before = lasting(run.root / ".ckpt_service")
    code, found = examine(*DOCTOR, str(run.root), env=no_torch)
    assert code == 0
    assert found["run lock"]["message"] == f"pid {pid} trains here now (on this host)"
    assert f"pid {run.daemon().pid}" in found["daemon"]["message"]
    assert found["daemon"]["verdict"] == "ok"
    assert "a live run has taken them already" in found["memory"]["message"]
    assert lasting(run.root / ".ckpt_service") == before
    assert run.cli("run", str(run.root)).returncode == 1, "the daemon still holds its lock"
    trainer.hears("again")
    trainer.ends()
    assert run.files() == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]


def lasting(directory: Path) -> list[str]:
    """Return the names in a directory, without what a daemon has for a moment while it renews its status."""
    return sorted(name for name in os.listdir(directory) if not name.endswith(".new"))


def test_a_daemon_that_was_killed_and_a_clock_that_went_back(run: RunDirectory, no_torch: dict[str, str]) -> None:
    trainer = run.trainer("checkpointer = Checkpointer(root)\nsay('ready')\nhear('end')")
    trainer.says("ready")
    trainer.kill()
    run.signal_daemon(signal.SIGKILL)
    wait_for(run.daemon_has_left, "the daemon is dead")
    path = run.root / ".ckpt_service" / f"status.{host_name(os.environ)}.json"
    status = json.loads(path.read_text())
    status["daemon"]["heartbeat_at"] = "2999-01-01T00:00:00Z"
    path.write_text(json.dumps(status))
    code, found = examine(*DOCTOR, str(run.root), env=no_torch)
    assert code == 0
    assert "ended without a word" in found["daemon"]["message"]
    assert "status files come from the future" in found["clock"]["message"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_what_it_started(number: signal.Signals, code: int, run: RunDirectory) -> None:
    run.root.mkdir()
    asked = run.root.parent / "asked"
    (run.root.parent / "torch.py").write_text(
        f"import os, pathlib, signal\npathlib.Path({str(asked)!r}).write_text(str(os.getpid()) + '.')\nsignal.pause()\n"
    )
    doctor = run.interpreter("-m", "ckpt_service", "doctor", str(run.root), PYTHONPATH=str(run.root.parent)).process
    wait_for(lambda: asked.exists() and asked.read_text().endswith("."), "it asks torch")
    doctor.send_signal(number)
    assert doctor.wait(30) == code
    other = int(asked.read_text()[:-1])
    wait_for(lambda: pid_start(other) is None, "what asked torch has ended as well")
    assert os.listdir(run.root) == []


def test_torch_is_imported_once_and_in_a_process_of_its_own(run: RunDirectory) -> None:
    imported = run.root.parent / "imported"
    (run.root.parent / "torch.py").write_text(
        f"import os\nwith open({str(imported)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
        "raise ImportError('no')\n"
    )
    doctor = run.interpreter("-m", "ckpt_service", "doctor", "/", "--json", PYTHONPATH=str(run.root.parent))
    checks = {check["check"]: check["message"] for check in json.loads(doctor.ends())["checks"]}
    assert "cannot be imported: ImportError: no" in checks["torch"]
    (pid,) = imported.read_text().split()
    assert int(pid) != doctor.pid
