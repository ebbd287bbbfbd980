"""Which partition of its topic a row goes to (option `partitioner`)."""

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Kind = Literal["key", "spread"]
ANY_PARTITION = -1
"""Partition number of a row that names no partition."""
GetKeys = Callable[[], Sequence[bytes | None]]


class Partitioner:
    """Chooses for the rows of one task, chunk after chunk: the same chunks go to the same partitions each time.

    A row goes to the partition that it names. For the other rows, `key` chooses the partition by the CRC-32 of the key,
    as the server and the command line do, so that a key is in one partition whichever client published it. The rows of
    a chunk without a key go to one partition, those of the next chunk to the next. `spread` assigns rows one by one.

    Args:
        turn: the first partition of a round; tasks have different ones.
    """

    def __init__(self, kind: Kind = "key", turn: int = 0) -> None:
        self._kind = kind
        self._first = self._turn = turn
        self._dealt: dict[str, int] = {}
        """Number of rows that were assigned, by topic."""

    def next(self, count: int) -> int:
        """Return the partition whose turn it is, of `count`."""
        self._turn += 1
        return self._turn % count

    def choose(self, topic: str, rows: int, count: int, named: I64 | None, keys: GetKeys | None) -> I64:
        """Return the partitions of some rows for a topic that has `count`.

        Args:
            named: what the rows say themselves, or `ANY_PARTITION`; it is not looked at whether there are such.
            keys: gives the keys of the rows.
        """
        if self._kind == "spread":
            return self._deal(topic, rows, count, named)
        turn = self.next(count)
        targets = np.full(rows, turn, np.int64) if keys is None or count == 1 else _of_keys(keys(), count, turn)
        return targets if named is None else np.where(named == ANY_PARTITION, targets, named)

    def _deal(self, topic: str, rows: int, count: int, named: I64 | None) -> I64:
        free = np.ones(rows, bool) if named is None else named == ANY_PARTITION
        dealt, more = self._dealt.get(topic, 0), int(free.sum())
        self._dealt[topic] = dealt + more
        targets = np.zeros(rows, np.int64) if named is None else named.copy()
        targets[free] = (self._first + dealt + np.arange(more)) % count
        return targets


def _of_keys(keys: Sequence[bytes | None], count: int, without: int) -> I64:
    """Return the partitions of keys, `without` for none."""
    crc32 = zlib.crc32
    try:
        return np.fromiter(map(crc32, keys), np.int64, len(keys)) % count  # type: ignore[arg-type]  # None raises
    except TypeError:
        return np.fromiter((without if key is None else crc32(key) % count for key in keys), np.int64, len(keys))
