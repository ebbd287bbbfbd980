"""The administration endpoint (docs/operations.md): metrics and health for machines, a JSON API for the command line.

`/metrics`, `/health` and `/ready` are open to who can connect. Everything below `/api` needs the token in its
`Authorization` header. A web page of somebody else cannot set that header without our consent, which we never give
(no CORS). The guard refuses it before that, also where its name is bound to this address (DNS rebinding).
"""

import asyncio
import hmac

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

from babelbus.clock import Clock, SystemClock
from babelbus.config import AdminSettings, read_topic_changes
from babelbus.metrics import Metrics
from babelbus.web.answers import Handler, answer, answer_errors, read_body
from babelbus.web.consumers import ConsumerRoutes
from babelbus.web.contract import Administration, Health, PartitionInfo, ServerInfo, TopicInfo
from babelbus.web.dead_letters import DeadLetterRoutes
from babelbus.web.groups import GroupRoutes
from babelbus.web.limits import ConnectionLimits
from babelbus.web.live import LiveRoutes
from babelbus.web.pipelines import PipelineRoutes, Pipelines
from babelbus.web.state import StateRoutes
from babelbus.wire.browsers import SAFE_METHODS, BrowserGuard

__all__ = ["AdminServer", "Administration", "Health", "PartitionInfo", "ServerInfo", "TopicInfo"]

BODY_BYTES_MAX = 2**20
STOP_SECONDS = 2.0


class CreateTopic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/topics."""

    name: str
    partitions: int | None = None
    settings: dict[str, object] = {}


class AdminServer:
    """The listening endpoint. `start` it on the event loop that serves the bus; `stop` it before that ends."""

    def __init__(
        self,
        administration: Administration,
        metrics: Metrics,
        *,
        token: str,
        settings: AdminSettings,
        clock: Clock | None = None,
        guard: BrowserGuard | None = None,
    ) -> None:
        assert token, "an empty token would let everybody in"
        self._bus = administration
        self._metrics = metrics
        self._expected = f"Bearer {token}".encode()
        self._settings = settings
        self._limits = ConnectionLimits(
            metrics,
            clock or SystemClock(),
            connections_max=settings.connections_max,
            handshake_seconds=settings.handshake_seconds,
        )
        self._guard = guard or BrowserGuard()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._live = LiveRoutes(administration.live, administration.state, metrics)
        self._state = StateRoutes(administration.state)
        self._groups = (
            *GroupRoutes(administration).routes,
            *ConsumerRoutes(administration).routes,
            *DeadLetterRoutes(administration).routes,
        )
        pipelines = Pipelines(clock or SystemClock())
        metrics.registry.register(pipelines)
        self._pipelines = PipelineRoutes(pipelines)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: host and port, the one that the system chose if 0 was asked for."""
        assert self._listener is not None, "not started"
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken or not ours.
        """
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=STOP_SECONDS,
            handler_cancellation=True,  # a listener that goes away must not be served until something happens
        )
        await runner.setup()
        assert runner.server is not None
        try:
            self._listener = await self._limits.listen(runner.server, self._settings.host, self._settings.port)
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Close the listener, and the connections once their requests are answered, or after two seconds."""
        self._live.close()
        self._limits.close()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._limits.guard, answer_errors, self._guard_request], client_max_size=BODY_BYTES_MAX
        )
        router = application.router
        router.add_get("/metrics", self._get_metrics)
        router.add_get("/health", self._get_health)
        router.add_get("/ready", self._get_ready)
        # `{name}` is one segment of the path as it was sent: the slash in `plant%2Fline1` stays inside the name.
        for method, path, handler in (
            ("GET", "/api/topics", self._list_topics),
            ("POST", "/api/topics", self._create_topic),
            ("GET", "/api/topics/{name}", self._show_topic),
            ("PATCH", "/api/topics/{name}", self._alter_topic),
            ("DELETE", "/api/topics/{name}", self._remove_topic),
            ("GET", "/api/server", self._show_server),
            ("POST", "/api/reload", self._reload),
            *self._state.routes,
            *self._live.routes,
            *self._groups,
            *self._pipelines.routes,
        ):
            router.add_route(method, path, self._with_token(handler))
        return application

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what pages may not ask; of two headers with one name, the guard sees both."""
        headers = {name.lower(): ", ".join(request.headers.getall(name)) for name in request.headers}
        refusal = self._guard.check(headers)
        if refusal is not None and (request.method not in SAFE_METHODS or not refusal.allows_reading):
            self._guard.refused(refusal)
            kind = web.HTTPMisdirectedRequest if refusal.status == 421 else web.HTTPForbidden
            raise kind(text=refusal.text)
        return await handler(request)

    def _with_token(self, handler: Handler) -> Handler:
        async def check(request: web.Request) -> web.StreamResponse:
            given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
            # In constant time: how long a wrong guess takes must not tell how much of it was right.
            if not hmac.compare_digest(given, self._expected):
                raise web.HTTPUnauthorized(
                    text="the admin token is missing or wrong", headers={"WWW-Authenticate": "Bearer"}
                )
            return await handler(request)

        return check

    async def _get_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(self._metrics.registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def _get_health(self, request: web.Request) -> web.Response:
        """200 as long as the process lives: a supervisor restarts on anything else, which mends no full disk."""
        reasons = self._bus.health().reasons
        return answer({"status": "degraded" if reasons else "ok", "reasons": reasons})

    async def _get_ready(self, request: web.Request) -> web.Response:
        health = self._bus.health()
        return answer({"ready": health.ready, "reasons": health.reasons}, status=200 if health.ready else 503)

    async def _list_topics(self, request: web.Request) -> web.Response:
        return answer({"topics": self._bus.list_topics()})

    async def _show_topic(self, request: web.Request) -> web.Response:
        return answer(self._bus.topic(request.match_info["name"]))

    async def _create_topic(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, CreateTopic)
        count = {} if wanted.partitions is None else {"partitions": wanted.partitions}
        settings = read_topic_changes(wanted.settings | count)
        partitions = settings.pop("partitions", None)
        assert partitions is None or isinstance(partitions, int)  # read_topic_changes has checked it
        return answer(self._bus.create_topic(wanted.name, partitions, settings), status=201)

    async def _alter_topic(self, request: web.Request) -> web.Response:
        changes = read_topic_changes(await read_body(request, dict[str, object]))
        return answer(self._bus.alter_topic(request.match_info["name"], changes))

    async def _remove_topic(self, request: web.Request) -> web.Response:
        await self._bus.remove_topic(request.match_info["name"])
        return answer({"removed": request.match_info["name"]})

    async def _show_server(self, request: web.Request) -> web.Response:
        return answer(self._bus.info())

    async def _reload(self, request: web.Request) -> web.Response:
        self._bus.reload()
        return answer({"reloaded": True})
