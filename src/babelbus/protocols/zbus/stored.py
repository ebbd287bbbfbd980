"""Messages -> the stored form at once: the same records as `records.to_record` makes, many of one mould together.

What the messages of a connection have in common is a mould: everything but id and body as a rule. The id comes first
among the headers: what follows it is the same from message to message, which `heads.py` makes use of.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import BodyKind, Message
from babelbus.protocols.zbus.records import LEFT_OUT, ORIGIN_PREFIX, record_name, to_record
from babelbus.records.envelope import ID_HEADER, SOURCE_HEADER
from babelbus.records.format import LENGTHS, RESERVED_HEADER_PREFIX
from babelbus.records.record import Headers

KNOWN_MAX: Final = 256
KNOWN_LENGTH_MAX: Final = 128
"""Limits of the names that a connection remembers: some tens of KiB at the most."""
_pack_length = struct.Struct(">i").pack
_pack_front = struct.Struct(">bq").pack
_NO_KEY: Final = _pack_length(-1)
_ID_NAME: Final = _pack_length(len(ID_HEADER)) + ID_HEADER
_URL_NAME: Final = _pack_length(8) + b"zbus.url"
_METHOD_NAME: Final = _pack_length(11) + b"zbus.method"
_ELSEWHERE: Final = LEFT_OUT | {"id", "source", "content-type"}
"""Headers that are not stored under a name of their own."""


class Mould(msgspec.Struct, frozen=True, gc=False):
    """What the records of messages have in common: the key with its length, and what stands around the id."""

    key: bytes
    before_id: bytes
    after_id: bytes

    def bodies(self, ids: Sequence[bytes], payloads: Sequence[bytes], timestamp: int) -> list[bytes]:
        """Return the bodies of records, which is what their CRCs cover."""
        lengths, join = LENGTHS, b"".join
        front = _pack_front(0, timestamp) + self.key
        before, after = self.before_id, self.after_id
        return [
            join((front, lengths[len(payload)], payload, before, lengths[len(one)], one, after))
            for one, payload in zip(ids, payloads, strict=True)
        ]


class Recorder:
    """Encodes the messages of one connection; `stamp` are the headers that it gives each of them, in place of its own.

    There is a source among them. The names of headers that it has seen are remembered as they are stored.
    """

    def __init__(self, stamp: Mapping[str, str]) -> None:
        self._names: dict[str, bytes] = {}
        stamped = to_record(Message(dict(stamp)), ORIGIN_PREFIX)[2]
        self._stamp = stamp
        self._stamped = _encode_headers(stamped)
        self._stamped_count = 1 + len(stamped)

    def encode(self, message: Message, request_id: bytes, timestamp: int) -> bytes:
        """Return the body of the record of one message.

        Raises:
            MalformedMessageError: a header is not UTF-8.
        """
        payload = message.body
        key, count, parts = self._parts(message, has_body=payload is not None)
        payload = payload or b""
        front, lengths = _pack_front(0, timestamp), LENGTHS
        return b"".join(
            (front, key, lengths[len(payload)], payload, count, _ID_NAME, lengths[len(request_id)], request_id, *parts)
        )

    def mould(self, message: Message, *, has_body: bool) -> Mould:
        """Return what the records of messages have in common that differ from this one in id and body alone.

        Raises:
            MalformedMessageError: a header is not UTF-8.
        """
        key, count, parts = self._parts(message, has_body=has_body)
        return Mould(key, count + _ID_NAME, b"".join(parts))

    def _parts(self, message: Message, *, has_body: bool) -> tuple[bytes, bytes, list[bytes]]:
        """Return the key with its length, the count of the headers, and the parts behind the id."""
        headers, names, lengths = message.headers, self._names, LENGTHS
        parts = [self._stamped]
        count = self._stamped_count
        try:
            for name, value in headers.items():
                encoded_name = names.get(name)
                if encoded_name is None:
                    encoded_name = self._encode_name(name)
                if encoded_name:
                    encoded = value.encode()
                    parts += (encoded_name, lengths[len(encoded)], encoded)
                    count += 1
            for encoded_name, text in ((_URL_NAME, message.url), (_METHOD_NAME, message.method)):
                if text is not None:
                    encoded = text.encode()
                    parts += (encoded_name, lengths[len(encoded)], encoded)
                    count += 1
            if message.status is not None:
                parts.append(_encode_headers(((b"zbus.status", b"%d" % message.status),)))
                count += 1
            typed, typed_count = _typed(headers.get("content-type"), has_body, message.body_kind)
            key = headers.get("key", headers.get("tag"))
            encoded_key = b"" if key is None else key.encode()
        except UnicodeEncodeError as error:
            raise MalformedMessageError("a header or the url is no UTF-8") from error
        parts.append(typed)
        stored_key = _NO_KEY if key is None else lengths[len(encoded_key)] + encoded_key
        return stored_key, bytes((count + typed_count,)), parts

    def _encode_name(self, name: str) -> bytes:
        """Return the name of a header with its length, as stored; nothing for a header that is not stored by name."""
        encoded = b""
        if name not in _ELSEWHERE and name not in self._stamp:
            stored = record_name(name)
            if not stored.startswith(RESERVED_HEADER_PREFIX):
                encoded = _pack_length(len(stored)) + stored
        if len(name) <= KNOWN_LENGTH_MAX:
            if len(self._names) >= KNOWN_MAX:
                self._names.clear()
            self._names[name] = encoded
        return encoded


def encode_id(request_id: str) -> bytes:
    """Return an id as it is stored.

    Raises:
        MalformedMessageError: it is no UTF-8.
    """
    try:
        return request_id.encode()
    except UnicodeEncodeError as error:
        raise MalformedMessageError("a header or the url is no UTF-8") from error


def _encode_headers(headers: Headers) -> bytes:
    return b"".join(
        [
            b"%b%b%b%b" % (_pack_length(len(name)), name, _pack_length(len(value)), value)
            for name, value in headers
            if value is not None
        ]
    )


@lru_cache(maxsize=1024)
def _typed(content_type: str | None, has_body: bool, kind: BodyKind) -> tuple[bytes, int]:
    """Return the record headers that describe the body, and how many they are."""
    headers = {} if content_type is None else {"content-type": content_type}
    body = b"" if has_body else None
    stored = tuple(one for one in to_record(Message(headers, body=body, body_kind=kind))[2] if one[0] != SOURCE_HEADER)
    return _encode_headers(stored), len(stored)
