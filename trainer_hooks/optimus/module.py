"""The tensors of a stage's module by their names, all of them, and what the names say.

With data and tensor parallelism together ``state_dict()`` is not whole: torch's hooks replace parameters by plain
DTensor attributes in the first forward, on the same memory, and ``state_dict()`` does not look there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_hooks.sharding import is_dtensor, local_part

_BASE = "base_linear"  # what the trainer's LoRA layers call the layer that they wrap


def whole_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return all that belongs to a module: under the names of ``state_dict()``, each tensor as its local part.

    The tensors share memory with the live ones, so that they can be restored in place.
    """
    state: dict[str, Any] = module.state_dict()
    for name, tensor in _attributes(module):
        state.setdefault(name, tensor)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = local(value)
    return state


def trainable(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that are trained, by name, in the order of ``parameters()``; each as its local part."""
    for prefix, inner in module.named_modules():
        own = [(name, value) for name, value in inner.named_parameters(prefix, recurse=False)]
        own += [(name, value) for name, value in _dtensors(prefix, inner)]
        yield from ((name, local(value)) for name, value in own if value.requires_grad)


def local(tensor: Any) -> torch.Tensor:
    """Return the local part of a tensor, without its history, on the same memory."""
    return (local_part(tensor) if is_dtensor(tensor) else tensor).detach()


def wrappers(module: torch.nn.Module) -> str:
    """Return what ``DistributedDataParallel`` and ``torch.compile`` have put before all names."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return "module." + wrappers(module.module)
    inner = getattr(module, "_orig_mod", None)
    return "_orig_mod." + wrappers(inner) if isinstance(inner, torch.nn.Module) else ""


def is_lora(name: str) -> bool:
    """Whether a tensor belongs to an adapter: a part of its name begins with ``lora_``."""
    return any(part.startswith("lora_") for part in name.split("."))


def adapters_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the adapters."""
    return {name: value for name, value in state.items() if is_lora(name)}


def without_adapters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the model as it was without adapters, under the names that it had then."""
    bare = ((".".join(part for part in name.split(".") if part != _BASE), name) for name in state if not is_lora(name))
    return {new: state[name] for new, name in bare}


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        yield from _dtensors(prefix, inner)


def _dtensors(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    found = [(name, value) for name, value in vars(module).items() if is_dtensor(value)]
    yield from ((f"{prefix}.{name}" if prefix else name, value) for name, value in found)
