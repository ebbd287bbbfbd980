"""A log whose length peers do not decide: each cause has a few lines a minute, then a count."""

import logging

from babelbus.clock import Clock

LINES_MAX = 10
SECONDS = 60.0


class LimitedLog:
    """Writes the first `LINES_MAX` lines of a cause in a minute, and counts the others until the next line is due.

    The causes are few and chosen by the caller, never by a peer; metrics count every occurrence.
    """

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._minutes: dict[str, tuple[float, int]] = {}
        """Cause -> when its minute began, and how many lines were due in it."""

    def write(self, level: int, cause: str, text: str, *arguments: object) -> None:
        """Write a line, or count it."""
        now = self._clock.monotonic()
        began, lines = self._minutes.get(cause, (now, 0))
        if now - began >= SECONDS:
            if lines > LINES_MAX:
                self._logger.log(level, "%s: %d more lines like those before", cause, lines - LINES_MAX)
            began, lines = now, 0
        self._minutes[cause] = began, lines + 1
        if lines < LINES_MAX:
            self._logger.log(level, text, *arguments)
        elif lines == LINES_MAX:
            self._logger.log(level, "%s: further lines of this minute are counted only", cause)
