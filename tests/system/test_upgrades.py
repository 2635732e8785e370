"""Two releases meet: an old daemon and a new trainer and the reverse, newer files, names that nobody here knows.

The other release is this one with another protocol and version, as a package of its own that real processes import.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from support.processes import PRELUDE, RANKS, RunDirectory, Trainer, daemons_of, wait_for
from support.shards import write_attempt, write_shard

import ckpt_service
from ckpt_service import __version__
from ckpt_service.ownership import host_name, pid_start

REPOSITORY = Path(ckpt_service.__file__).parents[1]
SLOWLY = {"CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(16 << 20), "CKPT_SERVICE_CHUNK_BYTES": str(1 << 20)}
SAVES = "checkpointer = Checkpointer(root)\n"
SAVES_ONE = SAVES + "checkpointer.save(1, state=state(1)).accepted.result(20)\nsay('accepted')\nhear('end')\n"
TRIES = """
from ckpt_service.errors import ServiceUnavailable
try:
    Checkpointer(root)
except ServiceUnavailable as error:
    say("refused", error)
"""


@pytest.fixture(scope="module")
def newer_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release 9.9.9 that speaks protocol 2."""
    home = tmp_path_factory.mktemp("newer")
    for package in ("ckpt_service", "trainer_hooks"):
        shutil.copytree(REPOSITORY / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    replace_in(home / "ckpt_service" / "messages.py", "\nPROTOCOL = 1\n", "\nPROTOCOL = 2\n")
    replace_in(home / "ckpt_service" / "_version.py", __version__, "9.9.9")
    return home


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def trainer_of(release: Path, run: RunDirectory, body: str, **env: str) -> Trainer:
    """Start a trainer that imports another release, and whose daemon does as well."""
    script = f"{PRELUDE}\nroot = {str(run.root)!r}\n{body}"
    return run.interpreter("-c", script, **env, PYTHONPATH=str(release))


# --- protocols --------------------------------------------------------------------------------------------------------


def test_an_older_daemon_finishes_and_gives_way_to_that_of_a_newer_trainer(
    run: RunDirectory, newer_release: Path
) -> None:
    old = run.trainer(SAVES_ONE, **SLOWLY)
    old.says("accepted")
    lingering = run.daemon()
    assert lingering.protocol == 1
    old.kill()
    new = trainer_of(newer_release, run, SAVES + "say('resumed', checkpointer.resume().step)\nhear('end')\n")
    assert new.says("resumed") == "1", "the older daemon wrote what it held before it left"
    daemon = run.daemon()
    assert (daemon.protocol, daemon.version) == (2, "9.9.9")
    assert daemon.pid != lingering.pid
    new.hears("end")
    new.ends()


def test_all_ranks_of_a_newer_start_meet_one_daemon_of_their_own(run: RunDirectory, newer_release: Path) -> None:
    old = run.trainer(SAVES + "say('ready')\nhear('end')\n")
    old.says("ready")
    lingering = run.daemon()
    old.kill()
    body = RANKS + "checkpointer = Checkpointer(root, topology=place)\nsay('ready')\nhear('end')\n"
    start = {"CKPT_SERVICE_LAUNCH": "newer", "WORLD_SIZE": "2", "PP": "1", "TP": "2"}
    ranks = [trainer_of(newer_release, run, body, **start, RANK=str(rank)) for rank in range(2)]
    for rank in ranks:
        rank.says("ready")
    assert run.daemon().protocol == 2
    assert pid_start(lingering.pid) != lingering.pid_start
    assert daemons_of(run.root) == [run.daemon().pid]
    for rank in ranks:
        rank.hears("end")
    for rank in ranks:
        rank.ends()


def test_an_older_trainer_is_refused_by_a_newer_daemon_naming_both_and_what_to_do(
    run: RunDirectory, newer_release: Path
) -> None:
    new = trainer_of(newer_release, run, SAVES_ONE)
    new.says("accepted")
    new.kill()
    reason = run.trainer(TRIES).says("refused")
    assert f"this daemon (9.9.9) speaks protocol 2, and {__version__} speaks 1" in reason
    assert "stop the daemon" in reason
    assert not run.daemon_has_left(), "an older trainer does not end a newer daemon"


def test_an_external_daemon_of_an_older_release_is_left_alone(run: RunDirectory, newer_release: Path) -> None:
    path = run.root.parent / "s"
    run.root.mkdir()
    run.interpreter("-m", "ckpt_service", "run", str(run.root), "--socket", str(path))
    wait_for(path.exists, "the daemon listens")
    tries = TRIES.replace("Checkpointer(root)", f"Checkpointer(root, service={str(path)!r})")
    reason = trainer_of(newer_release, run, tries).says("refused")
    assert f"this daemon ({__version__}) speaks protocol 1, and 9.9.9 speaks 2" in reason
    assert not run.daemon_has_left()


def test_an_older_daemon_that_cannot_finish_in_time_stops_the_start_and_is_named(
    run: RunDirectory, newer_release: Path
) -> None:
    stuck = {**SLOWLY, "CKPT_SERVICE_RATE_LIMIT_BYTES_PER_SECOND": str(1 << 20), "CKPT_SERVICE_GRACE_SECONDS": "60"}
    old = run.trainer(SAVES_ONE, **stuck)
    old.says("accepted")
    lingering = run.daemon()
    old.kill()
    hasty = {"CKPT_SERVICE_GRACE_SECONDS": "0.5", "CKPT_SERVICE_NOTICE_SECONDS": "0.5"}
    reason = trainer_of(newer_release, run, TRIES, **hasty).says("refused")
    assert f"pid {lingering.pid} was asked to leave, and has not" in reason
    assert "start again once it has left" in reason


# --- files of a newer format ------------------------------------------------------------------------------------------


def make_newer(path: Path) -> None:
    """Turn a shard into one that a newer release wrote."""
    content = path.read_bytes()
    assert b'"format_version":1,' in content
    path.write_bytes(content.replace(b'"format_version":1,', b'"format_version":2,'))


def three_steps(root: Path) -> list[Path]:
    """Write steps 1 to 3, of which the last is of a newer format."""
    write_attempt(root, 1)
    paths = [write_shard(root / "checkpoint_0", step=step, sequence=step) for step in (1, 2, 3)]
    make_newer(paths[-1])
    return paths


def test_verbs_say_that_a_newer_release_wrote_the_newest(run: RunDirectory) -> None:
    path = three_steps(run.root)[-1]
    rows = json.loads(run.cli("ls", str(run.root), "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(3, "damaged"), (2, "complete"), (1, "complete")]
    assert "format version is 2" in rows[0]["reason"]
    latest = run.cli("latest", "--json", str(run.root))
    assert (latest.returncode, json.loads(latest.stdout)["step"]) == (0, 2)
    assert "step 3 epoch 0 may be newer: " in latest.stderr
    newest = run.cli("verify", str(run.root))
    assert newest.returncode == 0
    assert "step 3 epoch 0 is not checked" in newest.stderr
    doctor = run.cli("doctor", str(run.root))
    assert "a resume stops at a checkpoint of a newer release: step 3 epoch 0" in doctor.stdout
    everything = run.cli("verify", "--all", str(run.root))
    assert everything.returncode == 6
    assert f"BAD  {path}: its format version is 2, and this release reads up to 1; upgrade" in everything.stdout


def test_a_run_goes_on_beside_newer_files_only_when_told_to_and_deletes_none(run: RunDirectory) -> None:
    first = """
    with Checkpointer(root, keep_last=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state=state(step, 1)).wait_committed(20)
    """
    run.trainer(first).ends()
    newest = run.root / "checkpoint_0" / "ckpt_step_3_epoch_0.pt"
    make_newer(newest)
    content = newest.read_bytes()
    tries = """
    from ckpt_service.errors import NewerFormat
    checkpointer = Checkpointer(root, keep_last=1)
    try:
        checkpointer.resume()
    except NewerFormat as error:
        say("refused", error)
    """
    assert "upgrade ckpt-service to read it; or go back on purpose" in run.trainer(tries).says("refused")
    goes_back = """
    with Checkpointer(root, keep_last=1) as checkpointer:
        checkpointer.resume(step=2)
        for step in (3, 4, 5):
            checkpointer.save(step, state=state(step, 1)).wait_committed(20)
    """
    run.trainer(goes_back).ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    aside = newest.with_name(".ckpt_step_3_epoch_0.pt.1-3.kept")
    assert aside.read_bytes() == content
    assert run.files() == ["ckpt_step_5_epoch_0.pt"]
    resumes = "with Checkpointer(root) as checkpointer:\n    say('resumed', checkpointer.resume().step)\n"
    assert run.trainer(resumes).says("resumed") == "5", "it is abandoned now, and stops nobody any more"


# --- fields and names that are not known here -------------------------------------------------------------------------


def test_what_a_newer_release_adds_to_our_files_is_ignored(run: RunDirectory) -> None:
    run.trainer("with Checkpointer(root) as c:\n    c.save(1, state=state(1, 1))").ends()
    service = run.root / ".ckpt_service"
    for path in [service / "attempts" / "1.json", *service.glob("status.*.json")]:
        path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2, "later": {"more": [1]}}))
    (service / "peers.other-host.json").write_text('{"format_version": 2, "ranks": [], "later": 1}')
    assert run.cli("status", str(run.root)).returncode == 0
    assert json.loads(run.cli("latest", "--json", str(run.root)).stdout)["step"] == 1
    assert run.trainer("with Checkpointer(root) as c:\n    say('resumed', c.resume().step)").says("resumed") == "1"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            '{"schema_version": 2, "hosts": "elsewhere"}',
            "its schema version is 2, and this release reads up to 1; upgrade",
        ),
        ("[", "Invalid JSON"),
    ],
)
def test_a_status_that_cannot_be_understood_is_named(content: str, reason: str, run: RunDirectory) -> None:
    path = run.root / ".ckpt_service" / "status.other.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    shown = run.cli("status", str(run.root))
    assert shown.returncode == 4
    assert f"{path} cannot be understood: " in shown.stderr
    assert reason in shown.stderr


def test_names_of_another_release_are_never_touched(run: RunDirectory) -> None:
    final = "ckpt_step_1_epoch_0.pt"
    strange = [
        f".{final}.1-1-{host_name(os.environ)}-1-0abc.v2.partial",
        f".{final}.1-1.partial",
        f".{final}.1-1-0abc.kept",
        f".{final}.run-1-1.kept",
        "ckpt_step_1_epoch_0_dp1.pt",
        "ckpt_step_1_epoch_0.pt2",
    ]
    directory = run.root / "checkpoint_0"
    directory.mkdir(parents=True)
    for name in strange:
        (directory / name).write_bytes(b"of another release")
        os.utime(directory / name, (time.time() - 10**6,) * 2)
    mine = directory / f".{final}.1-1-{host_name(os.environ)}-0abc.partial"
    mine.write_bytes(b"left behind")
    body = """
    with Checkpointer(root, keep_last=1) as checkpointer:
        checkpointer.resume()
        for step in (1, 2, 3):
            checkpointer.save(step, state=state(step, 1)).wait_committed(20)
    """
    run.trainer(body).ends()
    wait_for(run.daemon_has_left, "the daemon leaves")
    assert sorted(os.listdir(directory)) == sorted([*strange, "ckpt_step_3_epoch_0.pt"])
