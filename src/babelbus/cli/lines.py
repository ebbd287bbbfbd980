"""Records as JSON lines: what `publish --json` and `import` read, and `tail --json`, `fetch --json` and `export` write.

    {"key": "UA1545", "payload": "text", "headers": {"type": "flight"}, "timestamp": 1357035300000}

`payload_base64`, `key_base64` and `headers_base64` (a list of pairs) replace bytes that are not UTF-8. A payload that
is no string is stored as its JSON; null is the removal of a key. `topic` and `offset` are ignored.
"""

import base64
import binascii

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.times import parse_time
from babelbus.clock import SystemClock
from babelbus.errors import BabelbusError
from babelbus.records.record import Headers, Record

ABSENT = msgspec.UNSET
Absent = msgspec.UnsetType


class LineError(CommandError):
    """A line is no record; the message has the line's number and the reason."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line as written. Unknown names are refused: a misspelt name would lose its value."""

    payload: msgspec.Raw | Absent = ABSENT
    payload_base64: str | Absent = ABSENT
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str | None] = {}
    headers_base64: list[tuple[str, str | None]] = []
    timestamp: int | str = 0
    attributes: int = 0
    topic: str = ""
    partition: int = -1
    offset: int = -1


_DECODER = msgspec.json.Decoder(Line)


def parse_line(text: bytes, number: int) -> tuple[Record, int]:
    """Return the record of a line, and its partition or -1. `number` is the line's number, for the error.

    Raises:
        LineError: the line is no record.
    """
    try:
        line = _DECODER.decode(text)
        return Record(_payload(line), _key(line), _headers(line), _timestamp(line), line.attributes), line.partition
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, BabelbusError) as error:
        raise LineError(f"line {number} is no record: {error}") from error


def _payload(line: Line) -> bytes | None:
    if isinstance(line.payload_base64, str):
        return _unpack(line.payload_base64)
    if isinstance(line.payload, Absent):
        raise LineError('it has neither "payload" nor "payload_base64"')
    raw = bytes(line.payload)
    if raw == b"null":
        return None
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


def _key(line: Line) -> bytes | None:
    if line.key_base64 is not None:
        return _unpack(line.key_base64)
    return None if line.key is None else line.key.encode()


def _headers(line: Line) -> Headers:
    if line.headers_base64:
        pairs = line.headers_base64
        return tuple((_unpack(name), None if value is None else _unpack(value)) for name, value in pairs)
    if not line.headers:
        return ()
    return tuple((name.encode(), None if value is None else value.encode()) for name, value in line.headers.items())


def _timestamp(line: Line) -> int:
    if isinstance(line.timestamp, str):
        return parse_time(line.timestamp, SystemClock().now_ms())
    return line.timestamp


def _unpack(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise LineError(f"{text[:40]!r} is no base64: {error}") from None
