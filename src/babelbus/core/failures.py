"""Publications that failed, as operators see them: counted by protocol and reason."""

from collections.abc import Iterable

from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.storage.errors import DiskError, DiskFullError


def failure_reason(error: BabelbusError) -> str:
    """Return the `reason` of `babelbus_publish_errors_total`: whether the disk failed, or the server refused."""
    return "disk" if isinstance(error, DiskError | DiskFullError) else "refused"


def count_failures(metrics: Metrics, protocols: Iterable[str], error: BabelbusError) -> None:
    """Count publications that failed, of each of these protocols one."""
    reason = failure_reason(error)
    for protocol in protocols:
        metrics.publish_errors_total.labels(protocol, reason).inc()
