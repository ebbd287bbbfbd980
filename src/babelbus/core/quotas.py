"""Quotas of principals: rates of bytes, and counts of what one principal may hold (docs/security.md, "Quotas").

A rate is kept by reading later from the socket; a count is kept by refusing. All connections of a principal share its
quota, whatever protocol they speak.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from babelbus.clock import Clock
from babelbus.config import QuotaSettings
from babelbus.core.access import ANONYMOUS, SERVER, Identity
from babelbus.errors import BabelbusError

if TYPE_CHECKING:
    from babelbus.metrics import Metrics

Counted = Literal["connections", "subscriptions", "topics", "requests"]
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

    def __init__(
        self,
        name: str,
        limits: QuotaSettings,
        clock: Clock,
        on_refused: Callable[[Counted], None],
        on_empty: Callable[["Quota"], None],
    ) -> None:
        self.name = name
        self.used: dict[Counted, int] = dict.fromkeys(COUNTED, 0)
        self.publish = Bucket(clock, limits.publish_bytes_per_second)
        """Bytes that come from the clients."""
        self.read = Bucket(clock, limits.read_bytes_per_second)
        """Bytes that go to the clients."""
        self.limits = limits
        self._on_refused = on_refused
        self._on_empty = on_empty

    def set_limits(self, limits: QuotaSettings) -> None:
        """Set other limits. Nothing that is held is taken away."""
        self.limits = limits
        self.publish.set_rate(limits.publish_bytes_per_second)
        self.read.set_rate(limits.read_bytes_per_second)

    def check(self, what: Counted) -> None:
        """Check that the principal may hold one more.

        Raises:
            QuotaExceededError: it holds as many as it may, which is counted as a refusal.
        """
        limit: int | None = getattr(self.limits, what)
        if limit is not None and self.used[what] >= limit:
            self._on_refused(what)
            raise QuotaExceededError(self.name, what, limit)

    def give(self, what: Counted) -> None:
        """Count one less."""
        self.used[what] -= 1
        if not any(self.used.values()):
            self._on_empty(self)


class Quotas:
    """The quotas of all principals that hold something."""

    def __init__(self, settings: QuotaSettings, clock: Clock, metrics: "Metrics") -> None:
        self._clock = clock
        self._metrics = metrics
        self.defaults = settings
        """The quotas of principals that have none of their own."""
        self._limits: Mapping[str, QuotaSettings] = {}
        self._quotas: dict[str, Quota] = {}
        self._leaving: dict[str, Quota] = {}
        """Of them, those that hold nothing and owe bytes."""
        self.active = settings != QuotaSettings()
        """Whether any principal has a quota; without it bytes, connections and requests are not counted."""

    def set_limits(self, limits: Mapping[str, QuotaSettings]) -> None:
        """Set the limits of principals by name, in place of the defaults; those of principals not named are dropped."""
        self._limits = dict(limits)
        self.active = self.defaults != QuotaSettings() or any(one != QuotaSettings() for one in limits.values())
        for name, quota in self._quotas.items():
            quota.set_limits(self._limits.get(name, self.defaults))

    def take(self, name: str, what: Counted) -> Quota:
        """Count one more that a principal holds; `Quota.give` it back when it has ended.

        Raises:
            QuotaExceededError: the principal holds as many as it may; nothing is counted.
        """
        quota = self._quotas.get(name)
        if quota is None:
            quota = self._new(name)  # kept when something is counted: each limit is 1 at least
        quota.check(what)
        return self._count(quota, what)

    def take_for(self, principal: Identity, what: Counted) -> Quota | None:
        """Count one more that an identity holds, see `take`; `None` for the server itself, which has no quota.

        Clients that prove nothing share a name: they count by their source.

        Raises:
            QuotaExceededError: the principal holds as many as it may; nothing is counted.
        """
        name = principal.source if principal.name == ANONYMOUS else principal.name
        return None if principal is SERVER or not name else self.take(name, what)

    def restore(self, name: str, what: Counted) -> Quota:
        """Count one more that a principal has held since before the start, whatever its limits are now."""
        return self._count(self._quotas.get(name) or self._new(name), what)

    def give(self, name: str, what: Counted) -> None:
        """Count one less of what `take` or `restore` has counted."""
        self._quotas[name].give(what)

    def describe(self) -> dict[str, dict[Counted, int]]:
        """Return what each principal holds."""
        return {
            name: {what: count for what, count in quota.used.items() if count}
            for name, quota in sorted(self._quotas.items())
        }

    def count_rest(self, protocol: str, direction: Literal["publish", "read"], seconds: float) -> None:
        """Record that a connection rests because of its quota."""
        self._metrics.quota_rests_total.labels(protocol, direction).inc()
        self._metrics.quota_rest_seconds_total.labels(protocol, direction).inc(seconds)

    def _new(self, name: str) -> Quota:
        limits = self._limits.get(name, self.defaults)
        return Quota(name, limits, self._clock, self._count_refusal, self._forget)

    def _count(self, quota: Quota, what: Counted) -> Quota:
        self._quotas[quota.name] = quota
        quota.used[what] += 1
        return quota

    def _forget(self, quota: Quota) -> None:
        """Drop what nobody uses.

        A principal that owes bytes is kept for a while: a new connection must not begin without the old debt.
        """
        self._leaving[quota.name] = quota
        for name in [name for name, one in self._leaving.items() if any(one.used.values()) or not _owes(one)]:
            one = self._leaving.pop(name)
            if not any(one.used.values()):
                del self._quotas[name]

    def _count_refusal(self, what: Counted) -> None:
        self._metrics.quota_refusals_total.labels(what).inc()


def _owes(quota: Quota) -> bool:
    return bool(quota.publish.take(0) or quota.read.take(0))
