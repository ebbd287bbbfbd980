"""The segments of a partition taken as one: which of them holds an offset, where in it, and reading across.

Nothing here knows what is durable: that is the log's business. The appending thread and one reader may use the object
at the same time: `lock` guards what they share and is never held while the disk is asked for records. All that removes
or replaces segments happens while no reader is inside.
"""

import threading
from bisect import bisect_right

from babelbus.arrays import np
from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at, size_of
from babelbus.records.format import RECORD_BYTES_MIN, CorruptRecordError
from babelbus.storage.contract import Chunk, Shared
from babelbus.storage.disk.index import BLOCK_RECORDS
from babelbus.storage.disk.reading import SegmentReader
from babelbus.storage.disk.recovery import replace_from
from babelbus.storage.disk.segment import Segment
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.storage.files import FileSystem, LocalFiles

PLACES_MAX = 4096
"""Offsets whose position is remembered: the ends of the last appends and reads, where the next reads begin."""
OPEN_SEGMENTS_MAX = 16
"""Sealed segments whose file stays open."""


class Segments:
    """The segments of a partition's folder; `begin` the first segment of an empty folder.

    Invariant: `all` are sorted by base offset, the last one is open for appending, and each ends where the next begins.

    Attributes:
        all: the segments; `bases` are their base offsets.
        active: the last one.
        unflushed: those that were sealed since the last `note_flushed`.
        unflushed_folder: whether a new segment's name may not be durable yet.
    """

    def __init__(self, files: FileSystem, folder: str, segments: list[Segment], lock: threading.RLock) -> None:
        self._files = files
        self._lock = lock
        self._folder = folder
        self.all = segments
        self.bases = [segment.base_offset for segment in segments]
        self.active: Segment
        if segments:
            self.active = segments[-1]
        self.unflushed: list[Segment] = []
        self.unflushed_folder = False
        self._open: list[Segment] = []
        self._places: dict[int, tuple[Segment, int]] = {}

    # -- growing -----------------------------------------------------------------------------------------------------

    def begin(self, base_offset: int, *, durable: bool = True) -> None:
        """Add a new segment and make it the active one.

        Raises:
            OSError: the disk refused; the old one goes on.
        """
        segment = Segment(self._files, self._folder, base_offset)
        segment.create(durable=durable)
        self.all.append(segment)
        self.bases.append(base_offset)
        self.active = segment

    def roll(self) -> None:
        """Begin the next segment, whose name the next flush makes durable, and seal the active one.

        Raises:
            OSError: the disk refused; the old one goes on.
        """
        active = self.active
        active.trim()  # first: a segment with another one behind it ends where its file does
        self.begin(active.next_offset, durable=False)
        self.unflushed_folder = True
        active.seal()
        self.unflushed.append(active)

    def note_flushed(self, segments: list[Segment]) -> None:
        """Record sealed segments are durable: their files need not stay open for it."""
        self.unflushed = [segment for segment in self.unflushed if segment not in segments]
        for segment in segments:
            if segment not in self._open:
                segment.close()

    def remember(self, offset: int, segment: Segment, position: int) -> None:
        """Keep the position of an offset that is likely to be read next."""
        places = self._places
        if len(places) >= PLACES_MAX:
            for old in list(places)[: PLACES_MAX // 2]:
                del places[old]
        places[offset] = (segment, position)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, end_offset: int | None) -> Chunk:
        """Return stored records from the first one at or after `offset` on; see `contract.PartitionLog`."""
        with self._lock:
            next_offset = self.active.next_offset
            end = next_offset if end_offset is None else min(end_offset, next_offset)
            if not self.bases[0] <= offset <= next_offset:
                raise OffsetOutOfRangeError(offset, self.bases[0], next_offset)
            if offset >= end:
                return Chunk(b"", offset, offset)
            segment = self.all[bisect_right(self.bases, offset) - 1]
            reader = segment if segment.sealed else segment.view()
        position, found = self._locate(segment, reader, offset)
        if found >= end:
            return Chunk(b"", end, end)
        stop = reader.size_bytes
        try:
            if end < reader.next_offset:
                stop = self._locate(segment, reader, end)[0]
        except CorruptRecordError:  # those in front of it are good
            chunk = _cut_chunk(reader.read(position, found, bytes_max, stop), end)
        else:
            if stop <= position:
                if end < reader.next_offset:  # compaction removed all from `offset` to `end`
                    return Chunk(b"", end, end)
                raise reader.corrupt(offset)  # the segment has lost its end
            chunk = reader.read(position, found, bytes_max, stop)
        if chunk.data:
            with self._lock:
                self.remember(chunk.next_offset, segment, position + len(chunk.data))
        return chunk

    def share(self, offset: int) -> Shared | None:
        """Return where another process reads the records from `offset` on; see `contract.PartitionLog`."""
        if not isinstance(self._files, LocalFiles):
            return None
        with self._lock:
            next_offset = self.active.next_offset
            if not self.bases[0] <= offset <= next_offset:
                raise OffsetOutOfRangeError(offset, self.bases[0], next_offset)
            segment = self.all[bisect_right(self.bases, offset) - 1]
            reader = segment if segment.sealed else segment.view()
        if offset >= reader.next_offset:
            return None
        position, found = self._locate(segment, reader, offset)
        file = self._files.share(f"{segment.path}.log")
        size, blocks = reader.size_bytes, reader.index.blocks_from(position)
        return Shared(file, position, size, found, reader.next_offset, blocks, BLOCK_RECORDS)

    def _locate(self, segment: Segment, reader: SegmentReader, offset: int) -> tuple[int, int]:
        """Return position and offset of the first record at or after `offset`, which the segment holds."""
        place = self._places.get(offset)
        if place is not None and place[0] is segment:
            return place[1], offset
        if reader is segment:
            self._touch(segment)
        return reader.locate(offset)

    def _touch(self, segment: Segment) -> None:
        """Keep the files of the sealed segments that were read last open, and no others."""
        if segment in self._open:
            return
        self._open.append(segment)
        if len(self._open) > OPEN_SEGMENTS_MAX:
            oldest = self._open.pop(0)
            if oldest not in self.unflushed:
                oldest.close()

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record at or after a time (ms); see `contract.PartitionLog`."""
        with self._lock:
            segments: list[SegmentReader] = [*self.all[:-1], self.active.view()]
        for segment in segments:
            if segment.index.greatest_timestamp >= timestamp:
                found = segment.find_time(timestamp)
                if found is not None:
                    return found
        return None

    # -- removing and replacing --------------------------------------------------------------------------------------

    def cut(self, next_offset: int) -> None:
        """Remove the records from `next_offset` on; what is left of the active segment is not flushed.

        Raises:
            OSError: the disk refused; it may be half done, and asking again is right.
        """
        self._places.clear()
        while len(self.all) > 1 and self.bases[-1] >= next_offset:
            self._drop_last()
        self._files.flush_folder(self._folder)  # before a cut that would make them look as if they followed a hole
        last = self.active
        dense = last.dense
        if next_offset < last.next_offset:
            last.cut(_position_to_cut(last, next_offset))
        if last.sealed or not dense:  # only a segment without gaps is appended to
            last.seal()
            if last.size_bytes:
                self.begin(last.next_offset)
            else:
                last.sealed = False

    def _drop_last(self) -> None:
        segment = self.all.pop()
        self.bases.pop()
        self.active = self.all[-1]
        self.unflushed = [other for other in self.unflushed if other is not segment]
        segment.remove()

    def drop_first(self) -> None:
        """Remove the oldest segment, which is sealed.

        Raises:
            OSError: the disk refused; it is gone from here all the same.
        """
        with self._lock:
            segment = self.all[0]
            self.unflushed = [other for other in self.unflushed if other is not segment]
            self._open = [other for other in self._open if other is not segment]
            del self.all[0], self.bases[0]
            self._forget_places(segment)
        segment.remove()
        self._files.flush_folder(self._folder)  # one after the other, so that what a crash leaves has no hole

    def swap(self, segment: Segment, source: str) -> None:
        """Replace a segment by the file `source`, the same records without some.

        Raises:
            OSError: the disk refused; the segment is the old or the new one.
        """
        with self._lock:
            self._forget_places(segment)
        segment.swap(source)

    def _forget_places(self, segment: Segment) -> None:
        self._places = {at: place for at, place in self._places.items() if place[0] is not segment}

    def begin_again(self, base_offset: int, now_ms: int) -> None:
        """Replace everything from an offset on by the rescued records (`recovery.RESCUED_SUFFIX`).

        Raises:
            OSError: the disk refused; may be done again.
        """
        for segment in self.all:
            if segment.base_offset >= base_offset:
                segment.close()
        self._places.clear()
        replace_from(self._files, self._folder, base_offset)
        fresh = Segment(self._files, self._folder, base_offset)
        fresh.recover(0, base_offset)
        kept = [segment for segment in self.all if segment.base_offset < base_offset]
        if kept and (kept[-1].next_offset > base_offset or not kept[-1].sealed):
            _end_before(kept[-1], base_offset)
        fresh.created_ms = now_ms if fresh.size_bytes else 0
        self.all = [*kept, fresh]
        self.bases = [segment.base_offset for segment in self.all]
        self.active = fresh
        self.unflushed = []
        self._open = [segment for segment in self._open if segment in kept]

    def close(self) -> None:
        """Close the files."""
        for segment in self.all:
            segment.close()


def _end_before(segment: Segment, base_offset: int) -> None:
    """End the segment in front of the rescued records where they begin; may be done again."""
    try:
        if segment.next_offset > base_offset:
            segment.cut(segment.locate(base_offset)[0])
        segment.flush()  # of the cut alone: what is in front of it was durable before
    except CorruptRecordError:  # not readable from there on: then it stays as it is
        segment.recover(0, segment.base_offset, base_offset)
    segment.seal()


def _position_to_cut(segment: Segment, offset: int) -> int:
    """Return where the record `offset` begins, also when it is damaged: behind the one in front of it."""
    try:
        return segment.locate(offset)[0]
    except CorruptRecordError:
        if offset == segment.base_offset:
            return 0
        position, found = segment.locate(offset - 1)
        if found != offset - 1:
            raise
        return position + size_of(segment.pread(RECORD_BYTES_MIN, position))


def _cut_chunk(chunk: Chunk, end_offset: int) -> Chunk:
    """Return the records of a chunk below `end_offset`."""
    positions, _ = find_positions(chunk.data, 0, len(chunk.data))
    offsets = offsets_at(chunk.data, positions).tolist()
    count = int(np.searchsorted(offsets, end_offset))
    if count == len(offsets):
        return chunk
    if count == 0:
        return Chunk(b"", end_offset, end_offset)
    return Chunk(chunk.data[: int(positions[count])], chunk.base_offset, offsets[count - 1] + 1)
