"""The options of `table=state`: those of the source where they mean something, and which moment is asked for."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from babelbus.spark.errors import OptionError
from babelbus.spark.option_values import SERVER_ALIASES, normalise, read_count
from babelbus.spark.options import ALIASES, SourceOptions, parse

STATE_TOPIC = "$state"
"""Where the server records all changes of the state (docs/state.md)."""
_PLACE = ("path", "url", "identity", "serverFingerprint", "requestTimeoutMs")
_OF_BATCHES = ("asOfOffset", "asOfTimestamp")
_OF_STREAMS = (
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestampStrategy", "maxOffsetsPerTrigger",
    "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "failOnDataLoss",
)  # fmt: skip


class StateOptions(msgspec.Struct, frozen=True):
    """The checked options of a query of the state. The moment is after an offset or a time (ms)."""

    source: SourceOptions
    as_of_offset: int | None = None
    as_of_ms: int | None = None


def is_state(given: Mapping[str, str]) -> bool:
    """Return whether the table of the state is asked for.

    Raises:
        OptionError: the query asks for another table.
    """
    table = next((value for name, value in given.items() if name.lower() == "table"), None)
    if table is not None and table.strip().lower() != "state":
        raise OptionError(f"option table: {table!r} is not possible; write state, or leave it out to read topics")
    return table is not None


def parse_state(given: Mapping[str, str], query: Literal["batch", "stream", "any"] = "any") -> StateOptions:
    """Check the options of a query of the state and return what they mean; `any` as in `options.parse`.

    Raises:
        OptionError: an option is unknown, missing, wrong, or does not go with another option.
    """
    options = normalise(
        {name: value for name, value in given.items() if name.lower() != "table"},
        (*_PLACE, *_OF_BATCHES, *_OF_STREAMS),
        SERVER_ALIASES | ALIASES,
        "table=state",
    )
    for name in _OF_STREAMS if query == "batch" else _OF_BATCHES if query == "stream" else ():
        if name in options:
            other = "streams: a batch reads the state of one moment" if query == "batch" else "batches"
            raise OptionError(f"option {name} of table=state is for {other}")
    moment = {name: options.pop(name) for name in _OF_BATCHES if name in options}
    if len(moment) == 2:
        raise OptionError("options asOfOffset and asOfTimestamp do not go together: give one")
    return StateOptions(
        parse({**options, "assign": f'{{"{STATE_TOPIC}": [0]}}'}, query),
        read_count(moment, "asOfOffset", f"an offset of {STATE_TOPIC}, 0 or more", least=0),
        _read_time(moment.get("asOfTimestamp")),
    )


def _read_time(value: str | None) -> int | None:
    if value is None:
        return None
    text = value.strip()
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            f"option asOfTimestamp: {value!r} is not possible; write milliseconds since the epoch, or a time as"
            " 2026-11-21T08:00:00Z (without a zone it is UTC)"
        ) from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    milliseconds = int(at.timestamp() * 1000)
    if milliseconds < 0:
        raise OptionError(f"option asOfTimestamp: {value!r} is before 1970")
    return milliseconds
