"""Which stored messages a consumer gets: the filters of subscriptions and channels, and calls that were given up.

Specification: docs/specifications/zbus.md, 5.3 and 6.3.

filter := group (";" group)*; a group's parts stand between `.`: `*` is any one part, `#` this and all that follow, none
too; any other part is itself. A message without a tag passes no filter.
"""

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TypeVar

from babelbus.core.groups import Delivery, RecordFilter, Rows, RowsFilter, Run
from babelbus.core.record import Headers, Record
from babelbus.core.settings import InvalidSettingError
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.records.envelope import ID_HEADER, SOURCE_HEADER
from babelbus.records.headers import read_headers

T = TypeVar("T")

FILTER_LENGTH_MAX = 4096

Matches = Callable[[str | None], bool]


@lru_cache(maxsize=1024)
def compile_filter(text: str) -> Matches:
    """Return the function that says whether a tag passes. Cached: a refill of a window names its filter again.

    Raises:
        MalformedMessageError: it is longer than `FILTER_LENGTH_MAX`.
    """
    if len(text) > FILTER_LENGTH_MAX:
        raise MalformedMessageError(f"a filter of {len(text)} characters, limit {FILTER_LENGTH_MAX}")
    groups = text.split(";")
    names = frozenset(group for group in groups if not _is_pattern(group))
    patterns = [_expression(group) for group in groups if _is_pattern(group)]
    if not patterns:
        return names.__contains__
    find = re.compile("|".join(patterns), re.DOTALL).fullmatch

    def matches(tag: str | None) -> bool:
        return tag is not None and (tag in names or find(tag) is not None)

    return matches


def _is_pattern(group: str) -> bool:
    parts = group.split(".")
    return "*" in parts or "#" in parts


def _expression(group: str) -> str:
    """Return the regular expression of one group. It does not backtrack: each part ends at its own dot."""
    expression = ""
    for number, part in enumerate(group.split(".")):
        if part == "#":  # what stands behind it is never looked at
            return expression + ("(?:\\..*)?" if number else ".*")
        expression += "\\." if number else ""
        expression += "[^.]*" if part == "*" else re.escape(part)
    return expression


class TagFilter(RowsFilter):
    """Wants the messages whose tag passes."""

    def __init__(self, matches: Matches) -> None:
        self._matches = matches

    def __call__(self, record: Record) -> bool:
        """Return whether a message is wanted."""
        return self._matches(_tag_of(record.headers))

    def choose(self, rows: Rows) -> list[bool]:
        """Return which messages of a chunk are wanted: each tag is looked at once."""
        tags = rows.made(_tags_of)
        wanted = {tag: self._matches(tag) for tag in set(tags)}
        return [wanted[tag] for tag in tags]


def record_filter(text: str) -> RecordFilter:
    """Return the filter of a channel for records, by their tag.

    Raises:
        InvalidSettingError: the filter is too long.
    """
    try:
        return TagFilter(compile_filter(text))
    except MalformedMessageError as error:
        raise InvalidSettingError(error.text) from error


def _tag_of(headers: Headers) -> str | None:
    """Return the tag of a message as it is stored, whoever published it."""
    for name, value in headers:
        if (name == b"zbus_tag" or name == b"tag") and value is not None:
            return value.decode("utf-8", "backslashreplace")
    return None


def _tags_of(rows: Rows) -> list[str | None]:
    return _read_all(rows, _tag_of)


def _read_all(rows: Rows, read: Callable[[Headers], T]) -> list[T]:
    """Return what `read` returns for the headers of each message; headers behind the id are decoded once if equal."""
    leading = rows.leading(ID_HEADER)
    rests = leading.rests()
    decoded = {rest: read_headers(rest) for rest in set(rests)}
    values = {
        number: read(((ID_HEADER, value), *decoded[rest]))
        for number, value, rest in zip(leading.numbers, leading.values(), rests, strict=True)
    }
    return [values[number] if number in values else read(rows.record(number).headers) for number in range(rows.count)]


# -- calls that nobody waits for any more ------------------------------------------------------------------------------

SourceAndId = tuple[str, str]


def callers(messages: Sequence[Delivery]) -> list[SourceAndId]:
    """Return who waits for the answer to each message, if it is a call."""
    if not isinstance(messages, Run):
        return [_caller(one.headers) for one in messages]
    made = messages.rows.made(_callers)
    return [made[number] for number in messages.numbers]


def without(messages: Sequence[Delivery], given_up: Collection[SourceAndId]) -> Sequence[Delivery]:
    """Return the messages for whose answer somebody may still wait."""
    if not isinstance(messages, Run):
        return [one for one in messages if _caller(one.headers) not in given_up]
    callers = messages.rows.made(_callers)
    numbers = [number for number in messages.numbers if callers[number] not in given_up]
    return messages if len(numbers) == len(messages) else messages.only(numbers)


def _callers(rows: Rows) -> list[SourceAndId]:
    return _read_all(rows, _caller)


def _caller(headers: Headers) -> SourceAndId:
    source = request_id = b""
    for name, value in headers:
        if name == SOURCE_HEADER:
            source = value or b""
        elif name == ID_HEADER:
            request_id = value or b""
    return source.rpartition(b"#")[2].decode("utf-8", "replace"), request_id.decode("utf-8", "replace")
