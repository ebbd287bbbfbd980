"""Which offsets of which partitions are read, and in how many pieces; plain functions over numbers."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

Offsets = dict[str, dict[int, int]]
"""Topic -> partition -> offset."""
At = tuple[str, int]
"""Topic and partition."""
NOTE = ","
"""Prefix of the entries beside the topics in an offset of Spark's; no topic's name has it."""
IDS = f"{NOTE}ids"
"""Which ids the topics had."""
LOST = f"{NOTE}lost"
"""Number of offsets that were gone when the query came to them, since its beginning."""
SHARE_BYTES_MIN = 8 * 2**20
"""Less than this is read by one core before another one has begun."""


class Bounds(msgspec.Struct, frozen=True):
    """The contents of a partition: offsets `first` to `end` (excluded), in about `size_bytes` bytes.

    `identity` changes when the topic is removed and made again; empty where that cannot be seen. The part
    after a `#` holds for one folder on one machine only.
    """

    first: int
    end: int
    size_bytes: int
    identity: str = ""

    @property
    def record_bytes(self) -> float:
        """Size of a record on the average; compaction makes it look smaller, per offset."""
        return max(self.size_bytes, 1) / max(self.end - self.first, 1)

    @property
    def id(self) -> str:
        """The part of `identity` that holds everywhere: the id of the topic from the server, empty if it has none."""
        return self.identity.partition("#")[0]


class Span(msgspec.Struct, frozen=True):
    """The offsets `start` to `end` (excluded) of one partition, about `size_bytes` bytes."""

    topic: str
    partition: int
    start: int
    end: int
    size_bytes: int

    def __len__(self) -> int:
        return self.end - self.start


def split(span: Span, records_max: int) -> list[Span]:
    """Return a span as equal pieces of `records_max` offsets at the most."""
    pieces = -(-len(span) // max(records_max, 1))
    edges = [span.start + len(span) * number // pieces for number in range(pieces + 1)]
    return [Span(span.topic, span.partition, start, end, span.size_bytes // pieces) for start, end in pairwise(edges)]


def make_tasks(
    spans: Iterable[Span],
    *,
    target_bytes: int,
    records_max: int | None = None,
    tasks_min: int | None = None,
    cores: int = 1,
) -> list[list[Span]]:
    """Return spans as tasks: large spans are split, small spans share a task.

    A task costs Spark about 35 ms whatever it does, so there is not one for each partition. A piece has `target_bytes`
    at the most, fewer if `tasks_min` tasks are wanted, and with `records_max` each task reads that many at the most.
    Larger work keeps all `cores` busy until the end: five equal tasks take two cores as long as six.
    """
    spans = [span for span in spans if len(span) > 0]
    total = sum(span.size_bytes for span in spans)
    needed = -(-total // target_bytes)
    count = max(needed, tasks_min or 1, min(cores, total // SHARE_BYTES_MIN))
    if count > cores:
        count = -(-count // cores) * cores
    if count > needed:
        target_bytes = max(-(-total // count), 1)
    tasks: list[list[Span]] = []
    open_bytes = open_records = 0
    for span in spans:
        count = max(1, -(-span.size_bytes // target_bytes))
        most = -(-len(span) // count)
        for piece in split(span, most if records_max is None else min(most, records_max)):
            fits = tasks and open_bytes + piece.size_bytes <= target_bytes
            if fits and (records_max is None or open_records + len(piece) <= records_max):
                tasks[-1].append(piece)
            else:
                tasks.append([piece])
                open_bytes = open_records = 0
            open_bytes += piece.size_bytes
            open_records += len(piece)
    return tasks


def limit(
    start: Mapping[At, int], end: Mapping[At, int], most: float, record_bytes: Mapping[At, float] | None = None
) -> dict[At, int]:
    """Return the end of reading in each partition, about `most` offsets (or bytes) in all, in proportion to backlogs.

    Each partition with a backlog gets at least one offset, as in Spark's Kafka source, so that none starves.
    """
    sizes = record_bytes or {}
    total = sum((end[at] - start[at]) * sizes.get(at, 1) for at in end)
    if total <= most:
        return dict(end)
    limited = {}
    for at, until in end.items():
        waiting = until - start[at]
        limited[at] = start[at] + max(int(waiting * most / total), min(waiting, 1))
    return limited
