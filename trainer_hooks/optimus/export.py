"""What LoRA and Hugging Face files of the trainer hold: plain values and local tensors, no wrapper's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

import torch

from trainer_hooks.fitting import Fit, fit_names
from trainer_hooks.optimus.module import adapters_in, local, without_adapters
from trainer_hooks.optimus.state import StageModel
from trainer_hooks.topology import Topology


def lora_state(model: StageModel, config: Any, place: Topology, step: int, epoch: int) -> dict[str, Any]:
    """Return the content of a LoRA file: ``lora_state_dict``, and ``lora_config`` as a dict.

    Raises:
        ValueError: there are no adapters, or the configuration holds something that is no plain value; names it.
    """
    return {
        "step": step,
        "epoch": epoch,
        "stage": place.stage,
        "tp_rank": place.tp_rank,
        "tp_size": place.tp,
        "lora_state_dict": adapters_of(model),
        "lora_config": plain_config(config),
    }


def adapters_of(model: StageModel) -> dict[str, Any]:
    """Return the tensors of the adapters; raises ``ValueError`` if there are none."""
    found = adapters_in(model.bare())
    if not found:
        raise ValueError("optimus_p.run_info.submod: no parameter's name begins with lora_; call apply_lora() first")
    return found


def fit_adapters(model: StageModel, state: Any) -> Fit:
    """Fit the adapters in a LoRA file to the live ones, by the names that those have in their wrappers."""
    saved = state.get("lora_state_dict") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping):
        return Fit({}, ["it holds no lora_state_dict"])
    adapters_of(model)
    # Files of the trainer without hooks hold DTensors.
    plain = {name: local(value) if isinstance(value, torch.Tensor) else value for name, value in saved.items()}
    return fit_names(adapters_in(model.state_dict()), plain, {})


def hf_state(model: StageModel, place: Topology, step: int | None, epoch: int | None) -> dict[str, Any]:
    """Return the content of an HF file, as the trainer's merge script reads it."""
    return {
        "stage": place.stage,
        "tp_rank": place.tp_rank,
        "tp_size": place.tp,
        "pp_size": place.pp,
        "step": step,
        "epoch": epoch,
        "state_dict": without_adapters(model.bare()),
    }


def plain_config(config: Any) -> Any:
    """Return a configuration object as a dict of plain values, which any process can load.

    Raises:
        ValueError: a value in it is not plain; names it.
    """
    if config is None or isinstance(config, Mapping) or dataclasses.is_dataclass(config):
        return _plain(config, "lora_config")
    return _plain(vars(config), "lora_config")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, Set):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    raise ValueError(f"optimus_p.{where}: a {type(value).__name__} is no plain value and cannot be saved")
