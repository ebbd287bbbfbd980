"""The server itself over the administration API: its addresses, its lists, and what an operator should look at."""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

import babelbus
from babelbus.clock import Clock
from babelbus.config import Config
from babelbus.core.access import Action, Identity, may
from babelbus.core.broker import Broker
from babelbus.listening.connections import Connected
from babelbus.web.answers import answer
from babelbus.web.callers import SERVER_SUBJECT, check_admin
from babelbus.web.calls import Call, Route
from babelbus.web.changes import Changes
from babelbus.web.clients import ClientList
from babelbus.web.cluster import Cluster
from babelbus.web.history import History

SLOW_FLUSH_SECONDS = 1.0


class ServerInfo(msgspec.Struct, frozen=True):
    """The running server: `addresses` are "host:port" by protocol.

    Paths of its machine, the data folder and those of unix sockets, are for administrators alone; others get an empty
    `data_folder` and the other addresses.
    """

    version: str
    uptime_seconds: float
    data_folder: str
    addresses: dict[str, str]


class Host(ClientList, Protocol):
    """The server whose API it is."""

    broker: Broker
    config: Config
    clock: Clock
    folder: str
    addresses: dict[str, str]
    started_at: float
    stopping: bool
    admin_tls: bool
    """Whether the administration endpoint speaks TLS."""
    cluster: Cluster | None
    """The cluster that the server owns the data of."""
    changes: Changes
    history: History | None
    """`None` where no console shows it."""

    def connections(self) -> dict[str, Collection[Connected]]:
        """Return the open connections of each protocol."""

    async def reload(self, by: Identity) -> None:
        """Read the lists of clients and rights again, as on SIGHUP; `by` asked for it."""


class ServerRoutes:
    """The requests about the server."""

    def __init__(self, server: Host) -> None:
        self._server = server

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/server", self._show), ("POST", "/api/reload", self._reload))

    async def _show(self, call: Call) -> web.Response:
        server = self._server
        uptime = server.clock.monotonic() - server.started_at
        addresses, folder = addresses_for(server, call.principal)
        return answer(ServerInfo(babelbus.__version__, uptime, folder, addresses))

    async def _reload(self, call: Call) -> web.Response:
        check_admin(call)
        await self._server.reload(call.principal)
        return answer({"reloaded": True})


def addresses_for(server: Host, principal: Identity) -> tuple[dict[str, str], str]:
    """Return the addresses and the data folder; paths of the machine are for administrators alone."""
    if may(principal, Action.ADMIN, SERVER_SUBJECT):
        return dict(server.addresses), server.folder
    return {name: one for name, one in server.addresses.items() if "/" not in one}, ""


def health_reasons(server: Host) -> list[str]:
    """Return what an operator should look at. Cheap: it is asked every few seconds."""
    reasons = []
    now = server.clock.monotonic()
    for engine, backend in server.broker.backends.items():
        begun, last = backend.flusher.begun_at, backend.flusher.last_seconds
        if begun is not None and now - begun > SLOW_FLUSH_SECONDS:
            reasons.append(f"a flush of engine {engine} takes {now - begun:.1f} s by now")
        elif last > SLOW_FLUSH_SECONDS:
            reasons.append(f"the last flush of engine {engine} took {last:.1f} s")
    for topic in server.broker.topics():
        failing = next((one.failing for one in topic.partitions if one.failing is not None), None)
        if failing is not None:
            reasons.append(f"topic {topic.name}: {failing}")
        reasons += [
            f"topic {topic.name}, partition {partition.number}: offsets {bad.offset} to {bad.next_offset - 1} "
            f"cannot be read ({bad.reason}); restore the file, or accept the loss with 'babelbus repair'"
            for partition in topic.partitions
            for _, bad in partition.log.recovery.bad
            if bad.next_offset > partition.log.first_offset
        ]
    reasons += [f"topic {name} is not open: {error}" for name, error in server.broker.damaged_topics.items()]
    reasons += [
        f"not saved: {writer.what} ({writer.failing})" for writer in server.broker.writers if writer.failing is not None
    ]
    if server.cluster is not None:
        reasons += server.cluster.reasons()
    if server.stopping:
        reasons.append("the server stops")
    return reasons
