"""Which batches a producer has stored, so that a resend gets the first answer again (docs/storage.md, producers)."""

from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec

from babelbus.records.record import StoredBatch

BATCHES_MAX = 64
"""Batches that are remembered of each producer: more than a client has on the way at once."""
PRODUCERS_MAX = 10_000
"""Producers that are remembered in a partition; the one that was silent for longest is forgotten first."""


class ProducerBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch that was stored: its first sequence number, how many records, and where they begin."""

    first_sequence: int
    count: int
    base_offset: int


class Producers:
    """The last batches of each producer of one partition. Bounded; rebuilt from the log's own headers."""

    def __init__(self) -> None:
        self._batches: OrderedDict[int, deque[ProducerBatch]] = OrderedDict()

    def add(self, producer_id: int, first_sequence: int, count: int, base_offset: int) -> None:
        """Record a batch that was stored, unless it is known."""
        batches = self._batches.get(producer_id)
        if batches is None:
            batches = self._batches[producer_id] = deque(maxlen=BATCHES_MAX)
            if len(self._batches) > PRODUCERS_MAX:
                self._batches.popitem(last=False)
        else:
            self._batches.move_to_end(producer_id)
        if not batches or batches[-1].base_offset < base_offset:
            batches.append(ProducerBatch(first_sequence, count, base_offset))

    def restore(self, batches: list[StoredBatch]) -> None:
        """Add what a scan of the log found."""
        for batch in batches:
            self.add(batch.producer_id, batch.first_sequence, batch.count, batch.base_offset)

    def forget_from(self, next_offset: int) -> None:
        """Drop the batches that a truncation to `next_offset` cut."""
        for producer_id, batches in list(self._batches.items()):
            kept = [batch for batch in batches if batch.base_offset + batch.count <= next_offset]
            if kept:
                self._batches[producer_id] = deque(kept, maxlen=BATCHES_MAX)
            else:
                del self._batches[producer_id]

    def batches(self, producer_id: int) -> Iterator[ProducerBatch]:
        """Return what is remembered of a producer, oldest first."""
        return iter(self._batches.get(producer_id, ()))

    def next_sequence(self, producer_id: int) -> int:
        """Return the sequence number behind the last batch of a producer, -1 for a producer that is not known."""
        batches = self._batches.get(producer_id)
        return batches[-1].first_sequence + batches[-1].count if batches else -1

    def snapshot(self) -> dict[int, list[ProducerBatch]]:
        """Return everything, in a form that a checkpoint can hold."""
        return {producer_id: list(batches) for producer_id, batches in self._batches.items()}

    def load(self, snapshot: dict[int, list[ProducerBatch]]) -> None:
        """Replace everything by what a checkpoint held."""
        self._batches = OrderedDict(
            (producer_id, deque(batches, maxlen=BATCHES_MAX)) for producer_id, batches in snapshot.items()
        )
