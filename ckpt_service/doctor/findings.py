"""What the doctor says: one line for each thing looked at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """How bad it is: fine, works with a limit, does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it (None only when it is fine).

    ``lacks_space``: it fails for want of space on the disk and for nothing else.
    """

    check: str
    verdict: Verdict
    message: str
    fix: str | None = None
    lacks_space: bool = False


def ok(check: str, message: str) -> Finding:
    """Return a line about something that is fine."""
    return Finding(check, Verdict.OK, message)


def warn(check: str, message: str, fix: str) -> Finding:
    """Return a line about something that works with a limit."""
    return Finding(check, Verdict.WARN, message, fix)


def fail(check: str, message: str, fix: str, *, lacks_space: bool = False) -> Finding:
    """Return a line about something that does not work."""
    return Finding(check, Verdict.FAIL, message, fix, lacks_space)


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict on everything."""
    found = {finding.verdict for finding in findings}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in found), Verdict.OK)


def only_space_lacks(findings: Sequence[Finding]) -> bool:
    """Return whether something fails, and everything that does for want of space."""
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    return bool(failed) and all(finding.lacks_space for finding in failed)
