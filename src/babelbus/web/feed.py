"""The bounded queue of a live answer's reader; lines without room are dropped, and counted where they are missing."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from babelbus.core.flow_policy import Bound

TAKEN_MAX: Final = 64
"""Lines that a reader takes at a time: only lines that are not taken can be taken back."""


async def came(something: asyncio.Event, seconds: float) -> bool:
    """Wait up to `seconds` for an event; return whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await something.wait()
    except TimeoutError:
        return False
    return True


class Feed:
    """Lines for one reader. `put` and `close` come from the event loop, `take` from the reader's task.

    When the queue is full, new lines are dropped, not the waiting ones: the reader gets an unbroken run up to the gap,
    and then the number of lines in the gap. Only the last line may pass `bound`.
    """

    def __init__(self, bound: Bound, on_drop: Callable[[int], None]) -> None:
        self._bound = bound
        self._on_drop = on_drop
        self._lines: deque[tuple[str, bytes]] = deque()
        """Subjects, and lines."""
        self._size_bytes = 0
        self._dropped = 0
        self._something = asyncio.Event()
        self.closed = False
        self.end = ""
        """Why the feed has ended, if the reader is told."""

    def put(self, makers: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
        """Append lines, each of a subject; a line is encoded only if there is room for it."""
        lines, bound = self._lines, self._bound
        dropped = 0
        for subject, make in makers:
            if self._size_bytes >= bound.size_bytes or len(lines) >= bound.count:
                dropped += 1
                continue
            line = make()
            lines.append((subject, line))
            self._size_bytes += len(line)
        if dropped:
            self._dropped += dropped
            self._on_drop(dropped)
        self._something.set()

    async def take(self, seconds: float) -> tuple[list[bytes], int]:
        """Wait up to `seconds` for lines; return some waiting lines, and how many were dropped behind them."""
        if not self.closed and not self._lines:
            self._something.clear()
            await came(self._something, seconds)
        lines = [self._lines.popleft()[1] for _ in range(min(len(self._lines), TAKEN_MAX))]
        self._size_bytes -= sum(map(len, lines))
        dropped = 0
        if not self._lines:
            dropped, self._dropped = self._dropped, 0
        return lines, dropped

    def keep(self, granted: Callable[[str], bool]) -> None:
        """Drop the lines of subjects that the reader may not have any more."""
        self._lines = deque(pair for pair in self._lines if granted(pair[0]))
        self._size_bytes = sum(len(line) for _, line in self._lines)

    def close(self, end: str = "") -> None:
        """End the feed behind the lines that wait."""
        self.closed, self.end = True, end
        self._something.set()
