"""Retention and compaction of a partition in a stream (docs/cluster.md, "Retention and compaction").

Messages of a stream cannot be changed. Retention purges whole frames from the front. Compaction writes the records that
stay, up to an offset, into new frames under a subject of its own. It counts when the bounds that name that subject are
stored; then the replaced frames are purged.
"""

import logging
from collections.abc import Iterator

import msgspec
import numpy as np

from babelbus.records.columns import Columns, decode_chunk, iterate_keys
from babelbus.records.format import CorruptRecordError
from babelbus.storage.jetstream.frame import Head, Kind
from babelbus.storage.jetstream.log import FRAME_BYTES
from babelbus.storage.jetstream.places import Places
from babelbus.storage.jetstream.reading import ReadableLog

log = logging.getLogger(__name__)

LOOK_BYTES = 2**20
"""Compaction looks again when this much is new, or a topic's `segment_bytes` if that is less."""
SHARE = 4
"""It also waits until the new part is a quarter of what the last compaction left: all of that is written again."""


class StreamLog(ReadableLog):
    """A partition in a stream; see `contract.PartitionLog`."""

    def trim(self, first_offset: int) -> int:
        """Remove whole frames in front of an offset; see `contract.PartitionLog`."""
        with self._changing:
            before = self.size_bytes
            if not self.first_offset < first_offset <= self.end:
                return 0
            _, frame = self.locate(lambda head, left: head.next_offset > first_offset)
            self._begin_with(frame)
            return before - self.size_bytes

    def _begin_with(self, frame: Head | None) -> None:
        """Remove what is in front of a frame, or everything."""
        bounds = self.bounds
        changes = {"first_offset": bounds.next_offset if frame is None else frame.base_offset}
        if changes["first_offset"] <= bounds.first_offset:
            return
        in_compacted = bounds.generation and frame is not None and frame.base_offset < bounds.compacted_until
        if in_compacted:
            assert frame is not None
            changes |= {"compacted_from": frame.sequence, "compacted_from_bytes": frame.bytes_before}
        else:
            changes |= {
                "first_sequence": bounds.scanned + 1 if frame is None else frame.sequence,
                "first_bytes": bounds.end_bytes if frame is None else frame.bytes_before,
            }
            if bounds.generation:
                changes |= {"compacted_from": bounds.compacted_to, "compacted_from_bytes": bounds.compacted_bytes}
        self.write_bounds(**changes)
        if bounds.generation:
            self.compacted.cut_front(changes["compacted_from"])
            self.purge(f"compacted.{bounds.generation}", changes["compacted_from"])
        if not in_compacted:
            self.records.cut_front(changes["first_sequence"])
            self.purge("", changes["first_sequence"])

    def clean(self, now_ms: int) -> int:
        """Run retention and compaction; return how many bytes became free. May take long.

        Raises:
            StreamAlteredError: somebody altered the stream.
            StorageError: NATS refused, or did not answer; the next call does the rest.
        """
        self.nats.call(self.shard.check())
        before, settings = self.size_bytes, self.settings
        with self._changing:
            if settings.retention_seconds is not None:
                oldest_ms = now_ms - int(settings.retention_seconds * 1000)
                self._begin_with(self.locate(lambda head, left: head.latest_timestamp >= oldest_ms)[1])
            if settings.retention_bytes is not None:
                bytes_max = settings.retention_bytes
                kept, _ = self.locate(lambda head, left: left < bytes_max)
                if kept is not None:
                    self._begin_with(kept)
            if before != self.size_bytes:
                log.info("%s: retention removed %d bytes", self.name, before - self.size_bytes)
        if settings.cleanup == "compact":
            try:
                self._compact(now_ms)
            except CorruptRecordError as error:
                log.error("%s: not compacted: %s", self.name, error)
        return max(before - self.size_bytes, 0)

    # -- compaction --------------------------------------------------------------------------------------------------

    def _compact(self, now_ms: int) -> None:
        """Write the last record of each key again, and remove the rest.

        Memory: about 150 bytes for each key of the partition while it runs.
        """
        settings, bounds = self.settings, self.bounds
        until, until_sequence, until_bytes = bounds.next_offset, bounds.scanned + 1, bounds.end_bytes
        if settings.compact_after_seconds is not None:
            oldest_ms = now_ms - int(settings.compact_after_seconds * 1000)
            _, young = self.locate(lambda head, left: head.latest_timestamp >= oldest_ms)
            if young is not None:
                until, until_sequence, until_bytes = young.base_offset, young.sequence, young.bytes_before
        left_bytes = bounds.compacted_bytes - bounds.compacted_from_bytes
        enough = max(min(settings.segment_bytes, LOOK_BYTES), left_bytes // SHARE)
        if until <= bounds.compacted_until or until_bytes - bounds.first_bytes < enough:
            return
        tombstones_until_ms = now_ms - int(settings.tombstone_seconds * 1000)
        last: dict[bytes, int] = {}
        for columns, _ in self._columns(bounds.first_offset, until):
            last.update((key, offset) for offset, key, _ in iterate_keys(columns) if key is not None)
        generation = bounds.generation + 1
        area = Places(f"{self.subject}.compacted.{generation}")
        kept: list[bytes] = []
        sequences: list[int] = []
        base_offset = covered = bounds.first_offset
        kept_bytes = size_bytes = latest = 0
        self.purge(f"compacted.{generation}", 2**62)  # what a crash left of an attempt

        def write() -> None:
            head = Head(Kind.RECORDS, self._topic, self._partition, 0, base_offset, covered, size_bytes, latest)
            sequences.append(self.write(Kind.RECORDS, f"compacted.{generation}", b"".join(kept), head))
            area.add(msgspec.structs.replace(head, sequence=sequences[-1]), always=True)

        for columns, next_offset in self._columns(bounds.first_offset, until):
            keep = np.array(
                [
                    key is None or (last.get(key, offset) == offset and tombstone_ms >= tombstones_until_ms)
                    for offset, key, tombstone_ms in iterate_keys(columns)
                ],
                np.bool_,
            )
            places = zip(columns.positions[keep].tolist(), columns.ends[keep].tolist(), strict=True)
            staying = b"".join([bytes(columns.data[start:end]) for start, end in places])
            if kept and kept_bytes + len(staying) > FRAME_BYTES:
                write()
                base_offset, size_bytes = covered, size_bytes + kept_bytes
                kept, kept_bytes = [], 0
            kept.append(staying)
            kept_bytes += len(staying)
            covered, latest = next_offset, max(latest, int(columns.timestamps.max(initial=0)))
        write()
        size_bytes += kept_bytes
        area.first, area.end = sequences[0], sequences[-1] + 1
        with self._changing:
            if self.bounds.first_offset != bounds.first_offset:
                return  # retention came in between: the next time
            freed = self.size_bytes
            before, self.compacted = self.compacted, area
            try:
                self.write_bounds(
                    first_sequence=until_sequence,
                    first_bytes=until_bytes,
                    compacted_until=until,
                    generation=generation,
                    compacted_from=area.first,
                    compacted_to=area.end,
                    compacted_from_bytes=0,
                    compacted_bytes=size_bytes,
                )
            except BaseException:
                self.compacted = before
                raise
            self.records.cut_front(until_sequence)
            self.purge("", until_sequence)
            if bounds.generation:
                self.purge(f"compacted.{bounds.generation}", before.end)
        log.info("%s: compaction removed %d bytes", self.name, freed - self.size_bytes)

    def _columns(self, offset: int, until: int) -> Iterator[tuple[Columns, int]]:
        """Yield the records of a range in chunks, with the offset behind each.

        Raises:
            CorruptRecordError: a record is damaged.
        """
        while offset < until:
            chunk = self.read(offset, FRAME_BYTES, until)
            offset = chunk.next_offset
            yield decode_chunk(chunk.data, verified=True), offset
