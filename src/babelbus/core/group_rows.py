"""The records of one chunk as a group hands them out: decoded by columns, objects made only for what is wanted."""

from bisect import bisect_left

import numpy as np

from babelbus.core.group_flight import Delivery, Lease
from babelbus.core.record import Headers, Record
from babelbus.storage.columns import I64, Columns
from babelbus.storage.format import RESERVED_HEADER_PREFIX, TOMBSTONE, public_headers

RESERVED = RESERVED_HEADER_PREFIX[0]


class Rows:
    """The records of one chunk; those from `at` on are still to be handed out."""

    __slots__ = (
        "_attributes", "_data", "_headers", "_keys", "_starts", "_stops", "_timestamps", "at", "count", "keyless",
        "next_offset", "offsets",
    )  # fmt: skip

    def __init__(self, columns: Columns, next_offset: int) -> None:
        self.at = 0
        self.count = len(columns)
        self.next_offset = next_offset
        data = self._data = bytes(columns.data)
        self.offsets: list[int] = columns.offsets.tolist()
        self._timestamps: list[int] = columns.timestamps.tolist()
        self._starts: list[int] = columns.payload_positions.tolist()
        self._stops: list[int] = columns.headers_positions.tolist()
        self.keyless = bool(columns.key_lengths.max(initial=-1) < 0)
        self._keys: list[bytes | None] | None = None
        self._headers: list[Headers] | None = None
        self._attributes: list[int] | None = None
        """The three are `None` where no record has one."""
        if not self.keyless:
            pairs = zip(self._starts, columns.key_lengths.tolist(), strict=True)
            self._keys = [data[start - 4 - size : start - 4] if size >= 0 else None for start, size in pairs]
        if columns.headers_counts.any():
            self._headers = decode_all_headers(columns, data)
        if columns.attributes.any():
            self._attributes = columns.attributes.tolist()

    @property
    def size_bytes(self) -> int:
        """About what is left to be handed out."""
        return len(self._data) * (self.count - self.at) // self.count

    def deliveries(self, part: slice, partition: int, lease: Lease | None) -> list[Delivery]:
        """Give some of them as a member gets them the first time; about 0.3 us each."""
        make, data = Delivery, self._data
        offsets = self.offsets[part]
        timestamps, starts, stops = self._timestamps[part], self._starts[part], self._stops[part]
        if self._attributes is not None:
            return [
                make(one.payload, one.key, one.headers, one.timestamp, one.attributes, one.offset, partition, 1, lease)
                for one in map(self.record, range(self.count)[part])
            ]
        if self._keys is None and self._headers is None:
            return [
                make(data[start:stop], None, (), timestamp, 0, offset, partition, 1, lease)
                for offset, timestamp, start, stop in zip(offsets, timestamps, starts, stops, strict=True)
            ]
        keys = [None] * len(offsets) if self._keys is None else self._keys[part]
        headers = [()] * len(offsets) if self._headers is None else self._headers[part]
        return [
            make(data[start:stop], key, some, timestamp, 0, offset, partition, 1, lease)
            for offset, timestamp, start, stop, key, some in zip(
                offsets, timestamps, starts, stops, keys, headers, strict=True
            )
        ]

    def record(self, number: int) -> Record:
        """Give one of them by its number in the chunk."""
        attributes = self._attributes[number] if self._attributes is not None else 0
        return Record(
            None if attributes & TOMBSTONE else self._data[self._starts[number] : self._stops[number]],
            None if self._keys is None else self._keys[number],
            () if self._headers is None else self._headers[number],
            self._timestamps[number],
            attributes & ~TOMBSTONE,
            self.offsets[number],
        )

    def find(self, offset: int) -> Record | None:
        """Give the record of an offset, if it is there."""
        number = bisect_left(self.offsets, offset)
        return self.record(number) if number < self.count and self.offsets[number] == offset else None


def decode_all_headers(columns: Columns, data: bytes) -> list[Headers]:
    """Give the headers of each record, without the bus's own; about 0.4 us a header.

    Records with equally many are walked in step, a header at a time.
    """
    found: list[Headers] = [()] * len(columns)
    for count in np.unique(columns.headers_counts).tolist():
        if count:
            numbers = np.flatnonzero(columns.headers_counts == count)
            headers = _decode_in_step(data, columns.headers_positions[numbers] + 1, count)
            for number, some in zip(numbers.tolist(), headers, strict=True):
                found[number] = some
    return found


def _decode_in_step(data: bytes, current: I64, count: int) -> list[Headers]:
    """Give the headers of records that have `count` each, the first one at `current`; they are known to be good."""
    sizes = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))
    octets = np.frombuffer(data, np.uint8)
    columns: list[list[tuple[bytes, bytes | None]]] = []
    reserved = False
    for _ in range(count):
        names = current + 4
        ends = names + sizes[current]
        lengths = sizes[ends].astype(np.int64)
        values = ends + 4
        current = values + np.maximum(lengths, 0)
        reserved = reserved or bool(((octets[names] == RESERVED) & (ends > names)).any())
        places = zip(names.tolist(), ends.tolist(), values.tolist(), current.tolist(), strict=True)
        if (lengths < 0).any():
            missing = (lengths < 0).tolist()
            columns.append(
                [
                    (data[name:end], None if none else data[value:stop])
                    for (name, end, value, stop), none in zip(places, missing, strict=True)
                ]
            )
        else:
            columns.append([(data[name:end], data[value:stop]) for name, end, value, stop in places])
    rows = list(zip(*columns, strict=True))
    return [public_headers(row) for row in rows] if reserved else rows
