"""How a topic is kept: the settings that each topic has and that may change while it is used."""

from typing import Annotated, Any, TypeVar

import msgspec

from babelbus.config import LogLayout, StorageSettings, TopicLayout
from babelbus.errors import BabelbusError
from babelbus.storage.contract import LogSettings
from babelbus.units import TIB


class InvalidSettingError(BabelbusError):
    """A topic's setting is unknown, has the wrong value, or cannot change; the message names it."""


class TopicSettings(TopicLayout, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one topic, as its file keeps them."""

    segment_bytes: Annotated[int, msgspec.Meta(ge=1024, le=TIB)] = StorageSettings().segment_bytes

    def for_log(self, checkpoint_bytes: int) -> LogSettings:
        """Return what a partition's log has to know of them."""
        layout = {name: getattr(self, name) for name in LogLayout.__struct_fields__}
        return LogSettings(**layout, segment_bytes=self.segment_bytes, checkpoint_bytes=checkpoint_bytes)


S = TypeVar("S", bound=msgspec.Struct)


def change_settings(settings: S, changes: dict[str, Any], *, of: str = "a topic") -> S:
    """Return `settings` with some values in the place of others.

    Raises:
        InvalidSettingError: a name is unknown or a value is not of its type.
    """
    kind = type(settings)
    unknown = set(changes) - set(kind.__struct_fields__)
    if unknown:
        names = ", ".join(kind.__struct_fields__)
        raise InvalidSettingError(f"unknown setting {sorted(unknown)[0]!r}; {of} has {names}")
    try:
        return msgspec.convert({**msgspec.to_builtins(settings), **changes}, kind)
    except msgspec.ValidationError as error:
        raise InvalidSettingError(str(error)) from error
