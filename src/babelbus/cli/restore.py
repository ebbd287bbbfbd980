"""`babelbus import`: the records of a file into a topic, with their times, keys and headers."""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import IO, TYPE_CHECKING

import click

from babelbus.cli.api import ApiError
from babelbus.cli.command import BusCommand, CommandError, complete, examples, summary_option, tell_done_at_interrupt
from babelbus.cli.export import format_option, tell_done
from babelbus.cli.lines import parse_line
from babelbus.cli.output import plural, progress
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.clock import SystemClock
from babelbus.errors import BabelbusError

if TYPE_CHECKING:
    from babelbus.client import BlockingClient
    from babelbus.records.record import Record

BATCH_RECORDS = 10_000
BATCH_BYTES = 4 * 2**20
CHUNK_BYTES = 4 * 2**20
GZIP_MAGIC = b"\x1f\x8b"


@click.command(
    "import",
    cls=BusCommand,
    epilog=examples(
        "babelbus import orders orders.json.gz --create",
        "babelbus export orders - | babelbus import copy -",
        "babelbus import orders orders.log --format log --partition 0",
    ),
)
@click.argument("topic", shell_complete=complete("topics"))
@click.argument("file")
@format_option
@click.option("--create", is_flag=True, help="Create the topic if it does not exist.")
@click.option(
    "--partition", type=click.IntRange(0), help="Partition for all.  [default: the one they came from, or by key]"
)
@summary_option
@bus_options
def import_(
    target: Target, topic: str, file: str, form: str, create: bool, partition: int | None, as_json: bool
) -> None:
    """Publish the records of FILE ('-' is standard input; compressed files are recognised) to a topic.

    Times, keys and headers are kept; offsets are new. A record goes to the partition that it was exported from; if the
    topic has fewer, the records of one old partition stay together. If a line is wrong, the lines before it are
    imported and the error names the line.
    """
    clock = SystemClock()
    start = clock.monotonic()
    size = os.path.getsize(file) if file != "-" and os.path.isfile(file) else None
    with progress(f"import {topic}", size, "bytes") as advance:
        records = _read_file(file, form, advance)
        if create:
            records = _begin(records)
        choose = _partition_chooser(_find_topic(target, topic, create), partition)
        with target.connect() as client:
            count = _publish(client, topic, records, choose)
    tell_done("imported", topic, file, count, clock.monotonic() - start, as_json)


def _find_topic(target: Target, topic: str, create: bool) -> int | None:
    """Return the number of partitions of the topic; `None` if the administration endpoint is out of reach."""
    try:
        partitions = target.partitions(topic)
    except ApiError as error:
        if error.code != "unknown_topic":
            raise
        if not create:
            raise CommandError(
                f"there is no topic {topic!r}; add --create, or create it with 'babelbus topics create'"
            ) from None
        partitions = target.api().create_topic(topic, None, {})["partitions"]
    else:
        if partitions is None and create:
            from babelbus.client import TopicExistsError

            with target.connect() as client:
                try:
                    client.create_topic(topic)
                except TopicExistsError:
                    pass
    return None if partitions is None else len(partitions)


def _partition_chooser(count: int | None, partition: int | None) -> Callable[[bytes | None, int], int]:
    def choose(key: bytes | None, old: int) -> int:
        if partition is not None:
            return partition
        if count is None:
            return max(old, 0)  # an error for a missing partition is better than a lost order
        if old >= 0:
            return old % count
        return zlib.crc32(key) % count if key is not None else 0

    return choose


def _publish(
    client: "BlockingClient",
    topic: str,
    records: "Iterator[tuple[Record, int]]",
    choose: Callable[[bytes | None, int], int],
) -> int:
    """Publish in large batches, in order within each partition; return the number of records."""
    tell_done_at_interrupt(lambda: f"{plural(count, 'record')} imported")
    count = 0
    try:
        for number, batch in _batches(records, choose):
            client.publish_many(topic, batch, partition=number)
            count += len(batch)
    except BabelbusError as error:
        raise CommandError(f"{error}; {plural(count, 'record')} imported") from error
    return count


def _batches(
    records: "Iterator[tuple[Record, int]]", choose: Callable[[bytes | None, int], int]
) -> "Iterator[tuple[int, list[Record]]]":
    """Yield batches with their partition. If a line is wrong, the records before it are yielded first."""
    lanes: dict[int, list[Record]] = {}
    sizes: dict[int, int] = {}
    try:
        for record, old in records:
            number = choose(record.key, old)
            lane = lanes.setdefault(number, [])
            lane.append(record)
            sizes[number] = sizes.get(number, 0) + len(record.payload or b"")
            if len(lane) >= BATCH_RECORDS or sizes[number] >= BATCH_BYTES:
                yield number, lanes.pop(number)
                sizes.pop(number)
    except CommandError:
        yield from lanes.items()
        raise
    yield from lanes.items()


def _read_file(file: str, form: str, advance: Callable[[int], object]) -> "Iterator[tuple[Record, int]]":
    with open_file(file, advance) as input_:
        yield from _from_json(input_) if form == "json" else _from_log(input_)


def _begin(records: "Iterator[tuple[Record, int]]") -> "Iterator[tuple[Record, int]]":
    """Return records whose first one has been read: a file that cannot be read must not leave an empty topic."""
    return chain(list(islice(records, 1)), records)


def _from_json(input_: IO[bytes]) -> "Iterator[tuple[Record, int]]":
    for number, line in enumerate(input_, 1):
        if line.strip():
            yield parse_line(line, number)


def _from_log(input_: IO[bytes]) -> "Iterator[tuple[Record, int]]":
    """Read records in the stored form, after a check of each CRC, without the bus's own headers."""
    from babelbus.records.plain import CorruptRecordError, decode_records, walk

    rest, position = b"", 0
    while chunk := input_.read(CHUNK_BYTES):
        data = rest + chunk
        end = walk(data)[-1]
        try:
            for record in decode_records(data[:end]):
                yield record, -1
        except CorruptRecordError as error:
            raise CommandError(f"bad record at byte {position + error.position}: {error.reason}") from error
        rest, position = data[end:], position + end
        if not end and len(rest) > 2 * CHUNK_BYTES + 2**24:
            break  # longer than any record: the file is no log
    if rest:
        raise CommandError(f"the file is no log, or cut off, at byte {position}: no whole record begins there")


class _Counted(io.RawIOBase):
    """A file that counts the bytes read."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], object]) -> None:
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into a buffer, and count the bytes."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)


@contextmanager
def open_file(file: str, advance: Callable[[int], object] = int) -> "Iterator[IO[bytes]]":
    """Open a file to read ('-' is standard input), decompressed if it begins as gzip does; `advance` counts its bytes.

    Raises:
        CommandError: the compressed file is cut off or damaged.
    """
    with (
        open(0 if file == "-" else file, "rb", closefd=file != "-") as raw,
        io.BufferedReader(_Counted(raw, advance), 2**18) as counted,
    ):
        if counted.peek(2)[:2] != GZIP_MAGIC:
            yield counted
            return
        try:
            with gzip.GzipFile(fileobj=counted) as unpacked:
                yield unpacked  # type: ignore[misc]  # a GzipFile is an IO[bytes] in all that is used
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CommandError(f"{file}: the compressed file is cut off or damaged: {error}") from error
