"""`babelbus topics`: the topics of a running server, through its administration endpoint."""

import sys
from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.command import BusGroup, CommandError, examples
from babelbus.cli.output import human_bytes, print_json, print_line, print_table
from babelbus.cli.target import Target, admin_options
from babelbus.units import format_duration, format_size

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")

# setting -> (flags, form of its value, meaning). The server checks the values and reads the units.
_SETTINGS = {
    "ack": (("--ack",), "accepted|written|flushed", "When a publisher is answered."),
    "retention_seconds": (("--retention", "--retention-seconds"), "DURATION|none", "Remove older segments, as in 7d."),
    "retention_bytes": (("--retention-bytes",), "SIZE|none", "Bound of each partition, as in 10GiB."),
    "retention_records": (("--retention-records",), "COUNT|none", "Records that each partition keeps at least."),
    "cleanup": (("--cleanup",), "delete|compact", "Remove old segments, or keep the last record of each key."),
    "segment_bytes": (("--segment-bytes",), "SIZE|none", "Size at which a new segment begins."),
    "segment_seconds": (("--segment-seconds",), "DURATION|none", "Age at which a new segment begins."),
    "tombstone_seconds": (("--tombstone-seconds",), "DURATION", "How long a compacted topic shows removed keys."),
    "compact_after_seconds": (
        ("--compact-after", "--compact-after-seconds"),
        "DURATION|none",
        "Compaction leaves younger records alone.",
    ),
    "retain": (("--retain",), "none|last", "Also keep the last event of each subject as state."),
}
_ENGINE = {"engine": (("--engine",), "disk|memory|db", "Where the records are stored; fixed for a topic.")}


def _setting_options(settings: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, (flags, metavar, text) in reversed(settings.items()):
            command = click.option(*flags, name, metavar=metavar, help=text)(command)
        return click.option("--partitions", type=click.IntRange(1, 1024), help="Ordered logs; can grow later.")(command)

    return decorate


def _given(values: dict[str, Any]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


@click.group(cls=BusGroup)
def topics() -> None:
    """List, show, create, change and remove topics."""


@topics.command(
    "list",
    epilog=examples("babelbus topics list", "babelbus topics list --json | jq -r .name"),
)
@json_option
@admin_options
def list_topics(target: Target, as_json: bool) -> None:
    """List all topics, with their sizes."""
    infos = target.api().topics()
    if as_json:
        for topic in infos:
            print_json(topic)
        return
    if not infos:
        print_line("there are no topics yet; 'babelbus topics create NAME' makes one")
        return
    rows = [
        (
            topic["name"],
            len(topic["partitions"]),
            _records(topic),
            human_bytes(sum(partition["bytes"] for partition in topic["partitions"])),
            topic["settings"]["ack"],
            topic["settings"]["cleanup"],
            _retention(topic["settings"]),
        )
        for topic in infos
    ]
    columns = ("Topic", "Partitions", "Records", "Size", "Ack", "Cleanup", "Retention")
    print_table(columns, rows, numbers=("Partitions", "Records", "Size"))


@topics.command("show", epilog=examples("babelbus topics show orders", "babelbus topics show orders --json"))
@click.argument("name")
@json_option
@admin_options
def show_topic(target: Target, name: str, as_json: bool) -> None:
    """Show one topic: its settings and its partitions."""
    _print_topic(target.api().topic(name), as_json)


@topics.command(
    "create",
    epilog=examples(
        "babelbus topics create orders",
        "babelbus topics create plant/line1 --partitions 4 --retention 7d --retention-bytes 10GiB",
        "babelbus topics create prices --cleanup compact --ack written",
        "babelbus topics create plant --retain last    its last events can be read as state",
    ),
)
@click.argument("name")
@_setting_options(_SETTINGS | _ENGINE)
@json_option
@admin_options
def create_topic(target: Target, name: str, partitions: int | None, as_json: bool, **settings: str | None) -> None:
    """Create a topic. Other settings are from the section [topics] of the server's configuration."""
    topic = target.api().create_topic(name, partitions, _given(settings))
    _print_done(topic, f"topic {name} is made", as_json)


@topics.command(
    "alter",
    epilog=examples(
        "babelbus topics alter orders --retention 30d",
        "babelbus topics alter orders --retention-bytes none    no bound any more",
        "babelbus topics alter orders --partitions 8            can grow, not shrink",
    ),
)
@click.argument("name")
@_setting_options(_SETTINGS)
@json_option
@admin_options
def alter_topic(target: Target, name: str, partitions: int | None, as_json: bool, **settings: str | None) -> None:
    """Update settings of a topic while it is in use."""
    changes = _given({**settings, "partitions": partitions})
    if not changes:
        raise click.UsageError("nothing to change: name a setting, such as --retention 7d")
    _print_done(target.api().alter_topic(name, changes), f"topic {name} is changed", as_json)


@topics.command("remove", epilog=examples("babelbus topics remove orders", "babelbus topics remove orders --yes"))
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@admin_options
def remove_topic(target: Target, name: str, yes: bool, as_json: bool) -> None:
    """Remove a topic and all its records. There is no way back."""
    api = target.api()
    records = _records(api.topic(name))
    if not yes:
        if not sys.stdin.isatty():
            raise CommandError(f"this would remove {records} records of topic {name}: add --yes if that is meant")
        click.confirm(f"Remove topic {name} with {records} records? There is no way back", abort=True, err=True)
    api.remove_topic(name)
    if as_json:
        print_json({"removed": name, "records": records})
    else:
        print_line(f"topic {name} is removed, with {records} records")


def _records(topic: dict[str, Any]) -> int:
    return sum(partition["high_watermark"] - partition["first_offset"] for partition in topic["partitions"])


def _retention(settings: dict[str, Any]) -> str:
    bounds = []
    if settings["retention_seconds"] is not None:
        bounds.append(format_duration(settings["retention_seconds"]))
    if settings["retention_bytes"] is not None:
        bounds.append(format_size(settings["retention_bytes"]))
    if settings["retention_records"] is not None:
        bounds.append(f"{settings['retention_records']} records")
    return ", ".join(bounds) or "forever"


def _setting_text(name: str, value: object) -> str:
    if value is None:
        return "none"
    if name.endswith("_seconds") and isinstance(value, int | float):
        return format_duration(value)
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    return str(value)


def _print_done(topic: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(topic)
    else:
        count = len(topic["partitions"])
        print_line(f"{text}: {count} partition{'s' if count > 1 else ''}, ack {topic['settings']['ack']}")


def _print_topic(topic: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(topic)
        return
    print_table(("Topic", topic["name"]), [(name, _setting_text(name, v)) for name, v in topic["settings"].items()])
    print_line("")
    rows = [
        (partition["partition"], partition["first_offset"], partition["high_watermark"], partition["next_offset"],
         human_bytes(partition["bytes"]), partition["segments"])
        for partition in topic["partitions"]
    ]  # fmt: skip
    columns = ("Partition", "First offset", "High watermark", "Next offset", "Size", "Segments")
    print_table(columns, rows, numbers=columns)
