"""What is kept of a transaction id: the last batch that was committed, and the one that is being.

The file `<token>.state` is a CRC and JSON, put in place of the last one as a whole. It is no memory of anything else,
as a checkpoint is: when it is damaged, nobody knows what was committed, and the transaction is refused until an
operator has decided.
"""

import hashlib
import zlib

import msgspec

from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem, disk_error

STATE_SUFFIX = ".state"
FORMAT = 1
_CRC_BYTES = 9
"""Eight hex digits and a line end stand in front of the JSON."""


class TransactionDamagedError(StorageError):
    """The file that says what was committed under a transaction id is damaged; it is used again when it is gone."""


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


def save(files: FileSystem, path: str, state: TransactionState) -> None:
    """Put the state in the place of the last one, durably.

    Raises:
        DiskFullError, DiskError: the old or the new one stands there.
    """
    body = msgspec.json.encode(state)
    try:
        files.replace_file(path, b"%08x\n" % zlib.crc32(body) + body)
    except OSError as error:
        raise disk_error(error, f"writing {path}") from error


def load(files: FileSystem, path: str) -> TransactionState:
    """Return the state that a file holds.

    Raises:
        TransactionDamagedError: it holds none.
        OSError: the disk refused.
    """
    content = files.read_file(path)
    body = content[_CRC_BYTES:]
    try:
        if int(content[: _CRC_BYTES - 1], 16) == zlib.crc32(body):
            found = msgspec.json.decode(body, type=TransactionState)
            if found.format == FORMAT:
                return found
    except ValueError:  # no number, or not the JSON that we write
        pass
    raise TransactionDamagedError(f"{path}: damaged or of another format; nobody knows what was committed")
