"""Retention carried out: scan, plan, delete. Shell; runs on a thread after a commit is durable.

Only files in the directory of the job are deleted, through its descriptor, so a path that has come to mean another
place cannot lead astray.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_service import retention, scan
from ckpt_service.catalog import Catalog, Evidence, build
from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.records import Retention, ShardManifest
from ckpt_service.retention import RetentionPlan, RetentionPolicy
from ckpt_service.storage import Directory


@dataclass(frozen=True)
class Retained:
    """What retention found, decided and did; a deletion that failed is tried again after the next commit."""

    catalog: Catalog
    plan: RetentionPlan
    deleted: int
    errors: tuple[CkptError, ...]


def retain(
    root: str, postfix: str | None, manifest: ShardManifest, directory: Directory, policy: Retention
) -> Retained:
    """Delete what ``policy`` allows of the history of the shard that was just committed to ``directory``.

    A late writer of an older attempt never deletes: the newer attempt decides what is needed.
    """
    catalog = _catalog(root, postfix, manifest, directory)
    plan = retention.plan(
        RetentionPolicy(policy.keep_last, policy.keep_every),
        catalog,
        kind=manifest.kind,
        stage=manifest.stage,
        tp_rank=manifest.tp_rank,
    )
    attempts = scan.load_attempts(root, postfix)
    if attempts and attempts[-1].n > manifest.attempt:
        return Retained(catalog, plan, 0, ())
    deleted, errors = 0, []
    for shard in plan.delete:
        if os.path.dirname(shard.path) != directory.path:
            continue
        try:
            deleted += directory.remove(os.path.basename(shard.path))
        except OSError as error:
            errors.append(from_os_error(error, op="deleting an old checkpoint", kind=CkptError, path=shard.path))
    if deleted:
        directory.sync()
    return Retained(catalog, plan, deleted, tuple(errors))


def _catalog(root: str, postfix: str | None, manifest: ShardManifest, directory: Directory) -> Catalog:
    attempts = scan.load_attempts(root, postfix)
    shards = scan.scan_run(root, postfix)
    if manifest.kind != "train":
        shards = list(scan.scan_directory(directory.path, manifest.stage))
    slots = attempts[-1].slots if attempts else 2
    return build(Evidence(shards, attempts, scan.load_pins(root, postfix), slots=slots))
