"""The figures of a server at one moment, for `babelbus status` and `babelbus top`: two such moments make rates."""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec
from aiohttp import web

import babelbus
from babelbus.core.access import Action, check_may
from babelbus.metrics import Metrics
from babelbus.web.answers import answer
from babelbus.web.callers import METRICS_SUBJECT
from babelbus.web.calls import Call, Route
from babelbus.web.groups import may_see
from babelbus.web.history import resident_bytes, values_of
from babelbus.web.server import Host, addresses_for, health_reasons


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
        self._count(protocols := _Protocols(), topics)
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
                resident_bytes(),
                time.process_time(),
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

    def _count(self, protocols: "_Protocols", topics: dict[str, TopicStatus]) -> None:
        """Add the counters to protocols and topics: of many topics not as samples for Prometheus, which cost more."""
        metrics = self._metrics
        for (name, topic_name), traffic in metrics.published.items():
            for one in (protocols[name], topics.get(topic_name)):
                if one is not None:
                    one.published += traffic.records_total
                    one.published_bytes += traffic.bytes_total
        for (name, topic_name), traffic in metrics.fetched.items():
            for one in (protocols[name], topics.get(topic_name)):
                if one is not None:
                    one.fetched += traffic.records_total
                    one.fetched_bytes += traffic.bytes_total
        for (name, direction), traffic in metrics.live.items():
            if direction == "delivered":
                protocols[name].live_delivered += traffic.records_total
            else:
                protocols[name].live_received += traffic.records_total
        for field, metric in (
            ("live_dropped", metrics.live_dropped_total),
            ("publish_errors", metrics.publish_errors_total),
            ("connections", metrics.connections),
            ("connections_max", metrics.connections_max),
            ("connections_refused", metrics.connections_refused_total),
            ("waiting_bytes", metrics.outbox_bytes),
        ):
            for name, value in values_of(metric):
                setattr(protocols[name], field, getattr(protocols[name], field) + int(value))


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
