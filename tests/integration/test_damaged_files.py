"""Files that are damaged, cut or exchanged: a load finds it and names file and record."""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from support.states import assert_same, load, manifest_in, save

from ckpt_service import image
from ckpt_service.checksum import crc32
from ckpt_service.errors import DamagedCheckpoint
from trainer_hooks.load import load_legacy, load_shard
from trainer_hooks.values import Allowed


@pytest.fixture
def good(tmp_path: Path) -> Path:
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 1, "empty": torch.empty(0), "v": 1}
    return save(state, tmp_path / "good")


def layout_of(path: Path) -> image.Layout:
    return image.parse(memoryview(path.read_bytes()))


RECORDS = ["data/0", "data/1", image.PICKLE, image.BYTEORDER, image.VERSION, image.SERIALIZATION_ID, image.MANIFEST]


@pytest.mark.parametrize("name", RECORDS)
def test_flipped_bit_is_found_and_named(name: str, good: Path) -> None:
    record = layout_of(good).find(name)
    assert record is not None
    content = bytearray(good.read_bytes())
    expected = manifest_in(good)
    for position in {record.offset, record.end - 1, (record.offset + record.end) // 2}:
        content[position] ^= 0x01
        good.write_bytes(content)
        with pytest.raises(DamagedCheckpoint) as caught:
            load_shard(str(good), expected, Allowed())
        assert caught.value.path == str(good)
        assert str(good) in str(caught.value)
        assert name.rpartition("/")[2].removesuffix(".json") in str(caught.value)
        content[position] ^= 0x01
    good.write_bytes(content)
    load(good)


def test_flipped_bit_in_the_structure_is_found(good: Path) -> None:
    """Bits of headers, descriptors and the directory: each is either found or outside of what is read."""
    content = bytearray(good.read_bytes())
    expected = manifest_in(good)
    layout = layout_of(good)
    positions = {position + offset for position, part in image.structure(layout) for offset in range(0, len(part), 97)}
    positions |= set(range(layout.directory, layout.nbytes, 11)) | {f for r in layout.records for f in r.crc_fields}
    for position in sorted(positions):
        content[position] ^= 0x10
        good.write_bytes(content)
        with pytest.raises(DamagedCheckpoint):
            load_shard(str(good), expected, Allowed())
        content[position] ^= 0x10


@pytest.mark.parametrize("keep", [0, 1, 100, 8191, 8192, 9000, -4096, -1])
def test_cut_file(keep: int, good: Path) -> None:
    expected = manifest_in(good)
    good.write_bytes(good.read_bytes()[:keep])
    with pytest.raises(DamagedCheckpoint, match=str(good)):
        load_shard(str(good), expected, Allowed())


def test_garbage_behind_the_file(good: Path) -> None:
    expected = manifest_in(good)
    for garbage in (b"x", bytes(4096), good.read_bytes()):
        before = good.read_bytes()
        good.write_bytes(before + garbage)
        with pytest.raises(DamagedCheckpoint, match=str(good)):
            load_shard(str(good), expected, Allowed())
        good.write_bytes(before)


def test_swapped_records(good: Path) -> None:
    layout, expected = layout_of(good), manifest_in(good)
    first, second = layout.find("data/0"), layout.find("data/1")
    assert first is not None
    assert second is not None
    content = bytearray(good.read_bytes())
    one, two = bytes(content[first.offset : first.end]), bytes(content[second.offset : second.end])
    content[first.offset : first.end], content[second.offset : second.end] = two, one
    good.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="record data/0: CRC"):
        load_shard(str(good), expected, Allowed())


def test_a_page_of_zeros(good: Path) -> None:
    expected = manifest_in(good)
    record = layout_of(good).find("data/1")
    assert record is not None
    content = bytearray(good.read_bytes())
    content[record.offset : record.offset + 4000] = bytes(4000)
    good.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="data/1"):
        load_shard(str(good), expected, Allowed())


def test_another_file_in_its_place(good: Path, tmp_path: Path) -> None:
    other = save({"a": torch.zeros(1000)}, tmp_path / "other")
    expected = manifest_in(good)
    good.write_bytes(other.read_bytes())
    with pytest.raises(DamagedCheckpoint, match="not the one that was listed"):
        load_shard(str(good), expected, Allowed())


def test_missing_file(good: Path) -> None:
    expected = manifest_in(good)
    good.unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        load_shard(str(good), expected, Allowed())


def test_crc_fields_that_agree_with_damaged_data_are_believed(good: Path) -> None:
    """The tests above fail for the reason that they state: with its CRC mended, a changed record loads."""
    record = layout_of(good).find("data/0")
    assert record is not None
    content = bytearray(good.read_bytes())
    content[record.offset : record.offset + 4] = struct.pack("<f", 42.0)
    for position in record.crc_fields:
        content[position : position + 4] = crc32(bytes(content[record.offset : record.end])).to_bytes(4, "little")
    good.write_bytes(content)
    assert load(good)["a"][0] == 42


def test_legacy_files(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    state = {"w": torch.arange(3.0), "lr": 0.1}
    torch.save(state, path)
    assert_same(load_legacy(str(path)), state)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert_same(load_legacy(str(path)), state)
    torch.save({"f": os.system}, path)
    with pytest.raises(DamagedCheckpoint, match=str(path)):
        load_legacy(str(path))


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_legacy_files(zipped: bool, tmp_path: Path) -> None:
    source = random.Random(3)
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(30.0), "v": [1, "two"]}, buffer, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "legacy.pt"
    for number in range(120):
        content = bytearray(buffer.getvalue())
        if number % 2:
            content = content[: source.randrange(len(content))]
        elif content:
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
        path.write_bytes(content)
        with contextlib.suppress(DamagedCheckpoint):
            load_legacy(str(path))
