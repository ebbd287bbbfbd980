"""EventMesh over gRPC: both packages on one port (specification, 7 and 8).

`grpc.aio` runs in the server's loop. In a thread with a loop of its own, and calls that cross in batches, a publication
costs a tenth more and a batch a fifth more, for the two threads wake each other; a stream costs the same. The
synchronous `grpc.server` spends a third less on a call, but holds a thread for each stream.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.empty_pb2 import Empty

from babelbus.core.access import Identity
from babelbus.core.groups import Delivery, Member
from babelbus.core.receipt import Promise, all_of
from babelbus.core.record import Event
from babelbus.core.request import NoRespondersError, Question, Reply, RequestTimeoutError
from babelbus.errors import BabelbusError
from babelbus.listening.certificates import Tls
from babelbus.protocols.eventmesh.dialects import (
    BATCH_ERROR,
    BODY_ERROR,
    PUBLISH_ERROR,
    RESUBSCRIBE,
    SUBSCRIBE_ERROR,
    SUCCESS,
    UNSUBSCRIBE_ERROR,
    Answered,
    Dialect,
    EventsDialect,
    LegacyDialect,
    Published,
    RefusedError,
    Wanted,
)
from babelbus.protocols.eventmesh.hub import CORRELATION, PROTOCOL, Hub, correlation, without_correlation
from babelbus.protocols.eventmesh.records import FLAVOUR, InvalidMessageError
from babelbus.protocols.eventmesh.subscriptions import Subscribed
from babelbus.protocols.eventmesh.webhooks import Webhooks
from babelbus.records.record import Headers

log = logging.getLogger(__name__)

ACKS_MAX = 64
"""Deliveries that were written are acknowledged after so many, or when no more wait."""
ANSWERS_MAX = 16
"""Answers to subscriptions that wait for a stream; no further subscription of the stream is read meanwhile."""
WAITING_BYTES_MAX = 4 * 2**20
"""Payloads that wait for a stream; its groups are held from then on."""

Waiting = tuple[str, bytes | None, Headers, dict[str, str], Member | None, Delivery | None]
"""A delivery that waits for its stream: topic, payload, headers, further properties, and whom to tell it is written."""


class Stream:
    """The subscriptions of one stream, and what waits to be written to it."""

    def __init__(self, hub: Hub) -> None:
        self.woken = asyncio.Event()
        self.waiting: deque[Waiting] = deque()
        self.client = ""
        self.subscribed: dict[tuple[str, str], Subscribed] = {}
        """By group and topic."""
        self._hub = hub
        self._group_bytes = 0
        """Payloads of groups that wait or are written and not acknowledged."""
        self.ending = False
        """Whether the server stops."""

    async def subscribe(self, wanted: Wanted) -> None:
        """Add topics.

        Raises:
            BabelbusError: a topic or the group cannot be.
        """
        self.client = wanted.client
        for item in wanted.items:
            key = wanted.group, item.topic
            before = self.subscribed.get(key)
            if before is not None and before.item == item:
                continue
            if len(self.subscribed) >= self._hub.settings.subscriptions_max:
                raise RefusedError(SUBSCRIBE_ERROR, f"{self._hub.settings.subscriptions_max} topics are the limit")
            await self._hub.ensure_group(item.topic, wanted.group)
            if before is not None:
                before.end(self._hub)
            subscribed = self.subscribed[key] = Subscribed(item)
            subscribed.begin(self._hub, wanted.group, self._deliver, self._broadcast, self._ask)

    def unsubscribe(self, group: str, topics: Sequence[str]) -> bool:
        """End subscriptions; return whether there was one."""
        found = [self.subscribed.pop((group, topic), None) for topic in topics]
        for subscribed in found:
            if subscribed is not None:
                subscribed.end(self._hub)
        return any(found)

    def written(self, done: Sequence[tuple[Member, Delivery]]) -> None:
        """Acknowledge deliveries: gRPC's clients send no acknowledgement (7.4)."""
        by_member: dict[Member, list[Delivery]] = {}
        was_full = self._group_bytes > WAITING_BYTES_MAX
        for member, delivery in done:
            by_member.setdefault(member, []).append(delivery)
            self._group_bytes -= len(delivery.payload or b"")
        if was_full and self._group_bytes <= WAITING_BYTES_MAX:
            for subscribed in self.subscribed.values():
                if subscribed.member is not None:
                    subscribed.member.resume()
        for member, deliveries in by_member.items():
            if not member.closed:
                member.ack(deliveries)

    def close(self) -> None:
        """End all subscriptions."""
        for subscribed in self.subscribed.values():
            subscribed.end(self._hub, lost=not self._hub.stopping)
        self.subscribed.clear()

    def _deliver(self, subscribed: Subscribed, deliveries: Sequence[Delivery]) -> None:
        member, topic = subscribed.member, subscribed.item.topic
        self._group_bytes += sum(len(one.payload or b"") for one in deliveries)
        if self._group_bytes > WAITING_BYTES_MAX and member is not None:
            member.hold()
        self._add([(topic, one.payload, one.headers, {}, member, one) for one in deliveries])

    def _broadcast(self, subscribed: Subscribed, events: Sequence[Event]) -> None:
        room = max(self._hub.settings.window - len(self.waiting), 0)
        if len(events) > room:
            self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc(len(events) - room)
        self._add([(subscribed.item.topic, one.payload, one.headers, {}, None, None) for one in events[:room]])

    def _ask(self, subscribed: Subscribed, question: Question) -> None:
        if len(self.waiting) >= self._hub.settings.window:
            self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc()
            return
        more = correlation(self._hub.remember(question))
        self._add([(subscribed.item.topic, question.payload, question.headers, more, None, None)])

    def _add(self, waiting: Sequence[Waiting]) -> None:
        self.waiting += waiting
        self.woken.set()


class RpcServer:
    """The gRPC listener."""

    def __init__(self, hub: Hub, webhooks: Webhooks) -> None:
        self._hub = hub
        self._webhooks = webhooks
        self._streams: set[Stream] = set()
        self._server: Any = None

    # -- life --------------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, str]]:
        """Return the subscriptions of all streams, in the server's loop."""
        return [
            {"group": group, "topic": topic, "mode": subscribed.item.mode, "type": subscribed.item.type,
             "client": stream.client, "protocol": "grpc"}
            for stream in self._streams
            for (group, topic), subscribed in stream.subscribed.items()
        ]  # fmt: skip

    async def start(self, host: str, port: int, tls: Tls | None = None) -> str:
        """Start to listen, with TLS alone if there is a certificate; return the address.

        Raises:
            OSError: the address is taken.
        """
        settings = self._hub.settings
        server = self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.grpc_bytes_max),
                ("grpc.max_send_message_length", settings.body_bytes_max),
                ("grpc.max_concurrent_streams", settings.streams_max),
                ("grpc.keepalive_time_ms", int(settings.idle_seconds * 1000) + 1),  # finds clients that vanished (7.6)
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=settings.calls_max,
        )
        for dialect in (LegacyDialect(self._hub.clock.now_ms), EventsDialect()):
            server.add_generic_rpc_handlers(tuple(self._handlers(dialect)))
        try:
            if tls is None:
                bound = server.add_insecure_port(f"{host}:{port}")
            else:
                bound = server.add_secure_port(f"{host}:{port}", make_credentials(tls))
        except RuntimeError as error:
            raise OSError(f"{host}:{port}: {error}") from None
        await server.start()
        return f"{host}:{bound}"

    async def stop(self, seconds: float) -> None:
        """End all streams, and the calls that are not answered after some seconds."""
        for stream in self._streams:
            stream.ending = True
            stream.woken.set()
        if self._server is not None:
            await self._server.stop(seconds)

    def _handlers(self, dialect: Dialect) -> list[Any]:
        """Return the handlers of the services of a package, by its descriptors."""
        methods = {
            "publish": self._publish,
            "publishOneWay": self._publish_one_way,
            "batchPublish": self._publish_batch,
            "batchPublishOneWay": self._publish_batch_one_way,
            "requestReply": self._request,
            "subscribe": self._subscribe,
            "subscribeStream": self._stream,
            "unsubscribe": self._unsubscribe,
            "heartbeat": self._beat,
        }
        found = []
        for service in dialect.messages.DESCRIPTOR.services_by_name.values():
            handlers = {}
            for method in service.methods:
                is_stream = method.name == "subscribeStream"
                make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
                handlers[method.name] = make(
                    partial(methods[method.name], dialect),
                    request_deserializer=_class_of(method.input_type).FromString,
                    response_serializer=_class_of(method.output_type).SerializeToString,
                )
            found.append(grpc.method_handlers_generic_handler(service.full_name, handlers))
        return found

    # -- unary calls -------------------------------------------------------------------------------------------------

    async def _publish(self, dialect: Dialect, message: Any, _context: Any) -> Any:
        try:
            await self._store([dialect.read_publication(message)])
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        except BabelbusError as error:
            return dialect.outcome(PUBLISH_ERROR, str(error))
        return dialect.outcome(SUCCESS, "success")

    async def _publish_batch(self, dialect: Dialect, message: Any, _context: Any) -> Any:
        try:
            await self._store(dialect.read_batch(message))
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        except BabelbusError as error:
            return dialect.outcome(BATCH_ERROR, str(error))
        return dialect.outcome(SUCCESS, "success")

    async def _publish_one_way(self, dialect: Dialect, message: Any, context: Any) -> Any:
        await self._publish(dialect, message, context)
        return Empty()

    async def _publish_batch_one_way(self, dialect: Dialect, message: Any, context: Any) -> Any:
        await self._publish_batch(dialect, message, context)
        return Empty()

    async def _store(self, published: Sequence[Published]) -> None:
        await self._hub.publish([one.event for one in published]).wait()

    async def _request(self, dialect: Dialect, message: Any, context: Any) -> Any:
        hub = self._hub
        try:
            asked = dialect.read_publication(message)
            event = asked.event
            deadline = hub.clock.monotonic() + asked.ttl_ms / 1000
            identity = Identity(f"{PROTOCOL}:{asked.group}", asked.group, None)
            request = hub.broker.request(event.subject, event.payload, event.headers, deadline, identity)
            await request.wait()
        except BabelbusError as error:
            answer = dialect.failed_request(error)
            if answer is None:
                await context.abort(_status(error), str(error))
            return answer
        reply = request.reply
        assert reply is not None
        flavour = [pair for pair in event.headers if pair[0] == FLAVOUR]
        headers = (*flavour, *(pair for pair in reply.headers if pair[0] != FLAVOUR))
        return dialect.delivery(event.subject, reply.payload, headers, {}, hub.next_number())

    async def _subscribe(self, dialect: Dialect, message: Any, _context: Any) -> Any:
        try:
            wanted = dialect.read_subscription(message)
            if isinstance(wanted, Answered) or not wanted.urls:
                raise RefusedError(BODY_ERROR, "url is missing")
            url = wanted.urls[0]
            await self._webhooks.subscribe(wanted.group, wanted.items, url, wanted.idc, wanted.pid).wait()
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        except BabelbusError as error:
            return dialect.outcome(SUBSCRIBE_ERROR, str(error))
        return dialect.outcome(SUCCESS, "success")

    async def _unsubscribe(self, dialect: Dialect, message: Any, _context: Any) -> Any:
        try:
            wanted = dialect.read_subscription(message)
            if isinstance(wanted, Answered):
                raise RefusedError(BODY_ERROR, "a reply is no subscription")
            await self._remove(wanted).wait()
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        except BabelbusError as error:
            return dialect.outcome(UNSUBSCRIBE_ERROR, str(error))
        return dialect.outcome(SUCCESS, "success")

    def _remove(self, wanted: Wanted) -> Promise:
        """End the subscriptions of one client alone (8.6)."""
        topics = [item.topic for item in wanted.items]
        for stream in [stream for stream in self._streams if stream.client == wanted.client]:
            stream.unsubscribe(wanted.group, topics)
        urls = wanted.urls or self._webhooks.urls_of(wanted.group, wanted.pid)
        return all_of([self._webhooks.unsubscribe(wanted.group, topics, url, wanted.pid) for url in urls])

    async def _beat(self, dialect: Dialect, message: Any, _context: Any) -> Any:
        try:
            wanted = dialect.read_heartbeat(message)
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        if not wanted.is_subscriber:
            return dialect.outcome(BODY_ERROR, "clientType is SUB")
        known = []
        streams = [stream for stream in self._streams if stream.client == wanted.client]
        for item, url in zip(wanted.items, wanted.urls, strict=True):
            key = wanted.group, item.topic
            has_stream = any(key in stream.subscribed for stream in streams)
            known.append(has_stream or self._webhooks.beat(*key, url))
        if all(known):
            return dialect.outcome(SUCCESS, "success")
        return dialect.outcome(RESUBSCRIBE, "no such subscription, subscribe again")

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, dialect: Dialect, requests: AsyncIterator[Any], context: Any) -> None:
        stream = Stream(self._hub)
        self._streams.add(stream)
        answers: deque[Any] = deque()
        room = asyncio.Semaphore(ANSWERS_MAX)
        reading = asyncio.get_running_loop().create_task(self._read(dialect, stream, requests, answers, room))
        reading.add_done_callback(lambda _: stream.woken.set())
        try:
            while not reading.done() and not stream.ending:
                await stream.woken.wait()
                stream.woken.clear()
                while answers:
                    await context.write(answers.popleft())
                    room.release()
                await self._write(dialect, stream, context)
            while answers:
                await context.write(answers.popleft())
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            self._streams.discard(stream)
            stream.close()

    async def _write(self, dialect: Dialect, stream: Stream, context: Any) -> None:
        """Write what waits; what is written counts as acknowledged."""
        waiting, number = stream.waiting, self._hub.next_number
        done: list[tuple[Member, Delivery]] = []
        try:
            while waiting:
                topic, payload, headers, more, member, delivery = waiting[0]
                await context.write(dialect.delivery(topic, payload, headers, more, number()))
                waiting.popleft()
                if member is not None and delivery is not None:
                    done.append((member, delivery))
                    if len(done) >= ACKS_MAX:
                        stream.written(done)
                        done = []
        finally:
            stream.written(done)

    async def _read(
        self,
        dialect: Dialect,
        stream: Stream,
        requests: AsyncIterator[Any],
        answers: deque[Any],
        room: asyncio.Semaphore,
    ) -> None:
        """Handle the subscriptions and replies of a stream until the client ends it."""
        async for message in requests:
            code, text = SUCCESS, "subscribe success"
            try:
                found = dialect.read_subscription(message)
                if isinstance(found, Answered):
                    self._respond(found)
                    continue
                await stream.subscribe(found)
            except InvalidMessageError as error:
                log.info("%s: a reply cannot be read: %s", PROTOCOL, error)
                continue
            except RefusedError as error:
                code, text = error.code, str(error)
            except BabelbusError as error:
                code, text = SUBSCRIBE_ERROR, str(error)
            await room.acquire()
            answers.append(dialect.acknowledgement(message, code, text))
            stream.woken.set()
            if code != SUCCESS:
                return

    def _respond(self, answered: Answered) -> None:
        name = answered.properties.get(CORRELATION, "")
        self._hub.respond(name, Reply(answered.event.payload, without_correlation(answered.event.headers)))


def _status(error: BabelbusError) -> Any:
    if isinstance(error, RequestTimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, RefusedError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE if isinstance(error, NoRespondersError) else grpc.StatusCode.FAILED_PRECONDITION


def make_credentials(tls: Tls) -> Any:
    """Return the credentials of gRPC, which asks at each handshake whether there is a newer certificate."""
    used = tls.context

    def read() -> Any:
        settings = tls.settings
        authority = None if settings.client_ca_file is None else Path(settings.client_ca_file).read_bytes()
        pair = Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def fetch() -> Any:
        nonlocal used
        if tls.context is used:
            return None
        used = tls.context
        return read()

    required = tls.settings.client_certificates == "required"
    return grpc.dynamic_ssl_server_credentials(read(), fetch, required)


def _class_of(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)
