"""One rank of the demo's training, from start or resume to its end (or until it is killed).

`train()` is the loop to copy: the five lines marked with numbers are all that checkpoints need in it. What it computes
is deterministic, so that a run that was killed and resumed can be compared with one that was not, bit by bit.

The ranks of a leg are started by the demo as torchrun would start them: with `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT`. `torchrun --nproc-per-node 4 -m trainer_hooks.demo.train ...` runs the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trainer_hooks import Checkpointer, Topology
from trainer_hooks.demo.data import Corpus, ShardedSampler, load_corpus
from trainer_hooks.demo.journal import JOURNAL, final_state_name
from trainer_hooks.demo.model import GPT
from trainer_hooks.demo.observer import Observer
from trainer_hooks.demo.parallel import Mesh, average_gradients, clip_gradients
from trainer_hooks.demo.recipe import Recipe, make_recipe
from trainer_hooks.demo.rng import rng_states, seed_everything


@dataclass(frozen=True)
class Parts:
    """Everything that training changes, and the data it reads."""

    mesh: Mesh
    model: GPT
    optimizer: AdamW
    scheduler: LambdaLR
    sampler: ShardedSampler
    corpus: Corpus
    clip_norm: float


def train(recipe: Recipe, mesh: Mesh, root: Path, observer: Observer) -> Parts:
    """Train to the recipe's last step, from the newest checkpoint under `root` if there is one."""
    parts = build(recipe, mesh)
    with Checkpointer(root, topology=mesh.topology, keep_last=2) as ckpt:  # 1: leaving it waits for the last write
        ckpt.track(  # 2: what to save and restore; the RNG states come by themselves
            model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, sampler=parts.sampler
        )
        point = ckpt.resume()  # 3: the newest checkpoint that all ranks have, or None
        observer.started(point)
        for step in range(point.step + 1 if point else 1, recipe.steps + 1):  # 4: go on after it
            observer.step_begins()
            batch = parts.sampler.next_batch()
            loss = train_step(parts, batch)
            observer.stepped(step, parts.sampler.epoch, loss, float(parts.scheduler.get_last_lr()[0]), batch)
            if recipe.saves_at(step):
                ticket = ckpt.save(step, parts.sampler.epoch)  # 5: returns at once; the write goes on beside training
                observer.saved(step, parts.sampler.epoch, ticket)
    return parts


def train_step(parts: Parts, batch: list[int]) -> float:
    """Forward, backward, average over the replicas, clip, update, schedule. Gives this replica's loss."""
    inputs, targets = parts.corpus.batch(batch)
    loss: Tensor = parts.model(inputs, targets)
    parts.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(parts.model, parts.mesh)
    clip_gradients(parts.model, parts.clip_norm, parts.mesh)
    parts.optimizer.step()
    parts.scheduler.step()
    return float(loss.detach())


def build(recipe: Recipe, mesh: Mesh) -> Parts:
    """Seed every generator and make a fresh model, optimizer, scheduler and sampler."""
    place = mesh.topology
    seed_everything(recipe.seed, place)
    model = GPT(recipe, mesh).train()
    optimizer = AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    scheduler = LambdaLR(optimizer, warmup_then_cosine(recipe))
    sampler = ShardedSampler(recipe.samples, recipe.batch, recipe.seed, replica=place.dp_rank, replicas=place.dp)
    return Parts(mesh, model, optimizer, scheduler, sampler, load_corpus(recipe), recipe.clip_norm)


def warmup_then_cosine(recipe: Recipe) -> Callable[[int], float]:
    """The factor of the learning rate at a step: linear up to 1, then half a cosine down to 0.1."""

    def factor(step: int) -> float:
        if step < recipe.warmup_steps:
            return (step + 1) / recipe.warmup_steps
        done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def live_state(parts: Parts) -> dict[str, Any]:
    """All of this rank's training state as it stands, collected without help from the service.

    This is what two runs are compared by, so it must not share the service's idea of what a state is.
    """
    return {
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": parts.scheduler.state_dict(),
        "sampler": parts.sampler.state_dict(),
        "rng": rng_states(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry of one rank of one leg: `python -m trainer_hooks.demo.train`."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    recipe = make_recipe(steps=options.steps, tiny=options.tiny, single=options.single)
    topology = Topology.from_env(tp=recipe.tp)
    mesh = Mesh.join(topology)
    observer = Observer(options.leg, topology, options.records / JOURNAL, options.hold_at)
    parts = train(recipe, mesh, options.root, observer)
    observer.finish()
    torch.save(live_state(parts), options.records / final_state_name(topology.rank))
    mesh.leave()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer_hooks.demo.train", description="One rank of the demo.")
    parser.add_argument("--root", type=Path, required=True, help="run directory: checkpoints go here")
    parser.add_argument("--records", type=Path, required=True, help="directory for the journal and the final states")
    parser.add_argument("--leg", type=int, default=1, help="number of this start in its run")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--single", action="store_true", help="one process, nothing split")
    parser.add_argument("--hold-at", type=int, default=0, metavar="STEP", help="wait there to be killed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
