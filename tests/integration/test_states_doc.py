"""docs/states.md: every row names a test, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "states.md").read_text().splitlines()
    if line.startswith("| ") and not line.endswith("| test |")
]


@cache
def defined_in(path: Path) -> set[str]:
    found = ast.parse(path.read_text()).body
    return {node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_there_are_rows() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_row_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == 3
    named = re.fullmatch(r"`(tests/\w+/\w+\.py)::(\w+)`", row[2])
    assert named, row[2]
    assert named[2] in defined_in(ROOT / named[1])
