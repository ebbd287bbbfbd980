"""`babelbus groups`: the consumer groups of a running server, with their lag."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.api import path_of
from babelbus.cli.command import BusGroup, ask_first, complete, examples, json_option, partition_option, yes_option
from babelbus.cli.output import escape, human_time, note, plural, print_all, print_json, print_line, print_table
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.cli.times import read_time
from babelbus.cli.topics import setting_text
from babelbus.units import UnitError, parse_duration

Command = Callable[..., Any]


class Seconds(click.ParamType[float]):
    """A duration as people write it; its value is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert the text to seconds."""
        try:
            return parse_duration(str(value))
        except UnitError as error:
            self.fail(str(error), param, ctx)


class Attempts(click.ParamType[int | str]):
    """A number of deliveries, or `none`."""

    name = "attempts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Convert the text to a number, or `none`."""
        return "none" if value == "none" else click.IntRange(1).convert(value, param, ctx)


# setting -> flag, type, form of its value, and meaning; "none" means null.
_SETTINGS: dict[str, tuple[str, click.ParamType[Any] | type, str, str]] = {
    "filter": ("--filter", str, "NAME[=VALUE]|none", "Deliver only records with this header; the others are skipped."),
    "filter_kind": ("--filter-kind", str, "KIND", "Which protocol reads --filter.  [default: header]"),
    "ack_seconds": ("--ack-seconds", Seconds(), "DURATION", "A record without an ack for so long is delivered again."),
    "attempts_max": ("--attempts-max", Attempts(), "N|none", "Deliveries before a record becomes a dead letter."),
    "retry_seconds": ("--retry-seconds", Seconds(), "DURATION", "Wait before the second delivery; doubles each time."),
    "retry_seconds_max": ("--retry-seconds-max", Seconds(), "DURATION", "The longest such wait."),
    "order": ("--order", click.Choice(["key", "none"]), "key|none", "Whether records of one key keep their order."),
    "in_flight_max": ("--in-flight-max", click.IntRange(1, 10_000_000), "N", "Most records delivered and not acked."),
    "dead_letter_topic": (
        "--dead-letter-topic", str, "TOPIC|none", "Where dead letters go.  [default: dead-letters/GROUP]",
    ),
}  # fmt: skip


DEFAULTS = {
    "ack_seconds": "1m", "attempts_max": "16", "retry_seconds": "1s", "retry_seconds_max": "5m", "order": "key",
    "in_flight_max": "10000",
}  # fmt: skip
"""Setting -> its default in a new group, as help shows it; a test compares it with the core's."""


def setting_options(*, made: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each setting that can change; with `made`, help has the defaults."""

    def decorate(command: Command) -> Command:
        for name, (flag, type_, metavar, text) in reversed(_SETTINGS.items()):
            help_ = f"{text}  [default: {DEFAULTS[name]}]" if made and name in DEFAULTS else text
            command = click.option(flag, name, type=type_, metavar=metavar, help=help_)(command)
        return command

    return decorate


def given(values: dict[str, Any]) -> dict[str, object]:
    """Return the settings that have a value, `none` as null."""
    return {name: None if value == "none" and name != "order" else value for name, value in values.items()
            if value is not None}  # fmt: skip


def group_path(topic: str, group: str, *action: str) -> str:
    """Return the path of a group's requests."""
    return path_of("topics", topic, "groups", group, *action)


def place_options(word: str, text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds `--from`, `--from-offset` and `--from-time` (`word` "from"), or those with "to"."""
    what = "begin" if word == "from" else "continue"

    def decorate(command: Command) -> Command:
        for option in (
            click.option(f"--{word}-time", "place_time", metavar="TIME", callback=read_time,
                         help=f"Time to {what} at: 2026-01-31T08:00 (UTC without a zone) or -1h."),
            click.option(f"--{word}-offset", "place_offset", type=click.IntRange(0), help=f"Offset to {what} at."),
            click.option(f"--{word}", "place_at", type=click.Choice(["beginning", "end"]), help=text),
        ):  # fmt: skip
            command = option(command)
        return command

    return decorate


def read_place(
    word: str, at: str | None, offset: int | None, timestamp: int | None, partition: int | None = None
) -> dict[str, object] | None:
    """Return the position as the body of a request; `None` without an option."""
    places = [
        ({"at": at, "value": 0}, at),
        ({"at": "offset", "value": offset}, offset),
        ({"at": "time", "value": timestamp}, timestamp),
    ]
    chosen: list[dict[str, object]] = [dict(place) for place, value in places if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"--{word}, --{word}-offset and --{word}-time are different places: give only one")
    return chosen[0] | {"partition": partition} if chosen else None


def _of_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds the arguments TOPIC and GROUP, `options`, and the options that all commands have."""

    def decorate(command: Command) -> Command:
        parts: list[Callable[[Command], Command]] = [
            click.argument("topic", shell_complete=complete("topics")),
            click.argument("group", shell_complete=complete("groups")),
            *options,
        ]
        parts += [json_option, bus_options]
        for part in reversed(parts):
            command = part(command)
        return command

    return decorate


@click.group(
    cls=BusGroup,
    epilog=examples(
        "babelbus groups create orders workers --from beginning",
        "babelbus consume orders --group workers --exec ./handle     run several: they share the records",
        "babelbus groups list                                        the lag of each group",
        "babelbus groups seek orders workers --to-time -1h           the last hour again",
    ),
)
def groups() -> None:
    """List, show, create, change, seek, pause and remove consumer groups.

    A group is a position in a topic that its members share: each record goes to one of them. Every group gets all.
    """


@groups.command(
    "list", epilog=examples("babelbus groups list", "babelbus groups list orders --json | jq '{name, lag}'")
)
@click.argument("topic", required=False, shell_complete=complete("topics"))
@json_option
@bus_options
def list_groups(target: Target, topic: str | None, as_json: bool) -> None:
    """List groups and their lag.

    All groups, or those of TOPIC; the lag is the number of records that are not done.
    """
    query = {} if topic is None else {"topic": topic}
    infos: list[dict[str, Any]] = target.api().ask("GET", "/api/groups", query, dict[str, Any])["groups"]
    columns: dict[str, Callable[[Any], object]] = {
        "Topic": lambda group: group["topic"],
        "Group": lambda group: group["name"],
        "Ack": lambda group: setting_text("ack", group["settings"]["ack"]),
        "Members": lambda group: "paused" if group["paused"] else group["members"],
        "Lag": lambda group: f"{group['lag']:,}",
        "In flight": lambda group: f"{group['in_flight']:,}",
        "Redelivered": lambda group: f"{group['counts']['redelivered']:,}",
        "Dead letters": lambda group: f"{group['counts']['dead_lettered']:,}",
    }
    nothing = "there are no groups; 'babelbus groups create TOPIC GROUP' or 'babelbus consume' makes one"
    print_all(infos, as_json, nothing, columns, numbers=tuple(columns)[3:])


@groups.command(
    "show", epilog=examples("babelbus groups show orders workers", "babelbus groups show orders workers --json")
)
@_of_group()
def show_group(target: Target, topic: str, group: str, as_json: bool) -> None:
    """Show one group.

    Why records wait, its members, its settings, its position in each partition, and its counts since the server
    started.
    """
    info = target.api().call("GET", group_path(topic, group))
    if as_json:
        print_json(info)
        return
    for obstacle in info["obstacles"]:
        print_line(escape(obstacle["text"]))
    if info["obstacles"]:
        print_line("")
    state = [("made", human_time(info["created_ms"])), ("members", info["members"])]
    state += [("paused", "yes")] if info["paused"] else []
    settings = [(name, setting_text(name, value)) for name, value in info["settings"].items() if name != "labels"]
    labels = [(f"label {name}", value) for name, value in info["settings"]["labels"].items()]
    print_table(("Group", info["name"]), [*state, *settings, *labels])
    print_line("")
    names = ("partition", "committed", "position", "end", "lag", "in_flight")
    columns = ("Partition", "Done below", "Next", "End", "Lag", "In flight")
    print_table(columns, [[lane[name] for name in names] for lane in info["lanes"]], numbers=columns)
    if info["joined"]:
        print_line("")
        head = ("Member", "Protocol", "Address", "Joined", "In flight", "Takes no more")
        print_table(head, [_member_line(member) for member in info["joined"]], numbers=("In flight",))
    print_line("")
    print_table(("Since the start", "Records"), list(info["counts"].items()), numbers=("Records",))


def _member_line(member: dict[str, Any]) -> list[object]:
    """Return the cells of a member; names that the server does not tell are a dash."""
    cells = [member["principal"] or "-", member["protocol"] or "-", member["address"] or "-"]
    return [*map(escape, cells), human_time(member["since_ms"]), member["in_flight"], member["full"] or "-"]


@groups.command(
    "create",
    epilog=examples(
        "babelbus groups create orders workers",
        "babelbus groups create orders audit --from beginning --attempts-max 5 --ack-seconds 5m",
        "babelbus groups create orders express --filter type=express --from-time -1h",
    ),
)
@_of_group(
    click.option(
        "--ack", type=click.Choice(["explicit", "on-delivery"]), default="explicit", show_default=True,
        help="A record is done when a member acks it, or when it is delivered. Fixed.",
    ),
    place_options("from", "Where to begin.  [default: end]"),
    setting_options(made=True),
)  # fmt: skip
def create_group(
    target: Target,
    topic: str,
    group: str,
    ack: str,
    place_at: str | None,
    place_offset: int | None,
    place_time: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Create a group on a topic.

    Every group gets each record of the topic; its members share them.
    """
    start = read_place("from", place_at, place_offset, place_time)
    body = {
        "topic": topic,
        "name": group,
        "settings": given(settings) | {"ack": ack.replace("-", "_")},
        "start": start or {"at": "end"},
    }
    info = target.api().call("POST", "/api/groups", body)
    _print_done(info, "is made", as_json)
    _warn_of_waiting(info)


@groups.command(
    "alter",
    epilog=examples(
        "babelbus groups alter orders workers --ack-seconds 10m",
        "babelbus groups alter orders workers --attempts-max none     never a dead letter",
        "babelbus groups alter orders express --filter none           every record",
    ),
)
@_of_group(setting_options(made=False))
def alter_group(target: Target, topic: str, group: str, as_json: bool, **settings: Any) -> None:
    """Update settings of a group.

    The group may be in use. 'none' removes a filter, the limit of attempts, or the topic of dead letters.
    """
    changes = given(settings)
    if not changes:
        raise click.UsageError("nothing to change: name a setting, such as --ack-seconds 5m")
    _print_done(target.api().call("PATCH", group_path(topic, group), changes), "is changed", as_json)


@groups.command(
    "seek",
    epilog=examples(
        "babelbus groups seek orders workers --to beginning      everything again",
        "babelbus groups seek orders workers --to end            skip all stored records",
        "babelbus groups seek orders workers --to-time -1h",
        "babelbus groups seek orders workers --to-offset 1700 --partition 2",
        "babelbus groups seek orders workers --to-time -1h --preview     what would come again, without moving",
    ),
)
@_of_group(
    place_options("to", "Where to continue."),
    partition_option,
    click.option("--preview", is_flag=True, help="Show what would be delivered again or skipped, and move nothing."),
)
def seek_group(
    target: Target,
    topic: str,
    group: str,
    place_at: str | None,
    place_offset: int | None,
    place_time: int | None,
    partition: int | None,
    preview: bool,
    as_json: bool,
) -> None:
    """Move a group to another position.

    The group may be in use: acks of earlier deliveries are ignored. An offset is used in each partition unless
    --partition is given.
    """
    place = read_place("to", place_at, place_offset, place_time, partition)
    if place is None:
        raise click.UsageError("no position: give --to beginning, --to end, --to-offset N or --to-time TIME")
    if preview:
        _print_preview(target.api().call("POST", f"{group_path(topic, group, 'seek')}?preview=1", place), as_json)
        return
    set_ = target.api().call("POST", group_path(topic, group, "seek"), place)
    _print_done(set_, "continues at the new position", as_json)
    _warn_of_waiting(set_)


@groups.command("pause", epilog=examples("babelbus groups pause orders workers"))
@_of_group()
def pause_group(target: Target, topic: str, group: str, as_json: bool) -> None:
    """Stop deliveries until 'resume'.

    The pause lasts over a restart. Acks are accepted meanwhile.
    """
    _print_done(target.api().call("POST", group_path(topic, group, "pause")), "is paused", as_json)


@groups.command("resume", epilog=examples("babelbus groups resume orders workers"))
@_of_group()
def resume_group(target: Target, topic: str, group: str, as_json: bool) -> None:
    """Resume the deliveries of a paused group."""
    _print_done(target.api().call("POST", group_path(topic, group, "resume")), "goes on", as_json)


@groups.command(
    "remove",
    epilog=examples("babelbus groups remove orders workers", "babelbus groups remove orders workers --yes"),
)
@_of_group(yes_option)
def remove_group(target: Target, topic: str, group: str, yes: bool, as_json: bool) -> None:
    """Remove a group.

    Its position in the topic is forgotten; the topic's records are kept.
    """
    api = target.api()
    info = api.call("GET", group_path(topic, group))
    lag, members = plural(info["lag"], "record"), plural(info["members"], "member")
    summary = f"group {group} of topic {topic}, with a lag of {lag} and {members}"
    ask_first(yes, f"remove {summary}", " Its position is forgotten")
    api.call("DELETE", group_path(topic, group))
    if as_json:
        print_json({"removed": group, "topic": topic, "lag": info["lag"]})
    else:
        print_line(f"group {group} of topic {topic} is removed")


def _warn_of_waiting(group: dict[str, Any]) -> None:
    """Print a warning for each partition where the position is beyond the end: the group skips records until there."""
    for lane in group["lanes"]:
        if lane["position"] > lane["end"]:
            note(
                f"babelbus: partition {lane['partition']} ends at {lane['end']}: "
                f"the group skips new records there until offset {lane['position']}"
            )


def _print_preview(effect: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(effect)
        return
    names = ("partition", "committed", "target", "end", "again", "skipped", "in_flight")
    columns = ("Partition", "Done below", "New position", "End", "Again", "Skipped", "In flight")
    print_table(columns, [[line[name] for name in names] for line in effect["partitions"]], numbers=columns)
    print_line(
        f"{plural(effect['again'], 'record')} would be delivered again, {effect['skipped']:,} skipped; acks of "
        f"{effect['in_flight']:,} in flight would count as stale"
    )


def _print_done(group: dict[str, Any], what: str, as_json: bool) -> None:
    if as_json:
        print_json(group)
    else:
        ack = setting_text("ack", group["settings"]["ack"])
        print_line(f"group {group['name']} of topic {group['topic']} {what}: ack {ack}, lag {group['lag']:,}")
