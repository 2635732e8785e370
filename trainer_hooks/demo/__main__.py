"""`python -m trainer_hooks.demo`: the same as `ckpt-service demo`."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from trainer_hooks.demo import run_demo
from trainer_hooks.demo.recipe import DEFAULT_STEPS

_INTERRUPTED = 130


def main() -> int:
    """Parse the options and run the demo; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_hooks.demo",
        description="Train a small GPT on four ranks (tensor parallel 2, data parallel 2), kill all of them twice in "
        "the middle of a checkpoint write, resume, and compare the bits with a run that was left alone.",
    )
    parser.add_argument("--root", metavar="DIR", help="new or empty directory for the files (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps of a run (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of 1 MB, for a quick look")
    parser.add_argument("--single", action="store_true", help="one training process instead of four")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        return run_demo(options.root, steps=options.steps, tiny=options.tiny, single=options.single, keep=options.keep)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _leave(number: int, _: FrameType | None) -> NoReturn:
    """Clean up as after Ctrl-C."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
