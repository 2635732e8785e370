"""`python -m trainer_hooks.demo`: the same as `ckpt-service demo`."""

from __future__ import annotations

import argparse
import sys

from trainer_hooks.demo import run_demo
from trainer_hooks.demo.recipe import DEFAULT_STEPS

_INTERRUPTED = 130


def main() -> int:
    """Parse the options and run the demo; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_hooks.demo",
        description="Train a small GPT, kill it twice in the middle of a checkpoint write, resume, compare the bits.",
    )
    parser.add_argument("--root", metavar="DIR", help="new or empty directory for the files (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps of a run (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of 1 MB, for a quick look")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    options = parser.parse_args()
    try:
        return run_demo(options.root, steps=options.steps, tiny=options.tiny, keep=options.keep)
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
