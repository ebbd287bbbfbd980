"""EventMesh over gRPC on bad days: too many streams, too large messages, clients that stop reading or are cut off."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from babelbus.client import BlockingClient
from babelbus.config import EventmeshSettings, ServerSettings
from babelbus.core.access import SERVER
from babelbus.protocols.eventmesh.stubs import legacy_pb2
from babelbus.wire.http2 import ENHANCE_YOUR_CALM
from tests.protocols.eventmesh.test_grpc import IDENTITY, Events, Legacy, Package
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.http2 import END_HEADERS, HEADERS, RawClient, block, frame, message
from tests.support.server import LiveServer, configure


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[LiveServer]:
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, **settings)  # type: ignore[arg-type]
    with LiveServer(configure(folder, eventmesh=made)) as live:
        yield live


def dial(live: LiveServer, number: int = 0) -> grpc.Channel:
    """A connection of its own for each number: gRPC shares those with equal options."""
    return grpc.insecure_channel(
        live.server.addresses["eventmesh-grpc"], options=[("number", number), ("grpc.use_local_subchannel_pool", 1)]
    )


def streams(live: LiveServer) -> list[Any]:
    return live.call(lambda: list(live.server.services["eventmesh"]._rpc._streams))  # type: ignore[attr-defined]


def test_all_connections_together_have_a_bound_of_streams(tmp_path: Path) -> None:
    with serving(tmp_path, calls_max=3) as live, ExitStack() as stack:
        channels = [stack.enter_context(dial(live, number)) for number in range(4)]
        for channel in channels[:3]:
            stack.enter_context(Legacy(channel).stream("g", "t"))
        legacy = Legacy(channels[3])
        with pytest.raises(grpc.RpcError) as caught:
            legacy.ask("publish", legacy.publication("t", "x"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(streams(live)) == 3
        with MeshClient(live.server.addresses["eventmesh-tcp"]).hello() as client:
            assert client.publish("t", "x")["code"] == 0  # other transports go on


def test_one_connection_has_a_bound_of_streams(tmp_path: Path) -> None:
    with serving(tmp_path, streams_max=2) as live, dial(live) as channel:
        legacy = Legacy(channel)
        with legacy.stream("a", "t"), ExitStack() as second:
            second.enter_context(legacy.stream("b", "t"))
            waiting = legacy._method("publish").future(legacy.publication("t", "x"), timeout=SAFETY_NET_SECONDS)
            assert len(streams(live)) == 2
            assert not waiting.done()
            second.close()
            assert legacy.code(waiting.result()) == "0"


@pytest.mark.parametrize("package", [Legacy, Events])
def test_a_stream_with_as_many_subscriptions_as_it_may_have_changes_one_of_them(
    tmp_path: Path, package: type[Package]
) -> None:
    with serving(tmp_path, subscriptions_max=2) as live, dial(live) as channel:
        events = package(channel)
        with events.stream("g", "a") as stream:
            for topic, kind in (("b", "ASYNC"), ("a", "SYNC")):
                stream.say(events.subscription("g", topic, kind=kind))
                assert events.is_acknowledgement(stream.next())
            broker = live.server.broker
            live.call(lambda: broker.request("a", b"?", (), broker.responders.deadline(1e4), SERVER))
            assert stream.text() == "?"
            stream.say(events.subscription("g", "c"))
            assert not events.is_acknowledgement(stream.next())
        assert live.call(lambda: broker.find_topic("c")) is None


def test_a_message_over_the_limit_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_bytes_max=100_000) as live, dial(live) as channel:
        for package in (Legacy(channel), Events(channel)):
            assert package.code(package.ask("publish", package.publication("t", "x" * 90_000))) == "0"
            with pytest.raises(grpc.RpcError) as caught:
                package.ask("publish", package.publication("t", "x" * 110_000))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_client_that_stops_reading_holds_a_bound_of_bytes_and_others_go_on(tmp_path: Path) -> None:
    text = "x" * 500_000
    with serving(tmp_path) as live, dial(live) as channel, dial(live, 1) as other:
        legacy = Legacy(channel)
        with legacy.stream("stuck", "large") as stuck, Legacy(other).stream("reads", "large") as reads:
            for _ in range(30):
                assert legacy.code(legacy.ask("publish", legacy.publication("large", text))) == "0"
                assert len(reads.text()) == len(text)
            waiting = [sum(len(one[1]) for one in stream.waiting) for stream in streams(live)]
            assert max(waiting) < 6 * 2**20
            assert [len(stuck.text()) for _ in range(30)] == [len(text)] * 30


@pytest.mark.parametrize("mode", ["CLUSTERING", "BROADCASTING"])
@pytest.mark.parametrize("where", ["payload", "headers"])
def test_a_stream_that_is_never_read_holds_a_bound_of_bytes_whatever_they_are(
    tmp_path: Path, mode: str, where: str
) -> None:
    size = 500_000
    payload, headers = (b"x" * size, ()) if where == "payload" else (b"", ((b"wide", b"x" * size),))
    with (
        serving(tmp_path) as live,
        dial(live) as channel,
        BlockingClient(live.address, identity=live.admin) as jebp,
        Legacy(channel).stream("stuck", "unread", mode),
    ):
        for _ in range(30):
            jebp.publish("unread", payload, headers=headers)
        (stream,) = streams(live)
        waiting = live.call(lambda: [len(one[1]) + sum(len(value) for _, value in one[2]) for one in stream.waiting])
        assert sum(waiting) < 6 * 2**20


def test_a_client_that_subscribes_and_reads_no_answers_holds_a_bound_of_answers(tmp_path: Path) -> None:
    topic = "t" * 200
    with serving(tmp_path) as live, dial(live) as channel:
        events = Events(channel)
        asked: queue.Queue[Any] = queue.Queue()
        call = events._method("subscribeStream")(iter(asked.get, None), timeout=SAFETY_NET_SECONDS)
        for _ in range(2000):
            asked.put(events.subscription("g", topic))
        assert all(events.is_acknowledgement(next(call)) for _ in range(2000))
        asked.put(None)
        call.cancel()


def test_empty_messages_behind_answers_that_are_not_read_have_a_bound(tmp_path: Path) -> None:
    path = "/eventmesh.common.protocol.grpc.ConsumerService/subscribeStream"
    config = configure(tmp_path, server=ServerSettings(unfinished_bytes_max=2**20))
    with LiveServer(config) as live, RawClient(live.server.addresses["eventmesh-grpc"], window=0) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, block(path=path)))
        client.upload(1, message(b"") * 3000)
        assert client.until_closed()[-1].number == ENHANCE_YOUR_CALM


def test_a_stream_that_is_cut_gives_back_what_it_was_not_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        with dial(live) as channel, Legacy(channel).stream("g", "cut"):
            pass
        live.until(lambda: not live.server.services["eventmesh"]._rpc._streams)  # type: ignore[attr-defined]
        with dial(live, 1) as channel:
            legacy = Legacy(channel)
            legacy.ask("publish", legacy.publication("cut", "x"))
            with legacy.stream("g", "cut") as stream:
                assert stream.text() == "x"


@pytest.mark.parametrize("package", [Legacy, Events])
def test_a_stream_whose_topic_was_removed_is_told_by_its_heartbeat_and_subscribes_again(
    tmp_path: Path, package: type[Package]
) -> None:
    with serving(tmp_path) as live, dial(live) as channel:
        client, broker = package(channel), live.server.broker
        with client.stream("g", "gone") as stream:
            assert client.code(client.ask("heartbeat", client.heartbeat("g", "gone"))) == "0"
            live.call(lambda: broker.remove_topic("gone", principal=SERVER))
            live.until(lambda: broker.find_topic("gone") is None)
            assert client.code(client.ask("heartbeat", client.heartbeat("g", "gone"))) == "30"
            stream.say(client.subscription("g", "gone"))
            assert client.is_acknowledgement(stream.next())
            client.ask("publish", client.publication("gone", "x"))
            assert stream.text() == "x"


def test_a_server_that_stops_completes_its_streams(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel, Legacy(channel).stream("g", "t") as stream:
        live.ask_to_stop()
        with pytest.raises(StopIteration):
            stream.next()


@pytest.mark.parametrize("text", ["{", "[" * 1000, '["a", {"topic": 1}]', "null", ""])
def test_a_subscription_that_cannot_be_read_ends_its_stream_alone(tmp_path: Path, text: str) -> None:
    with serving(tmp_path) as live, dial(live) as channel:
        events = Events(channel)
        with events.stream("g", "t") as good:
            call = events._method("subscribeStream")(
                iter([events._event({"text_data": text}, consumergroup="g")]), timeout=SAFETY_NET_SECONDS
            )
            assert [events.code(answer) for answer in call] == ["7"]
            events.ask("publish", events.publication("t", "x"))
            assert good.text() == "x"


def test_a_reply_that_cannot_be_read_is_dropped_and_the_stream_stays(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel:
        legacy = Legacy(channel)
        with legacy.stream("g", "t", kind="SYNC") as stream:
            reply = legacy_pb2.Subscription.Reply(
                topic="t", content="no base64", properties={"content-encoding": "base64"}
            )
            stream.say(legacy_pb2.Subscription(consumerGroup="g", reply=reply))
            legacy.ask("publish", legacy.publication("t", "x"))
            assert stream.text() == "x"


def test_go_counts_the_time_to_live_in_seconds(tmp_path: Path) -> None:
    with serving(tmp_path) as live, dial(live) as channel:
        legacy = Legacy(channel)
        message = legacy.publication("t", "x")
        message.header.CopyFrom(legacy_pb2.RequestHeader(**{**IDENTITY, "language": "GO"}, password="p"))
        message.ttl = "3600"
        with legacy.stream("g", "t") as stream:
            legacy.ask("publish", message)
            assert stream.next().ttl == "3600000"
