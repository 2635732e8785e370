"""The verbs that show, wait for, keep and delete single checkpoints, and what is true of all verbs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import OBEY, RunDirectory, wait_for
from support.shards import write_attempt, write_shard

UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")
SHOW = {
    *("schema_version", "root", "kind", "attempt", "sequence", "epoch", "step", "state", "reason", "pinned", "bytes"),
    *("ranks_committed", "ranks_expected", "committed_at", "run_id", "topology", "attempt_record", "shards", "others"),
}
SHOWN_SHARD = {
    *("stage", "tp_rank", "path", "bytes", "problem", "sequence", "created_at", "producer", "tensors", "user"),
    "absent_replicas",
}


def cli(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt_service", *map(str, arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def document(*arguments: str | Path) -> Any:
    done = cli(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stage(root: Path, number: int = 0) -> Path:
    return root / f"checkpoint_{number}"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three complete checkpoints (steps 100, 200, 300) of one attempt on two ranks."""
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        for rank in (0, 1):
            write_shard(stage(tmp_path), step=100 * sequence, sequence=sequence, tp=2, tp_rank=rank)
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in stage(root).glob("*.pt"))


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_all_about_one(saved: Path) -> None:
    write_attempt(saved, 2, (1, 2), explicit=True)
    for rank in (0, 1):
        absent = {"user": {"absent_replicas": "1 3"}} if rank else {}
        write_shard(stage(saved), step=300, sequence=1, attempt=2, tp=2, tp_rank=rank, **absent)
    cli("pin", "300", saved)
    found = document("show", "300", saved)
    assert found.keys() == SHOW
    assert [shard.keys() for shard in found["shards"]] == [SHOWN_SHARD, SHOWN_SHARD]
    assert (found["state"], found["attempt"], found["kind"], found["pinned"]) == ("complete", 2, "train", True)
    assert found["topology"] == {"pp": 1, "tp": 2, "dp": 1}
    assert found["attempt_record"]["resumed_from"] == {"attempt": 1, "sequence": 2, "explicit": True}
    assert [shard["absent_replicas"] for shard in found["shards"]] == [[], [1, 3]]
    for shard in found["shards"]:
        assert UTC.fullmatch(shard["created_at"])
        assert os.path.getsize(shard["path"]) == shard["bytes"]
    (other,) = found["others"]
    assert (other["attempt"], other["state"]) == (1, "abandoned")
    text = cli("show", "300:0", saved).stdout
    for word in (
        "complete",
        "pinned",
        "attempt 2",
        "resumed from attempt 1 save 2",
        "ranks 1, 3",
        "abandoned",
        "2 of 2",
    ):
        assert word in text
    for shard in found["shards"]:
        assert shard["path"] in text


def test_show_finds_every_kind_and_what_is_wrong(saved: Path) -> None:
    write_shard(saved / "lora_checkpoint_stage_0", kind="lora", step=700, sequence=1)
    (stage(saved) / "ckpt_step_5_epoch_1.pt").write_bytes(b"")
    os.truncate(stage(saved) / "ckpt_step_200_epoch_0_tp1.pt", 9000)
    assert document("show", "700", saved)["kind"] == "lora"
    assert document("show", "5", saved)["state"] == "damaged"
    assert document("show", "200", saved)["shards"][1]["problem"].startswith("it has 9000 bytes")
    assert "it has 9000 bytes" in cli("show", "200", saved).stdout


@pytest.mark.parametrize("verb", ["show", "pin", "unpin"])
def test_a_step_that_means_nothing_or_too_much(saved: Path, verb: str) -> None:
    for rank in (0, 1):
        write_shard(stage(saved), step=100, epoch=1, sequence=4, tp=2, tp_rank=rank)
    for step, code, said in (
        ("x", 2, "STEP=x: not a number"),
        ("100", 2, "100:0, 100:1"),
        ("400", 1, "no checkpoint of step 400"),
        ("200:3", 1, "no checkpoint of step 200 epoch 3"),
    ):
        done = cli(verb, step, saved)
        assert (done.returncode, done.stdout) == (code, ""), (step, done.stderr)
        assert said in done.stderr
    assert cli(verb, "100:1", saved).returncode == 0


def test_an_empty_root_has_no_checkpoint(tmp_path: Path) -> None:
    for arguments in (("show", "1"), ("wait",), ("wait", "1"), ("latest",)):
        assert cli(*arguments, tmp_path).returncode == 5
    assert list(tmp_path.iterdir()) == []


# --- wait -------------------------------------------------------------------------------------------------------------

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20)}
STARTS = "checkpointer = Checkpointer(root)\nsay('started')\n" + OBEY


def started(verb: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckpt_service", verb, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_wait_for_what_is_there_and_for_what_never_comes(saved: Path) -> None:
    assert document("wait", saved)["checkpoint"]["step"] == 300
    found = document("wait", "200", saved)["checkpoint"]
    assert [path["path"] for path in found["paths"]] == [
        f"{saved}/checkpoint_0/ckpt_step_200_epoch_0_tp{rank}.pt" for rank in (0, 1)
    ]
    assert cli("wait", "400", saved).returncode == 5
    write_shard(stage(saved), step=400, sequence=4, tp=2)
    done = cli("wait", saved)
    assert (done.returncode, done.stdout) == (1, "")
    assert "step 400" in done.stderr
    refused = cli("wait", "nowhere")
    assert refused.returncode == 2
    assert "nowhere" in refused.stderr
    assert cli("wait", saved, "--timeout", "nan").returncode == 2


def test_wait_for_what_is_pending_and_for_a_step_to_come(run: RunDirectory) -> None:
    trainer = run.trainer(STARTS, **SLOW)
    trainer.says("started")
    assert run.cli("wait", str(run.root), "--timeout", "0.1").returncode == 7
    fifth = started("wait", "5", run.root)
    trainer.hears("checkpointer.save(4, state=state(4, megabytes=16)).accepted.result(60); say('accepted')")
    trainer.says("accepted")
    wait_for(lambda: (status := run.status()) and (status.writing or status.pending), "the status shows it")
    late = run.cli("wait", "4", str(run.root), "--timeout", "0.1")
    assert (late.returncode, "step 4" in late.stderr) == (7, True)
    done = run.cli("wait", str(run.root))
    assert done.stdout.startswith("step 4 epoch 0"), done.stderr
    assert run.files() == ["ckpt_step_4_epoch_0.pt"]
    assert fifth.poll() is None
    trainer.hears("checkpointer.save(5, state=state(5, megabytes=1)).accepted.result(60)")
    out, talk = fifth.communicate(timeout=60)
    assert (fifth.returncode, talk) == (0, ""), "no progress where nobody watches"
    assert out.startswith("step 5 epoch 0")
    trainer.hears("checkpointer.close(); say('closed')")
    trainer.says("closed")


def test_wait_shows_its_progress_on_a_terminal(run: RunDirectory) -> None:
    trainer = run.trainer(STARTS, **SLOW)
    trainer.says("started")
    trainer.hears("checkpointer.save(4, state=state(4, megabytes=24)).accepted.result(60); say('accepted')")
    trainer.says("accepted")
    terminal, stderr = os.openpty()
    command = [sys.executable, "-m", "ckpt_service", "wait", "4", str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as waiting, open(terminal, "rb", 0) as screen:
        os.close(stderr)
        seen = b""
        while not re.search(rb"writing step 4: \d+ % of 25.2 MB at [\d.]+ MB/s, \d s left", seen):
            seen += screen.read(4096)
        out, _ = waiting.communicate(timeout=60)
        assert (waiting.returncode, out.split()[:2]) == (0, [b"step", b"4"])
    trainer.kill()


def test_wait_for_a_save_that_fails(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        checkpointer = Checkpointer(root)  # its daemon inherits the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        say("started")
        hear("save")
        checkpointer.save(1, state=state(1, megabytes=1)).committed.exception(60)
        say("failed")
        hear("end")
        os._exit(0)
        """
    )
    trainer.says("started")
    waiting = started("wait", "1", run.root)
    trainer.hears("save")
    _, talk = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "writing step 1 failed" in talk
    trainer.says("failed")
    trainer.hears("end")


# --- pin and prune ----------------------------------------------------------------------------------------------------


def test_a_pin_is_heeded_by_a_daemon_that_runs(run: RunDirectory) -> None:
    trainer = run.trainer(STARTS)
    trainer.says("started")

    def save(step: int) -> None:
        trainer.hears(f"checkpointer.save({step}, state=state({step}, 1)).wait_committed(60); say('saved')")
        trainer.says("saved")

    save(1)
    for _ in range(2):
        done = run.cli("pin", "1", str(run.root))
        assert (done.returncode, "pinned: step 1" in done.stderr) == (0, True)
    assert [path.name for path in (run.root / ".ckpt_service" / "pins").iterdir()] == ["1-1"]
    for step in (2, 3, 4):
        save(step)
    wait_for(lambda: run.files() == [f"ckpt_step_{step}_epoch_0.pt" for step in (1, 3, 4)], "2 is pruned, 1 stays")
    for said in ("unpinned", "not pinned"):
        done = run.cli("unpin", "1", str(run.root))
        assert (done.returncode, f"{said}: step 1" in done.stderr) == (0, True)
    save(5)
    wait_for(lambda: run.files() == [f"ckpt_step_{step}_epoch_0.pt" for step in (4, 5)], "1 is pruned as well")
    trainer.hears("checkpointer.close(); say('closed')")
    trainer.says("closed")


def test_what_is_worth_a_pin(saved: Path) -> None:
    write_shard(stage(saved), step=400, sequence=4, tp=2)
    assert cli("pin", "400", saved).returncode == 0, "it can still complete"
    write_attempt(saved, 2, (1, 3))
    for rank in (0, 1):
        write_shard(stage(saved), step=500, sequence=1, attempt=2, tp=2, tp_rank=rank)
    write_shard(stage(saved), step=150, sequence=9, tp=2)
    dead = cli("pin", "150", saved)
    assert (dead.returncode, "step 150 cannot be pinned: stage 0 tp 1" in dead.stderr) == (1, True), dead.stderr
    (stage(saved) / "ckpt_step_5_epoch_0.pt").write_bytes(b"\x80\x02.")
    old = cli("pin", "5", saved)
    assert (old.returncode, "the old trainer" in old.stderr) == (1, True)


def test_prune_says_why_and_does_what_it_said(saved: Path) -> None:
    cli("pin", "100", saved)
    write_shard(stage(saved), step=400, sequence=4, tp=2)
    before = names(saved)
    planned = document("prune", saved, "--keep", "1", "--dry-run")
    assert names(saved) == before
    assert planned["dry_run"]
    assert {row["step"]: (row["delete"], row["reason"]) for row in planned["files"]} == {
        100: (False, "pinned"),
        200: (True, "older than the last 1"),
        300: (False, "the newest complete checkpoint"),
        400: (False, "it can still complete"),
    }
    doomed = [row for row in planned["files"] if row["delete"]]
    assert planned["bytes_deleted"] == sum(os.path.getsize(row["path"]) for row in doomed)
    done = cli("prune", saved, "--keep", "1")
    assert done.returncode == 0
    for row in planned["files"]:
        assert f"{'deleted' if row['delete'] else 'keep   '} {row['path']}: {row['reason']}\n" in done.stdout
    assert [path for path in before if path not in names(saved)] == [os.path.basename(row["path"]) for row in doomed]
    assert "deleted 0 files" in cli("prune", saved, "--keep", "1").stderr


def test_prune_looks_at_every_stage_and_kind(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        for number in (0, 1):
            write_shard(stage(tmp_path, number), step=sequence, sequence=sequence, pp=2, stage=number)
            lora = tmp_path / f"lora_checkpoint_stage_{number}"
            write_shard(lora, kind="lora", step=sequence, sequence=sequence, pp=2, stage=number)
        write_shard(tmp_path / f"hf{sequence}", kind="hf", step=sequence, sequence=sequence, tp=1)
    assert cli("prune", tmp_path, "--keep", "1", "--keep-every", "2").returncode == 0
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt"))
    assert left == [
        *(f"checkpoint_{number}/ckpt_step_{step}_epoch_0.pt" for number in (0, 1) for step in (2, 3)),
        *(f"hf{place}/stage0_tp0.pt" for place in (1, 2, 3)),
        *(f"lora_checkpoint_stage_{number}/lora_step_{step}_epoch_0.pt" for number in (0, 1) for step in (2, 3)),
    ]


@pytest.mark.parametrize("value", ["0", "-3", "x"])
def test_prune_keeps_at_least_one(saved: Path, value: str) -> None:
    before = names(saved)
    done = cli("prune", saved, "--keep", value)
    assert (done.returncode, names(saved)) == (2, before)
    assert "--keep" in done.stderr
    assert cli("prune", saved).returncode == 2


def test_prune_stops_at_a_file_that_cannot_be_read(saved: Path) -> None:
    before = names(saved)
    path = stage(saved) / "ckpt_step_250_epoch_0_tp0.pt"
    path.symlink_to(path.name)  # opening it fails, also for root
    done = cli("prune", saved, "--keep", "1")
    assert (done.returncode, names(saved)) == (1, sorted([*before, path.name]))
    assert f"nothing is deleted: {path} cannot be opened" in done.stderr


def test_prune_waits_for_a_run_that_is_starting(run: RunDirectory) -> None:
    run.trainer(
        """
        checkpointer = Checkpointer(root, keep_last=9)
        for step in range(1, 5):
            checkpointer.save(step, state=state(step, 1))
        checkpointer.close()
        """
    ).ends()
    trainer = run.trainer(STARTS)
    trainer.says("started")
    refused = run.cli("prune", str(run.root), "--keep", "2")
    assert (refused.returncode, len(run.files())) == (1, 4)
    assert f"a run is starting on {run.root} (host {os.uname().nodename}, pid {trainer.pid})" in refused.stderr
    trainer.hears("checkpointer.resume(step=3); say('resumed')")
    trainer.says("resumed")
    assert run.cli("prune", str(run.root), "--keep", "2").returncode == 0
    assert "ckpt_step_3_epoch_0.pt" in run.files(), "the running attempt started from it"
    trainer.hears("checkpointer.close(); say('closed')")
    trainer.says("closed")


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    service = tmp_path / ".ckpt_service"
    service.mkdir()
    (service / "daemon.here.log.1").write_text("1\n2\n")
    (service / "daemon.here.log").write_text("3\n4\n")
    return tmp_path


def test_logs_are_printed_in_order(logged: Path) -> None:
    here = {"CKPT_SERVICE_HOST": "here"}
    assert cli("logs", logged, **here).stdout == "1\n2\n3\n4\n"
    assert cli("logs", logged, "-n", "3", **here).stdout == "2\n3\n4\n"
    assert cli("logs", logged, "-n", "0", **here).stdout == ""
    assert cli("logs", logged, "-n", "-1", **here).returncode == 2
    done = cli("logs", logged, CKPT_SERVICE_HOST="there")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there are logs of here" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_logs_are_followed_over_a_rotation_until_a_signal(logged: Path, number: signal.Signals, code: int) -> None:
    log = logged / ".ckpt_service" / "daemon.here.log"
    command = [sys.executable, "-m", "ckpt_service", "logs", "-f", "-n", "1", str(logged)]
    with subprocess.Popen(
        command, env={**os.environ, "CKPT_SERVICE_HOST": "here"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"4\n"
        with log.open("a") as file:
            file.write("5\n")
        assert process.stdout.readline() == b"5\n"
        with log.open("a") as file:
            file.write("6\n")
        log.rename(f"{log}.1")
        log.write_text("7\n")
        assert [process.stdout.readline() for _ in range(2)] == [b"6\n", b"7\n"]
        process.send_signal(number)
        assert process.wait(30) == code  # a shell says 143 of a process that SIGTERM has ended
        assert process.stderr.read() == b""


# --- all verbs --------------------------------------------------------------------------------------------------------


def test_other_postfixes_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "checkpoint_a b_0")
    write_shard(tmp_path / "checkpoint_x_0")
    hint = "it has runs with --postfix 'a b', with --postfix x"
    asked = (
        ("status",),
        ("ls",),
        ("latest",),
        ("verify",),
        ("show", "1"),
        ("wait",),
        ("logs",),
        ("prune", "--keep", "1"),
    )
    for arguments in asked:
        assert hint in cli(*arguments, tmp_path).stderr, arguments
    write_shard(tmp_path / "checkpoint_0")
    assert "it has runs without --postfix, with --postfix 'a b'" in cli("latest", tmp_path, "--postfix", "x y").stderr
    assert cli("show", "100", tmp_path, "--postfix", "x").returncode == 0


def test_files_of_the_old_trainer_are_not_bad(saved: Path) -> None:
    torch.save({"epoch": 1, "step": 5}, stage(saved) / "ckpt_step_5_epoch_1.pt")
    done = cli("verify", "--all", saved)
    assert done.returncode == 0
    assert "?    " in done.stdout
    found = document("verify", "--all", saved)
    assert (found["checked"], found["bad"], len(found["files"])) == (6, 0, 7)
    assert [(row["ok"], row["problem"]) for row in found["files"] if not row["ok"]] == [
        (None, "written without a manifest: its bytes cannot be checked")
    ]


def test_what_the_system_refuses_is_said_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / ".ckpt_service").write_text("in the way")
    write_shard(stage(tmp_path))
    done = cli("pin", "100", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert str(tmp_path / ".ckpt_service") in done.stderr


def test_the_demo_without_torch_says_what_to_do() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['demo']; from ckpt_service.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ckpt-service: the demo trains with PyTorch")
    assert "pip install torch" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", ""], {"300", "200", "100"}),
        (["show", "2"], {"200"}),
        (["pin", "1"], {"100"}),
        (["wait", "3"], {"300"}),
        (["wait", "che"], {"checkpoint_0", "checkpoint_other_0"}),
        (["show", "--postfix", ""], {"other"}),
        (["show", "--postfix", "other", ""], {"7"}),
        (["unp"], {"unpin"}),
    ],
)
def test_the_shell_completes_steps_and_postfixes(saved: Path, words: list[str], expected: set[str]) -> None:
    write_shard(saved / "checkpoint_other_0", step=7)
    answer = _completion(saved, lambda program: [program, *words])
    assert set(answer.split()) == expected


def _completion(cwd: Path, words: Callable[[str], list[str]]) -> str:
    program = str(Path(sys.executable).with_name("ckpt-service"))
    line = words("ckpt-service")
    asked = {"_CKPT_SERVICE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    done = subprocess.run([program], env={**os.environ, **asked}, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def test_the_shell_is_given_its_completion() -> None:
    # As typed at a prompt: the program looks for the shell among the processes above it, where a launcher has none.
    typed = f"{shlex.quote(str(Path(sys.executable).with_name('ckpt-service')))} --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True)
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert "complete -o default -F" in done.stdout


def test_status_is_watched_until_the_daemon_has_left(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
        say("saved")
        hear("end")
        checkpointer.close()
        """
    )
    trainer.says("saved")
    terminal, other_end = os.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-m", "ckpt_service", "status", "--watch", str(run.root)],
        stdout=other_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(other_end)
    seen = b""
    while seen.count(b"seen at ") < 2:  # it is shown again and again
        seen += os.read(terminal, 65536)
    assert b"last complete: step 1 epoch 0" in seen
    trainer.hears("end")
    trainer.ends()
    with contextlib.suppress(OSError):  # a terminal whose other end is closed is an error
        while more := os.read(terminal, 65536):
            seen += more
    os.close(terminal)
    assert watching.wait(30) == 0
    assert b": stopped (pid " in seen.rpartition(b"seen at ")[2]


def test_status_is_watched_by_people_only(saved: Path) -> None:
    done = cli("status", "--watch", "--json", str(saved))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ckpt-service: --watch: it is for people")
