"""docs/architecture.md names every module, and its life cycle is that of the transition table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_service.jobs import ENDED, TRANSITIONS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_the_life_cycle_is_that_of_the_table() -> None:
    diagram = TEXT.split("```mermaid\n")[1].split("```")[0]
    arrows = {tuple(found) for found in re.findall(r"(\S+) --> ([^\s:]+)(?:: (.+))?", diagram)}
    table = {(phase.value, after.value, event.__name__) for (phase, event), after in TRANSITIONS.items()}
    others = {("[*]", "queued", "Offered"), ("queued", "writing", "its turn"), ("waiting", "failed", "no more tries")}
    assert arrows == table | others | {(phase.value, "[*]", "") for phase in ENDED}


@pytest.mark.parametrize("package", ["ckpt_service", "trainer_hooks"])
def test_every_module_has_its_place(package: str) -> None:
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__", "_version"}
    modules |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    places = TEXT.split("## Where to look")[1].split("## Words")[0]
    half = places.split("modules of `trainer_hooks`")[package == "trainer_hooks"]
    named = set(re.findall(r"`([a-z_]+)`", half))
    assert modules - named == set(), "these are not mentioned"
