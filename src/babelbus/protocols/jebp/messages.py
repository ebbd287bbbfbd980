"""The messages of jebp: the requests of a client and the responses of a server (docs/protocols/jebp.md).

Timestamps are milliseconds since the epoch; offsets, sequences and sizes are what their names say.
"""

from typing import Final

import msgspec

from babelbus.protocols.jebp.status import Outcome

PROTOCOL: Final = "jebp"
"""The name of the protocol in metrics and logs."""
CREATE_TOPIC: Final = 0x11
CREATE_RECORD: Final = 0x12
CREATE_RECORDS: Final = 0x13  # since jebp/1.1
STAGE_RECORDS: Final = 0x14  # this and the next two, and ASK_TRANSACTION: extension of ours, staged batches
COMMIT_BATCH: Final = 0x15
ABORT_BATCH: Final = 0x16
STAGE_STATE: Final = 0x17  # extension of ours: as STAGE_RECORDS, of records that set the state
SUBSCRIBE: Final = 0x21
FETCH: Final = 0x22
ASK_TRANSACTION: Final = 0x23
TELL_POSITIONS: Final = 0x24  # this and the next two: extension of ours, partitions by number
FETCH_PARTITION: Final = 0x25
MOVE_GROUP: Final = 0x26
REMOVE_TOPIC: Final = 0x31
CALL: Final = 0x40  # since jebp/1.2: calls and streams
CALL_STATUS: Final = 0xC0  # of the server's frames with items of calls

FROM_TIMESTAMP: Final = 0xC0
FROM_OFFSET: Final = 0xC1

ANY_PARTITION: Final = -1
NO_PRODUCER: Final = -1
NO_SEQUENCE: Final = -1
NO_TIMESTAMP: Final = -1
NO_OFFSET: Final = -1

Data = bytes | bytearray | memoryview


class CreateTopic(msgspec.Struct, frozen=True, gc=False):
    """`11`: make a topic; needs administrative rights."""

    topic: str


class CreateRecord(msgspec.Struct, frozen=True, gc=False):
    """`12`: append one record. `timestamp` 0 asks for the server's time; it is never negative.

    `checksum_valid` is False when the CRC that the client sent is not the one of `payload`: answer it, store nothing.
    """

    topic: str
    timestamp: int
    payload: bytes
    checksum_valid: bool = True


class CreateRecords(msgspec.Struct, frozen=True, gc=False):
    """`13`: append a batch of records that have the stored form already (extension jebp/1.1).

    `records` are not looked at here, and there is at least one byte of them. From a decoder they are a memoryview of a
    buffer that nobody else holds; the store may patch the offsets in place if the buffer is writable.
    With a producer id, `first_sequence` is the number of the first record, otherwise it is -1.
    """

    topic: str
    partition: int
    producer_id: int
    first_sequence: int
    records: Data


class Subscribe(msgspec.Struct, frozen=True):
    """`21`: set what `Fetch` reads on this connection; no name twice, and no name at all clears it (DECISION 23)."""

    topics: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """`22`: read records from a timestamp (`FROM_TIMESTAMP`) or an offset (`FROM_OFFSET`) on, at most `bytes_max`."""

    start_type: int
    start: int
    bytes_max: int


class RemoveTopic(msgspec.Struct, frozen=True, gc=False):
    """`31`: remove a topic with all its records; needs administrative rights."""

    topic: str


class StageRecords(msgspec.Struct, frozen=True, gc=False):
    """`14`: keep records for a batch, seen by nobody until it is committed. `records` as in `CreateRecords`.

    `part` is one writer's share; `first_record` is how many records he staged in it before. With `to_state` it is
    `17`, which a topic that does not retain the last events refuses.
    """

    transaction: str
    batch_id: int
    part: str
    topic: str
    partition: int
    first_record: int
    records: Data
    to_state: bool = False


class PartRecords(msgspec.Struct, frozen=True, gc=False):
    """A part that belongs to a commit, and how many records were staged in it."""

    part: str
    records: int


class CommitBatch(msgspec.Struct, frozen=True, gc=False):
    """`15`: publish all records of these parts, or none. An empty `owner` is nobody."""

    transaction: str
    batch_id: int
    parts: tuple[PartRecords, ...]
    owner: str = ""


class AbortBatch(msgspec.Struct, frozen=True, gc=False):
    """`16`: drop a part, or with an empty `part` all parts of a batch."""

    transaction: str
    batch_id: int
    part: str = ""


class AskTransaction(msgspec.Struct, frozen=True, gc=False):
    """`23`: which batch of a transaction was committed last?"""

    transaction: str


class TellPositions(msgspec.Struct, frozen=True):
    """`24`: which partitions do topics have, and where do those begin and end?

    Without `topics` all are meant that the client may read. The answer begins behind the name `after`. With a
    `timestamp` (-1: none) it also says where each partition has its first record at or after that time.
    """

    topics: tuple[str, ...] = ()
    timestamp: int = NO_TIMESTAMP
    after: str = ""


class FetchPartition(msgspec.Struct, frozen=True, gc=False):
    """`25`: read records of one partition, up to the offset `end` (excluded; -1: as far as there are any).

    Start and `bytes_max` are those of `Fetch`. When there is nothing yet the server waits for `wait_ms` at the most.
    """

    topic: str
    partition: int
    start_type: int
    start: int
    end: int
    bytes_max: int
    wait_ms: int = 0


class MoveGroup(msgspec.Struct, frozen=True, gc=False):
    """`26`: this is how far a reader has come that keeps its offsets itself; `offsets` are the next ones it reads.

    The consumer group of this name is made if it does not exist; one that was made otherwise, for members, is refused.
    """

    topic: str
    group: str
    offsets: tuple[tuple[int, int], ...]
    """Partition and offset."""


PartitionRequest = TellPositions | FetchPartition | MoveGroup


StagingRequest = StageRecords | CommitBatch | AbortBatch | AskTransaction


class CallItems(msgspec.Struct, frozen=True, gc=False):
    """`40`, and the server's frames of status `c0`: items of calls, in order (extension jebp/1.2, see `items`)."""

    items: list[tuple[int, int, Data]]
    """Number of the call, kind of the item, body."""


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """A request that cannot be carried out as it stands; `outcome` is its answer (`status.answers`).

    `command` is None for an empty request. Commands that need rights are checked for them first: who may not create
    topics is told that, not that the name is bad (section 4.2).
    """

    command: int | None
    outcome: Outcome


Request = (
    CreateTopic
    | CreateRecord
    | CreateRecords
    | StagingRequest
    | PartitionRequest
    | Subscribe
    | Fetch
    | RemoveTopic
    | CallItems
    | Malformed
)


class Response(msgspec.Struct, frozen=True, gc=False):
    """The answer to one request; `repeat` says that the client should try again, `content` depends on the command."""

    status: int
    repeat: bool
    content: bytes | memoryview = b""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Stored records of one partition, whole and in order, as a fetch response carries them (DECISION 27)."""

    topic: str
    partition: int
    records: bytes | memoryview


class RecordsCreated(msgspec.Struct, frozen=True, gc=False):
    """The content of a successful answer to `CreateRecords`: where the first record of the batch is."""

    partition: int
    base_offset: int


class RecordsStaged(msgspec.Struct, frozen=True, gc=False):
    """The content of a successful answer to `StageRecords`: the partition, and how many records the part has now."""

    partition: int
    records: int


class BatchCommitted(msgspec.Struct, frozen=True, gc=False):
    """The content of a successful answer to `CommitBatch`.

    `records` is -1 when a later batch was committed since; `again` says that it had been committed before.
    """

    records: int
    again: bool


class PartsDropped(msgspec.Struct, frozen=True, gc=False):
    """The content of a successful answer to `AbortBatch`: how many parts were dropped."""

    parts: int


class TransactionTold(msgspec.Struct, frozen=True, gc=False):
    """The content of the answer to `AskTransaction`; -1 is no batch, an empty owner nobody."""

    last_batch_id: int
    last_records: int
    pending_batch_id: int
    staged_bytes: int
    owner: str


class PartitionPositions(msgspec.Struct, frozen=True, gc=False):
    """Where a partition begins and where readers stop, and its size (bytes of the stored records).

    `time_offset` is where its first record at or after the wanted time is; -1: no such record, or no time was given.
    """

    first_offset: int
    high_watermark: int
    size_bytes: int
    time_offset: int = NO_OFFSET


class TopicPositions(msgspec.Struct, frozen=True):
    """One topic of the answer to `TellPositions`; the partitions are in the order of their numbers, from 0 on.

    `id` is another one when the topic was removed and made again, or its records went with a restart.
    """

    topic: str
    id: str
    engine: str
    partitions: tuple[PartitionPositions, ...]


class PositionsTold(msgspec.Struct, frozen=True):
    """The content of a successful answer to `TellPositions`; `more` says that topics behind the last one are left."""

    topics: tuple[TopicPositions, ...]
    more: bool


class PartitionFetched(msgspec.Struct, frozen=True, gc=False):
    """The content of a successful answer to `FetchPartition`: whole stored records in order, perhaps none.

    `next_offset` is where to go on: behind the last record, or behind offsets that compaction left empty.
    """

    next_offset: int
    first_offset: int
    high_watermark: int
    records: bytes | memoryview


class OffsetBounds(msgspec.Struct, frozen=True, gc=False):
    """The content of `b2` to `FetchPartition`: which offsets there are instead."""

    first_offset: int
    high_watermark: int
