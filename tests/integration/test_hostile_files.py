"""Files that are whole and mean harm: nothing that they name is called, and nothing else goes wrong."""

from __future__ import annotations

import collections
import contextlib
import decimal
import os
import pickle
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import BUFFERED, manifest
from support.states import load, save

from ckpt_service import image
from ckpt_service.errors import DamagedCheckpoint, UntrustedClass
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Snapshot, Watcher, commit
from trainer_hooks.capture import blueprint
from trainer_hooks.layout import plan
from trainer_hooks.values import Allowed


def write_pickle(pickled: bytes, directory: Path) -> Path:
    """Commit a file that is right in every way but for its pickle."""
    drawn = blueprint(plan({"a": torch.arange(4.0)}, Allowed()))
    sizes = [image.RecordSize(image.MANIFEST, image.manifest_capacity())]
    content = {"data/0": bytes(16), image.PICKLE: pickled, image.BYTEORDER: b"little", image.VERSION: b"3\n"}
    sizes += [image.RecordSize(name, len(data), aligned=name == "data/0") for name, data in content.items()]
    layout = image.lay_out(sizes)
    said = manifest(bytes=layout.nbytes, tensors=drawn.plan.tensors)
    content[image.MANIFEST] = said.model_dump_json().encode().ljust(image.manifest_capacity())
    view = memoryview(bytearray(layout.nbytes))
    for position, part in image.structure(layout):
        view[position : position + len(part)] = part
    for record in layout.records:
        view[record.offset : record.end] = content[record.name.partition("/")[2]]
    with LocalDirectory.open(str(directory)) as opened:
        made = Snapshot(said, layout, view)
        commit(made, opened, mode=0o644, host="host", token="0", options=BUFFERED, watcher=Watcher())
    return directory / made.final_name


def test_the_writer_of_pickles_makes_files_that_load(tmp_path: Path) -> None:
    assert load(write_pickle(pickle.dumps({"a": 1}, protocol=2), tmp_path)) == {"a": 1}


def call(module: str, name: str, *arguments: Any) -> bytes:
    """Return a pickle that calls ``module.name``."""
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + pickle.dumps(arguments, 2)[2:-1] + b"R."


HOSTILE = {
    "os.system": call("os", "system", "touch {flag}"),
    "posix.system": call("posix", "system", "touch {flag}"),
    "subprocess": call("subprocess", "check_output", ["touch", "{flag}"]),
    "eval": call("builtins", "eval", "open('{flag}', 'w')"),
    "old eval": call("__builtin__", "eval", "open('{flag}', 'w')"),
    "open": call("builtins", "open", "{flag}", "w"),
    "getattr": call("builtins", "getattr", "a", "upper"),
    "import": call("builtins", "__import__", "os"),
    "dotted": call("torch", "nn.Parameter.__init__", 1),
    "attribute of a class": call("builtins", "dict.fromkeys", "a"),
    "module as a name": call("torch", "os.system", "touch {flag}"),
    "numpy.load": call("numpy", "load", "{flag}"),
    "numpy.fromfile": call("numpy", "fromfile", "{flag}"),
    "numpy.save": call("numpy", "save", "{flag}", 1),
    "numpy.memmap": call("numpy", "memmap", "{flag}", "uint8", "w+", 0, (1,)),
    "numpy through a submodule": call("numpy.lib.npyio", "load", "{flag}"),
    "numpy core function": call("numpy.core.multiarray", "fromfile", "{flag}"),
    "torch.load": call("torch", "load", "{flag}"),
    "torch.serialization": call("torch.serialization", "load", "{flag}"),
    "rebuild through from_type": call("torch._utils", "_rebuild_device_tensor_from_numpy", 1),
    "functools.partial": call("functools", "partial", print),
    "operator": call("operator", "attrgetter", "a"),
    "ours": call("trainer_hooks.values", "Allowed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickle_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    pickled = HOSTILE[name]
    if b"{flag}" in pickled:  # a short name of the same length, relative to where the test runs
        pickled = pickled.replace(b"{flag}", b"./flag")
    path = write_pickle(pickled, tmp_path)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(UntrustedClass, match="not allowed"):
            load(path)
    finally:
        os.chdir(before)
    assert not flag.exists()


def test_extension_registry_and_old_instances_are_refused(tmp_path: Path) -> None:
    for number, pickled in enumerate([b"\x80\x02\x82\x01.", b"(ios\nsystem\nS'true'\n.", b"\x80\x02(cos\nsystem\no."]):
        with pytest.raises((DamagedCheckpoint, UntrustedClass)):
            load(write_pickle(pickled, tmp_path / str(number)))


@pytest.mark.parametrize(
    "pid",
    [
        "a string",
        ("storage", torch.FloatStorage, "0", "cpu", 1 << 60),
        ("storage", torch.FloatStorage, "0", "cpu", -1),
        ("storage", torch.FloatStorage, "0", "cpu", 3),
        ("storage", torch.FloatStorage, "9", "cpu", 4),
        ("storage", dict, "0", "cpu", 4),
        ("storage", torch.FloatStorage, "../data/0", "cpu", 4),
        ("storage", torch.FloatStorage, [], "cpu", 4),
        ("storage", torch.FloatStorage, "0", "cpu", "4"),
    ],
    ids=str,
)
def test_references_to_wrong_storages_are_refused(pid: Any, tmp_path: Path) -> None:
    with pytest.raises((DamagedCheckpoint, UntrustedClass)):
        load(write_pickle(pickle.dumps(pid, 2)[:-1] + b"Q.", tmp_path))


def test_sparse_indices_outside_the_tensor_are_refused(tmp_path: Path) -> None:
    wrong = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.tensor([1.0]), (2,), check_invariants=False)
    path = save({"w": wrong}, tmp_path)
    with pytest.raises(DamagedCheckpoint, match="size is inconsistent"):
        load(path)
    assert torch._utils._sparse_tensors_to_validate == []


def test_mutilated_pickles_are_damage_and_nothing_else(tmp_path: Path) -> None:
    """Whatever stands in the pickle, its CRC being right: a load gives a state or says that the file is damaged."""
    source = random.Random(7)
    state = {"a": torch.arange(4.0), "v": [uuid.UUID(int=1), np.arange(2), decimal.Decimal(1), collections.deque()]}
    good = plan(state, Allowed()).pickled
    for number in range(150):
        pickled = bytearray(good)
        for _ in range(source.randint(1, 3)):
            pickled[source.randrange(len(pickled))] = source.randrange(256)
        path = write_pickle(bytes(pickled), tmp_path / str(number))
        with contextlib.suppress(DamagedCheckpoint, UntrustedClass):
            load(path)
