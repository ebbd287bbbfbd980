"""What an option may look like, of the source and of the sink: numbers, sizes, times, words; and how they are named."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from babelbus.spark.errors import OptionError
from babelbus.units import UnitError, parse_duration, parse_size

T = TypeVar("T")

SERVER_ALIASES = {"kafka.bootstrap.servers": "url", "bootstrap.servers": "url", "servers": "url"}
"""What users of Spark's Kafka source call the server."""


def normalise(given: Mapping[str, str], names: Iterable[str], aliases: Mapping[str, str], who: str) -> dict[str, str]:
    """Give the options under the names that we write, whatever their case.

    Raises:
        OptionError: one is unknown, or given under two names.
    """
    known = {name.lower(): name for name in names} | dict(aliases)
    options: dict[str, str] = {}
    for key, value in given.items():
        name = known.get(key.lower())
        if name is None:
            raise OptionError(f"option {key} is unknown; {who} has {', '.join(names)}")
        if name in options:
            raise OptionError(f"option {name} is given twice, as {key} too")
        options[name] = value
    return options


def wrong_value(name: str, value: str, wanted: str) -> OptionError:
    """Give the error of an option that has a value which is not possible; `wanted` says what is."""
    shown = value if len(value) <= 200 else f"{value[:200]}..."
    return OptionError(f"option {name}: {shown!r} is not possible; write {wanted}")


def read_count(options: Mapping[str, str], name: str) -> int | None:
    """Give a number from 1 on, `None` when the option is not given."""
    value = options.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII) or int(value) == 0:
        raise wrong_value(name, value, "a whole number from 1 on")
    return int(value)


def read_bytes(options: Mapping[str, str], name: str) -> int | None:
    """Give a size in bytes, `None` when the option is not given."""
    return _unit(options, name, parse_size, "a size above 0, as 64MiB or a number of bytes")


def read_duration(options: Mapping[str, str], name: str, default: str) -> float:
    """Give a time in seconds."""
    found = _unit({name: default} | dict(options), name, parse_duration, "a time above 0, as 15m, 30s or 500ms")
    assert found is not None
    return found


def _unit(options: Mapping[str, str], name: str, parse_unit: Callable[[str], T], wanted: str) -> T | None:
    value = options.get(name)
    if value is None:
        return None
    try:
        found = parse_unit(value)
    except UnitError:
        raise wrong_value(name, value, wanted) from None
    if not found:
        raise wrong_value(name, value, wanted)
    return found


def read_flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Give what is true or false."""
    return read_choice(options, name, ("true", "false"), str(default).lower()) == "true"


def read_choice(options: Mapping[str, str], name: str, values: tuple[str, ...], default: str) -> str:
    """Give one of some words, in lower case."""
    value = options.get(name, default)
    if value.strip().lower() not in values:
        raise wrong_value(name, value, " or ".join(values))
    return value.strip().lower()
