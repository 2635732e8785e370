"""The objects whose state is saved and given back: collecting, checking, restoring. Shell over torch objects."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from ckpt_service.errors import StateMismatch, StateRefused
from trainer_hooks.fitting import StandIn, fit, is_checked
from trainer_hooks.sharding import Keys, Sharding, below, describe, is_dtensor, refuse_object
from trainer_hooks.topology import Topology

RNG = "rng_state"
_KEYS = {"model": "stage_state_dict"}
_BYTES_AROUND_A_TENSOR = 5000  # it begins at a page of its own, and has its names and a place in the pickle
_BYTES_OF_VALUES = 1 << 20
_RESERVED = frozenset({"stage"})


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state over."""
        ...


def key_of(name: str) -> str:
    """Return the key of the file under which the state of the object tracked as ``name`` stands."""
    return _KEYS.get(name, f"{name}_state_dict")


class Tracked:
    """Named objects with a state; the names are those given to ``track()``."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, name: str, thing: Any) -> None:
        """Track an object, in place of what had this name; raises ``ValueError`` if it has no state."""
        if name in _RESERVED:
            raise ValueError(f"track({name}=...): the name is taken; choose another one")
        if not isinstance(thing, Stateful):
            raise ValueError(f"track({name}=...): {type(thing).__name__} lacks state_dict() or load_state_dict()")
        self._objects[name] = thing

    def known_bytes(self) -> int:
        """Return the size of what modules and optimizers hold by now, in bytes; their states will not be smaller."""
        return sum(_held_bytes(thing) for thing in self._objects.values())

    def image_bytes(self) -> int:
        """Return a size that a snapshot of what is held by now surely fits into, in bytes."""
        count = sum(len(_held(thing)) for thing in self._objects.values())
        return self.known_bytes() + count * _BYTES_AROUND_A_TENSOR + _BYTES_OF_VALUES

    def collect(self) -> dict[str, Any]:
        """Return the states by their keys in the file, and the state of the random number generators.

        Raises:
            StateRefused: an object splits its state over ranks in a way that a file for each rank cannot hold.
        """
        self._refuse_split()
        state = {key_of(name): thing.state_dict() for name, thing in self._objects.items()}
        return {**state, RNG: rng_state()}

    def collect_own(self, place: Topology) -> dict[str, Any]:
        """Return what differs between data-parallel replicas: generators, and all that is no module or optimizer.

        Raises:
            StateRefused: what the writer is refused for being split over ranks; then all ranks raise.
        """
        self._refuse_split()
        self._refuse_split_parameters(place)
        state = {key_of(name): thing.state_dict() for name, thing in self._objects.items() if not is_checked(thing)}
        return {**state, RNG: rng_state()}

    def check(
        self, state: Mapping[str, Any], shardings: Mapping[Keys, Sharding] = MappingProxyType({}), *, strict: bool
    ) -> None:
        """Check that every tracked object finds what it needs, before any is touched.

        ``shardings`` says which tensors of the state are parts of split ones, by their keys.

        Raises:
            StateMismatch: something is missing or does not fit; names all of it. With ``strict=False`` what is missing
                only warns.
        """
        missing = [key_of(name) for name in self._objects if key_of(name) not in state]
        if self._objects and RNG not in state:
            missing.append(RNG)
        if missing:
            message = f"the checkpoint lacks {', '.join(missing)}"
            if all(key_of(name) not in state for name in self._objects):
                hint = "was it saved with other names, or by another program? Load it by hand, or use another root"
                raise StateMismatch(f"{message}: it holds nothing of what is tracked", op="resume", hint=hint)
            if strict:
                raise StateMismatch(message, op="resume", hint="resume(strict=False) starts these afresh")
            warnings.warn(message, stacklevel=4)
        misfits = [
            f"{key_of(name)}: {misfit}"
            for name, thing in self._objects.items()
            if key_of(name) in state
            for misfit in fit(thing, state[key_of(name)], below(shardings, key_of(name))).misfits
        ]
        if RNG in state and not _is_rng_state(state[RNG]):
            misfits.append(f"{RNG}: it is not one that was collected from tracked objects")
        if misfits:
            raise StateMismatch("the checkpoint does not fit: " + "; ".join(misfits), op="resume")

    def restore(self, state: Mapping[str, Any], shardings: Mapping[Keys, Sharding] = MappingProxyType({})) -> None:
        """Give every tracked object its state, and restore the random number generators.

        It was found to fit by :meth:`check`.

        Raises:
            StateMismatch: an object refused its state; those restored before it are as they were.
        """
        undo: list[tuple[Stateful, Any]] = []
        for name, thing in sorted(self._objects.items(), key=lambda item: not _may_refuse(item[1])):
            if key_of(name) not in state:
                continue
            try:
                if _may_refuse(thing):
                    undo.append((thing, copy.deepcopy(thing.state_dict())))
                thing.load_state_dict(fit(thing, state[key_of(name)], below(shardings, key_of(name))).state)
            except Exception as error:
                for earlier, before in reversed(undo):
                    with contextlib.suppress(Exception):  # it refuses its own state too; the others still get theirs
                        earlier.load_state_dict(before)
                raise StateMismatch(
                    f"{name} refuses its state: {type(error).__name__}: {error}", op="resume"
                ) from error
        if RNG in state:
            restore_rng(state[RNG])

    def _refuse_split(self) -> None:
        for name, thing in self._objects.items():
            reason = refuse_object(thing)
            if reason is not None:
                raise StateRefused(f"{key_of(name)}: {reason}", op="capture")

    def _refuse_split_parameters(self, place: Topology) -> None:
        """Look, without calling any ``state_dict()``, for what the writer will find in it."""
        modules = {name: thing for name, thing in self._objects.items() if isinstance(thing, torch.nn.Module)}
        for name, module in modules.items():
            for key, parameter in module.named_parameters():
                if is_dtensor(parameter):
                    try:
                        describe(parameter, place)
                    except ValueError as error:
                        raise StateRefused(f"state[{key_of(name)!r}][{key!r}]: {error}", op="capture") from None


def _may_refuse(thing: Stateful) -> bool:
    """Whether loading may fail although nothing that does not fit was found: the object has its own way to load."""
    known = (torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
    return not isinstance(thing, StandIn) and getattr(type(thing), "load_state_dict", None) not in known


def _held_bytes(thing: Stateful) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _held(thing))


def _held(thing: Stateful) -> list[torch.Tensor]:
    """Return the tensors that a module or an optimizer holds, each once; lazy ones have no size yet."""
    tensors: dict[int, torch.Tensor] = {}
    if isinstance(thing, torch.nn.Module):
        tensors = {id(tensor): tensor for tensor in (*thing.parameters(), *thing.buffers())}
    elif isinstance(thing, torch.optim.Optimizer):
        held = (value for state in thing.state.values() if isinstance(state, Mapping) for value in state.values())
        tensors = {id(value): value for value in held if isinstance(value, torch.Tensor)}
    return [tensor for tensor in tensors.values() if not torch.nn.parameter.is_lazy(tensor)]


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's (if it is imported) and torch's generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _is_rng_state(state: Any) -> bool:
    return isinstance(state, Mapping) and {"python", "torch"} <= state.keys()


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`rng_state` returned; those of absent libraries or devices are left out."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy, saved = sys.modules["numpy"], state["numpy"]
        keys = numpy.array(saved["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
