"""Print the annotated hexdump in docs/format.md; ``--update`` puts it there. The same on every run and every machine.

The image is made and committed by the code that trainers use. What differs from save to save (time, run id,
serialization id) is fixed here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

from ckpt_service import image
from ckpt_service.image import Layout, Record
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Watcher, WriteOptions, commit
from trainer_hooks.capture import blueprint, capture
from trainer_hooks.layout import plan
from trainer_hooks.slots import Slot
from trainer_hooks.values import Allowed

DOCUMENT = Path(__file__).with_name("format.md")
BEGIN = "<!-- hexdump: printed by docs/make_hexdump.py -->\n```text\n"
END = "```\n<!-- end of hexdump -->\n"

_SERIALIZATION_ID = b"0123456789" * 4
_ROW = 16
_END64_BYTES, _LOCATOR_BYTES = 56, 20

Part = tuple[str, int, int]
"""What it is, and the bytes [start, end) that it takes."""


def make_file(directory: Path) -> Path:
    """Commit a checkpoint with two tensors and a number, and return its path."""
    state = {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "counts": torch.arange(8, dtype=torch.int64)[2:4],  # a view: only its 16 bytes are stored
        "step": 100,
    }
    drawn = blueprint(plan(state, Allowed()))
    manifest = ShardManifest(
        kind="train",
        run_id="1f2e3d4c",
        attempt=1,
        sequence=1,
        step=100,
        epoch=0,
        stage=0,
        tp_rank=0,
        pp=1,
        tp=1,
        dp=1,
        created_at=datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc),
        producer="ckpt-service 0.1.0",
        bytes=drawn.layout.nbytes,
        tensors=drawn.plan.tensors,
    )
    slot = Slot.create(drawn.layout.nbytes)
    snapshot = capture(drawn, manifest, slot)
    random_id = snapshot.layout.find(image.SERIALIZATION_ID)
    assert random_id is not None
    snapshot.view[random_id.offset : random_id.end] = _SERIALIZATION_ID
    try:
        with LocalDirectory.open(str(directory)) as opened:
            options = WriteOptions(threads=1, direct=False)
            commit(snapshot, opened, mode=0o644, host="host", token="0", options=options, watcher=Watcher())
    finally:
        snapshot.view.release()
        slot.close()
    return directory / snapshot.final_name


def parts(data: memoryview, layout: Layout) -> Iterator[Part]:
    """Yield the parts of an image in order; together they are the whole file."""
    ends = [record.header for record in layout.records[1:]] + [layout.directory]
    for record, end in zip(layout.records, ends, strict=True):
        yield from _record_parts(record, end)
    position = layout.directory
    for record in layout.records:
        end = position + 46 + len(record.name)  # no zip64 field: the image is small
        yield f"central directory: {record.name}", position, end
        position = end
    yield "zip64 end of central directory", position, position + _END64_BYTES
    yield "zip64 locator", position + _END64_BYTES, position + _END64_BYTES + _LOCATOR_BYTES
    yield "end of central directory", position + _END64_BYTES + _LOCATOR_BYTES, len(data)


def _record_parts(record: Record, end: int) -> Iterator[Part]:
    name_end = record.header + 30 + len(record.name)
    yield f"{record.name}: local header and name", record.header, name_end
    padding = record.offset - name_end - 4
    yield f"{record.name}: extra field FB, {padding} bytes of padding", name_end, record.offset
    yield f"{record.name}: data, {record.nbytes} bytes", record.offset, record.end
    if record.nbytes:
        yield f"{record.name}: descriptor", record.end, end


def dump(data: memoryview, start: int, end: int) -> Iterator[str]:
    """Yield the rows of ``hexdump -C`` for [start, end); rows that repeat the one before become one ``*``."""
    before: bytes | None = None
    starred = False
    for position in range(start, end, _ROW):
        row = bytes(data[position : min(position + _ROW, end)])
        if row == before:
            if not starred:
                yield "*"
            starred = True
            continue
        before, starred = row, False
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        yield f"{position:08x}  {left:<23}  {right:<23}  |{text}|"


def render(path: Path) -> str:
    """Return the annotated hexdump of an image."""
    content = path.read_bytes()
    data = memoryview(content)
    lines: list[str] = []
    position = 0
    for title, start, end in parts(data, image.parse(data)):
        assert start == position, title
        lines += [f"; {title}", *dump(data, start, end)]
        position = end
    assert position == len(data)
    return "\n".join([*lines, f"{position:08x}", ""])


def main() -> None:
    """Print the block, or put it into the document."""
    parser = argparse.ArgumentParser(description="Print the annotated hexdump of docs/format.md.")
    parser.add_argument("--update", action="store_true", help="replace the block in docs/format.md instead")
    update = parser.parse_args().update
    with tempfile.TemporaryDirectory() as directory:
        block = render(make_file(Path(directory)))
    if not update:
        print(block, end="")
        return
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{DOCUMENT} has no block to replace"
    DOCUMENT.write_text(head + BEGIN + block + END + tail)


if __name__ == "__main__":
    main()
