"""How a topic is kept: the settings that each topic has and that may change while it is used."""

from typing import Any, Literal, TypeVar

import msgspec

from babelbus.errors import BabelbusError
from babelbus.storage.contract import LogSettings

Ack = Literal["accepted", "written", "flushed"]


class InvalidSettingError(BabelbusError):
    """A topic's setting is unknown, has the wrong value, or cannot change; the message names it."""


class TopicSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one topic. Times are seconds, sizes bytes; `None` means no bound."""

    engine: Literal["disk", "memory", "db"] = "disk"
    """Where the records lie; fixed when the topic is made."""
    ack: Ack = "flushed"
    """When a publisher is answered (docs/storage.md, ack levels)."""
    retention_seconds: float | None = None
    """Records older than this are removed, a segment at a time."""
    retention_bytes: int | None = None
    """The oldest segments are removed while the rest of the partition is at least this large."""
    cleanup: Literal["delete", "compact"] = "delete"
    """`compact` keeps the last record of each key."""
    retain: Literal["none", "last"] = "none"
    """`last` also keeps the last event of each subject as state."""
    segment_bytes: int = 128 * 2**20
    """A new segment begins when the last one has reached this size."""
    segment_seconds: float | None = None
    """A new segment begins when the first record of the last one came this long ago."""
    tombstone_seconds: float = 86_400.0
    """How long a compacted topic still shows that a key was removed."""
    compact_after_seconds: float | None = None
    """How long compaction leaves records alone: so far back, the state can be asked for as it was."""

    def __post_init__(self) -> None:
        for name in ("retention_seconds", "retention_bytes", "segment_seconds", "compact_after_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is above 0, or null for no bound")
        if not 1024 <= self.segment_bytes <= 2**40:
            raise ValueError("segment_bytes is between 1024 and 2**40")
        if self.tombstone_seconds < 0:
            raise ValueError("tombstone_seconds is not negative")

    def for_log(self, checkpoint_bytes: int) -> LogSettings:
        """Return what a partition's log has to know of them."""
        return LogSettings(
            segment_bytes=self.segment_bytes,
            segment_seconds=self.segment_seconds,
            retention_bytes=self.retention_bytes,
            retention_seconds=self.retention_seconds,
            cleanup=self.cleanup,
            tombstone_seconds=self.tombstone_seconds,
            compact_after_seconds=self.compact_after_seconds,
            checkpoint_bytes=checkpoint_bytes,
        )


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
