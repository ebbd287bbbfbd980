"""The calls of one connection over plain HTTP: requests that a service behind an MQ answers.

Specification: docs/specifications/zbus.md, 6.3.
"""

from typing import Generic

from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.core.request import Request, RequestAbandonedError, RequestTimeoutError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.errors import UnsendableMessageError
from babelbus.protocols.zbus.hub import PROTOCOL, Hub
from babelbus.protocols.zbus.messages import Message, text_reply
from babelbus.protocols.zbus.publisher import Asked, Framing, Publisher

NO_ANSWER = "no service has answered in time"
UNANSWERED = (RequestTimeoutError, RequestAbandonedError)


class Caller(Generic[Asked]):
    """Who calls; `source` is the id of the connection, to which services send their answers."""

    def __init__(
        self, hub: Hub, outbox: Outbox, framing: Framing[Asked], publisher: Publisher[Asked], *, source: str
    ) -> None:
        self._hub = hub
        self._outbox = outbox
        self._framing = framing
        self._publisher = publisher
        self._source = source
        self._calls: dict[Request[Message], None] = {}

    def call(self, message: Message, mq: str, request_id: str, asked: Asked) -> None:
        """Publish a request, and answer it when a service does: behind the answers to those before it.

        Raises:
            NotFoundError: there is no such MQ.
        """
        hub = self._hub
        topic = hub.topic(mq)
        event = self._publisher.event(mq, message)
        self._publisher.settle()
        deadline = hub.clock.monotonic() + hub.settings.rpc_timeout_seconds
        call = hub.calls.begin(mq, (self._source, request_id), deadline)
        self._calls[call] = None
        call.when_done(self._forget)
        self._outbox.answer_when([call], lambda: self._encode(call, request_id, asked))
        if call.done:
            return

        def stored(receipt: Receipt) -> None:
            if receipt.error is not None:
                hub.calls.fail(call, receipt.error)

        publication = Publication(self._publisher.principal, PROTOCOL, [event], topic.name)
        hub.broker.publish(publication).when_done(stored)
        hub.published(topic)

    def _forget(self, call: Request[Message]) -> None:
        self._calls.pop(call, None)

    def _encode(self, call: Request[Message], request_id: str, asked: Asked) -> bytes:
        reply = call.reply
        if reply is None:
            status = m.GATEWAY_TIMEOUT if isinstance(call.error, UNANSWERED) else m.FAILED
            text = NO_ANSWER if isinstance(call.error, RequestTimeoutError) else str(call.error)
            reply = text_reply(request_id, status, text)
        try:
            return self._framing.reply(reply, asked)
        except UnsendableMessageError as error:
            return self._framing.reply(text_reply(request_id, error.status, error.text), asked)

    def take_reply(self, message: Message) -> bool:
        """Answer a call with the reply of a service; return `False` if nobody waits for the reply."""
        return self._hub.calls.respond((self._source, message.headers.get("id", "")), message)

    def close(self) -> None:
        """Cancel the calls: the connection is gone."""
        for call in list(self._calls):
            self._hub.calls.abandon(call)
