"""The newest records of each partition, kept in memory: whoever reads at the tail never asks the engine.

Memory is bounded twice: by `PARTITION_BYTES_MAX` for one partition, and by the budget that all partitions share. Over
the budget the partition that was written longest ago gives up its oldest batches.
"""

from bisect import bisect_right
from collections import OrderedDict

from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk

PARTITION_BYTES_MAX = 8 * 2**20
"""Most that one partition keeps."""
BATCH_BYTES = 512
"""About what a batch costs in memory beside its bytes."""
FORGOTTEN_MAX = 1024
"""Places of batches that are gone, before the lists are cut."""


class TailBudget:
    """The budget of bytes for the tails of all partitions; 0 keeps no batch."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._tails: OrderedDict[Tail, None] = OrderedDict()

    def grow(self, tail: "Tail", size: int) -> None:
        """Record that a tail holds `size` bytes more; the tails written longest ago make room."""
        tails = self._tails
        tails[tail] = None
        tails.move_to_end(tail)
        self.bytes_held += size
        while self.bytes_held > self.bytes_max:
            oldest = next(iter(tails))
            oldest.forget_first()
            if not oldest.bytes_held:
                tails.pop(oldest, None)

    def shrink(self, tail: "Tail", size: int) -> None:
        """Record that a tail holds `size` bytes less."""
        self.bytes_held -= size
        if not tail.bytes_held:
            self._tails.pop(tail, None)


class Tail:
    """The last batches of one partition, as they were appended, without a gap between them."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._batches: list[RecordBatch | None] = []
        self._bases: list[int] = []
        self._first = 0
        """Place of the oldest batch that is still kept."""
        self._end = -1
        """The offset behind the last batch."""
        self.bytes_held = 0

    def add(self, batch: RecordBatch) -> None:
        """Keep a batch that was appended; batches that do not end where it begins are forgotten."""
        if not self._budget.bytes_max:
            return
        if batch.base_offset != self._end:
            self.cut(batch.base_offset)
            if batch.base_offset != self._end:
                self.clear()
        self._batches.append(batch)
        self._bases.append(batch.base_offset)
        self._end = batch.base_offset + batch.count
        size = len(batch.data) + BATCH_BYTES
        self.bytes_held += size
        self._budget.grow(self, size)
        while self.bytes_held > PARTITION_BYTES_MAX:
            self.forget_first()

    def read(self, offset: int, bytes_max: int, end_offset: int) -> Chunk | None:
        """Return the records from `offset` on, below `end_offset`, that fit `bytes_max`: at least one.

        `None` means that the record at `offset` is not kept. `offset` is below `end_offset`.
        """
        place = bisect_right(self._bases, offset, self._first) - 1
        if place < self._first or offset >= self._end:
            return None
        parts: list[bytes | bytearray | memoryview] = []
        at, room = offset, bytes_max
        for number in range(place, len(self._batches)):
            batch = self._batches[number]
            assert batch is not None
            base, count, data = batch.base_offset, batch.count, batch.data
            first, last = at - base, min(end_offset - base, count)
            if last <= first:
                break
            positions = batch.positions
            start = int(positions[first])
            if last < count or len(data) - start > room:
                fitting = bisect_right(positions, start + room, first, last + (last < count)) - 1
                if last == count and len(data) - start <= room:
                    fitting = count
                fitting = max(fitting, first + (not parts))
                stop = int(positions[fitting]) if fitting < count else len(data)
                if stop > start:
                    parts.append(memoryview(data)[start:stop])
                at = base + fitting
                break
            parts.append(memoryview(data)[start:] if start else data)
            room -= len(data) - start
            at = base + count
        return Chunk(bytes(parts[0]) if len(parts) == 1 else b"".join(parts), offset, at)

    def cut(self, next_offset: int) -> None:
        """Drop the batches that reach beyond `next_offset`: their offsets are assigned again."""
        while self._end > next_offset:
            if self._first == len(self._batches):
                self.clear()
                return
            batch = self._batches.pop()
            self._bases.pop()
            assert batch is not None
            self._end = batch.base_offset
            self._release(batch)

    def forget_first(self) -> None:
        """Drop the oldest batch."""
        batch = self._batches[self._first]
        assert batch is not None
        self._batches[self._first] = None
        self._first += 1
        if self._first == len(self._batches):
            self._batches, self._bases, self._first = [], [], 0
        elif self._first >= FORGOTTEN_MAX:
            del self._batches[: self._first], self._bases[: self._first]
            self._first = 0
        self._release(batch)

    def clear(self) -> None:
        """Drop all batches."""
        size, self.bytes_held = self.bytes_held, 0
        self._batches, self._bases, self._first, self._end = [], [], 0, -1
        self._budget.shrink(self, size)

    def _release(self, batch: RecordBatch) -> None:
        size = len(batch.data) + BATCH_BYTES
        self.bytes_held -= size
        self._budget.shrink(self, size)
