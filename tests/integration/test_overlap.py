"""What may be copied after ``save()`` has returned, what must not, and what is seen if it was changed meanwhile."""

from __future__ import annotations

import copy
import ctypes
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_service.errors import SaveFailed, SnapshotDisturbed
from trainer_hooks.layout import plan
from trainer_hooks.overlap import BackgroundCopy, Later, StepGate
from trainer_hooks.tickets import SaveTicket
from trainer_hooks.values import Allowed


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.1))

    def step() -> None:
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def gate(*, overlaps: bool = True, first: Callable[[], None] = lambda: None) -> StepGate:
    return StepGate(30, first, overlaps=overlaps)


def watching(*, overlaps: bool = True) -> tuple[StepGate, torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    made = gate(overlaps=overlaps)
    model, optimizer, step = training()
    made.watch("model", model)
    made.watch("optimizer", optimizer)
    return made, model, optimizer, step


def names_of(later: Later, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Return what of a training may be copied later, by name."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors["lr"] = optimizer.param_groups[0]["lr"]
    for index, state in enumerate(optimizer.state.values()):
        tensors |= {f"{index}.{name}": value for name, value in state.items()}
    return {name for name, tensor in tensors.items() if tensor.untyped_storage()._cdata in later.handles}


def test_only_what_steps_change_is_copied_later() -> None:
    made, model, optimizer, step = watching()
    step()
    later = made.later()
    assert later is not None
    trained = {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias"}
    moments = {f"{index}.{name}" for index in range(5) for name in ("exp_avg", "exp_avg_sq")}
    assert names_of(later, model, optimizer) == trained | moments, "no buffers, no counters, no lr, nothing frozen"


def test_without_a_step_since_the_last_save_all_is_copied_at_once() -> None:
    made, _, _, step = watching()
    assert made.later() is None, "whether its hooks run is not known yet"
    step()
    assert made.later() is not None
    assert made.later() is None
    step()
    assert made.later() is not None


def test_every_optimizer_counts() -> None:
    made, model, _, step = watching()
    made.watch("other", torch.optim.SGD(model[2].parameters()))
    step()
    assert made.later() is None, "whether the hook of the other one runs is not known"


@pytest.mark.parametrize("overlaps", [True, False])
def test_staging_blocking_copies_all_at_once(overlaps: bool) -> None:
    made, _, _, step = watching(overlaps=overlaps)
    step()
    assert (made.later() is not None) is overlaps


def test_a_step_that_was_compiled_or_captured_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for blinding in ("torch.compiler.is_compiling", "trainer_hooks.overlap._is_captured"):
        made, _, _, step = watching()
        with monkeypatch.context() as patched:
            patched.setattr(blinding, lambda: True)
            step()
        step()
        assert made.later() is None, "other steps of it may not run the hook"


def test_a_new_optimizer_of_the_name_takes_the_place_of_the_old_one() -> None:
    made, model, optimizer, step = watching()
    made.watch("optimizer", torch.optim.SGD(model[2].parameters()))
    step()
    assert made.later() is None, "the hook of the old one does not count"
    assert not optimizer._optimizer_step_pre_hooks


def test_nothing_of_the_gate_is_in_copies_and_pickles_of_the_users_objects() -> None:
    made, model, optimizer, step = watching()
    step()
    made.hold(SaveTicket(1, 0))
    copy.deepcopy(model)
    copy.deepcopy(optimizer)
    for thing in (model, optimizer):
        assert b"trainer_hooks" not in pickle.dumps(thing)
    made.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_waits_for_the_copy() -> None:
    made, _, _, step = watching()
    step()
    ticket = SaveTicket(1, 0)
    made.hold(ticket)
    done = threading.Event()
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: (step(), done.set()))
        assert not done.wait(0.2)
        ticket.staged.set_result(None)
        assert done.wait(30)


def test_the_first_step_is_told_once() -> None:
    told = []
    made = gate(first=lambda: told.append(1))
    model, optimizer, step = training()
    made.watch("model", model)
    made.watch("optimizer", optimizer)
    step()
    step()
    assert told == [1]


def test_what_goes_wrong_after_the_first_step_does_not_end_it() -> None:
    def fails() -> None:
        raise RuntimeError("can't start new thread")

    made = gate(first=fails)
    _, optimizer, step = training()
    made.watch("optimizer", optimizer)
    step()


def test_hooks_of_the_user_wait_as_the_step_does() -> None:
    """One that was there first, too: it may clamp what is still being copied."""
    _, optimizer, step = training()
    seen: list[bool] = []
    ticket = SaveTicket(1, 0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(ticket.staged.done()))
    made = gate()
    made.watch("optimizer", optimizer)
    step()
    made.hold(ticket)
    timer = threading.Timer(0.1, ticket.staged.set_result, [None])
    seen.clear()
    timer.start()
    step()
    assert seen == [True]


def test_hooks_for_all_optimizers_of_the_process_end_it() -> None:
    made, _, _, step = watching()
    step()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert made.later() is None, "they run before ours"
    finally:
        handle.remove()
    step()
    assert made.later() is not None


class Lookahead(torch.optim.Optimizer):
    """A wrapper as libraries publish them: an optimizer by name, made without what torch's constructor makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_a_wrapper_whose_steps_cannot_be_seen_is_copied_at_once() -> None:
    _, optimizer, step = training()
    made = gate()
    made.watch("inner", optimizer)
    made.watch("wrapper", Lookahead(optimizer))
    step()
    assert made.later() is None


@pytest.mark.parametrize("odd", [torch.ones(3), [torch.ones(3)], None])
def test_an_odd_state_is_no_reason_not_to_save(odd: object) -> None:
    made, _, optimizer, step = watching()
    step()
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = odd
    later = made.later()
    assert later is None or later.handles


# --- the copy ---------------------------------------------------------------------------------------------------------


def begun(tensors: list[torch.Tensor]) -> tuple[BackgroundCopy, bytearray]:
    """Return a copy that has been begun, and the memory that it goes to, to be kept as long."""
    spans = plan(tensors, Allowed()).spans
    target = bytearray(sum(span.nbytes for span in spans))
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    places, at = [], address
    for span in spans:
        places.append((span, at))
        at += span.nbytes
    handles = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
    return BackgroundCopy(places, Later(handles, tuple((t, t._version) for t in tensors))), target


def test_it_copies_every_byte() -> None:
    tensors = [torch.randn(1000), torch.randint(0, 9, (7,)), torch.empty(0), torch.tensor([True])]
    copying, target = begun(tensors)
    copying.run()
    expected = b"".join(bytes(tensor.untyped_storage().tolist()) for tensor in tensors)
    assert bytes(target) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor[3:4].add_(1),
        lambda tensor: tensor.data.add_(1),
        lambda tensor: tensor.data.copy_(torch.randn(1000)),
        lambda tensor: tensor.data.clamp_(-0.001, 0.001),
        lambda tensor: tensor.data.zero_(),
    ],
)
def test_a_change_before_it_is_done_is_seen(change: Callable[[torch.Tensor], object]) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(1000)
    copying, _target = begun([torch.randn(10), tensor])
    change(tensor)
    with pytest.raises(SnapshotDisturbed, match=r"wait_staged\(\) before you change them"):
        copying.run()


def test_a_snapshot_that_was_disturbed_ends_the_overlap_and_other_failures_do_not() -> None:
    for error, trusted in ((SaveFailed("all slots are taken"), True), (SnapshotDisturbed("changed"), False)):
        made, _, _, step = watching()
        step()
        ticket = SaveTicket(1, 0)
        made.hold(ticket)
        ticket.fail(error)
        step()
        assert (made.later() is not None) is trusted
