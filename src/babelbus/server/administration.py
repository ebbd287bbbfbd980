"""The server as its administrator sees it: what the admin endpoint asks for, answered by the broker."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

import babelbus
from babelbus.core.groups import DeadLetterTopics
from babelbus.core.topic import Topic
from babelbus.server.administration_live import LiveAdministrator
from babelbus.server.administration_state import StateAdministrator
from babelbus.web.contract import Health, PartitionInfo, ServerInfo, TopicInfo

if TYPE_CHECKING:
    from babelbus.server.app import Server

SLOW_FLUSH_SECONDS = 1.0


class Administrator:
    """Implements `web.contract.Administration`."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.state = StateAdministrator(server.broker, server.clock)
        self.live = LiveAdministrator(server.broker)
        self.groups = server.broker.groups
        self.dead_letters = DeadLetterTopics(server.broker, self.groups)

    def list_topics(self) -> list[TopicInfo]:
        """Return all topics, by name."""
        return [_describe(topic) for topic in self._server.broker.topics()]

    def topic(self, name: str) -> TopicInfo:
        """Return one topic."""
        return _describe(self._server.broker.topic(name))

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> TopicInfo:
        """Create a topic; what is None or not in `settings` comes from the configuration's [topics]."""
        count = partitions if partitions is not None else self._server.config.topics.partitions
        return _describe(self._server.broker.create_topic(name, count, self._resolve(settings)))

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change settings of a topic while it is in use; `partitions` may be among them."""
        return _describe(self._server.broker.alter_topic(name, self._resolve(changes)))

    def _resolve(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Put the server's own value where a topic has none."""
        resolved = dict(settings)
        if "segment_bytes" in resolved and resolved["segment_bytes"] is None:
            resolved["segment_bytes"] = self._server.config.storage.segment_bytes
        return resolved

    async def remove_topic(self, name: str) -> None:
        """Remove a topic and its records; returns when a crash can no longer bring it back."""
        self._server.broker.remove_topic(name)

    def health(self) -> Health:
        """Return how the server is."""
        server = self._server
        reasons = []
        begun = server.broker.flusher.begun_at
        if begun is not None and server.clock.monotonic() - begun > SLOW_FLUSH_SECONDS:
            reasons.append(f"a flush of the disk takes {server.clock.monotonic() - begun:.1f} s by now")
        elif server.broker.flusher.last_seconds > SLOW_FLUSH_SECONDS:
            reasons.append(f"the last flush of the disk took {server.broker.flusher.last_seconds:.1f} s")
        for topic in server.broker.topics():
            failing = next((one.failing for one in topic.partitions if one.failing is not None), None)
            if failing is not None:
                reasons.append(f"topic {topic.name}: {failing}")
        reasons += [f"topic {name} is not open: {error}" for name, error in server.broker.damaged_topics.items()]
        if server.stopping:
            reasons.append("the server stops")
        return Health(ready=not server.stopping, reasons=reasons)

    def reload(self) -> None:
        """Read the lists of clients and rights again, as on SIGHUP."""
        self._server.reload()

    def info(self) -> ServerInfo:
        """Return what runs here."""
        server = self._server
        uptime = server.clock.monotonic() - server.started_at
        return ServerInfo(babelbus.__version__, uptime, server.folder, dict(server.addresses))


def _describe(topic: Topic) -> TopicInfo:
    partitions = [
        PartitionInfo(
            one.number,
            one.log.first_offset,
            one.next_offset,
            one.high_watermark,
            one.log.size_bytes,
            one.log.segment_count,
        )
        for one in topic.partitions
    ]
    return TopicInfo(topic.name, partitions, msgspec.to_builtins(topic.settings))
