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
from collections.abc import Iterator
from typing import Final

from msgspec.structs import astuple

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.fields import Fields, MalformedError, encode_name_field
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
    PartitionFetched,
    PartitionPositions,
    PartitionRequest,
    PositionsTold,
    TellPositions,
    TopicPositions,
)
from babelbus.protocols.jebp.status import Outcome

TOPICS_MAX: Final = 10_000
"""Most that one request names."""
WAIT_MS_MAX: Final = 60_000
TEXT_BYTES_MAX: Final = 64
GROUP_BYTES_MAX: Final = 249

_TIMESTAMP: Final = struct.Struct(">q")
_FETCH_FIELDS: Final = struct.Struct(">iBqqii")  # the fields of `FetchPartition` behind the topic
_COUNT: Final = struct.Struct(">i")
_MOVED: Final = struct.Struct(">iq")  # partition, offset
_POSITIONS: Final = struct.Struct(">qqqq")  # first, high watermark, size, offset for the time
_FETCHED: Final = struct.Struct(">qqq")  # next offset, first, high watermark

FETCHED_HEAD_BYTES: Final = _FETCHED.size


def decode_partition_request(content: Data) -> PartitionRequest | Malformed:
    """Read a request whose command is one of these; one that has not its form becomes a `Malformed`."""
    fields = Fields(content)
    try:
        request: PartitionRequest
        match content[0]:
            case 0x24:
                request = _read_positions(fields)
            case 0x25:
                request = FetchPartition(fields.name(), *fields.numbers(_FETCH_FIELDS))
                if _why_not(request) is not None:
                    raise MalformedError
            case _:
                request = MoveGroup(fields.name(), fields.short_text(1, GROUP_BYTES_MAX), _read_offsets(fields))
        fields.end()
        return request
    except MalformedError:
        return Malformed(content[0], Outcome.PARTITION_REFUSED)


def _read_positions(fields: Fields) -> TellPositions:
    (timestamp,) = fields.numbers(_TIMESTAMP)
    after = fields.name() if fields.rest()[0] else ""
    if not after:
        fields.position += 1
    topics: dict[str, None] = {}
    while fields.more:
        if len(topics) == TOPICS_MAX:
            raise MalformedError
        topics[fields.name()] = None
    if timestamp < NO_TIMESTAMP:
        raise MalformedError
    return TellPositions(tuple(topics), timestamp, after)


def _read_offsets(fields: Fields) -> tuple[tuple[int, int], ...]:
    offsets: list[tuple[int, int]] = []
    while fields.more or not offsets:
        partition, offset = fields.numbers(_MOVED)
        if partition < 0 or offset < 0:
            raise MalformedError
        offsets.append((partition, offset))
    return tuple(offsets)


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
            moved = b"".join(_pack(_MOVED, *pair) for pair in request.offsets)
            return bytes((MOVE_GROUP,)) + encode_name_field(request.topic) + bytes((len(group),)) + group + moved
        case FetchPartition():
            reason = _why_not(request)
            if reason is not None:
                raise LocalProtocolError(reason)
            fields = _pack(_FETCH_FIELDS, *astuple(request)[1:])
            return bytes((FETCH_PARTITION,)) + encode_name_field(request.topic) + fields


def _pack(fields: struct.Struct, *numbers: int) -> bytes:
    try:
        return fields.pack(*numbers)
    except struct.error as error:
        raise LocalProtocolError(f"a number is too large: {numbers}") from error


# -- answers ---------------------------------------------------------------------------------------------------------


def encode_topic_positions(topic: TopicPositions) -> bytes:
    """Return one topic of the answer to `TellPositions`."""
    parts = [encode_name_field(topic.topic), _text(topic.id), _text(topic.engine), _COUNT.pack(len(topic.partitions))]
    parts += [_POSITIONS.pack(*astuple(positions)) for positions in topic.partitions]
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
        RemoteProtocolError: it does not have the form of such an answer.
    """
    content = bytes(content)
    if not content or content[0] > 1:
        raise RemoteProtocolError("an answer of positions that says neither that there are more nor that there are not")
    return PositionsTold(tuple(_topics(content)), bool(content[0]))


def _topics(content: bytes) -> Iterator[TopicPositions]:
    fields = Fields(content)
    while fields.more:
        at = fields.position
        try:
            topic = fields.name()
            identifier, engine = fields.short_text(0, TEXT_BYTES_MAX), fields.short_text(0, TEXT_BYTES_MAX)
            (count,) = fields.numbers(_COUNT)
            rows = [_checked(topic, fields.numbers(_POSITIONS)) for _ in range(count)]
        except MalformedError:
            raise RemoteProtocolError(f"positions at byte {at} are not those of a topic, or not whole") from None
        if count < 0:
            raise RemoteProtocolError(f"positions of topic {topic!r} say {count} partitions")
        yield TopicPositions(topic, identifier, engine, tuple(rows))


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
        RemoteProtocolError: it does not have the form of such an answer.
    """
    if len(content) < _FETCHED.size:
        raise RemoteProtocolError(f"answer to fetch partition of {len(content)} bytes, at least {_FETCHED.size}")
    next_offset, first, high_watermark = _FETCHED.unpack_from(content)
    if min(next_offset, first, high_watermark) < 0:
        raise RemoteProtocolError(f"fetched up to {next_offset}, of {first} to {high_watermark}")
    return PartitionFetched(next_offset, first, high_watermark, content[_FETCHED.size :])
