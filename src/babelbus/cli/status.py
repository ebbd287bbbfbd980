"""`babelbus status` and `babelbus top`: how a server is, on one screen, once or live (docs/command-line.md)."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from babelbus.cli.command import BusCommand, CommandError, examples, json_option
from babelbus.cli.groups import Seconds
from babelbus.cli.output import (
    escape,
    has_colours,
    human_bytes,
    note,
    paint,
    plural,
    print_json,
    print_line,
    terminal_width,
)
from babelbus.cli.tables import lay_out
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi

Sample = dict[str, Any]
"""The figures of `GET /api/status`."""
SHOWN_ROWS = 10
SLOW_LAG_SECONDS = 10.0
"""A group that needs so long for its lag at its present pace is slow."""
GREEN, YELLOW, RED = "32", "33", "31"
PROTOCOL_FIELDS = ("published", "published_bytes", "fetched", "fetched_bytes", "live_received", "live_delivered")
TOPIC_FIELDS = ("published", "published_bytes", "fetched")
GROUP_FIELDS = ("delivered", "acknowledged", "redelivered")

interval_option = click.option(
    "--interval", type=Seconds(), default="1s", show_default=True, metavar="DURATION", help="Time that rates are of."
)


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus status                          the server here, or of the context in use",
        "babelbus status --context prod --all",
        "babelbus status --json | jq .health",
    ),
)
@click.option("--all", "everything", is_flag=True, help="All topics and groups, also those without traffic.")
@interval_option
@json_option
@bus_options
def status(target: Target, everything: bool, interval: float, as_json: bool) -> None:
    """Show how a server is, on one screen.

    Health and why it is degraded, rates, disk and memory, connections by protocol, topics, groups with lag. The
    command takes two samples, an --interval apart. Exit code 0 if the server is well, 1 if it is degraded.
    """
    api = target.api()
    first = _sample(api)
    time.sleep(interval)
    last = _with_rates(first, _sample(api))
    if as_json:
        print_json(last)
    else:
        for line in _screen(last, None if everything else SHOWN_ROWS, terminal_width()):
            print_line(line)
    if last["health"] != "ok":
        click.get_current_context().exit(1)


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus top                             until Ctrl-C",
        "babelbus top --context prod --interval 5s",
        "babelbus top --once                      one screen, also without a terminal",
        "babelbus top --json | jq -c '{rates, slow}'",
    ),
)
@click.option("--once", is_flag=True, help="Show one screen and end.")
@interval_option
@json_option
@bus_options
def top(target: Target, once: bool, interval: float, as_json: bool) -> None:
    """Show the rates, the lag and the slow consumers of a server live, by protocol, until Ctrl-C.

    Without a terminal a screen follows the other; with --json a line does.
    """
    api = target.api()
    is_live = sys.stdout.isatty() and not once and not as_json
    samples = _samples(api, interval)
    try:
        if is_live:
            _show_live(samples)
            return
        for at, sample in enumerate(samples):
            if as_json:
                print_json(sample)
            else:
                if at:
                    print_line("")
                for line in _screen(sample, SHOWN_ROWS, terminal_width()):
                    print_line(line)
            if once:
                return
    except KeyboardInterrupt:
        if not is_live:
            note("stopped")


def _show_live(samples: Iterator[Sample]) -> None:
    """Show the samples in place of each other."""
    import shutil

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for sample in samples:
            size = shutil.get_terminal_size()
            lines = _screen(sample, max(3, (size.lines - 14) // 2), size.columns)
            live.update(Text.from_ansi("\n".join(lines[: size.lines - 1])), refresh=True)


def _sample(api: "AdminApi") -> Sample:
    return api.call("GET", "/api/status")


def _samples(api: "AdminApi", interval: float) -> Iterator[Sample]:
    """Yield a sample with rates each `interval` seconds; a server that is away for a moment is waited for."""
    last = _sample(api)
    while True:
        time.sleep(interval)
        sample = _sample(api)
        yield _with_rates(last, sample)
        last = sample


def _with_rates(first: Sample, last: Sample) -> Sample:
    """Return the second sample with `rates` in each protocol, topic and group, the sums, and the `slow` groups."""
    seconds = last["time_seconds"] - first["time_seconds"]
    if seconds <= 0:
        raise CommandError("the server was started again between two looks: ask again")
    _add_rates(first["protocols"], last["protocols"], ("protocol",), PROTOCOL_FIELDS, seconds)
    _add_rates(first["topics"], last["topics"], ("name",), TOPIC_FIELDS, seconds)
    _add_rates(first["groups"], last["groups"], ("topic", "name"), GROUP_FIELDS, seconds)
    rates = {name: sum(one["rates"][name] for one in last["protocols"]) for name in PROTOCOL_FIELDS}
    for name in GROUP_FIELDS:
        rates[name] = sum(group["rates"][name] for group in last["groups"])
    slow = []
    before = {(group["topic"], group["name"]): group["lag"] for group in first["groups"]}
    for group in last["groups"]:
        pace = group["rates"]["acknowledged"]
        group["lag_seconds"] = group["lag"] / pace if pace else None
        is_growing = group["lag"] > before.get((group["topic"], group["name"]), group["lag"])
        if group["lag"] and (is_growing or not pace or group["lag"] / pace > SLOW_LAG_SECONDS):
            slow.append({"topic": group["topic"], "name": group["name"], "why": _why_slow(group, is_growing)})
    return last | {"rates": {name: round(rate, 1) for name, rate in rates.items()}, "slow": slow}


def _why_slow(group: Sample, is_growing: bool) -> str:
    if group["paused"]:
        return "paused"
    if not group["members"]:
        return "no members"
    if is_growing:
        return "the lag grows"
    return "nothing is acked" if not group["rates"]["acknowledged"] else "the lag takes long"


def _add_rates(
    first: list[Sample], last: list[Sample], key: Sequence[str], fields: Sequence[str], seconds: float
) -> None:
    before = {tuple(one[name] for name in key): one for one in first}
    for one in last:
        old = before.get(tuple(one[name] for name in key), {})
        one["rates"] = {name: round(max(one[name] - old.get(name, 0), 0) / seconds, 1) for name in fields}


# -- the screen ------------------------------------------------------------------------------------------------------


def _screen(sample: Sample, rows_max: int | None, width: int | None) -> list[str]:
    """Return the lines of one screen."""
    is_well = sample["health"] == "ok"
    health = paint(sample["health"], GREEN if is_well else RED)
    uptime = _uptime(round(sample["uptime_seconds"]))
    lines = [f"babelbus {sample['version']}: {health}, up {uptime}, gate {'on' if sample['enforcing'] else 'off'}"]
    lines += [f"  {paint('!', RED)} {escape(reason)}" for reason in sample["reasons"]]
    rates, disk = sample["rates"], sample["disk"]
    free = "" if disk["free_bytes"] is None else f", {human_bytes(disk['free_bytes'])} free"
    lines += [
        f"published {_rate(rates['published'])} ({human_bytes(rates['published_bytes'])}/s), "
        f"fetched {_rate(rates['fetched'])}, acked {_rate(rates['acknowledged'])}",
        f"live in {_rate(rates['live_received'])}, out {_rate(rates['live_delivered'])}",
        f"topics {human_bytes(disk['log_bytes'])}{free}, memory {human_bytes(sample['memory_bytes'])}",
    ]
    lines += _section("", _PROTOCOLS, [one for one in sample["protocols"] if one["connections"] or _is_busy(one)],
                      None, width)  # fmt: skip
    topics = sorted(sample["topics"], key=lambda topic: (-topic["rates"]["published"], -topic["bytes"], topic["name"]))
    lines += _section("topics", _TOPICS, topics, rows_max, width)
    groups = sorted(sample["groups"], key=lambda group: (-group["lag"], group["topic"], group["name"]))
    slow = {(one["topic"], one["name"]): one["why"] for one in sample["slow"]}
    shown = [group | {"why": slow.get((group["topic"], group["name"]), "")} for group in groups]
    lines += _section("groups", _GROUPS, shown, rows_max, width)
    return lines


def _is_busy(protocol: Sample) -> bool:
    return any(protocol["rates"].values()) or bool(protocol["connections_refused"])


Columns = dict[str, Callable[[Any], object]]
_PROTOCOLS: Columns = {
    "Protocol": lambda one: one["protocol"],
    "Connections": lambda one: f"{one['connections']:,}",
    "Published": lambda one: _rate(one["rates"]["published"]),
    "Fetched": lambda one: _rate(one["rates"]["fetched"]),
    "Live in": lambda one: _rate(one["rates"]["live_received"]),
    "Live out": lambda one: _rate(one["rates"]["live_delivered"]),
    "Dropped": lambda one: f"{one['live_dropped']:,}",
    "Waiting": lambda one: human_bytes(one["waiting_bytes"]),
}
_TOPICS: Columns = {
    "Topic": lambda topic: topic["name"],
    "Records": lambda topic: f"{topic['records']:,}",
    "Size": lambda topic: human_bytes(topic["bytes"]),
    "Published": lambda topic: _rate(topic["rates"]["published"]),
    "Fetched": lambda topic: _rate(topic["rates"]["fetched"]),
}
_GROUPS: Columns = {
    "Group": lambda group: group["name"],
    "Topic": lambda group: group["topic"],
    "Members": lambda group: "paused" if group["paused"] else f"{group['members']:,}",
    "Lag": lambda group: f"{group['lag']:,}",
    "In flight": lambda group: f"{group['in_flight']:,}",
    "Acked": lambda group: _rate(group["rates"]["acknowledged"]),
    "Again": lambda group: _rate(group["rates"]["redelivered"]),
    "Slow": lambda group: group["why"],
}
_TEXTS = ("Protocol", "Topic", "Group", "Slow")


def _section(name: str, columns: Columns, items: list[Sample], rows_max: int | None, width: int | None) -> list[str]:
    """Return a table with an empty line above, and a line that says how many rows are left out."""
    if not items:
        return []
    rows = [[escape(str(cell(item))) for cell in columns.values()] for item in items[:rows_max]]
    numbers = [column for column in columns if column not in _TEXTS]
    style = "1" if has_colours() else ""
    lines = ["", *lay_out(tuple(columns), rows, numbers=numbers, width=width, head_style=style)]
    if rows_max is not None and len(items) > rows_max:
        lines.append(f"and {plural(len(items) - rows_max, f'more {name[:-1]}')}")
    return lines


def _uptime(seconds: int) -> str:
    """Return a time in its two largest units: "18m 42s", "3d 4h"."""
    units = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    at = next((at for at, (_, size) in enumerate(units) if seconds >= size), len(units) - 1)
    parts = [
        f"{seconds // size if here == at else seconds % units[here - 1][1] // size}{unit}"
        for here, (unit, size) in list(enumerate(units))[at : at + 2]
    ]
    return " ".join(parts)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 or not rate else f"{rate:,.1f}/s"
