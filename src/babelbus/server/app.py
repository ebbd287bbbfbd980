"""The server: builds every part from the configuration, hands each what it needs, and takes all down in order."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from babelbus import __version__
from babelbus.clock import Clock, SystemClock
from babelbus.config import Config, TopicLayout
from babelbus.core.access import SERVER, Identity, InvalidAccessError, Principal
from babelbus.core.access.gate import Gate
from babelbus.core.access.table import KEPT, LISTED, id_of
from babelbus.core.broker import Broker
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import Promise, settled
from babelbus.core.settings import TopicSettings
from babelbus.errors import ConfigError
from babelbus.identities.proofs import Proofs
from babelbus.listening.certificates import Certificates
from babelbus.listening.certified import Certified
from babelbus.listening.connections import Connected
from babelbus.listening.crowd import Crowd
from babelbus.listening.entrances import Entrances
from babelbus.metrics import Metrics
from babelbus.protocols.browsers import read_browsers
from babelbus.protocols.budget import Budget
from babelbus.protocols.registry import SERVICES, TRANSIENT_KEYS, read_value
from babelbus.protocols.service import CONF_NAME, Service, ServiceContext
from babelbus.server.access import AccessLists, ClientEntry, source_of
from babelbus.server.administration import Administration
from babelbus.server.figures import watch_broker, watch_cluster
from babelbus.server.identities import SharedKeys, prepare_identities
from babelbus.server.loop_watch import LoopWatch
from babelbus.server.stores import DATABASE_NAME, Stores, import_jetstream, in_daemon
from babelbus.server.topic_list import TopicList
from babelbus.storage.disk import LOCK_NAME
from babelbus.storage.files import FOLDER_MODE, File, FileSystem, LocalFiles
from babelbus.storage.notes import MEMBERSHIP_NAME
from babelbus.web.changes import Changes
from babelbus.web.history import History
from babelbus.web.token import ensure_token

if TYPE_CHECKING:
    from babelbus.link.client import Client
    from babelbus.link.core import CoreEnd
    from babelbus.link.frames import Copy
    from babelbus.server.copies import Copier
    from babelbus.server.edges import Edges
    from babelbus.server.handover import Handover
    from babelbus.storage.jetstream import Ownership
    from babelbus.web.clients import ClientLine
    from babelbus.web.cluster import Cluster

log = logging.getLogger(__name__)

STATE_NAME = "state"
STAGING_NAME = "staging"
OWN_NAMES = (CONF_NAME, "topics", STATE_NAME, STAGING_NAME, LOCK_NAME, "groups.*", "*.json", f"{DATABASE_NAME}*")
"""The entries of the data folder that a server makes, without the folder of its sockets."""
ACCESS_SEGMENT_BYTES = 2**20
AUDIT_SEGMENT_BYTES = 16 * 2**20
DRAIN_STEP_SECONDS = 0.01
GC_FIRST_THRESHOLD = 50_000
"""Objects between two looks of the cycle collector: batches are thousands of objects without a cycle among them."""


class Server:
    """One server on one data folder. `start` in an event loop, `stop` in the same; or `process.run` for both."""

    def __init__(
        self,
        config: Config,
        clock: Clock | None = None,
        files: FileSystem | None = None,
        ownership: "Ownership | None" = None,
        cluster: "Cluster | None" = None,
    ) -> None:
        """Build a server; an `ownership` has the lease of its cluster, without one `start` waits for the lease.

        The caller has locked the data folder if it gives an `ownership`.
        """
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = Metrics()
        self.folder = os.path.abspath(config.data.folder)
        self.proofs = Proofs(os.path.join(self.folder, CONF_NAME), self.clock, self.metrics, config.access)
        self.addresses: dict[str, str] = {}
        self.started_at = self.clock.monotonic()
        self.stopping = False
        self._local: FileSystem = files or LocalFiles()
        self._files: FileSystem = self._local
        """The files of the data folder; in a cluster they are in NATS."""
        self.cluster = cluster
        """The cluster that this server owns the data of."""
        self._ownership = ownership
        self._owns_connection = ownership is None
        self._conf = os.path.join(self.folder, CONF_NAME)
        self._lists = AccessLists(self._files, self._conf)
        self._lists_lock = asyncio.Lock()
        self.services: dict[str, Service] = {}
        self.fingerprint = ""
        """Fingerprint of the server's certificate."""
        self.admin_tls = False
        """Whether the administration endpoint speaks TLS."""
        self._lock: File | None = None
        self.certificates = Certificates(config.tls)
        """Those of the listeners; the files in it are loaded again when they change."""
        self.certified = Certified(self.clock)
        """Connections of clients that have shown certificates."""
        self.quotas = Quotas(config.quotas, self.clock, self.metrics)
        self.entrances = Entrances(elsewhere=config.server.processes > 1)
        self._core_end: CoreEnd | None = None
        self._edges: Edges | None = None
        self._handover: Handover | None = None
        """There in a cluster whose members change."""
        self.gather: Callable[[], Awaitable[list[Copy]]] | None = None
        """Returns the copies of sessions whose owner was killed."""
        self._copier: Copier | None = None
        self.released: list[Client] = []
        """Clients of this server whose sessions go on at the next owner, when it has stopped."""
        self._cleaner: asyncio.Task[None] | None = None
        self._watch = LoopWatch(self.metrics, self.clock)
        self.history: History | None = None
        self.changes = Changes(self.clock)
        self._cleanings: set[asyncio.Task[int]] = set()
        self.broker: Broker
        self.gate: Gate
        self.topic_list: TopicList
        self.administration: Administration

    @property
    def core_end(self) -> "CoreEnd":
        """The links of edge processes and of other members of a cluster; loaded for whoever asks first."""
        if self._core_end is None:
            from babelbus.link.core import CoreEnd

            name = self.config.cluster.name or socket.gethostname()
            self._core_end = CoreEnd(self.entrances, self.metrics, self.clock, name=name)
        return self._core_end

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Lock the data folder, wait in a cluster until no other member owns, open the topics, open the listeners.

        Raises:
            BabelbusError: the folder is in use, a file of it or a setting is wrong.
            OSError: an address is taken, or the disk refused.
        """
        gc.set_threshold(GC_FIRST_THRESHOLD)
        self._files.make_folder(self.folder)
        if self._ownership is None:
            self._lock = self._files.lock(os.path.join(self.folder, LOCK_NAME))
        try:
            self._close_folder_to_others()
            if self.config.cluster.enabled:
                await in_daemon(self._own_cluster)
            elif self._local.exists(os.path.join(self.folder, MEMBERSHIP_NAME)):
                raise ConfigError(
                    f"data.folder {self.folder} belongs to a cluster ({MEMBERSHIP_NAME}), and cluster.enabled is off:"
                    " turn it on, or name another folder"
                )
            self._files.make_folder(self._conf)
            self._lists.reload()
            self.fingerprint = prepare_identities(self._conf, self._lists)
            self.administration = Administration(self, self.metrics, self.proofs, self._files)
            await self._open_broker()
            await self.broker.staging.settle()
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        self._cleaner = asyncio.get_running_loop().create_task(self._clean())
        self._watch.start()
        if self.config.admin.enabled and self.config.admin.console:
            protocols = (*SERVICES, "admin")
            worst = self._watch.take_worst
            self.history = History(self.broker, self.metrics, self.clock, self.folder, protocols, worst)
            self.history.start()
        self.changes.note("server", f"the server started, version {__version__}")
        self.changes.watch(self.broker)
        self.gate.watch()
        self.certificates.watch()
        self.certified.watch()
        if self.cluster is None:  # a member has done it before
            gc.collect()
            gc.freeze()

    def _own_cluster(self) -> None:
        """Wait until no other member owns the data of the cluster, then open its files. Blocks.

        Raises:
            BabelbusError: NATS or the streams cannot be used as they are.
        """
        jetstream = import_jetstream()
        ownership = self._ownership
        if ownership is None:
            ownership = jetstream.Ownership(self.config.jetstream, self._local, self.folder, self.clock)
            self._ownership = ownership
            ownership.connect(self.config.cluster.name or socket.gethostname())
            jetstream.join(ownership, self._local, self.folder)  # before it waits: it may belong elsewhere
            ownership.acquire()
        self._files = jetstream.ReplicatedFiles(ownership, self._local, self.folder, self.clock)
        self._lists = AccessLists(self._files, self._conf)
        self._local.make_folder(self._conf)
        keys = SharedKeys(self._files, self._local, self._conf)
        prepare_identities(self._conf, self._lists, keys.keep)
        self.proofs.vault.make_key()
        if self.config.admin.enabled:
            ensure_token(self.folder)
        keys.keep_all()
        if self.cluster is not None and ownership.lease is not None:
            from babelbus.server.handover import Handover

            self._handover = Handover(self._files, self.folder, ownership.lease.held.epoch)
            self._handover.gather = self.gather
        log.info("this member owns the data of the cluster now (jetstream.prefix %s)", self.config.jetstream.prefix)

    def _close_folder_to_others(self) -> None:
        """Set the modes of a folder that an earlier version made: every user of the machine could read it."""
        sections = [getattr(self.config, name) for name in SERVICES]
        has_guests = any(section.enabled and getattr(section, "has_guests", False) for section in sections)
        # Other users may pass through the folder to a socket in it, and see nothing else.
        mode = 0o711 if has_guests else FOLDER_MODE
        try:
            self._files.close_to_others(self.folder, OWN_NAMES, mode=mode)
        except OSError as error:
            log.warning("other users may read %s: %s; 'chmod -R go-rwx' it", self.folder, error.strerror)

    async def _open_broker(self) -> None:
        topics = self.config.topics
        defaults = TopicSettings(
            **{name: getattr(topics, name) for name in TopicLayout.__struct_fields__},
            segment_bytes=topics.segment_bytes or self.config.storage.segment_bytes,
        )
        in_cluster = self.config.cluster.enabled
        own_engine: Literal["disk", "jetstream"] = "jetstream" if in_cluster else "disk"
        stores = Stores(self.config, self._files, self.folder, self.clock, self._ownership)
        if self.config.jetstream.servers is not None:
            await in_daemon(lambda: stores["jetstream"])  # which waits as long as NATS is away
        self.broker = Broker(
            stores,
            defaults=defaults,
            checkpoint_bytes=self.config.storage.checkpoint_bytes,
            clock=self.clock,
            metrics=self.metrics,
            loop=asyncio.get_running_loop(),
            default_partitions=topics.partitions,
            tail_cache_bytes=self.config.storage.tail_cache_bytes,
            quotas=self.quotas,
            refused_engines=("disk", "db") if in_cluster else (),
        )
        listed = self._lists.read_topics()
        removed = set(self.broker.open(listed).values())
        await self._open_gate(own_engine)
        state = self.config.state
        away = [] if self._handover is None else await self._handover.read()
        self.broker.open_state(
            self._files,
            os.path.join(self.folder, STATE_NAME),
            settings=TopicSettings(
                engine=own_engine,
                ack=state.ack,
                cleanup="compact",
                segment_bytes=self.config.storage.segment_bytes,
                compact_after_seconds=state.history_seconds,
            ),
            checkpoint_bytes=state.checkpoint_bytes,
            transient=TRANSIENT_KEYS,
            key_bytes_max=state.key_bytes_max,
            away=away,
            since=None if self._handover is None else self._handover.since,
        )
        self.broker.open_staging(self._files, os.path.join(self.folder, STAGING_NAME), self.config.staging)
        groups = self.config.groups
        self.broker.open_groups(self._files, self.folder, groups.commit_seconds, groups.read_ahead_bytes)
        self.topic_list = TopicList(self._lists, self.broker)
        await self.topic_list.reconcile(listed, removed)
        self.broker.on_topics_changed = self._note_topic
        await self.topic_list.write().wait()
        await asyncio.get_running_loop().run_in_executor(None, self.broker.erase_removed)
        watch_broker(self.metrics, self.broker)

    async def _open_gate(self, engine: Literal["disk", "jetstream"]) -> None:
        """Open the table of access, take in the lists of clients, and apply the table file of the configuration."""
        access, audit, segment_bytes = self.config.access, self.config.audit, self.config.storage.segment_bytes
        self.gate = self.broker.open_gate(
            self._files,
            self.folder,
            settings=TopicSettings(
                engine=engine, cleanup="compact", segment_bytes=min(segment_bytes, ACCESS_SEGMENT_BYTES)
            ),
            audit_settings=TopicSettings(
                engine=engine,
                ack="written",
                retention_seconds=audit.retention_seconds,
                retention_bytes=audit.retention_bytes,
                segment_bytes=min(segment_bytes, AUDIT_SEGMENT_BYTES),
            ),
            mode=access.mode,
            wildcards=access.wildcards,
            accept_version=access.accept_version,
        )
        await self.gate.settle()
        self.gate.on_changed.append(self._access_changed)
        self._import_clients()
        if access.file is not None:
            await self._apply_table_file(access.file)

    async def _apply_table_file(self, path: str) -> None:
        """Load the table file of the configuration; a file with an error leaves the table as it was."""
        read = partial(self._local.read_file, path)
        try:
            text = (await asyncio.get_running_loop().run_in_executor(None, read)).decode()
            await self.gate.apply_file(text, path, SERVER)
        except (OSError, UnicodeDecodeError, InvalidAccessError) as error:
            log.error("access: the table stays as it was: %s", error)

    def _import_clients(self) -> None:
        """Show the lists of clients in the table of access."""
        self.gate.import_entries(LISTED, self._lists.entries(self._is_principal))

    def _is_principal(self, name: str) -> bool:
        return id_of(Principal(name)) in self.gate.table.entries

    def _access_changed(self) -> None:
        table = self.gate.table
        kept = sorted(table.principals(), key=lambda pair: pair[1] != KEPT)  # proofs of the table go before files
        self.proofs.update({principal.name: principal.credentials for principal, _ in kept})
        for service in self.services.values():
            service.access_changed()
        self.administration.access_changed()
        self.broker.router.forget_all()  # routes that were found before every session had its new principal
        self.broker.responders.access_changed()

    def authorise(self, fingerprint: str) -> Identity | None:
        """Return who owns a verified certificate, with its rights; `None` if nobody does."""
        if not self.gate.enforcing:
            entry = self._lists.clients.get(fingerprint)
            if entry is None:
                return None
            rights = self.gate.admin_rights if entry.admin else self.gate.client_rights
            return Identity(source_of(entry.name), entry.name, rights)
        name = self.proofs.directory.by_fingerprint(fingerprint)
        return None if name is None else self.gate.identity(source_of(name), name)

    def _note_topic(self, name: str) -> Promise:
        """Record a topic that came, went or grew; return what is done when the list of topics is written."""
        if self.broker.find_topic(name) is None:
            self.metrics.forget_topic(name)
        written = self.topic_list.note(name)
        for service in self.services.values():
            service.topics_changed()
        return written

    async def _listen(self) -> None:
        crowd = Crowd(self.config.server)
        crowd.certified = self.certified
        cluster = self.cluster
        if cluster is not None:
            crowd.may_serve = cluster.may_serve
            watch_cluster(self.metrics, cluster)
        context = ServiceContext(
            self.config,
            self.broker,
            self.metrics,
            self.clock,
            self._files,
            self.folder,
            self.authorise,
            read_browsers(self.config.server),
            Budget(self.config.server, self.metrics),
            self.certificates,
            crowd,
            self.quotas,
            self.entrances,
            self.proofs,
            read_value,
            self.administration.answer,
        )
        for name, make_service in SERVICES.items():
            if getattr(self.config, name).enabled:
                self.services[name] = make_service(context)
        if self._handover is not None:
            await self._handover.go_on(self.services, self.core_end, self.broker)
        for service in self.services.values():
            await service.start()
            self.addresses |= service.addresses
        if self.config.admin.enabled:
            self.addresses["admin"] = await self.administration.listen(context)
            self.admin_tls = self.administration.is_tls
        if self.entrances.elsewhere:
            from babelbus.server.edges import Edges

            self._edges = Edges(self.config, self.core_end, self.entrances, self.metrics)
            await self._edges.start()
        if self._handover is not None:
            from babelbus.server.copies import Copier

            self._copier = Copier(self.core_end, self.broker, self._handover.epoch, self.metrics)
            self._copier.start()

    def connections(self) -> dict[str, Collection[Connected]]:
        """Return the open connections of each protocol; those of the administration endpoint are not among them."""
        return {name: service.connections for name, service in self.services.items()}

    @property
    def enforcing(self) -> bool:
        """Whether the gate asks for rights."""
        return self.gate.enforcing

    def clients(self) -> "list[ClientLine]":
        """Return the clients of the lists by name."""
        from babelbus.web.clients import ClientLine

        lines = [ClientLine(entry.name, entry.fingerprint, entry.admin) for entry in self._lists.clients.values()]
        return sorted(lines, key=lambda line: line.name)

    async def put_client(self, client: "ClientLine") -> None:
        """Add a client to the lists, or replace the client with its fingerprint; in effect when this returns.

        Raises:
            ConfigError: the fingerprint or the name is not valid.
        """
        entry = ClientEntry(client.fingerprint, client.name, client.admin)
        await self._change_lists(partial(self._lists.put, entry), client.fingerprint)

    async def remove_client(self, fingerprint: str) -> None:
        """Remove a client from the lists and close its connections."""
        await self._change_lists(partial(self._lists.remove, fingerprint), fingerprint)

    async def _change_lists(self, change: Callable[[], None], fingerprint: str) -> None:
        async with self._lists_lock:
            clients = self._lists.clients
            await asyncio.get_running_loop().run_in_executor(None, change)
            # The files are read again whole: whoever asked has changed this client, and not what was edited by hand.
            self._note_changes({**clients, fingerprint: self._lists.clients.get(fingerprint)}, SERVER)
            self._import_clients()

    async def reload(self, by: Identity) -> None:
        """Read the lists of clients and topics and the certificates again.

        Clients that are not in the lists any more lose their connection. The audit has each client that has changed,
        and who asked for the reload: the server itself after a SIGHUP.

        Nobody has to wait any longer for wrong proofs of identity.

        Raises:
            ConfigError: a line of a list or a certificate is wrong; what was known before still holds.
            BabelbusError: a topic of the list cannot be made; the lists of clients hold all the same.
        """
        before = set(self.topic_list.topics())  # what goes from here on was removed, whatever the list says
        await settled([self.topic_list.last])
        run = asyncio.get_running_loop().run_in_executor
        listed = await run(None, self._lists.read_topics)  # before anything changes
        async with self._lists_lock:
            clients = self._lists.clients
            await run(None, self._lists.reload)
            self._note_changes(clients, by)
        self.proofs.guessing.clear()
        self._import_clients()
        await self.topic_list.reconcile(listed, before | self.topic_list.removed)
        log.info("lists of clients and topics read again: %d clients", len(self._lists.clients))
        try:
            await run(None, self.certificates.reload)
        finally:  # a wrong certificate is wrong for one listener
            if self._core_end is not None:
                await self._core_end.reload()

    def _note_changes(self, clients: Mapping[str, ClientEntry | None], by: Identity) -> None:
        """Record in the audit what the lists of clients say otherwise than before."""
        now, audit = self._lists.clients, self.broker.gate.audit
        for fingerprint in {**clients, **now}:
            before, after = clients.get(fingerprint), now.get(fingerprint)
            if before != after:
                audit.listed(by, msgspec.to_builtins(before), msgspec.to_builtins(after))

    async def _clean(self) -> None:
        """Run retention and compaction at every interval of the cleaner."""
        while True:
            await asyncio.sleep(self.config.storage.cleaner_interval_seconds)
            cleaning = asyncio.get_running_loop().create_task(self.broker.clean())  # one engine may hang in it
            self._cleanings.add(cleaning)
            cleaning.add_done_callback(self._cleaned)
            await self.broker.staging.expire()

    def _cleaned(self, cleaning: "asyncio.Task[int]") -> None:
        self._cleanings.discard(cleaning)
        if cleaning.cancelled():
            return
        if cleaning.exception() is not None:
            log.error("cleaning failed", exc_info=cleaning.exception())
        elif cleaning.result():
            log.info("cleaning freed %d bytes", cleaning.result())

    async def stop(self, *, goes_on: bool = False) -> None:
        """Stop: no new connections, answer what was asked within `drain_seconds`, flush, close.

        If the process `goes_on` as a member of its cluster, sessions of its own clients can go on, too.
        """
        self.stopping = True
        self._watch.stop()
        if self.history is not None:
            self.history.stop()
        await self.certificates.stop()
        self.certified.close()
        if self._cleaner is not None:
            self._cleaner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._cleaner
        services = list(self.services.values())
        if self._copier is not None:
            await self._copier.stop()
        if hasattr(self, "broker"):
            if self._handover is not None:
                await self._handover.settle(services, self.broker)
            self.broker.end_requests()  # no reply is read from now on
        if self._edges is not None:
            await self._edges.leave()
        if self._core_end is not None:
            self._core_end.stop_accepting()
        if self._handover is not None:
            await self._handover.begin(services, self.core_end, goes_on=goes_on)
        for service in services:
            await service.drain()
        deadline = self.clock.monotonic() + self.config.server.drain_seconds
        while any(service.unsent for service in services) and self.clock.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_STEP_SECONDS)
        for service in services:
            service.close()
        if hasattr(self, "administration"):  # before the clients leave that hear what is published there
            await self.administration.stop()
        if self._handover is not None:
            self.released = await self._handover.end(services, self.broker)
        if hasattr(self, "broker"):
            await self.broker.close()
        for service in services:
            service.abort()
        if self._core_end is not None:
            await self._core_end.close()
        if self._edges is not None:
            await self._edges.stop()
        self.entrances.close()
        self.proofs.close()
        await self._leave_cluster()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill_edges(self) -> None:
        """Stop the edge processes with SIGKILL, because this process is replaced at once.

        Any thread may call this; it blocks.
        """
        if self._edges is not None:
            self._edges.kill()

    async def _leave_cluster(self) -> None:
        """Write no more; return the lease, when everything is stored."""
        ownership = self._ownership
        if ownership is not None:
            leave = ownership.close if self._owns_connection else ownership.close_shards
            await asyncio.get_running_loop().run_in_executor(None, leave)
