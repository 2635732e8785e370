"""Retention carried out: scan, plan, delete. Shell; runs on one thread after commits are durable.

A commit can complete a set, so it may free files of other ranks as well: every pass looks at all histories that this
process writes. Each is planned by itself, and only files in its own directory are deleted, through its descriptor, so a
path that has come to mean another place cannot lead astray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_service import retention, scan
from ckpt_service.catalog import Catalog, Evidence, State, build
from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.naming import Kind
from ckpt_service.records import Retention, ShardManifest
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
            deleted += history.directory.remove(os.path.basename(shard.path))
        except OSError as error:
            errors.append(from_os_error(error, op="deleting an old checkpoint", kind=CkptError, path=shard.path))
    if deleted:
        history.directory.sync()
    return Retained(history, catalog, plan, deleted, tuple(errors))


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
    """The histories of all shards that a daemon writes. Used on one thread only; owns the directories.

    A shard of LoRA or HF files has one history for each directory; those that are not written to any more are looked at
    until nothing in them waits for other ranks.
    """

    root: str
    postfix: str | None
    _histories: dict[tuple[Key, str], History] = field(default_factory=dict)
    _memory: scan.Memory = field(default_factory=scan.Memory)

    def retain_after(self, manifest: ShardManifest, directory: LocalDirectory, policy: Retention) -> list[Retained]:
        """Note a commit and make a pass over all histories."""
        history = History(manifest, LocalDirectory(os.dup(directory.fd), directory.path), policy)
        self._let_go((history.key, directory.path))
        self._histories[history.key, directory.path] = history
        return self.retain()

    def retain(self) -> list[Retained]:
        """Make a pass over all histories."""
        done = retain(self.root, self.postfix, list(self._histories.values()), self._memory)
        catalogs = {id(retained.catalog): retained.catalog for retained in done}.values()
        self._memory.forget_the_gone(shard for catalog in catalogs for shard in catalog.files())
        self._let_go_of_former([retained.history for retained in done if not retained.is_unfinished])
        return done

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
