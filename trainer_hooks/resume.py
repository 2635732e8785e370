"""Agree with all ranks on a checkpoint, load it, and only then touch anything. Shell; works with no daemon.

1. Every writer lists its own shard's files; rank 0 adds the attempts, the pins, and what ranks of another layout left.
   Everybody gets all of it and derives the same choice.
2. Candidate by candidate, newest first: every rank reads its file and checks every byte. Only if all could, it is
   taken; otherwise all go on to the next older one.
3. Every rank checks that the state fits what is tracked. Only if it fits everywhere, anything is changed.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ckpt_service import scan
from ckpt_service.catalog import Checkpoint, CheckpointId, Evidence, Shard
from ckpt_service.errors import CkptError, DamagedCheckpoint, NoUsableCheckpoint, UntrustedClass
from ckpt_service.records import Attempt, ShardManifest
from trainer_hooks.choice import Choice, Skipped, own_shard
from trainer_hooks.load import LoadedShard, load_legacy, load_rank
from trainer_hooks.start import Run
from trainer_hooks.values import Allowed

_HAVE, _LACK, _BAD, _UNTRUSTED = b"+", b"?", b"-", b"!"


@dataclass(frozen=True)
class ResumePoint:
    """What training goes on from.

    Attributes:
        step, epoch, attempt, sequence: the checkpoint; attempt and sequence are 0 for a legacy file.
        path: this rank's file.
        source: where the bytes came from.
        state: the whole state of this rank, of DTensors the plain local parts. Its tensors may be the very ones that
            tracked optimizers hold from now on.
        skipped: newer checkpoints that were passed over, each with the reason.
    """

    step: int
    epoch: int
    attempt: int
    sequence: int
    path: Path
    source: Literal["memory", "disk"]
    state: Any = field(repr=False)
    skipped: list[Skipped]


@dataclass(frozen=True)
class _Listing:
    """What one rank contributes: its own shard's files, and from rank 0 what only rank 0 is asked for."""

    ranks: list[tuple[int, int]]
    shards: list[Shard]
    attempts: list[Attempt]
    pins: list[tuple[int, int]]
    unread: list[str]


_listings = TypeAdapter(_Listing)


def evidence(run: Run) -> Evidence:
    """Return what all ranks together see; collective, and the same on all of them."""
    listings = [_listings.validate_json(answer) for answer in run.agree(lambda: _listed(run), b"", kind=CkptError)]
    covered = {rank for listing in listings for rank in listing.ranks}
    shards = [
        shard for listing in listings for shard in listing.shards if (shard.stage, shard.tp_rank) in listing.ranks
    ]
    shards += [shard for shard in listings[0].shards if (shard.stage, shard.tp_rank) not in covered]
    attempts = listings[0].attempts
    slots = attempts[-1].slots if attempts else run.slots
    return Evidence(shards, attempts, frozenset(listings[0].pins), slots=slots, unread=tuple(listings[0].unread))


def _listed(run: Run) -> bytes:
    place = run.topology
    ranks = [(place.stage, place.tp_rank)] if place.is_writer else []
    if place.rank == 0:
        shards = scan.scan_run(run.root, run.postfix)
        attempts, unread = scan.read_attempts(run.root, run.postfix)
        pins = sorted(scan.load_pins(run.root, run.postfix))
        return _listings.dump_json(_Listing(ranks, shards, attempts, pins, unread))
    found = scan.scan_stage(run.root, run.postfix, place.stage) if place.is_writer else ()
    own = [shard for shard in found if shard.tp_rank == place.tp_rank]
    return _listings.dump_json(_Listing(ranks, own, [], [], []))


def load_agreed(
    run: Run, choice: Choice, allowed: Allowed, *, explicit: bool
) -> tuple[ResumePoint, LoadedShard] | None:
    """Load the first candidate that every rank finds whole; None if there is none at all. Collective.

    Raises:
        NoUsableCheckpoint: there are some, and all are damaged.
        DamagedCheckpoint: the one that the user named is damaged.
        UntrustedClass: a whole one holds a class that is not trusted; going back further would lose it.
    """
    skipped = list(choice.skipped)
    for checkpoint in choice.candidates:
        shard = own_shard(checkpoint, run.topology)
        loaded, problems = load_on_all(run, shard, _path_here(run, shard), allowed)
        if problems:
            if explicit:
                raise DamagedCheckpoint("; ".join(problems), op="resume", path=shard.path)
            skipped.append((checkpoint.id, "; ".join(problems)))
            continue
        assert loaded is not None
        _warn(skipped, checkpoint.id)
        return _point(checkpoint, shard, loaded.state, skipped), loaded
    if skipped:
        reasons = "; ".join(f"step {found.step} epoch {found.epoch}: {reason}" for found, reason in skipped)
        raise NoUsableCheckpoint(f"every checkpoint is damaged: {reasons}", op="resume")
    return None


def _point(checkpoint: Checkpoint, shard: Shard, state: Any, skipped: list[Skipped]) -> ResumePoint:
    found = checkpoint.id
    return ResumePoint(found.step, found.epoch, found.attempt, found.sequence, Path(shard.path), "disk", state, skipped)


def _path_here(run: Run, shard: Shard) -> str:
    """Return where this rank looks for a shard of the training."""
    # Where hosts do not share the directory, the path is that of the rank that saved; the names below it are the same.
    return shard.path if run.topology.is_writer else os.path.join(run.root, *shard.path.split(os.sep)[-2:])


def load_on_all(run: Run, shard: Shard, path: str, allowed: Allowed) -> tuple[LoadedShard | None, list[str]]:
    """Return this rank's state, and what is wrong with the files of all ranks (then no rank uses its state).

    Collective. ``path`` is where this rank looks for the file; a replica that does not see it there is sent it.
    """
    loaded, mine = _load_own(run, shard, path, allowed)
    answers = run.group.gather(mine)
    problems = _problems(answers)
    lacking = [rank for rank, answer in enumerate(answers) if answer == _LACK]
    if problems or not lacking:
        return loaded, problems
    if not run.group.can_send:
        return None, [f"rank {rank} does not see its file" for rank in lacking]
    received = _share(run, shard, lacking, allowed)
    if received is not None:
        loaded, mine = received
    return loaded, _problems(run.group.gather(mine))


def _load_own(run: Run, shard: Shard, path: str, allowed: Allowed) -> tuple[LoadedShard | None, bytes]:
    if not run.topology.is_writer and not os.path.exists(path):
        return None, _LACK
    return _loaded(path, shard.manifest, allowed, run.topology.dp_rank)


def _loaded(
    path: str, manifest: ShardManifest | None, allowed: Allowed, dp_rank: int
) -> tuple[LoadedShard | None, bytes]:
    try:
        if manifest is None:
            return LoadedShard(load_legacy(path, allowed.trusted)), _HAVE
        return load_rank(path, manifest, allowed, dp_rank=dp_rank), _HAVE
    except DamagedCheckpoint as error:
        return None, _BAD + str(error).encode()
    except UntrustedClass as error:
        return None, _UNTRUSTED + str(error).encode()


def _problems(answers: Sequence[bytes]) -> list[str]:
    """Return what is damaged. A file that only lacks trust is no reason to go back: the user has to decide."""
    untrusted = [answer[1:].decode() for answer in answers if answer[:1] == _UNTRUSTED]
    if untrusted:
        raise UntrustedClass(untrusted[0], op="resume")
    many = len(answers) > 1
    bad = [(rank, answer[1:].decode()) for rank, answer in enumerate(answers) if answer[:1] == _BAD]
    return [f"rank {rank}: {problem}" if many else problem for rank, problem in bad]


def _share(run: Run, shard: Shard, lacking: list[int], allowed: Allowed) -> tuple[LoadedShard | None, bytes] | None:
    """Send the file from data-parallel rank 0 to the replicas that do not have it; returns what a receiver loaded."""
    place = run.topology
    replicas = [place.rank + place.tp * (dp - place.dp_rank) for dp in range(place.dp)]
    receivers = [rank for rank in lacking if rank in replicas]
    if place.is_writer:
        with open(shard.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
            view = memoryview(mapping)
            run.group.send(view, receivers)
            view.release()
        return None
    if place.rank not in receivers:
        return None
    fd = os.memfd_create("ckpt-received", os.MFD_CLOEXEC)  # exactly as large as the file: its end is looked for
    try:
        os.ftruncate(fd, shard.bytes)
        with mmap.mmap(fd, shard.bytes) as mapping, memoryview(mapping) as view:
            run.group.receive(view, replicas[0])
        path = f"/proc/self/fd/{fd}"
        loaded, mine = _loaded(path, shard.manifest, allowed, place.dp_rank)
        return loaded, mine.replace(path.encode(), f"{shard.path} as rank {replicas[0]} sent it".encode())
    finally:
        os.close(fd)


def _warn(skipped: Sequence[Skipped], taken: CheckpointId) -> None:
    for found, reason in skipped:
        warnings.warn(
            f"resuming from step {taken.step}: passed over step {found.step} epoch {found.epoch}: {reason}",
            stacklevel=4,
        )
