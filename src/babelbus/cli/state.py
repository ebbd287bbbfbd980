"""`babelbus state`: the values of the bus, now and as they were, through the administration endpoint."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from babelbus.cli.api import LONG_TIMEOUT_SECONDS, TIMEOUT_SECONDS
from babelbus.cli.command import (
    BusGroup,
    CommandError,
    ask_first,
    complete,
    examples,
    json_option,
    max_option,
    summary_option,
    tell_done_at_interrupt,
)
from babelbus.cli.export import open_new, tell_summary, write_lines
from babelbus.cli.output import (
    escape,
    human_time,
    note,
    plural,
    print_json,
    print_line,
    print_table,
    progress,
    until_interrupted,
)
from babelbus.cli.state_lines import Line, batches, is_key, read_file
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.cli.times import parse_time
from babelbus.clock import SystemClock
from babelbus.units import UnitError

SHOWN_CHARACTERS = 200
"""Most characters of a value in a table."""

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a watch (a present value, a change, the number of missing lines, or why the watch has ended), or a
    stored change of a key."""

    offset: int | Unset = UNSET
    timestamp: int | Unset = UNSET
    source: str | Unset = UNSET
    key: str | Unset = UNSET
    value: msgspec.Raw | Unset = UNSET
    version: int = 0
    deleted: bool = False
    dropped: int = 0
    end: str = ""


class Changes(msgspec.Struct, frozen=True):
    """The last changes of a key, complete from an offset on."""

    key: str
    complete_from: int
    revisions: list[Change]


def read_moment(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, str]:
    """Read `--as-of` into the query of a request: a number is an offset of `$state`, any other text a time."""
    if value is None:
        return {}
    if re.fullmatch(r"\d+", value, re.ASCII):
        return {"as_of_offset": value}
    try:
        return {"as_of_time": str(parse_time(value, SystemClock().now_ms()))}
    except UnitError as error:
        raise click.BadParameter(f"{error}; or an offset of $state", ctx, param) from error


as_of_option = click.option(
    "--as-of", "moment", metavar="OFFSET|TIME", callback=read_moment,
    help="As it was after this offset of $state, or at this time: 2026-01-31T08:00 (UTC without a zone), -1h.",
)  # fmt: skip


def _patience(moment: dict[str, str]) -> float:
    return LONG_TIMEOUT_SECONDS if moment else TIMEOUT_SECONDS


@click.group(cls=BusGroup)
def state() -> None:
    """Read, change and follow the state: the last value of each key.

    A key is a path such as plant/line1/temp, a value is JSON. In a pattern '?' matches one element and '#' at the
    end any number of elements, also zero: quote patterns, the shell expands them.
    """


@state.command(
    epilog=examples(
        "babelbus state get plant/line1/temp",
        "babelbus state get plant/line1/name --raw            a string without its quotes",
        "babelbus state get plant/line1/temp --as-of -1h      as it was an hour ago",
        "babelbus state get plant/line1/temp --json           with its version",
    ),
)
@click.argument("key", shell_complete=complete("keys"))
@as_of_option
@click.option("--raw", is_flag=True, help="Print the text of a string: no quotes, no escapes.")
@json_option
@bus_options
def get(target: Target, key: str, moment: dict[str, str], raw: bool, as_json: bool) -> None:
    """Print a value."""
    query = {"key": key, **moment}
    line = target.api().ask("GET", "/api/state/value", query, Line, timeout_seconds=_patience(moment))
    value = bytes(line.value)
    if as_json:
        print_json(line)
    elif raw and value.startswith(b'"'):
        sys.stdout.buffer.write(msgspec.json.decode(value, type=str).encode() + b"\n")
    elif raw:
        sys.stdout.buffer.write(value + b"\n")
    else:
        print_line(_shown(value))


@state.command(
    "set",
    # A negative number is a value, not an option.
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "babelbus state set plant/line1/temp 21.5",
        'babelbus state set plant/line1 \'{"name": "presses", "running": true}\'',
        "babelbus state set plant/line1/name --text 'Line 1'",
        "babelbus state set plant/line1/plan - < plan.json",
        "babelbus state set plant/line1/owner '\"ann\"' --version 0    only if the key has no value",
    ),
)
@click.argument("key", shell_complete=complete("keys"))
@click.argument("value", required=False)
@click.option("--text", is_flag=True, help="The value is text: store it as a JSON string.")
@click.option(
    "--version", type=click.IntRange(0), metavar="N",
    help="Compare and set: only if the key has this version, 0 for none; it gets the next one.",
)  # fmt: skip
@json_option
@bus_options
def set_(target: Target, key: str, value: str | None, text: bool, version: int | None, as_json: bool) -> None:
    """Set KEY to VALUE, which is JSON; without one, or with '-', standard input is the value."""
    if value is None and sys.stdin.isatty():
        raise click.UsageError("no value: give a value, pipe it in, or write '-' to type it")
    data = sys.stdin.buffer.read() if value in (None, "-") else str(value).encode("utf-8", "surrogateescape")
    content = _as_text(data) if text else _as_json(data)
    query = {"key": key} | ({} if version is None else {"version": str(version)})
    stored = target.api().ask("PUT", "/api/state/value", query, dict[str, Any], content=content)
    if as_json:
        print_json(stored)
    elif stored["version"]:
        print_line(f"{escape(key)} has version {stored['version']}")


def _as_text(given: bytes) -> bytes:
    try:
        return msgspec.json.encode(given.decode())
    except UnicodeDecodeError as error:
        raise CommandError(f"the value is no UTF-8 text: {error}") from error


def _as_json(given: bytes) -> bytes:
    from babelbus.protocols.worterbuch.values import parse_value

    try:
        return parse_value(given)
    except (ValueError, msgspec.DecodeError) as error:
        raise CommandError(f"the value is no JSON: {error}; add --text to store it as a string") from error


@state.command(
    epilog=examples(
        "babelbus state match 'plant/#'                 plant and everything below it",
        "babelbus state match 'plant/?/temp' --json",
        "babelbus state match 'plant/#' --as-of 2026-01-31T08:00",
        "babelbus state match '$SYS/#'                  values about the server",
    ),
)
@click.argument("pattern", shell_complete=complete("keys"))
@as_of_option
@json_option
@bus_options
def match(target: Target, pattern: str, moment: dict[str, str], as_json: bool) -> None:
    """Print the keys and values that match a pattern, sorted by key. No match is no failure."""
    lines = target.api().lines(
        "/api/state/values", {"pattern": pattern, **moment}, Line, timeout_seconds=_patience(moment)
    )
    for line in sorted((line for line in lines if line is not None), key=lambda line: line.key.split("/")):
        if as_json:
            print_json(line)
        else:
            print_line(f"{escape(line.key)}  {_shown(bytes(line.value))}")


@state.command(
    epilog=examples(
        "babelbus state watch 'plant/#'                 until Ctrl-C",
        "babelbus state watch plant/line1/temp --max 1 --new-only",
        "babelbus state watch 'plant/#' --json | jq .value",
    ),
)
@click.argument("pattern", shell_complete=complete("keys"))
@click.option("--new-only", is_flag=True, help="Do not begin with the present values.")
@max_option
@json_option
@bus_options
def watch(target: Target, pattern: str, new_only: bool, count_max: int | None, as_json: bool) -> None:
    """Print the values that match a pattern, and each change as it happens, until Ctrl-C.

    A line is time, source, key and value; the values of the beginning have neither time nor source. If this command is
    too slow for the changes, it prints how many it missed.
    """
    query = {"pattern": pattern} | ({"new_only": "1"} if new_only else {})
    count = 0
    with until_interrupted(lambda: plural(count, "change")):
        for line in target.api().lines("/api/state/watch", query, Change, live=True):
            if line is None:
                continue
            if line.end:
                raise CommandError(f"the server ended the watch: {line.end}")
            if line.dropped:
                tell_dropped(line.dropped, as_json)
                continue
            if as_json:
                print_json(line)
            else:
                print_line(_show_change(line))
            count += 1
            if count == count_max:
                return
        raise CommandError("the server ended the watch: it stops")


def _show_change(line: Change) -> str:
    value = "(deleted)" if isinstance(line.value, Unset) else _shown(bytes(line.value))
    text = f"{escape(str(line.key))}  {value}"
    if isinstance(line.timestamp, Unset):  # a value of the beginning
        return text
    return f"{human_time(line.timestamp)}  {escape(str(line.source))}  {text}"


def tell_dropped(count: int, as_json: bool) -> None:
    """Print the number of lines that are missing here: in the data for a program, on standard error for a person."""
    if as_json:
        print_json({"dropped": count})
    else:
        were = "was" if count == 1 else "were"
        note(f"babelbus: {count:,} {were} not shown here: they arrived faster than this command read them")


@state.command(
    epilog=examples(
        "babelbus state delete plant/line1/temp",
        "babelbus state delete 'plant/line1/#' --yes         a pattern; asks without --yes",
    ),
)
@click.argument("pattern", metavar="KEY|PATTERN", shell_complete=complete("keys"))
@click.option("--yes", is_flag=True, help="Do not ask before a pattern deletes.")
@json_option
@bus_options
def delete(target: Target, pattern: str, yes: bool, as_json: bool) -> None:
    """Delete a value, or all values that match a pattern. History keeps them until compaction."""
    api = target.api()
    if is_key(pattern):
        gone = api.ask("DELETE", "/api/state/value", {"key": pattern}, Line)
        if as_json:
            print_json({"key": pattern, "deleted": 1, "value": gone.value})
        return
    if not yes:
        lines = api.lines("/api/state/values", {"pattern": pattern}, Line)
        # What the server says of itself is found by wildcards, and never deleted.
        count_before = sum(line is not None and line.key.partition("/")[0] != "$SYS" for line in lines)
        ask_first(yes, f"delete {plural(count_before, 'value')}")
    count = api.ask("DELETE", "/api/state/values", {"pattern": pattern}, dict[str, int])["deleted"]
    if as_json:
        print_json({"pattern": pattern, "deleted": count})
    else:
        print_line(f"{plural(count, 'value')} deleted")


@state.command(
    epilog=examples(
        "babelbus state export state.jsonl.gz",
        "babelbus state export - | jq -r .key",
        "babelbus state export before.jsonl --as-of -1d      the whole tree as it was yesterday",
    ),
)
@click.argument("file")
@as_of_option
@summary_option
@bus_options
def export(target: Target, file: str, moment: dict[str, str], as_json: bool) -> None:
    """Write all values to FILE ('-' is standard output; compressed if it ends in .gz), one JSON line each.

    A line is {"key", "value"} and "version" if it has one. Values about the server ($SYS) are left out. The file
    appears under its name when it is complete. 'babelbus state import' reads it.
    """
    lines = target.api().lines("/api/state/tree", moment, Line, timeout_seconds=_patience(moment))
    count = 0
    tell_done_at_interrupt(lambda: f"{plural(count, 'value')} read, {file} is not written")
    quiet = file == "-" and sys.stdout.isatty()
    with open_new(file) as output, progress("export the state", None, "values", quiet=quiet) as advance:
        for step in write_lines((line for line in lines if line is not None), output):
            count += step
            advance(step)
    _tell_done("exported", file, count, as_json)


@state.command(
    "import",
    epilog=examples(
        "babelbus state import state.jsonl.gz",
        "babelbus state import export.json.gz         an export of a Wörterbuch server",
        "babelbus state export - --as-of -1h | babelbus state import -",
    ),
)
@click.argument("file")
@summary_option
@bus_options
def import_(target: Target, file: str, as_json: bool) -> None:
    """Write the values of FILE ('-' is standard input) to the state: lines of 'state export', or a Wörterbuch export.

    Compressed files are recognised. Present values are overwritten, also those with a version; other keys are kept. If
    a line is wrong, the lines before it are stored and the error names the line.
    """
    api = target.api()
    count = 0
    tell_done_at_interrupt(lambda: f"{plural(count, 'value')} imported")
    try:
        with progress("import into the state", None, "values") as advance:
            for batch in batches(read_file(file)):
                api.ask("POST", "/api/state/values", {}, dict[str, int], content=msgspec.json.encode({"values": batch}))
                count += len(batch)
                advance(len(batch))
    except CommandError as error:
        raise CommandError(f"{error}; {plural(count, 'value')} imported") from error
    _tell_done("imported", file, count, as_json)


def _tell_done(done: str, file: str, count: int, as_json: bool) -> None:
    summary: dict[str, object] = {"file": file, "values": count}
    tell_summary(f"{plural(count, 'value')} {done}", summary, as_json, on_error=file == "-" and done == "exported")


@state.command(
    epilog=examples(
        "babelbus state history plant/line1/temp",
        "babelbus state history plant/line1/temp --before 1200 --max 10",
        "babelbus state history plant/line1/temp --json | jq .value",
    ),
)
@click.argument("key", shell_complete=complete("keys"))
@click.option("--max", "count_max", type=click.IntRange(1), default=100, show_default=True, help="The last N changes.")
@click.option("--before", type=click.IntRange(0), metavar="OFFSET", help="Only those in front of this offset.")
@json_option
@bus_options
def history(target: Target, key: str, count_max: int, before: int | None, as_json: bool) -> None:
    """Print the stored changes of a key, oldest first: offset in $state, time, version, source, and the value."""
    query = {"key": key, "max": str(count_max)} | ({} if before is None else {"before": str(before)})
    answer = target.api().ask("GET", "/api/state/revisions", query, Changes, timeout_seconds=LONG_TIMEOUT_SECONDS)
    if as_json:
        for revision in answer.revisions:
            print_json(revision)
    elif not answer.revisions:
        print_line(f"no stored change of {escape(key)}")
    else:
        print_table(("Offset", "Time", "Version", "Source", "Value"), _rows(answer.revisions), numbers=("Offset",))
    if answer.complete_from:
        note(f"complete from offset {answer.complete_from} on; compaction may have removed changes in front of it")


def _rows(revisions: list[Change]) -> Iterator[tuple[object, ...]]:
    for revision in revisions:
        value = "(deleted)" if isinstance(revision.value, Unset) else bytes(revision.value).decode()
        if len(value) > SHOWN_CHARACTERS:
            value = f"{value[:SHOWN_CHARACTERS]}... ({len(value)} characters)"
        assert isinstance(revision.timestamp, int)  # stored changes have all fields
        yield revision.offset, human_time(revision.timestamp), revision.version or "-", revision.source or "-", value


def _shown(value: bytes) -> str:
    return escape(value.decode())
