"""Publications and calls of one connection, and its answers in the order of its messages.

Specification: docs/specifications/zbus.md, 3, 4 and 6.3. The publications of a chunk are appended once for each MQ.
The answers of a chunk go out with one write, when all that it published is stored, and in front of every delivery that
they caused.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from babelbus.core.access import Action, Identity, refusal
from babelbus.core.publish import Bodies
from babelbus.core.receipt import Promise, Receipt
from babelbus.core.request import Reply, Request
from babelbus.core.topic import Topic
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus.errors import UnsendableMessageError
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Message, text_reply
from babelbus.protocols.zbus.records import ORIGIN_PREFIX
from babelbus.protocols.zbus.rooted import relative_answer
from babelbus.protocols.zbus.services import answer_of, failure_of, refusal_of
from babelbus.protocols.zbus.stored import Recorder

Asked = TypeVar("Asked")
"""The part of a request that its answer needs."""
AskedOf = TypeVar("AskedOf", contravariant=True)
REPLIES_BYTES = 2**18
"""So much of answers is collected before they go to the outbox, which knows what it may hold."""


class Framing(Protocol[AskedOf]):
    """How the connection encodes its answers."""

    def reply(self, message: Message, asked: AskedOf) -> bytes:
        """Return an answer that is a message.

        Raises:
            UnsendableMessageError: it cannot be said here.
        """

    def published(self, mq: str, ids: Sequence[str], asked: AskedOf) -> list[bytes]:
        """Return the answers to `pub`, which are most of all answers."""

    def join(self, answers: list[bytes]) -> bytes:
        """Return the bytes of answers for one write."""


class _Batch:
    """The publications of one chunk to one MQ."""

    __slots__ = ("bodies", "receipt", "size_bytes", "timestamp", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.timestamp = topic.stamp()
        self.bodies: list[bytes] = []
        self.receipt: Receipt
        self.size_bytes = 0


_Reply = tuple[_Batch | None, list[bytes], Sequence[str], Asked]
"""Answers; with a batch they are true once it is stored, and the ids are those of its messages."""


class Publisher(Generic[Asked]):
    """Gathers what one connection publishes and is answered, until `settle` or `store`.

    `stamp` are the headers that say who sent a message; its source is the id of the connection, to which services send
    their answers.
    """

    def __init__(self, hub: Hub, outbox: Outbox, framing: Framing[Asked], stamp: Mapping[str, str]) -> None:
        self._hub = hub
        self._outbox = outbox
        self._framing = framing
        self._source = stamp["source"]
        self._recorder = Recorder(stamp)
        self._principal = Identity(f"{ORIGIN_PREFIX}#{self._source}", self._source, None)
        self._batches: dict[str, _Batch] = {}
        self._receipts: list[Receipt] = []
        self._replies: list[_Reply[Asked]] = []
        self._replies_bytes = 0
        self._calls: dict[Request[Message], None] = {}
        self._asked: dict[Request[Reply], None] = {}
        """Requests to responders of other protocols that wait for their reply."""

    @property
    def principal(self) -> Identity:
        """The client, as the broker asks for its rights; set before each message if it may change."""
        return self._principal

    @principal.setter
    def principal(self, principal: Identity) -> None:
        if principal is not self._principal:
            self._append()  # each batch is of one principal
            self._principal = principal

    @property
    def is_idle(self) -> bool:
        """Whether everything is answered, also what responders of other protocols were asked."""
        return not (self._replies or self._receipts or self._batches or self._calls or self._asked)

    # -- what is gathered --------------------------------------------------------------------------------------------

    def reply(self, reply: Message, asked: Asked) -> None:
        """Answer a message, behind the answers to those before it."""
        encoded = self._encode_reply(reply, asked)
        self._replies.append((None, [encoded], (), asked))
        self._replies_bytes += len(encoded)

    def publish(
        self, message: Message, mq: str, ids: Sequence[str], payloads: Sequence[bytes], asked: Asked, *, acked: bool
    ) -> None:
        """Publish messages that differ from `message` in id and body alone, and answer them when they are stored.

        Without an ack they are answered only if that fails (section 4).

        Raises:
            AccessRefusedError: the principal may not publish the messages.
            NotFoundError: there is no such MQ.
            MalformedMessageError: a header is no UTF-8.
        """
        batch = self._batches.get(mq)
        if batch is None:
            self._check_known(mq)
            batch = _Batch(self._hub.topic(mq))
        bodies = self._recorder.encode(message, ids, payloads, batch.timestamp)
        if not self._hub.broker.may_publish_all(self._principal, batch.topic):
            self._check_subjects(batch, bodies)
        self._batches[mq] = batch
        batch.bodies += bodies
        batch.size_bytes += sum(map(len, payloads))
        answers = self._framing.published(self._principal.relative(mq), ids, asked) if acked else []
        self._replies.append((batch, answers, ids, asked))
        self._replies_bytes += sum(map(len, answers))

    def _check_known(self, mq: str) -> None:
        """Check that the principal may publish something to an MQ, which need not be there: it does not hear that.

        Raises:
            AccessRefusedError: it may not.
        """
        if not self._hub.broker.may_some(self._principal, Action.PUBLISH, mq):
            raise refusal(self._principal, Action.PUBLISH, mq)

    def _check_subjects(self, batch: _Batch, bodies: list[bytes]) -> None:
        """Check each subject: a message that is refused may not refuse the others of its batch.

        Raises:
            AccessRefusedError: the principal may not publish under a subject.
        """
        content = Bodies(bodies, [batch.timestamp] * len(bodies), sum(map(len, bodies)))
        subjects = batch.topic.subjects_of(content)
        refused = self._hub.broker.refuse_events(self._principal, batch.topic, subjects)
        if refused is not None:
            raise refused

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Publish and answer the messages gathered: behind each chunk, and before the outbox is asked."""
        if not self._replies and not self._receipts:
            return
        self._append()
        receipts, self._receipts = self._receipts, []
        replies, self._replies = self._replies, []
        weight, self._replies_bytes = self._replies_bytes, 0
        if replies:
            self._outbox.answer_when(receipts, lambda: self._encode(replies), weight)

    def store(self) -> bool:
        """Publish the messages before a command; return `False` if they are not stored yet, or the outbox is full."""
        if self._replies_bytes > REPLIES_BYTES:
            self.settle()
        if self._outbox.full:
            return False
        topics = [batch.topic for batch in self._batches.values()]
        self._append()
        for topic in topics:
            topic.flush()
        receipts = [receipt for receipt in self._receipts if not receipt.done]
        if not receipts:
            return True
        self.wait(*receipts)
        return False

    def wait(self, *receipts: Promise) -> None:
        """Keep the outbox full until the receipts are done: later requests of the connection are put off."""
        self.settle()
        self._outbox.answer_when(receipts, bytes, self._outbox.bytes_max)

    def _append(self) -> None:
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            if batch.bodies:  # else each of its messages was refused
                batch.receipt = self._publish(batch)
                self._receipts.append(batch.receipt)

    def _publish(self, batch: _Batch) -> Receipt:
        bodies, batch.bodies = batch.bodies, []
        return self._hub.publish(self.principal, batch.topic, bodies, batch.timestamp, batch.size_bytes)

    def _encode(self, replies: list[_Reply[Asked]]) -> bytes:
        failed = {batch for batch, _, _, _ in replies if batch is not None and batch.receipt.error is not None}
        if not failed:
            return self._framing.join([answer for _, answers, _, _ in replies for answer in answers])
        encoded: list[bytes] = []
        for batch, answers, ids, asked in replies:
            if batch is None or batch not in failed:
                encoded += answers
            else:
                error = batch.receipt.error
                encoded += [self._encode_reply(refusal_of(error, request_id), asked) for request_id in ids]
        return self._framing.join(encoded)

    def _encode_reply(self, reply: Message, asked: Asked) -> bytes:
        root = self._principal.root
        if root is not None:
            reply = relative_answer(reply, root)
        return self._encode_sendable(reply, asked)

    def _encode_sendable(self, reply: Message, asked: Asked) -> bytes:
        """Return an answer, or that the framing cannot say it; then without the id, which may be the reason."""
        try:
            return self._framing.reply(reply, asked)
        except UnsendableMessageError as error:
            return self._framing.reply(text_reply(None, error.status, error.text), asked)

    # -- calls: requests over plain HTTP that a service behind an MQ answers -----------------------------------------

    def call(self, message: Message, mq: str, request_id: str, asked: Asked) -> None:
        """Send a request to the service, or to responders of other protocols; answer it behind those before it.

        Raises:
            AccessRefusedError: the principal may not publish to it.
            NotFoundError: there is no such MQ.
            MalformedMessageError: a header is no UTF-8.
        """
        hub = self._hub
        self._check_known(mq)
        batch = None
        if not hub.services.are_elsewhere(mq):
            batch = _Batch(hub.topic(mq))
            batch.bodies = self._recorder.encode(message, (request_id,), (message.body or b"",), batch.timestamp)
            batch.size_bytes = len(message.body or b"")
        self.settle()
        deadline = hub.clock.monotonic() + hub.settings.rpc_timeout_seconds
        # Without a subject where there is no MQ: nobody would ever look for the call among the abandoned ones.
        call = hub.calls.begin("" if batch is None else mq, (self._source, request_id), deadline)
        self._calls[call] = None
        call.when_done(lambda done: self._calls.pop(done, None))
        self._outbox.answer_when([call], lambda: self._encode_call(call, request_id, asked))
        if call.done:
            return
        if batch is None:

            def replied(request: Request[Reply]) -> None:
                if not call.done:
                    hub.calls.respond(call.key, answer_of(request, request_id))

            self.ask(message, mq, deadline).when_done(replied)
            return

        def stored(receipt: Receipt) -> None:
            if receipt.error is not None:
                hub.calls.fail(call, receipt.error)

        self._publish(batch).when_done(stored)

    def ask(self, message: Message, subject: str, deadline: float) -> Request[Reply]:
        """Send a message as a request to the responders of a subject.

        Raises:
            MalformedMessageError: a header is no UTF-8.
        """
        headers = self._recorder.headers(message)
        request = self._hub.broker.request(subject, message.body, headers, deadline, self.principal)
        self._asked[request] = None
        request.when_done(lambda done: self._asked.pop(done, None))
        return request

    def _encode_call(self, call: Request[Message], request_id: str, asked: Asked) -> bytes:
        reply = call.reply
        if reply is None:
            reply, root = failure_of(call.error, request_id), self._principal.root
            if root is not None:
                reply = relative_answer(reply, root)
        return self._framing.join([self._encode_sendable(reply, asked)])

    def take_reply(self, message: Message) -> bool:
        """Answer a call with the reply of a service; return `False` if nobody waits for the reply."""
        return self._hub.calls.respond((self._source, message.headers.get("id", "")), message)

    def close(self) -> None:
        """End the calls and requests: the connection is gone."""
        for call in list(self._calls):
            self._hub.calls.abandon(call)
        for request in list(self._asked):
            self._hub.broker.responders.requests.abandon(request)
