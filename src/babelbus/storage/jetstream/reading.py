"""Reading a partition in a stream: from any offset, by time, in batches of direct gets; every byte is checked."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import Chunk
from babelbus.storage.fileless import READ_BYTES_MAX
from babelbus.storage.jetstream.frame import Frame, Head, cut
from babelbus.storage.jetstream.log import WritableLog
from babelbus.storage.jetstream.places import Places

READ_BYTES_MIN = 2**16
HINTS_MAX = 64


class FrameCache:
    """The frames that readers stopped in, by subject and sequence: the next read goes on there."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_held = 0
        self._lock = threading.Lock()
        self._frames: OrderedDict[tuple[str, int], Frame] = OrderedDict()

    def get(self, subject: str, sequence: int) -> Frame | None:
        """Return a frame that is kept."""
        with self._lock:
            return self._frames.get((subject, sequence))

    def put(self, subject: str, frame: Frame) -> None:
        """Keep a frame; those kept longest make room."""
        key = (subject, frame.head.sequence)
        with self._lock:
            if key in self._frames:
                return
            self._frames[key] = frame
            self._bytes_held += frame.size_bytes
            while self._bytes_held > self._bytes_max and len(self._frames) > 1:
                self._bytes_held -= self._frames.popitem(last=False)[1].size_bytes


class ReadableLog(WritableLog):
    """A partition that can be read; see `contract.PartitionLog`."""

    def __init__(self, cache: FrameCache, *arguments: Any) -> None:
        self._cache = cache
        self._hints: OrderedDict[tuple[str, int], int] = OrderedDict()
        """The sequences where reads ended, by subject and offset: the next read begins there."""
        super().__init__(*arguments)

    @property
    def is_owned(self) -> bool:  # type: ignore[override]
        """Whether the lease is valid, and nobody else has taken the stream."""
        return self.shard.is_owned

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records, all checked; see `contract.PartitionLog`.

        Raises:
            StaleWriterError, NatsAwayError: another server may write the partition, so what is read may be old.
        """
        self.shard.check_owner()
        return super().read(offset, bytes_max, end_offset)

    def _collect(self, offset: int, end_offset: int, bytes_max: int) -> Chunk:
        at, room, base_offset = offset, bytes_max, -1
        parts: list[bytes] = []
        reason = "its frame is missing"
        sequence = 0
        for frame in self._frames_from(offset, end_offset, bytes_max):
            if isinstance(frame, int):
                sequence, reason = frame, "the frame there is damaged, or not of Babelbus"
                continue
            head = frame.head
            if head.base_offset > at or head.next_offset <= at:
                break
            if frame.data is None:
                sequence, reason = head.sequence, "the frame there does not match its CRC"
                break
            data, begins, at = cut(frame, at, end_offset, room, least=not parts)
            if data:
                base_offset = base_offset if parts else begins
                parts.append(data)
                room -= len(data)
            if at < head.next_offset:
                self._cache.put(self._places(at).subject, frame)
                self._hint(at, head.sequence)
                break
            self._hint(at, head.sequence + 1)
            if at >= end_offset or (parts and room <= 0):
                break
        if not parts and at < end_offset:
            where = f"stream {self.shard.stream}" + (f", sequence {sequence}" if sequence else "")
            raise CorruptRecordError(0, reason, path=where, offset=at)
        return Chunk(parts[0] if len(parts) == 1 else b"".join(parts), base_offset if parts else end_offset, at)

    def _places(self, offset: int) -> Places:
        bounds = self.bounds
        return self.compacted if bounds.generation and offset < bounds.compacted_until else self.records

    def _frames_from(self, offset: int, end: int, bytes_max: int) -> "Iterator[Frame | int]":
        """Yield the frames from the one that holds an offset on; the sequence of a message that holds no frame."""
        at = offset
        page_bytes = max(READ_BYTES_MIN, min(bytes_max, READ_BYTES_MAX))
        while at < end:
            places = self._places(at)
            stop = min(end, self.bounds.compacted_until) if places is self.compacted else end
            sequence = self._sequence_of(places, at)
            kept = self._cache.get(places.subject, sequence)
            if kept is not None:
                yield kept
                at, sequence = kept.head.next_offset, sequence + 1
            if at < stop:
                for found in self.messages(places, sequence, places.end, page_bytes):
                    yield found
                    if isinstance(found, Frame):
                        at = found.head.next_offset
                        if at >= stop:
                            break
                if at < stop:
                    return

    def _hint(self, offset: int, sequence: int) -> None:
        self._hints[self._places(offset).subject, offset] = sequence
        while len(self._hints) > HINTS_MAX:
            try:
                self._hints.popitem(last=False)
            except KeyError:
                return

    def _sequence_of(self, places: Places, offset: int) -> int:
        """Return a sequence from which on the next frame holds an offset."""
        hint = self._hints.get((places.subject, offset))
        if hint is not None and hint >= places.first:
            return hint
        before, after = places.find(lambda head: head.next_offset > offset, self._looker(places))
        if after is not None and after.base_offset <= offset:
            return after.sequence
        return places.first if before is None else before.sequence + 1  # what lies between is damaged or missing

    def _looker(self, places: Places) -> Callable[[int, int], Head | None]:
        def look(sequence: int, end: int) -> Head | None:
            frame = next(self.frames(places, sequence, end, 1), None)
            return None if frame is None else frame.head

        return look

    def locate(self, condition: Callable[[Head, int], bool]) -> tuple[Head | None, Head | None]:
        """Return the last frame in front of the first one that fulfils a condition, and that one.

        The condition is asked with a head and the bytes of records from that frame on.
        """
        bounds, last = self.bounds, None
        records_bytes = bounds.end_bytes - bounds.first_bytes
        areas = [(self.compacted, bounds.compacted_bytes + records_bytes)] if bounds.generation else []
        for places, end_bytes in [*areas, (self.records, bounds.end_bytes)]:
            before, after = places.find(
                lambda head, end_bytes=end_bytes: condition(head, end_bytes - head.bytes_before),  # type: ignore[misc]
                self._looker(places),
            )
            last = before or last
            if after is not None:
                return last, after
        return last, None

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record at or after a time, or of a damaged record that may be it."""
        _, frame = self.locate(lambda head, left: head.latest_timestamp >= timestamp)
        if frame is None:
            return None
        return self.find_time_between(timestamp, max(self.first_offset, frame.base_offset), self.end)
