"""Saves come faster than the disk takes them, 500 times: what could grow stays bounded, and the status tells of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import RunDirectory, wait_for

SAVES, SLOTS = 500, 2
STATE_BYTES = 256 << 10
MEMORY_BYTES = 2 << 20  # a slot is a multiple of this

TRAINER = f"""
import json
def facts(pid):
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{{pid}}/status").read_text().splitlines())
    kilobytes = {{name: int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")}}
    return {{
        "anonymous": kilobytes["RssAnon"] << 10,
        "shared": kilobytes["RssShmem"] << 10,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{{pid}}/fd")),
    }}
warnings.simplefilter("ignore")
checkpointer = Checkpointer(root, slots={SLOTS}, on_full=os.environ["ON_FULL"])
status = next(Path(root, ".ckpt_service").glob("status.*.json"))
daemon = json.loads(status.read_text())["daemon"]["pid"]
seen, steps, depth = [], [], 0
for step in range({SAVES}):
    began = time.monotonic()
    value = torch.full(({STATE_BYTES} // 4,), float(step))
    checkpointer.save(step, state={{"value": value}}, final=step == {SAVES} - 1)
    time.sleep(float(os.environ["PAUSE"]))
    steps.append(time.monotonic() - began)
    seen.append((facts("self"), facts(daemon)))
    depth = max(depth, json.loads(status.read_text())["queue"]["depth"])
checkpointer.drain()
say("seen", json.dumps([seen, steps, depth]))
hear("end")
checkpointer.close()
"""


@pytest.fixture
def quick() -> Iterator[RunDirectory]:
    """A run directory in memory: the limit is what saves wait for, not the syncs of some disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        run = RunDirectory(Path(directory, "run"), {"XDG_RUNTIME_DIR": directory})
        yield run
        run.clean_up()


@pytest.mark.parametrize(("on_full", "pause"), [("block", "0"), ("skip", "0.005")])
def test_five_hundred_saves_faster_than_the_disk(on_full: str, pause: str, quick: RunDirectory) -> None:
    run = quick
    trainer = run.trainer(
        TRAINER,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(32 << 20),
        CKPT_SERVICE_CHUNK_BYTES=str(64 << 10),
        CKPT_SERVICE_DIRECT_IO="false",
        ON_FULL=on_full,
        PAUSE=pause,
    )
    seen, steps, depth = json.loads(trainer.says("seen"))
    trainer.hears("end")
    trainer.ends()
    run.status()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert depth <= SLOTS
    assert max(steps) < 5
    for who in (0, 1):
        early, late = seen[SAVES // 10 : SAVES // 2], seen[SAVES // 2 :]

        def most(what: str, facts: list[list[dict[str, int]]], who: int = who) -> int:
            return max(both[who][what] for both in facts)

        assert most("shared", seen) <= SLOTS * MEMORY_BYTES
        assert most("anonymous", late) - most("anonymous", early) < 10 * STATE_BYTES, "250 states would be more"
        assert most("threads", late) <= most("threads", early) + 2
        assert most("descriptors", late) <= most("descriptors", early) + 4
    status = run.status()
    assert status is not None
    totals, queue = status.totals, status.queue
    assert queue.on_full == on_full
    assert totals.failed == totals.superseded == 0
    assert totals.submitted == totals.committed == SAVES - totals.skipped
    assert totals.skipped > 0 if on_full == "skip" else queue.blocked_seconds > 0
    assert run.files("*")[-1] == f"ckpt_step_{SAVES - 1}_epoch_0.pt"
    assert len(run.files("*")) == 2


def test_a_save_that_was_lost_does_not_keep_its_state_alive(run: RunDirectory) -> None:
    trainer = run.trainer(
        """
        import gc, weakref
        gc.disable()
        checkpointer = Checkpointer(root, slots=1, on_full="skip")
        checkpointer.save(1, state=state(1, megabytes=8))
        def save():
            mine = torch.ones(1 << 18)
            return checkpointer.save(2, state={"value": mine}), weakref.ref(mine)
        ticket, mine = save()
        say("lost", type(ticket.committed.exception(0)).__name__, mine())
        checkpointer.save(3, state={}, final=True)
        checkpointer.close()
        """,
        CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND=str(16 << 20),
    )
    assert trainer.says("lost") == "SnapshotSkipped None"
    trainer.ends()
