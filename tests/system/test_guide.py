"""What docs/guide.md tells people to do, done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer_hooks import Checkpointer

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def saved(root: Path, *steps: int) -> None:
    with Checkpointer(root, async_ckpt=False) as checkpointer:
        for step in steps:
            checkpointer.save(step, state={"value": torch.tensor(float(step))})


def resumed(root: Path) -> tuple[int, float]:
    with Checkpointer(root, async_ckpt=False) as checkpointer:
        point = checkpointer.resume()
    assert point is not None
    return point.step, float(point.state["value"])


def test_a_copy_by_the_command_of_the_guide_resumes(tmp_path: Path) -> None:
    root, backup = tmp_path / "my runs" / "gpt", tmp_path / "a backup" / "gpt"
    saved(root, 1, 2, 3)
    (command,) = re.findall(r"^cd runs/gpt && .*$", GUIDE, re.MULTILINE)
    command = command.replace("runs/gpt", '"$ROOT"').replace("/backup/gpt", '"$BACKUP"')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "ROOT": str(root), "BACKUP": str(backup), "PATH": path}
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=environment, check=True, timeout=60)
    assert [path.name for path in backup.rglob("*.pt")] == ["ckpt_step_3_epoch_0.pt"]
    assert resumed(backup) == (3, 3.0)


def test_a_run_directory_without_our_own_directory_resumes(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / ".ckpt_service")
    assert resumed(tmp_path) == (3, 3.0)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
def test_its_loops_compile(block: str) -> None:
    compile(block, "guide.md", "exec")
