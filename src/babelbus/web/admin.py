"""The administration endpoint (docs/operations.md): metrics and health for machines, a JSON API for the command line.

`/metrics`, `/health`, `/ready`, the pages of `/docs/` and the files of the console are open to who can connect.
Everything below `/api` needs a proof in its `Authorization` header: the token of the data folder, or the token or
password of a principal, which does what its rights allow. The console has the cookie of its session instead, and a
header beside it. A web page of somebody else cannot set these headers without our consent, which we never give (no
CORS). The guard refuses it before that, also where its name is bound to this address (DNS rebinding).
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong
from prometheus_client.exposition import choose_encoder

from babelbus.config import AdminSettings
from babelbus.core.access import AccessRefusedError, Action, check_may
from babelbus.limited_log import LimitedLog
from babelbus.listening.certificates import Tls
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Door
from babelbus.units import KIB
from babelbus.web.answers import HttpHandler, answer, answer_errors
from babelbus.web.api import AdminApi
from babelbus.web.callers import METRICS_SUBJECT, Callers, principal_of
from babelbus.web.calls import BODY_BYTES_MAX, Handler, HttpCall
from babelbus.web.console import ConsoleRoutes, takes_gzip
from babelbus.web.http_protocol import Handlers, HttpProtocol, name_server
from babelbus.web.limits import ConnectionLimits
from babelbus.web.pages import PageRoutes
from babelbus.web.server import Host, health_reasons
from babelbus.web.slots import Room
from babelbus.wire.browsers import SAFE_METHODS, BrowserGuard
from babelbus.wire.http import IDLE_SECONDS

log = logging.getLogger(__name__)

UNTOLD = "the log says what is wrong; the gate is on, so reasons need the right to read the metrics"
STOP_SECONDS = 2.0
PACKED_BYTES_MIN = 16 * KIB
"""Shorter answers of the API are sent as they are: on the own machine to pack them takes longer than to send them."""


class AdminServer:
    """The listening endpoint. `start` it on the event loop that serves the bus; `stop` it before that ends."""

    def __init__(
        self,
        server: Host,
        api: AdminApi,
        *,
        token: str,
        settings: AdminSettings,
        guard: BrowserGuard | None = None,
        crowd: Crowd | None = None,
        tls: Tls | None = None,
        door: Door | None = None,
    ) -> None:
        assert token, "an empty token would let everybody in"
        self._server = server
        self._broker = broker = server.broker
        self.api = api
        self._metrics = metrics = api.metrics
        self._gate = broker.gate
        self._callers = Callers(token, broker.gate, api.proofs, server.clock, api.sessions)
        self._token = token
        self._settings = settings
        self._limits = ConnectionLimits(
            metrics,
            server.clock,
            crowd or Crowd(server.config.server),
            connections_max=settings.connections_max,
            handshake_seconds=settings.handshake_seconds,
            tls=tls,
            door=door,
        )
        self._callers.on_entered = self._limits.prove
        self._room = Room(server.config.server.unfinished_bytes_max)
        self._guard = guard or BrowserGuard()
        self._runner: web.AppRunner | None = None
        self._handlers = Handlers()
        self._listeners: list[asyncio.Server] = []
        self._pages = PageRoutes(settings)
        self._console = ConsoleRoutes(server, self._callers, api.sessions) if settings.console else None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve the connections of listening sockets."""
        options: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": IDLE_SECONDS,
            "auto_decompress": False,  # also what is not read would be decompressed, a gigabyte for a megabyte
            "logger": self._make_logger(),
        }
        runner = web.AppRunner(
            self._application(),
            handle_signals=False,
            shutdown_timeout=STOP_SECONDS,
            handler_cancellation=True,  # a listener that goes away must not be served until something happens
            **options,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        self._runner = runner
        if self._console is not None:
            self.api.sessions.begin(self._token)
        make_protocol = partial(HttpProtocol, server, loop=asyncio.get_running_loop(), **options)
        self._listeners = await self._limits.listen(server, make_protocol, sockets)

    def _make_logger(self) -> logging.Logger:
        """Return the logger of aiohttp, which would write a stack for each request that is no HTTP."""
        limited = LimitedLog(log, self._server.clock)

        def is_ours(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if not isinstance(error, HttpProcessingError):
                return True
            peer = record.args[0] if isinstance(record.args, tuple) and record.args else ""
            text = _describe_wrong_request(error)
            limited.write(logging.WARNING, "no HTTP", "admin %s: closed, since it sent no HTTP request: %s", peer, text)
            return False

        logger = logging.Logger(__name__)
        logger.parent = log
        logger.addFilter(is_ours)
        return logger

    def make_guest(self) -> asyncio.Protocol:
        """Return the protocol of a connection that comes over a link."""
        return self._limits.make_guest()

    async def stop(self) -> None:
        """Close the listener, and the connections once their requests are answered, or after two seconds."""
        self.api.close()
        self._limits.close()
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._handlers.close()

    def _application(self) -> web.Application:
        add, middlewares = self._handlers.add, (self._limits.guard, answer_errors, self._guard_request)
        application = web.Application(
            middlewares=list(map(self._handlers.add_middleware, middlewares)), client_max_size=BODY_BYTES_MAX
        )
        application.on_response_prepare.append(name_server)
        router = application.router
        router.add_get("/metrics", add(self._get_metrics))
        router.add_get("/health", add(self._get_health))
        router.add_get("/ready", add(self._get_ready))
        for path, page in self._pages.routes:
            router.add_get(path, add(page))
        for method, path, answer_page in () if self._console is None else self._console.routes:
            (router.add_get if method == "GET" else router.add_post)(path, add(answer_page))
        # `{name}` is one segment of the path as it was sent: the slash in `plant%2Fline1` stays inside the name.
        # By itself aiohttp finds no segment that has a brace.
        for method, path, handler in self.api.direct.routes:
            router.add_route(method, path.replace("}", ":[^/]+}"), add(self._identified(handler)))
        return application

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: HttpHandler) -> web.StreamResponse:
        """Refuse what pages may not ask; of two headers with one name, the guard sees both."""
        headers = {name.lower(): ", ".join(request.headers.getall(name)) for name in request.headers}
        refusal = self._guard.check(headers)
        if refusal is not None and (request.method not in SAFE_METHODS or not refusal.allows_reading):
            self._guard.refused(refusal)
            kind = web.HTTPMisdirectedRequest if refusal.status == 421 else web.HTTPForbidden
            raise kind(text=refusal.text)
        return await handler(request)

    def _identified(self, handler: Handler) -> HttpHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await self._callers.enter(request)
            principal, room = principal_of(request), self._room
            call = HttpCall(request, principal, partial(room.take, principal))
            try:
                answer = await handler(call)
            finally:
                room.give_back(principal, call.size_bytes)
                self._callers.leave(request)
            assert isinstance(answer, web.StreamResponse)
            is_long = isinstance(answer, web.Response) and (answer.content_length or 0) >= PACKED_BYTES_MIN
            if is_long and takes_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
                answer.enable_compression(web.ContentCoding.gzip)  # aiohttp packs it in a thread
            return answer

        return handle

    def access_changed(self) -> None:
        """Close the connections of principals that are gone or prove themselves otherwise from now on."""
        self._callers.access_changed()

    async def _may_look(self, request: web.Request) -> None:
        """Check that a caller may see the metrics: everybody, until the gate is on.

        Raises:
            web.HTTPException, AccessRefusedError: the caller proves nothing, or may not.
        """
        if not self._gate.enforcing or self._settings.open_metrics:
            return
        await self._callers.enter(request)
        self._callers.leave(request)
        check_may(principal_of(request), Action.READ, METRICS_SUBJECT)

    async def _reasons(self, request: web.Request) -> list[str]:
        """Return what an operator should look at; it names topics and files, so not everybody hears it."""
        reasons = health_reasons(self._server)
        if reasons:
            try:
                await self._may_look(request)
            except (web.HTTPException, AccessRefusedError):
                return [UNTOLD]
        return reasons

    async def _get_metrics(self, request: web.Request) -> web.Response:
        await self._may_look(request)
        try:
            encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        except TypeError as error:  # it compares the words of a version with numbers
            raise web.HTTPBadRequest(text="the header Accept asks for a version that has no number") from error
        return web.Response(body=encode(self._metrics.registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def _get_health(self, request: web.Request) -> web.Response:
        """Answer 200 while the process lives: a supervisor restarts on any other status, which repairs no full disk."""
        reasons = await self._reasons(request)
        return answer({"status": "degraded" if reasons else "ok", "reasons": reasons})

    async def _get_ready(self, request: web.Request) -> web.Response:
        failing = any(one.failing or one.flush_failing for one in self._broker.backends.values())
        cluster = self._server.cluster
        ready = not self._server.stopping and not failing and (cluster is None or cluster.may_serve())
        return answer({"ready": ready, "reasons": await self._reasons(request)}, status=200 if ready else 503)


def _describe_wrong_request(error: HttpProcessingError) -> str:
    """Return why a request is no HTTP, without its text: messages of aiohttp quote lines, which may hold a proof."""
    match error:
        case LineTooLong():
            return "a line is too long"
        case InvalidURLError():
            return "the target is no URL"
        case BadStatusLine():
            return "the first line is no request line"
    return error.message.partition("\n")[0].partition(":")[0]
