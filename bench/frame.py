"""The registry of figures, and how one is measured.

A figure is a function that measures once and returns the value. One that needs an expensive set-up is a generator:
what it does before its first `yield` is the set-up, each `yield` is one measurement, and `finally` cleans up.

    @figure("storage.append", unit="records/s", target=600_000, peers=[raw.writing(chunk, records_per_chunk=1000)])
    def append() -> Iterator[Reading]:
        with scratch_folder() as folder:
            while True:
                yield measure_once(folder)

Peers are measured the same way and in turn with the figure (ours, peer, ours, peer, ...), so that a machine that
slows down slows both. The uniform twin of a figure on mixed traffic is measured in turn as well: the same job where
every message is alike. A figure on mixed traffic has a floor (its budget) and a smallest ratio to its twin.
"""

import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec


class PeerMissingError(Exception):
    """A peer is not installed. The message says what to install; the figure is measured without it."""


class Reading(msgspec.Struct, frozen=True):
    """One measurement. `note` is a remark for the table, such as `p50 0.1 ms, p99 0.4 ms`."""

    value: float
    note: str = ""


UNIFORM_RATIO_MIN = 0.6
"""Smallest part of its uniform twin's value that a figure on mixed traffic may have."""

Outcome = float | Reading
Measure = Callable[[], Outcome | Iterator[Outcome]]
MeasureFunction = TypeVar("MeasureFunction", bound=Measure)


class Peer(msgspec.Struct, frozen=True):
    """Somebody else's way to do the job of a figure, in the figure's unit."""

    name: str
    measure: Measure


class Figure(msgspec.Struct, frozen=True):
    """One line of the table. `lower_is_better` concerns target, floor and the choice of the strongest peer.

    `floor` is the budget of a figure on mixed traffic, `uniform` the name of its twin on uniform traffic.
    """

    name: str
    unit: str
    measure: Measure
    target: float | None = None
    peers: Sequence[Peer] = ()
    lower_is_better: bool = False
    floor: float | None = None
    uniform: str | None = None


class PeerResult(msgspec.Struct, frozen=True):
    """The median of a peer, or why there is none: `value` is None and `note` says `skipped: ...`."""

    name: str
    value: float | None
    note: str = ""


class Result(msgspec.Struct, frozen=True):
    """The median of a figure, of each of its peers in the order of the figure, and of its uniform twin."""

    figure: Figure
    value: float
    note: str
    peers: Sequence[PeerResult]
    uniform_value: float | None = None

    @property
    def strongest_peer(self) -> PeerResult | None:
        """The peer that is hardest to beat; None if every peer was skipped."""
        measured = [peer for peer in self.peers if peer.value is not None]
        choose = min if self.figure.lower_is_better else max
        return choose(measured, key=lambda peer: peer.value or 0.0) if measured else None

    @property
    def ratio(self) -> float | None:
        """Our value divided by the strongest peer's, whichever direction is better."""
        peer = self.strongest_peer
        return self.value / peer.value if peer and peer.value else None

    @property
    def meets_target(self) -> bool:
        """Whether the target is reached; a figure without one meets it."""
        return self._reaches(self.figure.target)

    @property
    def meets_floor(self) -> bool:
        """Return whether the floor holds; a figure without a floor meets it."""
        return self._reaches(self.figure.floor)

    @property
    def uniform_ratio(self) -> float | None:
        """Return the value divided by the uniform twin's value; None without a twin."""
        return self.value / self.uniform_value if self.uniform_value else None

    @property
    def meets_uniform_ratio(self) -> bool:
        """Return whether the ratio to the uniform twin holds; a figure without a twin meets it."""
        return self.uniform_ratio is None or self.uniform_ratio >= UNIFORM_RATIO_MIN

    @property
    def failures(self) -> list[str]:
        """Return the bounds that the value misses: the floor, the ratio to the uniform twin."""
        below = [] if self.meets_floor else [f"floor {self.figure.floor:,.0f}"]
        if not self.meets_uniform_ratio:
            below.append(f"{UNIFORM_RATIO_MIN} of {self.figure.uniform}")
        return below

    def _reaches(self, bound: float | None) -> bool:
        if bound is None:
            return True
        return self.value <= bound if self.figure.lower_is_better else self.value >= bound


FIGURES: dict[str, Figure] = {}


def figure(
    name: str,
    *,
    unit: str,
    target: float | None = None,
    peers: Sequence[Peer] = (),
    lower_is_better: bool = False,
    floor: float | None = None,
    uniform: str | None = None,
) -> Callable[[MeasureFunction], MeasureFunction]:
    """Register the decorated function as the figure `name` (`<area>.<what>`); `--only` selects by its beginning."""

    def register(measure: MeasureFunction) -> MeasureFunction:
        assert name not in FIGURES, f"two figures are called {name}"
        FIGURES[name] = Figure(name, unit, measure, target, tuple(peers), lower_is_better, floor, uniform)
        return measure

    return register


def run(chosen: Figure, repeat: int, progress: Callable[[str], object]) -> Result:
    """Measure a figure, its peers and its uniform twin `repeat` times in turn; call `progress` before each measurement.

    Raises: whatever our own measurement raises. A missing peer is a result; one that fails is an error as well,
    because a comparison that quietly lost its other half would read as a victory.
    """
    runs = [_Run(chosen.name, chosen.measure), *(_Run(peer.name, peer.measure) for peer in chosen.peers)]
    peers, twin = runs[1:], None
    if chosen.uniform is not None:
        twin = _Run(chosen.uniform, FIGURES[chosen.uniform].measure)
        runs.append(twin)
    try:
        for turn in range(1, repeat + 1):
            for one in runs:
                progress(f"{chosen.name}: {one.name} ({turn}/{repeat})")
                one.measure_once(may_be_missing=one in peers)
    finally:
        for one in runs:
            one.close()
    ours = runs[0].median()
    uniform = None if twin is None else twin.median().value
    return Result(chosen, ours.value, ours.note, [one.as_peer() for one in peers], uniform)


class _Run:
    """The readings of one function or generator."""

    def __init__(self, name: str, measure: Measure) -> None:
        self.name = name
        self._measure = measure
        self._iterator: Iterator[Outcome] | None = None
        self._readings: list[Reading] = []
        self._skipped = ""

    def measure_once(self, *, may_be_missing: bool) -> None:
        if self._skipped:
            return
        try:
            outcome = next(self._iterator) if self._iterator is not None else self._first()
        except PeerMissingError as missing:
            if not may_be_missing:
                raise
            self._skipped = f"skipped: {missing}"
            return
        self._readings.append(outcome if isinstance(outcome, Reading) else Reading(float(outcome)))

    def _first(self) -> Outcome:
        outcome = self._measure()
        if isinstance(outcome, Reading | float | int):
            return outcome
        self._iterator = outcome
        return next(outcome)

    def median(self) -> Reading:
        """The reading in the middle with its own note; the lower one of two."""
        value = statistics.median_low(reading.value for reading in self._readings)
        return next(reading for reading in self._readings if reading.value == value)

    def as_peer(self) -> PeerResult:
        if self._skipped:
            return PeerResult(self.name, None, self._skipped)
        median = self.median()
        return PeerResult(self.name, median.value, median.note)

    def close(self) -> None:
        if inspect.isgenerator(self._iterator):
            self._iterator.close()
