"""Faults that a test sets, and a trainer that saves whenever it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import FAULTY, Faults, Saver
from support.processes import OBEY, RunDirectory

TRAINER = """
import json
checkpointer = Checkpointer(
    root,
    keep_last=2,
    async_ckpt=os.environ["ASYNC"] == "1",
    service=os.environ.get("SERVICE", "auto"),
    slots=int(os.environ.get("SLOTS", "2")),
    on_full=os.environ.get("ON_FULL", "block"),
)

def drain():
    try:
        checkpointer.drain()
    except Exception as error:
        say("drained", type(error).__name__, error)
    else:
        say("drained", "all")

def save(step, wait=60):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ticket = checkpointer.save(step, state=state(step, 1))
    try:
        error = ticket.committed.exception(wait)
    except BaseException as late:
        error = late
    said = {"kind": type(error).__name__, "message": str(error), "warned": [str(warning.message) for warning in caught]}
    for name in ("code", "hint", "step", "path"):
        said[name] = getattr(error, name, None)
    say("saved", json.dumps(said))
"""


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "faults.json")


@pytest.fixture
def saver(run: RunDirectory, faults: Faults) -> Callable[..., Saver]:
    """Start a trainer on the run; ``faulty`` puts the faults into it as well."""

    def start(*, faulty: bool = False, synchronous: bool = False, **env: str) -> Saver:
        script = (FAULTY if faulty else "") + TRAINER + OBEY
        return Saver(run.trainer(script, **faults.env, **env, ASYNC="0" if synchronous else "1"))

    return start
