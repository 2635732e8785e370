"""``verify``: read files back and check every byte."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ckpt_service.catalog import Catalog, Shard
from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    Root,
    absolute_root,
    checked_postfix,
    complain,
    elsewhere,
    print_json,
    size,
)
from ckpt_service.newer import unreadable_newest
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.scan import load_catalog, load_lora
from ckpt_service.verify import FileReport, verify_shard


def verify(
    root: Root = ".",
    postfix: Postfix = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Check every file, not only the newest complete ones.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the newest complete checkpoint against its checksums (exit 6: damaged).

    Files of the old trainer, without a manifest, are listed as not checkable (``"ok": null``); they are not bad.
    """
    root, postfix = absolute_root(root), checked_postfix(postfix)
    catalog = load_catalog(root, postfix)
    shards = _chosen(root, postfix, catalog, everything=everything)
    if not everything and (newer := unreadable_newest(catalog)) is not None:
        complain(f"step {newer.id.step} epoch {newer.id.epoch} is not checked: {newer.reason}")
    if not shards:
        what = "checkpoint" if everything else "complete checkpoint"
        complain(f"{root} has no {what} to verify{elsewhere(root, postfix)}")
        sys.exit(Exit.NO_CHECKPOINT)
    reports = []
    for shard in shards:
        reports.append(verify_shard(shard))
        if not as_json:
            _print(reports[-1])
    bad = sum(report.ok is False for report in reports)
    checked = sum(report.checkable for report in reports)
    if as_json:
        files = [_row(report) for report in reports]
        print_json({"schema_version": SCHEMA_VERSION, "root": root, "files": files, "checked": checked, "bad": bad})
    if bad:
        sys.exit(Exit.DAMAGED)


def _chosen(root: str, postfix: str | None, catalog: Catalog, *, everything: bool) -> list[Shard]:
    if everything:
        catalogs = [catalog, *load_lora(root, postfix).values()]
        return [shard for found in catalogs for checkpoint in found.checkpoints for shard in checkpoint.shards]
    newest = catalog.newest_complete()
    return list(newest.shards) if newest else []


def _row(report: FileReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "records": report.records,
        "bytes": report.bytes,
        "seconds": round(report.seconds, 3),
        "problem": report.problem,
    }


def _print(report: FileReport) -> None:
    if report.ok:
        typer.echo(f"ok   {report.path}: {report.records} records, {size(report.bytes)} in {report.seconds:.2f} s")
    elif report.ok is None:
        typer.echo(f"?    {report.path}: {report.problem}")
    else:
        typer.echo(f"BAD  {report.path}: {report.problem}")
