"""The requests about access: the table, principals and their credentials, and explanations."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.config import QuotaSettings
from babelbus.core.access import ACTIONS, Effect, InvalidAccessError, Principal, Row
from babelbus.core.access.gate import AccessConflictError, Gate
from babelbus.core.access.model import check_name
from babelbus.core.access.table import ADMIN_ROLE, KEPT, MODE_ID, Edit, Mode, edits_for, id_of
from babelbus.core.broker import Broker
from babelbus.identities.credential import Credential, Issued
from babelbus.identities.proofs import Proofs, Wish
from babelbus.web.answers import answer, read_body, read_text
from babelbus.web.callers import ACCESS_SUBJECT, check_admin
from babelbus.web.calls import Answer, Call, Handler, Route
from babelbus.web.errors import ImportedPrincipalError, UnknownPrincipalError


class RowsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST and DELETE /api/access/rows."""

    rows: list[Row]
    version: int | None = None


class ModeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/access/mode; `admin` is a principal that gets the role `admin`."""

    enforce: bool
    admin: str | None = None
    credentials: tuple[Credential, ...] = ()
    issue: tuple[Wish, ...] = ()


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/access/apply: the content of a table file, and its path for messages."""

    text: str
    path: str = "the table file"
    version: int | None = None


class PrincipalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/principals and PATCH /api/principals/NAME.

    `issue` has credentials that the server makes, `remove` the ids of those that go.
    """

    name: str = ""
    roles: tuple[str, ...] | None = None
    credentials: tuple[Credential, ...] = ()
    quotas: QuotaSettings | msgspec.UnsetType = msgspec.UNSET
    root: str | msgspec.UnsetType | None = msgspec.UNSET
    """`null` takes the root away."""
    issue: tuple[Wish, ...] = ()
    remove: tuple[str, ...] = ()
    version: int | None = None


class CredentialsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/principals/NAME/credentials: these replace those of the same kind."""

    kind: str
    credentials: tuple[Credential, ...] = ()
    issue: tuple[Wish, ...] = ()
    version: int | None = None


class AccessRoutes:
    """The requests about the gate of a broker."""

    def __init__(self, broker: Broker, proofs: Proofs, now_ms: Callable[[], int]) -> None:
        self._broker = broker
        self._proofs = proofs
        self._now_ms = now_ms

    @property
    def _gate(self) -> Gate:
        return self._broker.gate

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        one = "/api/principals/{name}"
        routes = (
            ("GET", "/api/access", self._show),
            ("POST", "/api/access/rows", self._grant),
            ("DELETE", "/api/access/rows", self._revoke),
            ("GET", "/api/access/explain", self._explain),
            ("GET", "/api/access/faults", self._faults),
            ("PUT", "/api/access/mode", self._set_mode),
            ("POST", "/api/access/apply", self._apply),
            ("GET", "/api/principals", self._list),
            ("POST", "/api/principals", self._add),
            ("GET", one, self._show_one),
            ("PATCH", one, self._alter),
            ("DELETE", one, self._remove),
            ("PUT", f"{one}/credentials", self._replace_credentials),
        )
        return [(method, path, _for_admins(handler)) for method, path, handler in routes]

    # -- rows --------------------------------------------------------------------------------------------------------

    async def _show(self, call: Call) -> web.Response:
        gate = self._gate
        rows = [_row(row) | {"origin": origin} for row, origin in gate.table.rows()]
        return answer(self._state() | {"rows": rows, "roles": gate.table.roles()})

    def _state(self) -> dict[str, Any]:
        gate = self._gate
        return {
            "version": gate.table.version,
            "enforcing": gate.enforcing,
            "mode": gate.mode,
            "wildcards": self._broker.wildcards,
        }

    async def _grant(self, call: Call) -> web.Response:
        body = await read_body(call, RowsBody)
        return answer({"version": await self._gate.put(body.rows, call.principal, version=body.version)})

    async def _revoke(self, call: Call) -> web.Response:
        """Remove rows; a row that the table does not keep is an error, so that a slip is noticed."""
        body = await read_body(call, RowsBody)
        table = self._gate.table
        for row in body.rows:
            if id_of(row) not in table.entries:
                allowing = table.allowing(row) if row.effect is Effect.ALLOW else None
                hint = f"; {_text(*allowing)} allows it: remove that row, or add one that denies" if allowing else ""
                raise InvalidAccessError(f"the table keeps no row {_text(row)}{hint}")
        version = await self._gate.remove(body.rows, call.principal, version=body.version)
        allowed = [table.allowing(row) for row in body.rows if row.effect is Effect.ALLOW]
        return answer(
            {"version": version, "allowing": [_row(row) | {"origin": at} for row, at in filter(None, allowed)]}
        )

    async def _explain(self, call: Call) -> web.Response:
        action = ACTIONS.get(read_text(call, "action"))
        if action is None:
            raise InvalidAccessError(f"there is no action {read_text(call, 'action')!r}; they are {', '.join(ACTIONS)}")
        found = self._gate.table.explain(read_text(call, "principal"), action, read_text(call, "subject"))
        row = None if found.row is None else _row(found.row) | {"origin": found.origin}
        return answer(
            {"allowed": found.allowed, "row": row, "roles": found.roles, "exists": found.exists}
            | {"subject": found.subject, "enforcing": self._gate.enforcing}
        )

    async def _faults(self, call: Call) -> web.Response:
        return answer({"faults": self._gate.table.faults()})

    async def _set_mode(self, call: Call) -> web.Response:
        """Set the gate on or off, with a first administrator: all or nothing."""
        body = await read_body(call, ModeBody)
        gate, by = self._gate, call.principal
        issued = await self._issue(body.issue)
        while True:
            version = gate.table.version
            changes: list[Edit] = [(MODE_ID, Mode(enforce=True) if body.enforce else None)]
            admins = {one.name for one, _ in gate.table.principals() if ADMIN_ROLE in one.roles}
            if body.admin is not None:
                check_name(body.admin)
                known = gate.table.principal(body.admin)
                if known is None or gate.table.origin(body.admin) == KEPT:
                    known = known or Principal(body.admin)
                    roles = tuple(dict.fromkeys([*known.roles, ADMIN_ROLE]))
                    credentials = (*known.credentials, *self._dated(body.credentials), *_credentials(issued))
                    made = msgspec.structs.replace(known, roles=roles, credentials=credentials)
                    changes += edits_for([made])
                    admins.add(body.admin)
                elif issued or body.credentials:
                    origin = gate.table.origin(body.admin)
                    raise ImportedPrincipalError(f"principal {body.admin!r} comes from the {origin}")
            if body.enforce and not admins:
                raise InvalidAccessError("nobody has the role admin: name the first administrator")
            try:
                await gate.change(changes, by, version=version)
            except AccessConflictError:
                continue
            return answer(self._state() | {"secrets": _secrets(issued)})

    async def _apply(self, call: Call) -> web.Response:
        body = await read_body(call, FileBody)
        return answer(
            {"version": await self._gate.apply_file(body.text, body.path, call.principal, version=body.version)}
        )

    # -- principals --------------------------------------------------------------------------------------------------

    async def _list(self, call: Call) -> web.Response:
        used = self._broker.quotas.describe()
        principals = [
            self._describe(one.name) | {"used": used.get(one.name, {})} for one, _ in self._gate.table.principals()
        ]
        counted = self._broker.quotas.active
        return answer({"principals": principals, "version": self._gate.table.version, "quotas_counted": counted})

    async def _show_one(self, call: Call) -> web.Response:
        name = call.path_values["name"]
        if self._gate.table.principal(name) is None:
            raise UnknownPrincipalError(f"there is no principal {name!r}")
        whos = self._gate.table.whos(name)
        rows = [_row(row) | {"origin": origin} for row, origin in self._gate.table.rows() if row.who in whos]
        used = self._broker.quotas.describe().get(name, {})
        quotas = self._broker.quotas
        defaults = msgspec.to_builtins(quotas.defaults)
        return answer(
            self._describe(name)
            | {"rows": rows, "used": used, "quota_defaults": defaults, "quotas_counted": quotas.active}
        )

    def _describe(self, name: str) -> dict[str, Any]:
        """Return a principal without what its credentials keep."""
        table = self._gate.table
        principal = table.principal(name)
        assert principal is not None
        credentials = [
            {"kind": one.kind, "id": one.id, "created": one.created, "expires": one.expires}
            for one in principal.credentials
        ]
        quotas = {} if principal.quotas is msgspec.UNSET else {"quotas": msgspec.to_builtins(principal.quotas)}
        root = {} if principal.root is msgspec.UNSET else {"root": principal.root}
        origin = table.origin(name)
        return {"name": name, "roles": principal.roles, "credentials": credentials, "origin": origin} | quotas | root

    def _kept(self, name: str) -> Principal:
        """Return a principal that can be changed here.

        Raises:
            UnknownPrincipalError, ImportedPrincipalError: there is no such principal, or it comes from a file.
        """
        principal = self._gate.table.principal(name)
        if principal is None:
            raise UnknownPrincipalError(f"there is no principal {name!r}")
        if self._gate.table.origin(name) != KEPT:
            raise ImportedPrincipalError(f"principal {name!r} comes from the {self._gate.table.origin(name)}")
        return principal

    async def _add(self, call: Call) -> web.Response:
        body = await read_body(call, PrincipalBody)
        check_name(body.name)
        issued = await self._issue(body.issue)

        def make() -> Principal:
            if self._gate.table.principal(body.name) is not None:
                raise InvalidAccessError(f"there is a principal {body.name!r} already")
            credentials = (*self._dated(body.credentials), *_credentials(issued))
            return Principal(
                body.name, body.roles or (), credentials, body.quotas, root=_root(body.root, msgspec.UNSET)
            )

        await self._put(call, body.version, make)
        return answer(self._describe(body.name) | {"secrets": _secrets(issued)}, status=201)

    async def _alter(self, call: Call) -> web.Response:
        """Replace roles, quotas or root of a principal, and add or remove credentials."""
        body, name = await read_body(call, PrincipalBody), call.path_values["name"]
        issued = await self._issue(body.issue)

        def make() -> Principal:
            known = self._kept(name)
            unknown = set(body.remove) - {one.id for one in known.credentials}
            if unknown:
                raise InvalidAccessError(f"principal {name!r} has no credential {', '.join(sorted(unknown))}")
            kept = tuple(one for one in known.credentials if one.id not in body.remove)
            roles = known.roles if body.roles is None else body.roles
            credentials = (*kept, *self._dated(body.credentials), *_credentials(issued))
            quotas = known.quotas if body.quotas is msgspec.UNSET else body.quotas
            return Principal(name, roles, credentials, quotas, root=_root(body.root, known.root))

        await self._put(call, body.version, make)
        return answer(self._describe(name) | {"secrets": _secrets(issued)})

    async def _replace_credentials(self, call: Call) -> web.Response:
        body, name = await read_body(call, CredentialsBody), call.path_values["name"]
        issued = await self._issue(body.issue)
        given = (*self._dated(body.credentials), *_credentials(issued))
        if any(one.kind != body.kind for one in given):
            raise InvalidAccessError(f"all credentials of the request are of the kind {body.kind!r}")

        def make() -> Principal:
            known = self._kept(name)
            kept = tuple(one for one in known.credentials if one.kind != body.kind)
            return msgspec.structs.replace(known, credentials=(*kept, *given))

        await self._put(call, body.version, make)
        return answer(self._describe(name) | {"secrets": _secrets(issued)})

    async def _put(self, call: Call, version: int | None, make: Callable[[], Principal]) -> None:
        """Replace a principal by what `make` returns, which is called again if the table changes meanwhile."""
        while True:
            found = self._gate.table.version
            try:
                await self._gate.put([make()], call.principal, version=found if version is None else version)
            except AccessConflictError:
                if version is not None:
                    raise
            else:
                return

    async def _issue(self, wishes: Sequence[Wish]) -> list[Issued]:
        return [await self._proofs.issue(wish) for wish in wishes]

    async def _remove(self, call: Call) -> web.Response:
        known = self._kept(call.path_values["name"])
        await self._gate.remove([known], call.principal)
        return answer({"removed": known.name})

    def _dated(self, credentials: tuple[Credential, ...]) -> tuple[Credential, ...]:
        now = self._now_ms()
        return tuple(one if one.created else msgspec.structs.replace(one, created=now) for one in credentials)


def _row(row: Row) -> dict[str, Any]:
    return {"who": row.who, "action": row.action, "pattern": row.pattern, "effect": row.effect.value}


def _text(row: Row, origin: str = "") -> str:
    text = f"{row.effect.value} {row.who} {row.action} {row.pattern}"
    return f"the row {text} ({origin})" if origin else text


def _root(root: str | msgspec.UnsetType | None, known: str | msgspec.UnsetType) -> str | msgspec.UnsetType:
    """Return the root that a principal has from now on."""
    if root is None:
        return msgspec.UNSET
    return known if root is msgspec.UNSET else root


def _for_admins(handler: Handler) -> Handler:
    """Return a handler for those who may administer access."""

    async def handle(call: Call) -> Answer:
        check_admin(call, ACCESS_SUBJECT)
        return await handler(call)

    return handle


def _credentials(issued: Sequence[Issued]) -> list[Credential]:
    return [one.credential for one in issued]


def _secrets(issued: Sequence[Issued]) -> list[dict[str, str]]:
    """Return the secrets that are shown once: those that the server has made."""
    return [
        {"kind": one.credential.kind, "id": one.credential.id, "secret": one.secret}
        | ({"key": str(one.credential.data["key"])} if one.credential.kind == "api-key" else {})
        for one in issued
        if one.secret
    ]
