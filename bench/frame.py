"""The registry of figures, and how one is measured.

A figure is a function that measures once and returns the value. One that needs an expensive set-up is a generator:
what it does before its first `yield` is the set-up, each `yield` is one measurement, and `finally` cleans up.

    @figure("storage.append", unit="records/s", target=600_000, peers=[raw.writing(chunk, records_per_chunk=1000)])
    def append() -> Iterator[Reading]:
        with scratch_folder() as folder:
            while True:
                yield measure_once(folder)

Peers are measured the same way and in turn with the figure (ours, peer, ours, peer, ...), so that a machine that
slows down slows both.
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


Outcome = float | Reading
Measure = Callable[[], Outcome | Iterator[Outcome]]
MeasureFunction = TypeVar("MeasureFunction", bound=Measure)


class Peer(msgspec.Struct, frozen=True):
    """Somebody else's way to do the job of a figure, in the figure's unit."""

    name: str
    measure: Measure


class Figure(msgspec.Struct, frozen=True):
    """One line of the table. `lower_is_better` concerns the target and the choice of the strongest peer."""

    name: str
    unit: str
    measure: Measure
    target: float | None = None
    peers: Sequence[Peer] = ()
    lower_is_better: bool = False


class PeerResult(msgspec.Struct, frozen=True):
    """The median of a peer, or why there is none: `value` is None and `note` says `skipped: ...`."""

    name: str
    value: float | None
    note: str = ""


class Result(msgspec.Struct, frozen=True):
    """The median of a figure, and of each of its peers in the order of the figure."""

    figure: Figure
    value: float
    note: str
    peers: Sequence[PeerResult]

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
        target = self.figure.target
        if target is None:
            return True
        return self.value <= target if self.figure.lower_is_better else self.value >= target


FIGURES: dict[str, Figure] = {}


def figure(
    name: str,
    *,
    unit: str,
    target: float | None = None,
    peers: Sequence[Peer] = (),
    lower_is_better: bool = False,
) -> Callable[[MeasureFunction], MeasureFunction]:
    """Register the decorated function as the figure `name` (`<area>.<what>`); `--only` selects by its beginning."""

    def register(measure: MeasureFunction) -> MeasureFunction:
        assert name not in FIGURES, f"two figures are called {name}"
        FIGURES[name] = Figure(name, unit, measure, target, tuple(peers), lower_is_better)
        return measure

    return register


def run(chosen: Figure, repeat: int, progress: Callable[[str], object]) -> Result:
    """Measure a figure and its peers `repeat` times in turn. `progress` is called before each measurement.

    Raises: whatever our own measurement raises. A missing peer is a result; one that fails is an error as well,
    because a comparison that quietly lost its other half would read as a victory.
    """
    runs = [_Run(chosen.name, chosen.measure), *(_Run(peer.name, peer.measure) for peer in chosen.peers)]
    try:
        for turn in range(1, repeat + 1):
            for one in runs:
                progress(f"{chosen.name}: {one.name} ({turn}/{repeat})")
                one.measure_once(may_be_missing=one is not runs[0])
    finally:
        for one in runs:
            one.close()
    ours = runs[0].median()
    return Result(chosen, ours.value, ours.note, [one.as_peer() for one in runs[1:]])


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
