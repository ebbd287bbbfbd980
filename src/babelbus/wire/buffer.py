"""Bytes of a peer that wait for more bytes."""

PART_BYTES = 64
"""Memory of a part beside its bytes: a peer may send single bytes."""


class Buffer:
    """Keeps the parts as they came and joins them once: one buffer that grows is copied, and leaves holes in memory."""

    __slots__ = ("_parts", "size_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that are kept, with what each part costs."""
        return self.size_bytes + PART_BYTES * len(self._parts)

    def add(self, data: bytes) -> None:
        """Append a part."""
        if data:
            self._parts.append(data)
            self.size_bytes += len(data)

    def peek(self) -> bytes:
        """Return all bytes."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def take(self) -> bytes:
        """Return and remove all bytes."""
        parts = self._parts
        self.size_bytes = 0
        if len(parts) == 1:
            return parts.pop()
        self._parts = []
        return b"".join(parts)

    def clear(self) -> None:
        """Remove all bytes."""
        self._parts = []
        self.size_bytes = 0
