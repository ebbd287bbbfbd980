"""The headers of many records, read once if they are equal behind the first one.

The first header is usually an id, and the headers behind it are those of the publisher. So they are cut off and read
once for all records with the same bytes, instead of being walked a header at a time.
"""

import msgspec

from babelbus.arrays import I64, U8, Flags, np
from babelbus.records.fields import int32s
from babelbus.records.format import FEW, HEADERS_MAX, INT32

BLOCK_BYTES = 64 * 2**10
"""So many bytes are compared at once: the system would have to provide more memory anew each time."""


class Headed(msgspec.Struct, frozen=True, eq=False):
    """The headers of records with the same number of headers and the same name of the first header."""

    front: bytes
    """Number of headers, and length and name of the first header."""
    rests: list[bytes]
    """For each record, the headers behind the first one; one object for all that are equal."""


def find_equal(data: bytes, starts: I64, counts: U8, ends: I64) -> tuple[Flags, Headed | None]:
    """Return which records have good headers that are those of many, and the headers if this holds for all records.

    The headers of a record reach from the byte `starts`, their number, to the byte `ends`.
    """
    nothing = np.zeros(len(starts), bool)
    first = int(np.argmax(counts != 0))
    start, end = int(starts[first]), int(ends[first])
    size = INT32.unpack_from(data, start + 1)[0] if start + 5 <= end else -1
    front = data[start : start + 5 + size]
    if not front or not front[0] or size < 0 or start + len(front) > end:
        return nothing, None
    alike = starts + (len(front) + 4) <= ends  # nothing is read beyond the end
    alike[alike] = are_equal(data, starts[alike], front)
    values = starts[alike] + (len(front) + 4)
    sizes = int32s(data)[values - 4].astype(np.int64)
    room = (sizes >= 0) & (values + sizes <= ends[alike])
    alike[alike] = room
    behind = (values + sizes)[room]
    sample = {data[at:stop] for at, stop in zip(behind[:FEW].tolist(), ends[alike][:FEW].tolist(), strict=True)}
    if len(sample) == FEW < len(behind):  # headers differ from record to record
        return nothing, None
    rests = cut(data, behind, ends[alike] - behind)
    equal = {rest: rest for rest in rests}
    if len(equal) > max(len(rests) // 4, FEW) or not all(_are_headers(rest, front[0] - 1) for rest in equal):
        return nothing, None
    return alike, Headed(front, [equal[rest] for rest in rests]) if alike.all() else None


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
