"""What the demo trains on: the source text of Python's own standard library, as bytes, and the order it is read in.

Three kinds of randomness are used on purpose, each from its own source, because a resume must bring back all three:
the order of the samples (a generator in `ShardedSampler`), the crop of each sample (Python's `random`) and noise on
the inputs (NumPy where it is installed).
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from trainer_hooks.demo.model import VOCABULARY
from trainer_hooks.demo.recipe import Recipe
from trainer_hooks.demo.rng import draw


class SamplerState(TypedDict):
    """Everything that decides which samples come next."""

    epoch: int
    position: int
    order: Tensor
    generator: Tensor


class ShardedSampler:
    """Gives a replica the sample numbers of one batch after another, newly shuffled in each epoch, without end.

    All replicas shuffle alike; of each round of `replicas` batches, replica number `replica` takes its own. The state
    is exact after every `next_batch()`: a sampler that loads it gives the batches that this one would.
    """

    def __init__(self, samples: int, batch: int, seed: int, *, replica: int = 0, replicas: int = 1) -> None:
        if samples % (batch * replicas):
            raise ValueError(f"samples {samples} must be a multiple of batch {batch} times replicas {replicas}")
        self.samples = samples
        self.batch = batch
        self.replica = replica
        self.replicas = replicas
        self.epoch = 0
        self._position = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(samples, generator=self._generator)

    def next_batch(self) -> list[int]:
        """Sample numbers of this replica's next batch; begins a new epoch when the old one is used up."""
        if self._position == self.samples:
            self.epoch += 1
            self._position = 0
            self._order = torch.randperm(self.samples, generator=self._generator)
        first = self._position + self.replica * self.batch
        self._position += self.replicas * self.batch
        return [int(index) for index in self._order[first : first + self.batch].tolist()]

    def state_dict(self) -> SamplerState:
        """What `load_state_dict` needs. The order is not copied: it is replaced, never changed."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "order": self._order,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where the saved sampler was; `ValueError` if it had another number of samples."""
        if state["order"].numel() != self.samples:
            raise ValueError(f"the sampler has {self.samples} samples, the saved state {state['order'].numel()}")
        self.epoch = state["epoch"]
        self._position = state["position"]
        self._order = state["order"].clone()
        self._generator.set_state(state["generator"])


class Corpus:
    """Bytes of text, cut into equal regions: sample number i is a random crop of region i."""

    def __init__(self, tokens: Tensor, recipe: Recipe) -> None:
        self._tokens = tokens
        self._context = recipe.context
        self._noise = recipe.noise
        self._region = tokens.numel() // recipe.samples
        if self._region <= recipe.context:
            raise ValueError(f"--steps {recipe.steps}: {tokens.numel()} bytes of text are too few for so many samples")

    def batch(self, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs (with a little noise) and targets: two int64 (batch, context) tensors."""
        crops = torch.stack([self._crop(sample) for sample in samples]).long()
        return with_noise(crops[:, :-1], self._noise), crops[:, 1:].contiguous()

    def _crop(self, sample: int) -> Tensor:
        start = sample * self._region + random.randrange(self._region - self._context)
        return self._tokens[start : start + self._context + 1]


def with_noise(tokens: Tensor, share: float) -> Tensor:
    """A copy in which about `share` of the tokens are replaced by random bytes."""
    noisy = tokens.reshape(-1).clone()
    count = int(noisy.numel() * share)
    where = torch.tensor(draw(count, below=noisy.numel()), dtype=torch.long)
    noisy[where] = torch.tensor(draw(count, below=VOCABULARY), dtype=torch.long)
    return noisy.view(tokens.shape)


def load_corpus(recipe: Recipe) -> Corpus:
    """Read the top-level modules of the standard library in name order, up to the recipe's size.

    Raises:
        RuntimeError: this Python has no source files (an embedded or zipped build).
    """
    text = bytearray()
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= recipe.corpus_bytes:
            break
    if not text:
        raise RuntimeError(f"no Python source files in {folder}: the demo has nothing to train on")
    return Corpus(torch.frombuffer(text[: recipe.corpus_bytes], dtype=torch.uint8), recipe)
