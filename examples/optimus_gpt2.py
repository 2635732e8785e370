"""GPT-2 on the Optimus Prime trainer, with checkpoints that do not stop it. Two lines differ from a script without:

    -from opt_prime.opti_pri import Optimus_p
    +from opt_prime.opti_pri import Optimus_p as Trainer
    +Optimus_p = wrap(Trainer)

    -optimus_p = Optimus_p(model, MICRO_BATCHES, ..., checkpoint=True)
    +optimus_p = Optimus_p(model, MICRO_BATCHES, ..., checkpoint=True, async_ckpt=True)

Run it under ``torchrun --nproc-per-node 4``; run it again after a crash, and it goes on with the epoch after the last
checkpoint that all ranks have. ``ckpt-service status`` in the same directory says what is being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opt_prime.opti_pri import Optimus_p as Trainer
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_hooks.optimus import wrap

Optimus_p = wrap(Trainer)

MICRO_BATCHES, BATCH, CONTEXT = 4, 8, 128
EPOCHS, STEPS = 3, 100


def batches(epoch: int, vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield the token ids of one epoch; put your data loader here."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(STEPS):
        yield torch.randint(vocabulary, (BATCH, CONTEXT), generator=generator)


def train_one_epoch(optimus_p: Any, epoch: int, vocabulary: int) -> None:
    for tokens in batches(epoch, vocabulary):
        optimus_p.optimizer.zero_grad()
        optimus_p.run(tokens, tokens)
        optimus_p.optimizer.step()


def main() -> None:
    config = GPT2Config(use_cache=False)
    optimus_p = Optimus_p(
        GPT2LMHeadModel(config),
        MICRO_BATCHES,
        use_gpu=True,
        pp_size=2,
        dp_size=2,
        tp_size=1,
        checkpoint=True,
        async_ckpt=True,
    )
    optimus_p.train()
    optimus_p.optimizer = torch.optim.AdamW(optimus_p.parameters(), lr=3e-5, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimus_p.optimizer, T_max=EPOCHS)
    optimus_p.checkpointer.track(scheduler=scheduler)  # without it, a resume starts the schedule afresh

    point = optimus_p.load_ckpt()  # None on a fresh start
    for epoch in range(point.epoch + 1 if point else 0, EPOCHS):
        train_one_epoch(optimus_p, epoch, config.vocab_size)
        scheduler.step()
        optimus_p.save_ckpt(STEPS - 1, epoch)  # returns as soon as the state is copied
    optimus_p.checkpointer.close()  # waits for the last write; raises if it was lost


if __name__ == "__main__":
    main()
