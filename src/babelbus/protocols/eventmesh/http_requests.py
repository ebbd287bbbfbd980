"""The requests of EventMesh over HTTP: what their heads, forms and JSON say, and the codes of the coded API.

A request that cannot be read is refused with a code of 11.1 (docs/specifications/eventmesh.md, 4 to 6).
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from babelbus.core.access import Identity
from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.protocols.eventmesh.callers import PROTOCOL, Given
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.wire import http
from babelbus.wire.http import HttpError, parse_form, parse_query

SEND_SYNC = "101"
BATCH = "102"
SEND_ASYNC = "104"
BATCH_V2 = "107"
HEARTBEAT = "203"
SUBSCRIBE = "206"
UNSUBSCRIBE = "207"
REPLY = "301"

PUBLISHING = frozenset((SEND_SYNC, BATCH, SEND_ASYNC, BATCH_V2, REPLY))
"""The codes of requests with a message in them."""

SUCCESS = 0
OVERLOAD = 1
REQUESTCODE_INVALID = 2
WAITING_RR_ERROR = 4
HEADER_ERROR = 6
BODY_ERROR = 7
BODY_SIZE_ERROR = 8
ASYNC_ERROR = 15
REPLY_ERROR = 16
BATCH_ERROR = 17
RUNTIME_ERROR = 18
SUBSCRIBE_ERROR = 19
UNSUBSCRIBE_ERROR = 20
HEARTBEAT_ERROR = 21
ACL_ERROR = 22
OVER_LIMIT_ERROR = 23

SEED_CODES: Final = {
    code: code - 1 if code in (8, 9, 10, 11, 12, 13, 14, 15, 16) else code - 2
    for code in (8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23)
}
"""The codes of servers up to 1.5 in place of those since 1.6, where the two differ (11.1)."""

FIELDS_MAX = 256
BATCH_MAX = 10
VERSIONS = ("1.0", "2.0")

_decode_items = msgspec.json.Decoder(list[SubscriptionItem | str]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class Beat(msgspec.Struct, frozen=True):
    """The heartbeat of a webhook."""

    topic: str
    url: str


class BatchItem(msgspec.Struct):
    """A message of a batch."""

    topic: str
    msg: str
    bizSeqNo: str | int | None = None  # noqa: N815 - the name on the wire
    tag: str | None = None
    ttl: str | int | None = None


class UriBody(msgspec.Struct):
    """The body of a subscription by the URI API."""

    url: str
    topic: list[SubscriptionItem | str]
    consumerGroup: str = "em-http-consumer"  # noqa: N815 - the name on the wire


_decode_beats = msgspec.json.Decoder(list[Beat]).decode
_decode_batch = msgspec.json.Decoder(list[BatchItem]).decode
_decode_uri_body = msgspec.json.Decoder(UriBody).decode


class HttpRefusedError(BabelbusError):
    """A request that is refused with a code of 11.1."""

    def __init__(self, code: int, text: str, status: int = 200) -> None:
        super().__init__(text)
        self.code, self.text, self.status = code, text, status


class CodedRequest(msgspec.Struct, frozen=True):
    """A request of the coded API."""

    request: http.Request
    code: str
    fields: dict[str, str]
    principal: Identity | None
    """The principal of the client, while the gate is on."""

    def identity(self, group: str) -> Identity:
        """Return who asks: without the gate, the client is the group that it names."""
        return self.principal or Identity(f"{PROTOCOL}:{group}", group, None)

    def source(self, group: str) -> str:
        """Return the source of what the client sends."""
        return f"{PROTOCOL}:{group}" if self.principal is None else self.principal.source

    def need(self, *names: str) -> str:
        """Return a field by the first of its names that is there; a header may stand for a field.

        Raises:
            HttpRefusedError: the field is missing or empty.
        """
        found = self.get(*names)
        if not found:
            raise HttpRefusedError(BODY_ERROR, f"{names[0]} is missing")
        return found

    def get(self, *names: str) -> str:
        """Return a field, empty if it is missing."""
        for name in names:
            found = self.fields.get(name) or self.request.headers.get(name.lower())
            if found:
                return found
        return ""


def credentials_of(request: http.Request) -> Given:
    """Return the credentials of a request; they come in its head alone, because logs have URLs."""
    headers = request.headers
    return Given(_utf_8(headers.get("username", "")), _utf_8(headers.get("passwd", "")), headers.get("token", ""))


def _utf_8(value: str) -> str:
    return value if value.isascii() else value.encode("latin-1").decode("utf-8", "surrogateescape")


def read_coded(request: http.Request, principal: Identity | None) -> CodedRequest:
    """Read a request of the coded API.

    Raises:
        HttpRefusedError: it cannot be read.
    """
    if request.headers.get("version", "1.0") not in VERSIONS:
        raise HttpRefusedError(REQUESTCODE_INVALID, "version is neither 1.0 nor 2.0", 400)
    try:
        if request.method == "GET":
            fields = dict(parse_query(request.query))
            return CodedRequest(request, fields.get("code", ""), fields, principal)
        fields = _read_form(request.body)
    except (HttpError, ValueError) as error:
        raise HttpRefusedError(RUNTIME_ERROR, f"the fields cannot be read: {error}", 500) from None
    return CodedRequest(request, request.headers.get("code", ""), fields, principal)


def _read_form(body: bytes) -> dict[str, str]:
    """Return the fields of a form (4.1).

    Raises:
        ValueError: the form is not UTF-8 and would be stored with other characters, or has too many fields.
    """
    return dict(parse_form(body.decode(), FIELDS_MAX, "strict"))


def query_of(request: http.Request) -> list[tuple[str, str]]:
    """Return the pairs of a query; a query that cannot be read has none."""
    try:
        return list(parse_query(request.query))
    except (HttpError, ValueError):
        return []


def read_batch(asked: CodedRequest) -> list[BatchItem]:
    """Return the messages of a batch.

    Raises:
        HttpRefusedError: they cannot be read, or are too many.
    """
    try:
        items = _decode_batch(asked.need("contents"))
    except UNREADABLE as error:
        raise HttpRefusedError(BODY_ERROR, f"contents cannot be read: {error}") from None
    if not 0 < len(items) <= BATCH_MAX:
        raise HttpRefusedError(BODY_ERROR, f"a batch of {len(items)} messages, 1 to {BATCH_MAX} are taken")
    return items


def read_beats(asked: CodedRequest) -> list[Beat]:
    """Return the webhooks of a heartbeat.

    Raises:
        HttpRefusedError: they cannot be read.
    """
    try:
        return _decode_beats(asked.need("heartbeatEntities", "heartbeatentities"))
    except UNREADABLE as error:
        raise HttpRefusedError(BODY_ERROR, f"heartbeatEntities cannot be read: {error}") from None


def read_items(text: str) -> list[SubscriptionItem]:
    """Return the topics of a subscription: a JSON list, or the name of one topic.

    Raises:
        HttpRefusedError: they cannot be read.
    """
    if not text.startswith("["):
        return [SubscriptionItem(text)]
    try:
        return items_of(_decode_items(text))
    except UNREADABLE as error:
        raise HttpRefusedError(BODY_ERROR, f"topic cannot be read: {error}") from None


def items_of(topics: Sequence[SubscriptionItem | str]) -> list[SubscriptionItem]:
    """Return the topics of a subscription, where a name stands for the item with its defaults.

    Raises:
        HttpRefusedError: there is no topic.
    """
    if not topics:
        raise HttpRefusedError(BODY_ERROR, "topic is missing")
    return [SubscriptionItem(topic) if isinstance(topic, str) else topic for topic in topics]


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the members of a JSON object; an empty text has none.

    Raises:
        HttpRefusedError: it is no JSON object.
    """
    if not text:
        return {}
    try:
        return _decode_object(text)
    except UNREADABLE as error:
        raise HttpRefusedError(BODY_ERROR, f"a field is no JSON object: {error}") from None


def read_uri_body(request: http.Request) -> UriBody:
    """Return the body of a subscription by the URI API: a form, or JSON.

    Raises:
        HttpRefusedError: it cannot be read.
    """
    try:
        if "form" in request.headers.get("content-type", ""):
            fields = _read_form(request.body)
            return UriBody(
                fields["url"], list(read_items(fields["topic"])), fields.get("consumerGroup", "em-http-consumer")
            )
        return _decode_uri_body(request.body)
    except (KeyError, ValueError, *UNREADABLE) as error:
        raise HttpRefusedError(BODY_ERROR, f"the body cannot be read: {error}") from None
