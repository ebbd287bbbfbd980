"""The administration endpoint (docs/operations.md): metrics and health for machines, a JSON API for the command line.

`/metrics`, `/health`, `/ready` and the pages of `/docs/` are open to who can connect. Everything below `/api` needs a
proof in its `Authorization` header: the token of the data folder, or the token or password of a principal, which does
what its rights allow. A web page of somebody else cannot set that header without our consent, which we never give
(no CORS). The guard refuses it before that, also where its name is bound to this address (DNS rebinding).
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from aiohttp import hdrs, web
from prometheus_client.exposition import choose_encoder

import babelbus
from babelbus.clock import Clock
from babelbus.config import AdminSettings, Config, read_topic_changes
from babelbus.core.access import AccessRefusedError, Action, Identity, check_may, may
from babelbus.core.broker import Broker
from babelbus.core.state import StateEditor, editor_for
from babelbus.core.topic import Topic
from babelbus.identities.proofs import Proofs
from babelbus.listening.certificates import Tls
from babelbus.listening.crowd import Crowd
from babelbus.metrics import Metrics
from babelbus.web.access import AccessRoutes
from babelbus.web.answers import Handler, answer, answer_errors, read_body
from babelbus.web.callers import METRICS_SUBJECT, SERVER_SUBJECT, Callers, check_admin, principal_of, topic_of
from babelbus.web.consumers import ConsumerRoutes
from babelbus.web.dead_letters import DeadLetterRoutes
from babelbus.web.groups import GroupRoutes, check_sees, may_see
from babelbus.web.limits import ConnectionLimits
from babelbus.web.live import LiveRoutes
from babelbus.web.pages import PageRoutes
from babelbus.web.pipelines import PipelineRoutes, Pipelines
from babelbus.web.requests import RequestRoutes
from babelbus.web.state import StateRoutes
from babelbus.wire.browsers import SAFE_METHODS, BrowserGuard

UNTOLD = "the log says what is wrong; the gate is on, so reasons need the right to read the metrics"
BODY_BYTES_MAX = 2**20
STOP_SECONDS = 2.0
SLOW_FLUSH_SECONDS = 1.0


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition: `first_offset` is the oldest record's, `next_offset` the next to be given out.

    All below `high_watermark` can be read. `bytes` are those of the `.log` files.
    """

    partition: int
    first_offset: int
    next_offset: int
    high_watermark: int
    bytes: int
    segments: int


class TopicInfo(msgspec.Struct, frozen=True):
    """One topic with its partitions and its settings (keys of `core.settings.TopicSettings`)."""

    name: str
    partitions: list[PartitionInfo]
    settings: dict[str, object]


class ServerInfo(msgspec.Struct, frozen=True):
    """The running server: `addresses` are "host:port" by protocol.

    Paths of its machine, the data folder and those of unix sockets, are for administrators alone; others get an empty
    `data_folder` and the other addresses.
    """

    version: str
    uptime_seconds: float
    data_folder: str
    addresses: dict[str, str]


class Host(Protocol):
    """The server in which the endpoint runs."""

    broker: Broker
    config: Config
    clock: Clock
    folder: str
    addresses: dict[str, str]
    started_at: float
    stopping: bool

    async def reload(self) -> None:
        """Read the lists of clients and rights again, as on SIGHUP."""


class CreateTopic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/topics."""

    name: str
    partitions: int | None = None
    settings: dict[str, object] = {}


class AdminServer:
    """The listening endpoint. `start` it on the event loop that serves the bus; `stop` it before that ends."""

    def __init__(
        self,
        server: Host,
        metrics: Metrics,
        *,
        read_value: Callable[[bytes], bytes],
        token: str,
        settings: AdminSettings,
        proofs: Proofs | None = None,
        guard: BrowserGuard | None = None,
        crowd: Crowd | None = None,
        tls: Tls | None = None,
    ) -> None:
        assert token, "an empty token would let everybody in"
        self._server = server
        self._broker = broker = server.broker
        self._metrics = metrics
        self._gate = broker.gate
        proofs = proofs or Proofs(server.folder, server.clock, metrics, server.config.access)
        self._callers = Callers(token, broker.gate, proofs, server.clock)
        self._settings = settings
        self._limits = ConnectionLimits(
            metrics,
            server.clock,
            crowd or Crowd(server.config.server),
            connections_max=settings.connections_max,
            handshake_seconds=settings.handshake_seconds,
            tls=tls,
        )
        self._guard = guard or BrowserGuard()
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.Server] = []

        def editor_of(principal: Identity) -> StateEditor:
            state, history = broker.state_for(principal), broker.history_for(principal)
            return editor_for(principal, state, history, server.clock, read_value)

        self._live = LiveRoutes(broker, editor_of, metrics)
        self._requests = RequestRoutes(broker, server.clock)
        self._state = StateRoutes(editor_of)
        self._access = AccessRoutes(broker, proofs, server.clock.now_ms)
        self._groups = (
            *GroupRoutes(broker).routes,
            *ConsumerRoutes(broker).routes,
            *DeadLetterRoutes(broker).routes,
        )
        pipelines = Pipelines(server.clock)
        metrics.registry.register(pipelines)
        self._pipelines = PipelineRoutes(pipelines)
        self._pages = PageRoutes(settings)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: host and port, the one that the system chose if 0 was asked for."""
        assert self._listeners, "not started"
        host, port = self._listeners[0].sockets[0].getsockname()[:2]
        return host, port

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start to serve the connections of listening sockets."""
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=STOP_SECONDS,
            handler_cancellation=True,  # a listener that goes away must not be served until something happens
        )
        await runner.setup()
        assert runner.server is not None
        self._runner = runner
        self._listeners = await self._limits.listen(runner.server, sockets)

    async def stop(self) -> None:
        """Close the listener, and the connections once their requests are answered, or after two seconds."""
        self._live.close()
        self._requests.close()
        self._limits.close()
        for listener in self._listeners:
            listener.close()
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
        for path, page in self._pages.routes:
            router.add_get(path, page)
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
            *self._requests.routes,
            *self._groups,
            *self._pipelines.routes,
            *self._access.routes,
        ):
            router.add_route(method, path, self._identified(handler))
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

    def _identified(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await self._callers.enter(request)
            try:
                return await handler(request)
            finally:
                self._callers.leave(request)

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
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(self._metrics.registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def _get_health(self, request: web.Request) -> web.Response:
        """Answer 200 while the process lives: a supervisor restarts on any other status, which repairs no full disk."""
        reasons = await self._reasons(request)
        return answer({"status": "degraded" if reasons else "ok", "reasons": reasons})

    async def _get_ready(self, request: web.Request) -> web.Response:
        failing = any(one.failing or one.flush_failing for one in self._broker.backends.values())
        ready = not self._server.stopping and not failing
        return answer({"ready": ready, "reasons": await self._reasons(request)}, status=200 if ready else 503)

    async def _list_topics(self, request: web.Request) -> web.Response:
        principal = principal_of(request)
        return answer(
            {
                "topics": [
                    _describe(topic, principal)
                    for topic in self._broker.topics()
                    if may_see(self._broker, principal, topic.name)
                ]
            }
        )

    async def _show_topic(self, request: web.Request) -> web.Response:
        name, principal = topic_of(request), principal_of(request)
        check_sees(self._broker, principal, name)
        return answer(_describe(self._broker.topic(name), principal))

    async def _create_topic(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, CreateTopic)
        count = {} if wanted.partitions is None else {"partitions": wanted.partitions}
        settings = read_topic_changes(wanted.settings | count)
        partitions = settings.pop("partitions", None)
        assert partitions is None or isinstance(partitions, int)  # read_topic_changes has checked it
        principal = principal_of(request)
        name = principal.absolute(wanted.name)
        topic = await self._broker.create_topic(name, partitions, self._resolve(settings), principal)
        return answer(_describe(topic, principal), status=201)

    async def _alter_topic(self, request: web.Request) -> web.Response:
        changes = read_topic_changes(await read_body(request, dict[str, object]))
        principal = principal_of(request)
        topic = await self._broker.alter_topic(topic_of(request), self._resolve(changes), principal)
        return answer(_describe(topic, principal))

    async def _remove_topic(self, request: web.Request) -> web.Response:
        await self._broker.remove_topic(topic_of(request), principal_of(request))
        return answer({"removed": request.match_info["name"]})

    async def _show_server(self, request: web.Request) -> web.Response:
        server = self._server
        uptime = server.clock.monotonic() - server.started_at
        folder, addresses = server.folder, dict(server.addresses)
        if not may(principal_of(request), Action.ADMIN, SERVER_SUBJECT):
            folder, addresses = "", {name: one for name, one in addresses.items() if "/" not in one}
        return answer(ServerInfo(babelbus.__version__, uptime, folder, addresses))

    async def _reload(self, request: web.Request) -> web.Response:
        check_admin(request)
        await self._server.reload()
        return answer({"reloaded": True})

    def _resolve(self, settings: dict[str, object]) -> dict[str, object]:
        """Replace a setting that a topic does not have by the server's value."""
        if "segment_bytes" in settings and settings["segment_bytes"] is None:
            return settings | {"segment_bytes": self._server.config.storage.segment_bytes}
        return settings


def health_reasons(server: Host) -> list[str]:
    """Return what an operator should look at. Cheap: it is asked every few seconds."""
    reasons = []
    now = server.clock.monotonic()
    for engine, backend in server.broker.backends.items():
        begun, last = backend.flusher.begun_at, backend.flusher.last_seconds
        if begun is not None and now - begun > SLOW_FLUSH_SECONDS:
            reasons.append(f"a flush of engine {engine} takes {now - begun:.1f} s by now")
        elif last > SLOW_FLUSH_SECONDS:
            reasons.append(f"the last flush of engine {engine} took {last:.1f} s")
    for topic in server.broker.topics():
        failing = next((one.failing for one in topic.partitions if one.failing is not None), None)
        if failing is not None:
            reasons.append(f"topic {topic.name}: {failing}")
        reasons += [
            f"topic {topic.name}, partition {partition.number}: offsets {bad.offset} to {bad.next_offset - 1} "
            f"cannot be read ({bad.reason}); restore the file, or accept the loss with 'babelbus repair'"
            for partition in topic.partitions
            for _, bad in partition.log.recovery.bad
            if bad.next_offset > partition.log.first_offset
        ]
    reasons += [f"topic {name} is not open: {error}" for name, error in server.broker.damaged_topics.items()]
    if server.stopping:
        reasons.append("the server stops")
    return reasons


def _describe(topic: Topic, principal: Identity) -> TopicInfo:
    partitions = [
        PartitionInfo(
            one.number,
            one.log.first_offset,
            one.next_offset,
            one.high_watermark,
            one.log.size_bytes,
            one.log.part_count,
        )
        for one in topic.partitions
    ]
    return TopicInfo(principal.relative(topic.name), partitions, msgspec.to_builtins(topic.settings))
