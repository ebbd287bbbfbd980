"""The settings of consumer groups, the places where they begin, their filters, and their errors."""

from collections.abc import Callable
from typing import Literal

import msgspec

from babelbus.core.record import Record
from babelbus.core.settings import InvalidSettingError
from babelbus.errors import BabelbusError

NAME_BYTES_MAX = 249
RecordFilter = Callable[[Record], bool]
"""Says whether a record is wanted; called in the dispatch loop, so it must be quick and must not fail."""
FilterFactory = Callable[[str], RecordFilter]
"""Text -> filter, in the language of one protocol. Raises `InvalidSettingError` for a text that says nothing."""


class UnknownGroupError(BabelbusError):
    """The topic has no consumer group of this name."""


class GroupExistsError(BabelbusError):
    """The topic has a consumer group of this name."""


class InvalidGroupNameError(BabelbusError):
    """A consumer group cannot have this name."""


class GroupOwnedError(BabelbusError):
    """A member has the group for itself, or wanted it and there were others."""


class GroupClosedError(BabelbusError):
    """The group was removed, its topic was, the server stops, or the member has left."""


class UnknownFilterError(BabelbusError):
    """The group's filter is in a language that no protocol of this server speaks."""


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one group. Times are seconds."""

    ack: Literal["on_delivery", "explicit"] = "on_delivery"
    """`on_delivery`: a record is done when it is handed to a member (at most once); `explicit`: when a member says so
    (at least once). Fixed when the group is made."""
    filter: str | None = None
    """Records that do not match are skipped for the whole group; in the language `filter_kind`."""
    filter_kind: str = "header"
    """Which protocol reads `filter`; `header` is the core's own: `name=value`, or `name` for a header that is there."""
    ack_seconds: float = 60.0
    """A record that its member neither acks nor nacks for so long is handed out again."""
    attempts_max: int | None = 16
    """After so many deliveries a record becomes a dead letter; `None`: never."""
    retry_seconds: float = 1.0
    """The wait before the second delivery of a record, unless the nack says; doubles with each further delivery."""
    retry_seconds_max: float = 300.0
    """The longest that it waits."""
    order: Literal["key", "none"] = "key"
    """`key`: records of one key in one partition never overtake each other (group.py); `none`: faster for keys."""
    in_flight_max: int = 10_000
    """The most records that may be handed out and not acked, or be held back behind those, in the whole group."""
    dead_letter_topic: str | None = None
    """Where dead letters go; `None`: `dead-letters/<group>`. It is made when the first one comes."""
    labels: dict[str, str] = {}
    """Texts of protocols (a zbus mask); the core does not look at them."""

    def __post_init__(self) -> None:
        if not self.ack_seconds > 0:
            raise ValueError("ack_seconds is above 0")
        if not 0 <= self.retry_seconds <= self.retry_seconds_max:
            raise ValueError("retry_seconds is between 0 and retry_seconds_max")
        if self.attempts_max is not None and self.attempts_max < 1:
            raise ValueError("attempts_max is at least 1, or null for no bound")
        if not 1 <= self.in_flight_max <= 10_000_000:
            raise ValueError("in_flight_max is between 1 and 10000000")

    def retry_delay(self, attempt: int) -> float:
        """Return how long a record waits after the delivery number `attempt` failed."""
        return float(min(self.retry_seconds * 2.0 ** min(attempt - 1, 62), self.retry_seconds_max))


class Place(msgspec.Struct, frozen=True):
    """Where a group begins, or goes on: see `BEGINNING`, `END`, `at_offset` and `Groups.at_time`."""

    at: Literal["beginning", "end", "offset"]
    value: int = 0
    partition: int | None = None
    """The one that is meant; `None`: every one."""
    offsets: dict[int, int] = {}
    """The offsets of partitions for which `value` does not hold."""


BEGINNING = Place("beginning")
END = Place("end")


def at_offset(offset: int, partition: int | None = None) -> Place:
    """Return the place of an offset. One below what is still there is the first that is; one beyond the end waits."""
    return Place("offset", offset, partition)


def check_group_name(name: str) -> None:
    """Check that a group may have this name: 1 to 249 bytes of UTF-8 without control characters.

    Raises:
        InvalidGroupNameError: it may not; the message says why.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidGroupNameError("a group's name is valid UTF-8") from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise InvalidGroupNameError(f"a group's name has 1 to {NAME_BYTES_MAX} bytes, this one has {size}")
    if any(letter < " " or "\x7f" <= letter <= "\x9f" for letter in name):
        raise InvalidGroupNameError(f"a group's name has no control character: {name!r}")


def header_filter(text: str) -> RecordFilter:
    """Return the filter of kind `header`: `name=value` wants a header of this value, `name` one of any value.

    Raises:
        InvalidSettingError: there is no name.
    """
    name, equals, value = text.partition("=")
    if not name:
        raise InvalidSettingError(f"a header filter is name=value or name, not {text!r}")
    wanted_name, wanted = name.encode(), value.encode()
    if equals:
        return lambda record: (wanted_name, wanted) in record.headers
    return lambda record: any(pair[0] == wanted_name for pair in record.headers)
