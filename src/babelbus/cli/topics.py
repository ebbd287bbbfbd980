"""`babelbus topics`: the topics of a running server, through its administration endpoint."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.api import ApiError, path_of
from babelbus.cli.command import BusGroup, CommandError, ask_first, complete, examples, json_option, yes_option
from babelbus.cli.output import human_bytes, plural, print_all, print_json, print_line, print_table
from babelbus.cli.serve import flag_of, metavar_of
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.config import describe
from babelbus.units import format_duration, format_size

_SHORT_FLAGS = {"retention_seconds": "--retention", "compact_after_seconds": "--compact-after"}


def _setting_options(*left_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option for each setting; the server checks the values and reads the units."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for entry in reversed(describe()):
            section, _, name = entry.key.partition(".")
            if section != "topics" or name in ("partitions", *left_out):
                continue
            flags = filter(None, (_SHORT_FLAGS.get(name), flag_of(name), name))
            kind = _read_count if entry.type.startswith("integer") else str
            command = click.option(*flags, metavar=metavar_of(entry.type), type=kind, help=f"{entry.doc}.")(command)
        return click.option("--partitions", type=click.IntRange(1, 1024), help="Ordered logs; can grow later.")(command)

    return decorate


def _read_count(text: str) -> int | str:
    """Return a number, which JSON has; other words are text, and the server says whether they are right."""
    return int(text) if text.isascii() and text.isdecimal() else text


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
@bus_options
def list_topics(target: Target, as_json: bool) -> None:
    """List all topics, with their sizes."""
    columns: dict[str, Callable[[Any], object]] = {
        "Topic": lambda topic: topic["name"],
        "Partitions": lambda topic: len(topic["partitions"]),
        "Records": lambda topic: f"{_records(topic):,}",
        "Size": lambda topic: human_bytes(sum(partition["bytes"] for partition in topic["partitions"])),
        "Ack": lambda topic: topic["settings"]["ack"],
        "Cleanup": lambda topic: topic["settings"]["cleanup"],
        "Retention": lambda topic: _retention(topic["settings"]),
    }
    nothing = "there are no topics yet; 'babelbus topics create NAME' makes one"
    topics = target.api().call("GET", "/api/topics")["topics"]
    print_all(topics, as_json, nothing, columns, numbers=("Partitions", "Records", "Size"))


@topics.command("show", epilog=examples("babelbus topics show orders", "babelbus topics show orders --json"))
@click.argument("name", shell_complete=complete("topics"))
@json_option
@bus_options
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
@_setting_options()
@json_option
@bus_options
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
@click.argument("name", shell_complete=complete("topics"))
@_setting_options("engine")
@json_option
@bus_options
def alter_topic(target: Target, name: str, partitions: int | None, as_json: bool, **settings: str | None) -> None:
    """Update settings of a topic while it is in use."""
    changes = _given({**settings, "partitions": partitions})
    if not changes:
        raise click.UsageError("nothing to change: name a setting, such as --retention 7d")
    topic = target.api().call("PATCH", path_of("topics", name), changes)
    shown = "".join(f", {key} {setting_text(key, topic['settings'][key])}" for key in changes if key != "partitions")
    _print_done(topic, f"topic {name} is changed{shown}", as_json)


@topics.command("remove", epilog=examples("babelbus topics remove orders", "babelbus topics remove orders --yes"))
@click.argument("name", shell_complete=complete("topics"))
@yes_option
@json_option
@bus_options
def remove_topic(target: Target, name: str, yes: bool, as_json: bool) -> None:
    """Remove a topic and all its records. There is no way back.

    With --yes also a closed topic that has lost a partition, of which nobody can say how many records it has.
    """
    api = target.api()
    records, amount = None, ""
    try:
        records = _records(api.topic(name))
        amount = f" with {plural(records, 'record')}"
    except ApiError as error:
        if error.code not in ("topic_closed", "refused") or not yes:
            raise
    ask_first(yes, f"remove topic {name}{amount}", " There is no way back")
    try:
        api.call("DELETE", path_of("topics", name))
    except ApiError as error:
        if error.code != "refused":
            raise
        raise CommandError(
            f"{error}; its owner can remove it, and everybody with the right to manage it; if the topic is closed, its "
            f"owner is not known"
        ) from error
    if as_json:
        print_json({"removed": name, "records": records})
    else:
        print_line(f"topic {name} is removed,{amount}" if amount else f"topic {name} is removed")


def _records(topic: dict[str, Any]) -> int:
    return sum(partition["high_watermark"] - partition["first_offset"] for partition in topic["partitions"])


def _retention(settings: dict[str, Any]) -> str:
    names = ("retention_seconds", "retention_bytes", "retention_records")
    bounds = [setting_text(name, settings[name]) for name in names if settings[name] is not None]
    return ", ".join(bounds) or "forever"


def setting_text(name: str, value: object) -> str:
    """Return the value of a setting of a topic or a group for a person."""
    if value is None:
        return "none"
    if name.removesuffix("_max").endswith("_seconds") and isinstance(value, int | float):
        return format_duration(value)
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if name == "retention_records":
        return plural(int(str(value)), "record")
    return str(value).replace("_", "-") if name == "ack" else str(value)


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
    print_table(("Topic", topic["name"]), [(name, setting_text(name, v)) for name, v in topic["settings"].items()])
    print_line("")
    columns = ("Partition", "First offset", "High watermark", "Next offset", "Size", "Segments")
    shown = [{**part, "size": human_bytes(part["bytes"])} for part in topic["partitions"]]
    rows = [[part[name.lower().replace(" ", "_")] for name in columns] for part in shown]
    print_table(columns, rows, numbers=columns)
