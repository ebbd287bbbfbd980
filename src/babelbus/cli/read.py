"""`babelbus tail` and `babelbus fetch`: records on the screen, new ones or stored ones."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, complete, examples, json_option, max_option, partition_option
from babelbus.cli.output import json_record, note, plural, print_json, print_line, show_record, until_interrupted
from babelbus.cli.target import Target, clear_errors
from babelbus.cli.target_options import bus_options
from babelbus.cli.times import read_time

if TYPE_CHECKING:
    from babelbus.client import BlockingClient
    from babelbus.records.record import Record

QUEUE_RECORDS_MAX = 10_000

from_offset_option = click.option("--from-offset", "offset", type=click.IntRange(0), help="Offset to begin at.")
from_time_option = click.option(
    "--from-time", "timestamp", metavar="TIME", callback=read_time,
    help="Time to begin at: 2026-01-31T08:00 (UTC without a zone), milliseconds since 1970, or -1h.",
)  # fmt: skip


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
    follow: bool = False,
    at_end: bool = False,
) -> list[Span]:
    """Return the spans of one partition or of all from a start on, or with `at_end` from their present ends on.

    A command that follows the topic also gets partitions that have no record behind the start so far.

    Raises:
        CommandError: there is no such topic, partition or offset.
    """
    partitions = find_partitions(target, client, topic)
    spans, bounds, has_start = [], [], False
    for info in partitions:
        number, first, end = info["partition"], info["first_offset"], info["high_watermark"]
        if partition is not None and number != partition:
            continue
        bounds.append(f"{first} to {end}" if len(partitions) == 1 else f"{first} to {end} in partition {number}")
        begin = end if at_end else first if offset is None else offset
        has_start |= first <= begin <= end
        if first <= begin < end:
            spans.append(Span(number, offset, timestamp, end - begin))
        elif follow and begin >= end:  # empty, or shorter than others: all its later records are behind the start
            spans.append(Span(number, end))
    if not bounds:
        raise CommandError(f"topic {topic!r} has partitions 0 to {len(partitions) - 1}, not {partition}")
    if not has_start:
        raise CommandError(f"topic {topic!r} has no offset {offset}: there are {', '.join(bounds)}")
    return spans


def _reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (from_offset_option, from_time_option, partition_option, max_option, json_option, bus_options)
    for option in reversed((click.argument("topic", shell_complete=complete("topics")), *options)):
        command = option(command)
    return command


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus tail orders                                new records, until Ctrl-C",
        "babelbus tail orders --from-offset 0 --max 10",
        "babelbus tail orders --from-time -1h --json | jq -r .payload",
    ),
)
@_reading_options
def tail(
    target: Target,
    topic: str,
    offset: int | None,
    timestamp: int | None,
    partition: int | None,
    count_max: int | None,
    as_json: bool,
) -> None:
    """Follow a topic: print its records as they arrive, until Ctrl-C.

    A line is partition:offset, time, key if there is one, payload, and headers. A lost connection is opened again,
    for as long as it takes; standard error tells when it was lost, and when it is there again.
    """
    check_start(offset, timestamp)
    shown = _Shown()
    with until_interrupted(lambda: plural(shown.count, "record")):
        with target.connect() as client:
            spans = find_spans(
                target, client, topic, partition, offset=offset, timestamp=timestamp,
                follow=True, at_end=offset is None and timestamp is None,
            )  # fmt: skip
        asyncio.run(_tail(target, topic, spans, count_max, as_json, shown))


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus fetch orders                               all records",
        "babelbus fetch orders --from-offset 1000 --max 10",
        "babelbus fetch orders --from-time 2026-01-31T08:00 --json",
    ),
)
@_reading_options
def fetch(
    target: Target,
    topic: str,
    offset: int | None,
    timestamp: int | None,
    partition: int | None,
    count_max: int | None,
    as_json: bool,
) -> None:
    """Print the stored records of a topic, up to its present end; one partition after the other."""
    check_start(offset, timestamp)
    with target.connect() as client:
        spans = find_spans(target, client, topic, partition, offset=offset, timestamp=timestamp)
        records = ((span.partition, record) for span in spans for record in span.records(client, topic, until_end=True))
        _print(islice(records, count_max), topic, as_json)


def check_start(offset: int | None, timestamp: int | None) -> None:
    """Check that a command has one beginning.

    Raises:
        UsageError: it has two.
    """
    if offset is not None and timestamp is not None:
        raise click.UsageError("--from-offset and --from-time are both a beginning: give only one of them")


def _print(records: "Iterator[tuple[int, Record]]", topic: str, as_json: bool) -> None:
    for partition, record in records:
        if as_json:
            print_json(json_record(record, topic, partition))
        else:
            print_line(show_record(record, partition))


class _Shown:
    """The number of records on the screen."""

    count = 0


async def _tail(
    target: Target, topic: str, spans: list[Span], count_max: int | None, as_json: bool, shown: _Shown
) -> None:
    """Print the records of all spans as they arrive; those of one partition are in order.

    Runs in an event loop of its own: Ctrl-C then cancels the waiting readers, and each closes in order.
    """
    from babelbus.client import BabelbusError, Client

    queue: asyncio.Queue[tuple[int, Record] | BabelbusError] = asyncio.Queue(QUEUE_RECORDS_MAX)

    async def read(client: Client, span: Span) -> None:
        try:
            start = client.follow(topic, offset=span.offset, timestamp=span.timestamp, partition=span.partition)
            async for record in start:
                await queue.put((span.partition, record))
        except BabelbusError as error:
            await queue.put(error)

    arguments = target.client_arguments()
    address = arguments["address"]

    def tell(error: BabelbusError | None) -> None:
        if error is None:
            note(f"babelbus: connected to {address} again")
        else:
            note(f"babelbus: the connection to {address} is lost ({error}): trying again until Ctrl-C")

    async with AsyncExitStack() as stack:
        with clear_errors(address):
            client = await stack.enter_async_context(Client(**arguments, on_connection=tell))
        readers = [asyncio.create_task(read(client, span)) for span in spans]
        try:
            while count_max is None or shown.count < count_max:
                item = await queue.get()
                if isinstance(item, BabelbusError):
                    raise item
                _print(iter([item]), topic, as_json)
                shown.count += 1
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
