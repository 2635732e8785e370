"""Saves faster than the disk with ``on_full="replace"``, and what the end of one rank means to the others."""

from __future__ import annotations

import pytest
from support.processes import RunDirectory
from support.states import manifest_in

SLOW = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(8 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(256 << 10)}

REPLACING = """
checkpointer = Checkpointer(root, topology=place, slots=2, on_full="replace")
tickets = [checkpointer.save(step, state=state(rank, 2), final=step in (3, 7)) for step in range(8)]
checkpointer.drain()
fates = [type(ticket.committed.exception()).__name__ for ticket in tickets]
for step, ticket in enumerate(tickets):
    error = ticket.committed.exception()
    assert error is None or str(error).startswith(f"step {step}: it gave way"), error
say("fates", *fates)
checkpointer.close()
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_a_set_gives_way_on_all_ranks_or_on_none(run: RunDirectory, tp: int) -> None:
    ranks = run.ranks(REPLACING, tp=tp, **SLOW)
    said = ranks.say("fates")
    assert len(set(said)) == 1, "the ranks agree"
    fates = said[0].split()
    assert set(fates) == {"NoneType", "SnapshotSuperseded"}, "some gave way, and nothing else went wrong"
    assert fates[0] == "NoneType", "its write had begun"
    assert (fates[3], fates[7]) == ("NoneType", "NoneType"), "final ones never give way"
    ranks.end()
    last = [step for step, fate in enumerate(fates) if fate == "NoneType"][-2:]
    suffixes = [f"_tp{rank}" for rank in range(tp)] if tp > 1 else [""]
    assert run.files() == sorted(f"ckpt_step_{step}_epoch_0{suffix}.pt" for step in last for suffix in suffixes)
    status = run.status()
    assert status is not None
    assert status.totals.superseded == tp * fates.count("SnapshotSuperseded")
    assert run.partials() == []


def test_the_last_save_holds_a_replica_that_is_slower_than_rank_0(run: RunDirectory) -> None:
    ranks = run.ranks(
        """
        checkpointer = Checkpointer(root, topology=place)
        checkpointer.track(model=torch.nn.Linear(2, 2))
        if rank == 3:
            hear("go")
        else:
            say("going")
        checkpointer.save(1)
        checkpointer.close()
        """,
        tp=2,
        dp=2,
        CKPT_SERVICE_REPLICA_SECONDS="30",
    )
    for rank in (0, 1, 2):
        ranks[rank].says("going")
    ranks[3].hears("go")
    ranks.end()
    for tp in (0, 1):
        assert manifest_in(run.root / "checkpoint_0" / f"ckpt_step_1_epoch_0_tp{tp}.pt").user == {}
