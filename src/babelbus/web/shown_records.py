"""A record as the console shows it: shortened on the server, so that no page gets 16 MiB that it did not ask for.

Bytes that are not UTF-8 are base64, under `..._b64`. A header is `[name, value]`; a third member says what differs
from what is stored: `{"bytes": size}` of a value that is shortened, `{"base64": true}`.
"""

import base64
import codecs
from typing import Any

import msgspec

from babelbus.core.access import Identity
from babelbus.core.rooted import relative_record
from babelbus.core.topic import event_of
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.record import Headers, Record

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType
NAME_BYTES_MAX = 256
"""A longer name of a header is shortened."""


class Limits(msgspec.Struct, frozen=True):
    """Most bytes of a payload, of a key, of the value of a header, and of all headers of a record."""

    payload: int = 1024
    key: int = 512
    header: int = 512
    headers: int = 4096


WHOLE = Limits(256 * 1024, 64 * 1024, 64 * 1024, 256 * 1024)
"""The limits of one record that somebody looks at."""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a record says that it came from; without a `protocol` the record says nothing.

    The server writes the header that says so, except for records that came in the stored form over jebp.
    """

    protocol: str = ""
    principal: str = ""
    source: str = ""


class ShownRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """One record. `time_ms` is milliseconds since 1970; `deleted` says that the record removes its key.

    `key_bytes` is set if the key is shortened; `headers_bytes` if a header is shortened.
    """

    partition: int
    offset: int
    time_ms: int
    subject: str
    key: str | Unset = UNSET
    key_b64: str | Unset = UNSET
    key_bytes: int = 0
    headers: list[list[Any]]
    headers_bytes: int = 0
    payload: str | Unset | None = UNSET
    payload_b64: str | Unset = UNSET
    payload_bytes: int
    clipped: bool
    deleted: bool = False
    origin: Origin


def show(record: Record, partition: int, topic: str, principal: Identity, limits: Limits) -> ShownRecord:
    """Return a record of a topic (its absolute name) as a principal sees it."""
    if principal.root is not None:
        record, topic = relative_record(record, principal.root), principal.relative(topic)
    event = event_of(topic, record)
    key, key_b64 = (UNSET, UNSET) if record.key is None else clip(record.key, limits.key)
    payload, payload_b64 = (None, UNSET) if record.payload is None else clip(record.payload, limits.payload)
    headers, headers_bytes = _headers(event.headers, limits)
    payload_bytes = len(record.payload or b"")
    return ShownRecord(
        partition=partition,
        offset=record.offset,
        time_ms=record.timestamp,
        subject=printable(event.subject[: limits.key]),
        key=key,
        key_b64=key_b64,
        key_bytes=len(record.key) if record.key is not None and len(record.key) > limits.key else 0,
        headers=headers,
        headers_bytes=headers_bytes,
        payload=payload,
        payload_b64=payload_b64,
        payload_bytes=payload_bytes,
        clipped=payload_bytes > limits.payload,
        deleted=record.payload is None,
        origin=_origin(record.headers),
    )


def clip(data: bytes, bytes_max: int) -> tuple[str | Unset, str | Unset]:
    """Return the beginning of some bytes as text, or as base64 if it is no UTF-8; a letter is not cut."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data[:bytes_max], len(data) <= bytes_max)
    except UnicodeDecodeError:
        return UNSET, base64.b64encode(data[:bytes_max]).decode()
    return text, UNSET


def printable(text: str) -> str:
    """Return a text whose bytes without a letter are replaced: JSON cannot hold them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _headers(headers: Headers, limits: Limits) -> tuple[list[list[Any]], int]:
    """Return the headers, and their size if one of them is shortened."""
    shown: list[list[Any]] = []
    left, clipped = limits.headers, False
    for name, value in headers:
        row: list[Any] = [name[:NAME_BYTES_MAX].decode("utf-8", "replace"), None]
        shown.append(row)
        clipped |= len(name) > NAME_BYTES_MAX
        if value is None:
            continue
        size = max(min(limits.header, left), 0)
        left -= min(len(value), size)
        text, data = clip(value, size)
        row[1] = data if text is UNSET else text
        about: dict[str, object] = {}
        if text is UNSET:
            about["base64"] = True
        if len(value) > size:
            about["bytes"], clipped = len(value), True
        if about:
            row.append(about)
    return shown, sum(len(name) + len(value or b"") for name, value in headers) if clipped else 0


def _origin(headers: Headers) -> Origin:
    source = next((value for name, value in headers if name == SOURCE_HEADER and value is not None), None)
    if source is None:
        return Origin()
    text = source[:NAME_BYTES_MAX].decode("utf-8", "replace")
    protocol, _, rest = text.partition(":")
    return Origin(protocol, rest.partition("#")[0], text)
