"""What is kept of a transaction id: the last batch that was committed, and the one that is being.

The note `<token>.state` is no memory of anything else, as a checkpoint is: when it is damaged, nobody knows what was
committed, and the transaction is refused until an operator has decided.
"""

import hashlib

import msgspec

from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import FORMAT, Note

STATE_SUFFIX = ".state"


class TransactionDamagedError(StorageError):
    """The file that says what was committed under a transaction id is damaged; it is used again when it is gone."""

    retriable = False


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
    return Note(files, path, TransactionState, advice="the transaction is refused until the file is removed")
