"""Records that somebody publishes or copies by hand: to the topic that the path names, or from it to another one.

    POST /api/topics/TOPIC/records   {"key": ..., "payload": ..., "headers": [[name, value]], "subject": ...}
    POST /api/topics/TOPIC/copy      {"to": ..., "partition": 0, "offsets": [1, 2]} or {..., "from": 5, "end": 90}

Publishing needs the right to publish, a copy also the right to read the source; a copy to the topic itself publishes
a record again. The server's header `ce_source` names who copied. A copy is answered with JSON lines: its progress, and
the last line has `done`.
"""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from babelbus.core.access import Action, Identity, may, refusal
from babelbus.core.broker import Broker
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.state import size_fault
from babelbus.core.topic import RESERVED_PREFIX, ReservedTopicError, event_of
from babelbus.errors import BabelbusError
from babelbus.records.envelope import SOURCE_HEADER, SUBJECT_HEADER
from babelbus.records.format import encode_batch
from babelbus.records.record import Headers, Record
from babelbus.units import MIB
from babelbus.web.answers import answer, read_body
from babelbus.web.callers import PROTOCOL, topic_of
from babelbus.web.calls import Answer, Call, Route
from babelbus.web.errors import InvalidCopyError, InvalidEventError
from babelbus.web.live import signed
from babelbus.web.reading import read_one, read_some, readable

BODY_BYTES_MAX = 64 * MIB
OFFSETS_MAX = 10_000

encode = msgspec.json.Encoder().encode


class PublishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record; of two forms of one thing, that in base64 holds. A `payload` of null removes the key.

    `subject` is the topic's name or below it. Without a `partition` the key chooses, or the partitions take turns.
    """

    payload: str | None = ""
    payload_b64: bytes | None = None
    key: str | None = None
    key_b64: bytes | None = None
    headers: list[tuple[str, str | None]] = []
    subject: str = ""
    partition: int | None = None


class CopyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """The records at `offsets`, or those from `from` on, up to `end` (excluded; the end of the moment without it)."""

    to: str
    partition: int = 0
    offsets: list[int] = []
    from_: int | None = None
    end: int | None = None


class Published(msgspec.Struct, frozen=True):
    """The place of a record."""

    topic: str
    partition: int
    offset: int


class CopyLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a copy; `error` says why the copy stopped before its end."""

    copied: int
    next_offset: int
    end_offset: int
    done: bool = False
    error: str = ""


class CopyRoutes:
    """The requests that publish and copy records."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("POST", "/api/topics/{name}/records", self._publish),
            ("POST", "/api/topics/{name}/copy", self._copy),
        )

    async def _publish(self, call: Call) -> web.Response:
        name, principal = topic_of(call), call.principal
        body = await read_body(call, PublishBody, BODY_BYTES_MAX)
        subject = name if not body.subject else principal.absolute(body.subject)
        self._check_publish(principal, name, subject)
        topic = self._broker.topic(name)
        payload = body.payload_b64
        if payload is None and body.payload is not None:
            payload = body.payload.encode()
        key = body.key_b64 if body.key is None else body.key.encode()
        headers = signed(tuple((one.encode(), None if v is None else v.encode()) for one, v in body.headers), principal)
        if payload is None and key is None:
            raise InvalidEventError("a record without a payload removes its key: it needs a key")
        event = Event(subject, payload, key, headers)
        if body.partition is None:
            publication = Publication(principal, PROTOCOL, [event], name)
        else:
            topic.partition(body.partition)
            batch = encode_batch([_record_of(event, name, topic.stamp())])
            publication = Publication(principal, PROTOCOL, batch, name, body.partition)
        receipt = await self._broker.publish(publication).wait()
        return answer(Published(principal.relative(name), receipt.partition, receipt.base_offset))

    def _check_publish(self, principal: Identity, name: str, subject: str) -> None:
        """Check that a principal may publish under a subject to a topic.

        Raises:
            BabelbusError: it may not, there is no such topic, or the subject is not below the topic.
        """
        if not may(principal, Action.PUBLISH, subject):
            raise refusal(principal, Action.PUBLISH, subject)
        # Before the topic is looked for: the right is one to the subject, and the topic may be that of others.
        if subject != name and not subject.startswith(f"{name}/"):
            raise InvalidEventError(f"the subject of a record of topic {name!r} is {name!r}, or below it")
        self._broker.topic(name)
        if name.startswith(RESERVED_PREFIX):
            raise ReservedTopicError(f"topic {name!r} is the server's own and cannot be written to")
        fault = size_fault(subject, self._broker.state.key_bytes_max)
        if fault is not None:
            raise InvalidEventError(f"the subject {subject[:80]!r}... {fault}")

    async def _copy(self, call: Call) -> Answer:
        name, principal = topic_of(call), call.principal
        body = await read_body(call, CopyBody)
        source = readable(self._broker, principal, name)
        to = principal.absolute(body.to)
        self._check_publish(principal, to, to)
        partition = source.partition(body.partition)
        if bool(body.offsets) == (body.from_ is not None):
            raise InvalidCopyError("a copy has a list of offsets, or an offset to begin from: give one of them")
        if len(body.offsets) > OFFSETS_MAX:
            raise InvalidCopyError(f"a copy has {OFFSETS_MAX} offsets at the most; give the first and the end instead")
        first, high_watermark = partition.log.first_offset, partition.high_watermark
        runs = [(offset, offset + 1) for offset in body.offsets]
        if body.from_ is not None:
            runs = [(max(body.from_, first), high_watermark if body.end is None else min(body.end, high_watermark))]
        for offset in body.offsets:
            await read_one(partition, offset, name)  # raises before anything is copied
        response = await call.begin_lines()
        copied, offset, end = 0, runs[0][0], max(stop for _, stop in runs)
        try:
            for start, stop in runs:
                offset = start
                while offset < stop:
                    readable(self._broker, principal, name)  # the right may have gone meanwhile
                    records, following, _ = await read_some(partition, offset, stop)
                    await self._append(records, name, to, principal)
                    copied, offset = copied + len(records), following
                    if body.from_ is not None and offset < stop:
                        await response.write(encode(CopyLine(copied, offset, end)) + b"\n")
        except BabelbusError as error:
            line = CopyLine(copied, offset, end, error=principal.relative_text(str(error)))
        else:
            line = CopyLine(copied, offset, end, done=True)
        await response.write(encode(line) + b"\n")
        return response

    async def _append(self, records: Sequence[Record], source: str, to: str, principal: Identity) -> None:
        """Publish records of a topic to another one, under the same subjects below it.

        Raises:
            BabelbusError: they were not stored.
        """
        if not records:
            return
        ours = (SOURCE_HEADER, principal.source.encode())
        events = []
        for record in records:
            event = event_of(source, record)
            headers = (*(pair for pair in event.headers if pair[0] != SOURCE_HEADER), ours)
            events.append(Event(to + event.subject[len(source) :], record.payload, record.key, headers))
        await self._broker.publish(Publication(principal, PROTOCOL, events, to)).wait()


def _record_of(event: Event, topic: str, now_ms: int) -> Record:
    """Return the record of an event that goes to a partition of its publisher's choice."""
    headers: Headers = event.headers
    if event.subject != topic:
        headers = (*headers, (SUBJECT_HEADER, event.subject.encode("utf-8", "surrogateescape")))
    return Record(event.payload, event.key, headers, now_ms)
