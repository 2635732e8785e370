"""The demo: train a small GPT on four ranks, kill all twice in the middle of a write, resume, compare bit for bit.

Run by `ckpt-service demo` and `python -m trainer_hooks.demo`; `trainer_hooks/demo/train.py` holds the training loop
that is meant to be copied.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from trainer_hooks.demo.recipe import DEFAULT_STEPS, Recipe, make_recipe

__all__ = ["DEFAULT_STEPS", "run_demo"]

_FAILED = 1
_USAGE = 2


def run_demo(
    root: str | None, *, steps: int = DEFAULT_STEPS, tiny: bool = False, single: bool = False, keep: bool = False
) -> int:
    """Run the demo and print its table on stdout, everything else on stderr.

    Args:
        root: a directory for the two runs, new or empty; its files stay. None: a temporary one, removed after success.
        steps: optimizer steps of a run.
        tiny: a model of 1 MB instead of 17, for a quick test.
        single: one training process instead of four (two tensor-parallel ranks times two data-parallel replicas).
        keep: leave a temporary directory where it is.

    Returns:
        0 if both runs ended bit-equal, 1 if anything went otherwise than claimed, 2 for a bad option.
    """
    try:
        recipe = make_recipe(steps=steps, tiny=tiny, single=single)
        base = _new_directory(root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return _USAGE
    succeeded = False
    try:
        succeeded = _play(recipe, base, tiny, single)
    finally:
        if succeeded and root is None and not keep:
            shutil.rmtree(base)
        else:
            print(f"checkpoints and logs are in {base}", file=sys.stderr)
    return 0 if succeeded else _FAILED


def _play(recipe: Recipe, base: Path, tiny: bool, single: bool) -> bool:
    from rich.console import Console

    from trainer_hooks.demo.leg import DemoFailed
    from trainer_hooks.demo.report import print_report
    from trainer_hooks.demo.scenario import play
    from trainer_hooks.demo.screen import Screen

    with Screen(Console(stderr=True)) as screen:
        try:
            report = play(recipe, base, tiny=tiny, single=single, screen=screen)
        except DemoFailed as failure:
            screen.say(f"the demo failed: {failure}")
            return False
    print_report(report, Console())
    return report.equal


def _new_directory(root: str | None) -> Path:
    if root is None:
        return Path(tempfile.mkdtemp(prefix="ckpt-service-demo-")).resolve()
    base = Path(root).resolve()
    base.mkdir(parents=True, exist_ok=True)
    if any(base.iterdir()):
        raise ValueError(f"--root {root}: not empty; the demo needs a directory of its own")
    return base
