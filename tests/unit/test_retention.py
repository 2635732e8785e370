"""Which files go, which stay, and why; the timeline of the design, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import attempt, catalog, legacy, ranks, shard, shards, step_of

from ckpt_service import retention
from ckpt_service.catalog import Catalog, Evidence, Shard, build
from ckpt_service.naming import Kind, parse_shard
from ckpt_service.records import Attempt
from ckpt_service.retention import RetentionPlan, RetentionPolicy

KEEP_2 = RetentionPolicy(2)


def planned(
    found: Catalog, policy: RetentionPolicy = KEEP_2, *, kind: Kind = "train", stage: int = 0, tp_rank: int = 0
) -> RetentionPlan:
    return retention.plan(policy, found, kind=kind, stage=stage, tp_rank=tp_rank)


def kept(plan: RetentionPlan) -> list[int | None]:
    return [file.name.step for file in plan.keep]


def saved(*steps: int, **fields: Any) -> list[Shard]:
    return [shard(1, n + 1, step, **fields) for n, step in enumerate(steps)]


# --- the timeline of the design ---------------------------------------------------------------------------------------


class Timeline:
    """One run with tp = 2 and ``keep_last`` 2, whose ranks retain after every save."""

    def __init__(self) -> None:
        self.files: dict[str, Shard] = {}
        self.attempts: list[Attempt] = []
        self.sequence = 0

    def start(self, resumed_from: tuple[int, int] | None = None, *, explicit: bool = False) -> None:
        self.attempts.append(attempt(len(self.attempts) + 1, resumed_from, explicit=explicit))
        self.sequence = 0

    def save(self, *steps: int, tp_ranks: tuple[int, ...] = (0, 1)) -> None:
        for step in steps:
            self.sequence += 1
            new = [shard(len(self.attempts), self.sequence, step, tp=2, tp_rank=rank) for rank in tp_ranks]
            self.files |= {file.path: file for file in new}
            for rank in tp_ranks:
                for file in planned(self.catalog, tp_rank=rank).delete:
                    del self.files[file.path]
            for rank in tp_ranks:  # what the last rank's commit has freed
                for file in planned(self.catalog, tp_rank=rank).delete:
                    del self.files[file.path]

    @property
    def catalog(self) -> Catalog:
        return catalog(self.files.values(), *self.attempts)

    @property
    def latest(self) -> int | None:
        return step_of(self.catalog.newest_complete())

    def states(self) -> dict[int, str]:
        return {c.id.step: c.state.value for c in reversed(self.catalog.checkpoints)}


def test_the_timeline_of_the_design() -> None:
    run = Timeline()
    run.start()
    run.save(100, 200, 300, 400)
    assert (run.latest, run.states()) == (400, {300: "complete", 400: "complete"})

    run.start((1, 4))
    run.save(500)
    run.save(600, tp_ranks=(0,))
    assert (run.latest, run.states()) == (500, {400: "complete", 500: "complete", 600: "partial"})

    run.start((2, 1))
    assert (run.latest, run.states()) == (500, {400: "complete", 500: "complete", 600: "dead"})

    run.save(600)
    assert (run.latest, run.states()) == (600, {500: "complete", 600: "complete"})
    assert {file.manifest.attempt for file in run.files.values() if file.manifest and file.name.step == 600} == {3}

    run.start((2, 1), explicit=True)
    assert (run.latest, run.states()) == (500, {500: "complete", 600: "abandoned"})

    run.start((2, 1))
    assert (run.latest, run.states()) == (500, {500: "complete", 600: "abandoned"})
    run.save(510, 520)
    assert (run.latest, run.states()) == (520, {510: "complete", 520: "complete"})

    run.start()
    assert (run.latest, run.states()) == (520, {510: "complete", 520: "complete"})
    run.save(10, 20, 30)
    assert (run.latest, run.states()) == (30, {510: "foreign", 520: "foreign", 20: "complete", 30: "complete"})


def test_a_dead_set_goes_with_the_next_pass() -> None:
    files = [*shards(1, 1, 400, tp=2), *shards(1, 2, 500, tp=2), shard(1, 3, 600, tp=2), shard(2, 1, 550, tp=2)]
    plan = planned(catalog(files, attempt(1), attempt(2, (1, 2))))
    assert [(d.shard.name.step, d.keep) for d in plan.decisions] == [
        (400, True),
        (500, True),
        (600, False),
        (550, True),
    ]
    assert plan.decisions[2].reason.startswith("it can no longer complete")


# --- the policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, None, True, False, 2.0, "2"])
def test_keep_last_below_one_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^keep_last="):
        RetentionPolicy(value)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_keep_every_below_one_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^keep_every="):
        RetentionPolicy(2, value)


@given(st.integers(1, 8), st.integers(0, 12))
def test_keep_last_keeps_that_many_or_all(keep_last: int, count: int) -> None:
    files = saved(*range(1, count + 1))
    assert (
        kept(planned(catalog(files, attempt(1)), RetentionPolicy(keep_last))) == list(range(1, count + 1))[-keep_last:]
    )


def test_a_huge_keep_last_keeps_everything() -> None:
    assert not planned(catalog(saved(1, 2, 3), attempt(1)), RetentionPolicy(10**30)).delete


@pytest.mark.parametrize(
    ("named", "left"),
    [
        ([(322, 0), (644, 0), (10, 1), (322, 1), (644, 1), (3, 2)], [(644, 1), (3, 2)]),
        ([(322, epoch) for epoch in range(1, 12)], [(322, 10), (322, 11)]),
        ([(1000, 3), (2000, 2)], [(1000, 3), (2000, 2)]),
        ([(9900, 0), (10000, 0), (10100, 0)], [(10000, 0), (10100, 0)]),
    ],
)
def test_the_last_are_the_last_saved(named: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    files = [shard(1, n + 1, *name, modified=-n) for n, name in enumerate(named)]
    assert [(f.name.step, f.name.epoch) for f in planned(catalog(files, attempt(1))).keep] == left


def test_keep_every_keeps_steps_divisible_by_it() -> None:
    assert kept(planned(catalog(saved(*range(8)), attempt(1)), RetentionPolicy(1, 3))) == [0, 3, 6, 7]


def test_pins_are_kept_and_do_not_count() -> None:
    found = catalog(saved(1, 2, 3, 4, 5), attempt(1), pins=[(1, 1), (1, 4)])
    assert kept(planned(found)) == [1, 3, 4, 5]
    newest_pinned = catalog(saved(1, 2, 3, 4), attempt(1), pins=[(1, 4)])
    assert kept(planned(newest_pinned, RetentionPolicy(1))) == [3, 4]


# --- what a plan never touches ----------------------------------------------------------------------------------------


def test_a_plan_names_only_files_of_its_own_rank() -> None:
    files = [file for n in (1, 2, 3, 4) for file in shards(1, n, n, pp=2, tp=11)]
    found = catalog(files, attempt(1))
    for stage, tp_rank in ranks(2, 11):
        plan = planned(found, stage=stage, tp_rank=tp_rank)
        assert {(f.stage, f.tp_rank) for f in (*plan.keep, *plan.delete)} == {(stage, tp_rank)}
        assert len(plan.delete) == 2


def test_kinds_have_histories_of_their_own() -> None:
    files = saved(1, 2, 3) + saved(1, 2, 3, kind="lora")
    found = catalog(files, attempt(1))
    assert [f.name.kind for f in planned(found, kind="lora").delete] == ["lora"]
    assert [f.name.kind for f in planned(found).delete] == ["train"]


def test_legacy_files_are_neither_counted_nor_deleted() -> None:
    files = [legacy(f"ckpt_step_{n}_epoch_0.pt") for n in (7, 8, 9)] + saved(1, 2, 3)
    assert kept(planned(catalog(files, attempt(1)))) == [7, 8, 9, 2, 3]


def test_files_of_ranks_that_do_not_exist_now_stay() -> None:
    old = shards(1, 1, 100, tp=4)
    files = [*old, *(file for n in (1, 2, 3) for file in shards(2, n, n, tp=2))]
    found = catalog(files, attempt(1), attempt(2))
    deleted = [file for tp_rank in range(4) for file in planned(found, tp_rank=tp_rank).delete]
    assert {file.name.step for file in deleted} == {1}


def test_foreign_runs_stay_also_when_damaged() -> None:
    files = [*saved(1, 2), shard(1, 3, 3, problem="short"), *(shard(2, n, n * 10) for n in (1, 2, 3))]
    plan = planned(catalog(files, attempt(1), attempt(2)))
    assert kept(plan) == [1, 2, 3, 20, 30]
    other_run = [shard(1, n, n, run_id="other") for n in (1, 2, 3)]
    assert kept(planned(catalog([*other_run, *files[3:]], attempt(1), attempt(2)))) == [1, 2, 3, 20, 30]


def test_a_strangers_copy_stays() -> None:
    parsed = parse_shard("ckpt_step_999_epoch_0.pt")
    assert parsed is not None
    copy = replace(shard(1, 1, 1), name=parsed, path="/runs/checkpoint_0/ckpt_step_999_epoch_0.pt")
    assert kept(planned(catalog([copy, *saved(1, 2, 3)], attempt(1)))) == [999, 2, 3]


def test_the_last_checkpoint_of_all_ranks_outlives_a_peer_that_has_stopped() -> None:
    files = shards(1, 1, 1, tp=2) + [shard(1, n, n, tp=2) for n in range(2, 20)]
    plan = planned(catalog(files, attempt(1)), RetentionPolicy(1))
    assert kept(plan) == [1, 16, 17, 18, 19]
    assert retention.held_back(catalog(files[:4], attempt(1)), kind="train", stage=0, tp_rank=0) == {(0, 1): 2}


def test_the_same_from_reports_where_files_of_peers_cannot_be_seen() -> None:
    files = [shard(1, n, n, tp=2) for n in range(1, 20)]
    found = build(Evidence(files, [attempt(1)], committed={("train", 0, 1): {(1, 1)}}))
    assert kept(planned(found, RetentionPolicy(1))) == [1, 16, 17, 18, 19]


def test_a_file_that_lost_its_manifest_stays() -> None:
    files = [legacy("ckpt_step_1_epoch_0.pt", problem="it is not a checkpoint (0 bytes)"), *saved(2, 3, 4)]
    assert kept(planned(catalog(files, attempt(1)))) == [1, 3, 4]


def test_a_damaged_file_goes_once_something_newer_is_complete() -> None:
    files = saved(1, 2, 3)
    files[1] = replace(files[1], problem="short")
    assert kept(planned(catalog(files, attempt(1)))) == [1, 3]
    assert kept(planned(catalog(files[:2], attempt(1)))) == [1, 2]


def newer_format(file: Shard) -> Shard:
    return replace(file, problem="its format version is 2", newer_format=True)


def test_a_file_of_a_newer_format_never_goes() -> None:
    """Whatever its set looks like from here: damaged, dead, abandoned, or in no set at all."""
    damaged = [newer_format(shard(1, 1, 1)), *saved(2, 3, 4, 5)[1:]]
    assert kept(planned(catalog(damaged, attempt(1)))) == [1, 4, 5]
    dead = [newer_format(shard(1, 1, 1, tp=2)), *shards(1, 2, 2, tp=2), *shards(1, 3, 3, tp=2), *shards(1, 4, 4, tp=2)]
    assert kept(planned(catalog(dead, attempt(1)))) == [1, 3, 4]
    abandoned = [shard(1, 1, 1), newer_format(shard(1, 2, 2)), shard(2, 1, 7), shard(2, 2, 8), shard(2, 3, 9)]
    assert kept(planned(catalog(abandoned, attempt(1), attempt(2, (1, 1), explicit=True)))) == [2, 8, 9]
    unplaced = [replace(legacy("ckpt_step_1_epoch_0.pt"), problem="newer", newer_format=True), *saved(2, 3, 4)]
    assert kept(planned(catalog(unplaced, attempt(1)), RetentionPolicy(1))) == [1, 4]


def test_what_the_running_attempt_started_from_stays_until_it_has_its_own() -> None:
    """The newer one could not be read: it must not push out, under a smaller keep_last, the one that could."""
    files = [*shards(1, 1, 300, tp=2), *shards(1, 2, 400, tp=2), shard(2, 1, 310, tp=2)]
    known = (attempt(1), attempt(2, (1, 1)))
    assert kept(planned(catalog(files, *known), RetentionPolicy(1))) == [300, 400, 310]
    whole = [*files, shard(2, 1, 310, tp=2, tp_rank=1)]
    assert kept(planned(catalog(whole, *known), RetentionPolicy(1))) == [310]


def test_what_a_roll_back_abandoned_goes_once_something_after_it_is_complete() -> None:
    """Also when that something belongs to an attempt before the head."""
    files = [*shards(1, 1, 5, tp=2), *shards(1, 2, 6, tp=2), *shards(2, 1, 7, tp=2), shard(3, 1, 8, tp=2)]
    known = (attempt(1), attempt(2, (1, 1), explicit=True), attempt(3, (2, 1)))
    assert kept(planned(catalog(files[:4], *known[:2]))) == [5, 6]
    assert kept(planned(catalog(files, *known))) == [5, 7, 8]


def test_abandoned_ones_wait_only_in_the_places_that_keep_last_leaves() -> None:
    """Where ranks hear late of each other, more may be there at the roll-back than the policy keeps."""
    files = saved(1, 2, 3, 4)
    rolled = catalog(files, attempt(1), attempt(2, (1, 1), explicit=True))
    assert kept(planned(rolled)) == [1, 4]
    assert kept(planned(rolled, RetentionPolicy(1))) == [1]
    assert kept(planned(rolled, RetentionPolicy(1, 1))) == [1, 4]  # the one that keep_every keeps takes no place


def test_saved_again_is_one_entry() -> None:
    """The earlier one is set aside only until the later one is complete, and never takes a place of keep_last."""
    aside = [shard(1, 2, 2, tp=2, tp_rank=rank, set_aside=True) for rank in (0, 1)]
    later = [shard(1, 3, 2, tp=2, tp_rank=rank, repeat=1) for rank in (0, 1)]
    before = catalog([*shards(1, 1, 1, tp=2), *aside, later[0]], attempt(1))
    assert not planned(before).delete
    after = catalog([*shards(1, 1, 1, tp=2), *aside, *later], attempt(1))
    assert planned(after).delete == (aside[0],)
    assert kept(planned(after)) == [1, 2]


def test_both_names_of_one_shard_go_together() -> None:
    files = [*saved(1, 2, 3), shard(1, 1, 1, set_aside=True)]
    assert len(planned(catalog(files, attempt(1))).delete) == 2


def test_an_export_lives_until_the_next_one_is_complete() -> None:
    """Its name is always the same, so whatever keep_last says there is one, the newest."""
    old = [shard(1, 1, 5, kind="hf", tp=2, tp_rank=rank, set_aside=True) for rank in (0, 1)]
    new = [shard(1, 2, 6, kind="hf", tp=2, tp_rank=rank) for rank in (0, 1)]
    assert not planned(catalog([*old, new[0]], attempt(1)), kind="hf").delete
    assert planned(catalog([*old, *new], attempt(1)), kind="hf").delete == (old[0],)
