"""Retention and compaction of a partition in SQL (docs/storage.md): ranges in the place of segments.

Each step is one short transaction, so that publishers wait for one range at most and a crash leaves whole steps.
"""

import logging
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from babelbus.records.columns import Columns, decode_chunk
from babelbus.records.format import TOMBSTONE, CorruptRecordError
from babelbus.storage.contract import LogSettings

if TYPE_CHECKING:
    from babelbus.storage.sql.log import DatabaseLog
    from babelbus.storage.sql.ranges import Range

log = logging.getLogger(__name__)

READ_BYTES = 4 * 2**20


def clean(partition: "DatabaseLog", settings: LogSettings, now_ms: int) -> int:
    """Do what retention and compaction ask for; return how many bytes of records became free.

    Raises:
        DiskError: the database refused; what was done is whole, the rest is done the next time.
    """
    freed = 0
    if settings.retention_seconds is not None:
        freed += _retain_by_age(partition, now_ms - int(settings.retention_seconds * 1000))
    if settings.retention_bytes is not None:
        freed += _retain_by_size(partition, settings.retention_bytes)
    if settings.cleanup == "compact":
        freed += _compact(partition, settings, now_ms)
    return freed


def _retain_by_age(partition: "DatabaseLog", oldest_ms: int) -> int:
    """Remove ranges from the front as long as all their records are older; the open one is sealed for it."""
    if partition.open_range().greatest_timestamp < oldest_ms:
        partition.roll()
    freed = 0
    for found in partition.sealed_ranges():
        if found.greatest_timestamp >= oldest_ms:
            break
        partition.drop_first()
        freed += found.size_bytes
    if freed:
        log.info("%s: removed %d bytes, older than the retention time", partition.name, freed)
    return freed


def _retain_by_size(partition: "DatabaseLog", bytes_max: int) -> int:
    """Remove ranges from the front while what is left still holds `bytes_max`."""
    size, freed = partition.size_bytes, 0
    for found in partition.sealed_ranges():
        if size - freed - found.size_bytes < bytes_max:
            break
        partition.drop_first()
        freed += found.size_bytes
    if freed:
        log.info("%s: removed %d bytes, over the retention size", partition.name, freed)
    return freed


def _compact(partition: "DatabaseLog", settings: LogSettings, now_ms: int) -> int:
    """Remove the records of sealed ranges that a later one of the same key replaces, and old tombstones.

    Memory: about 150 bytes for each key of the partition while it runs.
    """
    tombstones_until_ms = now_ms - int(settings.tombstone_seconds * 1000)
    sealed = partition.sealed_ranges()
    replacing = [*sealed, partition.open_range()]
    if settings.compact_after_seconds is not None:
        oldest_ms = now_ms - int(settings.compact_after_seconds * 1000)
        # Up to the first young range: in front of an offset, rather than here and there, compaction has looked.
        replacing = sealed = list(takewhile(lambda found: found.greatest_timestamp < oldest_ms, sealed))
    if all(found.compacted_with == len(sealed) for found in sealed):
        return 0
    durable = partition.flush()  # a record that may still be lost replaces nothing
    last: dict[bytes, int] = {}
    whole = []
    for number, found in enumerate(replacing):
        try:
            for columns in _chunks(partition, found, min(found.next_offset, durable)):
                last.update((key, offset) for offset, key, _ in _keys(columns))
        except CorruptRecordError as error:
            log.warning("not compacted: %s", error)
            # It keeps everything, so no tombstone may go that takes back what it says.
            tombstones_until_ms = 0
            continue
        if number < len(sealed):
            whole.append(found)
    before, until = partition.size_bytes, min(replacing[-1].next_offset, durable)
    for found in whole:  # from the front: a tombstone goes after what it takes back
        found.compacted_with = len(sealed)
        replaced = [
            offset
            for columns in _chunks(partition, found, found.next_offset)
            for offset, key, tombstone_ms in _keys(columns)
            if last[key] != offset or tombstone_ms < tombstones_until_ms
        ]
        if replaced:
            partition.thin_out(found, replaced, until)
            log.info("%s: compacted, %d records removed", partition.name, len(replaced))
    return before - partition.size_bytes


def _chunks(partition: "DatabaseLog", found: "Range", end: int) -> Iterator[Columns]:
    """Yield the records of a range below the offset `end`.

    Raises:
        CorruptRecordError: one is damaged.
    """
    offset = found.base_offset
    while offset < end:
        chunk = partition.read(offset, READ_BYTES, end)
        if not chunk.data and chunk.next_offset == offset:
            chunk = partition.read(offset, 2**31 - 1, end)
        if chunk.data:
            yield decode_chunk(chunk.data, verified=True)
        offset = chunk.next_offset


def _keys(columns: Columns) -> Iterator[tuple[int, bytes, int]]:
    """Yield offset, key, and of a tombstone its time (of another record: a time that is never over)."""
    data = columns.data
    rows = zip(
        columns.offsets.tolist(),
        columns.key_positions.tolist(),
        columns.key_lengths.tolist(),
        columns.attributes.tolist(),
        columns.timestamps.tolist(),
        strict=True,
    )
    for offset, at, size, attributes, timestamp in rows:
        if size >= 0:
            yield offset, bytes(data[at : at + size]), timestamp if attributes & TOMBSTONE else 2**63
