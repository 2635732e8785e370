"""Retention carried out: scan, plan, delete. Shell; runs on one thread after commits are durable.

A commit can complete a set, so it may free files of other ranks as well: every pass looks at all histories that this
process writes. Each is planned by itself, and only files in its own directory are deleted, through its descriptor, so a
path that has come to mean another place cannot lead astray.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt_service import retention, scan
from ckpt_service.catalog import Catalog, Evidence, Shard, build
from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.naming import Kind
from ckpt_service.records import Retention, ShardManifest
from ckpt_service.retention import RetentionPlan, RetentionPolicy
from ckpt_service.storage import Directory, LocalDirectory

Key = tuple[Kind, int, int]
"""(kind, stage, tp rank)"""


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
            shards = tuple(scan.scan_directory(history.directory.path, history.manifest.stage))
            catalog = build(replace(evidence, shards=shards))
        done.append(_retain_one(history, catalog, evidence))
    return done


def _retain_one(history: History, catalog: Catalog, evidence: Evidence) -> Retained:
    kind, stage, tp_rank = history.key
    policy = RetentionPolicy(history.policy.keep_last, history.policy.keep_every)
    plan = retention.plan(policy, catalog, kind=kind, stage=stage, tp_rank=tp_rank)
    if evidence.attempts and evidence.attempts[-1].n > history.manifest.attempt:
        return Retained(history, catalog, plan, 0, ())  # a late writer: the newer attempt decides what is needed
    if problem := _uncertainty(catalog, evidence):
        return Retained(history, catalog, plan, 0, (problem,))
    deleted, errors = 0, []
    for shard in plan.delete:
        if os.path.dirname(shard.path) != history.directory.path:
            continue
        try:
            deleted += _delete(shard, history.directory)
        except OSError as error:
            errors.append(from_os_error(error, op="deleting an old checkpoint", kind=CkptError, path=shard.path))
    if deleted:
        try:
            history.directory.sync()
        except OSError as error:  # after a power cut the files may be back, and are deleted again then
            path = history.directory.path
            errors.append(from_os_error(error, op="syncing after a deletion", kind=CkptError, path=path))
    return Retained(history, catalog, plan, deleted, tuple(errors))


def _delete(shard: Shard, directory: Directory) -> bool:
    """Delete what was planned; what a save has put there since, while the disk or this pass was slow, stays."""
    name = os.path.basename(shard.path)
    with directory.keeping(name), directory.locked():  # commits wait for the lock, and must not wait for a large file
        found = scan.inspect(shard.path, shard.name, shard.stage)
        return found == shard and directory.remove(name)


def _uncertainty(catalog: Catalog, evidence: Evidence) -> CkptError | None:
    """Return why nothing may be deleted: what could not be read may turn the plan into another one."""
    for path in evidence.unread:  # what an attempt resumed from decides which checkpoints count
        hint = "restore the record, or delete it if it is lost for good"
        return CkptError(f"nothing is deleted: {path} cannot be read", op="prune", path=path, hint=hint)
    for shard in catalog.files():  # what looks damaged or partial now may be whole, and what has to be kept
        if shard.unread:
            return CkptError(f"nothing is deleted: {shard.path} {shard.problem}", op="prune", path=shard.path)
    return None


@dataclass
class Pruner:
    """The histories of all shards that a daemon writes; owns their directories. Passes are made on one thread."""

    root: str
    postfix: str | None
    _histories: dict[Key, History] = field(default_factory=dict)
    _directories: dict[Key, LocalDirectory] = field(default_factory=dict)
    _noted: deque[tuple[History, LocalDirectory]] = field(default_factory=deque)
    _memory: scan.Memory = field(default_factory=scan.Memory)

    def note(self, manifest: ShardManifest, directory: LocalDirectory, policy: Retention) -> None:
        """Have the next pass look after this shard's history too; on any thread, and never waits for a disk.

        Raises:
            OSError: there is no descriptor for its directory.
        """
        mine = LocalDirectory(os.dup(directory.fd), directory.path)
        self._noted.append((History(manifest, mine, policy), mine))

    def retain(self) -> list[Retained]:
        """Make a pass over all histories."""
        self._take_in_what_was_noted()
        done = retain(self.root, self.postfix, list(self._histories.values()), self._memory)
        catalogs = {id(retained.catalog): retained.catalog for retained in done}.values()
        self._memory.forget_the_gone(shard for catalog in catalogs for shard in catalog.files())
        return done

    def _take_in_what_was_noted(self) -> None:
        while self._noted:
            history, directory = self._noted.popleft()
            before = self._directories.pop(history.key, None)
            if before is not None:
                before.close()
            self._histories[history.key], self._directories[history.key] = history, directory
