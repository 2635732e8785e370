"""A stand-in for the Optimus Prime trainer: what the hooks may rely on, over real DDP and DTensor modules.

Its five methods do what the trainer's own do without hooks, blocking, so that files of old can be written. Stages are
fed inputs of their own instead of talking to each other.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 8
PLAN = {"block.up": ColwiseParallel, "block.down": RowwiseParallel}


@dataclass
class LoRAConfig:
    """What the trainer calls its adapters' configuration."""

    r: int = 2
    alpha: float = 16.0
    target_modules: list[str] = field(default_factory=lambda: ["up"])


class LoRALinear(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, base_linear: nn.Module, r: int, out_features: int) -> None:
        super().__init__()
        self.base_linear = base_linear
        self.lora_A = nn.Linear(WIDTH, r, bias=False)
        self.lora_B = nn.Linear(r, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_linear(x)
        return out + self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.dropout(self.down(torch.relu(self.up(x)))))
        return out


class Stage(nn.Module):
    """A part of a model: only the first stage embeds, only the last one has a head, and a weight that is never used."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH) if first else None
        self.block = Block()
        if last:
            self.head = nn.Linear(WIDTH, 3)
            self.unused = nn.Parameter(torch.randn(3))
            self.register_buffer("seen", torch.zeros(()))
        self.has_head = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x if self.embed is None else self.embed(x))
        if self.has_head:
            self.seen += 1
            out = self.head(out)
        return out


class Optimus:
    """The trainer. ``directory`` is where it runs."""

    def __init__(
        self,
        directory: str,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        seed: int = 0,
        checkpoint: bool = False,
        postfix: str | None = None,
        swap_opt_in_fwdbwd: bool = False,
        swap_model_in_optstep: bool = False,
    ) -> None:
        rank = dist.get_rank()
        stage, replica = rank // (dp * tp), rank // tp % dp
        self.tpl = SimpleNamespace(rank=rank, stage=stage, num_stage=pp, pp_size=pp, dp_size=dp, tp_size=tp)
        self.checkpoint, self.device, self.use_gpu = checkpoint, "cpu", 0
        self.optimizer: Any = None
        self.lora_config: LoRAConfig | None = None
        self.swap_opt_in_fwdbwd, self.swap_model_in_optstep = swap_opt_in_fwdbwd, swap_model_in_optstep
        self.ckpt_dir = os.path.join(directory, f"checkpoint_{postfix}_{stage}")
        if checkpoint:
            os.makedirs(self.ckpt_dir, exist_ok=True)
        self._mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        torch.manual_seed(seed * 100 + stage)  # replicas and tensor-parallel ranks begin alike
        module: nn.Module = Stage(first=stage == 0, last=stage == pp - 1)
        if tp > 1:
            parallelize_module(module, self._mesh["tp"], {name: style() for name, style in PLAN.items()})
        self.run_info = SimpleNamespace(submod=self._replicated(module))
        torch.manual_seed(seed * 100 + 10 * replica + stage)  # and draw numbers of their own later, by replica
        self._grads_of: list[nn.Parameter] | None = None

    def get_rank(self) -> int:
        return int(self.tpl.rank)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.run_info.submod.parameters() if parameter.requires_grad]

    def apply_lora(self, config: LoRAConfig) -> None:
        """Freeze the model and put adapters beside it; the module is wrapped anew."""
        self.lora_config = config
        inner = self.run_info.submod.module if self.tpl.dp_size > 1 else self.run_info.submod
        for parameter in inner.parameters():
            parameter.requires_grad_(False)
        inner.block.up = LoRALinear(inner.block.up, config.r, 16)
        if self.tpl.tp_size > 1:
            parallelize_module(inner, self._mesh["tp"], {"block.up.lora_B": ColwiseParallel()})
        self.run_info.submod = self._replicated(inner)

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._swap_in()
            self.optimizer.zero_grad()
            x = torch.randn(5, 4 if self.tpl.stage == 0 else WIDTH)
            self.run_info.submod(x).square().mean().backward()
            self._swap_out()
            self.optimizer.step()

    # --- what the trainer does without hooks --------------------------------------------------------------------------

    def save_ckpt(self, step: int, epoch: int) -> None:
        state = {
            "epoch": epoch,
            "stage": self.tpl.stage,
            "stage_state_dict": self.run_info.submod.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
        }
        torch.save(state, os.path.join(self.ckpt_dir, f"ckpt_step_{step}_epoch_{epoch}.pt"))

    def save_lora_ckpt(self, step: int, epoch: int, lora_dir: str | None = None) -> None:
        directory = f"{lora_dir or 'lora_checkpoint'}_stage_{self.tpl.stage}"
        os.makedirs(directory, exist_ok=True)
        tensors = {name: value for name, value in self.run_info.submod.state_dict().items() if "lora_" in name}
        suffix = f"_tp{self.tpl.rank % self.tpl.tp_size}" if self.tpl.tp_size > 1 else ""
        path = os.path.join(directory, f"lora_step_{step}_epoch_{epoch}{suffix}.pt")
        torch.save({"lora_state_dict": tensors, "lora_config": self.lora_config}, path)

    # --- swapping -----------------------------------------------------------------------------------------------------

    def _swap_in(self) -> None:
        if self._grads_of is not None:
            for mine, other in self._pairs(self._grads_of):
                mine.data.copy_(other.data)
            self._exchange(self._grads_of)
            self._grads_of = None
        if self.swap_opt_in_fwdbwd:
            self._renew_state()

    def _swap_out(self) -> None:
        if self.swap_opt_in_fwdbwd:
            self._renew_state()
        if self.swap_model_in_optstep:
            self._grads_of = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            others = [nn.Parameter(mine.detach().clone()) for mine in self._grads_of]
            for mine, other in zip(self._grads_of, others, strict=True):
                other.grad = mine.grad
            self._exchange(others)

    def _pairs(self, mine: list[nn.Parameter]) -> Any:
        return zip(mine, (p for group in self.optimizer.param_groups for p in group["params"]), strict=True)

    def _exchange(self, new: list[nn.Parameter]) -> None:
        """Put other parameters into the groups, in the places of those that are there."""
        coming = iter(new)
        for group in self.optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                group["params"][index] = other = next(coming)
                if old in self.optimizer.state:
                    self.optimizer.state[other] = self.optimizer.state.pop(old)

    def _renew_state(self) -> None:
        for values in self.optimizer.state.values():
            values.update({name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)})

    def _replicated(self, module: nn.Module) -> nn.Module:
        if self.tpl.dp_size == 1:
            return module
        # Given a mesh, it prepares split parameters, and so brings about that state_dict() loses them.
        return DistributedDataParallel(module, device_mesh=self._mesh["dp"], find_unused_parameters=True)


def digest(trainer: Optimus) -> str:
    """Return a hash of all that training depends on: parameters, buffers, moments, options, random numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            plain = (value.to_local() if isinstance(value, DTensor) else value).detach()
            found.update(repr((plain.dtype, tuple(plain.shape), plain.flatten().tolist())).encode())
        elif isinstance(value, dict):
            for inner in value.values():
                add(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                add(inner)
        else:
            found.update(repr(value).encode())

    add([group["params"] for group in trainer.optimizer.param_groups])
    add(list(trainer.run_info.submod.buffers()))
    add(trainer.optimizer.state_dict())
    add(torch.get_rng_state())
    return found.hexdigest()
