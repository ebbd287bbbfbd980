"""`babelbus dead-letters`: records that groups gave up: list them, publish them again, remove them."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from babelbus.cli.api import LONG_TIMEOUT_SECONDS, AdminApi, path_of
from babelbus.cli.command import (
    BusGroup,
    CommandError,
    ask_first,
    complete,
    examples,
    json_option,
    partition_option,
    yes_option,
)
from babelbus.cli.output import (
    escape,
    human_time,
    json_record,
    note,
    plural,
    print_all,
    print_json,
    print_line,
    show_record,
)
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

if TYPE_CHECKING:
    from babelbus.web.lines import LetterLine

PAGE_COUNT = 500
SHOWN_COUNT = 100

name_argument = click.argument("name", metavar="TOPIC|GROUP", shell_complete=complete("dead_letters"))


@click.group(
    cls=BusGroup,
    name="dead-letters",
    epilog=examples(
        "babelbus dead-letters list                   which groups gave records up",
        "babelbus dead-letters show workers           why, and where each came from",
        "babelbus dead-letters replay workers         publish them again, once the cause is repaired",
        "babelbus dead-letters purge workers          remove them when all were replayed",
    ),
)
def dead_letters() -> None:
    """List, show, replay and purge dead letters: records that a group failed to handle in all its attempts."""


@dead_letters.command(
    "list",
    epilog=examples("babelbus dead-letters list", "babelbus dead-letters list --json | jq 'select(.waiting > 0)'"),
)
@json_option
@bus_options
def list_topics(target: Target, as_json: bool) -> None:
    """List topics of dead letters.

    With the number of letters in each, and the groups that send to it.
    """
    columns: dict[str, Callable[[Any], object]] = {
        "Topic": lambda topic: topic["topic"],
        "Letters": lambda topic: f"{topic['letters']:,}",
        "Not replayed": lambda topic: f"{topic['waiting']:,}",
        "From groups": lambda topic: (
            ", ".join(f"{sender['group']} on {sender['topic']}" for sender in topic["senders"]) or "-"
        ),
    }
    nothing = "there are no dead letters: no group gave a record up"
    infos = target.api().call("GET", "/api/dead-letters")["dead_letters"]
    print_all(infos, as_json, nothing, columns, numbers=("Letters", "Not replayed"))


@dead_letters.command(
    "show",
    epilog=examples(
        "babelbus dead-letters show dead-letters/workers",
        "babelbus dead-letters show workers                      the same: the name of a group works, too",
        "babelbus dead-letters show workers --waiting --max 10",
        "babelbus dead-letters show workers --json | jq -r .reason | sort | uniq -c",
    ),
)
@name_argument
@click.option("--waiting", is_flag=True, help="Only letters that were not replayed.")
@partition_option
@click.option("--from-offset", "offset", type=click.IntRange(0), default=0, help="Offset to begin at.")
@click.option(
    "--max", "count_max", type=click.IntRange(1), metavar="N", help="Stop after N.  [default: 100; --json: all]"
)
@json_option
@bus_options
def show_letters(
    target: Target, name: str, waiting: bool, partition: int | None, offset: int, count_max: int | None, as_json: bool
) -> None:
    """Show dead letters.

    Why the group gave each record up, after how many deliveries, and where it came from.
    """
    api = target.api()
    info = api.call("GET", path_of("dead-letters", name))
    partitions = range(info["partitions"]) if partition is None else [partition]
    most = count_max if count_max is not None or as_json else SHOWN_COUNT
    count = 0
    for letter in _letters(api, info["topic"], partitions, offset):
        if waiting and letter.replayed:
            continue
        if most is not None and count == most:
            if count_max is None:
                note(f"there are more: continue with --from-offset {letter.record.offset}, or show more with --max N")
            return
        count += 1
        if as_json:
            print_json(_json(letter, info["topic"]))
        else:
            _print(letter)
    if not count and not as_json:
        print_line(f"there are no dead letters in {info['topic']}" + (" that were not replayed" if waiting else ""))


@dead_letters.command(
    "replay",
    epilog=examples(
        "babelbus dead-letters replay dead-letters/workers",
        "babelbus dead-letters replay workers --max 10           the ten oldest",
        "babelbus dead-letters replay workers --at 17 --at 1:4   offset 17, and offset 4 of partition 1",
    ),
)
@name_argument
@click.option("--max", "count_max", type=click.IntRange(1), metavar="N", help="At most N, the oldest first.")
@click.option("--at", "places", multiple=True, metavar="[PARTITION:]OFFSET", help="Only this letter; may be repeated.")
@json_option
@bus_options
def replay_letters(target: Target, name: str, count_max: int | None, places: tuple[str, ...], as_json: bool) -> None:
    """Publish dead letters again.

    Each once, in the topic of its origin. The letters are kept and marked as replayed. Every group on such a topic
    reads the record again, behind all newer ones. Exit code 1 if a letter could not be replayed; it waits for the
    next replay.
    """
    if count_max is not None and places:
        raise click.UsageError("--max takes the oldest letters, --at names them: give only one of the two options")
    body = {"max": count_max, "places": [_place(text) for text in places]}
    path = path_of("dead-letters", name, "replay")
    done = target.api().call("POST", path, body, timeout_seconds=LONG_TIMEOUT_SECONDS)
    if as_json:
        print_json(done)
    else:
        print_line(f"{plural(done['replayed'], 'dead letter')} of {done['topic']} replayed, {done['waiting']:,} wait")
    for failure in done["failures"]:
        note(f"babelbus: {failure['partition']}:{failure['offset']} was not replayed: {escape(failure['reason'])}")
    if done["failed"]:
        raise CommandError(f"{plural(done['failed'], 'dead letter')} could not be replayed")


@dead_letters.command(
    "purge",
    epilog=examples(
        "babelbus dead-letters purge dead-letters/workers        when all of them were replayed",
        "babelbus dead-letters purge workers --all --yes         with letters that were not replayed",
    ),
)
@name_argument
@click.option("--all", "everything", is_flag=True, help="Also letters that were not replayed.")
@yes_option
@json_option
@bus_options
def purge_letters(target: Target, name: str, everything: bool, yes: bool, as_json: bool) -> None:
    """Remove dead letters.

    Removes the whole topic of the letters, with the groups that read it. There is no way back. The next dead letter
    creates the topic again, with the server's defaults. Without --all the command fails unless all were replayed.
    """
    api = target.api()
    info = api.call("GET", path_of("dead-letters", name))
    letters = (
        f"topic {info['topic']} with {plural(info['letters'], 'dead letter')}, {info['waiting']:,} of them not replayed"
    )
    if not yes and (everything or not info["waiting"]):  # else the server refuses with the reason
        ask_first(yes, f"remove {letters}", " There is no way back")
    gone = api.call("POST", path_of("dead-letters", info["topic"], "purge"), {"all": everything})
    if as_json:
        print_json({"removed": gone["topic"], "letters": gone["letters"], "waiting": gone["waiting"]})
    else:
        print_line(
            f"topic {gone['topic']} is removed, with {plural(gone['letters'], 'dead letter')}, "
            f"{gone['waiting']:,} of them not replayed"
        )


def _letters(api: AdminApi, name: str, partitions: "range | list[int]", offset: int) -> "Iterator[LetterLine]":
    from babelbus.web.lines import Letters

    for partition in partitions:
        at: int | None = offset
        while at is not None:
            query = {"offset": str(at), "max": str(PAGE_COUNT)}
            page = api.ask("GET", path_of("dead-letters", name, str(partition)), query, Letters)
            yield from page.letters
            at = page.next_offset


def _json(letter: "LetterLine", topic: str) -> dict[str, Any]:
    from babelbus.web.record_lines import record_of

    came = {} if letter.origin is None else {
        "reason": letter.origin.reason,
        "attempts": letter.origin.attempts,
        "group": letter.origin.group,
        "time": letter.origin.time_ms,
        "origin": {
            "topic": letter.origin.topic, "partition": letter.origin.partition, "offset": letter.origin.offset,
        },
    }  # fmt: skip
    return json_record(record_of(letter.record), topic, letter.record.partition) | {"replayed": letter.replayed} | came


def _print(letter: "LetterLine") -> None:
    from babelbus.web.record_lines import record_of

    came = letter.origin
    print_line(show_record(record_of(letter.record), letter.record.partition))
    state = "replayed" if letter.replayed else "waits"
    if came is None:
        print_line(f"    {state}; no dead letter: published here by a client")
        return
    print_line(
        f"    {state}; {escape(came.reason)}; {came.attempts} deliveries by group {escape(came.group)}; "
        f"was {escape(came.topic)} {came.partition}:{came.offset}, given up {human_time(came.time_ms)}"
    )


def _place(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,18})", text, re.ASCII)
    if match is None:
        raise click.UsageError(f"--at is an offset, or PARTITION:OFFSET, not {text!r}")
    return int(match[1] or 0), int(match[2])
