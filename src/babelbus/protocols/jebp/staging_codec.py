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
    BatchCommitted,
    CommitBatch,
    Data,
    Malformed,
    PartRecords,
    RecordsStaged,
    StageRecords,
    StagingRequest,
    TransactionTold,
)
from babelbus.protocols.jebp.names import encode_name_field, find_field, read_name_field
from babelbus.protocols.jebp.status import Outcome

ID_BYTES_MAX: Final = 512
PARTS_MAX: Final = 100_000

_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_STAGE_FIELDS: Final = struct.Struct(">iq")  # partition, first record
_STAGED: Final = struct.Struct(">iq")  # partition, records
_COMMITTED: Final = struct.Struct(">qB")  # records, again
_TOLD: Final = struct.Struct(">qqqq")  # last batch, its records, pending batch, staged bytes


class _MalformedError(Exception):
    """A request does not have its form."""


class _Fields:
    """Reads the fields of a request one behind the other."""

    def __init__(self, content: Data) -> None:
        self._content = content
        self.position = 1

    def text(self, bytes_min: int = 1) -> str:
        """Read an id."""
        field = find_field(self._content, self.position)
        if field is None:
            raise _MalformedError
        start, end = field
        self.position = end
        if not bytes_min <= end - start <= ID_BYTES_MAX:
            raise _MalformedError
        try:
            return str(self._content[start:end], "utf-8")
        except UnicodeDecodeError:
            raise _MalformedError from None

    def name(self) -> str:
        """Read a topic's name."""
        field = read_name_field(self._content, self.position)
        if field is None:
            raise _MalformedError
        name, self.position = field
        return name

    def numbers(self, fields: struct.Struct) -> tuple[int, ...]:
        """Read numbers."""
        start, self.position = self.position, self.position + fields.size
        if self.position > len(self._content):
            raise _MalformedError
        return fields.unpack_from(self._content, start)

    def number(self) -> int:
        """Read a number that is not negative."""
        (value,) = self.numbers(_INT64)
        if value < 0:
            raise _MalformedError
        return int(value)

    def end(self) -> None:
        """Check that nothing follows."""
        if self.position != len(self._content):
            raise _MalformedError

    def rest(self) -> memoryview:
        """Return the bytes that follow, at least one."""
        if self.position >= len(self._content):
            raise _MalformedError
        return memoryview(self._content)[self.position :]


def decode_staging(content: Data) -> StagingRequest | Malformed:
    """Read a request whose command is one of these; one that has not its form becomes a `Malformed`."""
    fields = _Fields(content)
    try:
        transaction = fields.text()
        match content[0]:
            case 0x14 | 0x17:
                return _read_stage(transaction, fields, to_state=content[0] == STAGE_STATE)
            case 0x15:
                return _read_commit(transaction, fields)
            case 0x16:
                batch_id, part = fields.number(), fields.text(0)
                fields.end()
                return AbortBatch(transaction, batch_id, part)
            case _:
                fields.end()
                return AskTransaction(transaction)
    except _MalformedError:
        return Malformed(content[0], Outcome.STAGING_REFUSED)


def _read_stage(transaction: str, fields: _Fields, *, to_state: bool) -> StageRecords:
    batch_id, part, topic = fields.number(), fields.text(), fields.name()
    partition, first_record = fields.numbers(_STAGE_FIELDS)
    if partition < ANY_PARTITION or first_record < 0:
        raise _MalformedError
    return StageRecords(transaction, batch_id, part, topic, partition, first_record, fields.rest(), to_state)


def _read_commit(transaction: str, fields: _Fields) -> CommitBatch:
    batch_id, owner = fields.number(), fields.text(0)
    (count,) = fields.numbers(_INT32)
    if not 0 <= count <= PARTS_MAX:
        raise _MalformedError
    parts = tuple(PartRecords(fields.text(), fields.number()) for _ in range(count))
    fields.end()
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


def encode_staged(staged: RecordsStaged) -> bytes:
    """Return the content of a successful answer to `StageRecords`."""
    return _STAGED.pack(staged.partition, staged.records)


def encode_committed(committed: BatchCommitted) -> bytes:
    """Return the content of a successful answer to `CommitBatch`."""
    return _COMMITTED.pack(committed.records, committed.again)


def encode_dropped(parts: int) -> bytes:
    """Return the content of a successful answer to `AbortBatch`."""
    return _INT32.pack(parts)


def encode_told(told: TransactionTold) -> bytes:
    """Return the content of the answer to `AskTransaction`."""
    numbers = _TOLD.pack(told.last_batch_id, told.last_records, told.pending_batch_id, told.staged_bytes)
    return numbers + told.owner.encode()


def _unpack(fields: struct.Struct, content: Data, what: str) -> tuple[int, ...]:
    if len(content) != fields.size:
        raise RemoteProtocolError(f"answer to {what} of {len(content)} bytes, not {fields.size}")
    return fields.unpack(content)


def decode_staged(content: Data) -> RecordsStaged:
    """Read the content of a successful answer to `StageRecords`.

    Raises:
        RemoteProtocolError: it is none.
    """
    return RecordsStaged(*_unpack(_STAGED, content, "stage records"))


def decode_committed(content: Data) -> BatchCommitted:
    """Read the content of a successful answer to `CommitBatch`.

    Raises:
        RemoteProtocolError: it is none.
    """
    records, again = _unpack(_COMMITTED, content, "commit batch")
    return BatchCommitted(records, bool(again))


def decode_dropped(content: Data) -> int:
    """Read the content of a successful answer to `AbortBatch`: how many parts were dropped.

    Raises:
        RemoteProtocolError: it is none.
    """
    return _unpack(_INT32, content, "abort batch")[0]


def decode_told(content: Data) -> TransactionTold:
    """Read the content of the answer to `AskTransaction`.

    Raises:
        RemoteProtocolError: it is none.
    """
    last_batch_id, last_records, pending, staged_bytes = _unpack(_TOLD, content[: _TOLD.size], "ask transaction")
    try:
        owner = str(content[_TOLD.size :], "utf-8")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("the owner of a transaction is not UTF-8") from error
    return TransactionTold(last_batch_id, last_records, pending, staged_bytes, owner)
