"""Which part of which partitions a reading command means: from an offset or a time, up to the end or on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.target import Target

if TYPE_CHECKING:
    from babelbus.client import BlockingClient
    from babelbus.records.record import Record


class Span(msgspec.Struct, frozen=True):
    """A part of one partition, from `offset` or `timestamp` on (from its first record if neither is given).

    `count_max` is how many records there were from `offset` (or the beginning) on when it was made; `None`: unknown.
    """

    partition: int
    offset: int | None = None
    timestamp: int | None = None
    count_max: int | None = None

    def records(self, client: "BlockingClient", topic: str, *, until_end: bool) -> "Iterator[Record]":
        """Yield the records, and with `until_end` stop where the partition ends now."""
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
        {"partition": number, "first_offset": one.first_offset, "high_watermark": one.high_watermark}
        for number, one in enumerate(positions.partitions)
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
    """Return the spans of one partition or of all that have the start; those without records are left out.

    Raises:
        CommandError: there is no such topic, partition or offset.
    """
    partitions = find_partitions(target, client, topic)
    spans, bounds = [], []
    for one in partitions:
        number, first, end = one["partition"], one["first_offset"], one["high_watermark"]
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
    """Return the spans that begin where the partitions end now.

    Raises:
        CommandError: there is no such topic or partition.
    """
    partitions = find_partitions(target, client, topic)
    spans = [
        Span(one["partition"], one["high_watermark"]) for one in partitions if partition in (None, one["partition"])
    ]
    if not spans:
        raise CommandError(f"topic {topic!r} has partitions 0 to {len(partitions) - 1}, not {partition}")
    return spans


def all_partitions(
    target: Target, client: "BlockingClient", topic: str, partition: int | None, offset: int | None, ts: int | None
) -> list[Span]:
    """Return the spans of a command that goes on when the end is reached: also those without records so far.

    Raises:
        CommandError: there is no such topic, partition or offset.
    """
    spans = find_spans(target, client, topic, partition, offset=offset, timestamp=ts)
    found = {span.partition: span for span in spans}
    for one in find_partitions(target, client, topic):
        number, end = one["partition"], one["high_watermark"]
        if number not in found and partition in (None, number) and (offset is None or offset >= end):
            # Nothing here yet, or less than elsewhere: from its end on, all that comes is later than what was meant.
            found[number] = Span(number, end)
    return [found[number] for number in sorted(found)]
