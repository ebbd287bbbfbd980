"""The cluster over the administration API: who is a member, who owns the data, and a move to another member."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from babelbus.core.access import Action, check_may
from babelbus.core.broker import Broker
from babelbus.web.answers import answer, read_body
from babelbus.web.callers import METRICS_SUBJECT, check_admin
from babelbus.web.calls import Call, Route
from babelbus.web.errors import NoClusterError


class MemberLine(msgspec.Struct, frozen=True):
    """One member, as the owner heard of it `heard_seconds` ago. `role` is owner, member, starting or away."""

    name: str
    role: str
    host: str
    version: str
    link_version: int
    owner: str
    """The member that its clients are passed on to; empty if it has reached no owner."""
    nats: str
    connections: int
    since_ms: int
    heard_seconds: float


class LinkLine(msgspec.Struct, frozen=True):
    """One link from an edge: a member, or a process of the owner's machine."""

    name: str
    peer: str
    connections: int


class ClusterStatus(msgspec.Struct, frozen=True):
    """The cluster at one moment, as its owner sees it."""

    owner: str
    epoch: int
    """How often the data had a new owner."""
    since_ms: int
    version: str
    address: str
    """Where members reach the owner."""
    prefix: str
    lease_seconds: float
    lease_rest_seconds: float
    """How long the owner may still serve if it cannot renew the lease."""
    nats_servers: list[str]
    nats: str
    """The server of NATS that the owner is connected to; empty without a connection."""
    members: list[MemberLine]
    links: list[LinkLine]

    @property
    def present(self) -> int:
        """How many members are there."""
        return sum(one.role != "away" for one in self.members)


class Cluster(Protocol):
    """The cluster that a server owns the data of."""

    def status(self) -> ClusterStatus:
        """Return what the owner knows."""

    def reasons(self) -> list[str]:
        """Return what an operator should look at."""

    def may_serve(self) -> bool:
        """Return whether the lease is valid, so that no other member can own the data."""

    def move(self, name: str | None) -> str:
        """Begin to give the data to a member, and return its name; `None` chooses one.

        Raises:
            MoveRefusedError: there is no such member, or it could not take over now.
        """


class _Move(msgspec.Struct, forbid_unknown_fields=True):
    to: str | None = None


class ClusterRoutes:
    """The requests about the cluster."""

    def __init__(self, broker: Broker, cluster: Cluster | None) -> None:
        self._broker = broker
        self._cluster = cluster

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/cluster", self._show), ("POST", "/api/cluster/move", self._move))

    async def _show(self, call: Call) -> web.Response:
        """Answer with members, owner and links, to those who may read the metrics."""
        if self._broker.gate.enforcing:
            check_may(call.principal, Action.READ, METRICS_SUBJECT)
        if self._cluster is None:
            raise NoClusterError
        return answer(self._cluster.status())

    async def _move(self, call: Call) -> web.Response:
        """Answer that the move begins; it ends the connection of the caller too."""
        principal = check_admin(call)
        asked = await read_body(call, _Move)
        if self._cluster is None:
            raise NoClusterError
        before = self._cluster.status()
        name = self._cluster.move(asked.to)
        self._broker.gate.audit.moved(principal, name)
        return answer({"from": before.owner, "to": name, "epoch": before.epoch}, status=202)
