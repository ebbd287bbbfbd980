"""The tags of messages as they are stored, and the filters of channels over them (specs/zbus.md, section 5.3)."""

from babelbus.core.group_settings import RecordFilter
from babelbus.core.record import Record
from babelbus.core.settings import InvalidSettingError
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.filters import compile_filter


def record_filter(text: str) -> RecordFilter:
    """Give the filter of a channel for records, by their tag.

    Raises:
        InvalidSettingError: it is none.
    """
    try:
        matches = compile_filter(text)
    except MalformedMessageError as error:
        raise InvalidSettingError(error.text) from error
    return lambda record: matches(tag_of(record))


def tag_of(record: Record) -> str | None:
    """Give the tag of a message as it is stored, whoever published it."""
    for name, value in record.headers:
        if (name == b"zbus_tag" or name == b"tag") and value is not None:
            return value.decode("utf-8", "backslashreplace")
    return None
