"""Receipts of staged batches, each way to be refused (`staging.py`), and what is kept of a transaction id.

The note `<token>.state` is no memory of anything else, as a checkpoint is: when it is damaged, nobody knows what was
committed, and the transaction is refused until an operator has decided.
"""

import hashlib

import msgspec

from babelbus.core.receipt import Promise
from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import FORMAT, Note

ID_BYTES_MAX = 1024
"""Longest transaction id and part id."""
NOT_REMEMBERED = -1
STATE_SUFFIX = ".state"
_ADVICE = "put a copy of the file back; the transaction is refused until then, or until the file is removed"


class StagingRefusedError(StorageError):
    """The request contradicts what is known of the transaction; asking again does not help."""

    retriable = False


class StagingFullError(StagingRefusedError):
    """More would be staged than the limits allow; committing or aborting makes room."""


class StagedRecordsMissingError(StagingRefusedError):
    """A writer left records out: those in front must be staged first."""

    retriable = True


class UnknownPartError(StagingRefusedError):
    """A commit names a part that is not staged, or not with so many records."""


class FailedPartError(StagingRefusedError):
    """The disk lost a part: it is to be aborted, and staged anew under another id."""


class MissingTopicError(StagingRefusedError):
    """There is no topic of this name, or not any more."""


class NoStateError(StagingRefusedError):
    """Records that are to set the state are for a topic that does not retain the last events."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} keeps no state, so its records would set none: `babelbus topics alter {topic} --retain"
            " last` lets it"
        )
        self.topic = topic


class TransactionOwnerError(StagingRefusedError):
    """Somebody else has committed to this transaction id: his batch ids are not ours."""


class TransactionDamagedError(StorageError):
    """The file that says what was committed under a transaction id is damaged; it is used again when it is gone."""

    retriable = False


class CommitPendingError(StorageError):
    """A commit of this transaction is not finished; ask again later."""


class PartRef(msgspec.Struct, frozen=True):
    """A part that belongs to a commit: its id, and how many records its writer staged in it."""

    part: str
    records: int


class TransactionInfo(msgspec.Struct, frozen=True):
    """The state of a transaction id; `-1`: no such batch."""

    last_batch_id: int
    last_records: int
    pending_batch_id: int
    owner: str
    staged_bytes: int


class CommitReceipt(Promise):
    """The outcome of a commit. `count` is how many records it has, -1 when a later batch has taken its place.

    `again` says that the batch had been committed before.
    """

    __slots__ = ("again", "batch_id", "count")

    def __init__(self, batch_id: int, count: int = NOT_REMEMBERED, *, again: bool = False) -> None:
        super().__init__()
        self.count = count
        self.batch_id = batch_id
        self.again = again


class Committed(msgspec.Struct, frozen=True):
    """A batch that is in the log: its id, how many records, and when that was done (ms since the epoch)."""

    batch_id: int
    records: int
    at_ms: int


class Pending(msgspec.Struct, frozen=True):
    """A commit that began: it is carried out whatever happens. The durable form of this is the commit marker.

    The records of `parts` (their numbers, in this order) have the sequence numbers from `first_sequence` on; those that
    are in the log already stand at or behind `starts` (topic -> partition -> offset).
    """

    batch_id: int
    parts: list[int]
    records: int
    first_sequence: int
    starts: dict[str, dict[int, int]]


class TransactionState(msgspec.Struct, frozen=True):
    """Everything that survives of a transaction. `owner` is who committed to it, empty when nobody said."""

    transaction_id: str
    owner: str = ""
    last: Committed | None = None
    pending: Pending | None = None
    next_sequence: int = 0
    format: int = FORMAT


def token_of(transaction_id: str) -> str:
    """Return the name of a transaction's files: ids may have any characters and be long."""
    return hashlib.sha256(transaction_id.encode()).hexdigest()[:32]


def producer_of(transaction_id: str) -> int:
    """Return the producer id under which the records of a transaction stand in the log."""
    return int.from_bytes(hashlib.sha256(b"producer\0" + transaction_id.encode()).digest()[:8], "big") >> 1


def note(files: FileSystem, path: str) -> Note[TransactionState]:
    """Return the note of a transaction."""
    return Note(files, path, TransactionState, advice=_ADVICE)
