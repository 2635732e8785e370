"""``ckpt-service bench`` at its parts: files that come and go, bounds, errors, interruptions."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpt_service import verify
from ckpt_service.bench import disk, measure, trial
from ckpt_service.bench.measure import Limits, NoSpace
from ckpt_service.errors import CkptError, SaveFailed
from ckpt_service.scan import scan_directory
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import WriteOptions

SMALL = Limits(4 << 20, 20)
OPTIONS = WriteOptions(chunk_bytes=1 << 20)


def ignore(_: str) -> None: ...


def test_all_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    told: list[str] = []
    found = measure.measure(str(tmp_path), SMALL, OPTIONS, told.append)
    assert os.listdir(tmp_path) == ["theirs"]
    assert len(told) == 5
    for rate in (found.direct_write, found.buffered_write, found.direct_read, found.warm_read, found.trial.copied):
        assert rate is None or (3 << 20 < rate.nbytes <= 4 << 20 and rate.seconds > 0)
    assert (found.direct_write is None) == (not found.trial.direct)
    assert found.host().cpu_seconds_per_byte > 0
    assert found.cores == len(os.sched_getaffinity(0))


def test_never_more_disk_than_allowed(tmp_path: Path) -> None:
    """What lies there is looked at each time that a new part begins; a file goes before the next one comes."""

    def at_most(_: str) -> None:
        files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(files) <= SMALL.nbytes

    measure.measure(str(tmp_path), SMALL, OPTIONS, at_most)


def test_time_ends_a_write_but_not_before_its_first_chunk(tmp_path: Path) -> None:
    found = disk.write_buffered(str(tmp_path / "file"), 4 * disk.CHUNK_BYTES, seconds=0)
    assert found.nbytes == disk.CHUNK_BYTES
    assert os.listdir(tmp_path) == []


def test_what_was_written_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (disk.CHUNK_BYTES + 4096))
    disk.forget(str(path))
    assert disk.read_warm(str(path)).nbytes == disk.CHUNK_BYTES + 4096
    direct = disk.read_direct(str(path))
    assert direct is None or direct.nbytes == disk.CHUNK_BYTES + 4096


def test_a_size_that_is_no_whole_page_is_still_written_directly(tmp_path: Path) -> None:
    whole, odd = (disk.write_direct(str(tmp_path / "file"), nbytes) for nbytes in (1 << 20, (1 << 20) + 1000))
    assert (odd is None) == (whole is None)
    assert odd is None or odd.nbytes == 1 << 20


def test_the_scratch_image_is_a_shard_that_verifies(tmp_path: Path) -> None:
    with LocalDirectory.open(str(tmp_path)) as directory:
        tried = trial.try_writer(directory, 9 << 20, OPTIONS)
    (shard,) = scan_directory(str(tmp_path), 0)
    report = verify.verify_shard(shard)
    assert (report.ok, report.problem) == (True, None)
    assert 8 << 20 < (tmp_path / tried.name).stat().st_size == tried.written.nbytes == tried.copied.nbytes <= 9 << 20


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match=r"1000000\.0 GB, and .* are free in .*--scratch-gigabytes"):
        measure.measure(str(tmp_path), Limits(10**15, 20), OPTIONS, ignore)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), NoSpace),
        (OSError(errno.EIO, "broken"), CkptError),
        (SaveFailed("full", code="EDQUOT"), NoSpace),
        (SaveFailed("broken", code="EIO"), SaveFailed),
    ],
)
def test_a_disk_that_fails_is_named_and_nothing_is_left(
    error: Exception, kind: type[CkptError], tmp_path: Path
) -> None:
    def fail(what: str) -> None:
        if what.startswith("reading"):
            raise error

    with pytest.raises(kind) as caught:
        measure.measure(str(tmp_path), SMALL, OPTIONS, fail)
    assert type(caught.value) is kind
    assert os.listdir(tmp_path) == []


def test_ctrl_c_between_two_chunks_leaves_no_file_and_no_thread(tmp_path: Path) -> None:
    moved: list[int] = []

    def interrupt(part: memoryview, position: int) -> None:
        moved.append(position)
        raise KeyboardInterrupt

    buffers = disk._Buffers(count=1)
    with pytest.raises(KeyboardInterrupt):
        disk._spread(4 * disk.CHUNK_BYTES, float("inf"), buffers, interrupt)
    buffers.close()
    assert moved == [0]
