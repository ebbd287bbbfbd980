"""EventMesh as a server offers it: a hub behind a TCP listener (docs/protocols/eventmesh.md)."""

from collections.abc import Callable

from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.session import Session
from babelbus.protocols.service import ServiceContext, StreamService

TICK_SECONDS = 1.0


class EventmeshService(StreamService):
    """EventMesh over TCP."""

    def __init__(self, context: ServiceContext) -> None:
        settings = self._settings = context.config.eventmesh
        super().__init__(PROTOCOL, context, settings)
        self.hub = Hub(context.broker, context.clock, context.metrics, settings)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an address is taken.
        """
        settings = self._settings

        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            return Session(self.hub, outbox, close, peer)

        await self.listeners.listen("eventmesh-tcp", settings.host, settings.tcp_port, make)
        self.listeners.tick(TICK_SECONDS, self.hub.tick)

    async def drain(self) -> None:
        """Say goodbye to every client, and stop all deliveries."""
        self.hub.stop()
        await super().drain()
