"""`babelbus search`: the records of a topic that match a filter, found by the server."""

import base64
from typing import Any

import click

from babelbus.cli.api import path_of
from babelbus.cli.command import BusCommand, CommandError, complete, examples, json_option, max_option, partition_option
from babelbus.cli.output import escape, human_time, note, plural, print_json, print_line, show_bytes, until_interrupted
from babelbus.cli.read import check_start, from_offset_option, from_time_option
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

COUNT_AT_ONCE = 64
SHOWN_BYTES_MAX = 64 * 1024


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus search orders '/customer/id = 4711'",
        "babelbus search orders 'payload contains \"timeout\"' --from-time -1h --max 10",
        "babelbus search orders 'key like \"eu-*\" and not /paid = true' --json | jq .offset",
    ),
)
@click.argument("topic", shell_complete=complete("topics"))
@click.argument("filter_", metavar="FILTER")
@from_offset_option
@from_time_option
@partition_option
@max_option
@json_option
@bus_options
def search(
    target: Target,
    topic: str,
    filter_: str,
    offset: int | None,
    timestamp: int | None,
    partition: int | None,
    count_max: int | None,
    as_json: bool,
) -> None:
    """Print the records of TOPIC that match FILTER, up to the present end of the topic.

    A filter compares key, subject, payload, headers["name"] and /pointers/into/json with =, !=, <, <=, >, >=, contains
    and like, joined by and, or, not and parentheses. The server searches; it says how far at the end. Payloads are
    shortened to 64 KiB.
    """
    check_start(offset, timestamp)
    query = {"filter": filter_, "bytes_max": str(SHOWN_BYTES_MAX)}
    given = {"offset": offset, "time_ms": timestamp, "partition": partition}
    query |= {name: str(value) for name, value in given.items() if value is not None}
    found = searched = 0
    with until_interrupted(lambda: plural(found, "record")):
        while True:
            wanted = COUNT_AT_ONCE if count_max is None else min(count_max - found, COUNT_AT_ONCE)
            progress: dict[str, Any] = {}
            lines = target.api().lines(
                path_of("topics", topic, "search"), query | {"count": str(wanted)}, dict[str, Any], live=True
            )
            for line in lines:
                if line is None:
                    continue
                if "record" in line:
                    found += 1
                    if as_json:
                        print_json(line["record"])
                    else:
                        print_line(_show(line["record"]))
                else:
                    progress = line["progress"]
                    for text in progress.get("notes", ()):
                        note(f"babelbus: {text}")
            searched += progress.get("records", 0)
            if not progress.get("why"):
                raise CommandError("the server ended the connection: it stops")
            if progress["why"] in ("ended", "removed"):
                raise CommandError(f"{progress['text']} Searched {plural(searched, 'record')}.")
            if progress["done"] or found == count_max:
                break
            query["from"] = progress["next"]
    note(f"babelbus: searched {plural(searched, 'record')}, found {found:,}")


def _show(record: dict[str, Any]) -> str:
    key, payload = _bytes(record, "key"), _bytes(record, "payload")
    shown_key = "" if key is None else f"  {show_bytes(key)}"
    shown = "(removed)" if payload is None else show_bytes(payload)
    more = f"... ({plural(record['payload_bytes'], 'byte')})" if record["clipped"] else ""
    headers = " ".join(f"{escape(name)}={escape(value or '')}" for name, value, *_ in record["headers"])
    place = f"{record['partition']}:{record['offset']}  {human_time(record['time_ms'])}"
    return f"{place}{shown_key}  {shown}{more}" + (f"  [{headers}]" if headers else "")


def _bytes(record: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_b64" in record:
        return base64.b64decode(record[f"{name}_b64"])
    text: str | None = record.get(name)
    return None if text is None else text.encode()
