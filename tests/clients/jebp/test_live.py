"""Live subscriptions, requests and replies through the client, against the real server over real sockets."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.client import (
    BadArgumentError,
    Client,
    LocalProtocolError,
    NoRespondersError,
    OutcomeUnknownError,
    QuotaError,
    Record,
    Reply,
    RequestFailedError,
    RequestTimeoutError,
)
from babelbus.core.flow_policy import Bound
from babelbus.core.receipt import Receipt
from babelbus.protocols.jebp.calls import live, requests
from babelbus.protocols.jebp.publisher import Publisher
from tests.clients.jebp.test_client import Bus, patient, with_bus
from tests.support.bus import SAFETY_NET_SECONDS

__all__ = ["patient"]  # the fixture, for this module too
T = tuple[str, bytes | None]


async def read(subscription: Any, count: int) -> list[T]:
    heard: list[T] = []
    async for event in subscription:
        heard.append((event.subject, event.payload))
        if len(heard) == count:
            break
    return heard


def test_a_subscription_gets_what_matches_from_every_way_of_publishing(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with client.subscribe("plant/+/temp", "t/#", "t") as subscription:
            assert subscription.narrowed == [False] * 3
            nowhere = await client.emit("plant/1/temp", b"20", key=b"k", headers=((b"a", None),), timestamp=5)
            await client.emit("plant/1/wind", b"no")
            recorded = await client.emit("t/x", b"x")
            await client.publish("t", b"direct")
            events = []
            async for event in subscription:
                events.append(event)
                if len(events) == 3:
                    break
        assert [(e.subject, e.payload) for e in events] == [("plant/1/temp", b"20"), ("t/x", b"x"), ("t", b"direct")]
        assert (events[0].key, events[0].headers[0], events[0].timestamp) == (b"k", (b"a", None), 5)
        assert events[0].source == "jebp:admin"
        assert (nowhere.topic, nowhere.receivers) == (None, 1)
        assert (recorded.topic, recorded.partition, recorded.offset) == ("t", 0, 0)
        assert bus.server.broker.router.count == 0

    with_bus(tmp_path, test)


def test_a_loop_that_was_left_ends_the_subscription(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        subscription = client.subscribe("a")
        await subscription.begin()
        await client.emit("a", b"1")
        async for _ in subscription:
            break
        del subscription, _
        gc.collect()
        while bus.server.broker.router.count:
            await client.positions(["t"])

    with_bus(tmp_path, test)


def test_a_slow_reader_gets_what_waits_and_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BOUND", Bound(2**20, 10))

    async def test(bus: Bus, client: Client) -> None:
        async with client.subscribe("a", window=5) as subscription:
            for number in range(20):
                await client.emit("a", b"%d" % number)
            assert await read(subscription, 15) == [("a", b"%d" % number) for number in range(15)]
            waiting = asyncio.create_task(read(subscription, 1))
            while not subscription.dropped:
                await client.positions(["t"])
            assert subscription.dropped == 5
            await client.emit("a", b"next")
            assert await waiting == [("a", b"next")]

    with_bus(tmp_path, test)


def test_a_subscription_is_made_again_after_a_lost_connection(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with bus.client() as mine:
            subscription = mine.subscribe("a")
            await subscription.begin()
            link = mine._keeper.link
            assert link is not None
            link._transport.abort()
            reading = asyncio.create_task(read(subscription, 1))
            while not (subscription.resubscribed and bus.server.broker.router.count == 1 and mine.connected):
                await client.positions(["t"])
            await client.emit("a", b"again")
            assert await reading == [("a", b"again")]
            await subscription.close()

    with_bus(tmp_path, test)


@pytest.mark.parametrize("pattern", ["", "a/#/b", "#/a", "x" * 100_000])
def test_a_wrong_pattern_is_told(tmp_path: Path, pattern: str) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(BadArgumentError, match="is no pattern"):
            await client.subscribe("ok", pattern).begin()
        assert bus.server.broker.router.count == 0
        with pytest.raises(LocalProtocolError):
            client.subscribe()

    with_bus(tmp_path, test)


@pytest.mark.parametrize(
    ("subject", "headers"), [("", ()), ("$x", ()), ("a", ((b"ce_source", b"me"),)), ("a", ((b"$b", None),))]
)
def test_what_is_the_servers_own_cannot_be_emitted(tmp_path: Path, subject: str, headers: Any) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(BadArgumentError):
            await client.emit(subject, b"x", headers=headers)
        with pytest.raises(BadArgumentError):
            await client.request(subject, b"x", headers=headers)

    with_bus(tmp_path, test)


def test_a_publish_that_is_stuck_on_the_server_ends_in_time_beside_a_busy_subscription(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with bus.client() as mine, mine.subscribe("plant/#") as subscription:
            with monkeypatch.context() as stuck:
                stuck.setattr(Publisher, "_store", lambda *_: Receipt())
                mine._keeper._timeout_seconds = mine._producer.timeout_seconds = 0.2
                mine._keeper._watch()
                reading = asyncio.ensure_future(read(subscription, 2**31))
                publishing = asyncio.ensure_future(mine.publish("t", b"x"))
                async with asyncio.timeout(SAFETY_NET_SECONDS):
                    while not publishing.done():
                        await client.emit("plant/1", b"busy")
                with pytest.raises(RequestTimeoutError):
                    await publishing
            mine._keeper._timeout_seconds = mine._producer.timeout_seconds = SAFETY_NET_SECONDS
            assert (await mine.publish("t", b"y")).offset == 0
            assert subscription.resubscribed > 0
            reading.cancel()

    with_bus(tmp_path, test)


# -- requests --------------------------------------------------------------------------------------------------------


async def answering(
    client: Client, answer: Callable[[Any], object], work: Callable[[], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Do `work` while questions to `calc/+` are answered."""

    async def serve(responder: Any) -> None:
        async for question in responder:
            answer(question)

    async with client.respond("calc/+", **options) as responder:
        serving = asyncio.create_task(serve(responder))
        await work()
    await serving


def test_a_request_gets_its_reply(tmp_path: Path) -> None:
    def answer(question: Any) -> None:
        assert 0 < question.timeout_seconds <= 30
        question.reply(question.subject.encode() + question.payload, headers=question.headers[:1])
        question.reply(b"twice")

    async def test(bus: Bus, client: Client) -> None:
        async def work() -> None:
            calls = [client.request("calc/x", b"%d" % number, headers=((b"h", b"v"),)) for number in range(500)]
            replies = await asyncio.gather(*calls)
            assert [reply.payload for reply in replies] == [b"calc/x%d" % number for number in range(500)]
            assert replies[0].headers == ((b"h", b"v"), (b"ce_source", b"jebp:admin"))
            assert isinstance(replies[0], Reply)

        await answering(client, answer, work, window=7)
        with pytest.raises(NoRespondersError, match="nobody answers requests to 'calc/x'"):
            await client.request("calc/x")

    with_bus(tmp_path, test)


def test_a_responder_that_fails_and_one_that_is_silent(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async def failing() -> None:
            with pytest.raises(RequestFailedError, match="it is broken"):
                await client.request("calc/x")

        async def silent() -> None:
            with pytest.raises(RequestTimeoutError, match="no reply has come in time"):
                await client.request("calc/x", timeout=0.05)

        await answering(client, lambda question: question.fail("it is broken"), failing)
        await answering(client, lambda question: None, silent)
        with pytest.raises(LocalProtocolError):
            await client.request("calc/x", timeout=0)

    with_bus(tmp_path, test)


def test_questions_of_a_responder_that_leaves_go_to_another(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        first = client.respond("a", window=1)
        await first.begin()
        asked = [asyncio.create_task(client.request("a", b"%d" % number)) for number in range(2)]
        await anext(first)
        async with client.respond("a") as second:
            await first.close()
            for _ in range(2):
                question = await anext(second)
                question.reply(question.payload)
            assert [(await one).payload for one in asked] == [b"0", b"1"]
            last = asyncio.create_task(client.request("a"))
            await anext(second)
        with pytest.raises(NoRespondersError, match="have gone"):
            await last

    with_bus(tmp_path, test)


def test_a_request_that_is_given_up_or_lost(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        pending = bus.server.broker.responders.requests
        async with client.respond("a") as responder, bus.client() as mine:
            asked = asyncio.create_task(mine.request("a"))
            question = await anext(responder)
            link = mine._keeper.link
            assert link is not None
            link._transport.abort()
            with pytest.raises(OutcomeUnknownError):
                await asked
            while pending.in_flight:
                await client.positions(["t"])
            question.reply(b"too late")
            await client.positions(["t"])

    with_bus(tmp_path, test)


def test_more_questions_than_may_wait_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "QUESTIONS_MAX", 1)

    async def test(bus: Bus, client: Client) -> None:
        async with client.respond("a", window=1) as responder:
            first, second = (asyncio.create_task(client.request("a")) for _ in range(2))
            question = await anext(responder)
            with pytest.raises(QuotaError, match="no more are taken"):
                await client.request("a")
            question.reply(b"1")
            (await anext(responder)).reply(b"2")
            assert [(await first).payload, (await second).payload] == [b"1", b"2"]

    with_bus(tmp_path, test)


def test_a_full_responder_leaves_a_request_to_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "QUESTIONS_MAX", 1)

    async def test(bus: Bus, client: Client) -> None:
        async def work() -> None:
            for _ in range(3):  # one is sent to the slow group, one waits there, and one finds no room
                assert (await client.request("calc/x")).payload == b"!"

        async with client.respond("calc/+", group="slow", window=1):
            await answering(client, lambda question: question.reply(b"!"), work, group="other")

    with_bus(tmp_path, test)


def test_a_full_responder_leaves_a_request_to_the_next_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "QUESTIONS_MAX", 1)

    async def test(bus: Bus, client: Client) -> None:
        full = client.respond("calc/+", group="g", window=1)
        await full.begin()
        held = [asyncio.create_task(client.request("calc/x")) for _ in range(2)]
        await anext(full)
        with pytest.raises(QuotaError, match="no more are taken"):
            await client.request("calc/x")

        async def work() -> None:
            for _ in range(3):
                assert (await client.request("calc/x")).payload == b"!"
            await full.close()
            assert [reply.payload for reply in await asyncio.gather(*held)] == [b"!", b"!"]

        await answering(client, lambda question: question.reply(b"!"), work, group="g")

    with_bus(tmp_path, test)


def test_a_responder_answers_again_after_a_lost_connection(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with bus.client() as mine:
            responder = mine.respond("a")
            await responder.begin()
            link = mine._keeper.link
            assert link is not None
            link._transport.abort()
            reading = asyncio.ensure_future(anext(responder))
            while not (responder.rejoined and bus.server.broker.responders.answers("a") and mine.connected):
                await client.positions(["t"])
            asked = asyncio.create_task(client.request("a"))
            (await reading).reply(b"here")
            assert (await asked).payload == b"here"
            await responder.close()

    with_bus(tmp_path, test)


def test_a_record_is_seen_live_with_its_subject(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with client.subscribe("t/#") as subscription:
            await client.publish_many("t", [Record(b"1", headers=((b"ce_subject", b"t/a/b"),))])
            assert await read(subscription, 1) == [("t/a/b", b"1")]

    with_bus(tmp_path, test)


def test_an_event_that_no_frame_of_the_reader_can_carry_counts_as_too_large(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        jebp = bus.server.services["jebp"]
        context = jebp._context  # type: ignore[attr-defined]
        settings = msgspec.structs.replace(context.config.jebp, frame_bytes_max=2_048)
        config = msgspec.structs.replace(context.config, jebp=settings)
        jebp._context = msgspec.structs.replace(context, config=config)  # type: ignore[attr-defined]
        async with bus.client() as small, small.subscribe("a") as subscription:
            await client.emit("a", b"x" * 3_000)
            await client.emit("a", b"next")
            assert await read(subscription, 1) == [("a", b"next")]
            assert subscription.dropped == 1
        metrics = bus.server.metrics
        sample, name = metrics.registry.get_sample_value, "babelbus_live_dropped_total"
        dropped = [sample(name, {"protocol": "jebp", "reason": reason}) for reason in ("slow", "too_large")]
        assert (dropped, metrics.live_delivered("jebp").records_total) == ([0, 1], 1)

    with_bus(tmp_path, test)


def test_what_no_frame_can_carry_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(LocalProtocolError, match="over the frame limit"):
            await client.emit("a", b"x" * 2**24)
        async with client.respond("a") as responder:
            asked = asyncio.create_task(client.request("a"))
            question = await anext(responder)
            with pytest.raises(LocalProtocolError, match="over the frame limit"):
                question.reply(b"x" * 2**24)
            question.reply(b"y")
            assert (await asked).payload == b"y"

    with_bus(tmp_path, test)


def test_tasks_that_answer_together_are_one_responder_also_after_a_lost_connection(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        async with bus.client() as mine:
            responder = mine.respond("a")

            async def answer() -> None:
                async for question in responder:
                    question.reply(question.payload)

            workers = [asyncio.create_task(answer()) for _ in range(3)]
            for times in range(2):
                while not (responder.rejoined == times and bus.server.broker.responders.answers("a")):
                    await client.positions(["t"])
                asked = [await client.request("a", b"%d" % number) for number in range(6)]
                assert [reply.payload for reply in asked] == [b"%d" % number for number in range(6)]
                link = mine._keeper.link
                assert link is not None
                link._transport.abort()
                while bus.server.broker.responders.answers("a") and responder.rejoined == times:
                    await client.positions(["t"])
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    with_bus(tmp_path, test)


def test_a_will_that_no_frame_can_carry_does_not_spoil_the_next_connection(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(LocalProtocolError, match="over the frame limit"):
            await client.state.will(set={"k": "x" * 2**24})
        link = client._keeper.link
        assert link is not None
        link._transport.abort()
        assert (await client.publish("t", b"x")).offset == 0
        while client._keeper.link is link:
            await client.positions(["t"])
        assert (await client.publish("t", b"x")).offset == 1

    with_bus(tmp_path, test)
