"""Callers of the administration endpoint: who asks, by token, password or certificate, and how long that holds.

The token of the data folder is the built-in administrator, who is never asked for rights. A principal of the table
proves its name by a token or a password of its own, or by a client certificate. Its rights are those of the table, also
while the gate is off: nobody becomes an administrator by a credential alone.
"""

import asyncio
import base64
import binascii
import hmac
import math
from typing import Any, Final, NoReturn

import msgspec
from aiohttp import hdrs, web

from babelbus.clock import Clock
from babelbus.core.access import Action, Identity, check_may
from babelbus.core.access.gate import Gate
from babelbus.identities.credential import Credential
from babelbus.identities.directory import names_of
from babelbus.identities.errors import CredentialError, TooManyProofsError
from babelbus.identities.proofs import Proofs
from babelbus.web.calls import Call

PROTOCOL: Final = "admin"
ADMIN: Final = Identity(PROTOCOL, PROTOCOL, None)
"""The built-in administrator."""
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


_CALLER: Final = web.RequestKey("caller", Caller)


def principal_of(request: web.Request) -> Identity:
    """Return who asks over HTTP."""
    return request[_CALLER].identity


def caller_of(request: web.Request) -> Identity | None:
    """Return who asks over HTTP, `None` before it is known."""
    caller = request.get(_CALLER)
    return None if caller is None else caller.identity


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

    def __init__(self, token: str, gate: Gate, proofs: Proofs, clock: Clock) -> None:
        self._token = token.encode()
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
        self._note_login(caller.identity, request.remote or "local")

    def leave(self, request: web.Request) -> None:
        """Remove a request that is answered."""
        self._open.pop(id(request), None)

    def access_changed(self) -> None:
        """Close the connections of principals that are gone or prove themselves otherwise from now on.

        Called when the table has changed, and when a credential has expired.
        """
        own = asyncio.current_task()  # who changes the own credentials gets the answer
        now_ms = self._clock.now_ms()
        for request, caller, task in list(self._open.values()):
            if caller.identity.rights is None or task is own:
                continue
            principal = self._gate.table.principal(caller.identity.name)
            holds = principal is not None and principal.credentials == caller.credentials and now_ms < caller.until_ms
            if principal is not None and principal.below != caller.identity.root:
                holds = False
            if not holds and request.transport is not None:
                request.transport.abort()

    async def _identify(self, request: web.Request) -> Caller:
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        scheme, _, text = given.partition(" ")
        text = text.strip(" ")
        address = request.remote or "local"
        if scheme.lower() == "basic" and text:
            return await self._by_password(text, address)
        # In constant time: how long a wrong guess takes must not tell how much of it was right. The right token
        # passes also while its address waits: nobody guesses 256 bits, and on loopback all have one address.
        is_token = hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() == "bearer":
            if is_token:
                return Caller(ADMIN)
            found = self._proofs.directory.find_token(text)
            if found is not None:
                return self._caller(*found)
            if self._proofs.directory.is_expired_token(text):
                raise _unauthorized("the token has expired")
        if not given:
            found = self._by_certificate(request)
            if found is not None:
                return self._caller(*found)
        return await self._refuse(address, ADMIN.name, "the admin token is missing or wrong", is_guess=bool(text))

    def _by_certificate(self, request: web.Request) -> tuple[str, Credential] | None:
        ssl_object = None if request.transport is None else request.transport.get_extra_info("ssl_object")
        certificate = None if ssl_object is None else ssl_object.getpeercert(True)
        if not certificate:
            return None
        try:
            return self._proofs.directory.find_names(names_of(certificate))
        except CredentialError:
            return None

    async def _by_password(self, text: str, address: str) -> Caller:
        try:
            user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            user, colon, password = "", "", ""
        if not colon:
            raise _unauthorized("the user and the password are base64 of USER:PASSWORD in UTF-8")
        wait = self._door.check(address, user)
        if wait:
            await self._delay(wait)
        try:
            is_right = await self._proofs.passwords.verify(user, password, address)
        except TooManyProofsError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        if not is_right:
            await self._refuse(address, user, "the user or the password is wrong", is_guess=True)
        self._door.succeeded(address, user)
        return self._caller(user, self._proofs.passwords.proved(user, password))

    def _caller(self, name: str, proof: Credential | None) -> Caller:
        table = self._gate.table
        principal = table.principal(name)
        credentials = () if principal is None else principal.credentials
        until_ms = math.inf if proof is None else proof.ends_ms
        identity = Identity(f"{PROTOCOL}:{name}", name, table.rights(name), table.root(name))
        return Caller(identity, credentials, until_ms)

    async def _refuse(self, address: str, name: str, text: str, *, is_guess: bool) -> NoReturn:
        """Refuse a request; a client that sends wrong proofs is told to wait.

        Raises:
            web.HTTPException: always.
        """
        if is_guess:
            wait = self._door.check(address, name)
            if wait:
                await self._delay(wait)
            self._door.failed(address, name)
            self._gate.note_login(name, f"{PROTOCOL} {address}", refused=text, is_known=name == ADMIN.name)
        raise _unauthorized(text)

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


def _unauthorized(text: str) -> web.HTTPUnauthorized:
    return web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
