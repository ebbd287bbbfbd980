"""Quotas of principals: rates of bytes, and counts of what one principal may hold (docs/operations.md, "Quotas").

A rate is kept by reading later from the socket; a count is kept by refusing. All connections of a principal share its
quota, whatever protocol they speak.
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from babelbus.clock import Clock
from babelbus.config import QuotaSettings
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics

Counted = Literal["connections"]
COUNTED: tuple[Counted, ...] = get_args(Counted)
BURST_SECONDS = 1.0
"""A bucket holds what its rate gives in so long, so that a batch passes without a rest."""


class QuotaExceededError(BabelbusError):
    """A principal holds as much as its quota lets it."""

    def __init__(self, name: str, what: Counted, limit: int) -> None:
        super().__init__(f"the quota of {limit} {what} of {name!r} is used up")
        self.name, self.what, self.limit = name, what, limit


class Bucket:
    """Bytes that may pass now; it may be overdrawn, and fills at the rate. Without a rate nothing is counted."""

    def __init__(self, clock: Clock, rate: float | None) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._rate = rate
        self._bytes = 0.0 if rate is None else rate * BURST_SECONDS

    def set_rate(self, rate: float | None) -> None:
        """Set another rate, from now on."""
        if rate != self._rate:
            self.__init__(self._clock, rate)  # type: ignore[misc]  # of this class, which nobody derives from

    def take(self, size_bytes: int) -> float:
        """Count bytes, and return for how many seconds to rest then; 0 if there is no debt."""
        rate = self._rate
        if rate is None:
            return 0.0
        now = self._clock.monotonic()
        self._bytes = min(self._bytes + (now - self._at) * rate, rate * BURST_SECONDS) - size_bytes
        self._at = now
        return max(0.0, -self._bytes / rate)


class Quota:
    """Counts the use of one principal. `limits` is replaced when the limits change."""

    def __init__(self, name: str, limits: QuotaSettings, clock: Clock, refused: Callable[[Counted], None]) -> None:
        self.name = name
        self.used: dict[Counted, int] = dict.fromkeys(COUNTED, 0)
        self.publish = Bucket(clock, limits.publish_bytes_per_second)
        """Bytes that come from the clients."""
        self.read = Bucket(clock, limits.read_bytes_per_second)
        """Bytes that go to the clients."""
        self.limits = limits
        self._refused = refused

    def set_limits(self, limits: QuotaSettings) -> None:
        """Set other limits. Nothing that is held is taken away."""
        self.limits = limits
        self.publish.set_rate(limits.publish_bytes_per_second)
        self.read.set_rate(limits.read_bytes_per_second)

    def take(self, what: Counted) -> None:
        """Count one more; `give` it back when it has ended.

        Raises:
            QuotaExceededError: the principal holds as many as it may; nothing is counted.
        """
        limit: int | None = getattr(self.limits, what)
        if limit is not None and self.used[what] >= limit:
            self._refused(what)
            raise QuotaExceededError(self.name, what, limit)
        self.used[what] += 1

    def give(self, what: Counted) -> None:
        """Count one less."""
        self.used[what] -= 1


class Quotas:
    """The quotas of all principals that have connections."""

    def __init__(self, settings: QuotaSettings, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._defaults = settings
        self._limits: Mapping[str, QuotaSettings] = {}
        self._quotas: dict[str, Quota] = {}
        self._leaving: dict[str, Quota] = {}
        """Of them, those without a connection that owe bytes or hold something."""
        self.active = settings != QuotaSettings()
        """Whether any principal has a quota; without it nobody asks."""

    def set_limits(self, limits: Mapping[str, QuotaSettings]) -> None:
        """Set the limits of principals by name, in place of the defaults; those of principals not named are dropped."""
        self._limits = dict(limits)
        self.active = self._defaults != QuotaSettings() or any(one != QuotaSettings() for one in limits.values())
        for name, quota in self._quotas.items():
            quota.set_limits(self._limits.get(name, self._defaults))

    def enter(self, name: str) -> Quota:
        """Return the quota of a principal for one more connection; `leave` it when the connection ends.

        Raises:
            QuotaExceededError: it has as many connections as it may.
        """
        quota = self._quotas.get(name)
        if quota is None:
            quota = Quota(name, self._limits.get(name, self._defaults), self._clock, self._count_refusal)
        quota.take("connections")
        self._quotas[name] = quota
        return quota

    def leave(self, quota: Quota) -> None:
        """Count a connection as ended, and drop what nobody uses.

        A principal that owes bytes is kept for a while: a new connection must not begin without the old debt.
        """
        quota.give("connections")
        if not _is_idle(quota):
            self._leaving[quota.name] = quota
        elif self._quotas.get(quota.name) is quota:
            del self._quotas[quota.name]
        for name in [name for name, one in self._leaving.items() if one.used["connections"] or _is_idle(one)]:
            one = self._leaving.pop(name)
            if not one.used["connections"]:
                self._quotas.pop(name, None)

    def describe(self) -> dict[str, dict[Counted, int]]:
        """Return what each principal holds."""
        return {name: dict(quota.used) for name, quota in sorted(self._quotas.items())}

    def count_rest(self, protocol: str, direction: Literal["publish", "read"], seconds: float) -> None:
        """Record that a connection rests because of its quota."""
        self._metrics.quota_rests_total.labels(protocol, direction).inc()
        self._metrics.quota_rest_seconds_total.labels(protocol, direction).inc(seconds)

    def _count_refusal(self, what: Counted) -> None:
        self._metrics.quota_refusals_total.labels(what).inc()


def _is_idle(quota: Quota) -> bool:
    return not any(quota.used.values()) and not quota.publish.take(0) and not quota.read.take(0)
