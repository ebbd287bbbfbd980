"""The tags of messages as they are stored, and filters over them (docs/specifications/zbus.md, section 5.3)."""

from babelbus.core.groups import RecordFilter, Rows, RowsFilter
from babelbus.core.record import Headers, Record
from babelbus.core.settings import InvalidSettingError
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.filters import Matches, compile_filter
from babelbus.records.envelope import ID_HEADER
from babelbus.records.headers import read_headers


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
        InvalidSettingError: it is none.
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
    """Return the tag of each message of a chunk; headers behind the id are read once for all that share them."""
    found = rows.leading(ID_HEADER)
    rests = found.rests()
    known = {rest: _tag_of(read_headers(rest)) for rest in set(rests)}
    tags = dict(zip(found.numbers, map(known.__getitem__, rests), strict=True))
    if len(tags) == rows.count:
        return list(tags.values())
    return [tags[number] if number in tags else _tag_of(rows.record(number).headers) for number in range(rows.count)]
