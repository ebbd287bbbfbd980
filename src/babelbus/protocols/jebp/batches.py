"""Batches of fronts at the core: records that many clients of an edge created one by one, published together.

Only records that a session would publish at once are published here: nothing of the client waits, and the client may
publish to the topic. All other records go to the session of their client, which refuses, delays or stores them, and
answers.
"""

import logging
import zlib
from collections.abc import Callable

from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker
from babelbus.core.publish import Payloads, Publication
from babelbus.core.receipt import Receipt, all_of
from babelbus.core.record import Headers
from babelbus.errors import StorageError
from babelbus.listening.fronts import Find, Linked
from babelbus.protocols.connection import Connection
from babelbus.protocols.jebp.batch_codec import PASSED, ClientBatch, decode_batch
from babelbus.protocols.jebp.box import TAG_BYTES
from babelbus.protocols.jebp.codec import RECORD_FIELDS
from babelbus.protocols.jebp.fields import known_name
from babelbus.protocols.jebp.messages import CREATE_RECORD, PROTOCOL
from babelbus.protocols.jebp.proved import encode_opened
from babelbus.protocols.jebp.publisher import refusal_of
from babelbus.protocols.jebp.session import Session
from babelbus.protocols.jebp.status import Answers, Outcome

log = logging.getLogger(__name__)

REQUEST_BYTES = 3 + TAG_BYTES + 15
"""Bytes of a request with one record, beside the name of the topic and the payload, if its length is one byte."""
SHORT_BYTES_MAX = 255 + 3
"""A longer request has a length of two bytes; none in a batch has one of three."""
RESPONSE_BYTES = 3 + TAG_BYTES + 2


class _Group:
    """Clients of one batch that are one principal."""

    def __init__(self, client: Client, topic: str, source: Headers) -> None:
        self.client = client
        self.topic = topic
        self.source = source
        self.connections: list[Connection] = []
        self.ranges: list[tuple[int, int]] = []
        """Of each connection, its first record in the batch and the record behind its last one."""


class Batches:
    """Publishes the batches of all edges."""

    def __init__(self, broker: Broker, answers: Answers, may_serve: Callable[[], bool] | None) -> None:
        self.unanswered = 0
        """Batches whose answer is outstanding."""
        self._broker = broker
        self._answers = answers
        self._may_serve = may_serve

    def receive(self, data: bytes, find: Find, answer: Callable[[bytes], None]) -> None:
        """Publish the records of a batch, and answer when all of them are as safe as promised.

        Raises:
            RemoteProtocolError: the bytes are no batch.
        """
        batch = decode_batch(data)
        groups: dict[tuple[Headers, int, str], _Group | None] = {}
        passed: list[tuple[Linked, int, int]] = []
        topic = known_name(batch.topic)
        serves = topic is not None and (self._may_serve is None or self._may_serve())
        end = 0
        for number, count in zip(batch.numbers, batch.counts, strict=True):
            start, end = end, end + count
            linked = find(number)
            if linked is None:  # closed here, and what it sent since is not for anybody
                continue
            connection = linked.idle_protocol
            session = connection.idle_session if isinstance(connection, Connection) else None
            if serves and isinstance(session, Session) and session.client is not None:
                assert topic is not None
                client = session.client
                name = topic if client.root is None else client.root.absolute(topic)
                key = (session.source, id(client.rights), name)
                if key not in groups:
                    groups[key] = _Group(client, name, session.source) if self._may_publish(client, name) else None
                group = groups[key]
                if group is not None:
                    assert isinstance(connection, Connection)
                    group.connections.append(connection)
                    group.ranges.append((start, end))
                    session.skip(count)
                    continue
            passed.append((linked, start, end))
        published = [(group, self._publish(group, batch)) for group in groups.values() if group is not None]
        for linked, start, end in passed:
            self._pass(linked, batch, start, end)
        self.unanswered += 1
        all_of([receipt for _, receipt in published]).when_done(
            lambda _: answer(self._answer(len(batch.payloads), published))
        )

    def _may_publish(self, client: Client, name: str) -> bool:
        """Return whether the whole topic is granted to a client; who may less asks the session for each record."""
        topic = self._broker.find_topic(name)
        if topic is None or topic.reserved or topic.has_letters:
            return False
        return self._broker.may_publish_all(client, topic)

    def _publish(self, group: _Group, batch: ClientBatch) -> Receipt:
        payloads, timestamps, ranges = batch.payloads, batch.timestamps, group.ranges
        if sum([end - start for start, end in ranges]) < len(payloads):
            payloads = [payload for start, end in ranges for payload in payloads[start:end]]
            timestamps = [timestamp for start, end in ranges for timestamp in timestamps[start:end]]
        content = Payloads(payloads, timestamps)
        try:
            receipt = self._broker.publish(
                Publication(group.client, PROTOCOL, content, group.topic, source=group.source)
            )
        except Exception:  # it costs these clients their connections, as in a session, and no others
            log.exception("publishing a batch of fronts failed, closing %d connections", len(group.connections))
            for connection in group.connections:
                connection.abort()
            return Receipt.refused(StorageError("the server failed; its log says why"))
        each = REQUEST_BYTES + len(batch.topic)
        for connection, (start, end) in zip(group.connections, ranges, strict=True):
            sizes = [each + len(payload) for payload in batch.payloads[start:end]]
            connection.count_received(sum(sizes) + sum([size > SHORT_BYTES_MAX for size in sizes]))
        return receipt

    def _pass(self, linked: Linked, batch: ClientBatch, start: int, end: int) -> None:
        """Send records to the session of their client."""
        head = b"%c\x01%c%b" % (CREATE_RECORD, len(batch.topic), batch.topic)
        requests = [
            head + RECORD_FIELDS.pack(zlib.crc32(payload), timestamp) + payload
            for timestamp, payload in zip(batch.timestamps[start:end], batch.payloads[start:end], strict=True)
        ]
        linked.receive_aside(encode_opened(requests))

    def _answer(self, count: int, published: list[tuple[_Group, Receipt]]) -> bytes:
        """Return the answer to a batch, and count what each client gets of it."""
        self.unanswered -= 1
        created = self._answers[Outcome.RECORD_CREATED]
        answers = [PASSED] * count
        for group, receipt in published:
            parts, turn = receipt.parts, 0
            for connection, (start, end) in zip(group.connections, group.ranges, strict=True):
                connection.count_sent(RESPONSE_BYTES * (end - start))
                if receipt.error is None:
                    answers[start:end] = [created] * (end - start)
                    continue
                refusals: dict[Receipt, bytes] = {}
                for at in range(start, end):
                    part = parts[turn % len(parts)]
                    turn += 1
                    if part not in refusals:
                        refusals[part] = refusal_of(part, self._answers) or created
                    answers[at] = refusals[part]
        return b"".join(answers)
