"""The image: the bytes of a finished ``.pt`` file, laid out before any of its data is there. Pure.

An image is a stored (uncompressed) zip archive that ``torch.load``, ``zipfile`` and ``unzip -t`` read; docs/format.md
is its specification. Its structure depends only on the names and sizes of the records, so the trainer lays it out
once, copies tensors straight to their final offsets, and the writer copies one flat image. CRCs live *behind* the
data, in each record's descriptor and in the central directory, so they are filled in while the image is written.

Formats: PKWARE APPNOTE 6.3.9 sections 4.3.7 to 4.3.16 (records), 4.5.3 (zip64 field).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_service.errors import DamagedCheckpoint

ALIGNMENT = 4096
ARCHIVE = "archive"
MANIFEST = ".ckpt_service/manifest.json"
MANIFEST_END = 8192  # the record after the manifest starts here, so one read of this many bytes holds it whole
SHARDING = ".ckpt_service/sharding.json"
PICKLE = "data.pkl"
BYTEORDER = "byteorder"
VERSION = "version"
SERIALIZATION_ID = ".data/serialization_id"

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR32 = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_EXTRA = struct.Struct("<2H")

_SIZES_FOLLOW = 0x808  # bit 3: CRC and sizes follow the data; bit 11: the name is UTF-8
_SIZES_HERE = 0x800  # for empty records; with bit 3 ``unzip -t`` would take the archive for a bomb
_LIMIT32 = 0xFFFFFFFF
_PADDING = 0x4246  # "FB", the extra field with which torch pads
_ZIP64 = 0x0001
_TAIL_BYTES = _END64.size + _LOCATOR64.size + _END.size


def replica(dp_rank: int) -> str:
    """Return the name of the record that holds what only the replica ``dp_rank`` had, as an image of its own."""
    return f".ckpt_service/replica_{dp_rank}"


@dataclass(frozen=True)
class Record:
    """One record of an image; all positions in bytes from its start.

    ``crc_fields`` are where the CRC-32 of the data stands (4 bytes, little-endian): in the descriptor behind the data
    and in the central directory. Empty records have none: their CRC is 0.
    """

    name: str
    header: int
    offset: int
    nbytes: int
    crc_fields: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position behind the last byte of data."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """Where everything lies in an image of ``nbytes`` bytes (a multiple of ``ALIGNMENT``)."""

    records: tuple[Record, ...]
    directory: int
    directory_bytes: int
    nbytes: int

    def find(self, name: str) -> Record | None:
        """Return the record of this name below the archive folder, or None."""
        full = f"{ARCHIVE}/{name}"
        return next((record for record in self.records if record.name == full), None)


@dataclass(frozen=True)
class RecordSize:
    """A record to lay out: its name below the archive folder and the size of its data in bytes."""

    name: str
    nbytes: int
    aligned: bool = False


def lay_out(sizes: Sequence[RecordSize]) -> Layout:
    """Place the records one behind the other and return where everything lies.

    The first must be the manifest; the second starts at ``MANIFEST_END``. Aligned records have their data at a multiple
    of ``ALIGNMENT``. The last one is padded so that the whole image ends on such a multiple as well, hence every byte
    can be written with direct I/O.
    """
    assert sizes[0].name == MANIFEST, "the manifest comes first"
    assert not sizes[-1].aligned, "the last record carries the padding of the image"
    directory_bytes = 0
    placed: list[tuple[RecordSize, int, int]] = []
    position = 0
    for size in sizes:
        header = position
        plain = header + _header_bytes(size, header) + _EXTRA.size
        offset = _round_up(plain) if size.aligned else plain
        position = offset + size.nbytes + _descriptor_bytes(size.nbytes, header)
        if size.name == MANIFEST:
            if position > MANIFEST_END:
                raise ValueError(f"the manifest takes {position} bytes, and there is room for {MANIFEST_END}")
            position = MANIFEST_END
        placed.append((size, header, offset))
        directory_bytes += _central_bytes(size, header)
    slack = -(position + directory_bytes + _TAIL_BYTES) % ALIGNMENT
    size, header, offset = placed[-1]
    placed[-1] = (size, header, offset + slack)
    directory = position + slack
    return Layout(
        tuple(_with_crc_fields(placed, directory)),
        directory,
        directory_bytes,
        directory + directory_bytes + _TAIL_BYTES,
    )


def structure(layout: Layout) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of all that is not data: headers, descriptors, directory. Every CRC is zero."""
    central = bytearray()
    for record in layout.records:
        yield record.header, _local_header(record)
        yield record.end, _descriptor(record)
        central += _central_entry(record)
    assert len(central) == layout.directory_bytes
    yield layout.directory, bytes(central) + _tail(layout)


def parse(image: memoryview) -> Layout:
    """Return the layout of a finished or unfinished image; CRCs are not looked at.

    ``image`` is the whole file. Every position is checked to lie inside it and in order, so a caller may use them
    without further checks, and all that is not data must be what :func:`structure` makes of the layout.

    Raises:
        DamagedCheckpoint: it is not an image of ours, or it is cut short.
    """
    try:
        count, directory_bytes, directory = _parse_tail(image)
        records = tuple(_parse_directory(image, count, directory, directory_bytes))
    except (struct.error, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"the zip directory cannot be read: {error}") from error
    for before, after in pairwise(records):
        _require(_behind(before) <= after.header, f"record {after.name} overlaps the one before it")
    _require(bool(records) and _behind(records[-1]) <= directory, "the last record overlaps the directory")
    layout = Layout(records, directory, directory_bytes, len(image))
    _require(_same(image, directory + directory_bytes, _tail(layout)), "the end of the zip directory is damaged")
    return layout


def stored_crc(image: memoryview, record: Record) -> int:
    """Return the CRC-32 that the image states for a record.

    Raises:
        DamagedCheckpoint: the descriptor and the directory disagree.
    """
    stated = {int.from_bytes(image[field : field + 4], "little") for field in record.crc_fields} or {0}
    _require(len(stated) == 1, f"record {record.name}: two different CRCs are stated")
    return stated.pop()


def manifest_json(head: bytes | memoryview) -> bytes | None:
    """Return the JSON of the manifest from the first ``MANIFEST_END`` bytes of a file; None if it has none of ours.

    Raises:
        DamagedCheckpoint: it starts like one of ours, and the manifest is cut or does not end where it should.
    """
    full = f"{ARCHIVE}/{MANIFEST}".encode()
    if len(head) < _LOCAL.size + len(full) or bytes(head[_LOCAL.size : _LOCAL.size + len(full)]) != full:
        return None
    _require(len(head) >= MANIFEST_END, f"the file ends at {len(head)} bytes, within its manifest")
    magic, _, flags, *_rest, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    _require(
        magic == b"PK\3\4" and flags == _SIZES_FOLLOW and name_bytes == len(full), "the manifest's header is damaged"
    )
    start = _LOCAL.size + name_bytes + extra_bytes
    end = MANIFEST_END - _DESCRIPTOR32.size
    magic, _, stored, size = _DESCRIPTOR32.unpack_from(head, end)
    _require(magic == b"PK\7\x08" and stored == size == end - start, "the manifest's descriptor is damaged")
    return bytes(head[start:end])


def manifest_capacity() -> int:
    """Return how many bytes of JSON the manifest must have, padded with spaces, to end at ``MANIFEST_END``."""
    size = RecordSize(MANIFEST, 0)
    return MANIFEST_END - _header_bytes(size, 0) - _EXTRA.size - _DESCRIPTOR32.size


# --- sizes ------------------------------------------------------------------------------------------------------------


def _round_up(position: int) -> int:
    return position + -position % ALIGNMENT


def _full_name(name: str) -> bytes:
    return f"{ARCHIVE}/{name}".encode()


def _zip64_fields(nbytes: int, header: int) -> bytes:
    values = ([nbytes, nbytes] if nbytes >= _LIMIT32 else []) + ([header] if header >= _LIMIT32 else [])
    return _EXTRA.pack(_ZIP64, 8 * len(values)) + struct.pack(f"<{len(values)}Q", *values) if values else b""


def _header_bytes(size: RecordSize, header: int) -> int:
    return _LOCAL.size + len(_full_name(size.name)) + len(_zip64_fields(size.nbytes, header))


def _central_bytes(size: RecordSize, header: int) -> int:
    return _CENTRAL.size + len(_full_name(size.name)) + len(_zip64_fields(size.nbytes, header))


def _descriptor_bytes(nbytes: int, header: int) -> int:
    if nbytes == 0:
        return 0
    return _DESCRIPTOR64.size if _zip64_fields(nbytes, header) else _DESCRIPTOR32.size


def _with_crc_fields(placed: Iterable[tuple[RecordSize, int, int]], directory: int) -> Iterator[Record]:
    entry = directory
    for size, header, offset in placed:
        fields = (offset + size.nbytes + 4, entry + 16) if size.nbytes else ()
        yield Record(f"{ARCHIVE}/{size.name}", header, offset, size.nbytes, fields)
        entry += _central_bytes(size, header)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _local_header(record: Record) -> bytes:
    name = record.name.encode()
    zip64 = _zip64_fields(record.nbytes, record.header)
    extra_bytes = record.offset - record.header - _LOCAL.size - len(name)
    padding = extra_bytes - len(zip64) - _EXTRA.size
    flags = _SIZES_FOLLOW if record.nbytes else _SIZES_HERE
    fixed = _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra_bytes)
    return fixed + name + zip64 + _EXTRA.pack(_PADDING, padding) + bytes(padding)


def _descriptor(record: Record) -> bytes:
    if record.nbytes == 0:
        return b""
    if _zip64_fields(record.nbytes, record.header):
        return _DESCRIPTOR64.pack(b"PK\7\x08", 0, record.nbytes, record.nbytes)
    return _DESCRIPTOR32.pack(b"PK\7\x08", 0, record.nbytes, record.nbytes)


def _central_entry(record: Record) -> bytes:
    name = record.name.encode()
    zip64 = _zip64_fields(record.nbytes, record.header)
    flags = _SIZES_FOLLOW if record.nbytes else _SIZES_HERE
    size = min(record.nbytes, _LIMIT32)
    start = min(record.header, _LIMIT32)
    fixed = _CENTRAL.pack(b"PK\1\2", 0, 0, flags, 0, 0, 0, 0, size, size, len(name), len(zip64), 0, 0, 0, 0, start)
    return fixed + name + zip64


def _tail(layout: Layout) -> bytes:
    count = len(layout.records)
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, layout.directory_bytes, layout.directory
    )
    locator = _LOCATOR64.pack(b"PK\6\7", 0, layout.directory + layout.directory_bytes, 1)
    few = min(count, 0xFFFF)
    end = _END.pack(
        b"PK\5\6", 0, 0, few, few, min(layout.directory_bytes, _LIMIT32), min(layout.directory, _LIMIT32), 0
    )
    return end64 + locator + end


# --- reading ----------------------------------------------------------------------------------------------------------


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise DamagedCheckpoint(problem)


def _parse_tail(image: memoryview) -> tuple[int, int, int]:
    _require(len(image) >= MANIFEST_END + _TAIL_BYTES, f"the file has only {len(image)} bytes")
    start = len(image) - _TAIL_BYTES
    magic, *_, count, _, directory_bytes, directory = _END64.unpack_from(image, start)
    _require(magic == b"PK\6\6", "the file does not end with a zip directory")
    _require(directory + directory_bytes == start, "the zip directory does not end where it should")
    return count, directory_bytes, directory


def _parse_directory(image: memoryview, count: int, directory: int, directory_bytes: int) -> Iterator[Record]:
    entry = directory
    for _ in range(count):
        fields = _CENTRAL.unpack_from(image, entry)
        magic, size, name_bytes, extra_bytes, header = fields[0], fields[9], fields[10], fields[11], fields[16]
        _require(magic == b"PK\1\2", "the zip directory is damaged")
        behind_name = entry + _CENTRAL.size + name_bytes
        name = str(image[entry + _CENTRAL.size : behind_name], "utf-8")
        read = _zip64_reader(image[behind_name : behind_name + extra_bytes])
        nbytes = read(size, 2)
        header = read(header, 1)
        offset = _data_offset(image, header, name)
        _require(offset + nbytes <= directory, f"record {name} lies outside the file")
        crc_fields = (offset + nbytes + 4, entry + 16) if nbytes else ()
        record = Record(name, header, offset, nbytes, crc_fields)
        _check_structure(image, record, entry)
        yield record
        entry = behind_name + extra_bytes
    _require(entry == directory + directory_bytes, "the zip directory has another length than it says")


def _check_structure(image: memoryview, record: Record, entry: int) -> None:
    name, data = record.name, bool(record.nbytes)
    _require(_same(image, record.header, _local_header(record)), f"the header of record {name} is damaged")
    _require(_same(image, record.end, _descriptor(record), 4 if data else None), f"record {name} has a damaged end")
    entry_is_whole = _same(image, entry, _central_entry(record), 16 if data else None)
    _require(entry_is_whole, f"the zip directory is damaged at record {name}")


def _same(image: memoryview, start: int, expected: bytes, crc: int | None = None) -> bool:
    """Whether the image has these bytes at ``start``, whatever stands in the CRC at this place in them."""
    found = bytearray(image[start : start + len(expected)])
    if crc is not None:
        found[crc : crc + 4] = bytes(4)
    return found == expected


def _behind(record: Record) -> int:
    return record.end + _descriptor_bytes(record.nbytes, record.header)


def _zip64_reader(extra: memoryview) -> Callable[[int, int], int]:
    position = _EXTRA.size

    def read(value: int, times: int) -> int:
        nonlocal position
        if value != _LIMIT32:
            return value
        wide = int(struct.unpack_from("<Q", extra, position)[0])
        position += 8 * times
        return wide

    return read


def _data_offset(image: memoryview, header: int, name: str) -> int:
    _require(header + _LOCAL.size <= len(image), f"record {name} lies outside the file")
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(image, header)
    start = header + _LOCAL.size
    same = bytes(image[start : start + name_bytes]) == name.encode()
    _require(magic == b"PK\3\4" and same, f"the header of record {name} is damaged")
    return int(start + name_bytes + extra_bytes)
