"""The records of one chunk as a group hands them out: kept as columns, objects made only for what is wanted.

A `Run` is some of them as a member gets them. A member that needs no object for a record reads columns instead:
`Rows.leading` returns payloads and headers as slices of the stored bytes.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast, overload

import msgspec

from babelbus.core.groups.in_flight import Delivery, Lease
from babelbus.core.groups.settings import RecordFilter
from babelbus.core.record import Headers, Record
from babelbus.records.columns import Columns
from babelbus.records.format import TOMBSTONE, Buffer, decode_headers, public_headers
from babelbus.records.headers import Leading, Numbers, decode_all_headers, find_leading

Column = TypeVar("Column")
Made = TypeVar("Made")


class _Fields(msgspec.Struct, frozen=True, eq=False):
    """Columns of the records beside their offsets. `None` if no record has a value."""

    timestamps: list[int]
    starts: list[int]
    stops: list[int]
    keys: list[bytes | None] | None
    attributes: list[int] | None


class Rows:
    """The records of one chunk; those from `at` on are still to be handed out."""

    __slots__ = (
        "_columns", "_data", "_fields", "_headers", "_made", "at", "count", "keyless", "next_offset",
        "offsets",
    )  # fmt: skip

    def __init__(self, columns: Columns, next_offset: int) -> None:
        self.at = 0
        self.count = len(columns)
        self.next_offset = next_offset
        self.offsets: list[int] = columns.offsets.tolist()
        self.keyless = bool(columns.key_lengths.max(initial=-1) < 0)
        self._columns = columns
        self._data = bytes(columns.data)
        self._fields: _Fields | None = None
        self._headers: list[Headers] | None = None
        self._made: dict[object, object] = {}

    @property
    def size_bytes(self) -> int:
        """About what is left to be handed out."""
        return len(self._data) * (self.count - self.at) // self.count

    @property
    def keys(self) -> list[bytes | None]:
        """The keys of the records, which are not `keyless`."""
        keys = (self._fields or self._load()).keys
        assert keys is not None
        return keys

    # -- columns -----------------------------------------------------------------------------------------------------

    def leading(self, name: bytes) -> Leading:
        """Return those whose first header is `name`, with a value; tombstones are left out."""
        return find_leading(self._columns, self._data, name)

    def made(self, make: Callable[["Rows"], Made]) -> Made:
        """Return what `make` makes of the whole chunk; it is made once, and kept as long as the chunk is."""
        try:
            return cast(Made, self._made[make])
        except KeyError:
            made = self._made[make] = make(self)
            return made

    def chosen_by(self, wanted: RecordFilter) -> list[bool]:
        """Return which records a filter wants: each record is looked at once, however often a member takes more."""
        flags = cast("list[bool] | None", self._made.get(wanted))
        if flags is None:
            if isinstance(wanted, RowsFilter):
                flags = wanted.choose(self)
            else:
                self.load()
                flags = [wanted(self.record(number)) for number in range(self.count)]
            self._made[wanted] = flags
        return flags

    def stored(self, numbers: Numbers) -> list[Buffer]:
        """Return the bytes of some of them as they are stored, in parts."""
        first, last = numbers[0], numbers[-1]
        starts, ends, data = self._columns.positions, self._columns.ends, memoryview(self._data)
        start, end = int(starts[first]), int(ends[last])
        count = last - first + 1
        if count == len(numbers) and end - start == int((ends[first : last + 1] - starts[first : last + 1]).sum()):
            return [data[start:end]]
        return [data[int(starts[number]) : int(ends[number])] for number in numbers]

    # -- objects -----------------------------------------------------------------------------------------------------

    def deliveries(self, numbers: Numbers, partition: int, lease: Lease | None) -> list[Delivery]:
        """Return some of them as a member gets them the first time; about 0.3 us each."""
        make, data, fields = Delivery, self._data, self._fields or self._load()
        if fields.attributes is not None:
            return [
                make(one.payload, one.key, one.headers, one.timestamp, one.attributes, one.offset, partition, 1, lease)
                for one in map(self.record, numbers)
            ]
        offsets = pick(self.offsets, numbers)
        timestamps, starts, stops = (pick(one, numbers) for one in (fields.timestamps, fields.starts, fields.stops))
        self.load()
        keys = [None] * len(offsets) if fields.keys is None else pick(fields.keys, numbers)
        headers = [()] * len(offsets) if self._headers is None else pick(self._headers, numbers)
        return [
            make(data[start:stop], key, some, timestamp, 0, offset, partition, 1, lease)
            for offset, timestamp, start, stop, key, some in zip(
                offsets, timestamps, starts, stops, keys, headers, strict=True
            )
        ]

    def record(self, number: int) -> Record:
        """Return one of them by its number in the chunk."""
        fields = self._fields or self._load()
        attributes = fields.attributes[number] if fields.attributes is not None else 0
        stop = fields.stops[number]
        headers: Headers = ()
        if self._headers is not None:
            headers = self._headers[number]
        elif count := self._data[stop]:
            headers = public_headers(decode_headers(self._data, stop + 1, count))
        return Record(
            None if attributes & TOMBSTONE else self._data[fields.starts[number] : stop],
            None if fields.keys is None else fields.keys[number],
            headers,
            fields.timestamps[number],
            attributes & ~TOMBSTONE,
            self.offsets[number],
        )

    def find(self, offset: int) -> Record | None:
        """Return the record of an offset, if it is there."""
        number = bisect_left(self.offsets, offset)
        return self.record(number) if number < self.count and self.offsets[number] == offset else None

    def load(self) -> None:
        """Decode the headers of all records, which costs less than one by one if most records are asked for."""
        if self._headers is None and self._columns.headers_counts.any():
            self._headers = decode_all_headers(self._columns, self._data)

    def _load(self) -> _Fields:
        columns, data = self._columns, self._data
        starts: list[int] = columns.payload_positions.tolist()
        keys: list[bytes | None] | None = None
        if not self.keyless:
            pairs = zip(starts, columns.key_lengths.tolist(), strict=True)
            keys = [data[start - 4 - size : start - 4] if size >= 0 else None for start, size in pairs]
        self._fields = _Fields(
            columns.timestamps.tolist(),
            starts,
            columns.headers_positions.tolist(),
            keys,
            columns.attributes.tolist() if columns.attributes.any() else None,
        )
        return self._fields


class Run(Sequence[Delivery]):
    """Records of one chunk that one member gets together. It holds on to the whole chunk: nothing to keep."""

    __slots__ = ("lease", "numbers", "partition", "rows")

    def __init__(self, rows: Rows, numbers: Numbers, partition: int, lease: Lease | None) -> None:
        self.rows = rows
        self.numbers = numbers
        self.partition = partition
        self.lease = lease

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self.deliveries())

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | list[Delivery]:
        if isinstance(index, slice):
            return self.rows.deliveries(self.numbers[index], self.partition, self.lease)
        number = self.numbers[index]
        return self.rows.deliveries([number], self.partition, self.lease)[0]

    def deliveries(self) -> list[Delivery]:
        """Return them as objects, made anew with each call."""
        return self.rows.deliveries(self.numbers, self.partition, self.lease)

    def only(self, numbers: Numbers) -> "Run":
        """Return the run of some of its records."""
        return Run(self.rows, numbers, self.partition, self.lease)


class RowsFilter(ABC):
    """A filter (`RecordFilter`) that can say for a whole chunk at once what it wants: no record is made to be asked."""

    @abstractmethod
    def __call__(self, record: Record) -> bool:
        """Return whether a record is wanted."""

    @abstractmethod
    def choose(self, rows: Rows) -> list[bool]:
        """Return which records of a chunk are wanted."""


def pick(column: list[Column], numbers: Numbers) -> list[Column]:
    """Return some places of a column."""
    if type(numbers) is range:
        return column[numbers.start : numbers.stop : numbers.step]
    return [column[number] for number in numbers]


def even(numbers: list[int]) -> Numbers:
    """Return rising numbers as a range if their steps are equal: a column gives a range at once."""
    if len(numbers) < 2:
        return numbers
    steps = range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0])
    return steps if len(steps) == len(numbers) and [*steps] == numbers else numbers
