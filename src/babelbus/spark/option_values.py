"""The forms of options of the source and the sink: names, numbers, sizes, times, words."""

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from babelbus.spark.errors import OptionError
from babelbus.units import UnitError, parse_duration, parse_size

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVER_ALIASES = {"kafka.bootstrap.servers": "url", "bootstrap.servers": "url", "servers": "url"}
"""The names of the server in Spark's Kafka source."""
_OF_KAFKA = {
    "groupidprefix": "groupId names the group of a query",
    "fetchoffset.": "requestTimeoutMs bounds how long the server may be away",
    "kafkaconsumer.": "requestTimeoutMs bounds how long the server may be away",
    "kafka.": "url, identity, serverFingerprint and requestTimeoutMs are the options of the connection",
}
"""Prefixes of the Kafka connector's options that have no meaning here, and our options in their place."""
MISSPELT_RATIO = 0.9
"""From here on an option of Kafka's is one of ours, misspelt: kafka.bootstrap.server."""


def normalise(given: Mapping[str, str], names: Iterable[str], aliases: Mapping[str, str], who: str) -> dict[str, str]:
    """Return the options under the names that we write, whatever their case; those of Kafka alone are left out.

    Raises:
        OptionError: one is unknown, or given under two names. Spark tells data sources all names in lower case.
    """
    if "provider" in given:  # Spark adds it to the options of a table
        raise OptionError(
            "a table of the catalogue (CREATE TABLE ... USING babelbus) is not possible:"
            " write CREATE TEMPORARY VIEW name USING babelbus OPTIONS (...)"
        )
    known = {name.lower(): name for name in names} | dict(aliases)
    options: dict[str, str] = {}
    for key, value in given.items():
        name = known.get(key.lower())
        if name is None:
            instead = next((text for start, text in _OF_KAFKA.items() if key.lower().startswith(start)), "")
            if instead and not difflib.get_close_matches(key.lower(), known, 1, MISSPELT_RATIO):
                _warn(key, instead)
                continue
            near = difflib.get_close_matches(key.lower(), known, 1)
            hint = f": did you mean {known[near[0]]}?" if near else ";"
            raise OptionError(f"option {key} is unknown{hint} {who} has {', '.join(names)}")
        if name in options:
            raise OptionError(f"option {name} is given twice, as {key} too")
        options[name] = value
    return options


@cache
def _warn(option: str, instead: str) -> None:
    """Record in the log, once in each process, that an option has no effect: Spark parses the options many times."""
    log.warning("option %s of the Kafka connector has no effect here: %s", option, instead)


def wrong_value(name: str, value: str, wanted: str) -> OptionError:
    """Return the error of an option that has a value which is not possible; `wanted` says what is."""
    return OptionError(f"option {name}: {_shown(value)!r} is not possible; write {wanted}")


def named_twice(name: str, value: str, what: str) -> OptionError:
    """Return the error of an option whose JSON says two things of one topic or partition."""
    return OptionError(f"option {name}: {what} stands there twice, in {_shown(value)!r}; name it once")


def _shown(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:200]}..."


def read_object(name: str, value: str, wanted: str) -> dict[str, Any]:
    """Return a JSON object that is not empty.

    Raises:
        OptionError: it is something else, or one of its objects has a key twice: JSON's last one would win in silence.
    """

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise named_twice(name, value, f"the key {next(key for key in keys if keys.count(key) > 1)!r}")
        return found

    try:
        found = json.loads(value, object_pairs_hook=collect)
    except ValueError as error:
        raise wrong_value(name, value, f"{wanted} ({error})") from None
    if not isinstance(found, dict) or not found:
        raise wrong_value(name, value, wanted)
    return found


def read_count(
    options: Mapping[str, str],
    name: str,
    wanted: str = "a whole number from 1 on",
    *,
    least: int = 1,
    most: int = 10**18 - 1,
) -> int | None:
    """Return a whole number from `least` to `most`, `None` when the option is not given."""
    value = options.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,19}", value.strip(), re.ASCII) or not least <= int(value) <= most:
        raise wrong_value(name, value, wanted)
    return int(value)


def read_bytes(options: Mapping[str, str], name: str) -> int | None:
    """Return a size in bytes, `None` when the option is not given."""
    return _unit(options, name, parse_size, "a size above 0, as 64MiB or a number of bytes")


def read_duration(options: Mapping[str, str], name: str, default: str) -> float:
    """Return a time in seconds."""
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
    """Return what is true or false."""
    return read_choice(options, name, ("true", "false"), str(default).lower()) == "true"


def read_choice(options: Mapping[str, str], name: str, values: tuple[str, ...], default: str) -> str:
    """Return one of some words, in lower case."""
    value = options.get(name, default)
    if value.strip().lower() not in values:
        raise wrong_value(name, value, " or ".join(values))
    return value.strip().lower()
