"""WebSocket clients of a whole server: the upgrade, frames of every kind, how a connection ends (section 3)."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import WorterbuchSettings
from babelbus.wire.websocket import (
    Close,
    Decoder,
    Event,
    Message,
    Pong,
    encode_close,
    encode_pong,
    encode_texts,
)
from babelbus.wire.websocket.deflate import Deflater
from babelbus.wire.websocket.frames import CONTINUATION, FIN, PING, TEXT, encode_frames
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.server import LiveServer, configure
from tests.support.web import Plain, WebSocket, get_of
from tests.support.websocket import encode_binaries, encode_ping

GET_VERSION = {"get": {"transactionId": 1, "key": "$SYS/version"}}


def serve(folder: Path, **settings: Any) -> LiveServer:
    return LiveServer(configure(folder, worterbuch=WorterbuchSettings(port=0, tcp_port=0, **settings)))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("sockets"), deflate=True, message_bytes_max=100_000) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[WebSocket]:
    with WebSocket(live) as socket:
        yield socket


def text(message: object) -> bytes:
    return json.dumps(message).encode()


def works(client: WebSocket) -> bool:
    return "state" in client.ask(GET_VERSION)


def ending(client: WebSocket) -> list[Event]:
    """What comes until the server closes the connection."""
    data = client.rest()
    decoder = Decoder(is_server=False, message_bytes_max=2**20, deflate=client.deflate)
    decoder.receive_data(data)
    return decoder.events()


# -- the upgrade -----------------------------------------------------------------------------------------------------


def test_the_server_greets_first(live: LiveServer) -> None:
    with WebSocket(live, greeted=False) as client:
        welcome = client.next()["welcome"]
        assert welcome["info"]["protocolVersion"] == "0.11"
        assert len(welcome["clientId"]) == 36


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [((), None), (("worterbuch",), "worterbuch"), (("a", "worterbuch"), "worterbuch"), (("a",), None)],
)
def test_the_subprotocol_is_chosen_if_it_is_offered(
    live: LiveServer, offered: tuple[str, ...], chosen: str | None
) -> None:
    with WebSocket(live, subprotocols=offered) as client:
        assert client.subprotocol == chosen
        assert works(client)


def test_half_a_handshake_is_waited_for(live: LiveServer) -> None:
    request = encode_upgrade_request("localhost", "/ws", make_key())
    with Plain(live) as client:
        client.socket.sendall(request[:50])
        with WebSocket(live) as other:
            assert works(other)
        client.socket.sendall(request[50:])
        assert client.read(1)[0].status == 101


def test_what_follows_the_handshake_in_one_packet_is_read(live: LiveServer) -> None:
    with Plain(live) as client:
        frame = encode_texts([text(GET_VERSION)], mask=True)
        client.socket.sendall(get_of("/info") + encode_upgrade_request("localhost", "/ws", make_key()) + frame)
        assert [answer.status for answer in client.read(2)] == [200, 101]
        data = client.answers.unread()
        while b'"state"' not in data:
            data += client.socket.recv(1000)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get_of("/ws"), 426),
        (get_of("/ws", "POST"), 405),
        (get_of("/ws", upgrade="websocket", sec_websocket_version="13"), 426),
        (encode_upgrade_request("localhost", "/ws", "short"), 400),
        (encode_upgrade_request("localhost", "/ws", make_key()).replace(b"version: 13", b"version: 8"), 426),
        (encode_upgrade_request("localhost", "/nix", make_key()), 404),
    ],
)
def test_what_is_no_handshake_is_refused(live: LiveServer, request_: bytes, status: int) -> None:
    with Plain(live) as client:
        client.socket.sendall(request_)
        assert client.read(1)[0].status == status


@pytest.mark.parametrize(("origin", "status"), [("http://localhost", 101), ("https://anywhere.example", 403)])
def test_pages_of_the_server_itself_may_connect_and_others_not(live: LiveServer, origin: str, status: int) -> None:
    with Plain(live) as client:
        headers = [("origin", origin), ("authorization", "Bearer whatever")]
        client.socket.sendall(encode_upgrade_request("localhost", "/ws", make_key(), headers=headers))
        assert client.read(1)[0].status == status


def test_an_old_version_has_a_path_of_its_own(tmp_path: Path) -> None:
    with serve(tmp_path, more_endpoints="/ws/0.6=0.6") as live, WebSocket(live, "/ws/0.6", greeted=False) as client:
        handshake = {"supportedProtocolVersions": [{"major": 0, "minor": 6}], "lastWill": [], "graveGoods": []}
        assert "handshake" in client.ask({"handshakeRequest": handshake})
        assert "ack" in client.ask({"set": {"transactionId": 1, "key": "a", "value": 1}})
        assert client.ask({"get": {"transactionId": 2, "key": "a"}})["state"]["keyValue"] == {"key": "a", "value": 1}


# -- frames ----------------------------------------------------------------------------------------------------------


def test_a_ping_is_answered_with_its_data_in_order(client: WebSocket) -> None:
    client.socket.sendall(encode_texts([text(GET_VERSION)], mask=True) + encode_ping(b"\x00\xff", mask=True))
    kinds = {type(client.event()), type(client.event())}
    assert kinds == {Message, Pong}
    client.socket.sendall(encode_ping(mask=True))
    assert client.event() == Pong(b"")
    client.socket.sendall(encode_pong(b"unasked", mask=True))
    assert works(client)


def test_no_ping_is_ever_sent_and_all_messages_are_texts(client: WebSocket) -> None:
    client.say({"subscribe": {"transactionId": 1, "key": "$SYS/uptime", "unique": False}})
    assert all(type(event) is Message and event.text for event in (client.event(), client.event(), client.event()))


def test_binary_messages_are_ignored(client: WebSocket) -> None:
    client.socket.sendall(encode_binaries([b"\xff", text(GET_VERSION), b""], mask=True))
    assert works(client)


def test_a_message_in_fragments_with_a_ping_between_is_one(client: WebSocket) -> None:
    data = text({"set": {"transactionId": 5, "key": "ä", "value": "öß"}}).replace(b"\\u00f6", "ö".encode())
    at = data.index("ö".encode()) + 1  # in the middle of a character
    client.socket.sendall(
        encode_frames(TEXT, [data[:at]], mask=True)
        + encode_frames(CONTINUATION, [b""], mask=True)
        + encode_frames(FIN | PING, [b"x"], mask=True)
        + encode_frames(FIN | CONTINUATION, [data[at:]], mask=True)
    )
    assert client.event() == Pong(b"x")
    assert client.next() == {"ack": {"transactionId": 5}}
    assert client.ask({"get": {"transactionId": 6, "key": "ä"}})["state"]["value"] == "öß"


@pytest.mark.parametrize("size", [1, 3, 50])
def test_frames_may_be_cut_anywhere(client: WebSocket, size: int) -> None:
    sets = [{"set": {"transactionId": number, "key": f"cut/{number}", "value": number}} for number in range(20)]
    data = encode_texts(list(map(text, sets)), mask=True)
    for at in range(0, len(data), size):
        client.socket.sendall(data[at : at + size])
    assert [client.next()["ack"]["transactionId"] for _ in sets] == list(range(20))


def test_a_chunk_of_many_requests_is_answered_in_order(client: WebSocket) -> None:
    client.say(*({"set": {"transactionId": number, "key": "k", "value": number}} for number in range(3000)))
    assert [client.next()["ack"]["transactionId"] for _ in range(3000)] == list(range(3000))
    assert client.ask({"get": {"transactionId": 1, "key": "k"}})["state"]["value"] == 2999


def test_a_value_of_several_lines_arrives_in_one(client: WebSocket) -> None:
    message = b'{"set":{"transactionId":1,"key":"lines","value":{\r\n"x":\n1}}}'
    client.socket.sendall(encode_texts([message], mask=True))
    assert "ack" in client.next()
    client.say({"get": {"transactionId": 2, "key": "lines"}})
    event = client.event()
    assert isinstance(event, Message)
    assert b"\n" not in event.data
    assert json.loads(event.data)["state"]["value"] == {"x": 1}


def test_events_reach_other_connections_of_every_kind(live: LiveServer, client: WebSocket) -> None:
    with WebSocket(live, deflate=True) as other:
        assert "ack" in other.ask({"pSubscribe": {"transactionId": 9, "requestPattern": "e/#", "unique": False}})
        assert other.next()["pState"]["keyValuePairs"] == []
        assert "ack" in client.ask({"set": {"transactionId": 1, "key": "e/1", "value": "x" * 1000}})
        assert other.next()["pState"]["keyValuePairs"] == [{"key": "e/1", "value": "x" * 1000}]


# -- compression -----------------------------------------------------------------------------------------------------


def test_messages_are_compressed_for_who_offers_it(live: LiveServer) -> None:
    value = "abc" * 5000
    with WebSocket(live, deflate=True) as client:
        assert client.deflate is not None
        assert "ack" in client.ask({"set": {"transactionId": 1, "key": "z", "value": value}})
        client.socket.sendall(encode_texts([text({"get": {"transactionId": 2, "key": "z"}})], mask=True))
        frame = client.socket.recv(4)
        assert frame[0] == 0xC1  # a whole text, compressed
        size = struct.unpack(">H", frame[2:])[0] if frame[1] == 126 else frame[1]
        assert size < len(value) / 10


def test_nothing_is_compressed_unless_the_setting_says_so(tmp_path: Path) -> None:
    with serve(tmp_path) as live, WebSocket(live, deflate=True) as client:
        assert client.deflate is None
        assert works(client)


def test_a_message_that_would_unpack_beyond_the_limit_closes(live: LiveServer) -> None:
    with WebSocket(live, deflate=True) as client:
        assert client.deflate is not None
        deflater = Deflater(client.deflate, is_server=False)
        client.socket.sendall(deflater.encode_texts([b" " * 200_000]))
        assert isinstance(last := ending(client)[-1], Close)
        assert last.code == 1009


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "echoed"), [(1000, 1000), (1001, 1001), (4000, 4000), (1005, 1000)])
def test_a_close_is_answered_after_everything_that_was_asked_before(client: WebSocket, code: int, echoed: int) -> None:
    client.socket.sendall(
        encode_texts([text(GET_VERSION)], mask=True)
        + encode_close(code, mask=True)
        + encode_texts([text(GET_VERSION)], mask=True)
    )
    message, close = ending(client)
    assert isinstance(message, Message)
    assert close == Close(echoed, "")


HEAD = {"set": {"transactionId": 77, "key": "before", "value": 1}}
VIOLATIONS = {
    "no mask": (encode_texts([text(GET_VERSION)]), 1002),
    "a reserved bit": (b"\xb1\x80\0\0\0\0", 1002),
    "an unknown opcode": (b"\x83\x80\0\0\0\0", 1002),
    "a fragmented ping": (b"\x09\x80\0\0\0\0", 1002),
    "a long ping": (b"\x89\xfe\x00\x7e\0\0\0\0", 1002),
    "a continuation of nothing": (encode_frames(FIN | CONTINUATION, [b"x"], mask=True), 1002),
    "a text inside a text": (encode_frames(TEXT, [b"x", b"y"], mask=True), 1002),
    "not UTF-8": (encode_texts([b'"\xff"'], mask=True), 1007),
    "a promise of too much": (b"\x81\xff" + struct.pack(">Q", 2**40) + b"\0\0\0\0", 1009),
    "one byte too much": (b"\x81\xff" + struct.pack(">Q", 100_001) + b"\0\0\0\0", 1009),
    "fragments of too much": (
        encode_frames(TEXT, [b"x" * 60_000], mask=True) + encode_frames(CONTINUATION, [b"x" * 60_000], mask=True),
        1009,
    ),
    "a close code that may not be sent": (b"\x88\x82\0\0\0\0\x03\xed", 1002),
    "a close of one byte": (b"\x88\x81\0\0\0\0\x03", 1002),
    "no JSON": (encode_texts([b"{nonsense"], mask=True), 1008),
    "null": (encode_texts([b"null"], mask=True), 1008),
    "an empty text": (encode_texts([b""], mask=True), 1008),
    "an unknown message": (encode_texts([b'{"nix":{}}'], mask=True), 1008),
    "two members": (encode_texts([b'{"ls":{"transactionId":1},"get":{}}'], mask=True), 1008),
    "a deep message": (encode_texts([b'{"set":' + b"[" * 10_000 + b"]" * 10_000 + b"}"], mask=True), 1008),
    "NaN": (encode_texts([b'{"set":{"transactionId":1,"key":"a","value":NaN}}'], mask=True), 1008),
}


@pytest.mark.parametrize(("data", "code"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_closes_with_its_code_after_what_came_before_it(
    live: LiveServer, client: WebSocket, data: bytes, code: int
) -> None:
    client.socket.sendall(encode_texts([text(HEAD)], mask=True) + data)
    first, *others = ending(client)
    assert isinstance(first, Message)
    assert json.loads(first.data) == {"ack": {"transactionId": 77}}
    assert isinstance(others[-1], Close)
    assert others[-1].code == code
    with WebSocket(live) as other:
        assert works(other)


def test_a_malformed_message_is_answered_if_its_number_can_be_read(client: WebSocket) -> None:
    client.say({"set": {"transactionId": 3, "key": 5, "value": 1}})
    error, close = ending(client)
    assert isinstance(error, Message)
    assert json.loads(error.data)["err"]["transactionId"] == 3
    assert json.loads(error.data)["err"]["errorCode"] == 4
    assert isinstance(close, Close)


def test_a_client_that_vanishes_leaves_what_it_left_behind(live: LiveServer) -> None:
    with WebSocket(live) as watcher:
        watcher.ask({"subscribe": {"transactionId": 1, "key": "will", "unique": False, "liveOnly": True}})
        with WebSocket(live, greeted=False) as client:
            own = f"$SYS/clients/{client.next()['welcome']['clientId']}/lastWill"
            will = [{"key": "will", "value": "gone"}]
            assert "ack" in client.ask({"set": {"transactionId": 1, "key": own, "value": will}})
            assert client.ask({"get": {"transactionId": 2, "key": own.replace("lastWill", "protocol")}}) == {
                "state": {"transactionId": 2, "value": "WS"}
            }
        assert watcher.next() == {"state": {"transactionId": 1, "value": "gone"}}
