"""The parts of partitions that a command reads: from an offset or a time, up to the end or without end."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.target import Target

if TYPE_CHECKING:
    from babelbus.client import BlockingClient
    from babelbus.records.record import Record


class Span(msgspec.Struct, frozen=True):
    """A part of one partition, from `offset` or `timestamp` on (from its first record with neither).

    `count_max` is the number of records from `offset` (or the beginning) on when the span was built; `None`: unknown.
    """

    partition: int
    offset: int | None = None
    timestamp: int | None = None
    count_max: int | None = None

    def records(self, client: "BlockingClient", topic: str, *, until_end: bool) -> "Iterator[Record]":
        """Yield the records; with `until_end`, stop at the present end of the partition."""
        return client.follow(
            topic, offset=self.offset, timestamp=self.timestamp, partition=self.partition, until_end=until_end
        )


def find_partitions(target: Target, client: "BlockingClient", topic: str) -> list[dict[str, Any]]:
    """Return number, `first_offset` and `high_watermark` of a topic's partitions.

    Raises:
        CommandError, ClientError: there is no such topic.
    """
    partitions = target.partitions(topic)
    if partitions is not None:
        return partitions
    (positions,) = client.positions([topic])
    return [
        {"partition": number, "first_offset": partition.first_offset, "high_watermark": partition.high_watermark}
        for number, partition in enumerate(positions.partitions)
    ]


def find_spans(
    target: Target,
    client: "BlockingClient",
    topic: str,
    partition: int | None,
    *,
    offset: int | None = None,
    timestamp: int | None = None,
) -> list[Span]:
    """Return the spans of one partition or of all that have the start, without empty spans.

    Raises:
        CommandError: there is no such topic, partition or offset.
    """
    partitions = find_partitions(target, client, topic)
    spans, bounds = [], []
    for info in partitions:
        number, first, end = info["partition"], info["first_offset"], info["high_watermark"]
        if partition is not None and number != partition:
            continue
        bounds.append(f"{first} to {end}" if len(partitions) == 1 else f"{first} to {end} in partition {number}")
        if offset is None:
            spans.append(Span(number, None, timestamp, end - first))
        elif first <= offset <= end:
            spans.append(Span(number, offset, None, end - offset))
    if not bounds:
        raise CommandError(f"topic {topic!r} has partitions 0 to {len(partitions) - 1}, not {partition}")
    if not spans:
        raise CommandError(f"topic {topic!r} has no offset {offset}: there are {', '.join(bounds)}")
    return [span for span in spans if span.count_max]


def find_ends(target: Target, client: "BlockingClient", topic: str, partition: int | None) -> list[Span]:
    """Return the spans that begin at the present ends of the partitions.

    Raises:
        CommandError: there is no such topic or partition.
    """
    partitions = find_partitions(target, client, topic)
    spans = [
        Span(info["partition"], info["high_watermark"]) for info in partitions if partition in (None, info["partition"])
    ]
    if not spans:
        raise CommandError(f"topic {topic!r} has partitions 0 to {len(partitions) - 1}, not {partition}")
    return spans


def all_partitions(
    target: Target, client: "BlockingClient", topic: str, partition: int | None, offset: int | None, ts: int | None
) -> list[Span]:
    """Return the spans of a command that continues behind the end: also of partitions without records so far.

    Raises:
        CommandError: there is no such topic, partition or offset.
    """
    spans = find_spans(target, client, topic, partition, offset=offset, timestamp=ts)
    by_number = {span.partition: span for span in spans}
    for info in find_partitions(target, client, topic):
        number, end = info["partition"], info["high_watermark"]
        if number not in by_number and partition in (None, number) and (offset is None or offset >= end):
            # Empty, or shorter than others: every later record of this partition is behind the requested start.
            by_number[number] = Span(number, end)
    return [by_number[number] for number in sorted(by_number)]
