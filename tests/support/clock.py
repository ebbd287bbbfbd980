"""Clocks that a test moves."""

from babelbus.clock import SystemClock


class ManualClock:
    """A time that moves only by `advance` and `jump_to`: for tests of deadlines, retention and clocks that jump."""

    __slots__ = ("_monotonic_ms", "_wall_ms")

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms = now_ms
        self._monotonic_ms = 0.0

    def now_ms(self) -> int:
        """Return the wall time that was set."""
        return self._wall_ms

    def monotonic(self) -> float:
        """Return the seconds that `advance` has added so far."""
        return self._monotonic_ms / 1000

    def advance(self, seconds: float) -> None:
        """Move both times forward by `seconds`, which must not be negative."""
        assert seconds >= 0, "time goes on; to set the wall clock back, use jump_to"
        self._monotonic_ms += seconds * 1000
        self._wall_ms += round(seconds * 1000)

    def jump_to(self, now_ms: int) -> None:
        """Set the wall clock alone, forwards or backwards, as an administrator or a time server does."""
        self._wall_ms = now_ms


class ShiftedClock(SystemClock):
    """The time of this machine, and some more."""

    __slots__ = ("shift_ms",)

    def __init__(self) -> None:
        self.shift_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.shift_ms
