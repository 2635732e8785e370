"""What the hooks of the Optimus Prime trainer read from it and make of it, on one rank and without files."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_service.errors import StateRefused
from trainer_hooks.fitting import fit
from trainer_hooks.optimus import enable_async_ckpt, wrap
from trainer_hooks.optimus.export import hf_state, lora_state, plain_config
from trainer_hooks.optimus.module import whole_state, wrappers
from trainer_hooks.optimus.place import place_of
from trainer_hooks.optimus.state import StageModel, StageOptimizer
from trainer_hooks.topology import Topology

nn = torch.nn


def trainer(**changes: Any) -> Any:
    """Return a trainer of (pp, dp, tp) = (2, 2, 2), as rank 5: stage 1, replica 0, tensor-parallel rank 1."""
    tpl = {"rank": 5, "stage": 1, "num_stage": 2, "pp_size": 2, "dp_size": 2, "tp_size": 2}
    tpl |= {name: changes.pop(name) for name in tpl if name in changes}
    values = {"checkpoint": True, "ckpt_dir": "/runs/checkpoint_None_1", "optimizer": None, "lora_config": None}
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return SimpleNamespace(tpl=SimpleNamespace(**tpl), run_info=SimpleNamespace(submod=module), **(values | changes))


@pytest.mark.parametrize(
    ("ckpt_dir", "postfix"),
    [
        ("/runs/checkpoint_None_1", None),
        ("/runs/checkpoint_1", None),
        ("/runs/checkpoint_gpt2_1", "gpt2"),
        ("/runs/checkpoint_a_b_7_1/", "a_b_7"),
    ],
)
def test_the_directory_of_the_trainer_says_root_and_postfix(ckpt_dir: str, postfix: str | None) -> None:
    place = place_of(trainer(ckpt_dir=ckpt_dir.rstrip("/")))
    assert (place.root, place.postfix, place.topology) == ("/runs", postfix, Topology(5, 2, 2, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": False}, "optimus_p.checkpoint: make the trainer with checkpoint=True"),
        ({"ckpt_dir": "/runs/out"}, "optimus_p.ckpt_dir='/runs/out'"),
        ({"ckpt_dir": "/runs/checkpoint_0"}, "this rank is of stage 1"),
        ({"stage": 0}, "optimus_p.tpl: rank=5 is of stage 1"),
        ({"num_stage": 4}, "num_stage=4 and pp_size=2"),
        ({"rank": 8}, "rank=8"),
        ({"tp_size": 0}, "tp=0"),
    ],
)
def test_what_contradicts_itself_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        enable_async_ckpt(trainer(**changes))


@pytest.mark.parametrize("path", ["checkpoint", "ckpt_dir", "tpl.rank", "tpl.tp_size", "tpl", "run_info.submod"])
def test_a_missing_attribute_is_named(path: str) -> None:
    made = trainer()
    owner, _, name = path.rpartition(".")
    delattr(getattr(made, owner) if owner else made, name)
    with pytest.raises(ValueError, match=rf"optimus_p\.{path}.*no such attribute"):
        enable_async_ckpt(made)


# --- the module and the optimizer as they are now ---------------------------------------------------------------------


def test_whatever_the_trainer_holds_now_is_saved_and_restored() -> None:
    made = trainer()
    model, optimizer = StageModel(made), StageOptimizer(made)
    with pytest.raises(ValueError, match=r"optimus_p\.optimizer.*NoneType"):
        optimizer.state_dict()
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    made.run_info.submod = torch.compile(inner, backend="eager")
    made.optimizer = torch.optim.SGD(made.run_info.submod.parameters(), lr=0.5)
    state = model.state_dict()
    assert list(state) == [f"_orig_mod.{name}" for name in inner.state_dict()]
    saved = {name.removeprefix("_orig_mod."): torch.full_like(value, 7) for name, value in state.items()}
    weight = inner[0].weight
    found = fit(model, saved, {})
    assert found.misfits == []
    model.load_state_dict(found.state)
    assert inner[0].weight is weight
    assert weight.detach().unique().tolist() == [7]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("0.bias"), "0.bias was not saved"),
        (lambda state: state.update(other=torch.zeros(1)), "other was saved and is not there now"),
        (lambda state: state.update({"0.bias": torch.zeros(4)}), "shape"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_touched(
    change: Callable[[dict[str, Any]], None], words: str
) -> None:
    made = trainer()
    model = StageModel(made)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    change(state)
    (misfit,) = fit(model, state, {}).misfits
    assert words in misfit
    assert fit(model, [1], {}).misfits
    assert fit(
        StageOptimizer(SimpleNamespace(optimizer=torch.optim.SGD(made.run_info.submod.parameters()))), 1, {}
    ).misfits


def test_adapters_do_not_make_up_for_lost_weights() -> None:
    made = trainer()
    model = StageModel(made)
    layer = nn.Module()
    layer.lora_A, layer.lora_B = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    made.run_info.submod = nn.Sequential(layer, made.run_info.submod[1])
    with pytest.raises(StateRefused, match=r"5 of the 7 tensors.*0.weight is not"):
        model.state_dict()


class Extra(nn.Module):
    """A module with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_comes_along() -> None:
    made = trainer()
    made.run_info.submod = nn.Sequential(Extra(), nn.Linear(1, 1))
    made.run_info.submod[0].count = 3
    model = StageModel(made)
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in model.state_dict().items()
    }
    made.run_info.submod[0].count = 9
    model.load_state_dict(state)
    assert made.run_info.submod[0].count == 3


# --- swap_model_in_optstep --------------------------------------------------------------------------------------------


def swapping(made: Any, order: list[int]) -> Any:
    """Have a trainer that swaps, its optimizer with two groups, and one weight under two names."""
    made.swap_model_in_optstep = True
    made.run_info.submod = module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    weight, *biases = (list(module.parameters())[index] for index in order)
    made.optimizer = torch.optim.SGD([{"params": [weight]}, {"params": biases}], lr=0.1)
    return made


def swap(made: Any) -> None:
    for group in made.optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.full_like(old, 10.0 * old.ndim)) for old in group["params"]]


def test_swapped_parameters_are_those_of_the_optimizer_and_ties_hold() -> None:
    made = swapping(trainer(), [0, 2, 1])
    model = StageModel(made)
    model.state_dict()  # while nothing is swapped: the order of the groups is seen
    swap(made)
    state = model.state_dict()
    assert {name: float(value.unique()) for name, value in state.items()} == {
        "a.weight": 20.0,
        "b.weight": 20.0,
        "a.bias": 10.0,
        "b.bias": 10.0,
    }
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    held = [parameter for group in made.optimizer.param_groups for parameter in group["params"]]
    assert not any(tensor.any() for tensor in [*held, *made.run_info.submod.parameters()])


@pytest.mark.parametrize(
    ("order", "why"), [([0, 1, 2], r"of 2 groups.*call load_ckpt\(\) once"), ([2, 0, 1], "not those of the stage")]
)
def test_swapped_parameters_that_cannot_be_told_apart_are_refused(order: list[int], why: str) -> None:
    made = swapping(trainer(), order)
    model = StageModel(made)
    swap(made)
    with pytest.raises(StateRefused, match=why):
        model.state_dict()


# --- what files hold --------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Config:
    r: int = 8
    dtype: Any = torch.bfloat16
    targets: Any = field(default_factory=lambda: {"v", "q"})
    inner: Any = field(default_factory=lambda: {"colour": Colour.RED, "pair": (1, None)})


def test_a_configuration_becomes_plain_values() -> None:
    plain = {"r": 8, "dtype": "torch.bfloat16", "targets": ["q", "v"], "inner": {"colour": "red", "pair": [1, None]}}
    assert plain_config(Config()) == plain
    assert plain_config(SimpleNamespace(r=1)) == {"r": 1}
    assert plain_config({"r": 1}) == {"r": 1}
    assert plain_config(None) is None
    with pytest.raises(ValueError, match=r"optimus_p\.lora_config\.inner\.f: a function is no plain value"):
        plain_config(Config(inner={"f": lambda: None}))


def test_exports_have_the_names_of_the_bare_model() -> None:
    made = trainer(lora_config=Config())
    inner = nn.ModuleDict({"up": nn.Module(), "norm": nn.LayerNorm(2)})
    inner["up"].base_linear, inner["up"].lora_A = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    made.run_info.submod = torch.compile(inner, backend="eager")
    assert wrappers(made.run_info.submod) == "_orig_mod."
    model = StageModel(made)
    place = Topology(5, 2, 2, 2)
    assert list(hf_state(model, place, None, None)["state_dict"]) == [
        "up.weight",
        "up.bias",
        "norm.weight",
        "norm.bias",
    ]
    found = lora_state(model, made.lora_config, place, 3, 1)
    assert (found["stage"], found["tp_rank"], found["step"], found["epoch"]) == (1, 1, 3, 1)
    assert list(found["lora_state_dict"]) == ["up.lora_A"]
    assert whole_state(inner)["up.lora_A"].data_ptr() == inner["up"].lora_A.data_ptr()


# --- wrap -------------------------------------------------------------------------------------------------------------


class Plain:
    """A trainer."""

    def __init__(self, model: str, *, checkpoint: bool = False) -> None:
        self.model, self.checkpoint = model, checkpoint

    def save_ckpt(self) -> str:
        return f"blocking {self.model}"


def test_wrap_keeps_the_class_and_leaves_alone_what_saves_nothing() -> None:
    wrapped = wrap(Plain)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__module__) == ("Plain", "A trainer.", __name__)
    made = wrapped("gpt", async_ckpt=True, keep_last=3)
    assert isinstance(made, Plain)
    assert made.save_ckpt() == "blocking gpt"
    with pytest.raises(ValueError, match=r"optimus_p\.tpl"):
        wrapped("gpt", checkpoint=True, async_ckpt=True)
