"""The connections of all protocols in one list: who is there, what waits for it, what it reads live; and close one."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from babelbus.core.access import EVERYBODY, Action, Effect, Table
from babelbus.listening.connections import Connected
from babelbus.web.answers import answer, read_number
from babelbus.web.callers import check_admin
from babelbus.web.calls import Call, Route
from babelbus.web.errors import UnknownConnectionError
from babelbus.web.server import Host

SUBSCRIPTIONS_MAX = 100
"""Most subscriptions of a connection in an answer."""
COUNT = 100


class SubscriptionLine(msgspec.Struct, frozen=True):
    """A pattern that a client reads live.

    If the table grants a part of it only, `narrowed_to` are the patterns of the rows that allow its principal to
    subscribe to something; else it is null.
    """

    pattern: str
    narrowed_to: list[str] | None


class ConnectionLine(msgspec.Struct, frozen=True):
    """One connection. `received` and `sent` are bytes since it began; null where nobody counts them.

    `edge` is the name of the process or member that the client is connected to; null for this process.
    """

    id: str
    protocol: str
    principal: str | None
    address: str
    edge: str | None
    since_ms: int
    received: int
    sent: int | None
    queue_bytes: int
    encrypted: bool
    subscriptions: list[SubscriptionLine]
    subscription_count: int


class ConnectionRoutes:
    """The requests about connections; they need the right to administer the server."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._gate = server.broker.gate

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/connections", self._list), ("DELETE", "/api/connections/{id}", self._close))

    async def _list(self, call: Call) -> web.Response:
        """Answer with a page of the connections, the oldest first."""
        check_admin(call)
        protocols = self._server.connections()
        protocol = call.query.get("protocol")
        if protocol is not None and protocol not in protocols:
            raise web.HTTPBadRequest(text=f"protocol is one of {', '.join(protocols)}, not {protocol[:40]!r}")
        text = call.query.get("search", "").casefold()
        offset, count = read_number(call, "offset") or 0, read_number(call, "count")
        found = [
            (name, one)
            for name, connections in protocols.items()
            if protocol in (None, name)
            for one in sorted(connections, key=lambda one: one.number)
            if not text or text in (one.principal_name or "").casefold() or text in one.peer.casefold()
        ]
        now_ms = self._server.clock.now_ms()
        page = found[offset : offset + (COUNT if count is None else count)]
        lines = [self._describe(name, one, now_ms) for name, one in page]
        counts = {name: len(connections) for name, connections in protocols.items()}
        return answer({"connections": lines, "total": len(found), "protocols": counts})

    def _describe(self, protocol: str, connection: Connected, now_ms: int) -> ConnectionLine:
        info, principal = connection.describe(), connection.principal_name
        shown = info.subscriptions[:SUBSCRIPTIONS_MAX]
        granted = _granted(self._gate.table, principal) if any(one.is_narrowed for one in shown) else []
        return ConnectionLine(
            f"{protocol}-{connection.number}",
            protocol,
            principal,
            connection.peer,
            info.edge,
            now_ms - int(info.open_seconds * 1000),
            info.received_bytes,
            info.sent_bytes,
            info.queue_bytes,
            info.is_encrypted,
            [SubscriptionLine(one.pattern, granted if one.is_narrowed else None) for one in shown],
            len(info.subscriptions),
        )

    async def _close(self, call: Call) -> web.Response:
        """Close a connection at once; its client may come again."""
        by = check_admin(call)
        wanted = call.path_values["id"]
        protocol, _, number = wanted.rpartition("-")
        for connection in list(self._server.connections().get(protocol, ())):
            if str(connection.number) == number:
                self._gate.note_close(by, f"{wanted} {connection.principal_name or ''} {connection.peer}")
                connection.abort()
                return answer({"closed": wanted})
        raise UnknownConnectionError(f"there is no connection {wanted[:40]!r}")


def _granted(table: Table, principal: str | None) -> list[str]:
    """Return the patterns that rows allow a principal to subscribe to."""
    whos = (EVERYBODY,) if principal is None else table.whos(principal)
    actions = {Action.SUBSCRIBE.value, "*"}
    return sorted(
        {
            row.pattern
            for row, _ in table.rows()
            if row.effect is Effect.ALLOW and row.who in whos and row.action in actions
        }
    )
