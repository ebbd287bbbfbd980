"""The figures of the last two days: rings in memory, filled once a second, for charts without another program.

Each series has three rings: 1 s for 10 minutes, 10 s for 2 hours, 1 minute for 2 days. A point has two bytes, on a
logarithmic scale of 1024 steps for each factor of two: 0.04 % beside the true figure at the most, and all integers
below a thousand are exact. Topics and groups are many, so only the busiest have a series.
"""

import asyncio
import math
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, Literal

from prometheus_client.metrics import MetricWrapperBase

from babelbus.clock import Clock
from babelbus.core.broker import Broker
from babelbus.core.groups import Group
from babelbus.core.topic import Topic
from babelbus.metrics import Metrics, Traffic

RINGS: Final = {1: 600, 10: 720, 60: 2880}
"""Seconds of a step -> points of the ring."""
TOPICS_MAX: Final = 24
GROUPS_MAX: Final = 16
SERIES_MAX: Final = 80
RANKED_MAX: Final = 5_000
"""Traffic counters that are looked at to find the busiest topics."""
RANK_SECONDS: Final = 10
"""How often the busiest are chosen anew, and slow figures are read."""
CURSORS_AT_ONCE: Final = 100
"""Cursors of groups that are read in one second: each takes some microseconds."""
PARTITIONS_AT_ONCE: Final = 500
"""Partitions whose bytes are read in one second."""
BUSIER: Final = 2.0
"""How many times busier a topic must be to take the place of another."""
STEPS: Final = 1024
LOWEST: Final = -14
"""Power of two of the smallest figure that is not 0."""
NOTHING, ZERO = 0, 1
"""Points that are no figure and the figure 0."""
_CODE_MAX = 2**16 - 1
_STATM_RESIDENT = 1

Unit = Literal["records/s", "messages/s", "connections", "seconds", "bytes", "processors", "records", "keys"]


def encode(value: float) -> int:
    """Return the two bytes of a figure; less than nothing counts as nothing, what is too large as the largest."""
    if value != value:  # not a number
        return NOTHING
    if value <= 0:
        return ZERO
    return min(max(round((math.log2(value) - LOWEST) * STEPS) + ZERO + 1, ZERO), _CODE_MAX)


def decode(code: int) -> float | None:
    """Return the figure of two bytes."""
    if code <= ZERO:
        return None if code == NOTHING else 0
    value: float = 2.0 ** ((code - ZERO - 1) / STEPS + LOWEST)
    whole = round(value)
    return whole if abs(value - whole) <= value * 0.0004 else float(f"{value:.4g}")


class Series:
    """One figure in its three rings."""

    __slots__ = ("_counts", "_is_worst", "_rings", "_sums", "label", "name", "unit", "value")

    def __init__(self, name: str, unit: Unit, label: str, *, is_worst: bool = False) -> None:
        self.name = name
        self.unit = unit
        self.label = label
        self.value = math.nan
        """The figure of this second."""
        self._is_worst = is_worst  # else the mean
        self._rings = [array("H", [NOTHING]) * size for size in RINGS.values()]
        self._sums = [0.0] * (len(RINGS) - 1)
        self._counts = [0] * (len(RINGS) - 1)

    def push(self, tick: int) -> None:
        """Add the figure of a second to the rings."""
        value, self.value = self.value, math.nan
        self._rings[0][tick % len(self._rings[0])] = encode(value)
        for number, step in enumerate(_LONG_STEPS):
            if value == value:
                self._counts[number] += 1
                self._sums[number] = max(self._sums[number], value) if self._is_worst else self._sums[number] + value
            if tick % step == step - 1:
                ring, count, total = self._rings[number + 1], self._counts[number], self._sums[number]
                mean = total if self._is_worst else total / count if count else 0
                ring[tick // step % len(ring)] = encode(mean) if count else NOTHING
                self._counts[number], self._sums[number] = 0, 0.0

    def skip(self, tick: int, count: int) -> None:
        """Remove the points of seconds that nobody has looked at."""
        for ring, step in zip(self._rings, RINGS, strict=True):
            first, last = tick // step, (tick + count) // step
            if step > 1 and first < last:
                number = _LONG_STEPS.index(step)
                self._counts[number], self._sums[number] = 0, 0.0
            for place in range(max(first, last - len(ring)), last):
                ring[place % len(ring)] = NOTHING

    def points(self, step: int, end: int, count: int) -> list[float | None]:
        """Return the last points before the tick `end`, the oldest first."""
        ring = self._rings[list(RINGS).index(step)]
        last = end // step
        places = range(max(last - count, 0), last)
        return [None] * (count - len(places)) + [decode(ring[place % len(ring)]) for place in places]


_LONG_STEPS = tuple(RINGS)[1:]


class Rate:
    """Turns a count into its rate a second."""

    __slots__ = ("_last", "series")

    def __init__(self, series: Series, total: int) -> None:
        self.series = series
        self._last = total

    def note(self, total: int, seconds: int) -> None:
        """Set the rate by the count of now; a count that became smaller lost what was removed."""
        self.series.value = max(total - self._last, 0) / seconds
        self._last = total


class History:
    """The rings of a server; only its event loop uses them.

    Args:
        worst_lag: returns how late the event loop was at worst since the last call.
        protocols: the protocols whose traffic is told.
    """

    def __init__(
        self,
        broker: Broker,
        metrics: Metrics,
        clock: Clock,
        folder: str,
        protocols: Iterable[str],
        worst_lag: Callable[[], float],
    ) -> None:
        self.series: dict[str, Series] = {}
        self.ticks = 0
        """Seconds since the beginning."""
        self.end_ms = clock.now_ms()
        """Time of the last second."""
        self.started_ms = self.end_ms
        self.topics: dict[str, Series] = {}
        """Those of the busiest topics, by name."""
        self.groups: dict[tuple[str, str], Series] = {}
        """Those of the groups that lag most, by topic and name."""
        self.topics_left_out = self.groups_left_out = 0
        self._broker = broker
        self._metrics = metrics
        self._clock = clock
        self._folder = folder
        self._protocols = frozenset(protocols)
        self._worst_lag = worst_lag
        self._rates: dict[str, Rate] = {}
        self._topic_rates: dict[str, tuple[Rate, list[Traffic]]] = {}
        self._counted: dict[str, tuple[int, list[tuple[str, list[Traffic]]]]] = {}
        """By kind: how many counters there were, and those of each protocol."""
        self._names: list[tuple[str, str]] = []
        """Protocol and topic of the traffic that was ranked when the busiest were chosen last."""
        self._ranked: list[Traffic] = []
        self._totals = array("Q")
        """Its counts at that moment."""
        self._walk: deque[Group] = deque()
        """The groups that are still to be looked at in this round."""
        self._group_count = 0
        self._lag = self._lag_so_far = 0.0
        self._lags: dict[tuple[str, str], float] = {}
        """The groups that lag most in this round: no more than have a series."""
        self._held: dict[tuple[str, str], float] = {}
        """The lag of the groups that have a series, as it was read last."""
        self._free_bytes: float = math.nan
        self._log_bytes: float = math.nan
        self._unmeasured: deque[Topic] = deque()
        """The topics whose bytes are still to be added in this round."""
        self._log_bytes_so_far = 0
        self._processor_seconds = time.process_time()
        self._last = clock.monotonic()
        self._asking: asyncio.Future[float] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look once a second."""
        self._loop = asyncio.get_running_loop()
        self._last = self._clock.monotonic()
        self._timer = self._loop.call_later(1.0, self._turn)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        late = self.sample()
        # At the same fraction of each second, however late the loop was.
        self._timer = self._loop.call_later(max(1.0 - late, 0.05), self._turn)

    def sample(self) -> float:
        """Add the figures of now; return how many seconds after the full second that was."""
        passed = self._clock.monotonic() - self._last
        seconds = int(passed + 0.1)  # a timer may be early
        if seconds < 1:
            return passed
        self._last += seconds
        self.end_ms = self._clock.now_ms()
        if seconds > 1:
            for series in self.series.values():
                series.skip(self.ticks, seconds - 1)
            self.ticks += seconds - 1
        if self.ticks % RANK_SECONDS == 0 or seconds > 1:
            self._ask_for_disk()
            self._choose_topics()
        self._look(seconds)
        for series in self.series.values():
            series.push(self.ticks)
        self.ticks += 1
        return passed - seconds

    # -- figures -----------------------------------------------------------------------------------------------------

    def _look(self, seconds: int) -> None:
        metrics = self._metrics
        for kind, kept in (("published", metrics.published), ("fetched", metrics.fetched)):
            for protocol, traffics in self._by_protocol(kind, kept):
                total = sum([one.records + one.records_settled for one in traffics])
                self._note_count(f"{kind}.{protocol}", "records/s", f"{protocol}: {kind}", total, seconds)
        for (protocol, direction), traffic in metrics.live.items():
            if protocol in self._protocols:
                name = "live" if direction == "delivered" else "received"
                label = f"{protocol}: live messages {direction}"
                self._note_count(f"{name}.{protocol}", "messages/s", label, traffic.records_total, seconds)
        for protocol, value in values_of(metrics.connections):
            if protocol in self._protocols:
                self._note(f"connections.{protocol}", "connections", f"{protocol}: connections", value)
        for rate, traffics in self._topic_rates.values():
            rate.note(sum([one.records + one.records_settled for one in traffics]), seconds)
        self._look_at_groups()
        self._look_at_logs()
        processor_seconds = time.process_time()
        self._note("cpu", "processors", "processor", (processor_seconds - self._processor_seconds) / seconds)
        self._processor_seconds = processor_seconds
        self._note("memory", "bytes", "memory", resident_bytes())
        self._note("loop_lag", "seconds", "event loop: lag at worst", self._worst_lag(), is_worst=True)
        flush = max([backend.flusher.last_seconds for backend in self._broker.backends.values()], default=0.0)
        self._note("flush", "seconds", "last flush", flush, is_worst=True)
        self._note("disk_free", "bytes", "disk: free", self._free_bytes)
        self._note("log_bytes", "bytes", "disk: topics", self._log_bytes)
        self._note("state_keys", "keys", "state: keys", len(self._broker.state))

    def _note(self, name: str, unit: Unit, label: str, value: float, *, is_worst: bool = False) -> None:
        series = self.series.get(name)
        if series is None:
            if len(self.series) >= SERIES_MAX:
                return
            series = self.series[name] = Series(name, unit, label, is_worst=is_worst)
        series.value = value

    def _note_count(self, name: str, unit: Unit, label: str, total: int, seconds: int) -> None:
        rate = self._rates.get(name)
        if rate is None:
            if not total or len(self.series) >= SERIES_MAX:
                return
            series = self.series[name] = Series(name, unit, label)
            rate = self._rates[name] = Rate(series, 0)
        rate.note(total, seconds)

    def _by_protocol(self, kind: str, kept: dict[tuple[str, str], Traffic]) -> list[tuple[str, list[Traffic]]]:
        """Return the counters of each protocol; they are sorted anew when there are more or fewer."""
        count, found = self._counted.get(kind, (-1, []))
        if count != len(kept):
            groups: dict[str, list[Traffic]] = {}
            for (protocol, topic), traffic in kept.items():
                if protocol in self._protocols and not topic.startswith("$"):
                    groups.setdefault(protocol, []).append(traffic)
            found = sorted(groups.items())
            self._counted[kind] = len(kept), found
        return found

    def _look_at_logs(self) -> None:
        """Add the bytes of some logs to the sum of this round."""
        if not self._unmeasured:
            self._unmeasured.extend(self._broker.topics())
            self._log_bytes_so_far = 0
        left = PARTITIONS_AT_ONCE
        while self._unmeasured and left > 0:
            partitions = self._unmeasured.popleft().partitions
            left -= len(partitions)
            self._log_bytes_so_far += sum([partition.log.size_bytes for partition in partitions])
        if not self._unmeasured:
            self._log_bytes = self._log_bytes_so_far

    def _ask_for_disk(self) -> None:
        if self._asking is None:
            # A disk that hangs must not stop the bus; it holds one thread, not one more every ten seconds.
            self._asking = asyncio.get_running_loop().run_in_executor(None, _free_bytes, self._folder)
            self._asking.add_done_callback(self._note_free)

    def _note_free(self, asking: "asyncio.Future[float]") -> None:
        self._asking = None
        if not asking.cancelled():
            self._free_bytes = asking.result()

    # -- the busiest -------------------------------------------------------------------------------------------------

    def _choose_topics(self) -> None:
        """Update which topics have a series: those with most records since the last choice."""
        counts = self._rank()
        for topic in [topic for topic in self.topics if self._broker.find_topic(topic) is None]:
            self._drop_topic(topic)
        busy = sorted(counts, key=counts.__getitem__, reverse=True)
        for topic in busy[:TOPICS_MAX]:
            if topic in self.topics or self._broker.find_topic(topic) is None:
                continue
            if len(self.topics) >= TOPICS_MAX:
                quietest = min(self.topics, key=lambda topic: counts.get(topic, 0))
                if counts[topic] < BUSIER * counts.get(quietest, 0):
                    break
                self._drop_topic(quietest)
            series = Series(f"topic.{escape(topic)}.published", "records/s", f"{topic}: published")
            self.topics[topic] = self.series[series.name] = series
        self.topics_left_out = sum(topic not in self.topics for topic in busy)
        traffics: dict[str, list[Traffic]] = {topic: [] for topic in self.topics}
        for (_, topic), traffic in zip(self._names, self._ranked, strict=True):
            if topic in traffics:
                traffics[topic].append(traffic)
        for topic, found in traffics.items():
            if topic not in self._topic_rates or self._topic_rates[topic][1] != found:
                self._topic_rates[topic] = Rate(self.topics[topic], sum(one.records_total for one in found)), found

    def _rank(self) -> dict[str, int]:
        """Return the records of each busy topic since the last call."""
        published = self._metrics.published
        names = list(islice((key for key in published if key[1][:1] != "$"), RANKED_MAX))
        ranked = [published[key] for key in names]
        totals = array("Q", [traffic.records_total for traffic in ranked])
        counts: dict[str, int] = {}
        place, before = 0, self._ranked
        for (_, topic), traffic, total in zip(names, ranked, totals, strict=True):
            while place < len(before) and before[place] is not traffic:
                place += 1  # its topic is gone: the order stays, and what is new comes last
            count = total - (self._totals[place] if place < len(before) else 0)
            if count > 0:
                counts[topic] = counts.get(topic, 0) + count
        self._names, self._ranked, self._totals = names, ranked, totals
        return counts

    def _drop_topic(self, topic: str) -> None:
        del self.series[self.topics.pop(topic).name]
        self._topic_rates.pop(topic, None)

    def _look_at_groups(self) -> None:
        """Read the lag of some groups; a whole round of all groups chooses those that have a series."""
        walk = self._walk
        if not walk:
            walk.extend(self._broker.groups.all())
            self._group_count, self._lag_so_far, self._lags = len(walk), 0.0, {}
        left = CURSORS_AT_ONCE
        while walk and left > 0:
            group = walk.popleft()
            left -= len(group.topic.partitions)
            key, lag = (group.topic.name, group.name), group.info().lag
            self._lag_so_far += lag
            self._lags[key] = lag
            if key in self.groups:
                self._held[key] = lag
            if len(self._lags) > GROUPS_MAX:
                del self._lags[min(self._lags, key=self._lags.__getitem__)]
        if not walk:
            self._lag = self._lag_so_far
            self._choose_groups()
        for key, series in self.groups.items():
            series.value = self._held[key]
        self._note("groups_lag", "records", "groups: lag", self._lag)

    def _choose_groups(self) -> None:
        find = self._broker.groups.find
        for key in [key for key in self.groups if find(*key) is None]:
            self._drop_group(key)
        for key, lag in sorted(self._lags.items(), key=lambda pair: -pair[1]):
            if key in self.groups or find(*key) is None:
                continue
            if len(self.groups) >= GROUPS_MAX:
                quietest = min(self.groups, key=self._held.__getitem__)
                if lag <= BUSIER * self._held[quietest]:
                    break
                self._drop_group(quietest)
            topic, name = key
            series = Series(f"group.{escape(topic)}.{escape(name)}.lag", "records", f"{topic}, group {name}: lag")
            self.groups[key] = self.series[series.name] = series
            self._held[key] = lag
        self.groups_left_out = self._group_count - len(self.groups)

    def _drop_group(self, key: tuple[str, str]) -> None:
        del self.series[self.groups.pop(key).name], self._held[key]


def escape(name: str) -> str:
    """Return a name as it is in the name of a series: commas are between series."""
    return name.replace("%", "%25").replace(",", "%2C")


def values_of(gauge: MetricWrapperBase) -> list[tuple[str, float]]:
    """Return the values of a gauge with one label, whether they are set or asked for."""
    return [(labels[0], next(iter(child._child_samples())).value) for labels, child in list(gauge._metrics.items())]


def resident_bytes() -> int:
    """Return the memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[_STATM_RESIDENT]) * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan
