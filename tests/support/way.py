"""A way between two servers that can be partitioned and slowed down, as a network can.

A partition holds everything: connections stay open, new ones lead nowhere, as with a router that drops packets. When
it heals, held bytes arrive late, unless their connection has ended meanwhile.
"""

import socket
import threading

from tests.support.passage import Passage


class Way(Passage):
    """A passage that carries everything until it is told otherwise."""

    def __init__(self, address: str) -> None:
        self._open, self._never = threading.Event(), threading.Event()
        self._open.set()
        self._delay_seconds = 0.0
        super().__init__(address)

    def connect(self) -> socket.socket:
        """Connect to the other end, when the way is open."""
        self._open.wait()
        return super().connect()

    def send(self, target: socket.socket, data: bytes, is_answer: bool) -> None:
        """Send bytes to the other side, when the way is open, and late on a slow way."""
        if self._delay_seconds:
            self._never.wait(self._delay_seconds)  # holds what comes behind too: a narrow way
        self._open.wait()
        super().send(target, data, is_answer)

    def partition(self) -> None:
        """Hold everything."""
        self._open.clear()

    def slow_down(self, seconds: float) -> None:
        """Let each piece of at most 64 KiB take so long."""
        self._delay_seconds = seconds

    def heal(self) -> None:
        """Let everything through at once."""
        self._delay_seconds = 0.0
        self._open.set()
