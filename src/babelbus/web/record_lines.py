"""A record as the administration endpoint writes it in JSON, and as the command line reads it back.

Bytes that are not UTF-8 are under `..._base64` instead; headers that an object cannot hold (a name twice) too, as
pairs.
"""

import msgspec

from babelbus.records.record import Headers, Record

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One record. `timestamp` is milliseconds since 1970; `payload` is null where it removes its key."""

    partition: int
    offset: int
    timestamp: int
    attributes: int = 0
    key: str | Unset = UNSET
    key_base64: bytes | Unset = UNSET
    payload: str | Unset | None = UNSET
    payload_base64: bytes | Unset = UNSET
    headers: dict[str, str | None] | Unset = UNSET
    headers_base64: list[tuple[bytes, bytes | None]] | Unset = UNSET


def line_of(record: Record, partition: int) -> RecordLine:
    """Return the line of a record."""
    key, key_base64 = (UNSET, UNSET) if record.key is None else text_or_bytes(record.key)
    payload, payload_base64 = (None, UNSET) if record.payload is None else text_or_bytes(record.payload)
    headers, headers_base64 = split_headers(record.headers)
    return RecordLine(
        partition,
        record.offset,
        record.timestamp,
        record.attributes,
        key,
        key_base64,
        payload,
        payload_base64,
        headers,
        headers_base64,
    )


def record_of(line: RecordLine) -> Record:
    """Return the record of a line."""
    return Record(
        bytes_of(line.payload, line.payload_base64),
        bytes_of(line.key, line.key_base64),
        headers_of(line.headers, line.headers_base64),
        line.timestamp,
        line.attributes,
        line.offset,
    )


def text_or_bytes(data: bytes) -> tuple[str | Unset, bytes | Unset]:
    """Return what stands under the plain name, and what under `..._base64`."""
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return UNSET, data


def split_headers(headers: Headers) -> tuple[dict[str, str | None] | Unset, list[tuple[bytes, bytes | None]] | Unset]:
    """Return headers as an object; as pairs where an object cannot say them."""
    if not headers:
        return UNSET, UNSET
    try:
        as_text = {name.decode(): None if value is None else value.decode() for name, value in headers}
    except UnicodeDecodeError:
        as_text = {}
    return (as_text, UNSET) if len(as_text) == len(headers) else (UNSET, list(headers))


def bytes_of(text: str | Unset | None, data: bytes | Unset | None) -> bytes | None:
    """Return the bytes that are under the plain name or under `..._base64`; `None` for null."""
    if isinstance(data, bytes):
        return data
    return text.encode() if isinstance(text, str) else None


def headers_of(
    headers: dict[str, str | None] | Unset, pairs: list[tuple[bytes, bytes | None]] | Unset | None
) -> Headers:
    """Return the headers that are an object, or pairs."""
    if isinstance(pairs, list):
        return tuple(pairs)
    if not isinstance(headers, dict):
        return ()
    return tuple((name.encode(), None if value is None else value.encode()) for name, value in headers.items())
