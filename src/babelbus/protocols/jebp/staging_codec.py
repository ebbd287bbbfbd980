"""The commands of staged, atomic publishing <-> bytes (docs/protocols/jebp.md, extension: staged batches).

stage  := 14, id(transaction), batch: i64, id(part), name_field(topic), partition: i32, first_record: i64, records
state  := 17, as stage: records that set the state
commit := 15, id(transaction), batch: i64, id(owner), count: i32, (id(part), records: i64)*
abort  := 16, id(transaction), batch: i64, id(part)
ask    := 23, id(transaction)
id     := L: u8 (0..8), size: big-endian number of L bytes, UTF-8; a part of 0 bytes is all parts, an owner of 0 nobody
"""

import struct
from typing import Final

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.fields import Fields, MalformedError, encode_name_field
from babelbus.protocols.jebp.frames import encode_length
from babelbus.protocols.jebp.messages import (
    ABORT_BATCH,
    ANY_PARTITION,
    ASK_TRANSACTION,
    COMMIT_BATCH,
    STAGE_RECORDS,
    STAGE_STATE,
    AbortBatch,
    AskTransaction,
    CommitBatch,
    Data,
    Malformed,
    PartRecords,
    StageRecords,
    StagingRequest,
    TransactionTold,
)
from babelbus.protocols.jebp.status import Outcome

ID_BYTES_MAX: Final = 512
PARTS_MAX: Final = 100_000

_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_STAGE_FIELDS: Final = struct.Struct(">iq")  # partition, first record
_TOLD: Final = struct.Struct(">qqqq")  # last batch, its records, pending batch, staged bytes


def decode_staging(content: Data) -> StagingRequest | Malformed:
    """Read a request whose command is one of these; one that has not its form becomes a `Malformed`."""
    fields = Fields(content)
    try:
        transaction = fields.text(1, ID_BYTES_MAX)
        request: StagingRequest
        match content[0]:
            case 0x14 | 0x17:
                return _read_stage(transaction, fields, to_state=content[0] == STAGE_STATE)
            case 0x15:
                request = _read_commit(transaction, fields)
            case 0x16:
                request = AbortBatch(transaction, _read_number(fields), fields.text(0, ID_BYTES_MAX))
            case _:
                request = AskTransaction(transaction)
        fields.end()
        return request
    except MalformedError:
        return Malformed(content[0], Outcome.STAGING_REFUSED)


def _read_number(fields: Fields) -> int:
    (value,) = fields.numbers(_INT64)
    if value < 0:
        raise MalformedError
    return value


def _read_stage(transaction: str, fields: Fields, *, to_state: bool) -> StageRecords:
    batch_id, part, topic = _read_number(fields), fields.text(1, ID_BYTES_MAX), fields.name()
    partition, first_record = fields.numbers(_STAGE_FIELDS)
    if partition < ANY_PARTITION or first_record < 0:
        raise MalformedError
    return StageRecords(transaction, batch_id, part, topic, partition, first_record, fields.rest(), to_state)


def _read_commit(transaction: str, fields: Fields) -> CommitBatch:
    batch_id, owner = _read_number(fields), fields.text(0, ID_BYTES_MAX)
    (count,) = fields.numbers(_INT32)
    if not 0 <= count <= PARTS_MAX:
        raise MalformedError
    parts = tuple(PartRecords(fields.text(1, ID_BYTES_MAX), _read_number(fields)) for _ in range(count))
    return CommitBatch(transaction, batch_id, parts, owner)


def encode_staging(request: StagingRequest) -> bytes:
    """Return the content of one request.

    Raises:
        LocalProtocolError: an id, a name or a number is one that the protocol cannot carry.
    """
    head = _id(request.transaction)
    match request:
        case StageRecords():
            if not len(request.records):
                raise LocalProtocolError("a batch without records")
            fields = _STAGE_FIELDS.pack(request.partition, request.first_record)
            where = _number(request.batch_id) + _id(request.part) + encode_name_field(request.topic) + fields
            command = STAGE_STATE if request.to_state else STAGE_RECORDS
            return b"".join((bytes((command,)), head, where, request.records))
        case CommitBatch():
            if len(request.parts) > PARTS_MAX:
                raise LocalProtocolError(f"a commit of {len(request.parts)} parts, limit {PARTS_MAX}")
            parts = b"".join(_id(one.part) + _number(one.records) for one in request.parts)
            what = _number(request.batch_id) + _id(request.owner, 0) + _INT32.pack(len(request.parts))
            return bytes((COMMIT_BATCH,)) + head + what + parts
        case AbortBatch():
            return bytes((ABORT_BATCH,)) + head + _number(request.batch_id) + _id(request.part, 0)
        case AskTransaction():
            return bytes((ASK_TRANSACTION,)) + head


def _id(text: str, bytes_min: int = 1) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"id {text!r} is not valid Unicode") from error
    if not bytes_min <= len(encoded) <= ID_BYTES_MAX:
        raise LocalProtocolError(f"an id of {len(encoded)} bytes, {bytes_min} to {ID_BYTES_MAX} are possible")
    return encode_length(len(encoded)) + encoded


def _number(value: int) -> bytes:
    if not 0 <= value < 2**63:
        raise LocalProtocolError(f"number {value} is not in [0, 2**63)")
    return _INT64.pack(value)


# -- answers ---------------------------------------------------------------------------------------------------------


def encode_told(told: TransactionTold) -> bytes:
    """Return the content of the answer to `AskTransaction`."""
    numbers = _TOLD.pack(told.last_batch_id, told.last_records, told.pending_batch_id, told.staged_bytes)
    return numbers + told.owner.encode()


def decode_told(content: Data) -> TransactionTold:
    """Read the content of the answer to `AskTransaction`.

    Raises:
        RemoteProtocolError: it is too short, or the owner is not UTF-8.
    """
    if len(content) < _TOLD.size:
        raise RemoteProtocolError(f"answer to ask transaction of {len(content)} bytes, at least {_TOLD.size}")
    last_batch_id, last_records, pending, staged_bytes = _TOLD.unpack_from(content)
    try:
        owner = str(content[_TOLD.size :], "utf-8")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("the owner of a transaction is not UTF-8") from error
    return TransactionTold(last_batch_id, last_records, pending, staged_bytes, owner)
