"""The demo: four trainers and a daemon, as a user starts them; and that it would notice what it claims to notice."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RunDirectory
from torch import Tensor

from trainer_hooks import Topology, demo
from trainer_hooks.demo import compare, scenario
from trainer_hooks.demo.data import ShardedSampler
from trainer_hooks.demo.journal import JOURNAL, JournalWriter, Stepped, final_state_name
from trainer_hooks.demo.model import GPT
from trainer_hooks.demo.parallel import Mesh, clip_gradients
from trainer_hooks.demo.recipe import Recipe, make_recipe
from trainer_hooks.demo.report import Report, Timing
from trainer_hooks.demo.screen import Screen

_LIMIT_SECONDS = 170


@pytest.mark.timeout(_LIMIT_SECONDS + 10)
def test_four_trainers_killed_twice_end_bit_equal(tmp_path: Path) -> None:
    done = subprocess.run(
        _demo("--steps", "12"), env=_environment(tmp_path), capture_output=True, text=True, timeout=_LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "SIGKILL of all 4 trainers after" in done.stderr
    assert re.search(r"SIGKILL of all 4 trainers and of their daemon, pid \d+,", done.stderr)
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [(row[1], row[2], row[4]) for row in rows[1:]] == [
        ("uninterrupted", "4 (tp 2, dp 2)", "ran to the end"),
        ("killed, leg 1", "4 (tp 2, dp 2)", "all 4 trainers killed in the write of step 4"),
        ("killed, leg 2", "4 (tp 2, dp 2)", "daemon and all 4 trainers killed in the write of step 8"),
        ("killed, leg 3", "4 (tp 2, dp 2)", "ran to the end"),
    ]
    assert [row[5] for row in rows[1:4]] == ["", "", "step 4, disk"]
    assert rows[4][5] in ("step 6, disk", "step 4, disk"), "6 if its slowed write was over before the second kill"
    assert "bit-equal: yes, on 4 ranks" in done.stdout
    assert list(tmp_path.glob("ckpt-service-demo-*")) == []
    assert _processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "trainers", "number", "code"), [([], 4, signal.SIGINT, 130), (["--single"], 1, signal.SIGTERM, 143)]
)
def test_a_demo_that_is_stopped_leaves_no_process(
    tmp_path: Path, options: list[str], trainers: int, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        _demo("--steps", "600", *options),
        env=_environment(tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("from the beginning" in line for line in process.stderr)
        assert len(_processes_of(tmp_path)) > trainers, "and their daemon"
        process.send_signal(number)
        _, talk = process.communicate(timeout=60)
    assert process.returncode == code, talk
    assert _processes_of(tmp_path) == []


def test_split_layers_give_the_gradients_of_the_whole_model(run: RunDirectory, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        run.trainer(
            """
            from dataclasses import replace
            from trainer_hooks import Topology
            from trainer_hooks.demo.model import GPT
            from trainer_hooks.demo.parallel import Mesh, average_gradients, clip_gradients
            from trainer_hooks.demo.recipe import make_recipe
            mesh = Mesh.join(Topology.from_env(tp=2))
            model = GPT(replace(make_recipe(steps=6, tiny=True), dropout=0.0), mesh)
            tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(mesh.topology.dp_rank))
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            average_gradients(model, mesh)
            norm = clip_gradients(model, 0.5, mesh)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            torch.save({"norm": norm, "gradients": gradients}, f"rank_{mesh.topology.rank}.pt")
            mesh.leave()
            """,
            RANK=str(rank),
            WORLD_SIZE="4",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(4)
    ]
    for rank in ranks:
        rank.ends()
    norm, whole = _unsplit_gradients()
    assert norm > 0.5, "nothing would be clipped"
    for rank in range(4):
        found = torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, _share(whole[name], gradient, rank % 2), msg=f"rank {rank}: {name}")


def test_replicas_read_different_samples_and_resume_in_place() -> None:
    samplers = [ShardedSampler(24, 3, seed=5, replica=replica, replicas=2) for replica in range(2)]
    for sampler in samplers:
        sampler.next_batch()
    states = [sampler.state_dict() for sampler in samplers]
    batches = [[sampler.next_batch() for _ in range(7)] for sampler in samplers]
    seen = [index for replica in batches for batch in replica[-4:] for index in batch]
    assert sorted(seen) == list(range(24)), "an epoch shows each sample to one replica, once"
    for replica, state in enumerate(states):
        resumed = ShardedSampler(24, 3, seed=6, replica=replica, replicas=2)
        resumed.load_state_dict(state)
        assert [resumed.next_batch() for _ in range(7)] == batches[replica]


def test_equal_records_compare_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _records(tmp_path / "a"), _records(tmp_path / "b")
    assert compare.main([str(a), str(b)]) == 0
    assert "bit-equal: yes, on 4 ranks (12 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("model", "weight"), "model.weight: 1 of 6 values differ"),
        (("optimizer", "exp_avg"), "optimizer.exp_avg: 1 of 6 values differ"),
        (("rng", "torch"), "rng.torch: 1 of 6 values differ"),
        (("scheduler", "last_epoch"), "scheduler.last_epoch: 2 and 3"),
        (("sampler", "position"), "sampler.position: 8 and 9"),
    ],
)
def test_one_changed_value_on_any_rank_is_found_and_named(
    tmp_path: Path, rank: int, path: tuple[str, str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _records(tmp_path / "a"), _records(tmp_path / "b")
    file = b / final_state_name(rank)
    state = torch.load(file, weights_only=True)
    part, name = path
    if isinstance(state[part][name], Tensor):
        state[part][name][3] += 1
    else:
        state[part][name] += 1
    torch.save(state, file)
    assert compare.main([str(a), str(b)]) == 1
    assert f"bit-equal: no: rank {rank}: {place}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "place"),
    [({"loss": 0.5000000000000001}, "loss: 0.5 and 0.5000000000000001"), ({"batch": [4, 7]}, "batch.1: 5 and 7")],
)
def test_another_loss_or_batch_of_one_step_is_found_and_named(
    tmp_path: Path, change: dict[str, Any], place: str
) -> None:
    a, b = _records(tmp_path / "a"), _records(tmp_path / "b", **change)
    assert compare.compare_runs(a, b).difference == f"rank 2: step.1.{place}"


def test_an_unrestored_value_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the training: what is found by the comparison is the exit code, the last line, and the files stay."""

    def play(recipe: Recipe, base: Path, *, tiny: bool, single: bool, screen: Screen) -> Report:
        verdict = compare.compare_runs(_records(base / "a"), _records(base / "b", lr=0.25))
        return Report((), Timing(2, 0, 0.0, 0.0, 0.0, 0.0), 0.0, verdict)

    monkeypatch.setattr(scenario, "play", play)
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    assert demo.run_demo(None, tiny=True) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "bit-equal: no: rank 2: step.1.lr: 0.125 and 0.25"
    (kept,) = tmp_path.glob("ckpt-service-demo-*")
    assert str(kept) in printed.err


def test_a_bad_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "something").touch()
    assert demo.run_demo(str(tmp_path)) == 2
    assert f"--root {tmp_path}: not empty" in capsys.readouterr().err
    assert demo.run_demo(None, steps=5) == 2
    assert "--steps 5: the demo needs at least 6" in capsys.readouterr().err


def _demo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ckpt_service", "demo", "--tiny", *arguments]


def _environment(temporary: Path) -> dict[str, str]:
    """The temporary directory of the demo is one of the test's own, so that what stays in it is its."""
    return {**os.environ, "TMPDIR": str(temporary)}


def _processes_of(directory: Path) -> list[int]:
    """Trainers and daemons that have a path below this directory on their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.fsencode(directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


def _records(directory: Path, **changed: Any) -> Path:
    """What two steps on four ranks leave; `changed` are fields of step 1 of rank 2."""
    directory.mkdir()
    journal = JournalWriter(directory / JOURNAL)
    for rank in range(4):
        for step in range(2):
            event = Stepped(leg=1, rank=rank, step=step, epoch=0, loss=0.5, lr=0.125, batch=[4, 5], seconds=1.0)
            journal.write(replace(event, **changed) if (rank, step) == (2, 1) else event)
        state = {
            "model": {"weight": torch.arange(6.0) + rank},
            "optimizer": {"exp_avg": torch.ones(6)},
            "scheduler": {"last_epoch": 2},
            "sampler": {"position": 8},
            "rng": {"torch": torch.arange(6, dtype=torch.uint8)},
        }
        torch.save(state, directory / final_state_name(rank))
    return directory


def _unsplit_gradients() -> tuple[float, dict[str, Tensor]]:
    """Norm and clipped gradients of one process that sees the samples of both replicas."""
    model = GPT(replace(make_recipe(steps=6, tiny=True, single=True), dropout=0.0), mesh := Mesh(Topology()))
    batches = [torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(replica)) for replica in range(2)]
    tokens = torch.cat(batches)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    norm = clip_gradients(model, 0.5, mesh)
    return norm, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _share(whole: Tensor, part: Tensor, tp_rank: int) -> Tensor:
    """The half of a tensor that a tensor-parallel rank holds, along the dimension in which it is split, if it is."""
    split = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    return whole.chunk(2, split[0])[tp_rank] if split else whole
