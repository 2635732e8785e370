"""Small and odd machines: a trainer there works, or is refused at its start with the reason and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PRELUDE, RunDirectory, daemons_of, wait_for

SAVES = """
with Checkpointer(root, keep_last=9) as checkpointer:
    checkpointer.save(1, state=state(1, megabytes=MEGABYTES))
    checkpointer.save(2, state=state(2, megabytes=MEGABYTES))
    checkpointer.drain()
    assert float(checkpointer.resume().state["value"][-1, -1]) == 2
say("latest", checkpointer.latest().step)
"""


def train(root: str, setup: str, *, megabytes: int = 4) -> subprocess.CompletedProcess[str]:
    """Run a whole training in a shell with mounts of its own that has run ``setup``."""
    script = f"{PRELUDE}\nroot = {root!r}\nMEGABYTES = {megabytes}\n{SAVES}"
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'set -e; {setup}\nexec "$@"', "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


LONG = f"/mnt/{'t' * 120}"
PLACES = {
    "64 MiB of shared memory": ("mount -t tmpfs -o size=64M tmpfs /dev/shm", {"megabytes": 100}),
    "no shared memory, 64 descriptors": (
        "mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs /dev/shm; mount -o remount,ro /dev/shm; ulimit -n 64",
        {},
    ),
    "no locked memory, little address space, a read-only home": (
        "ulimit -l 0; ulimit -v 2500000; mkdir /mnt/home; mount -t tmpfs -o ro tmpfs /mnt/home; export HOME=/mnt/home",
        {},
    ),
    "a long TMPDIR elsewhere": (f"mkdir {LONG}; mount -t tmpfs tmpfs {LONG}; export TMPDIR={LONG}", {}),
    "a read-only /tmp that was used": ("mkdir -p /tmp/ckpt-service-0; mount -o remount,ro,bind /tmp", {}),
    "no place for temporary files": (
        "mount -t tmpfs -o ro tmpfs /var/tmp; mount -o remount,ro,bind /tmp; unset TMPDIR; cd /proc",
        {},
    ),
    "an XDG_RUNTIME_DIR that is not there": ("export XDG_RUNTIME_DIR=/mnt/none", {}),
}


@pytest.mark.parametrize(("setup", "options"), PLACES.values(), ids=PLACES)
def test_it_works_with(setup: str, options: dict[str, int]) -> None:
    """The root lies on a tmpfs, which has no O_DIRECT."""
    prepare = "mount -t tmpfs -o size=1G tmpfs /mnt; mkdir /mnt/run; mount --bind /tmp /tmp; unset XDG_RUNTIME_DIR"
    done = train("/mnt/run", f"{prepare}; {setup}", **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "latest 2\n"
    assert done.stderr == ""


def deep(base: Path, nbytes: int) -> Path:
    """Return a path of so many bytes."""
    path = str(base)
    while len(path) < nbytes - 200:
        path += "/" + "d" * 150
    return Path(path + "/" + "e" * (nbytes - len(path) - 1))


def test_a_root_may_have_a_path_of_4000_characters(tmp_path: Path) -> None:
    run = RunDirectory(deep(tmp_path, 4000))
    script = f"{PRELUDE}\nroot = {str(run.root)!r}\nMEGABYTES = 1\n{SAVES}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "latest 2\n", "")
    assert run.files("*") == ["ckpt_step_1_epoch_0.pt", "ckpt_step_2_epoch_0.pt"]
    run.status()
    wait_for(run.daemon_has_left, "the daemon leaves")


@pytest.mark.parametrize("nbytes", [4060, 5000])
def test_a_root_whose_path_is_too_long_is_refused_at_the_start(nbytes: int, tmp_path: Path) -> None:
    run = RunDirectory(deep(tmp_path, nbytes))
    script = f"{PRELUDE}\nroot = {str(run.root)!r}\nMEGABYTES = 1\n{SAVES}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert 'checkpointer.py", line' in done.stderr
    assert ", in __init__" in done.stderr
    assert done.returncode == 1
    assert "File name too long" in done.stderr
    assert done.stderr.strip().endswith("use a shorter path")
    assert daemons_of(run.root) == []
