"""State on a CUDA device: frozen at ``save()``, whatever the device does next. Skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_hooks import Checkpointer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def frozen(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return the states as they are now, on the CPU."""
    torch.cuda.synchronize()
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def require_same(path: Path | None, expected: Any) -> None:
    assert path is not None
    found = torch.load(path, weights_only=True)
    weights, moments = expected
    for name, tensor in weights.items():
        assert torch.equal(found["stage_state_dict"][name], tensor.cpu()), name
    for index, values in moments["state"].items():
        for name, tensor in values.items():
            assert torch.equal(found["optimizer_state_dict"]["state"][index][name], tensor.cpu()), (index, name)


def stepping(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    data = torch.randn(64, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(data).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}])
def test_a_step_right_after_the_save_changes_nothing_of_it(tmp_path: Path, options: dict[str, bool]) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    step = stepping(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        for number in range(4):
            step()
            expected = frozen(model, optimizer)
            ticket = checkpointer.save(number)
            step()
            require_same(ticket.wait_committed(60), expected)


def test_replays_of_a_graph_right_after_the_save_change_nothing_of_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    step = stepping(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(4):
            graph.replay()
            expected = frozen(model, optimizer)
            ticket = checkpointer.save(number)
            graph.replay()
            require_same(ticket.wait_committed(60), expected)


def test_training_goes_on_bit_for_bit_on_the_device(tmp_path: Path) -> None:
    def run(checkpointer: Checkpointer, steps: range) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.5), torch.nn.Linear(256, 256)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer.track(model=model, optimizer=optimizer)
        step = stepping(model, optimizer)
        if steps.start:
            assert checkpointer.resume() is not None
        for number in steps:
            step()
            if number == 2:
                checkpointer.save(number)
        return frozen(model, optimizer)

    with Checkpointer(tmp_path / "whole") as checkpointer:
        whole = run(checkpointer, range(6))
    with Checkpointer(tmp_path / "broken") as checkpointer:
        run(checkpointer, range(3))
    with Checkpointer(tmp_path / "broken") as checkpointer:
        resumed = run(checkpointer, range(3, 6))
    for name, tensor in whole[0].items():
        assert torch.equal(resumed[0][name], tensor), name
