"""CRCs: the values of the zip format, computed piece by piece as well, and compared record by record."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_service.checksum import crc32, verify_record, verify_records
from ckpt_service.errors import DamagedCheckpoint
from ckpt_service.image import MANIFEST, Layout, RecordSize, lay_out, manifest_capacity, parse, structure

SIZES = [
    RecordSize(MANIFEST, manifest_capacity()),
    RecordSize("data/0", 5000, aligned=True),
    RecordSize("data/1", 0, aligned=True),
    RecordSize("data.pkl", 77),
]


@pytest.fixture
def layout() -> Layout:
    return lay_out(SIZES)


@pytest.fixture
def image(layout: Layout) -> bytearray:
    content = bytearray(layout.nbytes)
    for position, piece in structure(layout):
        content[position : position + len(piece)] = piece
    for record in layout.records:
        content[record.offset : record.end] = bytes(at * 7 % 251 for at in range(record.nbytes))
        for field in record.crc_fields:
            content[field : field + 4] = crc32(content[record.offset : record.end]).to_bytes(4, "little")
    return content


def test_the_check_value_of_the_polynomial() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"") == 0


@given(st.binary(max_size=500), st.integers(0, 500))
def test_pieces_give_the_value_of_the_whole(data: bytes, cut: int) -> None:
    assert crc32(data[cut:], crc32(data[:cut])) == crc32(memoryview(data)) == zlib.crc32(data)


def test_a_good_image_passes(image: bytearray, layout: Layout) -> None:
    verify_records(memoryview(image), layout)


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("end", ["first", "last"])
def test_one_wrong_bit_is_found_and_its_record_named(
    image: bytearray, layout: Layout, index: int, bit: int, end: str
) -> None:
    record = layout.records[index]
    stated = crc32(image[record.offset : record.end])
    image[record.offset if end == "first" else record.end - 1] ^= 1 << bit
    found = crc32(image[record.offset : record.end])
    assert parse(memoryview(image)) == layout, "the structure is not concerned"
    problem = f"record {SIZES[index].name}: CRC {found:08x}, expected {stated:08x}"
    with pytest.raises(DamagedCheckpoint, match=problem):
        verify_records(memoryview(image), layout)
    for other in layout.records:
        if other is not record:
            verify_record(memoryview(image), other)


def test_two_different_crcs_for_one_record_are_no_crc(image: bytearray, layout: Layout) -> None:
    record = layout.records[1]
    image[record.crc_fields[1]] ^= 1
    with pytest.raises(DamagedCheckpoint, match="two different CRCs"):
        verify_record(memoryview(image), record)


def test_an_image_without_its_crcs_does_not_pass(layout: Layout, image: bytearray) -> None:
    for record in layout.records:
        for field in record.crc_fields:
            image[field : field + 4] = bytes(4)
    with pytest.raises(DamagedCheckpoint, match="expected 00000000"):
        verify_records(memoryview(image), layout)
