"""The five methods of the trainer that are rebound, over a :class:`trainer_hooks.Checkpointer`."""

from __future__ import annotations

import os
from typing import Any

from ckpt_service import naming, scan
from ckpt_service.catalog import Evidence, build
from ckpt_service.errors import LayoutMismatch, StateMismatch
from ckpt_service.messages import Retention
from trainer_hooks.beside import Wanted
from trainer_hooks.checkpointer import Checkpointer
from trainer_hooks.choice import whose_is_unknown
from trainer_hooks.optimus.export import fit_adapters, hf_state, lora_state
from trainer_hooks.optimus.place import RunPlace, attribute, optimizer_of
from trainer_hooks.optimus.state import StageModel
from trainer_hooks.resume import ResumePoint
from trainer_hooks.saves import OnDemand
from trainer_hooks.saving import Target
from trainer_hooks.tickets import SaveTicket

_LORA_KEPT = 2


class Hooks:
    """What the methods share: the trainer, its checkpointer, its place. ``save_*`` return at once on every rank.

    Each ``save_*`` has to be called by all ranks; only data-parallel rank 0 writes, but mistakes raise on all. Relative
    directories are below the root, which is where the trainer has its own.
    """

    def __init__(self, trainer: Any, model: StageModel, checkpointer: Checkpointer, place: RunPlace) -> None:
        self._trainer = trainer
        self._model = model
        self._checkpointer = checkpointer
        self._place = place

    def save_ckpt(self, step: int, epoch: int) -> SaveTicket:
        """Save model, optimizer, scheduler and random numbers of this stage as ``Checkpointer.save``.

        Raises:
            ValueError: a number is wrong, the optimizer is not set, or the state cannot be saved.
        """
        optimizer_of(self._trainer)  # also where nothing is written
        return self._checkpointer.save(step, epoch)

    def load_ckpt(self, step: int | None = None, epoch: int | None = None) -> ResumePoint | None:
        """Load the last complete checkpoint, or the one that is named; collective, as ``Checkpointer.resume``.

        Files of the trainer before it had hooks are loaded too; what they lack (random numbers, a scheduler) is warned
        about.

        Raises:
            LayoutMismatch: only files are there that all tensor-parallel ranks wrote under one name.
            ValueError, CkptError: as ``Checkpointer.resume``.
        """
        point = self._checkpointer.resume(step, epoch, strict=False)
        if point is None:
            self._refuse_unknown_part()
        return point

    def save_lora_ckpt(self, step: int, epoch: int, lora_dir: str | None = None) -> SaveTicket:
        """Save the adapters of this stage to ``<lora_dir>_stage_<stage>``; the last two of each rank are kept there.

        Raises:
            ValueError: there are no adapters, or ``lora_config`` holds something that is no plain value.
        """
        place = self._place.topology

        def state() -> dict[str, Any]:
            return lora_state(self._model, attribute(self._trainer, "lora_config"), place, step, epoch)

        directory = self._below_root(naming.lora_directory(place.stage, lora_dir))
        target = Target("lora", directory, Retention(keep_last=_LORA_KEPT))
        return self._checkpointer.save_to(target, step, epoch, OnDemand(state), final=False)

    def load_lora_ckpt(self, step: int, epoch: int, lora_dir: str | None = None) -> str:
        """Load adapters into the module; collective. They are looked for where ``save_lora_ckpt`` puts them, and in
        ``lora_dir`` itself.

        Returns:
            The path of this rank's file.

        Raises:
            ValueError: there is no such file for every rank, or no adapters are there to take it.
            CkptError: it is damaged or does not fit, on some rank; nothing has been touched.
        """
        directories = [self._below_root(naming.lora_directory(self._place.topology.stage, lora_dir))]
        if lora_dir is not None:
            directories.append(self._below_root(lora_dir))
        config = type(getattr(self._trainer, "lora_config", None))  # old files hold the object itself
        trust = (config,) if config.__module__ != "builtins" and "<locals>" not in config.__qualname__ else ()
        wanted = Wanted("lora", step, epoch, directories, trust)
        return self._checkpointer.load_beside(wanted, check=self._check_adapters, restore=self._restore_adapters)

    def save_hf_ckpt(self, save_dir: str, step: int | None = None, epoch: int | None = None) -> SaveTicket:
        """Save the model of this stage for the trainer's merge script, in place of what ``save_dir`` held before."""
        place = self._place.topology
        state = OnDemand(lambda: hf_state(self._model, place, step, epoch))
        target = Target("hf", self._below_root(save_dir), Retention(keep_last=1))
        return self._checkpointer.save_to(target, step or 0, epoch or 0, state, final=False)

    def _below_root(self, directory: str) -> str:
        return os.path.abspath(os.path.join(self._place.root, os.fspath(directory)))

    def _check_adapters(self, state: Any) -> None:
        misfits = fit_adapters(self._model, state).misfits
        if misfits:
            raise StateMismatch("the adapters do not fit: " + "; ".join(misfits), op="load")

    def _restore_adapters(self, state: Any) -> None:
        self._model.load_state_dict(fit_adapters(self._model, state).state)

    def _refuse_unknown_part(self) -> None:
        """Tell old files that nobody can load apart from a fresh start; all ranks raise, or none."""
        place = self._place
        shards = tuple(scan.scan_stage(place.root, place.postfix, place.topology.stage))
        found = build(Evidence(shards)).of_kind("train")
        mine = next((path for c in found if (path := whose_is_unknown(c, place.topology))), None)
        if self._checkpointer.any_rank(mine is not None):
            raise LayoutMismatch(
                f"{mine or 'the file of another stage'} was written by all {place.topology.tp} tensor-parallel ranks "
                "under one name: it holds the part of one of them, and nothing says of which",
                op="resume",
                hint="move such files away to start afresh",
            )
