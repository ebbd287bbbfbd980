"""Requests and responses of jebp <-> the content of their frames (specification, section 4; docs/protocols/jebp.md).

request  := command: u8, parameters
response := status: u8, repetition: u8, content
Integers are big-endian. Sealing and frames are `box` and `frames`; whole chunks of requests are `decoder`.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Final, assert_never

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.fields import (
    NAME_BYTES_MAX,
    encode_name,
    encode_name_field,
    known_name,
    read_name,
    read_name_field,
)
from babelbus.protocols.jebp.items import CLIENT_HEAD, decode_client_items, decode_server_items, encode_items
from babelbus.protocols.jebp.messages import (
    ABORT_BATCH,
    ANY_PARTITION,
    ASK_TRANSACTION,
    CALL,
    CALL_STATUS,
    COMMIT_BATCH,
    CREATE_RECORD,
    CREATE_RECORDS,
    CREATE_TOPIC,
    FETCH,
    FETCH_PARTITION,
    FROM_OFFSET,
    FROM_TIMESTAMP,
    MOVE_GROUP,
    NO_PRODUCER,
    NO_SEQUENCE,
    REMOVE_TOPIC,
    STAGE_RECORDS,
    STAGE_STATE,
    SUBSCRIBE,
    TELL_POSITIONS,
    AbortBatch,
    AskTransaction,
    Batch,
    CallItems,
    CommitBatch,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Data,
    Fetch,
    FetchPartition,
    Malformed,
    MoveGroup,
    RemoveTopic,
    Request,
    Response,
    StageRecords,
    Subscribe,
    TellPositions,
)
from babelbus.protocols.jebp.partition_codec import decode_partition_request, encode_partition_request
from babelbus.protocols.jebp.staging_codec import decode_staging, encode_staging
from babelbus.protocols.jebp.status import REPEAT_NO, REPEAT_YES, Outcome

_RESPONSES: Final = {
    bytes((status, repetition)): Response(status, repetition == REPEAT_YES)
    for status in range(0xA0, 0xC0)
    for repetition in (REPEAT_NO, REPEAT_YES)
}
"""All answers without content: acks are alike, and one object serves all of them."""

TopicExists = Callable[[str], bool]

RECORD_FIELDS: Final = struct.Struct(">Iq")  # checksum, timestamp
_BATCH_FIELDS: Final = struct.Struct(">iqq")  # partition, producer id, first sequence
_FETCH_FIELDS: Final = struct.Struct(">BBqi")  # command, start type, start, bytes_max
_PLACE_FIELDS: Final = struct.Struct(">ii")  # partition, size
_START: Final = struct.Struct(">q")

_EMPTY: Final = Malformed(None, Outcome.UNKNOWN_COMMAND)
_RECORD_REFUSED: Final = Malformed(CREATE_RECORD, Outcome.CREATE_RECORD_REFUSED)
_RECORD_CHECKSUM: Final = Malformed(CREATE_RECORD, Outcome.CREATE_RECORD_CHECKSUM)
_BATCH_REFUSED: Final = Malformed(CREATE_RECORDS, Outcome.CREATE_RECORDS_REFUSED)
_FETCH_REFUSED: Final = Malformed(FETCH, Outcome.FETCH_REFUSED)
_SUBSCRIBE_REFUSED: Final = Malformed(SUBSCRIBE, Outcome.SUBSCRIBE_REFUSED)
_NAME_REFUSED: Final = {
    CREATE_TOPIC: Malformed(CREATE_TOPIC, Outcome.CREATE_TOPIC_BAD_NAME),
    REMOVE_TOPIC: Malformed(REMOVE_TOPIC, Outcome.REMOVE_TOPIC_REFUSED),
}
_STAGING: Final = frozenset((STAGE_RECORDS, STAGE_STATE, COMMIT_BATCH, ABORT_BATCH, ASK_TRANSACTION))
_NAME_END: Final = re.compile(rb"[,\x00-\x1f\x7f]")


def decode_request(content: Data, topic_exists: TopicExists | None = None) -> Request:
    """Read one request; what cannot be carried out becomes a `Malformed` with its answer, for the connection stays.

    Args:
        content: the opened content of a frame, which the records of a batch are a part of.
        topic_exists: given with the option `jebp_bare_records` only: says which topics there are (DECISION 19).

    Raises:
        RemoteProtocolError: the items of a call are malformed, which no answer could name.
    """
    if not content:
        return _EMPTY
    command = content[0]
    if command == CREATE_RECORD:
        return _read_record(content, topic_exists)
    if command == CREATE_RECORDS:
        return _read_records(content)
    if command == CALL:
        return decode_client_items(content)
    if command == FETCH:
        return _read_fetch(content)
    if command == SUBSCRIBE:
        return _read_subscribe(content)
    if command in _STAGING:
        return decode_staging(content)
    if command in (TELL_POSITIONS, FETCH_PARTITION, MOVE_GROUP):
        return decode_partition_request(content)
    if command in (CREATE_TOPIC, REMOVE_TOPIC):
        topic = read_name(content[1:])
        if topic is None:
            return _NAME_REFUSED[command]
        return CreateTopic(topic) if command == CREATE_TOPIC else RemoveTopic(topic)
    return Malformed(command, Outcome.UNKNOWN_COMMAND)


def _read_record(content: Data, topic_exists: TopicExists | None) -> Request:
    if topic_exists is not None and len(content) > 1 and content[1] > 8:  # no name starts with a byte up to 08
        return _read_bare_record(content, topic_exists)
    if len(content) > 2 and content[1] == 1:  # the common form, without a call
        end = 3 + content[2]
        topic = known_name(bytes(content[3:end]))
    else:
        topic, end = read_name_field(content, 1) or (None, 0)
    fields_end = end + RECORD_FIELDS.size
    if topic is None or fields_end > len(content):
        return _RECORD_REFUSED
    checksum, timestamp = RECORD_FIELDS.unpack_from(content, end)
    if timestamp < 0:
        return _RECORD_REFUSED
    payload = bytes(content[fields_end:])
    return CreateRecord(topic, timestamp, payload, zlib.crc32(payload) == checksum)


def _read_bare_record(content: Data, topic_exists: TopicExists) -> Request:
    """Find where the name ends: the longest existing topic that leaves a rest with the right checksum."""
    name_bytes_max = len(content) - 1 - RECORD_FIELDS.size
    if name_bytes_max < 1:
        return _RECORD_REFUSED
    # No name goes past a comma or a control character, and the timestamp mostly starts with zeros: few are tried.
    head = bytes(content[1 : 1 + min(name_bytes_max, NAME_BYTES_MAX)])
    limit = _NAME_END.search(head)
    for name_bytes in range(limit.start() if limit else len(head), 0, -1):
        topic = read_name(head[:name_bytes])
        if topic is None or not topic_exists(topic):
            continue
        checksum, timestamp = RECORD_FIELDS.unpack_from(content, 1 + name_bytes)
        payload = bytes(content[1 + name_bytes + RECORD_FIELDS.size :])
        if zlib.crc32(payload) == checksum:
            return CreateRecord(topic, timestamp, payload) if timestamp >= 0 else _RECORD_REFUSED
    return _RECORD_CHECKSUM


def _read_records(content: Data) -> Request:
    field = read_name_field(content, 1)
    if field is None:
        return _BATCH_REFUSED
    topic, end = field
    fields_end = end + _BATCH_FIELDS.size
    if fields_end >= len(content):
        return _BATCH_REFUSED
    partition, producer_id, first_sequence = _BATCH_FIELDS.unpack_from(content, end)
    if partition < ANY_PARTITION or producer_id < NO_PRODUCER or first_sequence < NO_SEQUENCE:
        return _BATCH_REFUSED
    if (producer_id == NO_PRODUCER) != (first_sequence == NO_SEQUENCE):
        return _BATCH_REFUSED
    return CreateRecords(topic, partition, producer_id, first_sequence, memoryview(content)[fields_end:])


def _read_fetch(content: Data) -> Request:
    if len(content) != _FETCH_FIELDS.size:
        return _FETCH_REFUSED
    _, start_type, start, bytes_max = _FETCH_FIELDS.unpack(content)
    if start_type not in (FROM_TIMESTAMP, FROM_OFFSET) or start < 0 or bytes_max < 0:
        return _FETCH_REFUSED
    return Fetch(start_type, start, bytes_max)


def _read_subscribe(content: Data) -> Request:
    if len(content) == 1:
        return Subscribe(())
    topics: dict[str, None] = {}
    for encoded in bytes(content[1:]).split(b","):
        topic = read_name(encoded)
        if topic is None:
            return _SUBSCRIBE_REFUSED
        topics[topic] = None
    return Subscribe(tuple(topics))


def encode_request(request: Request, *, bare_records: bool = False) -> bytes:
    """Return the content of one request; for a `CreateRecords` of megabytes, `request_parts` saves the copy.

    Raises:
        LocalProtocolError: a name or number is one that the protocol cannot carry, or the request is a `Malformed`.
    """
    match request:
        case CreateRecord(topic=topic, timestamp=timestamp, payload=payload, checksum_valid=valid):
            if timestamp < 0:
                raise LocalProtocolError(f"timestamp {timestamp} is negative")
            checksum = zlib.crc32(payload) ^ (not valid)
            name = encode_name(topic) if bare_records else encode_name_field(topic)
            return b"\x12" + name + RECORD_FIELDS.pack(checksum, timestamp) + payload
        case CreateRecords():
            return b"".join(request_parts(request))
        case Fetch(start_type=start_type, start=start, bytes_max=bytes_max):
            return _FETCH_FIELDS.pack(FETCH, start_type, start, bytes_max)
        case Subscribe(topics=topics):
            return b"\x21" + b",".join(map(encode_name, topics))
        case CreateTopic(topic=topic):
            return b"\x11" + encode_name(topic)
        case RemoveTopic(topic=topic):
            return b"\x31" + encode_name(topic)
        case StageRecords() | CommitBatch() | AbortBatch() | AskTransaction():
            return encode_staging(request)
        case TellPositions() | FetchPartition() | MoveGroup():
            return encode_partition_request(request)
        case CallItems(items=items):
            return encode_items(CLIENT_HEAD, items)
        case Malformed():
            raise LocalProtocolError("a malformed request is for reading only")
        case _:
            assert_never(request)


def request_parts(request: CreateRecords) -> tuple[bytes, Data]:
    """Return a batch request in two parts, for `Sealer.seal_parts`.

    Raises:
        LocalProtocolError: as `encode_request`.
    """
    if not len(request.records):
        raise LocalProtocolError("a batch without records")
    if (request.producer_id == NO_PRODUCER) != (request.first_sequence == NO_SEQUENCE):
        raise LocalProtocolError("a producer id and a first sequence go together")
    fields = _BATCH_FIELDS.pack(request.partition, request.producer_id, request.first_sequence)
    return b"\x13" + encode_name_field(request.topic) + fields, request.records


def decode_response(content: bytes | memoryview) -> Response:
    """Read one response; its content is a part of `content`.

    Raises:
        RemoteProtocolError: it is too short, no success (`a`) and no failure (`b`), or the repetition is neither
            `30` nor `31`.
    """
    if len(content) < 2:
        raise RemoteProtocolError(f"response of {len(content)} bytes, at least 2")
    response = _RESPONSES.get(bytes(content[:2]))
    if response is None:
        raise RemoteProtocolError(f"response starts with {content[0]:02x} {content[1]:02x}")
    return response if len(content) == 2 else Response(response.status, response.repeat, content[2:])


def decode_answer(content: bytes | memoryview) -> Response | CallItems:
    """Read one frame of the server: a response, or items of calls.

    Raises:
        RemoteProtocolError: as `decode_response` and `decode_server_items`.
    """
    response = _RESPONSES.get(bytes(content[:2]))
    if response is not None:
        return response if len(content) == 2 else Response(response.status, response.repeat, content[2:])
    if len(content) > 1 and content[0] == CALL_STATUS and not content[1]:
        return decode_server_items(content)
    return decode_response(content)


def batch_head(topic: str, partition: int, size: int) -> bytes:
    """Return what stands before `size` bytes of stored records in the answer to a fetch (DECISION 27)."""
    return encode_name_field(topic) + _PLACE_FIELDS.pack(partition, size)


def decode_batches(content: bytes | memoryview) -> list[Batch]:
    """Read the content of a successful fetch; the records are parts of `content`, not copies.

    Raises:
        RemoteProtocolError: a batch is not whole, or a name or number is impossible.
    """
    batches = []
    position = 0
    while position < len(content):
        field = read_name_field(content, position)
        if field is None or field[1] + _PLACE_FIELDS.size > len(content):
            raise RemoteProtocolError(f"batch at byte {position} of the fetched content has no head")
        topic, end = field
        partition, size = _PLACE_FIELDS.unpack_from(content, end)
        start = end + _PLACE_FIELDS.size
        position = start + size
        if partition < 0 or size < 0 or position > len(content):
            raise RemoteProtocolError(f"batch of {topic!r}: partition {partition}, {size} bytes")
        batches.append(Batch(topic, partition, content[start:position]))
    return batches


def encode_missing_topics(topics: Iterable[str]) -> bytes:
    """Return the content of `b1` to a subscribe: the topics that do not exist, in the order of the request."""
    return b",".join(map(encode_name, topics))


def decode_missing_topics(content: bytes | memoryview) -> tuple[str, ...]:
    """Read the content of `b1` to a subscribe.

    Raises:
        RemoteProtocolError: there is no name, or an impossible one.
    """
    topics = tuple(map(read_name, bytes(content).split(b",")))
    named = tuple(topic for topic in topics if topic is not None)
    if len(named) != len(topics):
        raise RemoteProtocolError("the list of missing topics has a name that no topic can have")
    return named


def encode_missing_offset(start: int) -> bytes:
    """Return the content of `b1` to a fetch: the START of the request (DECISION 29)."""
    return _START.pack(start)
