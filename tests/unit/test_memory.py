"""What bounds memory, from the files of the kernel; and the sentence when it does not suffice."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_service import memory
from ckpt_service.memory import Room

MEMINFO = "MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    8000 kB\nHugePages_Total:   0\n"
NO_LIMIT = "9223372036854771712\n"


class Kernel:
    """/proc and /sys/fs/cgroup, made up."""

    def __init__(self, home: Path, membership: str, meminfo: str = MEMINFO) -> None:
        self.proc, self.cgroups = home / "proc", home / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(meminfo)
        (self.proc / "self" / "cgroup").write_text(membership)

    def group(self, path: str, **files: str) -> Kernel:
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / f"memory.{name}").write_text(content)
        return self

    def room(self) -> Room | None:
        return memory.room(str(self.proc), str(self.cgroups))


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job\n").group("job", max="max\n", current="5\n")
    assert kernel.room() == Room(8000 << 10, "free on this machine")


def test_the_limit_of_version_2_less_what_is_used_and_cannot_go(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job\n")
    kernel.group("job", max="6000000\n", current="5000000\n", stat="anon 4\ninactive_file 250000\n")
    assert kernel.room() == Room(1_250_000, "the limit of control group /job is 6.0 MB")


def test_the_limit_of_version_1(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "5:devices:/\n4:cpu,memory:/a/b\n0::/\n")
    kernel.group("memory/a/b", limit_in_bytes=NO_LIMIT, usage_in_bytes="7\n")
    kernel.group(
        "memory/a",
        limit_in_bytes="3000000\n",
        usage_in_bytes="1000000\n",
        stat="inactive_file 9\ntotal_inactive_file 5\n",
    )
    assert kernel.room() == Room(2_000_005, "the limit of control group /a is 3.0 MB")


def test_the_tightest_of_all_groups_above_decides(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/a/b/c\n")
    kernel.group("a/b/c", max="5000000\n", current="0\n").group("a/b", max="4000000\n", current="3900000\n")
    kernel.group("a", max="4500000\n", current="4000000\n")
    assert kernel.room() == Room(100_000, "the limit of control group /a/b is 4.0 MB")


def test_in_a_container_the_root_stands_for_its_group(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/../of/the/host\n").group("", max="1000000\n", current="400000\n")
    assert kernel.room() == Room(600_000, "the limit of control group / is 1.0 MB")


def test_a_group_above_its_limit_has_no_room(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "0::/job\n").group("job", max="1000\n", current="2000\n")
    assert kernel.room() == Room(0, "the limit of control group /job is 0.0 MB")


@pytest.mark.parametrize("meminfo", ["", "MemAvailable: many kB\n", "MemAvailable:\n", "MemTotal: 5 kB\n"])
def test_where_nothing_can_be_found_out_nothing_is_said(meminfo: str, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "nonsense\n", meminfo)
    assert kernel.room() is None
    assert memory.room(str(tmp_path / "none"), str(tmp_path / "none")) is None
    assert memory.shortage(1 << 60, None) is None


def test_what_fits_is_no_shortage() -> None:
    assert memory.shortage(100, Room(100, "free on this machine")) is None


def test_a_shortage_names_both_numbers_the_bound_and_the_ways_out() -> None:
    said = memory.shortage(4_000_000_000, Room(2_500_000_000, "the limit of control group /job is 3.0 GB"))
    assert said == (
        "4.0 GB are needed, and 2.5 GB can be had (the limit of control group /job is 3.0 GB): "
        "use fewer slots, save a smaller state, or give it more memory"
    )


def test_this_machine_says_something() -> None:
    found = memory.room()
    assert found is not None
    assert found.bytes > 0
