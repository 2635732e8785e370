"""The wheel as users install it: outside this checkout, with nothing of the checkout in sight."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, CHECKOUT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel; what it depends on is that of the tests' own environment."""
    home = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    site = Path(run(home / "venv/bin/python", "-c", "import site; print(site.getsitepackages()[0])", cwd=home).strip())
    run(*PIP, "--python", home / "venv/bin/python", "install", "--no-deps", "--no-index", wheel, cwd=home)
    # A plain path, so that no other .pth file (as the one that finds the checkout) is looked at.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "venv" / "bin"


def test_it_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ckpt_service", "trainer_hooks"}
    assert {"ckpt_service/py.typed", "trainer_hooks/py.typed", "trainer_hooks/demo/__main__.py"} <= set(names)


def test_it_runs_the_demo_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = "import ckpt_service, trainer_hooks; print(ckpt_service.__file__, trainer_hooks.__file__)"
    found = run(installed / "python", "-c", where, cwd=tmp_path).split()
    assert all(path.startswith(str(installed.parent)) for path in found)
    said = run(installed / "ckpt-service", "demo", "--single", "--tiny", cwd=tmp_path)
    assert "bit" in said
    assert run(installed / "ckpt-service", "--version", cwd=tmp_path).startswith("ckpt-service ")
