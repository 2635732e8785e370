"""CRC-32 as zip archives use it (ISO 3309, polynomial 0xEDB88320), by the fastest code at hand. Pure."""

from __future__ import annotations

from ckpt_service.errors import DamagedCheckpoint
from ckpt_service.image import Layout, Record, stored_crc

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform: four times slower, the same values
    from zlib import crc32

__all__ = ["crc32", "fill_in", "verify_record", "verify_records"]


def fill_in(image: memoryview, layout: Layout) -> None:
    """Compute the CRC of every record and put it where it belongs."""
    for record in layout.records:
        crc = crc32(image[record.offset : record.end])
        for field in record.crc_fields:
            image[field : field + 4] = crc.to_bytes(4, "little")


def verify_record(image: memoryview, record: Record) -> None:
    """Check the data of one record against the CRC that the image states.

    Raises:
        DamagedCheckpoint: they differ; names the record.
    """
    stated = stored_crc(image, record)
    found = crc32(image[record.offset : record.end])
    if found != stated:
        name = record.name.partition("/")[2]
        raise DamagedCheckpoint(f"record {name}: CRC {found:08x}, expected {stated:08x}", op="verify")


def verify_records(image: memoryview, layout: Layout) -> None:
    """Check every record of an image; raises ``DamagedCheckpoint`` for the first that is damaged."""
    for record in layout.records:
        verify_record(image, record)
