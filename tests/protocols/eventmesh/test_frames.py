"""Frames of EventMesh over TCP: golden bytes of the SDKs, any cut, garbage, limits."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.eventmesh.frames import NEW, OLD, FrameDecoder, MalformedFrameError, ObjectScan, encode_frame
from babelbus.protocols.eventmesh.messages import Frame
from tests.support.eventmesh import AGENT, HEAD, frame

HELLO = {"cmd": "HELLO_REQUEST", "command": "HELLO_REQUEST", "code": 0, "seq": "1"}
BEAT = b'{"cmd":"HEARTBEAT_REQUEST","command":"HEARTBEAT_REQUEST","code":0,"seq":"1"}'


def decode(*chunks: bytes, frame_bytes_max: int = 2**16) -> list[Frame]:
    decoder = FrameDecoder(frame_bytes_max=frame_bytes_max)
    found = []
    for chunk in chunks:
        decoder.receive_data(chunk)
        found += decoder.frames()
    assert decoder.held_bytes == 0
    return found


def test_a_heartbeat_has_the_lengths_of_the_specification() -> None:
    old, new = frame(OLD, BEAT, b"null"), frame(NEW, BEAT, b"")
    assert (old[13:21], len(old)) == (bytes((0, 0, 0, 0x58, 0, 0, 0, 0x4C)), 101)
    assert (new[13:21], len(new)) == (bytes((0, 0, 0, 0x59, 0, 0, 0, 0x4C)), 97)
    for data in (old, new):
        (found,) = decode(data)
        assert (found.header.name, found.header.seq, found.body) == ("HEARTBEAT_REQUEST", "1", b"")


@pytest.mark.parametrize("surplus", [OLD, NEW, 21, 0])
@given(data=st.data())
def test_the_first_frame_says_the_framing_and_any_cut_gives_the_same_frames(surplus: int, data: st.DataObject) -> None:
    odd = {**AGENT, "path": 'a"}{\\', "idc": "\u00e4{"}
    stream = frame(surplus, HELLO, odd) + frame(surplus, BEAT) * 2 + frame(surplus, BEAT, {"a": [{}]})
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = decode(*chunks)
    assert [one.header.name for one in found] == ["HELLO_REQUEST"] + ["HEARTBEAT_REQUEST"] * 3
    assert (json.loads(found[0].body), found[1].body, json.loads(found[3].body)) == (odd, b"", {"a": [{}]})


def test_a_hello_is_found_without_a_byte_behind_its_object() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(frame(OLD, HELLO, AGENT))
    assert len(decoder.frames()) == 1
    assert decoder.surplus == OLD


def test_a_hello_that_comes_byte_by_byte_is_looked_at_once() -> None:
    class Counted(bytes):
        looked_at = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.looked_at += isinstance(key, int)
            return super().__getitem__(key)

    body = b'{"path":"' + b"x" * 500 + b'"}'
    scan = ObjectScan(body, 0)
    for size in range(1, len(body)):
        assert scan.find_end(Counted(body[:size]), len(body)) == -1
    assert scan.find_end(Counted(body), len(body)) == len(body)
    assert Counted.looked_at == len(body)
    decoder = FrameDecoder()
    for byte in frame(NEW, HELLO, body):
        decoder.receive_data(bytes((byte,)))
        found = decoder.frames()
        assert len(found) == (decoder.held_bytes == 0)
    assert (found[0].body, decoder.surplus) == (body, NEW)


@pytest.mark.parametrize("command", ["cmd", "command"])
def test_old_and_new_names_of_the_command_are_read(command: str) -> None:
    (found,) = decode(frame(NEW, {command: "HEARTBEAT_REQUEST", "msg": "x", "unknown": [1]}))
    assert found.header.name == "HEARTBEAT_REQUEST"


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waits(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(b"EventMesh0000" + data)
    try:
        decoder.frames()
    except MalformedFrameError:
        assert decoder.held_bytes == 0


@pytest.mark.parametrize(
    ("length", "size"), [(10, 0), (10, -1), (-1, 5), (2**31 - 1, 5), (100, 2**16 + 1), (2**16 + 65, 5), (5, 60)]
)
def test_lengths_that_lie_are_refused_before_anything_is_kept(length: int, size: int) -> None:
    decoder = FrameDecoder(frame_bytes_max=2**16)
    decoder.surplus = NEW
    decoder.receive_data(HEAD.pack(b"EventMesh0000", length, size))
    with pytest.raises(MalformedFrameError):
        decoder.frames()


@pytest.mark.parametrize(
    "data",
    [b"EventMesh0001" + bytes(8), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", frame(NEW, b"{", b""),
     frame(NEW, b'{"cmd":1}', b""), frame(NEW, b"[" * 1000, b""), frame(NEW, HELLO, b'{"a":1}' + b" " * 9),
     frame(NEW, HELLO, b'["a", "b", 1]'),
     frame(NEW, HELLO, b'{"a": "' + b"x" * 99) + b"x" * NEW],
)  # fmt: skip
def test_what_is_no_frame_ends_the_connection(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    with pytest.raises(MalformedFrameError):
        decoder.frames()


def test_frames_before_a_fault_are_given_first() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(frame(NEW, BEAT) + b"x" * 40)
    assert len(decoder.frames()) == 1
    with pytest.raises(MalformedFrameError):
        decoder.frames()


@given(st.integers(0, 3000), st.integers(0, 5000), st.sampled_from([OLD, NEW]))
def test_no_byte_of_a_length_is_a_newline(header_bytes: int, body_bytes: int, surplus: int) -> None:
    header = b'{"a":"' + b"x" * header_bytes + b'"}'
    data = encode_frame(surplus, header, b"y" * body_bytes)
    magic, length, size = HEAD.unpack_from(data)
    assert b"\n" not in data
    assert (magic, length) == (b"EventMesh0000", size + body_bytes + surplus)
    assert json.loads(data[21 : 21 + size])["a"] == "x" * header_bytes


def test_a_first_frame_that_is_shorter_than_its_header_is_refused_before_the_header_comes() -> None:
    decoder = FrameDecoder()
    decoder.receive_data(struct.pack(">13sii", b"EventMesh0000", 5, 60))
    with pytest.raises(MalformedFrameError, match="no room for its header of 60"):
        decoder.frames()
