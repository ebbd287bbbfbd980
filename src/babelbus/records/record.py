"""A record, and a batch of records in the stored form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from babelbus.arrays import I64

Headers = tuple[tuple[bytes, bytes | None], ...]
Positions: TypeAlias = "Sequence[int] | I64"


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of a partition (docs/specifications/jebp.md, section 5.1).

    `timestamp` is milliseconds since the epoch. A `payload` of `None` is a tombstone: compaction removes the records
    of its key, and after a while the tombstone too. `offset` is -1 until the record is stored.
    """

    payload: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int = 0
    attributes: int = 0
    offset: int = -1


class RecordBatch:
    """Whole records in the stored form, one behind the other, with the position of each.

    Invariant: `data` holds `count` records; `positions[i]` is the byte where record i begins and `timestamps[i]` its
    time; the offsets inside `data` are `base_offset` and up, without gaps, or anything if `base_offset` is -1.
    """

    __slots__ = ("base_offset", "count", "data", "positions", "timestamps")

    def __init__(
        self, data: bytes | bytearray | memoryview, positions: Positions, timestamps: Positions, base_offset: int
    ) -> None:
        self.data = data
        self.positions = positions
        self.timestamps = timestamps
        self.count = len(positions)
        self.base_offset = base_offset

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Bytes of the records."""
        return len(self.data)


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch with a producer id, as its first record names it."""

    producer_id: int
    first_sequence: int
    count: int
    base_offset: int
    timestamp: int
