"""sbus and jebp on one bus: who publishes in one is heard, and recorded, in the other."""

import os
from pathlib import Path

from babelbus.client import Client as JebpClient
from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.core.router import Route
from babelbus.core.subject import EVERYTHING, exactly
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Publish
from tests.support.bus import in_loop
from tests.support.sbus import configured, heard_before_barrier, join, payloads
from tests.support.server import LiveServer

ARBITRARY = bytes(range(256))


def test_an_event_that_jebp_publishes_reaches_sbus_subscribers(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"a/") as client, join(live, b"a/b") as other:

        @in_loop
        async def publish() -> None:
            async with JebpClient(live.address, identity=live.admin) as jebp:
                await jebp.create_topic("a/b")
                await jebp.publish_many("a/b", [b"hi", b"", ARBITRARY])

        publish()
        for one in (client, other):
            assert [one.receive_packet() for _ in range(3)] == [b"MSG a/b\0hi", b"MSG a/b\0", b"MSG a/b\0" + ARBITRARY]


def test_a_topic_records_what_sbus_publishes_below_it_and_jebp_fetches_it(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"flights/") as client:

        @in_loop
        async def talk() -> None:
            async with JebpClient(live.address, identity=live.admin) as jebp:
                await jebp.create_topic("flights")
                keys = (b"flights/x", b"flights", "flights/größe".encode(), b"flights/\xff")
                for number, key in enumerate(keys):
                    client.publish(key, b"%d" % number + ARBITRARY)
                client.publish(b"flightsx", b"not below it")
                client.socket.send(b"MSG flights/no-nul")
                assert [one.key for one in heard_before_barrier(client)] == [
                    keys[0], *keys[2:], b"flights/no-nul"
                ]  # fmt: skip
                records = []
                async for record in jebp.follow("flights", offset=0):
                    records.append(record)
                    if len(records) == 5:
                        break
                assert [record.payload for record in records[:4]] == [b"%d" % one + ARBITRARY for one in range(4)]
                assert records[4].payload == b""
                headers = [dict(record.headers) for record in records]
                assert [one.get(b"ce_subject") for one in headers] == [keys[0], None, *keys[2:], b"flights/no-nul"]
                source = f"sbus:uid={os.getuid()},gid={os.getgid()},pid={os.getpid()}".encode()
                assert {one[b"ce_source"] for one in headers} == {source}

        talk()


def test_sbus_subscribers_hear_a_recorded_message_once_and_in_order_with_the_others(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"") as client:
        live.call(lambda: live.server.broker.create_topic("t", principal=SERVER))
        for number in range(100):
            client.publish(b"t/x" if number % 2 else b"live", b"%d" % number)
        assert [one.payload for one in heard_before_barrier(client)] == [b"%d" % number for number in range(100)]
        topic = live.server.broker.topic("t")
        live.until(lambda: topic.partitions[0].high_watermark == 50)
        assert heard_before_barrier(client) == []  # not again once it is durable
        sample = live.server.metrics.registry.get_sample_value
        recorded = {"protocol": "sbus", "topic": "t"}
        assert live.call(lambda: sample("babelbus_records_published_total", recorded)) == 50
        assert (live.call(lambda: sample("babelbus_live_received_total", {"protocol": "sbus"})) or 0) >= 100


def test_a_topic_that_comes_or_goes_later_counts_at_once(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live) as client:
        for step in ("before", "during", "after"):
            if step == "during":
                live.call(lambda: live.server.broker.create_topic("t", principal=SERVER))
            if step == "after":
                topic = live.server.broker.topic("t")
                live.until(lambda: topic.partitions[0].high_watermark == 1)  # noqa: B023
                live.call(lambda: live.server.broker.remove_topic("t", principal=SERVER))
            client.publish(b"t/x", step.encode())
            client.whoami()
        assert topic.partitions[0].next_offset == 1


def test_secrets_and_the_servers_own_names_stay_on_the_bus(tmp_path: Path) -> None:
    heard: list[str] = []
    with LiveServer(configured(tmp_path)) as live, join(live, b"") as client:
        live.call(
            lambda: live.server.broker.subscribe(
                EVERYTHING, lambda events: heard.extend(event.subject for event in events), principal=SERVER
            )
        )
        for key in (b"!/cred////x", b"!/cred/9/9/9/x", b"$state/x", b"open"):
            client.publish(key)
        assert [one.key for one in heard_before_barrier(client)] == [b"!/cred////x", b"$state/x", b"open"]
        assert live.server.broker.topic("$state").partitions[0].next_offset == 0
        assert heard == ["open"]


def test_what_sbus_cannot_express_is_dropped_and_counted(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"") as client:

        def publish(subject: str, payload: bytes) -> None:
            live.publish([Event(subject, payload)])

        publish("a\0b", b"")
        publish("k", bytes(PACKET_BYTES_MAX - 5))
        publish("\ud800", b"")
        publish("k", bytes(PACKET_BYTES_MAX - 6))
        assert payloads(client, 1) == [bytes(PACKET_BYTES_MAX - 6)]
        labels = {"protocol": "sbus", "reason": "inexpressible"}
        sample = live.server.metrics.registry.get_sample_value
        # A subject that is no key matches no pattern of sbus, so only the one that is too long came there.
        assert live.call(lambda: sample("babelbus_live_dropped_total", labels)) == 1


def test_an_event_is_looked_up_once_for_many_packets(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"a/") as client:
        routes: set[Route] = set()
        router = live.server.broker.router
        for _ in range(3):
            client.publish(b"a/b", b"x")
            assert payloads(client, 1) == [b"x"]
            routes.add(live.call(lambda: router.route_of("a/b")))
        live.call(lambda: router.add(exactly("other"), lambda events: None, principal=SERVER))
        routes.add(live.call(lambda: router.route_of("a/b")))
        assert len(routes) == 1
        client.publish(b"a/b")
        assert heard_before_barrier(client) == [Publish(b"a/b", b"")]
