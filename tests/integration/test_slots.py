"""The memory that snapshots are made in: bounded, used again, never taken where it cannot be had."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckpt_service.errors import SaveFailed
from ckpt_service.memory import Room
from trainer_hooks import Checkpointer, slots
from trainer_hooks.slots import Slot, SlotPool

MIB = 1 << 20


def never() -> bool:
    return False


def test_what_cannot_be_had_is_not_taken() -> None:
    pool = SlotPool(2, lambda: Room(5 * MIB, "free on this machine"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SaveFailed) as caught:
        pool.take(6 * MIB, never)
    assert "6.3 MB are needed, and 5.2 MB can be had (free on this machine)" in str(caught.value)
    assert caught.value.code == "ENOMEM"
    assert len(os.listdir("/proc/self/fd")) == before
    assert pool.has_room(), "the next one may be smaller"
    assert pool.take(4 * MIB, never) is not None
    pool.close()


def test_what_was_taken_is_used_again_without_asking() -> None:
    rooms = iter([Room(100 * MIB, "free")])
    pool = SlotPool(1, lambda: next(rooms))
    first = pool.take(4 * MIB, never)
    assert first is not None
    pool.give_back(first)
    assert pool.take(3 * MIB, never) is first
    assert pool.take(MIB, never) is None, "there is one slot, and it is taken"
    pool.close()


def test_what_will_not_fit_into_memory_is_said_when_it_is_tracked(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    huge = torch.nn.Parameter(torch.empty(1 << 42, dtype=torch.uint8, device="meta"), requires_grad=False)
    with Checkpointer(tmp_path, async_ckpt=False) as checkpointer:
        checkpointer.track(model=model)
        model.register_parameter("huge", huge)
        with pytest.warns(UserWarning, match=r"slots=2: not all slots will fit into memory: 8796\.1 GB are needed"):
            checkpointer.track(model=model)
        assert checkpointer.save(1, state={"value": torch.tensor(1.0)}).wait_committed(0) is not None


@pytest.mark.parametrize("error", [OSError(12, "no memory"), MemoryError()])
def test_a_slot_that_could_not_be_made_ready_holds_up_no_save(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: Slot) -> None:
        raise error

    pool = SlotPool(2, lambda: None)
    monkeypatch.setattr(Slot, "touch", fail)
    pool.prepare(MIB)
    assert pool.take(MIB, never) is not None
    pool.close()


def test_slots_are_made_ready_once_and_used() -> None:
    pool = SlotPool(2, lambda: None)
    pool.prepare(MIB)
    pool.prepare(MIB)
    first, second = pool.take(MIB, never), pool.take(MIB, never)
    assert first is not None
    assert second is not None
    assert pool.take(MIB, never) is None
    pool.close()


def test_memory_that_cannot_be_touched_is_an_error_and_not_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(slots, "_libc", SimpleNamespace(madvise=fails))
    slot = Slot.create(MIB)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        slot.touch()
    slot.close()
