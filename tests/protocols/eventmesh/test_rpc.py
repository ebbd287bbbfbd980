"""The gRPC listener of EventMesh with clients that write HTTP/2 themselves: limits, deadlines, goodbyes, silence."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from babelbus.config import EventmeshSettings, ServerSettings
from babelbus.protocols.eventmesh.rpc import PING_SECONDS, RpcServer
from babelbus.protocols.eventmesh.service import EventmeshService
from babelbus.protocols.eventmesh.stubs import legacy_pb2
from babelbus.wire.http2.connection import GOODBYE
from tests.protocols.eventmesh.test_bad_streams import dial, streams
from tests.protocols.eventmesh.test_grpc import Events, Legacy
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    RawClient,
    Upload,
    block,
    body_of,
    call,
    frame,
    message,
    number,
)
from tests.support.server import LiveServer, configure

PACKAGE = "/eventmesh.common.protocol.grpc"
PUBLISH, REQUEST, LISTEN = (
    f"{PACKAGE}.{name}" for name in ("PublisherService/publish", "PublisherService/requestReply",
                                     "ConsumerService/subscribeStream")
)  # fmt: skip
LEGACY = Legacy(None)
CALM = 11
LONG_SECONDS = 1_000.0
"""The time for a handshake, of which nobody waits for the end: `LiveServer.skip` lets it be over."""


def serving(folder: Path, server: ServerSettings | None = None, **settings: Any) -> LiveServer:
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, **settings)
    return LiveServer(configure(folder, eventmesh=made, server=server))


def raw(live: LiveServer, **values: int) -> RawClient:
    return RawClient(live.server.addresses["eventmesh-grpc"], **values)


def read_to_end(client: MeshClient) -> None:
    with suppress(ConnectionResetError):
        while client.socket.recv(2**16):
            pass


def shared(live: LiveServer) -> RpcServer:
    found = live.server.services["eventmesh"]._rpc  # type: ignore[attr-defined]
    assert isinstance(found, RpcServer)
    return found


def publication(topic: str = "t", text: str = "x") -> bytes:
    encoded = LEGACY.publication(topic, text).SerializeToString()
    assert isinstance(encoded, bytes)
    return encoded


def listen(topic: str, group: str = "g", *, stream: int = 1) -> bytes:
    """A stream that subscribes to a topic."""
    asked = LEGACY.subscription(group, topic).SerializeToString()
    return frame(HEADERS, END_HEADERS, stream, block(path=LISTEN)) + frame(DATA, 0, stream, message(asked))


def code(client: RawClient, stream: int) -> str:
    client.until(HEADERS, stream, END_STREAM)
    answer = legacy_pb2.Response.FromString(body_of(client.came, stream)[5:])
    return str(answer.respCode)


def test_calls_of_one_connection_are_answered_whatever_else_is_open(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        upload = frame(HEADERS, END_HEADERS, 1, block(path=PUBLISH)) + frame(DATA, 0, 1, message(publication())[:20])
        calls = b"".join(call(stream, publication(), block(path=PUBLISH)) for stream in range(3, 103, 2))
        client.send(upload + calls)
        assert {code(client, stream) for stream in range(3, 103, 2)} == {"0"}
        client.send(frame(DATA, END_STREAM, 1, message(publication())[20:]))
        assert code(client, 1) == "0"
        assert client.status(1)["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("fields", "data", "status"),
    [
        (block(path="/a.B/c"), publication(), "12"),
        (block(path=PUBLISH), b"\xff\xff", "13"),
        (block(path=PUBLISH, grpc_encoding="snappy"), publication(), "12"),
    ],
)
def test_a_call_that_cannot_be_fails_alone(tmp_path: Path, fields: bytes, data: bytes, status: str) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.send(call(1, data, fields) + call(3, publication(), block(path=PUBLISH)))
        assert client.status(1)["grpc-status"] == status
        assert code(client, 3) == "0"


def test_a_message_of_a_stream_that_cannot_be_read_ends_the_stream(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, block(path=LISTEN)) + frame(DATA, 0, 1, message(b"\xff\xff")))
        assert client.status(1)["grpc-status"] == "13"
        assert streams(live) == []


def test_a_stream_of_a_client_that_sends_no_more_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.send(listen("t") + frame(DATA, END_STREAM, 1))
        assert client.status(1)["grpc-status"] == "0"
        assert len(body_of(client.came, 1)) > 5  # the subscription was answered
        live.until(lambda: not shared(live)._streams)


def test_compressed_calls_of_grpc_are_read(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        address = live.server.addresses["eventmesh-grpc"]
        with grpc.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
            for package in (Legacy(channel), Events(channel)):
                assert package.code(package.ask("publish", package.publication("t", "x" * 50_000))) == "0"
        with grpc.insecure_channel(address, compression=grpc.Compression.Deflate) as channel:
            legacy = Legacy(channel)
            with pytest.raises(grpc.RpcError) as caught:
                legacy.ask("publish", legacy.publication("t", "x" * 50_000))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_long_messages_go_both_ways_through_the_windows_of_grpc(tmp_path: Path) -> None:
    text = "0123456789" * 300_000
    with serving(tmp_path) as live:
        address = live.server.addresses["eventmesh-grpc"]
        with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 2**23)]) as channel:
            for package in (Legacy(channel), Events(channel)):
                with package.stream("g", "long") as stream:
                    answers = [
                        package._method("publish").future(package.publication("long", text), timeout=SAFETY_NET_SECONDS)
                        for _ in range(5)
                    ]
                    assert {package.code(answer.result()) for answer in answers} == {"0"}
                    assert all(stream.text() == text for _ in range(5))


def test_a_method_that_is_not_there_is_unimplemented(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/a.B/c")(b"", timeout=SAFETY_NET_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == "there is no such method"


# -- deadlines and cancelled calls -------------------------------------------------------------------------------------


def test_a_call_fails_when_its_deadline_has_passed(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel, raw(live) as client:
        with Legacy(channel).stream("s", "t", kind="SYNC") as silent:
            client.send(call(1, publication(), block(path=REQUEST, grpc_timeout="50m")))
            assert client.status(1)["grpc-status"] == "4"
            assert silent.text() == "x"
        client.send(call(5, publication(), block(path=PUBLISH, grpc_timeout="1H")))
        assert code(client, 5) == "0"
        assert live.call(lambda: [session._timers for session in shared(live).sessions if session._timers]) == []


def test_a_stream_ends_when_its_deadline_has_passed(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, block(path=LISTEN, grpc_timeout="50m")))
        assert client.status(1)["grpc-status"] == "4"
        assert streams(live) == []


def test_calls_that_the_client_cancels_are_no_longer_open(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel, dial(live, 1) as other:
        with Legacy(channel).stream("s", "t", kind="SYNC") as silent:
            future = Legacy(other)._method("requestReply").future(LEGACY.publication("t", "x"))
            assert silent.text() == "x"
            assert live.call(lambda: shared(live).limit.count) == 2
            future.cancel()
            live.until(lambda: shared(live).limit.count == 1)
        live.until(lambda: shared(live).limit.count == 0)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_client_that_opens_ten_thousand_streams_is_sent_away(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        opened = b"".join(frame(HEADERS, END_HEADERS, stream, block(path=LISTEN)) for stream in range(1, 20_001, 2))
        writing = threading.Thread(target=_write, args=(client, opened), daemon=True)
        writing.start()
        came = client.until_closed()
        writing.join(SAFETY_NET_SECONDS)
        goaway = next(one for one in came if one.kind == GOAWAY)
        assert goaway.payload[4:8] == CALM.to_bytes(4, "big")
        refused = [one for one in came if one.kind == RST_STREAM]
        assert 1000 < len(refused) < 5000
        live.until(lambda: not shared(live)._streams and shared(live).limit.count == 0)
        with raw(live) as other:
            other.send(call(1, publication(), block(path=PUBLISH)))
            assert code(other, 1) == "0"


def _write(client: RawClient, data: bytes) -> None:
    try:
        client.send(data)
    except OSError:
        pass  # the server has closed


def test_answers_for_which_a_client_gives_no_window_hold_streams_and_a_bound_of_bytes(tmp_path: Path) -> None:
    text = "x" * 300_000
    with (
        serving(tmp_path, ServerSettings(outbox_bytes_max=2**20)) as live,
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="s").listen("t", kind="SYNC") as responder,
        raw(live, window=0) as client,
    ):
        for stream in range(1, 41, 2):
            client.send(call(stream, publication(), block(path=REQUEST)))
            if stream < 9:
                header, body = responder.push()
                responder.send("RESPONSE_TO_SERVER", {**body, "body": text}, seq=header["seq"])
        assert client.status(39)["grpc-status"] == "8"
        assert client.status(39)["grpc-message"] == "the client does not read its answers"
        held = live.call(lambda: max(session._calls.answers.unsent_bytes for session in shared(live).sessions))
        assert 10**6 < held < 2 * 10**6
        client.grant(0, 2**24)
        for stream in (1, 3, 5, 7):
            client.grant(stream, 2**20)
            assert client.status(stream)["grpc-status"] == "0"
            assert len(body_of(client.came, stream)) > len(text)
        client.send(call(41, publication(), block(path=PUBLISH)))
        client.grant(41, 1000)
        assert code(client, 41) == "0"


def test_a_client_that_reads_no_bytes_holds_a_bound_of_them_and_its_group_goes_on(tmp_path: Path) -> None:
    text = "x" * 100_000
    with (
        serving(tmp_path, ServerSettings(outbox_bytes_max=2**20)) as live,
        raw(live, window=2**31 - 1) as stuck,
        dial(live) as channel,
    ):
        stuck.grant(0, 2**30)
        stuck.send(listen("t"))
        stuck.until(DATA, 1)
        legacy = Legacy(channel)
        for _ in range(300):
            legacy.ask("publish", legacy.publication("t", text))
        outboxes = live.call(lambda: max(one.outbox_bytes for one in live.connections))
        assert outboxes < 2**20 + 64 * 110_000
        (stream,) = streams(live)
        assert live.call(lambda: sum(len(one[1] or b"") for one in stream.waiting)) < 6 * 2**20
        stuck.socket.close()
        with legacy.stream("g", "t") as other:
            assert len(other.text()) == len(text)


def test_a_client_of_http_1_and_a_silent_one_are_closed(tmp_path: Path) -> None:
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, handshake_seconds=LONG_SECONDS)
    with LiveServer(configure(tmp_path, eventmesh=made), use_uvloop=False) as live:
        address = live.server.addresses["eventmesh-grpc"]
        with RawClient(address) as known:
            known.until(SETTINGS, 0, ACK)
            with MeshClient(address) as client:
                client.socket.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                read_to_end(client)
            live.until(lambda: len(live.connections) == 1)
            with MeshClient(address) as client:
                client.socket.sendall(b"PRI * HTTP/2.0\r\n")
                live.until(lambda: len(live.connections) == 2)
                live.skip(LONG_SECONDS)
                read_to_end(client)
            known.send(call(1, publication(), block(path=PUBLISH)))
            assert code(known, 1) == "0"


def test_a_long_upload_holds_no_more_than_its_bytes(tmp_path: Path) -> None:
    with serving(tmp_path) as live, Upload(live.server.addresses["eventmesh-grpc"], PUBLISH, 3_000_000) as client:
        client.sendall(bytes(2_000_000))
        sample = live.server.metrics.registry.get_sample_value
        live.until(lambda: 2_000_000 <= (sample("babelbus_unfinished_bytes") or 0) < 2_500_000)
        client.send(number(RST_STREAM, 1, 8) + frame(PING, payload=bytes(8)))
        client.until(PING, 0, ACK)
        live.until(lambda: sample("babelbus_unfinished_bytes") == 0)


# -- silence and goodbyes ----------------------------------------------------------------------------------------------


def test_a_silent_client_is_pinged_and_closed_if_it_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.until(SETTINGS, 0, ACK)
        (session,) = shared(live).sessions

        def wait(seconds: float) -> None:
            session._heard_at -= seconds
            if session._pinged_at is not None:
                session._pinged_at -= seconds
            session.tick()

        live.call(lambda: wait(live.config.eventmesh.idle_seconds + 1))
        client.until(PING)
        client.send(frame(PING, ACK, payload=b"babelbus") + call(1, publication(), block(path=PUBLISH)))
        assert code(client, 1) == "0"
        live.call(lambda: wait(PING_SECONDS + 1))
        live.call(lambda: wait(live.config.eventmesh.idle_seconds + 1))
        live.call(lambda: wait(PING_SECONDS + 1))
        assert [one.kind for one in client.until_closed()].count(PING) == 2


def test_a_server_that_stops_ends_streams_answers_calls_and_says_goodbye(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client, raw(live) as listening:
        listening.send(listen("t"))
        listening.until(DATA, 1)
        listening.send(frame(PING, ACK, 0, GOODBYE))  # nobody has asked for it yet
        head, body = frame(HEADERS, END_HEADERS, 1, block(path=PUBLISH)), message(publication())
        client.send(head + frame(DATA, 0, 1, body[:9]))
        live.until(lambda: shared(live).limit.count == 2)
        live.ask_to_stop()
        assert listening.status(1)["grpc-status"] == "0"
        listening.send(frame(PING, ACK, 0, GOODBYE))
        assert client.until(GOAWAY).payload == (2**31 - 1).to_bytes(4, "big") + bytes(4)
        client.send(call(3, publication(), block(path=PUBLISH)) + listen("t", stream=5))  # begun before it was heard
        assert code(client, 3) == "0"
        assert client.status(5)["grpc-status"] == "0"
        client.send(frame(PING, ACK, 0, GOODBYE))
        assert client.until(GOAWAY, number=1).payload == (5).to_bytes(4, "big") + bytes(4)
        client.send(call(7, publication(), block(path=PUBLISH)) + frame(DATA, END_STREAM, 1, body[9:]))
        assert code(client, 1) == "0"
        assert all(one.stream != 7 for one in client.until_closed())
        listening.until_closed()


def test_a_call_that_does_not_end_is_unavailable_when_the_server_stops(tmp_path: Path) -> None:
    with serving(tmp_path, ServerSettings(drain_seconds=0.2)) as live, raw(live) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, block(path=PUBLISH)))
        live.until(lambda: shared(live).limit.count == 1)
        live.ask_to_stop()
        assert client.status(1)["grpc-status"] == "14"
        client.until_closed()


def test_streams_go_on_until_the_client_has_heard_that_the_owner_of_a_cluster_goes(tmp_path: Path) -> None:
    with serving(tmp_path) as live, raw(live) as client:
        client.send(listen("t"))
        client.until(DATA, 1)
        service = live.server.services["eventmesh"]
        assert isinstance(service, EventmeshService)
        settling = threading.Thread(target=live.run, args=(service.settle,))
        settling.start()
        client.until(GOAWAY)
        client.send(call(3, publication(), block(path=PUBLISH)))
        assert code(client, 3) == "0"
        client.until(DATA, 1, number=1)
        client.send(frame(PING, ACK, 0, GOODBYE))
        assert client.until(GOAWAY, number=1).payload[:4] == (3).to_bytes(4, "big")
        settling.join(SAFETY_NET_SECONDS)
        assert not settling.is_alive()
        live.run(lambda: shared(live).stop(SAFETY_NET_SECONDS, reads=False))
        assert client.status(1)["grpc-status"] == "0"
