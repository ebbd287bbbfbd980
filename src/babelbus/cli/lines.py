"""Records as JSON lines: what `publish --json` and `import` read, and `tail --json`, `fetch --json` and `export` write.

    {"key": "UA1545", "payload": "text", "headers": {"type": "flight"}, "timestamp": 1357035300000}

`payload_base64`, `key_base64` and `headers_base64` (a list of pairs) replace bytes that are not UTF-8. A payload that
is no string is stored as its JSON; null is the removal of a key. `topic` and `offset` are ignored.
"""

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.times import parse_time
from babelbus.clock import SystemClock
from babelbus.errors import BabelbusError
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.records.plain import ATTRIBUTES_KNOWN, INT64_MAX
from babelbus.records.record import Record
from babelbus.web.record_lines import bytes_of, headers_of

ABSENT = msgspec.UNSET
Absent = msgspec.UnsetType


class LineError(CommandError):
    """A line is no record; the message has the line's number and the reason."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line as written. Unknown names are refused: a misspelt name would lose its value."""

    payload: msgspec.Raw | Absent = ABSENT
    payload_base64: bytes | Absent = ABSENT
    key: str | None = None
    key_base64: bytes | None = None
    headers: dict[str, str | None] = {}
    headers_base64: list[tuple[bytes, bytes | None]] = []
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
        key = bytes_of(line.key, line.key_base64)
        headers = headers_of(line.headers, line.headers_base64 or None)
        record = Record(_payload(line), key, headers, _timestamp(line), line.attributes)
        _check(record)
        return record, line.partition
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, BabelbusError) as error:
        raise LineError(f"line {number} is no record: {error}") from error


def _check(record: Record) -> None:
    """Check what makes a record impossible to store: in a batch, it would cost the records in front of it as well.

    Raises:
        LineError: the record cannot be stored.
    """
    if not 0 <= record.timestamp <= INT64_MAX:
        raise LineError(f"its time is milliseconds since 1970, not {record.timestamp}")
    if not 0 <= record.attributes <= ATTRIBUTES_KNOWN:
        raise LineError(f"its attributes are 0 to {ATTRIBUTES_KNOWN}, not {record.attributes}")
    size = len(record.payload or b"")
    if size > FRAME_BYTES_MAX:
        raise LineError(f"its payload has {size:,} bytes, more than the {FRAME_BYTES_MAX:,} of a message")


def _payload(line: Line) -> bytes | None:
    if isinstance(line.payload_base64, bytes):
        return line.payload_base64
    if isinstance(line.payload, Absent):
        raise LineError('it has neither "payload" nor "payload_base64"')
    raw = bytes(line.payload)
    if raw == b"null":
        return None
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


def _timestamp(line: Line) -> int:
    if isinstance(line.timestamp, str):
        return parse_time(line.timestamp, SystemClock().now_ms())
    return line.timestamp
