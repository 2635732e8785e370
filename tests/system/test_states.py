"""States in real trainers: frozen at the call, refused without a trace, and saved and resumed behind wrappers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.processes import RunDirectory

FREEZING = """
import collections, copy, hashlib, random
import numpy as np
class Holder:
    def __init__(self):
        weight = torch.arange(6.0)
        self.state = {
            "list": [1, [2]], "dict": {"a": {"b": 1}}, "array": np.arange(4), "queue": collections.deque([1]),
            "set": {1}, "bytes": bytearray(b"abc"), "count": torch.tensor(5), "weight": weight, "view": weight[2:4],
        }
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state
    def change(self):
        state = self.state
        state["list"][1].append(3); state["list"].append(4); state["dict"]["a"]["b"] = 2; state["dict"]["c"] = 1
        state["array"] += 1; state["queue"].append(2); state["set"].add(2); state["bytes"][0] = 0
        state["count"] += 1; state["weight"] += 1; state["new"] = 1
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
holder = Holder()
parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, holder=holder)
def train():
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step(); scheduler.step()
    random.random(); np.random.rand()
def digest(state):
    found = hashlib.sha256()
    def add(value):
        if isinstance(value, torch.Tensor):
            value = value.detach()
            found.update(repr((value.dtype, tuple(value.shape), value.flatten().tolist())).encode())
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(type(value).__name__.encode())
            for item in value:
                add(item)
        else:
            found.update(repr((type(value).__name__, value)).encode())
    add(state)
    return found.hexdigest()
def everything():
    generators = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return [{name: thing.state_dict() for name, thing in parts.items()}, *generators]
def change_all():
    holder.change()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(7)
    optimizer.param_groups[0]["lr"].fill_(9.0)
    scheduler.last_epoch = 77
"""


@pytest.mark.parametrize("explicit", [False, True], ids=["tracked", "explicit"])
def test_a_snapshot_holds_the_moment_of_the_call(run: RunDirectory, explicit: bool) -> None:
    trainer = run.trainer(
        FREEZING
        + f"""
explicit = {explicit}
train()
checkpointer = Checkpointer(root)
checkpointer.track(**parts)
say("ready")
hear("save")
if explicit:
    state = everything()
    at_the_call = digest(state)
    ticket = checkpointer.save(1, state=state)
    state.append("more")
else:
    at_the_call = digest(everything())
    ticket = checkpointer.save(1)
    train()
change_all()
say("differs", digest(everything()) != at_the_call, ticket.committed.done())
hear("wait")
say("path", ticket.wait_committed(60))
if explicit:
    checkpointer.track(model=None)
    with Checkpointer(root, async_ckpt=False) as reader:
        found = reader.resume().state
else:
    checkpointer.resume()
    found = everything()
say("same", digest(found) == at_the_call)
checkpointer.close()
"""
    )
    trainer.says("ready")
    run.signal_daemon(signal.SIGSTOP)
    trainer.hears("save")
    assert trainer.says("differs") == "True False"
    run.signal_daemon(signal.SIGCONT)
    trainer.hears("wait")
    trainer.says("path")
    assert trainer.says("same") == "True"
    trainer.ends()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_refused_state_leaves_no_trace(run: RunDirectory, asynchronous: bool) -> None:
    trainer = run.trainer(
        f"""
class Odd:
    pass
class Holder:
    value = 1
    def state_dict(self):
        return {{"deep": [{{"value": self.value}}]}}
    def load_state_dict(self, state):
        self.value = state["deep"][0]["value"]
holder = Holder()
checkpointer = Checkpointer(root, async_ckpt={asynchronous}, slots=1)
checkpointer.track(holder=holder)
checkpointer.save(1).wait_committed(60)
def refuse(state=None):
    try:
        checkpointer.save(2, state=state)
    except ValueError as error:
        say("refused", error)
for value in (Odd(), lambda: 0, torch.nn.Linear(1, 1), (number for number in [1])):
    holder.value = value
    refuse()
refuse({{"w": torch.ones(1 << 20), "m": torch.empty(2, device="meta")}})
holder.value = 3
with warnings.catch_warnings():
    warnings.simplefilter("error")
    say("path", checkpointer.save(3).wait_committed(60))
say("steps", checkpointer.resume().step, holder.value, checkpointer.resume(1).step, holder.value)
checkpointer.close()
"""
    )
    place = "state['holder_state_dict']['deep'][0]['value']: "
    odd, function, module, generator, meta = (trainer.says("refused") for _ in range(5))
    assert odd.startswith(f"{place}__main__.Odd is not a plain value; ")
    assert "trust=[Odd]" in odd
    assert function.startswith(f"{place}__main__.<lambda> cannot be saved")
    assert module.startswith(f"{place}torch.nn.modules.linear.Linear is not a plain value")
    assert generator.startswith(f"{place}builtins.generator cannot be saved")
    assert meta.startswith("state['m']: a tensor on the meta device has no data")
    trainer.says("path")
    assert trainer.says("steps") == "3 3 1 1"
    trainer.ends()
    assert run.files() == ["ckpt_step_1_epoch_0.pt", "ckpt_step_3_epoch_0.pt"]
    assert run.partials() == []


def test_ddp_on_either_side(run: RunDirectory) -> None:
    body = """
from torch.nn.parallel import DistributedDataParallel
def weighing(value):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model
def values(model):
    return sorted({float(number) for parameter in model.parameters() for number in parameter.detach().flatten()})
with Checkpointer(root, topology=place) as checkpointer:
    def save(step, model):
        checkpointer.track(model=model)
        say("path", checkpointer.save(step).wait_committed(60))
    def resume(step, model):
        checkpointer.track(model=model)
        checkpointer.resume(step)
        say("has", *values(model))
    wrapped = DistributedDataParallel(weighing(3.0))
    save(1, wrapped)
    save(2, weighing(4.0))
    resume(2, DistributedDataParallel(weighing(0.0)))
    resume(1, DistributedDataParallel(weighing(0.0)))
    resume(1, weighing(0.0))
"""
    ranks = run.ranks(body, dp=2)
    path = Path(ranks.say("path")[0])
    assert set(torch.load(path, weights_only=True)["stage_state_dict"]) >= {"module.0.weight", "module.1.bias"}
    ranks.say("path")
    assert ranks.say("has") == ["4.0", "4.0"]
    assert ranks.say("has") == ["3.0", "3.0"]
    assert ranks.say("has") == ["3.0", "3.0"]
    ranks.end()
