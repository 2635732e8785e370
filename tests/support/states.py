"""States to shard files and back, the way a trainer does it, and what makes two states equal."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Watcher, commit
from support.shards import BUFFERED, manifest
from trainer_hooks.capture import Blueprint, blueprint, capture
from trainer_hooks.layout import Plan, plan
from trainer_hooks.load import load_shard
from trainer_hooks.slots import Slot
from trainer_hooks.values import Allowed


def manifest_of(drawn: Blueprint) -> ShardManifest:
    return manifest(bytes=drawn.layout.nbytes, tensors=drawn.plan.tensors)


def save(state: Any, directory: Path, trust: Iterable[type] = ()) -> Path:
    """Save a state as step 100 of a run, and return the path of the file."""
    return save_plan(plan(state, Allowed(trust)), directory)


def save_plan(planned: Plan, directory: Path) -> Path:
    """Save a state that was planned, and return the path of the file."""
    drawn = blueprint(planned)
    slot = Slot.create(drawn.layout.nbytes)
    made = capture(drawn, manifest_of(drawn), slot)
    try:
        with LocalDirectory.open(str(directory)) as opened:
            commit(made, opened, mode=0o644, host="host", token="0", options=BUFFERED, watcher=Watcher())
    finally:
        made.view.release()
        slot.close()
    return directory / made.final_name


def load(path: Path, trust: Iterable[type] = ()) -> Any:
    """Load a file as what it says it is."""
    return load_shard(str(path), manifest_in(path), Allowed(trust))


def manifest_in(path: Path) -> ShardManifest:
    with zipfile.ZipFile(path) as archive:
        return ShardManifest.model_validate_json(archive.read("archive/.ckpt_service/manifest.json"))


def saved_by_torch(state: Any) -> io.BytesIO:
    """Return the file that ``torch.save`` makes of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the logical bytes of a tensor, whatever its dtype, layout or laziness."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    contiguous = plain.contiguous().reshape(-1).clone()
    found: list[int] = torch.empty(0, dtype=torch.uint8).set_(contiguous.untyped_storage()).tolist()
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Check that two states are equal: types, order of keys, ties, and all that can be asked of a tensor."""
    ties: dict[int, int] = {}
    _assert_same(found, expected, "state", ties)
    assert len(set(ties.values())) == len(ties), "tensors are tied that were not"


def _assert_same(found: Any, expected: Any, path: str, ties: dict[int, int]) -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, path, ties)
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            _assert_same(found[key], value, f"{path}[{key!r}]", ties)
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None), path
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            _assert_same(found[index], value, f"{path}[{index}]", ties)
    else:
        assert repr(found) == repr(expected), path


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, path: str, ties: dict[int, int]) -> None:
    for name in ("dtype", "shape", "layout", "requires_grad", "is_quantized"):
        assert getattr(found, name) == getattr(expected, name), f"{path}: {name}"
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg()), path
    if expected.layout is not torch.strided:
        assert torch.equal(found.to_dense(), expected.to_dense()), path
        return
    assert found.stride() == expected.stride(), path
    assert bits(found) == bits(expected), path
    if expected.is_quantized:
        assert found.qscheme() == expected.qscheme(), path
        assert torch.equal(found.dequantize(), expected.dequantize()), path
    if expected.numel():
        memory = expected.untyped_storage().data_ptr()
        assert ties.setdefault(memory, found.untyped_storage().data_ptr()) == found.untyped_storage().data_ptr(), path
