"""Points in time as written on a command line: "2026-01-31T08:00", "1700000000000", "-1h", "now"."""

import re
from datetime import UTC, datetime

import click

from babelbus.clock import SystemClock
from babelbus.units import UnitError, parse_duration

_MILLISECONDS = re.compile(r"\d+", re.ASCII)


def parse_time(text: str, now_ms: int) -> int:
    """Return a point in time in milliseconds since the epoch; an ISO time without a zone is UTC.

    Raises:
        UnitError: the text is no point in time.
    """
    text = text.strip()
    try:
        if text == "now":
            return now_ms
        if text.startswith("-"):
            return max(now_ms - round(parse_duration(text[1:]) * 1000), 1)
        if _MILLISECONDS.fullmatch(text) and len(text) != 4:  # four digits are a year
            return int(text)
        moment = datetime.fromisoformat(text + "-01-01" if len(text) == 4 else text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(round(moment.timestamp() * 1000), 1)
    except (UnitError, ValueError, OverflowError) as error:
        raise UnitError(
            f"{text!r} is no time: write 2026-01-31T08:00 (UTC without a zone), milliseconds since 1970, "
            f"-1h for an hour ago, or now"
        ) from error


def read_time(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read the text of an option for a point in time, as its callback."""
    try:
        return None if value is None else parse_time(value, SystemClock().now_ms())
    except UnitError as error:
        raise click.BadParameter(str(error), ctx, param) from error
