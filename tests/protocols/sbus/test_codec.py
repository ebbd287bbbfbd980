"""Packets both ways: the bytes of the specification, and every way to be malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.sbus.codec import decode, encode, encode_whoami
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Control, Message, Publish, Subscribe, Unsubscribe

GOLDEN: list[tuple[str, Message]] = [
    ("53 55 42 20 61 2f", Subscribe(b"a/")),
    ("55 4e 53 55 42 20 61 2f", Unsubscribe(b"a/")),
    ("4d 53 47 20 61 2f 62 00 68 69", Publish(b"a/b", b"hi")),
    ("43 4d 53 47 20 21 2f 63 72 65 64 2f 77 68 6f 61 6d 69 00", Control(b"!/cred/whoami")),
    ("53 55 42 20", Subscribe(b"")),
    ("4d 53 47 20 00", Publish(b"", b"")),
    ("4d 53 47 20 61", Publish(b"a", None)),
    ("4d 53 47 20 61 00 00 62", Publish(b"a", b"\0b")),
]
WHOAMI = (
    "43 4d 53 47 20 21 2f 63 72 65 64 2f 77 68 6f 61 6d 69 00 "
    "21 2f 63 72 65 64 2f 31 30 30 2f 31 30 30 30 2f 31 31 31 31"
)
keys = st.binary(max_size=20).map(lambda key: key.replace(b"\0", b""))
said = (
    st.builds(Subscribe, keys)
    | st.builds(Unsubscribe, keys)
    | st.builds(Publish, keys, st.binary() | st.none())
    | st.builds(Control, keys, st.binary())
)


@pytest.mark.parametrize(("packet", "message"), GOLDEN)
def test_the_bytes_of_the_specification_both_ways(packet: str, message: Message) -> None:
    assert encode(message) == bytes.fromhex(packet)
    assert decode(bytes.fromhex(packet)) == message


def test_the_answer_to_whoami_has_the_group_first() -> None:
    assert encode_whoami(100, 1000, 1111) == bytes.fromhex(WHOAMI)


@given(said)
def test_what_is_said_is_what_is_understood(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("packet", "message"),
    [(b"SUB a\0junk", Subscribe(b"a")), (b"UNSUB a\0junk", Unsubscribe(b"a")), (b"CMSG a", Control(b"a"))],
)
def test_what_stands_behind_a_nul_that_need_not_be_there_is_ignored(packet: bytes, message: Message) -> None:
    assert decode(packet) == message


MALFORMED = [b"", b"SUB", b"SUB\0 a", b"MSG", b"MSG\0a", b"msg a\0", b" MSG a\0", b"UNSUB", b"CMSG\0", b"PING x", b"\0"]


@pytest.mark.parametrize("packet", MALFORMED)
def test_what_begins_with_none_of_the_four_words_is_refused(packet: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(packet)


def test_a_packet_may_have_409600_bytes_and_no_more() -> None:
    longest = encode(Publish(b"a", bytes(PACKET_BYTES_MAX - 6)))
    assert len(longest) == PACKET_BYTES_MAX
    assert decode(longest) == Publish(b"a", bytes(PACKET_BYTES_MAX - 6))
    with pytest.raises(LocalProtocolError):
        encode(Publish(b"a", bytes(PACKET_BYTES_MAX - 5)))
    with pytest.raises(RemoteProtocolError):
        decode(longest + b"x")


@pytest.mark.parametrize("message", [Subscribe(b"a\0"), Publish(b"\0", b""), Control(b"a\0b")])
def test_a_key_with_a_nul_cannot_be_said(message: Message) -> None:
    with pytest.raises(LocalProtocolError):
        encode(message)
