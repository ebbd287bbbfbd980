"""Where the frames of one subject lie in its stream: some frames are known, the others are searched for by halving.

A stream finds the next message of a subject from any sequence on. The heads only grow from frame to frame, so a search
for the first frame that fulfils a condition costs some single reads, and the frames that it meets are known afterwards.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Callable

from babelbus.storage.jetstream.frame import Head

STEP_BYTES = 2**18
"""Records between two places that a writer notes."""
PLACES_MAX = 100_000
"""Places that are known at most; beyond it, every second one is forgotten."""


class Places:
    """Some frames of a subject in a stream. Methods may be called from any thread.

    `end` is the sequence behind the last frame, `first` that of the first one.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.first = 1
        self.end = 1
        self._lock = threading.Lock()
        self._heads: list[Head] = []

    def add(self, head: Head, *, always: bool = False) -> None:
        """Record a frame, if the last known one is far enough in front of it."""
        with self._lock:
            heads = self._heads
            if heads and not always and 0 <= head.bytes_before - heads[-1].bytes_before < STEP_BYTES:
                return
            place = bisect_left(heads, head.sequence, key=_sequence)
            if place == len(heads) or heads[place].sequence != head.sequence:
                insort(heads, head, key=_sequence)
            if len(heads) > PLACES_MAX:
                del heads[1::2]

    def cut_front(self, sequence: int) -> None:
        """Remove the frames in front of a sequence."""
        with self._lock:
            self.first = max(self.first, sequence)
            del self._heads[: bisect_left(self._heads, sequence, key=_sequence)]

    def find(
        self, condition: Callable[[Head], bool], look: Callable[[int, int], Head | None]
    ) -> tuple[Head | None, Head | None]:
        """Return the last frame in front of the first one that fulfils a condition, and that one.

        The condition holds for all frames behind one for which it holds. `look(sequence, end)` returns the head of the
        first good frame at or behind a sequence, in front of `end`.
        """
        with self._lock:
            place = bisect_left(self._heads, True, key=condition)
            before = self._heads[place - 1] if place else None
            after = self._heads[place] if place < len(self._heads) else None
        low = self.first if before is None else before.sequence + 1
        high = self.end if after is None else after.sequence
        while low < high:  # a frame that fulfils the condition may lie in [low, high)
            middle = (low + high) // 2
            head = look(middle, high)
            if head is None:
                high = middle
                continue
            self.add(head, always=True)
            if condition(head):
                after, high = head, middle
            else:
                before, low = head, head.sequence + 1
        return before, after


def _sequence(head: Head) -> int:
    return head.sequence
