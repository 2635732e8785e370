"""What a restarted trainer goes on from: bit for bit, past damage, over restarts, and only if everything fits."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import RunDirectory, wait_for
from support.shards import data_offset, flip_bit, write_stage_shard

from ckpt_service.errors import CkptError, DamagedCheckpoint, LayoutMismatch, NoUsableCheckpoint, StateMismatch
from trainer_hooks import Checkpointer

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20)}

TRAINING = """
import hashlib, random
torch.use_deterministic_algorithms(True)
class Run:
    def __init__(self, seed):
        torch.manual_seed(seed); random.seed(seed)
        nn = torch.nn
        self.model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=100)
    def parts(self):
        return dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
    def train(self, steps):
        for step in steps:
            x = torch.randn(16, 8) * random.random()
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
    def digest(self):
        found = hashlib.sha256()
        def add(value):
            if isinstance(value, torch.Tensor):
                found.update(repr((value.dtype, tuple(value.shape))).encode())
                found.update(bytes(value.detach().contiguous().flatten().view(torch.uint8).tolist()))
            elif isinstance(value, dict):
                for key in value:
                    found.update(repr(key).encode())
                    add(value[key])
            elif isinstance(value, (list, tuple)):
                found.update(type(value).__name__.encode())
                for item in value:
                    add(item)
            else:
                found.update(repr(value).encode())
        add({name: thing.state_dict() for name, thing in self.parts().items()})
        add([torch.get_rng_state(), random.getstate()])
        return found.hexdigest()
"""


def test_training_goes_on_bit_for_bit_after_kill_9(run: RunDirectory) -> None:
    whole = run.trainer(f"{TRAINING}\nrun = Run(1)\nrun.train(range(20))\nsay('digest', run.digest())")
    killed = run.trainer(
        TRAINING
        + """
run = Run(1)
checkpointer = Checkpointer(root)
checkpointer.track(**run.parts())
run.train(range(10))
checkpointer.save(10).wait_committed(60)
run.train(range(3))
say("ready")
time.sleep(60)
"""
    )
    killed.says("ready")
    killed.kill()
    resumed = run.trainer(
        TRAINING
        + """
run = Run(2)
with Checkpointer(root) as checkpointer:
    checkpointer.track(**run.parts())
    point = checkpointer.resume()
    say("from", point.step, point.epoch, point.attempt, point.sequence, point.skipped)
    run.train(range(10))
    say("digest", run.digest())
"""
    )
    assert resumed.says("from") == "10 0 1 1 []"
    assert resumed.says("digest") == whole.says("digest")
    resumed.ends()


def test_the_restarted_trainer_waits_for_what_its_daemon_still_writes(run: RunDirectory) -> None:
    first = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
        checkpointer.save(2, state=state(2, megabytes=24)).accepted.result(60)
        say("accepted")
        time.sleep(60)
        """,
        **SLOW,
    )
    first.says("accepted")
    first.kill()
    assert run.files() == ["ckpt_step_1_epoch_0.pt"]
    second = run.trainer(
        """
        with Checkpointer(root) as checkpointer:
            point = checkpointer.resume()
            say("from", point.step, float(point.state["value"].min()), float(point.state["value"].max()))
        """,
        **SLOW,
    )
    assert second.says("from") == "2 2.0 2.0"
    second.ends()


def test_a_daemon_that_dies_while_it_is_waited_for_costs_its_snapshots_only(run: RunDirectory) -> None:
    first = run.trainer(
        """
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
        checkpointer.save(2, state=state(2, megabytes=64)).accepted.result(60)
        say("accepted")
        time.sleep(60)
        """,
        **SLOW,
    )
    first.says("accepted")
    first.kill()
    second = run.trainer(
        """
        with Checkpointer(root) as checkpointer:
            say("started")
            began = time.monotonic()
            point = checkpointer.resume()
            say("from", point.step, time.monotonic() - began < 15)
        """,
        **SLOW,
        CKPT_SERVICE_RESUME_WAIT_SECONDS="20",
    )
    second.says("started")
    wait_for(run.being_written, "the write goes on")
    run.signal_daemon(signal.SIGKILL)
    assert second.says("from") == "1 True"
    second.ends()


# --- without a daemon: what the files alone decide --------------------------------------------------------------------


def saved(root: Path, *steps: int, keep_last: int = 10) -> list[Path]:
    """Save these steps in a new attempt that goes on from what is there."""
    with Checkpointer(root, async_ckpt=False, keep_last=keep_last) as checkpointer:
        if checkpointer.latest() is not None:
            checkpointer.resume()
        tickets = [checkpointer.save(step, state={"value": torch.full((9000,), float(step))}) for step in steps]
        return [path for ticket in tickets if (path := ticket.wait_committed(0)) is not None]


def reader(root: Path) -> Checkpointer:
    return Checkpointer(root, async_ckpt=False)


def flipped(path: Path) -> None:
    flip_bit(path, data_offset(path) + 1234)


def zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(data_offset(path) + 4096)
        file.write(bytes(4096))


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


DAMAGES = [
    (flipped, r"record data/0: CRC [0-9a-f]{8}, expected [0-9a-f]{8}"),
    (zeroed, r"record data/0: CRC"),
    (halved, r"bytes instead of"),
    (emptied, r"not a checkpoint \(0 bytes\)"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_newest_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    newest = saved(tmp_path, 1, 2)[-1]
    damage(newest)
    with pytest.warns(UserWarning, match=rf"resuming from step 1: passed over step 2 epoch 0.*{reason}") as caught:
        point = reader(tmp_path).resume()
    assert point is not None
    assert (point.step, point.state["value"].unique().tolist()) == (1, [1.0])
    ((identity, why),) = point.skipped
    assert (identity.step, identity.epoch) == (2, 0)
    assert damage in (halved, emptied) or newest.name in str(caught[0].message)
    assert why in str(caught[0].message)


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_when_all_are_damaged_nothing_starts_silently_from_zero(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    for path in saved(tmp_path, 1, 2):
        damage(path)
    with pytest.raises(NoUsableCheckpoint, match=f"(?s)step 2 epoch 0.*{reason}.*step 1 epoch 0.*{reason}"):
        reader(tmp_path).resume()


def test_a_named_checkpoint_that_is_damaged_is_not_replaced_by_another(tmp_path: Path) -> None:
    flipped(saved(tmp_path, 1, 2)[-1])
    with pytest.raises(DamagedCheckpoint, match=r"ckpt_step_2_epoch_0\.pt: record data/0"):
        reader(tmp_path).resume(step=2)


def test_nothing_is_none(tmp_path: Path) -> None:
    for root in (tmp_path / "new", tmp_path):
        assert reader(root).resume() is None
        assert reader(root).latest() is None
    (tmp_path / "checkpoint_0").mkdir()
    (tmp_path / "checkpoint_0" / ".ckpt_step_1_epoch_0.pt.1-1-h-0.partial").write_bytes(bytes(9000))
    (tmp_path / "checkpoint_0" / "ckpt_step_01_epoch_0.pt").write_bytes(bytes(9000))
    assert reader(tmp_path).resume() is None


def test_another_layout_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_stage_shard(tmp_path, tp=2, tp_rank=rank, step=7)
    with pytest.raises(LayoutMismatch, match=r"pp=1 tp=2.*pp=1 tp=1"):
        reader(tmp_path).resume()


def legacy(root: Path, model: torch.nn.Module) -> Path:
    """Write a file as plain ``torch.save`` trainers do."""
    directory = root / "checkpoint_0"
    directory.mkdir(parents=True)
    path = directory / "ckpt_step_5_epoch_1.pt"
    torch.save({"epoch": 1, "step": 5, "stage": 0, "stage_state_dict": model.state_dict()}, path)
    return path


def test_a_legacy_file_resumes(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    before = new.weight.detach().clone()
    path = legacy(tmp_path, old)
    with reader(tmp_path) as checkpointer:
        checkpointer.track(model=new)
        with pytest.raises(StateMismatch, match="lacks rng_state"):
            checkpointer.resume()
        assert torch.equal(new.weight, before)
        with pytest.warns(UserWarning, match="lacks rng_state"):
            point = checkpointer.resume(strict=False)
        assert point is not None
        assert (point.step, point.epoch, point.attempt, point.sequence, point.path) == (5, 1, 0, 0, path)
        assert torch.equal(new.weight, old.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # resume() was called, so nobody need be told that it was not
            checkpointer.save(6, 1).wait_committed(0)
        latest = checkpointer.latest()
    assert latest is not None
    assert (latest.step, latest.attempt) == (6, 1)
    assert path.exists()


def test_a_roll_back_abandons_what_came_after_it_at_once(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with Checkpointer(tmp_path, keep_last=10) as checkpointer:
        point = checkpointer.resume(step=1)
        assert point is not None
        assert point.step == 1
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 1
    # That one saved nothing; the next goes on from the roll-back, not from what it left behind.
    with Checkpointer(tmp_path, keep_last=10) as checkpointer:
        point = checkpointer.resume()
        assert point is not None
        assert point.step == 1
        with pytest.raises(ValueError, match="it is abandoned"):
            checkpointer.resume(step=3)
        checkpointer.save(2, state={"value": torch.zeros(3)}).wait_committed(60)
        latest = checkpointer.latest()
        assert latest is not None
        assert (latest.attempt, latest.step) == (3, 2)
        with pytest.raises(ValueError, match=r"step=9.*2:0, 1:0"):
            checkpointer.resume(step=9)
        with pytest.raises(ValueError, match="epoch: give the step"):
            checkpointer.resume(epoch=0)


def test_a_record_that_cannot_be_read_is_no_reason_to_undo_a_roll_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_ckpt=False, keep_last=9) as checkpointer:
        for step in (400, 500, 600):
            checkpointer.save(step, state={"value": torch.tensor(float(step))})
        assert (point := checkpointer.resume(step=500))
        assert point.step == 500
    record = tmp_path / ".ckpt_service" / "attempts" / "2.json"
    record.write_bytes(b"")
    with Checkpointer(tmp_path, async_ckpt=False) as checkpointer:
        with pytest.raises(CkptError, match=r"attempts/2\.json cannot be read: it may say that the run"):
            checkpointer.resume()
        assert (point := checkpointer.resume(step=500))
        assert point.step == 500
    record.unlink()  # lost for good: the user has decided
    with Checkpointer(tmp_path, async_ckpt=False) as checkpointer:
        assert (point := checkpointer.resume())


def test_an_unasked_fallback_abandons_nothing_before_it_has_saved(tmp_path: Path) -> None:
    newest = saved(tmp_path, 1, 2)[-1]
    content = newest.read_bytes()
    flipped(newest)
    with pytest.warns(UserWarning, match="passed over step 2"), Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume() is not None
    newest.write_bytes(content)
    point = reader(tmp_path).resume()
    assert point is not None
    assert point.step == 2


def test_what_does_not_fit_leaves_everything_untouched(tmp_path: Path) -> None:
    def parts(width: int) -> dict[str, Any]:
        model = torch.nn.Linear(4, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    with reader(tmp_path) as checkpointer:
        checkpointer.track(**parts(8))
        checkpointer.save(1).wait_committed(0)
    mine = parts(16)
    before = {name: repr(thing.state_dict()) for name, thing in mine.items()}
    with reader(tmp_path) as checkpointer:
        checkpointer.track(**mine)
        rng = torch.get_rng_state()
        with pytest.raises(StateMismatch, match=r"weight was saved with shape \(8, 4\) and has \(16, 4\) now"):
            checkpointer.resume()
        with pytest.raises(StateMismatch, match="weight was saved with shape"):
            checkpointer.resume(strict=False)
        assert torch.equal(torch.get_rng_state(), rng)
    assert {name: repr(thing.state_dict()) for name, thing in mine.items()} == before


class Stubborn:
    """An object that refuses the state that it is given."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("another data set")


class Counter:
    """An object with a state that anything fits into."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_an_object_that_refuses_its_state_undoes_the_others(tmp_path: Path) -> None:
    with reader(tmp_path) as checkpointer:
        checkpointer.track(model=torch.nn.Linear(2, 2), counter=Counter(1), loader=Stubborn())
        checkpointer.save(1).wait_committed(0)
    model, counter = torch.nn.Linear(2, 2), Counter(5)
    before = model.weight.detach().clone()
    with reader(tmp_path) as checkpointer:
        checkpointer.track(model=model, counter=counter, loader=Stubborn())
        with pytest.raises(StateMismatch, match="loader refuses its state: RuntimeError: another data set"):
            checkpointer.resume()
    assert counter.value == 5
    assert torch.equal(model.weight, before)


def test_the_step_may_start_again_in_every_epoch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_ckpt=False, keep_last=2) as checkpointer:
        for step, epoch in [(322, 0), (644, 0), (10, 1), (322, 1), (644, 1), (3, 2)]:
            checkpointer.save(step, epoch, {"at": torch.tensor([step, epoch])})
            latest = checkpointer.latest()
            assert latest is not None
            assert (latest.step, latest.epoch) == (step, epoch)
    names = sorted(path.name for path in (tmp_path / "checkpoint_0").iterdir())
    assert names == ["ckpt_step_3_epoch_2.pt", "ckpt_step_644_epoch_1.pt"]
    point = reader(tmp_path).resume()
    assert point is not None
    assert (point.step, point.epoch, point.state["at"].tolist()) == (3, 2, [3, 2])


def test_a_step_of_two_epochs_needs_the_epoch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, async_ckpt=False) as checkpointer:
        for epoch in (1, 2):
            checkpointer.save(5, epoch, {"epoch": epoch})
    with pytest.raises(ValueError, match=r"give the epoch as well, there are \[1, 2\]"):
        reader(tmp_path).resume(step=5)
    point = reader(tmp_path).resume(step=5, epoch=1)
    assert point is not None
    assert point.state == {"epoch": 1}


def test_a_fresh_start_in_a_used_directory_warns_and_goes_its_own_way(tmp_path: Path) -> None:
    saved(tmp_path, 4900, 5000)
    with Checkpointer(tmp_path, async_ckpt=False, keep_last=2) as checkpointer:
        with pytest.warns(UserWarning, match=r"holds 2 checkpoints .*step 5000.*resume\(\) was not called"):
            checkpointer.save(10, state={})
        checkpointer.save(20, state={})
        checkpointer.save(30, state={})
    point = reader(tmp_path).resume()
    assert point is not None
    assert point.step == 30
    names = sorted(path.name for path in (tmp_path / "checkpoint_0").iterdir())
    assert names == [f"ckpt_step_{step}_epoch_0.pt" for step in (20, 30, 4900, 5000)]


def test_a_relative_root_means_one_place(run: RunDirectory) -> None:
    run.root.parent.joinpath("elsewhere").mkdir()
    trainer = run.trainer(
        """
        with Checkpointer("run") as checkpointer:
            checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
            os.chdir("elsewhere")
            path = checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(60)
            say("path", path)
            say("latest", checkpointer.latest().step, checkpointer.resume().step)
        say("here", os.listdir("."))
        """
    )
    assert trainer.says("path") == str(run.root / "checkpoint_0" / "ckpt_step_2_epoch_0.pt")
    assert trainer.says("latest") == "2 2"
    assert trainer.says("here") == "[]"
    trainer.ends()
    assert len(run.files()) == 2


@pytest.mark.parametrize("what", ["checkpoint_0", "."], ids=["stage directory", "whole root"])
def test_a_directory_that_is_removed_comes_back_with_the_next_save(run: RunDirectory, what: str) -> None:
    trainer = run.trainer(
        f"""
        import shutil
        checkpointer = Checkpointer(root)
        checkpointer.save(1, state=state(1, megabytes=1)).wait_committed(60)
        while os.path.exists(Path(root, {what!r})):
            shutil.rmtree(Path(root, {what!r}), ignore_errors=True)  # the daemon writes its status meanwhile
        say("path", checkpointer.save(2, state=state(2, megabytes=1)).wait_committed(60))
        checkpointer.save(3, state=state(3, megabytes=1))
        checkpointer.close()
        """
    )
    trainer.says("path")
    trainer.ends()
    assert run.files() == ["ckpt_step_2_epoch_0.pt", "ckpt_step_3_epoch_0.pt"]
    latest = reader(run.root).latest()
    assert latest is not None
    assert latest.step == 3


@pytest.mark.parametrize("keep_last", [1, 2])
def test_retention_remembers_over_restarts(tmp_path: Path, keep_last: int) -> None:
    for start in range(5):
        saved(tmp_path, *(10 * start + number for number in range(1, 4)), keep_last=keep_last)
        names = [path.name for path in (tmp_path / "checkpoint_0").iterdir()]
        assert len(names) == keep_last
        assert f"ckpt_step_{10 * start + 3}_epoch_0.pt" in names


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_later_of_two_saves_with_one_name_wins(run: RunDirectory, asynchronous: bool) -> None:
    run.root.mkdir()
    with Checkpointer(run.root, async_ckpt=asynchronous, keep_last=2) as checkpointer:
        checkpointer.save(4, state={"value": 4})
        tickets = [checkpointer.save(5, state={"value": value}) for value in (1, 2)]
        checkpointer.drain(60)
        assert {ticket.wait_committed(60) for ticket in tickets} == {run.root / "checkpoint_0/ckpt_step_5_epoch_0.pt"}
        if asynchronous:
            run.status()
    assert run.files() == ["ckpt_step_4_epoch_0.pt", "ckpt_step_5_epoch_0.pt"]
    point = reader(run.root).resume()
    assert point is not None
    assert (point.step, point.state) == (5, {"value": 2})


FORGETFUL = """
from dataclasses import dataclass
@dataclass
class Settings:
    width: int
def save(step, trust, value):
    with Checkpointer(root, trust=trust) as checkpointer:
        checkpointer.resume()
        checkpointer.save(step, state={"value": value}).wait_committed(60)
"""


def test_a_forgotten_trust_stops_the_resume_and_costs_no_checkpoint(run: RunDirectory) -> None:
    run.trainer(FORGETFUL + "save(1, [], 0)\nsave(11, [Settings], Settings(3))\n").ends()
    trainer = run.trainer(
        FORGETFUL
        + """
try:
    save(12, [], 0)
except Exception as error:
    say("raised", type(error).__name__, error)
save(13, [Settings], 0)
"""
    )
    said = trainer.says("raised")
    assert said.startswith("UntrustedClass ")
    assert "ckpt_step_11_epoch_0.pt" in said
    assert "trust=[Settings]" in said
    trainer.ends()
    assert run.files() == ["ckpt_step_11_epoch_0.pt", "ckpt_step_13_epoch_0.pt"]
