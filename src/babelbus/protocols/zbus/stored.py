"""Messages -> the stored form at once: the same records as `records.to_record` makes, in a third of the time.

The headers of a connection's messages repeat but for the id, so each pair is encoded once and remembered. The id comes
first: what follows it is the same from message to message, which `heads.py` makes use of when they are delivered.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import BodyKind, Message
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, to_record
from babelbus.storage.format import BODY, HEAD, HEAD_BYTES, RESERVED_HEADER_PREFIX
from babelbus.storage.record import Headers, RecordBatch

KNOWN_MAX: Final = 256
KNOWN_LENGTH_MAX: Final = 128
"""What a connection remembers: some tens of KiB at the most."""
_pack_length = struct.Struct(">i").pack
_ID_NAME: Final = _pack_length(5) + b"ce_id"


class Recorder:
    """Encodes the messages of one connection; `stamp` are the headers that it gives each of them, in place of its own.

    There is a source among them.
    """

    def __init__(self, stamp: Mapping[str, str]) -> None:
        self._known: dict[tuple[str, str], bytes] = {}
        self._stamp = stamp
        stamped = to_record(Message(dict(stamp)), ORIGIN_PREFIX)[2]
        self._stamped = _encode_headers(stamped)
        self._stamped_count = 1 + len(stamped)

    def encode(self, message: Message, timestamp: int) -> bytes:
        """Give the body of a record, which is what its CRC covers. The message has an id.

        Raises:
            MalformedMessageError: a header is no UTF-8.
        """
        headers, known, payload = message.headers, self._known, message.body
        pack = _pack_length
        try:
            request_id = headers["id"].encode()
            parts = [_ID_NAME, pack(len(request_id)), request_id, self._stamped]
            count = self._stamped_count
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
            if message.url is not None or message.method is not None:
                for name, value in (("\0url", message.url), ("\0method", message.method)):
                    if value is not None:
                        part = known.get((name, value))
                        parts.append(part if part is not None else self._learn((name, value)))
                        count += 1
            typed, typed_count = _typed(headers.get("content-type"), payload is not None, message.body_kind)
            if message.status is not None:
                parts.append(_encode_headers(((b"zbus.status", b"%d" % message.status),)))
                count += 1
            key = headers.get("key")
            if key is None:
                key = headers.get("tag")
            encoded_key = None if key is None else key.encode()
        except UnicodeEncodeError as error:
            raise MalformedMessageError("a header or the url is no UTF-8") from error
        if payload is None:
            payload = b""
        if encoded_key is None:
            front = BODY.pack(0, timestamp, -1) + pack(len(payload))
        else:
            front = b"%b%b%b" % (BODY.pack(0, timestamp, len(encoded_key)), encoded_key, pack(len(payload)))
        return b"".join((front, payload, _COUNTS[count + typed_count], *parts, typed))

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


_COUNTS: Final = [bytes((number,)) for number in range(128)]


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
    """Give the record headers that describe the body, and how many they are."""
    headers = {} if content_type is None else {"content-type": content_type}
    body = b"" if has_body else None
    stored = tuple(one for one in to_record(Message(headers, body=body, body_kind=kind))[2] if one[0] != b"ce_source")
    return _encode_headers(stored), len(stored)


def encode_batch(bodies: Sequence[bytes], timestamps: list[int]) -> RecordBatch:
    """Give the stored form of records, from offset 0 on; `timestamps` are those that the bodies were made with."""
    parts: list[bytes] = []
    positions: list[int] = []
    position, crc32, pack = 0, zlib.crc32, HEAD.pack
    for offset, body in enumerate(bodies):
        size = len(body)
        parts += (pack(offset, size + 4, crc32(body)), body)
        positions.append(position)
        position += HEAD_BYTES + size
    return RecordBatch(bytearray(b"".join(parts)), positions, timestamps, 0)
