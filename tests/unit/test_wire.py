"""Frames: any chunking of the same bytes gives the same frames, and a hostile head ends the stream at once."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_service.errors import ProtocolError
from ckpt_service.messages import (
    Committed,
    Failed,
    Goodbye,
    Progress,
    daemon_messages,
)
from ckpt_service.wire import MAX_BODY_BYTES, MAX_DESCRIPTORS, Decoder, Frame, encode

MESSAGES = st.one_of(
    st.builds(Progress, snapshot_id=st.text(max_size=20), bytes_done=st.integers(0, 1 << 60)),
    st.builds(Committed, snapshot_id=st.text(max_size=20), path=st.text(max_size=300), seconds=st.floats(0, 1e9)),
    st.builds(
        Failed, snapshot_id=st.text(max_size=20), reason=st.just("error"), message=st.text(max_size=300), code=st.none()
    ),
)


def decode(chunks: Iterable[bytes]) -> list[Frame]:
    decoder = Decoder()
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


@given(st.lists(st.tuples(MESSAGES, st.integers(0, MAX_DESCRIPTORS)), max_size=6), st.data())
def test_any_chunking_of_any_frames_decodes_the_same(
    sent: list[tuple[Progress | Committed | Failed, int]], data: st.DataObject
) -> None:
    stream = b"".join(encode(message, descriptors) for message, descriptors in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    frames = decode(chunks)
    assert [(daemon_messages.validate_json(frame.body), frame.descriptors) for frame in frames] == sent
    assert frames == decode(stream[at : at + 1] for at in range(len(stream)))


def test_a_frame_comes_out_as_soon_as_its_last_byte_is_in() -> None:
    decoder = Decoder()
    frame = encode(Goodbye(), 2)
    assert list(decoder.feed(frame[:-1])) == []
    assert list(decoder.feed(frame[-1:] + frame[:3])) == [Frame(b'{"type":"goodbye"}', 2)]
    assert list(decoder.feed(frame[3:])) == [Frame(b'{"type":"goodbye"}', 2)]


def test_a_frame_that_was_taken_does_not_come_again() -> None:
    decoder = Decoder()
    assert next(decoder.feed(encode(Goodbye()) + encode(Goodbye(), 1))).descriptors == 0
    assert [frame.descriptors for frame in decoder.feed(b"")] == [1]


def test_the_head_is_two_big_endian_numbers() -> None:
    assert encode(Goodbye(), 1)[:8] == bytes([0, 0, 0, 18, 0, 0, 0, 1])


def test_an_empty_body_is_a_frame() -> None:
    assert decode([bytes(8)]) == [Frame(b"", 0)]


def test_the_longest_frame_is_taken() -> None:
    body = b"x" * MAX_BODY_BYTES
    stream = struct.pack(">II", len(body), MAX_DESCRIPTORS) + body
    assert decode([stream[:100_000], stream[100_000:]]) == [Frame(body, MAX_DESCRIPTORS)]


@pytest.mark.parametrize(
    ("size", "descriptors"),
    [
        (MAX_BODY_BYTES + 1, 0),
        (0xFFFFFFFF, 0),
        (0, MAX_DESCRIPTORS + 1),
        (2, 0xFFFFFFFF),
        tuple(struct.unpack(">II", b"GET / HT")),
    ],
)
def test_a_hostile_head_is_refused_before_its_body_arrives(size: int, descriptors: int) -> None:
    decoder = Decoder()
    head = struct.pack(">II", size, descriptors)
    assert list(decoder.feed(head[:7])) == []
    with pytest.raises(ProtocolError, match=f"{size} bytes with {descriptors} descriptors") as caught:
        list(decoder.feed(head[7:]))
    assert caught.value.op == "receive"


def test_frames_before_a_hostile_head_are_still_given() -> None:
    frames = Decoder().feed(encode(Goodbye()) + b"\xff" * 8)
    assert next(frames) == Frame(b'{"type":"goodbye"}', 0)
    with pytest.raises(ProtocolError):
        next(frames)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_noise_gives_frames_or_a_protocol_error_and_nothing_is_lost(noise: bytes, chunk: int) -> None:
    decoder = Decoder()
    taken = b""
    try:
        for start in range(0, len(noise), chunk):
            for frame in decoder.feed(noise[start : start + chunk]):
                taken += struct.pack(">II", len(frame.body), frame.descriptors) + frame.body
    except ProtocolError:
        size, descriptors = struct.unpack(">II", noise[len(taken) : len(taken) + 8])
        assert size > MAX_BODY_BYTES or descriptors > MAX_DESCRIPTORS
    else:
        assert noise.startswith(taken)
        rest = noise[len(taken) :]
        assert len(rest) < 8 or len(rest) < 8 + struct.unpack(">I", rest[:4])[0]


def test_a_message_that_no_peer_would_take_is_not_sent() -> None:
    overhead = len(encode(Failed(snapshot_id="1-1-0-0", reason="error", message=""))) - 8
    room = MAX_BODY_BYTES - overhead
    longest = Failed(snapshot_id="1-1-0-0", reason="error", message="x" * room)
    assert len(decode([encode(longest)])[0].body) == MAX_BODY_BYTES
    with pytest.raises(ProtocolError, match=f"a Failed of {MAX_BODY_BYTES + 1} bytes") as caught:
        encode(Failed(snapshot_id="1-1-0-0", reason="error", message="x" * (room + 1)))
    assert caught.value.op == "send"
