"""Copies that go on behind the next forward and backward pass. Shell.

What nothing but an optimizer's step changes need not be copied before ``save()`` returns, if the step waits for the
copy. That holds for the parameters that an optimizer was given and for its moments, as long as its hook really runs
before each step: not if the step was compiled or captured into a CUDA graph, where hooks run once and never again.

Whoever changes a parameter by other means between ``save()`` and the next step (weights swapped for an evaluation, a
clamp, ``load_state_dict``) has to call ``ticket.wait_staged()`` first. There are two nets below: the version counters
of torch, which ``.data`` does not move, and a few bytes of every storage, compared when its copy is done. What they
catch fails that snapshot, and everything is copied before ``save()`` returns from then on. On CUDA it always is.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from ckpt_service.errors import SnapshotDisturbed
from trainer_hooks.layout import StorageSpan
from trainer_hooks.sharding import is_dtensor, local_part
from trainer_hooks.tickets import SaveTicket

_SAMPLE_BYTES = 32

log = logging.getLogger(__name__)


@dataclass
class _Watched:
    """A tracked optimizer. ``fired``: its hook ran since the last save; ``blind``: some steps may not run it."""

    optimizer: torch.optim.Optimizer
    handles: tuple[RemovableHandle, ...]
    fired: bool = False
    blind: bool = False

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()


@dataclass(frozen=True)
class Later:
    """What may be copied later: storages by torch's handle, and tensors with the version that they have now."""

    handles: frozenset[int]
    versions: tuple[tuple[torch.Tensor, int], ...]

    def changed(self) -> bool:
        """Return whether some tensor was changed in place since."""
        return any(tensor._version != version for tensor, version in self.versions)


class StepGate:
    """Knows what only optimizer steps change, and holds every step of theirs until it is copied.

    ``on_first_step`` is called once, after the first step of a watched optimizer. Used on the training thread only.
    """

    def __init__(self, patience_seconds: float, on_first_step: Callable[[], None], *, overlaps: bool) -> None:
        self._patience_seconds = patience_seconds
        self._on_first_step: Callable[[], None] | None = on_first_step
        self._watched: dict[str, _Watched] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._copies: list[SaveTicket] = []
        self._trusted = overlaps
        self._pid = os.getpid()

    def watch(self, name: str, thing: object) -> None:
        """Look after a tracked object, in place of the one that had this name."""
        self._modules.pop(name, None)
        if known := self._watched.pop(name, None):
            known.close()
        if isinstance(thing, torch.nn.Module):
            self._modules[name] = thing  # no hook: it would travel in pickles and deep copies of the user's module
        if isinstance(thing, torch.optim.Optimizer):
            self._watched[name] = self._hooked(thing)

    def _hooked(self, optimizer: torch.optim.Optimizer) -> _Watched:
        try:
            before = optimizer.register_step_pre_hook(self._before_step)
            # In front of the user's own: one of those may change parameters, and has to wait as the step does.
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)
            return _Watched(optimizer, (before, optimizer.register_step_post_hook(self._after_step)))
        except AttributeError:  # a wrapper that is an optimizer by name only: its steps cannot be seen
            return _Watched(optimizer, (), blind=True)

    def later(self) -> Later | None:
        """Return what may be copied after this save has returned; None if all has to be copied now."""
        self._look_at_copies()
        watched = list(self._watched.values())
        ready = self._trusted and bool(watched) and all(each.fired and not each.blind for each in watched)
        for each in watched:
            each.fired = False
        # Hooks for all optimizers of the process run before ours, and may change what is still being copied.
        if not ready or _global_optimizer_pre_hooks:
            return None
        try:
            return self._held_by_optimizers()
        except Exception as error:  # noqa: BLE001 - an optimizer of an odd build is no reason not to save
            log.info("all is copied at once: %s: %s", type(error).__name__, error)
            return None

    def _held_by_optimizers(self) -> Later:
        optimizers = [each.optimizer for each in self._watched.values()]
        kept = [tensor for optimizer in optimizers for tensor in _held_by(optimizer)]
        now = {_handle(buffer) for module in self._modules.values() for buffer in module.buffers()}
        now |= {_handle(value) for optimizer in optimizers for value in _small_values(optimizer)}
        later = [tensor for tensor in kept if _handle(tensor) not in now]
        return Later(frozenset(map(_handle, later)), tuple((tensor, tensor._version) for tensor in later))

    def hold(self, ticket: SaveTicket) -> None:
        """Let no step of a watched optimizer begin before this save is staged."""
        self._copies.append(ticket)

    def close(self) -> None:
        """Take the hooks away."""
        for each in self._watched.values():
            each.close()
        self._watched.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mine = [each for each in self._watched.values() if each.optimizer is optimizer]
        if torch.compiler.is_compiling() or _is_captured():
            for each in mine:
                each.blind = True
            return
        for each in mine:
            each.fired = True
        if self._copies and os.getpid() == self._pid:
            self._wait_for_copies()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on_first_step is not None and not torch.compiler.is_compiling():
            first, self._on_first_step = self._on_first_step, None
            try:
                first()  # the optimizers have their moments now
            except Exception as error:  # noqa: BLE001 - no threads, an odd state: it may not end somebody's step
                log.warning("the memory for snapshots could not be made ready: %s", error)

    def _wait_for_copies(self) -> None:
        # Bounded: a step that goes on too early is seen by the nets, and costs a snapshot, not the training.
        wait([ticket.staged for ticket in self._copies], self._patience_seconds)
        self._look_at_copies()

    def _look_at_copies(self) -> None:
        """Let go of the copies that are done; if one was disturbed, there are no more of their kind."""
        for ticket in [ticket for ticket in self._copies if ticket.staged.done()]:
            self._copies.remove(ticket)
            if isinstance(error := ticket.staged.exception(), SnapshotDisturbed):
                self._trusted = False
                log.warning("snapshots are copied before save() returns from now on: %s", error)


def _held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer and their moments, where they are plain memory of this host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            state = state if isinstance(state, Mapping) else {}
            moments = (value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim > 0)
            for tensor in (parameter, *moments):
                local = local_part(tensor) if is_dtensor(tensor) else tensor
                if local.device.type == "cpu" and local.layout is torch.strided and not local.is_inference():
                    yield local


def _small_values(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what schedulers and users change at any time: counters, and tensors among the options of the groups."""
    for state in optimizer.state.values():
        if isinstance(state, Mapping):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim == 0)
    for group in optimizer.param_groups:
        yield from (value for key, value in group.items() if key != "params" and isinstance(value, torch.Tensor))


def _handle(tensor: torch.Tensor) -> int:
    local = local_part(tensor) if is_dtensor(tensor) else tensor
    return local.untyped_storage()._cdata if local.layout is torch.strided else 0


class BackgroundCopy:
    """The copy of some spans, begun and checked on another thread than the one that made it. CPU storages only."""

    def __init__(self, spans: Iterable[tuple[StorageSpan, int]], later: Later) -> None:
        """Take samples now. ``spans`` come with the address that each goes to."""
        self._spans = [(span, address) for span, address in spans if span.nbytes]
        self._later = later
        self._samples = [list(_samples(span.address, span.nbytes)) for span, _ in self._spans]

    def run(self) -> None:
        """Copy; the interpreter is free meanwhile.

        Raises:
            SnapshotDisturbed: something was changed before its copy was done.
        """
        for span, address in self._spans:
            ctypes.memmove(address, span.address, span.nbytes)
        copied = [list(_samples(address, span.nbytes)) for span, address in self._spans]
        if copied != self._samples or self._later.changed():
            raise SnapshotDisturbed(
                "parameters were changed between save() and the next optimizer step, while they were being copied",
                op="capture",
                hint='call ticket.wait_staged() before you change them, or use staging="blocking"',
            )


def _samples(address: int, nbytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a span, some in its middle, and the last."""
    for start in (0, nbytes // 2, max(0, nbytes - _SAMPLE_BYTES)):
        yield ctypes.string_at(address + start, min(_SAMPLE_BYTES, nbytes - start))


def _is_captured() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()
