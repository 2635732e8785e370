"""Tracked objects: what is collected, what does not fit, and that a refused restore leaves everything as it was."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import assert_same, load, save

from ckpt_service.errors import StateMismatch
from trainer_hooks.tracking import RNG, Tracked, restore_rng, rng_state


class Counter:
    """A stateful object that counts, and takes only states that it likes."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self.value = state["value"]
        if self.value < 0:
            raise RuntimeError("negative")


class Picky(torch.nn.Linear):
    """A module that loads in a way of its own, and may refuse half-way."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        if self.bias.sum() > 50:
            raise ValueError("I do not like it")
        return result


class Training:
    """A model, an optimizer, a scheduler and a counter, tracked together."""

    def __init__(self, *, width: int = 4, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.5, total_steps=50)
        self.counter = Counter(seed)
        self.tracked = Tracked()
        for name in ("model", "optimizer", "scheduler", "counter"):
            self.tracked.add(name, getattr(self, name))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            scale = random.random() + float(np.random.rand())
            (self.model(torch.rand(8, 3)) * scale).pow(2).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.counter.value += 1

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.tracked.collect())


def assert_untouched(training: Training, before: dict[str, Any]) -> None:
    assert_same(training.state(), before)


# --- collecting -------------------------------------------------------------------------------------------------------


def test_keys_in_the_file() -> None:
    assert list(Training().tracked.collect()) == [
        "stage_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "counter_state_dict",
        RNG,
    ]


def test_what_has_no_state_cannot_be_tracked() -> None:
    tracked = Tracked()
    for thing in (object(), 3, {"state_dict": 1}, torch.ones(2)):
        with pytest.raises(ValueError, match=r"track\(thing=\.\.\.\): .* lacks state_dict"):
            tracked.add("thing", thing)
    with pytest.raises(ValueError, match=r"track\(stage=\.\.\.\)"):
        tracked.add("stage", Counter())
    assert not tracked


def test_tracking_a_name_again_takes_its_place() -> None:
    tracked = Tracked()
    tracked.add("counter", Counter(1))
    tracked.add("counter", Counter(2))
    assert tracked.collect()["counter_state_dict"] == {"value": 2}


def test_file_is_read_without_help(tmp_path: Path) -> None:
    training = Training()
    training.train(2)
    state = training.tracked.collect()
    path = save(state, tmp_path)
    assert_same(torch.load(path, weights_only=True), torch.load(path, weights_only=False))
    assert_same(load(path), torch.load(path, weights_only=True))


# --- restoring --------------------------------------------------------------------------------------------------------


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = Training()
    first.train(3)
    path = save(first.tracked.collect(), tmp_path)
    first.train(4)
    expected = first.state()
    second = Training(seed=9)
    second.train(1)
    state = load(path)
    second.tracked.check(state, strict=True)
    second.tracked.restore(state)
    second.train(4)
    assert_untouched(second, expected)


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


@pytest.mark.parametrize("halfway", [False, True], ids=["fresh", "in the middle of a pair"])
def test_generators_come_back_bit_for_bit(halfway: bool, tmp_path: Path) -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    if halfway:  # each of these keeps the second of a pair of numbers for the next call
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(1)
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    path = save({RNG: rng_state()}, tmp_path)
    expected = draws()
    restore_rng(load(path)[RNG])
    assert random.getstate() == python
    assert repr(np.random.get_state()) == repr(numpy)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert draws() == expected
    restore_rng(torch.load(path, weights_only=True)[RNG])
    assert draws() == expected


def test_collecting_draws_nothing() -> None:
    random.seed(1)
    expected = random.getstate()
    rng_state()
    assert random.getstate() == expected


def test_state_of_an_absent_library_is_left_out() -> None:
    state = rng_state()
    del state["numpy"]
    before = repr(np.random.get_state())
    restore_rng(state)
    assert repr(np.random.get_state()) == before


# --- what does not fit ------------------------------------------------------------------------------------------------


def refused(training: Training, state: dict[str, Any], message: str, *, strict: bool = True) -> None:
    before = training.state()
    with pytest.raises(StateMismatch, match=message):
        training.tracked.check(state, strict=strict)
    assert_untouched(training, before)


def test_missing_parts_are_all_named() -> None:
    training = Training()
    state = training.state()
    del state["scheduler_state_dict"], state[RNG]
    refused(training, state, r"lacks scheduler_state_dict, rng_state; resume\(strict=False\)")


def test_missing_parts_start_afresh_if_so_wished() -> None:
    source, target = Training(), Training(seed=3)
    source.train(2)
    state = source.state()
    del state["counter_state_dict"], state[RNG]
    generators = rng_state()
    with pytest.warns(UserWarning, match="lacks counter_state_dict, rng_state"):
        target.tracked.check(state, strict=False)
    target.tracked.restore(state)
    assert target.counter.value == 3
    assert_same(target.state()["stage_state_dict"], state["stage_state_dict"])
    assert_same(rng_state(), generators)


def test_more_than_is_tracked_is_fine() -> None:
    training = Training()
    state = {**training.state(), "extra_state_dict": {"a": 1}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.tracked.check(state, strict=True)
    training.tracked.restore(state)


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_named_with_their_key(strict: bool) -> None:
    refused(
        Training(width=4),
        Training(width=5).state(),
        r"stage_state_dict: 0\.weight was saved with shape \(5, 3\) and has \(4, 3\) now",
        strict=strict,
    )


def test_other_parameters_are_named() -> None:
    training = Training()
    state = training.state()
    renamed = {f"other.{key}": value for key, value in state["stage_state_dict"].items()}
    refused(training, state | {"stage_state_dict": renamed}, r"stage_state_dict: 0\.bias was not saved \(and 6 more\)")
    more = {**state["stage_state_dict"], "9.weight": torch.ones(1)}
    refused(training, state | {"stage_state_dict": more}, r"stage_state_dict: 9\.weight was saved and is not there now")


def test_other_groups_of_the_optimizer() -> None:
    training = Training()
    other = torch.optim.AdamW([torch.zeros(2, requires_grad=True)]).state_dict()
    refused(training, training.state() | {"optimizer_state_dict": other}, r"parameter groups of \[1\] .* are \[4\]")


@pytest.mark.parametrize("key", ["stage_state_dict", "optimizer_state_dict", RNG])
@pytest.mark.parametrize("wrong", [None, 3, [], {"a": 1}], ids=repr)
def test_states_of_something_else(key: str, wrong: Any) -> None:
    training = Training()
    refused(training, training.state() | {key: wrong}, f"does not fit: {key}")


def test_all_misfits_are_named() -> None:
    training = Training()
    state = training.state() | {"stage_state_dict": {}, "optimizer_state_dict": {}}
    refused(training, state, r"stage_state_dict: .*; optimizer_state_dict: ")


def test_refusal_undoes_what_was_restored_before() -> None:
    training = Training()
    training.train(1)
    late = Counter(5)
    training.tracked.add("late", late)
    state = training.state()
    state["counter_state_dict"] = {"value": 77}
    state["late_state_dict"] = {"value": -1}
    state["stage_state_dict"] = {key: value + 1 for key, value in state["stage_state_dict"].items()}
    before = training.state()
    training.tracked.check(state, strict=True)
    with pytest.raises(StateMismatch, match="late refuses its state: RuntimeError: negative"):
        training.tracked.restore(state)
    assert_untouched(training, before)
    assert late.value == 5


def test_module_that_loads_in_its_own_way_and_refuses() -> None:
    training = Training()
    training.tracked.add("picky", Picky(2, 2))
    before = training.state()
    state = training.state()
    state["picky_state_dict"] = {key: value + 100 for key, value in state["picky_state_dict"].items()}
    state["stage_state_dict"] = {key: value + 1 for key, value in state["stage_state_dict"].items()}
    with pytest.raises(StateMismatch, match="picky refuses its state: ValueError"):
        training.tracked.restore(state)
    assert_untouched(training, before)


def test_what_was_restored_is_not_tied_to_a_second_object(tmp_path: Path) -> None:
    source = Training()
    source.train(1)
    path = save(source.tracked.collect(), tmp_path)
    first, second = Training(seed=1), Training(seed=2)
    first.tracked.restore(load(path))
    second.tracked.restore(load(path))
    before = second.state()
    first.train(3)
    restore_rng(before[RNG])
    assert_untouched(second, before)
