"""The image: what is laid out is read back, others can read it, and a damaged one is never taken for a good one."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import struct
import subprocess
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_service import image
from ckpt_service.errors import DamagedCheckpoint
from ckpt_service.image import (
    ALIGNMENT,
    ARCHIVE,
    MANIFEST,
    MANIFEST_END,
    Layout,
    Record,
    RecordSize,
    lay_out,
    manifest_capacity,
    parse,
    structure,
)

HEAD = RecordSize(MANIFEST, manifest_capacity())
TRAINER = [
    HEAD,
    RecordSize("data/0", 4 * 1000, aligned=True),
    RecordSize("data/1", 0, aligned=True),
    RecordSize("data/2", 1, aligned=True),
    RecordSize("data/3", 4096, aligned=True),
    RecordSize("data.pkl", 311),
    RecordSize("byteorder", 6),
    RecordSize("version", 2),
    RecordSize(".data/serialization_id", 40),
]
SMALL = [HEAD, RecordSize("data/0", 9), RecordSize("data/1", 0), RecordSize("version", 2)]
FOUR_GIB = 1 << 32

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@st.composite
def record_sizes(draw: st.DrawFn) -> list[RecordSize]:
    names = draw(st.lists(NAMES.filter(lambda name: name != MANIFEST), min_size=1, max_size=8, unique=True))
    nbytes = st.just(0) | st.integers(0, 50) | st.integers(4000, 4200) | st.integers(0, 20_000)
    sizes = [RecordSize(name, draw(nbytes), draw(st.booleans())) for name in names]
    return [HEAD, *sizes[:-1], RecordSize(sizes[-1].name, sizes[-1].nbytes)]


def content_of(record: Record) -> bytes:
    """Return data that has no zero in it and repeats at a prime distance."""
    pattern = bytes(1 + (at + record.header) % 255 for at in range(251))
    return (pattern * (record.nbytes // 251 + 1))[: record.nbytes]


def fill(layout: Layout) -> bytearray:
    """Return the finished image: structure, data and CRCs, as capture and writer put them in."""
    content = bytearray(layout.nbytes)
    for position, piece in structure(layout):
        content[position : position + len(piece)] = piece
    for record in layout.records:
        data = content_of(record)
        content[record.offset : record.end] = data
        for field in record.crc_fields:
            content[field : field + 4] = zlib.crc32(data).to_bytes(4, "little")
    return content


def accepts(content: bytes | bytearray) -> Layout | None:
    """Return the layout, or None if it is refused; anything else that is raised fails the test."""
    try:
        return parse(memoryview(content))
    except DamagedCheckpoint:
        return None


# --- laying out and reading back --------------------------------------------------------------------------------------


@given(record_sizes())
def test_a_layout_comes_back_from_its_structure(sizes: list[RecordSize]) -> None:
    layout = lay_out(sizes)
    unfinished = bytearray(layout.nbytes)
    for position, piece in structure(layout):
        unfinished[position : position + len(piece)] = piece
    assert parse(memoryview(unfinished)) == layout
    assert parse(memoryview(fill(layout))) == layout


@given(record_sizes())
def test_records_lie_where_they_were_asked_for(sizes: list[RecordSize]) -> None:
    layout = lay_out(sizes)
    assert [(record.name, record.nbytes) for record in layout.records] == [
        (f"{ARCHIVE}/{size.name}", size.nbytes) for size in sizes
    ]
    for size, record in zip(sizes, layout.records, strict=True):
        assert layout.find(size.name) == record
        assert not size.aligned or record.offset % ALIGNMENT == 0
    assert layout.nbytes % ALIGNMENT == 0, "every byte can be written with direct I/O"
    assert layout.records[0].header == 0
    assert layout.records[1].header == MANIFEST_END
    assert layout.find("no such record") is None


@given(record_sizes())
def test_structure_and_data_cover_every_byte_once(sizes: list[RecordSize]) -> None:
    layout = lay_out(sizes)
    pieces = [(position, len(piece)) for position, piece in structure(layout)]
    pieces += [(record.offset, record.nbytes) for record in layout.records]
    position = 0
    for start, length in sorted(piece for piece in pieces if piece[1]):
        assert start == position
        position += length
    assert position == layout.nbytes


@given(record_sizes())
def test_crcs_stand_behind_the_data_and_agree(sizes: list[RecordSize]) -> None:
    layout = lay_out(sizes)
    content = memoryview(fill(layout))
    for record in layout.records:
        assert all(field >= record.end for field in record.crc_fields)
        assert len(record.crc_fields) == (2 if record.nbytes else 0)
        assert image.stored_crc(content, record) == zlib.crc32(content_of(record))


@given(record_sizes())
def test_the_layout_depends_on_names_and_sizes_only(sizes: list[RecordSize]) -> None:
    assert lay_out(sizes) == lay_out(list(sizes))
    assert dict(structure(lay_out(sizes))) == dict(structure(lay_out(sizes)))


def test_offsets_of_storages_do_not_move_when_the_pickle_grows() -> None:
    grown = [RecordSize(size.name, size.nbytes + (size.name == "data.pkl"), size.aligned) for size in TRAINER]
    before, after = lay_out(TRAINER), lay_out(grown)
    assert [record.offset for record in before.records[:5]] == [record.offset for record in after.records[:5]]


def test_a_manifest_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=f"room for {MANIFEST_END}"):
        lay_out([RecordSize(MANIFEST, manifest_capacity() + 1), RecordSize("version", 2)])


def test_a_caller_that_forgets_the_manifest_or_the_padding_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="manifest"):
        lay_out([RecordSize("version", 2)])
    with pytest.raises(AssertionError, match="padding"):
        lay_out([HEAD, RecordSize("data/0", 2, aligned=True)])


# --- what others make of it -------------------------------------------------------------------------------------------


@given(record_sizes())
def test_zipfile_reads_every_record(sizes: list[RecordSize]) -> None:
    layout = lay_out(sizes)
    with zipfile.ZipFile(io.BytesIO(fill(layout))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [record.name for record in layout.records]
        for record in layout.records:
            assert archive.read(record.name) == content_of(record)
            info = archive.getinfo(record.name)
            assert (info.header_offset, info.compress_type) == (record.header, zipfile.ZIP_STORED)


MANY = [HEAD, *(RecordSize(f"data/{index}", index % 3) for index in range(70_000)), RecordSize("version", 2)]


def test_more_records_than_a_plain_zip_directory_can_count() -> None:
    layout = lay_out(MANY)
    content = fill(layout)
    assert parse(memoryview(content)) == layout
    assert content[-14:-10] == b"\xff" * 4, "look elsewhere for the counts"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert len(archive.namelist()) == len(MANY) > 0xFFFF


@pytest.mark.parametrize(
    "sizes",
    [
        TRAINER,
        SMALL,
        [HEAD, RecordSize("version", 0)],
        [HEAD, *(RecordSize(f"data/{index}", index * 37 % 5000, aligned=True) for index in range(300)), SMALL[-1]],
        [HEAD, *(RecordSize(f"data/{index}", 0, aligned=True) for index in range(40)), SMALL[-1]],
    ],
    ids=["trainer", "small", "empty last", "many", "all empty"],
)
def test_unzip_finds_no_fault(sizes: list[RecordSize], tmp_path: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    path = tmp_path / "image.pt"
    path.write_bytes(fill(lay_out(sizes)))
    done = subprocess.run(["unzip", "-t", str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No errors detected" in done.stdout


# --- beyond 4 GiB -----------------------------------------------------------------------------------------------------


HUGE = [
    HEAD,
    RecordSize("data/0", FOUR_GIB + 8192, aligned=True),
    RecordSize("data/1", 5000, aligned=True),
    RecordSize("data/2", 0, aligned=True),
    RecordSize("version", 2),
]
# The largest size that fits into 32 bits without meaning "look elsewhere", and the next one, which does not.
LARGEST_PLAIN = [HEAD, RecordSize("data/0", 0xFFFFFFFE, aligned=True), *HUGE[2:]]
SMALLEST_WIDE = [HEAD, RecordSize("data/0", 0xFFFFFFFF, aligned=True), *HUGE[2:]]
# Many records, none of them large: only the positions are.
FAR = [HEAD, *(RecordSize(f"data/{index}", 1 << 30, aligned=True) for index in range(5)), SMALL[-1]]


def far_pieces(layout: Layout) -> list[tuple[int, bytes]]:
    """Return the structure and the data of small records, with their CRCs; large records stay holes."""
    pieces = list(structure(layout))
    for record in layout.records:
        if 0 < record.nbytes < 10_000:
            data = content_of(record)
            crc = zlib.crc32(data).to_bytes(4, "little")
            pieces += [(record.offset, data), *((field, crc) for field in record.crc_fields)]
    return pieces


@pytest.mark.parametrize(
    "sizes", [HUGE, LARGEST_PLAIN, SMALLEST_WIDE, FAR], ids=["huge", "largest plain", "smallest wide", "far"]
)
def test_an_image_beyond_4_gib_is_read_by_us_and_by_zipfile(sizes: list[RecordSize], tmp_path: Path) -> None:
    layout = lay_out(sizes)
    assert layout.nbytes > FOUR_GIB
    with (tmp_path / "sparse.pt").open("w+b") as file:
        os.truncate(file.fileno(), layout.nbytes)
        for position, piece in far_pieces(layout):
            os.pwrite(file.fileno(), piece, position)
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 20, "nothing but the structure is written"
        with (
            mmap.mmap(file.fileno(), layout.nbytes, access=mmap.ACCESS_READ) as mapping,
            memoryview(mapping) as view,
        ):
            assert parse(view) == layout
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            assert [(info.filename, info.file_size, info.compress_size, info.header_offset) for info in infos] == [
                (record.name, record.nbytes, record.nbytes, record.header) for record in layout.records
            ]
            for record in layout.records:
                if record.nbytes < 10_000:
                    assert archive.read(record.name) == content_of(record), "its header is found"


def test_a_large_size_or_a_large_position_is_written_in_64_bits() -> None:
    pieces = dict(structure(lay_out(HUGE)))
    _, large, behind, empty, last = lay_out(HUGE).records
    assert len(pieces[large.end]) == 24, "its size takes 64 bits"
    assert len(pieces[behind.end]) == 24, "its position does"
    assert empty.end == last.header, "an empty record has nothing behind it"
    assert struct.unpack("<4sI2Q", pieces[large.end]) == (b"PK\7\x08", 0, large.nbytes, large.nbytes)
    plain = lay_out(LARGEST_PLAIN)
    assert len(dict(structure(plain))[plain.records[1].end]) == 16


@given(st.integers(-3, 3), st.integers(-3, 3))
def test_layout_arithmetic_around_4_gib(near_size: int, near_position: int) -> None:
    start = lay_out([HEAD, RecordSize("a", 0, aligned=True), SMALL[-1]]).records[1].offset
    sizes = [
        HEAD,
        RecordSize("a", 0xFFFFFFFF - start - 16 + near_position, aligned=True),
        RecordSize("b", 0xFFFFFFFF + near_size),
        RecordSize("c", 1, aligned=True),
        RecordSize("version", 2),
    ]
    layout = lay_out(sizes)
    assert layout.records[2].header == 0xFFFFFFFF + near_position
    assert layout.nbytes % ALIGNMENT == 0
    pieces = sorted(structure(layout))
    for record, after in zip(layout.records, layout.records[1:], strict=False):
        behind = next(piece for position, piece in pieces if position == record.end)
        assert record.end + len(behind) == after.header
        wide = record.nbytes >= 0xFFFFFFFF or record.header >= 0xFFFFFFFF
        assert len(behind) == (24 if wide else 16)


# --- the manifest -----------------------------------------------------------------------------------------------------


def head_with(json: bytes) -> bytearray:
    content = fill(lay_out(SMALL))
    record = lay_out(SMALL).records[0]
    content[record.offset : record.end] = json.ljust(record.nbytes)
    return content


@given(st.binary(max_size=manifest_capacity()))
def test_the_manifest_is_read_from_the_head_alone(json: bytes) -> None:
    head = bytes(head_with(json)[:MANIFEST_END])
    assert image.manifest_json(head) == json.ljust(manifest_capacity())
    assert image.manifest_json(memoryview(head)) == json.ljust(manifest_capacity())


@pytest.mark.parametrize("head", [b"", b"PK\3\4", bytes(MANIFEST_END), b"\x80\x02}q\x00." * 2000])
def test_a_file_that_does_not_start_like_ours_has_no_manifest(head: bytes) -> None:
    assert image.manifest_json(head) is None


def test_a_zip_of_torch_has_no_manifest() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 9000)
    assert image.manifest_json(buffer.getvalue()[:MANIFEST_END]) is None


@pytest.mark.parametrize("length", [100, 4096, MANIFEST_END - 1])
def test_a_manifest_that_is_cut_is_damaged(length: int) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"ends at {length} bytes"):
        image.manifest_json(bytes(head_with(b"{}")[:length]))


@given(st.lists(st.tuples(st.integers(0, 200) | st.integers(MANIFEST_END - 16, MANIFEST_END - 1), st.integers(0, 255))))
def test_a_damaged_head_is_no_manifest_or_damaged(edits: list[tuple[int, int]]) -> None:
    head = head_with(b"{}")[:MANIFEST_END]
    for position, value in edits:
        head[position] = value
    try:
        found = image.manifest_json(bytes(head))
    except DamagedCheckpoint:
        return
    assert found is None or len(found) == manifest_capacity()


# --- damaged images ---------------------------------------------------------------------------------------------------


LAYOUT = lay_out(SMALL)
GOOD = bytes(fill(LAYOUT))
TAIL = 98  # zip64 end, its locator, and the end of the directory: 56 + 20 + 22 bytes
TAIL_START = LAYOUT.nbytes - TAIL


@pytest.mark.parametrize(
    "length",
    [
        *(0, 1, 29, 100, MANIFEST_END - 1, MANIFEST_END, MANIFEST_END + 1),
        LAYOUT.records[1].offset,
        LAYOUT.records[1].end - 1,
        LAYOUT.records[1].end + 4,
        LAYOUT.records[-1].offset,
        LAYOUT.records[-1].end,
        LAYOUT.directory,
        LAYOUT.directory + 20,
        TAIL_START - 1,
        TAIL_START,
        TAIL_START + 30,
        TAIL_START + 56,
        TAIL_START + 60,
        TAIL_START + 76,
        LAYOUT.nbytes - 22,
        LAYOUT.nbytes - 2,
        LAYOUT.nbytes - 1,
    ],
)
def test_an_image_that_is_cut_is_damaged(length: int) -> None:
    assert accepts(GOOD[:length]) is None


@given(st.integers(0, LAYOUT.nbytes - 1))
def test_an_image_that_is_cut_anywhere_is_damaged(length: int) -> None:
    assert accepts(GOOD[:length]) is None
    zeroed = GOOD[:length] + bytes(LAYOUT.nbytes - length)
    found = accepts(zeroed)
    assert found is None or zeroed == GOOD, "as after a power cut: the size is right, the end was never written"


@pytest.mark.parametrize("more", [b"\0", bytes(4096), GOOD])
def test_bytes_behind_the_end_are_damage(more: bytes) -> None:
    assert accepts(GOOD + more) is None


@pytest.mark.parametrize("sizes", [SMALL, TRAINER], ids=["small", "trainer"])
def test_no_flipped_byte_goes_unseen(sizes: list[RecordSize]) -> None:
    """Each byte in turn: what is not data and not a CRC must be exactly as it was laid out."""
    layout = lay_out(sizes)
    content = fill(layout)
    crcs = {field + at: record for record in layout.records for field in record.crc_fields for at in range(4)}
    tested = 0
    for start, piece in structure(layout):
        # Of long padding a sample is enough; the rest of a header is taken whole.
        for position in (*range(start, min(start + 150, start + len(piece))), *range(start, start + len(piece), 97)):
            content[position] ^= 1 << position % 8
            found = accepts(content)
            if position in crcs:
                assert found == layout
                with pytest.raises(DamagedCheckpoint, match="two different CRCs"):
                    image.stored_crc(memoryview(content), crcs[position])
            else:
                assert found is None, f"byte {position} was flipped"
            content[position] ^= 1 << position % 8
            tested += 1
    assert tested > 500
    assert accepts(content) == layout


STRUCTURAL = [position for start, piece in structure(LAYOUT) for position in range(start, start + len(piece))]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(STRUCTURAL), st.integers(0, 255)), min_size=1, max_size=12))
@example([(LAYOUT.directory + 28, 255), (LAYOUT.directory + 29, 255)])
@example([(LAYOUT.directory + 30, 255), (LAYOUT.directory + 31, 255)])
def test_any_damage_is_refused_or_leaves_every_position_in_bounds(edits: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for position, value in edits:
        content[position] = value
    found = accepts(content)
    if found is None:
        return
    assert found.nbytes == len(content)
    position = 0
    for record in found.records:
        assert position <= record.header < record.offset <= record.end <= found.directory
        assert all(record.end <= field <= len(content) - 4 for field in record.crc_fields)
        position = record.end


@given(st.binary(max_size=300), st.integers(0, 20_000))
def test_noise_is_refused(noise: bytes, length: int) -> None:
    assert accepts((noise * (length // max(len(noise), 1) + 1))[:length]) is None


@dataclass(frozen=True)
class Lie:
    """A number of the directory, replaced."""

    position: int
    form: str
    value: int

    def told(self) -> bytearray:
        content = bytearray(GOOD)
        struct.pack_into(self.form, content, self.position, self.value)
        return content


ENTRY = LAYOUT.directory
LIES = {
    "count": Lie(TAIL_START + 32, "<Q", 2**64 - 1),
    "count 0": Lie(TAIL_START + 32, "<Q", 0),
    "one more": Lie(TAIL_START + 32, "<Q", len(SMALL) + 1),
    "one less": Lie(TAIL_START + 32, "<Q", len(SMALL) - 1),
    "directory size": Lie(TAIL_START + 40, "<Q", 2**64 - 1),
    "directory start": Lie(TAIL_START + 48, "<Q", 2**64 - 1),
    "directory at 0": Lie(TAIL_START + 48, "<Q", 0),
    "data size": Lie(ENTRY + 24, "<I", 0xFFFFFFFE),
    "data size elsewhere": Lie(ENTRY + 24, "<I", 0xFFFFFFFF),
    "name length": Lie(ENTRY + 28, "<H", 0xFFFF),
    "extra length": Lie(ENTRY + 30, "<H", 0xFFFF),
    "header": Lie(ENTRY + 42, "<I", 0xFFFFFFFE),
    "header elsewhere": Lie(ENTRY + 42, "<I", 0xFFFFFFFF),
    "local name length": Lie(26, "<H", 0xFFFF),
    "local extra length": Lie(28, "<H", 0xFFFF),
    "no local extra": Lie(28, "<H", 0),
}


def refused_cheaply(content: bytes | bytearray) -> None:
    """Assert that it is refused, and that no number in it made us allocate."""
    tracemalloc.start()
    try:
        assert accepts(content) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_number_that_lies_is_refused(lie: Lie) -> None:
    refused_cheaply(lie.told())


def test_the_end_may_not_wrap_around() -> None:
    content = bytearray(GOOD)
    struct.pack_into("<2Q", content, TAIL_START + 40, TAIL_START + 4096, 2**64 - 4096)
    refused_cheaply(content)


def with_directory(entries: Sequence[bytes]) -> bytes:
    """Return an image whose directory is replaced by these entries; its end is right."""
    directory = b"".join(entries)
    start = LAYOUT.directory
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *[len(entries)] * 2, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[len(entries)] * 2, len(directory), start, 0)
    return GOOD[:start] + directory + end64 + locator + end


def entry_of(record: Record, *, size: int, header: int, extra: bytes = b"") -> bytes:
    name = record.name.encode()
    numbers = (0, 0, 0x808, 0, 0, 0, 0, size, size, len(name), len(extra), 0, 0, 0, 0, header)
    return struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers) + name + extra


def entries() -> list[bytes]:
    """Return the entries of the good directory one by one."""
    start, found = LAYOUT.directory, []
    for record in LAYOUT.records:
        length = 46 + len(record.name.encode())
        found.append(GOOD[start : start + length])
        start += length
    return found


def test_the_crafted_directory_of_the_next_tests_is_good_when_left_alone() -> None:
    assert accepts(with_directory(entries())) == LAYOUT


def _wide(size: int, header: int) -> Callable[[Record], bytes]:
    extra = struct.pack("<2H3Q", 1, 24, size, size, header)
    return lambda record: entry_of(record, size=0xFFFFFFFF, header=0xFFFFFFFF, extra=extra)


@pytest.mark.parametrize(
    "entry",
    [
        _wide(2**64 - 1, 0),
        _wide(2**63, 2**63),
        _wide(5, 2**64 - 1),
        _wide(5, LAYOUT.nbytes - 1),
        lambda record: entry_of(record, size=0xFFFFFFFF, header=record.header, extra=b"\1\0"),
        lambda record: entry_of(record, size=record.nbytes, header=0),
        lambda record: entry_of(record, size=record.nbytes - 1, header=record.header),
        lambda record: entry_of(record, size=record.nbytes + 1, header=record.header),
        lambda record: entry_of(record, size=0, header=record.header),
    ],
    ids=["size", "both", "header", "end", "no field", "first's header", "short", "long", "empty"],
)
def test_an_entry_that_lies_is_refused(entry: Callable[[Record], bytes]) -> None:
    crafted = entries()
    crafted[1] = entry(LAYOUT.records[1])
    refused_cheaply(with_directory(crafted))


@pytest.mark.parametrize(
    "order", [[], [0, 0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 1, 3]], ids=lambda order: "".join(map(str, order))
)
def test_records_twice_or_out_of_order_are_refused(order: list[int]) -> None:
    refused_cheaply(with_directory([entries()[index] for index in order]))


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    content = GOOD.replace(b"archive/data/0", b"archive/data/\xff")
    assert accepts(content) is None
