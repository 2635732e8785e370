"""Several ranks that save: who writes what, how they meet, what only a replica has, and sets dropped by all or none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.processes import Meeting, RunDirectory, wait_for
from support.states import manifest_in

from trainer_hooks import Checkpointer, Topology

MODEL = """
def weighing(value):
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model
"""


def value_in(path: Path) -> float:
    """Return the one value that all weights in a file have."""
    weights = torch.load(path, weights_only=True)["stage_state_dict"]
    (value,) = {float(number) for tensor in weights.values() for number in tensor.flatten()}
    return value


@pytest.mark.parametrize("meet", ["gloo", "launch"])
def test_one_file_for_each_shard_and_replicas_load_it(run: RunDirectory, meet: Meeting) -> None:
    ranks = run.ranks(
        MODEL
        + """
with Checkpointer(root, topology=place) as checkpointer:
    model = weighing(rank)
    checkpointer.track(model=model)
    ticket = checkpointer.save(1)
    if not place.is_writer:
        say("at-once", [future.done() for future in (ticket.staged, ticket.accepted, ticket.committed)])
    say("path", ticket.wait_committed(60))
    hear("resume")
    checkpointer.track(model=(model := weighing(-1)))
    point = checkpointer.resume()
    say("from", point.step, point.attempt, point.sequence, float(model.weight.min()), float(model.weight.max()))
""",
        tp=2,
        dp=2,
        meet=meet,
    )
    paths = [run.root / "checkpoint_0" / f"ckpt_step_1_epoch_0_tp{tp}.pt" for tp in (0, 1)]
    assert [ranks[rank].says("at-once") for rank in (2, 3)] == ["[True, True, True]"] * 2
    assert ranks.say("path") == [*map(str, paths), "None", "None"]
    assert sorted((run.root / "checkpoint_0").iterdir()) == paths
    assert [value_in(path) for path in paths] == [0, 1]
    for tp, path in enumerate(paths):
        found = manifest_in(path)
        assert (found.stage, found.tp_rank, found.dp_rank, found.pp, found.dp, found.tp) == (0, tp, 0, 1, 2, 2)
        assert found.user == {}
    ranks.hear("resume")
    assert ranks.say("from") == ["1 1 1 0.0 0.0", "1 1 1 1.0 1.0"] * 2
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert not list((run.root / ".ckpt_service" / "launches").glob("*")), "the meeting place is gone"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_stages_have_directories_and_no_suffix_without_tensor_parallelism(
    run: RunDirectory, asynchronous: bool
) -> None:
    ranks = run.ranks(
        MODEL
        + f"""
with Checkpointer(root, topology=place, async_ckpt={asynchronous}, postfix="a") as checkpointer:
    checkpointer.track(model=weighing(rank))
    say("path", checkpointer.save(3, 1).wait_committed(60))
""",
        pp=2,
    )
    paths = [run.root / f"checkpoint_a_{stage}" / "ckpt_step_3_epoch_1.pt" for stage in (0, 1)]
    assert ranks.say("path") == list(map(str, paths))
    assert [value_in(path) for path in paths] == [0, 1]
    ranks.end()


def test_ranks_that_cannot_meet_are_told_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPT_SERVICE_LAUNCH", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"(?s)init_process_group.*CKPT_SERVICE_LAUNCH"):
        Checkpointer(tmp_path, topology=Topology(tp=2))
    lazy = Checkpointer(tmp_path, topology=Topology(tp=2), async_ckpt=False)
    with pytest.raises(ValueError, match=r"(?s)init_process_group.*CKPT_SERVICE_LAUNCH"):
        lazy.save(1, state={})
    lazy.close()
    assert list(tmp_path.rglob("*.json")) == [], "no attempt was taken"


def test_a_topology_that_torch_distributed_contradicts_is_refused(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
        for wrong in (None, Topology(1 - rank, tp=2), Topology(rank, tp=4)):
            try:
                Checkpointer(root, topology=wrong)
            except ValueError as error:
                say("refused", error)
        """,
        tp=2,
    )
    for wrong in (["0 of 1"] * 2, ["1 of 2", "0 of 2"], ["0 of 4", "1 of 4"]):
        for rank, said in enumerate(ranks.say("refused")):
            assert said == f"topology: rank {wrong[rank]}, and torch.distributed says rank {rank} of 2"
    ranks.end()


SAMPLER = """
import random
class Sampler:
    def __init__(self, position):
        self.position = position
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]
def draws():
    return random.random(), float(torch.rand(()))
def begin(seed):
    torch.manual_seed(seed); random.seed(seed)
    sampler = Sampler(seed)
    checkpointer.track(model=torch.nn.Linear(2, 2), sampler=sampler)
    return sampler
"""


@pytest.mark.parametrize(("meet", "asynchronous"), [("gloo", True), ("launch", False)])
def test_every_replica_goes_on_with_its_own_numbers(run: RunDirectory, meet: Meeting, asynchronous: bool) -> None:
    saving = run.ranks(
        SAMPLER
        + f"""
checkpointer = Checkpointer(root, topology=place, async_ckpt={asynchronous})
sampler = begin(100 + rank)
draws()
checkpointer.save(1).wait_committed(60)
say("next", *draws())
hear("end")
checkpointer.close()
""",
        dp=3,
        meet=meet,
    )
    expected = saving.say("next")
    assert len(set(expected)) == 3
    saving.hear("end")
    saving.end()
    resuming = run.ranks(
        SAMPLER
        + """
warnings.simplefilter("error")
with Checkpointer(root, topology=place, async_ckpt=False) as checkpointer:
    sampler = begin(7)
    checkpointer.resume()
    say("sampler", sampler.position)
    say("next", *draws())
""",
        dp=3,
        meet=meet,
        launch="second",
    )
    assert resuming.say("sampler") == ["100", "101", "102"]
    assert resuming.say("next") == expected
    resuming.end()


def test_a_late_replica_is_not_waited_for_and_is_named(run: RunDirectory) -> None:
    ranks = run.ranks(
        SAMPLER
        + """
checkpointer = Checkpointer(root, topology=place)
sampler = begin(100 + rank)
if rank == 1:
    hear("save")
ticket = checkpointer.save(1)
if rank == 0:
    say("returned", ticket.staged.done(), ticket.accepted.done())
say("path", ticket.wait_committed(60))
hear("on-time")
say("path", checkpointer.save(2).wait_committed(60))
hear("end")
checkpointer.close()
""",
        dp=2,
        CKPT_SERVICE_REPLICA_SECONDS="1",
    )
    assert ranks[0].says("returned") == "True False"
    late = Path(ranks[0].says("path"))
    assert manifest_in(late).user == {"absent_replicas": "1"}
    ranks[1].hears("save")
    assert ranks[1].says("path") == "None"
    # What came too late for one save is not taken for a part of the next one.
    ranks.hear("on-time")
    assert manifest_in(Path(ranks[0].says("path"))).user == {}
    ranks.hear("end")
    ranks.end()
    resumed = run.ranks(
        SAMPLER
        + """
with Checkpointer(root, topology=place, async_ckpt=False) as checkpointer:
    sampler = begin(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.resume(step=1)
    say("from", sampler.position, *(warning.message for warning in caught))
""",
        dp=2,
    )
    first, second = resumed.say("from")
    assert first == "100"
    assert second.startswith("100 step 1 holds no random numbers of data-parallel rank 1")
    resumed.end()


SKIPPING = """
checkpointer = Checkpointer(root, topology=place, slots=1, on_full="skip")
def save(step, megabytes, **options):
    hear("save")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ticket = checkpointer.save(step, state=state(rank, megabytes), **options)
    say("warned", *(warning.message for warning in caught))
    return ticket
def say_outcome(ticket):
    try:
        say("outcome", ticket.wait_committed(60))
    except Exception as error:
        say("outcome", type(error).__name__, error)
slow = save(1, megabytes=8 if place.tp_rank else 1)
if place.tp_rank == 0:
    slow.wait_committed(60)
say("saved")
say_outcome(save(2, megabytes=1))
last = save(3, megabytes=1, final=True)
say_outcome(last)
hear("end")
checkpointer.close()
"""


def test_a_set_is_skipped_by_all_ranks_or_by_none(run: RunDirectory) -> None:
    ranks = run.ranks(
        SKIPPING,
        tp=2,
        dp=2,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(4 << 20),
        CKPT_SERVICE_CHUNK_BYTES=str(64 << 10),
    )
    ranks.hear("save")
    assert ranks.say("warned") == [""] * 4
    assert ranks.say("saved") == [""] * 4
    # Tensor-parallel rank 0 has room now, rank 1 has not: its only slot is being written.
    run.signal_daemon(signal.SIGSTOP)
    assert run.files() == ["ckpt_step_1_epoch_0_tp0.pt"]
    ranks.hear("save")
    assert ranks.say("warned") == [""] * 4
    outcomes = ranks.say("outcome")
    for skipped in outcomes[:2]:
        assert skipped.startswith("SnapshotSkipped step 2 was skipped: all 1 slots of some rank are taken")
    assert outcomes[2:] == ["None", "None"]
    run.signal_daemon(signal.SIGCONT)
    ranks.hear("save")  # the last one waits for its slot instead
    for warned in ranks.say("warned")[:2]:
        assert warned.startswith("an earlier save failed: step 2 was skipped")
    assert ranks.say("outcome")[:2] == [
        str(run.root / "checkpoint_0" / f"ckpt_step_3_epoch_0_tp{tp}.pt") for tp in (0, 1)
    ]
    ranks.hear("end")
    ranks.end()
    assert run.files() == [f"ckpt_step_{step}_epoch_0_tp{tp}.pt" for step in (1, 3) for tp in (0, 1)]


def test_skipping_needs_a_vote_and_a_vote_needs_torch_distributed(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
        try:
            Checkpointer(root, topology=place, on_full="skip")
        except ValueError as error:
            say("refused", error)
        with Checkpointer(root, topology=place) as checkpointer:
            if rank % 2 == 0:
                hear("save")  # the other one neither votes nor waits
            say("path", checkpointer.save(1, state={}).wait_committed(60))
        """,
        tp=2,
        dp=2,
        meet="launch",
        CKPT_SERVICE_RESUME_WAIT_SECONDS="5",
    )
    for said in ranks.say("refused"):
        assert said.startswith("on_full: ")
        assert "torch.distributed" in said
    directory = run.root / "checkpoint_0"
    assert ranks[1].says("path") == str(directory / "ckpt_step_1_epoch_0_tp1.pt")
    assert run.files() == ["ckpt_step_1_epoch_0_tp1.pt"]
    for rank in (0, 2):
        ranks[rank].hears("save")
    assert ranks[0].says("path") == str(directory / "ckpt_step_1_epoch_0_tp0.pt")
    ranks.end()
    wait_for(run.daemon_has_left, "the daemon leaves: the start that was refused holds on to nothing", seconds=15)


VOTES_ALONE = """
checkpointer = Checkpointer(root, topology=place, slots=2, on_full="replace")
for step in (1, 2):
    checkpointer.save(step, state=state(step, 2))
hear("go")
if rank == 0:
    os._exit(1)
ticket = checkpointer.save(3, state=state(3, 2))
say("third", type(ticket.committed.exception(60)).__name__)
checkpointer.drain()
say("files", *sorted(os.listdir(os.path.join(root, "checkpoint_0"))))
os._exit(0)
"""


def test_what_was_parked_for_a_vote_that_never_ended_is_written(run: RunDirectory) -> None:
    slow = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(1 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(64 << 10)}
    ranks = run.ranks(VOTES_ALONE, tp=2, **slow)
    wait_for(run.being_written, "the first is being written")
    ranks.hear("go")
    assert ranks[1].says("third") == "SaveFailed"
    names = ranks[1].says("files").split()
    assert {"ckpt_step_1_epoch_0_tp1.pt", "ckpt_step_2_epoch_0_tp1.pt"} <= set(names)
    ranks[1].ends()


def test_the_status_tells_the_policy_and_how_long_saves_were_blocked(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root, slots=1)
        for step in range(3):
            checkpointer.save(step, state=state(step, 2))
        checkpointer.close()
        """,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(8 << 20),
        CKPT_SERVICE_CHUNK_BYTES=str(256 << 10),
    )
    trainer.ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    status = run.status()
    assert status is not None
    assert status.daemon.state == "stopped"
    assert (status.attempt, len(status.run_id or "")) == (1, 8), "the status is still about this run"
    assert status.queue.on_full == "block"
    assert 0.1 < status.queue.blocked_seconds < 30
