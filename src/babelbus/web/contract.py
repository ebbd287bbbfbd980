"""What the administration endpoint needs of a server, and what it tells of one.

The server implements `Administration`; the endpoint and its tests know nothing else of the bus.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition: `first_offset` is the oldest record's, `next_offset` the next to be given out.

    All below `high_watermark` can be read. `bytes` are those of the `.log` files.
    """

    partition: int
    first_offset: int
    next_offset: int
    high_watermark: int
    bytes: int
    segments: int


class TopicInfo(msgspec.Struct, frozen=True):
    """One topic with its partitions and its settings (keys of `core.settings.TopicSettings`)."""

    name: str
    partitions: list[PartitionInfo]
    settings: dict[str, object]


class Health(msgspec.Struct, frozen=True):
    """How the server is: `ready` when it serves requests; a reason for each thing an operator should look at."""

    ready: bool
    reasons: list[str] = []


class ServerInfo(msgspec.Struct, frozen=True):
    """What runs here: `addresses` are "host:port" by protocol."""

    version: str
    uptime_seconds: float
    data_folder: str
    addresses: dict[str, str]


class Administration(Protocol):
    """The server as its administrator sees it. Called on the event loop; no method may block for long.

    Any method may raise a `BabelbusError`; admin.py says which one the caller is answered with what. Settings come
    checked and with their units read (`config.read_topic_changes`).
    """

    def list_topics(self) -> list[TopicInfo]:
        """Give all topics, by name."""

    def topic(self, name: str) -> TopicInfo:
        """Give one topic."""

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> TopicInfo:
        """Make a topic; what is None or not in `settings` comes from the configuration's [topics]."""

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change settings of a topic while it is in use; `partitions` may be among them."""

    async def remove_topic(self, name: str) -> None:
        """Remove a topic and its records; returns when a crash can no longer bring it back."""

    def health(self) -> Health:
        """Say how the server is. Cheap: it is asked every few seconds."""

    def reload(self) -> None:
        """Read the lists of clients and rights again, as on SIGHUP."""

    def info(self) -> ServerInfo:
        """Say what runs here."""
