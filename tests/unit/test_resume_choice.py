"""What a resume tries, and what it says when there is nothing to try."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.checkpoints import RUN, attempt, catalog, legacy, shard, shards, topologies

from ckpt_service.catalog import Catalog, Shard, build
from ckpt_service.errors import LayoutMismatch, NewerFormat
from ckpt_service.records import Attempt
from ckpt_service.scan import evidence_beside
from trainer_hooks.choice import Choice, candidates, own_shard, saved_beside
from trainer_hooks.topology import Topology

ALONE = Topology()


def chosen(found: Catalog, pp: int = 1, tp: int = 1, dp: int = 1, step: int | None = None) -> Choice:
    """Return the choice, which must be the same on every rank."""
    choices = [candidates(found, place, step, None) for place in topologies(pp, tp, dp)]
    assert all(choice == choices[0] for choice in choices)
    return choices[0]


def tried(found: Catalog, pp: int = 1, tp: int = 1, dp: int = 1) -> list[int]:
    return [checkpoint.id.step for checkpoint in chosen(found, pp, tp, dp).candidates]


def line(*steps: int) -> tuple[list[Shard], Attempt]:
    return [shard(1, n + 1, step) for n, step in enumerate(steps)], attempt(1)


# --- without arguments ------------------------------------------------------------------------------------------------


def test_newest_first() -> None:
    files, record = line(9900, 10000, 50)
    assert tried(catalog(files, record)) == [50, 10000, 9900]


@pytest.mark.parametrize("files", [[], [shard(1, 1, 5, tp=2)]])
def test_nothing_or_only_partial_sets_is_nothing(files: list[Shard]) -> None:
    assert chosen(catalog(files, attempt(1)), tp=2) == Choice([], [])


def test_ranks_that_have_come_further_go_back_to_what_all_have() -> None:
    first = [file for n in (1, 2) for file in shards(1, n, n * 100, pp=2, tp=2)]
    ahead = [shard(1, n, n * 100, pp=2, tp=2, stage=stage, tp_rank=0) for n in (3, 4) for stage in (0, 1)]
    found = catalog([*first, *ahead], attempt(1), attempt(2))
    assert tried(found, 2, 2, 2) == [200, 100]
    for place in topologies(2, 2):
        mine = own_shard(chosen(found, 2, 2).candidates[0], place)
        assert (mine.stage, mine.tp_rank) == (place.stage, place.tp_rank)


def test_only_the_lineage_is_tried() -> None:
    """Neither what a roll-back abandoned, nor a run that was here before, nor another run's files."""
    files = [shard(1, 1, 4900), shard(1, 2, 5000), shard(2, 1, 300), shard(2, 2, 310), shard(3, 1, 305)]
    files += [shard(7, 1, 9000, run_id="other")]
    known = (attempt(1), attempt(2), attempt(3, (2, 1), explicit=True), attempt(4, (3, 1)))
    assert tried(catalog(files, *known)) == [305, 300]


def test_a_roll_back_holds_also_before_its_first_save() -> None:
    files = [shard(1, 1, 500), shard(1, 2, 600)]
    assert tried(catalog(files, attempt(1), attempt(2, (1, 1), explicit=True))) == [500]
    assert tried(catalog(files, attempt(1), attempt(2, (1, 1)))) == [600, 500]


def test_a_damaged_one_is_passed_over_and_named() -> None:
    files = [shard(1, 1, 100), shard(1, 2, 200, problem="short"), shard(1, 3, 300, problem="shorter")]
    choice = chosen(catalog(files, attempt(1)))
    assert [c.id.step for c in choice.candidates] == [100]
    assert [(found.step, reason) for found, reason in choice.skipped] == [
        (300, "stage 0 tp 0: shorter"),
        (200, "stage 0 tp 0: short"),
    ]


def test_an_older_damaged_one_is_not_mentioned() -> None:
    files = [shard(1, 1, 100, problem="short"), shard(1, 2, 200)]
    assert chosen(catalog(files, attempt(1))).skipped == []


@pytest.mark.parametrize(
    "files",
    [
        [shard(1, 1, 100, problem="short")],
        [legacy("ckpt_step_100_epoch_0.pt", problem="it is not a checkpoint (0 bytes)")],
    ],
)
def test_all_damaged_is_not_the_same_as_nothing(files: list[Shard]) -> None:
    choice = chosen(catalog(files, attempt(1)))
    assert choice.candidates == []
    assert [found.step for found, _ in choice.skipped] == [100]


def test_after_the_service_directory_was_deleted_the_manifests_say_what_is_newest() -> None:
    assert tried(catalog([shard(1, 1, 900), shard(2, 1, 100), shard(2, 2, 200)])) == [200, 100, 900]


# --- files of a newer format ------------------------------------------------------------------------------------------


def newer_format(file: Shard) -> Shard:
    return replace(file, problem="its format version is 2; upgrade ckpt-service to read it", newer_format=True)


def refusal(found: Catalog, tp: int = 1) -> str:
    """Return why a resume that names no step is refused, which must be the same on every rank."""
    reasons = set()
    for place in topologies(1, tp):
        with pytest.raises(NewerFormat) as caught:
            candidates(found, place, None, None)
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    return reasons.pop()


def test_a_newer_release_s_newest_checkpoint_stops_the_resume() -> None:
    files, record = line(100, 200)
    reason = refusal(catalog([*files, newer_format(shard(1, 3, 50))], record))
    assert "step 50 epoch 0 was saved by a newer release" in reason
    assert "upgrade ckpt-service" in reason
    assert "resume(step=...)" in reason
    of_one_rank = [*shards(1, 1, 100, tp=2), shard(1, 2, 200, tp=2), newer_format(shard(1, 2, 200, tp=2, tp_rank=1))]
    assert "step 200" in refusal(catalog(of_one_rank, attempt(1)), tp=2)


def test_it_stops_the_resume_where_there_is_nothing_else() -> None:
    assert "step 100" in refusal(catalog([newer_format(shard(1, 1, 100))], attempt(1)))
    assert "step 100" in refusal(catalog([newer_format(shard(1, 1, 100)), legacy("ckpt_step_900_epoch_9.pt")]))


def test_one_without_a_place_among_the_others_is_judged_by_its_name() -> None:
    files, record = line(100, 200)
    assert "step 300" in refusal(catalog([*files, newer_format(legacy("ckpt_step_300_epoch_0.pt"))], record))
    older = catalog([*files, newer_format(legacy("ckpt_step_150_epoch_0.pt"))], record)
    assert [checkpoint.id.step for checkpoint in chosen(older).candidates] == [200, 100]


def test_an_older_or_abandoned_one_of_a_newer_format_does_not() -> None:
    files = [newer_format(shard(1, 1, 100)), shard(1, 2, 200), newer_format(shard(1, 3, 300)), shard(2, 1, 210)]
    rolled_back = (attempt(1), attempt(2, (1, 2), explicit=True))
    assert tried(catalog(files[:2], attempt(1))) == [200]
    assert tried(catalog(files[:3], *rolled_back)) == [200]
    assert tried(catalog(files, *rolled_back)) == [210, 200]


def test_an_older_one_that_is_named_is_taken() -> None:
    files, record = line(100, 200)
    found = catalog([*files, newer_format(shard(1, 3, 300))], record)
    assert [checkpoint.id.step for checkpoint in chosen(found, step=200).candidates] == [200]
    with pytest.raises(
        ValueError, match=r"step=300: no such complete checkpoint; it is damaged: .*format version is 2"
    ):
        candidates(found, ALONE, 300, None)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 4), (2, 2), (2, 1)])
def test_another_layout_is_refused_naming_both(pp: int, tp: int) -> None:
    found = catalog(shards(1, 1, 5, tp=2), attempt(1))
    for place in topologies(pp, tp):
        with pytest.raises(LayoutMismatch, match=rf"saved with pp=1 tp=2.*this run has pp={pp} tp={tp}"):
            candidates(found, place, None, None)
        with pytest.raises(LayoutMismatch):
            candidates(found, place, 5, None)


def test_another_number_of_replicas_is_fine() -> None:
    assert tried(catalog(shards(1, 1, 5, tp=2), attempt(1)), tp=2, dp=3) == [5]


def test_stale_files_of_a_wider_run_do_not_matter() -> None:
    wide = shards(1, 1, 900, tp=4)
    narrow = shards(2, 1, 5, tp=2)
    assert tried(catalog([*wide, *narrow], attempt(1), attempt(2)), tp=2) == [5]
    assert tried(catalog([*wide, *narrow]), tp=2) == [5]  # also where the records of the attempts are lost


# --- legacy -----------------------------------------------------------------------------------------------------------


def test_legacy_files_are_tried_by_epoch_and_step_when_there_is_nothing_else() -> None:
    files = [legacy(f"ckpt_step_{step}_epoch_{epoch}.pt") for step, epoch in [(900, 1), (3, 2), (10, 2)]]
    assert tried(catalog(files)) == [10, 3, 900]
    assert tried(catalog([*files, shard(1, 1, 5)], attempt(1))) == [5]


def test_a_legacy_step_needs_a_file_for_every_rank() -> None:
    both = [legacy("ckpt_step_1_epoch_0.pt", stage=stage) for stage in (0, 1)]
    assert tried(catalog([*both, legacy("ckpt_step_2_epoch_0.pt")]), pp=2) == [1]


def test_an_old_file_that_all_tensor_parallel_ranks_wrote_is_nobodys() -> None:
    """Also beside one that says its rank: the first may hold the same part."""
    alone = catalog([legacy("ckpt_step_1_epoch_0.pt")])
    beside = catalog([legacy("ckpt_step_1_epoch_0.pt"), legacy("ckpt_step_1_epoch_0_tp1.pt")])
    for found in (alone, beside):
        assert tried(found, tp=2) == []
        with pytest.raises(ValueError, match=r"ckpt_step_1_epoch_0.pt holds the part of one of the 2 tensor-parallel"):
            candidates(found, Topology(0, 1, 1, 2), 1, None)
        assert tried(catalog([legacy(f"ckpt_step_1_epoch_0_tp{rank}.pt") for rank in (0, 1)]), tp=2) == [1]


def test_an_old_file_can_be_named_although_newer_ones_are_there() -> None:
    found = catalog([legacy("ckpt_step_1_epoch_0.pt"), shard(1, 1, 5)], attempt(1))
    assert [c.id.attempt for c in chosen(found, step=1).candidates] == [0]


# --- beside the training ----------------------------------------------------------------------------------------------


def beside(files: list[Shard], *, tp: int = 1, step: int = 3) -> tuple[int, str]:
    found = build(evidence_beside(files, RUN, 2)).of_kind("lora")
    taken = saved_beside(found, Topology(0, 1, 1, tp), step, 0, "here")
    return taken.id.attempt, taken.state.value


def test_of_adapters_saved_twice_the_whole_later_set_is_taken() -> None:
    old = [shard(1, 9, 3, tp=2, tp_rank=rank, kind="lora", set_aside=rank == 0) for rank in (0, 1)]
    new = [shard(2, 1, 3, tp=2, tp_rank=0, kind="lora")]
    assert beside([*old, *new], tp=2) == (1, "complete"), "never a part of one and a part of the other"
    assert beside([*old, *new, shard(2, 1, 3, tp=2, tp_rank=1, kind="lora")], tp=2) == (2, "complete")


def test_adapters_of_this_run_come_first_then_those_of_others_then_old_ones() -> None:
    old = legacy("lora_step_3_epoch_0.pt")
    other = shard(9, 1, 3, kind="lora", run_id="other")
    assert beside([old, other, shard(1, 1, 3, kind="lora")]) == (1, "complete")
    assert beside([old, other]) == (9, "foreign")
    assert beside([old]) == (0, "legacy")


def test_adapters_that_are_not_whole_are_refused_with_the_reason() -> None:
    half = [shard(1, 1, 3, tp=2, kind="lora")]
    with pytest.raises(ValueError, match=r"step=3, epoch=0: nothing to load in here: it is partial: stage 0 tp 1"):
        beside(half, tp=2)
    with pytest.raises(ValueError, match=r"step=4, epoch=0: nothing to load in here: no such file"):
        beside(half, tp=2, step=4)
    with pytest.raises(LayoutMismatch, match=r"pp=1 tp=2.*pp=1 tp=1"):
        beside(half)


# --- by number --------------------------------------------------------------------------------------------------------


def test_a_named_step_is_the_only_one_tried() -> None:
    files, record = line(100, 200, 300)
    assert [c.id.step for c in chosen(catalog(files, record), step=200).candidates] == [200]


def test_of_a_step_that_was_saved_again_the_later_is_meant() -> None:
    files = [shard(1, 1, 7, set_aside=True), shard(1, 2, 7, repeat=1)]
    assert [c.id.sequence for c in chosen(catalog(files, attempt(1)), step=7).candidates] == [2]


def test_an_unknown_step_is_answered_with_those_that_are_there() -> None:
    files, record = line(100, 200)
    with pytest.raises(ValueError, match=r"step=150: no such complete checkpoint; .*200:0, 100:0"):
        candidates(catalog(files, record), ALONE, 150, None)
    with pytest.raises(ValueError, match=r"step=150.*none"):
        candidates(catalog([]), ALONE, 150, None)
    with pytest.raises(ValueError, match=r"step=100, epoch=3"):
        candidates(catalog(files, record), ALONE, 100, 3)


def test_a_step_alone_that_names_several_asks_for_the_epoch() -> None:
    files = [shard(1, n, 322, epoch) for n, epoch in ((1, 9), (2, 10))]
    found = catalog(files, attempt(1))
    with pytest.raises(ValueError, match=r"step=322: give the epoch as well, there are \[9, 10\]"):
        candidates(found, ALONE, 322, None)
    assert candidates(found, ALONE, 322, 9).candidates[0].id.epoch == 9


@pytest.mark.parametrize(
    ("step", "why"), [(10, "foreign"), (30, "abandoned"), (40, "partial"), (50, "damaged: stage 0 tp 0: short")]
)
def test_a_step_that_cannot_be_resumed_is_refused_with_its_state(step: int, why: str) -> None:
    files = [*shards(1, 1, 10, tp=2), *shards(2, 1, 20, tp=2), *shards(2, 2, 30, tp=2), shard(3, 2, 40, tp=2)]
    files += [shard(3, 1, 50, tp=2, problem="short"), shard(3, 1, 50, tp=2, tp_rank=1)]
    found = catalog(files, attempt(1), attempt(2), attempt(3, (2, 1), explicit=True))
    with pytest.raises(ValueError, match=f"step={step}.*it is {why}"):
        candidates(found, Topology(0, 1, 1, 2), step, None)
