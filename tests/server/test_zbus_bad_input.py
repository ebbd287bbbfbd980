"""What the port of zbus does with bad input, through real sockets: each is answered, and nothing of it is done.

After each test the server is asked whether it goes on, whether a message came that should not have, and whether it
found a mistake of its own.
"""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import ZbusSettings
from babelbus.protocols.zbus.messages import Message
from babelbus.wire.websocket import encode_texts
from tests.support.server import LiveServer, configure
from tests.support.signing import sign_frame, sign_request
from tests.support.zbus import HttpClient, SocketClient, command, request_of

LONG_SECONDS = 1_000.0
"""The time for a handshake, of which nobody waits for the end: `LiveServer.skip` lets it be over."""
LIMIT = 65_536
SMUGGLED = request_of("POST", "/", b"", cmd="pub", mq="Q", id="smuggled")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = ZbusSettings(port=0, package_bytes_max=LIMIT)
    with LiveServer(configure(tmp_path_factory.mktemp("data"), zbus=settings)) as made:
        yield made


@pytest.fixture
def live(running: LiveServer, caplog: pytest.LogCaptureFixture) -> Iterator[LiveServer]:
    with SocketClient(running.server.addresses["zbus"]) as client:
        client.do("create", mq="Q", channel="C", mqType="disk")
        yield running
        assert client.do("pub", "last", mq="Q")["status"] == 200
        assert [one.get("body") for one in client.do("take", mq="Q", channel="C", window=9)["body"]] == ["last"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def web(live: LiveServer) -> Iterator[HttpClient]:
    with HttpClient(live.server.addresses["zbus"]) as client:
        yield client


@pytest.fixture
def client(live: LiveServer) -> Iterator[SocketClient]:
    with SocketClient(live.server.addresses["zbus"]) as connected:
        yield connected


def frame(opcode: int, payload: bytes, *, masked: bool = True, reserved: int = 0, final: bool = True) -> bytes:
    """A frame of up to 125 bytes, with a mask of zeros."""
    first = (0x80 if final else 0) | reserved << 4 | opcode
    return bytes((first, len(payload) | (0x80 if masked else 0))) + (bytes(4) if masked else b"") + payload


# -- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("content-length: 5\r\ncontent-length: 6", 400),
        ("content-length: 5, 6", 400),
        ("content-length: -1", 400),
        ("content-length: +5", 400),
        ("content-length: 0x5", 400),
        ("content-length: 5 5", 400),
        ("content-length: ５", 400),
        ("content-length:", 400),
        ("content-length: 65537", 413),
        ("content-length: 9223372036854775807", 413),
        ("content-length: " + "9" * 30, 413),
        ("content-length: 5\r\ntransfer-encoding: chunked", 400),
        ("transfer-encoding: chunked\r\ncontent-length: 5", 400),
        ("transfer-encoding: chunked, chunked", 400),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked", 400),
        ("transfer-encoding: chunked, identity", 400),
        ("transfer-encoding: gzip, chunked", 501),
        ("transfer-encoding: xchunked", 501),
        ("transfer-encoding: ", 400),
        ("transfer-encoding : chunked", 400),
        ("content-length : 5", 400),
        (" content-length: 5", 400),
        ("x: y\r\n folded: z", 400),
        ("x: y\r\n\tfolded", 400),
        ("x: y\nz: smuggled", 400),
        ("x: a\0b", 400),
        ("x: a\rb", 400),
        ("no header", 400),
        (": no name", 400),
        ("na me: x", 400),
        ("host: other", 400),
        ("expect: something", 417),
    ],
)
def test_a_request_that_two_readers_could_understand_differently_is_refused_with_all_behind_it(
    web: HttpClient, lines: str, status: int
) -> None:
    web.send(f"POST / HTTP/1.1\r\nhost: localhost\r\ncmd: pub\r\nmq: Q\r\n{lines}\r\n\r\nhello".encode() + SMUGGLED)
    assert web.next().status == status
    assert web.is_closed()


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nhello\r\n0 0\r\n\r\n",
        b"-1\r\nx\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\nno trailer\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"\r\nhello",
        b"5;" + b"x" * 70_000,
    ],
)
def test_chunks_that_are_none_are_refused(web: HttpClient, body: bytes) -> None:
    web.send(b"POST / HTTP/1.1\r\nhost: h\r\ncmd: pub\r\nmq: Q\r\ntransfer-encoding: chunked\r\n\r\n" + body)
    assert web.next().status in (400, 413)
    assert web.is_closed()


def test_chunks_of_more_than_a_message_may_have_are_refused(web: HttpClient) -> None:
    chunk = b"8000\r\n%b\r\n" % bytes(0x8000)
    web.send(b"POST / HTTP/1.1\r\nhost: h\r\ncmd: pub\r\nmq: Q\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 2)
    web.send(b"1\r\nx\r\n0\r\n\r\n")
    assert web.next().status == 413


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # how TLS begins
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1 x\r\nhost: h\r\n\r\n", 400),
        (b"GET nowhere HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"G\xe9T / HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: h\n\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /%s HTTP/1.1\r\nhost: h\r\n\r\n" % (b"x" * 70_000), 414),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: %s\r\n\r\n" % (b"y" * 70_000), 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\n%s\r\n" % b"".join(b"x%d: y\r\n" % at for at in range(10_000)), 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\n%s\r\n" % (b"x: y\r\n" * 10_000), 431),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 426),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: x, WebSocket\r\nsec-websocket-version: 13\r\n\r\n", 426),
        (
            b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: short\r\n\r\n",
            400,
        ),
        (
            b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 8\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n",
            426,
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_request_is_answered_and_closed(web: HttpClient, data: bytes, status: int) -> None:
    web.send(data + SMUGGLED)
    assert web.next().status == status
    assert web.is_closed()


def test_more_headers_than_a_message_may_have_are_refused_and_the_connection_stays(web: HttpClient) -> None:
    answer = web.ask("POST", "/", b"x", cmd="pub", mq="Q", id="i", **{f"x{at}": "y" for at in range(100)})
    assert (answer.status, answer.headers["id"]) == (400, "i")
    assert web.do("query", mq="Q").status == 200


def test_a_request_that_wants_to_become_something_else_than_a_websocket_stays_http(web: HttpClient) -> None:
    headers = {"upgrade": "h2c, xwebsocket", "connection": "upgrade, http2-settings"}
    web.send(request_of("GET", "/?cmd=query", id="1", **headers) + request_of(cmd="query", id="2"))
    assert [web.next().headers["id"] for _ in range(2)] == ["1", "2"]


def test_what_came_whole_before_a_bad_request_is_done_and_answered(web: HttpClient) -> None:
    web.send(request_of(cmd="create", mq="made", id="1") + request_of(cmd="query", mq="made", id="2") + b"bad\r\n\r\n")
    assert [(one.status, one.headers.get("id")) for one in (web.next(), web.next(), web.next())] == [
        (200, "1"),
        (200, "2"),
        (400, None),
    ]


@pytest.mark.parametrize("cut", [1, 20, 60, -3, -1])
def test_of_a_request_that_is_not_sent_whole_nothing_is_done(web: HttpClient, cut: int) -> None:
    web.send(request_of("POST", "/", b"never", cmd="pub", mq="Q")[:cut])
    web.socket.shutdown(socket.SHUT_WR)
    assert web.is_closed()


def test_http_1_0_is_answered_and_closed_unless_it_asks_to_stay(web: HttpClient) -> None:
    requests = [
        b"POST / HTTP/1.0\r\ncmd: query\r\nid: %d\r\nconnection: Keep-Alive\r\ncontent-length: 1\r\n\r\nx" % at
        for at in range(20)
    ]
    web.send(b"".join(requests))
    found = [web.next() for _ in requests]
    assert [(one.headers["id"], one.headers["connection"]) for one in found] == [
        (str(at), "keep-alive") for at in range(20)
    ]
    web.send(b"GET /?cmd=query HTTP/1.0\r\nid: last\r\n\r\n" + SMUGGLED)
    last = web.next()
    assert (last.headers["id"], last.headers["connection"]) == ("last", "close")
    assert web.is_closed()


def test_a_request_may_come_byte_by_byte(web: HttpClient) -> None:
    web.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in request_of("POST", "/", b"[]", cmd="create", mq="made", content_type="text/plain"):
        web.send(bytes((byte,)))
    assert web.next().status == 200


def test_a_client_that_sends_no_whole_request_in_time_is_closed(tmp_path: Path) -> None:
    config = configure(tmp_path, zbus=ZbusSettings(port=0, handshake_seconds=LONG_SECONDS))
    with (
        LiveServer(config, use_uvloop=False) as live,
        HttpClient(live.server.addresses["zbus"]) as half,
        HttpClient(live.server.addresses["zbus"]) as silent,
        SocketClient(live.server.addresses["zbus"]) as good,
    ):
        half.send(b"POST / HTTP/1.1\r\nhost: h\r\ncmd: pub\r\n")
        assert good.do("query")["status"] == 200
        live.until(lambda: len(live.connections) == 3)
        live.skip(LONG_SECONDS)
        assert half.is_closed()
        assert silent.is_closed()
        assert good.do("query")["status"] == 200


@pytest.mark.parametrize(
    ("url", "headers", "status", "text"),
    [
        ("/", {"cmd": "unsub", "mq": "Q", "channel": "C"}, 404, b"Command(unsub) Not Found"),
        ("/", {"cmd": "produce", "mq": "Q"}, 404, b"Command(produce) Not Found"),
        ("/", {"cmd": ""}, 404, b"Command() Not Found"),
        ("/", {"cmd": "sub", "mq": "Q", "channel": "C"}, 400, b"nothing can be pushed"),
        ("/", {"cmd": "take", "mq": "Q", "channel": "C", "window": "9" * 20}, 400, b"window is no integer"),
        ("/", {"cmd": "take", "mq": "Q", "channel": "C", "window": "ten"}, 400, b"window is no integer: ten"),
        ("/", {"cmd": "take", "mq": "Q", "channel": "C", "window": str(2**63 - 1)}, 604, b"[]"),
        ("/", {"cmd": "take", "mq": "Q", "channel": "C", "window": str(-(2**63))}, 604, b"[]"),
        ("/", {"cmd": "create", "mq": "Q", "channel": "C", "offset": "1.5"}, 400, b"offset is no integer"),
        ("/", {"cmd": "create", "mq": "a" * 300}, 400, b""),
        ("/", {"cmd": "create", "mq": "Q", "channel": "C", "filter": "x" * 5000}, 400, b"a filter of 5000"),
        ("/", {"cmd": "pub", "mq": "Q", "content_type": "text/plain; charset=nix"}, 400, b"unknown charset"),
        ("/", {"cmd": "pub", "mq": "Q", "content_type": "text/plain; charset=ascii"}, 400, b"body is no ascii"),
        ("/", {"cmd": "pub", "mq": "Q", "content_type": "text/plain"}, 400, b"body is no UTF-8"),
        ("/", {"cmd": "pub", "mq": "Q", "content_type": "multipart/form-data"}, 400, b"multipart: no boundary"),
        ("/", {"cmd": "bind", "mq": "Q", "content_type": "application/octet-stream"}, 400, b"bind command"),
        ("/%zz", {}, 400, b"the target is no url"),
        ("/nowhere", {}, 404, b"/nowhere Not Found"),
        ("/?" + "&".join(["a=b"] * 101) + "&cmd=query", {}, 400, b"more than 100 parameters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_command_that_cannot_be_done_says_why_and_the_connection_stays(
    web: HttpClient, url: str, headers: dict[str, str], status: int, text: bytes
) -> None:
    answer = web.ask("POST", url, b"\xff", id="i", **headers)
    assert (answer.status, answer.headers["id"]) == (status, "i")
    assert text in answer.body
    assert web.do("query", mq="Q").status == 200


@pytest.mark.parametrize("cmd", ["ping", "PING"])
def test_ping_over_http_is_answered_with_nothing(web: HttpClient, cmd: str) -> None:
    answer = web.do(cmd)
    assert (answer.status, answer.body) == (200, b"")


# -- WebSocket -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b"{}{}",
        b'{"headers":1}',
        b'{"headers":[]}',
        b'{"headers":{"cmd":{}}}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":nope}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":NaN}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":[1,]}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":"\xff"}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":["\xff"]}',
        b'{"headers":{"cmd":"pub","mq":"Q","x":"\\ud800"},"body":1}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":"\\ud800"}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"status":1}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"status":"x"}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"url":{}}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"[" * 60_000,
        json.dumps(command("pub", 1, mq="Q", **{f"x{at}": "y" for at in range(4_000)})).encode(),
    ],
    ids=lambda text: repr(text)[:60],
)
def test_a_frame_that_is_no_message_is_answered_with_400_and_the_connection_stays(
    client: SocketClient, text: bytes
) -> None:
    for count in (1, 5):  # one by one, and as a run
        client.send(b"".join([frame_of(text)] * count))
        assert [client.next()["status"] for _ in range(count)] == [400] * count
    assert client.do("query", mq="Q", id="i")["headers"]["id"] == "i"


def frame_of(text: bytes) -> bytes:
    """A masked frame: of text if it is one, else of bytes, which may say anything."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return frame(2, text)
    return encode_texts([text], mask=True)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(1, b"{}", masked=False), 1002),
        (frame(1, b"{}", reserved=4), 1002),
        (frame(3, b""), 1002),
        (frame(0, b"x"), 1002),
        (frame(9, b"", final=False), 1002),
        (frame(8, b"\x00"), 1002),
        (frame(1, b"\xff"), 1007),
        (b"\x81\xff" + (LIMIT + 1).to_bytes(8, "big") + bytes(4), 1009),
        (b"\x81\xff" + (2**63 - 1).to_bytes(8, "big") + bytes(4), 1009),
        (b"\x81\xff" + (2**64 - 1).to_bytes(8, "big") + bytes(4), 1002),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_frame_that_breaks_the_protocol_closes_the_connection_and_nothing_behind_it_is_done(
    client: SocketClient, data: bytes, code: int
) -> None:
    client.send(data + encode_texts([json.dumps(command("pub", "smuggled", mq="Q")).encode()], mask=True))
    with pytest.raises(ConnectionResetError):
        client.next()
    assert client.close_code == code


def test_messages_in_pieces_and_as_binary_are_messages_and_a_ping_gets_its_pong(client: SocketClient) -> None:
    text = json.dumps(command("query", mq="Q", id="i")).encode()
    client.send(frame(1, text[:9], final=False) + frame(9, b"hi") + frame(0, text[9:]) + frame(2, text))
    assert [client.next()["headers"]["id"] for _ in range(2)] == ["i", "i"]
    assert client.pongs == [b"hi"]


@pytest.mark.parametrize("cut", [1, 5, -1])
def test_of_a_frame_that_is_not_sent_whole_nothing_is_done(client: SocketClient, cut: int) -> None:
    client.send(encode_texts([json.dumps(command("pub", 1, mq="Q")).encode()], mask=True)[:cut])
    client.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        client.next()


# -- signatures ------------------------------------------------------------------------------------------------------


def signed(secret: str = "secret", **headers: str) -> dict[str, Any]:
    return {"headers": sign_frame(Message(headers), "key", secret).headers}


def test_wrong_and_replayed_signatures_are_refused_and_nothing_is_done(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key secret\nempty-is-none x\n")
    keys.chmod(0o600)
    settings = ZbusSettings(port=0, auth_file=str(keys), replay_window_seconds=3600)
    with (
        LiveServer(configure(tmp_path / "data", zbus=settings)) as live,
        SocketClient(live.server.addresses["zbus"]) as client,
        HttpClient(live.server.addresses["zbus"]) as web,
    ):
        create = signed(cmd="create", mq="Q", channel="C", mqType="disk", id="1")
        client.say_all([create])
        assert client.next()["status"] == 200
        altered = {"headers": {**create["headers"], "mq": "R"}}
        added = {**signed(cmd="create", mq="R", id="2"), "body": 1}
        cases = [
            (create, "signature mismatched"),  # again
            (altered, "signature mismatched"),
            (added, "signature mismatched"),
            (signed("wrong", cmd="create", mq="R", id="3"), "signature mismatched"),
            ({"headers": {"cmd": "create", "mq": "R", "id": "4"}}, "missing apiKey in request"),
            ({"headers": {"cmd": "create", "mq": "R", "id": "5", "apiKey": "key"}}, "missing signature in request"),
            (
                {"headers": {"cmd": "create", "mq": "R", "id": "6", "apiKey": "nobody", "signature": "00"}},
                "apiKey not exists",
            ),
            ({"headers": {"cmd": "create", "mq": "R", "apiKey": "key", "signature": "é"}}, "signature mismatched"),
        ]
        for message, text in cases:
            client.say_all([message])
            answer = client.next()
            assert (answer["status"], answer["body"]) == (403, text)
            assert answer["headers"].get("id") == message["headers"].get("id")
        names = "body,h.cmd,h.mq,h.id"
        proof = sign_request(Message({"cmd": "create", "mq": "S", "id": "7"}, "/", "POST"), "key", "secret", names)
        assert [web.ask("POST", "/", **proof.headers).status for _ in range(2)] == [200, 403]
        whole = sign_request(Message({"cmd": "create", "mq": "T", "id": "9"}, "/", "POST"), "key", "secret", "body,h.*")
        assert web.ask("POST", "/", **whole.headers).status == 403  # there are headers that it did not sign
        for more in ({"mqMask": "1"}, {"mqtype": "disk"}):
            assert web.ask("POST", "/", **proof.headers, **more).status == 403
        assert web.ask("POST", "/", b"body", **proof.headers).status == 403
        client.say_all([signed(cmd="query", id="8")])
        assert [queue["name"] for queue in client.next()["body"]] == ["Q", "S"]
