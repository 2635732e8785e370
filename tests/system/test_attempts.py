"""Starts of the trainer: their numbers, their lineage, restarts of one rank or of all, and steps saved again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import OBEY, Meeting, Ranks, RunDirectory, wait_for
from support.states import manifest_in

from ckpt_service import scan

SAVING = """
def save(step, value=None):
    shown = step + rank / 10 if value is None else value
    ticket = checkpointer.save(step, state={"value": torch.full((9000,), float(shown))})
    say("path", ticket.wait_committed(60))
def resume(**numbers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        point = checkpointer.resume(**numbers)
    say("warned", *(warning.message for warning in caught))
    say("from", point and (point.step, point.attempt, point.sequence, round(float(point.state["value"].unique()), 1)))
checkpointer = Checkpointer(root, topology=place)
"""


def started(run: RunDirectory, **options: Any) -> Ranks:
    """Start ranks that save and resume as they are told."""
    return run.ranks(SAVING + OBEY, **options)


def attempt(run: RunDirectory, number: int) -> dict[str, Any]:
    """Return the record of a start."""
    found: dict[str, Any] = json.loads((run.root / ".ckpt_service" / "attempts" / f"{number}.json").read_text())
    return found


def states(run: RunDirectory) -> dict[tuple[int, int], str]:
    """Return the state of each checkpoint, by attempt and step."""
    found = scan.load_catalog(str(run.root), None).of_kind("train")
    return {(checkpoint.id.attempt, checkpoint.id.step): checkpoint.state.value for checkpoint in found}


def latest(run: RunDirectory) -> int | None:
    newest = scan.load_catalog(str(run.root), None).newest_complete()
    return newest.id.step if newest is not None else None


def steps(run: RunDirectory) -> list[list[int]]:
    """Return for each tensor-parallel rank the steps of which it has a file."""
    names = [run.files(f"ckpt_*_tp{rank}.pt") for rank in (0, 1)]
    return [sorted(int(name.split("_")[2]) for name in mine) for mine in names]


def value_in(path: Path) -> float:
    return round(float(torch.load(path, weights_only=True)["value"].unique()), 1)


@pytest.mark.parametrize("meet", ["gloo", "launch"])
def test_one_start_is_one_attempt_on_all_ranks(run: RunDirectory, meet: Meeting) -> None:
    for number in (1, 2):
        ranks = started(run, pp=2, tp=2, meet=meet)
        ranks.hear("save(1)")
        found = [manifest_in(Path(path)) for path in ranks.say("path")]
        assert {(m.attempt, m.sequence, m.run_id) for m in found} == {(number, 1, attempt(run, 1)["run_id"])}
        assert {(m.stage, m.tp_rank) for m in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
        record = attempt(run, number)
        assert (record["n"], record["pid"], record["resumed_from"]) == (number, ranks[0].pid, None)
        assert record["topology"] == {"pp": 2, "dp": 1, "tp": 2}
        ranks.end()
    assert len(list((run.root / ".ckpt_service" / "attempts").iterdir())) == 2


REFUSED = """
try:
    Checkpointer(root, topology=place)
except Exception as error:
    say("refused", type(error).__name__, error)
"""


def test_a_rank_that_restarts_alone_is_refused_and_all_together_are_not(run: RunDirectory) -> None:
    ranks = started(run, tp=3, meet="launch")
    ranks.hear("save(1)")
    ranks.say("path")
    for number in (1, 0):
        ranks[number].kill()
        said = run.rank(number, REFUSED, tp=3).says("refused")
        assert said.startswith(f"RunDirectoryBusy rank {number} has started already in this launch")
        assert "restart all ranks together" in said
    ranks.kill()
    assert not (run.root / ".ckpt_service" / "attempts" / "2.json").exists(), "who was refused is no start"
    again = started(run, tp=3, meet="launch")
    again.hear("resume()")
    assert again.say("from") == [f"(1, 1, 1, 1.{rank})" for rank in range(3)]
    again.kill()
    started(run, tp=3, meet="launch", launch="another one").end()
    assert list((run.root / ".ckpt_service" / "launches").iterdir()) == [], "what the dead left is swept"


def test_one_process_may_start_twice_in_one_launch(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
        for number in (1, 2, 3):
            with Checkpointer(root, topology=place) as checkpointer:
                point = checkpointer.resume()
                say("from", point and point.step)
                checkpointer.save(number, state={}).wait_committed(60)
        """,
        tp=2,
        meet="launch",
    )
    for expected in ("None", "1", "2"):
        assert ranks.say("from") == [expected] * 2
    ranks.end()


def test_a_resume_counts_once_it_succeeded_on_all_ranks(run: RunDirectory) -> None:
    body = """
    def weighing(value, width):
        model = torch.nn.Linear(2, width)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return model
    def track(value, width):
        global model
        model = weighing(value, width)
        checkpointer.track(model=model)
    def save(step):
        say("path", checkpointer.save(step).wait_committed(60))
    def resume():
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        try:
            outcome = checkpointer.resume().step
        except Exception as error:
            outcome = f"{type(error).__name__} {error}"
        say("weights", float(model.weight.min()), float(model.weight.max()), torch.equal(before, torch.get_rng_state()))
        say("outcome", outcome)
    checkpointer = Checkpointer(root, topology=place)
    """
    first = run.ranks(body + OBEY.replace("\n", "\n    "), tp=2)
    first.hear("track(1.0 + rank, 2)")
    first.hear("save(5)")
    first.say("path")
    first.kill()
    second = run.ranks(body + OBEY.replace("\n", "\n    "), tp=2)
    second.hear("track(9.0, 2 + rank)")
    second.hear("resume()")
    assert second.say("weights") == ["9.0 9.0 True"] * 2
    assert [outcome.split(": ", 1)[0] for outcome in second.say("outcome")] == [
        "StateMismatch rank 1",
        "StateMismatch the checkpoint does not fit",
    ]
    assert attempt(run, 2)["resumed_from"] is None
    second.hear("track(9.0, 2)")
    second.hear("resume()")
    assert second.say("weights") == ["1.0 1.0 False", "2.0 2.0 False"]
    assert second.say("outcome") == ["5", "5"]
    assert attempt(run, 2)["resumed_from"] == {"attempt": 1, "sequence": 1, "explicit": False}
    second.end()


def test_the_history_of_six_starts(run: RunDirectory) -> None:
    # Attempt 1 saves 100, 200, 300, 400.
    ranks = started(run, tp=2)
    for step in (100, 200, 300, 400):
        ranks.hear(f"save({step})")
        ranks.say("path")
    assert latest(run) == 400
    wait_for(lambda: steps(run) == [[300, 400]] * 2, "older ones are pruned")
    ranks.kill()

    # Attempt 2 resumes and saves 500; it dies when only tensor-parallel rank 0 has 600.
    ranks = started(run, tp=2)
    ranks.hear("resume()")
    assert ranks.say("from") == ["(400, 1, 4, 400.0)", "(400, 1, 4, 400.1)"]
    ranks.hear("save(500)")
    ranks.say("path")
    ranks[0].hears("save(600)")
    ranks[0].says("path")
    wait_for(lambda: steps(run) == [[400, 500, 600], [400, 500]], "older ones are pruned")
    ranks.kill()
    assert latest(run) == 500
    assert states(run)[2, 600] == "partial"

    # Attempt 3 resumes from 500: 600 of attempt 2 cannot complete any more. It saves 600 again, a set of its own.
    ranks = started(run, tp=2)
    ranks.hear("resume()")
    assert ranks.say("from") == ["(500, 2, 1, 500.0)", "(500, 2, 1, 500.1)"]
    assert latest(run) == 500
    assert states(run) == {(1, 400): "complete", (2, 500): "complete", (2, 600): "dead"}
    ranks.hear("save(600, 6)")
    ranks.say("path")
    assert latest(run) == 600
    wait_for(lambda: steps(run) == [[500, 600]] * 2 and not run.files(".*"), "older ones are pruned")
    assert states(run) == {(2, 500): "complete", (3, 600): "complete"}
    ranks.kill()

    # Attempt 4 rolls back to 500 and dies before its first save.
    ranks = started(run, tp=2)
    ranks.hear("resume(step=500)")
    assert ranks.say("from") == ["(500, 2, 1, 500.0)", "(500, 2, 1, 500.1)"]
    ranks.kill()
    assert latest(run) == 500
    assert states(run) == {(2, 500): "complete", (3, 600): "abandoned"}
    assert steps(run) == [[500, 600]] * 2

    # Attempt 5 resumes from 500, not from 600, and saves 510, 520.
    ranks = started(run, tp=2)
    ranks.hear("resume()")
    assert ranks.say("from") == ["(500, 2, 1, 500.0)", "(500, 2, 1, 500.1)"]
    for step in (510, 520):
        ranks.hear(f"save({step})")
        ranks.say("path")
    assert latest(run) == 520
    wait_for(lambda: steps(run) == [[510, 520]] * 2, "what was abandoned is pruned")
    ranks.kill()

    # Attempt 6 never resumes and saves 10, 20, 30: what it did not come from stays.
    ranks = started(run, tp=2)
    for step in (10, 20, 30):
        ranks.hear(f"save({step})")
        ranks.say("path")
    assert latest(run) == 30
    wait_for(lambda: steps(run) == [[20, 30, 510, 520]] * 2, "its own are pruned, foreign ones are not")
    assert states(run) == {(5, 510): "foreign", (5, 520): "foreign", (6, 20): "complete", (6, 30): "complete"}
    ranks.end()


def test_a_step_saved_again_keeps_the_old_shard_until_all_ranks_have_the_new_one(run: RunDirectory) -> None:
    ranks = started(run, tp=2)
    for step in (90, 100):
        ranks.hear(f"save({step})")
        paths = list(map(Path, ranks.say("path")))
    ranks[0].hears("save(100, 7)")
    ranks[0].says("path")
    old = ".ckpt_step_100_epoch_0_tp0.pt.1-2.kept"
    assert run.files(".*.kept") == [old]
    assert [value_in(path) for path in paths] == [7, 100.1], "both are there under one name"
    ranks.kill()

    ranks = started(run, tp=2)
    ranks.hear("resume()")
    assert ranks.say("from") == ["(100, 1, 2, 100.0)", "(100, 1, 2, 100.1)"]
    ranks[0].hears("save(100, 8)")
    ranks[0].says("path")
    wait_for(lambda: run.files(".*.kept") == [old], "the set that cannot complete is pruned, the complete one is not")
    assert [value_in(path) for path in paths] == [8, 100.1]
    ranks[1].hears("save(100, 8)")
    ranks[1].says("path")
    wait_for(lambda: run.files(".*") == [], "the old shard goes once the new set is complete")
    assert [value_in(path) for path in paths] == [8, 8]
    ranks.hear("resume()")
    assert ranks.say("from") == ["(100, 2, 1, 8.0)"] * 2
    ranks.end()
    assert steps(run) == [[90, 100]] * 2


@pytest.mark.parametrize(("patience", "expected"), [("30", "(100, 1, 2, 1.0)"), ("0.5", "(90, 1, 1, 90.0)")])
def test_a_late_write_of_a_dead_trainer_never_replaces_what_the_new_one_saved(
    run: RunDirectory, patience: str, expected: str
) -> None:
    env = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(2 << 20), "CKPT_SERVICE_RESUME_WAIT_SECONDS": patience}
    ranks = started(run, **env)
    ranks.hear("save(90)")
    ranks.say("path")
    ranks.hear("checkpointer.save(100, state=state(1, megabytes=5)).accepted.result(60); say('accepted')")
    ranks.say("accepted")
    ranks.kill()
    assert run.files() == ["ckpt_step_90_epoch_0.pt"]
    ranks = started(run, **env)
    ranks.hear("resume()")
    warned = ranks[0].says("warned")
    assert ("older snapshots were not written within 0.5 s and are dropped" in warned) == (patience == "0.5")
    assert ranks[0].says("from") == expected
    for step in (100, 110):
        ranks.hear(f"save({step}, 2)")
        assert value_in(Path(ranks[0].says("path"))) == 2
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")
    directory = run.root / "checkpoint_0"
    assert sorted(path.name for path in directory.iterdir()) == [f"ckpt_step_{n}_epoch_0.pt" for n in (100, 110)]
    found = manifest_in(directory / "ckpt_step_100_epoch_0.pt")
    assert (value_in(directory / "ckpt_step_100_epoch_0.pt"), found.attempt) == (2, 2)


def newest_in_status(run: RunDirectory) -> int | None:
    status = run.status()
    return status.last_complete.step if status is not None and status.last_complete is not None else None


ROLLING_BACK = """
def saved(step):
    checkpointer.save(step, state={"value": torch.full((9000,), float(step))}).wait_committed(60)
def resumed(**numbers):
    point = checkpointer.resume(**numbers)
    return point.step, point.attempt, point.sequence
checkpointer = Checkpointer(root, topology=place, async_ckpt=asynchronous, keep_last=4)
saved(1), saved(2), saved(3)
say("rolled-back", resumed(step=1), checkpointer.latest().step)
hear("go")
saved(4), saved(2)
say("again", resumed(), resumed(step=2), checkpointer.latest().step)
checkpointer.close()
"""


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_roll_back_in_the_object_that_has_saved_begins_another_attempt(run: RunDirectory, asynchronous: bool) -> None:
    ranks = run.ranks(f"asynchronous = {asynchronous}\n{ROLLING_BACK}", tp=2)
    assert ranks.say("rolled-back") == ["(1, 1, 1) 1"] * 2
    assert states(run) == {(1, 1): "complete", (1, 2): "abandoned", (1, 3): "abandoned"}
    assert attempt(run, 2)["resumed_from"] == {"attempt": 1, "sequence": 1, "explicit": True}
    assert attempt(run, 1)["resumed_from"] is None
    if asynchronous:
        wait_for(lambda: newest_in_status(run) == 1, "the status knows what counts now")
    ranks.hear("go")
    assert ranks.say("again") == ["(2, 2, 5) (2, 2, 5) 2"] * 2
    ranks.end()
    # What was resumed is the head of the second attempt, so the third, which has saved nothing, abandons nothing.
    assert states(run) == {(1, 1): "complete", (2, 4): "complete", (2, 2): "complete"}
    assert {n: attempt(run, n)["resumed_from"] for n in (3,)} == {3: {"attempt": 2, "sequence": 5, "explicit": True}}


def test_a_resume_waits_for_the_objects_own_saves(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        for step in (1, 2):
            checkpointer.save(step, state=state(step, megabytes=4))
        say("from", checkpointer.resume().step)
        """,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(4 << 20),
        CKPT_SERVICE_CHUNK_BYTES=str(1 << 20),
    )
    assert trainer.says("from") == "2"
    trainer.ends()


WRONG_ON_ONE_RANK = """
began = time.monotonic()
try:
    Checkpointer(root, topology=place, async_ckpt=asynchronous).resume()
except Exception as error:
    say("refused", round(time.monotonic() - began), type(error).__name__, error)
hear("go")
"""


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("meet", ["gloo", "launch"])
def test_settings_that_are_wrong_on_one_host_are_told_on_all_ranks(
    run: RunDirectory, meet: Meeting, asynchronous: bool
) -> None:
    wrong = {1: {"CKPT_SERVICE_STALL_SECONDS": "soon"}}
    body = f"asynchronous = {asynchronous}\n{WRONG_ON_ONE_RANK}"
    ranks = run.ranks(body, tp=2, meet=meet, each=lambda rank: wrong.get(rank, {}))
    first, second = ranks.say("refused")
    assert "CkptError rank 1: ValueError: CKPT_SERVICE_STALL_SECONDS='soon'" in first
    assert "ValueError CKPT_SERVICE_STALL_SECONDS='soon'" in second
    ranks.kill()
    assert not (run.root / ".ckpt_service" / "attempts").exists(), "no attempt was taken"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_root_that_cannot_be_made_on_one_host_is_told_on_all_ranks(run: RunDirectory, asynchronous: bool) -> None:
    body = f"asynchronous = {asynchronous}\n{WRONG_ON_ONE_RANK}"
    ranks = run.ranks(body, tp=2, each=lambda rank: {"ROOT": "/proc/nowhere"} if rank else {})
    for said in ranks.say("refused"):
        seconds, kind, reason = said.split(maxsplit=2)
        assert (int(seconds) < 20, kind) == (True, "CkptError")
        assert "preparing the root failed: No such file or directory: /proc/nowhere" in reason
    ranks.kill()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("Topology(rank=0, tp=2)", "rank 0 of 2, and torch.distributed says rank 1 of 2"),
        ("Topology()", "rank 0 of 1, and torch.distributed says rank 1 of 2"),
        ("Topology(rank=1, pp=2)", "rank 1 has pp, dp, tp = (2, 1, 1), and rank 0 has (1, 1, 2)"),
    ],
)
def test_a_topology_that_is_wrong_on_one_rank_is_told_on_all_ranks(run: RunDirectory, wrong: str, told: str) -> None:
    mistake = f"place = {wrong} if rank == 1 else place\nasynchronous = True\n"
    ranks = run.ranks(mistake + WRONG_ON_ONE_RANK, tp=2)
    for said in ranks.say("refused"):
        assert said.endswith(f"ValueError topology: {told}")
    ranks.kill()
