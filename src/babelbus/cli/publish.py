"""`babelbus publish`: records from arguments, lines of standard input, or JSON lines."""

import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import click

from babelbus.cli.command import BusCommand, CommandError, complete, examples, tell_done_at_interrupt
from babelbus.cli.output import PATIENCE_SECONDS, note, plural, print_json, print_line, progress
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.cli.times import read_time
from babelbus.clock import SystemClock
from babelbus.errors import BabelbusError

if TYPE_CHECKING:
    from babelbus.client import BlockingClient
    from babelbus.records.record import Record

T = TypeVar("T")
FLUSH_SECONDS = 1.0
GIVE_UP_SECONDS = 10.0
"""How long to wait for a server that cannot store records."""
RESERVED_PREFIX = "$"
"""The names of the server's own topics begin so."""


def octets(text: str) -> bytes:
    """Return the bytes of an argument of the shell."""
    return text.encode("utf-8", "surrogateescape")


def read_headers(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[bytes, bytes | None], ...]:
    """Read the texts of `--header`, split at the first `=`; a header without `=` has no value."""
    headers = []
    for text in values:
        name, separator, content = text.partition("=")
        if not name:
            raise click.BadParameter(f"{text!r} is no header: write NAME=VALUE", ctx, param)
        headers.append((octets(name), octets(content) if separator else None))
    return tuple(headers)


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus publish orders 'first order' 'second order'",
        "babelbus publish orders --key 17 --header type=order '{\"id\": 17}'",
        "tail -f app.log | babelbus publish logs",
        'babelbus publish orders --json \'{"key": "17", "payload": "paid", "headers": {"type": "order"}}\'',
        "babelbus export orders - | babelbus publish copy --json",
    ),
)
@click.argument("topic", shell_complete=complete("topics"))
@click.argument("payload", nargs=-1)
@click.option("--key", help="Key of every record.")
@click.option(
    "--header", "headers", multiple=True, callback=read_headers, metavar="NAME=VALUE", help="Header; may be repeated."
)
@click.option("--partition", type=click.IntRange(0), help="Partition.  [default: by key, else in turn]")
@click.option(
    "--timestamp",
    metavar="TIME",
    callback=read_time,
    help="Time of the records (ISO, ms, -1h).  [default: when the server takes it]",
)
@click.option("--json", "as_json", is_flag=True, help="Payloads are JSON records, and so is the output.")
@bus_options
def publish(
    target: Target,
    topic: str,
    payload: tuple[str, ...],
    key: str | None,
    headers: tuple[tuple[bytes, bytes | None], ...],
    partition: int | None,
    timestamp: int | None,
    as_json: bool,
) -> None:
    """Publish records to a topic.

    Each PAYLOAD is a record; without one, or with '-', each line of standard input is a record. With --json a record is
    an object with "payload" (or "payload_base64") and optionally "key", "headers" and "timestamp". One record prints
    partition:offset; many print their number, once all are as durable as the topic's ack level requires.
    """
    from babelbus.client import RequestError
    from babelbus.records.record import Record

    if not payload and sys.stdin.isatty():
        raise click.UsageError("no payload: give a payload, pipe lines in, or write '-' to type them")
    texts = _from_input() if payload in ((), ("-",)) else map(octets, payload)
    own_key = None if key is None else octets(key)
    if as_json:
        records = _from_json(texts, Record(b"", own_key, headers, timestamp or 0))
    else:
        records = (Record(text, own_key, headers, timestamp or 0) for text in texts)
    target.timeout_seconds = GIVE_UP_SECONDS
    choose = _partition_chooser(target, topic, partition)
    with target.connect() as client, waiting_explained(target, topic):
        try:
            if len(payload) == 1 and payload != ("-",):
                record = next(iter(records), None)
                if record is None:
                    raise click.UsageError("an empty payload is no JSON record")
                _publish_one(client, topic, record, choose(record.key), as_json)
            else:
                _publish_many(client, topic, records, choose, as_json)
        except _StoppedError as stopped:
            error = why_refused(target, topic, partition, stopped.error)
            raise CommandError(f"{error}; {stopped.stored}") from stopped.error
        except RequestError as error:
            raise why_refused(target, topic, partition, error) from error


class _StoppedError(BabelbusError):
    """Publishing stopped; `stored` says how much was stored before."""

    def __init__(self, error: BabelbusError, stored: str) -> None:
        super().__init__(f"{error}; {stored}")
        self.error, self.stored = error, stored


def why_refused(target: Target, topic: str, partition: int | None, error: BabelbusError) -> BabelbusError:
    """Return the error of a refused publish with its reason, which the answer of jebp does not tell."""
    from babelbus.cli.api import ApiError
    from babelbus.client import RequestError, RequestTimeoutError

    if not isinstance(error, RequestError | RequestTimeoutError):
        return error
    try:
        info = target.api().topic(topic)
    except ApiError as refusal:
        if refusal.code == "refused":
            return CommandError(f"no right to publish to topic {topic!r}")
        return CommandError(str(refusal))
    except BabelbusError:  # an old server, or none any more
        return error
    count = len(info["partitions"])
    if topic.startswith(RESERVED_PREFIX):
        return CommandError(f"topic {topic!r} is the server's own: nobody else writes to it")
    if info.get("failing"):
        return CommandError(f"the server cannot store records of topic {topic!r} now: {info['failing']}")
    if partition is not None and partition >= count:
        return CommandError(f"topic {topic!r} has {plural(count, 'partition')}, from 0 on: there is no {partition}")
    if not info.get("may_publish", True):
        return CommandError(f"no right to publish to topic {topic!r}")
    if isinstance(error, RequestTimeoutError) or error.repeat:
        return CommandError(f"{error}; 'babelbus status' shows how the server is")
    return CommandError(f"topic {topic!r} does not take the record, which is too large or has a wrong header ({error})")


@contextmanager
def waiting_explained(target: Target, topic: str) -> Iterator[None]:
    """Run a block that publishes; when it takes long because the server cannot store records, print the reason once."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PATIENCE_SECONDS):
            with suppress(BabelbusError):
                failing = target.api().topic(topic).get("failing")
                if failing:
                    note(f"babelbus: waiting, for the server cannot store records of topic {topic!r} now: {failing}")
                    return

    thread = threading.Thread(target=look, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _partition_chooser(target: Target, topic: str, partition: int | None) -> Callable[[bytes | None], int]:
    """Return the function that chooses the partition of a key, as the server does for other protocols.

    The function returns -1 to leave the choice to the server. A missing topic is a clear error before anything is sent.
    """
    partitions = target.partitions(topic)
    if partition is not None:
        return lambda key: partition
    count = 1 if partitions is None else len(partitions)
    return lambda key: -1 if key is None or count == 1 else zlib.crc32(key) % count


def _from_input() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _from_json(texts: Iterable[bytes], given: "Record") -> "Iterator[Record]":
    """Read JSON records; options apply to records without the field."""
    import msgspec

    from babelbus.cli.lines import parse_line

    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        record, _ = parse_line(text, number)
        yield msgspec.structs.replace(
            record,
            key=given.key if record.key is None else record.key,
            headers=record.headers or given.headers,
            timestamp=record.timestamp or given.timestamp,
        )


def _publish_one(client: "BlockingClient", topic: str, record: "Record", partition: int, as_json: bool) -> None:
    position = _send(client.publish, topic, record, partition)
    if as_json:
        print_json({"topic": topic, "partition": position.partition, "offset": position.offset})
    else:
        print_line(f"{position.partition}:{position.offset}")


def _publish_many(
    client: "BlockingClient",
    topic: str,
    records: "Iterable[Record]",
    choose: Callable[[bytes | None], int],
    as_json: bool,
) -> None:
    clock, count = SystemClock(), 0
    before = client.acknowledged
    tell_done_at_interrupt(lambda: f"{client.acknowledged - before:,} of {plural(count, 'record')} stored")
    start = flushed_at = clock.monotonic()
    try:
        try:
            with progress(f"publish to {topic}", None, "records", quiet=sys.stdin.isatty()) as advance:
                for record in records:
                    advance(1)
                    _send(client.send, topic, record, choose(record.key))
                    count += 1
                    # So that a server that stores nothing is noticed.
                    if clock.monotonic() - flushed_at > FLUSH_SECONDS:
                        client.flush()
                        flushed_at = clock.monotonic()
        finally:
            client.flush()  # also when a later line is wrong: the lines before it are published
    except BabelbusError as error:
        raise _StoppedError(error, f"{client.acknowledged:,} of {plural(count, 'record')} stored") from error
    seconds = max(clock.monotonic() - start, 1e-9)
    if as_json:
        print_json({"topic": topic, "records": count, "seconds": round(seconds, 6)})
    else:
        print_line(f"{plural(count, 'record')} published, {count / seconds:,.0f} a second")


def _send(send: Callable[..., T], topic: str, record: "Record", partition: int) -> T:
    key, headers = record.key, record.headers
    return send(topic, record.payload, key=key, headers=headers, timestamp=record.timestamp, partition=partition)
