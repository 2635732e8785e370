"""Each row of the table names its tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")][1:]


def test_each_row_names_tests_that_exist() -> None:
    sources = "\n".join(path.read_text() for path in HERE.parent.rglob("test_*.py"))
    existing = set(re.findall(r"^(?:async )?def (test_\w+)", sources, re.MULTILINE))
    assert len(ROWS) > 20
    for row in ROWS:
        named = set(re.findall(r"`(test_\w+)`", row.rsplit(" | ", 1)[-1]))
        assert named, f"no test: {row}"
        assert named <= existing, f"not there: {named - existing}"
