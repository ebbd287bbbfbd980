"""Consumer groups through the client, against the real server over real sockets; faults come from a proxy that cuts."""

import asyncio
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.client import (
    BadArgumentError,
    Client,
    GoneError,
    LocalProtocolError,
    LockedError,
    Message,
    Record,
    UnknownGroupError,
    UnknownTopicError,
)
from babelbus.clients.jebp import messages
from babelbus.core.groups import Group
from babelbus.protocols.jebp.call_messages import Window
from tests.clients.jebp.test_calls import cut_off
from tests.clients.jebp.test_client import PAYLOADS, Bus, CuttingProxy, patient, with_bus
from tests.support.bus import turns

__all__ = ["patient"]  # the fixture, for this module too
START: dict[str, Any] = {"start": "beginning"}


def group_of(bus: Bus, name: str = "g", topic: str = "t") -> Group:
    return bus.server.broker.groups.get(topic, name)


async def read(consumer: Any, count: int, *, ack: bool = True) -> list[Message]:
    heard: list[Message] = []
    async for message in consumer:
        heard.append(message)
        if ack:
            message.ack()
        if len(heard) == count:
            break
    return heard


def test_a_backlog_is_consumed_once_and_in_order(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS)
        async with client.consume("t", "g", **START, window=300) as consumer:
            heard = await read(consumer, len(PAYLOADS))
        assert [message.payload for message in heard] == PAYLOADS
        assert [message.offset for message in heard] == list(range(len(PAYLOADS)))
        assert {(message.topic, message.group, message.partition, message.attempt) for message in heard} == {
            ("t", "g", 0, 1)
        }
        info = group_of(bus).info()
        assert (info.lag, info.members, info.counts.acknowledged, info.counts.stale) == (0, 0, len(PAYLOADS), 0)

    with_bus(tmp_path, test)


def test_a_message_has_everything_of_its_record(tmp_path: Path) -> None:
    records = [
        Record(b"a", b"key", ((b"type", b"text"), (b"none", None)), 1_700_000_000_000),
        Record(None, b"key", (), 1_700_000_000_001),
        Record(b"", None, (), 1_700_000_000_002),
        Record(b"c" * 100_000, b"k", ((b"ce_subject", b"t/x"),), 1_700_000_000_003),
    ]

    async def test(bus: Bus, client: Client) -> None:
        async with client.consume("t", "g") as consumer:
            await client.publish_many("t", records)
            heard = await read(consumer, len(records))
        assert [(m.payload, m.key, m.headers, m.timestamp) for m in heard] == [
            (r.payload, r.key, r.headers, r.timestamp) for r in records
        ]
        assert [message.subject for message in heard] == ["t", "t", "t", "t/x"]

    with_bus(tmp_path, test)


def test_no_member_holds_more_than_its_window_and_members_share(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:100])
        async with (
            client.consume("t", "g", **START, window=10) as one,
            bus.client() as other_client,
            other_client.consume("t", "g", window=7) as two,
        ):
            held = [await read(one, 10, ack=False), await read(two, 7, ack=False)]
            assert await one.next(timeout=0.01) is None
            assert group_of(bus).info().in_flight == 17
            assert len({message.offset for part in held for message in part}) == 17
            for part in held:
                for message in part:
                    message.ack()
            more = [await read(one, 10), await read(two, 7)]
            assert len({message.offset for part in (*held, *more) for message in part}) == 34

    with_bus(tmp_path, test)


def test_a_nack_delivers_again_with_the_attempt_and_a_reject_makes_a_dead_letter(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", b"b", b"c"])
        settings = {"retry_seconds": 0.0, "attempts_max": 3}
        async with client.consume("t", "g", **START, settings=settings) as consumer:
            first, second, third = await read(consumer, 3, ack=False)
            first.nack(reason="not yet")
            first.ack()  # it was answered
            second.nack(delay=0.05)
            third.reject(reason="never")
            again = await read(consumer, 2)
            assert {(m.payload, m.attempt) for m in again} == {(b"a", 2), (b"b", 2)}
            while "dead-letters/g" not in {topic.topic for topic in await client.positions()}:
                pass  # the server makes the topic with the first letter
            letters = client.consume("dead-letters/g", "look", **START)
            async for letter in letters:
                assert letter.payload == b"c"
                assert dict(letter.headers)[b"dead-reason"] == b"never"
                break
            await letters.leave()

    with_bus(tmp_path, test)


def test_records_of_a_key_wait_for_the_one_that_failed(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [Record(b"1", b"k"), Record(b"2", b"k"), Record(b"3", b"other")])
        async with client.consume("t", "g", **START, window=1, settings={"retry_seconds": 0.0}) as consumer:
            (first,) = await read(consumer, 1, ack=False)
            first.nack()
            heard = await read(consumer, 3)
        assert [m.payload for m in heard if m.key == b"k"] == [b"1", b"2"]

    with_bus(tmp_path, test)


def test_who_leaves_gives_back_without_an_attempt_and_who_is_lost_with_one(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", b"b"])
        consumer = client.consume("t", "g", **START, window=1)
        await read(consumer, 1, ack=False)
        await consumer.leave()
        assert [message async for message in consumer] == []
        other = bus.client()
        await other.__aenter__()
        (message,) = await read(other.consume("t", "g", window=1), 1, ack=False)
        assert (message.payload, message.attempt) == (b"a", 1)
        await other.close()
        assert not message.held
        message.ack()  # into the void
        async with client.consume("t", "g") as last:
            heard = await read(last, 2)
        assert [(m.payload, m.attempt) for m in heard] == [(b"a", 2), (b"b", 1)]

    with_bus(tmp_path, test)


def test_a_loop_that_was_left_leaves_the_group(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:10])
        async for message in client.consume("t", "g", **START):
            message.ack()
            break
        gc.collect()
        while group_of(bus).members:
            await client.positions(["t"])
        assert group_of(bus).info().lag == 9

    with_bus(tmp_path, test)


def test_a_lost_connection_joins_again_and_loses_nothing(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS)
        cuts = [20_000, 60_000, 5_000]
        async with CuttingProxy(bus.address, cuts) as proxy:
            slow = bus.client(address=proxy.address)
            async with slow:
                consumer = slow.consume("t", "g", **START, window=500)
                seen: Counter[int] = Counter()
                async for message in consumer:
                    seen[message.offset] += 1
                    message.ack()
                    if len(seen) == len(PAYLOADS):
                        break
                assert consumer.rejoined == 3
                assert proxy.connections == 4
                await consumer.leave()
        assert set(seen) == set(range(len(PAYLOADS)))

    with_bus(tmp_path, test)


def test_a_server_that_starts_again_goes_on_where_the_acks_were(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:20])
        consumer = client.consume("t", "g", **START, window=5)
        done = await read(consumer, 5)
        held = await read(consumer, 3, ack=False)
        await client.positions(["t"])  # the acks are there
        await bus.stop()
        await bus.start()
        rest = await read(consumer, 15)
        assert [m.offset for m in (*done, *rest)] == list(range(20))
        assert {m.attempt for m in rest} == {1}
        assert not any(m.held for m in held)
        await consumer.leave()

    with_bus(tmp_path, test)


def test_what_is_not_read_yet_is_extended_and_what_is_held_is_not(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", b"b", b"c"])
        settings = {"ack_seconds": 2.0, "retry_seconds": 0.0, "order": "none"}
        consumer = client.consume("t", "g", **START, settings=settings)
        (first,) = await read(consumer, 1, ack=False)
        group = group_of(bus)
        while not group.info().counts.redelivered:  # the first one, whose handler is silent
            await client.positions(["t"])
        heard = await read(consumer, 3)
        assert [(m.payload, m.attempt) for m in heard] == [(b"b", 1), (b"c", 1), (b"a", 2)]
        first.ack()  # too late
        await consumer.leave()
        assert group.info().counts.acknowledged == 3

    with_bus(tmp_path, test)


def test_a_handler_can_extend_what_it_works_on(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"a", b"b"])
        settings = {"ack_seconds": 2.0, "retry_seconds": 0.0, "order": "none"}
        consumer = client.consume("t", "g", **START, settings=settings)
        kept, silent = await read(consumer, 2, ack=False)
        group = group_of(bus)
        while not group.info().counts.redelivered:
            kept.extend()
            await client.positions(["t"])
        (again,) = await read(consumer, 1)
        assert (again.payload, again.attempt) == (silent.payload, 2)
        kept.ack()
        await consumer.leave()
        assert group.info().counts.acknowledged == 2

    with_bus(tmp_path, test)


def test_a_window_of_nothing_pauses_the_member(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        consumer = client.consume("t", "g", **START)
        await consumer.join()
        consumer.set_window(0)
        await client.positions(["t"])
        await client.publish("t", b"a")
        assert await consumer.next(timeout=0.05) is None
        consumer.set_window(5)
        (message,) = await read(consumer, 1)
        assert message.payload == b"a"
        with pytest.raises(LocalProtocolError):
            consumer.set_window(-1)
        await consumer.leave()

    with_bus(tmp_path, test)


def test_a_group_that_takes_no_acks_flows_by_its_window(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:1_000])
        async with client.consume("t", "g", **START, settings={"ack": "on_delivery"}, window=50) as consumer:
            heard = await read(consumer, 1_000)
            assert consumer.ack_seconds == float("inf")
        assert [m.payload for m in heard] == PAYLOADS[:1_000]

    with_bus(tmp_path, test)


@pytest.mark.parametrize("start", ["offset", "time", "end"])
def test_a_group_begins_where_it_is_told(tmp_path: Path, start: str) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [Record(b"%d" % n, timestamp=1_000 + n) for n in range(10)])
        options: dict[str, Any] = {"offset": {"start": 7}, "time": {"start_time": 1_007}, "end": {}}[start]
        async with client.consume("t", "g", **options) as consumer:
            await client.publish("t", b"10")
            (message,) = await read(consumer, 1)
        assert message.offset == (10 if start == "end" else 7)

    with_bus(tmp_path, test)


def test_what_is_wrong_is_told_with_its_class(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(UnknownTopicError):
            await client.consume("nothing", "g").join()
        with pytest.raises(UnknownGroupError):
            await client.consume("t", "g", create=False).join()
        with pytest.raises(BadArgumentError, match="unknown setting 'colour'"):
            await client.consume("t", "g", settings={"colour": 3}).join()
        with pytest.raises(LocalProtocolError):
            client.consume("t", "g", window=0)
        async with client.consume("t", "g", exclusive=True) as consumer:
            with pytest.raises(LockedError):
                await client.consume("t", "g").join()
            await client.publish("t", b"a")
            await read(consumer, 1)
            await client.remove_topic("t")
            with pytest.raises(GoneError, match="was removed"):
                await anext(consumer)

    with_bus(tmp_path, test)


def test_a_frame_limit_cuts_deliveries_and_an_endless_record_is_a_dead_letter(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"x" * 300] * 50)
        await client.publish("t", b"y" * 3_000)
        await client.publish("t", b"last")
        jebp = bus.server.services["jebp"]
        context = jebp._context  # type: ignore[attr-defined]
        config = msgspec.structs.replace(
            context.config, jebp=msgspec.structs.replace(context.config.jebp, frame_bytes_max=2_048)
        )
        jebp._context = msgspec.structs.replace(context, config=config)  # type: ignore[attr-defined]
        async with bus.client() as small:
            heard = await read(small.consume("t", "g", **START), 51)
        assert [len(m.payload or b"") for m in heard] == [300] * 50 + [4]
        while not group_of(bus).info().counts.dead_lettered:
            await client.positions(["t"])

    with_bus(tmp_path, test)


def test_acks_in_order_are_one_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[object] = []
    monkeypatch.setattr(messages.Membership, "send", lambda self, message: sent.append(message))

    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:10])
        consumer = client.consume("t", "g", **START)
        heard = await read(consumer, 10, ack=False)
        for number in (0, 1, 2, 5, 6, 4):
            heard[number].ack()
        consumer._membership.flush_acks()  # type: ignore[union-attr]
        (ack,) = sent
        assert ack.ranges == [1, 0, 3, 1, 5, 2, 1, 4, 1]  # type: ignore[attr-defined]

    with_bus(tmp_path, test)


def test_messages_are_free_when_nobody_refers_to_them(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", PAYLOADS[:100])
        consumer = client.consume("t", "g", **START, window=10)
        deliveries = [weakref.ref(message.delivery) for message in await read(consumer, 95)]
        await consumer.leave()
        del consumer
        gc.collect()
        assert not any(delivery() for delivery in deliveries)

    with_bus(tmp_path, test)


def test_a_membership_that_was_left_is_free_at_once(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        consumer = client.consume("t", "g", settings={"ack_seconds": 3_600.0})
        await consumer.join()
        assert consumer._membership is not None
        membership = weakref.ref(consumer._membership)
        await consumer.leave()
        gc.collect()
        assert membership() is None

    with_bus(tmp_path, test)


def test_large_messages_stop_the_server_before_the_window_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "UNREAD_BYTES_MAX", 100_000)
    windows: list[int] = []
    send = messages.Membership.send

    def note(self: messages.Membership, message: object) -> None:
        windows.extend([message.window] if isinstance(message, Window) else [])
        send(self, message)

    monkeypatch.setattr(messages.Membership, "send", note)

    async def test(bus: Bus, client: Client) -> None:
        await client.publish_many("t", [b"x" * 30_000] * 50, batch_records=1)
        settings = {"order": "none"}
        async with client.consume("t", "g", **START, settings=settings, window=40) as consumer:
            heard = await read(consumer, 50)
        assert [message.offset for message in heard] == list(range(50))
        assert windows[:2] == [0, 40]

    with_bus(tmp_path, test)


def test_tasks_that_read_together_are_one_member_and_each_message_comes_to_one_of_them(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        consumer = client.consume("t", "g", **START)
        heard: list[Message] = []
        complete = asyncio.Event()

        async def work(count: int) -> None:
            async for message in consumer:
                heard.append(message)
                message.ack()
                if len(heard) == count:
                    complete.set()

        for count in (100, 200):
            complete.clear()
            workers = [asyncio.create_task(work(count)) for _ in range(3)]
            for _ in range(10):
                await client.publish_many("t", [b"x"] * 10)
            await complete.wait()
            assert group_of(bus).info().members == 1
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            link = client._keeper.link
            assert link is not None
            link._transport.abort()  # the second round joins again
            while client._keeper.link is link:
                await turns()
        assert {message.attempt for message in heard[:100]} == {1}
        assert {message.offset for message in heard} == set(range(200))

    with_bus(tmp_path, test)


def test_who_leaves_without_a_connection_is_no_member_when_it_is_back(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with bus.client() as mine:
            consumer, subscription = mine.consume("t", "g"), mine.subscribe("t")
            await consumer.join()
            await subscription.begin()
            readers = [asyncio.ensure_future(consumer.take()), asyncio.ensure_future(subscription.take())]
            cut_off(mine)
            while not (consumer.rejoined and subscription.resubscribed):
                await turns()
            await consumer.leave()
            await subscription.close()
            mine._keeper._address = bus.address
            assert await asyncio.gather(*readers) == [[], []]
            await mine.positions(["t"])
            assert (group_of(bus).info().members, bus.server.broker.router.count) == (0, 0)

    with_bus(tmp_path, test)
