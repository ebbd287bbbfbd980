"""The records of one chunk as a group hands them out: kept as columns, objects made only for what is wanted.

A `Run` is some of them as a member gets them. Who asks for runs (`Group.join`) and needs no object for a record reads
columns instead: `Rows.leading` tells payloads and headers by slices of what is stored.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast, overload

import msgspec
import numpy as np

from babelbus.core.groups.in_flight import Delivery, Lease
from babelbus.core.record import Headers, Record
from babelbus.records.columns import I64, Columns
from babelbus.records.equal_headers import Headed, are_equal, cut
from babelbus.records.format import INT32, RESERVED_HEADER_PREFIX, TOMBSTONE, decode_headers, public_headers

RESERVED = RESERVED_HEADER_PREFIX[0]

Column = TypeVar("Column")
Made = TypeVar("Made")
Numbers = range | list[int]
"""Records of a chunk by their place in it, rising."""


class Leading:
    """Records that have a certain first header, with a value, and are no tombstones; see `Rows.leading`.

    Each column is made when it is asked for.
    """

    __slots__ = ("_columns", "_data", "_known", "_rests", "_values", "numbers")

    def __init__(
        self,
        numbers: Numbers,
        columns: tuple[I64, I64, I64],
        data: bytes,
        values: I64,
        rests: I64,
        known: list[bytes] | None,
    ) -> None:
        self.numbers = numbers
        self._columns = columns
        self._data = data
        self._values = values
        self._rests = rests
        self._known = known

    def payloads(self) -> list[bytes]:
        """Return their payloads."""
        return cut(self._data, self._columns[0], self._columns[1])

    def values(self) -> list[bytes]:
        """Return the values of that header."""
        return cut(self._data, self._values, self._rests - self._values)

    def rests(self) -> list[bytes]:
        """Return the headers behind it, as they are stored (`read_headers`); one object for many where they are
        equal.
        """
        return self._known or cut(self._data, self._rests, self._columns[2] - self._rests)


class _Fields(msgspec.Struct, frozen=True, eq=False):
    """What stands in the records beside their offsets. `None` where no record has one."""

    timestamps: list[int]
    starts: list[int]
    stops: list[int]
    keys: list[bytes | None] | None
    attributes: list[int] | None


class Rows:
    """The records of one chunk; those from `at` on are still to be handed out."""

    __slots__ = (
        "_columns", "_data", "_fields", "_headed", "_headers", "_made", "at", "count", "keyless", "next_offset",
        "offsets",
    )  # fmt: skip

    def __init__(self, columns: Columns, next_offset: int, headed: Headed | None = None) -> None:
        self.at = 0
        self.count = len(columns)
        self.next_offset = next_offset
        self.offsets: list[int] = columns.offsets.tolist()
        self.keyless = bool(columns.key_lengths.max(initial=-1) < 0)
        self._columns = columns
        self._headed = headed
        self._data = bytes(columns.data)
        self._fields: _Fields | None = None
        self._headers: list[Headers] | None = None
        self._made: dict[object, object] = {}

    @property
    def size_bytes(self) -> int:
        """About what is left to be handed out."""
        return len(self._data) * (self.count - self.at) // self.count

    # -- columns -----------------------------------------------------------------------------------------------------

    def leading(self, name: bytes) -> Leading:
        """Return those whose first header is `name`, with a value; tombstones are left out."""
        columns, headed, head = self._columns, self._headed, INT32.pack(len(name)) + name
        if headed is None or headed.front[1:] != head or columns.attributes.any():
            return _find_leading(columns, self._data, head)
        values = columns.headers_positions + (len(headed.front) + 4)
        places = columns.payload_positions, columns.payload_lengths, columns.ends
        sizes = np.ndarray((len(self._data) - 3,), ">i4", self._data, 0, (1,))[values - 4]
        return Leading(range(self.count), places, self._data, values, values + sizes, headed.rests)

    def made(self, make: Callable[["Rows"], Made]) -> Made:
        """Return what `make` makes of the whole chunk; it is made once, and kept as long as the chunk is."""
        try:
            return cast(Made, self._made[make])
        except KeyError:
            made = self._made[make] = make(self)
            return made

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
        all_headers = self._all_headers()
        if fields.keys is None and all_headers is None:
            return [
                make(data[start:stop], None, (), timestamp, 0, offset, partition, 1, lease)
                for offset, timestamp, start, stop in zip(offsets, timestamps, starts, stops, strict=True)
            ]
        keys = [None] * len(offsets) if fields.keys is None else pick(fields.keys, numbers)
        headers = [()] * len(offsets) if all_headers is None else pick(all_headers, numbers)
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
        """Decode everything: who will ask for most records pays less in all."""
        self._all_headers()

    def _all_headers(self) -> list[Headers] | None:
        """Return the headers of all records, `None` where no record has any."""
        if self._headers is None and self._columns.headers_counts.any():
            self._headers = decode_all_headers(self._columns, self._data)
        return self._headers

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


def decode_all_headers(columns: Columns, data: bytes) -> list[Headers]:
    """Return the headers of each record, without the bus's own; about 0.4 us a header.

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
    """Return the headers of records that have `count` each, the first one at `current`; they are known to be good."""
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


def read_headers(rest: bytes) -> Headers:
    """Return the headers that `Leading.rests` has, without the bus's own."""
    count = at = 0
    while at < len(rest):
        at += 4 + INT32.unpack_from(rest, at)[0]
        at += 4 + max(INT32.unpack_from(rest, at)[0], 0)
        count += 1
    return public_headers(decode_headers(rest, 0, count))


def _find_leading(columns: Columns, data: bytes, head: bytes) -> Leading:
    """Find the records whose first header begins with `head`, a length and a name. All lengths are known to be good."""
    count, firsts = len(columns), columns.headers_positions + 1
    values = firsts + (len(head) + 4)
    numbers = np.flatnonzero(values <= columns.ends)
    numbers = numbers[are_equal(data, firsts[numbers], head)]
    values = values[numbers]
    sizes = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))[values - 4].astype(np.int64)
    good = (sizes >= 0) & (columns.headers_counts[numbers] > 0) & (columns.attributes[numbers] & TOMBSTONE == 0)
    if not good.all():
        numbers, values, sizes = numbers[good], values[good], sizes[good]
    if len(numbers) == count:
        places = columns.payload_positions, columns.payload_lengths, columns.ends
        return Leading(range(count), places, data, values, values + sizes, None)
    places = columns.payload_positions[numbers], columns.payload_lengths[numbers], columns.ends[numbers]
    return Leading(numbers.tolist(), places, data, values, values + sizes, None)
