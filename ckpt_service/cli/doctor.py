"""``doctor``: will it work here, and what to do where it will not."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone

import typer

from ckpt_service.cli.common import Exit, Json, Postfix, Root, checked_postfix, end_on_signals, print_json
from ckpt_service.config import load_config
from ckpt_service.doctor import machine, place
from ckpt_service.doctor.findings import Finding, Verdict, only_space_lacks, worst
from ckpt_service.doctor.gather import gather
from ckpt_service.records import SCHEMA_VERSION


def doctor(root: Root = ".", postfix: Postfix = None, as_json: Json = False) -> None:
    """Check the machine, the disk and the run directory; ROOT need not exist yet. A live run is not disturbed."""
    end_on_signals()
    root, postfix = os.path.abspath(root), checked_postfix(postfix)
    config = load_config(os.environ)
    facts = gather(root, postfix, os.environ, datetime.now(timezone.utc), wants_direct=config.direct_io)
    findings = [*machine.judge(facts), *place.judge(facts, config.stale_seconds)]
    if as_json:
        checks = [_row(finding) for finding in findings]
        verdict = worst(findings).value
        print_json({"schema_version": SCHEMA_VERSION, "root": root, "verdict": verdict, "checks": checks})
    else:
        for finding in findings:
            _print(finding)
    sys.exit(_exit_code(findings))


def _exit_code(findings: list[Finding]) -> Exit:
    """Return 8 where only space lacks, 1 where anything else fails."""
    if only_space_lacks(findings):
        return Exit.NO_SPACE
    return Exit.FAILED if worst(findings) is Verdict.FAIL else Exit.OK


def _row(finding: Finding) -> dict[str, str | None]:
    return {
        "check": finding.check,
        "verdict": finding.verdict.value,
        "message": finding.message,
        "fix": finding.fix,
    }


def _print(finding: Finding) -> None:
    typer.echo(f"{finding.verdict.value.upper():<4}  {finding.check:<10}  {finding.message}")
    if finding.fix is not None:
        typer.echo(f"{'':18}fix: {finding.fix}")
