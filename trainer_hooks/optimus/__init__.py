"""Checkpoints for the Optimus Prime trainer: its five methods, rebound. The trainer itself is never imported.

    from trainer_hooks.optimus import wrap
    Optimus_p = wrap(Optimus_p)
    optimus_p = Optimus_p(model, ..., checkpoint=True, async_ckpt=True)

Or, with a trainer that is made already, ``enable_async_ckpt(optimus_p, scheduler=scheduler)``.
"""

from trainer_hooks.optimus.enable import enable_async_ckpt, wrap

__all__ = ["enable_async_ckpt", "wrap"]
