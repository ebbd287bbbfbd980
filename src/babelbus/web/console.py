"""The console over HTTP: its files, and the log-in of browsers (docs/console.md).

The files are the same on every server and need no log-in. They may load from here alone: no script or style stands in
a page, no page of somebody else may show them in a frame, and no text becomes HTML.
"""

import asyncio
import gzip
import math
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import hdrs, web

import babelbus
from babelbus.core.access import NOBODY
from babelbus.web.answers import HttpHandler, answer, read_body
from babelbus.web.callers import (
    ADMIN,
    CONSOLE,
    Caller,
    Callers,
    check_page,
    cookie_of,
    principal_of,
    session_of,
    until_of,
)
from babelbus.web.calls import SAFE_HEADERS, HttpCall
from babelbus.web.server import Host
from babelbus.web.sessions import Sessions
from babelbus.wire.http import FileRefusedError, Files

PACKAGED: Final = Path(__file__).parent / "console"
FILE_BYTES_MAX = 2**22
LOGIN_BYTES_MAX = 2**14
GZIP_BYTES_MIN = 500
"""Smaller files are sent as they are: a packet has room for them."""
HEADERS: Final = {
    **SAFE_HEADERS,
    # A browser asks each time whether a file has changed, and gets 304: a new release shows its own pages.
    hdrs.CACHE_CONTROL: "no-cache",
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class SessionInfo(msgspec.Struct, frozen=True):
    """The principal of a log-in. `expires_ms` is when the log-in ends at the latest, null if it has no end."""

    principal: str
    source: str
    root: str | None
    enforcing: bool
    version: str
    server: str
    expires_ms: int | None


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A proof: a token, a user with a password, or a code that counts once."""

    token: str | None = None
    user: str | None = None
    password: str | None = None
    code: str | None = None

    def __repr__(self) -> str:
        return "Login()"


class ConsoleRoutes:
    """The handlers of the console's files and of the log-in."""

    def __init__(self, server: Host, callers: Callers, sessions: Sessions, folder: Path | None = None) -> None:
        self._server = server
        self._gate = server.broker.gate
        self._callers = callers
        self._sessions = sessions
        self._files = _PackedFiles(folder or PACKAGED)
        self.routes: tuple[tuple[str, str, HttpHandler], ...] = (
            ("GET", "/", self._index),
            ("GET", "/console/{path:.+}", self._get),
            ("POST", "/api/console/login", self._log_in),
            ("POST", "/api/console/logout", self._log_out),
            ("GET", "/api/console/session", self._show),
        )

    # -- files -------------------------------------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "/index.html")

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, "/" + request.match_info["path"])

    async def _send(self, request: web.Request, path: str) -> web.StreamResponse:
        """Answer a file; the disk is read, and the file packed, in a thread.

        Raises:
            web.HTTPNotFound: there is no such file, or it cannot be read.
        """
        file = await asyncio.to_thread(self._files.read, path, request.headers.get(hdrs.IF_NONE_MATCH))
        if file is None:
            raise web.HTTPNotFound
        headers = {**HEADERS, hdrs.ETAG: file.tag}
        if file.unchanged:
            return web.Response(status=304, headers=headers)
        headers[hdrs.CONTENT_TYPE] = file.content_type
        if file.packed is not None and takes_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
            return web.Response(body=file.packed, headers={**headers, hdrs.CONTENT_ENCODING: "gzip"})
        return web.Response(body=file.data, headers=headers)

    # -- log-in ------------------------------------------------------------------------------------------------------

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Open a session for a proof, and end the session that the browser had."""
        check_page(request)
        login = await self._read_login(request)
        address = request.remote or "local"
        await self._sessions.load()
        before = await self._callers.find_session(request)
        name, ends_ms = await self._prove(login, address)
        # Nothing waits since the proof: the session belongs to the credential that was proved.
        id_, session = self._sessions.open(name, ends_ms)
        if before is not None:
            self._sessions.end(before)
        caller = self._callers.caller_in(session)
        self._gate.note_login(caller.identity.name, f"{CONSOLE} {address}")
        reply = answer(self._describe(caller))
        reply.set_cookie(
            cookie_of(request), id_, path="/", httponly=True, samesite="Strict", secure=_is_encrypted(request)
        )
        return reply

    async def _read_login(self, request: web.Request) -> Login:
        """Read the body of a log-in.

        Raises:
            web.HTTPException: it is wrong, or does not come in time.
        """
        try:
            # All others prove who they are before a body is read: half of a log-in must not hold a connection for ever.
            async with asyncio.timeout(self._server.config.admin.handshake_seconds):
                return await read_body(HttpCall(request, NOBODY), Login, LOGIN_BYTES_MAX)
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    async def _prove(self, login: Login, address: str) -> tuple[str | None, float]:
        """Return the principal that a proof names, `None` for the built-in administrator, and when the proof ends.

        Raises:
            web.HTTPException: the proof is wrong, or the client has to wait.
        """
        match login:
            case Login(token=str(token), user=None, password=None, code=None):
                caller = self._callers.find_token(token.strip())
                if caller is None:
                    await self._callers.refuse(address, ADMIN.name, "the token is wrong", door=CONSOLE)
            case Login(token=None, user=str(user), password=str(password), code=None):
                caller = await self._callers.prove_password(user, password, address, CONSOLE)
            case Login(token=None, user=None, password=None, code=str(code)):
                used = self._sessions.use_code(code)
                if used is None:
                    await self._callers.refuse(address, ADMIN.name, "the code is wrong, old or used", door=CONSOLE)
                return used
            case _:
                raise web.HTTPBadRequest(text="a log-in has a token, a user with a password, or a code")
        return None if caller.identity.rights is None else caller.identity.name, caller.until_ms

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        """End the session of the browser, also when it has ended already."""
        check_page(request)
        session = await self._callers.find_session(request)
        if session is not None:
            caller = self._callers.caller_in(session)
            self._gate.note_logout(caller.identity.name, f"{CONSOLE} {request.remote or 'local'}")
            await self._sessions.end(session).wait()
        reply = answer({"logged_out": session is not None})
        reply.del_cookie(cookie_of(request), path="/", httponly=True, samesite="Strict", secure=_is_encrypted(request))
        return reply

    async def _show(self, request: web.Request) -> web.StreamResponse:
        """Answer who asks."""
        await self._callers.enter(request)
        try:
            return answer(self._describe(Caller(principal_of(request), (), until_of(request), session_of(request))))
        finally:
            self._callers.leave(request)

    def _describe(self, caller: Caller) -> SessionInfo:
        identity = caller.identity
        return SessionInfo(
            identity.name,
            identity.source,
            None if identity.root is None else identity.root.name,
            self._gate.enforcing,
            babelbus.__version__,
            self._server.addresses.get("admin", ""),
            int(caller.until_ms) if math.isfinite(caller.until_ms) else None,
        )


class _File(msgspec.Struct, frozen=True):
    """A file as it is sent; `packed` is missing where it would gain nothing."""

    content_type: str
    data: bytes
    packed: bytes | None
    tag: str
    unchanged: bool = False


class _PackedFiles:
    """The files of a folder with their packed forms, which are kept; `read` may run in any thread."""

    def __init__(self, folder: Path) -> None:
        self._files = Files(str(folder), bytes_max=FILE_BYTES_MAX)
        self._packed: dict[str, tuple[str, bytes | None]] = {}
        """Tag and packed form by path: there are as many as there are files."""

    def read(self, path: str, tags: str | None) -> _File | None:
        """Return the file of a path, `None` for no file; `tags` are those of the files that the client has."""
        try:
            file = self._files.read(path, asked={} if tags is None else {"if-none-match": tags})
        except FileRefusedError:
            return None
        if file is None or path.endswith("/"):
            return None
        weak = f"W/{file.tag}"  # the packed and the plain form have one tag
        if file.unchanged:
            return _File(file.content_type, b"", None, weak, unchanged=True)
        tag, packed = self._packed.get(path, ("", None))
        if tag != file.tag:
            packed = gzip.compress(file.data, 9, mtime=0) if len(file.data) >= GZIP_BYTES_MIN else None
            self._packed[path] = file.tag, packed
        return _File(file.content_type, file.data, packed, weak)


def takes_gzip(accepted: str) -> bool:
    """Return whether a client takes packed answers, by its header `Accept-Encoding`."""
    for entry in accepted.lower().split(","):
        name, _, quality = entry.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _is_encrypted(request: web.Request) -> bool:
    """Return whether the browser speaks TLS, with us or with a proxy in front of us."""
    return request.secure or request.headers.get(hdrs.ORIGIN, "").lower().startswith("https://")
