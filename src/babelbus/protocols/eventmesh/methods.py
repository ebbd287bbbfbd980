"""The methods of EventMesh over gRPC: publish, ask, subscribe webhooks, heartbeat (specification, 7 and 8)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from google.protobuf import message_factory
from google.protobuf.empty_pb2 import Empty

from babelbus.core.access import Identity
from babelbus.core.receipt import Promise, all_of
from babelbus.core.record import Event
from babelbus.core.request import Reply, Request
from babelbus.core.work import Work, settled
from babelbus.errors import BabelbusError
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
    code_of,
)
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.messages import CLOUD_EVENT, MESSAGE
from babelbus.protocols.eventmesh.records import FLAVOUR, convert_reply
from babelbus.protocols.eventmesh.streams import Stream
from babelbus.protocols.eventmesh.webhooks import Webhooks

Answer = Callable[[Any], None]
"""Sends the answer of a call: a message, or the error with which the call itself fails."""
Handle = Callable[[Dialect, Any, Identity | None, Answer], Request[Reply] | None]
"""Carries out a call, with a principal while the gate is on; returns a request that the answer waits for."""


class Method(msgspec.Struct, frozen=True):
    """A method of one package; a streaming method has no `handle`."""

    dialect: Dialect
    read: Callable[[bytes], Any]
    handle: Handle | None


class Methods:
    """The methods of both packages, by their paths. `streams` returns the streams of all connections."""

    def __init__(self, hub: Hub, webhooks: Webhooks, streams: Callable[[], Iterable[Stream]]) -> None:
        self.by_path: dict[bytes, Method] = {}
        self._hub = hub
        self._webhooks = webhooks
        self._streams = streams
        for dialect in (LegacyDialect(hub.clock.now_ms), EventsDialect()):
            self._add(dialect)

    def _add(self, dialect: Dialect) -> None:
        """Add the methods of a package, by its descriptors."""
        handlers: dict[str, Handle | None] = {
            "publish": self._publish,
            "publishOneWay": self._publish_one_way,
            "batchPublish": self._publish_batch,
            "batchPublishOneWay": self._publish_batch_one_way,
            "requestReply": self._request,
            "subscribe": self._subscribe,
            "subscribeStream": None,
            "unsubscribe": self._unsubscribe,
            "heartbeat": self._beat,
        }
        for service in dialect.messages.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}".encode()
                read = message_factory.GetMessageClass(method.input_type).FromString
                self.by_path[path] = Method(dialect, read, handlers[method.name])

    # -- unary calls -------------------------------------------------------------------------------------------------

    def refuse(self, method: Method, path: bytes, error: BabelbusError, answer: Answer) -> None:
        """Answer a call whose caller is not known."""
        if path.endswith(b"OneWay"):
            answer(Empty())
        elif path.endswith(b"requestReply"):
            answer(method.dialect.failed_request(error) or error)
        else:
            answer(_outcome(method.dialect, BODY_ERROR, error))

    def _publish(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        source = None if principal is None else principal.source
        self._store(dialect, PUBLISH_ERROR, principal, answer, lambda: [dialect.read_publication(message, source)])

    def _publish_batch(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        source = None if principal is None else principal.source
        self._store(dialect, BATCH_ERROR, principal, answer, lambda: dialect.read_batch(message, source))

    def _publish_one_way(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        self._publish(dialect, message, principal, lambda _: answer(Empty()))

    def _publish_batch_one_way(
        self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer
    ) -> None:
        self._publish_batch(dialect, message, principal, lambda _: answer(Empty()))

    def _store(
        self,
        dialect: Dialect,
        failure: str,
        principal: Identity | None,
        answer: Answer,
        read: Callable[[], Sequence[Published]],
    ) -> None:
        """Publish what `read` returns, and answer when it is stored."""
        try:
            receipt = self._hub.publish([one.event for one in read()], principal)
        except BabelbusError as error:
            answer(_outcome(dialect, failure, error, principal))
        else:
            receipt.when_done(lambda done: answer(_outcome(dialect, failure, done.error, principal)))

    def _request(
        self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer
    ) -> Request[Reply] | None:
        try:
            asked = dialect.read_publication(message, None if principal is None else principal.source)
            event = asked.event
            identity = principal or Identity(f"{PROTOCOL}:{asked.group}", asked.group, None)
            request = self._hub.ask(event, asked.ttl_ms, identity)
        except BabelbusError as error:
            answer(dialect.failed_request(error) or error)
            return None
        work = Work(self._read_reply(dialect, event, request))
        work.when_done(lambda _: answer(work.value if work.error is None else work.error))
        return None if request.done else request

    async def _read_reply(self, dialect: Dialect, event: Event, request: Request[Reply]) -> Any:
        """Return the answer to a request, as soon as there is a reply.

        Raises:
            BabelbusError: there is no reply, and the call fails.
        """
        await settled(request)
        if request.error is not None:
            failed = dialect.failed_request(request.error)
            if failed is None:
                raise request.error
            return failed
        reply = request.reply
        assert reply is not None
        flavour = CLOUD_EVENT if dict(event.headers).get(FLAVOUR) == b"cloudevents" else MESSAGE
        headers = convert_reply(flavour, reply.payload, reply.headers)
        return dialect.delivery(event.subject, reply.payload, headers, {}, self._hub.next_number())

    def _subscribe(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        try:
            wanted = dialect.read_subscription(message)
            if isinstance(wanted, Answered) or not wanted.urls:
                raise RefusedError(BODY_ERROR, "url is missing")
            subscribed = self._webhooks.subscribe(
                wanted.group, wanted.items, wanted.urls[0], wanted.idc, wanted.pid, principal, dialect.description
            )
        except BabelbusError as error:
            answer(_outcome(dialect, SUBSCRIBE_ERROR, error, principal))
        else:
            subscribed.when_done(lambda done: answer(_outcome(dialect, SUBSCRIBE_ERROR, done.error, principal)))

    def _unsubscribe(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        try:
            wanted = dialect.read_subscription(message)
            if isinstance(wanted, Answered):
                raise RefusedError(BODY_ERROR, "a reply is no subscription")
            removed = self._remove(wanted, principal)
        except BabelbusError as error:
            answer(_outcome(dialect, UNSUBSCRIBE_ERROR, error, principal))
        else:
            removed.when_done(lambda done: answer(_outcome(dialect, UNSUBSCRIBE_ERROR, done.error, principal)))

    def _remove(self, wanted: Wanted, principal: Identity | None) -> Promise:
        """End the subscriptions of one client alone (8.6); clients name themselves, principals do not."""
        topics = [item.topic for item in wanted.items]
        for stream in self._streams_of(wanted, principal):
            stream.unsubscribe(wanted.group, topics)
        webhooks = self._webhooks
        urls = wanted.urls or webhooks.urls_of(wanted.group, wanted.pid, principal)
        return all_of([webhooks.unsubscribe(wanted.group, topics, url, wanted.pid, principal) for url in urls])

    def _streams_of(self, wanted: Wanted, principal: Identity | None) -> list[Stream]:
        """Return the streams of a client, while the gate is on those of its principal alone."""
        return [
            stream
            for stream in self._streams()
            if stream.client == wanted.client and (principal is None or stream.principal == principal.name)
        ]

    def _beat(self, dialect: Dialect, message: Any, principal: Identity | None, answer: Answer) -> None:
        answer(self._known(dialect, message, principal))

    def _known(self, dialect: Dialect, message: Any, principal: Identity | None) -> Any:
        """Return the answer to a heartbeat."""
        try:
            wanted = dialect.read_heartbeat(message)
        except RefusedError as error:
            return dialect.outcome(error.code, str(error))
        if not wanted.is_subscriber:
            return dialect.outcome(BODY_ERROR, "clientType is SUB")
        known = []
        streams = self._streams_of(wanted, principal)
        for item, url in zip(wanted.items, wanted.urls, strict=True):
            key = wanted.group, item.topic
            has_stream = any(key in stream.subscribed and not stream.subscribed[key].is_over for stream in streams)
            known.append(has_stream or self._webhooks.beat(*key, url, principal))
        if all(known):
            return dialect.outcome(SUCCESS, "success")
        return dialect.outcome(RESUBSCRIBE, "no such subscription, subscribe again")


def _outcome(dialect: Dialect, failure: str, error: BabelbusError | None, principal: Identity | None = None) -> Any:
    """Return the answer to a unary call, with the names as the principal knows them."""
    if error is None:
        return dialect.outcome(SUCCESS, "success")
    text = str(error) if principal is None else principal.relative_text(str(error))
    return dialect.outcome(code_of(error, failure), text)
