"""Messages of EventMesh <-> what the log keeps: payload, key and record headers (docs/design/design.md, section 5).

The payload is the plain body or data, so that other protocols see a natural one. Headers take the names of CloudEvents'
Kafka binding:

| of the message                           | record header                                                        |
|------------------------------------------|----------------------------------------------------------------------|
| flavour                                  | `eventmesh.flavour`; an event without it is a foreign one            |
| `seq`, or the CloudEvent's `id`          | `ce_id`                                                              |
| CloudEvent's `source`                    | `ce_source` = who sent it, `#` and the source                        |
| CloudEvent's `type`, `time`, extensions  | `ce_` + name                                                         |
| `datacontenttype`                        | `content-type`                                                       |
| property of an EventMeshMessage          | its own name; `eventmesh_` + name if that has another meaning here   |
| others of an EventMeshMessage's `headers` | `eventmesh.headers`, as JSON                                        |

Left out are the topic and the publisher's credentials and place (specification, 0.8).
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from babelbus.core.record import Event
from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.protocols.eventmesh.messages import CLOUD_EVENT, HTTP, MESSAGE, EventMeshMessage, Flavour
from babelbus.records.envelope import CONTENT_TYPE, ID_HEADER, SOURCE_HEADER, SUBJECT_HEADER
from babelbus.records.format import HEADERS_MAX
from babelbus.records.record import Headers

PREFIX: Final = "eventmesh"
FLAVOUR: Final = b"eventmesh.flavour"
MESSAGE_HEADERS: Final = b"eventmesh.headers"
LEFT_OUT: Final = frozenset(
    ("username", "passwd", "password", "token", "pid", "ip", "protocoltype", "protocolversion", "protocoldesc")
)
"""Properties that neither the log nor a subscriber gets: secrets and the place of the publisher, and the flavour."""
CE_OWN: Final = frozenset(("specversion", "id", "source", "subject", "datacontenttype", "data", "data_base64"))
"""Members of a CloudEvent that have a place of their own in a record."""
CE_OPTIONAL: Final = frozenset(("type", "dataschema", "time"))
"""Further attributes that CloudEvents define: all others are extensions."""
NO_PROPERTIES: Final = frozenset((FLAVOUR, SUBJECT_HEADER, CONTENT_TYPE, MESSAGE_HEADERS))
"""Record headers that are no properties."""
BASE64: Final = "base64"
ENCODING: Final = "content-encoding"
OLD_VERSION: Final = "0.3"
SPEC_VERSIONS: Final = ("1.0", OLD_VERSION)

NAMES_MAX: Final = 1024
NAME_SIZE_MAX: Final = 64

Given = TypeVar("Given", bound=str | bytes)
Made = TypeVar("Made")

_decode_message = msgspec.json.Decoder(EventMeshMessage).decode
_decode_event = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_value = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_NO_HEADERS: Final[dict[str, Any]] = {}


class InvalidMessageError(BabelbusError):
    """A message cannot be published; the answer carries the text."""


def read_ttl(text: str | None, default_ms: float, unit_ms: float = 1) -> float:
    """Return a time to live in ms; one that is missing or makes no sense is the default (10)."""
    try:
        ttl = float(text or 0) * unit_ms
    except ValueError:
        return default_ms
    return ttl if 0 < ttl < math.inf else default_ms


def text_of(value: object) -> str:
    """Return a property as text: a string is the text, other values are their JSON."""
    return value if isinstance(value, str) else _encode(value).decode()


def flavour_of(properties: dict[str, Any] | None) -> Flavour:
    """Return the flavour that the header of a frame names.

    Raises:
        InvalidMessageError: it names none that TCP carries.
    """
    named = (properties or {}).get("protocoltype") or MESSAGE
    if named == MESSAGE:
        return MESSAGE
    if named == CLOUD_EVENT:
        return CLOUD_EVENT
    raise InvalidMessageError(f"protocoltype {text_of(named)!r} is neither {MESSAGE} nor {CLOUD_EVENT}")


def read_message(body: bytes, seq: str, properties: dict[str, Any] | None, source: str) -> tuple[Event, dict[str, str]]:
    """Return the event of the body of a frame and the properties of its message; the subject is the topic.

    `source` begins with `eventmesh:` and names who sends.

    Raises:
        InvalidMessageError: the body is no message of the flavour, or has no topic.
    """
    if flavour_of(properties) == MESSAGE:
        return _read_message(body, seq, properties, source)
    return read_cloud_event(body, source)


def _read_message(
    body: bytes, seq: str, frame_properties: dict[str, Any] | None, source: str
) -> tuple[Event, dict[str, str]]:
    try:
        message = _decode_message(body)
    except UNREADABLE as error:
        raise InvalidMessageError(f"the body is no EventMeshMessage: {error}") from None
    if not message.topic:
        raise InvalidMessageError("the message has no topic")
    properties = (frame_properties or {}) | (message.properties or {})
    return make_event(message.topic, message.body, seq, properties, source, message.headers)


def make_event(
    topic: str,
    text: str | None,
    identifier: str,
    properties: dict[str, Any],
    source: str,
    message_headers: dict[str, Any] | None = None,
    flavour: Flavour = MESSAGE,
) -> tuple[Event, dict[str, str]]:
    """Return the event of an EventMeshMessage, and its properties as text without those that nobody else may see.

    Raises:
        InvalidMessageError: the body is not what its properties say.
    """
    headers: list[tuple[bytes, bytes | None]] = [
        (FLAVOUR, flavour.encode()),
        (ID_HEADER, identifier.encode()),
        (SOURCE_HEADER, source.encode()),
    ]
    if message_headers:
        rest = {name: value for name, value in message_headers.items() if name.lower() not in LEFT_OUT}
        content_type = rest.pop("datacontenttype", None)
        if content_type is not None:
            headers.append((CONTENT_TYPE, text_of(content_type).encode()))
        if rest:
            headers.append((MESSAGE_HEADERS, _encode(rest)))
    kept = {
        name: value if type(value) is str else text_of(value)
        for name, value in properties.items()
        if value is not None and _record_names[name] is not None
    }
    payload = b"" if text is None else text.encode()
    if kept.get(ENCODING) == BASE64 and text is not None:
        del kept[ENCODING]
        try:
            payload = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidMessageError("content-encoding is base64, and the body is not") from None
    headers += [(_record_names[name] or b"", value.encode()) for name, value in kept.items()]
    key = kept.get("keys") or kept.get("tag")
    return _event(topic, payload, key, headers), kept


def _event(topic: str, payload: bytes | None, key: str | None, headers: list[tuple[bytes, bytes | None]]) -> Event:
    """Return an event that can be stored: a batch with another one would fail as a whole."""
    if len(headers) > HEADERS_MAX:
        raise InvalidMessageError(f"the message has {len(headers)} properties, the most are {HEADERS_MAX}")
    return Event(topic, payload, key.encode() if key else None, tuple(headers))


class _Names(dict[Given, Made]):
    """Names as they are written elsewhere; a short name that came before costs a look-up."""

    def __init__(self, make: Callable[[Given], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: Given) -> Made:
        made = self._make(name)
        if len(self) < NAMES_MAX and len(name) <= NAME_SIZE_MAX:
            self[name] = made
        return made


def _record_name(name: str) -> bytes | None:
    """Return the header of a property, `None` for a property that is left out: seed clients capitalise names."""
    if name.lower() in LEFT_OUT:
        return None
    taken = name.startswith(("ce_", PREFIX)) or name == "content-type"
    return (f"{PREFIX}_{name}" if taken else name).encode()


def _property_name(name: bytes) -> str | None:
    return None if name in NO_PROPERTIES else _text(name).removeprefix(f"{PREFIX}_")


def legal_name(name: str) -> str:
    """Return a name that CloudEvents allow: Java throws on others (2.4)."""
    return "".join(letter for letter in name.lower() if letter.isascii() and letter.isalnum())


def _attribute_name(name: bytes) -> str | None:
    legal = legal_name(_text(name[3:])) if name.startswith(b"ce_") else ""
    return legal if legal and legal not in CE_OWN else None


_attribute_names: _Names[bytes, str | None] = _Names(_attribute_name)
_record_names: _Names[str, bytes | None] = _Names(_record_name)
_property_names: _Names[bytes, str | None] = _Names(_property_name)


def read_cloud_event(
    body: bytes, source: str, beside: Mapping[str, str] = MappingProxyType({})
) -> tuple[Event, dict[str, str]]:
    """Return the event of a CloudEvent in JSON, and its extensions as text; some may stand `beside` it (4.4).

    Raises: as `read_message`.
    """
    try:
        members = _decode_event(body)
        values = {name: _decode_value(raw) for name, raw in members.items() if name != "data"}
    except UNREADABLE as error:
        raise InvalidMessageError(f"the body is no CloudEvent: {error}") from None
    if values.get("specversion") not in SPEC_VERSIONS:
        raise InvalidMessageError("the CloudEvent has no specversion that is supported: 1.0, 0.3")
    if values["specversion"] == OLD_VERSION:
        _update_event(values, members)
    if "data" in members and values.get("datacontenttype") is None:
        values["datacontenttype"] = "application/json"  # CloudEvents JSON format, 3.1: without a type it is this one
    return make_cloud_event({**beside, **values}, _data(members, values.get("datacontenttype")), source)


def _update_event(values: dict[str, Any], members: dict[str, msgspec.Raw]) -> None:
    """Update a CloudEvent of version 0.3 to 1.0, as which it is delivered."""
    if "schemaurl" in values:
        values["dataschema"] = values.pop("schemaurl")
    if str(values.get("datacontentencoding")).lower() == BASE64:
        del values["datacontentencoding"]
        if "data" in members:
            members["data_base64"] = members.pop("data")


def make_cloud_event(attributes: dict[str, Any], payload: bytes | None, source: str) -> tuple[Event, dict[str, str]]:
    """Return the event of a CloudEvent by its attributes, and its extensions as text.

    Raises:
        InvalidMessageError: it has no subject, which is the topic.
    """
    topic = attributes.get("subject")
    if not isinstance(topic, str) or not topic:
        raise InvalidMessageError("the CloudEvent has no subject, which is the topic")
    headers: list[tuple[bytes, bytes | None]] = [(FLAVOUR, b"cloudevents")]
    if attributes.get("id") is not None:
        headers.append((ID_HEADER, text_of(attributes["id"]).encode()))
    named = attributes.get("source")
    headers.append((SOURCE_HEADER, (source if named is None else f"{source}#{text_of(named)}").encode()))
    content_type = attributes.get("datacontenttype")
    if content_type is not None:
        headers.append((CONTENT_TYPE, text_of(content_type).encode()))
    properties: dict[str, str] = {}
    for name, value in attributes.items():
        if name not in CE_OWN and name.lower() not in LEFT_OUT and value is not None:
            properties[name] = text_of(value)
            headers.append((f"ce_{name}".encode(), properties[name].encode()))
    key = properties.get("keys") or properties.get("tag")
    return _event(topic, payload, key, headers), properties


def _data(members: dict[str, msgspec.Raw], content_type: object) -> bytes | None:
    """Return the data of a CloudEvent as the bytes that the content type describes."""
    encoded = members.get("data_base64")
    try:
        if encoded is not None:
            return base64.b64decode(text_of(_decode_value(encoded)), validate=True)
        raw = members.get("data")
        if raw is None:
            return b""
        if not _is_json(content_type):
            value = _decode_value(raw)
            if isinstance(value, str):
                return value.encode()
        return bytes(raw)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise InvalidMessageError("the data of the CloudEvent cannot be read") from None


def _is_json(content_type: object) -> bool:
    """Return whether data of a content type is JSON (CloudEvents JSON format, 3.1.1); without a type it is."""
    if content_type is None:
        return True
    main = str(content_type).partition(";")[0].strip().lower()
    return main.endswith(("/json", "+json"))


def encode_body(
    topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], *, strict: bool
) -> tuple[Flavour, bytes]:
    """Return flavour and body of a frame for a record, in the flavour of its publisher.

    `more` are properties that the server adds. `strict` is for clients that refuse members of a message beside topic,
    properties and body (specification, 0.1).
    """
    properties, message_headers = _describe_plain(headers), _NO_HEADERS
    if properties is None:
        known = dict(headers)
        if known.get(FLAVOUR) == b"cloudevents":
            return CLOUD_EVENT, _encode_cloud_event(topic, payload, known, more)
        properties, message_headers = describe(known)
    text, encoding = text_body(payload)
    if encoding or more:
        properties |= encoding | more
    message: dict[str, Any] = {"topic": topic, "properties": properties, "body": text}
    if message_headers and not strict:
        message["headers"] = message_headers
    return MESSAGE, _encode(message)


def encode_content(
    topic: str, payload: bytes | None, headers: Headers, more: dict[str, str], *, data_alone: bool = False
) -> tuple[Flavour, str, dict[str, str]]:
    """Return flavour, content and properties of a record for a webhook (5.1); `data_alone` is for CloudEvents."""
    plain = _describe_plain(headers)
    if plain is not None:
        text, encoding = text_body(payload)
        return HTTP if headers[0][1] == b"http" else MESSAGE, text, plain | encoding | more
    known = dict(headers)
    if known.get(FLAVOUR) == b"cloudevents":
        attributes = cloud_attributes(known)
        extensions = {name: text for name, text in attributes.items() if name not in CE_OPTIONAL}
        if data_alone:
            text, encoding = text_body(payload)
            return CLOUD_EVENT, text, extensions | encoding | more
        return CLOUD_EVENT, _encode_cloud_event(topic, payload, known, more).decode(), extensions | more
    properties, message_headers = describe(known)
    text, encoding = text_body(payload)
    flavour = HTTP if known.get(FLAVOUR) == b"http" else MESSAGE
    typed = {name: text_of(value) for name, value in message_headers.items()}
    return flavour, text, typed | properties | encoding | more


def describe(headers: dict[bytes, bytes | None]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the properties and the `headers` of the EventMeshMessage that a record is."""
    try:
        # Decoding without a handler of errors takes a third of the time.
        properties = {
            property_name: value.decode()
            for name, value in headers.items()
            if value is not None and (property_name := _property_names[name]) is not None
        }
    except UnicodeDecodeError:
        properties = {
            property_name: _text(value)
            for name, value in headers.items()
            if value is not None and (property_name := _property_names[name]) is not None
        }
    message_headers: dict[str, Any] = {}
    content_type, rest = headers.get(CONTENT_TYPE), headers.get(MESSAGE_HEADERS)
    if content_type is not None:
        message_headers["datacontenttype"] = _text(content_type)
    if rest is not None:
        message_headers |= _object(rest)
    return properties, message_headers


def cloud_attributes(headers: dict[bytes, bytes | None]) -> dict[str, str]:
    """Return the attributes of the CloudEvent that a record is, beside those with a place of their own."""
    return {
        attribute: _text(value)
        for name, value in headers.items()
        if value is not None and (attribute := _attribute_names[name]) is not None
    }


def convert_reply(flavour: Flavour, payload: bytes | None, headers: Headers) -> Headers:
    """Return the headers of a reply in the flavour of the client that has asked (8.5)."""
    known = dict(headers)
    is_event = known.get(FLAVOUR) == b"cloudevents"
    made: dict[bytes, bytes | None] = {FLAVOUR: flavour.encode()}
    if is_event == (flavour == CLOUD_EVENT):
        return tuple((known | made).items())
    made |= {name: known[name] for name in (ID_HEADER, SOURCE_HEADER, CONTENT_TYPE) if name in known}
    if is_event:
        for name, text in cloud_attributes(known).items():
            header = None if name in CE_OPTIONAL else _record_names[name]
            if header is not None:
                made[header] = text.encode()
    else:
        properties, _ = describe(known)
        default = "application/octet-stream" if text_body(payload)[1] else "text/plain"
        made.setdefault(CONTENT_TYPE, properties.pop("datacontenttype", default).encode())
        for name, text in properties.items():
            made.setdefault(f"ce_{name.removeprefix('ce_')}".encode(), text.encode())
    return tuple(made.items())


def _describe_plain(headers: Headers) -> dict[str, str] | None:
    """Return the properties of a message of EventMesh that has no other headers beside its flavour; else `None`.

    Most messages are so. Other records take half a microsecond more, for what has another meaning or comes twice.
    """
    if not headers or headers[0][0] != FLAVOUR or headers[0][1] == b"cloudevents":
        return None
    try:
        properties = {
            property_name: value.decode()  # type: ignore[union-attr] # no value is an error that is caught
            for name, value in headers
            if (property_name := _property_names[name]) is not None
        }
    except (UnicodeDecodeError, AttributeError):
        return None
    return properties if len(properties) == len(headers) - 1 else None


def text_body(payload: bytes | None) -> tuple[str, dict[str, str]]:
    """Return a payload as text, and the property that marks one that is no UTF-8 and so is base64."""
    if payload is None:
        return "", {}
    try:
        return payload.decode(), {}
    except UnicodeDecodeError:
        return base64.b64encode(payload).decode(), {ENCODING: BASE64}


def _encode_cloud_event(
    topic: str, payload: bytes | None, headers: dict[bytes, bytes | None], more: dict[str, str]
) -> bytes:
    source = _text(headers.get(SOURCE_HEADER) or b"").partition("#")[2]
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": _text(headers.get(ID_HEADER) or b"") or "0",
        "source": source or "/",
        "type": _text(headers.get(b"ce_type") or b"") or CLOUD_EVENT,
        "subject": topic,
    }
    content_type = headers.get(CONTENT_TYPE)
    if content_type is not None:
        event["datacontenttype"] = _text(content_type)
    for name, text in cloud_attributes(headers).items():
        event.setdefault(name, text)
    event |= {"protocoltype": CLOUD_EVENT, "protocolversion": "1.0", "protocoldesc": "tcp"}
    event |= more
    text, encoding = text_body(payload)
    is_json = _is_json(event.get("datacontenttype"))
    if payload and is_json and _is_valid_json(payload):
        event["data"] = msgspec.Raw(payload)
    elif not encoding and not is_json:
        event["data"] = text
    elif payload:  # a text as `data` would be a JSON string where the type is JSON
        event["data_base64"] = base64.b64encode(payload).decode()
    encoded = _encode(event)
    # JSON that a publisher wrote over several lines stays so in `Raw`: a newline would end Go's client (3.1).
    return encoded if b"\n" not in encoded else _encode(_decode_value(encoded))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = _decode_value(data)
    except UNREADABLE:
        return {}
    return value if isinstance(value, dict) else {}


def _is_valid_json(payload: bytes) -> bool:
    try:
        _decode_value(payload)
    except UNREADABLE:
        return False
    return True
