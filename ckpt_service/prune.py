"""Retention carried out: scan, plan, delete. Shell; runs on one thread after commits are durable.

A commit can complete a set, so it may free files of other ranks as well: every pass looks at all histories that this
process writes. Each is planned by itself, and only files in its own directory are deleted, through its descriptor, so a
path that has come to mean another place cannot lead astray.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from ckpt_service import retention, scan
from ckpt_service.catalog import Catalog, Evidence, Shard, State, build
from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.messages import Retention
from ckpt_service.naming import Kind
from ckpt_service.records import ShardManifest
from ckpt_service.retention import RetentionPlan, RetentionPolicy
from ckpt_service.storage import Directory, LocalDirectory

Key = tuple[Kind, int, int]
"""(kind, stage, tp rank)"""

_FORMER_DIRECTORIES = 4


@dataclass(frozen=True)
class History:
    """One shard's history: its newest manifest, its directory, and the policy of its trainer."""

    manifest: ShardManifest
    directory: Directory
    policy: Retention

    @property
    def key(self) -> Key:
        """The (kind, stage, tp rank)."""
        return (self.manifest.kind, self.manifest.stage, self.manifest.tp_rank)


@dataclass(frozen=True)
class Retained:
    """What retention found, decided and did for one history; a failed deletion is tried again at the next commit."""

    history: History
    catalog: Catalog
    plan: RetentionPlan
    deleted: int
    errors: tuple[CkptError, ...]

    @property
    def is_unfinished(self) -> bool:
        """Whether there may be more to delete once other ranks have committed, or when it is tried again."""
        partial = any(found.state is State.PARTIAL for found in self.catalog.of_kind(self.history.manifest.kind))
        return partial or bool(self.errors)


def retain(
    root: str, postfix: str | None, histories: Sequence[History], look: scan.Look = scan.inspect
) -> list[Retained]:
    """Delete what the policies allow of these histories."""
    evidence = scan.load_evidence(root, postfix, look)
    train = build(evidence)
    done = []
    for history in histories:
        catalog = train
        if history.manifest.kind != "train":
            m = history.manifest
            shards = [s for s in scan.scan_all_stages(history.directory.path, m.stage, look) if s.name.kind == m.kind]
            catalog = build(scan.evidence_beside(shards, m.run_id, evidence.slots))
        done.append(_retain_one(history, catalog, evidence, partial(_is_pinned, root, postfix)))
    return done


def _retain_one(history: History, catalog: Catalog, evidence: Evidence, is_pinned: Spared) -> Retained:
    kind, stage, tp_rank = history.key
    policy = RetentionPolicy(history.policy.keep_last, history.policy.keep_every)
    plan = retention.plan(policy, catalog, kind=kind, stage=stage, tp_rank=tp_rank)
    if evidence.attempts and evidence.attempts[-1].n > history.manifest.attempt:
        return Retained(history, catalog, plan, 0, ())  # a late writer: the newer attempt decides what is needed
    if problem := _uncertainty(evidence.unread, catalog):
        return Retained(history, catalog, plan, 0, (problem,))
    mine = [shard for shard in plan.delete if os.path.dirname(shard.path) == history.directory.path]
    deleted, errors = delete(mine, history.directory, is_pinned)
    return Retained(history, catalog, plan, len(deleted), tuple(errors))


Spared = Callable[[Shard], bool]
"""Whether a file that was to be deleted is to stay after all, asked just before."""


def _is_pinned(root: str, postfix: str | None, shard: Shard) -> bool:
    """Return whether a training shard is pinned now: a pass over a slow disk takes long, and somebody may have come."""
    m = shard.manifest
    return m is not None and m.kind == "train" and (m.attempt, m.sequence) in scan.load_pins(root, postfix)


def delete(shards: Iterable[Shard], directory: Directory, is_spared: Spared) -> tuple[list[Shard], list[CkptError]]:
    """Delete these files of one directory, durably; return those that are gone by this, and what went wrong."""
    deleted, errors = [], []
    for shard in shards:
        try:
            if _delete_one(shard, directory, is_spared):
                deleted.append(shard)
        except OSError as error:
            errors.append(from_os_error(error, op="deleting an old checkpoint", kind=CkptError, path=shard.path))
    if deleted:
        try:
            directory.sync()
        except OSError as error:  # after a power cut the files may be back, and are deleted again then
            errors.append(from_os_error(error, op="syncing after a deletion", kind=CkptError, path=directory.path))
    return deleted, errors


def _delete_one(shard: Shard, directory: Directory, is_spared: Spared) -> bool:
    """Delete what was planned; what a save has put there since, while the disk or this pass was slow, stays."""
    name = os.path.basename(shard.path)
    with directory.keeping(name), directory.locked():  # commits wait for the lock, and must not wait for a large file
        found = scan.inspect(shard.path, shard.name, shard.stage)
        return found == shard and not is_spared(shard) and directory.remove(name)


@dataclass(frozen=True)
class HandPass:
    """What a pass by hand decides for one (kind, stage, tp rank), and what it has deleted of it."""

    plan: RetentionPlan
    deleted: tuple[Shard, ...] = ()
    errors: tuple[CkptError, ...] = ()


def plan_by_hand(root: str, postfix: str | None, policy: RetentionPolicy) -> list[RetentionPlan]:
    """Return a plan for each history that lies below a root: all kinds, stages and tensor-parallel ranks.

    The decisions are those of the daemon's own passes; nothing is deleted here.

    Raises:
        CkptError: a file or a record could not be read; the plan could be another one.
    """
    catalogs = scan.load_catalogs(root, postfix)
    unread = scan.read_attempts(root, postfix)[1]
    for problem in filter(None, (_uncertainty(unread, catalog) for catalog in catalogs)):
        raise problem
    return [
        retention.plan(policy, catalog, kind=kind, stage=stage, tp_rank=tp_rank)
        for catalog in catalogs
        for kind, stage, tp_rank in sorted({(s.name.kind, s.stage, s.tp_rank) for s in catalog.files()})
    ]


def carry_out(root: str, postfix: str | None, plan: RetentionPlan) -> HandPass:
    """Delete what a plan by hand lets go."""
    deleted: list[Shard] = []
    errors: list[CkptError] = []
    for path, shards in groupby(plan.delete, key=lambda shard: os.path.dirname(shard.path)):
        try:
            with LocalDirectory.open(path) as directory:
                gone, problems = delete(shards, directory, partial(_is_pinned, root, postfix))
        except OSError as error:
            errors.append(from_os_error(error, op="deleting old checkpoints", kind=CkptError, path=path))
            continue
        deleted += gone
        errors += problems
    return HandPass(plan, tuple(deleted), tuple(errors))


def _uncertainty(unread: Sequence[str], catalog: Catalog) -> CkptError | None:
    """Return why nothing may be deleted: what could not be read may turn the plan into another one.

    ``unread`` are records of attempts: what an attempt resumed from decides which checkpoints count.
    """
    for path in unread:
        hint = "restore the record, or delete it if it is lost for good"
        return CkptError(f"nothing is deleted: {path} cannot be read", op="prune", path=path, hint=hint)
    for shard in catalog.files():  # what looks damaged or partial now may be whole, and what has to be kept
        if shard.unread:
            return CkptError(f"nothing is deleted: {shard.path} {shard.problem}", op="prune", path=shard.path)
    return None


@dataclass
class Pruner:
    """The histories of all shards that a daemon writes; owns their directories. Passes are made on one thread.

    A shard of LoRA or HF files has one history for each directory; those that are not written to any more are looked at
    until nothing in them waits for other ranks.
    """

    root: str
    postfix: str | None
    _histories: dict[tuple[Key, str], History] = field(default_factory=dict)
    _noted: deque[History] = field(default_factory=deque)
    _memory: scan.Memory = field(default_factory=scan.Memory)

    def note(self, manifest: ShardManifest, directory: LocalDirectory, policy: Retention) -> None:
        """Have the next pass look after this shard's history too; on any thread, and never waits for a disk.

        Raises:
            OSError: there is no descriptor for its directory.
        """
        self._noted.append(History(manifest, LocalDirectory(os.dup(directory.fd), directory.path), policy))

    def retain(self) -> list[Retained]:
        """Make a pass over all histories."""
        self._take_in_what_was_noted()
        done = retain(self.root, self.postfix, list(self._histories.values()), self._memory)
        catalogs = {id(retained.catalog): retained.catalog for retained in done}.values()
        self._memory.forget_the_gone(shard for catalog in catalogs for shard in catalog.files())
        self._let_go_of_former([retained.history for retained in done if not retained.is_unfinished])
        return done

    def _take_in_what_was_noted(self) -> None:
        while self._noted:
            history = self._noted.popleft()
            place = (history.key, history.directory.path)
            self._let_go(place)
            self._histories[place] = history

    def _let_go_of_former(self, finished: Sequence[History]) -> None:
        """Forget directories that a shard has left, if nothing is to come there, or if they are too many."""
        for key in {history.key for history in self._histories.values()}:
            former = [history for history in self._histories.values() if history.key == key][:-1]
            for history in former:
                if history in finished or len(former) - former.index(history) > _FORMER_DIRECTORIES:
                    self._let_go((key, history.directory.path))

    def _let_go(self, place: tuple[Key, str]) -> None:
        known = self._histories.pop(place, None)
        if known is not None and isinstance(known.directory, LocalDirectory):
            known.directory.close()
