"""Plain values in a state: what comes back, what is refused by its key path, and what trust allows."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import operator
import os
import pathlib
import pickle
import threading
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import load, save

from ckpt_service.errors import StateRefused, UntrustedClass
from trainer_hooks.layout import plan
from trainer_hooks.values import Allowed

VALUES: list[Any] = [
    None,
    True,
    2**2100 + 1,
    -(2**9000),
    1j,
    -0.0,
    "\ud800 lone surrogate",
    b"\x00\xff",
    bytearray(b"bytes"),
    range(1, 9, 2),
    slice(None, 3),
    {1, 2},
    frozenset({"a"}),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    collections.Counter("aab"),
    collections.defaultdict(list, {1: [2]}),
    collections.deque([1, 2], 3),
    collections.OrderedDict(b=1, a=2),
    pathlib.Path("/x/y"),
    pathlib.PurePosixPath("a"),
    datetime.date(2020, 2, 29),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(-1, 2, 3),
    datetime.datetime(2020, 1, 1, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=9))),
    argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=[1])),
    types.SimpleNamespace(b=2),
    int,
    collections.OrderedDict,
    np.float16(1.5),
    np.float32("nan"),
    np.float64(0.1),
    np.longdouble("1.1"),
    np.complex64(1j),
    np.int64(-3),
    np.uint8(255),
    np.bool_(True),
    np.str_("é"),
    np.bytes_(b"x"),
    np.void(b"ab"),
    np.datetime64("2020-01-01"),
    np.timedelta64(3, "s"),
    np.array(3),
    np.zeros((0, 2)),
    np.arange(6).reshape(2, 3).T,
    np.array(["a", "bb"]),
    np.array([1, "a", None], dtype=object),
    np.array(["2020"], dtype="M8[D]"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    np.dtype("float32"),
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    np.dtype("M8[ns]"),
    np.float64,
    np.random.RandomState(3).get_state(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:12]!a}")
def test_values_come_back(value: Any, tmp_path: Path) -> None:
    found = load(save({"v": value, "nested": [(value,)]}, tmp_path))
    for copy in (found["v"], found["nested"][0][0]):
        assert type(copy) is type(value)
        assert repr(copy) == repr(value)
        assert pickle.dumps(copy) == pickle.dumps(pickle.loads(pickle.dumps(value)))


def test_arrays_of_another_byte_order_keep_their_values(tmp_path: Path) -> None:
    value = np.arange(3, dtype=">i4")
    assert load(save({"v": value}, tmp_path))["v"].tolist() == [0, 1, 2]


def test_odd_keys_come_back(tmp_path: Path) -> None:
    keys = [
        None,
        True,
        1.5,
        -0.0,
        b"x",
        frozenset({1}),
        (1, (2, "a")),
        torch.float32,
        np.int64(3),
        2**80,
        "",
        "é\n.[0]",
    ]
    state = {key: torch.full((2,), float(index)) for index, key in enumerate(keys)}
    found = load(save({"v": state}, tmp_path))["v"]
    assert [(type(key), repr(key)) for key in found] == [(type(key), repr(key)) for key in keys]
    assert [value[0].item() for value in found.values()] == list(range(len(keys)))


def test_cycles_and_shared_values_stay(tmp_path: Path) -> None:
    shared: list[Any] = []
    shared.append(shared)
    found = load(save({"a": shared, "b": shared}, tmp_path))
    assert found["a"] is found["b"] is found["a"][0]


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


class Plain:
    def method(self) -> None: ...


class RefusesToReturn:
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("never again")

    def __init__(self) -> None:
        self.x = 1


class MakesTensors:
    """Its tensors are views, made anew whenever it is asked for its state."""

    def __getstate__(self) -> Any:
        return {"w": torch.arange(100.0)[10:20]}


ODD: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: 0, "lambda"),
    "class": (Plain, "Plain"),
    "object": (Plain(), "Plain"),
    "lock": (threading.Lock(), "lock"),
    "bound method": (Plain().method, "method"),
    "builtin": (os.system, "system"),
    "raising": (Refuses(), "not today"),
    "generator": (iter(n for n in [1]), "generator"),
    "module": (os, "module"),
    "numpy function": (np.load, "load"),
    "numpy generator": (np.random.RandomState(0), "RandomState"),
    "masked array": (np.ma.masked_array([1], [True]), "MaskedArray"),
    "ellipsis": (..., "ellipsis"),
    "enum": (uuid.SafeUUID.safe, "SafeUUID"),
    "partial method": (operator.methodcaller("x"), "methodcaller"),
    "torch generator": (torch.Generator(), "Generator"),
    "module of torch": (torch.nn.Linear(1, 1), "Linear"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_are_refused_by_their_key(name: str) -> None:
    thing, said = ODD[name]
    places: list[tuple[Any, str]] = [
        ({"a": [1, {"b": thing}]}, "state['a'][1]['b']: "),
        ({"a": argparse.Namespace(inner=thing)}, "state['a'].inner: "),
        ({"a": collections.deque([thing])}, "state['a'][0]: "),
        (thing, "state: "),
    ]
    if thing.__hash__ is not None:
        places.append(({"a": {thing: 1}}, "state['a']: key "))
    for state, path in places:
        with pytest.raises(StateRefused) as caught:
            plan(state, Allowed([Refuses]))
        assert str(caught.value).startswith(path), str(caught.value)
        assert said in str(caught.value)


def test_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(StateRefused, match=r"^state\['f'\]: .*TextIOWrapper"):
        plan({"f": file}, Allowed())


def test_what_is_hidden_inside_a_value_is_refused_by_the_key_of_the_value() -> None:
    def factory() -> int:
        return 0

    with pytest.raises(StateRefused, match=r"^state\['a'\]\['b'\]: .*factory"):
        plan({"ok": torch.ones(2), "a": {"b": collections.defaultdict(factory), "c": 1}}, Allowed())


def test_a_state_nested_too_deeply_is_refused() -> None:
    state: list[Any] = []
    for _ in range(100_000):
        state = [state]
    with pytest.raises(StateRefused, match="nested too deeply"):
        plan(state, Allowed())


def test_trusted_class_is_saved_and_loaded(tmp_path: Path) -> None:
    thing = Plain()
    thing.__dict__["weight"] = torch.arange(3.0)
    with pytest.raises(StateRefused, match=r"trust=\[Plain\]"):
        plan({"a": thing}, Allowed())
    path = save({"a": thing}, tmp_path, trust=[Plain])
    found = load(path, trust=[Plain])["a"]
    assert type(found) is Plain
    assert found.__dict__["weight"].tolist() == [0, 1, 2]
    with pytest.raises(UntrustedClass, match=r"names .*Plain, which is not allowed; .* trust=\[Plain\]"):
        load(path)


def test_class_that_does_not_come_back_is_refused_at_save() -> None:
    with pytest.raises(StateRefused, match="would not load again: RuntimeError: never again"):
        plan({"a": RefusesToReturn()}, Allowed([RefusesToReturn]))


def test_class_that_makes_new_tensors_each_time(tmp_path: Path) -> None:
    base = torch.arange(50.0)
    path = save({"a": MakesTensors(), "row": base[3:5]}, tmp_path, trust=[MakesTensors])
    found = load(path, trust=[MakesTensors])
    assert vars(found["a"])["w"].tolist() == list(range(10, 20))
    assert found["row"].tolist() == [3, 4]


def test_only_classes_with_a_name_can_be_trusted() -> None:
    class Local:
        pass

    for wrong in (Local, "a string", len):
        with pytest.raises(ValueError, match="trust="):
            Allowed([wrong])  # type: ignore[list-item]
