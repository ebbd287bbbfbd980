"""Services of zbus answer requests of the bus, and responders of the bus answer calls of zbus (docs/protocols/zbus.md).

A question of the core becomes the message of a caller whose `source` is this server; the answer that a service routes
there becomes the reply. An MQ with subscribers that answer nothing lets the request time out.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from babelbus.core.access import SERVER, AccessRefusedError, Identity
from babelbus.core.broker import Broker
from babelbus.core.groups import GroupOwnedError, InvalidGroupNameError
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import Receipt
from babelbus.core.request import (
    STOPS,
    NoRespondersError,
    Question,
    Reply,
    Request,
    RequestAbandonedError,
    RequestFailedError,
    RequestTimeoutError,
)
from babelbus.core.router import Subscription
from babelbus.core.settings import InvalidSettingError
from babelbus.core.subject import exactly
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError, InvalidTopicNameError
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.calls import Calls
from babelbus.protocols.zbus.errors import MalformedMessageError, NotFoundError, RequestError
from babelbus.protocols.zbus.messages import HEADERS_MAX, PROTOCOL, Message, text_reply
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, from_record
from babelbus.protocols.zbus.stored import Recorder

NOT_ROUTED: Final = frozenset({"cmd", "target", "source", "remote-addr"}) | m.SECRETS
"""Headers that stay behind when an answer goes to its caller."""
NO_ANSWER: Final = "no service has answered in time"
BYTES_TYPE: Final = "application/octet-stream"
STATUS_OF: Final = (
    (QuotaExceededError, m.FORBIDDEN),
    (AccessRefusedError, m.FORBIDDEN),
    (GroupOwnedError, m.FORBIDDEN),
    (InvalidGroupNameError, m.BAD_REQUEST),
    (InvalidSettingError, m.BAD_REQUEST),
    (InvalidTopicNameError, m.BAD_REQUEST),
    (NoRespondersError, m.NOT_FOUND),
)
Publish = Callable[[Identity, Topic, list[bytes], int, int], Receipt]


class Services:
    """The MQs with subscribers, as responders of the bus. `calls` are the requests that wait for an answer of an MQ."""

    def __init__(
        self,
        broker: Broker,
        calls: Calls,
        find_topic: Callable[[str], Topic | None],
        publish: Publish,
        new_id: Callable[[], str],
    ) -> None:
        self.id = new_id()
        """The `source` of questions, to which services route their answers."""
        self._broker = broker
        self._calls = calls
        self._find_topic = find_topic
        self._publish = publish
        self._new_id = new_id
        self._recorder = Recorder({"source": self.id})
        self._principal = Identity(f"{ORIGIN_PREFIX}#{self.id}", self.id, None)
        self._responders: dict[str, tuple[Subscription, int]] = {}
        """The responder of an MQ, and the number of its subscribers."""

    # -- subscribers -------------------------------------------------------------------------------------------------

    def add(self, mq: str) -> None:
        """Record one more subscriber of an MQ: the first one makes the MQ a responder."""
        responder, count = self._responders.get(mq, (None, 0))
        if responder is None:
            responder = self._broker.responders.add(exactly(mq), self._ask, PROTOCOL, SERVER)  # stored first
        self._responders[mq] = responder, count + 1

    def remove(self, mq: str) -> None:
        """Record one subscriber less."""
        responder, count = self._responders.pop(mq)
        if count > 1:
            self._responders[mq] = responder, count - 1
        else:
            self._broker.responders.remove(responder)

    def are_elsewhere(self, name: str) -> bool:
        """Return whether calls of a name go to other protocols: there are responders, and none of them is of zbus."""
        return name not in self._responders and self._broker.responders.answers(name)

    # -- questions of the bus ----------------------------------------------------------------------------------------

    def _ask(self, question: Question) -> BabelbusError | None:
        """Publish a question to its MQ."""
        topic = self._find_topic(question.subject)
        request_id = self._new_id()
        try:
            if topic is None:
                raise NotFoundError(m.mq_not_found(question.subject))
            timestamp, payload = topic.stamp(), question.payload or b""
            bodies = self._recorder.encode(call_of(question), (request_id,), (payload,), timestamp)
        except RequestError as error:
            return RequestFailedError(error.text)
        call = self._calls.begin(question.subject, (self.id, request_id), question.deadline)
        call.when_done(partial(self._answered, question))
        if not call.done:
            self._broker.responders.requests.when_done(question.key, lambda _: self._calls.abandon(call))
            receipt = self._publish(self._principal, topic, bodies, timestamp, len(payload))
            receipt.when_done(partial(self._stored, call))
        return None

    def _stored(self, call: Request[Message], receipt: Receipt) -> None:
        if receipt.error is not None:
            self._calls.fail(call, receipt.error)

    def take_reply(self, message: Message) -> bool:
        """Answer a question with the reply of a service; return `False` if nobody waits for the reply."""
        return self._calls.respond((self.id, message.headers.get("id", "")), message)

    def _answered(self, question: Question, call: Request[Message]) -> None:
        message = call.reply
        try:
            if message is not None:
                self._broker.respond(question.key, Reply(message.body, self._recorder.headers(message)))
            elif not isinstance(call.error, RequestTimeoutError):  # the requester has the same deadline
                raise call.error or RequestAbandonedError(STOPS)
        except BabelbusError as error:
            self._broker.decline(question.key, error)


def call_of(question: Question) -> Message:
    """Return a question as the message of a caller; its url is that of its requester, or the MQ alone.

    Raises:
        MalformedMessageError: it has more headers than a message may have.
    """
    message = from_record(question.payload, None, question.headers)
    if len(message.headers) > HEADERS_MAX:
        raise MalformedMessageError(f"{len(message.headers)} headers, limit {HEADERS_MAX}")
    headers = {name: value for name, value in message.headers.items() if name not in NOT_ROUTED} | {"ack": "false"}
    url = message.url or f"/{question.subject.removeprefix('/')}"
    return msgspec.structs.replace(message, headers=headers, url=url, status=None)


def answer_of(request: Request[Reply], request_id: str) -> Message:
    """Return the outcome of a request as the answer to a call of zbus: 200 unless the responder names a status."""
    reply = request.reply
    if reply is None:
        return failure_of(request.error, request_id)
    message = from_record(reply.payload, None, reply.headers)
    headers = {name: value for name, value in message.headers.items() if name not in NOT_ROUTED} | {"id": request_id}
    if message.body is not None:  # without a type HTTP would say JSON
        kinds = {"json": m.JSON_TYPE, "text": m.TEXT_TYPE, "bytes": BYTES_TYPE}
        headers.setdefault("content-type", kinds[message.body_kind])
    return Message(headers, None, None, message.status or m.OK, message.body, message.body_kind)


def failure_of(error: BabelbusError | None, request_id: str) -> Message:
    """Return the answer to a call without a reply."""
    if isinstance(error, RequestTimeoutError):
        return text_reply(request_id, m.GATEWAY_TIMEOUT, NO_ANSWER)
    if isinstance(error, RequestAbandonedError):
        return text_reply(request_id, m.GATEWAY_TIMEOUT, str(error))
    return refusal_of(error, request_id)


def refusal_of(error: BabelbusError | None, request_id: str | None) -> Message:
    """Return the answer to a request that the broker refuses."""
    status = next((status for kind, status in STATUS_OF if isinstance(error, kind)), m.FAILED)
    return text_reply(request_id, status, str(error))
