"""The requests about access: the table, principals and their credentials, explanations, and the audit."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.config import QuotaSettings
from babelbus.core.access import ACTIONS, Credential, InvalidAccessError, Principal, Row
from babelbus.core.access.audit import AUDIT_TOPIC, AuditRecord
from babelbus.core.access.gate import Gate
from babelbus.core.access.model import check_name
from babelbus.core.access.table import ADMIN_ROLE, KEPT, id_of
from babelbus.core.broker import Broker
from babelbus.records.columns import decode_chunk, iterate
from babelbus.web.answers import Handler, answer, read_body, read_number, read_text
from babelbus.web.errors import ImportedPrincipalError, UnknownPrincipalError
from babelbus.web.live import ADMIN

AUDIT_COUNT = 100
AUDIT_COUNT_MAX = 10_000
READ_BYTES = 2**20


class RowsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST and DELETE /api/access/rows."""

    rows: list[Row]
    version: int | None = None


class ModeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/access/mode; `admin` is a principal that gets the role `admin`."""

    enforce: bool
    admin: str | None = None
    credentials: tuple[Credential, ...] = ()


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/access/apply: the content of a table file, and its path for messages."""

    text: str
    path: str = "the table file"
    version: int | None = None


class PrincipalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/principals and PATCH /api/principals/NAME."""

    name: str = ""
    roles: tuple[str, ...] | None = None
    credentials: tuple[Credential, ...] = ()
    quotas: QuotaSettings | msgspec.UnsetType = msgspec.UNSET
    version: int | None = None


class CredentialsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PUT /api/principals/NAME/credentials: these replace those of the same kind."""

    kind: str
    credentials: tuple[Credential, ...]
    version: int | None = None


class AccessRoutes:
    """The requests about the gate of a broker."""

    def __init__(self, broker: Broker, now_ms: Callable[[], int]) -> None:
        self._broker = broker
        self._now_ms = now_ms

    @property
    def _gate(self) -> Gate:
        return self._broker.gate

    @property
    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Method, path, and who answers."""
        one = "/api/principals/{name}"
        return (
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
            ("GET", "/api/audit", self._audit),
        )

    # -- rows --------------------------------------------------------------------------------------------------------

    async def _show(self, request: web.Request) -> web.Response:
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

    async def _grant(self, request: web.Request) -> web.Response:
        body = await read_body(request, RowsBody)
        return answer({"version": await self._gate.put(body.rows, ADMIN, version=body.version)})

    async def _revoke(self, request: web.Request) -> web.Response:
        """Remove rows; a row that the table does not keep is an error, so that a slip is noticed."""
        body = await read_body(request, RowsBody)
        for row in body.rows:
            if id_of(row) not in self._gate.table.entries:
                raise InvalidAccessError(
                    f"the table keeps no row {row.effect.value} {row.who} {row.action} {row.pattern}"
                )
        return answer({"version": await self._gate.remove(body.rows, ADMIN, version=body.version)})

    async def _explain(self, request: web.Request) -> web.Response:
        action = ACTIONS.get(read_text(request, "action"))
        if action is None:
            raise InvalidAccessError(
                f"there is no action {read_text(request, 'action')!r}; they are {', '.join(ACTIONS)}"
            )
        found = self._gate.table.explain(read_text(request, "principal"), action, read_text(request, "subject"))
        row = None if found.row is None else _row(found.row) | {"origin": found.origin}
        return answer(
            {"allowed": found.allowed, "row": row, "roles": found.roles, "exists": found.exists}
            | {"enforcing": self._gate.enforcing}
        )

    async def _faults(self, request: web.Request) -> web.Response:
        return answer({"faults": self._gate.table.faults()})

    async def _set_mode(self, request: web.Request) -> web.Response:
        body = await read_body(request, ModeBody)
        gate = self._gate
        if body.admin is not None:
            known = gate.table.principal(body.admin)
            if known is None or gate.table.origin(body.admin) == KEPT:
                roles = tuple(dict.fromkeys([*(known.roles if known else ()), ADMIN_ROLE]))
                credentials = (*(known.credentials if known else ()), *body.credentials)
                quotas = known.quotas if known else msgspec.UNSET
                await gate.put([Principal(body.admin, roles, credentials, quotas)], ADMIN)
        if body.enforce and not any(ADMIN_ROLE in one.roles for one, _ in gate.table.principals()):
            raise InvalidAccessError("nobody has the role admin: name the first administrator")
        await gate.enable(ADMIN, enforce=body.enforce)
        return answer(self._state())

    async def _apply(self, request: web.Request) -> web.Response:
        body = await read_body(request, FileBody)
        return answer({"version": await self._gate.apply_file(body.text, body.path, ADMIN, version=body.version)})

    # -- principals --------------------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.Response:
        return answer({"principals": [self._describe(one.name) for one, _ in self._gate.table.principals()]})

    async def _show_one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self._gate.table.principal(name) is None:
            raise UnknownPrincipalError(f"there is no principal {name!r}")
        whos = {name, "*", *(f"role:{role}" for role in self._describe(name)["roles"])}
        rows = [_row(row) | {"origin": origin} for row, origin in self._gate.table.rows() if row.who in whos]
        used = self._broker.quotas.describe().get(name, {})
        return answer(self._describe(name) | {"rows": rows, "used": used})

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
        origin = table.origin(name)
        return {"name": name, "roles": principal.roles, "credentials": credentials, "origin": origin} | quotas

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

    async def _add(self, request: web.Request) -> web.Response:
        body = await read_body(request, PrincipalBody)
        check_name(body.name)
        if self._gate.table.principal(body.name) is not None:
            raise InvalidAccessError(f"there is a principal {body.name!r} already")
        made = Principal(body.name, body.roles or (), self._dated(body.credentials), body.quotas)
        await self._gate.put([made], ADMIN, version=body.version)
        return answer(self._describe(body.name), status=201)

    async def _alter(self, request: web.Request) -> web.Response:
        """Replace the roles or the quotas of a principal, and add credentials."""
        body, known = await read_body(request, PrincipalBody), self._kept(request.match_info["name"])
        roles = known.roles if body.roles is None else body.roles
        credentials = (*known.credentials, *self._dated(body.credentials))
        quotas = known.quotas if body.quotas is msgspec.UNSET else body.quotas
        made = Principal(known.name, roles, credentials, quotas)
        await self._gate.put([made], ADMIN, version=body.version)
        return answer(self._describe(known.name))

    async def _replace_credentials(self, request: web.Request) -> web.Response:
        body, known = await read_body(request, CredentialsBody), self._kept(request.match_info["name"])
        if any(one.kind != body.kind for one in body.credentials):
            raise InvalidAccessError(f"all credentials of the request are of the kind {body.kind!r}")
        kept = tuple(one for one in known.credentials if one.kind != body.kind)
        made = msgspec.structs.replace(known, credentials=(*kept, *self._dated(body.credentials)))
        await self._gate.put([made], ADMIN, version=body.version)
        return answer(self._describe(known.name))

    async def _remove(self, request: web.Request) -> web.Response:
        known = self._kept(request.match_info["name"])
        await self._gate.remove([known], ADMIN)
        return answer({"removed": known.name})

    def _dated(self, credentials: tuple[Credential, ...]) -> tuple[Credential, ...]:
        now = self._now_ms()
        return tuple(one if one.created else msgspec.structs.replace(one, created=now) for one in credentials)

    # -- audit -------------------------------------------------------------------------------------------------------

    async def _audit(self, request: web.Request) -> web.Response:
        """Return the newest records, oldest first; `id` chooses one refusal, `principal` those of one principal."""
        count = min(read_number(request, "count", 1) or AUDIT_COUNT, AUDIT_COUNT_MAX)
        wanted, principal = request.query.get("id"), request.query.get("principal")
        written = self._gate.audit.flush()
        if written is not None:
            await written.wait()
        topic = self._broker.find_topic(AUDIT_TOPIC)
        found: list[AuditRecord] = []
        if topic is not None:
            partition = topic.partition(0)
            end = partition.high_watermark
            offset = max(partition.log.first_offset, 0 if wanted or principal else end - count)
            while offset < end:
                chunk = await partition.read(offset, READ_BYTES, end)
                for record in iterate(decode_chunk(chunk.data, verified=True)) if chunk.data else ():
                    one = msgspec.json.decode(record.payload or b"{}", type=AuditRecord)
                    if (wanted is None or one.id == wanted) and (principal is None or one.principal == principal):
                        found.append(one)
                del found[:-count]
                offset = chunk.next_offset
        return answer({"records": found})


def _row(row: Row) -> dict[str, Any]:
    return {"who": row.who, "action": row.action, "pattern": row.pattern, "effect": row.effect.value}
