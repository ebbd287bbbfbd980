"""The list of jebp clients over the administration API: who may connect by a certificate, and who may administer."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from babelbus.core.access.audit import Audit
from babelbus.web.answers import answer, read_body
from babelbus.web.callers import ACCESS_SUBJECT, check_admin
from babelbus.web.calls import Call, Handler, Route
from babelbus.web.errors import ClientExistsError, UnknownClientError


class ClientLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One client; `admin` lets it create and remove topics."""

    name: str
    fingerprint: str
    admin: bool = False


class ClientChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PATCH /api/clients/{fingerprint}; null leaves the name or the right as it is."""

    name: str | None = None
    admin: bool | None = None


class ClientList(Protocol):
    """The list of clients of a server, which keeps it in its data folder."""

    fingerprint: str
    """Fingerprint of the server's certificate."""

    def clients(self) -> list[ClientLine]:
        """Return the clients by name."""

    async def put_client(self, client: ClientLine) -> None:
        """Add a client, or replace the client with its fingerprint; in effect when this returns.

        Raises:
            ConfigError: the fingerprint or the name is not valid.
        """

    async def remove_client(self, fingerprint: str) -> None:
        """Remove a client and close its connections."""


class ClientRoutes:
    """The requests about the list of clients."""

    def __init__(self, clients: ClientList, audit: Audit) -> None:
        self._clients = clients
        self._audit = audit

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/clients", _administer(self._list)),
            ("POST", "/api/clients", _administer(self._add)),
            ("PATCH", "/api/clients/{fingerprint}", _administer(self._change)),
            ("DELETE", "/api/clients/{fingerprint}", _administer(self._remove)),
        )

    async def _list(self, call: Call) -> web.Response:
        return answer({"clients": self._clients.clients(), "server_fingerprint": self._clients.fingerprint})

    async def _add(self, call: Call) -> web.Response:
        client = await read_body(call, ClientLine)
        client = msgspec.structs.replace(client, fingerprint=client.fingerprint.lower())
        self._check_name(client)
        owner = next((one for one in self._clients.clients() if one.fingerprint == client.fingerprint), None)
        if owner is not None:
            raise ClientExistsError(f"this certificate is that of client {owner.name!r} already")
        await self._clients.put_client(client)
        self._note(call, None, client)
        return self._answer(client, 201)

    async def _change(self, call: Call) -> web.Response:
        change, old = await read_body(call, ClientChange), self._find(call)
        name = old.name if change.name is None else change.name
        client = ClientLine(name, old.fingerprint, old.admin if change.admin is None else change.admin)
        self._check_name(client)
        await self._clients.put_client(client)
        self._note(call, old, client)
        return self._answer(client)

    async def _remove(self, call: Call) -> web.Response:
        client = self._find(call)
        await self._clients.remove_client(client.fingerprint)
        self._note(call, client, None)
        return answer({"removed": client.fingerprint, "name": client.name})

    def _note(self, call: Call, before: ClientLine | None, after: ClientLine | None) -> None:
        """Record a change in the audit, which is that of the table."""
        self._audit.listed(call.principal, msgspec.to_builtins(before), msgspec.to_builtins(after))

    def _answer(self, client: ClientLine, status: int = 200) -> web.Response:
        more = {"server_fingerprint": self._clients.fingerprint}
        return answer(msgspec.to_builtins(client) | more, status=status)

    def _find(self, call: Call) -> ClientLine:
        fingerprint = call.path_values["fingerprint"].lower()
        client = next((one for one in self._clients.clients() if one.fingerprint == fingerprint), None)
        if client is None:
            raise UnknownClientError(f"there is no client with the fingerprint {fingerprint[:80]!r}")
        return client

    def _check_name(self, client: ClientLine) -> None:
        """Check that no other client has the name.

        Raises:
            ClientExistsError: another client has it.
        """
        others = (one for one in self._clients.clients() if one.fingerprint != client.fingerprint)
        if any(one.name == client.name for one in others):
            raise ClientExistsError(f"there is a client {client.name!r} already")


def _administer(handler: Handler) -> Handler:
    """Return a handler for those who may administer the table.

    Clients of the list are principals, and may be given every right: who administers the server alone may not do that.
    """

    async def handle(call: Call) -> "web.Response":
        check_admin(call, ACCESS_SUBJECT)
        answered = await handler(call)
        assert isinstance(answered, web.Response)
        return answered

    return handle
