"""When a wait is over: what statuses and files say in, a judgement out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import pytest
from support.checkpoints import LONG_AGO, attempt, catalog, shard

from ckpt_service.catalog import Shard
from ckpt_service.cli.steps import StepName
from ckpt_service.cli.verdict import Judgement, Scene, Target, Verdict, judge_saves, judge_step, pending_targets
from ckpt_service.naming import Kind
from ckpt_service.records import (
    DaemonStatus,
    ErrorEntry,
    PendingStatus,
    QueueStatus,
    ServiceStatus,
    Totals,
    save_of,
)

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
THIRD = Target("train", 1, 3, 0, 300)


def waiting(step: int, sequence: int, *, kind: Kind = "train") -> PendingStatus:
    name = f"1-{sequence}-0-0"
    return PendingStatus(
        snapshot_id=name if kind == "train" else f"{kind}-{name}",
        kind=kind,
        step=step,
        epoch=0,
        stage=0,
        tp_rank=0,
        bytes_total=1,
        submitted_at=NOW,
    )


def failed(step: int, at: datetime = NOW) -> ErrorEntry:
    return ErrorEntry(at=at, code="EIO", message=f"step {step} broke", hint="look", step=step, stage=0, tp_rank=0)


def status(pending: Sequence[PendingStatus] = (), errors: Sequence[ErrorEntry] = ()) -> ServiceStatus:
    return ServiceStatus(
        host="h",
        root="/runs",
        run_id=None,
        attempt=None,
        daemon=DaemonStatus(
            pid=1,
            pid_start=1,
            version="0",
            protocol=1,
            socket="/s",
            state="writing",
            started_at=NOW,
            heartbeat_at=NOW,
        ),
        queue=QueueStatus(depth=0, capacity=0, bytes=0, on_full="block", blocked_seconds=0),
        writing=[],
        pending=list(pending),
        shards=[],
        last_complete=None,
        totals=Totals(),
        storage=None,
        errors=list(errors),
    )


def scene(*files: Shard, runs: bool = True, said: ServiceStatus | None = None, since: datetime = LONG_AGO) -> Scene:
    return Scene("/runs", catalog(files, attempt(1)), [said] if said else [], runs, since)


def verdict(judgement: Judgement) -> Verdict:
    return judgement.verdict


@pytest.mark.parametrize(("name", "save"), [("4-13-0-1", (4, 13)), ("lora-2-7-10-3", (2, 7))])
def test_a_snapshot_id_names_its_save(name: str, save: tuple[int, int]) -> None:
    assert save_of(name) == save


def test_what_is_waited_for_by_default() -> None:
    assert pending_targets(scene(shard(1, 2, 200), said=status([waiting(300, 3)]))) == {THIRD}
    assert pending_targets(scene(shard(1, 2, 200), shard(1, 3, 300))) == {THIRD}
    assert pending_targets(scene()) == frozenset()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (scene(said=status([waiting(300, 3)])), Verdict.WAIT),
        (scene(said=status([waiting(300, 3)]), runs=False), Verdict.FAILED),
        (scene(shard(1, 3, 300), said=status([waiting(400, 4)])), Verdict.COMPLETE),
        (scene(shard(1, 2, 200), said=status(errors=[failed(300)])), Verdict.FAILED),
        (scene(shard(1, 2, 200), said=status([waiting(300, 3)], [failed(300)])), Verdict.WAIT),  # it is tried again
        (scene(shard(1, 3, 300), said=status(errors=[failed(300)])), Verdict.COMPLETE),
        (scene(shard(1, 2, 300), said=status(errors=[failed(300)])), Verdict.FAILED),  # an earlier save of that step
        (scene(shard(1, 4, 400)), Verdict.COMPLETE),  # pruned, or given way to a newer one
        (scene(shard(1, 3, 300, tp=2)), Verdict.WAIT),
        (scene(shard(1, 3, 300, tp=2), runs=False), Verdict.NOTHING),
        (scene(shard(1, 1, 100), shard(1, 3, 300, tp=2), runs=False), Verdict.FAILED),
        (scene(shard(1, 3, 300, problem="it is short")), Verdict.FAILED),
        (scene(), Verdict.WAIT),
    ],
)
def test_a_save_that_was_pending(found: Scene, expected: Verdict) -> None:
    assert verdict(judge_saves({THIRD}, found)) is expected


def test_several_saves_are_over_when_all_are() -> None:
    both = {THIRD, Target("train", 1, 4, 0, 400)}
    assert verdict(judge_saves(both, scene(shard(1, 3, 300), said=status([waiting(400, 4)])))) is Verdict.WAIT
    assert verdict(judge_saves(both, scene(shard(1, 3, 300), shard(1, 4, 400)))) is Verdict.COMPLETE
    broken = judge_saves(both, scene(shard(1, 2, 200), shard(1, 4, 400), said=status(errors=[failed(300)])))
    assert broken == Judgement(Verdict.FAILED, "step 300 broke; look")
    assert verdict(judge_saves((), scene())) is Verdict.WAIT
    assert verdict(judge_saves((), scene(runs=False))) is Verdict.NOTHING


def test_files_of_other_kinds_are_known_by_the_status_only() -> None:
    lora = Target("lora", 1, 3, 0, 300)
    assert pending_targets(scene(said=status([waiting(300, 3, kind="lora")]))) == {lora}
    assert verdict(judge_saves({lora}, scene(said=status([waiting(300, 3, kind="lora")])))) is Verdict.WAIT
    assert verdict(judge_saves({lora}, scene(said=status()))) is Verdict.COMPLETE
    assert verdict(judge_saves({lora}, scene(said=status(errors=[failed(300)])))) is Verdict.FAILED


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (scene(shard(1, 3, 300)), Verdict.COMPLETE),
        (scene(shard(1, 2, 200)), Verdict.WAIT),
        (scene(shard(1, 2, 200), runs=False), Verdict.NOTHING),
        (scene(said=status([waiting(300, 3)])), Verdict.WAIT),
        (scene(said=status([waiting(300, 3)]), runs=False), Verdict.FAILED),
        (scene(said=status(errors=[failed(300)])), Verdict.FAILED),
        (scene(said=status(errors=[failed(300)]), since=NOW + timedelta(seconds=1)), Verdict.WAIT),  # an older start's
        (scene(shard(1, 3, 300, problem="it is short")), Verdict.FAILED),
        (scene(shard(1, 3, 300), said=status([waiting(300, 4)])), Verdict.WAIT),  # it is saved again
    ],
)
def test_a_step_that_was_named(found: Scene, expected: Verdict) -> None:
    assert verdict(judge_step(StepName(300), found)) is expected
    assert verdict(judge_step(StepName(300, 0), found)) is expected


def test_a_step_of_several_epochs_cannot_be_waited_for() -> None:
    found = scene(shard(1, 1, 100, 0), shard(1, 2, 100, 1))
    with pytest.raises(ValueError, match="100:0, 100:1"):
        judge_step(StepName(100), found)
    assert verdict(judge_step(StepName(100, 1), found)) is Verdict.COMPLETE
    assert verdict(judge_step(StepName(100, 2), found)) is Verdict.WAIT
