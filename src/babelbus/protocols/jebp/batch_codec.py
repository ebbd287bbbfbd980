"""Bytes <-> batches of records that many clients of an edge create one by one, for one topic.

batch := topic_bytes: u8, topic, clients: u32, records: u32,
         numbers: u32 * clients, counts: u8 * clients, timestamps: i64 * records, sizes: u32 * records, payloads

Numbers are big-endian: a member of a cluster and its owner may be different machines. The answer has the two bytes of
an answer of jebp for each record (`status`), or `PASSED` for each record of a client.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from babelbus.errors import RemoteProtocolError

PASSED: Final = b"\0\0"
"""Says of a record that the session answers it."""
ANSWER_BYTES: Final = len(PASSED)
CLIENT_BYTES: Final = 5
RECORD_BYTES: Final = 12
_COUNTS: Final = struct.Struct(">II")


class ClientBatch(msgspec.Struct, frozen=True, gc=False):
    """Records of many clients; those of one client stand together, in their order."""

    topic: bytes
    """Its name as the clients say it."""
    numbers: Sequence[int]
    """Numbers of the clients."""
    counts: Sequence[int]
    """How many records each client has, 1 to 255."""
    timestamps: list[int]
    payloads: list[bytes]


def _encode(form: str, numbers: Iterable[int]) -> bytes:
    numbers = array(form, numbers)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def _decode(form: str, data: bytes) -> "array[int]":
    numbers = array(form, data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def encode_batch(batch: ClientBatch) -> bytes:
    """Return the bytes of a batch."""
    return b"".join(
        (
            bytes((len(batch.topic),)),
            batch.topic,
            _COUNTS.pack(len(batch.numbers), len(batch.payloads)),
            _encode("I", batch.numbers),
            bytes(batch.counts),
            _encode("q", batch.timestamps),
            _encode("I", map(len, batch.payloads)),
            *batch.payloads,
        )
    )


def decode_batch(data: bytes) -> ClientBatch:
    """Read a batch.

    Raises:
        RemoteProtocolError: the bytes are no batch.
    """
    fields = 1 + data[0] if data else 0
    at = fields + _COUNTS.size
    if not fields or len(data) < at:
        raise RemoteProtocolError("a batch of fronts has no head")
    clients, records = _COUNTS.unpack_from(data, fields)
    counts_at = at + 4 * clients
    times_at = counts_at + clients
    sizes_at = times_at + 8 * records
    start = sizes_at + 4 * records
    if start > len(data):
        raise RemoteProtocolError("a batch of fronts is cut off")
    numbers = _decode("I", data[at:counts_at])
    counts = data[counts_at:times_at]
    times = _decode("q", data[times_at:sizes_at])
    sizes = _decode("I", data[sizes_at:start])
    if 0 in counts or sum(counts) != records or start + sum(sizes) != len(data):
        raise RemoteProtocolError("the numbers of a batch of fronts do not fit each other")
    payloads = []
    for size in sizes:
        end = start + size
        payloads.append(data[start:end])
        start = end
    return ClientBatch(data[1:fields], numbers, counts, times.tolist(), payloads)
