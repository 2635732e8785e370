"""Saves that return before everything is copied, in a real training with a real daemon."""

from __future__ import annotations

from pathlib import Path

import torch
from support.processes import RunDirectory

TRAINING = """
import ctypes, threading, warnings
from trainer_hooks import overlap, slots
made = []
create = slots.Slot.create
slots.Slot.create = lambda nbytes: (made.append(nbytes), create(nbytes))[1]
held, go = threading.Event(), threading.Event()
memmove = overlap.ctypes.memmove
def slowly(*arguments):
    held.set()
    assert go.wait(60)
    return memmove(*arguments)
class Ctypes:  # the copying thread waits for the word
    memmove, string_at = staticmethod(slowly), ctypes.string_at
overlap.ctypes = Ctypes
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
def loss():
    return model(torch.randn(8, 64)).square().sum()
def step():
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
def frozen():
    import copy
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}
    return copy.deepcopy(states)
checkpointer = Checkpointer(root)
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler)
step()
"""


def same(path: Path, expected: Path) -> None:
    found, wanted = torch.load(path, weights_only=True), torch.load(expected, weights_only=True)
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["stage_state_dict"][name], tensor), name
    for index, moments in wanted["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(found["optimizer_state_dict"]["state"][index][name], tensor), (index, name)
    assert found["optimizer_state_dict"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert found["scheduler_state_dict"] == wanted["lr"]


def test_a_snapshot_is_of_its_moment_while_training_goes_on(run: RunDirectory) -> None:
    expected = run.root.parent / "expected.pt"
    trainer = run.trainer(
        TRAINING
        + f"""
ticket = checkpointer.save(1)
torch.save(frozen(), {str(expected)!r})
assert held.wait(60)
say("returned", ticket.staged.done())
loss().backward()  # another forward pass moves buffers and random numbers, a backward pass the gradients
scheduler.last_epoch = 77
optimizer.state[model[0].weight]["step"] += 5
stepped = threading.Event()
def next_step():
    optimizer.step()
    stepped.set()
thread = threading.Thread(target=next_step)
thread.start()
say("waits", not stepped.wait(0.3))
go.set()
assert stepped.wait(60)
say("path", ticket.wait_committed(60))
checkpointer.close()
"""
    )
    assert trainer.says("returned") == "False"
    assert trainer.says("waits") == "True"
    same(Path(trainer.says("path")), expected)
    trainer.ends()


def test_weights_that_are_swapped_too_early_cost_that_snapshot_only(run: RunDirectory) -> None:
    trainer = run.trainer(
        TRAINING
        + """
first = checkpointer.save(1)
assert held.wait(60)
kept = {name: p.detach().clone() for name, p in model.named_parameters()}
for p in model.parameters():
    p.data.mul_(0.99)  # averaged weights for an evaluation, say; torch does not count this as a change
go.set()
say("first", type(first.committed.exception(60)).__name__)
for name, p in model.named_parameters():
    p.data.copy_(kept[name])
step()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    second = checkpointer.save(2)
say("second", second.staged.done(), *{str(w.message).split(";")[0] for w in caught})
say("path", second.wait_committed(60))
checkpointer.close()
"""
    )
    assert trainer.says("first") == "SnapshotDisturbed"
    told = trainer.says("second")
    assert told.startswith("True an earlier save failed: step 1 was not saved: parameters were changed between save()")
    assert trainer.says("path").endswith("ckpt_step_2_epoch_0.pt")
    trainer.ends()
    assert run.files("*") == ["ckpt_step_2_epoch_0.pt"]


def test_the_memory_is_ready_before_the_first_save(run: RunDirectory) -> None:
    trainer = run.trainer(
        TRAINING
        + """
go.set()
pool = checkpointer._saver._pool
while len(pool._free) < 2:
    time.sleep(0.01)
ready = list(made)
for number in range(1, 6):
    checkpointer.save(number).wait_committed(60)
    step()
say("made", len(ready), made == ready)
checkpointer.close()
"""
    )
    assert trainer.says("made") == "2 True", "no save had to make a slot"
    trainer.ends()
