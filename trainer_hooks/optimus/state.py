"""Stand-ins for the module and the optimizer of a trainer, which look at the trainer at every call.

The user sets the optimizer after construction, LoRA and DDP wrap the module anew, and swapping replaces tensors: what
was seen once may be gone. Files hold local tensors; they are put back in place, and moments wrapped like their
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_service.errors import StateRefused
from trainer_hooks.fitting import Fit, fit, fit_names
from trainer_hooks.optimus.module import is_lora, local, trainable, whole_state, wrappers
from trainer_hooks.optimus.place import module_of, optimizer_of
from trainer_hooks.sharding import Keys, Sharding, describe, is_dtensor
from trainer_hooks.topology import Topology

_EXTRA = "_extra_state"


class StageModel:
    """The module of a stage. Its tensors are counted when this is made: a state with fewer is never saved."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._at_first = _base_names(whole_state(module_of(trainer)))
        self._order: list[list[str]] | None = None

    def bare(self) -> dict[str, Any]:
        """Return the whole state as :meth:`state_dict`, under names without those of wrappers."""
        prefix = wrappers(module_of(self._trainer))
        return {name.removeprefix(prefix): value for name, value in self.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; its tensors share memory with the live ones.

        Raises:
            StateRefused: it is not whole, or swapped parameters cannot be told apart; says why.
        """
        state = self._live()
        names = _base_names(state)
        if len(names) < len(self._at_first):
            lost = next((name for name in self._at_first if name not in names), "some")
            count = f"{len(names)} of the {len(self._at_first)} tensors that the stage had at first are found"
            raise StateRefused(f"stage_state_dict: {count}; {lost} is not", op="capture")
        return state

    def fit_saved(self, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
        """Fit by names, with and without those of wrappers, and by the shapes of the local parts."""
        if not isinstance(saved, Mapping):
            return Fit(saved, [f"a {type(saved).__name__} was saved that is not a state of a module"])
        return fit_names(self._live(), saved, {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state that fits, or a part of one, into the live tensors and those that a swapped optimizer holds."""
        module = module_of(self._trainer)
        for live in (whole_state(module), self._live()):
            _copy_into(live, state)
        for name, value in state.items():
            path, _, last = name.rpartition(".")
            if last == _EXTRA:
                module.get_submodule(path).set_extra_state(value)

    # --- swap_model_in_optstep ----------------------------------------------------------------------------------------

    def _live(self) -> dict[str, Any]:
        state = whole_state(module_of(self._trainer))
        if getattr(self._trainer, "swap_model_in_optstep", False):
            state.update(self._in_optimizer())
        return state

    def _in_optimizer(self) -> dict[str, torch.Tensor]:
        """Return the parameters as the optimizer has them: between steps it may hold others, which are newer."""
        optimizer = optimizer_of(self._trainer)
        names: dict[object, list[str]] = {}  # tied parameters have several
        shapes: dict[str, torch.Size] = {}
        for name, tensor in trainable(module_of(self._trainer)):
            names.setdefault(_memory(tensor) if tensor.numel() else name, []).append(name)
            shapes[name] = tensor.shape
        held = [local(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        known = [names.get(_memory(tensor)) for tensor in held]
        if None not in known:
            self._order = [found for found in known if found is not None]  # for when they are swapped
            return {}
        order = self._order or list(names.values())
        self._require_match([shapes.get(found[0]) for found in order], held, len(optimizer.param_groups))
        return {name: tensor for found, tensor in zip(order, held, strict=True) for name in found}

    def _require_match(self, shapes: list[torch.Size | None], held: list[torch.Tensor], groups: int) -> None:
        if shapes != [tensor.shape for tensor in held]:
            raise StateRefused(
                "swap_model_in_optstep: the optimizer's parameters are not those of the stage", op="save"
            )
        if groups > 1 and self._order is None:
            hint = "call load_ckpt() once before the first step, also when there is nothing to load"
            reason = f"which parameters of {groups} groups are which cannot be told once they are swapped; {hint}"
            raise StateRefused(f"swap_model_in_optstep: {reason}", op="save")


class StageOptimizer:
    """The optimizer of a stage."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state with local tensors only."""
        state: dict[str, Any] = optimizer_of(self._trainer).state_dict()
        values = {index: _localized(held) for index, held in state["state"].items()}
        return {**state, "state": values}

    def fit_saved(self, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
        """Fit to the optimizer as it is now; what has the local shape of a split parameter is split like it."""
        optimizer = optimizer_of(self._trainer)
        return fit(optimizer, saved, _like_parameters(optimizer, saved))

    def load_state_dict(self, state: Any) -> None:
        """Give the optimizer a state that fits."""
        optimizer_of(self._trainer).load_state_dict(state)


def _copy_into(live: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, value in state.items():
            target = live.get(name)
            if isinstance(target, torch.Tensor):
                target.copy_(value)


def _base_names(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if isinstance(value, torch.Tensor) and not is_lora(name)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _localized(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {name: local(value) if is_dtensor(value) else value for name, value in values.items()}


def _like_parameters(optimizer: torch.optim.Optimizer, saved: Any) -> dict[Keys, Sharding]:
    """Return how saved local parts were split, judged by the parameters that they belong to."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        return {}
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        ("state", index, name): describe(parameter, Topology())
        for index, parameter in zip(indices, parameters, strict=False)
        if is_dtensor(parameter)
        for name, value in saved["state"].get(index, {}).items()
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == local(parameter).shape
    }
