"""Publications of one connection, and its answers in the order of its messages (docs/specifications/zbus.md, 3 and 4).

What a chunk publishes is appended together, once for each MQ. The answers of a chunk go out with one write, when all
that it published is stored, and in front of every delivery that they caused.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from babelbus.core.access import Identity
from babelbus.core.publish import Bodies, Content, Publication
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.errors import UnsendableMessageError
from babelbus.protocols.zbus.hub import PROTOCOL, Hub
from babelbus.protocols.zbus.messages import Message, flag, text_reply
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, to_record
from babelbus.protocols.zbus.runs import Run
from babelbus.protocols.zbus.stored import Mould, Recorder, encode_id

Asked = TypeVar("Asked")
"""What an answer must know of its request."""
AskedOf = TypeVar("AskedOf", contravariant=True)
REPLIES_BYTES = 2**18
"""So much of answers is collected before they go to the outbox, which knows what it may hold."""


class Framing(Protocol[AskedOf]):
    """How the connection says what it answers."""

    def reply(self, message: Message, asked: AskedOf) -> bytes:
        """Return the answer that says a message.

        Raises:
            UnsendableMessageError: it cannot be said here.
        """

    def published(self, mq: str, ids: Sequence[bytes], asked: AskedOf) -> bytes:
        """Return the answers to `pub`, which is most of what is asked, one behind the other; `ids` are UTF-8."""


class _Publication:
    """The publications of one chunk to one MQ."""

    __slots__ = ("bodies", "events", "receipts", "size_bytes", "timestamp", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.timestamp = topic.stamp()
        self.bodies: list[bytes] = []
        self.events: list[Event] = []
        """Where keys choose among several partitions."""
        self.receipts: list[Promise] = []
        self.size_bytes = 0

    @property
    def error(self) -> BabelbusError | None:
        return next((receipt.error for receipt in self.receipts if receipt.error is not None), None)


_Reply = tuple[_Publication | None, bytes, Sequence[bytes], Asked]
"""The bytes of answers; with a publication they are true once it is stored, and the ids are those of its messages."""


class Publisher(Generic[Asked]):
    """Gathers what one connection publishes and is answered, until `settle` or `store`.

    `stamp` are the headers that say who sent a message. `silent` says whether it may publish without an answer; where
    it may not, who wants no ack of a publication means a call (6.3).
    """

    def __init__(
        self, hub: Hub, outbox: Outbox, framing: Framing[Asked], *, stamp: Mapping[str, str], silent: bool
    ) -> None:
        self._hub = hub
        self._outbox = outbox
        self._framing = framing
        self._stamp = stamp
        self._silent = silent
        self._recorder = Recorder(stamp)
        self._principal = Identity(f"{ORIGIN_PREFIX}#{stamp['source']}", stamp["source"], None)
        self._publications: dict[str, _Publication] = {}
        self._receipts: list[Promise] = []
        self._replies: list[_Reply[Asked]] = []
        self._replies_bytes = 0
        self._known: Message | None = None
        self._mq = ""
        self._acked = True
        self._mould: Mould

    # -- what is gathered --------------------------------------------------------------------------------------------

    def reply(self, reply: Message, asked: Asked) -> None:
        """Answer a message, behind the answers to those before it."""
        try:
            encoded = self._framing.reply(reply, asked)
        except UnsendableMessageError as error:
            encoded = self._framing.reply(text_reply(None, error.status, error.text), asked)
        self._replies.append((None, encoded, (), asked))
        self._replies_bytes += len(encoded)

    def publish(self, message: Message, mq: str, request_id: str, acked: bool, asked: Asked) -> None:
        """Publish one message.

        Raises:
            NotFoundError: there is no such MQ.
            MalformedMessageError: a header is no UTF-8.
        """
        topic = self._hub.topic(mq)
        publication = self._publications.get(topic.name) or self._begin(topic)
        encoded_id = encode_id(request_id)
        if len(topic.partitions) == 1:
            publication.bodies.append(self._recorder.encode(message, encoded_id, publication.timestamp))
        else:
            publication.events.append(self.event(mq, message))
        if message.body is not None:
            publication.size_bytes += len(message.body)
        self._promise(publication, [encoded_id], acked, asked)

    def publish_run(self, run: Run, asked: Asked) -> bool:
        """Publish a run; `False`: not together, its messages have to be looked at one by one."""
        if run.message is not self._known:
            self._learn(run.message)
        topic = self._hub.find_topic(self._mq)
        if topic is None or len(topic.partitions) != 1 or not (self._acked or self._silent):
            return False
        ids = self._hub.fill_ids(run.ids)
        publication = self._publications.get(topic.name) or self._begin(topic)
        publication.bodies += self._mould.bodies(ids, run.bodies, publication.timestamp)
        publication.size_bytes += sum(map(len, run.bodies))
        self._promise(publication, ids, self._acked, asked)
        return True

    @property
    def principal(self) -> Identity:
        """The identity that publishes."""
        return self._principal

    def event(self, mq: str, message: Message) -> Event:
        """Return the event of a message, stamped with who sent it (section 3)."""
        stamped = msgspec.structs.replace(message, headers={**message.headers, **self._stamp})
        payload, key, headers = to_record(stamped, ORIGIN_PREFIX)
        return Event(mq, payload, key, headers)

    def _learn(self, message: Message) -> None:
        """Record the common part of the publications of a run: the next runs may have the same."""
        self._known = message
        self._mq = message.headers.get("mq", "")
        self._acked = flag(message, "ack", default=True)
        self._mould = self._recorder.mould(message, has_body=True)

    def _begin(self, topic: Topic) -> _Publication:
        publication = self._publications[topic.name] = _Publication(topic)
        return publication

    def _promise(self, publication: _Publication, ids: Sequence[bytes], acked: bool, asked: Asked) -> None:
        """Answer publications when they are stored; without an ack nothing is said unless it fails (section 4)."""
        reply = self._framing.published(publication.topic.name, ids, asked) if acked else b""
        self._replies.append((publication, reply, ids, asked))
        self._replies_bytes += len(reply)

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Publish and answer the messages gathered: behind each chunk, and before the outbox is asked."""
        if not self._replies and not self._receipts:
            return
        self._append()
        receipts, self._receipts = self._receipts, []
        replies, self._replies, self._replies_bytes = self._replies, [], 0
        if replies:
            weight = sum([len(one[1]) for one in replies])
            self._outbox.answer_when(receipts, lambda: self._encode(replies), weight)

    def store(self) -> bool:
        """Publish the messages before a command; return `False` if they are not stored yet, or the outbox is full."""
        if self._replies_bytes > REPLIES_BYTES:
            self.settle()
        if self._outbox.full:
            return False
        topics = [publication.topic for publication in self._publications.values()]
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
        if not self._publications:
            return
        publications, self._publications = self._publications, {}
        for publication in publications.values():
            topic, events, bodies = publication.topic, publication.events, publication.bodies
            if bodies:
                timestamps = [publication.timestamp] * len(bodies)
                self._publish(publication, Bodies(bodies, timestamps, publication.size_bytes))
            if events:
                self._publish(publication, events)
            self._hub.published(topic)
            publication.bodies = []
            publication.events = []

    def _publish(self, publication: _Publication, content: Content) -> None:
        receipt = self._hub.broker.publish(Publication(self._principal, PROTOCOL, content, publication.topic.name))
        publication.receipts.append(receipt)
        self._receipts.append(receipt)

    def _encode(self, replies: list[_Reply[Asked]]) -> bytes:
        encoded = []
        for publication, reply, ids, asked in replies:
            error = None if publication is None else publication.error
            if error is None:
                encoded.append(reply)
            else:
                texts = (text_reply(one.decode(), m.FAILED, str(error)) for one in ids)
                encoded += [self._framing.reply(text, asked) for text in texts]
        return b"".join(encoded)
