"""Memory of messages that have not come whole: one bound for the process, and one for each address."""

from typing import Protocol

import msgspec

from babelbus.config import ServerSettings
from babelbus.metrics import Metrics


class Holder(Protocol):
    """A connection, as the budget sees it."""

    address: str
    """Address of the peer without the port; all Unix sockets have one."""

    def give_up(self, reason: str, text: str) -> None:
        """Drop the message that has not come whole, and close. The budget does not count the connection any more."""


class _Share(msgspec.Struct):
    holders: dict[Holder, int] = {}
    size_bytes: int = 0


class Budget:
    """Counts the bytes that connections hold of unfinished messages.

    Over a bound, the connection that holds the most gives up its message. So peers with small messages are served
    while others fill the budget, and a long message passes on a quiet server.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self.unauthenticated_bytes_max = settings.unauthenticated_bytes_max
        self._bytes_max = settings.unfinished_bytes_max
        self._address_bytes_max = settings.unfinished_bytes_per_address_max
        self._shares: dict[str, _Share] = {}
        self._size_bytes = 0
        metrics.unfinished_bytes.set_function(lambda: self._size_bytes)
        metrics.unfinished_bytes_max.set(self._bytes_max)

    def room(self, address: str) -> int:
        """Return how many bytes one more message of an address may take."""
        share = self._shares.get(address)
        held = 0 if share is None else share.size_bytes
        return max(0, min(self._bytes_max - self._size_bytes, self._address_bytes_max - held))

    def hold(self, holder: Holder, size_bytes: int) -> None:
        """Record how many bytes a connection holds now."""
        share = self._shares.get(holder.address)
        if share is None:
            if not size_bytes:
                return
            share = self._shares[holder.address] = _Share()
        change = size_bytes - share.holders.pop(holder, 0)
        if size_bytes:
            share.holders[holder] = size_bytes
        elif not share.holders:
            del self._shares[holder.address]
        share.size_bytes += change
        self._size_bytes += change
        while share.size_bytes > self._address_bytes_max:
            text = f"unfinished messages of one address take more than {self._address_bytes_max} bytes"
            self._refuse(share, "address_memory", text)
        while self._size_bytes > self._bytes_max:
            largest = max(self._shares.values(), key=lambda share: share.size_bytes)
            self._refuse(largest, "memory", f"unfinished messages take more than {self._bytes_max} bytes")

    def _refuse(self, share: _Share, reason: str, text: str) -> None:
        holder = max(share.holders, key=share.holders.__getitem__)
        self.hold(holder, 0)
        holder.give_up(reason, text)
