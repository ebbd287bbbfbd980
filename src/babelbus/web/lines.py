"""The lines of the administration API that the command line reads back: it needs nothing else of the server.

Consumers, responders and dead letters have each a first line, a line for each record or question, and answers.
"""

import msgspec

from babelbus.web.record_lines import UNSET, RecordLine, Unset

IDLE = "idle"
"""Why the answer of a consumer ends: there were no records for as long as it wanted to wait."""


class ConsumerHead(msgspec.Struct, frozen=True):
    """The first line of a consumer's answer."""

    consumer: str
    ack: str
    ack_seconds: float
    paused: bool


class DeliveryLine(msgspec.Struct, frozen=True, gc=False):
    """A record; acks refer to it by `number`."""

    number: int
    attempt: int
    subject: str
    record: RecordLine


class ConsumeLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line behind the first: records, or why the answer ends (`idle`, `left`, or the text of an error)."""

    deliveries: list[DeliveryLine] = []
    end: str = ""


class Answered(msgspec.Struct, frozen=True):
    """The counts of an ack or nack; `stale` ones came too late: the records have been delivered again."""

    done: int
    stale: int


class Replied(msgspec.Struct, frozen=True):
    """Whether somebody waited for a reply."""

    delivered: bool


class ReplyLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Payload and headers. Bytes that are not UTF-8 are under `..._base64` instead; no payload at all is null."""

    payload: str | Unset | None = UNSET
    payload_base64: bytes | Unset = UNSET
    headers: dict[str, str | None] | Unset = UNSET
    headers_base64: list[tuple[bytes, bytes | None]] | Unset = UNSET


class QuestionLine(ReplyLine, frozen=True, omit_defaults=True, kw_only=True):
    """A question; the reply refers to it by `number`. After `timeout_seconds` nobody waits for the reply."""

    number: int
    subject: str
    timeout_seconds: float


class ResponderHead(msgspec.Struct, frozen=True):
    """The first line of a responder's answer."""

    responder: str


class RespondLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line behind the first: a question, or why the answer ends."""

    question: QuestionLine | None = None
    end: str = ""


class LetterOrigin(msgspec.Struct, frozen=True):
    """Where a record came from that is a dead letter now."""

    topic: str
    partition: int
    offset: int
    group: str
    attempts: int
    reason: str
    time_ms: int


class LetterLine(msgspec.Struct, frozen=True):
    """A letter: its place and its record without the headers that `origin` holds (null: not a dead letter)."""

    record: RecordLine
    origin: LetterOrigin | None
    replayed: bool


class Letters(msgspec.Struct, frozen=True):
    """Some letters of a partition, and where to read on; `next_offset` is null behind the last one."""

    letters: list[LetterLine]
    next_offset: int | None
