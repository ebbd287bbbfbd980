"""The headers of all records of a chunk, walked in step instead of record by record."""

import numpy as np

from babelbus.records.columns import I64, Columns
from babelbus.records.equal_headers import are_equal, cut
from babelbus.records.fields import int32s
from babelbus.records.format import INT32, RESERVED_HEADER_PREFIX, TOMBSTONE, decode_headers, public_headers
from babelbus.records.record import Headers

Numbers = range | list[int]
"""Records of a chunk by their place in it, rising."""


class Leading:
    """Records whose first header has a certain name and a value, and which are no tombstones; see `find_leading`.

    Each column is built when it is requested.
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
        """Return the payloads."""
        return cut(self._data, self._columns[0], self._columns[1])

    def values(self) -> list[bytes]:
        """Return the values of the first header."""
        return cut(self._data, self._values, self._rests - self._values)

    def rests(self) -> list[bytes]:
        """Return the headers behind the first one, as stored (`read_headers`); equal ones may share one object."""
        return self._known or cut(self._data, self._rests, self._columns[2] - self._rests)


def find_leading(columns: Columns, data: bytes, name: bytes) -> Leading:
    """Return the records whose first header is `name`, with a value; tombstones are left out."""
    headed = columns.headed
    head = INT32.pack(len(name)) + name
    if headed is None or headed.front[1:] != head or columns.attributes.any():
        return _find_leading(columns, data, head)
    values = columns.headers_positions + (len(headed.front) + 4)
    places = columns.payload_positions, columns.payload_lengths, columns.ends
    return Leading(range(len(columns)), places, data, values, values + int32s(data)[values - 4], headed.rests)


def decode_all_headers(columns: Columns, data: bytes) -> list[Headers]:
    """Return the headers of each record, without the bus's own headers; about 0.4 us a header."""
    results: list[Headers] = [()] * len(columns)
    _, names, name_sizes, values, value_sizes = walk_headers(columns)
    places = zip(names.tolist(), name_sizes.tolist(), values.tolist(), value_sizes.tolist(), strict=True)
    pairs = [
        (data[name : name + name_size], data[value : value + size] if size >= 0 else None)
        for name, name_size, value, size in places
    ]
    reserved = any(name[:1] == RESERVED_HEADER_PREFIX for name, _ in pairs)
    numbers = np.flatnonzero(columns.headers_counts)
    at = 0
    for number, count in zip(numbers.tolist(), columns.headers_counts[numbers].tolist(), strict=True):
        headers = tuple(pairs[at : at + count])
        results[number] = public_headers(headers) if reserved else headers
        at += count
    return results


def read_headers(rest: bytes) -> Headers:
    """Return the headers of an entry of `Leading.rests`, without the bus's own headers."""
    count = at = 0
    while at < len(rest):
        at += 4 + INT32.unpack_from(rest, at)[0]
        at += 4 + max(INT32.unpack_from(rest, at)[0], 0)
        count += 1
    return public_headers(decode_headers(rest, 0, count))


def _find_leading(columns: Columns, data: bytes, head: bytes) -> Leading:
    """Find the records whose first header begins with `head`, a length and a name. All lengths must be verified."""
    count, firsts = len(columns), columns.headers_positions + 1
    values = firsts + (len(head) + 4)
    numbers = np.flatnonzero(values <= columns.ends)
    numbers = numbers[are_equal(data, firsts[numbers], head)]
    values = values[numbers]
    sizes = int32s(data)[values - 4].astype(np.int64)
    good = (sizes >= 0) & (columns.headers_counts[numbers] > 0) & (columns.attributes[numbers] & TOMBSTONE == 0)
    if not good.all():
        numbers, values, sizes = numbers[good], values[good], sizes[good]
    if len(numbers) == count:
        places = columns.payload_positions, columns.payload_lengths, columns.ends
        return Leading(range(count), places, data, values, values + sizes, None)
    places = columns.payload_positions[numbers], columns.payload_lengths[numbers], columns.ends[numbers]
    return Leading(numbers.tolist(), places, data, values, values + sizes, None)


def walk_headers(columns: Columns) -> tuple[I64, I64, I64, I64, I64]:
    """Find all headers, a step of numpy for each header of the record that has the most.

    Returns, sorted by record: the record's number, position and size of the key, position and size of the value (-1:
    no value).
    """
    data = columns.data
    sizes = int32s(data)
    counts = columns.headers_counts.astype(np.int64)
    rows = np.flatnonzero(counts)
    at = columns.headers_positions[rows] + 1
    steps: list[tuple[I64, I64, I64, I64, I64]] = []
    number = 0
    while len(rows):
        key_size = sizes[at].astype(np.int64)
        value_at = at + 4 + key_size
        value_size = sizes[value_at].astype(np.int64)
        steps.append((rows, at + 4, key_size, value_at + 4, value_size))
        number += 1
        more = counts[rows] > number
        at = (value_at + 4 + np.maximum(value_size, 0))[more]
        rows = rows[more]
    if not steps:
        empty = np.empty(0, np.int64)
        return empty, empty, empty, empty, empty
    joined = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
    if len(steps) > 1:
        order = np.argsort(joined[1])  # by position in the chunk, which is record after record
        joined = [part[order] for part in joined]
    return joined[0], joined[1], joined[2], joined[3], joined[4]
