"""The daemon's event loop never waits for a disk: whatever may block runs on a thread."""

from __future__ import annotations

import os
import signal
import textwrap

from support.processes import RunDirectory, wait_for

# A blocking call is printed with where it came from, and then let through: an error could be caught on its way.
WATCHED_DAEMON = """
import logging, traceback
from blockbuster import BlockBuster
from ckpt_service import daemon
from ckpt_service.config import load_config

def watch(function):
    allowed, tolerated = function.can_block_predicate, function.can_block_functions
    def report(*args, **kwargs):
        if not allowed(*args, **kwargs):
            stack = traceback.extract_stack()[:-2]
            if not any(f.filename.endswith(end) and f.name in names for f in stack for end, names in tolerated):
                where = [f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(stack[-6:])]
                print("BLOCKED", function.full_name, "<-", " <- ".join(where), file=sys.stderr, flush=True)
        return True
    function.can_block_predicate = report

logging.basicConfig(stream=sys.stderr, level=logging.INFO)
os.makedirs(root, exist_ok=True)
watched = BlockBuster()
for function in watched.functions.values():
    watch(function)
watched.activate()
say("code", daemon.serve(root, None, load_config(os.environ), os.environ, stays=False))
"""

TRAINER = """
checkpointer = Checkpointer(root, keep_last=1)
checkpointer.resume()
for step in range(4):
    checkpointer.save(step, state=state(step, megabytes=4))
checkpointer.drain(60)
checkpointer.save(1, state=state(1, megabytes=4))  # a name that is there already
checkpointer.close()
"""


def blocked(errors: str) -> list[str]:
    return sorted({line for line in errors.splitlines() if line.startswith("BLOCKED")})


def test_the_event_loop_never_blocks(run: RunDirectory) -> None:
    daemon = run.trainer(WATCHED_DAEMON, CKPT_SERVICE_HEARTBEAT_SECONDS="0.2")
    wait_for(lambda: run.status() is not None, "the daemon serves")
    assert run.daemon().pid == daemon.pid
    trainer = run.trainer(TRAINER)
    _, errors = trainer.process.communicate(timeout=60)
    assert trainer.process.returncode == 0, errors
    out, errors = daemon.process.communicate(timeout=60)
    assert blocked(errors) == [], "\n".join(blocked(errors))
    assert out.split() == ["code", "0"]
    assert run.files() == ["ckpt_step_1_epoch_0.pt"]


def test_the_event_loop_never_blocks_when_things_go_wrong(run: RunDirectory) -> None:
    limits = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
    daemon = run.trainer(textwrap.dedent(limits) + WATCHED_DAEMON, CKPT_SERVICE_LINGER_SECONDS="0.2")
    wait_for(lambda: run.status() is not None, "the daemon serves")
    trainer = run.trainer(
        """
        checkpointer = Checkpointer(root)
        say("lost", checkpointer.save(1, state=state(1, megabytes=4)).committed.exception(60))
        os._exit(0)  # without a goodbye
        """
    )
    assert trainer.says("lost").startswith("writing step 1 failed")
    out, errors = daemon.process.communicate(timeout=60)
    assert blocked(errors) == [], "\n".join(blocked(errors))
    assert out.split() == ["code", "0"]


def test_the_watch_sees_a_blocking_call(run: RunDirectory) -> None:
    """Without this, the tests above could pass because nothing is watched."""
    slow = WATCHED_DAEMON.replace(
        "watched = BlockBuster()",
        "from ckpt_service.server import Server\n"
        "drain = Server._drain\n"
        "Server._drain = lambda self, number: (time.sleep(0.001), drain(self, number))\n"
        "watched = BlockBuster()",
    )
    daemon = run.trainer(slow)
    wait_for(lambda: run.status() is not None, "the daemon serves")
    os.kill(daemon.pid, signal.SIGTERM)
    _, errors = daemon.process.communicate(timeout=60)
    assert any("time.sleep" in line for line in blocked(errors))
