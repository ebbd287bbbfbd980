"""Handlers that run until SIGTERM: acks, nacks with reasons, order per key, and an orderly stop."""

import asyncio
import os
import signal
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from babelbus.client import (
    Client,
    GoneError,
    LocalProtocolError,
    Message,
    Question,
    Record,
    Reply,
    RequestFailedError,
    ServerDiskError,
    UnknownTopicError,
)
from babelbus.clients.jebp import service
from babelbus.clients.jebp.consumer import Consumer
from babelbus.core.request import TooManyRequestsError
from babelbus.errors import BabelbusError, StorageError
from babelbus.protocols.jebp.calls import methods
from babelbus.protocols.jebp.calls.call import Call
from tests.clients.jebp.test_client import PAYLOADS, Bus, patient, with_bus
from tests.support.bus import SAFETY_NET_SECONDS

__all__ = ["patient"]  # the fixture, for this module too
START: dict[str, Any] = {"start": "beginning"}


def lag(bus: Bus) -> int:
    return bus.server.broker.groups.get("t", "g").info().lag


def test_a_handler_acks_what_it_returns_from_and_nacks_what_it_raises(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        seen: list[tuple[bytes | None, int]] = []
        done = asyncio.Event()
        settings = {"retry_seconds": 0.0, "attempts_max": 2}

        @client.subscriber("t", "g", settings=settings, **START)
        async def handle(message: Message) -> None:
            seen.append((message.payload, message.attempt))
            if message.payload == b"bad":
                raise ValueError("cannot parse it")
            if message.payload == b"own":
                message.reject(reason="by hand")
            if message.payload == b"last":
                done.set()

        await client.publish_many("t", [b"good", b"bad", b"own", b"last"])
        running = asyncio.create_task(client.run(signals=False))
        await done.wait()
        while bus.server.broker.groups.get("t", "g").info().counts.dead_lettered < 2:
            await client.positions(["t"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"good", 1), (b"last", 1), (b"own", 1)]
        letters = client.consume("dead-letters/g", "look", **START)
        reasons = {}
        async for letter in letters:
            reasons[letter.payload] = dict(letter.headers)[b"dead-reason"]
            if len(reasons) == 2:
                break
        await letters.leave()
        assert reasons == {b"bad": b"ValueError: cannot parse it", b"own": b"by hand"}

    with_bus(tmp_path, test)


def test_handlers_run_together_and_those_of_a_key_one_after_the_other(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        running: dict[bytes, int] = defaultdict(int)
        order: dict[bytes, list[int]] = defaultdict(list)
        most = 0

        @client.subscriber("t", "g", concurrency=4, window=100, **START)
        async def handle(message: Message) -> None:
            nonlocal most
            key = message.key or b""
            running[key] += 1
            assert running[key] == 1
            most = max(most, sum(running.values()))
            for _ in range(3):
                await asyncio.sleep(0)
            running[key] -= 1
            order[key].append(message.offset)

        await client.publish_many("t", [Record(b"x", b"%d" % (number % 7)) for number in range(300)])
        task = asyncio.create_task(client.run(signals=False))
        while sum(map(len, order.values())) < 300:
            await client.positions(["t"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert most == 4
        assert all(offsets == sorted(offsets) for offsets in order.values())
        assert lag(bus) == 0

    with_bus(tmp_path, test)


def test_sigterm_lets_handlers_end_and_gives_back_the_rest(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        handled: list[bytes | None] = []

        async with bus.client() as mine:

            @mine.subscriber("t", "g", window=10, **START)
            async def handle(message: Message) -> None:
                begun.set()
                await go_on.wait()
                handled.append(message.payload)

            await client.publish_many("t", PAYLOADS[:5])
            task = asyncio.create_task(mine.run())
            await begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            while not mine._services[0]._stopping.is_set():
                await client.positions(["t"])
            go_on.set()
            await task
            assert handled == PAYLOADS[:1]
        async with client.consume("t", "g") as consumer:
            rest = [await anext(consumer) for _ in range(4)]
        assert [(m.payload, m.attempt) for m in rest] == [(payload, 1) for payload in PAYLOADS[1:5]]

    with_bus(tmp_path, test)


def test_a_handler_that_does_not_end_is_cancelled_and_its_message_comes_again(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        begun = asyncio.Event()
        other = bus.client()

        @other.subscriber("t", "g", **START)
        async def handle(message: Message) -> None:
            begun.set()
            await asyncio.Event().wait()

        await client.publish("t", b"a")
        task = asyncio.create_task(other.run(stop_seconds=0.01, signals=False))  # connects by itself
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not other.connected
        async with client.consume("t", "g") as consumer:
            message = await anext(consumer)
        assert (message.payload, message.attempt) == (b"a", 2)

    with_bus(tmp_path, test)


def test_a_handler_that_takes_too_long_is_ended_and_one_that_takes_long_keeps_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended: list[bytes | None] = []
    extend = Message.extend

    def note(message: Message) -> None:
        extend(message)
        extended.append(message.payload)

    monkeypatch.setattr(Message, "extend", note)

    async def test(bus: Bus, client: Client) -> None:
        seen: list[tuple[bytes | None, int]] = []
        # Long enough that a machine with much to do neither ends a lease that is extended, nor a handler that works.
        settings = {"ack_seconds": 1.2, "retry_seconds": 0.0, "order": "none"}

        @client.subscriber("t", "g", timeout=6.0, concurrency=2, settings=settings, **START)
        async def handle(message: Message) -> None:
            seen.append((message.payload, message.attempt))
            if message.payload == b"hangs" and message.attempt == 1:
                await asyncio.Event().wait()
            if message.payload == b"long":
                while extended.count(b"long") < 5:  # three times in `ack_seconds`
                    await client.positions(["t"])

        await client.publish_many("t", [b"long", b"hangs"])
        task = asyncio.create_task(client.run(signals=False))
        while len(seen) < 3 or lag(bus):
            await client.positions(["t"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert seen == [(b"long", 1), (b"hangs", 1), (b"hangs", 2)]

    with_bus(tmp_path, test)


def test_responders_answer_and_tell_what_they_raise(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        @client.responder("calc/double")
        async def double(question: Question) -> bytes:
            return b"%d" % (2 * int(question.payload or b""))

        @client.responder("calc/who")
        async def who(question: Question) -> Reply:
            return Reply(b"me", ((b"a", b"b"),))

        task = asyncio.create_task(client.run(signals=False))
        while not (
            bus.server.broker.responders.answers("calc/double") and bus.server.broker.responders.answers("calc/who")
        ):
            await client.positions(["t"])
        async with bus.client() as asking:
            assert (await asking.request("calc/double", b"21")).payload == b"42"
            assert (await asking.request("calc/who")).headers[0] == (b"a", b"b")
            with pytest.raises(RequestFailedError, match="ValueError: invalid literal"):
                await asking.request("calc/double", b"x")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_bus(tmp_path, test)


def test_a_service_that_cannot_go_on_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        with pytest.raises(LocalProtocolError, match="no handlers"):
            await client.run()

        @client.subscriber("nothing", "g")
        async def never(message: Message) -> None:
            raise AssertionError

        with pytest.raises(UnknownTopicError):
            await client.run(signals=False)

    with_bus(tmp_path, test)


def test_a_topic_that_is_removed_ends_the_run(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        @client.subscriber("t", "g")
        async def never(message: Message) -> None:
            raise AssertionError

        task = asyncio.create_task(client.run(signals=False))
        while bus.server.broker.groups.find("t", "g") is None or not bus.server.broker.groups.get("t", "g").members:
            await client.positions(["t"])
        await client.remove_topic("t")
        with pytest.raises(GoneError):
            await task

    with_bus(tmp_path, test)


def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAUSE_SECONDS_MIN", 0.001)
    joins = 0
    join = Consumer.join

    async def failing(self: Consumer) -> None:
        nonlocal joins
        joins += 1
        if joins < 4:
            raise ServerDiskError("the disk is full", repeat=True)
        await join(self)

    monkeypatch.setattr(Consumer, "join", failing)

    async def test(bus: Bus, client: Client) -> None:
        done = asyncio.Event()

        @client.subscriber("t", "g", **START)
        async def handle(message: Message) -> None:
            done.set()

        await client.publish("t", b"a")
        task = asyncio.create_task(client.run(signals=False))
        await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert joins == 4

    with_bus(tmp_path, test)


def test_a_trouble_after_a_while_of_work_begins_with_the_shortest_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "PAUSE_SECONDS_MIN", 0.001)
    worked = [0.0, 0.0, 3_600.0, 0.0]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ahead = 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + ahead)

        class Troubled(service.Service):
            name = "troubled"

            async def _read(self) -> None:
                nonlocal ahead
                if not worked:
                    await self.stop(0)
                    return
                ahead += worked.pop(0)
                raise ServerDiskError("the disk is full", repeat=True)

            async def _leave(self) -> None:
                pass

        await Troubled(1, None, lambda *_: nullcontext()).run()

    asyncio.run(run())
    assert [message.rpartition("again in ")[2] for message in caplog.messages] == [
        "0.001 s", "0.002 s", "0.001 s", "0.002 s",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["respond", "consume"])
@pytest.mark.parametrize("error", [StorageError("the disk is full"), TooManyRequestsError("too many")])
def test_a_stream_that_the_server_ends_for_a_temporary_trouble_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: BabelbusError
) -> None:
    monkeypatch.setattr(service, "PAUSE_SECONDS_MIN", 0.001)
    calls: list[Call] = []
    answer = methods.METHODS[method].answer

    def keep(call: Call, parameters: Any) -> Any:
        calls.append(call)
        return answer(call, parameters)

    monkeypatch.setattr(methods.METHODS[method], "answer", keep)

    async def test(bus: Bus, client: Client) -> None:
        handled = asyncio.Event()

        @client.responder("calc/double")
        async def double(question: Question) -> bytes:
            handled.set()
            return b"42"

        @client.subscriber("t", "g", **START)
        async def handle(message: Message) -> None:
            handled.set()

        running = asyncio.create_task(client.run(signals=False))
        async with bus.client() as other, asyncio.timeout(SAFETY_NET_SECONDS):
            for count in (1, 2):
                while len(calls) < count or calls[-1].stream is None:
                    await other.positions(["t"])
                handled.clear()
                if method == "respond":
                    assert (await other.request("calc/double")).payload == b"42"
                else:
                    await other.publish("t", b"x")
                await handled.wait()
                calls[-1].fail(error)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_bus(tmp_path, test)
