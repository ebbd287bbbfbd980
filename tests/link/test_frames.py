"""Frames of a link: any cut, garbage, limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.link.frames import (
    DATA,
    GREETING_BYTES_MAX,
    HEADER,
    LAST_KIND,
    PAYLOAD_BYTES_MAX,
    Decoder,
    Frame,
    Hello,
    LinkError,
    Opening,
    encode,
    read,
)

U32 = st.integers(0, 2**32 - 1)
FRAMES = st.tuples(st.integers(1, LAST_KIND), U32, U32, st.binary(max_size=300))


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


@given(st.lists(FRAMES), st.lists(st.integers(0, 40)))
def test_frames_do_not_depend_on_how_the_bytes_were_cut(sent: list[Frame], sizes: list[int]) -> None:
    data = b"".join(encode(kind, number, payload, taken) for kind, number, taken, payload in sent)
    decoder = Decoder()
    assert [frame for part in cut(data, sizes) for frame in decoder.receive_data(part)] == sent


@given(st.binary(max_size=400), st.lists(st.integers(0, 40)))
def test_garbage_is_refused_or_waits_for_more(data: bytes, sizes: list[int]) -> None:
    decoder = Decoder()
    try:
        for part in cut(data, sizes):
            for kind, _, _, payload in decoder.receive_data(part):
                assert 0 < kind <= LAST_KIND
                assert len(payload) <= GREETING_BYTES_MAX
    except LinkError:
        return


def test_golden_bytes() -> None:
    assert encode(DATA, 7, b"ab", 3) == bytes.fromhex("00000002 07 00000007 00000003 6162")


@pytest.mark.parametrize(("trusted", "limit"), [(False, GREETING_BYTES_MAX), (True, PAYLOAD_BYTES_MAX)])
def test_a_payload_over_the_limit_is_refused_before_it_comes(trusted: bool, limit: int) -> None:
    for size, is_refused in ((limit, False), (limit + 1, True)):
        decoder = Decoder()
        if trusted:
            decoder.trust()
        if is_refused:
            with pytest.raises(LinkError, match=f"{size} bytes, limit {limit}"):
                decoder.receive_data(HEADER.pack(size, DATA, 1, 0))
        else:
            assert decoder.receive_data(encode(DATA, 1, bytes(size))) == [(DATA, 1, 0, bytes(size))]


@pytest.mark.parametrize("kind", [0, LAST_KIND + 1, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(LinkError, match=f"kind {kind}"):
        Decoder().receive_data(HEADER.pack(0, kind, 0, 0))


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b'{"magic": 1}', b'{"version": 1}', b"[]"])
def test_a_message_of_another_shape_is_refused(payload: bytes) -> None:
    with pytest.raises(LinkError, match="Hello"):
        read(payload, Hello)
    with pytest.raises(LinkError, match="Opening"):
        read(payload, Opening)
