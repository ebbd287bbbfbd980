"""Packets in one piece of memory: the packets of one read of a socket, or those that wait together for a receiver."""

from typing import Protocol


class Buffer(Protocol):
    """Bytes that can be searched and cut: `bytes`, or an `mmap` that the next read overwrites."""

    def find(self, wanted: bytes, start: int, end: int, /) -> int:
        """Return where `wanted` begins between `start` and `end`, -1 if nowhere."""

    def __getitem__(self, part: slice, /) -> bytes: ...


class Packets:
    """Some packets: packet `i` is the `sizes[i]` bytes of `data` from `starts[i]` on.

    With `fleeting`, the memory is valid until the next read only: receivers that keep packets use `packed`.
    """

    __slots__ = ("_packed", "_packed_part", "address", "data", "fleeting", "sizes", "starts")

    def __init__(self, data: Buffer, starts: list[int], sizes: list[int], *, fleeting: bool = False) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes
        self.fleeting = fleeting
        self.address = 0
        """Where the memory of `data` begins, once a sender has looked; 0 is not known."""
        self._packed: Packets | None = None
        self._packed_part = (0, 0)

    @classmethod
    def of(cls, packets: list[bytes]) -> "Packets":
        """Build packets from a list."""
        starts, position = [], 0
        for packet in packets:
            starts.append(position)
            position += len(packet)
        return cls(packets[0] if len(packets) == 1 else b"".join(packets), starts, list(map(len, packets)))

    def __len__(self) -> int:
        return len(self.sizes)

    def packet(self, number: int) -> bytes:
        """Return one packet."""
        start = self.starts[number]
        return self.data[start : start + self.sizes[number]]

    def packed(self, first: int, last: int) -> "Packets":
        """Return packets `first` to `last` (exclusive) as a copy; made once for all receivers of the same run."""
        if self._packed is None or self._packed_part != (first, last):
            self._packed = Packets.of([self.packet(number) for number in range(first, last)])
            self._packed_part = (first, last)
        return self._packed

    def refill(self, sizes: list[int]) -> None:
        """Record the packets of the next read into the same memory."""
        self.sizes = sizes
        self._packed = None
