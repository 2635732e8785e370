"""Turn the hooks on: for one trainer object, or for every one that a class makes."""

from __future__ import annotations

from typing import Any

from trainer_hooks.checkpointer import Checkpointer
from trainer_hooks.optimus.hooks import Hooks
from trainer_hooks.optimus.place import place_of
from trainer_hooks.optimus.state import StageModel, StageOptimizer

_METHODS = ("save_ckpt", "load_ckpt", "save_lora_ckpt", "load_lora_ckpt", "save_hf_ckpt")
_SWAPS = ("swap_opt_in_fwdbwd", "swap_model_in_optstep")


def enable_async_ckpt(
    optimus_p: Any, async_ckpt: bool = True, scheduler: Any = None, keep_last: int = 2
) -> Checkpointer:
    """Rebind the checkpoint methods of a trainer object, made with ``checkpoint=True``; collective on all ranks.

    Args:
        optimus_p: the trainer. Its optimizer may be set later, and its module wrapped anew.
        async_ckpt: write in the background. False writes the same files before the methods return.
        scheduler: saved and restored with the rest.
        keep_last: how many complete checkpoints to keep, at least 1.

    Returns:
        The checkpointer, also found as ``optimus_p.checkpointer``: to wait for writes with ``drain()`` or ``close()``
        (the end of the process waits by itself), and to ``track(scheduler=...)`` one that is made later.

    Raises:
        ValueError: an attribute of the trainer is missing or wrong, or it has its hooks already; names it.
        CkptError: as ``Checkpointer``.
    """
    if isinstance(getattr(optimus_p, "checkpointer", None), Checkpointer):
        raise ValueError("optimus_p: it has a checkpointer already; use optimus_p.checkpointer.track(scheduler=...)")
    place = place_of(optimus_p)
    model = StageModel(optimus_p)
    swaps = any(getattr(optimus_p, name, False) for name in _SWAPS)
    checkpointer = Checkpointer(
        place.root,
        topology=place.topology,
        postfix=place.postfix,
        async_ckpt=async_ckpt,
        keep_last=keep_last,
        # Swapped tensors are replaced between steps: a copy that is not finished would keep the old ones alive.
        staging="blocking" if swaps else "overlap",
    )
    checkpointer.track(model=model, optimizer=StageOptimizer(optimus_p), scheduler=scheduler)
    hooks = Hooks(optimus_p, model, checkpointer, place)
    for name in _METHODS:
        setattr(optimus_p, name, getattr(hooks, name))
    optimus_p.checkpointer = checkpointer
    return checkpointer


def wrap(trainer_class: Any) -> Any:
    """Return a subclass of a class of trainers whose constructor takes ``async_ckpt``, ``scheduler`` and ``keep_last``.

    With ``checkpoint=True`` the methods of what it makes are rebound as by :func:`enable_async_ckpt`.

    Raises:
        ValueError: it is no class.
    """
    if not isinstance(trainer_class, type):
        raise ValueError(f"wrap({trainer_class!r}): it takes the class of the trainer, not an object of it")

    class Wrapped(trainer_class):  # type: ignore[misc]
        def __init__(
            self, *args: Any, async_ckpt: bool = True, scheduler: Any = None, keep_last: int = 2, **rest: Any
        ) -> None:
            super().__init__(*args, **rest)
            if getattr(self, "checkpoint", False):
                enable_async_ckpt(self, async_ckpt, scheduler, keep_last)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Wrapped, name, getattr(trainer_class, name))
    return Wrapped
