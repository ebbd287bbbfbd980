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
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, to_record
from babelbus.records.format import LENGTHS, RESERVED_HEADER_PREFIX
from babelbus.records.record import Headers

KNOWN_MAX: Final = 256
KNOWN_LENGTH_MAX: Final = 128
"""What a connection remembers: some tens of KiB at the most."""
_pack_length = struct.Struct(">i").pack
_pack_front = struct.Struct(">bq").pack
_NO_KEY: Final = _pack_length(-1)
_ID_NAME: Final = _pack_length(5) + b"ce_id"


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


def mixed_bodies(
    moulds: Sequence[Mould], ids: Sequence[bytes], payloads: Sequence[bytes], timestamp: int
) -> list[bytes]:
    """Return the bodies of records that have a mould each, as `Mould.bodies` does."""
    lengths, join = LENGTHS, b"".join
    front = _pack_front(0, timestamp)
    return [
        join((front, one.key, lengths[len(payload)], payload, one.before_id, lengths[len(id_)], id_, one.after_id))
        for one, id_, payload in zip(moulds, ids, payloads, strict=True)
    ]


class Recorder:
    """Encodes the messages of one connection; `stamp` are the headers that it gives each of them, in place of its own.

    There is a source among them. The pairs of headers that it has seen are remembered as they are stored.
    """

    def __init__(self, stamp: Mapping[str, str]) -> None:
        self._known: dict[tuple[str, str], bytes] = {}
        self._stamp = stamp
        stamped = to_record(Message(dict(stamp)), ORIGIN_PREFIX)[2]
        self._stamped = _encode_headers(stamped)
        self._stamped_count = 1 + len(stamped)

    def encode(self, message: Message, timestamp: int) -> bytes:
        """Return the body of the record of one message, which has an id.

        Raises:
            MalformedMessageError: a header is no UTF-8.
        """
        payload = message.body
        mould = self.mould(message, has_body=payload is not None)
        return mould.bodies([encode_id(message.headers["id"])], [payload or b""], timestamp)[0]

    def mould(self, message: Message, *, has_body: bool) -> Mould:
        """Return what the records of messages have in common that differ from this one in id and body alone.

        Raises:
            MalformedMessageError: a header is no UTF-8.
        """
        headers, known = message.headers, self._known
        parts = [self._stamped]
        count = self._stamped_count
        try:
            for pair in headers.items():
                name = pair[0]
                if name == "id" or name == "content-type":
                    continue
                part = known.get(pair)
                if part is None:
                    part = self._learn(pair)
                if part:
                    parts.append(part)
                    count += 1
            for name, value in (("\0url", message.url), ("\0method", message.method)):
                if value is not None:
                    part = known.get((name, value))
                    parts.append(part if part is not None else self._learn((name, value)))
                    count += 1
            if message.status is not None:
                parts.append(_encode_headers(((b"zbus.status", b"%d" % message.status),)))
                count += 1
            typed, typed_count = _typed(headers.get("content-type"), has_body, message.body_kind)
            key = headers.get("key", headers.get("tag"))
            encoded_key = b"" if key is None else key.encode()
        except UnicodeEncodeError as error:
            raise MalformedMessageError("a header or the url is no UTF-8") from error
        return Mould(
            _NO_KEY if key is None else _pack_length(len(encoded_key)) + encoded_key,
            bytes((count + typed_count,)) + _ID_NAME,
            b"".join((*parts, typed)),
        )

    def _learn(self, pair: tuple[str, str]) -> bytes:
        name, value = pair
        stored: Headers
        if name in self._stamp:
            stored = ()
        elif name == "\0url":
            stored = ((b"zbus.url", value.encode()),)
        elif name == "\0method":
            stored = ((b"zbus.method", value.encode()),)
        else:
            stored = to_record(Message({name: value}), ORIGIN_PREFIX)[2]
            stored = tuple(one for one in stored if one[0] != b"ce_source")
        part = _encode_headers(tuple(one for one in stored if not one[0].startswith(RESERVED_HEADER_PREFIX)))
        if len(name) + len(value) <= KNOWN_LENGTH_MAX:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[pair] = part
        return part


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
    stored = tuple(one for one in to_record(Message(headers, body=body, body_kind=kind))[2] if one[0] != b"ce_source")
    return _encode_headers(stored), len(stored)
