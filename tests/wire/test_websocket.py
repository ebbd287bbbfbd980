"""WebSocket both ways: the examples of RFC 6455 and 7692, any cut, all limits at and one past, all malformed forms."""

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError
from babelbus.wire.http import HttpError, Request, RequestDecoder, encode_response
from babelbus.wire.websocket import (
    Close,
    Decoder,
    Event,
    Message,
    Ping,
    Pong,
    Texts,
    WebSocketError,
    encode_close,
    encode_pong,
    encode_texts,
)
from babelbus.wire.websocket.deflate import Deflate, Deflater
from babelbus.wire.websocket.frames import BINARY, COMPRESSED, FIN, encode_frames, toggle_mask
from babelbus.wire.websocket.upgrade import (
    Response,
    accept_key,
    accept_upgrade,
    check_upgrade_response,
    encode_upgrade_request,
    make_key,
    read_upgrade_response,
)
from tests.support.websocket import encode_binaries, encode_ping

HELLO = Message(b"Hello", True)
LIMIT = 100_000


def server(message_bytes_max: int = LIMIT, deflate: Deflate | None = None) -> Decoder:
    return Decoder(is_server=True, message_bytes_max=message_bytes_max, deflate=deflate)


def client(message_bytes_max: int = LIMIT, deflate: Deflate | None = None) -> Decoder:
    return Decoder(is_server=False, message_bytes_max=message_bytes_max, deflate=deflate)


def read(decoder: Decoder, data: bytes) -> list[Event]:
    decoder.receive_data(data)
    return decoder.events()


def refusal(decoder: Decoder, data: bytes) -> int:
    with pytest.raises(WebSocketError) as caught:
        read(decoder, data)
    return caught.value.code


def frame(first: int, payload: bytes = b"") -> bytes:
    return encode_frames(first, [payload], mask=True)


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    chunks, position, number = [], 0, 0
    while position < len(data):
        size = sizes[number % len(sizes)] if sizes else len(data)
        chunks.append(data[position : position + size])
        position += size
        number += 1
    return chunks


def test_the_examples_of_section_5_7_are_read() -> None:
    assert read(client(), bytes.fromhex("810548656c6c6f")) == [HELLO]
    assert read(server(), bytes.fromhex("818537fa213d7f9f4d5158")) == [HELLO]
    assert read(client(), bytes.fromhex("010348656c 80026c6f")) == [HELLO]
    assert read(client(), bytes.fromhex("890548656c6c6f")) == [Ping(b"Hello")]
    assert read(server(), bytes.fromhex("8a8537fa213d7f9f4d5158")) == [Pong(b"Hello")]
    assert read(client(), bytes.fromhex("827e0100") + bytes(256)) == [Message(bytes(256), False)]
    assert read(client(), bytes.fromhex("827f0000000000010000") + bytes(65536)) == [Message(bytes(65536), False)]


def test_the_examples_of_section_5_7_are_made() -> None:
    assert encode_texts([b"Hello"]).hex() == "810548656c6c6f"
    assert encode_ping(b"Hello").hex() == "890548656c6c6f"
    assert encode_pong(b"Hello").hex() == "8a0548656c6c6f"
    assert encode_binaries([bytes(256)]) == bytes.fromhex("827e0100") + bytes(256)
    assert encode_binaries([bytes(65536)]) == bytes.fromhex("827f0000000000010000") + bytes(65536)
    assert toggle_mask(b"Hello", 0, 5, bytes.fromhex("37fa213d")).hex() == "7f9f4d5158"
    assert encode_close(1000, "bye").hex() == "880503e8627965"
    assert encode_close(1005) == b"\x88\x00"


def test_masked_frames_have_another_key_each() -> None:
    data = encode_texts([bytes(4)] * 3, mask=True)
    keys = {data[start : start + 4] for start in (2, 12, 22)}
    assert len(keys) == 3
    assert read(server(), data) == [Message(bytes(4), True)] * 3


payloads = st.binary(max_size=20) | st.integers(min_value=0, max_value=5000).map(lambda size: b"ab"[:2] * size)
messages = (
    st.builds(Message, payloads, st.just(False))
    | st.builds(Message, st.text(max_size=20).map(str.encode), st.just(True))
    | st.builds(Ping, st.binary(max_size=125))
    | st.builds(Pong, st.binary(max_size=125))
)


def encode(event: Event, *, mask: bool) -> bytes:
    match event:
        case Message(data, text):
            return (encode_texts if text else encode_binaries)([data], mask=mask)
        case Texts(several):
            return encode_texts(several, mask=mask)
        case Ping(data):
            return encode_ping(data, mask=mask)
        case Pong(data):
            return encode_pong(data, mask=mask)
        case Close(code, reason):
            return encode_close(code, reason, mask=mask)


@given(st.lists(messages, max_size=20), st.lists(st.integers(min_value=1, max_value=500)), st.booleans())
def test_messages_do_not_depend_on_how_the_bytes_were_cut(sent: list[Event], sizes: list[int], mask: bool) -> None:
    decoder, received = Decoder(is_server=mask, message_bytes_max=LIMIT), []
    for chunk in cut(b"".join(encode(one, mask=mask) for one in sent), sizes):
        decoder.receive_data(chunk)
        received += decoder.events()
    assert received == sent
    assert not decoder.unfinished_bytes


@given(st.lists(messages, max_size=20), st.lists(st.integers(min_value=1, max_value=500)))
def test_texts_that_come_together_are_those_that_come_one_by_one(sent: list[Event], sizes: list[int]) -> None:
    decoder = Decoder(is_server=True, message_bytes_max=LIMIT, together=True)
    received: list[Event] = []
    for chunk in cut(b"".join(encode(one, mask=True) for one in sent), sizes):
        decoder.receive_data(chunk)
        for event in decoder.events():
            received += [Message(one, True) for one in event.payloads] if isinstance(event, Texts) else [event]
    assert received == sent


@given(st.lists(st.text(max_size=300).map(str.encode), max_size=40), st.booleans())
def test_a_list_of_texts_is_what_each_of_them_would_be(texts: list[bytes], mask: bool) -> None:
    decoder = Decoder(is_server=mask, message_bytes_max=LIMIT)
    assert read(decoder, encode_texts(texts, mask=mask)) == [Message(one, True) for one in texts]
    assert encode_texts(texts) == b"".join(encode_texts([one]) for one in texts)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 130, 131]), st.integers(1, 40)), max_size=6),
    st.booleans(),
    st.lists(st.integers(min_value=1, max_value=3000)),
)
def test_runs_of_frames_of_equal_size_are_read_like_others(
    runs: list[tuple[int, int]], mask: bool, sizes: list[int]
) -> None:
    sent = [Message(b"%c" % (97 + n % 26) * size, bool(n % 7)) for size, count in runs for n in range(count)]
    data = b"".join((encode_texts if one.text else encode_binaries)([one.data], mask=mask) for one in sent)
    decoder, received = Decoder(is_server=mask, message_bytes_max=LIMIT), []
    for chunk in cut(data, sizes):
        decoder.receive_data(chunk)
        received += decoder.events()
    assert received == sent


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 4095, 4096, 65_535, 65_536, 70_001])
def test_every_form_of_the_length_goes_there_and_back(size: int) -> None:
    for mask in (False, True):
        decoder = Decoder(is_server=mask, message_bytes_max=LIMIT)
        assert read(decoder, encode_binaries([bytes(size)] * 8, mask=mask)) == [Message(bytes(size), False)] * 8


@given(st.text(min_size=1), st.lists(st.integers(min_value=1, max_value=3), min_size=1))
def test_a_fragmented_text_is_put_together_with_control_frames_between(text: str, sizes: list[int]) -> None:
    parts = cut(text.encode(), sizes)
    data = frame(0x01)
    for part in parts:
        data += frame(0x00, part) + frame(0x89, b"?")
    data += frame(0x80)
    assert read(server(), data + frame(0x81)) == [
        *([Ping(b"?")] * len(parts)),
        Message(text.encode(), True),
        Message(b"", True),
    ]


MALFORMED = [
    (1002, b"\x81\x00"),  # not masked
    (1002, b"\x81\x7f"),
    (1002, b"\xc1\x80"),  # reserved bits
    (1002, b"\xa1\x80"),
    (1002, b"\x91\x80"),
    (1002, b"\x83\x80"),  # unknown kinds
    (1002, b"\x87\x80"),
    (1002, b"\x8b\x80"),
    (1002, b"\x8f\x80"),
    (1002, b"\x09\x80"),  # control frames in fragments, or too long
    (1002, b"\x08\x80"),
    (1002, b"\x89\xfe"),
    (1002, b"\x8a\xff"),
    (1002, b"\x88\xfe"),
    (1002, b"\x80\x80"),  # continues nothing
    (1002, b"\x00\x80"),
    (1002, frame(0x01, b"a") + b"\x81\x80"),  # begins before the last has ended
    (1002, frame(0x01, b"a") + b"\x02\x80"),
    (1002, b"\x81\xfe\x00\x7d"),  # lengths in more bytes than needed
    (1002, b"\x81\xff\x00\x00\x00\x00\x00\x00\xff\xff"),
    (1002, b"\x81\xff\x80\x00\x00\x00\x00\x00\x00\x00"),
    (1009, b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff"),
    (1009, b"\x82\xff\x00\x00\x00\x00\x00\x01\x86\xa1"),
    (1007, frame(0x81, b"\xff")),
    (1007, frame(0x81, b"\xed\xa0\x80")),
    (1007, frame(0x81, "ä".encode()[:1])),
    (1007, frame(0x01, b"\xc0\x80")),
    (1007, frame(0x01, "ä".encode()[:1]) + frame(0x80)),
    (1002, frame(0x88, b"\x03")),
    (1007, frame(0x88, b"\x03\xe8\xff")),
]


@pytest.mark.parametrize(("code", "data"), MALFORMED)
def test_what_breaks_the_protocol_is_refused_with_its_code(code: int, data: bytes) -> None:
    assert refusal(server(), data) == code


@pytest.mark.parametrize(("code", "data"), MALFORMED)
@pytest.mark.parametrize("before", [1, 20])
def test_what_was_whole_before_the_bad_frame_is_given_first(code: int, data: bytes, before: int) -> None:
    decoder = server()
    good = [Message(b"%d" % number, True) for number in range(before)]
    assert read(decoder, encode_texts([one.data for one in good], mask=True) + data + bytes(8)) == good
    assert decoder.error is not None
    assert decoder.error.code == code
    assert refusal(decoder, encode_texts([b"x"], mask=True)) == code
    assert not decoder.unfinished_bytes


def test_a_message_that_has_ended_is_not_continued() -> None:
    decoder = server()
    assert read(decoder, frame(0x01, b"a") + frame(0x80) + b"\x80\x80") == [Message(b"a", True)]
    assert refusal(decoder, b"") == 1002


def test_the_first_of_two_errors_counts() -> None:
    assert refusal(server(), frame(0x81, b"\xff") + b"\x83\x80") == 1007


def test_a_server_may_not_mask() -> None:
    assert refusal(client(), encode_texts([b"Hello"], mask=True)) == 1002
    assert refusal(client(), frame(0x81, bytes(126))) == 1002


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1011, 1014, 3000, 3999, 4000, 4999])
def test_a_close_frame_has_a_code_that_may_be_sent(code: int) -> None:
    assert read(server(), encode_close(code, "grüß", mask=True)) == [Close(code, "grüß")]


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535])
def test_a_close_frame_with_another_code_is_refused(code: int) -> None:
    assert refusal(server(), frame(0x88, code.to_bytes(2, "big"))) == 1002
    if code != 1005:
        with pytest.raises(LocalProtocolError):
            encode_close(code)


def test_a_close_frame_without_a_code_says_so() -> None:
    assert read(server(), encode_close(1005, mask=True)) == [Close(1005, "")]


def test_nothing_behind_a_close_frame_is_read() -> None:
    decoder = server()
    close = encode_close(mask=True)
    assert read(decoder, encode_texts([b"a"], mask=True) + close + b"\xff\xff") == [
        Message(b"a", True),
        Close(1000, ""),
    ]
    assert read(decoder, encode_texts([b"b"], mask=True)) == []
    assert not decoder.unfinished_bytes


def test_a_long_reason_is_cut_at_a_character_and_long_data_refused() -> None:
    assert read(client(), encode_close(1000, "ä" * 100)) == [Close(1000, "ä" * 61)]
    assert read(client(), encode_pong(bytes(125))) == [Pong(bytes(125))]
    with pytest.raises(LocalProtocolError):
        encode_pong(bytes(126))


@pytest.mark.parametrize("limit", [0, 1, 125, 126, 1000, 70_000])
def test_a_message_may_have_as_many_bytes_as_the_limit_says_and_no_more(limit: int) -> None:
    assert read(server(limit), frame(0x82, bytes(limit))) == [Message(bytes(limit), False)]
    assert refusal(server(limit), frame(0x82, bytes(limit + 1))[:14]) == 1009
    assert read(server(limit), frame(0x02, bytes(limit)) + frame(0x80)) == [Message(bytes(limit), False)]
    assert refusal(server(limit), frame(0x02, bytes(limit)) + frame(0x00, b"x")[:6]) == 1009


def test_control_frames_do_not_count_as_part_of_a_message() -> None:
    assert read(server(1), frame(0x02, b"x") + frame(0x89, bytes(125)) + frame(0x80)) == [
        Ping(bytes(125)),
        Message(b"x", False),
    ]


@given(st.lists(st.binary(max_size=40) | messages.map(lambda one: encode(one, mask=True)), max_size=12), st.booleans())
def test_garbage_raises_nothing_but_our_errors_and_the_same_however_it_is_cut(parts: list[bytes], zip_it: bool) -> None:
    data = b"".join(parts)
    outcomes = []
    for chunks in ([data], cut(data, [1])):
        decoder, received = server(1000, Deflate() if zip_it else None), []
        for chunk in chunks:
            decoder.receive_data(chunk)
            try:
                received += decoder.events()
            except WebSocketError:
                pass
        outcomes.append((received, decoder.error and decoder.error.code))
    assert outcomes[0] == outcomes[1]


# RFC 7692, section 7.2.3: in one frame, in two, not compressed, with a final block, in two blocks.
@pytest.mark.parametrize(
    "data",
    [
        "c107 f248cdc9c90700",
        "4103 f248cd 8004 c9c90700",
        "c10b 000500faff48656c6c6f00",
        "c108 f348cdc9c9070000",
        "c10d f248050000 00ffffcac9c90700",
    ],
)
def test_the_examples_of_rfc_7692_are_read(data: str) -> None:
    decoder = client(deflate=Deflate())
    assert read(decoder, bytes.fromhex(data)) == [HELLO]
    assert read(decoder, bytes.fromhex("c107 f248cdc9c90700")) == [HELLO]


def test_the_window_is_kept_from_message_to_message_unless_it_was_agreed_otherwise() -> None:
    again = bytes.fromhex("c107 f248cdc9c90700 c105 f200110000")
    assert read(client(deflate=Deflate()), again) == [HELLO, HELLO]
    forgetful = client(deflate=Deflate(server_no_context_takeover=True))
    assert read(forgetful, again) == [HELLO]
    assert forgetful.error is not None
    assert forgetful.error.code == 1007


def as_binary(text: bytes) -> bytes:
    """The one frame of a compressed text as one of a binary message."""
    return bytes([FIN | COMPRESSED | BINARY]) + text[1:]


AGREED = [
    Deflate(),
    Deflate(server_no_context_takeover=True, client_no_context_takeover=True),
    Deflate(server_max_window_bits=9, client_max_window_bits=9),
]


@pytest.mark.parametrize("agreed", AGREED)
@pytest.mark.parametrize("is_server", [False, True])
def test_what_was_compressed_is_read_by_the_other_side(agreed: Deflate, is_server: bool) -> None:
    deflater = Deflater(agreed, is_server=is_server, bytes_min=1)
    decoder = Decoder(is_server=not is_server, message_bytes_max=LIMIT, deflate=agreed)
    texts = [b"", b"a", b"hello " * 1000, "äöü".encode() * 500, b"hello " * 1000]
    data = deflater.encode_texts(texts) + as_binary(deflater.encode_texts([b"\xff" * 5000]))
    assert len(data) < 1000
    assert read(decoder, data) == [*(Message(one, True) for one in texts), Message(b"\xff" * 5000, False)]


def test_small_messages_are_not_compressed() -> None:
    deflater = Deflater(Deflate(), is_server=True, bytes_min=6)
    assert deflater.encode_texts([b"Hello"]) == encode_texts([b"Hello"])
    assert deflater.encode_texts([b"Hello!"])[0] == 0xC1


def test_a_bomb_is_refused_when_it_has_grown_past_the_limit() -> None:
    bomb = Deflater(Deflate(), is_server=False).encode_texts([bytes(1_000_000)])
    assert len(bomb) < 2000
    assert read(server(1_000_000, Deflate()), bomb) == [Message(bytes(1_000_000), True)]
    assert refusal(server(999_999, Deflate()), bomb) == 1009


@pytest.mark.parametrize(
    ("code", "data"),
    [
        (1007, frame(0xC1, b"\xff\xff\xff")),
        (1007, Deflater(Deflate(), is_server=False, bytes_min=1).encode_texts([b"\xff"])),
        (1002, frame(0x41, b"\xf2\x48") + frame(0xC0)),
        (1002, frame(0xC9)),
        (1002, frame(0xC1, bytes.fromhex("0300") * 3)),
    ],
)
def test_a_malformed_compressed_message_is_refused(code: int, data: bytes) -> None:
    assert refusal(server(deflate=Deflate()), data) == code


KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def asked(method: str = "GET", version: str = "1.1", **changed: str | None) -> Request:
    headers: dict[str, str | None] = {
        "host": "server.example.com",
        "upgrade": "WebSocket",
        "connection": "keep-alive, Upgrade",
        "sec-websocket-key": KEY,
        "sec-websocket-version": "13",
    }
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    return Request(method, "/chat", {name: one for name, one in headers.items() if one is not None}, version=version)


def test_the_handshake_of_section_1_3_is_answered() -> None:
    upgrade = accept_upgrade(asked(sec_websocket_protocol="chat, superchat"), subprotocols=["superchat", "chat"])
    assert accept_key(KEY) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert upgrade.response == (
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nsec-websocket-protocol: chat\r\n\r\n"
    )
    assert (upgrade.subprotocol, upgrade.deflate) == ("chat", None)


def test_a_subprotocol_that_is_not_ours_is_not_chosen() -> None:
    assert accept_upgrade(asked(sec_websocket_protocol="chat"), subprotocols=["other"]).subprotocol is None
    assert accept_upgrade(asked(), subprotocols=["other"]).subprotocol is None


REFUSED = [
    (405, asked("POST"), ("allow", "GET")),
    (426, asked(upgrade=None), ("upgrade", "websocket")),
    (426, asked(upgrade="h2c"), ("upgrade", "websocket")),
    (426, asked(connection="keep-alive"), ("upgrade", "websocket")),
    (426, asked(version="1.0"), ("upgrade", "websocket")),
    (426, asked(sec_websocket_version="8"), ("sec-websocket-version", "13")),
    (426, asked(sec_websocket_version=None), ("sec-websocket-version", "13")),
    (400, asked(sec_websocket_key=None), None),
    (400, asked(sec_websocket_key=f"{KEY}, {KEY}"), None),
    (400, asked(sec_websocket_key="AAAA"), None),
    (400, asked(sec_websocket_key="\xe4" * 24), None),
    (400, asked(sec_websocket_protocol="a, a"), None),
    (400, asked(sec_websocket_protocol="a,,b"), None),
]


@pytest.mark.parametrize(("status", "request_", "header"), REFUSED)
def test_a_handshake_that_is_none_is_refused_with_its_status(
    status: int, request_: Request, header: tuple[str, str] | None
) -> None:
    with pytest.raises(HttpError) as caught:
        accept_upgrade(request_)
    assert caught.value.status == status
    assert caught.value.headers == (() if header is None else (header,))


NO_TAKEOVER = Deflate(server_no_context_takeover=True, client_no_context_takeover=True, server_max_window_bits=12)


@pytest.mark.parametrize(
    ("offer", "agreed"),
    [
        ("permessage-deflate", Deflate(server_max_window_bits=12)),
        ("permessage-deflate; client_max_window_bits", Deflate(server_max_window_bits=12)),
        ('permessage-deflate; client_max_window_bits="10"', Deflate(server_max_window_bits=12)),
        ("permessage-deflate; server_max_window_bits=10", Deflate(server_max_window_bits=10)),
        ("permessage-deflate; server_no_context_takeover; client_no_context_takeover", NO_TAKEOVER),
        ("other, permessage-deflate", Deflate(server_max_window_bits=12)),
        ("permessage-deflate; server_max_window_bits=8, permessage-deflate", Deflate(server_max_window_bits=12)),
        ("permessage-deflate; server_max_window_bits=8", None),
        ("permessage-deflate; server_max_window_bits=16", None),
        ("permessage-deflate; server_max_window_bits", None),
        ("permessage-deflate; server_max_window_bits=09", None),
        ("permessage-deflate; client_max_window_bits=7", None),
        ("permessage-deflate; server_no_context_takeover=1", None),
        ("permessage-deflate; server_no_context_takeover; server_no_context_takeover", None),
        ("permessage-deflate; unknown", None),
        ("other", None),
        ("", None),
    ],
)
def test_the_first_offer_of_compression_that_can_be_served_is_taken(offer: str, agreed: Deflate | None) -> None:
    assert accept_upgrade(asked(sec_websocket_extensions=offer), deflate=True).deflate == agreed
    assert accept_upgrade(asked(sec_websocket_extensions=offer)).deflate is None


@pytest.mark.parametrize("offer", ["permessage-deflate;", ";", "a=b", "permessage-deflate; a=", 'x; a="b', ",", "a b"])
def test_a_list_of_extensions_that_is_none_is_refused(offer: str) -> None:
    with pytest.raises(HttpError) as caught:
        accept_upgrade(asked(sec_websocket_extensions=offer), deflate=True)
    assert caught.value.status == 400


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"])
def test_the_answer_to_a_handshake_is_read_when_its_head_is_whole(interim: bytes) -> None:
    head = interim + encode_response(101, [("upgrade", "websocket")])
    for size in range(len(head)):
        assert read_upgrade_response(head[:size]) is None
    assert read_upgrade_response(head + b"\x81\x00") == (
        Response(101, "Switching Protocols", {"upgrade": "websocket"}),
        b"\x81\x00",
    )


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        b"x" * 65_536,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + b"x" * 65_536,
    ],
)
def test_a_malformed_answer_to_a_handshake_is_refused(data: bytes) -> None:
    with pytest.raises(HttpError):
        read_upgrade_response(data)


@given(st.binary())
def test_garbage_of_a_server_raises_nothing_but_our_errors(data: bytes) -> None:
    for answer in (data, b"HTTP/1.1 200 OK\r\n" + data):
        with contextlib.suppress(HttpError):
            read_upgrade_response(answer)


@pytest.mark.parametrize("deflate", [False, True])
def test_client_and_server_agree(deflate: bool) -> None:
    key = make_key()
    decoder = RequestDecoder()
    decoder.receive_data(
        encode_upgrade_request("h:1", "/ws?x", key, subprotocols=["b", "a"], deflate=deflate, headers=[("x-a", "b")])
    )
    (request,) = decoder.requests()
    assert (request.target, request.headers["host"], request.headers["x-a"]) == ("/ws?x", "h:1", "b")
    upgrade = accept_upgrade(request, subprotocols=["a"], deflate=True, headers=[("x-c", "d")])
    answer = read_upgrade_response(upgrade.response + b"\x81\x00")
    assert answer is not None
    response, unread = answer
    assert unread == b"\x81\x00"
    assert response.headers["x-c"] == "d"
    chosen = check_upgrade_response(response, key, subprotocols=["b", "a"], deflate=deflate)
    assert chosen == ("a", upgrade.deflate)
    assert (upgrade.deflate is not None) is deflate


def answered(status: int = 101, **changed: str) -> Response:
    headers = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": accept_key(KEY)}
    return Response(status, "", headers | {name.replace("_", "-"): value for name, value in changed.items()})


@pytest.mark.parametrize(
    "response",
    [
        answered(200),
        answered(upgrade="h2c"),
        answered(connection="close"),
        answered(sec_websocket_accept=accept_key(KEY).lower()),
        answered(sec_websocket_protocol="other"),
        answered(sec_websocket_extensions="other"),
        answered(sec_websocket_extensions="permessage-deflate, permessage-deflate"),
        answered(sec_websocket_extensions="permessage-deflate; client_max_window_bits=10"),
        answered(sec_websocket_extensions="permessage-deflate; server_max_window_bits"),
        answered(sec_websocket_extensions="permessage-deflate; server_no_context_takeover=1"),
    ],
)
def test_a_server_that_chose_what_was_not_offered_is_refused(response: Response) -> None:
    assert check_upgrade_response(answered(), KEY) == (None, None)
    with pytest.raises(HttpError):
        check_upgrade_response(response, KEY, subprotocols=["mine"], deflate=True)


def test_compression_that_was_not_offered_is_refused() -> None:
    with pytest.raises(HttpError):
        check_upgrade_response(answered(sec_websocket_extensions="permessage-deflate"), KEY)


@pytest.mark.parametrize("path", ["", "ws", "/a b", "/ä", "/a\r\nx: y"])
def test_a_handshake_with_a_path_that_is_none_is_not_made(path: str) -> None:
    with pytest.raises(LocalProtocolError):
        encode_upgrade_request("h", path, KEY)
