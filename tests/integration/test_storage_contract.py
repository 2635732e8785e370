"""What callers may expect of a directory: the same tests on the fake in memory and on the real one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fakes import FakeDirectory

from ckpt_service import storage
from ckpt_service.storage import Directory, LocalDirectory, NewFile, create_small, make_directories, write_small

PAGE = 4096


class Place:
    """A directory under test, and the view of it that someone else has."""

    def __init__(self, directory: FakeDirectory | LocalDirectory, root: Path) -> None:
        self.directory: Directory = directory
        self._fake = directory if isinstance(directory, FakeDirectory) else None
        self._root = root

    def read(self, name: str) -> bytes:
        return self._fake.disk()[name] if self._fake else (self._root / name).read_bytes()

    def mode(self, name: str) -> int:
        return self._fake.mode(name) if self._fake else (self._root / name).stat().st_mode & 0o7777

    def put(self, name: str, content: bytes) -> None:
        if self._fake:
            self._fake.put(name, content)
        else:
            (self._root / name).write_bytes(content)

    def put_link(self, name: str, target: Path) -> None:
        if self._fake:
            self._fake.put_link(name)
        else:
            (self._root / name).symlink_to(target)


@pytest.fixture(params=["fake", "real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root = tmp_path / "directory"
    if request.param == "fake":
        yield Place(FakeDirectory(), root)
        return
    with LocalDirectory.open(str(root)) as directory:
        yield Place(directory, root)


def write(place: Place, name: str, content: bytes, *, mode: int = 0o644) -> None:
    with closing(place.directory.create(name, mode=mode, direct=False)) as file:
        file.write_at(memoryview(content), 0)
        file.sync()


# --- both -------------------------------------------------------------------------------------------------------------


def test_created_file_holds_what_was_written(place: Place) -> None:
    write(place, "a", b"content")
    assert place.read("a") == b"content"
    assert place.directory.names() == ["a"]


def test_create_refuses_a_name_that_exists(place: Place) -> None:
    place.put("a", b"former")
    with pytest.raises(FileExistsError):
        place.directory.create("a", mode=0o644, direct=True)
    assert place.read("a") == b"former"


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666, 0o640])
def test_mode_is_exact(place: Place, mode: int) -> None:
    before = os.umask(0o077)
    try:
        write(place, "a", b"", mode=mode)
    finally:
        os.umask(before)
    assert place.mode("a") == mode


@pytest.mark.parametrize("direct", [False, True])
def test_threads_write_their_parts(place: Place, direct: bool) -> None:
    content = b"".join(bytes([number]) * PAGE for number in range(32)) + b"an unaligned tail"
    view = memoryview(content)
    with (
        closing(place.directory.create("a", mode=0o644, direct=direct)) as file,
        ThreadPoolExecutor(8) as pool,
    ):
        starts = list(range(0, len(content), PAGE))
        list(pool.map(lambda start: file.write_at(view[start : start + PAGE], start), reversed(starts)))
        file.sync()
    assert place.read("a") == content


def test_short_writes_are_gone_on_with(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    if isinstance(place.directory, FakeDirectory):
        place.directory.short_bytes = 7
    else:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    content = bytes(range(100))
    write(place, "a", content)
    assert place.read("a") == content


def test_closing_twice_is_fine(place: Place) -> None:
    file = place.directory.create("a", mode=0o644, direct=True)
    file.close()
    file.close()


def test_replace_takes_the_place_of_a_file(place: Place) -> None:
    place.put("old", b"former")
    write(place, "new", b"content")
    place.directory.replace("new", "old")
    place.directory.sync()
    assert place.directory.names() == ["old"]
    assert place.read("old") == b"content"


def test_replace_of_a_missing_file(place: Place) -> None:
    with pytest.raises(FileNotFoundError):
        place.directory.replace("absent", "a")


def test_link_is_a_second_name(place: Place) -> None:
    place.put("a", b"content")
    place.directory.link("a", "b")
    assert place.directory.remove("a")
    assert place.read("b") == b"content"


def test_link_never_replaces(place: Place) -> None:
    place.put("a", b"a")
    place.put("b", b"b")
    with pytest.raises(FileExistsError):
        place.directory.link("a", "b")
    with pytest.raises(FileNotFoundError):
        place.directory.link("absent", "c")
    assert place.read("b") == b"b"


def test_remove_says_whether_it_was_there(place: Place) -> None:
    place.put("a", b"")
    assert place.directory.remove("a") is True
    assert place.directory.remove("a") is False
    assert place.directory.names() == []


def test_head_is_the_start_of_a_file(place: Place) -> None:
    place.put("a", b"0123456789")
    assert place.directory.head("a", 4) == b"0123"
    assert place.directory.head("a", 100) == b"0123456789"
    assert place.directory.head("absent", 4) is None


def test_links_are_not_followed(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    place.put_link("link", outside)
    with pytest.raises(FileExistsError):
        place.directory.create("link", mode=0o644, direct=False)
    with pytest.raises(OSError, match="symbolic links"):
        place.directory.head("link", 4)
    assert not place.directory.is_abandoned("link")
    assert place.directory.remove("link")
    assert outside.read_bytes() == b"not ours"


def test_a_file_is_abandoned_once_it_is_closed(place: Place) -> None:
    file = place.directory.create("a", mode=0o644, direct=True)
    assert not place.directory.is_abandoned("a")
    file.close()
    assert place.directory.is_abandoned("a")
    assert not place.directory.is_abandoned("absent")


def test_one_at_a_time_is_in_the_lock(place: Place) -> None:
    order: list[str] = []
    entered, started = threading.Event(), threading.Event()

    def second() -> None:
        started.set()
        with place.directory.locked():
            entered.set()
            order.append("second")

    thread = threading.Thread(target=second)
    with place.directory.locked():
        thread.start()
        started.wait()
        assert not entered.wait(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_the_lock_is_free_after_an_error(place: Place) -> None:
    with pytest.raises(ValueError, match="in the lock"), place.directory.locked():
        raise ValueError("in the lock")
    with place.directory.locked():
        pass


def test_free_bytes(place: Place) -> None:
    assert place.directory.free_bytes() > 0


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalDirectory]:
    with LocalDirectory.open(str(tmp_path)) as directory:
        yield directory


def test_unaligned_direct_write_goes_on_buffered(local: LocalDirectory, tmp_path: Path) -> None:
    with closing(local.create("a", mode=0o644, direct=True)) as file:
        file.write_at(memoryview(b"odd"), 0)
        assert not file.direct
        file.write_at(memoryview(b"ends"), 3)
        file.sync()
    assert (tmp_path / "a").read_bytes() == b"oddends"


def test_room_is_allocated_where_the_filesystem_can(local: LocalDirectory, tmp_path: Path) -> None:
    file = local.create("a", mode=0o644, direct=False)
    file.allocate(1 << 20)
    found = os.stat(tmp_path / "a")
    assert (found.st_size, found.st_blocks * 512 >= 1 << 20) == (1 << 20, True)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one depends on the filesystem
        file.allocate(1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    file.close()


def test_a_filesystem_that_cannot_allocate_is_no_error(local: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(storage, "_libc", SimpleNamespace(fallocate=cannot))
    file = local.create("a", mode=0o644, direct=False)
    file.allocate(1 << 20)
    file.close()


def test_failed_creation_leaves_no_file(local: LocalDirectory) -> None:
    with pytest.raises(PermissionError):  # the kernel refuses these bits to nobody, so refuse the lock
        _create_refusing_locks(local)
    assert local.names() == []


def _create_refusing_locks(local: LocalDirectory) -> NewFile:
    def refuse(fd: int, operation: int) -> None:
        raise PermissionError

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(fcntl, "flock", refuse)
        return local.create("a", mode=0o644, direct=True)


def test_a_writer_in_another_process_is_alive_until_it_is_killed(local: LocalDirectory, tmp_path: Path) -> None:
    script = (
        "import sys; from ckpt_service.storage import LocalDirectory\n"
        "file = LocalDirectory.open(sys.argv[1]).create('a', mode=0o644, direct=True)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert not local.is_abandoned("a")
        child.kill()
        child.wait()
    assert local.is_abandoned("a")


def test_heads_of_what_is_no_file(local: LocalDirectory, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        with pytest.raises(OSError, match=r"directory|seek"):
            local.head(name, 4)
        assert not local.is_abandoned("folder")


def test_work_is_relative_to_the_directory_that_was_opened(tmp_path: Path) -> None:
    with LocalDirectory.open(str(tmp_path / "a")) as directory:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        directory.create("file", mode=0o644, direct=False).close()
        assert (tmp_path / "b" / "file").exists()
        assert not (tmp_path / "a" / "file").exists()


def test_open_makes_the_parents(tmp_path: Path) -> None:
    with LocalDirectory.open(str(tmp_path / "a" / "b" / "c")) as directory:
        assert directory.path == str(tmp_path / "a" / "b" / "c")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_directories, [str(tmp_path / "x" / "y")] * 8))
    assert (tmp_path / "x" / "y").is_dir()


def test_open_refuses_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(NotADirectoryError):
            LocalDirectory.open(str(path))


def test_small_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "small"
    write_small(str(path), b"one")
    with path.open("rb") as reader:
        write_small(str(path), b"two", mode=0o600, durable=False)
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["small"]


def test_a_small_file_that_cannot_be_placed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with pytest.raises(IsADirectoryError):
        write_small(str(tmp_path / "small"), b"content")
    assert os.listdir(tmp_path) == ["small"]


def test_one_of_many_creates_a_small_file(tmp_path: Path) -> None:
    path = str(tmp_path / "small")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: create_small(path, b"%d" % number), range(8)))
    assert sorted(made) == [False] * 7 + [True]
    assert Path(path).read_bytes() == b"%d" % made.index(True)
    assert os.listdir(tmp_path) == ["small"]


def test_the_fake_fulfils_the_protocols() -> None:
    directory: Directory = FakeDirectory()
    file: storage.NewFile = directory.create("a", mode=0o644, direct=True)
    assert file.direct
