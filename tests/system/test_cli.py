"""The command line on roots of every kind: exit codes, JSON fields, what goes to which stream, and how fast."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RunDirectory, wait_for
from support.shards import data_offset, flip_bit, write_stage_shard

from ckpt_service import __version__
from trainer_hooks import Checkpointer

READING = [["status"], ["ls"], ["latest"], ["verify"], ["show", "2"], ["wait"], ["wait", "2"], ["logs"]]
READING += [["prune", "--keep", "1", "--dry-run"]]

CHECKPOINT = {"kind", "attempt", "sequence", "epoch", "step"}
REFERENCE = {"attempt", "sequence", "epoch", "step"}
LATEST = {"schema_version", "root", "committed_at", "paths", *CHECKPOINT}
LS_ROW = {"state", "reason", "ranks_committed", "ranks_expected", "bytes", "committed_at", "pinned", *CHECKPOINT}
VERIFY = {"schema_version", "root", "files", "checked", "bad"}
VERIFY_ROW = {"path", "ok", "records", "bytes", "seconds", "problem"}
STATUS = {
    *("schema_version", "host", "root", "run_id", "attempt", "daemon", "queue", "writing", "pending", "shards"),
    *("last_complete", "totals", "storage", "errors"),
}
DAEMON = {"pid", "pid_start", "version", "protocol", "socket", "state", "started_at", "heartbeat_at"}
QUEUE = {"depth", "capacity", "bytes", "on_full", "blocked_seconds"}
SNAPSHOT = {"snapshot_id", "kind", "step", "epoch", "stage", "tp_rank", "bytes_total"}
WRITING = {*SNAPSHOT, "phase", "bytes_done", "bytes_per_second", "eta_seconds"}
PENDING = {*SNAPSHOT, "submitted_at"}
SHARD = {
    *("kind", "stage", "tp_rank", "last_submitted", "last_committed", "kept", "held_back_by"),
    *("consecutive_failures", "last_error"),
}
COMMITTED = {*REFERENCE, "path", "bytes", "committed_at", "seconds"}
COMPLETE = {*REFERENCE, "ranks_committed", "ranks_expected", "committed_at"}
TOTALS = {"submitted", "committed", "failed", "retried", "skipped", "superseded", "pruned", "bytes_written"}
STORAGE = {"free_bytes", "total_bytes", "checkpoints_left"}
ERROR = {"at", "code", "message", "hint", "step", "stage", "tp_rank"}
UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


def save(root: Path, steps: list[int], *, postfix: str | None = None) -> list[Path]:
    """Save these steps without a daemon; return the paths."""
    with Checkpointer(root, async_ckpt=False, keep_last=10, postfix=postfix) as checkpointer:
        if checkpointer.latest() is not None:
            checkpointer.resume()
        paths = [checkpointer.save(step, state={"value": torch.full((5000,), 1.0 * step)}) for step in steps]
        return [path for ticket in paths if (path := ticket.wait_committed(0)) is not None]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one root of every kind."""
    top = tmp_path_factory.mktemp("roots")
    (top / "empty").mkdir()
    write_stage_shard(top / "partial", tp=2, step=7)
    (top / "legacy" / "checkpoint_0").mkdir(parents=True)
    torch.save({"epoch": 1, "step": 5}, top / "legacy" / "checkpoint_0" / "ckpt_step_5_epoch_1.pt")
    save(top / "complete", [1, 2])
    newest = save(top / "flipped", [1, 2])[-1]
    flip_bit(newest, data_offset(newest) + 100)
    os.truncate(save(top / "cut", [1, 2])[-1], 9000)
    os.truncate(save(top / "emptied", [1, 2])[-1], 0)
    save(top / "named", [3], postfix="a b")
    return top


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt_service", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def both(code: int, *arguments: str) -> tuple[str, Any, str]:
    """Run a verb with and without ``--json``, both to end with ``code``; return text, document and talk."""
    runs = [started(*arguments), started(*arguments, "--json")]
    (text, talk), (document, _) = (process.communicate(timeout=60) for process in runs)
    assert [process.returncode for process in runs] == [code, code], (text, talk, document)
    return text, json.loads(document) if document else None, talk


@pytest.mark.parametrize(
    ("kind", "verb", "code"),
    [
        ("empty", "status", 4),
        ("empty", "latest", 5),
        ("partial", "latest", 5),
        ("legacy", "latest", 5),
        ("complete", "status", 4),
        ("flipped", "latest", 0),
        ("cut", "latest", 0),
        ("cut", "verify", 0),
        ("emptied", "latest", 0),
    ],
)
def test_the_exit_code_says_what_is_there(roots: Path, kind: str, verb: str, code: int) -> None:
    text, document, talk = both(code, verb, str(roots / kind))
    if code in (4, 5):
        assert text == "", "what is missing is talk"
        assert str(roots / kind) in talk
    if code == 5:
        assert document is None
    if code == 4:
        assert document == {"schema_version": 1, "hosts": []}


def test_ls_gives_every_file_a_state_and_a_reason(roots: Path) -> None:
    def states(kind: str) -> list[tuple[int, str, str | None]]:
        text, document, _ = both(0, "ls", str(roots / kind))
        assert document.keys() == {"schema_version", "root", "checkpoints"}
        assert document["root"] == str(roots / kind)
        for row in document["checkpoints"]:
            assert row.keys() == LS_ROW
            assert UTC.fullmatch(row["committed_at"])
            assert row["state"] in text
            assert row["reason"] is None or row["reason"] in text
        return [(row["step"], row["state"], row["reason"]) for row in document["checkpoints"]]

    assert states("empty") == []
    assert states("partial") == [(7, "partial", "stage 0 tp 1 not committed yet")]
    assert states("legacy") == [(5, "legacy", "written without a manifest")]
    assert states("complete") == [(2, "complete", None), (1, "complete", None)]
    (_, state, reason), older = states("cut")
    assert (state, older) == ("damaged", (1, "complete", None))
    assert reason is not None
    assert "9000 bytes" in reason
    emptied = states("emptied")
    assert [(step, state) for step, state, _ in emptied] in (
        [(2, "damaged"), (1, "complete")],
        [(1, "complete"), (2, "damaged")],
    )


def test_latest_names_the_checkpoint_and_its_files(roots: Path) -> None:
    root = roots / "complete"
    path = root / "checkpoint_0" / "ckpt_step_2_epoch_0.pt"
    text, document, _ = both(0, "latest", str(root))
    assert text.startswith("step 2 epoch 0")
    assert document.keys() == LATEST
    assert UTC.fullmatch(document.pop("committed_at"))
    assert document == {
        "schema_version": 1,
        "root": str(root),
        "kind": "train",
        "attempt": 1,
        "sequence": 2,
        "epoch": 0,
        "step": 2,
        "paths": [{"stage": 0, "tp_rank": 0, "path": str(path)}],
    }
    assert run("latest", "--path", str(root)).stdout == f"{path}\n"
    assert run("latest", "--path", str(roots / "cut")).stdout.endswith("ckpt_step_1_epoch_0.pt\n")


def test_verify_names_file_and_record(roots: Path) -> None:
    text, document, _ = both(6, "verify", str(roots / "flipped"))
    assert document.keys() == VERIFY
    assert (document["checked"], document["bad"]) == (1, 1)
    (row,) = document["files"]
    assert row.keys() == VERIFY_ROW
    assert not row["ok"]
    assert re.search(r"data/0: CRC [0-9a-f]{8}, expected [0-9a-f]{8}", row["problem"])
    assert row["path"] in text
    assert row["problem"] in text
    text, document, _ = both(6, "verify", "--all", str(roots / "cut"))
    assert (document["checked"], document["bad"]) == (2, 1)
    assert [row["ok"] for row in document["files"]] == [False, True]
    text, document, _ = both(0, "verify", str(roots / "complete"))
    (row,) = document["files"]
    assert row["problem"] is None
    assert row["records"] >= 6
    assert row["bytes"] == Path(row["path"]).stat().st_size


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt_service", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("verb", [*READING, ["drain"], ["stop"], ["pin", "2"], ["unpin", "2"], ["run"]])
def test_an_unknown_root_is_named(tmp_path: Path, verb: list[str]) -> None:
    missing = tmp_path / "nowhere"
    done = run(*verb, str(missing))
    assert (done.returncode, done.stdout) == (2, "")
    assert str(missing) in done.stderr
    assert "Traceback" not in done.stderr
    assert not missing.exists(), "looking must not create"


def test_a_postfix_is_a_run_of_its_own(roots: Path) -> None:
    root = str(roots / "named")
    assert run("latest", root).returncode == 5
    found = run("latest", root, "--postfix", "a b", "--path")
    assert found.stdout == f"{root}/checkpoint_a b_0/ckpt_step_3_epoch_0.pt\n"
    refused = run("ls", root, "--postfix", "1/2")
    assert refused.returncode == 2
    assert "postfix='1/2'" in refused.stderr


def test_usage_errors_and_the_version() -> None:
    assert run("ls", "--no-such-option").returncode == 2
    assert run("no-such-verb").returncode == 2
    done = run("version")
    assert (done.returncode, done.stdout) == (0, f"ckpt-service {__version__} (protocol 1, format 1)\n")
    assert run("--version").stdout == done.stdout


@pytest.mark.parametrize("verb", READING)
def test_a_reading_verb_answers_at_once(roots: Path, verb: list[str]) -> None:
    def seconds() -> float:
        began = time.monotonic()
        run(*verb, str(roots / "complete"))
        return time.monotonic() - began

    # 0.5 s is what we promise; as much again, and more tries, for a machine that is busy with other tests.
    assert any(seconds() < 1.0 for _ in range(8))


@pytest.mark.parametrize("verb", READING)
def test_a_reading_verb_never_imports_torch(roots: Path, verb: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ckpt_service", *verb, str(roots / "complete")]
    imported = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "ckpt_service.scan" in imported
    assert not re.search(r"\b(torch|trainer_hooks|numpy)\b", imported)


def test_the_package_never_imports_torch() -> None:
    script = """
import pkgutil, sys, importlib
import ckpt_service
for module in pkgutil.walk_packages(ckpt_service.__path__, "ckpt_service."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not {"torch", "trainer_hooks", "numpy"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("arguments", [("ls",), ("status", "--json"), ("verify",)])
def test_a_reader_that_has_enough_is_no_error_to_talk_about(roots: Path, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_service", *arguments, str(roots / "complete")],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode != 2


def test_head_gets_its_line(tmp_path: Path) -> None:
    for step in range(1, 1500):
        (tmp_path / "checkpoint_0").mkdir(exist_ok=True)
        (tmp_path / "checkpoint_0" / f"ckpt_step_{step}_epoch_0.pt").touch()
    command = f'"{sys.executable}" -m ckpt_service ls "{tmp_path}" | head -1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.split()[:2] == ["STEP", "EPOCH"]
    assert done.stderr == ""


# --- with a daemon ----------------------------------------------------------------------------------------------------

SAVES = """
checkpointer = Checkpointer(root)
for step in range(1, 3):
    checkpointer.save(step, state=state(step, megabytes=1)).wait_committed(60)
say("saved")
hear("more")
for step, megabytes in ((3, int(sys.stdin.readline())), (4, 1)):
    checkpointer.save(step, state=state(step, megabytes)).accepted.result(60)
say("accepted")
hear("close")
checkpointer.close()
say("closed")
"""


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run with two committed saves and a live daemon that writes 16 MB/s."""
    directory = RunDirectory(tmp_path / "run", {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20)})
    directory.trainer(SAVES).says("saved")
    yield directory
    directory.clean_up()


def document_of(directory: RunDirectory, code: int, **env: str) -> dict[str, Any]:
    done = directory.cli("status", str(directory.root), "--json", **env)
    assert done.returncode == code, (done.stdout, done.stderr)
    whole = json.loads(done.stdout)
    assert whole.keys() == {"schema_version", "hosts"}
    (host,) = whole["hosts"]
    assert isinstance(host, dict)
    return host


def test_status_of_a_daemon_at_work(alive: RunDirectory) -> None:
    (trainer,) = alive.trainers
    trainer.hears("more\n64")
    trainer.says("accepted")

    def shown() -> bool:
        status = alive.status()
        return status is not None and bool(status.pending) and status.writing[0].bytes_per_second is not None

    wait_for(shown, "the status shows the write")
    alive.signal_daemon(signal.SIGSTOP)  # so that all below look at the same moment
    host = document_of(alive, 0)
    assert host.keys() == STATUS
    assert host["daemon"].keys() == DAEMON
    assert host["queue"].keys() == QUEUE
    assert [write.keys() for write in host["writing"]] == [WRITING]
    assert [waiting.keys() for waiting in host["pending"]] == [PENDING]
    assert [shard.keys() for shard in host["shards"]] == [SHARD]
    (shard,) = host["shards"]
    assert shard["last_submitted"].keys() == REFERENCE
    assert shard["last_committed"].keys() == COMMITTED
    assert [kept.keys() for kept in shard["kept"]] == [REFERENCE, REFERENCE]
    assert host["last_complete"].keys() == COMPLETE
    assert host["totals"].keys() == TOTALS
    assert host["storage"].keys() == STORAGE
    assert host["errors"] == []
    assert (host["root"], host["daemon"]["state"], host["attempt"]) == (str(alive.root), "writing", 1)
    assert host["last_complete"]["step"] == 2
    assert (host["writing"][0]["step"], host["pending"][0]["step"]) == (3, 4)
    assert host["queue"]["depth"] == 1
    assert 0 < host["writing"][0]["bytes_done"] < host["writing"][0]["bytes_total"]
    assert (host["totals"]["submitted"], host["totals"]["committed"]) == (4, 2)
    for moment in (host["daemon"]["heartbeat_at"], host["pending"][0]["submitted_at"]):
        assert UTC.fullmatch(moment)
    talk = alive.cli("status", str(alive.root)).stdout
    for word in ("writing", "queued: step 4", "last complete: step 2"):
        assert word in talk


def test_status_of_a_daemon_that_left(alive: RunDirectory) -> None:
    (trainer,) = alive.trainers
    assert document_of(alive, 0)["daemon"]["state"] == "idle"
    assert alive.cli("latest", "--path", str(alive.root)).stdout.endswith("ckpt_step_2_epoch_0.pt\n")
    assert alive.cli("verify", "--all", str(alive.root)).returncode == 0
    trainer.hears("more\n1")
    trainer.hears("close")
    trainer.says("closed")
    wait_for(alive.daemon_has_left, "the daemon leaves")
    # Long after, the heartbeat is old; a daemon that said goodbye is still no trouble.
    host = document_of(alive, 0, CKPT_SERVICE_STALE_SECONDS="0.001")
    assert (host["daemon"]["state"], host["last_complete"]["step"]) == ("stopped", 4)
    assert (host["attempt"], host["writing"], host["pending"]) == (1, [], [])


def test_status_of_a_daemon_that_was_killed(alive: RunDirectory) -> None:
    (trainer,) = alive.trainers
    document_of(alive, 0)
    trainer.kill()
    alive.signal_daemon(signal.SIGKILL)
    wait_for(alive.daemon_has_left, "the daemon is dead")
    assert "DEAD" in alive.cli("status", str(alive.root), CKPT_SERVICE_STALE_SECONDS="1000").stdout
    elsewhere = {"CKPT_SERVICE_HOST": "elsewhere"}  # there, only the age of the heartbeat tells
    assert alive.cli("status", str(alive.root), CKPT_SERVICE_STALE_SECONDS="1000", **elsewhere).returncode == 0
    wait_for(
        lambda: alive.cli("status", str(alive.root), CKPT_SERVICE_STALE_SECONDS="1", **elsewhere).returncode == 4,
        "the status is called stale",
    )
    done = alive.cli("status", str(alive.root), CKPT_SERVICE_STALE_SECONDS="1")
    assert "STALE" in done.stdout
    assert alive.cli("latest", str(alive.root)).returncode == 0, "the files speak for themselves"


def test_status_of_a_daemon_that_could_not_save(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        checkpointer = Checkpointer(root)  # its daemon inherits the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpointer.save(1, state=state(1, megabytes=1)).committed.exception(60)
        say("failed")
        hear("end")
        os._exit(0)
        """
    )
    trainer.says("failed")
    wait_for(lambda: (status := run.status()) and status.errors, "the failure stands in the status")
    host = document_of(run, 3)
    assert host["daemon"]["state"] == "degraded"
    assert [error.keys() for error in host["errors"]] == [ERROR]
    (error,) = host["errors"]
    assert (error["code"], error["step"]) == ("EFBIG", 1)
    assert "ulimit -f" in error["hint"]
    assert host["shards"][0]["consecutive_failures"] == 1
    assert host["totals"]["failed"] == 1
    assert "step 1" in run.cli("status", str(run.root)).stdout
    trainer.hears("end")
