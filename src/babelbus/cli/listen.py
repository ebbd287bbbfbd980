"""`babelbus listen`: the events of all protocols as they happen, with their sources."""

import base64
from contextlib import suppress
from typing import Any

import click

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import escape, human_time, print_json, print_line, show_bytes
from babelbus.cli.state import tell_dropped
from babelbus.cli.target import Target, admin_options
from babelbus.records.envelope import CONTENT_TYPE


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
@click.option("--max", "count_max", type=click.IntRange(1), metavar="N", help="Stop after N events.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one event a line.")
@admin_options
def listen(target: Target, pattern: str, count_max: int | None, as_json: bool) -> None:
    """Print the events whose subject matches PATTERN, as they happen, until Ctrl-C.

    In a pattern '?' matches one element of a subject and '#' at the end one or more: 'plant/#' matches plant/a and
    plant/a/b but not plant. Quote patterns: the shell expands them. Changes of the state are events too.

    A line is time, subject, source (protocol and identity, '-' if the protocol has none), key if it is not the
    subject, payload, and headers. Only new events are printed: 'babelbus tail' reads the records of topics. If this
    command is too slow, it prints how many events it missed.
    """
    count = 0
    with suppress(KeyboardInterrupt):
        for event in target.api().lines("/api/listen", {"pattern": pattern}, dict[str, Any]):
            if event is None:
                continue
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
