"""How split tensors are described, without any ranks: what makes two of them the same part, and where they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.states import manifest_in, save_plan

from ckpt_service import image
from ckpt_service.errors import DamagedCheckpoint
from ckpt_service.records import MeshRecord, ShardingRecord, TensorSharding
from trainer_hooks.layout import plan
from trainer_hooks.load import load_rank
from trainer_hooks.sharding import (
    Sharding,
    below,
    is_dtensor,
    keys_to,
    record,
    refuse_object,
    refuse_tensor,
    rejoined,
    rejoined_beside,
    shardings_in,
)
from trainer_hooks.values import Allowed

MESH = MeshRecord(dim_names=["dp", "tp"], shape=[2, 4], coordinate=[1, 2])


def sharding(*placements: int | None, mesh: MeshRecord = MESH) -> Sharding:
    return Sharding(mesh, placements, (8, 6))


def test_only_dimensions_along_which_something_is_split_count() -> None:
    one = MeshRecord(dim_names=None, shape=[1, 4], coordinate=[0, 2])
    assert sharding(None, 1).cuts == ((1, 4, 2),)
    assert sharding(0, 1).cuts == ((0, 2, 1), (1, 4, 2))
    assert sharding(0, 1, mesh=one).cuts == sharding(None, 1).cuts
    assert sharding(None, None).cuts == sharding(0, None, mesh=one).cuts == ()


def test_a_part_is_said_in_words() -> None:
    assert str(sharding(None, None)) == "a whole (8, 6)"
    assert str(sharding(0, 1)) == "part 2 of 2 of dimension 0, part 3 of 4 of dimension 1 of (8, 6)"


def test_the_record_says_what_it_was_made_of_and_names_each_mesh_once() -> None:
    other = MeshRecord(dim_names=None, shape=[2], coordinate=[0])
    found = [
        (("model", "w"), sharding(None, 0)),
        (("optimizer", "state", 0, "exp_avg"), sharding(None, 0)),
        (("model", "b"), Sharding(other, (0,), (3,))),
    ]
    made = ShardingRecord.model_validate_json(record(found).model_dump_json())
    assert made.meshes == [MESH, other]
    assert shardings_in(made) == dict(found)
    assert below(dict(found), "model") == {("w",): sharding(None, 0), ("b",): Sharding(other, (0,), (3,))}


@pytest.mark.parametrize(
    ("meshes", "changes", "problem"),
    [
        ([MESH], {"mesh": 1}, "there is no mesh 1"),
        ([MESH], {"placements": [0]}, "one entry for each dimension"),
        ([MESH], {"placements": [2, None]}, "that the tensor does not have"),
        ([MESH], {"placements": [-1, None]}, "greater than or equal to 0"),
        ([MESH], {"shape": [-1, 2]}, "greater than or equal to 0"),
        ([{"dim_names": ["a"], "shape": [2, 2], "coordinate": [0, 0]}], {}, "one entry for each dimension"),
        ([{"dim_names": None, "shape": [2, 2], "coordinate": [0, 2]}], {}, "outside"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_records_that_contradict_themselves_are_refused(meshes: Any, changes: dict[str, Any], problem: str) -> None:
    plain = {"path": ["w"], "mesh": 0, "placements": [0, None], "shape": [8, 6]}
    good = ShardingRecord(meshes=[MESH], tensors=[TensorSharding.model_validate(plain)])
    assert good.tensors[0].shape == [8, 6]
    with pytest.raises(ValidationError, match=problem):
        ShardingRecord.model_validate({"meshes": meshes, "tensors": [{**plain, **changes}]})


def test_values_are_found_wherever_they_lie() -> None:
    w, v, lost = torch.ones(1), torch.ones(1), torch.ones(1)
    cycle: list[Any] = [w]
    cycle.append(cycle)
    shared = {"v": v}
    state = {"a": cycle, 3: (v, [shared, shared]), (1, 2): lost, True: lost}
    wanted: dict[int, object] = {id(w): None, id(v): None, id(lost): None}
    found = [(keys, value) for keys, value in keys_to(state, wanted)]
    assert [keys for keys, _ in found] == [("a", 0), (3, 0), (3, 1, 0, "v"), (3, 1, 1, "v")]
    assert [id(value) for _, value in found] == [id(value) for value in (w, v, v, v)]
    assert [keys for keys, _ in keys_to(w, wanted)] == [()]


def test_plain_tensors_are_left_alone() -> None:
    saved, live = torch.ones(2), torch.zeros(2)
    assert not is_dtensor(live)
    assert rejoined(saved, None, live) is saved
    assert rejoined(saved, sharding(None, None), live) is saved
    assert rejoined_beside(saved, sharding(None, None), None) is saved
    assert refuse_tensor(saved) is None
    assert refuse_object(torch.nn.Linear(1, 1)) is None
    with pytest.raises(ValueError, match=r"was saved as part 3 of 4 of dimension 0 of \(8, 6\), and is no DTensor now"):
        rejoined(saved, sharding(None, 0), live)


def test_a_class_of_the_users_own_with_the_name_of_a_split_one_is_not_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    assert refuse_object(ZeroRedundancyOptimizer([torch.ones(1, requires_grad=True)], lr=0.1)) is None


# --- in a file --------------------------------------------------------------------------------------------------------


def saved_with(content: bytes, directory: Path) -> Path:
    return save_plan(replace(plan({"w": torch.ones(2, 6)}, Allowed()), sharding=content), directory)


def test_the_record_of_a_file_is_read_with_it(tmp_path: Path) -> None:
    path = saved_with(record([(("w",), sharding(None, 0))]).model_dump_json().encode(), tmp_path)
    found = load_rank(str(path), manifest_in(path), Allowed(), dp_rank=0)
    assert found.shardings == {("w",): sharding(None, 0)}
    assert torch.load(path, weights_only=True)["w"].shape == (2, 6)


def test_a_record_that_is_damaged_or_makes_no_sense_is_damage(tmp_path: Path) -> None:
    for number, content in enumerate((b"{}", b"no JSON", b'{"meshes": [], "tensors": [{"path": ["w"], "mesh": 0}]}')):
        path = saved_with(content, tmp_path / str(number))
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            load_rank(str(path), manifest_in(path), Allowed(), dp_rank=0)
    path = saved_with(record([(("w",), sharding(None, 0))]).model_dump_json().encode(), tmp_path / "flipped")
    content = bytearray(path.read_bytes())
    found = image.parse(memoryview(bytes(content))).find(image.SHARDING)
    assert found is not None
    content[found.offset + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"sharding\.json: CRC"):
        load_rank(str(path), manifest_in(path), Allowed(), dp_rank=0)
