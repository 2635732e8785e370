"""What a trainer object says of itself: its place in the mesh, its run directory, its module. Reads only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_service import naming
from trainer_hooks.topology import Topology

_MISSING = object()


@dataclass(frozen=True)
class RunPlace:
    """Where a trainer saves: the root, the postfix of the run, and this rank's place in the mesh."""

    root: str
    postfix: str | None
    topology: Topology


def attribute(trainer: Any, path: str) -> Any:
    """Return an attribute of the trainer, or one of an attribute (``tpl.rank``).

    Raises:
        ValueError: it is not there; names it.
    """
    found = trainer
    for name in path.split("."):
        found = getattr(found, name, _MISSING)
        if found is _MISSING:
            raise ValueError(f"optimus_p.{path}: this {type(trainer).__name__} has no such attribute, and it is needed")
    return found


def module_of(trainer: Any) -> torch.nn.Module:
    """Return the module of this stage as it is now, in its wrapper if it has one."""
    module = attribute(trainer, "run_info.submod")
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"optimus_p.run_info.submod: it must be a torch.nn.Module and is a {type(module).__name__}")
    return module


def optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer as it is now; the trainer has none until the user sets it."""
    optimizer = attribute(trainer, "optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimus_p.optimizer: it must be a torch.optim.Optimizer and is a {type(optimizer).__name__}; "
            "set it before save_ckpt() and load_ckpt()"
        )
    return optimizer


def place_of(trainer: Any) -> RunPlace:
    """Return where a trainer saves.

    Raises:
        ValueError: an attribute is missing, or the attributes contradict each other; names them.
    """
    if not attribute(trainer, "checkpoint"):
        raise ValueError("optimus_p.checkpoint: make the trainer with checkpoint=True")
    topology = _topology(trainer)
    directory = os.fspath(attribute(trainer, "ckpt_dir"))
    parent, name = os.path.split(os.path.abspath(directory))
    found = naming.read_stage_directory(name)
    if found is None:
        raise ValueError(f"optimus_p.ckpt_dir={directory!r}: it must end in checkpoint_<postfix>_<stage>")
    postfix, stage = found
    if stage != topology.stage:
        raise ValueError(f"optimus_p.ckpt_dir={directory!r}: this rank is of stage {topology.stage}")
    return RunPlace(parent, postfix, topology)


def _topology(trainer: Any) -> Topology:
    names = ("rank", "stage", "num_stage", "pp_size", "dp_size", "tp_size")
    rank, stage, stages, pp, dp, tp = (attribute(trainer, f"tpl.{name}") for name in names)
    if stages != pp:
        raise ValueError(f"optimus_p.tpl: num_stage={stages!r} and pp_size={pp!r} must be the same")
    place = Topology(rank, pp, dp, tp)
    if place.stage != stage:
        raise ValueError(
            f"optimus_p.tpl: rank={rank} is of stage {place.stage} where pp={pp}, dp={dp}, tp={tp} "
            f"(rank = (stage * dp + dp_rank) * tp + tp_rank), and tpl.stage={stage!r}"
        )
    return place
