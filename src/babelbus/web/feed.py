"""The bounded queue of a live answer's reader; lines without room are dropped, and counted where they are missing."""

import asyncio
from collections.abc import Callable, Iterable

from babelbus.core.flow_policy import Bound


class Feed:
    """Lines for one reader. `put` and `close` come from the event loop, `take` from the reader's task.

    When the queue is full, new lines are dropped, not the waiting ones: the reader gets an unbroken run up to the gap,
    and then the number of lines in the gap. Only the last line may pass `bound`.
    """

    def __init__(self, bound: Bound, on_drop: Callable[[int], None]) -> None:
        self._bound = bound
        self._on_drop = on_drop
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._dropped = 0
        self._something = asyncio.Event()
        self.closed = False

    def put(self, makers: Iterable[Callable[[], bytes]]) -> None:
        """Append lines; a line is encoded only if there is room for it."""
        lines, bound = self._lines, self._bound
        dropped = 0
        for make in makers:
            if self._size_bytes >= bound.size_bytes or len(lines) >= bound.count:
                dropped += 1
                continue
            line = make()
            lines.append(line)
            self._size_bytes += len(line)
        if dropped:
            self._dropped += dropped
            self._on_drop(dropped)
        self._something.set()

    async def take(self, seconds: float) -> tuple[list[bytes], int]:
        """Wait up to `seconds` for lines; return all waiting lines, and how many were dropped behind them."""
        if not self.closed and not self._lines:
            self._something.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._something.wait()
            except TimeoutError:
                pass
        lines, dropped = self._lines, self._dropped
        self._lines, self._size_bytes, self._dropped = [], 0, 0
        return lines, dropped

    def close(self) -> None:
        """End the feed behind the lines that wait."""
        self.closed = True
        self._something.set()
