"""Real directories: what a listing makes of them, what retention deletes there, what a check of every byte finds."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeDirectory
from support.shards import snapshot, write_attempt, write_shard

from ckpt_service import image, naming, scan
from ckpt_service.catalog import Shard, State
from ckpt_service.errors import DamagedCheckpoint
from ckpt_service.messages import Retention
from ckpt_service.prune import History, Pruner, Retained, carry_out, delete, plan_by_hand, retain
from ckpt_service.retention import RetentionPolicy
from ckpt_service.storage import LocalDirectory
from ckpt_service.verify import verify_shard

NAME = "ckpt_step_100_epoch_0.pt"


def only(directory: Path, stage: int = 0) -> Shard:
    (shard,) = scan.scan_directory(str(directory), stage)
    return shard


def steps(root: Path, state: State | None = None) -> list[int]:
    checkpoints = scan.load_catalog(str(root), None).of_kind("train")
    return [checkpoint.id.step for checkpoint in checkpoints if state in (None, checkpoint.state)]


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# --- one file ---------------------------------------------------------------------------------------------------------


def test_whole_file(tmp_path: Path) -> None:
    path = write_shard(tmp_path, user={"note": "é"})
    shard = only(tmp_path)
    assert (shard.path, shard.problem, shard.bytes) == (str(path), None, path.stat().st_size)
    assert shard.manifest is not None
    assert (shard.manifest.step, shard.manifest.user) == (100, {"note": "é"})


def newer_format(content: bytes) -> bytes:
    return content.replace(b'"format_version":1,', b'"format_version":2,')


def overwritten(start: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:start] + data + content[start + len(data) :]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: b"", r"it is not a checkpoint \(0 bytes\)"),
        (lambda content: b"hello", "it is not a checkpoint"),
        (lambda content: bytes(len(content)), "it is not a checkpoint"),
        (lambda content: content[:100], "within its manifest"),
        (lambda content: content[:8191], "within its manifest"),
        (lambda content: content[:-1], "bytes instead of"),
        (lambda content: content[:8192], "it has 8192 bytes instead of"),
        (lambda content: content + b"x", "bytes instead of"),
        (newer_format, "its format version is 2, and this release reads up to 1; upgrade"),
        (overwritten(1000, b"{"), "its manifest cannot be read"),
        (overwritten(8176, b"xxxx"), "the manifest's descriptor is damaged"),
        (overwritten(0, b"XX"), "the manifest's header is damaged"),
    ],
)
def test_damaged_files_say_what_is_wrong(change: Callable[[bytes], bytes], problem: str, tmp_path: Path) -> None:
    path = write_shard(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    shard = only(tmp_path)
    assert shard.problem is not None
    assert re.search(problem, shard.problem), shard.problem


def test_manifests_that_are_no_manifests() -> None:
    head = bytes(snapshot().view[: image.MANIFEST_END])
    content = image.manifest_json(head)
    assert content is not None
    for wrong in (b"[]", b"null", b"{}", b"\xff", b"[" * 3000, b'{"format_version": "x"}', b'{"format_version": true}'):
        changed = head.replace(content, wrong.ljust(len(content)))
        with pytest.raises(DamagedCheckpoint, match="cannot be read"):
            scan.parse_manifest(changed)
    assert scan.parse_manifest(b"PK\3\4 of someone else".ljust(8192)) is None


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("ckpt_step_200_epoch_0.pt", 0),
        ("ckpt_step_100_epoch_1.pt", 0),
        ("ckpt_step_100_epoch_0_tp1.pt", 0),
        ("lora_step_100_epoch_0.pt", 0),
        (NAME, 1),
    ],
)
def test_file_at_the_wrong_place(name: str, stage: int, tmp_path: Path) -> None:
    write_shard(tmp_path).rename(tmp_path / name)
    shard = only(tmp_path, stage)
    assert shard.problem is not None
    assert "its manifest says" in shard.problem


@pytest.mark.parametrize("content", [b"PK\3\4 a zip archive", b"\x80\x02 a pickle"])
def test_legacy_files_have_no_problem_and_no_manifest(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    shard = only(tmp_path)
    assert (shard.manifest, shard.problem) == (None, None)


def test_what_is_no_file_is_listed_with_its_problem(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    os.mkfifo(tmp_path / "ckpt_step_1_epoch_0.pt")
    (tmp_path / "ckpt_step_2_epoch_0.pt").symlink_to(tmp_path / "nowhere")
    problems = {shard.name.step: shard.problem for shard in scan.scan_directory(str(tmp_path), 0)}
    assert problems.keys() == {100, 1}, "a link to nowhere is like a file that is gone"
    assert problems[100] == "cannot be read: Is a directory"
    assert problems[1] == "cannot be read: Illegal seek"


def test_file_that_vanished_is_left_out(tmp_path: Path) -> None:
    path = write_shard(tmp_path)
    name = only(tmp_path).name
    path.unlink()
    assert scan.inspect(str(path), name, 0) is None


# --- directories ------------------------------------------------------------------------------------------------------


def test_strange_names_are_not_looked_at(tmp_path: Path) -> None:
    path = write_shard(tmp_path)
    strangers = ["ckpt_step_0100_epoch_0.pt", "ckpt_step_100_epoch_0.pt.bak", "ckpt_step_\u0661_epoch_0.pt"]
    strangers += [naming.partial(NAME, attempt=1, sequence=1, host="h", token="0"), "ckpt_step_100_epoch_0_tp01.pt"]
    for name in strangers:
        shutil.copy(path, tmp_path / name)
    assert only(tmp_path).path == str(path)


def test_set_aside_file_is_found_under_its_own_numbers(tmp_path: Path) -> None:
    kept = naming.kept(NAME, attempt=1, sequence=1)
    write_shard(tmp_path).rename(tmp_path / kept)
    write_shard(tmp_path, attempt=2)
    found = {shard.manifest.attempt for shard in scan.scan_directory(str(tmp_path), 0) if shard.manifest}
    assert found == {1, 2}


def test_runs_in_one_root_do_not_mix(tmp_path: Path) -> None:
    for directory, stage in [("checkpoint_0", 0), ("checkpoint_1", 1), ("checkpoint_10", 10), ("checkpoint_x_0", 0)]:
        write_shard(tmp_path / directory, stage=stage, pp=11)
    (tmp_path / "checkpoint_00").mkdir()
    (tmp_path / "checkpoint_None_0").mkdir()
    assert sorted(shard.stage for shard in scan.scan_run(str(tmp_path), None)) == [0, 1, 10]
    assert [shard.stage for shard in scan.scan_run(str(tmp_path), "x")] == [0]
    assert list(scan.stage_directories(str(tmp_path), None)) == [0, 1, 10]


def test_nothing_there(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert scan.scan_run(absent, None) == []
    assert scan.load_attempts(absent, None) == []
    assert scan.load_pins(absent, None) == frozenset()
    assert scan.load_statuses(absent, None) == []
    assert scan.load_catalog(absent, None).checkpoints == ()
    (tmp_path / "checkpoint_0").write_bytes(b"a file where the directory belongs")
    assert scan.scan_run(str(tmp_path), None) == []


def test_attempts_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_attempt(tmp_path, number)
    directory = tmp_path / ".ckpt_service" / "attempts"
    (directory / "3.json").write_text("{")
    (directory / "4.json").mkdir()
    (directory / "05.json").write_text((directory / "2.json").read_text())
    assert [attempt.n for attempt in scan.load_attempts(str(tmp_path), None)] == [1, 2, 10]


def test_pins_and_statuses_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    service = tmp_path / ".ckpt_service"
    (service / "pins").mkdir(parents=True)
    for name in ("1-2", "01-2", "1-2.bak", "10-20"):
        (service / "pins" / name).touch()
    (service / "status.host.json").write_text("{}")
    assert scan.load_pins(str(tmp_path), None) == {(1, 2), (10, 20)}
    assert scan.load_statuses(str(tmp_path), None) == []


@pytest.mark.parametrize("times", [[0, 0, 0], [3, 2, 1], [4e9, 1, 2]])
def test_modification_times_decide_nothing(times: list[float], tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence, (step, when) in enumerate(zip((9900, 10000, 100), times, strict=True), 1):
        os.utime(write_shard(tmp_path / "checkpoint_0", step=step, sequence=sequence), (when, when))
    assert steps(tmp_path) == [100, 10000, 9900]


def test_copy_without_our_directory_still_tells_the_order(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for sequence, step in enumerate((900, 1000, 50), 1):
        write_shard(root / "checkpoint_0", step=step, sequence=sequence)
    shutil.copytree(root / "checkpoint_0", tmp_path / "b" / "checkpoint_0")
    assert steps(tmp_path / "b", State.COMPLETE) == [50, 1000, 900]


def test_partial_temporary_and_damaged_files_are_never_the_newest(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint_0"
    write_shard(directory, step=100, sequence=1)
    newest = write_shard(directory, step=200, sequence=2)
    newest.rename(directory / naming.partial(newest.name, attempt=1, sequence=2, host="h", token="0"))
    short = write_shard(directory, step=300, sequence=3)
    short.write_bytes(short.read_bytes()[:-4096])
    write_shard(directory, step=400, sequence=4, pp=2)
    newest_complete = scan.load_catalog(str(tmp_path), None).newest_complete()
    assert newest_complete is not None
    assert newest_complete.id.step == 100
    assert steps(tmp_path, State.DAMAGED) == [300]


# --- retention --------------------------------------------------------------------------------------------------------


def prune(root: Path, keep_last: int = 2, keep_every: int | None = None, **changes: Any) -> Retained:
    """Run retention as after a commit of what ``changes`` say."""
    made = snapshot(**changes).manifest
    directory = root / naming.stage_directory(made.stage, None)
    with LocalDirectory.open(str(directory)) as opened:
        history = History(made, opened, Retention(keep_last=keep_last, keep_every=keep_every))
        (done,) = retain(str(root), None, [history])
    return done


def save_and_prune(root: Path, step: int, sequence: int, **changes: Any) -> Retained:
    stage = changes.get("stage", 0)
    write_shard(root / f"checkpoint_{stage}", step=step, sequence=sequence, **changes)
    return prune(root, step=step, sequence=sequence, **changes)


def test_the_last_two_stay_whatever_their_numbers(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence, step in enumerate((9800, 9900, 10000, 100, 5), 1):
        done = save_and_prune(tmp_path, step, sequence)
        assert done.errors == ()
    assert sorted(steps(tmp_path)) == [5, 100]
    assert done.deleted == 1


def test_only_ones_own_shards_go(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    directory = tmp_path / "checkpoint_0"
    for sequence, step in enumerate((1, 2, 3, 4), 1):
        for tp_rank in (1, 10):
            write_shard(directory, step=step, sequence=sequence, tp_rank=tp_rank, tp=1)
    for sequence, step in enumerate((1, 2, 3, 4), 1):
        for tp_rank in range(2):
            write_shard(directory, step=step, sequence=sequence, tp_rank=tp_rank, tp=2)
    (directory / "notes.txt").touch()
    (directory / "ckpt_step_1_epoch_0.pt").write_bytes(b"\x80\x02 legacy")
    before = set(files(directory))
    prune(tmp_path, step=4, sequence=4, tp_rank=1, tp=2)
    assert before - set(files(directory)) == {"ckpt_step_1_epoch_0_tp1.pt", "ckpt_step_2_epoch_0_tp1.pt"}


def test_nothing_goes_while_a_peer_is_behind(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for tp_rank in range(2):
        write_shard(tmp_path / "checkpoint_0", step=1, sequence=1, tp_rank=tp_rank, tp=2)
    for sequence in (2, 3, 4):
        save_and_prune(tmp_path, sequence, sequence, tp_rank=0, tp=2)
    assert steps(tmp_path, State.COMPLETE) == [1]
    assert steps(tmp_path, State.PARTIAL) == [4, 3, 2]


def test_every_kth_and_pinned_stay(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    pins = tmp_path / ".ckpt_service" / "pins"
    pins.mkdir()
    (pins / "1-1").touch()
    for sequence, step in enumerate((5, 10, 15, 20, 25, 30), 1):
        write_shard(tmp_path / "checkpoint_0", step=step, sequence=sequence)
    prune(tmp_path, keep_last=1, keep_every=10, step=30, sequence=6)
    assert sorted(steps(tmp_path)) == [5, 10, 20, 30]


def test_late_writer_of_an_older_attempt_deletes_nothing(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    write_attempt(tmp_path, 2, resumed_from=(1, 2))
    for sequence in (1, 2, 3, 4):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    assert prune(tmp_path, keep_last=1, step=4, sequence=4).deleted == 0
    assert len(files(tmp_path / "checkpoint_0")) == 4


def test_fresh_start_leaves_what_was_there(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence, step in enumerate((4900, 5000), 1):
        write_shard(tmp_path / "checkpoint_0", step=step, sequence=sequence)
    write_attempt(tmp_path, 2)
    for sequence, step in enumerate((10, 20, 30), 1):
        save_and_prune(tmp_path, step, sequence, attempt=2)
    assert sorted(steps(tmp_path)) == [20, 30, 4900, 5000]
    assert steps(tmp_path, State.COMPLETE) == [30, 20]


def test_roll_back_leaves_the_future_behind_and_deletes_it_later(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence, step in enumerate((100, 200), 1):
        write_shard(tmp_path / "checkpoint_0", step=step, sequence=sequence)
    write_attempt(tmp_path, 2, resumed_from=(1, 1), explicit=True)
    assert steps(tmp_path, State.COMPLETE) == [100]
    save_and_prune(tmp_path, 110, 1, attempt=2)
    assert steps(tmp_path) == [110, 100]


def test_kinds_have_histories_of_their_own(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
        write_shard(tmp_path / "checkpoint_0", kind="lora", step=sequence, sequence=sequence)
    prune(tmp_path, kind="lora", step=3, sequence=3)
    assert files(tmp_path / "checkpoint_0") == [
        "ckpt_step_1_epoch_0.pt",
        "ckpt_step_2_epoch_0.pt",
        "ckpt_step_3_epoch_0.pt",
        "lora_step_2_epoch_0.pt",
        "lora_step_3_epoch_0.pt",
    ]


def test_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    """Another process deleted it between the listing and the deletion: the fake directory has never held it."""
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    fake = FakeDirectory(path=str(tmp_path / "checkpoint_0"))
    made = snapshot(step=3, sequence=3).manifest
    (done,) = retain(str(tmp_path), None, [History(made, fake, Retention())])
    assert (done.deleted, done.errors) == (0, ())
    assert fake.did("remove") == ["ckpt_step_1_epoch_0.pt"]
    assert fake.did("sync_directory") == []


def test_deletion_that_fails_is_said_and_tried_again(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3, 4):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    fake = FakeDirectory(path=str(tmp_path / "checkpoint_0"), failures={0: errno.EPERM})
    for sequence in (1, 2):
        fake.put(f"ckpt_step_{sequence}_epoch_0.pt", b"")
    history = History(snapshot(step=4, sequence=4).manifest, fake, Retention())
    (done,) = retain(str(tmp_path), None, [history])
    (error,) = done.errors
    assert (done.deleted, error.code, error.path) == (1, "EPERM", f"{fake.path}/ckpt_step_1_epoch_0.pt")
    (again,) = retain(str(tmp_path), None, [history])
    assert (again.deleted, again.errors) == (1, ())
    assert fake.disk() == {}


def test_only_the_directory_of_the_history_is_touched(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for stage in range(2):
        for sequence in (1, 2, 3):
            write_shard(tmp_path / f"checkpoint_{stage}", step=sequence, sequence=sequence, stage=stage, pp=2)
    prune(tmp_path, step=3, sequence=3, stage=1, pp=2)
    assert (len(files(tmp_path / "checkpoint_0")), len(files(tmp_path / "checkpoint_1"))) == (3, 2)
    (tmp_path / "checkpoint_0").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    with LocalDirectory.open(str(tmp_path / "elsewhere")) as other:
        made = snapshot(step=3, sequence=3, pp=2).manifest
        (done,) = retain(str(tmp_path), None, [History(made, other, Retention(keep_last=1))])
    assert done.plan.delete
    assert len(files(tmp_path / "elsewhere")) == 3, "a path that has come to mean another place led astray"


def test_nothing_is_deleted_while_some_file_cannot_be_read(tmp_path: Path) -> None:
    """It may be a part of the newest complete checkpoint; the next pass that reads everything deletes what is due."""
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    unreadable = tmp_path / "checkpoint_0" / "ckpt_step_9_epoch_0.pt"
    unreadable.symlink_to(unreadable.name)
    done = prune(tmp_path, step=3, sequence=3)
    (error,) = done.errors
    assert (done.deleted, error.path) == (0, str(unreadable))
    assert "nothing is deleted" in str(error)
    unreadable.unlink()
    again = prune(tmp_path, step=3, sequence=3)
    assert (again.deleted, again.errors) == (1, ())


@pytest.mark.parametrize("content", [b"", b'{"n": 1', b"\xff"])
def test_a_record_of_an_attempt_that_cannot_be_read_stops_retention(tmp_path: Path, content: bytes) -> None:
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    record = tmp_path / ".ckpt_service" / "attempts" / "2.json"
    record.write_bytes(content)  # it may have said that the run was rolled back
    done = prune(tmp_path, step=3, sequence=3)
    (error,) = done.errors
    assert (done.deleted, error.path) == (0, str(record))
    assert str(error).startswith(f"nothing is deleted: {record} cannot be read; restore the record")
    record.unlink()
    assert prune(tmp_path, step=3, sequence=3).deleted == 1


def test_a_pin_that_comes_while_a_pass_is_under_way_is_heeded(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    for sequence in (1, 2, 3, 4):
        write_shard(tmp_path / "checkpoint_0", step=sequence, sequence=sequence)
    pins = tmp_path / ".ckpt_service" / "pins"
    (plan,) = plan_by_hand(str(tmp_path), None, RetentionPolicy(1))
    pins.mkdir()
    (pins / naming.pin_file(1, 2)).touch()
    assert [shard.name.step for shard in carry_out(str(tmp_path), None, plan).deleted] == [1, 3]
    assert steps(tmp_path) == [4, 2]


def test_pruner_looks_after_all_its_shards(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    pruner = Pruner(str(tmp_path), None)
    with LocalDirectory.open(str(tmp_path / "checkpoint_0")) as directory:
        for sequence in (1, 2, 3, 4):
            for tp_rank in range(2):
                changes = {"step": sequence, "sequence": sequence, "tp_rank": tp_rank, "tp": 2}
                write_shard(tmp_path / "checkpoint_0", None, **changes)
                pruner.note(snapshot(None, **changes).manifest, directory, Retention())
                pruner.retain()
    assert files(tmp_path / "checkpoint_0") == [f"ckpt_step_{s}_epoch_0_tp{t}.pt" for s in (3, 4) for t in range(2)]


def lora_saved(directory: Path, step: int, tp_rank: int, *, stage: int = 0, pp: int = 1, tp: int = 2) -> Any:
    """Commit a LoRA shard; return what the daemon then tells its pruner."""
    changes = {"kind": "lora", "step": step, "sequence": step, "tp_rank": tp_rank, "tp": tp, "stage": stage, "pp": pp}
    write_shard(directory, None, **changes)
    with LocalDirectory.open(str(directory)) as opened:
        return snapshot(None, **changes).manifest, LocalDirectory(os.dup(opened.fd), opened.path)


def test_a_directory_that_a_shard_has_left_is_looked_after_until_its_last_set_is_whole(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    pruner = Pruner(str(tmp_path), None)
    old, new = tmp_path / "a_stage_0", tmp_path / "b_stage_0"

    def commit(directory: Path, step: int, tp_rank: int) -> None:
        made, opened = lora_saved(directory, step, tp_rank)
        with opened:
            pruner.note(made, opened, Retention())
            pruner.retain()

    for step in (1, 2):
        commit(old, step, 0)
        commit(old, step, 1)
    commit(old, 3, 0)
    commit(new, 4, 0)
    assert "lora_step_1_epoch_0_tp0.pt" in files(old), "step 3 is not whole yet"
    commit(old, 3, 1)
    assert files(old) == [f"lora_step_{step}_epoch_0_tp{tp}.pt" for step in (2, 3) for tp in (0, 1)]


def test_directories_that_a_shard_has_left_are_not_held_open_for_ever(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    pruner = Pruner(str(tmp_path), None)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(1, 30):
        made, opened = lora_saved(tmp_path / f"{step}_stage_0", step, 0)  # its peer never comes
        with opened:
            pruner.note(made, opened, Retention())
            pruner.retain()
    assert len(os.listdir("/proc/self/fd")) - before < 10


def test_the_stages_of_lora_shards_have_one_history_and_strangers_have_none(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1)
    write_attempt(tmp_path, 2)  # it did not resume: adapters are loaded by name
    pruner = Pruner(str(tmp_path), None)
    directories = [tmp_path / f"lora_stage_{stage}" for stage in (0, 1)]
    stranger = {"kind": "lora", "run_id": "another", "attempt": 9}
    write_shard(directories[0], None, **stranger, step=7)
    write_shard(tmp_path / "other_stage_1", None, kind="lora", stage=1, pp=2, step=5, sequence=5)
    for step in (1, 2, 3):
        for stage in (0, 1) if step < 3 else (0,):
            write_shard(directories[stage], None, kind="lora", stage=stage, pp=2, step=step, sequence=step)
    made, opened = lora_saved(directories[0], 4, 0, pp=2, tp=1)
    with opened:
        pruner.note(made.model_copy(update={"attempt": 2}), opened, Retention())
        pruner.retain()
    assert files(directories[0]) == [f"lora_step_{step}_epoch_0.pt" for step in (1, 2, 3, 4, 7)], "3 and 4 are partial"
    for step in (3, 4):
        made, opened = lora_saved(directories[1], step, 0, stage=1, pp=2, tp=1)
        with opened:
            pruner.note(made.model_copy(update={"attempt": 2}), opened, Retention())
            pruner.retain()
    assert files(directories[0]) == [f"lora_step_{step}_epoch_0.pt" for step in (3, 4, 7)]
    assert files(directories[1]) == [f"lora_step_{step}_epoch_0.pt" for step in (3, 4)]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_good_file_verifies(tmp_path: Path) -> None:
    path = write_shard(tmp_path, {"data/0": b"a" * 5000, "data/1": b"", "data.pkl": b"b"})
    report = verify_shard(only(tmp_path))
    assert (report.ok, report.records, report.bytes) == (True, 5, path.stat().st_size)


@pytest.mark.parametrize("name", ["data/0", "data.pkl", image.VERSION, image.MANIFEST])
def test_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    path = write_shard(tmp_path, {"data/0": b"a" * 5000, "data.pkl": b"b"})
    shard = only(tmp_path)
    content = bytearray(path.read_bytes())
    record = image.parse(memoryview(bytes(content))).find(name)
    assert record is not None
    content[record.end - 1] ^= 4
    path.write_bytes(content)
    problem = verify_shard(shard).problem
    assert problem is not None
    assert f"record {name}: CRC" in problem


def test_damaged_structure_is_found(tmp_path: Path) -> None:
    path = write_shard(tmp_path, {"data/0": b"a" * 5000, "data.pkl": b"b"})
    shard = only(tmp_path)
    content = path.read_bytes()
    layout = image.parse(memoryview(content))
    for position, part in image.structure(layout):
        changed = bytearray(content)
        changed[position + len(part) - 1] ^= 4
        path.write_bytes(changed)
        assert not verify_shard(shard).ok


def test_file_with_a_hole(tmp_path: Path) -> None:
    path = write_shard(tmp_path, {"data/0": b"a" * 50000})
    shard = only(tmp_path)
    with path.open("r+b") as file:
        file.truncate(16384)
        file.truncate(shard.bytes)
    assert not verify_shard(shard).ok


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    path = write_shard(tmp_path)
    shard = only(tmp_path)
    path.write_bytes(b"")
    assert not verify_shard(shard).ok
    path.unlink()
    assert "No such file" in str(verify_shard(shard).problem)
    (tmp_path / NAME).write_bytes(b"PK\3\4")
    assert "without a manifest" in str(verify_shard(only(tmp_path)).problem)


def test_damage_of_the_listing_is_reported_without_reading(tmp_path: Path) -> None:
    path = write_shard(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    report = verify_shard(only(tmp_path))
    assert (report.records, report.ok) == (0, False)
    assert "bytes instead of" in str(report.problem)


def test_manifest_is_readable_by_anyone(tmp_path: Path) -> None:
    head = write_shard(tmp_path).read_bytes()[: image.MANIFEST_END]
    start = head.index(b'{"format_version"')
    assert json.loads(head[start : head.rindex(b"}") + 1])["run_id"] == "run"
    assert struct.unpack("<I", head[-4:])[0] == image.manifest_capacity()


def test_a_memory_opens_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [write_shard(tmp_path, step=step) for step in (1, 2)]
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: opened.append(str(path)) or real_open(path, *rest, **more)
    )
    memory = scan.Memory()
    first = sorted(scan.scan_directory(str(tmp_path), 0, memory), key=lambda shard: shard.path)
    assert sorted(opened) == sorted(map(str, written))
    opened.clear()
    assert sorted(scan.scan_directory(str(tmp_path), 0, memory), key=lambda shard: shard.path) == first
    assert opened == []
    os.truncate(written[0], 100)
    changed = {shard.path: shard.problem for shard in scan.scan_directory(str(tmp_path), 0, memory)}
    assert opened == [str(written[0])]
    assert changed[str(written[0])] is not None
    memory.forget_the_gone([])
    opened.clear()
    list(scan.scan_directory(str(tmp_path), 0, memory))
    assert len(opened) == 2


def test_a_file_of_a_newer_format_keeps_its_place_and_its_attempt_counts(tmp_path: Path) -> None:
    path = write_shard(tmp_path, attempt=7, sequence=3)
    path.write_bytes(newer_format(path.read_bytes()))
    shard = only(tmp_path)
    assert shard.newer_format
    assert shard.manifest is not None
    assert (shard.manifest.attempt, shard.manifest.sequence) == (7, 3)
    path.write_bytes(path.read_bytes().replace(b'"sequence":3', b'"sequence":x'))
    assert (only(tmp_path).newer_format, only(tmp_path).manifest) == (False, None), "it is not even JSON any more"
    path.write_bytes(path.read_bytes().replace(b'"sequence":x', b'"sequence":0'))
    assert (only(tmp_path).newer_format, only(tmp_path).manifest) == (True, None)


def test_a_name_that_a_newer_shard_has_taken_is_not_deleted(tmp_path: Path) -> None:
    """A daemon gave the name to a newer shard between the plan and the deletion."""
    path = write_shard(tmp_path / "checkpoint_0", step=1, sequence=1)
    (planned,) = scan.scan_directory(str(path.parent), 0)
    write_shard(path.parent, step=1, sequence=1, attempt=2)
    with LocalDirectory.open(str(path.parent)) as directory:
        assert delete([planned], directory, lambda shard: False) == ([], [])
        (newer,) = (shard for shard in scan.scan_directory(directory.path, 0) if shard.path == str(path))
        assert newer.manifest is not None
        assert newer.manifest.attempt == 2
        assert delete([newer], directory, lambda shard: False) == ([newer], [])
    assert not path.exists()
