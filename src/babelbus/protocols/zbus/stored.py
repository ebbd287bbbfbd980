"""Messages -> the bodies of records, which is what the CRC of each covers (the mapping is told in `records`).

The id is the first header of each record: what follows the id is the same from message to message, which `heads` uses.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from babelbus.protocols.zbus.content import body_kind_of
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import BodyKind, Message
from babelbus.protocols.zbus.records import (
    JSON,
    KINDS,
    LEFT_OUT,
    NO_BODY,
    ORIGIN_PREFIX,
    RETYPED,
    SENT_TYPE,
    UNTYPED,
    record_name,
)
from babelbus.records.envelope import CONTENT_TYPE, ID_HEADER, SOURCE_HEADER
from babelbus.records.format import LENGTHS, RESERVED_HEADER_PREFIX
from babelbus.records.headers import read_headers
from babelbus.records.record import Headers

Pair = tuple[bytes, bytes]

NAMES_MAX: Final = 256
NAME_LENGTH_MAX: Final = 128
"""Limits of the names that a connection remembers: some tens of KiB at the most."""
_pack_length = struct.Struct(">i").pack
_pack_front = struct.Struct(">bq").pack
_NO_KEY: Final = _pack_length(-1)
_ELSEWHERE: Final = LEFT_OUT | {"id", "source", "content-type"}
"""Headers that are not stored under a name of their own."""


def _sized(data: bytes) -> bytes:
    return LENGTHS[len(data)] + data


def _encode_pairs(pairs: Sequence[Pair]) -> bytes:
    return b"".join([_sized(part) for pair in pairs for part in pair])


_ID_NAME: Final = _sized(ID_HEADER)
_URL_NAME: Final = _sized(b"zbus.url")
_METHOD_NAME: Final = _sized(b"zbus.method")
_STATUS_NAME: Final = _sized(b"zbus.status")


class _Names(dict[str, bytes]):
    """The name of a header -> its name in the record with its length; nothing for a header that is stored elsewhere."""

    def __init__(self, elsewhere: frozenset[str]) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def __missing__(self, name: str) -> bytes:
        stored = record_name(name)
        left_out = name in self._elsewhere or stored.startswith(RESERVED_HEADER_PREFIX)
        encoded = b"" if left_out else _sized(stored)
        if len(name) <= NAME_LENGTH_MAX:
            if len(self) >= NAMES_MAX:
                self.clear()
            self[name] = encoded
        return encoded


class Recorder:
    """Encodes the messages of one connection; `stamp` are the headers that it gives each of them, in place of its own.

    There is a source among them.
    """

    def __init__(self, stamp: Mapping[str, str]) -> None:
        self._names = _Names(_ELSEWHERE | stamp.keys())
        pairs = [(SOURCE_HEADER, f"{ORIGIN_PREFIX}#{stamp['source']}".encode())]
        pairs += [(record_name(name), value.encode()) for name, value in stamp.items() if name != "source"]
        self._stamp = _encode_pairs(pairs)
        self._count = 1 + len(pairs)
        self._message: Message | None = None
        self._parts = (b"", b"", b"")

    def encode(self, message: Message, ids: Sequence[str], payloads: Sequence[bytes], timestamp: int) -> list[bytes]:
        """Return the bodies of the records of messages that differ from `message` in id and body alone.

        All of them have a body if `message` has a body, else none has.

        Raises:
            MalformedMessageError: a header is not UTF-8.
        """
        lengths = LENGTHS
        try:
            if message is not self._message:  # the runs of a connection have one common message
                self._parts = self._encode_parts(message)
                self._message = None if message.body else message  # a body is not kept
            key, middle, rest = self._parts
            front = _pack_front(0, timestamp) + key
            bodies = []
            for request_id, data in zip(ids, payloads, strict=True):
                encoded_id = request_id.encode()
                bodies.append(
                    b"".join((front, lengths[len(data)], data, middle, lengths[len(encoded_id)], encoded_id, rest))
                )
            return bodies
        except UnicodeEncodeError as error:
            raise MalformedMessageError("a header or the url is no UTF-8") from error

    def headers(self, message: Message) -> Headers:
        """Return the record headers of a message, which has an id.

        Raises:
            MalformedMessageError: a header is not UTF-8.
        """
        try:
            _, _, rest = self._encode_parts(message)
            return ((ID_HEADER, message.headers["id"].encode()), *read_headers(rest))
        except UnicodeEncodeError as error:
            raise MalformedMessageError("a header or the url is no UTF-8") from error

    def _encode_parts(self, message: Message) -> tuple[bytes, bytes, bytes]:
        """Return the key, the count of headers with the name of the id, and what follows the id."""
        headers, lengths, names = message.headers, LENGTHS, self._names
        parts = [self._stamp]
        count = self._count
        for name, value in headers.items():
            stored_name = names[name]
            if stored_name:
                encoded = value.encode()
                parts += (stored_name, lengths[len(encoded)], encoded)
                count += 1
        if message.url is not None:
            parts += (_URL_NAME, _sized(message.url.encode()))
            count += 1
        if message.method is not None:
            parts += (_METHOD_NAME, _sized(message.method.encode()))
            count += 1
        if message.status is not None:
            parts += (_STATUS_NAME, _sized(b"%d" % message.status))
            count += 1
        typed, typed_count = _typed(headers.get("content-type"), message.body is not None, message.body_kind)
        parts.append(typed)
        key = headers.get("key", headers.get("tag"))
        encoded_key = _NO_KEY if key is None else _sized(key.encode())
        return encoded_key, bytes((count + typed_count,)) + _ID_NAME, b"".join(parts)


@lru_cache(maxsize=1024)
def _typed(content_type: str | None, has_body: bool, kind: BodyKind) -> tuple[bytes, int]:
    """Return the record headers that describe the body, and their number."""
    pairs: Sequence[Pair]
    if content_type is not None:
        pairs = _pairs_of_type(content_type, has_body, kind)
    else:
        pairs = UNTYPED[kind] if has_body else ()
    return _encode_pairs(pairs), len(pairs)


def _pairs_of_type(content_type: str, has_body: bool, kind: BodyKind) -> list[Pair]:
    sent = content_type.encode()
    if not has_body:
        return [(CONTENT_TYPE, sent), NO_BODY]
    described, natural = body_kind_of(content_type)
    if kind == "json" and described != "json":  # a form, or a value with the type of a page
        return [JSON, (SENT_TYPE, sent), RETYPED["json"]]
    if kind == "text" and natural != content_type:  # the payload is UTF-8, whatever it came as
        return [(CONTENT_TYPE, natural.encode()), (SENT_TYPE, sent), RETYPED["text"]]
    return [(CONTENT_TYPE, sent)] if kind == described else [(CONTENT_TYPE, sent), KINDS[kind]]
