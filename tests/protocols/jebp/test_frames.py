"""The frame of section 1: its table, every form that is accepted, and each way to break it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX, FrameReader, encode_frame, read_head

TABLE = [(0, "010100"), (5, "010105"), (255, "0101ff"), (300, "0102012c"), (70_000, "0103011170")]


@pytest.mark.parametrize(("size", "head"), TABLE)
def test_the_heads_of_the_specification_are_written_and_read(size: int, head: str) -> None:
    encoded = bytes.fromhex(head)
    assert encode_frame(bytes(size)) == encoded + bytes(size)
    assert read_head(encoded, 0, FRAME_BYTES_MAX) == (len(encoded), size)


@pytest.mark.parametrize("head", ["0100", "010100", "01020000", "01080000000000000000"])
def test_empty_content_is_accepted_in_every_form(head: str) -> None:
    reader = FrameReader()
    reader.receive_data(bytes.fromhex(head))
    assert reader.next_frame() == b""
    assert reader.take_rest() == b""


@pytest.mark.parametrize("size", range(1, 9))
def test_leading_zeros_of_the_length_are_accepted(size: int) -> None:
    reader = FrameReader()
    reader.receive_data(bytes((1, size)) + (3).to_bytes(size, "big") + b"abcd")
    assert reader.next_frame() == b"abc"
    assert reader.take_rest() == b"d"


@pytest.mark.parametrize("data", ["00", "02", "ff", "0109", "01ff", "01020401", "01087fffffffffffffff"])
def test_what_is_no_frame_or_too_long_is_refused_as_soon_as_it_shows(data: str) -> None:
    reader = FrameReader(1024)
    reader.receive_data(bytes.fromhex(data))
    with pytest.raises(RemoteProtocolError):
        reader.next_frame()


def test_a_frame_of_exactly_the_limit_is_read() -> None:
    reader = FrameReader(1024)
    reader.receive_data(encode_frame(bytes(1024)))
    assert reader.next_frame() == bytes(1024)


@pytest.mark.parametrize("data", ["", "01", "0102", "010204", "010103abcd"])
def test_an_incomplete_frame_waits(data: str) -> None:
    reader = FrameReader()
    reader.receive_data(bytes.fromhex(data))
    assert reader.next_frame() is None


@given(st.lists(st.binary(max_size=600), max_size=5), st.integers(min_value=1, max_value=50))
def test_frames_do_not_depend_on_how_the_bytes_were_cut(contents: list[bytes], size: int) -> None:
    data = b"".join(map(encode_frame, contents))
    reader, received = FrameReader(), []
    for at in range(0, len(data), size):
        reader.receive_data(data[at : at + size])
        while (content := reader.next_frame()) is not None:
            received.append(content)
    assert received == contents
