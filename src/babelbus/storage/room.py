"""The room for records that an engine has taken and not yet stored."""

import threading

QUEUE_BYTES_MAX = 64 * 2**20
"""Most that all partitions of a store hold unstored; beyond it publishers get a retriable error."""


class Room:
    """How many bytes the partitions of a store hold unstored together. Methods may be called from any thread."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Record `size` bytes more; return whether there was room; a batch larger than all of the room goes alone."""
        with self._lock:
            if self.bytes_held and self.bytes_held + size > self.bytes_max:
                return False
            self.bytes_held += size
            return True

    def give_back(self, size: int) -> None:
        """Record that `size` bytes are stored or dropped."""
        with self._lock:
            self.bytes_held -= size
