"""`babelbus send`: publish one event under a subject, and print where it was recorded."""

import sys

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import escape, print_json, print_line
from babelbus.cli.publish import read_headers
from babelbus.cli.target import Target, admin_options
from babelbus.records.envelope import CONTENT_TYPE
from babelbus.units import MIB

PAYLOAD_BYTES_MAX = 40 * MIB
"""The largest payload that fits into a request of 64 MiB as base64."""


class Sent(msgspec.Struct, frozen=True):
    """Where an event was recorded, and how many subscriptions received it."""

    topic: str | None
    partition: int | None
    offset: int | None
    receivers: int


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus send plant/line1/temp 21.5",
        "babelbus send plant/line1/status '{\"on\": true}' --content-type application/json",
        "babelbus send orders/new - --key 17 --header type=order < order.xml",
    ),
)
@click.argument("subject")
@click.argument("payload", required=False)
@click.option("--key", help="Key of the event: it chooses the partition, and what compaction keeps.")
@click.option(
    "--header", "headers", multiple=True, callback=read_headers, metavar="NAME=VALUE", help="Header; may be repeated."
)
@click.option("--content-type", metavar="TYPE", help="Type of the payload, such as application/json.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@admin_options
def send(
    target: Target,
    subject: str,
    payload: str | None,
    key: str | None,
    headers: tuple[tuple[bytes, bytes | None], ...],
    content_type: str | None,
    as_json: bool,
) -> None:
    """Publish one event under SUBJECT: to all subscribers of any protocol, and to the topic that covers the subject.

    Without PAYLOAD, or with '-', the whole standard input is the payload. This command is for one event on the bus;
    'publish' is for one or many records of a topic. It prints where the event was recorded, or that it was live only.
    """
    if payload is None and sys.stdin.isatty():
        raise click.UsageError("no payload: give one, pipe it in, or write '-' to type it")
    data = sys.stdin.buffer.read() if payload in (None, "-") else _bytes(str(payload))
    if len(data) > PAYLOAD_BYTES_MAX:
        raise CommandError(f"the payload has {len(data)} bytes, the limit is {PAYLOAD_BYTES_MAX}")
    if content_type is not None:
        headers = (*headers, (CONTENT_TYPE, content_type.encode()))
    body = {
        "subject_base64": _bytes(subject),
        "payload_base64": data,
        "key_base64": None if key is None else _bytes(key),
        "headers_base64": headers,
    }
    sent = target.api().ask("POST", "/api/send", {}, Sent, content=msgspec.json.encode(body))
    if as_json:
        print_json({"subject": subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace")} | _fields(sent))
    elif sent.topic is None:
        print_line(f"live only, no topic covers it; subscriptions that received it: {sent.receivers}")
    else:
        print_line(f"{escape(sent.topic)} {sent.partition}:{sent.offset}; live subscriptions: {sent.receivers}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _fields(sent: Sent) -> dict[str, object]:
    return msgspec.structs.asdict(sent)
