"""The commands that name partitions <-> bytes (docs/protocols/jebp.md, extension: partitions by number).

positions := 24, timestamp: i64, after: name_field or 00, name_field(topic)*
fetch     := 25, name_field(topic), partition: i32, start_type: u8 (c0, c1), start: i64, end: i64, bytes_max: i32,
             wait_ms: i32
move      := 26, name_field(topic), text(group), (partition: i32, offset: i64)+
told      := more: u8, (name_field(topic), text(id), text(engine), count: i32,
             (first: i64, high_watermark: i64, size_bytes: i64, time_offset: i64)*)*
fetched   := next_offset: i64, first: i64, high_watermark: i64, records
text      := size: u8, UTF-8
"""

import struct
from collections.abc import Callable, Iterator
from typing import Final

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.messages import (
    FETCH_PARTITION,
    FROM_OFFSET,
    FROM_TIMESTAMP,
    MOVE_GROUP,
    NO_OFFSET,
    NO_TIMESTAMP,
    TELL_POSITIONS,
    Data,
    FetchPartition,
    Malformed,
    MoveGroup,
    OffsetBounds,
    PartitionFetched,
    PartitionPositions,
    PartitionRequest,
    PositionsTold,
    TellPositions,
    TopicPositions,
)
from babelbus.protocols.jebp.names import encode_name_field, read_name_field
from babelbus.protocols.jebp.status import Outcome

TOPICS_MAX: Final = 10_000
"""Most that one request names."""
WAIT_MS_MAX: Final = 60_000
TEXT_BYTES_MAX: Final = 64
GROUP_BYTES_MAX: Final = 249

_TIMESTAMP: Final = struct.Struct(">q")
_FETCH_FIELDS: Final = struct.Struct(">iBqqii")  # partition, start type, start, end, bytes_max, wait_ms
_COUNT: Final = struct.Struct(">i")
_MOVED: Final = struct.Struct(">iq")  # partition, offset
_POSITIONS: Final = struct.Struct(">qqqq")  # first, high watermark, size, offset for the time
_FETCHED: Final = struct.Struct(">qqq")  # next offset, first, high watermark
_BOUNDS: Final = struct.Struct(">qq")

FETCHED_HEAD_BYTES: Final = _FETCHED.size


def decode_partition_request(content: Data) -> PartitionRequest | Malformed:
    """Read a request whose command is one of these; one that has not its form becomes a `Malformed`."""
    found = _READERS[content[0]](content)
    return found or Malformed(content[0], Outcome.PARTITION_REFUSED)


def _read_positions(content: Data) -> TellPositions | None:
    position = 1 + _TIMESTAMP.size
    if position >= len(content):
        return None
    (timestamp,) = _TIMESTAMP.unpack_from(content, 1)
    after = ""
    if content[position] == 0:
        position += 1
    else:
        field = read_name_field(content, position)
        if field is None:
            return None
        after, position = field
    topics: dict[str, None] = {}
    while position < len(content):
        field = read_name_field(content, position)
        if field is None or len(topics) == TOPICS_MAX:
            return None
        name, position = field
        topics[name] = None
    return TellPositions(tuple(topics), timestamp, after) if timestamp >= NO_TIMESTAMP else None


def _read_fetch(content: Data) -> FetchPartition | None:
    field = read_name_field(content, 1)
    if field is None or field[1] + _FETCH_FIELDS.size != len(content):
        return None
    topic, end = field
    request = FetchPartition(topic, *_FETCH_FIELDS.unpack_from(content, end))
    return request if _why_not(request) is None else None


def _read_move(content: Data) -> MoveGroup | None:
    field = read_name_field(content, 1)
    if field is None or field[1] >= len(content):
        return None
    topic, at = field
    begin = at + 1
    end = begin + content[at]
    if not 0 < end - begin <= GROUP_BYTES_MAX or end >= len(content) or (len(content) - end) % _MOVED.size:
        return None
    try:
        group = bytes(content[begin:end]).decode()
    except UnicodeDecodeError:
        return None
    offsets = tuple(_MOVED.iter_unpack(content[end:]))
    return MoveGroup(topic, group, offsets) if all(min(pair) >= 0 for pair in offsets) else None


_READERS: Final[dict[int, Callable[[Data], PartitionRequest | None]]] = {
    TELL_POSITIONS: _read_positions,
    FETCH_PARTITION: _read_fetch,
    MOVE_GROUP: _read_move,
}


def _why_not(request: FetchPartition) -> str | None:
    """Return which number of a fetch is impossible."""
    if request.start_type not in (FROM_TIMESTAMP, FROM_OFFSET) or request.start < 0:
        return f"a fetch cannot start at {request.start}"
    if request.partition < 0 or request.end < NO_OFFSET:
        return f"a fetch of partition {request.partition} cannot end at {request.end}"
    if request.bytes_max < 0 or not 0 <= request.wait_ms <= WAIT_MS_MAX:
        return f"a fetch of {request.bytes_max} bytes that waits for {request.wait_ms} ms; {WAIT_MS_MAX} is the longest"
    return None


def encode_partition_request(request: PartitionRequest) -> bytes:
    """Return the content of one request.

    Raises:
        LocalProtocolError: a name or number is one that the protocol cannot carry.
    """
    match request:
        case TellPositions(topics=topics, timestamp=timestamp, after=after):
            if not NO_TIMESTAMP <= timestamp < 2**63:
                raise LocalProtocolError(f"timestamp {timestamp} is not possible")
            if len(topics) > TOPICS_MAX:
                raise LocalProtocolError(f"positions of {len(topics)} topics, limit {TOPICS_MAX}")
            head = bytes((TELL_POSITIONS,)) + _TIMESTAMP.pack(timestamp)
            return b"".join((head, encode_name_field(after) if after else b"\0", *map(encode_name_field, topics)))
        case MoveGroup():
            group = request.group.encode()
            if not 0 < len(group) <= GROUP_BYTES_MAX or not request.offsets or min(map(min, request.offsets)) < 0:
                raise LocalProtocolError(f"group {request.group!r} cannot be moved to {request.offsets}")
            try:
                moved = b"".join(_MOVED.pack(*pair) for pair in request.offsets)
            except struct.error as error:
                raise LocalProtocolError(f"a number of {request} is too large") from error
            return bytes((MOVE_GROUP,)) + encode_name_field(request.topic) + bytes((len(group),)) + group + moved
        case FetchPartition():
            reason = _why_not(request)
            if reason is not None:
                raise LocalProtocolError(reason)
            try:
                fields = _FETCH_FIELDS.pack(
                    request.partition,
                    request.start_type,
                    request.start,
                    request.end,
                    request.bytes_max,
                    request.wait_ms,
                )
            except struct.error as error:
                raise LocalProtocolError(f"a number of {request} is too large") from error
            return bytes((FETCH_PARTITION,)) + encode_name_field(request.topic) + fields


# -- answers ---------------------------------------------------------------------------------------------------------


def encode_topic_positions(topic: TopicPositions) -> bytes:
    """Return one topic of the answer to `TellPositions`."""
    parts = [encode_name_field(topic.topic), _text(topic.id), _text(topic.engine), _COUNT.pack(len(topic.partitions))]
    parts += [
        _POSITIONS.pack(one.first_offset, one.high_watermark, one.size_bytes, one.time_offset)
        for one in topic.partitions
    ]
    return b"".join(parts)


def _text(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) <= TEXT_BYTES_MAX
    return bytes((len(encoded),)) + encoded


def positions_head(*, more: bool) -> bytes:
    """Return what stands before the topics in the content of a successful answer to `TellPositions`."""
    return bytes((more,))


def decode_positions(content: bytes | memoryview) -> PositionsTold:
    """Read the content of a successful answer to `TellPositions`.

    Raises:
        RemoteProtocolError: it is none.
    """
    content = bytes(content)
    if not content or content[0] > 1:
        raise RemoteProtocolError("an answer of positions that says neither that there are more nor that there are not")
    return PositionsTold(tuple(_topics(content)), bool(content[0]))


def _topics(content: bytes) -> Iterator[TopicPositions]:
    position = 1
    while position < len(content):
        field = read_name_field(content, position)
        if field is None:
            raise RemoteProtocolError(f"positions at byte {position} name no topic")
        topic, position = field
        identifier, position = _read_text(content, position)
        engine, position = _read_text(content, position)
        end = position + _COUNT.size
        count = _COUNT.unpack_from(content, position)[0] if end <= len(content) else -1
        position = end + count * _POSITIONS.size
        if count < 0 or position > len(content):
            raise RemoteProtocolError(f"positions of topic {topic!r} are not whole")
        rows = _POSITIONS.iter_unpack(content[end:position])
        yield TopicPositions(topic, identifier, engine, tuple(_checked(topic, row) for row in rows))


def _read_text(content: bytes, position: int) -> tuple[str, int]:
    size = content[position] if position < len(content) else TEXT_BYTES_MAX + 1
    end = position + 1 + size
    if size > TEXT_BYTES_MAX or end > len(content):
        raise RemoteProtocolError(f"positions have no text at byte {position}")
    try:
        return content[position + 1 : end].decode(), end
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"positions: the text at byte {position} is not UTF-8") from error


def _checked(topic: str, row: tuple[int, ...]) -> PartitionPositions:
    first, high_watermark, size, time_offset = row
    if not 0 <= first <= high_watermark or size < 0 or time_offset < NO_OFFSET:
        raise RemoteProtocolError(f"impossible positions of topic {topic!r}: {row}")
    return PartitionPositions(first, high_watermark, size, time_offset)


def fetched_head(next_offset: int, first_offset: int, high_watermark: int) -> bytes:
    """Return what stands before the records in the content of a successful answer to `FetchPartition`."""
    return _FETCHED.pack(next_offset, first_offset, high_watermark)


def decode_partition_fetched(content: bytes | memoryview) -> PartitionFetched:
    """Read the content of a successful answer to `FetchPartition`; the records are a part of it, not a copy.

    Raises:
        RemoteProtocolError: it is none.
    """
    if len(content) < _FETCHED.size:
        raise RemoteProtocolError(f"answer to fetch partition of {len(content)} bytes, at least {_FETCHED.size}")
    next_offset, first, high_watermark = _FETCHED.unpack_from(content)
    if min(next_offset, first, high_watermark) < 0:
        raise RemoteProtocolError(f"fetched up to {next_offset}, of {first} to {high_watermark}")
    return PartitionFetched(next_offset, first, high_watermark, content[_FETCHED.size :])


def encode_offset_bounds(bounds: OffsetBounds) -> bytes:
    """Return the content of `b2` to `FetchPartition`."""
    return _BOUNDS.pack(bounds.first_offset, bounds.high_watermark)


def decode_offset_bounds(content: bytes | memoryview) -> OffsetBounds:
    """Read the content of `b2` to `FetchPartition`.

    Raises:
        RemoteProtocolError: it is none.
    """
    if len(content) != _BOUNDS.size:
        raise RemoteProtocolError(f"bounds of {len(content)} bytes, not {_BOUNDS.size}")
    return OffsetBounds(*_BOUNDS.unpack(content))
