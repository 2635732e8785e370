"""Does a saved state fit the object that is to take it, and in which form does that object want it?

Asked before anything is touched: names of wrappers (``torch.compile``, ``DistributedDataParallel``) are adapted, local
parts become DTensors like the live ones, and all that does not fit is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from trainer_hooks.sharding import Keys, Sharding, is_dtensor, rejoined, rejoined_beside

_WRAPPERS = frozenset({"module", "_orig_mod"})

# What the optimizers of torch keep in the shape of the parameter; others may give these names to something else.
_LIKE_THEIR_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)


@dataclass
class Fit:
    """A saved state in the form that its object takes, and what of it does not fit (then it must not be loaded)."""

    state: Any
    misfits: list[str] = field(default_factory=list)


@runtime_checkable
class StandIn(Protocol):
    """A tracked object that stands for a module or an optimizer, which may be another one at each call.

    All replicas have the same of it.
    """

    def fit_saved(self, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
        """Fit a saved state to what it stands for, as :func:`fit`."""
        ...


def fit(thing: Any, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
    """Fit a saved state to a live object, of which nothing is changed.

    Args:
        thing: what is to take the state; only modules and optimizers are looked into.
        saved: its saved state.
        shardings: which tensors in it are parts of split ones, by the keys below ``saved``.
    """
    if isinstance(thing, StandIn):
        return thing.fit_saved(saved, shardings)
    if isinstance(thing, torch.nn.Module):
        return _fit_module(thing, saved, shardings)
    if isinstance(thing, torch.optim.Optimizer):
        return _fit_optimizer(thing, saved, shardings)
    if not shardings:
        return Fit(saved)
    live = thing.state_dict()
    return _rejoin(saved, shardings, lambda keys, part: rejoined(part, shardings[keys], _at(live, keys)))


def is_checked(thing: Any) -> bool:
    """Whether this kind of object is known well enough that loading a state that fits will not fail."""
    return isinstance(thing, (torch.nn.Module, torch.optim.Optimizer, StandIn))


def _not_of(thing: Any, saved: Any) -> Fit:
    return Fit(saved, [f"a {type(saved).__name__} was saved that is not a state of {type(thing).__name__}"])


# --- modules ----------------------------------------------------------------------------------------------------------


def _fit_module(module: torch.nn.Module, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
    if not isinstance(saved, Mapping):
        return _not_of(module, saved)
    return fit_names(module.state_dict(), saved, shardings)


def fit_names(mine: Mapping[str, Any], saved: Mapping[str, Any], shardings: Mapping[Keys, Sharding]) -> Fit:
    """Fit saved tensors by their names to live ones: names of wrappers may differ, all else has to be the same."""
    names = _names_now(saved, mine)
    if names:
        saved = _renamed(saved, names, mine)
        shardings = {(names.get(str(keys[0]), keys[0]), *keys[1:]): found for keys, found in shardings.items()}
    misfits = _named(sorted(mine.keys() - saved.keys(), key=str), "was not saved")
    misfits += _named(sorted(saved.keys() - mine.keys(), key=str), "was saved and is not there now")
    common = [name for name in mine if name in saved]
    split = {keys: None for keys in shardings if keys[0] in mine}
    split |= {(name,): None for name in common if is_dtensor(mine[name])}
    fitted = _rejoin(saved, split, lambda keys, part: rejoined(part, shardings.get(keys), _at(mine, keys)))
    misfits += _named(*_other_shapes((name, saved[name], mine[name]) for name in common if (name,) not in split))
    return Fit(fitted.state, misfits + fitted.misfits)


def _names_now(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that only wrappers have changed: as saved, and as they are now."""
    if saved.keys() == mine.keys() or not all(isinstance(name, str) for name in saved):
        return {}
    now = {_bare(name): name for name in mine}
    was = {_bare(name): name for name in saved}
    if len(now) < len(mine) or len(was) < len(saved):
        return {}  # without the wrappers' parts two names would be one
    return {was[bare]: now[bare] for bare in was.keys() & now.keys() if was[bare] != now[bare]}


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _renamed(saved: Mapping[str, Any], names: Mapping[str, str], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state under other names, its metadata (the versions of its submodules) as well."""
    renamed = copy.copy(saved)
    assert isinstance(renamed, dict)
    renamed.clear()
    renamed.update((names.get(name, name), value) for name, value in saved.items())
    was, now = getattr(saved, "_metadata", None), getattr(mine, "_metadata", None)
    if was is not None and now is not None:
        bare = {_bare(name): entry for name, entry in was.items()}
        renamed._metadata = {name: bare[_bare(name)] for name in now if _bare(name) in bare}  # type: ignore[attr-defined]
    return renamed


def _other_shapes(triples: Iterable[tuple[str, Any, Any]]) -> tuple[list[str], str]:
    wrong = [
        (name, f"was saved with shape {tuple(saved.shape)} and has {tuple(live.shape)} now")
        for name, saved, live in triples
        if isinstance(live, torch.Tensor)
        and isinstance(saved, torch.Tensor)
        and not torch.nn.parameter.is_lazy(live)
        and saved.shape != live.shape
    ]
    return [name for name, _ in wrong], wrong[0][1] if wrong else ""


def _named(names: list[str], what: str) -> list[str]:
    """Say something of the first name, and how many more there are."""
    return [f"{names[0]} {what}" + (f" (and {len(names) - 1} more)" if names[1:] else "")] if names else []


# --- optimizers -------------------------------------------------------------------------------------------------------


def _fit_optimizer(optimizer: torch.optim.Optimizer, saved: Any, shardings: Mapping[Keys, Sharding]) -> Fit:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        return _not_of(optimizer, saved)
    now = [len(group["params"]) for group in optimizer.param_groups]
    was = [len(group["params"]) for group in saved["param_groups"]]
    if now != was:
        return Fit(saved, [f"parameter groups of {was} parameters were saved, and there are {now}"])
    parameters = _by_index(optimizer, saved)
    live = {index: optimizer.state.get(parameter, {}) for index, parameter in parameters.items()}
    values = list(_values(saved["state"], parameters))
    split = dict.fromkeys(shardings)
    split |= {keys: None for keys, value, mine in values if _becomes_dtensor(value, mine, _at(live, keys[1:]))}

    def join(keys: Keys, part: Any) -> Any:
        there = _at({"state": live}, keys)
        if there is not None:
            return rejoined(part, shardings.get(keys), there)
        return rejoined_beside(part, shardings.get(keys), parameters.get(keys[1]) if keys[1:] else None)

    fitted = _rejoin(saved, split, join)
    if type(optimizer).__module__.startswith("torch.optim"):
        like = [(keys, *pair) for keys, *pair in values if keys not in split and keys[2] in _LIKE_THEIR_PARAMETER]
        fitted.misfits += _named(*_other_shapes((".".join(map(str, keys)), *pair) for keys, *pair in like))
    return fitted


def _by_index(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the live parameters by the numbers that the saved state calls them; the groups are as long."""
    numbers = (index for group in saved["param_groups"] for index in group["params"])
    return dict(zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=True))


def _values(state: Mapping[Any, Any], parameters: Mapping[Any, Any]) -> Iterator[tuple[Keys, Any, Any]]:
    """Yield every value that was saved for a parameter: its keys below the whole state, it, and the live parameter."""
    for index, values in state.items() if isinstance(state, Mapping) else ():
        if index in parameters and isinstance(values, Mapping):
            yield from ((("state", index, name), value, parameters[index]) for name, value in values.items())


def _becomes_dtensor(value: Any, parameter: Any, live: Any) -> bool:
    """Whether a saved value without a note of being split belongs to a DTensor all the same."""
    if live is not None or not isinstance(value, torch.Tensor):
        return is_dtensor(live)
    return is_dtensor(parameter) and value.ndim > 0 and value.shape == parameter.shape


# --- any state --------------------------------------------------------------------------------------------------------


def _at(state: Any, keys: Keys) -> Any:
    """Return what lies under these keys, None if there is nothing."""
    for key in keys:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return None
    return state


def _rejoin(saved: Any, split: Iterable[Keys], join: Callable[[Keys, Any], Any]) -> Fit:
    """Return the state with the parts under the keys ``split`` joined; ``saved`` itself stays as it is."""
    joined: dict[Keys, Any] = {}
    misfits = []
    for keys in split:
        part = _at(saved, keys)
        if not isinstance(part, torch.Tensor):
            continue
        try:
            joined[keys] = join(keys, part)
        except ValueError as error:
            misfits.append((".".join(map(str, keys)), str(error)))
    named = _named([name for name, _ in misfits], misfits[0][1]) if misfits else []
    return Fit(_replaced(saved, joined), named)


def _replaced(value: Any, parts: Mapping[Keys, Any]) -> Any:
    """Return a copy of the containers in ``value`` that lead to ``parts``, with these in their places."""
    if () in parts or not parts:
        return parts.get((), value)
    inside: dict[str | int, dict[Keys, Any]] = {}
    for keys, part in parts.items():
        inside.setdefault(keys[0], {})[keys[1:]] = part
    new = {key: _replaced(value[key], rest) for key, rest in inside.items()}
    if isinstance(value, tuple):
        return tuple(new.get(index, item) for index, item in enumerate(value))
    renewed = copy.copy(value)
    for key, item in new.items():
        renewed[key] = item
    return renewed
