"""How late the event loop is, and the call that holds it: a thread asks the loop to turn, and looks at its stack.

All protocols run in this one loop: a call that does not return stops every client.
"""

import asyncio
import logging
import sys
import threading
import traceback

from babelbus.clock import Clock
from babelbus.limited_log import LimitedLog
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.1
"""How often the loop is asked to turn."""
HELD_SECONDS = 0.1
"""How late the loop may be before its stack is looked at."""
FRAMES_MAX = 8


class LoopWatch:
    """Measures the event loop that it was started in, until `stop`. A loop that is on time costs ten wakes a second."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._log = LimitedLog(log, clock)
        self._clock = clock
        self._worst_seconds = 0.0
        self._turned = threading.Event()
        """Set when the loop has turned since the thread last asked."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Begin to measure; call it in the loop."""
        self._loop = asyncio.get_running_loop()
        self._identity = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next look; nobody waits for it, since it may wait for the loop."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            if not self.look():
                return

    def look(self) -> bool:
        """Measure one turn of the loop, in the thread of the watch; return `False` when the loop is closed."""
        self._turned.clear()
        asked = self._clock.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._turned.set)
        except RuntimeError:  # the loop is closed
            return False
        held = "" if self._turned.wait(HELD_SECONDS) else self._stack()
        while held and not self._turned.wait(INTERVAL_SECONDS) and not self._stopped.is_set():
            pass
        lag = self._clock.monotonic() - asked
        self._metrics.loop_lag_seconds.observe(lag)
        self._worst_seconds = max(self._worst_seconds, lag)
        if held:
            self._log.write(logging.WARNING, "event loop", "the event loop was held for %.2f s by %s", lag, held)
        return True

    def take_worst(self) -> float:
        """Return how late the loop was at worst since the last call, in seconds."""
        worst, self._worst_seconds = self._worst_seconds, 0.0
        return worst

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._identity)
        calls = traceback.extract_stack(frame)[-FRAMES_MAX:] if frame is not None else []
        return " > ".join(f"{call.filename.rpartition('/babelbus/')[2]}:{call.lineno} {call.name}" for call in calls)
