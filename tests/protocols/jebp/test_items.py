"""Items of calls, both ways: bytes of the specification, any cut, each way to be malformed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import Opener, Sealer
from babelbus.protocols.jebp.codec import decode_answer, decode_request, encode_request
from babelbus.protocols.jebp.decoder import ClientDecoder, ServerDecoder
from babelbus.protocols.jebp.items import SERVER_HEAD, encode_items
from babelbus.protocols.jebp.messages import CallItems, Data, Response

KEY, NONCE = b"\x07" * 32, b"\x01" * 24

GOLDEN_CLIENT = [
    ("40", []),
    ("40 00000001 00 0000000a 92 a76d6574686f6473 90", [(1, 0, b"\x92\xa7methods\x90")]),
    ("40 00000001 01 00000001 05 ffffffff 02 00000000", [(1, 1, b"\x05"), (2**32 - 1, 2, b"")]),
]
GOLDEN_SERVER = [
    (
        "c000 00000002 02 0000000f 93 a4676f6e65 a772656d6f766564 c0",
        [(2, 2, msgspec.msgpack.encode(["gone", "removed", None]))],
    ),
    ("c000 00000001 00 00000002 6869", [(1, 0, b"hi")]),
    ("c000 00000001 01 00000001 c0 00000002 02 00000004 93a0a0c0", [(1, 1, b"\xc0"), (2, 2, b"\x93\xa0\xa0\xc0")]),
]

items = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2), st.one_of(st.binary(max_size=40), st.just(b"x" * 5_000)))
)


def plain(message: object) -> list[tuple[int, int, bytes]]:
    assert isinstance(message, CallItems)
    return [(number, kind, bytes(body)) for number, kind, body in message.items]


@pytest.mark.parametrize(("text", "said"), GOLDEN_CLIENT)
def test_items_of_a_client_are_the_bytes_of_the_specification(text: str, said: list[tuple[int, int, Data]]) -> None:
    content = bytes.fromhex(text)
    assert encode_request(CallItems(said)) == content
    assert plain(decode_request(content)) == said


@pytest.mark.parametrize(("text", "said"), GOLDEN_SERVER)
def test_items_of_a_server_are_the_bytes_of_the_specification(text: str, said: list[tuple[int, int, Data]]) -> None:
    content = bytes.fromhex(text)
    assert encode_items(SERVER_HEAD, said) == content
    assert plain(decode_answer(content)) == said


@given(st.lists(items, max_size=5), st.lists(st.integers(1, 3_000), min_size=1, max_size=10))
def test_items_do_not_depend_on_how_the_bytes_were_cut(
    frames: list[list[tuple[int, int, Data]]], cuts: list[int]
) -> None:
    to_server, to_client = Sealer(KEY, NONCE), Sealer(KEY, NONCE)
    directions: list[tuple[ServerDecoder | ClientDecoder, bytes | bytearray]] = [
        (
            ServerDecoder(Opener(KEY, NONCE)),
            to_server.seal_many([encode_request(CallItems(frame)) for frame in frames]),
        ),
        (ClientDecoder(Opener(KEY, NONCE)), to_client.seal_many([encode_items(SERVER_HEAD, one) for one in frames])),
    ]
    for decoder, data in directions:
        heard: list[object] = []
        at = 0
        while at < len(data):
            size = cuts[len(heard) % len(cuts)]
            decoder.receive_data(bytes(data[at : at + size]))
            heard += decoder.events()
            at += size
        assert [plain(message) for message in heard] == frames


@pytest.mark.parametrize(
    "text",
    [
        "40 00",  # no whole head
        "40 00000001 00 00000002 61",  # a body that is cut
        "40 00000001 00 ffffffff 61",
        "40 00000001 03 00000000",  # an unknown kind
    ],
)
def test_a_malformed_item_ends_the_connection(text: str) -> None:
    content = bytes.fromhex(text)
    with pytest.raises(RemoteProtocolError):
        decode_request(content)
    with pytest.raises(RemoteProtocolError):
        decode_answer(SERVER_HEAD + content[1:])


@given(st.binary(max_size=60))
def test_garbage_is_items_or_an_error(garbage: bytes) -> None:
    try:
        assert encode_request(CallItems(list(plain(decode_request(b"\x40" + garbage))))) == b"\x40" + garbage
    except RemoteProtocolError:
        pass


def test_an_answer_of_1_1_is_an_answer_and_another_status_is_none() -> None:
    assert decode_answer(b"\xa1\x30") == Response(0xA1, False)
    assert decode_answer(b"\xb1\x31names") == Response(0xB1, True, b"names")
    for wrong in (b"\xc0", b"\xc0\x01", b"\xc1\x00", b""):
        with pytest.raises(RemoteProtocolError):
            decode_answer(wrong)
