"""Connections for HTTP that are closed when they are silent (docs/specifications/eventmesh.md, 4 and 12)."""

import math
from collections.abc import Callable

from babelbus.protocols import contract
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh.callers import Caller, address_of, name_of
from babelbus.protocols.eventmesh.hub import Hub
from babelbus.wire.browsers import BrowserGuard
from babelbus.wire.http import HttpSession


class IdleSession(HttpSession, contract.Session):
    """A connection for HTTP that is closed when it is silent, as the hub closes silent clients over TCP."""

    _outbox: Outbox
    ends_at = math.inf
    stays = False

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        guard: BrowserGuard,
        body_bytes_max: int,
        peer: str | None,
    ) -> None:
        super().__init__(outbox, guard, body_bytes_max=body_bytes_max)
        self._hub = hub
        self._close = close
        self._address = address_of(peer)
        self._caller: Caller | None = None
        """The caller of the last request, while the gate is on."""
        self._heard_at = hub.clock.monotonic()
        self._is_half_closed = False
        hub.peers[self] = None

    @property
    def principal(self) -> str | None:
        """Name of the principal that the last request has proved."""
        return name_of(self._caller)

    def receive_data(self, data: bytes) -> None:
        """Handle a chunk. Raises: as `HttpSession.receive_data`."""
        self._heard_at = self._hub.clock.monotonic()
        super().receive_data(data)

    @property
    def heard_at(self) -> float:
        """When the last bytes came; a client that waits for an answer is silent only if it will send nothing more."""
        if self._outbox.waiting and not self._is_half_closed:
            self._heard_at = self._hub.clock.monotonic()
        return self._heard_at

    def end_fetches(self) -> None:
        """Handle that the client sends nothing more: it is gone, or waits for a last answer."""
        self._is_half_closed = True

    def say_goodbye(self, reason: str) -> None:
        """Return at once: HTTP has no goodbye."""

    def check_proof(self) -> None:
        """Return at once: each request proves who sends it."""

    def expire(self) -> None:
        """Close the connection: the client has been silent for too long."""
        self._close()

    def close(self) -> None:
        """Release what the session holds: the connection is gone."""
        self._hub.peers.pop(self, None)
        super().close()
