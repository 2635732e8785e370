"""``pin`` and ``unpin``: keep a checkpoint whatever retention would do."""

from __future__ import annotations

import os

from ckpt_service import naming, ownership
from ckpt_service.catalog import Checkpoint, State
from ckpt_service.cli.common import Postfix, Root, Step, absolute_root, checked_postfix, complain, summary
from ckpt_service.cli.steps import choose, parse_step
from ckpt_service.errors import CkptError
from ckpt_service.scan import load_catalog
from ckpt_service.storage import create_small, make_directories, remove_small


def pin(step: Step, root: Root = ".", postfix: Postfix = None) -> None:
    """Keep a checkpoint until it is unpinned: no retention deletes it, and it does not count against keep_last.

    A daemon that runs heeds it from its next pass on. Pinning twice is the same as once.
    """
    root, postfix = absolute_root(root), checked_postfix(postfix)
    checkpoint = _chosen(root, postfix, step)
    if (refusal := _refusal(checkpoint)) is not None:
        raise CkptError(f"step {checkpoint.id.step} cannot be pinned: {refusal}", op="pin", path=root)
    path = _pin_path(root, postfix, checkpoint)
    make_directories(os.path.dirname(path))
    create_small(path, b"")
    if not any(c.pinned and c.id == checkpoint.id for c in load_catalog(root, postfix).checkpoints):
        remove_small(path)
        raise CkptError(f"step {checkpoint.id.step} was deleted just before it could be pinned", op="pin", path=root)
    complain(f"pinned: {summary(checkpoint)}")


def unpin(step: Step, root: Root = ".", postfix: Postfix = None) -> None:
    """Let retention decide about a checkpoint again; one that is not pinned stays as it is."""
    root, postfix = absolute_root(root), checked_postfix(postfix)
    checkpoint = _chosen(root, postfix, step)
    gone = remove_small(_pin_path(root, postfix, checkpoint))
    complain(f"{'unpinned' if gone else 'not pinned'}: {summary(checkpoint)}")


def _chosen(root: str, postfix: str | None, step: str) -> Checkpoint:
    return choose(load_catalog(root, postfix).checkpoints, parse_step(step), root).checkpoint


def _pin_path(root: str, postfix: str | None, checkpoint: Checkpoint) -> str:
    pins = os.path.join(ownership.service_path(root, postfix), naming.PINS)
    return os.path.join(pins, naming.pin_file(checkpoint.id.attempt, checkpoint.id.sequence))


def _refusal(checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint is not worth a pin, None if it is: whole, or able to become so."""
    if checkpoint.state is State.LEGACY:
        return "it was written by the old trainer, and no retention deletes those"
    if checkpoint.state in (State.COMPLETE, State.PARTIAL):
        return None
    whole = len(checkpoint.ranks) == checkpoint.expected and not any(shard.problem for shard in checkpoint.shards)
    if checkpoint.state in (State.ABANDONED, State.FOREIGN) and whole:
        return None
    return checkpoint.reason or f"it is {checkpoint.state.value}"
