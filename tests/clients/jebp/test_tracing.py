"""Traces through the bus: the span of a handler is below the span of the publisher."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from babelbus.client import Client, Identity, Message, Question, TracingUnavailableError
from tests.clients.jebp.test_client import Bus, patient, with_bus

__all__ = ["patient"]  # the fixture, for this module too


def test_tracing_without_opentelemetry_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(TracingUnavailableError, match=r"pip install 'babelbus\[otel\]'"):
        Client(identity=Identity.generate(), tracing=True)


def test_without_tracing_nothing_is_added(tmp_path: Path) -> None:
    async def test(bus: Bus, client: Client) -> None:
        await client.publish("t", b"x")
        async with client.consume("t", "g", start="beginning") as consumer:
            message = await anext(consumer)
            with client.span(message):
                assert message.headers == ()

    with_bus(tmp_path, test)


def test_a_trace_goes_through_the_bus(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace  # type: ignore[import-not-found,unused-ignore]
    from opentelemetry.sdk.trace import TracerProvider  # type: ignore[import-not-found,unused-ignore]
    from opentelemetry.sdk.trace.export import (  # type: ignore[import-not-found,unused-ignore]
        SimpleSpanProcessor,
    )
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # type: ignore[import-not-found,unused-ignore]
        InMemorySpanExporter,
    )

    spans: Any = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)

    async def test(bus: Bus, client: Client) -> None:
        done = asyncio.Event()

        @client.subscriber("t", "g", start="beginning")
        async def handle(message: Message) -> None:
            assert dict(message.headers)[b"traceparent"]
            done.set()

        @client.responder("calc")
        async def answer(question: Question) -> bytes:
            return b"y"

        running = asyncio.create_task(client.run(signals=False))
        await client.publish("t", b"x", headers=((b"own", b"header"),))
        await done.wait()
        while not bus.server.broker.responders.answers("calc"):
            await client.positions(["t"])
        assert (await client.request("calc")).payload == b"y"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        named = {span.name: span for span in spans.get_finished_spans()}
        assert named["process t"].parent.span_id == named["publish t"].context.span_id
        assert named["respond calc"].parent.span_id == named["request calc"].context.span_id
        assert named["publish t"].attributes["messaging.destination.name"] == "t"

    with_bus(tmp_path, test, tracing=True)
