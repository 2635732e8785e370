"""The commit: what a crash, a power cut or a failing disk leaves at every single operation of it."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.fakes import Disk, FakeDirectory, FakeFile, Operation
from support.shards import BUFFERED, snapshot

from ckpt_service import image, naming
from ckpt_service.checksum import verify_records
from ckpt_service.errors import SaveFailed, SnapshotSuperseded
from ckpt_service.storage import Directory, LocalDirectory
from ckpt_service.writer import (
    CommitResult,
    RateLimit,
    Snapshot,
    Stopped,
    Watcher,
    WriteOptions,
    commit,
    sweep,
    write_image,
)

FINAL = "ckpt_step_100_epoch_0.pt"
OTHER = "ckpt_step_50_epoch_0.pt"
CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]
SMALL_CHUNKS = WriteOptions(threads=1, chunk_bytes=4096)


def put(
    made: Snapshot,
    directory: Directory,
    options: WriteOptions = SMALL_CHUNKS,
    watcher: Watcher | None = None,
    token: str = "0",
) -> CommitResult:
    watcher = watcher or Watcher()
    return commit(made, directory, mode=0o640, host="host", token=token, options=options, watcher=watcher)


def check_whole(content: bytes) -> None:
    view = memoryview(content)
    verify_records(view, image.parse(view))


def big(seed: int = 0, nbytes: int = 300_000) -> Snapshot:
    """Return a snapshot with records of many sizes, an empty one among them."""
    source = random.Random(seed)
    sizes = [1, 4096, 0, 4095, 12288, 17, nbytes]
    return snapshot({f"data/{number}": source.randbytes(size) for number, size in enumerate(sizes)})


def operations_of_a_commit() -> list[Operation]:
    directory = FakeDirectory()
    put(snapshot(), directory)
    return directory.operations


OPERATIONS = operations_of_a_commit()

# --- order ------------------------------------------------------------------------------------------------------------


def test_content_is_durable_before_its_name_and_the_name_before_success() -> None:
    kinds = [operation.kind for operation in OPERATIONS]
    assert kinds.count("write") == len(snapshot().view) // SMALL_CHUNKS.chunk_bytes
    without_writes = [kind for kind in kinds if kind != "write"]
    assert without_writes == ["create", "sync", "lock", "head", "replace", "unlock", "sync_directory"]
    assert kinds.index("create") < kinds.index("write")
    assert len(kinds) - 1 - kinds[::-1].index("write") < kinds.index("sync")


def test_temporary_file_is_one_that_nobody_looks_for() -> None:
    directory = FakeDirectory()
    put(snapshot(), directory)
    (name,) = directory.did("create")
    assert naming.parse_partial(name) == naming.PartialName(FINAL, 1, 1, "host", "0")
    assert naming.parse_shard(name) is None
    assert list(directory.disk()) == [FINAL]
    assert directory.mode(FINAL) == 0o640


def test_power_cut_at_every_operation_leaves_the_file_whole_or_absent() -> None:
    directory = FakeDirectory()
    directory.put(OTHER, b"former checkpoint")
    seen: set[bool] = set()

    def check(operation: Operation) -> None:
        for disk in directory.after_power_cut():
            check_disk(disk)
            seen.add(FINAL in disk)

    directory.before = check
    put(big(), directory, replace(SMALL_CHUNKS, chunk_bytes=65536))
    assert seen == {False, True}
    (left,) = directory.after_power_cut()
    assert left.keys() == {OTHER, FINAL}, "what was reported as committed is gone after a power cut"
    check_disk(left)


def check_disk(disk: Disk) -> None:
    assert disk[OTHER] == b"former checkpoint"
    if FINAL in disk:
        check_whole(disk[FINAL])
    assert all(naming.parse_partial(name) for name in disk.keys() - {FINAL, OTHER})


def test_process_killed_at_every_operation_leaves_the_file_whole_or_absent() -> None:
    directory = FakeDirectory()
    directory.put(OTHER, b"former checkpoint")
    directory.before = lambda operation: check_disk(directory.disk())
    put(big(), directory, replace(SMALL_CHUNKS, chunk_bytes=65536))
    check_disk(directory.disk())


def test_replaced_file_is_whole_at_every_moment() -> None:
    former = snapshot({"data/0": b"former"}, attempt=1)
    directory = FakeDirectory()
    put(former, directory)

    def check(operation: Operation) -> None:
        for disk in directory.after_power_cut():
            check_whole(disk[FINAL])

    directory.before = check
    made = snapshot({"data/0": b"newer"}, attempt=2)
    put(made, directory)
    assert directory.disk()[FINAL] == bytes(made.view)


def test_replaced_shard_of_another_save_is_there_at_every_moment() -> None:
    former, made = (
        snapshot({"data/0": content}, kind="hf", pp=2, sequence=n) for n, content in ((1, b"old"), (2, b"new"))
    )
    kept = naming.kept(former.final_name, attempt=1, sequence=1)
    directory = FakeDirectory()
    put(former, directory)
    before = bytes(former.view)
    directory.before = lambda operation: check_former(directory.after_power_cut(), before)
    put(made, directory)
    check_former(directory.after_power_cut(), before)
    assert directory.disk() == {made.final_name: bytes(made.view), kept: before}


def check_former(disks: Iterable[Disk], former: bytes) -> None:
    for disk in disks:
        assert former in [content for name, content in disk.items() if not name.endswith(".partial")]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_shard_that_cannot_be_set_aside_is_not_replaced(code: int) -> None:
    former, made = (
        snapshot({"data/0": content}, kind="hf", pp=2, sequence=n) for n, content in ((1, b"old"), (2, b"new"))
    )
    directory = FakeDirectory()
    put(former, directory)
    trial = [operation.kind for operation in commit_over(former, made)]
    directory.failures = {trial.index("link"): code}
    with pytest.raises(SaveFailed):
        put(made, directory)
    assert directory.disk() == {former.final_name: bytes(former.view)}


def commit_over(former: Snapshot, made: Snapshot) -> list[Operation]:
    directory = FakeDirectory()
    put(former, directory)
    put(made, directory)
    return directory.operations


def test_the_fake_loses_what_was_not_synced() -> None:
    """Without the syncs the checks above would see damage: they are not satisfied by anything."""
    directory = FakeDirectory()
    file = directory.create("temporary", mode=0o644, direct=False)
    file.write_at(snapshot().view, 0)
    directory.replace("temporary", FINAL)
    disks = list(directory.after_power_cut())
    assert {} in disks
    assert {FINAL: b""} in disks
    assert {FINAL: bytes(len(snapshot().view))} in disks


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=lambda number: f"{number}-{OPERATIONS[number].kind}")
def test_failure_at_every_operation(number: int, code: int) -> None:
    kind = OPERATIONS[number].kind
    directory = FakeDirectory(failures={number: code}, free=12345)
    directory.put(OTHER, b"former checkpoint")
    made = snapshot()
    if kind == "unlock":  # letting go of a lock cannot fail; what cannot be read may be newer, so nothing replaces it
        put(made, directory)
    else:
        with pytest.raises(SaveFailed) as caught:
            put(made, directory)
        error = caught.value
        assert (error.code, error.step, error.path) == (errno.errorcode[code], 100, f"/fake/{FINAL}")
        assert isinstance(error.__cause__, OSError)
        assert "step 100" in str(error)
        has_numbers = f"{made.layout.nbytes} bytes needed, 12345 free" in str(error)
        assert has_numbers == (code in (errno.ENOSPC, errno.EDQUOT))
    assert directory.disk().keys() - {OTHER, FINAL} == set(), "the temporary file stayed"
    check_disk(directory.disk())
    put(made, directory, token="1")
    (left,) = directory.after_power_cut()
    assert left == {OTHER: b"former checkpoint", FINAL: bytes(made.view)}


def test_disk_full_in_the_middle_of_a_short_write() -> None:
    directory = FakeDirectory(failures={7: errno.ENOSPC}, short_bytes=1000)
    with pytest.raises(SaveFailed, match="bytes needed"):
        put(snapshot(), directory)
    assert directory.disk() == {}


def test_a_disk_without_room_is_known_before_anything_is_written() -> None:
    directory = FakeDirectory(free=100, room=100)
    with pytest.raises(SaveFailed, match="bytes needed, 100 free") as caught:
        put(snapshot(), directory)
    assert caught.value.code == "ENOSPC"
    assert directory.did("write") == []
    assert directory.disk() == {}


def test_memory_that_runs_out_is_a_failed_write() -> None:
    def hungry(operation: Operation) -> None:
        if operation.kind == "write":
            raise MemoryError

    directory = FakeDirectory(before=hungry)
    with pytest.raises(SaveFailed, match="step 100 failed: Cannot allocate memory") as caught:
        put(snapshot(), directory)
    assert (caught.value.code, caught.value.retryable) == ("ENOMEM", True)
    assert directory.disk() == {}


def test_a_filesystem_that_takes_no_more_files_says_so() -> None:
    directory = FakeDirectory(failures={0: errno.ENOSPC}, inodes=False)
    with pytest.raises(SaveFailed, match="out of inodes"):
        put(snapshot(), directory)


def test_failed_sync_is_not_tried_again_on_the_same_file() -> None:
    number = next(number for number, operation in enumerate(OPERATIONS) if operation.kind == "sync")
    directory = FakeDirectory(failures={number: errno.EIO})
    with pytest.raises(SaveFailed):
        put(snapshot(), directory)
    (failed,) = directory.did("sync")
    put(snapshot(), directory, token="1")
    assert directory.did("sync")[1:] != [failed]
    assert len(directory.did("create")) == 2
    (left,) = directory.after_power_cut()
    check_whole(left[FINAL])


def test_failed_sync_of_the_directory_is_followed_by_a_whole_new_write() -> None:
    number = next(number for number, operation in enumerate(OPERATIONS) if operation.kind == "sync_directory")
    directory = FakeDirectory(failures={number: errno.EIO})
    with pytest.raises(SaveFailed) as caught:
        put(snapshot(), directory)
    assert caught.value.retryable
    put(snapshot(), directory, token="1")
    assert len(directory.did("create")) == len(directory.did("replace")) == 2
    assert directory.did("link") == [], "the same snapshot is not set aside from itself"
    assert list(directory.after_power_cut()) == [directory.disk()]


def test_the_temporary_file_is_locked_until_it_has_its_final_name(tmp_path: Path) -> None:
    with LocalDirectory.open(str(tmp_path)) as directory:
        seen: list[list[str]] = []
        put(snapshot(), directory, watcher=Watcher(renaming=lambda: seen.append(sweep(directory, lambda name: True))))
    assert seen == [[]]
    assert os.listdir(tmp_path) == [FINAL]


def test_temporary_that_cannot_be_removed_does_not_hide_the_error() -> None:
    number = next(number for number, operation in enumerate(OPERATIONS) if operation.kind == "sync")
    directory = FakeDirectory(failures={number: errno.ENOSPC, number + 1: errno.EIO})
    with pytest.raises(SaveFailed) as caught:
        put(snapshot(), directory)
    assert caught.value.code == "ENOSPC"
    assert [naming.parse_partial(name) is not None for name in directory.disk()] == [True]


def test_error_of_one_thread_stops_the_others() -> None:
    directory = FakeDirectory(failures={4: errno.EIO})
    with pytest.raises(SaveFailed, match="Input/output error"):
        put(big(), directory, WriteOptions(threads=4, chunk_bytes=4096))
    assert directory.disk() == {}
    assert len(directory.did("write")) < 20


# --- once more, late, or stopped --------------------------------------------------------------------------------------


def test_doing_it_again_writes_it_anew_and_replaces_it() -> None:
    """Whether a sync of the file that is there has failed before, only the process knew that is gone."""
    directory = FakeDirectory()
    made = snapshot()
    written = CommitResult(direct=True, written=made.layout.nbytes)
    assert put(made, directory) == put(made, directory, token="1") == written
    assert len(directory.did("create")) == len(directory.did("replace")) == 2
    assert directory.did("link") == [], "the same snapshot is not set aside from itself"
    assert list(directory.after_power_cut()) == [directory.disk()]


def test_what_another_attempt_or_the_old_trainer_wrote_is_set_aside() -> None:
    for former, kept in [
        (bytes(snapshot(attempt=1, sequence=3).view), naming.kept(FINAL, attempt=1, sequence=3)),
        (bytes(snapshot(attempt=9, run_id="another").view), naming.kept(FINAL, attempt=9, sequence=1)),
        (b"PK\3\4 as torch.save writes it", naming.kept(FINAL, attempt=0, sequence=0)),
    ]:
        directory = FakeDirectory()
        directory.put(FINAL, former)
        put(snapshot(attempt=2, sequence=5), directory)
        assert directory.disk()[kept] == former
    directory = FakeDirectory()
    directory.put(FINAL, bytes(snapshot(attempt=2, sequence=4).view))
    put(snapshot(attempt=2, sequence=5), directory)
    assert list(directory.disk()) == [FINAL], "a set of one file that the same attempt saves again needs no second name"


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ((b'"format_version":1,', b'"format_version":2,'), naming.kept(FINAL, attempt=2, sequence=4)),
        (
            (b'{"format_version":1,"kind":"train"', b'{"format_version":2,"sort":"train"'),
            naming.kept(FINAL, attempt=0, sequence=0),
        ),
    ],
    ids=["placed", "of another shape"],
)
def test_a_file_of_a_newer_format_is_set_aside(change: tuple[bytes, bytes], kept: str) -> None:
    former = bytes(snapshot(attempt=2, sequence=4).view)
    former = former.replace(change[0], change[1].ljust(len(change[0]))[: len(change[0])])
    directory = FakeDirectory()
    directory.put(FINAL, former)
    made = snapshot(attempt=2, sequence=5)
    put(made, directory)
    assert directory.disk() == {FINAL: bytes(made.view), kept: former}


@pytest.mark.parametrize(("attempt", "sequence"), [(2, 1), (1, 6), (3, 9)])
def test_late_writer_gives_way(attempt: int, sequence: int) -> None:
    directory = FakeDirectory()
    newer = snapshot({"data/0": b"newer"}, attempt=attempt, sequence=sequence)
    put(newer, directory)
    with pytest.raises(SnapshotSuperseded) as caught:
        put(snapshot(sequence=5), directory)
    assert (caught.value.step, caught.value.path) == (100, f"/fake/{FINAL}")
    assert directory.disk() == {FINAL: bytes(newer.view)}


@pytest.mark.parametrize(
    "former",
    [
        snapshot({"data/0": b"older"}, sequence=4).view,
        snapshot({"data/0": b"another run's"}, run_id="other", attempt=9).view,
        b"legacy",
        b"",
        bytes(snapshot(attempt=9).view[:8191]),
    ],
    ids=["older", "another run's", "legacy", "empty", "cut"],
)
def test_whatever_is_not_a_newer_one_of_this_run_is_replaced(former: bytes) -> None:
    directory = FakeDirectory()
    directory.put(FINAL, bytes(former))
    made = snapshot(sequence=5)
    put(made, directory)
    assert directory.disk()[FINAL] == bytes(made.view)


def test_only_one_of_two_racing_writers_remains_and_it_is_the_newer(tmp_path: Path) -> None:
    older, newer = big(1), snapshot({"data/0": b"newer" * 9999}, attempt=2)
    outcomes: dict[str, BaseException | None] = {}

    def run(name: str, made: Snapshot) -> None:
        with LocalDirectory.open(str(tmp_path)) as directory:
            try:
                put(made, directory, token=name)
                outcomes[name] = None
            except SnapshotSuperseded as error:
                outcomes[name] = error

    for _ in range(10):
        threads = [threading.Thread(target=run, args=pair) for pair in (("a", older), ("b", newer))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes["b"] is None
        set_aside = [naming.kept(FINAL, attempt=1, sequence=1)] if outcomes["a"] is None else []
        assert sorted(os.listdir(tmp_path)) == sorted([FINAL, *set_aside])
        assert (tmp_path / FINAL).read_bytes() == bytes(newer.view)
        for path in tmp_path.iterdir():
            path.unlink()


def test_stop_before_the_write_and_after_it() -> None:
    directory = FakeDirectory()
    stopped = Watcher()
    stopped.stop.set()
    with pytest.raises(Stopped):
        put(snapshot(), directory, watcher=stopped)
    assert directory.did("write") == []
    late = Watcher(syncing=lambda: late.stop.set())
    with pytest.raises(Stopped):
        put(snapshot(), directory, watcher=late)
    assert directory.disk() == {}
    assert directory.did("replace") == []


def test_watcher_hears_of_every_byte_and_phase() -> None:
    heard: list[str | int] = []
    watcher = Watcher(heard.append, lambda: heard.append("syncing"), lambda: heard.append("renaming"))
    made = big()
    put(made, FakeDirectory(), replace(SMALL_CHUNKS, chunk_bytes=100_000), watcher)
    assert heard[-2:] == ["syncing", "renaming"]
    assert sum(n for n in heard if isinstance(n, int)) == made.layout.nbytes


# --- rate limit -------------------------------------------------------------------------------------------------------


@dataclass
class FakeTime:
    now: float = 0.0


@dataclass
class FakeStop(threading.Event):
    """An event on which waiting moves a clock and takes no time."""

    time: FakeTime
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.time.now += max(0.0, timeout)
        return self.is_set()


def test_rate_limit_paces_the_bytes() -> None:
    time = FakeTime(now=50.0)
    limit = RateLimit(1000, clock=lambda: time.now)
    stop = FakeStop(time)
    for _ in range(4):
        limit.take(500, stop)
    assert time.now == 52.0
    time.now += 100  # an idle time earns nothing
    limit.take(2000, stop)
    assert stop.waits == [0.5, 0.5, 0.5, 0.5, 2.0]


def test_rate_limit_is_shared_and_can_be_stopped() -> None:
    time = FakeTime()
    limit = RateLimit(1000, clock=lambda: time.now)
    never = FakeStop(FakeTime())  # its clock is another one, so for the limit no time passes
    limit.take(500, never)
    limit.take(500, never)
    assert never.waits == [0.5, 1.0]
    never.set()
    with pytest.raises(Stopped):
        limit.take(500, never)


def test_no_limit_never_waits() -> None:
    stop = FakeStop(FakeTime())
    RateLimit(0).take(1 << 40, stop)
    assert stop.waits == []


def test_a_commit_keeps_to_the_limit() -> None:
    time = FakeTime()
    watcher = Watcher(stop=FakeStop(time))
    made = snapshot()
    put(made, FakeDirectory(), replace(SMALL_CHUNKS, limit=RateLimit(4096, clock=lambda: time.now)), watcher)
    assert time.now == made.layout.nbytes / 4096


# --- bytes ------------------------------------------------------------------------------------------------------------


def crcs(made: Snapshot) -> list[int]:
    return [zlib.crc32(made.view[record.offset : record.end]) for record in made.layout.records]


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 12288, 5000, 65536, 1 << 20, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_chunks_and_threads_do_not_show_in_the_file(chunk_bytes: int, threads: int, tmp_path: Path) -> None:
    made = big()
    with LocalDirectory.open(str(tmp_path)) as directory:
        result = put(made, directory, WriteOptions(threads, chunk_bytes))
    content = (tmp_path / FINAL).read_bytes()
    assert result.written == len(content) == made.layout.nbytes
    assert [image.stored_crc(memoryview(content), record) for record in made.layout.records] == crcs(made)
    assert zlib.crc32(content) == expected_crc()
    check_whole(content)


def expected_crc() -> int:
    made = big()
    directory = FakeDirectory()
    put(made, directory, WriteOptions(threads=1, chunk_bytes=1 << 30))
    return zlib.crc32(directory.disk()[FINAL])


def test_direct_and_buffered_files_are_the_same(tmp_path: Path) -> None:
    for name, direct in (("direct", True), ("buffered", False)):
        with LocalDirectory.open(str(tmp_path / name)) as directory:
            result = put(big(), directory, replace(SMALL_CHUNKS, direct=direct))
            assert direct or not result.direct
    assert (tmp_path / "direct" / FINAL).read_bytes() == (tmp_path / "buffered" / FINAL).read_bytes()
    assert (tmp_path / "direct" / FINAL).stat().st_mode & 0o777 == 0o640


def test_others_read_the_archive(tmp_path: Path) -> None:
    with LocalDirectory.open(str(tmp_path)) as directory:
        put(big(), directory)
    with zipfile.ZipFile(tmp_path / FINAL) as archive:
        assert archive.testzip() is None


def test_image_in_memory_is_what_was_written() -> None:
    made = big()
    directory = FakeDirectory()
    put(made, directory)
    assert directory.disk()[FINAL] == bytes(made.view)


def test_a_chunk_that_is_not_written_is_noticed() -> None:
    class Forgetful(FakeFile):
        def write_at(self, data: memoryview, offset: int) -> None:
            raise SystemExit  # as if a helper thread had been ended from outside

    directory = FakeDirectory()
    inner = directory.create("a", mode=0o644, direct=True)
    with pytest.raises(SystemExit):
        write_image(snapshot(), Forgetful(directory, "a", inner.inode, True), SMALL_CHUNKS, Watcher())


# --- sweep ------------------------------------------------------------------------------------------------------------


def partial(attempt: int, token: str = "0", host: str = "host") -> str:
    return naming.partial(FINAL, attempt=attempt, sequence=1, host=host, token=token)


def test_sweep_takes_only_dead_temporaries() -> None:
    directory = FakeDirectory()
    strangers = [FINAL, ".hidden", "notes.partial", f".{FINAL}.01-1-host-0.partial", f".notes.txt.{1}-1-host-0.partial"]
    for name in [*strangers, partial(1), partial(3), partial(1, host="other")]:
        directory.put(name, b"")
    live = directory.create(partial(1, token="a1"), mode=0o644, direct=False)
    swept = sweep(directory, lambda name: name.attempt < 3 and name.host == "host")
    assert swept == [partial(1)]
    assert set(directory.disk()) == {*strangers, partial(3), partial(1, host="other"), partial(1, token="a1")}
    live.close()
    assert sweep(directory, lambda name: name.attempt < 3 and name.host == "host") == [partial(1, token="a1")]


def test_sweep_spares_the_file_of_a_live_process(tmp_path: Path) -> None:
    script = (
        "import sys; from ckpt_service.storage import LocalDirectory\n"
        "file = LocalDirectory.open(sys.argv[1]).create(sys.argv[2], mode=0o644, direct=False)\n"
        "file.write_at(memoryview(b'half'), 0)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    (tmp_path / partial(1)).write_bytes(b"dead")
    held = partial(1, token="feed")
    arguments = [sys.executable, "-c", script, str(tmp_path), held]
    with (
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        LocalDirectory.open(str(tmp_path)) as directory,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert sweep(directory, lambda name: True) == [partial(1)]
        assert os.listdir(tmp_path) == [held]
        child.kill()
        child.wait()
        assert sweep(directory, lambda name: True) == [held]
    assert os.listdir(tmp_path) == []


def test_buffered_options_do_without_threads() -> None:
    before = threading.active_count()
    counts: list[int] = []
    put(snapshot(), FakeDirectory(), BUFFERED, Watcher(wrote=lambda n: counts.append(threading.active_count())))
    assert set(counts) == {before}
