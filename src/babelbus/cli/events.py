"""`babelbus listen` and `babelbus send`: the events of all protocols as they happen, and one event to the bus."""

import base64
import sys
from typing import Any

import click

from babelbus.cli.command import BusCommand, CommandError, examples, json_option, max_option
from babelbus.cli.output import escape, human_time, note, plural, print_json, print_line, show_bytes, until_interrupted
from babelbus.cli.publish import octets, read_headers
from babelbus.cli.state import tell_dropped
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.records.envelope import CONTENT_TYPE
from babelbus.units import MIB

PAYLOAD_BYTES_MAX = 40 * MIB
"""The largest payload that fits into a request of 64 MiB as base64."""


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus listen                              all events of the bus",
        "babelbus listen 'plant/#'                    events below plant, from any protocol",
        "babelbus listen 'plant/?/temp' --max 10",
        "babelbus listen 'plant/#' --json | jq -r .payload",
    ),
)
@click.argument("pattern", default="#")
@max_option
@json_option
@bus_options
def listen(target: Target, pattern: str, count_max: int | None, as_json: bool) -> None:
    """Print the events whose subject matches PATTERN, as they happen, until Ctrl-C.

    In a pattern '?' matches one element of a subject and '#' at the end one or more: 'plant/#' matches plant/a and
    plant/a/b but not plant. Quote patterns: the shell expands them. Changes of the state are events too.

    A line is time, subject, source (protocol and identity, '-' if the protocol has none), key if it is not the
    subject, payload, and headers. Only new events are printed: 'babelbus tail' reads the records of topics. If this
    command is too slow, it prints how many events it missed.
    """
    count = 0
    if "*" in pattern:
        note("babelbus: '*' stands for itself here: '?' matches one element, '#' at the end one or more")
    with until_interrupted(lambda: plural(count, "event")):
        for event in target.api().lines("/api/listen", {"pattern": pattern}, dict[str, Any], live=True):
            if event is None:
                continue
            if "end" in event:
                raise CommandError(f"the server ended the connection: {event['end']}")
            if "dropped" in event:
                tell_dropped(event["dropped"], as_json)
                continue
            if as_json:
                print_json(event)
            else:
                print_line(_show(event))
            count += 1
            if count == count_max:
                return
        raise CommandError("the server ended the connection: it stops")


def _show(event: dict[str, Any]) -> str:
    subject = _bytes(event, "subject") or b""
    key, payload = _bytes(event, "key"), _bytes(event, "payload")
    text = f"{human_time(event['timestamp'])}  {show_bytes(subject)}  {escape(event.get('source', '-'))}"
    if key is not None and key != subject:
        text += f"  {show_bytes(key)}"
    text += "  (removed)" if payload is None else f"  {show_bytes(payload)}"
    headers = " ".join(f"{show_bytes(name)}={show_bytes(value or b'')}" for name, value in _headers(event))
    return f"{text}  [{headers}]" if headers else text


def _bytes(event: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_base64" in event:
        return base64.b64decode(event[f"{name}_base64"])
    text: str | None = event.get(name)
    return None if text is None else text.encode()


def _headers(event: dict[str, Any]) -> list[tuple[bytes, bytes | None]]:
    """Return the headers without the content type, which the payload shows."""
    decode = base64.b64decode
    pairs = [
        (decode(name), None if value is None else decode(value)) for name, value in event.get("headers_base64", ())
    ]
    for name, value in event.get("headers", {}).items():
        pairs.append((name.encode(), None if value is None else value.encode()))
    return [pair for pair in pairs if pair[0] != CONTENT_TYPE]


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
@bus_options
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
    data = read_payload(payload)
    if content_type is not None:
        headers = (*headers, (CONTENT_TYPE, content_type.encode()))
    body = {
        "subject_base64": octets(subject),
        "payload_base64": data,
        "key_base64": None if key is None else octets(key),
        "headers_base64": headers,
    }
    sent = target.api().call("POST", "/api/send", body)
    if as_json:
        print_json({"subject": subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace")} | sent)
    elif sent["topic"] is None:
        print_line(f"live only, no topic covers it; subscriptions that received it: {sent['receivers']}")
    else:
        print_line(
            f"{escape(sent['topic'])} {sent['partition']}:{sent['offset']}; live subscriptions: {sent['receivers']}"
        )


def read_payload(payload: str | None) -> bytes:
    """Return the payload of an argument; without one, or for '-', the whole standard input.

    Raises:
        UsageError: the standard input is a terminal, and '-' does not ask for it.
        CommandError: the payload is too large.
    """
    if payload is None and sys.stdin.isatty():
        raise click.UsageError("no payload: give one, pipe it in, or write '-' to type it")
    data = sys.stdin.buffer.read() if payload in (None, "-") else octets(str(payload))
    if len(data) > PAYLOAD_BYTES_MAX:
        raise CommandError(f"the payload has {len(data)} bytes, the limit is {PAYLOAD_BYTES_MAX}")
    return data
