"""The two packages of EventMesh over gRPC: protobuf messages <-> what they say (specification, 7 and 8).

Both have the same services. A dialect reads the requests of its package and makes the answers, and knows nothing of
topics and groups.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from google.protobuf.message import DecodeError

from babelbus.core.access import AccessRefusedError
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.record import Event
from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.protocols.eventmesh.callers import NOTHING, PROTOCOL, Given
from babelbus.protocols.eventmesh.messages import CLOUD_EVENT, MESSAGE, SubscriptionItem
from babelbus.protocols.eventmesh.records import (
    FLAVOUR,
    InvalidMessageError,
    cloud_attributes,
    describe,
    encode_content,
    legal_name,
    make_cloud_event,
    make_event,
    read_cloud_event,
    read_ttl,
    text_body,
)
from babelbus.protocols.eventmesh.stubs import cloudevents_pb2, legacy_pb2
from babelbus.records.envelope import CONTENT_TYPE, ID_HEADER, SOURCE_HEADER
from babelbus.records.record import Headers

SUCCESS: Final = "0"
OVERLOAD: Final = "1"
HEADER_ERROR: Final = "6"
BODY_ERROR: Final = "7"
BATCH_ERROR: Final = "10"
PUBLISH_ERROR: Final = "14"
SUBSCRIBE_ERROR: Final = "17"
UNSUBSCRIBE_ERROR: Final = "18"
ACL_ERROR: Final = "20"
OVER_LIMIT_ERROR: Final = "21"
REQUEST_ERROR: Final = "22"
RESUBSCRIBE: Final = "30"
TTL_MS: Final = 4000
IDENTITY: Final = ("env", "idc", "ip", "pid", "sys", "username", "language")
SEQUENCE: Final = ("seqnum", "uniqueid", "producergroup", "ttl", "tag")
REPLY_MARK: Final = "submessagetype"
CREDENTIALS: Final = ("username", "passwd", "token")
OWN_ATTRIBUTES: Final = frozenset(
    (*IDENTITY, *CREDENTIALS, "protocoltype", "protocolversion", "protocoldesc", REPLY_MARK)
)

_decode_items = msgspec.json.Decoder(list[SubscriptionItem | str]).decode
_encode = msgspec.json.Encoder().encode


class RefusedError(BabelbusError):
    """A request that gets a code of 11.2."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def code_of(error: BabelbusError, failure: str) -> str:
    """Return the code of an error (11.2); `failure` is that of the method."""
    if isinstance(error, RefusedError):
        return error.code
    if isinstance(error, AccessRefusedError | InvalidProofError):
        return ACL_ERROR
    if isinstance(error, QuotaExceededError):
        return OVER_LIMIT_ERROR
    return OVERLOAD if isinstance(error, TooManyProofsError) else failure


class Published(msgspec.Struct, frozen=True):
    """The event that a message publishes or asks with; `ttl_ms` counts for a request."""

    group: str
    event: Event
    ttl_ms: float


class Wanted(msgspec.Struct, frozen=True):
    """A subscription, its end or its heartbeat; `client` identifies the client among those of its group."""

    group: str
    items: Sequence[SubscriptionItem]
    urls: Sequence[str]
    client: str
    idc: str = ""
    pid: str = ""
    is_subscriber: bool = True


class Answered(msgspec.Struct, frozen=True):
    """A reply that came on a stream."""

    event: Event
    properties: Mapping[str, str]


class Dialect(ABC):
    """One package; `messages` is where its classes are."""

    messages: Any
    description: str
    """The `protocoldesc` of the package."""

    @abstractmethod
    def credentials(self, message: Any) -> Given:
        """Return the credentials of a message of any kind; those of the first event hold for a batch."""

    @abstractmethod
    def read_publication(self, message: Any, source: str | None = None) -> Published:
        """Read a publication or a request of a `source`, by default of its group. Raises: `RefusedError`."""

    @abstractmethod
    def read_batch(self, message: Any, source: str | None = None) -> list[Published]:
        """Read a batch. Raises: `RefusedError`."""

    @abstractmethod
    def read_subscription(self, message: Any) -> Wanted | Answered:
        """Read a subscription, or a reply on a stream. Raises: `RefusedError`."""

    @abstractmethod
    def read_heartbeat(self, message: Any) -> Wanted:
        """Read a heartbeat. Raises: `RefusedError`."""

    @abstractmethod
    def outcome(self, code: str, text: str) -> Any:
        """Return the answer to a unary call."""

    @abstractmethod
    def acknowledgement(self, message: Any, code: str, text: str) -> Any:
        """Return the answer to a subscription on a stream."""

    @abstractmethod
    def delivery(self, topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], number: int) -> bytes:
        """Return the encoded message of a record or a reply."""

    @abstractmethod
    def failed_request(self, error: BabelbusError) -> Any:
        """Return the answer to a request without a reply; `None` if the call itself fails."""


def _check_identity(values: Mapping[str, str]) -> None:
    missing = [name for name in IDENTITY if not values.get(name)]
    if missing or not values["pid"].isdecimal():
        raise RefusedError(HEADER_ERROR, f"{missing[0]} is missing" if missing else "pid is no number")


def _need(values: Mapping[str, str], *names: str) -> None:
    for name in names:
        if not values.get(name):
            raise RefusedError(BODY_ERROR, f"{name} is missing")


class LegacyDialect(Dialect):
    """Package `eventmesh.common.protocol.grpc`: servers up to 1.8, and Go of every version (7)."""

    messages = legacy_pb2
    description = "grpc"

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    def credentials(self, message: Any) -> Given:
        """Return those of the header; a token is a property of a message."""
        token = message.properties.get("token", "") if isinstance(message, legacy_pb2.SimpleMessage) else ""
        return Given(message.header.username, message.header.password, token)

    def _publications(
        self, header: Any, group: str, topic: str, messages: Iterable[Any], source: str | None
    ) -> list[Published]:
        source, is_cloud_event = source or f"{PROTOCOL}:{group}", header.protocolType == CLOUD_EVENT
        unit_ms = 1000 if header.language.upper() == "GO" else 1
        found = []
        for message in messages:
            content, identifier, ttl = message.content, message.uniqueId, message.ttl
            if not content:
                raise RefusedError(BODY_ERROR, "content is missing")
            ttl_ms = read_ttl(ttl, TTL_MS, unit_ms)
            try:
                if is_cloud_event:
                    event, _ = read_cloud_event(content.encode(), source)
                else:
                    properties = message.properties
                    named = dict(properties) if properties else {}
                    sequence = (message.seqNum, identifier, group, str(round(ttl_ms)) if ttl else "", message.tag)
                    for name, value in zip(SEQUENCE, sequence, strict=True):
                        if value:
                            named[name] = value
                    event, _ = make_event(topic, content, identifier, named, source)
            except InvalidMessageError as error:
                raise RefusedError(BODY_ERROR, str(error)) from None
            found.append(Published(group, event, ttl_ms))
        return found

    def _check(self, header: Any) -> None:
        _check_identity({name: getattr(header, name) for name in IDENTITY})

    def read_publication(self, message: Any, source: str | None = None) -> Published:
        """Read a SimpleMessage."""
        self._check(message.header)
        fields = {name: getattr(message, name) for name in ("uniqueId", "producerGroup", "topic", "content", "ttl")}
        _need(fields, *fields)
        return self._publications(message.header, message.producerGroup, message.topic, [message], source)[0]

    def read_batch(self, message: Any, source: str | None = None) -> list[Published]:
        """Read a BatchMessage."""
        self._check(message.header)
        _need({"topic": message.topic, "producerGroup": message.producerGroup}, "topic", "producerGroup")
        return self._publications(message.header, message.producerGroup, message.topic, message.messageItem, source)

    def read_subscription(self, message: Any) -> Wanted | Answered:
        """Read a Subscription, which may be a reply."""
        if message.HasField("reply"):
            reply = message.reply
            event, properties = make_event(
                reply.topic or "reply", reply.content, reply.uniqueId, dict(reply.properties),
                f"{PROTOCOL}:{reply.producerGroup}",
            )  # fmt: skip
            return Answered(event, properties)
        header = message.header
        self._check(header)
        if not message.consumerGroup or not message.subscriptionItems:
            raise RefusedError(BODY_ERROR, "consumerGroup or subscriptionItems is missing")
        items = []
        for item in message.subscriptionItems:
            if not item.topic or item.mode not in (0, 1) or item.type not in (0, 1):
                raise RefusedError(BODY_ERROR, "a topic, its mode or its type is missing")
            mode: Literal["CLUSTERING", "BROADCASTING"] = "BROADCASTING" if item.mode else "CLUSTERING"
            items.append(SubscriptionItem(item.topic, mode, "SYNC" if item.type else "ASYNC"))
        urls = (message.url,) if message.url else ()
        return Wanted(message.consumerGroup, items, urls, _client(header), header.idc, header.pid)

    def read_heartbeat(self, message: Any) -> Wanted:
        """Read a Heartbeat."""
        self._check(message.header)
        items = [SubscriptionItem(item.topic) for item in message.heartbeatItems]
        urls = [item.url for item in message.heartbeatItems]
        return Wanted(
            message.consumerGroup, items, urls, _client(message.header), is_subscriber=message.clientType == 1
        )

    def outcome(self, code: str, text: str) -> Any:
        """Return a Response."""
        return legacy_pb2.Response(respCode=code, respMsg=text, respTime=str(self._now_ms()))

    def acknowledgement(self, message: Any, code: str, text: str) -> Any:
        """Return a SimpleMessage without topic, seqNum and uniqueId (7.4)."""
        content = _encode({"respMsg": text, "respCode": code}).decode()
        return legacy_pb2.SimpleMessage(header=_HEADER, content=content)

    def delivery(self, topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], number: int) -> bytes:
        """Return an encoded SimpleMessage."""
        flavour, content, properties = encode_content(topic, payload, headers, more)
        message = legacy_pb2.SimpleMessage(
            producerGroup=properties.get("producergroup", ""),
            topic=topic,
            content=content,
            ttl=properties.get("ttl", str(TTL_MS)),
            uniqueId=properties.get("uniqueid") or str(number),
            seqNum=properties.get("seqnum") or str(number),
            tag=properties.get("tag", ""),
            properties=properties,
        )
        # The header is the first field, and the same for all: fields that are encoded apart are joined as bytes.
        return (_CLOUD_FRONT if flavour == CLOUD_EVENT else _FRONT) + bytes(message.SerializeToString())

    def failed_request(self, error: BabelbusError) -> Any:
        """Return a SimpleMessage in the shape of an acknowledgement (7.5)."""
        return self.acknowledgement(None, code_of(error, REQUEST_ERROR), str(error))


def _client(header: Any) -> str:
    return f"{header.ip} {header.pid} {header.sys}"


def _header(flavour: str) -> Any:
    return legacy_pb2.RequestHeader(
        env="", idc="", ip="127.0.0.1", pid="1", sys=PROTOCOL, language="PYTHON", username="", password="",
        protocolType=flavour, protocolVersion="1.0", protocolDesc="grpc",
    )  # fmt: skip


_HEADER: Final = _header(MESSAGE)
_FRONT: Final[bytes] = legacy_pb2.SimpleMessage(header=_HEADER).SerializeToString()
_CLOUD_FRONT: Final[bytes] = legacy_pb2.SimpleMessage(header=_header(CLOUD_EVENT)).SerializeToString()


class EventsDialect(Dialect):
    """Package `org.apache.eventmesh.cloudevents.v1`: servers from 1.9 on (8)."""

    messages = cloudevents_pb2
    description = "grpc-cloud-event"

    def credentials(self, message: Any) -> Given:
        """Return those of the attributes."""
        if isinstance(message, cloudevents_pb2.CloudEventBatch):
            if not message.events:
                return NOTHING
            message = message.events[0]
        attributes = message.attributes
        return Given(*(attributes[name].ce_string if name in attributes else "" for name in CREDENTIALS))

    def read_publication(self, message: Any, source: str | None = None) -> Published:
        """Read a CloudEvent that is published."""
        attributes = _attributes(message)
        _check_identity(attributes)
        _need(attributes, "uniqueid", "producergroup", "subject", "ttl")
        kind = message.WhichOneof("data")
        if kind is None:
            raise RefusedError(BODY_ERROR, "data is missing")
        group = attributes["producergroup"]
        event = self._event(message, kind, attributes, source or f"{PROTOCOL}:{group}")
        return Published(group, event, read_ttl(attributes["ttl"], TTL_MS))

    def read_batch(self, message: Any, source: str | None = None) -> list[Published]:
        """Read a CloudEventBatch."""
        return [self.read_publication(event, source) for event in message.events]

    def _event(self, message: Any, kind: str | None, attributes: dict[str, str], source: str) -> Event:
        payload = b"" if kind is None else _data(message, kind)
        named = {name: value for name, value in attributes.items() if name not in OWN_ATTRIBUTES}
        try:
            if attributes.get("protocoltype") == CLOUD_EVENT:
                own = {"id": message.id, "source": message.source, "type": message.type}
                return make_cloud_event(named | own, payload, source)[0]
            topic = named.pop("subject")
            content_type = named.pop("datacontenttype", None)
            typed = None if content_type is None else {"datacontenttype": content_type}
            event, _ = make_event(topic, None, attributes.get("uniqueid", ""), named, source, typed)
            return Event(event.subject, payload, event.key, event.headers)
        except InvalidMessageError as error:
            raise RefusedError(BODY_ERROR, str(error)) from None

    def read_subscription(self, message: Any) -> Wanted | Answered:
        """Read a subscription event, which may be one of three shapes of a reply (8.7)."""
        attributes = _attributes(message)
        text = message.text_data
        if REPLY_MARK in attributes:
            named = {name: value for name, value in attributes.items() if name not in OWN_ATTRIBUTES}
            kind = message.WhichOneof("data")
            payload = b"" if kind is None else _data(message, kind)
            if attributes.get("protocoltype") == CLOUD_EVENT:
                own = {"subject": "reply", **named, "id": message.id, "source": message.source, "type": message.type}
                return Answered(*make_cloud_event(own, payload, PROTOCOL))
            return _answered(named, named.pop("subject", "reply"), payload)
        if text.lstrip().startswith("{"):
            try:
                reply = msgspec.json.decode(text, type=dict[str, Any])
            except UNREADABLE as error:
                raise RefusedError(BODY_ERROR, f"the reply cannot be read: {error}") from None
            properties = reply.get("properties")
            named = {name: str(value) for name, value in (properties if isinstance(properties, dict) else {}).items()}
            return _answered(named, str(reply.get("topic") or "reply"), str(reply.get("content") or "").encode())
        _check_identity(attributes)
        _need(attributes, "consumergroup")
        url = attributes.get("url")
        return Wanted(
            attributes["consumergroup"], _read_items(text), (url,) if url else (), _client_of(attributes),
            attributes["idc"], attributes["pid"],
        )  # fmt: skip

    def read_heartbeat(self, message: Any) -> Wanted:
        """Read a heartbeat event."""
        attributes = _attributes(message)
        _check_identity(attributes)
        try:
            found = msgspec.json.decode(message.text_data or "[]", type=list[dict[str, str]])
        except UNREADABLE as error:
            raise RefusedError(BODY_ERROR, f"the heartbeat cannot be read: {error}") from None
        items = [SubscriptionItem(item.get("topic", "")) for item in found]
        urls = [item.get("url", "") for item in found]
        is_subscriber = attributes.get("clienttype") == "2"
        return Wanted(
            attributes.get("consumergroup", ""), items, urls, _client_of(attributes), is_subscriber=is_subscriber
        )

    def outcome(self, code: str, text: str) -> Any:
        """Return a CloudEvent with both spellings of the result (8.4)."""
        return _with_status(
            cloudevents_pb2.CloudEvent(id="1", source="/", spec_version="1.0", type=PROTOCOL), code, text
        )

    def acknowledgement(self, message: Any, code: str, text: str) -> Any:
        """Return a copy of the subscription event with the result (8.7)."""
        copy = cloudevents_pb2.CloudEvent()
        copy.CopyFrom(message)
        for name in ("seqnum", "uniqueid", *CREDENTIALS):
            copy.attributes.pop(name, None)
        return _with_status(copy, code, text)

    def delivery(self, topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], number: int) -> bytes:
        """Return an encoded CloudEvent."""
        known = dict(headers)
        is_event = known.get(FLAVOUR) == b"cloudevents"
        if is_event:
            attributes, content_type = cloud_attributes(known), _text(known.get(CONTENT_TYPE))
            if content_type:
                attributes["datacontenttype"] = content_type
            event = cloudevents_pb2.CloudEvent(
                id=_text(known.get(ID_HEADER)) or str(number),
                source=_text(known.get(SOURCE_HEADER)).partition("#")[2] or "/",
                spec_version="1.0",
                type=attributes.pop("type", "") or CLOUD_EVENT,
            )
            _set_data(event, payload or b"", content_type)
            attributes["protocoltype"] = CLOUD_EVENT
        else:
            attributes, typed = describe(known)
            attributes = {legal_name(name): value for name, value in attributes.items()}
            text, encoding = text_body(payload)
            attributes |= {"protocoltype": "eventmeshmessage", "datacontenttype": "text/plain"}
            attributes |= {name: str(value) for name, value in typed.items()}
            attributes |= {legal_name(name): value for name, value in encoding.items()}
            event = cloudevents_pb2.CloudEvent(
                id=str(number), source="/", spec_version="1.0", type="eventmeshmessage", text_data=text
            )
        attributes |= more
        attributes |= {"subject": topic, "protocolversion": "1.0", "protocoldesc": self.description}
        for name, default in (("seqnum", str(number)), ("uniqueid", str(number)), ("ttl", str(TTL_MS)),
                              ("producergroup", PROTOCOL)):  # fmt: skip
            if not attributes.get(name):
                attributes[name] = default
        for name, value in attributes.items():
            if name:
                event.attributes[name].ce_string = value
        if is_event and "time" in attributes:
            _set_time(event.attributes["time"], attributes["time"])
        return bytes(event.SerializeToString())

    def failed_request(self, error: BabelbusError) -> Any:
        """Return nothing: the call fails with a status of gRPC (0.3)."""
        return None


def _answered(named: dict[str, str], topic: str, payload: bytes) -> Answered:
    event, properties = make_event(topic, None, named.get("uniqueid", ""), named, PROTOCOL)
    return Answered(Event(topic, payload, None, event.headers), properties)


def _attributes(message: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in message.attributes.items():
        kind = value.WhichOneof("attr")
        if kind is None:
            continue
        if kind == "ce_timestamp":
            found[name] = value.ce_timestamp.ToJsonString()
        elif kind == "ce_bytes":
            found[name] = value.ce_bytes.decode("utf-8", "backslashreplace")
        elif kind == "ce_boolean":
            found[name] = "true" if value.ce_boolean else "false"
        else:
            found[name] = str(getattr(value, kind))
    return found


def _client_of(attributes: Mapping[str, str]) -> str:
    return f"{attributes['ip']} {attributes['pid']} {attributes['sys']}"


def _read_items(text: str) -> list[SubscriptionItem]:
    try:
        found = _decode_items(text)
    except UNREADABLE as error:
        raise RefusedError(BODY_ERROR, f"the subscription cannot be read: {error}") from None
    if not found:
        raise RefusedError(BODY_ERROR, "the subscription names no topic")
    return [SubscriptionItem(item) if isinstance(item, str) else item for item in found]


def _data(message: Any, kind: str) -> bytes:
    if kind == "text_data":
        return bytes(message.text_data.encode())
    return bytes(message.binary_data if kind == "binary_data" else message.proto_data.SerializeToString())


def _set_time(value: Any, text: str) -> None:
    """Set the time of an event (8.3); a text that is no time stays as it is."""
    with contextlib.suppress(ValueError):
        value.ce_timestamp.FromJsonString(text)


def _set_data(event: Any, payload: bytes, content_type: str) -> None:
    """Set the data in the field for its content type (8.2)."""
    main = content_type.partition(";")[0].strip().lower()
    if main == "application/protobuf":
        with contextlib.suppress(DecodeError):  # another message than an Any may be one with unknown fields
            event.proto_data.ParseFromString(payload)
            if event.proto_data.type_url and event.proto_data.SerializeToString() == payload:
                return
        event.ClearField("proto_data")
    elif (
        main.startswith("text/") or main in ("application/json", "application/xml") or main.endswith(("+json", "+xml"))
    ):
        try:
            event.text_data = payload.decode()
            return
        except UnicodeDecodeError:
            pass
    event.binary_data = payload


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "backslashreplace")


def _with_status(event: Any, code: str, text: str) -> Any:
    for names, value in ((("statuscode", "status_code"), code), (("responsemessage", "response_message"), text)):
        for name in names:
            event.attributes[name].ce_string = value
    event.attributes["time"].ce_timestamp.GetCurrentTime()
    return event
