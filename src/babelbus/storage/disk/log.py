"""A partition on disk: retention by age and size, and compaction that keeps each key's last record (docs/storage.md).

Only sealed segments are touched. Retention removes whole segments from the front. Compaction writes a segment again
without the records that a later one of the same key replaces, and puts it in the old one's place; it always keeps the
last record of a segment, so that a segment whose end was lost can be told from one that was compacted.
"""

import logging
from itertools import takewhile

from babelbus.arrays import np
from babelbus.records.columns import NEVER, Columns, decode_chunk, iterate_keys
from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.append_log import AppendLog
from babelbus.storage.disk.segment import Segment

log = logging.getLogger(__name__)

READ_BYTES = 4 * 2**20


class Log(AppendLog):
    """A partition on disk; see `contract.PartitionLog`."""

    def clean(self, now_ms: int) -> int:
        """Run retention and compaction; return how many bytes became free. May take long.

        Raises:
            DiskError: the disk refused; what was done is whole, the rest is done the next time.
        """
        before, settings = self.size_bytes, self._settings
        if settings.retention_seconds is not None:
            _retain_by_age(self, now_ms - int(settings.retention_seconds * 1000))
        if settings.retention_bytes is not None:
            _retain_by_size(self, settings.retention_bytes)
        if settings.cleanup == "compact":
            _compact(self, settings, now_ms)
        return before - self.size_bytes


def _retain_by_age(partition: AppendLog, oldest_ms: int) -> None:
    """Remove segments from the front as long as all their records are older; the open one is sealed for it."""
    active = partition.open_segment()
    if active.size_bytes and active.index.greatest_timestamp < oldest_ms:
        partition.roll()
    for segment in partition.sealed_segments():
        if segment.index.greatest_timestamp >= oldest_ms:
            return
        log.info("%s: removed, older than the retention time", segment.path)
        partition.drop_first(segment)


def _retain_by_size(partition: AppendLog, bytes_max: int) -> None:
    """Remove segments from the front while what is left still holds `bytes_max`."""
    size = partition.size_bytes
    for segment in partition.sealed_segments():
        if size - segment.size_bytes < bytes_max:
            return
        size -= segment.size_bytes
        log.info("%s: removed, over the retention size", segment.path)
        partition.drop_first(segment)


def _compact(partition: AppendLog, settings: LogSettings, now_ms: int) -> None:
    """Write those sealed segments again that hold records a later one replaces.

    Memory: about 150 bytes for each key of the partition while it runs.
    """
    tombstones_until_ms = now_ms - int(settings.tombstone_seconds * 1000)
    sealed = partition.sealed_segments()
    replacing = [*sealed, partition.open_segment()]
    if settings.compact_after_seconds is not None:
        oldest_ms = now_ms - int(settings.compact_after_seconds * 1000)
        # Up to the first young segment: in front of an offset, rather than here and there, compaction has looked.
        sealed = list(takewhile(lambda segment: segment.index.greatest_timestamp < oldest_ms, sealed))
        replacing = sealed
    if all(segment.compacted_with == len(sealed) for segment in sealed):
        return
    durable = partition.flush()  # a record that may still be lost replaces nothing
    last: dict[bytes, int] = {}
    staying: set[bytes] = set()
    whole = []
    for number, segment in enumerate(replacing):
        try:
            for columns in _chunks(partition, segment, durable):
                last.update((key, offset) for offset, key, _ in iterate_keys(columns) if key is not None)
        except CorruptRecordError as error:
            log.warning("%s: not compacted: %s", segment.path, error)
            # It keeps everything, so no tombstone may go that takes back what it says.
            tombstones_until_ms = 0
            continue
        if number < len(sealed):  # the open one may be sealed by now, and has records behind `durable`
            whole.append(segment)
    until = min(replacing[-1].next_offset, durable)
    for segment in whole:
        _compact_segment(partition, segment, last, staying, tombstones_until_ms, until)
        segment.compacted_with = len(sealed)


def _chunks(partition: AppendLog, segment: Segment, end: int) -> list[Columns]:
    """Return the columns of a segment, of its records below the offset `end`.

    Raises:
        CorruptRecordError: it is damaged.
    """
    found = []
    offset, end = segment.base_offset, min(segment.next_offset, end)
    while offset < end:
        chunk = partition.read(offset, READ_BYTES, end)
        if chunk.data:
            found.append(decode_chunk(chunk.data, verified=True))
        offset = chunk.next_offset
    return found


def _compact_segment(
    partition: AppendLog,
    segment: Segment,
    last: dict[bytes, int],
    staying: set[bytes],
    tombstones_until_ms: int,
    until: int,
) -> None:
    """Write a segment again without replaced records, if there are any.

    `staying` are keys of replaced records that stay because they are the last of their segment: the tombstone that
    takes one back stays with it. `until` is where the records end that were looked at.
    """
    kept: list[bytes] = []
    removed = 0
    for columns in _chunks(partition, segment, segment.next_offset):
        keep = np.ones(len(columns), bool)
        for number, (offset, key, tombstone_ms) in enumerate(iterate_keys(columns)):
            if key is None:
                continue
            if offset == segment.next_offset - 1:
                if tombstone_ms == NEVER:
                    staying.add(key)
            elif last[key] != offset or (tombstone_ms < tombstones_until_ms and key not in staying):
                keep[number] = False
        removed += int((~keep).sum())
        bounds = zip(columns.positions[keep].tolist(), columns.ends[keep].tolist(), strict=True)
        kept += [bytes(columns.data[start:end]) for start, end in bounds]
    if removed:
        partition.note_compaction(until)
        partition.swap(segment, b"".join(kept))
        log.info("%s: compacted, %d records removed", segment.path, removed)
