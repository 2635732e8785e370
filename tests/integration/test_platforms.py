"""Other systems than Linux are refused in a sentence, whichever module is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported(module: str, platform: str) -> subprocess.CompletedProcess[str]:
    """Import a module in an interpreter that takes itself for one on another system."""
    script = f"import sys; sys.platform = {platform!r}; import {module}; print('imported')"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize("module", ["trainer_hooks", "trainer_hooks.checkpointer", "ckpt_service", "ckpt_service.cli"])
def test_other_systems_are_refused_at_import(module: str, platform: str) -> None:
    done = imported(module, platform)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: ckpt-service needs Linux, and this is {platform}: ")
    assert "memfd" in last
    assert "container" in last


def test_linux_is_not_refused() -> None:
    assert imported("ckpt_service", "linux").stdout == "imported\n"
