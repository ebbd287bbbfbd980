"""Groups, live events and requests of the blocking client, against a real server in another thread."""

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from babelbus.client import BlockingClient, Message, NoRespondersError, Question, Reply, UnknownTopicError
from tests.clients.jebp.test_client import PATIENT, PAYLOADS, Bus, patient
from tests.support.bus import SAFETY_NET_SECONDS

__all__ = ["patient"]  # the fixture, for this module too
START: dict[str, Any] = {"start": "beginning"}


class House:
    """A server in a thread."""

    def __init__(self, folder: Path) -> None:
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(folder)))
        self._thread.start()
        assert self._started.wait(SAFETY_NET_SECONDS)

    async def _run(self, folder: Path) -> None:
        self.loop = asyncio.get_running_loop()
        self.bus = Bus(folder)
        await self.bus.start()
        self._started.set()
        await self._stop.wait()
        await self.bus.stop()

    def client(self) -> BlockingClient:
        return BlockingClient(self.bus.address, identity=self.bus.admin, **PATIENT)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    try:
        with house.client() as client:
            client.create_topic("t")
        yield house
    finally:
        house.close()


def test_a_backlog_is_consumed_and_acked(house: House) -> None:
    with house.client() as client:
        client.publish_many("t", PAYLOADS)
        with client.consume("t", "g", **START, window=300) as consumer:
            heard = []
            for message in consumer:
                message.ack()
                heard.append(message.payload)
                if len(heard) == len(PAYLOADS):
                    break
        assert heard == PAYLOADS
        assert (consumer.topic, consumer.group, consumer.rejoined) == ("t", "g", 0)
    assert house.bus.server.broker.groups.get("t", "g").info().lag == 0


def test_messages_are_answered_from_other_threads(house: House) -> None:
    def work(message: Message) -> None:
        if message.attempt == 1 and message.offset % 10 == 0:
            message.nack(delay=0.0, reason="once")
        else:
            message.ack()
        assert not message.held

    with house.client() as client, ThreadPoolExecutor(4) as threads:
        client.publish_many("t", PAYLOADS[:100])
        consumer = client.consume("t", "g", **START, settings={"order": "none"})
        for seen, message in enumerate(consumer, 1):
            threads.submit(work, message).result()
            if seen == 110:
                break
        consumer.leave()
        assert list(consumer) == []
    counts = house.bus.server.broker.groups.get("t", "g").info().counts
    assert (counts.acknowledged, counts.redelivered, counts.stale) == (100, 10, 0)


def test_an_ack_is_sent_although_nobody_asks_for_more(house: House) -> None:
    with house.client() as client, client.consume("t", "g") as consumer:
        client.publish("t", b"a")
        message = consumer.next(timeout=SAFETY_NET_SECONDS)
        assert message is not None
        message.extend()
        message.ack()
        group = house.bus.server.broker.groups.get("t", "g")
        while not group.counts.acknowledged:
            client.positions(["t"])
        assert consumer.next(timeout=0.01) is None
        consumer.set_window(3)


def test_events_and_requests(house: House) -> None:
    with house.client() as client:
        with client.subscribe("a/+") as subscription:
            client.emit("a/b", b"1")
            client.emit("a/c", b"2")
            events = [next(subscription) for _ in range(2)]
        assert [(event.subject, event.payload) for event in events] == [("a/b", b"1"), ("a/c", b"2")]
        assert (subscription.dropped, subscription.resubscribed, subscription.narrowed) == (0, 0, [False])
        assert list(subscription) == []
        with client.respond("calc") as responder, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.request, "calc", b"x")
            question = next(responder)
            question.reply(b"y")
            assert asked.result().payload == b"y"
        assert list(responder) == []
        with pytest.raises(NoRespondersError):
            client.request("calc")
        with pytest.raises(UnknownTopicError):
            client.consume("nothing", "g").join()


def test_handlers_run_in_threads_until_sigterm(house: House) -> None:
    client = house.client()
    seen: list[bytes | None] = []

    @client.subscriber("t", "g", concurrency=3, settings={"retry_seconds": 0.0}, **START)
    def handle(message: Message) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if message.payload == b"bad" and message.attempt == 1:
            raise ValueError("not yet")
        seen.append(message.payload)

    @client.responder("calc/+")
    def double(question: Question) -> Reply:
        return Reply(2 * (question.payload or b""))

    def use() -> None:
        with house.client() as other:
            other.publish_many("t", [b"good", b"bad"])
            while not house.bus.server.broker.responders.answers("calc/x"):
                other.positions(["t"])
            assert other.request("calc/x", b"ab").payload == b"abab"
            while house.bus.server.broker.groups.get("t", "g").counts.acknowledged < 2:
                other.positions(["t"])
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:
        used = threads.submit(use)
        client.run()
        used.result()
    assert sorted(seen) == [b"bad", b"good"]  # type: ignore[type-var]
    assert signal.getsignal(signal.SIGTERM) is before


def test_threads_that_read_together_get_each_message_and_each_event_once(house: House) -> None:
    with house.client() as client, ThreadPoolExecutor(6) as threads:
        consumer, subscription = client.consume("t", "g", **START), client.subscribe("t")
        subscription.begin()
        messages: list[Message] = []
        events: list[Any] = []
        complete = threading.Barrier(3)  # a thread of each, and the test

        def work() -> None:
            for message in consumer:
                message.ack()
                messages.append(message)
                if len(messages) == 2_000:
                    complete.wait(SAFETY_NET_SECONDS)

        def look() -> None:
            for event in subscription:
                events.append(event)
                if len(events) == 2_000:
                    complete.wait(SAFETY_NET_SECONDS)

        workers = [threads.submit(one) for one in (work, look) * 3]
        for at in range(0, 2_000, 20):
            client.publish_many("t", PAYLOADS[at : at + 20])
        complete.wait(SAFETY_NET_SECONDS)
        subscription.close()
        consumer.leave()
        for one in workers:
            one.result(SAFETY_NET_SECONDS)
        assert sorted(message.offset for message in messages) == list(range(2_000))
        assert {message.attempt for message in messages} == {1}
        assert sorted(event.payload for event in events) == PAYLOADS[:2_000]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let nothing but the count of references free an object."""
    gc.disable()
    yield
    gc.enable()


def freed(thing: object) -> threading.Event:
    event = threading.Event()
    weakref.finalize(thing, event.set)
    return event


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("left", [True, False])
def test_a_consumer_that_nobody_refers_to_is_freed_with_its_messages(house: House, left: bool) -> None:
    with house.client() as client:
        client.publish_many("t", PAYLOADS[:10])
        consumer = client.consume("t", "g", **START)
        message = next(consumer)
        message.ack()
        membership = consumer._twin._membership
        assert membership is not None
        gone = freed(consumer), freed(consumer._twin), freed(message.delivery)
        if left:
            consumer.leave()
        del consumer, message
        assert [one.wait(SAFETY_NET_SECONDS) for one in gone[:2]] == [True, True]
        client.positions(["t"])  # the loop has ended the membership when this is answered
        assert membership.ended_now
        assert gone[2].wait(SAFETY_NET_SECONDS)


@pytest.mark.usefixtures("no_collector")
def test_a_responder_that_nobody_refers_to_ends(house: House) -> None:
    with house.client() as client:
        responder = client.respond("calc/x")
        responder.begin()
        gone = freed(responder), freed(responder._twin)
        del responder
        assert [one.wait(SAFETY_NET_SECONDS) for one in gone] == [True, True]
        client.positions([])
        with pytest.raises(NoRespondersError):
            client.request("calc/x")
