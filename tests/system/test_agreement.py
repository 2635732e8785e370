"""All ranks resume from the same checkpoint, or all refuse together, whatever is damaged, missing or changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import OBEY, RunDirectory, wait_for
from support.shards import BUFFERED, data_offset, flip_bit, manifest
from support.states import manifest_in

from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Watcher, commit
from trainer_hooks.capture import blueprint, capture
from trainer_hooks.layout import plan
from trainer_hooks.slots import Slot
from trainer_hooks.values import Allowed

READING = """
import json
def resume(where=".", **numbers):
    there = Path(root, where)
    reader = Checkpointer(there, topology=place, async_ckpt=False)
    with warnings.catch_warnings(record=True) as caught, reader:
        warnings.simplefilter("always")
        try:
            point = reader.resume(**numbers)
            outcome = None if point is None else [point.step, point.attempt, point.sequence]
            if outcome and point.attempt:
                (value,) = point.state["value"].unique().tolist()
                mine = (place.stage * place.tp + place.tp_rank) / 10
                assert round(value - point.step, 1) == mine, "it is another rank's shard"
            skipped = [] if point is None else [identity.step for identity, _ in point.skipped]
        except Exception as error:
            outcome, skipped = f"{type(error).__name__}: {error}", []
    said = {"outcome": outcome, "skipped": skipped, "warnings": [str(warning.message) for warning in caught]}
    say("found", json.dumps(said))
"""


def resumed(run: RunDirectory, **sizes: int) -> list[dict[str, Any]]:
    """Let the ranks of a mesh resume, and return what each found."""
    (found,) = resumed_often(run, "resume()", **sizes)
    return found


def resumed_often(run: RunDirectory, *calls: str, **sizes: int) -> list[list[dict[str, Any]]]:
    """Let the ranks of a mesh resume in several ways, and return for each what each rank found."""
    ranks = run.ranks("\n".join([READING, *calls]), **sizes)
    found = [[json.loads(said) for said in ranks.say("found")] for _ in calls]
    ranks.end()
    return found


def the_same(found: list[dict[str, Any]]) -> Any:
    """Return the outcome that all ranks agree on; an error may say on which other rank it came up."""
    errors = re.compile(r"^(\w+: )rank \d+: ")
    outcomes = [errors.sub(r"\1", o) if isinstance(o := rank["outcome"], str) else o for rank in found]
    assert outcomes == [outcomes[0]] * len(outcomes)
    return outcomes[0]


def write(root: Path, stated: ShardManifest, value: float) -> None:
    """Commit a shard that holds ``value``."""
    drawn = blueprint(plan({"value": torch.full((9000,), value)}, Allowed(())))
    sized = stated.model_copy(update={"bytes": drawn.layout.nbytes, "tensors": 1})
    slot = Slot.create(drawn.layout.nbytes)
    made = capture(drawn, sized, slot)
    try:
        with LocalDirectory.open(str(root / f"checkpoint_{stated.stage}")) as opened:
            commit(made, opened, mode=0o644, host="host", token="0", options=BUFFERED, watcher=Watcher())
    finally:
        made.view.release()
        slot.close()


def save(root: Path, *steps: int, pp: int = 1, tp: int = 1, without: tuple[int, int] | None = None) -> None:
    """Write the shards of checkpoints; ``without`` is the (step, rank) of one that is not there."""
    for number, step in enumerate(steps, 1):
        for rank in range(pp * tp):
            place = {"stage": rank // tp, "tp_rank": rank % tp, "pp": pp, "tp": tp}
            if (step, rank) != without:
                write(root, manifest(step=step, sequence=number, **place), step + rank / 10)


def shard(root: Path, step: int, tp_rank: int) -> Path:
    return root / "checkpoint_0" / f"ckpt_step_{step}_epoch_0_tp{tp_rank}.pt"


def damage(path: Path) -> None:
    flip_bit(path, data_offset(path) + 1234)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_one_damaged_shard_sends_all_ranks_to_the_next_older_one(run: RunDirectory) -> None:
    save(run.root, 10, 20, 30, 40, tp=2)
    damage(shard(run.root, 30, 0))
    damage(shard(run.root, 40, 1))
    # A roll-back to one that is damaged is not answered with another one.
    found, damaged, older, absent = resumed_often(
        run, "resume()", "resume(step=40)", "resume(step=10)", "resume(step=15)", tp=2
    )
    assert the_same(found) == [20, 1, 2]
    for said in found:
        assert said["skipped"] == [40, 30]
        first, second = said["warnings"]
        assert first.startswith("resuming from step 20: passed over step 40 epoch 0: rank 1: ")
        assert second.startswith("resuming from step 20: passed over step 30 epoch 0: rank 0: ")
        assert f"{shard(run.root, 40, 1)}: record data/0: CRC" in first
        assert f"{shard(run.root, 30, 0)}: record data/0: CRC" in second
    assert the_same(damaged).startswith(f"DamagedCheckpoint: {shard(run.root, 40, 1)}: record data/0: CRC")
    assert the_same(older) == [10, 1, 1]
    assert the_same(absent).startswith("ValueError: step=15: no such complete checkpoint")


def test_when_none_is_whole_on_all_ranks_all_refuse(run: RunDirectory) -> None:
    save(run.root, 10, 20, tp=2)
    damage(shard(run.root, 10, 0))
    damage(shard(run.root, 20, 1))
    said = the_same(resumed(run, tp=2))
    assert said.startswith("NoUsableCheckpoint: every checkpoint is damaged: step 20 epoch 0: rank 1: ")
    assert f"step 10 epoch 0: rank 0: {shard(run.root, 10, 0)}: record data/0" in said


def test_a_shard_that_is_short_counts_as_damaged_on_all_ranks(run: RunDirectory) -> None:
    save(run.root, 10, 20, tp=2)
    with shard(run.root, 20, 1).open("r+b") as file:
        file.truncate(9000)
    found = resumed(run, tp=2)
    assert the_same(found) == [10, 1, 1]
    for said in found:
        (warned,) = said["warnings"]
        assert "passed over step 20 epoch 0: stage 0 tp 1: it has 9000 bytes instead of" in warned


def test_only_partial_ones_are_nothing_to_resume_from(run: RunDirectory) -> None:
    save(run.root, 10, tp=2, without=(10, 1))
    found = resumed(run, tp=2)
    assert the_same(found) is None
    for said in found:
        assert said["warnings"] == ["nothing to resume from: only partial checkpoints, of steps [10]"]


def test_the_newest_that_all_have_counts_not_the_newest_of_each(run: RunDirectory) -> None:
    save(run.root, 100, 200, 300, 400, pp=2, without=(400, 1))
    (run.root / "checkpoint_0" / "ckpt_step_300_epoch_0.pt").unlink()
    assert the_same(resumed(run, pp=2)) == [200, 1, 2]


# --- another mesh -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [{"tp": 4}, {"tp": 1}, {"pp": 2}], ids=str)
def test_other_sizes_are_refused_by_all_ranks(run: RunDirectory, now: dict[str, int]) -> None:
    save(run.root / "complete", 7, tp=2)
    save(run.root / "partial", 7, tp=2, without=(7, 1))
    for found in resumed_often(run, "resume('complete')", "resume('partial')", **now):
        said = the_same(found)
        assert said.startswith("LayoutMismatch: step 7 was saved with pp=1 tp=2, and this run has ")
        assert f"pp={now.get('pp', 1)} tp={now.get('tp', 1)}" in said


TRAINING = """
import random
model = torch.nn.Linear(2, 2)
def train(seed):
    random.seed(seed + place.dp_rank)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter)
    torch.manual_seed(seed + place.dp_rank)
def digest():
    return [round(float(parameter.double().sum()), 6) for parameter in model.parameters()]
def resume():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            point = checkpointer.resume()
        except Exception as error:
            return say("from", type(error).__name__, error)
    say("from", point.step, *(warning.message for warning in caught))
    say("digest", digest())
    say("draws", random.random(), float(torch.rand(())))
def save(step):
    say("path", checkpointer.save(step).wait_committed(60))
    say("digest", digest())
    say("draws", random.random(), float(torch.rand(())))
checkpointer = Checkpointer(root, topology=place)
checkpointer.track(model=model)
"""


def test_another_number_of_replicas_is_fine(run: RunDirectory) -> None:
    expected: list[str] = []
    draws: list[str] = []
    for start, dp in enumerate((1, 2, 1)):
        ranks = run.ranks(TRAINING + OBEY, dp=dp)
        if start:
            ranks.hear("train(0); resume()")
            said = ranks.say("from")
            assert said[0] == str(start)
            for rank, warned in enumerate(said[1:], 1):
                assert re.match(rf"{start} step 1 holds no random numbers of data-parallel rank {rank}: .*seed", warned)
            assert ranks.say("digest") == expected[:1] * dp
            drawn = ranks.say("draws")
            assert len(set(drawn)) == dp
            assert drawn[0] == draws[0]
        ranks.hear(f"train({start + 1}); save({start + 1})")
        ranks.say("path")
        expected = ranks.say("digest")
        draws = ranks.say("draws")
        ranks.end()


# --- directories that are not shared ----------------------------------------------------------------------------------


def test_a_replica_on_another_host_gets_the_file_from_the_writer(run: RunDirectory) -> None:
    there = run.root.parent / "there"

    def each(rank: int) -> dict[str, str]:
        return {"ROOT": str(there), "CKPT_SERVICE_HOST": "other"} if rank % 2 else {}

    # Four ranks: two pipeline stages, each with a writer here and a replica there.
    ranks = run.ranks(TRAINING + OBEY, pp=2, dp=2, each=each)
    ranks.hear("train(10 * place.stage); save(1)")
    assert [path != "None" for path in ranks.say("path")] == [True, False] * 2
    expected = ranks.say("digest"), ranks.say("draws")
    assert len(set(expected[1])) == 4
    ranks.end()
    assert list(there.glob("checkpoint_*")) == []
    ranks = run.ranks(TRAINING + OBEY, pp=2, dp=2, each=each)
    ranks.hear("resume()")
    assert ranks.say("from") == ["1"] * 4
    assert (ranks.say("digest"), ranks.say("draws")) == expected
    # What is sent is checked like what is read.
    damage(run.root / "checkpoint_1" / "ckpt_step_1_epoch_0.pt")
    ranks.hear("resume()")
    for said in ranks.say("from"):
        assert said.startswith("NoUsableCheckpoint every checkpoint is damaged: step 1 epoch 0: rank 2: ")
    ranks.end()


def test_without_torch_distributed_a_file_that_a_replica_does_not_see_is_named(run: RunDirectory) -> None:
    save(run.root, 5, pp=1)
    body = READING + 'place = Topology(rank, dp=2)\nroot = root if rank == 0 else os.environ["ELSEWHERE"]\n'
    elsewhere = run.root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".ckpt_service").symlink_to(run.root / ".ckpt_service")
    (run.root / ".ckpt_service").mkdir()
    ranks = run.ranks(body + "resume()", dp=2, meet="launch", ELSEWHERE=str(elsewhere))
    said = the_same([json.loads(said) for said in ranks.say("found")])
    assert said == "NoUsableCheckpoint: every checkpoint is damaged: step 5 epoch 0: rank 1 does not see its file"
    ranks.end()


def test_every_stage_may_have_a_directory_of_its_own(run: RunDirectory) -> None:
    there = run.root.parent / "there"

    def each(rank: int) -> dict[str, str]:
        return {"ROOT": str(there), "CKPT_SERVICE_HOST": "other"} if rank else {}

    ranks = run.ranks(TRAINING + OBEY, pp=2, each=each)
    for step in (1, 2):
        ranks.hear(f"train({step} + 10 * rank); save({step})")
        assert ranks.say("path") == [
            str(root / f"checkpoint_{stage}" / f"ckpt_step_{step}_epoch_0.pt")
            for stage, root in enumerate((run.root, there))
        ]
        expected = ranks.say("digest"), ranks.say("draws")
    ranks[0].hears("save(3)")
    ranks[0].says("path")
    ranks.end()
    ranks = run.ranks(TRAINING + OBEY, pp=2, each=each)
    ranks.hear("resume()")
    assert ranks.say("from") == ["2", "2"]
    assert (ranks.say("digest"), ranks.say("draws")) == expected
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")


# --- files of the old trainer -----------------------------------------------------------------------------------------


def legacy(root: Path, step: int, stage: int, tp_rank: int | None = None) -> Path:
    """Write a file as plain ``torch.save`` trainers do."""
    suffix = "" if tp_rank is None else f"_tp{tp_rank}"
    path = root / f"checkpoint_{stage}" / f"ckpt_step_{step}_epoch_1{suffix}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 1, "step": step, "stage": stage, "value": torch.full((4,), 1.0 * step)}, path)
    return path


def test_old_files_are_taken_if_all_ranks_have_one(run: RunDirectory) -> None:
    old, damaged, begun, ours = (run.root / name for name in ("old", "damaged", "begun", "ours"))
    for root in (old, damaged, begun, ours):
        for step in (5, 6):
            for stage in (0, 1):
                legacy(root, step, stage)
    legacy(old, 7, 0)
    (damaged / "checkpoint_1" / "ckpt_step_6_epoch_1.pt").write_bytes(b"PK\3\4 not whole")
    save(begun, 1, pp=2, without=(1, 1))
    save(ours, 1, pp=2)
    found = resumed_often(run, *(f"resume({name!r})" for name in ("old", "damaged", "begun", "ours")), pp=2)
    assert the_same(found[0]) == [6, 0, 0]
    assert the_same(found[1]) == [5, 0, 0]
    for said in found[1]:
        assert any("passed over step 6 epoch 1: rank 1: " in warned for warned in said["warnings"])
    assert the_same(found[2]) == [6, 0, 0], "a set of ours that is not whole changes nothing"
    assert the_same(found[3]) == [1, 1, 1], "ours are newer, whatever their numbers"


def test_old_files_of_some_ranks_only_are_nothing_and_said_to_be_there(run: RunDirectory) -> None:
    legacy(run.root, 5, 0)  # the old trainer gave full checkpoints no tensor-parallel part: all ranks wrote this one
    found = resumed(run, tp=2)
    assert the_same(found) is None
    for said in found:
        (warned,) = said["warnings"]
        assert warned == "nothing to resume from: only partial checkpoints, of steps [5]"


def test_what_was_resumed_from_old_files_goes_on_without_a_complaint(run: RunDirectory) -> None:
    for stage in (0, 1):
        legacy(run.root, 5, stage)
    ranks = run.ranks(
        """
        warnings.simplefilter("error")
        with Checkpointer(root, topology=place) as checkpointer:
            point = checkpointer.resume()
            say("from", point.step, point.epoch, point.attempt, float(point.state["value"].unique()))
            for step in (6, 7, 8):
                path = checkpointer.save(step, 1, state={}).wait_committed(60)
            say("path", path)
        """,
        pp=2,
    )
    assert ranks.say("from") == ["5 1 0 5.0"] * 2
    paths = list(map(Path, ranks.say("path")))
    assert [manifest_in(path).stage for path in paths] == [0, 1]
    ranks.end()
    for path in paths:
        assert sorted(other.name for other in path.parent.iterdir()) == [
            f"ckpt_step_{step}_epoch_1.pt" for step in (5, 7, 8)
        ], "old files are kept and do not count"
