"""The figures of a server at one moment, for `babelbus status` and `babelbus top`: two such moments make rates."""

import asyncio
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

import babelbus
from babelbus.core.access import Action, check_may
from babelbus.metrics import Metrics
from babelbus.web.answers import answer
from babelbus.web.callers import METRICS_SUBJECT
from babelbus.web.calls import Call, Route
from babelbus.web.groups import may_see
from babelbus.web.server import Host, addresses_for, health_reasons

# Sample of the metrics -> field of the protocol, and of the topic if the sample has that label.
_COUNTERS = {
    "babelbus_records_published_total": "published",
    "babelbus_bytes_published_total": "published_bytes",
    "babelbus_records_fetched_total": "fetched",
    "babelbus_bytes_fetched_total": "fetched_bytes",
    "babelbus_live_received_total": "live_received",
    "babelbus_live_delivered_total": "live_delivered",
    "babelbus_live_dropped_total": "live_dropped",
    "babelbus_publish_errors_total": "publish_errors",
    "babelbus_connections": "connections",
    "babelbus_connections_max": "connections_max",
    "babelbus_connections_refused_total": "connections_refused",
    "babelbus_outbox_bytes": "waiting_bytes",
}


class ProtocolStatus(msgspec.Struct):
    """The traffic of one protocol since the start; `waiting_bytes` wait for clients that read too slowly."""

    protocol: str
    connections: int = 0
    connections_max: int = 0
    connections_refused: int = 0
    published: int = 0
    published_bytes: int = 0
    publish_errors: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    live_received: int = 0
    live_delivered: int = 0
    live_dropped: int = 0
    waiting_bytes: int = 0


class TopicStatus(msgspec.Struct):
    """One topic: the records that it holds, and its traffic since the start."""

    name: str
    partitions: int
    records: int
    bytes: int
    published: int = 0
    published_bytes: int = 0
    fetched: int = 0
    fetched_bytes: int = 0


class GroupStatus(msgspec.Struct):
    """One consumer group; the counts are those since the start."""

    topic: str
    name: str
    members: int
    paused: bool
    lag: int
    in_flight: int
    delivered: int
    acknowledged: int
    redelivered: int
    dead_lettered: int


class DiskStatus(msgspec.Struct):
    """The bytes of the topics, and of the file system with the data folder."""

    log_bytes: int
    free_bytes: int | None
    total_bytes: int | None


class Status(msgspec.Struct):
    """All figures; `health` is "ok", or "degraded" with its reasons. `time_seconds` only rises, for rates."""

    version: str
    uptime_seconds: float
    time_seconds: float
    health: str
    reasons: list[str]
    enforcing: bool
    addresses: dict[str, str]
    data_folder: str
    disk: DiskStatus
    memory_bytes: int
    processor_seconds: float
    protocols: list[ProtocolStatus]
    topics: list[TopicStatus]
    groups: list[GroupStatus]


class StatusRoutes:
    """The request for all figures."""

    def __init__(self, server: Host, metrics: Metrics) -> None:
        self._server = server
        self._metrics = metrics

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/status", self._show),)

    async def _show(self, call: Call) -> web.Response:
        """Answer with the figures; topics and groups are those that the caller may see."""
        server, broker, principal = self._server, self._server.broker, call.principal
        if broker.gate.enforcing:
            check_may(principal, Action.READ, METRICS_SUBJECT)
        disk = await asyncio.to_thread(_look_at_disk, server.folder)  # a disk that hangs must not stop the bus
        reasons = [principal.relative_text(reason) for reason in health_reasons(server)]
        topics = {
            topic.name: TopicStatus(
                topic.name,
                len(topic.partitions),
                sum(one.high_watermark - one.log.first_offset for one in topic.partitions),
                sum(one.log.size_bytes for one in topic.partitions),
            )
            for topic in broker.topics()
            if may_see(broker, principal, topic.name)
        }
        disk.log_bytes = sum(one.log.size_bytes for topic in broker.topics() for one in topic.partitions)
        memory, processor = self._count(protocols := _Protocols(), topics)
        groups = [group.info() for group in broker.groups.all() if group.topic.name in topics]
        for topic in topics.values():
            topic.name = principal.relative(topic.name)
        now = server.clock.monotonic()
        return answer(
            Status(
                babelbus.__version__,
                now - server.started_at,
                now,
                "degraded" if reasons else "ok",
                reasons,
                broker.gate.enforcing,
                *addresses_for(server, principal),
                disk,
                memory,
                processor,
                [protocols[name] for name in sorted(protocols)],
                sorted(topics.values(), key=lambda topic: topic.name),
                [
                    GroupStatus(
                        principal.relative(group.topic), group.name, group.members, group.paused, group.lag,
                        group.in_flight,
                        group.counts.delivered, group.counts.acknowledged, group.counts.redelivered,
                        group.counts.dead_lettered,
                    )
                    for group in groups
                ],
            )
        )  # fmt: skip

    def _count(self, protocols: "_Protocols", topics: dict[str, TopicStatus]) -> tuple[int, float]:
        """Add the counters of the metrics to protocols and topics; return memory and processor time of the process."""
        memory, processor = 0, 0.0
        for name, labels, value in self._samples():
            if name == "process_resident_memory_bytes":
                memory = int(value)
            elif name == "process_cpu_seconds_total":
                processor = value
            field = _COUNTERS.get(name)
            if field is None:
                continue
            protocol = protocols[labels["protocol"]]
            setattr(protocol, field, getattr(protocol, field) + int(value))
            topic = topics.get(labels.get("topic", ""))
            if topic is not None:
                setattr(topic, field, getattr(topic, field) + int(value))
        return memory, processor

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value


class _Protocols(defaultdict[str, ProtocolStatus]):
    def __missing__(self, name: str) -> ProtocolStatus:
        made = self[name] = ProtocolStatus(name)
        return made


def _look_at_disk(folder: str) -> DiskStatus:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return DiskStatus(0, None, None)
    return DiskStatus(0, usage.free, usage.total)
