"""What the demo trains, on how many ranks, and when it saves: every number in one frozen value.

Takes `--steps`, `--tiny` and `--single`; gives a `Recipe` that the parent and every training process build alike from
the same options, so that nothing but file names has to be passed around.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SAVES = 6
"""Saves in one run. The first kill lands in the second of them, the second kill in the fourth."""

MINIMUM_STEPS = SAVES
DEFAULT_STEPS = 60


@dataclass(frozen=True)
class Recipe:
    """One training run. Two starts with equal recipes on one machine compute the same bits on every rank.

    `batch` is that of one data-parallel replica; `tp` and `dp` are the sizes of the mesh of ranks.
    """

    steps: int
    tp: int
    dp: int
    layers: int
    heads: int
    width: int
    context: int
    corpus_bytes: int
    batch: int = 4
    epoch_batches: int = 1
    dropout: float = 0.1
    noise: float = 0.02
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1234

    @property
    def ranks(self) -> int:
        """Training processes of one leg."""
        return self.tp * self.dp

    @property
    def samples(self) -> int:
        """Samples in one epoch: a whole number of batches for every replica."""
        return self.batch * self.dp * self.epoch_batches

    @property
    def save_every(self) -> int:
        """Steps from one save to the next."""
        return self.steps // SAVES

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, self.steps // 10)

    @property
    def first_kill_step(self) -> int:
        """The save in whose write the trainers are killed."""
        return 2 * self.save_every

    @property
    def second_kill_step(self) -> int:
        """The save in whose write the trainers and their daemon are killed."""
        return 4 * self.save_every

    def saves_at(self, step: int) -> bool:
        """Whether the loop saves after this step. It does after the last."""
        return step % self.save_every == 0 or step == self.steps


def make_recipe(*, steps: int, tiny: bool, single: bool = False) -> Recipe:
    """The demo's model (1.4 million parameters, 17 MB with AdamW's moments), or one of 1 MB for a quick test.

    Raises:
        ValueError: fewer steps than the demo needs for its saves and kills.
    """
    if steps < MINIMUM_STEPS:
        raise ValueError(f"--steps {steps}: the demo needs at least {MINIMUM_STEPS} steps for its {SAVES} saves")
    tp, dp = (1, 1) if single else (2, 2)
    if tiny:
        shape = Recipe(steps, tp, dp, layers=2, heads=2, width=48, context=32, corpus_bytes=1 << 18)
    else:
        shape = Recipe(steps, tp, dp, layers=3, heads=4, width=192, context=64, corpus_bytes=1 << 20)
    return replace(shape, epoch_batches=max(1, int(steps * 0.4)))
