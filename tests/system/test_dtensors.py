"""Tensors split over real ranks: what the file holds, what comes back, and what is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RunDirectory

from ckpt_service.records import ShardingRecord

# A block split by columns and rows, with one that all ranks have whole; AdamW and a scheduler.
TRAINING = """
import hashlib
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.use_deterministic_algorithms(True)
nn = torch.nn
mesh = init_device_mesh("cpu", (place.dp, place.tp), mesh_dim_names=("dp", "tp"))
class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        block = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.block = parallelize_module(block, mesh["tp"], plan)
        self.head = nn.Linear(8, 4)
        for tensor in self.head.parameters():
            dist.broadcast(tensor.data, 0)
        self.model = nn.ModuleDict({"block": self.block, "head": self.head})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=20)
    def parts(self):
        return dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(4, 8)
            dist.broadcast(x, 0)
            hidden = self.block["down"](torch.relu(self.block["up"](x)))
            self.head(hidden).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
    def digest(self):
        found = hashlib.sha256()
        def add(value):
            if isinstance(value, DTensor):
                found.update(repr((value.placements, tuple(value.shape), value.stride())).encode())
                value = value.to_local()
            if isinstance(value, torch.Tensor):
                found.update(repr((value.dtype, tuple(value.shape), value.detach().flatten().tolist())).encode())
            elif isinstance(value, dict):
                for key in value:
                    found.update(repr(key).encode())
                    add(value[key])
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                found.update(repr(value).encode())
        add({name: thing.state_dict() for name, thing in self.parts().items()})
        add(torch.get_rng_state())
        return found.hexdigest()
"""


def sharding_in(path: Path) -> dict[tuple[str | int, ...], tuple[Any, ...]]:
    """Return the record of a file: (placements, shape, coordinate) of each split tensor, by its keys."""
    with zipfile.ZipFile(path) as archive:
        found = ShardingRecord.model_validate_json(archive.read("archive/.ckpt_service/sharding.json"))
    return {
        tuple(tensor.path): (tensor.placements, tensor.shape, found.meshes[tensor.mesh].coordinate)
        for tensor in found.tensors
    }


@pytest.mark.parametrize("dp", [1, 2])
def test_training_with_split_tensors_goes_on_bit_for_bit_after_kill_9(run: RunDirectory, dp: int) -> None:
    killed = run.ranks(
        TRAINING
        + """
training = Training(1)
checkpointer = Checkpointer(root, topology=place)
checkpointer.track(**training.parts())
training.train(3)
say("path", checkpointer.save(3).wait_committed(60))
training.train(3)
say("digest", training.digest())
hear("never")
""",
        tp=2,
        dp=dp,
    )
    paths = [Path(said) for said in killed.say("path")[:2]]
    expected = killed.say("digest")
    killed.kill()
    resumed = run.ranks(
        TRAINING
        + """
training = Training(2)
with Checkpointer(root, topology=place) as checkpointer:
    checkpointer.track(**training.parts())
    say("from", checkpointer.resume().step)
    moment = training.optimizer.state[training.block["up"].weight]["exp_avg"]
    say("moment", type(moment).__name__, moment.placements, tuple(moment.shape), tuple(moment.to_local().shape))
    training.train(3)
    say("digest", training.digest())
""",
        tp=2,
        dp=dp,
    )
    assert resumed.say("from") == ["3"] * 2 * dp
    assert resumed.say("moment") == ["DTensor (Shard(dim=0),) (16, 8) (8, 8)"] * 2 * dp
    assert resumed.say("digest") == expected
    resumed.end()
    for rank, path in enumerate(paths):
        found = sharding_in(path)
        assert found["stage_state_dict", "block.up.weight"] == ([0], [16, 8], [rank])
        assert found["stage_state_dict", "block.down.weight"] == ([1], [8, 16], [rank])
        assert found["stage_state_dict", "block.down.bias"] == ([None], [8], [rank])
        assert found["optimizer_state_dict", "state", 0, "exp_avg"] == ([0], [16, 8], [rank])
        assert ("stage_state_dict", "head.weight") not in found


PIECES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
class Holder:
    def __init__(self, **tensors):
        self.tensors = tensors
    def state_dict(self):
        return {"inside": [self.tensors, (1, self.tensors["split"])]}
    def load_state_dict(self, state):
        self.tensors = state["inside"][0]
        assert state["inside"][1][0] == 1
def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
def split(tensor, *placements):
    return distribute_tensor(tensor, mesh, placements)
def same(found, expected):
    return (type(found) is type(expected) and found.placements == expected.placements
            and found.shape == expected.shape and torch.equal(found.to_local(), expected.to_local()))
"""


def test_uneven_and_empty_parts_come_back_and_are_plain_tensors_in_the_file(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
def parts(factor):
    return Holder(
        split=split(whole(5, 3) * factor, Shard(0)),
        few=split(whole(2, 3) * factor, Shard(0)),
        columns=split(whole(3, 6) * factor, Shard(1)),
        same=split(whole(4) * factor, Replicate()),
        plain=whole(2) * factor,
    )
first, second = parts(2), parts(0)
with Checkpointer(root, topology=place) as checkpointer:
    checkpointer.track(holder=first)
    say("path", checkpointer.save(1).wait_committed(60))
    checkpointer.track(holder=second)
    point = checkpointer.resume()
    say("same", *(same(second.tensors[name], first.tensors[name]) for name in ("split", "few", "columns", "same")))
    say("plain", torch.equal(second.tensors["plain"], whole(2) * 2))
    say("point", type(point.state["holder_state_dict"]["inside"][0]["split"]).__name__)
""",
        tp=4,
    )
    paths = [Path(said) for said in ranks.say("path")]
    assert ranks.say("same") == ["True True True True"] * 4
    assert ranks.say("plain") == ["True"] * 4
    assert ranks.say("point") == ["Tensor"] * 4
    ranks.end()
    shapes = []
    for path in paths:
        held, (_, again) = torch.load(path, weights_only=True)["holder_state_dict"]["inside"]
        shapes.append([tuple(held[name].shape) for name in ("split", "few", "columns", "same")])
        assert held["split"] is again or held["split"].data_ptr() == again.data_ptr()
        found = sharding_in(path)
        assert found["holder_state_dict", "inside", 0, "split"] == found["holder_state_dict", "inside", 1, 1]
        assert len(found) == 5
    assert [shape[0] for shape in shapes] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [shape[1] for shape in shapes] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert [shape[2] for shape in shapes] == [(3, 2), (3, 2), (3, 2), (3, 0)]
    assert [shape[3] for shape in shapes] == [(4,)] * 4


def test_a_single_process_reads_the_file_without_torch_distributed(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
with Checkpointer(root, topology=place, async_ckpt=False) as checkpointer:
    state = {"w": torch.nn.Parameter(split(whole(4, 2), Shard(0))), "frozen": split(whole(3), Replicate())}
    say("path", checkpointer.save(1, state=state).wait_committed(60))
""",
        tp=2,
    )
    second = ranks.say("path")[1]
    ranks.end()
    alone = run.interpreter(
        "-c",
        f"""
import sys
sys.modules["torch.distributed.tensor"] = None
import torch
found = torch.load({second!r}, weights_only=True)
print("found", type(found["w"]).__name__, found["w"].requires_grad, found["w"].tolist(), found["frozen"].tolist())
""",
    )
    assert alone.says("found") == "Parameter True [[4.0, 5.0], [6.0, 7.0]] [0.0, 1.0, 2.0]"
    alone.ends()


def test_what_is_split_otherwise_now_is_refused_and_nothing_is_touched(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
class Weight(torch.nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.w = torch.nn.Parameter(tensor)
with Checkpointer(root, topology=place, async_ckpt=False, keep_last=5) as checkpointer:
    checkpointer.track(model=Weight(split(whole(4, 4), Shard(0))))
    checkpointer.save(1)
    checkpointer.track(model=Weight(split(whole(4, 4), Replicate())))
    checkpointer.save(2)
    checkpointer.track(model=Weight(whole(2, 4)))
    checkpointer.save(3)
    def resume(step, tensor):
        model = Weight(tensor * 0)
        checkpointer.track(model=model)
        try:
            checkpointer.resume(step)
            say("took", float(model.w.detach().to_local().sum() if isinstance(tensor, DTensor) else model.w.sum()))
        except Exception as error:
            assert not model.w.detach().any()
            say("refused", type(error).__name__, error)
    resume(1, split(whole(4, 4), Shard(1)))
    resume(1, split(whole(4, 4), Replicate()))
    resume(1, split(whole(6, 4), Shard(0)))
    resume(1, whole(2, 4))
    resume(2, split(whole(4, 4), Shard(0)))
    resume(3, split(whole(4, 4), Shard(0)))
    resume(3, split(whole(2, 4), Replicate()))
    resume(2, whole(4, 4))
""",
        tp=2,
    )
    expected = [
        "part {part} of 2 of dimension 0 of (4, 4), and is part {part} of 2 of dimension 1 of (4, 4) now",
        "part {part} of 2 of dimension 0 of (4, 4), and is a whole (4, 4) now",
        "part {part} of 2 of dimension 0 of (4, 4), and is part {part} of 2 of dimension 0 of (6, 4) now",
        "part {part} of 2 of dimension 0 of (4, 4), and is no DTensor now",
        "a whole (4, 4), and is part {part} of 2 of dimension 0 of (4, 4) now",
        "a whole (2, 4), and is part {part} of 2 of dimension 0 of (4, 4) now",
    ]
    for sentence in expected:
        for rank, said in enumerate(ranks.say("refused")):
            detail = sentence.format(part=rank + 1)
            assert said == f"StateMismatch the checkpoint does not fit: stage_state_dict: w was saved as {detail}"
    assert ranks.say("took") == ["28.0"] * 2  # whole on both sides: a plain tensor then, a DTensor now
    assert ranks.say("took") == ["120.0"] * 2  # and the other way round
    ranks.end()


def test_replicas_come_and_go(run: RunDirectory) -> None:
    """Dimensions of the mesh along which all ranks have the same do not count."""
    body = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (place.dp, place.tp), mesh_dim_names=("dp", "tp"))
def training(factor):
    weight = distribute_tensor(torch.arange(8.0).reshape(4, 2) * factor, mesh, [Replicate(), Shard(0)])
    parameter = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    return torch.nn.ParameterList([parameter]), optimizer
"""
    saving = run.ranks(
        body
        + """
with Checkpointer(root, topology=place) as checkpointer:
    model, optimizer = training(1)
    model[0].square().sum().backward()
    optimizer.step()
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.save(1)
    say("has", model[0].detach().to_local().tolist(), optimizer.state[model[0]]["momentum_buffer"].to_local().tolist())
""",
        tp=2,
        dp=2,
    )
    has = saving.say("has")
    saving.end()
    resuming = run.ranks(
        body
        + """
with Checkpointer(root, topology=place) as checkpointer:
    model, optimizer = training(0)
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.resume()
    buffer = optimizer.state[model[0]]["momentum_buffer"]
    assert buffer.placements == model[0].placements == (Replicate(), Shard(0))
    say("has", model[0].detach().to_local().tolist(), buffer.to_local().tolist())
""",
        tp=2,
    )
    assert resuming.say("has") == has[:2]
    resuming.end()


def test_values_of_an_optimizer_become_dtensors_on_the_mesh_of_their_parameter(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
class Keeping(torch.optim.SGD):
    \"""Keeps for its parameter whatever it is given.\"""
def optimizer_of(**kept):
    parameter = torch.nn.Parameter(split(whole(4, 4), Shard(0)))
    optimizer = Keeping([parameter], lr=0.1)
    if kept:
        optimizer.state[parameter].update(kept)
    return optimizer, optimizer.state[parameter]
with Checkpointer(root, topology=place, async_ckpt=False) as checkpointer:
    kept = dict(like=split(whole(4, 4) + 1, Shard(0)), row=split(whole(3), Replicate()), step=torch.tensor(2.0))
    checkpointer.track(optimizer=optimizer_of(**kept)[0])
    checkpointer.save(1)
    fresh, state = optimizer_of()
    checkpointer.track(optimizer=fresh)
    checkpointer.resume(1)
    state = next(iter(fresh.state.values()))
    say("same", same(state["like"], kept["like"]), same(state["row"], kept["row"]), float(state["step"]))
    checkpointer.track(optimizer=optimizer_of(odd=split(whole(4, 4), Shard(1)))[0])
    checkpointer.save(2)
    checkpointer.resume(2)  # the live optimizer has it, and it is split in the same way
    fresh, state = optimizer_of()
    checkpointer.track(optimizer=fresh)
    try:
        checkpointer.resume(2)
    except Exception as error:
        say("refused", type(error).__name__, error)
    say("untouched", sum(map(len, fresh.state.values())))
""",
        tp=2,
    )
    assert ranks.say("same") == ["True True 2.0"] * 2
    for rank, said in enumerate(ranks.say("refused")):
        part = f"part {rank + 1} of 2 of dimension"
        assert said.startswith(
            "StateMismatch the checkpoint does not fit: optimizer_state_dict: state.0.odd was saved as "
        )
        assert said.endswith(f"{part} 1 of (4, 4), and is {part} 0 of (4, 4) now")
    assert ranks.say("untouched") == ["0", "0"]
    ranks.end()


def test_tied_split_parameters_are_stored_once_and_stay_tied(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
def tied(seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    parallelize_module(model, mesh, {"emb": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()})
    model["head"].weight = model["emb"].weight
    return model
with Checkpointer(root, topology=place) as checkpointer:
    checkpointer.track(model=(model := tied(1)))
    say("path", checkpointer.save(1).wait_committed(60))
    checkpointer.track(model=(other := tied(2)))
    checkpointer.resume()
    weight = other["head"].weight
    say("tied", weight is other["emb"].weight, same(weight.detach(), model["emb"].weight.detach()))
""",
        tp=2,
    )
    path = Path(ranks.say("path")[0])
    assert ranks.say("tied") == ["True True"] * 2
    ranks.end()
    found = torch.load(path, weights_only=True)["stage_state_dict"]
    assert found["emb.weight"].shape == (4, 4)
    assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert set(sharding_in(path)) == {("stage_state_dict", name) for name in ("emb.weight", "head.weight")}


def test_whole_values_of_an_optimizer_may_have_shapes_of_their_own(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + """
class Keeping(torch.optim.SGD):
    \"""Keeps for its parameter whatever it is given.\"""
def optimizer_of(**kept):
    parameter = torch.nn.Parameter(split(whole(4, 4), Shard(0)))
    optimizer = Keeping([parameter], lr=0.1)
    optimizer.state[parameter].update(kept)
    return optimizer
kept = dict(row=split(whole(3), Replicate()), like=split(whole(4, 4), Shard(0)))
with Checkpointer(root, topology=place, async_ckpt=False) as checkpointer:
    checkpointer.track(optimizer=optimizer_of(**kept))
    checkpointer.save(1)
    checkpointer.track(optimizer=(fresh := optimizer_of()))
    checkpointer.resume()
    say("same", *(same(value, kept[name]) for name, value in next(iter(fresh.state.values())).items()))
"""
    )
    assert ranks.say("same") == ["True True"]
    ranks.end()


def test_what_a_replica_has_of_its_own_may_be_split_too(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
mesh = init_device_mesh("cpu", (place.dp, place.tp), mesh_dim_names=("dp", "tp"))
class Holder:
    def __init__(self, value):
        local = torch.full((2, 3), float(value))
        self.tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    def state_dict(self):
        return {"tensor": self.tensor}
    def load_state_dict(self, state):
        self.tensor = state["tensor"]
with Checkpointer(root, topology=place) as checkpointer:
    checkpointer.track(holder=Holder(rank + 1))
    checkpointer.save(1).wait_committed(60)
    checkpointer.track(holder=(holder := Holder(0)))
    dist.barrier()
    checkpointer.resume()
    say("has", tuple(holder.tensor.shape), holder.tensor.placements, *holder.tensor.to_local().unique().tolist())
""",
        tp=2,
        dp=2,
    )
    split = "(4, 3) (Replicate(), Shard(dim=0))"
    assert ranks.say("has") == [f"{split} {value}" for value in (1.0, 2.0, 3.0, 4.0)]
    ranks.end()


def test_fully_shard_over_one_replica_splits_nothing(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
warnings.simplefilter("ignore")
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
def values(model):
    return [parameter.detach().to_local().tolist() for parameter in model.parameters()]
with Checkpointer(root, topology=place) as checkpointer:
    model, optimizer = training(1)
    train(model, optimizer, 2)
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.save(1).wait_committed(60)
    train(model, optimizer, 2)
    expected = values(model)
    model, optimizer = training(2)
    checkpointer.track(model=model, optimizer=optimizer)
    checkpointer.resume()
    train(model, optimizer, 2)
    say("same", values(model) == expected)
"""
    )
    assert ranks.say("same") == ["True"]
    ranks.end()


# --- refused ----------------------------------------------------------------------------------------------------------

REFUSING = """
from ckpt_service.errors import StateRefused
checkpointer = Checkpointer(root, topology=place)
def refuse(what, state=None, **tracked):
    try:
        if tracked:
            checkpointer.track(**tracked)
        checkpointer.save(2, state=state)
        say(what, "saved")
    except StateRefused as error:
        say(what, error)
checkpointer.save(1, state={"a": torch.ones(2)}).wait_committed(60)
"""


def test_terms_of_a_sum_and_hidden_tensors_are_refused_by_their_keys(run: RunDirectory) -> None:
    ranks = run.ranks(
        PIECES
        + REFUSING
        + """
refuse("partial", {"a": [{"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}]})
refuse("odd", {"a": {(1, 2): split(whole(4), Shard(0))}})
class Maker:
    def __getstate__(self):
        return {"w": split(whole(4), Shard(0))}
with Checkpointer(Path(root, "other"), topology=place, async_ckpt=False, trust=[Maker]) as other:
    try:
        other.save(1, state={"a": Maker()})
    except StateRefused as error:
        say("made", error)
refuse("set", {"a": {True: split(whole(4), Shard(0))}})
say("path", checkpointer.save(3, state={"a": split(whole(4), Shard(0))}).wait_committed(60))
say("step", checkpointer.resume(1).step)
checkpointer.close()
""",
        tp=2,
    )
    for said in ranks.say("partial"):
        assert said.startswith("state['a'][0]['w']: its ranks hold terms of a sum (mesh dimension 'tp', P")
    for said in ranks.say("odd"):
        assert said.startswith("state['a'][(1, 2)]: a DTensor must lie below keys that are strings or whole numbers")
    assert all("a DTensor must lie below keys" in said for said in ranks.say("made"))
    assert all(said.startswith("state['a'][True]: ") for said in ranks.say("set"))
    assert [Path(said).name for said in ranks.say("path")] == [f"ckpt_step_3_epoch_0_tp{tp}.pt" for tp in (0, 1)]
    assert ranks.say("step") == ["1", "1"]
    ranks.end()
    assert run.partials() == []


def test_states_split_over_replicas_are_refused_with_the_way_out(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
warnings.simplefilter("ignore")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
"""
        + REFUSING
        + """
plain = torch.nn.Linear(2, 2)
sharded = torch.nn.Linear(4, 4)
fully_shard(sharded, mesh=mesh)
refuse("fsdp2", model=sharded)
refuse("fsdp1", model=FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")))
refuse("zero", model=plain, optimizer=ZeroRedundancyOptimizer(plain.parameters(), torch.optim.AdamW, lr=0.1))
flat = next(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")).parameters())
spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
for name, tensor in (("flat", flat), ("shards", sharded_tensor.zeros(spec, 4))):
    if rank == 0:
        refuse(name, {"w": tensor})
    else:
        checkpointer.save(2, state={})
        say(name, "replica")
checkpointer.track(model=plain, optimizer=torch.optim.SGD(plain.parameters()))
say("path", checkpointer.save(3).wait_committed(60))
checkpointer.close()
""",
        dp=2,
    )
    whole = "gather it on all ranks and give save() a whole state: "
    full = f"{whole}get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
    over = "it is split over data-parallel ranks (mesh dimension 'dp', S(0)), and only the first of them writes"
    assert ranks.say("fsdp2") == [f"state['stage_state_dict']['weight']: {over}; {full}"] * 2
    said = f"stage_state_dict: FullyShardedDataParallel splits its state over ranks; {full}"
    assert ranks.say("fsdp1") == [said, said]
    said = f"optimizer_state_dict: ZeroRedundancyOptimizer splits its state over ranks; {whole}"
    assert [zero.partition("consolidate")[0] for zero in ranks.say("zero")] == [said, said]
    assert ranks.say("flat") == [f"state['w']: a FlatParameter is split over ranks; {full}", "replica"]
    assert ranks.say("shards") == [f"state['w']: a ShardedTensor is split over ranks; {full}", "replica"]
    assert [Path(path).name for path in ranks.say("path")] == ["ckpt_step_3_epoch_0.pt", "None"]
    ranks.end()
    assert run.files() == ["ckpt_step_1_epoch_0.pt", "ckpt_step_3_epoch_0.pt"]
    assert run.partials() == []
