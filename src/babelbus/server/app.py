"""The server: builds every part from the configuration, hands each what it needs, and takes all down in order."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from babelbus.clock import Clock, SystemClock
from babelbus.config import Config
from babelbus.core.broker import Broker
from babelbus.core.settings import TopicSettings
from babelbus.core.topic import Topic
from babelbus.core.transactions import StagingSettings
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import PROTOCOL as JEBP
from babelbus.protocols.jebp.session import Options as JebpOptions
from babelbus.protocols.jebp.session import Session as JebpSession
from babelbus.protocols.worterbuch.names import SYS
from babelbus.protocols.worterbuch.values import parse_value
from babelbus.server.access import AccessLists, ClientEntry
from babelbus.server.allocator import keep_freed_memory
from babelbus.server.browsers import read_browsers
from babelbus.server.connection import Connection
from babelbus.server.listeners import Listeners
from babelbus.server.sbus import SbusService
from babelbus.server.worterbuch import WorterbuchService
from babelbus.server.zbus import ZbusService
from babelbus.storage.contract import Store
from babelbus.storage.disk import LOCK_NAME, FolderStore
from babelbus.storage.files import File, FileSystem, LocalFiles
from babelbus.storage.memory import MemoryFiles
from babelbus.web.admin import AdminServer
from babelbus.web.token import ensure_token

log = logging.getLogger(__name__)

CONF_NAME = "conf"
STATE_NAME = "state"
STAGING_NAME = "staging"
DATABASE_NAME = "db.sqlite"
SERVER_KEY_NAME = "server_key"
ADMIN_KEY_NAME = "admin_key"
DRAIN_STEP_SECONDS = 0.01
GC_FIRST_THRESHOLD = 50_000
"""Objects between two looks of the cycle collector: batches are thousands of objects without a cycle among them."""
SWITCH_SECONDS = 0.001
"""How long the interpreter lets one thread run while another waits: the flusher must not wait the usual 5 ms."""


class Server:
    """One server on one data folder. `start` in an event loop, `stop` in the same; or `run` for both."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = Metrics()
        self.folder = os.path.abspath(config.data.folder)
        self.addresses: dict[str, str] = {}
        self.started_at = self.clock.monotonic()
        self.stopping = False
        self._files = LocalFiles()
        self._lists = AccessLists(self._files, os.path.join(self.folder, CONF_NAME))
        self._sessions: set[JebpSession] = set()
        self._listeners: list[Listeners] = []
        self._lock: File | None = None
        self._admin: AdminServer | None = None
        self._sbus: SbusService | None = None
        self._worterbuch: WorterbuchService | None = None
        self._zbus: ZbusService | None = None
        self._cleaner: asyncio.Task[None] | None = None
        self._watched: set[str] = set()
        self._closed_topics: dict[str, int] = {}
        """Topics of the list that are damaged, and how many partitions the list gives them."""
        self.broker: Broker

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the data folder, open the topics, listen.

        Raises:
            BabelbusError: the folder is in use, a file of it or a setting is wrong.
            OSError: an address is taken, or the disk refused.
        """
        self._files.make_folder(self.folder)
        self._lock = self._files.lock(os.path.join(self.folder, LOCK_NAME))
        try:
            identity = self._prepare()
            self._open_broker()
            await self.broker.staging.settle()
            await self._listen(identity)
        except BaseException:
            await self.stop()
            raise
        self._cleaner = asyncio.get_running_loop().create_task(self._clean())
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_FIRST_THRESHOLD)

    def _prepare(self) -> Identity:
        """Return the server's identity; make it, and an administrator's, at the first start."""
        folder = os.path.join(self.folder, CONF_NAME)
        self._files.make_folder(folder)
        key_path = os.path.join(folder, SERVER_KEY_NAME)
        self._lists.reload()
        if not os.path.exists(key_path):
            admin_path = os.path.join(folder, ADMIN_KEY_NAME)
            if not os.path.exists(admin_path):
                Identity.generate().save(admin_path, name="admin")
            self._lists.put(ClientEntry(Identity.load(admin_path).fingerprint, "admin", admin=True))
            identity = Identity.generate()
            identity.save(key_path, name="server")  # last: it says that the rest is done
            log.warning("first start: made the server certificate %s (%s) and an administrator's identity (%s)",
                        identity.fingerprint, key_path, admin_path)  # fmt: skip
        return Identity.load(key_path)

    def _open_broker(self) -> None:
        topics = self.config.topics
        defaults = TopicSettings(
            engine=topics.engine,
            ack=topics.ack,
            retention_seconds=topics.retention_seconds,
            retention_bytes=topics.retention_bytes,
            cleanup=topics.cleanup,
            retain=topics.retain,
            segment_bytes=topics.segment_bytes or self.config.storage.segment_bytes,
            segment_seconds=topics.segment_seconds,
            tombstone_seconds=topics.tombstone_seconds,
            compact_after_seconds=topics.compact_after_seconds,
        )
        url = self.config.db.url or f"sqlite:///{os.path.join(self.folder, DATABASE_NAME)}"
        self.broker = Broker(
            _Stores(
                {
                    "disk": FolderStore(self._files, self.folder, self.clock),
                    "memory": FolderStore(MemoryFiles(), "memory", self.clock),
                },
                {"db": lambda: _open_database(url, self._files, self.clock)},
            ),
            defaults=defaults,
            checkpoint_bytes=self.config.storage.checkpoint_bytes,
            clock=self.clock,
            metrics=self.metrics,
            loop=asyncio.get_running_loop(),
            default_partitions=topics.partitions,
        )
        removed = set(self.broker.open().values())
        state = self.config.state
        self.broker.open_state(
            self._files,
            os.path.join(self.folder, STATE_NAME),
            settings=TopicSettings(
                ack=state.ack,
                cleanup="compact",
                segment_bytes=self.config.storage.segment_bytes,
                compact_after_seconds=state.history_seconds,
            ),
            checkpoint_bytes=state.checkpoint_bytes,
            transient=SYS,
            key_bytes_max=state.key_bytes_max,
        )
        limits = StagingSettings(**msgspec.structs.asdict(self.config.staging))
        self.broker.open_staging(self._files, os.path.join(self.folder, STAGING_NAME), limits)
        groups = self.config.groups
        self.broker.open_groups(self._files, self.folder, groups.commit_seconds, groups.read_ahead_bytes)
        self._reconcile_topics(self._lists.read_topics(), removed)
        self.broker.on_topics_changed = self._note_topics
        self._note_topics()
        self._watch_broker()

    def _reconcile_topics(self, listed: dict[str, int], removed: set[str]) -> None:
        """Make what the list of topics has and the store has not; what the store has is kept in any case."""
        for name, partitions in listed.items():
            topic = self.broker.find_topic(name)
            if name in self.broker.damaged_topics:
                self._closed_topics[name] = partitions
            elif topic is None:
                if name not in removed:  # else a crash came between the folder and the list
                    self.broker.create_topic(name, partitions)
            elif partitions > len(topic.partitions):
                self.broker.alter_topic(name, {"partitions": partitions})
            elif partitions < len(topic.partitions):
                log.warning("the list of topics gives %r %d partitions, it has %d and keeps them",
                            name, partitions, len(topic.partitions))  # fmt: skip
        for name in sorted(set(self.public_topics()) - set(listed)):
            log.warning("topic %r is not in the list of topics; it is kept ('babelbus topics remove' removes it)", name)

    def public_topics(self) -> dict[str, Topic]:
        """Return the topics that clients made: all but the server's own."""
        return {topic.name: topic for topic in self.broker.topics() if not topic.reserved}

    def _note_topics(self) -> None:
        """Write the list of topics, and show the right ones in the metrics."""
        topics = self.public_topics()
        try:
            counts = {name: len(topic.partitions) for name, topic in topics.items()}
            self._lists.write_topics({**self._closed_topics, **counts}.items())
        except OSError as error:
            log.error("the list of topics could not be written; the topics themselves are safe: %s", error)
        if self._sbus is not None:
            self._sbus.hub.topics_changed()
        self._watch_metrics()

    def _watch_broker(self) -> None:
        """Let the metrics ask the broker when they are read."""
        metrics, broker, groups, staging = self.metrics, self.broker, self.broker.groups, self.broker.staging
        metrics.watch_groups(
            lambda: msgspec.structs.asdict(groups.totals()) | {"commit_failures": groups.commit_failures}
        )
        metrics.groups.set_function(lambda: len(groups.all()))
        metrics.groups_lag.set_function(lambda: sum(group.info().lag for group in groups.all()))
        metrics.groups_read_ahead_bytes.set_function(lambda: groups.read_ahead.bytes_held)
        metrics.groups_read_ahead_bytes_max.set(groups.read_ahead.bytes_max)
        metrics.staged_bytes.set_function(lambda: staging.staged_bytes)
        metrics.staged_bytes_max.set(staging.settings.bytes_max)
        metrics.state_keys.set_function(lambda: len(broker.state))
        metrics.live_subscriptions.set_function(lambda: broker.router.count)

    def _watch_metrics(self) -> None:
        names = set(self.broker.topic_names())
        for name in self._watched - names:
            self.metrics.forget_topic(name)
        self._watched = names
        for topic in self.broker.topics():
            name, partitions = topic.name, topic.partitions
            self.metrics.watch_topic(
                name,
                segments=lambda partitions=partitions: sum(one.log.segment_count for one in partitions),  # type: ignore[misc]
                log_bytes=lambda partitions=partitions: sum(one.log.size_bytes for one in partitions),  # type: ignore[misc]
            )

    async def _listen(self, identity: Identity) -> None:
        jebp, server = self.config.jebp, self.config.server
        browsers = read_browsers(server)
        if jebp.bare_certificates:
            log.warning("jebp.bare_certificates is on: who saw a certificate once can show it again")
        options = JebpOptions(jebp.status, jebp.bare_records, jebp.bare_certificates, jebp.frame_bytes_max)

        def make_session(outbox: Outbox, close: Callable[[], None], _peer: str | None) -> JebpSession:
            session = JebpSession(
                self.broker,
                outbox,
                close,
                identity=identity,
                authorise=self._lists.authorise,
                options=options,
                metrics=self.metrics,
            )
            self._sessions.add(session)
            session.on_close = lambda: self._sessions.discard(session)
            return session

        if jebp.enabled:
            listeners = Listeners(
                JEBP,
                self.metrics,
                bytes_max=server.outbox_bytes_max,
                handshake_seconds=jebp.handshake_seconds,
                connections_max=jebp.connections_max,
            )
            self._listeners.append(listeners)
            await listeners.listen(JEBP, jebp.host, jebp.port, make_session)
            self.addresses |= listeners.addresses
            log.info("the certificate of jebp is %s", identity.fingerprint)
        if self.config.sbus.enabled and sys.platform == "linux":
            self._sbus = SbusService(self.config.sbus, self.broker, self.metrics, self.folder)
            self.addresses["sbus"] = self._sbus.addresses[0]
            log.info("sbus listens on %s", ", ".join(self._sbus.addresses))
        if self.config.worterbuch.enabled:
            self._worterbuch = WorterbuchService(
                self.config.worterbuch,
                self.broker,
                self.metrics,
                self.clock,
                outbox_bytes_max=server.outbox_bytes_max,
                browsers=browsers,
            )
            self._listeners.append(self._worterbuch.listeners)
            await self._worterbuch.start()
            self.addresses |= self._worterbuch.listeners.addresses
        if self.config.zbus.enabled:
            self._zbus = ZbusService(
                self.config.zbus,
                self.broker,
                self._files,
                self.folder,
                metrics=self.metrics,
                clock=self.clock,
                outbox_bytes_max=server.outbox_bytes_max,
                browsers=browsers,
            )
            self._listeners.append(self._zbus.listeners)
            await self._zbus.start()
            self.addresses |= self._zbus.listeners.addresses
        if self.config.admin.enabled:
            self._admin = AdminServer(
                self,
                self.metrics,
                read_value=parse_value,
                token=ensure_token(self.folder),
                host=self.config.admin.host,
                port=self.config.admin.port,
                guard=browsers.guard("admin", self.metrics, host=self.config.admin.host),
            )
            await self._admin.start()
            self.addresses["admin"] = "{}:{}".format(*self._admin.address)
            log.info("admin listens on %s", self.addresses["admin"])

    def reload(self) -> None:
        """Read the lists of clients and topics again; clients that are not in it any more lose their connection.

        Raises:
            ConfigError: a line of a list is wrong; what was known before still holds.
            BabelbusError: a topic of the list cannot be made; the lists of clients hold all the same.
        """
        listed = self._lists.read_topics()  # before anything changes
        self._lists.reload()
        for session in list(self._sessions):
            session.reauthorise()
        self._reconcile_topics(listed, set())
        log.info("lists of clients and topics read again: %d clients", len(self._lists.clients))

    async def _clean(self) -> None:
        """Look after retention and compaction, now and then."""
        while True:
            await asyncio.sleep(self.config.storage.cleaner_interval_seconds)
            try:
                freed = await self.broker.clean()
            except Exception:
                log.exception("cleaning failed")
                continue
            self.broker.staging.expire()
            if freed:
                log.info("cleaning freed %d bytes", freed)

    async def stop(self) -> None:
        """Stop: no new connections, answer what was asked within `drain_seconds`, flush, close."""
        self.stopping = True
        for listeners in self._listeners:
            await listeners.stop()
        if self._sbus is not None:
            self._sbus.stop_reading()
        if self._zbus is not None:
            self._zbus.hub.stop()
        if self._cleaner is not None:
            self._cleaner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._cleaner
        for connection in self._connections:
            connection.stop_reading()
        for session in self._sessions:
            session.end_waits()
        deadline = self.clock.monotonic() + self.config.server.drain_seconds
        while self._has_unsent() and self.clock.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_STEP_SECONDS)
        for connection in self._connections:
            connection.close()
        if self._sbus is not None:
            self._sbus.close()
        if hasattr(self, "broker"):
            await self.broker.close()
        for connection in self._connections:
            connection.abort()
        if self._admin is not None:
            await self._admin.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _connections(self) -> list[Connection]:
        """The connections of all stream protocols."""
        return [connection for listeners in self._listeners for connection in listeners.connections]

    def _has_unsent(self) -> bool:
        return any(one.unsent for one in self._connections) or (self._sbus is not None and self._sbus.waiting_bytes > 0)


class _Stores(dict[str, Store]):
    """The store of each engine; some are made when a topic first needs them."""

    def __init__(self, stores: dict[str, Store], makers: dict[str, Callable[[], Store]]) -> None:
        super().__init__(stores)
        self._makers = makers

    def __missing__(self, engine: str) -> Store:
        made = self[engine] = self._makers[engine]()
        return made


def _open_database(url: str, files: FileSystem, clock: Clock) -> Store:
    """Open the database, and finish the removals that a crash cut short; loading SQLAlchemy takes half a second."""
    from babelbus.storage.sql import DatabaseStore

    store = DatabaseStore(url, files, clock)
    for token in store.removed():
        store.erase(token)
    return store


async def _serve(config: Config, ready: Callable[[Server], None]) -> None:
    server = Server(config)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)

    def reload() -> None:
        try:
            server.reload()
        except (BabelbusError, OSError) as error:
            log.error("reload: %s", error)

    loop.add_signal_handler(signal.SIGHUP, reload)
    await server.start()
    ready(server)
    await asked.wait()
    log.info("stopping")
    await server.stop()
    log.info("stopped")


def run(config: Config, ready: Callable[[Server], None] = lambda server: None) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the lists of clients again. `ready` is called once it listens.

    Raises:
        BabelbusError, OSError: it could not start.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_freed_memory()
    factory = None
    if config.server.uvloop:
        try:
            import uvloop
        except ImportError:
            log.info("uvloop is not installed; asyncio's own loop is slower")
        else:
            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(config, ready))
