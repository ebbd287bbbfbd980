"""`babelbus tail` and `babelbus fetch`: records on the screen, new ones or stored ones."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING

import click

from babelbus.cli.command import BusCommand, examples
from babelbus.cli.output import json_record, print_json, print_line, show_record
from babelbus.cli.spans import Span, all_partitions, find_ends, find_spans
from babelbus.cli.target import Target, bus_options, clear_errors
from babelbus.cli.times import read_time

if TYPE_CHECKING:
    from babelbus.records.record import Record

QUEUE_RECORDS_MAX = 10_000

from_offset_option = click.option("--from-offset", "offset", type=click.IntRange(0), help="Offset to begin at.")
from_time_option = click.option(
    "--from-time", "timestamp", metavar="TIME", callback=read_time,
    help="Time to begin at: 2026-01-31T08:00 (UTC without a zone), milliseconds since 1970, or -1h.",
)  # fmt: skip
partition_option = click.option("--partition", type=click.IntRange(0), help="One partition.  [default: all]")
max_option = click.option("--max", "count_max", type=click.IntRange(1), metavar="N", help="Stop after N records.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one record a line.")


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus tail orders                                new records, until Ctrl-C",
        "babelbus tail orders --from-offset 0 --max 10",
        "babelbus tail orders --from-time -1h --json | jq -r .payload",
    ),
)
@click.argument("topic")
@from_offset_option
@from_time_option
@partition_option
@max_option
@json_option
@bus_options
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

    A line is partition:offset, time, key if there is one, payload, and headers. A lost connection is opened again.
    """
    _one_start(offset, timestamp)
    with suppress(KeyboardInterrupt):
        with target.connect() as client:
            if offset is not None or timestamp is not None:
                spans = all_partitions(target, client, topic, partition, offset, timestamp)
            else:
                spans = find_ends(target, client, topic, partition)
        asyncio.run(_tail(target, topic, spans, count_max, as_json))


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus fetch orders                               all records",
        "babelbus fetch orders --from-offset 1000 --max 10",
        "babelbus fetch orders --from-time 2026-01-31T08:00 --json",
    ),
)
@click.argument("topic")
@from_offset_option
@from_time_option
@partition_option
@max_option
@json_option
@bus_options
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
    _one_start(offset, timestamp)
    with target.connect() as client:
        spans = find_spans(target, client, topic, partition, offset=offset, timestamp=timestamp)
        records = ((span.partition, record) for span in spans for record in span.records(client, topic, until_end=True))
        _print(islice(records, count_max), topic, as_json)


def _one_start(offset: int | None, timestamp: int | None) -> None:
    if offset is not None and timestamp is not None:
        raise click.UsageError("--from-offset and --from-time are both a beginning: give only one of them")


def _print(records: "Iterator[tuple[int, Record]]", topic: str, as_json: bool) -> None:
    for partition, record in records:
        if as_json:
            print_json(json_record(record, topic, partition))
        else:
            print_line(show_record(record, partition))


async def _tail(target: Target, topic: str, spans: list[Span], count_max: int | None, as_json: bool) -> None:
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
    async with AsyncExitStack() as stack:
        with clear_errors(arguments["address"]):
            client = await stack.enter_async_context(Client(**arguments))
        readers = [asyncio.create_task(read(client, span)) for span in spans]
        try:
            count = 0
            while count_max is None or count < count_max:
                item = await queue.get()
                if isinstance(item, BabelbusError):
                    raise item
                _print(iter([item]), topic, as_json)
                count += 1
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
