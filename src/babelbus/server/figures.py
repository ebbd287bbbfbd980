"""Connects the metrics to the parts of a server: these figures are read when the metrics are read."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from babelbus.core.broker import Broker
from babelbus.metrics import Metrics
from babelbus.storage.contract import PartitionLog

if TYPE_CHECKING:
    from babelbus.web.cluster import Cluster


def watch_broker(metrics: Metrics, broker: Broker) -> None:
    """Read the figures of a broker whose parts are all open."""
    groups, staging, gate = broker.groups, broker.staging, broker.gate
    metrics.watch_groups(lambda: msgspec.structs.asdict(groups.totals()) | {"commit_failures": groups.commit_failures})
    metrics.groups.set_function(lambda: len(groups.all()))
    metrics.groups_lag.set_function(lambda: sum(group.info().lag for group in groups.all()))
    metrics.groups_read_ahead_bytes.set_function(lambda: groups.read_ahead.bytes_held)
    metrics.groups_read_ahead_bytes_max.set(groups.read_ahead.bytes_max)
    metrics.tail_cache_bytes.set_function(lambda: broker.tails.bytes_held)
    metrics.tail_cache_bytes_max.set(broker.tails.bytes_max)
    metrics.staged_bytes.set_function(lambda: staging.staged_bytes)
    metrics.staged_bytes_max.set(staging.settings.bytes_max)
    metrics.state_keys.set_function(lambda: len(broker.state))
    gate.audit.on_refused = lambda action: metrics.access_refusals_total.labels(action.value).inc()
    metrics.access_version.set_function(lambda: gate.table.version)
    metrics.access_rows.set_function(lambda: gate.table.row_count)
    metrics.access_principals.set_function(lambda: gate.table.principal_count)
    metrics.access_enforcing.set_function(lambda: gate.enforcing)
    metrics.live_subscriptions.set_function(lambda: broker.router.count)
    metrics.segments.read = lambda: _sums(broker, lambda log: log.part_count)
    metrics.log_bytes.read = lambda: _sums(broker, lambda log: log.size_bytes)


def _sums(broker: Broker, figure: Callable[[PartitionLog], int]) -> list[tuple[str, int]]:
    """Return the name of each topic, with the sum of a figure over its partitions."""
    return [(topic.name, sum([figure(partition.log) for partition in topic.partitions])) for topic in broker.topics()]


def watch_cluster(metrics: Metrics, cluster: "Cluster") -> None:
    """Read the figures of the cluster whose data the server owns."""
    metrics.cluster_epoch.set_function(lambda: cluster.status().epoch)
    metrics.cluster_members.set_function(lambda: cluster.status().present)
    metrics.cluster_lease_rest_seconds.set_function(lambda: cluster.status().lease_rest_seconds)
