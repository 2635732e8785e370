"""docs/format.md against the code: its hexdump, its tables of fields and globals, and its examples."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from ckpt_service import image
from ckpt_service.checksum import verify_records
from ckpt_service.records import (
    FORMAT_VERSION,
    Attempt,
    MeshRecord,
    Origin,
    ShardingRecord,
    ShardManifest,
    TensorSharding,
    TopologyRecord,
)
from trainer_hooks.values import REBUILD, REBUILD_PARAMETER, STORAGE_DTYPES, Allowed

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "format.md").read_text()


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_hexdump", DOCS / "make_hexdump.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    found = re.search(rf"^## \d+\. {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of the tables in ``text``, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def fields(title: str) -> dict[str, str]:
    """Return the fields that the first table of a section names, with what stands in the column of types."""
    return {row[0].strip("`"): row[1] for row in rows(_own(title)) if row[0].startswith("`")}


def _own(title: str) -> str:
    """Return a section without its subsections."""
    return section(title).partition("\n### ")[0]


def names(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


SCRIPT = load_script()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return SCRIPT.make_file(tmp_path)


def test_hexdump_is_what_the_script_prints(path: Path) -> None:
    _, begin, rest = TEXT.partition(SCRIPT.BEGIN)
    block, end, _ = rest.partition(SCRIPT.END)
    assert begin
    assert end
    assert block == SCRIPT.render(path), "docs/format.md is out of date: run python docs/make_hexdump.py --update"


def test_script_makes_the_same_file_each_time(path: Path, tmp_path: Path) -> None:
    assert SCRIPT.make_file(tmp_path / "again").read_bytes() == path.read_bytes()


def test_hexdump_elides_repeated_rows_only() -> None:
    data = memoryview(bytes(16) + b"x" + bytes(63) + b"end")
    assert list(SCRIPT.dump(data, 0, len(data))) == [
        "00000000  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|",
        "00000010  78 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |x...............|",
        "00000020  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|",
        "*",
        "00000050  65 6e 64                                          |end|",
    ]


def test_file_of_the_hexdump_is_a_good_checkpoint(path: Path) -> None:
    view = memoryview(path.read_bytes())
    verify_records(view, image.parse(view))
    assert len(view) % image.ALIGNMENT == 0


def test_manifest_fields() -> None:
    assert list(fields("The manifest")) == names(ShardManifest)


@pytest.mark.parametrize("title", ["The manifest", "The attempt file"])
def test_optional_fields_are_told_apart(title: str) -> None:
    model = ShardManifest if title == "The manifest" else Attempt
    told = {row[0].strip("`") for row in rows(_own(title)) if "if absent" in row[-1] or "null" in row[1]}
    assert told == {name for name, field in model.model_fields.items() if not field.is_required()} - {"format_version"}


def test_attempt_fields() -> None:
    documented = fields("The attempt file")
    assert list(documented) == names(Attempt)
    assert re.findall("`(.+?)`", documented["topology"]) == names(TopologyRecord)
    assert re.findall("`(.+?)`", documented["resumed_from"]) == names(Origin)


def test_fields_of_split_tensors() -> None:
    documented = [[cell.strip("`") for cell in row[:2]] for row in rows(section("The manifest").partition("\n### ")[2])]
    models = {"meshes": MeshRecord, "tensors": TensorSharding}
    assert list(models) == names(ShardingRecord)
    expected = [[part, name] for part, model in models.items() for name in names(model)]
    assert documented == [["list", "field"], *expected]


def test_numbers() -> None:
    assert f"**format version {FORMAT_VERSION}**" in TEXT
    assert "8107, the descriptor 16" in TEXT
    assert image.manifest_capacity() == 8107
    assert image.MANIFEST_END == 8192
    assert image.ALIGNMENT == 4096


def test_globals_are_those_that_may_be_named() -> None:
    allowed = Allowed()
    documented = set()
    for cells in rows(section("The pickle")):
        modules = re.findall("`(.+?)`", cells[0])
        listed = [name for name in re.findall("`(.+?)`", cells[1]) if name.isidentifier()]
        if not modules or modules == ["numpy"]:
            continue
        for name in listed:
            assert any(allowed.find(module, name) is not None for module in modules), name
        documented.update(listed)
    assert documented >= {*STORAGE_DTYPES, *REBUILD, *REBUILD_PARAMETER}


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", section("Reading a file with nothing but torch or Python"), re.DOTALL)


@pytest.mark.parametrize("source", examples())
def test_examples_read_the_file(source: str, path: Path) -> None:
    found: dict[str, Any] = {"path": path}
    exec(source, found)
    if "manifest" in found:
        expected = ShardManifest.model_validate(found["manifest"])
        assert found["manifest"] == json.loads(expected.model_dump_json())
    else:
        state = found["state"]
        assert list(state) == ["weight", "counts", "step"]
        assert state["step"] == 100
        if isinstance(state["weight"], torch.Tensor):
            assert state["weight"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
            assert state["counts"].tolist() == [2, 3]
        else:
            counts = torch.tensor([2, 3]).numpy().tobytes()
            assert state["counts"] == ("LongStorage", counts, 0, (2,), (1,))
