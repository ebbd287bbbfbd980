"""`babelbus audit`: logins, refusals and changes of the table, of a running server (docs/access.md)."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.command import BusCommand, examples, json_option
from babelbus.cli.output import human_time, print_all
from babelbus.cli.target import Target, admin_options


@click.command(
    "audit",
    cls=BusCommand,
    epilog=examples("babelbus audit", "babelbus audit --principal alice --json", "babelbus audit --id k3x7aq2m"),
)
@click.option("--count", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Newest records.")
@click.option("--id", "refusal", metavar="ID", help="The refusal with this id, which its error names.")
@click.option("--principal", metavar="NAME", help="Records of one principal.")
@json_option
@admin_options
def audit(target: Target, count: int, refusal: str | None, principal: str | None, as_json: bool) -> None:
    """Show the newest records of the audit."""
    query = {"count": str(count)}
    query |= {} if refusal is None else {"id": refusal}
    query |= {} if principal is None else {"principal": principal}
    records = target.api().ask("GET", "/api/audit", query, dict[str, Any])["records"]
    columns: dict[str, Callable[[Any], object]] = {
        "Time": lambda one: human_time(one["time_ms"]),
        "Kind": lambda one: one["kind"],
        "Principal": lambda one: one["principal"],
        "From": lambda one: one.get("source", ""),
        "What": _what,
        "Times": lambda one: f"{one.get('count', 1):,}",
        "Id": lambda one: one.get("id", ""),
    }
    print_all(records, as_json, "the audit has no such records", columns, numbers=("Times",))


def _what(record: dict[str, Any]) -> str:
    if record["kind"] != "change":
        return " ".join(filter(None, (record.get("action"), record.get("subject"), record.get("reason"))))
    changed = [*record.get("before", []), *record.get("after", [])]
    names = [_entry(entry) for entry in changed if entry is not None]
    return f"version {record['version']}: {', '.join(dict.fromkeys(names))}"


def _entry(entry: dict[str, Any]) -> str:
    if "pattern" in entry:
        return f"{entry.get('effect', 'allow')} {entry['who']} {entry['action']} {entry['pattern']}"
    return f"principal {entry['name']}" if "name" in entry else f"enforce {entry.get('enforce')}"
