"""``ckpt-service bench`` as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_for
from support.shards import write_attempt, write_shard

BENCH = (sys.executable, "-m", "ckpt_service", "bench")
SMALL = ("--scratch-gigabytes", "0.004", "--seconds", "5")
RATES = {"direct_write", "buffered_write", "direct_read", "warm_read", "memory_copy"}


def bench(*arguments: str | Path, small: tuple[str, ...] = SMALL) -> subprocess.CompletedProcess[str]:
    command = [*BENCH, *map(str, arguments), *small]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def document(*arguments: str | Path) -> Any:
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_document_is_whole_and_the_directory_as_before(tmp_path: Path) -> None:
    found = document(tmp_path)
    assert set(found) == {"schema_version", "directory", "cores", "fsync_seconds", "writer", "checkpoint", *RATES}
    for name in RATES:
        assert found[name] is None or set(found[name]) == {"bytes", "seconds", "bytes_per_second"}
    assert found["directory"] == str(tmp_path)
    assert found["writer"]["mode"] in ("direct", "buffered")
    assert found["checkpoint"]["bytes"] == 10 * 10**9
    assert os.listdir(tmp_path) == []


def test_the_interval_follows_from_what_the_document_says(tmp_path: Path) -> None:
    found = document(tmp_path, "--gigabytes", "2.5")["checkpoint"]
    assert found["bytes"] == 2_500_000_000
    assert found["lost_seconds"] == pytest.approx(found["stall_seconds"] + found["contention_seconds"])
    expected = max(found["lost_seconds"] / found["share"], found["write_seconds"])
    assert found["shortest_interval_seconds"] == pytest.approx(expected)


def test_of_a_run_directory_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    shards = [write_shard(tmp_path / "checkpoint_0", step=100, tp=2, tp_rank=rank) for rank in (0, 1)]
    write_shard(tmp_path / "checkpoint_0", step=200, sequence=2, tp=2, tp_rank=0)
    assert document(tmp_path)["checkpoint"]["bytes"] == sum(Path(path).stat().st_size for path in shards)


def test_people_get_a_table_and_no_progress_in_a_pipe(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[:7]] == [
        *("direct write", "buffered write", "fsync", "direct read", "warm read", "memory copy", "our writer")
    ]
    assert "10.0 GB is durable after" in done.stdout
    assert "less than 3%" in done.stdout


def test_too_little_space_is_exit_8(tmp_path: Path) -> None:
    done = bench(tmp_path, small=("--scratch-gigabytes", "1000000"))
    assert done.returncode == 8
    assert "--scratch-gigabytes" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--gigabytes", "0"), "--gigabytes 0"),
        (("--gigabytes", "nan"), "--gigabytes nan"),
        (("--scratch-gigabytes", "-1"), "--scratch-gigabytes -1"),
        (("--seconds", "inf"), "--seconds inf"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = bench(tmp_path, *arguments, small=())
    assert done.returncode == 2
    assert named in done.stderr


def test_a_directory_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    done = bench(tmp_path / "gone")
    assert done.returncode == 2
    assert f"DIR={tmp_path / 'gone'}" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [*BENCH, str(tmp_path), "--scratch-gigabytes", "0.5", "--seconds", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: any(tmp_path.rglob("buffered")), "a file is being written")
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == code
    assert os.listdir(tmp_path) == []


def test_it_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv = sys.argv[:1] + ['bench'] + sys.argv[1:]\n"
        "from ckpt_service.cli import main; main()"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
