"""All metrics for Prometheus: one object, with a registry of its own.

The exposition's names have `babelbus_` in front. Labels are few and bounded: the protocol, the topic, a reason out of a
short list; never a client, a key or a subject. Counting is done once per chunk, not once per record.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

# From a page into a battery-backed cache to a disk that is dying; an fdatasync takes 0.2 ms on a common SSD.
FLUSH_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

LAG_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MetricInfo(msgspec.Struct, frozen=True):
    """One metric, as documentation shows it."""

    name: str
    type: str
    labels: tuple[str, ...]
    doc: str


class Traffic:
    """Two counters that go up together: the records and the bytes of one protocol and topic.

    They are plain numbers until the metrics are read: a lock for each chunk would cost more than its look-up.
    Only the event loop counts and reads.
    """

    __slots__ = ("_bytes", "_records", "bytes", "bytes_settled", "records", "records_settled")

    def __init__(self, records: Counter, bytes_: Counter) -> None:
        self._records = records
        self._bytes = bytes_
        self.records = 0
        self.bytes = 0
        self.records_settled = self.bytes_settled = 0

    @property
    def records_total(self) -> int:
        """Records since the start."""
        return self.records_settled + self.records

    @property
    def bytes_total(self) -> int:
        """Bytes since the start."""
        return self.bytes_settled + self.bytes

    def inc(self, records: int, size_bytes: int) -> None:
        """Count one chunk."""
        self.records += records
        self.bytes += size_bytes

    def settle(self) -> None:
        """Send the counts to Prometheus."""
        self._records.inc(self.records)
        self.records_settled += self.records
        self._bytes.inc(self.bytes)
        self.bytes_settled += self.bytes
        self.records = self.bytes = 0


class _Settler(Collector):
    """Is first in the registry, so that the counters are up to date when they are read."""

    def __init__(self, *kept: dict[tuple[str, str], Traffic]) -> None:
        self._kept = kept

    def collect(self) -> Iterable[Metric]:
        for kept in self._kept:
            for traffic in kept.values():
                traffic.settle()
        return ()


class _Totals(Collector):
    """Counters of numbers that other modules count: updated before they are read."""

    def __init__(self) -> None:
        self.sources: list[tuple[Mapping[str, Counter], Callable[[], Mapping[str, float]]]] = []
        self._last: dict[Counter, float] = {}

    def collect(self) -> Iterable[Metric]:
        for counters, read in self.sources:
            for name, value in read().items():
                counter = counters[name]
                counter.inc(value - self._last.get(counter, 0))
                self._last[counter] = value
        return ()


class _LabelledGauge(Gauge):
    """A figure of each topic or edge, read when the metrics are: what comes or goes need not be registered."""

    read: Callable[[], Iterable[tuple[str, float]]] = staticmethod(lambda: ())

    def collect(self) -> Iterable[Metric]:
        (family,) = self.describe()
        (label,) = self._labelnames
        for name, value in self.read():
            family.add_sample(family.name, {label: name}, value)
        return (family,)


class Metrics:
    """All metrics of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.published: dict[tuple[str, str], Traffic] = {}
        """By protocol and topic."""
        self.fetched: dict[tuple[str, str], Traffic] = {}
        """The same."""
        self.live: dict[tuple[str, str], Traffic] = {}
        """By protocol, and "received" or "delivered"."""
        registry.register(_Settler(self.published, self.fetched, self.live))
        self._totals = _Totals()
        registry.register(self._totals)
        ProcessCollector(registry=registry)  # memory, processor time, descriptors

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, namespace="babelbus", registry=registry)

        def gauge(name: str, doc: str, *labels: str) -> Gauge:
            return Gauge(name, doc, labels, namespace="babelbus", registry=registry)

        topic = ("protocol", "topic")
        self.records_published_total = counter(
            "records_published_total", "Records that publishers sent to topics", *topic
        )
        self.bytes_published_total = counter("bytes_published_total", "Bytes of those, as they were sent", *topic)
        self.records_fetched_total = counter("records_fetched_total", "Records given to readers", *topic)
        self.bytes_fetched_total = counter("bytes_fetched_total", "Bytes given to readers, as stored", *topic)
        self.publish_errors_total = counter(
            "publish_errors_total",
            "Publications that failed, by the disk or refused; not those to unknown topics or without a right",
            "protocol",
            "reason",
        )

        live = ("protocol",)
        self.live_received_total = counter("live_received_total", "Packets from clients of a live protocol", *live)
        self.live_received_bytes_total = counter("live_received_bytes_total", "Their bytes", *live)
        self.live_delivered_total = counter("live_delivered_total", "Live messages sent, each receiver counted", *live)
        self.live_delivered_bytes_total = counter("live_delivered_bytes_total", "Their bytes", *live)
        self.live_dropped_total = counter(
            "live_dropped_total", "Live messages that did not reach a receiver", "protocol", "reason"
        )

        self.live_subscriptions = gauge("live_subscriptions", "Keys and patterns that live clients subscribed to")

        self.flush_seconds = Histogram(
            "flush_seconds",
            "How long the disk took to make a group of batches durable",
            namespace="babelbus",
            registry=registry,
            buckets=FLUSH_BUCKETS,
        )
        self.loop_lag_seconds = Histogram(
            "loop_lag_seconds",
            "How late the event loop was; the log names the call that held it for more than 0.1 s",
            namespace="babelbus",
            registry=registry,
            buckets=LAG_BUCKETS,
        )
        self.flush_failures_total = counter("flush_failures_total", "Flushes that the disk refused; act on the first")
        self.corrupt_records_total = counter("corrupt_records_total", "Records found damaged; run babelbus check")
        self.recovered_bytes_cut_total = counter(
            "recovered_bytes_cut_total", "Bytes of torn tails that were cut when logs were opened"
        )
        self.segments = _LabelledGauge(
            "segments", "Segments of a topic, all partitions", ("topic",), namespace="babelbus", registry=registry
        )
        self.log_bytes = _LabelledGauge(
            "log_bytes", "Bytes of a topic's logs, all partitions", ("topic",), namespace="babelbus", registry=registry
        )

        groups = "consumer groups, all topics"
        self.groups = gauge("groups", "Consumer groups")
        self.groups_lag = gauge("groups_lag", f"Records that are still to be done by {groups}")
        self.groups_delivered_total = counter("groups_delivered_total", f"Records handed out by {groups}, again or not")
        self.groups_acknowledged_total = counter("groups_acknowledged_total", "Of those, acked by a member")
        self.groups_redelivered_total = counter("groups_redelivered_total", "Of those, handed out before")
        self.groups_dead_lettered_total = counter(
            "groups_dead_lettered_total", "Records that became dead letters; look with babelbus dead-letters list"
        )
        self.groups_filtered_total = counter("groups_filtered_total", "Records that a group's filter skipped")
        self.groups_dropped_total = counter("groups_dropped_total", "Records that no open member's filter wanted")
        self.groups_removed_total = counter(
            "groups_removed_total", "Offsets that retention removed before a group was done with them"
        )
        self.groups_corrupt_total = counter("groups_corrupt_total", "Damaged records that groups passed")
        self.groups_stale_total = counter("groups_stale_total", "Acks that came too late and changed nothing")
        self.groups_commit_failures_total = counter(
            "groups_commit_failures_total", "Times that the disk refused to save the groups' cursors"
        )
        self.groups_read_ahead_bytes = gauge(
            "groups_read_ahead_bytes", "Bytes of records that groups hold in memory to hand them out"
        )
        self.groups_read_ahead_bytes_max = gauge("groups_read_ahead_bytes_max", "Limit of groups_read_ahead_bytes")
        self.tail_cache_bytes = gauge("tail_cache_bytes", "Bytes of the newest records that partitions keep in memory")
        self.tail_cache_bytes_max = gauge("tail_cache_bytes_max", "Limit of tail_cache_bytes")
        self.staged_bytes = gauge("staged_bytes", "Bytes that transactions have staged")
        self.staged_bytes_max = gauge("staged_bytes_max", "Limit of staged_bytes")
        self.state_keys = gauge("state_keys", "Keys of the state")
        self.requests_in_flight = gauge("requests_in_flight", "Requests that wait for a reply")
        self.requests_in_flight_max = gauge(
            "requests_in_flight_max", "Limit of requests_in_flight for requests of one kind"
        )
        self.requests_late_replies_total = counter(
            "requests_late_replies_total", "Replies for which nobody waited any more"
        )

        self.connections = gauge("connections", "Open connections", "protocol")
        self.links = gauge("links", "Edges that are linked to this server: processes of its machine, other members")
        self.edge_connections = _LabelledGauge(
            "edge_connections", "Connections through each edge", ("edge",), namespace="babelbus", registry=registry
        )
        self.cluster_epoch = gauge("cluster_epoch", "How often the data of the cluster had a new owner")
        self.cluster_session_copies = gauge("cluster_session_copies", "Sessions that would go on if the owner died now")
        self.cluster_members = gauge("cluster_members", "Members of the cluster that the owner hears, with itself")
        self.cluster_lease_rest_seconds = gauge(
            "cluster_lease_rest_seconds", "How long the owner may serve on without renewing its lease"
        )
        self.edge_bytes = _LabelledGauge(
            "edge_bytes",
            "Bytes over the link of each edge, both ways, since it was linked",
            ("edge",),
            namespace="babelbus",
            registry=registry,
        )
        self.edge_starts_total = counter("edge_starts_total", "Starts of the processes of server.processes", "edge")
        self.connections_max = gauge("connections_max", "Limit of open connections", "protocol")
        # Shown with "accepted": Prometheus takes a `connections_total` for the same name as the gauge `connections`.
        self.connections_total = counter("connections_accepted_total", "Connections accepted", "protocol")
        self.connections_refused_total = counter(
            "connections_refused_total",
            "Connections turned away: limit, descriptors, handshake, tls (the two sides do not agree on it), identity, "
            "address_connections, address_handshakes, address_memory, memory, unauthenticated, quota",
            "protocol",
            "reason",
        )
        self.quota_rests_total = counter(
            "quota_rests_total",
            "Times that a connection waited: its principal sent (publish) or was sent (read) more than its quota",
            "protocol",
            "direction",
        )
        self.quota_rest_seconds_total = counter(
            "quota_rest_seconds_total", "How long these waits were to take", "protocol", "direction"
        )
        self.quota_refusals_total = counter(
            "quota_refusals_total", "Refusals because a principal holds as much as its quota lets it", "what"
        )
        self.protocol_errors_total = counter(
            "protocol_errors_total", "Connections closed because the peer broke the protocol", "protocol"
        )
        self.proofs_failed_total = counter("proofs_failed_total", "Wrong passwords, tokens and signatures", "protocol")
        self.proofs_delayed_total = counter(
            "proofs_delayed_total", "Proofs refused because their client has to wait after wrong ones", "protocol"
        )
        self.access_refusals_total = counter("access_refusals_total", "Refusals of the table of access", "action")
        self.access_version = gauge("access_version", "Version of the table of access: changes so far")
        self.access_rows = gauge("access_rows", "Rows of the table of access")
        self.access_principals = gauge("access_principals", "Principals of the table of access")
        self.access_enforcing = gauge("access_enforcing", "1 while the gate is on")
        self.guessing_entries = gauge("guessing_entries", "Addresses and principals with wrong proofs")
        self.guessing_entries_max = gauge("guessing_entries_max", "Limit of guessing_entries")
        self.passwords_waiting = gauge("passwords_waiting", "Passwords that wait to be checked or are being checked")
        self.passwords_waiting_max = gauge("passwords_waiting_max", "Limit of passwords_waiting")
        self.passwords_refused_total = counter("passwords_refused_total", "Passwords not checked: too many waited")
        self.key_set_fetches_total = counter(
            "key_set_fetches_total", "Fetches of the keys that sign JWTs, by result", "result"
        )
        self.browser_requests_refused_total = counter(
            "browser_requests_refused_total",
            "Requests refused for their Host, their Origin, or a change that a browser may not make",
            "protocol",
            "reason",
        )
        self.outbox_bytes = gauge("outbox_bytes", "Bytes of answers that wait to be sent, all connections", "protocol")
        self.outbox_bytes_max = gauge("outbox_bytes_max", "Limit of outbox_bytes for one connection", "protocol")
        self.unfinished_bytes = gauge("unfinished_bytes", "Bytes of messages that have not come whole, all connections")
        self.unfinished_bytes_max = gauge("unfinished_bytes_max", "Limit of unfinished_bytes")

    def topic_published(self, protocol: str, topic: str) -> Traffic:
        """Return the counters of what is published to `topic` through `protocol`; a dictionary look-up."""
        traffic = self.published.get((protocol, topic))
        if traffic is None:
            traffic = self.published[protocol, topic] = Traffic(
                self.records_published_total.labels(protocol, topic), self.bytes_published_total.labels(protocol, topic)
            )
        return traffic

    def topic_fetched(self, protocol: str, topic: str) -> Traffic:
        """Return the counters of what is read from `topic` through `protocol`; a dictionary look-up."""
        traffic = self.fetched.get((protocol, topic))
        if traffic is None:
            traffic = self.fetched[protocol, topic] = Traffic(
                self.records_fetched_total.labels(protocol, topic), self.bytes_fetched_total.labels(protocol, topic)
            )
        return traffic

    def live_received(self, protocol: str) -> Traffic:
        """Return the counters of packets that clients of `protocol` publish; the caller keeps them."""
        return self.live.setdefault(
            (protocol, "received"),
            Traffic(self.live_received_total.labels(protocol), self.live_received_bytes_total.labels(protocol)),
        )

    def live_delivered(self, protocol: str) -> Traffic:
        """Return the counters of messages that clients of `protocol` are sent live; the caller keeps them."""
        return self.live.setdefault(
            (protocol, "delivered"),
            Traffic(self.live_delivered_total.labels(protocol), self.live_delivered_bytes_total.labels(protocol)),
        )

    def watch_groups(self, totals: Callable[[], Mapping[str, float]]) -> None:
        """Register the source of the totals of all groups since the start ("delivered", ..., "commit_failures").

        It is called when the metrics are read; a name without a counter here is a defect, which the first reader meets.
        """
        counters = {
            name.removeprefix("groups_").removesuffix("_total"): metric
            for name, metric in vars(self).items()
            if name.startswith("groups_") and isinstance(metric, Counter)
        }
        self._totals.sources.append((counters, totals))

    def forget_topic(self, topic: str) -> None:
        """Remove the counters of a topic that was removed."""
        for kept, records, size_bytes in (
            (self.published, self.records_published_total, self.bytes_published_total),
            (self.fetched, self.records_fetched_total, self.bytes_fetched_total),
        ):
            for key in [key for key in kept if key[1] == topic]:
                del kept[key]
                records.remove(*key)
                size_bytes.remove(*key)

    def describe(self) -> list[MetricInfo]:
        """Return all our metrics in the order of declaration, under the name that Prometheus shows."""
        metrics: list[MetricInfo] = []
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                (family,) = metric.describe()
                suffix = "_total" if family.type == "counter" else ""
                metrics.append(MetricInfo(family.name + suffix, family.type, metric._labelnames, family.documentation))
        return metrics
