"""What is said about staged batches: settings, receipts, and each way to be refused (`staging.py`)."""

import msgspec

from babelbus.core.receipt import Promise
from babelbus.errors import StorageError

ID_BYTES_MAX = 1024
"""Longest transaction id and part id."""
NOT_REMEMBERED = -1


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


class CommitPendingError(StorageError):
    """A commit of this transaction is not finished; ask again later."""


class PartRef(msgspec.Struct, frozen=True):
    """What a commit says of a part that belongs to it: its id, and how many records its writer staged in it."""

    part: str
    records: int


class TransactionInfo(msgspec.Struct, frozen=True):
    """What is known of a transaction id; `-1`: no such batch."""

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
