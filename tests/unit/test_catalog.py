"""Which files belong together, in which order, and what each set is good for."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import attempt, catalog, legacy, shard, shards, states, step_of

from ckpt_service.catalog import Evidence, Shard, State, build
from ckpt_service.naming import parse_shard
from ckpt_service.records import Attempt

SHORT = "it has 9 bytes instead of 10000"


def steps(files: list[Shard], *attempts: Attempt) -> list[tuple[int, int]]:
    """Return (step, epoch) of each checkpoint, oldest first."""
    return [(c.id.step, c.id.epoch) for c in reversed(catalog(files, *attempts).checkpoints)]


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modified", [[0.0] * 5, [5.0, 4.0, 3.0, 2.0, 1.0], [9e9, 1.0, 2.0, 3.0, 0.0]])
def test_order_is_that_of_the_saves_whatever_the_times_and_digits(modified: list[float]) -> None:
    saved = [9800, 9900, 10000, 10100, 100000]
    files = [shard(1, n + 1, step, modified=modified[n]) for n, step in enumerate(saved)]
    found = catalog(files, attempt(1))
    assert [c.id.step for c in found.checkpoints] == saved[::-1]
    assert step_of(found.newest_complete()) == 100000


@given(st.randoms(use_true_random=False))
def test_order_does_not_depend_on_the_listing(rng: random.Random) -> None:
    files = [*shards(1, 1, 5, tp=2), *shards(1, 2, 3, tp=2), shard(2, 1, 4, tp=2), legacy("ckpt_step_9_epoch_9_tp0.pt")]
    files += [replace(shard(1, 1, 7, run_id="other", tp=2)), legacy("ckpt_step_8_epoch_9_tp0.pt", problem="no magic")]
    expected = catalog(files, attempt(1), attempt(2, (1, 2))).checkpoints
    rng.shuffle(files)
    assert catalog(files, attempt(2, (1, 2)), attempt(1)).checkpoints == expected


@pytest.mark.parametrize(
    "saved",
    [
        [(322, 0), (644, 0), (10, 1), (322, 1), (644, 1), (3, 2)],
        [(322, epoch) for epoch in (1, 2, 9, 10, 11)],
        [(1000, 3), (2000, 2)],
    ],
)
def test_step_and_epoch_have_no_say_in_the_order(saved: list[tuple[int, int]]) -> None:
    assert steps([shard(1, n + 1, *named) for n, named in enumerate(saved)], attempt(1)) == saved


def test_a_later_attempt_is_newer_whatever_its_sequence_and_step() -> None:
    files = [shard(1, 8, 4900), shard(1, 9, 5000), shard(2, 1, 400)]
    assert steps(files, attempt(1), attempt(2, (1, 9))) == [(4900, 0), (5000, 0), (400, 0)]


def test_legacy_comes_first_by_epoch_and_then_step() -> None:
    files = [legacy(f"ckpt_step_{step}_epoch_{epoch}.pt") for step, epoch in [(3, 2), (10, 1), (9, 1), (99, 0)]]
    assert steps([*files, shard(1, 1, 1)], attempt(1)) == [(99, 0), (9, 1), (10, 1), (3, 2), (1, 0)]


def test_ranks_that_count_their_saves_differently_are_named() -> None:
    files = [shard(1, 3, 5, tp=2), shard(1, 4, 5, tp=2, tp_rank=1)]
    (found,) = catalog(files, attempt(1)).checkpoints
    assert (found.state, found.id.sequence) == (State.COMPLETE, 3)
    assert found.reason == "it is save number 3, and stage 0 tp 1 counts 4"


# --- sets -------------------------------------------------------------------------------------------------------------


def test_complete_is_every_stage_and_tensor_parallel_rank() -> None:
    files = shards(1, 1, 100, pp=2, tp=2)
    assert states(catalog(files, attempt(1))) == {100: "complete"}
    for missing in files:
        found = catalog([file for file in files if file is not missing], attempt(1)).checkpoints[0]
        assert found.state is State.PARTIAL
        assert found.awaited == ((missing.stage, missing.tp_rank),)
        assert found.reason == f"stage {missing.stage} tp {missing.tp_rank} not committed yet"


def test_shards_of_different_saves_are_never_mixed() -> None:
    for other in (
        shard(1, 2, 100, tp=2, tp_rank=1, repeat=1),
        shard(2, 1, 100, tp=2, tp_rank=1),
        shard(1, 1, 101, tp=2, tp_rank=1),
        shard(1, 1, 100, 1, tp=2, tp_rank=1),
        shard(1, 1, 100, tp=2, tp_rank=1, run_id="other"),
        replace(legacy("ckpt_step_100_epoch_0_tp1.pt")),
    ):
        found = catalog([shard(1, 1, 100, tp=2), other], attempt(1))
        assert len(found.checkpoints) == 2
        assert found.newest_complete() is None


def test_the_lowest_rank_gives_the_sequence() -> None:
    found = catalog([shard(1, 7, 100, tp=2), shard(1, 8, 100, tp=2, tp_rank=1)], attempt(1)).checkpoints
    assert [(c.state, c.id.sequence) for c in found] == [(State.COMPLETE, 7)]


def test_sizes_that_disagree_are_damage() -> None:
    assert states(catalog([shard(1, 1, 5, tp=2), shard(1, 1, 5, tp=4, tp_rank=1)], attempt(1))) == {5: "damaged"}
    assert states(catalog([*shards(1, 1, 5, tp=2), shard(1, 1, 5, tp=2, tp_rank=3)], attempt(1))) == {5: "damaged"}


def test_a_short_file_damages_its_set() -> None:
    files = [shard(1, 1, 5, tp=2), shard(1, 1, 5, tp=2, tp_rank=1, problem=SHORT)]
    found = catalog(files, attempt(1)).checkpoints
    assert [(c.state, c.reason) for c in found] == [(State.DAMAGED, f"stage 0 tp 1: {SHORT}")]


def test_a_set_aside_shard_counts_where_its_name_was_taken() -> None:
    files = [shard(1, 1, 5, tp=2, set_aside=True), shard(1, 1, 5, tp=2, tp_rank=1), shard(1, 2, 5, tp=2, repeat=1)]
    assert [c.state for c in catalog(files, attempt(1)).checkpoints] == [State.PARTIAL, State.COMPLETE]


def test_a_shard_under_two_names_is_one_shard() -> None:
    """A crash came between setting it aside and the rename that would have replaced it."""
    files = [*shards(1, 1, 5, tp=2), shard(1, 1, 5, tp=2, set_aside=True)]
    found = catalog(files, attempt(1)).checkpoints
    assert [(c.state, len(c.shards), len(c.copies)) for c in found] == [(State.COMPLETE, 2, 1)]
    damaged = [replace(files[0], problem=SHORT), *files[1:]]
    assert states(catalog(damaged, attempt(1))) == {5: "complete"}


@pytest.mark.parametrize(
    "name", ["ckpt_step_999_epoch_0.pt", "ckpt_step_5_epoch_0_tp0.pt", "ckpt_step_5_epoch_0_tp1.pt"]
)
def test_a_copy_under_another_name_belongs_to_no_set(name: str) -> None:
    parsed = parse_shard(name)
    assert parsed is not None
    copy = replace(shard(1, 1, 5), name=parsed, path=f"/runs/checkpoint_0/{name}")
    found = catalog([shard(1, 1, 5), copy], attempt(1))
    assert [(c.state, c.id.attempt) for c in found.checkpoints] == [(State.COMPLETE, 1), (State.DAMAGED, 0)]
    elsewhere = replace(shard(1, 1, 5), stage=3, path="/runs/checkpoint_3/ckpt_step_5_epoch_0.pt")
    assert [c.state for c in catalog([elsewhere], attempt(1)).checkpoints] == [State.DAMAGED]


def test_tp1_is_not_tp10() -> None:
    wide = shards(1, 1, 5, tp=11)
    assert states(catalog(wide, attempt(1))) == {5: "complete"}
    found = catalog([file for file in wide if file.tp_rank != 1], attempt(1)).checkpoints[0]
    assert found.awaited == ((0, 1),)


def test_legacy_files_of_one_step_are_listed_together() -> None:
    files = [legacy("ckpt_step_5_epoch_0.pt", stage=stage) for stage in (0, 1)]
    found = catalog(files).checkpoints
    assert [(c.state, c.ranks) for c in found] == [(State.LEGACY, {(0, 0), (1, 0)})]


def test_pins_are_of_one_checkpoint() -> None:
    found = catalog(
        [shard(1, 1, 5), shard(1, 2, 6), legacy("ckpt_step_4_epoch_0.pt")], attempt(1), pins=[(1, 1), (0, 0)]
    )
    assert [c.id.step for c in found.checkpoints if c.pinned] == [5]


# --- dead sets --------------------------------------------------------------------------------------------------------


def test_a_partial_set_is_dead_when_its_attempt_has_ended() -> None:
    files = [*shards(1, 1, 5, tp=2), shard(1, 2, 6, tp=2)]
    assert states(catalog(files, attempt(1)))[6] == "partial"
    assert states(catalog(files, attempt(1), attempt(2)))[6] == "dead"


def test_a_partial_set_is_dead_when_the_missing_rank_went_on_without_it() -> None:
    files = [shard(1, 1, 5, tp=2), shard(1, 2, 6, tp=2), shard(1, 2, 6, tp=2, tp_rank=1)]
    found = catalog(files, attempt(1)).checkpoints[1]
    assert found.state is State.DEAD
    assert found.reason == "stage 0 tp 1 not committed yet, and stage 0 tp 1 has committed a later one"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_partial_set_is_dead_when_it_is_too_far_behind(slots: int) -> None:
    files = [shard(1, n, n, tp=2) for n in range(1, slots + 4)]
    found = catalog(files, attempt(1), slots=slots)
    assert [c.id.step for c in found.checkpoints if c.state is State.PARTIAL] == list(range(slots + 3, 1, -1))
    assert [c.id.step for c in found.checkpoints if c.state is State.DEAD] == [1]


# --- ranks whose files are elsewhere ----------------------------------------------------------------------------------


def elsewhere(files: list[Shard], held: list[tuple[int, int]] | None, *attempts: Attempt) -> dict[int, str]:
    """Return the states as tp rank 0 sees them, which is told what rank 1 holds (None: it is told nothing)."""
    committed = {} if held is None else {("train", 0, 1): held}
    return states(build(Evidence(files, attempts or (attempt(1),), committed=committed)))


def test_reports_complete_a_set_and_only_that_one() -> None:
    files = [shard(1, n, n, tp=2) for n in (1, 2, 3, 4)]
    assert elsewhere(files, [(1, 1), (1, 3)]) == {1: "complete", 2: "dead", 3: "complete", 4: "partial"}


def test_unknown_ranks_may_still_hold_what_is_needed() -> None:
    """Also when the attempt has ended: until they are heard of, nothing is given up but what is too far behind."""
    files = [shard(1, n, n, tp=2) for n in (1, 2, 3, 4, 5)]
    two = (attempt(1), attempt(2, (1, 5)))
    assert elsewhere(files, None, *two) == {1: "dead", 2: "partial", 3: "partial", 4: "partial", 5: "partial"}
    assert elsewhere(files, [], *two) == dict.fromkeys([1, 2, 3, 4, 5], "dead")


def test_a_report_does_not_bring_back_a_file_that_is_gone() -> None:
    """On a directory that all see, an old report must not make a set look complete whose file was deleted since."""
    files = [shard(1, 1, 1, tp=2), *shards(1, 2, 2, tp=2)]
    assert elsewhere(files, [(1, 1), (1, 2)]) == {1: "dead", 2: "complete"}


# --- lineage ----------------------------------------------------------------------------------------------------------


def test_without_attempt_records_the_manifests_still_say_it() -> None:
    """The service directory was deleted, or the checkpoints were copied without it."""
    files = [shard(1, 1, 500), shard(1, 2, 600), shard(2, 1, 510), shard(4, 1, 400)]
    found = catalog(files)
    assert [(c.id.step, c.state) for c in found.checkpoints] == [
        (step, State.COMPLETE) for step in (400, 510, 600, 500)
    ]
    resumed = catalog([*files, shard(5, 1, 410)], attempt(5, (4, 1)))
    assert states(resumed) == dict.fromkeys([410, 400, 510, 600, 500], "complete")


def test_a_lost_record_in_the_middle_breaks_no_chain() -> None:
    files = [shard(1, 1, 100), shard(2, 1, 200), shard(3, 1, 300)]
    assert set(states(catalog(files, attempt(1), attempt(3, (2, 1)))).values()) == {"complete"}


def test_a_lost_record_is_bridged_also_where_no_file_is_left() -> None:
    assert states(catalog([shard(1, 1, 100), shard(3, 1, 300)], attempt(1), attempt(3, (2, 1)))) == {
        100: "complete",
        300: "complete",
    }


def test_an_attempt_of_another_layout_is_no_ancestor() -> None:
    """Nobody can have resumed from it, so without records, too, it is another run's."""
    found = catalog([*shards(1, 1, 900, tp=4), *shards(2, 1, 5, tp=2), shard(3, 1, 6, tp=2)])
    assert states(found) == {900: "foreign", 5: "complete", 6: "partial"}


def test_an_attempt_of_unknown_origin_beside_the_lineage_is_foreign() -> None:
    files = [shard(1, 1, 100), shard(2, 1, 200), shard(3, 1, 300)]
    assert states(catalog(files, attempt(1), attempt(3, (1, 1)))) == {100: "complete", 200: "foreign", 300: "complete"}


def test_a_roll_back_abandons_at_once_and_for_good() -> None:
    files = [shard(1, 1, 500), shard(1, 2, 600)]
    rolled = attempt(2, (1, 1), explicit=True)
    for later in ((), (attempt(3, (1, 1)),), (attempt(3, (1, 1)), attempt(4))):
        found = catalog(files, attempt(1), rolled, *later)
        assert states(found) == {500: "complete", 600: "abandoned"}
    assert found.checkpoints[0].reason == "attempt 2 resumed from attempt 1 sequence 1"


def test_an_unasked_fallback_abandons_only_with_a_complete_checkpoint_of_its_own() -> None:
    files = [*shards(1, 1, 500, tp=2), *shards(1, 2, 600, tp=2)]
    fallback = attempt(2, (1, 1))
    assert states(catalog(files, attempt(1), fallback))[600] == "complete"
    assert states(catalog([*files, shard(2, 1, 510, tp=2)], attempt(1), fallback))[600] == "complete"
    assert states(catalog([*files, *shards(2, 1, 510, tp=2)], attempt(1), fallback))[600] == "abandoned"


def test_what_the_running_attempt_started_from_is_told_until_it_has_its_own() -> None:
    files = [shard(1, 1, 500), shard(1, 2, 600)]
    assert catalog(files, attempt(1), attempt(2, (1, 1))).origin == (1, 1)
    assert catalog([*files, shard(2, 1, 510)], attempt(1), attempt(2, (1, 1))).origin is None


def test_a_fresh_start_counts_from_its_first_file() -> None:
    files = [shard(1, 1, 500), shard(2, 1, 510)]
    known = (attempt(1), attempt(2, (1, 1)), attempt(3))
    assert set(states(catalog(files, *known)).values()) == {"complete"}
    found = catalog([*files, shard(3, 1, 10)], *known)
    assert states(found) == {500: "foreign", 510: "foreign", 10: "complete"}
    assert found.head == 3


def test_a_lost_file_does_not_bring_an_older_run_back() -> None:
    """The fresh start that the head came from has no file left; the run before it is as foreign as ever."""
    files = [*shards(1, 1, 100, tp=2), shard(3, 1, 20, tp=2)]
    assert states(catalog(files, attempt(1), attempt(2), attempt(3, (2, 1)))) == {100: "foreign", 20: "partial"}


def test_a_partial_set_that_was_left_behind_is_dead_not_abandoned() -> None:
    """Else every roll-back that crashes early would leave files that nothing may delete."""
    files = [*shards(1, 1, 5, tp=2), shard(2, 1, 6, tp=2)]
    known = (attempt(1), attempt(2, (1, 1), explicit=True), attempt(3, (1, 1), explicit=True))
    assert states(catalog(files, *known)) == {5: "complete", 6: "dead"}


def test_two_runs_in_one_directory_are_kept_apart() -> None:
    ours, theirs = (
        [shard(1, 1, 10), shard(2, 1, 20)],
        [shard(2, 1, 70, run_id="other"), shard(9, 1, 80, run_id="other")],
    )
    found = catalog([*ours, *theirs], attempt(1), attempt(2, (1, 1)))
    assert states(found) == {10: "complete", 20: "complete", 70: "foreign", 80: "foreign"}
    assert step_of(found.newest_complete()) == 20
    unrecorded = catalog([*ours, *theirs])
    assert step_of(unrecorded.newest_complete()) == 80  # the newest file says whose directory it is


def test_shards_of_other_kinds_are_never_cut_off() -> None:
    """A resume names a training checkpoint; the sequences of LoRA saves count something else."""
    files = [shard(1, n, n, kind="lora") for n in (1, 2, 3)] + [shard(1, 1, 10), shard(1, 2, 20), shard(2, 1, 11)]
    found = catalog(files, attempt(1), attempt(2, (1, 1), explicit=True))
    assert [c.state for c in found.of_kind("lora")] == [State.COMPLETE] * 3
    assert [c.state for c in found.of_kind("train")] == [State.COMPLETE, State.ABANDONED, State.COMPLETE]


def test_thousands_of_restarts_are_followed() -> None:
    loop = [attempt(1), *(attempt(n, (1, 1)) for n in range(2, 3000))]
    assert states(catalog([shard(1, 1, 5), shard(1, 2, 6)], *loop)) == {5: "complete", 6: "complete"}
    chain = [attempt(1), *(attempt(new, (old, 1)) for old, new in pairwise(range(1, 3000)))]
    assert states(catalog([shard(1, 1, 5), shard(2999, 1, 6)], *chain)) == {5: "complete", 6: "complete"}


def test_an_origin_that_cannot_be_is_no_origin() -> None:
    assert states(catalog([shard(1, 1, 5), shard(2, 1, 6)], attempt(1, (2, 1)), attempt(2, (2, 1)))) == {
        5: "foreign",
        6: "complete",
    }


def test_an_empty_directory_has_nothing() -> None:
    found = catalog([])
    assert (found.checkpoints, found.head, found.newest_complete()) == ((), None, None)
    assert catalog([], attempt(1)).head is None
