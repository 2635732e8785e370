"""LoRA and HF files of the Optimus Prime trainer, end to end: names, contents, histories, and loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.processes import RunDirectory, wait_for
from support.states import manifest_in

TESTS = Path(__file__).parents[1]
ADAPTED = f"""
sys.path.insert(0, {str(TESTS)!r})
from support.optimus import LoRAConfig, Optimus, digest
from trainer_hooks.optimus import enable_async_ckpt
warnings.filterwarnings("ignore", ".*find_unused_parameters.*")
def made(seed=1, asynchronous=True):
    trainer = Optimus(root, seed=seed, checkpoint=True, pp=place.pp, dp=place.dp, tp=place.tp)
    enable_async_ckpt(trainer, asynchronous)
    trainer.apply_lora(LoRAConfig(r=3))
    trainer.optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01, foreach=False)
    return trainer
def adapters(trainer):
    held = trainer.optimizer.param_groups[0]["params"] if trainer.optimizer else trainer.parameters()
    return [getattr(each, "_local_tensor", each).flatten().tolist() for each in held]
def attempt(work):
    try:
        say("returned", work())
    except Exception as error:
        say("raised", type(error).__name__, error)
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def lora(*steps: int, tp: int = 1) -> list[str]:
    suffixes = [f"_tp{rank}" for rank in range(tp)] if tp > 1 else [""]
    return sorted(f"lora_step_{step}_epoch_0{suffix}.pt" for step in steps for suffix in suffixes)


def test_adapters_are_saved_by_shard_and_come_back(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "adapters"
    ranks = run.ranks(
        ADAPTED
        + f"""
trainer = made()
for step in (1, 2, 3):
    trainer.run()
    trainer.save_lora_ckpt(step, 0).wait_committed(60)
say("at-3", adapters(trainer))
say("path", trainer.save_lora_ckpt(4, 0, lora_dir={str(elsewhere)!r}).wait_committed(60))
trainer.run(2)
say("back", trainer.load_lora_ckpt(3, 0))
say("at-3", adapters(trainer))
trainer.run()
for directory in ({str(elsewhere)!r}, {str(elsewhere) + "_stage_0"!r}):
    say("back", trainer.load_lora_ckpt(4, 0, lora_dir=directory))
    say("at-3", adapters(trainer))
attempt(lambda: trainer.load_lora_ckpt(9, 0))
before = digest(trainer)
trainer.save_ckpt(5, 0).wait_committed(60)
trainer.run()
say("whole", trainer.load_ckpt().step, digest(trainer) == before)
""",
        dp=2,
        tp=2,
    )
    expected = ranks.say("at-3")
    assert expected[0] != expected[1]
    outside = elsewhere.with_name("adapters_stage_0")
    paths = [str(outside / f"lora_step_4_epoch_0_tp{rank}.pt") for rank in (0, 1)]
    assert ranks.say("path") == [*paths, "None", "None"]
    below = run.root / "lora_checkpoint_stage_0"
    assert ranks.say("back") == [str(below / f"lora_step_3_epoch_0_tp{rank}.pt") for rank in (0, 1)] * 2
    for directory in (below, outside, outside):
        if directory is outside:
            assert ranks.say("back") == paths * 2
        assert ranks.say("at-3") == expected
    for said in ranks.say("raised"):
        assert said.startswith("ValueError step=9, epoch=0: nothing to load in ")
        assert str(below) in said
    assert ranks.say("whole") == ["5 True"] * 4, "the optimizer has the adapters only"
    ranks.end()
    assert names(below) == lora(2, 3, tp=2)
    assert names(outside) == lora(4, tp=2)


def test_a_lora_file_is_plain_and_the_old_readers_take_it(run: RunDirectory) -> None:
    ranks = run.ranks(
        ADAPTED
        + """
trainer = made()
trainer.run()
path = trainer.save_lora_ckpt(1, 2).wait_committed(60)
say("path", path)
say("at-1", adapters(trainer))
if place.is_writer:
    other = Optimus(root, seed=3)
    other.apply_lora(LoRAConfig(r=3))
    found = torch.load(path, weights_only=False)["lora_state_dict"]
    said = other.run_info.submod.load_state_dict(found, strict=False)
    say("unexpected", said.unexpected_keys, any("lora_" in name for name in said.missing_keys))
    say("at-1", adapters(other))
"""
    )
    path = Path(ranks[0].says("path"))
    expected = ranks[0].says("at-1")
    assert ranks[0].says("unexpected") == "[] False"
    assert ranks[0].says("at-1") == expected
    ranks.kill()
    assert path == run.root / "lora_checkpoint_stage_0" / "lora_step_1_epoch_2.pt"
    loaded = torch.load(path, weights_only=True)
    assert loaded["lora_config"] == {"r": 3, "alpha": 16.0, "target_modules": ["up"]}
    assert list(loaded["lora_state_dict"]) == ["block.up.lora_A.weight", "block.up.lora_B.weight"]
    assert (loaded["step"], loaded["epoch"]) == (1, 2)


def test_what_earlier_starts_left_half_written_is_cleared_away(run: RunDirectory) -> None:
    """Also without a daemon, and only what is this shard's own."""
    directory = run.root / "lora_checkpoint_stage_0"
    directory.mkdir(parents=True)
    own, newer, other = (
        f".lora_step_1_epoch_0{tp}.pt.{n}-1-host-0.partial" for tp, n in (("", 1), ("", 9), ("_tp1", 1))
    )
    for name in (own, newer, other):
        (directory / name).touch()
    body = ADAPTED + 'made(asynchronous=False).save_lora_ckpt(2, 0).wait_committed(60)\nsay("saved")\n'
    for start in (1, 2):
        ranks = run.ranks(body)
        ranks.say("saved")
        ranks.kill()
        assert ((directory / own).exists(), (directory / newer).exists()) == (start == 1, True)
    assert (directory / other).exists()


def test_old_lora_files_with_a_config_object_load(run: RunDirectory) -> None:
    ranks = run.ranks(
        ADAPTED
        + """
os.makedirs(root, exist_ok=True)
os.chdir(root)
old = Optimus(root, seed=5, tp=place.tp)
old.apply_lora(LoRAConfig(r=3))
old.save_lora_ckpt(6, 1)
trainer = made(seed=6, asynchronous=False)
trainer.load_lora_ckpt(6, 1)
say("same", adapters(trainer) == adapters(old))
""",
        tp=2,
    )
    assert ranks.say("same") == ["True"] * 2
    ranks.kill()


def test_stages_keep_two_of_the_same_steps_over_restarts(run: RunDirectory) -> None:
    body = (
        ADAPTED
        + """
trainer = made()
for line in sys.stdin:
    trainer.save_lora_ckpt(int(line), 0).accepted.result(60)
    say("saved")
"""
    )
    directories = [run.root / f"lora_checkpoint_stage_{stage}" for stage in (0, 1)]
    for steps in ((1, 2, 3), (4, 2)):
        ranks = run.ranks(body, pp=2)
        for step in steps:
            ranks.hear(str(step))
            ranks.say("saved")
        ranks.kill()
    for directory in directories:
        wait_for(lambda directory=directory: names(directory) == lora(2, 4), "two are kept")  # type: ignore[misc]
    assert [manifest_in(directory / lora(2)[0]).attempt for directory in directories] == [2, 2]
    assert run.cli("ls", str(run.root)).stdout.count("LoRA, lora_checkpoint") == 2
    rows = json.loads(run.cli("ls", str(run.root), "--json").stdout)["checkpoints"]
    assert [(row["kind"], row["attempt"], row["step"], row["state"]) for row in rows] == [
        ("lora", 2, 2, "complete"),
        ("lora", 2, 4, "complete"),
    ]
    assert run.cli("latest", str(run.root)).returncode == 5, "adapters are nothing to resume from"
    assert json.loads(run.cli("verify", "--all", "--json", str(run.root)).stdout)["checked"] == 4


def test_a_damaged_part_on_one_rank_touches_nothing_anywhere(run: RunDirectory) -> None:
    ranks = run.ranks(
        ADAPTED
        + """
trainer = made(asynchronous=False)
for step in (1, 2):
    path = trainer.save_lora_ckpt(step, 0).wait_committed(60)
if rank == 1:
    with open(path, "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
trainer.run()
before = adapters(trainer)
attempt(lambda: trainer.load_lora_ckpt(2, 0))
say("untouched", adapters(trainer) == before)
trainer.apply_lora(LoRAConfig(r=3 if rank else 4))
attempt(lambda: trainer.load_lora_ckpt(1, 0))
""",
        pp=2,
    )
    for said in ranks.say("raised"):
        assert said.startswith("DamagedCheckpoint")
        assert "lora_checkpoint_stage_1/lora_step_2_epoch_0.pt" in said
    assert ranks.say("untouched") == ["True"] * 2
    assert all(said.startswith("StateMismatch") for said in ranks.say("raised"))
    ranks.kill()


def test_mistakes_are_named(run: RunDirectory) -> None:
    ranks = run.ranks(
        ADAPTED
        + """
trainer = Optimus(root, checkpoint=True)
enable_async_ckpt(trainer, False)
attempt(lambda: trainer.save_ckpt(1, 0))
attempt(lambda: trainer.save_lora_ckpt(1, 0))
attempt(lambda: enable_async_ckpt(trainer))
trainer.apply_lora(LoRAConfig(target_modules=[object()]))
attempt(lambda: trainer.save_lora_ckpt(1, 0))
"""
    )
    for words in ("optimus_p.optimizer", "apply_lora()", "has a checkpointer already", "lora_config.target_modules[0]"):
        said = ranks[0].says("raised")
        assert said.startswith("ValueError")
        assert words in said
    ranks.kill()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_hf_files_hold_the_model_and_are_replaced_as_a_set(
    run: RunDirectory, tmp_path: Path, asynchronous: bool
) -> None:
    directory = tmp_path / "hf"
    ranks = run.ranks(
        ADAPTED
        + f"""
trainer = made(asynchronous={asynchronous})
weight = trainer.run_info.submod.block.up.base_linear.weight.full_tensor()
say("weight", weight.flatten().tolist())
for line in sys.stdin:
    step = int(line) if line.strip() != "none" else None
    say("path", trainer.save_hf_ckpt({str(directory)!r}, step=step, epoch=step).wait_committed(60))
""",
        pp=2,
        tp=2,
    )
    expected = ranks.say("weight")
    finals = [f"stage{stage}_tp{tp}.pt" for stage in (0, 1) for tp in (0, 1)]
    ranks.hear("none")
    assert ranks.say("path") == [str(directory / name) for name in finals]
    assert names(directory) == finals
    for rank in (0, 1, 2):
        ranks[rank].hears("7")
        ranks[rank].says("path")
    aside = [f".{name}.1-1.kept" for name in finals[:3]]
    assert names(directory) == sorted(aside + finals), "the last whole set stays until the new one is whole"
    ranks[3].hears("7")
    ranks[3].says("path")
    if asynchronous:  # else each rank clears up at its own next save
        wait_for(lambda: names(directory) == finals, "the new set has replaced the old one")
    loaded = [torch.load(directory / name, weights_only=True) for name in finals]
    ranks.kill()
    for number, state in enumerate(loaded):
        assert {key: value for key, value in state.items() if key != "state_dict"} == {
            "stage": number // 2,
            "tp_rank": number % 2,
            "tp_size": 2,
            "pp_size": 2,
            "step": 7,
            "epoch": 7,
        }
        assert not [name for name in state["state_dict"] if "lora_" in name or "base_linear" in name]
    assert loaded[0]["state_dict"].keys() == loaded[1]["state_dict"].keys()
    for stage in (0, 1):
        halves = [state["state_dict"]["block.up.weight"] for state in loaded[2 * stage :][:2]]
        assert str(torch.cat(halves).flatten().tolist()) == expected[2 * stage]
    assert "embed.weight" in loaded[0]["state_dict"]
    assert "head.weight" in loaded[2]["state_dict"]
