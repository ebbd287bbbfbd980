"""Messages <-> what the log keeps: payload, key and record headers (docs/design/design.md, sections 1.9 and 5).

The payload is the plain body, so that other protocols see a natural one: a text without quotes, the JSON text as its
sender wrote it, bytes as they are; `content-type` describes it. Headers take the names of CloudEvents' Kafka binding
where there are any:

| of the message           | record header                                                                          |
|--------------------------|----------------------------------------------------------------------------------------|
| `id`                     | `ce_id`                                                                                |
| `source`                 | `ce_source` = origin `#` source; the origin begins with `zbus:` and names who sent it  |
| `content-type`           | `content-type`, or `zbus_content-type` where it does not describe the payload          |
| others of the protocol   | `zbus_` + name                                                                         |
| any other header         | its own name; `zbus_` + name if that is taken                                          |
| url, method, status      | `zbus.url`, `zbus.method`, `zbus.status`                                               |
| kind of the body         | `zbus.body`, where `content-type` does not say it                                      |

Left out are `cmd`, `mq` (it is the topic) and the secrets. An event without such a `ce_source` is a foreign one.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from babelbus.protocols.zbus.content import body_kind_of, is_json, is_utf8, parse_json
from babelbus.protocols.zbus.messages import HEADER_NAMES, SECRETS, BodyKind, Message, canonical_name
from babelbus.records.envelope import CONTENT_TYPE, ID_HEADER, JSON_TYPE, SOURCE_HEADER, TEXT_TYPE
from babelbus.records.record import Headers

ORIGIN_PREFIX: Final = "zbus:"
OWN: Final = "zbus"
LEFT_OUT: Final = SECRETS | {"cmd", "mq"}
NAME_LENGTH_MAX: Final = 64
"""Longer header names are not cached: they are chosen by clients."""
DELIVERY: Final = frozenset({"cmd", "mq", "channel", "offset", "window", "target"}) | SECRETS
"""Headers that a foreign event cannot have in zbus: here they would mean something else."""

JSON: Final = (CONTENT_TYPE, JSON_TYPE)
TEXT: Final = (CONTENT_TYPE, TEXT_TYPE)
BODY: Final = b"zbus.body"
NO_BODY: Final = (BODY, b"none")
KINDS: Final[dict[BodyKind, tuple[bytes, bytes]]] = {
    "json": (BODY, b"json"),
    "text": (BODY, b"text"),
    "bytes": (BODY, b"bytes"),
}
RETYPED: Final = {"json": (BODY, b"json+"), "text": (BODY, b"text+")}
"""The kinds with a `+`: the record's content type is ours, the message had none or the one in `zbus_content-type`."""

SENT_TYPE: Final = b"zbus_content-type"
_ABOUT: Final = frozenset({CONTENT_TYPE, BODY, SENT_TYPE, b"zbus.url", b"zbus.method", b"zbus.status"})

UNTYPED: Final[dict[BodyKind, tuple[tuple[bytes, bytes], ...]]] = {
    "json": (JSON, RETYPED["json"]),
    "text": (TEXT, RETYPED["text"]),
    "bytes": (KINDS["bytes"],),
}


_NAMES: Final = frozenset({*HEADER_NAMES, ID_HEADER.decode(), SOURCE_HEADER.decode()})


def record_name(name: str) -> bytes:
    """Return the name that a header of a message has in the record."""
    return (f"{OWN}_{name}" if name in _NAMES or name.startswith(OWN) else name).encode()


def from_record(payload: bytes | None, key: bytes | None, headers: Headers, mq: str | None = None) -> Message:
    """Return the message of a record, whoever published it: a zbus message as it was sent, a foreign event as one.

    `mq` becomes the header of that name. A foreign payload is JSON if its content type says so and it is valid, else
    text if it is UTF-8, else bytes. A value that is no UTF-8 has escapes (`\\xff`).
    """
    try:
        return _from_record(payload, key, headers, mq, bytes.decode)
    except UnicodeDecodeError:
        return _from_record(payload, key, headers, mq, _text)


def _from_record(
    payload: bytes | None, key: bytes | None, headers: Headers, mq: str | None, decode: Callable[[bytes], str]
) -> Message:
    names: dict[str, str] = {} if mq is None else {"mq": mq}
    about: dict[bytes, str] = {}
    own = False
    for record_name, data in headers:
        if data is None:
            continue
        value = decode(data)
        if record_name == ID_HEADER:
            names["id"] = value
        elif record_name == SOURCE_HEADER:
            is_own = value.startswith(ORIGIN_PREFIX)
            own = own or is_own
            _, separator, source = value.partition("#")
            if not is_own or separator:
                names["source"] = source if is_own else value
        elif record_name in _ABOUT:
            about[record_name] = value
        elif record_name.startswith(b"zbus"):
            if record_name.startswith(b"zbus_"):
                names[decode(record_name[5:])] = value
        else:
            name = _message_name(record_name)
            if name is not None:
                names[name] = value
    url, method, content_type = about.get(b"zbus.url"), about.get(b"zbus.method"), about.get(CONTENT_TYPE)
    status, marker = _status(about.get(b"zbus.status", "")), about.get(BODY)
    if not own:
        if key is not None and "key" not in names:
            names["key"] = decode(key)
        if content_type is not None:
            names["content-type"] = content_type
        body, kind = foreign_body(payload, content_type)
        return Message(names, url, method, status, body, kind)
    if marker is not None and marker.endswith("+"):
        content_type, marker = about.get(SENT_TYPE), marker[:-1]
    if content_type is not None:
        names["content-type"] = content_type
    if marker is None and content_type is not None:
        marker = body_kind_of(content_type)[0]
    body, kind = _own_body(payload, marker)
    return Message(names, url, method, status, body, kind)


def _own_body(payload: bytes | None, kind: str | None) -> tuple[bytes | None, BodyKind]:
    """Return the body that a record says it has. It is looked at again: who may write records may write any.

    A text that is no UTF-8 would end the connection of its consumer, and invalid JSON could say anything there.
    """
    if payload is None or kind not in KINDS:
        return None, "json"
    if kind == "json":
        value = parse_json(payload)
        if value is not None:
            return value
    return payload, "text" if kind != "bytes" and is_utf8(payload) else "bytes"


def _message_name(record_name: bytes) -> str | None:
    """Return the header name of a record header, `None` for one that zbus gives another meaning."""
    return _short_message_name(record_name) if len(record_name) <= NAME_LENGTH_MAX else _make_message_name(record_name)


def _make_message_name(record_name: bytes) -> str | None:
    name = canonical_name(_text(record_name))
    return None if name in DELIVERY else name


_short_message_name: Final = lru_cache(maxsize=4096)(_make_message_name)


def _status(text: str) -> int | None:
    return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def foreign_body(payload: bytes | None, content_type: str | None) -> tuple[bytes | None, BodyKind]:
    """Return the body of what another protocol published (docs/design/design.md, section 5)."""
    if payload is None:
        return None, "json"
    if content_type is not None and is_json(content_type):
        value = parse_json(payload)
        if value is not None:
            return value
    return payload, "text" if is_utf8(payload) else "bytes"
