"""Tensors after a save and a load, beside what torch.save and torch.load make of them: dtypes, views, ties, layouts."""

from __future__ import annotations

import collections
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import assert_same, bits, load, manifest_of, save, saved_by_torch

from ckpt_service import image
from ckpt_service.errors import StateRefused
from trainer_hooks.capture import blueprint, capture, stage
from trainer_hooks.layout import plan
from trainer_hooks.slots import Slot
from trainer_hooks.values import Allowed

pytestmark = [  # what torch says of its own code, whoever calls it
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
]

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)
NARROW = [dtype for dtype in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]
WHOLE = [dtype for dtype in DTYPES if dtype not in NARROW]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits; bool gets only the two that it knows."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    source = random.Random(str(dtype))
    content = bytearray(source.randbytes(nbytes) if dtype != torch.bool else bytes(source.choices((0, 1), k=nbytes)))
    return (
        torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
        if nbytes
        else torch.empty(shape, dtype=dtype)
    )


def check(state: Any, directory: Path) -> None:
    """Save a state and compare all three ways of loading it with what torch makes of it."""
    path = save(state, directory)
    expected = torch.load(saved_by_torch(state), weights_only=True)
    assert_same(load(path), expected)
    assert_same(torch.load(path, weights_only=True), expected)
    assert_same(torch.load(path, weights_only=True, mmap=True), expected)


def test_the_lists_of_dtypes_are_plausible() -> None:
    assert {torch.float8_e4m3fn, torch.bfloat16, torch.uint64, torch.complex32, torch.bool} <= set(WHOLE)
    assert not {torch.int8, torch.uint16, torch.int64} & set(NARROW)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 1, 2, 2)]
    state = {str(shape): filled(dtype, *shape) for shape in shapes}
    state["transposed"] = filled(dtype, 4, 6).t()
    state["every second"] = filled(dtype, 8)[::2]
    state["expanded"] = filled(dtype, 1).expand(3, 4)
    check(state, tmp_path)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_dtypes_narrower_than_a_byte_are_refused_by_name(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=torch.uint8).view(dtype)
    with pytest.raises(StateRefused, match=rf"state\['w'\]: {dtype}"):
        plan({"w": tensor}, Allowed())


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.float32, [0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000]),
        (torch.float64, [0x7FF8000000000001, 0xFFF0000000000000, 1 << 63, 1]),
        (torch.bfloat16, [0x7FC1, 0xFFC0, 0x8000, 1, 0x7F81]),
        (torch.float16, [0x7E01, 0xFE00, 0x8000, 1, 0x7C01]),
        (torch.complex64, [0x7FC00001_80000000, 0xFFC00000_00000001]),
        *((dtype, list(range(256))) for dtype in WHOLE if dtype.itemsize == 1 and dtype.is_floating_point),
    ],
    ids=str,
)
def test_bits_of_odd_numbers_stay(dtype: torch.dtype, patterns: list[int], tmp_path: Path) -> None:
    content = bytearray(b"".join(pattern.to_bytes(dtype.itemsize, "little") for pattern in patterns))
    tensor = torch.frombuffer(content, dtype=dtype)
    path = save({"w": tensor}, tmp_path)
    assert bytes(bits(load(path)["w"])) == bytes(content)
    assert bytes(bits(torch.load(path)["w"])) == bytes(content)


def test_all_narrow_floats_are_tried() -> None:
    assert len([dtype for dtype in WHOLE if dtype.itemsize == 1 and dtype.is_floating_point]) >= 5


def structures() -> dict[str, Callable[[], Any]]:
    def tied() -> Any:
        weight = torch.arange(12.0).reshape(3, 4)
        return {"emb": weight, "head": weight, "transposed": weight.t(), "row": weight[1], "flat": weight.view(-1)}

    def batch_norm() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()

    def optimizer() -> Any:
        model = torch.nn.Linear(3, 2)
        adam = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), amsgrad=True)
        model(torch.ones(1, 3)).sum().backward()
        adam.step()
        return adam.state_dict()

    def many_tied() -> Any:
        tensors = [torch.full((3,), float(number)) for number in range(15)]
        return {"once": tensors, "again": tensors, "other shape": [tensor.view(3, 1) for tensor in tensors]}

    def with_attributes(*, requires_grad: bool) -> Any:
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=requires_grad)
        vars(parameter).update(tensor_model_parallel=True, partition_dim=0, scale=torch.ones(1))
        return {"w": parameter}

    def made_for_inference() -> Any:
        with torch.inference_mode():
            return torch.ones(3)

    return {
        "nothing": dict,
        "tied": tied,
        "many tied": many_tied,
        "batch norm": batch_norm,
        "optimizer": optimizer,
        "optimizer before its first step": lambda: torch.optim.SGD([torch.zeros(2)], lr=0.1).state_dict(),
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "requires grad": lambda: torch.ones(2, requires_grad=True),
        "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "parameter with attributes": lambda: with_attributes(requires_grad=True),
        "frozen parameter with attributes": lambda: with_attributes(requires_grad=False),
        "sparse parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
        "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
        "made for inference": made_for_inference,
        "result of a function of a parameter": lambda: torch.ones(2, requires_grad=True) * 2,
        "channels last in 3d": lambda: torch.rand(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "empty": lambda: [torch.empty(2, 0, 3, 1, 0), torch.empty_strided((0, 3), (7, 2)), torch.empty(0).t()],
        "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        "coo": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0]), (2, 3)),
        "quantised": lambda: torch.quantize_per_tensor(torch.arange(6.0), 0.1, 3, torch.qint8),
        "quantised to 32 bits": lambda: torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.qint32),
        "quantised by channel": lambda: torch.quantize_per_channel(
            torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "quantised to half bytes": lambda: torch.quantize_per_channel(
            torch.rand(4, 3), torch.full((4,), 0.1), torch.zeros(4), 0, torch.quint4x2
        ),
        "names of torch": lambda: [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
        "plain": lambda: {
            "": None,
            ".": True,
            "/%": [float("inf"), -0.0, 1 << 40, "é", b"\xff"],
            "k" * 300: {},
            3: [],
            (3, (1, 2)): (0.9, 0.999),
            "nested": {"tuple": ((),), "ordered": collections.OrderedDict(b=1, a=2)},
        },
    }


STRUCTURES = structures()


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str, tmp_path: Path) -> None:
    check(STRUCTURES[name](), tmp_path)


@pytest.mark.parametrize("name", STRUCTURES)
def test_pickle_is_that_of_torch_where_nothing_is_cut(name: str) -> None:
    state = STRUCTURES[name]()
    with zipfile.ZipFile(saved_by_torch(state)) as archive:
        assert plan(state, Allowed()).pickled == archive.read("archive/data.pkl")


def views() -> dict[str, Callable[[], Any]]:
    base = torch.arange(1000.0)
    complex_base = torch.complex(torch.arange(9.0), torch.ones(9))
    return {
        "slice": lambda: {"w": base[10:20]},
        "last": lambda: {"w": base[-1]},
        "overlapping": lambda: {"a": base[:8], "b": base[4:12]},
        "apart": lambda: {"a": base[2:4], "b": base[900:]},
        "empty and not": lambda: {"a": base[5:5], "b": base[7:9]},
        "only empty": lambda: {"a": base[5:5]},
        "strided": lambda: {"w": base.view(10, 100)[2:4, 10:90:7]},
        "expanded": lambda: {"w": base[3:4].expand(5, 5)},
        "negative": lambda: {"w": complex_base.conj().imag},
        "coalesced": lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 3)
        ).coalesce(),
        "csr": lambda: {"w": torch.eye(3).to_sparse_csr()},
        "bsr": lambda: {"w": torch.eye(4).to_sparse_bsr((2, 2))},
        "parameter of a flat buffer": lambda: {"w": torch.nn.Parameter(base[100:200].view(10, 10))},
        "part of a quantised one": lambda: torch.quantize_per_tensor(base[:8], 0.1, 3, torch.qint8)[2:5],
        "fp8": lambda: {"w": base.to(torch.float8_e5m2)[7:19], "x": base.to(torch.uint16)[3:6]},
    }


VIEWS = views()


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_larger_storages(name: str, tmp_path: Path) -> None:
    check(VIEWS[name](), tmp_path)


def test_a_slice_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    base = torch.arange(4 << 20, dtype=torch.float32).reshape(16384, 256)
    weight = torch.ones(64, 64)
    pair = torch.arange(16.0)
    state = {
        "emb": weight,
        "head": weight,
        "headT": weight.t(),
        "row": base[3],
        "rows": base[100:110],
        "pair_a": pair[:8],
        "pair_b": pair[4:12],
    }
    path = save(state, tmp_path)
    needed = weight.nbytes + 11 * base[3].nbytes + 12 * 4
    assert path.stat().st_size <= needed * 1.05 + (64 << 10)
    loaded = load(path)
    assert {key: bits(value) for key, value in loaded.items()} == {key: bits(value) for key, value in state.items()}
    assert loaded["row"].untyped_storage().nbytes() < 65536
    loaded["emb"][0, 1] = 7
    assert loaded["head"][0, 1] == loaded["headT"][1, 0] == 7


def test_views_far_apart_are_stored_apart_and_all_others_stay_tied(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    state = {"a": base[10:20], "b": base[15:30], "near": base[900:910], "far": base[90_000:90_010], "none": base[5:5]}
    assert [span.nbytes for span in plan(state, Allowed()).spans] == [900 * 4, 10 * 4]
    found = load(save(state, tmp_path))
    assert {key: bits(value) for key, value in found.items()} == {key: bits(value) for key, value in state.items()}
    places = {key: value.untyped_storage().data_ptr() for key, value in found.items()}
    assert places["a"] == places["b"] == places["near"] != places["far"]


def test_a_thousand_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(2_000_000.0)
    state = {str(number): base[number * 2000 : number * 2000 + 3] for number in reversed(range(1000))}
    path = save(state, tmp_path)
    assert path.stat().st_size < 1000 * 4500 + 200_000
    assert [value[0].item() for value in load(path).values()] == [number * 2000 for number in reversed(range(1000))]


class Restless:
    """Its tensor is another part of the same storage whenever it is asked for its state."""

    def __init__(self) -> None:
        self.base = torch.arange(100_000.0)
        self.asked = 0

    def __getstate__(self) -> Any:
        self.asked += 1
        return {"w": self.base[self.asked * 5000 :][:3]}


def test_a_view_that_moves_between_the_passes_is_refused() -> None:
    with pytest.raises(StateRefused, match="changes while it is being saved"):
        plan({"a": Restless()}, Allowed([Restless]))


def test_one_storage_of_two_dtypes_is_refused() -> None:
    tensor = torch.ones(4)
    with pytest.raises(StateRefused, match=r"state\['b'\]\['c'\]: a tensor of torch.int32 shares memory"):
        plan({"a": tensor, "b": {"c": tensor.view(torch.int32)}}, Allowed())


def test_tied_tensors_are_stored_once() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 10))
    state = {"emb": weight, "head": weight, "data": weight.data, "t": weight.detach().t(), "row": weight[3].detach()}
    assert [span.nbytes for span in plan(state, Allowed()).spans] == [4000]


def test_lazy_parameters_are_refused_with_the_way_out() -> None:
    for name, lazy in (("w", torch.nn.LazyLinear(3).weight), ("b", torch.nn.LazyBatchNorm1d().running_mean)):
        with pytest.raises(StateRefused, match=rf"state\['{name}'\]: it is not initialised yet; run one forward"):
            plan({name: lazy}, Allowed())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(StateRefused, match=r"state\['w'\]: tensors of class (Nested)?Tensor .* are not supported"):
        plan({"w": nested}, Allowed())


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(StateRefused, match=r"state\['a'\]\[0\]: .*meta"):
        plan({"a": [torch.empty(3, device="meta")]}, Allowed())


def test_subclasses_of_tensors_are_refused() -> None:
    class Wrapped(torch.Tensor):
        pass

    with pytest.raises(StateRefused, match=r"state\['a'\]: .*Wrapped"):
        plan({"a": torch.ones(2).as_subclass(Wrapped)}, Allowed())


def test_tensors_are_writable_and_independent_of_each_other_and_the_file(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    path = save({"a": weight, "tied": weight, "b": torch.zeros(4)}, tmp_path)
    before = path.read_bytes()
    first, second = load(path), load(path)
    first["a"].fill_(1)
    assert first["tied"].tolist() == [1, 1, 1, 1]
    assert first["b"].tolist() == second["a"].tolist() == [0, 0, 0, 0]
    assert path.read_bytes() == before


def test_sparse_tensors_are_not_kept_alive_by_a_load(tmp_path: Path) -> None:
    load(save({"w": torch.eye(3).to_sparse()}, tmp_path))
    assert torch._utils._sparse_tensors_to_validate == []


def test_the_image_shares_nothing_with_the_live_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.rand(8, 4)).sum().backward()
        optimizer.step()

    train()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "hist": [1, 2],
        "queue": collections.deque([1, 2]),
        "array": np.arange(3),
        "rng": torch.get_rng_state(),
    }
    drawn = blueprint(plan(state, Allowed()))
    slot = Slot.create(drawn.layout.nbytes)
    made = capture(drawn, manifest_of(drawn), slot)
    before = bytes(made.view)
    assert not any(tensor.is_shared() for tensor in model.state_dict().values())
    train()
    for tensor in model.state_dict().values():
        tensor.zero_()
    state["hist"].append(3)
    state["queue"].popleft()
    state["array"] += 1
    state["rng"].zero_()
    state["optimizer"]["param_groups"][0]["lr"] = 7
    assert bytes(made.view) == before
    made.view.release()
    slot.close()


def image_in(slot: Slot, state: dict[str, torch.Tensor]) -> bytes:
    drawn = blueprint(plan(state, Allowed()))
    made = capture(drawn, manifest_of(drawn), slot)
    record = made.layout.find(image.SERIALIZATION_ID)
    assert record is not None
    made.view[record.offset : record.end] = bytes(record.nbytes)  # random in each
    content = bytes(made.view)
    made.view.release()
    return content


def test_a_slot_that_was_used_before_does_not_show_through() -> None:
    one = {"a": torch.ones(5), "b": torch.arange(3000)}
    other = {"a": torch.full((9000,), -1.0), "b": torch.full((7,), -1), "c": torch.full((500,), -1)}
    fresh = {}
    for name, state in (("one", one), ("other", other)):
        slot = Slot.create(1 << 20)
        fresh[name] = image_in(slot, state)
        slot.close()
    slot = Slot.create(1 << 20)
    slot.mapping[:] = b"\xff" * slot.nbytes
    for name, state in (("one", one), ("one", one), ("other", other), ("one", one)):
        assert image_in(slot, state) == fresh[name]
    slot.close()


def test_a_layout_whose_copy_failed_is_written_whole_the_next_time() -> None:
    one = {"a": torch.ones(5), "b": torch.arange(3000)}
    slot = Slot.create(1 << 20)
    before = image_in(slot, one)
    large = blueprint(plan({"a": torch.full((9000,), -1.0)}, Allowed()))
    stage(large, slot)  # and then the save fails: nothing stands around its storages
    assert image_in(slot, one) == before
    slot.close()


def test_a_state_of_the_same_structure_is_laid_out_once() -> None:
    drawn = [
        blueprint(plan({"step": step, "a": torch.full((5,), float(step))}, Allowed())) for step in (1, 300, 70_000)
    ]
    assert drawn[0].layout is drawn[1].layout is drawn[2].layout
    slot = Slot.create(1 << 20)
    written = []
    for each in drawn:
        capture(each, manifest_of(each), slot).view.release()
        written.append((slot.structure, slot.places and id(slot.places[1])))
    assert written == [written[0]] * 3, "headers, directory and views are made once"
    slot.close()
