"""Load a checkpoint that lies beside the training's own (LoRA) into live objects, on all ranks or on none. Shell.

The steps are those of a resume: list, agree, read and check every byte, check that it fits, and only then change
anything. No attempt is recorded, since such a checkpoint does not say where the training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from ckpt_service import scan
from ckpt_service.catalog import Shard, build
from ckpt_service.errors import CkptError, DamagedCheckpoint, SaveFailed, StateMismatch
from ckpt_service.naming import Kind
from trainer_hooks.choice import own_shard, saved_beside
from trainer_hooks.resume import load_on_all
from trainer_hooks.saving import Saver
from trainer_hooks.start import Run
from trainer_hooks.values import Allowed

_shards = TypeAdapter(list[Shard])


@dataclass(frozen=True)
class Wanted:
    """What to load: the kind, the numbers, and the absolute directories in which this rank's file may lie.

    ``trust``: classes that old files may hold.
    """

    kind: Kind
    step: int
    epoch: int
    directories: Sequence[str]
    trust: Sequence[type] = ()


def load_beside(
    run: Run, saver: Saver, wanted: Wanted, *, check: Callable[[Any], None], restore: Callable[[Any], None]
) -> str:
    """Load what is wanted; ``check`` and ``restore`` get this rank's state. Returns the path. Collective.

    Raises:
        ValueError, LayoutMismatch: as :func:`trainer_hooks.choice.saved_beside`.
        DamagedCheckpoint: a byte is wrong, on some rank.
        StateMismatch: it does not fit on some rank; nothing has been touched anywhere.
    """
    run.open()
    run.agree(lambda: _settled(saver), b"", kind=SaveFailed)
    answers = run.agree(lambda: _shards.dump_json(_listed(run, wanted)), b"", kind=CkptError)
    shards = [shard for answer in answers for shard in _shards.validate_json(answer)]
    found = build(scan.evidence_beside(shards, run.attempt.run_id if run.attempt else None, run.slots))
    where = " or ".join(wanted.directories)
    chosen = saved_beside(found.of_kind(wanted.kind), run.topology, wanted.step, wanted.epoch, where)
    shard = own_shard(chosen, run.topology)
    loaded, problems = load_on_all(run, shard, _path_here(run, shard, wanted), Allowed(wanted.trust))
    if problems:
        raise DamagedCheckpoint("; ".join(problems), op="load", path=shard.path)
    assert loaded is not None
    state = loaded.state
    run.agree(lambda: _done(check, state), b"", kind=StateMismatch)
    run.agree(lambda: _done(restore, state), b"", kind=StateMismatch)
    return shard.path


def _settled(saver: Saver) -> bytes:
    saver.drain(None)  # what is asked for may be on its way, from this start or an earlier one
    saver.settle()
    return b""


def _listed(run: Run, wanted: Wanted) -> list[Shard]:
    """Return the files of this rank's own shard, in the first of the directories that has any."""
    place = run.topology
    if not place.is_writer:
        return []
    for directory in wanted.directories:
        shards = [
            shard
            for shard in scan.scan_directory(directory, place.stage)
            if (shard.name.kind, shard.stage, shard.tp_rank) == (wanted.kind, place.stage, place.tp_rank)
            and (shard.name.step, shard.name.epoch) == (wanted.step, wanted.epoch)
        ]
        if shards:
            return shards
    return []


def _path_here(run: Run, shard: Shard, wanted: Wanted) -> str:
    """Return where this rank looks for its file: hosts need not share directories, nor call them the same."""
    if run.topology.is_writer:
        return shard.path
    here = [os.path.join(directory, os.path.basename(shard.path)) for directory in wanted.directories]
    return next(filter(os.path.exists, here), here[0])


def _done(work: Callable[[Any], None], state: Any) -> bytes:
    work(state)
    return b""
