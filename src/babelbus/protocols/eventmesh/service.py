"""EventMesh as a server offers it: a hub behind listeners for TCP, HTTP and gRPC (docs/protocols/eventmesh.md)."""

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from babelbus.config import EventmeshSettings
from babelbus.listening.openings import Opening, openings_for
from babelbus.protocols import contract
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh.callers import Callers
from babelbus.protocols.eventmesh.calls import Calls, read_networks
from babelbus.protocols.eventmesh.continuation import decode_session
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.session import Session
from babelbus.protocols.eventmesh.webhooks import Entry, Webhooks
from babelbus.protocols.service import CLIENT_SECONDS, ServiceContext, StreamService
from babelbus.storage.notes import Note

if TYPE_CHECKING:
    from babelbus.protocols.eventmesh.rpc import RpcServer

PACKAGE = "babelbus.protocols.eventmesh"
TICK_SECONDS = 1.0
ACK_STEP_SECONDS = 0.01
ORIGIN = "babelbus"
FILE_NAME = "eventmesh.json"
ADVICE = "put a copy of the file back, or remove the file: then webhooks must subscribe again"


def openings(settings: EventmeshSettings) -> list[Opening]:
    """Return the TCP listeners of some settings."""
    ports = {
        "eventmesh-tcp": settings.tcp_port,
        "eventmesh-http": settings.http_port,
        "eventmesh-admin": settings.admin_port,
    }
    rpc = openings_for(PROTOCOL, settings, {"eventmesh-grpc": settings.grpc_port}, alpn=("h2",))
    return openings_for(PROTOCOL, settings, ports) + rpc


class EventmeshService(StreamService):
    """EventMesh over TCP, HTTP and gRPC."""

    def __init__(self, context: ServiceContext) -> None:
        settings = self._settings = context.config.eventmesh
        self._in_cluster = context.config.cluster.enabled
        self._drain_seconds = context.config.server.drain_seconds
        super().__init__(PROTOCOL, context, settings)
        self.callers = Callers(context.broker.gate, context.proofs, context.clock)
        self.hub = Hub(context.broker, context.clock, context.metrics, settings, self.callers)
        calls = Calls(context.clock, read_networks(settings.webhook_networks))
        cluster = {
            "eventmeshcluster": ORIGIN,
            "eventmeship": settings.host,
            "eventmeshenv": "",
            "eventmeshidc": "",
            "webhook-request-origin": ORIGIN,
        }
        note = Note(context.files, os.path.join(context.folder, FILE_NAME), list[Entry], advice=ADVICE)
        self.webhooks = Webhooks(self.hub, calls, note, cluster)
        self._rpc: RpcServer | None = None
        self._tls = context.certificates.make_tls(PROTOCOL, settings.tls)
        self._rpc_tls = context.certificates.make_tls(PROTOCOL, settings.tls, alpn=("h2",))
        self._guard = context.browsers.guard(
            PROTOCOL, context.metrics, host=settings.host, is_tls=self._tls is not None
        )

    async def start(self) -> None:
        """Start to listen, and to push to the webhooks of the last run.

        Raises:
            OSError: an address is taken.
            StorageError: the note with the webhooks is damaged.
        """
        settings, tls = self._settings, self._tls

        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            return Session(self.hub, outbox, close, peer)

        def make_web(outbox: Outbox, close: Callable[[], None], peer: str | None) -> contract.Session:
            from babelbus.protocols.eventmesh.http import WebSession

            return WebSession(self.hub, self.webhooks, outbox, close, self._guard, peer)

        def make_admin(outbox: Outbox, close: Callable[[], None], peer: str | None) -> contract.Session:
            from babelbus.protocols.eventmesh.admin import AdminSession

            return AdminSession(self.hub, self.webhooks, self._describe_streams, outbox, close, self._guard, peer)

        def make_rpc(outbox: Outbox, close: Callable[[], None], peer: str | None) -> contract.Session:
            from babelbus.protocols.eventmesh.rpc import RpcServer

            if self._rpc is None:
                self._rpc = RpcServer(self.hub, self.webhooks)
            return self._rpc.make_session(outbox, close, peer)

        self.webhooks.open()
        await self.listeners.listen("eventmesh-tcp", settings.host, settings.tcp_port, make, tls=tls)
        await self.listeners.listen(
            "eventmesh-http", settings.host, settings.http_port, make_web, tls=tls, needs=f"{PACKAGE}.http"
        )
        if settings.admin_port is not None:
            await self.listeners.listen(
                "eventmesh-admin", settings.host, settings.admin_port, make_admin, tls=tls, needs=f"{PACKAGE}.admin"
            )
        await self.listeners.listen(
            "eventmesh-grpc",
            settings.host,
            settings.grpc_port,
            make_rpc,
            tls=self._rpc_tls,
            needs=f"{PACKAGE}.rpc",
        )
        self.listeners.tick(TICK_SECONDS, self._tick)

    def access_changed(self) -> None:
        """Check the rights of all clients and webhooks again."""
        self.callers.access_changed()
        super().access_changed()
        self.webhooks.access_changed()

    def _describe_streams(self) -> list[dict[str, str]]:
        return [] if self._rpc is None else self._rpc.describe()

    def _tick(self) -> None:
        self.hub.tick()
        if self._rpc is not None:
            self._rpc.tick()
        self.webhooks.tick()

    async def settle(self) -> None:
        """Send nothing more of groups to clients over TCP and webhooks, and wait a moment for their acknowledgements.

        Clients over gRPC have this moment to hear that the server goes.
        """
        sessions = [peer for peer in self.hub.peers if isinstance(peer, Session)]
        for session in sessions:
            session.rest()
        self.webhooks.rest()
        callers = [] if self._rpc is None else list(self._rpc.sessions)
        for caller in callers:
            caller.say_goodbye()
        steps = int(CLIENT_SECONDS / ACK_STEP_SECONDS)
        while steps and (
            self.webhooks.owe_acks or any(one.owes_acks for one in sessions) or not all(one.has_left for one in callers)
        ):
            steps -= 1
            await asyncio.sleep(ACK_STEP_SECONDS)

    def continue_session(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        """Return a session over TCP that goes on."""
        return Session(self.hub, outbox, close, peer, decode_session(content))

    async def drain(self) -> None:
        """Send a goodbye to every client whose session ends here, and stop all deliveries."""
        self.hub.stop()
        self.webhooks.stop()
        await self.listeners.stop()
        if self._rpc is not None:
            await self._rpc.stop(self._drain_seconds, reads=not self._in_cluster)
        await super().drain()
