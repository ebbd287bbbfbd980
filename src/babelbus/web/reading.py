"""Records of a partition for the console: forwards, backwards, by time; a turn decodes some hundred at the most."""

import msgspec

from babelbus.core.access import Action, Identity
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition
from babelbus.core.topic import Topic
from babelbus.records.columns import decode_columns, find_positions, iterate
from babelbus.records.format import CorruptRecordError
from babelbus.records.record import Record
from babelbus.units import MIB
from babelbus.web.answers import read_number
from babelbus.web.calls import Call
from babelbus.web.errors import NoRecordError
from babelbus.web.shown_records import Limits

COUNT_AT_ONCE = 200
READ_BYTES_MAX = MIB
"""The size of one read, if no single record is larger."""
ANSWER_BYTES_MAX = 32 * MIB
"""The size of the reads of one answer, before the last one."""
WIDTH_MAX = 2**40
BYTES_MAX = 1024
PREVIEW_BYTES_MAX = 64 * 1024
SHOWN_BYTES_MAX = 4 * MIB
"""Most bytes of payloads in one answer: it is made within one turn of the event loop."""


class Page(msgspec.Struct):
    """Records in the order of their offsets, and where to read on in both directions."""

    records: list[Record] = []
    first_offset: int = 0
    next_offset: int = 0
    notes: list[str] = []


def readable(broker: Broker, principal: Identity, name: str) -> Topic:
    """Return a topic that a principal may read.

    Raises:
        UnknownTopicError: there is no such topic.
        AccessRefusedError: the principal may not read it, or may not know whether there is one.
    """
    broker.check_topic(principal, Action.READ, name)
    return broker.topic(name)


def read_limits(call: Call, count: int) -> Limits:
    """Read `bytes_max` of a query: how much of the payload of each of `count` records is shown."""
    asked = min(read_number(call, "bytes_max", 1) or BYTES_MAX, PREVIEW_BYTES_MAX, SHOWN_BYTES_MAX // count)
    return Limits(asked, min(asked, 1024), min(asked, 1024), 4096)


async def read_some(
    partition: Partition, offset: int, end: int, count: int = COUNT_AT_ONCE
) -> tuple[list[Record], int, int]:
    """Return up to `count` records from `offset` on, below `end`; where to read on; and how many bytes were read.

    Raises:
        StorageError: the partition cannot be read.
    """
    count = min(count, COUNT_AT_ONCE)
    chunk = await partition.read(offset, READ_BYTES_MAX, min(end, offset + count))
    if not chunk.data:
        return [], max(chunk.next_offset, min(end, offset + count)), 0
    positions, _ = find_positions(chunk.data, 0, len(chunk.data))
    records = list(iterate(decode_columns(chunk.data, positions)))
    return records, chunk.next_offset, len(chunk.data)


async def read_forwards(partition: Partition, offset: int, end: int, count: int, bytes_max: int | None = None) -> Page:
    """Return the first `count` records from `offset` on, below `end`; damaged ones are named in a note."""
    bytes_max = ANSWER_BYTES_MAX if bytes_max is None else bytes_max
    page = Page(first_offset=offset, next_offset=offset)
    size = 0
    while len(page.records) < count and page.next_offset < end:
        if size >= bytes_max:
            page.notes.append("The records are large, so that fewer of them are shown at once.")
            break
        try:
            records, page.next_offset, read = await read_some(
                partition, page.next_offset, end, count - len(page.records)
            )
        except CorruptRecordError as error:
            page.notes.append(f"The record at offset {page.next_offset} is damaged: {error.reason}.")
            page.next_offset += 1
            continue
        page.records += records
        size += read
    return page


async def read_backwards(partition: Partition, first: int, end: int, count: int, bytes_max: int | None = None) -> Page:
    """Return the last `count` records below `end`, from `first` on; where compaction left few, it looks farther."""
    bytes_max = ANSWER_BYTES_MAX if bytes_max is None else bytes_max
    page = Page(first_offset=end, next_offset=end)
    width = count
    while len(page.records) < count and page.first_offset > first:
        start, wanted = max(first, page.first_offset - width), count - len(page.records)
        part = await read_forwards(partition, start, page.first_offset, wanted + 1, bytes_max)
        if width > 1 and (part.next_offset < page.first_offset or len(part.records) > wanted):
            width //= 2  # more than fits: those at the end are wanted
            continue
        page.records[:0] = part.records
        page.notes += part.notes
        page.first_offset = start
        if sum(len(record.payload or b"") for record in page.records) >= bytes_max:
            page.notes.append("The records are large, so that fewer of them are shown at once.")
            break
        if not part.records:
            width = min(2 * width, WIDTH_MAX)
    return page


async def read_one(partition: Partition, offset: int, topic: str) -> tuple[Record, bytes]:
    """Return the record at an offset, and its stored form.

    Raises:
        NoRecordError: it is not there; the error says why.
    """
    first, end = partition.log.first_offset, partition.high_watermark
    where = f"Partition {partition.number} of topic {topic!r}"
    if offset < first:
        raise NoRecordError(f"{where} begins at offset {first} now: retention has removed the record at {offset}.")
    if offset >= end:
        raise NoRecordError(f"{where} ends at offset {end}: there is no record at {offset} yet.")
    chunk = await partition.read(offset, READ_BYTES_MAX, offset + 1)
    positions, _ = find_positions(chunk.data, 0, len(chunk.data))
    record = next(iterate(decode_columns(chunk.data, positions)), None)
    if record is None or record.offset != offset:
        raise NoRecordError(f"{where} has no record at offset {offset}: compaction has removed it.")
    return record, chunk.data
