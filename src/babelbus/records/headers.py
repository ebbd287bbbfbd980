"""The headers of all records of a chunk, walked in step instead of record by record."""

import msgspec

from babelbus.arrays import I64, np
from babelbus.records.columns import Columns
from babelbus.records.equal_headers import are_equal, cut
from babelbus.records.fields import int32s
from babelbus.records.format import FEW, INT32, RESERVED_HEADER_PREFIX, TOMBSTONE, decode_headers, public_headers
from babelbus.records.record import Headers

Numbers = range | list[int]
"""Records of a chunk by their place in it, rising."""


class Leading(msgspec.Struct, frozen=True, eq=False):
    """Records whose first header has a certain name and a value, and which are no tombstones; see `find_leading`.

    Each column is built when it is requested, from where the parts of the records begin in `data`.
    """

    numbers: Numbers
    data: bytes
    payload_starts: I64
    payload_lengths: I64
    value_starts: I64
    rest_starts: I64
    ends: I64
    known_rests: list[bytes] | None = None

    def payloads(self) -> list[bytes]:
        """Return the payloads."""
        return cut(self.data, self.payload_starts, self.payload_lengths)

    def values(self) -> list[bytes]:
        """Return the values of the first header."""
        return cut(self.data, self.value_starts, self.rest_starts - self.value_starts)

    def rests(self) -> list[bytes]:
        """Return the headers behind the first one, as stored (`read_headers`); equal ones may share one object."""
        return self.known_rests or cut(self.data, self.rest_starts, self.ends - self.rest_starts)


def find_leading(columns: Columns, data: bytes, name: bytes) -> Leading:
    """Return the records whose first header is `name`, with a value; tombstones are left out."""
    head, headed, known = INT32.pack(len(name)) + name, columns.headed, None
    values = columns.headers_positions + (len(head) + 5)
    rows = np.arange(len(columns))
    if headed is not None and headed.front[1:] == head and not columns.attributes.any():
        known = headed.rests
    else:
        rows = rows[values <= columns.ends]
        rows = rows[are_equal(data, columns.headers_positions[rows] + 1, head)]
        good = (columns.headers_counts[rows] > 0) & (columns.attributes[rows] & TOMBSTONE == 0)
        rows = rows[good & (int32s(data)[values[rows] - 4] >= 0)]
        values = values[rows]
    sizes = int32s(data)[values - 4].astype(np.int64)
    numbers: Numbers = range(len(columns)) if len(rows) == len(columns) else rows.tolist()
    return Leading(
        numbers,
        data,
        columns.payload_positions[rows],
        columns.payload_lengths[rows],
        values,
        values + sizes,
        columns.ends[rows],
        known,
    )


def decode_all_headers(columns: Columns, data: bytes) -> list[Headers]:
    """Return the headers of each record, without the bus's own headers.

    Records with the same number of headers are decoded together, a header at a time: about 0.1 us a header if the
    headers have the same names in the same order, as those of one publisher mostly have, else 0.3 us.
    """
    results: list[Headers] = [()] * len(columns)
    for count in np.unique(columns.headers_counts).tolist():
        rows = np.flatnonzero(columns.headers_counts == count)
        starts = columns.headers_positions[rows] + 1
        if len(rows) > FEW:
            decoded = _decode_together(data, starts, count)
        else:
            decoded = [public_headers(decode_headers(data, start, count)) for start in starts.tolist()]
        if len(rows) == len(columns):
            return decoded
        for row, headers in zip(rows.tolist(), decoded, strict=True):
            results[row] = headers
    return results


def _decode_together(data: bytes, starts: I64, count: int) -> list[Headers]:
    """Return the headers of records that have `count` headers each, from the bytes `starts` on."""
    if not count:
        return [()] * len(starts)
    sizes, octets, at = int32s(data), np.frombuffer(data, np.uint8), starts
    columns, reserved = [], False
    for _ in range(count):
        name_sizes = sizes[at].astype(np.int64)
        names = at + 4
        at = names + name_sizes
        value_sizes = sizes[at].astype(np.int64)
        values: list[bytes | None] = [*cut(data, at + 4, np.maximum(value_sizes, 0))]
        for row in np.flatnonzero(value_sizes < 0).tolist():
            values[row] = None
        reserved = reserved or bool(((octets[names] == RESERVED_HEADER_PREFIX[0]) & (name_sizes > 0)).any())
        columns.append(zip(cut(data, names, name_sizes), values, strict=True))
        at = at + 4 + np.maximum(value_sizes, 0)
    decoded = [*zip(*columns, strict=True)]
    return [public_headers(headers) for headers in decoded] if reserved else decoded


def read_headers(rest: bytes) -> Headers:
    """Return the headers of an entry of `Leading.rests`, without the bus's own headers."""
    count = at = 0
    while at < len(rest):
        at += 4 + INT32.unpack_from(rest, at)[0]
        at += 4 + max(INT32.unpack_from(rest, at)[0], 0)
        count += 1
    return public_headers(decode_headers(rest, 0, count))


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
