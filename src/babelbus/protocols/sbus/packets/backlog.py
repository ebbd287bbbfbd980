"""The packets that wait for one receiver, in the order that the receiver chose."""

from bisect import insort
from collections import deque
from collections.abc import Callable

from babelbus.core.flow_policy import Bound, Order
from babelbus.wire.packets import Packets


class _Run:
    """Packets `first` to `last` of some; `number` is that of the first one since the backlog began."""

    __slots__ = ("first", "last", "number", "packets")

    def __init__(self, packets: Packets, first: int, last: int, number: int) -> None:
        self.packets = packets
        self.first = first
        self.last = last
        self.number = number


_Sized = tuple[int, int, Packets, int]
"""Size, minus the number (so that of equal ones the oldest is the largest), and where the packet is."""


class _Segment:
    """The packets between two control packets, which nothing overtakes."""

    def __init__(self, *, control: bool) -> None:
        self.control = control
        self._runs: deque[_Run] = deque()
        self._sized: list[_Sized] | None = None

    def __bool__(self) -> bool:
        return bool(self._runs or self._sized)

    def put(self, run: _Run) -> None:
        if self._sized is None:
            self._runs.append(run)
        else:
            for one in _single(run):
                insort(self._sized, one)

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop the packets that are not wanted."""
        kept = [_Run(packets, number, number + 1, -negated) for _, negated, packets, number in self._sized or ()]
        for run in self._runs:
            kept += [_Run(run.packets, at, at + 1, run.number + at - run.first) for at in range(run.first, run.last)]
        kept.sort(key=lambda run: run.number)
        self._sized = None
        self._runs = deque(run for run in kept if wanted(run.packets.packet(run.first)))

    @property
    def sizes(self) -> list[int]:
        """The sizes of the packets."""
        if self._sized is not None:
            return [one[0] for one in self._sized]
        return [size for run in self._runs for size in run.packets.sizes[run.first : run.last]]

    def next(self, order: Order) -> _Run:
        """Return what goes first; a part of it may be taken."""
        if order == "random":
            if self._sized is None:
                self._sized = sorted(one for run in self._runs for one in _single(run))
                self._runs.clear()
            _, negated, packets, number = self._sized[-1]
            return _Run(packets, number, number + 1, -negated)
        if self._sized is not None:
            for _, negated, packets, number in sorted(self._sized, key=lambda one: -one[1]):
                self._runs.append(_Run(packets, number, number + 1, -negated))
            self._sized = None
        if order == "queue" or self.control:
            return self._runs[0]
        run = self._runs[-1]
        return _Run(run.packets, run.last - 1, run.last, run.number)

    def take(self, order: Order, count: int) -> None:
        """Remove `count` packets of those that `next` returned for the same order."""
        if self._sized is not None:
            self._sized.pop()
        elif order == "queue" or self.control:
            run = self._runs[0]
            run.first += count
            run.number += count
            if run.first == run.last:
                self._runs.popleft()
        else:
            run = self._runs[-1]
            run.last -= 1
            if run.first == run.last:
                self._runs.pop()


def _single(run: _Run) -> list[_Sized]:
    sizes, number = run.packets.sizes, run.number
    return [(sizes[one], -(number + one - run.first), run.packets, one) for one in range(run.first, run.last)]


class Backlog:
    """The queue of one receiver. It knows its size; what to do when it is full is its owner's matter."""

    def __init__(self) -> None:
        self._segments: deque[_Segment] = deque()
        self._numbered = 0
        self.size_bytes = 0
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def put(self, packets: Packets, first: int, last: int, *, control: bool = False) -> None:
        """Append packets `first` to `last`, which nobody may overwrite; a `control` one keeps its place."""
        if not self._segments or control or self._segments[-1].control:
            self._segments.append(_Segment(control=control))
        self._segments[-1].put(_Run(packets, first, last, self._numbered))
        self._numbered += last - first
        self.count += last - first
        self.size_bytes += sum(packets.sizes[first:last])

    def next(self, order: Order) -> tuple[Packets, int, int]:
        """Return what goes out first: packets, first, last. There must be something."""
        segment = self._segments[0]
        run = segment.next("queue" if segment.control else order)
        return run.packets, run.first, run.last

    def take(self, order: Order, count: int) -> None:
        """Remove the first `count` packets of those that `next` returned for the same order."""
        segment = self._segments[0]
        run = segment.next("queue" if segment.control else order)
        self.size_bytes -= sum(run.packets.sizes[run.first : run.first + count])
        self.count -= count
        segment.take(order, count)
        if not segment:
            self._segments.popleft()

    def exceeds(self, bound: Bound) -> bool:
        """Return whether more waits than `bound` allows."""
        return self.size_bytes > bound.size_bytes or self.count > bound.count

    def keep(self, wanted: Callable[[bytes], bool]) -> int:
        """Drop the packets that are not wanted, but no control packet; return how many."""
        before = self.count
        for segment in self._segments:
            if not segment.control:
                segment.keep(wanted)
        self._segments = deque(segment for segment in self._segments if segment)
        sizes = [size for segment in self._segments for size in segment.sizes]
        self.size_bytes, self.count = sum(sizes), len(sizes)
        return before - self.count

    def clear(self) -> None:
        """Drop all packets."""
        self._segments.clear()
        self.size_bytes = self.count = 0
