"""What the doctor makes of what it finds: facts in, lines out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_service.doctor import machine, place
from ckpt_service.doctor.facts import (
    Daemon,
    Disk,
    Facts,
    Failure,
    Locks,
    Machine,
    Mount,
    Newest,
    Probe,
    Run,
    SocketPlace,
    Space,
    Torch,
)
from ckpt_service.doctor.findings import Finding, Verdict, fail, ok, only_space_lacks, warn, worst
from ckpt_service.memory import Room

GB = 10**9
MACHINE = Machine(
    python="3.12.1",
    release="0.1.0",
    crc="isal",
    memfd_problem=None,
    shm_free_bytes=8 * GB,
    room=Room(100 * GB, "free on this machine"),
    memlock_bytes=None,
    open_files=1024,
    torch=Torch("2.13.0", None, 8, "12.8"),
    socket=SocketPlace("/run/user/7/ckpt-service"),
)
PROBE = Probe(None, True, 0.01, Locks(True), 0.0)
DISK = Disk("/runs/a", "/runs/a", 7, Mount("ext4", "/runs"), PROBE, Space(100 * GB, 10**6))
NEWEST = Newest(step=400, epoch=1, files=2, bytes=20 * GB, here=(10 * GB, 10 * GB), known=True)
DAEMON = Daemon("node", True, 55, "idle", "0.1.0", 1, 0.4, ended=False)
RUN = Run(2, NEWEST, (DAEMON,), daemon_lock=55)
HEALTHY = Facts(MACHINE, DISK, RUN)


def judged(facts: Facts) -> list[Finding]:
    return [*machine.judge(facts), *place.judge(facts, stale_seconds=5)]


def lines(check: str, facts: Facts = HEALTHY, **changes: Any) -> list[Finding]:
    """Return the lines about one check; ``changes`` go to whichever of machine, disk, probe and run has the field."""
    for name, value in changes.items():
        if hasattr(facts.machine, name):
            facts = replace(facts, machine=replace(facts.machine, **{name: value}))
        elif hasattr(facts.run, name):
            facts = replace(facts, run=replace(facts.run, **{name: value}))
        elif hasattr(facts.disk, name):
            facts = replace(facts, disk=replace(facts.disk, **{name: value}))
        else:
            probe = replace(facts.disk.probe, **{name: value})
            facts = replace(facts, disk=replace(facts.disk, probe=probe))
    return [finding for finding in judged(facts) if finding.check == check]


def line(check: str, **changes: Any) -> Finding:
    (found,) = lines(check, **changes)
    return found


# --- all together -----------------------------------------------------------------------------------------------------


def test_a_healthy_place_is_all_ok() -> None:
    assert [finding for finding in judged(HEALTHY) if finding.verdict is not Verdict.OK] == []
    checks = {finding.check for finding in judged(HEALTHY)}
    assert checks >= {"versions", "torch", "memfd", "/dev/shm", "memory", "memlock", "nofile", "socket"}
    assert checks >= {"filesystem", "writing", "direct I/O", "locks", "space", "inodes", "clock", "daemon", "run lock"}


def test_an_empty_root_is_all_ok() -> None:
    assert worst(judged(replace(HEALTHY, run=Run(2)))) is Verdict.OK


def test_whatever_is_not_fine_says_what_to_do() -> None:
    broken = Facts(
        replace(MACHINE, crc="zlib", torch=Torch(None), memfd_problem="no", room=Room(1, "b"), open_files=9),
        replace(DISK, mount=Mount("nfs", "/"), probe=replace(PROBE, locks=Locks(False, "no")), space=Space(1, 1)),
        replace(RUN, problem="no", unreadable=("no",), daemons=(replace(DAEMON, ended=True),)),
    )
    unwell = [finding for finding in judged(broken) if finding.verdict is not Verdict.OK]
    assert len(unwell) >= 12
    assert all(finding.fix for finding in unwell)


def test_the_worst_decides() -> None:
    fine, so_so, bad = ok("a", "m"), warn("a", "m", "f"), fail("a", "m", "f")
    full = fail("space", "m", "f", lacks_space=True)
    assert [worst(found) for found in ([], [fine], [fine, so_so], [so_so, bad, fine])] == [
        *(Verdict.OK, Verdict.OK, Verdict.WARN, Verdict.FAIL)
    ]
    assert [only_space_lacks(found) for found in ([], [so_so], [full, so_so], [full, bad], [bad])] == [
        *(False, False, True, False, False)
    ]


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "changes", "verdict", "said"),
    [
        ("versions", {"crc": "zlib"}, "warn", "checksums by zlib"),
        ("torch", {"torch": Torch(None)}, "warn", "no torch"),
        ("torch", {"torch": Torch("2.5.1+cu121")}, "fail", "2.5.1.cu121 is too old"),
        ("torch", {"torch": Torch("2.10.0")}, "ok", "without CUDA"),
        ("torch", {"torch": Torch("2.13.0", "it cannot be imported: no libc")}, "warn", "no libc"),
        ("torch", {"torch": Torch("2.13.0", None, 0, "12.8")}, "warn", "finds no device"),
        ("memfd", {"memfd_problem": "Operation not permitted"}, "fail", "Operation not permitted"),
        ("/dev/shm", {"shm_free_bytes": None}, "warn", "is not there"),
        ("/dev/shm", {"shm_free_bytes": 1 << 20}, "warn", "has 1.0 MB left"),
        ("socket", {"socket": SocketPlace(None, ("/a is too long", "/b: no"))}, "fail", "/a is too long; /b: no"),
        ("socket", {"socket": SocketPlace("/tmp/c", ("/a is too long",))}, "warn", "/tmp/c, since /a is too long"),
        ("socket", {"socket": SocketPlace("/tmp/c", is_open=True)}, "warn", "others can reach into"),
    ],
)
def test_the_machine(check: str, changes: dict[str, Any], verdict: str, said: str) -> None:
    found = line(check, **changes)
    assert found.verdict.value == verdict
    assert said.replace(".cu", "+cu") in found.message


@pytest.mark.parametrize(
    ("room", "verdict"), [(50 * GB, "ok"), (49 * GB, "warn"), (40 * GB, "warn"), (40 * GB - 1, "fail"), (0, "fail")]
)
def test_memory_for_the_slots_and_one_image_more(room: int, verdict: str) -> None:
    found = line("memory", room=Room(room, "the limit of control group /job is 60.0 GB"))
    assert found.verdict.value == verdict
    assert "2 slots for 2 shards like step 400 take 40.0 GB" in found.message
    assert "control group /job" in found.message


def test_memory_is_no_failure_where_this_host_may_write_less_or_has_it_taken_already() -> None:
    short = Room(GB, "free on this machine")
    assert line("memory", room=short, newest=replace(NEWEST, known=False)).verdict is Verdict.WARN
    assert line("memory", room=short, run_lock=77).verdict is Verdict.OK
    assert line("memory", room=None).verdict is Verdict.WARN
    assert line("memory", room=short, newest=None).verdict is Verdict.OK


def test_pinning_is_asked_for_where_there_is_a_device() -> None:
    assert line("memlock", memlock_bytes=20 * GB).verdict is Verdict.OK
    short = line("memlock", memlock_bytes=8 << 20)
    assert short.verdict is Verdict.WARN
    assert "a trainer pins 20.0 GB" in short.message
    assert line("memlock", memlock_bytes=8 << 20, torch=Torch("2.13.0")).verdict is Verdict.OK
    assert line("memlock", memlock_bytes=8 << 20, newest=None).verdict is Verdict.OK


@pytest.mark.parametrize(("limit", "verdict"), [(84, "ok"), (83, "fail"), (None, "ok")])
def test_open_files_for_every_snapshot_on_its_way(limit: int | None, verdict: str) -> None:
    found = line("nofile", open_files=limit)
    assert found.verdict.value == verdict
    assert "84 are needed" in found.message


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse", "9p"]
)
def test_a_filesystem_over_a_network_is_named_with_what_it_means(kind: str) -> None:
    found = line("filesystem", mount=Mount(kind, "/runs"))
    assert found.verdict is Verdict.WARN
    assert f"{kind} at /runs: " in found.message


@pytest.mark.parametrize(
    ("mount", "verdict", "said"),
    [
        (Mount("nfs", "/runs", frozenset({"rw", "nolock"})), "warn", "locks hold on this host only"),
        (Mount("tmpfs", "/"), "warn", "gone after a reboot"),
        (Mount("overlay", "/"), "warn", "gone with the container"),
        (Mount("xfs", "/runs"), "ok", "xfs at /runs"),
        (None, "warn", "cannot be found out"),
    ],
)
def test_other_filesystems(mount: Mount | None, verdict: str, said: str) -> None:
    found = line("filesystem", mount=mount)
    assert found.verdict.value == verdict
    assert said in found.message


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("EACCES", "give user 7 write permission on /runs/a"),
        ("EROFS", "mount it read-write"),
        ("EMFILE", "ulimit -n"),
        ("EIO", "kernel log"),
        (None, "kernel log"),
    ],
)
def test_a_step_that_fails_is_named(code: str | None, fix: str) -> None:
    failed = Probe(Failure("fsync", code, "for a reason"))
    found = line("writing", probe=failed)
    assert (found.verdict, found.lacks_space) == (Verdict.FAIL, False)
    assert found.message == "fsync in /runs/a failed: for a reason"
    assert fix in str(found.fix)
    assert lines("direct I/O", probe=failed) == lines("locks", probe=failed) == [], "they could not be tried"


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_lacks_space_and_nothing_else(code: str) -> None:
    full = replace(DISK, probe=Probe(Failure("writing", code, "full")), space=Space(0, 10**6))
    for run in (RUN, Run(2)):
        assert only_space_lacks(judged(replace(HEALTHY, disk=full, run=run)))


def test_directories_of_the_run_that_belong_to_another() -> None:
    found = line("writing", unwritable=("/runs/a/.ckpt_service", "/runs/a/checkpoint_0"))
    assert found.verdict is Verdict.FAIL
    assert "user 7 may not write to /runs/a/.ckpt_service, /runs/a/checkpoint_0" in found.message


def test_a_root_that_is_not_there_yet_and_a_slow_disk() -> None:
    assert "/runs (/runs/a does not exist yet)" in line("writing", place="/runs").message
    assert line("writing", sync_seconds=3.0).verdict is Verdict.WARN


def test_direct_writes() -> None:
    assert line("direct I/O", direct=False).verdict is Verdict.WARN
    assert line("direct I/O", direct=False, wants_direct=False).verdict is Verdict.OK


def test_locks_that_do_not_lock() -> None:
    found = line("locks", locks=Locks(False, "a second process got the same lock"))
    assert found.verdict is Verdict.WARN
    assert "a second process got the same lock" in found.message


@pytest.mark.parametrize(("free", "verdict"), [(40 * GB, "ok"), (40 * GB - 1, "fail"), (0, "fail")])
def test_space_for_the_next_two_checkpoints(free: int, verdict: str) -> None:
    found = line("space", space=Space(free, None))
    assert (found.verdict.value, found.lacks_space) == (verdict, verdict == "fail")
    assert "the next 2 checkpoints like step 400 take 40.0 GB" in found.message
    assert lines("inodes", space=Space(free, None)) == [], "this filesystem does not count files"


@pytest.mark.parametrize(("free", "verdict"), [(20, "ok"), (19, "fail")])
def test_inodes_for_the_next_two_checkpoints(free: int, verdict: str) -> None:
    found = line("inodes", space=Space(100 * GB, free))
    assert (found.verdict.value, found.lacks_space) == (verdict, verdict == "fail")


# --- clocks, daemons, locks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clock_ahead_seconds": 30.0}, "the filesystem is 30 s ahead of ours"),
        ({"clock_ahead_seconds": -30.0}, "the filesystem is 30 s behind ours"),
        ({"daemons": (replace(DAEMON, age_seconds=-9.0),)}, "from the future: node by 9 s"),
        ({"files_ahead_seconds": 7.0}, "the newest checkpoint is 7 s ahead"),
    ],
)
def test_clocks_that_differ(changes: dict[str, Any], said: str) -> None:
    found = line("clock", **changes)
    assert found.verdict is Verdict.WARN
    assert said in found.message
    assert line("clock", clock_ahead_seconds=1.0, files_ahead_seconds=-100.0).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("changes", "lock", "verdict", "said"),
    [
        ({"state": "stopped", "ended": True}, None, "ok", "has left"),
        ({"ended": True}, None, "warn", "ended without a word"),
        ({}, None, "warn", "ended without a word"),
        ({"age_seconds": 60.0}, 55, "warn", "its status is 60 s old"),
        ({"here": False, "host": "far", "age_seconds": 60.0}, None, "warn", "its host is down"),
        ({"protocol": 0, "version": "0.0.9"}, 55, "warn", "speaks protocol 0, and this release speaks 1"),
        ({"state": "writing"}, 55, "ok", "writing (on node, pid 55"),
    ],
)
def test_daemons(changes: dict[str, Any], lock: int | None, verdict: str, said: str) -> None:
    found = line("daemon", daemons=(replace(DAEMON, **changes),), daemon_lock=lock)
    assert found.verdict.value == verdict
    assert said in found.message


def test_who_holds_the_locks() -> None:
    none = Run(2)
    assert [found.message for found in lines("daemon", replace(HEALTHY, run=none))] == ["none has served here yet"]
    unknown = replace(HEALTHY, run=replace(none, daemon_lock=66))
    assert [(found.verdict, "pid 66 holds" in found.message) for found in lines("daemon", unknown)] == [
        (Verdict.WARN, True)
    ]
    assert "pid 77 trains here now" in line("run lock", run_lock=77).message


def test_what_cannot_be_read_is_said() -> None:
    assert line("run", problem="/runs/a cannot be read").verdict is Verdict.FAIL
    assert line("format", newer_format="step 7 epoch 0: its format version is 2").verdict is Verdict.WARN
    assert line("status", unreadable=("status.far.json cannot be understood",)).verdict is Verdict.WARN
