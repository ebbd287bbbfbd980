"""A chunk of stored records -> columns, fast when many records have the same headers behind the first one.

The first header is usually an id, and the headers behind it are those of the publisher. So they are cut off and read
once for all records with the same bytes, instead of being walked a header at a time.
"""

import struct

import msgspec
import numpy as np
import numpy.typing as npt

from babelbus.records.columns import I64, Columns, decode_columns
from babelbus.records.format import (
    HEAD,
    HEAD_BYTES,
    HEADERS_MAX,
    INT32,
    LENGTH_FROM,
    LENGTH_MIN,
    PLAIN_BODY,
    PLAIN_FIELDS,
)

FEW = 16
"""With fewer records than this, numpy's fixed costs are more than it saves."""
BLOCK_BYTES = 64 * 2**10
"""So many bytes are compared at once: the system would have to provide more memory anew each time."""
PLAIN_HEAD = struct.Struct(HEAD.format + PLAIN_BODY.format[1:])
HEAD_SIZE = PLAIN_FIELDS.itemsize
Flags = npt.NDArray[np.bool_]


class Headed(msgspec.Struct, frozen=True, eq=False):
    """The headers of records with the same number of headers and the same name of the first header."""

    front: bytes
    """Number of headers, and length and name of the first header."""
    rests: list[bytes]
    """For each record, the headers behind the first one; one object for all that are equal."""


def decode(data: bytes, positions: I64) -> tuple[Columns, Headed | None]:
    """Return the columns of `decode_columns`, and the headers if all begin alike.

    Raises:
        CorruptRecordError: the inner lengths of a record do not add up to its length.
    """
    if not len(positions) or _is_plain(data, int(positions[0])):
        return decode_columns(data, positions), None  # which is fast for records without headers
    heads = np.ndarray((len(data) - HEAD_SIZE + 1,), f"V{HEAD_SIZE}", data, 0, (1,))[positions].view(PLAIN_FIELDS)
    ends = positions + heads["length"] + LENGTH_FROM
    key_lengths = heads["key_length"].astype(np.int64)
    payload_positions = positions + (HEAD_BYTES + 17)
    payload_lengths = heads["payload_length"].astype(np.int64)
    if (ends > len(data)).any():
        return decode_columns(data, positions), None  # which raises the right error
    if (key_lengths != -1).any():
        payload_positions += np.maximum(key_lengths, 0)
        if ((key_lengths < -1) | (payload_positions >= ends)).any():
            return decode_columns(data, positions), None
        payload_lengths = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))[payload_positions - 4].astype(np.int64)
    headers_positions = payload_positions + payload_lengths
    if (payload_lengths < 0).any() or (headers_positions >= ends).any():
        return decode_columns(data, positions), None
    headers_counts = np.frombuffer(data, np.uint8)[headers_positions]
    headed = _check_headers(data, positions, headers_positions, headers_counts, ends)
    columns = Columns(
        data,
        positions,
        ends,
        heads["offset"].astype(np.int64),
        heads["timestamp"].astype(np.int64),
        heads["attributes"].astype(np.int8),
        key_lengths,
        payload_positions,
        payload_lengths,
        headers_positions,
        headers_counts,
    )
    return columns, headed


def _check_headers(data: bytes, positions: I64, starts: I64, counts: npt.NDArray[np.uint8], ends: I64) -> Headed | None:
    """Check that each record ends where its headers end; return the headers if all begin alike.

    Raises:
        CorruptRecordError: the headers of a record do not fit its length.
    """
    rows = np.flatnonzero((counts != 0) | (starts + 1 != ends))
    if not len(rows):
        return None
    start, end = int(starts[rows[0]]), int(ends[rows[0]])
    size = INT32.unpack_from(data, start + 1)[0] if start + 5 <= end else -1
    front = data[start : start + 5 + size]
    alike = starts + (len(front) + 4) <= ends  # nothing is read beyond the end
    if size < 0 or start + len(front) > end or not alike[rows[0]]:
        decode_columns(data, positions)
        return None
    alike[alike] = are_equal(data, starts[alike], front)
    values = starts[alike] + (len(front) + 4)
    sizes = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))[values - 4].astype(np.int64)
    room = (sizes >= 0) & (values + sizes <= ends[alike])
    if not room.all():
        alike[alike] = room
        values, sizes = values[room], sizes[room]
    rests = cut(data, values + sizes, ends[alike] - values - sizes)
    equal = {rest: rest for rest in rests}
    if len(equal) > max(len(rests) // 4, FEW) or not all(_are_headers(rest, front[0] - 1) for rest in equal):
        alike[:] = False
    if not alike.all():
        decode_columns(data, positions[~alike])
        return None
    return Headed(front, rests if len(equal) == 1 else [equal[rest] for rest in rests])


def _are_headers(rest: bytes, count: int) -> bool:
    """Return whether `rest` is exactly `count` headers."""
    at, size = 0, len(rest)
    for _ in range(count):
        for least in (0, -1):
            if at + 4 > size:
                return False
            length = INT32.unpack_from(rest, at)[0]
            if length < least:
                return False
            at += 4 + max(length, 0)
    return at == size and 0 <= count < HEADERS_MAX


def _is_plain(data: bytes, position: int) -> bool:
    """Return whether a record has neither key nor headers."""
    _, length, _, _, _, key_length, payload_length = PLAIN_HEAD.unpack_from(data, position)
    return bool(key_length == -1 and payload_length + LENGTH_MIN == length)


def are_equal(data: bytes, places: I64, part: bytes) -> Flags:
    """Return at which places of `data` the bytes of `part` are; `data` must have room for them at each place."""
    count, size = len(places), len(part)
    equal: Flags = np.ones(count, bool)
    if not count or not size:
        return equal
    view = np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))
    step = max(BLOCK_BYTES // size, 1)
    expected = part * min(step, count)
    for at in range(0, count, step):
        octet_strings = view[places[at : at + step]]
        if octet_strings.tobytes() != expected[: len(octet_strings) * size]:
            octets = octet_strings.view(np.uint8).reshape(len(octet_strings), size)
            equal[at : at + step] = (octets == np.frombuffer(part, np.uint8)).all(axis=1)
    return equal


def cut(data: bytes, starts: I64, sizes: I64) -> list[bytes]:
    """Return parts of `data`: in a fifth of the time of slices if of one size, one object if equal."""
    size = int(sizes[0]) if len(starts) >= FEW else 0
    if size == 0 or (sizes != size).any():
        pairs = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        return [data[start:stop] for start, stop in pairs]
    begin, last = int(starts[0]), int(starts[-1])
    first = data[begin : begin + size]
    if first == data[last : last + size] and are_equal(data, starts, first).all():
        return [first] * len(starts)
    parts: list[bytes] = np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))[starts].tolist()
    return parts
