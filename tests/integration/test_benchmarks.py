"""The benchmark: a tiny run gives all of its figures, a stored result becomes a table. Never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import processes, report, summary
from benchmarks.contenders import CONTENDERS, Entry, Ours
from benchmarks.options import Options
from benchmarks.summary import COLUMNS, Spread

ROOT = Path(__file__).parents[2]
TINY = ("--gigabytes", "0.001", "--rounds", "1", "--saves", "1", "--interval", "2", "--batch", "4", "--quiet", "1")


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a tiny run of ours and of torch.save."""
    place = tmp_path_factory.mktemp("place")
    results = tmp_path_factory.mktemp("results")
    done = run(*TINY, "--only", "ours,torch_save", "--directory", place, "--results", results, "--label", "tiny")
    assert done.returncode == 0, done.stderr
    assert os.listdir(place) == []
    (stored,) = results.glob("*.json")
    assert stored.stem.endswith("-tiny")
    assert stored.with_suffix(".md").read_text() == done.stdout.rstrip("\n") + "\n"
    return stored


@pytest.fixture
def document(result: Path) -> Any:
    return json.loads(result.read_text())


def test_every_sample_has_every_figure(document: Any) -> None:
    assert [sample["contender"] for sample in document["samples"]] == ["ours", "torch_save"]
    for sample in document["samples"]:
        assert sample["mode"] in ("direct", "buffered")
        assert 900_000 < sample["state_bytes"] < 1_100_000
        assert sample["steps"] >= 2
        for name in ("calls", "lost", "worst_step", "durable", "done", "quiet_durable"):
            assert len(sample[name]) == 1
        assert all(0 < done <= durable for done, durable in zip(sample["done"], sample["durable"], strict=True))
        assert all(call <= durable for call, durable in zip(sample["calls"], sample["durable"], strict=True))
        assert sample["cpu_per_gigabyte"] >= 0


def test_the_daemon_counts_into_the_figures_of_ours(document: Any) -> None:
    ours, plain = document["samples"]
    assert ours["descriptors"] > plain["descriptors"] + 5
    assert ours["memory"] > 5_000_000  # an interpreter with the daemon in it


def test_the_disk_and_the_loads_are_measured_beside(document: Any) -> None:
    assert len(document["ceiling"]) == 1
    assert document["ceiling"][0]["buffered"]["nbytes"] == 1_000_000
    ways = {(load["way"], load["cold"]) for load in document["loads"]}
    assert len(ways) == len(document["loads"]) == 14
    assert all(load["seconds"] > 0 and load["nbytes"] > 900_000 for load in document["loads"])


def test_who_was_not_measured_is_in_the_table(document: Any) -> None:
    left_out = set(CONTENDERS) - {"ours", "torch_save"}
    assert set(document["not_measured"]) == left_out
    text = report.render(document)
    for name in left_out:
        assert f"| {CONTENDERS[name].title} | not measured: left out by --only |" in text


def test_the_table_has_all_columns_and_the_facts(document: Any) -> None:
    text = report.render(document)
    heading = next(line for line in text.splitlines() if line.startswith("| | mode |"))
    assert heading.split(" | ")[2:] == [*(c.heading for c in COLUMNS[:-1]), f"{COLUMNS[-1].heading} |"]
    (row,) = (line for line in text.splitlines() if line.startswith("| ours | "))
    assert row.count("|") == heading.count("|") == len(COLUMNS) + 3
    facts = document["facts"]
    for fact in (facts["kernel"], facts["filesystem"], facts["commit"], f"torch {facts['packages']['torch']}"):
        assert fact in text
    assert str(os.uname().nodename) not in text


def test_a_stored_result_is_rendered_again(result: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(result.read_bytes())
    done = run("--render", copy)
    assert done.returncode == 0, done.stderr
    assert copy.with_suffix(".md").read_text() == result.with_suffix(".md").read_text()


def test_what_fails_is_named_with_the_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    arguments = (*TINY, "--only", "ours", "--directory", tmp_path / "place", "--results", tmp_path / "results")
    done = run(*arguments, CKPT_SERVICE_CHUNK_BYTES="1")
    assert done.returncode == 1, done.stderr
    (stored,) = (tmp_path / "results").glob("*.json")
    found = json.loads(stored.read_text())
    assert "CKPT_SERVICE_CHUNK_BYTES" in found["not_measured"]["ours"]
    assert found["samples"] == found["loads"] == []
    assert len(found["ceiling"]) == 1
    assert "| ours | not measured: it ended with 1: ValueError: CKPT_SERVICE_CHUNK_BYTES" in done.stdout
    assert os.listdir(tmp_path / "place") == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--only", "ours,pickle"), "'pickle'"),
        (("--rounds", "0"), "--rounds 0"),
        (("--gigabytes", "-1"), "--gigabytes -1"),
        (("--render", "gone.json"), "gone.json"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


def test_too_little_space_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    done = run("--gigabytes", "1000000", "--directory", tmp_path)
    assert done.returncode == 8
    assert "4000000.0 GB are needed" in done.stderr
    assert os.listdir(tmp_path) == []


# --- pure parts -------------------------------------------------------------------------------------------------------


def sample(contender: str, **changes: Any) -> dict[str, Any]:
    figures = {key: [1.0, 2.0, 3.0] for key in ("calls", "lost", "worst_step", "durable", "done", "quiet_durable")}
    numbers = {"state_bytes": 10**9, "first_call": 1.0, "cpu_per_gigabyte": 1.0, "memory": 10**9, "descriptors": 4}
    return {"contender": contender, "mode": "direct", "step": 0.1, "unfinished": 0, **figures, **numbers, **changes}


def test_figures_are_medians_over_all_rounds() -> None:
    rounds = [sample("ours"), sample("ours", lost=[9.0, 9.0]), sample("torch_save", lost=[99.0])]
    lost = next(column for column in COLUMNS if "lost" in column.heading)
    assert summary.spread({"samples": rounds}, "ours", lost) == Spread(3000, 1000, 9000)


def test_others_are_shown_as_a_multiple_of_ours_unless_noise_was_larger() -> None:
    rounds = [sample("ours", lost=[-0.1], durable=[2.0]), sample("lightning", lost=[3.0], durable=[5.0])]
    document = {"samples": rounds}
    assert summary.ratio(document, "lightning", "durable after, s") == 2.5
    assert summary.ratio(document, "lightning", "training lost per save, ms") is None


def test_loops_that_were_too_short_are_named() -> None:
    document = {"samples": [sample("ours"), sample("lightning", unfinished=2), sample("lightning", unfinished=1)]}
    assert summary.unfinished(document) == {"lightning": 3}


def test_packages_that_are_missing_are_named_and_not_imported() -> None:
    assert Entry("one", Ours, ("json", "no_such_package")).missing() == ["no_such_package"]


def test_options_survive_the_way_to_a_process() -> None:
    options = Options(gigabytes=0.25, interval=7)
    assert Options.from_json(options.to_json()) == options


def test_cpu_time_counts_children_that_have_ended() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", "17", *["0"] * 9, str(1 * ticks), str(2 * ticks), str(3 * ticks), str(4 * ticks), *["0"] * 20]
    assert processes.parse_stat(f"5 (a ) name) {' '.join(fields)}") == (17, 10.0)


def test_memory_leaves_out_what_is_mapped_from_files() -> None:
    text = "00400000-7fff [rollup]\nRss: 900 kB\nPss_Anon: 3 kB\nPss_File: 500 kB\nPss_Shmem: 2 kB\n"
    assert processes.parse_pss(text) == 5 * 1024


def test_a_family_holds_children_of_children() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        found = processes.family(child.pid)
        assert found[0] == child.pid
        assert len(found) == 2
        assert processes.cpu_seconds(found) > 0
        assert processes.descriptors(found) >= 6
        assert processes.memory_bytes(found) > 1 << 20
        child.communicate("\n", timeout=30)
