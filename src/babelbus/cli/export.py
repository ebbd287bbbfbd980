"""`babelbus export`: a topic's records into a file, as JSON lines or as the bytes that are stored."""

import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import (
    BusCommand,
    CommandError,
    complete,
    examples,
    partition_option,
    summary_option,
    tell_done_at_interrupt,
)
from babelbus.cli.output import human_bytes, json_record, note, plural, print_json, progress
from babelbus.cli.read import Span, check_start, find_spans, from_offset_option, from_time_option
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.clock import SystemClock

if TYPE_CHECKING:
    from babelbus.client import BlockingClient

LINES_AT_ONCE = 1_000
GZIP_LEVEL = 3
"""A third of the default level's time, for files that are a tenth larger."""

format_option = click.option(
    "--format", "form", type=click.Choice(["json", "log"]), default="json", show_default=True,
    help="JSON lines, or the records as they are stored.",
)  # fmt: skip


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus export orders orders.json.gz",
        "babelbus export orders - --from-time -1d | jq .payload",
        "babelbus export orders orders.log --format log        the stored bytes, the fastest",
    ),
)
@click.argument("topic", shell_complete=complete("topics"))
@click.argument("file")
@format_option
@from_offset_option
@from_time_option
@partition_option
@summary_option
@bus_options
def export(
    target: Target,
    topic: str,
    file: str,
    form: str,
    offset: int | None,
    timestamp: int | None,
    partition: int | None,
    as_json: bool,
) -> None:
    """Write a topic's records, up to where it ends now, to FILE ('-' is standard output; compressed if it ends in .gz).

    The file appears under its name when it is complete. 'babelbus import' reads it.
    """
    check_start(offset, timestamp)
    clock = SystemClock()
    start = clock.monotonic()
    with target.connect() as client:
        spans = find_spans(target, client, topic, partition, offset=offset, timestamp=timestamp)
        if form == "log" and len(spans) > 1:
            raise CommandError(f"the format log holds one partition, topic {topic!r} has more: add --partition N")
        counts = [span.count_max for span in spans if span.count_max is not None]
        total = sum(counts) if len(counts) == len(spans) and timestamp is None else None
        # No bar on a terminal that also shows the records.
        quiet = file == "-" and sys.stdout.isatty()
        with open_new(file) as output, progress(f"export {topic}", total, "records", quiet=quiet) as advance:
            write = _write_json if form == "json" else _write_log
            count = 0
            tell_done_at_interrupt(lambda: f"{plural(count, 'record')} read, {file} is not written")
            for step in (step for span in spans for step in write(client, topic, span, output)):
                count += step
                advance(step)
    tell_done("exported", topic, file, count, clock.monotonic() - start, as_json)


def _write_json(client: "BlockingClient", topic: str, span: Span, output: IO[bytes]) -> Iterator[int]:
    records = span.records(client, topic, until_end=True)
    return write_lines((json_record(record, topic, span.partition) for record in records), output)


def write_lines(objects: Iterable[Any], output: IO[bytes]) -> Iterator[int]:
    """Write a JSON line for each object; yield now and then how many were written since."""
    lines = map(msgspec.json.Encoder().encode, objects)
    while part := list(islice(lines, LINES_AT_ONCE)):
        output.write(b"\n".join(part) + b"\n")
        yield len(part)


def _write_log(client: "BlockingClient", topic: str, span: Span, output: IO[bytes]) -> Iterator[int]:
    """Write the stored bytes, after a check of each CRC; yield how many records were written."""
    batches = client.follow_batches(
        topic, offset=span.offset, timestamp=span.timestamp, partition=span.partition, until_end=True
    )
    for batch in batches:
        batch.verify()
        output.write(batch.data)
        yield len(batch)


@contextmanager
def open_new(file: str) -> "Iterator[IO[bytes]]":
    """Open a file to write that gets its name when it is complete, so that half an export is never read as a whole."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    whole = os.path.exists(file) and not os.path.isfile(file)  # a pipe or device is written in place
    draft = file if whole else f"{file}.part"
    try:
        with open(draft, "wb") as raw:
            if file.endswith(".gz"):
                with gzip.GzipFile("", "wb", GZIP_LEVEL, raw) as packed:
                    yield packed  # type: ignore[misc]  # a GzipFile is an IO[bytes] in all that is used
            else:
                yield raw
        if not whole:
            os.replace(draft, file)
    except BaseException:
        if not whole and os.path.exists(draft):
            os.unlink(draft)
        raise


def tell_done(done: str, topic: str, file: str, count: int, seconds: float, as_json: bool) -> None:
    """Show the number of records and their rate."""
    size = f", {human_bytes(os.path.getsize(file))}" if file != "-" and os.path.isfile(file) else ""
    text = f"{plural(count, 'record')} {done}{size}, {count / max(seconds, 1e-9):,.0f} a second"
    summary = {"topic": topic, "file": file, "records": count, "seconds": round(seconds, 6)}
    tell_summary(text, summary, as_json, on_error=file == "-" and done == "exported")


def tell_summary(text: str, summary: dict[str, object], as_json: bool, *, on_error: bool) -> None:
    """Show a summary; as JSON `on_error`, on standard error, where standard output has the data."""
    if not as_json:
        note(text)
    elif on_error:
        note(msgspec.json.encode(summary).decode())
    else:
        print_json(summary)
