"""Options for the position where a consumer group begins or continues."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.times import read_time

Command = Callable[..., Any]


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
