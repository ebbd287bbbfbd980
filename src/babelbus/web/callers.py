"""Callers of the administration endpoint: who asks, by token, password, certificate or session, and for how long.

The token of the data folder is the built-in administrator, who is never asked for rights. A principal of the table
proves its name by a token or a password of its own, or by a client certificate. Its rights are those of the table, also
while the gate is off: nobody becomes an administrator by a credential alone.
"""

import asyncio
import base64
import binascii
import hmac
import math
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgspec
from aiohttp import hdrs, web

from babelbus.clock import Clock
from babelbus.core.access import Action, Identity, check_may, has_lost
from babelbus.core.access.gate import Gate
from babelbus.identities.credential import Credential
from babelbus.identities.directory import names_of
from babelbus.identities.errors import CredentialError, TooManyProofsError
from babelbus.identities.proofs import Proofs
from babelbus.listening.transports import is_blocked
from babelbus.web.calls import Call
from babelbus.web.sessions import Session, Sessions

PROTOCOL: Final = "admin"
CONSOLE: Final = "console"
"""Begins the sources of callers that have logged in with a browser."""
ADMIN: Final = Identity(PROTOCOL, PROTOCOL, None)
"""The built-in administrator."""
COOKIE: Final = "babelbus_session"
"""The cookie with the id of a session; behind it `_` and the port, since all ports of a host share their cookies."""
PAGE_HEADER: Final = "X-Babelbus-Console"
"""The header of the console's requests: a page of somebody else cannot set it without our consent."""
SERVER_SUBJECT: Final = "$server"
"""The subject of requests that are about the server itself."""
ACCESS_SUBJECT: Final = "$access"
AUDIT_SUBJECT: Final = "$audit"
METRICS_SUBJECT: Final = "$metrics"
REFUSAL_SECONDS = 5.0
"""How long a client waits at the most to hear that it guesses too often.

Each guess of a flood holds its connection for so long: five seconds cost a fifth of the processor time of one second.
"""
LOGIN_SECONDS = 300.0
"""How long a login counts: each request proves its caller again, which the audit need not tell."""
LOGINS_MAX = 10_000


class Caller(msgspec.Struct, frozen=True):
    """The principal of a request, with its credentials at that moment, and when the proof ends."""

    identity: Identity
    credentials: tuple[Credential, ...] = ()
    until_ms: float = math.inf
    session: Session | None = None


_CALLER: Final = web.RequestKey("caller", Caller)


def principal_of(request: web.Request) -> Identity:
    """Return who asks over HTTP."""
    return request[_CALLER].identity


def caller_of(request: web.Request) -> Identity | None:
    """Return who asks over HTTP, `None` before it is known."""
    caller = request.get(_CALLER)
    return None if caller is None else caller.identity


def until_of(request: web.Request) -> float:
    """Return when the proof of who asks over HTTP ends, in milliseconds since 1970."""
    return request[_CALLER].until_ms


def session_of(request: web.Request) -> Session | None:
    """Return the session of who asks over HTTP, `None` for a caller that has proved its name otherwise."""
    return request[_CALLER].session


def cookie_of(request: web.Request) -> str:
    """Return the name of the cookie for the address that the browser asks."""
    # Not `request.host`: without the header, that asks the network for the name of this machine.
    _, colon, port = request.headers.get(hdrs.HOST, "").rpartition(":")
    return f"{COOKIE}_{port}" if colon and port.isascii() and port.isdigit() else COOKIE


def check_page(request: web.Request) -> None:
    """Check that a page of this server sends a request: only a page can have a cookie sent that it does not know.

    Raises:
        web.HTTPForbidden: the header of the console is missing, or a page of another origin asks.
    """
    if request.headers.getall(PAGE_HEADER, []) != ["1"]:
        raise web.HTTPForbidden(text=f"a request with a log-in of the console needs the header {PAGE_HEADER}: 1")
    if any(site != "same-origin" for site in request.headers.getall("Sec-Fetch-Site", [])):
        raise web.HTTPForbidden(text="only a page of this server may use a log-in of the console")


def topic_of(call: Call, place: str = "name") -> str:
    """Return the topic that a request names in its path."""
    return call.principal.absolute(call.path_values[place])


def check_admin(call: Call, subject: str = SERVER_SUBJECT) -> Identity:
    """Return who asks, who may administer.

    Raises:
        AccessRefusedError: the caller may not.
    """
    check_may(call.principal, Action.ADMIN, subject)
    return call.principal


def is_caller(call: Call, other: Identity) -> bool:
    """Return whether the caller may act for another one: it is the same principal, or the built-in administrator."""
    principal = call.principal
    return principal.rights is None or (principal.name, principal.source) == (other.name, other.source)


class Callers:
    """Proves who asks, and ends the requests of principals whose proofs changed."""

    def __init__(self, token: str, gate: Gate, proofs: Proofs, clock: Clock, sessions: Sessions) -> None:
        self._token = token.encode()
        self._sessions = sessions
        sessions.on_ended = self._session_ended
        self.on_entered: Callable[[web.Request], None] = lambda request: None
        """Called with each request whose caller is known."""
        sessions.is_running = lambda session: any(one.session is session for _, one, _ in self._open.values())
        self._gate = gate
        self._proofs = proofs
        self._clock = clock
        self._door = proofs.guessing.door(PROTOCOL)
        self._open: dict[int, tuple[web.Request, Caller, asyncio.Task[Any] | None]] = {}
        """By the `id` of the request, which has no hash."""
        self._logins: dict[tuple[str, str], float] = {}

    async def enter(self, request: web.Request) -> None:
        """Set who asks.

        Raises:
            web.HTTPException: the request proves nothing, or something wrong.
        """
        caller = await self._identify(request)
        request[_CALLER] = caller
        self._open[id(request)] = request, caller, asyncio.current_task()
        self.on_entered(request)
        if caller.session is None:
            self._note_login(caller.identity, request.remote or "local")
        else:
            self._sessions.use(caller.session)

    def leave(self, request: web.Request) -> None:
        """Remove a request that is answered."""
        entry = self._open.pop(id(request), None)
        if entry is not None and entry[1].session is not None:
            self._sessions.use(entry[1].session)

    def access_changed(self) -> None:
        """Close the connections of principals that are gone or prove themselves otherwise from now on.

        Called when the table has changed, and when a credential has expired.
        """
        self._sessions.access_changed()
        own = asyncio.current_task()  # who changes the own credentials gets the answer
        now_ms = self._clock.now_ms()
        for request, caller, task in list(self._open.values()):
            if caller.identity.rights is None or task is own:
                continue
            principal = self._gate.table.principal(caller.identity.name)
            holds = principal is not None and principal.credentials == caller.credentials and now_ms < caller.until_ms
            if principal is not None and principal.below != caller.identity.root:
                holds = False
            transport = request.transport
            if transport is not None and (
                not holds or (has_lost(caller.identity, caller.identity) and is_blocked(transport))
            ):
                transport.abort()  # what waits for a caller who lost a right cannot be taken out of the answer

    def _session_ended(self, session: Session) -> None:
        """Close the connections of a session that has ended."""
        own = asyncio.current_task()  # who logs out gets the answer
        for request, caller, task in list(self._open.values()):
            if caller.session is session and task is not own and request.transport is not None:
                request.transport.abort()

    async def _identify(self, request: web.Request) -> Caller:
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        scheme, _, text = given.partition(" ")
        text = text.strip(" ")
        address = request.remote or "local"
        if scheme.lower() == "basic" and text:
            return await self._by_basic(text, address)
        if scheme.lower() == "bearer":
            caller = self.find_token(text)
            if caller is not None:
                return caller
        if not given:
            ids = _session_ids(request)
            caller = await self._by_session(request, ids) or self._by_certificate(request)
            if caller is not None:
                return caller
            if ids:
                raise unauthorized("the log-in has ended: log in again")
        reason = "this is the token of no principal, and not the admin token"
        if not text:
            what = "the Authorization header has no token" if given else "nothing says who asks"
            reason = f"{what}: send 'Authorization: Bearer TOKEN', or log in"
        return await self.refuse(address, ADMIN.name, reason, is_guess=bool(text))

    def find_token(self, text: str) -> Caller | None:
        """Return the caller that a token proves.

        Raises:
            web.HTTPUnauthorized: the token has expired.
        """
        # In constant time: how long a wrong guess takes must not tell how much of it was right. The right token
        # passes also while its address waits: nobody guesses 256 bits, and on loopback all have one address.
        if hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token):
            return Caller(ADMIN)
        found = self._proofs.directory.find_token(text)
        if found is not None:
            return self._caller(*found)
        if self._proofs.directory.is_expired_token(text):
            raise unauthorized("the token has expired")
        return None

    async def _by_session(self, request: web.Request, ids: list[str]) -> Caller | None:
        """Return the caller that has logged in with a browser.

        Raises:
            web.HTTPException: somebody else may have sent the request, or set a cookie.
        """
        if not ids:
            return None
        check_page(request)
        if len(ids) > 1:
            raise unauthorized("the request has two log-ins: log in again")
        session = await self._sessions.find(ids[0])
        return None if session is None else self.caller_in(session)

    def caller_in(self, session: Session) -> Caller:
        """Return the caller of a session that holds."""
        if session.name is None:
            return Caller(msgspec.structs.replace(ADMIN, source=CONSOLE), (), session.ends_ms, session)
        caller = self._caller(session.name, None)
        identity = msgspec.structs.replace(caller.identity, source=f"{CONSOLE}:{session.name}")
        return Caller(identity, caller.credentials, session.ends_ms, session)

    async def find_session(self, request: web.Request) -> Session | None:
        """Return the session that a request names; a request with two has none."""
        ids = _session_ids(request)
        return await self._sessions.find(ids[0]) if len(ids) == 1 else None

    def _by_certificate(self, request: web.Request) -> Caller | None:
        ssl_object = None if request.transport is None else request.transport.get_extra_info("ssl_object")
        certificate = None if ssl_object is None else ssl_object.getpeercert(True)
        if not certificate:
            return None
        try:
            found = self._proofs.directory.find_names(names_of(certificate))
        except CredentialError:
            return None
        return None if found is None else self._caller(*found)

    async def _by_basic(self, text: str, address: str) -> Caller:
        try:
            user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            user, colon, password = "", "", ""
        if not colon:
            raise unauthorized("the user and the password are base64 of USER:PASSWORD in UTF-8")
        return await self.prove_password(user, password, address)

    async def prove_password(self, user: str, password: str, address: str, door: str = PROTOCOL) -> Caller:
        """Return the caller that a password proves.

        Raises:
            web.HTTPException: the password is wrong, or cannot be looked at now.
        """
        wait = self._door.check(address, user)
        if wait:
            await self._delay(wait)
        try:
            proof = await self._proofs.passwords.verify(user, password, address)
        except TooManyProofsError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        if proof is None:
            await self.refuse(address, user, "the user or the password is wrong", is_guess=True, door=door)
        self._door.succeeded(address, user)
        return self._caller(user, proof)

    def _caller(self, name: str, proof: Credential | None) -> Caller:
        table = self._gate.table
        principal = table.principal(name)
        credentials = () if principal is None else principal.credentials
        until_ms = math.inf if proof is None else proof.ends_ms
        identity = Identity(f"{PROTOCOL}:{name}", name, table.rights(name), table.root(name))
        return Caller(identity, credentials, until_ms)

    async def refuse(
        self, address: str, name: str, text: str, *, is_guess: bool = True, door: str = PROTOCOL
    ) -> NoReturn:
        """Refuse a request; a client that sends wrong proofs is told to wait.

        Raises:
            web.HTTPException: always.
        """
        if is_guess:
            wait = self._door.check(address, name)
            if wait:
                await self._delay(wait)
            self._door.failed(address, name)
            self._gate.note_login(name, f"{door} {address}", refused=text, is_known=name == ADMIN.name)
        raise unauthorized(text)

    async def _delay(self, wait: float) -> NoReturn:
        # Answered late, on a connection that then closes: a flood of guesses costs no more than its connections.
        await asyncio.sleep(min(wait, REFUSAL_SECONDS))
        seconds = str(math.ceil(wait))
        raise web.HTTPTooManyRequests(
            text=f"too many wrong tokens; try again in {seconds} s", headers={"Retry-After": seconds}
        )

    def _note_login(self, identity: Identity, address: str) -> None:
        """Record a login in the audit, if the caller has not logged in from there for a while."""
        if not self._gate.enforcing:
            return
        now, place = self._clock.monotonic(), (identity.name, address)
        last = self._logins.pop(place, None)
        if last is None or now - last > LOGIN_SECONDS:
            self._gate.note_login(identity.name, f"{PROTOCOL} {address}")
            last = now
        self._logins[place] = last
        if len(self._logins) > LOGINS_MAX:
            del self._logins[next(iter(self._logins))]


def _session_ids(request: web.Request) -> list[str]:
    """Return the ids of sessions in the cookies of a request: a browser may send two, when somebody else set one."""
    name = cookie_of(request)
    pairs = (pair.partition("=") for line in request.headers.getall(hdrs.COOKIE, []) for pair in line.split(";"))
    return [value.strip() for key, _, value in pairs if key.strip() == name and value.strip()]


def unauthorized(text: str) -> web.HTTPUnauthorized:
    """Return the refusal of a request that proves nothing."""
    return web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
