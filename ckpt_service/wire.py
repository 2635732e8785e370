"""Messages to bytes and back. Pure.

A frame is a head of 8 bytes (length of the body, number of descriptors that travel with it; both unsigned 32 bit,
big-endian) and a body of JSON. Descriptors ride on the first byte of their frame, so they arrive in the order of the
frames; the head says how many of those received belong to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel

from ckpt_service.errors import ProtocolError

MAX_BODY_BYTES = 1 << 20
MAX_DESCRIPTORS = 2
_HEAD = struct.Struct(">II")


@dataclass(frozen=True)
class Frame:
    """A body of JSON and the number of descriptors that came with it."""

    body: bytes
    descriptors: int


def encode(message: BaseModel, descriptors: int = 0) -> bytes:
    """Return the frame of a message; the caller sends ``descriptors`` file descriptors with its first byte."""
    body = message.model_dump_json().encode()
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is too long to send", op="send")
    return _HEAD.pack(len(body), descriptors) + body


@dataclass
class Decoder:
    """Cuts a stream of bytes into frames."""

    _pending: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole now.

        Raises:
            ProtocolError: a head announces more than a frame may hold; the stream cannot be read on.
        """
        self._pending += data
        while len(self._pending) >= _HEAD.size:
            size, descriptors = _HEAD.unpack_from(self._pending)
            if size > MAX_BODY_BYTES or descriptors > MAX_DESCRIPTORS:
                raise ProtocolError(f"a frame of {size} bytes with {descriptors} descriptors is not ours", op="receive")
            end = _HEAD.size + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_HEAD.size : end])
            del self._pending[:end]
            yield Frame(body, descriptors)
