"""How STEP is written, and which of several checkpoints it means."""

from __future__ import annotations

import pytest
from support.checkpoints import attempt, catalog, legacy, shard

from ckpt_service.catalog import CheckpointId, State
from ckpt_service.cli.steps import StepName, UnknownStep, choose, is_step, parse_step


@pytest.mark.parametrize(
    ("text", "name"), [("300", StepName(300)), ("0", StepName(0)), ("7:2", StepName(7, 2)), ("007", StepName(7))]
)
def test_a_step_is_a_number_and_maybe_an_epoch(text: str, name: StepName) -> None:
    assert is_step(text)
    assert parse_step(text) == name


@pytest.mark.parametrize("text", ["", "x", "3.5", "-1", "1:", ":1", "1:2:3", "1 ", "٣", "runs/1", "9" * 40])
def test_all_else_is_refused_by_name(text: str) -> None:
    assert not is_step(text)
    with pytest.raises(ValueError, match=r"STEP=.*not a number"):
        parse_step(text)


def test_an_unknown_step_says_what_there_is() -> None:
    found = catalog([shard(1, 1, 100), shard(1, 2, 200, 1)], attempt(1)).checkpoints
    with pytest.raises(UnknownStep, match="no checkpoint of step 300; there are 200:1, 100:0"):
        choose(found, StepName(300), "/runs")
    with pytest.raises(UnknownStep, match="step 200 epoch 0"):
        choose(found, StepName(200, 0), "/runs")
    with pytest.raises(UnknownStep, match="none at all"):
        choose((), StepName(1), "/runs")
    many = catalog([shard(1, n, n) for n in range(1, 20)], attempt(1)).checkpoints
    with pytest.raises(UnknownStep, match=r"the newest are 19:0, .*12:0; `ckpt-service ls /runs`"):
        choose(many, StepName(300), "/runs")


def test_a_step_of_several_epochs_is_ambiguous() -> None:
    found = catalog([shard(1, 1, 100, 0), shard(1, 2, 100, 1)], attempt(1)).checkpoints
    with pytest.raises(ValueError, match=r"STEP=100: .*100:0, 100:1"):
        choose(found, StepName(100), "/runs")
    assert choose(found, StepName(100, 0), "/runs").checkpoint.id == CheckpointId(1, 1, 0, 100)


def test_the_lineage_comes_before_what_it_left_behind() -> None:
    files = [
        shard(1, 1, 100),
        shard(1, 2, 200),
        shard(2, 1, 200),
        shard(3, 1, 200, 5),
        legacy("ckpt_step_200_epoch_9.pt"),
    ]
    found = catalog(files, attempt(1), attempt(2), attempt(3, (1, 1), explicit=True)).checkpoints
    choice = choose(found, StepName(200), "/runs")
    assert choice.checkpoint.id == CheckpointId(3, 1, 5, 200)
    assert {c.state for c in choice.others} == {State.ABANDONED, State.FOREIGN, State.LEGACY}
    assert choose(found, StepName(200, 9), "/runs").checkpoint.state is State.LEGACY
    assert choose(found, StepName(200, 0), "/runs").checkpoint.state is State.ABANDONED


def test_a_whole_one_comes_before_a_part() -> None:
    files = [shard(1, 1, 100, tp=2), shard(1, 1, 100, tp=2, tp_rank=1), shard(1, 2, 100, tp=2, repeat=1)]
    (choice,) = [choose(catalog(files, attempt(1)).checkpoints, StepName(100), "/runs")]
    assert (choice.checkpoint.state, [c.state for c in choice.others]) == (State.COMPLETE, [State.PARTIAL])
