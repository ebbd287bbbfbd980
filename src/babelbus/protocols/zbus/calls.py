"""Calls that wait for the answer of a service, and who took each of them: nobody else may answer it."""

import asyncio
from collections.abc import Sequence

from babelbus.clock import Clock
from babelbus.core.access import ANONYMOUS, Identity
from babelbus.core.groups import Delivery
from babelbus.core.request import Key, Request, Requests
from babelbus.metrics import Metrics
from babelbus.protocols.zbus.filters import callers
from babelbus.protocols.zbus.messages import Message


class Calls(Requests[Message]):
    """Calls over plain HTTP, and requests of the bus, which wait for the answer of a service behind an MQ (6.3)."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        super().__init__(clock, loop, metrics)
        self._counts: dict[str, int] = {}
        """How many calls of an MQ wait."""
        self._takers: dict[Key, set[str]] = {}

    def begin(self, subject: str, key: Key, deadline: float) -> Request[Message]:
        """Return a call that waits for its answer; see `Requests.begin`."""
        call = super().begin(subject, key, deadline)
        if not call.done:
            self._counts[subject] = self._counts.get(subject, 0) + 1
            call.when_done(lambda _: self._forget(call))
        return call

    def _forget(self, call: Request[Message]) -> None:
        count = self._counts.pop(call.subject) - 1
        if count:
            self._counts[call.subject] = count
        if not self.waits(call.key):
            self._takers.pop(call.key, None)

    def are_waiting(self, mq: str) -> bool:
        """Return whether calls of an MQ wait."""
        return mq in self._counts

    def handed_out(self, deliveries: Sequence[Delivery], taker: str) -> None:
        """Record who was handed messages, as far as they are calls that wait."""
        for key in callers(deliveries):
            if self.waits(key):
                self._takers.setdefault(key, set()).add(taker)

    def may_answer(self, key: Key, taker: str) -> bool:
        """Return whether the taker was handed a call that waits; anybody may answer a call that nobody waits for."""
        return not self.waits(key) or taker in self._takers.get(key, ())


def taker_of(principal: Identity, connection: str, address: str, *, is_pushed: bool) -> str:
    """Return who takes a call: a principal by any connection, else a WebSocket, else plain HTTP of one address."""
    if principal.rights is not None and principal.name != ANONYMOUS:
        return f"principal {principal.name}"
    return f"connection {connection}" if is_pushed else f"http {address.rpartition(':')[0]}"
