"""The calls of one connection over plain HTTP: requests that a service behind an MQ answers.

Specification: docs/specifications/zbus.md, 6.3.
"""

from typing import Generic

from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.calls import Call
from babelbus.protocols.zbus.errors import UnsendableMessageError
from babelbus.protocols.zbus.hub import PROTOCOL, Hub
from babelbus.protocols.zbus.messages import Message, text_reply
from babelbus.protocols.zbus.publisher import Asked, Framing, Publisher


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
        self._calls: dict[str, list[Call]] = {}

    def call(self, message: Message, mq: str, request_id: str, asked: Asked) -> None:
        """Publish a request, and answer it when a service does: behind the answers to those before it.

        Raises:
            NotFoundError: there is no such MQ.
        """
        topic = self._hub.topic(mq)
        event = self._publisher.event(mq, message)
        self._publisher.settle()
        call = self._hub.calls.begin(mq, self._source, request_id)
        self._calls.setdefault(request_id, []).append(call)

        def encode() -> bytes:
            assert call.reply is not None
            waiting = self._calls.get(request_id, [])
            if call in waiting:
                waiting.remove(call)
                if not waiting:
                    del self._calls[request_id]
            try:
                return self._framing.reply(call.reply, asked)
            except UnsendableMessageError as error:
                return self._framing.reply(text_reply(request_id, error.status, error.text), asked)

        self._outbox.answer_when([call.done], encode)

        def stored(receipt: Receipt) -> None:
            if receipt.error is not None:
                call.answer(text_reply(request_id, m.FAILED, str(receipt.error)))

        publication = Publication(self._publisher.principal, PROTOCOL, [event], topic.name)
        self._hub.broker.publish(publication).when_done(stored)
        self._hub.published(topic)

    def take_reply(self, message: Message) -> bool:
        """Return a call the answer of a service; `False`: nobody waits for it."""
        for call in self._calls.get(message.headers.get("id", ""), ()):
            if call.reply is None:
                call.answer(message)
                return True
        return False

    def close(self) -> None:
        """The connection is gone: nobody waits for its calls."""
        for calls in self._calls.values():
            for call in calls:
                if call.reply is None:
                    self._hub.calls.give_up(call)
                    call.answer(text_reply(call.id, m.GATEWAY_TIMEOUT, "the caller is gone"))
        self._calls.clear()
