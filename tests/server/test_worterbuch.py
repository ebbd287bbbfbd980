"""Wörterbuch on real sockets: hostile bytes, clients that do not read, WebSocket's own rules, compression, tokens."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from babelbus.config import Config, StateSettings, WorterbuchSettings
from babelbus.protocols.worterbuch.service import WorterbuchService
from babelbus.wire.websocket import Close, Ping, encode_close, encode_texts
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer, configure
from tests.support.web import SECRET, WebSocket, token
from tests.support.websocket import encode_binaries, encode_ping
from tests.support.worterbuch import ack, get, named, psubscribe, put, state, subscribe


def serve(folder: Path, *, ack: str = "written", **options: Any) -> LiveServer:
    made = configure(folder / "data", worterbuch=WorterbuchSettings(port=0, tcp_port=0, **options))
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return LiveServer(Config(**{**fields, "state": StateSettings(ack=ack)}))  # type: ignore[arg-type]  # one of three


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("w"), message_bytes_max=100_000) as server:
        yield server


class Lines:
    """A TCP client that says anything."""

    def __init__(self, live: LiveServer, *, receive_bytes: int | None = None, greeted: bool = True) -> None:
        host, _, port = live.server.addresses["worterbuch-tcp"].rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(SAFETY_NET_SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect((host, int(port)))
        self.file = self.socket.makefile("rb")
        if greeted:
            self.client_id = self.next()["welcome"]["clientId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.file.close()
        self.socket.close()

    def next(self) -> Any:
        line = self.file.readline()
        assert line, "closed"
        return json.loads(line)

    def say(self, *messages: object) -> None:
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def ask(self, message: object) -> Any:
        self.say(message)
        return self.next()

    def rest(self) -> bytes:
        """Everything until the server closes."""
        try:
            return self.file.read()
        except ConnectionResetError:
            return b""


def is_fine(live: LiveServer) -> bool:
    """Whether a new client is served."""
    with Lines(live) as client:
        return bool(client.ask(put(1, "fine", 1)) == ack(1))


@given(st.lists(st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode)), max_size=5))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_cost_their_own_connection_at_the_most(live: LiveServer, pieces: list[bytes]) -> None:
    with Lines(live) as client, Lines(live) as other:
        client.socket.sendall(b"\n".join(pieces))
        client.socket.shutdown(socket.SHUT_WR)
        client.rest()
        assert other.ask(put(1, "k", 1)) == ack(1)


@given(st.binary(max_size=300))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_after_an_upgrade_cost_their_own_connection_at_the_most(live: LiveServer, garbage: bytes) -> None:
    with WebSocket(live) as client:
        client.socket.sendall(garbage)
        client.socket.shutdown(socket.SHUT_WR)
        client.rest()
    assert is_fine(live)


def test_hostile_lines_cost_their_own_connection(live: LiveServer) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    for hostile in (
        b'{"set":{"transactionId":1,"key":"k","value":%b}}\n' % deep,
        b"[" * 50_000 + b"\n",
        b"x" * 100_001,
        b'{"get":{"transactionId":1,"key":"k"},"get":{"transactionId":2,"key":"k"}}\n',
        b"\x00\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with Lines(live) as client:
            client.socket.sendall(hostile)
            assert b"ack" not in client.rest()
    assert is_fine(live)


def test_requests_before_a_mistake_are_done_and_answered(live: LiveServer) -> None:
    with Lines(live) as client:
        client.socket.sendall(b'{"set":{"transactionId":1,"key":"before","value":1}}\nnonsense\n')
        assert client.next() == ack(1)
        assert client.rest() == b""
    with WebSocket(live) as web:
        web.socket.sendall(
            encode_texts([b'{"set":{"transactionId":1,"key":"before","value":2}}', b"nonsense"], mask=True)
        )
        assert web.next() == ack(1)
        assert web.event() == Close(1008, "")
        web.say(get(2, "before"))
        assert web.rest() == b""
    with Lines(live) as client:
        assert client.ask(get(1, "before")) == state(1, 2)


def test_a_request_that_may_not_be_made_is_answered_and_closes_a_websocket_in_order(live: LiveServer) -> None:
    with WebSocket(live) as web:
        web.say(put(1, "a", 1), {"transform": {"transactionId": 2, "key": "a", "template": 1}}, put(3, "a", 2))
        assert web.next() == ack(1)
        assert web.next()["err"]["errorCode"] == 19
        assert web.event() == Close(1008, "")
    with Lines(live) as client:
        assert client.ask(get(1, "a")) == state(1, 1)


def test_websocket_takes_pings_and_fragments_ignores_binaries_and_closes_politely(live: LiveServer) -> None:
    with WebSocket(live) as web:
        text = json.dumps(put(1, "größe", "ü")).encode()
        whole = encode_texts([text], mask=False)
        assert whole[0] == 0x81
        first, second = text[:20], text[20:]
        frames = b"".join(
            bytes([head, 0x80 | len(part)]) + bytes(4) + part for head, part in ((0x01, first), (0x80, second))
        )
        web.socket.sendall(encode_ping(b"are you there", mask=True) + encode_binaries([b"\x00"], mask=True) + frames)
        heard = [web.event(), web.event()]
        assert not any(isinstance(one, Ping) for one in heard)
        web.socket.sendall(encode_close(1000, mask=True))
        assert web.event() == Close(1000, "")
    with Lines(live) as client:
        assert client.ask(get(1, "größe")) == state(1, "ü")


def test_an_unmasked_frame_is_refused(live: LiveServer) -> None:
    with WebSocket(live) as web:
        web.socket.sendall(encode_texts([json.dumps(put(1, "unmasked", 1)).encode()], mask=False))
        event = web.event()
        assert isinstance(event, Close)
        assert event.code == 1002
    with Lines(live) as client:
        assert client.ask(get(1, "unmasked"))["err"]["errorCode"] == 5


def test_many_texts_in_one_chunk_are_answered_one_by_one_and_in_order(live: LiveServer) -> None:
    messages = [put(number, f"n/{number}", number) for number in range(100)]
    messages[50] = get(50, "n/3")
    with WebSocket(live) as web:
        web.say(*messages)
        assert [web.next() for _ in messages] == [state(50, 3) if n == 50 else ack(n) for n in range(100)]
        web.socket.sendall(
            encode_texts(
                [b'{"set":{"transactionId":%d,"key":"k",\n"value":[1,\n2]}}' % n for n in range(20)], mask=True
            )
        )
        assert [web.next() for _ in range(20)] == list(map(ack, range(20)))
    with Lines(live) as client:
        assert client.ask(get(1, "k")) == state(1, [1, 2])  # in one line
        client.socket.sendall(b'{"get":{"transactionId":1,"key":"k"}}\r\n\r\n\n')
        assert client.next() == state(1, [1, 2])


def test_values_beyond_ascii_leave_in_ascii_on_tcp_and_as_they_are_on_websocket(live: LiveServer) -> None:
    with Lines(live) as client, WebSocket(live) as web:
        web.ask(put(1, "ü", "größe \U0001f600"))
        client.socket.sendall(b'{"pGet":{"transactionId":1,"requestPattern":"\\u00fc"}}\n')
        line = client.file.readline()
        assert line.isascii()
        assert json.loads(line)["pState"]["keyValuePairs"] == [{"key": "ü", "value": "größe \U0001f600"}]
        assert web.ask(get(2, "ü")) == state(2, "größe \U0001f600")


@pytest.mark.parametrize("slow", ["disconnect", "discard"])
def test_a_client_that_does_not_read_is_no_matter_of_the_others(tmp_path: Path, slow: str) -> None:
    with (
        serve(tmp_path, slow=slow, queue_bytes_max=2**16) as live,
        Lines(live, receive_bytes=4096) as stuck,
        Lines(live) as fine,
        Lines(live) as talker,
    ):
        for one in (stuck, fine):
            assert one.ask(psubscribe(1, "k", liveOnly=True)) == ack(1)
        value = "x" * 10_000
        connections = live.connections
        service = live.server.services["worterbuch"]
        assert isinstance(service, WorterbuchService)
        hub = service.hub

        def queued() -> int:
            return max(one.outbox_bytes for one in connections)

        for number in range(1500):
            assert talker.ask(put(number, "k", [number, value])) == ack(number)
            pair = fine.next()["pState"]["keyValuePairs"][0]
            assert pair["value"][0] == number
            if number % 100 == 0:
                assert live.call(queued) < 2**18
        sample = live.server.metrics.registry.get_sample_value
        labels = {"protocol": "worterbuch", "reason": "slow"}
        assert (live.call(lambda: sample("babelbus_live_dropped_total", labels)) or 0) > 0
        if slow == "disconnect":
            live.until(lambda: stuck.client_id not in hub.clients)
            assert talker.client_id in hub.clients
        else:
            begun = [stuck.next()["pState"]["keyValuePairs"][0]["value"][0] for _ in range(3)]
            assert begun == [0, 1, 2]


def test_a_client_that_vanishes_gives_its_locks_to_the_next_and_leaves_its_will(live: LiveServer) -> None:
    with Lines(live) as waiter:
        with Lines(live) as victim:
            victim.ask(named("lock", 1, "l"))
            victim.ask(put(2, f"$SYS/clients/{victim.client_id}/lastWill", [{"key": "will", "value": "gone"}]))
            waiter.ask(subscribe(1, "will", liveOnly=True))
            waiter.say(named("acquireLock", 2, "l"))
            waiter.ask(put(3, "barrier", 1))
        assert sorted(map(str, (waiter.next(), waiter.next()))) == sorted(map(str, (ack(2), state(1, "gone"))))


def test_compressed_messages_leave_in_the_order_in_which_they_were_compressed(tmp_path: Path) -> None:
    with (
        serve(tmp_path, ack="flushed", deflate=True) as live,
        WebSocket(live, deflate=True) as web,
        Lines(live) as other,
    ):
        assert web.deflate is not None
        assert not web.deflate.server_no_context_takeover
        web.ask(psubscribe(1, "?", liveOnly=True))
        value = [f"some words that come again and again, {number}" for number in range(10)]
        for number in range(50):
            # Answers that wait for the disk, events of others, and snapshots, all of them in one stream.
            other.say(put(number, "o", [number, value]))
            web.say(put(1000 + number, "w", [number, value]), subscribe(2000 + number, "w"), get(3000 + number, "w"))
        found = [web.next() for _ in range(50)]
        while not any(one.get("state", {}).get("transactionId") == 3049 for one in found):
            found.append(web.next())
        answers = [one for one in found if one.get("state", {}).get("transactionId", 0) >= 3000]
        assert [one["state"]["value"] for one in answers] == [[number, value] for number in range(50)]


def test_tokens_decide_what_real_clients_may_do(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    with serve(tmp_path, auth_key_file=str(tmp_path / "key")) as live:
        with Lines(live) as client:
            assert client.ask({"protocolSwitchRequest": {"version": 1}}) == ack(0)
            granted = {"authorizationRequest": {"authToken": token({"read": ["a/?"], "write": ["a/#"]})}}
            assert client.ask(granted) == {"authorized": {"transactionId": 0}}
            assert client.ask(put(1, "a/b", 1)) == ack(1)
            assert client.ask(get(2, "a/b")) == state(2, 1)
            assert client.ask(put(3, "b", 1))["err"]["errorCode"] == 14
            assert client.ask({"delete": {"transactionId": 4, "key": "a/b"}})["err"]["errorCode"] == 14
        with Lines(live) as client:
            client.say(get(1, "a/b"))
            assert client.next()["err"]["errorCode"] == 11
            assert client.rest() == b""


def test_endpoints_of_old_versions_are_where_the_settings_put_them(tmp_path: Path) -> None:
    with serve(tmp_path, more_endpoints="tcp:0=0.6 /ws/0.10=0.10 /ws/old=0.3:.*>") as live:
        with WebSocket(live, "/ws/0.10", greeted=False) as web:
            assert web.next()["welcome"]["info"]["protocolVersion"] == "0.10"
        with WebSocket(live, "/ws/old", greeted=False) as web:
            shake = {"supportedProtocolVersions": [{"major": 0, "minor": 3}], "lastWill": [], "graveGoods": []}
            answer = web.ask({"handshakeRequest": shake})["handshake"]
            assert (answer["separator"], answer["wildcard"], answer["multiWildcard"]) == (".", "*", ">")
            assert web.ask(put(1, "a.b", 1)) == ack(1)
        with Lines(live) as client:
            assert client.ask(get(1, "a/b")) == state(1, 1)


def test_a_client_that_shows_no_token_where_one_is_needed_is_closed_in_time(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    with serve(tmp_path, auth_key_file=str(key), handshake_seconds=0.2) as live, Lines(live) as silent:
        assert silent.file.readline() == b""
