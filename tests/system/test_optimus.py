"""The hooks of the Optimus Prime trainer, over its stand-in: saved, killed, resumed; old files; what is refused."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.processes import RunDirectory, wait_for

TESTS = Path(__file__).parents[1]
OPTIMUS = f"""
sys.path.insert(0, {str(TESTS)!r})
from support.optimus import LoRAConfig, Optimus, digest
from trainer_hooks.optimus import enable_async_ckpt, wrap
warnings.filterwarnings("ignore", ".*find_unused_parameters.*")
def guarded(call):
    def guard(*arguments, group=None, **options):
        assert group is not None and group is not dist.group.WORLD, f"{{call.__name__}} on the default group"
        return call(*arguments, group=group, **options)
    return guard
for name in ("all_gather", "all_reduce", "broadcast", "barrier"):
    setattr(dist, name, guarded(getattr(dist, name)))
sizes = dict(pp=place.pp, dp=place.dp, tp=place.tp)
def made(seed=1, **options):
    return Optimus(root, seed=seed, checkpoint=True, **sizes, **options)
def ready(trainer):
    trainer.optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01, foreach=False)
    return torch.optim.lr_scheduler.LinearLR(trainer.optimizer, total_iters=20)
def train(trainer, scheduler, steps):
    for _ in range(steps):
        trainer.run()
        scheduler.step()
    return digest(trainer)
"""
# Saves, and goes on to step 5; the second save is on its way when it is killed.
FIRST = (
    OPTIMUS
    + """
trainer = made()
enable_async_ckpt(trainer)
scheduler = ready(trainer)
trainer.checkpointer.track(scheduler=scheduler)
assert trainer.load_ckpt() is None
say("at-2", train(trainer, scheduler, 2))
trainer.save_ckpt(2, 0).wait_committed(60)
say("at-3", train(trainer, scheduler, 1))
trainer.save_ckpt(3, 0).accepted.result(60)
say("at-5", train(trainer, scheduler, 2))
hear("leave")
"""
)
SECOND = (
    OPTIMUS
    + """
trainer = wrap(Optimus)(root, seed=2, checkpoint=True, async_ckpt=True, **sizes)
scheduler = ready(trainer)
trainer.checkpointer.track(scheduler=scheduler)
point = trainer.load_ckpt()
say("from", point.step)
say("now", digest(trainer))
say("at-5", train(trainer, scheduler, 5 - point.step))
"""
)
SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(400 << 10), "CKPT_SERVICE_CHUNK_BYTES": "4096"}
SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


def files(run: RunDirectory, pattern: str = "checkpoint_*/*.pt") -> list[str]:
    return sorted(str(path.relative_to(run.root)) for path in run.root.glob(pattern))


def shards(step: int, pp: int, tp: int) -> list[str]:
    suffixes = [f"_tp{rank}" for rank in range(tp)] if tp > 1 else [""]
    return [f"checkpoint_{stage}/ckpt_step_{step}_epoch_0{suffix}.pt" for stage in range(pp) for suffix in suffixes]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_run_goes_on_bit_for_bit(run: RunDirectory, sizes: tuple[int, int, int]) -> None:
    pp, dp, tp = sizes
    first = run.ranks(FIRST, pp=pp, dp=dp, tp=tp)
    expected = [first.say(word) for word in ("at-2", "at-3", "at-5")]
    whole = sorted(shards(2, pp, tp) + shards(3, pp, tp))
    wait_for(lambda: files(run) == whole, "there is one file for each shard, and none of replicas")
    first.kill()
    second = run.ranks(SECOND, pp=pp, dp=dp, tp=tp)
    assert second.say("from") == ["3"] * (pp * dp * tp)
    assert [second.say("now"), second.say("at-5")] == expected[1:]
    second.kill()


@pytest.mark.parametrize(
    ("sizes", "survives"),
    [((2, 2, 1), True), ((1, 2, 2), True), ((2, 1, 2), True), ((2, 1, 2), False)],
    ids=["2-2-1", "1-2-2", "2-1-2", "2-1-2 with the daemon"],
)
def test_killed_in_mid_write_it_goes_on_bit_for_bit(
    run: RunDirectory, sizes: tuple[int, int, int], survives: bool
) -> None:
    pp, dp, tp = sizes
    first = run.ranks(FIRST, pp=pp, dp=dp, tp=tp, **SLOW)
    at_2, at_3, at_5 = (first.say(word) for word in ("at-2", "at-3", "at-5"))
    wait_for(lambda: list(run.root.glob("checkpoint_*/.*.partial")), "a write has begun")
    assert not set(shards(3, pp, tp)) <= set(files(run)), "and is not over"
    if not survives:
        run.signal_daemon(signal.SIGKILL)
    first.kill()
    second = run.ranks(SECOND, pp=pp, dp=dp, tp=tp)
    assert second.say("from") == ["3" if survives else "2"] * 4, "the daemon writes what it has accepted"
    assert second.say("now") == (at_3 if survives else at_2)
    assert second.say("at-5") == at_5
    second.kill()


def test_with_data_and_tensor_parallelism_state_dict_is_not_whole_and_the_file_is(run: RunDirectory) -> None:
    ranks = run.ranks(
        OPTIMUS
        + """
trainer = made()
scheduler = ready(trainer)
enable_async_ckpt(trainer, False, scheduler)
before = len(trainer.run_info.submod.state_dict())
train(trainer, scheduler, 1)
say("counts", before, len(trainer.run_info.submod.state_dict()))
say("path", trainer.save_ckpt(1, 0).wait_committed(60))
""",
        dp=2,
        tp=2,
    )
    assert ranks.say("counts") == ["12 8"] * 4, "the four tensors that are split are gone"
    paths = ranks.say("path")
    ranks.kill()
    loaded = [torch.load(path, weights_only=True) for path in paths[:2]]
    assert loaded[0].keys() == {
        *("epoch", "step", "stage", "stage_state_dict", "optimizer_state_dict", "scheduler_state_dict", "rng_state")
    }
    for state in loaded:
        tensors = state["stage_state_dict"]
        assert len(tensors) == 12
        assert all(type(value) is torch.Tensor for value in tensors.values())
        assert tensors["module.block.up.weight"].shape == (8, 8), "this rank's half of (16, 8)"
        assert len(state["optimizer_state_dict"]["state"]) == 10, "one parameter never had a gradient"
    halves = [state["stage_state_dict"]["module.block.up.weight"] for state in loaded]
    assert not torch.equal(*halves)


def test_a_state_that_lost_tensors_is_refused(run: RunDirectory) -> None:
    ranks = run.ranks(
        OPTIMUS
        + """
trainer = made()
ready(trainer)
enable_async_ckpt(trainer)
try:
    trainer.save_ckpt(1.5, 0)
except ValueError as error:
    say("number", error)
del trainer.run_info.submod.block.up
try:
    trainer.save_ckpt(1, 0)
except ValueError as error:
    say("refused", error)
"""
    )
    assert "step=1.5" in ranks[0].says("number")
    assert "10 of the 12 tensors" in (refused := ranks[0].says("refused"))
    assert "block.up.weight" in refused
    ranks.kill()


@pytest.mark.parametrize(
    ("option", "sizes"),
    [("swap_opt_in_fwdbwd", (1, 1, 1)), ("swap_model_in_optstep", (1, 1, 2)), ("swap_model_in_optstep", (1, 2, 2))],
)
def test_swapped_tensors_are_saved_as_they_are_now(run: RunDirectory, option: str, sizes: Sequence[int]) -> None:
    body = f"trainer = made({option}=True)"
    pp, dp, tp = sizes
    first = run.ranks(FIRST.replace("trainer = made()", body), pp=pp, dp=dp, tp=tp)
    expected = [first.say(word) for word in ("at-2", "at-3", "at-5")]
    first.kill()
    second = run.ranks(SECOND.replace("(root, seed=2,", f"(root, seed=2, {option}=True,"), pp=pp, dp=dp, tp=tp)
    second.say("from")
    assert [second.say("now"), second.say("at-5")] == expected[1:]
    second.kill()


# --- files of the trainer before it had hooks -------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "dp_now"), [(1, 2), (2, 1)])
def test_old_files_load_whatever_the_wrapper(run: RunDirectory, dp: int, dp_now: int) -> None:
    old = run.ranks(
        OPTIMUS
        + """
trainer = made()
scheduler = ready(trainer)
train(trainer, scheduler, 2)
if place.is_writer:
    trainer.save_ckpt(1, 0)
    trainer.save_ckpt(2, 0)
say("weight", trainer.parameters()[0].flatten().tolist())
""",
        dp=dp,
    )
    weight = old.say("weight")[0]
    old.kill()
    assert files(run) == [f"checkpoint_None_0/ckpt_step_{step}_epoch_0.pt" for step in (1, 2)]
    now = run.ranks(
        OPTIMUS
        + """
trainer = made(seed=2)
scheduler = ready(trainer)
enable_async_ckpt(trainer, scheduler=scheduler)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    say("from", trainer.load_ckpt().step, trainer.load_ckpt(1).step, trainer.load_ckpt(1, 0).step)
say("weight", trainer.parameters()[0].flatten().tolist())
say("moments", len(trainer.optimizer.state))
say("warned", any("lacks scheduler_state_dict, rng_state" in str(w.message) for w in caught))
""",
        dp=dp_now,
    )
    assert now.say("from") == ["2 1 1"] * dp_now
    assert now.say("weight") == [weight] * dp_now
    assert now.say("moments") == ["10"] * dp_now
    assert now.say("warned") == ["True"] * dp_now
    now.kill()


def test_an_old_file_that_all_tensor_parallel_ranks_wrote_is_refused(run: RunDirectory) -> None:
    for stage in (0, 1):
        directory = run.root / f"checkpoint_None_{stage}"
        directory.mkdir(parents=True)
        torch.save({"epoch": 0, "stage_state_dict": {}}, directory / "ckpt_step_7_epoch_0.pt")
    ranks = run.ranks(
        OPTIMUS
        + """
trainer = made()
ready(trainer)
enable_async_ckpt(trainer)
warnings.simplefilter("ignore")
for numbers in ((), (7,), (7, 0)):
    try:
        trainer.load_ckpt(*numbers)
    except Exception as error:
        say(type(error).__name__, error)
say("done")
""",
        pp=2,
        tp=2,
    )
    sentence = "holds the part of one of"
    for stage, said in zip((0, 0, 1, 1), ranks.say("LayoutMismatch"), strict=True):
        assert f"checkpoint_None_{stage}/ckpt_step_7_epoch_0.pt" in said
        assert sentence in said
    for _ in range(2):
        assert all(sentence in said for said in ranks.say("ValueError"))
    ranks.say("done")
    ranks.kill()


@pytest.mark.parametrize(("dp", "dp_now"), [(1, 2), (2, 1)])
def test_the_number_of_replicas_may_change_with_tensor_parallelism(run: RunDirectory, dp: int, dp_now: int) -> None:
    first = run.ranks(FIRST, dp=dp, tp=2)
    first.say("at-5")
    first.kill()
    second = run.ranks(
        OPTIMUS
        + """
warnings.simplefilter("ignore")
trainer = made(seed=2)
enable_async_ckpt(trainer, scheduler=ready(trainer))
say("from", trainer.load_ckpt().step, torch.float32 == trainer.run_info.submod.state_dict().popitem()[1].dtype)
say("path", trainer.save_ckpt(4, 0).wait_committed(60))
""",
        dp=dp_now,
        tp=2,
    )
    assert second.say("from") == ["3 True"] * (2 * dp_now)
    paths = [path for path in second.say("path") if path != "None"]
    second.kill()
    for rank, path in enumerate(paths):
        was = torch.load(Path(path).with_name(f"ckpt_step_3_epoch_0_tp{rank}.pt"), weights_only=True)
        now = torch.load(path, weights_only=True)
        for name, value in was["stage_state_dict"].items():
            other = name.removeprefix("module.") if dp_now == 1 else f"module.{name}"
            assert torch.equal(value, now["stage_state_dict"][other])
        for index, values in was["optimizer_state_dict"]["state"].items():
            for name, value in values.items():
                assert torch.equal(value, now["optimizer_state_dict"]["state"][index][name])


# --- the example ------------------------------------------------------------------------------------------------------


EXAMPLE = (
    OPTIMUS
    + f"""
import runpy, types
class Trainer(Optimus):
    def __init__(self, model, micro_batches, *, use_gpu, pp_size, dp_size, tp_size, checkpoint=False):
        super().__init__(root, pp=pp_size, dp=dp_size, tp=tp_size, checkpoint=checkpoint)
        self.steps = 0
    def train(self):
        self.run_info.submod.train()
    def run(self, data, labels):
        self.steps += 1
        if self.steps == int(os.environ.get("DIES", "0")):
            self.checkpointer.drain(60)
            os.kill(os.getpid(), signal.SIGKILL)
        self.run_info.submod(data[:, :4 if self.tpl.stage == 0 else 8].float()).square().mean().backward()
class Config(types.SimpleNamespace):
    vocab_size = 50
sys.modules["opt_prime"] = types.ModuleType("opt_prime")
sys.modules["opt_prime.opti_pri"] = types.SimpleNamespace(Optimus_p=Trainer)
sys.modules["transformers"] = types.SimpleNamespace(GPT2Config=Config, GPT2LMHeadModel=lambda config: None)
made = []
example = runpy.run_path({str(TESTS.parent / "examples" / "optimus_gpt2.py")!r})
main = example["main"]
main.__globals__["STEPS"] = 3
main.__globals__["Optimus_p"] = lambda *a, **k: made.append(example["Optimus_p"](*a, **k)) or made[-1]
main()
say("steps", made[0].steps)
"""
)


def test_the_example_trains_and_goes_on_after_a_crash(run: RunDirectory) -> None:
    first = run.ranks(EXAMPLE, pp=2, dp=2, DIES="8")  # in the third epoch
    for trainer in first.trainers:
        assert trainer.process.wait(60) == -signal.SIGKILL, trainer.errors()
    second = run.ranks(EXAMPLE, pp=2, dp=2)
    assert second.say("steps") == ["3"] * 4
    second.end()
    assert files(run) == [f"checkpoint_{stage}/ckpt_step_2_epoch_{epoch}.pt" for stage in (0, 1) for epoch in (1, 2)]
