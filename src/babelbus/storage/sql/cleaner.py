"""Retention and compaction of a partition in SQL (docs/storage.md): whole batches are removed or rewritten.

Each step is one short transaction, so that publishers wait for one step at most and a crash leaves whole steps.
"""

import logging

from sqlalchemy import func, select

from babelbus.arrays import np
from babelbus.records.columns import Columns, decode_chunk, iterate_keys
from babelbus.storage.contract import LogSettings
from babelbus.storage.sql.batches import ROW_BYTES_MAX, ROWS_MAX, Batch, cut
from babelbus.storage.sql.log import DatabaseLog
from babelbus.storage.sql.tables import batches

log = logging.getLogger(__name__)

STEP_BYTES = 8 * 2**20
"""About how much one transaction removes."""
PAGE_BYTES = 4 * 2**20
GROUP_MAX = 256
"""Most batches that become one."""
LOOK_BYTES = 2**20
"""Compaction looks again when this much is new, or a topic's `segment_bytes` if that is less."""


def clean(partition: DatabaseLog, now_ms: int) -> int:
    """Run retention and compaction, and tidy up; return how many bytes of records became free. May take long.

    Raises:
        DiskError: the database refused; finished steps stay, the next call does the rest.
    """
    freed, settings = 0, partition.settings
    oldest_ms = None if settings.retention_seconds is None else now_ms - int(settings.retention_seconds * 1000)
    while step := _retain(partition, oldest_ms, settings.retention_bytes):
        freed += step
    if freed:
        log.info("%s: retention removed %d bytes", partition.name, freed)
    if settings.cleanup == "compact":
        freed += _compact(partition, settings, now_ms)
    partition.tidy_producers()
    if not partition.failed:
        partition.flush()  # so that also records of a lower ack level are known to be there
        partition.database.settle()
    return freed


def _retain(partition: DatabaseLog, oldest_ms: int | None, bytes_max: int | None) -> int:
    """Remove some batches from the front: old ones, and those without which `bytes_max` are left."""
    if oldest_ms is None and bytes_max is None:
        return 0
    query = select(batches.c.next_offset, batches.c.size_bytes, batches.c.greatest_timestamp)
    query = query.where(batches.c.partition_id == partition.id).order_by(batches.c.base_offset).limit(ROWS_MAX)
    with partition.database.read() as connection:
        rows = connection.execute(query).all()
    left, first, step = partition.size_bytes, partition.first_offset, 0
    for next_offset, size_bytes, greatest in rows:
        is_old = oldest_ms is not None and greatest < oldest_ms
        is_over = bytes_max is not None and left - size_bytes >= bytes_max
        if step >= STEP_BYTES or not (is_old or is_over):
            break
        left, first, step = left - size_bytes, next_offset, step + size_bytes
    return partition.trim(first)


def _compact(partition: DatabaseLog, settings: LogSettings, now_ms: int) -> int:
    """Remove records that a later record of the same key replaces, and old tombstones.

    Memory: about 150 bytes for each key of the partition while it runs.
    """
    until = partition.flush()  # a record that may still be lost replaces nothing
    of_partition = batches.c.partition_id == partition.id
    with partition.database.read() as connection:
        if settings.compact_after_seconds is not None:
            young = batches.c.greatest_timestamp >= now_ms - int(settings.compact_after_seconds * 1000)
            # Up to the first young batch: `compacted_until` is one offset.
            first_young = connection.execute(select(func.min(batches.c.base_offset)).where(of_partition, young))
            until = min(until, first_young.scalar() or until)
        new = of_partition & (batches.c.base_offset >= partition.looked_until) & (batches.c.next_offset <= until)
        new_bytes = connection.execute(select(func.sum(batches.c.size_bytes)).where(new)).scalar() or 0
    if new_bytes < min(settings.segment_bytes, LOOK_BYTES):
        return 0
    tombstones_until_ms = now_ms - int(settings.tombstone_seconds * 1000)
    last: dict[bytes, int] = {}
    for batch in partition.fetch(partition.first_offset, until, PAGE_BYTES):
        columns = _decode(partition, batch, until)
        if columns is None:  # a damaged batch keeps everything, so no tombstone may go that takes back what it says
            tombstones_until_ms = 0
            log.warning("%s: the batch at %d is damaged and not compacted", partition.name, batch.base_offset)
        else:
            last.update((key, offset) for offset, key, _ in iterate_keys(columns) if key is not None)
    freed, group = 0, _Group(partition, until)
    for batch in partition.fetch(partition.first_offset, until, PAGE_BYTES):
        columns = _decode(partition, batch, until)
        if columns is None or batch.base_offset < partition.first_offset:
            continue
        keep = [
            key is None or (last.get(key, offset) == offset and tombstone_ms >= tombstones_until_ms)
            for offset, key, tombstone_ms in iterate_keys(columns)
        ]
        chosen = np.array(keep, np.bool_)
        bounds = zip(columns.positions[chosen].tolist(), columns.ends[chosen].tolist(), strict=True)
        freed += group.add(batch, b"".join(columns.data[start:end] for start, end in bounds))
    freed += group.write()
    partition.looked_until = until
    if freed:
        log.info("%s: compaction removed %d bytes", partition.name, freed)
    return freed


class _Group:
    """Neighbouring batches that become one, so that compacted batches do not stay small."""

    def __init__(self, partition: DatabaseLog, until: int) -> None:
        self._partition = partition
        self._until = until
        self._batches: list[Batch] = []
        self._kept: list[bytes] = []

    def add(self, batch: Batch, kept: bytes) -> int:
        """Add a batch with the records that stay; return the bytes that writing a full group freed."""
        freed, size_bytes = 0, sum(map(len, self._kept)) + len(kept)
        is_full = size_bytes > ROW_BYTES_MAX or len(self._batches) == GROUP_MAX
        if self._batches and (is_full or batch.base_offset != self._batches[-1].next_offset):
            freed = self.write()
        self._batches.append(batch)
        self._kept.append(kept)
        return freed

    def write(self) -> int:
        """Write the batches again if a record goes; return the bytes that this frees."""
        replaced, data = self._batches, b"".join(self._kept)
        self._batches, self._kept = [], []
        if len(data) == sum(len(batch.data) for batch in replaced):
            return 0
        return self._partition.rewrite(replaced, data, self._until)


def _decode(partition: DatabaseLog, batch: Batch, until: int) -> Columns | None:
    """Return the records of a batch that can be read, or `None` if a record is damaged."""
    piece = cut(batch, max(batch.base_offset, partition.first_offset), until, 2**31 - 1, least=0)
    return None if piece.reason is not None else decode_chunk(piece.data, verified=True)
