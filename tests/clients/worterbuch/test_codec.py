"""The client's side of the codec: what servers say, as our server writes it and as the specification shows it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.clients.worterbuch.codec import (
    Ack,
    Authorized,
    CState,
    Err,
    LsState,
    Pair,
    PState,
    Reply,
    ReplyDecoder,
    State,
    Welcome,
    decode_metadata,
    decode_reply,
    encode_message,
)
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.worterbuch import codec
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.profiles import MAIN
from babelbus.protocols.worterbuch.values import text_json

INFO = MAIN.info("1.5.0", authorization=False)
REPLIES: list[tuple[bytes, Reply | None]] = [
    (codec.encode_welcome("C1", INFO), Welcome(INFO, "C1")),
    (codec.AUTHORIZED, Authorized(0)),
    (b'{"ack":{"transactionId":3}}', Ack(3)),
    (b' {"ack": {"transactionId":3}}', Ack(3)),
    (codec.encode_error(3, 5, "é"), Err(3, 5, '"\\u00e9"')),
    (codec.encode_state(3, b"null"), State(3, None)),
    (codec.encode_state(3, b'{"key":"a","value":1}', deleted=True), State(3, deleted={"key": "a", "value": 1})),
    (codec.encode_cstate(3, b"42", 7), CState(3, 42, 7)),
    (codec.encode_pstate(3, "a/#", [("é", b"1"), ("b", b"null")]), PState(3, (Pair("é", 1), Pair("b", None)))),
    (codec.encode_pstate(3, "a/#", []), PState(3, ())),
    (codec.encode_pstate(3, "#", [("b", b"1")], deleted=True), PState(3, deleted=(Pair("b", 1),))),
    (codec.encode_ls(3, ["b", "c"]), LsState(3, ("b", "c"))),
    (b'""', None),
]


@pytest.mark.parametrize(("text", "message"), REPLIES)
def test_a_reply_is_read_as_the_server_wrote_it(text: bytes, message: Reply | None) -> None:
    assert decode_reply(text) == message


def test_every_reply_has_its_line() -> None:
    assert {type(message) for _, message in REPLIES} == {*Reply.__args__, type(None)}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"null", b"[]", b"{}", b"{", b'"x"', b'{"ack":{}}', b'{"ack":{"transactionId":"1"}}', b'{"ack":1}x'),
        *(b'{"more":{"transactionId":1}}', b'{"ack":{"transactionId":1},"err":{}}', b'{"state":{"transactionId":1}}'),
        *(b'{"pState":{"transactionId":1,"requestPattern":"a"}}', b'{"state":{"transactionId":1,"value":"\xff"}}'),
    ],
)
def test_what_no_server_says_is_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_reply(text)


@pytest.mark.parametrize(("metadata", "text"), [('"x \\"y\\""', 'x "y"'), ("cancelled",) * 2, ("", ""), ("1", "1")])
def test_the_text_of_an_error_is_unquoted_if_it_is_quoted(metadata: str, text: str) -> None:
    assert decode_metadata(metadata) == text


@settings(deadline=None)
@given(st.text(), st.text(), st.integers(0, 2**64 - 1))
def test_what_a_client_writes_is_what_the_server_reads(key: str, other: str, number: int) -> None:
    for message in (
        m.Set(number, key, text_json(other)),
        m.Subscribe(number, key, True),
        m.PSubscribe(number, key, live_only=True),
        m.Ls(number, other),
        m.PLs(number, other),
    ):
        read: list[m.ClientMessage] = []
        codec.decode_messages((encode_message(message),), read)
        assert read == [message]


@settings(deadline=None)
@given(st.lists(st.sampled_from(REPLIES), max_size=8), st.lists(st.integers(1, 60), max_size=30))
def test_replies_do_not_depend_on_how_the_bytes_were_cut(
    sent: list[tuple[bytes, Reply | None]], sizes: list[int]
) -> None:
    data = b"".join(text + b"\n" for text, _ in sent)
    decoder, received = ReplyDecoder(line_bytes_max=10**6), list[Reply]()
    position = 0
    for size in [*sizes, len(data)]:
        received += decoder.receive_data(data[position : position + size])
        position += size
    assert received == [message for _, message in sent if message is not None]


def test_a_line_may_be_as_long_as_the_limit_and_no_longer() -> None:
    line = codec.encode_ack(1)
    assert ReplyDecoder(line_bytes_max=len(line)).receive_data(line + b"\n\n") == [Ack(1)]
    for data in (line + b"\n", line):
        with pytest.raises(RemoteProtocolError):
            ReplyDecoder(line_bytes_max=len(line) - 1).receive_data(data)
