"""A group commit as one message of a stream, and the other messages of ours (docs/cluster.md, "Frames").

frame := magic "BBF1", head CRC u32, data CRC u32, kind u8, pad u8, topic bytes u16, partition u32, epoch u64,
         base offset i64, next offset i64, bytes in front i64, latest timestamp i64, topic (UTF-8), data; big-endian

Both CRCs are CRC-32C: the first covers what follows it up to the data, and so the second one. A frame whose data is
damaged still says which offsets are lost with it. `bytes in front` counts the bytes of records of the partition before
the frame, and `latest timestamp` is the greatest up to its end: both only grow, so that a search can halve the stream.
"""

import struct
from enum import IntEnum

import google_crc32c
import msgspec
import numpy as np

from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at

HEAD = struct.Struct(">4sIIBxHIQqqqq")
COVERED_FROM = 8
MAGIC = b"BBF1"


class Kind(IntEnum):
    """The kinds of messages in a stream."""

    RECORDS = 1
    BOUNDS = 2
    PRODUCERS = 3
    EPOCH = 4
    REMOVED = 5
    FILE = 6
    """A file of the data folder with its content (`files`)."""
    CHUNKED = 7
    """A file whose content is in messages of its own."""
    CHUNK = 8
    GONE = 9
    """A file that was removed."""


class Head(msgspec.Struct, frozen=True):
    """The head of a frame, with the `sequence` that the stream gave it (0: not stored yet)."""

    kind: int
    topic: str
    partition: int
    epoch: int = 0
    base_offset: int = 0
    next_offset: int = 0
    bytes_before: int = 0
    latest_timestamp: int = 0
    sequence: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A frame as it was read. `data` is `None` if it does not match its CRC; it had `size_bytes`."""

    head: Head
    data: bytes | None
    size_bytes: int


def encode(head: Head, data: bytes, data_crc: int) -> bytes:
    """Return the message of a frame; `data_crc` is `crc_of(data)`."""
    topic = head.topic.encode()
    front = HEAD.pack(
        MAGIC, 0, data_crc, head.kind, len(topic), head.partition, head.epoch,
        head.base_offset, head.next_offset, head.bytes_before, head.latest_timestamp,
    )  # fmt: skip
    front += topic
    return b"".join((MAGIC, crc_of(front[COVERED_FROM:]).to_bytes(4, "big"), front[COVERED_FROM:], data))


def crc_of(data: bytes) -> int:
    """Return the CRC-32C."""
    return int(google_crc32c.value(data))


def decode(message: bytes, sequence: int) -> Frame | None:
    """Return the frame that a message holds, `None` if the message has no head of ours that matches its CRC."""
    if len(message) < HEAD.size or message[:4] != MAGIC:
        return None
    _, head_crc, data_crc, kind, topic_bytes, partition, epoch, base, following, before, latest = HEAD.unpack_from(
        message
    )
    end = HEAD.size + topic_bytes
    if crc_of(message[COVERED_FROM:end]) != head_crc:
        return None
    data = message[end:]
    try:
        topic = message[HEAD.size : end].decode()
    except UnicodeDecodeError:
        return None
    head = Head(kind, topic, partition, epoch, base, following, before, latest, sequence)
    return Frame(head, data if crc_of(data) == data_crc else None, len(data))


def cut(frame: Frame, offset: int, end_offset: int, bytes_max: int, least: int) -> tuple[bytes, int, int]:
    """Return the records of a frame from `offset` on, below `end_offset`, that fit `bytes_max`; at least `least`.

    Beside the records: the offset of the first one, and where to read on.
    """
    head, data = frame.head, frame.data
    assert data is not None
    stop = min(end_offset, head.next_offset)
    if offset <= head.base_offset and stop == head.next_offset and 0 < len(data) <= bytes_max:
        return data, int.from_bytes(data[:8], "big"), stop
    starts, _ = find_positions(data, 0, len(data))
    offsets = offsets_at(data, starts)
    at, after = np.searchsorted(offsets, (offset, stop)).tolist()
    if at == after:
        return b"", stop, stop
    ends = np.append(starts[1:], len(data))
    fitting = at + max(int(np.searchsorted(ends[at:after], int(starts[at]) + bytes_max, "right")), least)
    if fitting == at:
        return b"", offset, offset
    following = stop if fitting == after else int(offsets[fitting - 1]) + 1
    return data[starts[at] : ends[fitting - 1]], int(offsets[at]), following
