"""`babelbus audit`: logins, refusals and changes of the table, of a running server (docs/access.md)."""

import time
from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.command import BusCommand, examples, json_option
from babelbus.cli.output import escape, human_time, print_all, print_json, print_line
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

KINDS = ("login", "login-refused", "logout", "refusal", "close", "move", "change")
FOLLOW_SECONDS = 1.0


@click.command(
    "audit",
    cls=BusCommand,
    epilog=examples(
        "babelbus audit",
        "babelbus audit --principal alice --json",
        "babelbus audit --id k3x7aq2m",
        "babelbus audit --follow --kind refusal",
    ),
)
@click.option("--count", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Newest records.")
@click.option("--id", "refusal", metavar="ID", help="The refusal with this id, which its error names.")
@click.option("--principal", metavar="NAME", help="Records of one principal.")
@click.option("--kind", type=click.Choice(KINDS), help="Records of one kind.")
@click.option("--follow", is_flag=True, help="Show further records as they come, until Ctrl-C.")
@json_option
@bus_options
def audit(
    target: Target,
    count: int,
    refusal: str | None,
    principal: str | None,
    kind: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the newest records of the audit."""
    query = {"count": str(count)}
    query |= {} if refusal is None else {"id": refusal}
    query |= {} if principal is None else {"principal": principal}
    query |= {} if kind is None else {"kind": kind}
    api = target.api()
    found = api.ask("GET", "/api/audit", query, dict[str, Any])
    records = found["records"]
    if not follow:
        print_all(records, as_json, "the audit has no such records", _COLUMNS, numbers=("Times",))
        return
    while True:
        for one in records:
            if as_json:
                print_json(one)
            else:
                print_line(line_of(one))
        time.sleep(FOLLOW_SECONDS)
        found = api.ask("GET", "/api/audit", query | {"offset": str(found["next_offset"])}, dict[str, Any])
        records = found["records"]


def line_of(record: dict[str, Any]) -> str:
    """Return a record as one line; clients choose subjects, which must not steer the terminal."""
    return escape("  ".join(str(show(record)) for show in _COLUMNS.values()))


def _what(record: dict[str, Any]) -> str:
    if record["kind"] != "change":
        return " ".join(filter(None, (record.get("action"), record.get("subject"), record.get("reason"))))
    entries = map(_entry, record.get("before", []), record.get("after", []))
    where = f"version {record['version']}" if "version" in record else "list of clients"
    return f"{where}: {', '.join(entries)}"


def _entry(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    entry = after or before or {}
    if "enforce" in entry:
        return f"enforce {entry['enforce']}"
    done = "added" if before is None else "removed" if after is None else "changed"
    if "pattern" in entry:
        return f"{done} {entry.get('effect', 'allow')} {entry['who']} {entry['action']} {entry['pattern']}"
    return f"{done} principal {entry.get('name')}"


_COLUMNS: dict[str, Callable[[Any], object]] = {
    "Time": lambda one: human_time(one["time_ms"]),
    "Kind": lambda one: one["kind"],
    "Principal": lambda one: one["principal"],
    "From": lambda one: one.get("source", ""),
    "What": _what,
    "Times": lambda one: f"{one.get('count', 1):,}",
    "Id": lambda one: one.get("id", ""),
}
