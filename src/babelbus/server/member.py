"""A member of a cluster: passes its clients on to the owner, or is the owner and runs the core (docs/cluster.md).

A member opens its listeners once, and they stay open while it changes between the two. Without an owner in reach new
clients wait. A member that was the owner and whose lease has ended begins as a new process: nothing that it has in
memory may be served any more.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import importlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import babelbus
from babelbus.clock import Clock, SystemClock
from babelbus.config import Config
from babelbus.core.access import Identity
from babelbus.errors import StorageError
from babelbus.link.client import EdgeListener
from babelbus.link.core import CoreEnd
from babelbus.link.edge import Edge
from babelbus.link.frames import LINK_VERSION, Copy
from babelbus.link.security import LinkTls
from babelbus.listening.certificates import Certificates
from babelbus.listening.crowd import Crowd
from babelbus.listening.sockets import open_sockets
from babelbus.protocols.registry import LATE_MODULES
from babelbus.protocols.service import CONF_NAME
from babelbus.server.app import Server
from babelbus.server.copies import Gathering
from babelbus.server.edge import FRONTS
from babelbus.server.identities import bring_keys
from babelbus.server.own_listeners import ADMIN, openings_of
from babelbus.server.owner_link import OwnerLink
from babelbus.server.stores import import_jetstream, in_daemon
from babelbus.server.waiting_room import WaitingRoom
from babelbus.storage.disk import LOCK_NAME
from babelbus.storage.files import LocalFiles
from babelbus.web.cluster import ClusterStatus, LinkLine, MemberLine
from babelbus.web.errors import MoveRefusedError

if TYPE_CHECKING:
    from babelbus.storage.jetstream import Lease, Ownership, Presence

log = logging.getLogger(__name__)

BACKLOG = 1024
WAITING_MAX = 1000
"""Clients that wait at a member for an owner."""
WAITING_SECONDS = 20.0
"""How long each of them waits: longer than a lease."""
TAKE_AGAIN_SECONDS = 1.0
"""How soon a member tries again to own that could not open the streams."""
CORE_MODULES = ("babelbus.web.admin", "babelbus.web.api", "babelbus.server.views", *LATE_MODULES)
"""Loaded by a core when it needs them."""

T = TypeVar("T")


class Member:
    """One member of a cluster, from its start to its end."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.name = config.cluster.name or socket.gethostname()
        self.folder = os.path.abspath(config.data.folder)
        self.addresses: dict[str, str] = {}
        self.admin_tls = False
        self.fingerprint = ""
        """Fingerprint of the cluster's certificate, once this member has owned the data."""
        self.server: Server | None = None
        """The core, while this member is the owner."""
        self._core: Server | None = None
        """The core from its start to its end."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when clients are served for the first time: here, or by the owner."""
        self.on_stopping: Callable[[], None] = lambda: None
        """Called when the end was asked for, and begins."""
        self.on_ended: Callable[[], None] = lambda: None
        """Called from another thread when the lease of this owner has ended: the process must end at once."""
        self._role, self._since_ms = "starting", self.clock.now_ms()
        self._edge: Edge | None = None
        self._waiting_room = WaitingRoom(self._why)
        self._crowd = Crowd(config.server)
        """Clients that wait for an owner, by their address."""
        self._ports: dict[str, list[socket.socket]] = {}
        self._certificates = Certificates(config.tls)
        """Those that an edge uses: of its listeners, and of its link."""
        self._heir: str | None = None
        self._given = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._ownership: Ownership
        self._owner_link: OwnerLink
        self._is_ready = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, asked: asyncio.Event) -> None:
        """Run the member until `asked` is set.

        Raises:
            BabelbusError: a setting is wrong, or NATS or the streams cannot be used as they are.
            OSError: an address is taken.
        """
        self._loop = asyncio.get_running_loop()
        files = LocalFiles()
        files.make_folder(self.folder)
        lock = files.lock(os.path.join(self.folder, LOCK_NAME))
        stopping = self._loop.create_task(asked.wait())
        try:
            files.make_folder(os.path.join(self.folder, CONF_NAME))
            self._tls = self._load_link_tls()
            await self._check_link_port()
            jetstream = import_jetstream()
            self._ownership = jetstream.Ownership(self.config.jetstream, files, self.folder, self.clock, self.name)
            self._owner_link = OwnerLink(self._lease, self._tls, self.clock, self._welcome)
            await self._open_edge()
            try:
                loading = self._loop.run_in_executor(None, _load_core)
                loading.add_done_callback(_freeze)
                if await self._or(stopping, in_daemon(self._connect)):
                    await self._live(stopping)
            finally:
                if stopping.done():
                    self.on_stopping()
                await loading
                await self._close_edge()
                self._close_ports()
                await self._in_thread(self._leave)
        finally:
            stopping.cancel()
            lock.close()

    async def _check_link_port(self) -> None:
        """Check that this member can listen for links: only an owner does, and an heir that cannot costs two moves.

        Raises:
            OSError: the address is taken.
        """
        cluster = self.config.cluster
        for one in await open_sockets(cluster.host, cluster.port):
            one.close()

    @property
    def _lease(self) -> "Lease":
        lease = self._ownership.lease
        assert lease is not None, "cluster.enabled needs a lease"
        return lease

    def _load_link_tls(self) -> LinkTls | None:
        cluster = self.config.cluster
        if cluster.cert_file is None or cluster.key_file is None or cluster.ca_file is None:
            return None
        return LinkTls(cluster.cert_file, cluster.key_file, cluster.ca_file)

    def _connect(self) -> None:
        """Connect to NATS, and send to the other members that this one is there. Blocks."""
        ownership, lease = self._ownership, self._lease
        ownership.connect(self.name)
        import_jetstream().join(ownership, LocalFiles(), self.folder)
        lease.on_seen.append(self._owner_link.look)
        lease.on_ended.append(self._lose)
        ownership.patiently(lease.prepare)
        ownership.patiently(lambda: ownership.members.start(self._presence))

    def _leave(self) -> None:
        nats = self._ownership.nats
        with contextlib.suppress(StorageError):
            nats.call(self._ownership.members.stop(), 1.0)
        self._ownership.close()

    async def _live(self, stopping: asyncio.Task[bool]) -> None:
        """Run as an edge until the lease is free, as the owner until it is given away, and so on."""
        while True:
            self._set_role("member")
            edge = self._edge
            assert edge is not None
            try:
                async with asyncio.TaskGroup() as group:  # an error of either ends the member
                    works = (self._owner_link.keep(edge), self._owner_link.check_copies(edge))
                    linking = [group.create_task(work) for work in works]
                    is_owner = await self._or(stopping, self._acquire())
                    for task in linking:
                        task.cancel()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            if not is_owner:
                return
            again = await self._own(stopping)
            if not again:
                return

    async def _acquire(self) -> None:
        """Wait until this member has the lease."""
        await self._in_nats(self._ownership.wait_for(self._lease.acquire))

    # -- the edge ----------------------------------------------------------------------------------------------------

    async def _open_edge(self) -> None:
        """Open the listeners, for clients of the owner."""
        self._certificates = Certificates(self.config.tls)
        if self._tls is not None:
            self._certificates.add(self._tls)
        listeners: list[EdgeListener] = []
        for one in openings_of(self.config):
            tls = one.make_tls(self._certificates)
            if one.name == ADMIN:
                self.admin_tls = tls is not None
            if one.name not in self._ports:
                self._ports[one.name] = await open_sockets(one.host, one.port, BACKLOG)
                self.addresses[one.name] = "{}:{}".format(*self._ports[one.name][0].getsockname()[:2])
            # Copies: the sockets listen on when the edge has closed its own, so nobody is refused in between.
            copies = [port.dup() for port in self._ports[one.name]]
            is_admin = one.name == ADMIN
            listeners.append(EdgeListener(one.name, copies, tls, one.handshake_seconds, is_admin=is_admin))
        self._certificates.watch()
        self._edge = Edge(
            self.name,
            self.clock,
            waiting_max=WAITING_MAX,
            crowd=self._crowd,
            waiting_seconds=WAITING_SECONDS,
            on_lost=self._lose_link,
            stand_in=self._stand_in,
            make_fronts=FRONTS,
        )
        self._edge.load_again = self._certificates.reload
        await self._edge.open(listeners)

    def _stand_in(self, listener: str) -> asyncio.Protocol | None:
        """Return who answers the clients of the administration endpoint while there is no owner."""
        return self._waiting_room.make() if listener == ADMIN else None

    def _why(self) -> str:
        trouble = self._owner_link.trouble or "the owner changes now"  # the link is there, and ends
        return f"member {self.name} reaches no owner of the cluster's data: {trouble}"

    async def _leave_edge(self) -> Edge:
        """Close the listeners, the link and the clients of it; return the edge, at which clients wait for an owner."""
        edge, self._edge = self._edge, None
        assert edge is not None
        edge.close_listeners()
        await edge.leave_core("this member takes over")
        await self._certificates.stop()
        return edge

    async def _close_edge(self) -> None:
        edge, self._edge = self._edge, None
        if edge is not None:
            await edge.stop()
        await self._certificates.stop()

    def _close_ports(self) -> None:
        ports, self._ports = self._ports, {}
        for sockets in ports.values():
            for one in sockets:
                one.close()

    def _lose_link(self, reason: str) -> None:
        if self._core is None:  # else its own core has closed the link of the clients that had waited
            self._owner_link.lose(reason)

    async def _welcome(self) -> None:
        """Handle that the edge is linked to the owner: clients are served."""
        try:
            await self._in_thread(self._bring_keys)
        except (OSError, StorageError) as error:
            log.warning("the commands on this machine do not find the keys of the cluster: %s", error)
        self._note_ready()

    def _bring_keys(self) -> None:
        """Write the keys of the cluster into the folder of this member, which belongs to the cluster from then on."""
        jetstream, ownership, files = import_jetstream(), self._ownership, LocalFiles()
        jetstream.join(ownership, files, self.folder)
        conf = os.path.join(self.folder, CONF_NAME)
        bring_keys(lambda name: jetstream.read_small_file(ownership, f"{CONF_NAME}/{name}"), files, conf)

    # -- the core ----------------------------------------------------------------------------------------------------

    async def _own(self, stopping: asyncio.Task[bool]) -> bool:
        """Run the core until the lease is given away; return whether this member goes on as an edge."""
        lease = self._lease
        self._set_role("starting")
        self._owner_link.take_over(self.name)
        self._heir = None
        self._given.clear()
        began = self.clock.monotonic()
        edge = await self._leave_edge()
        letting_in: asyncio.Task[None] | None = None
        if self.config.server.processes > 1:  # its processes open the addresses themselves
            self._close_ports()
        server = self._core = Server(self.config, self.clock, ownership=self._ownership, cluster=self)
        if self._tls is not None:
            server.certificates.add(self._tls)
        if lease.last_owner:
            gathering = Gathering(server.core_end, lease.held.epoch, edge.waiting.copies())
            server.gather = partial(self._gather, server.core_end, gathering)
        for name, sockets in self._ports.items():
            server.entrances.kept[name] = [one.dup() for one in sockets]
        is_started = False
        try:
            is_started = await self._or(stopping, server.start())
            if is_started:
                address = await self._listen(server.core_end)
                server.core_end.serve()
                self.server, self.fingerprint = server, server.fingerprint
                self.addresses = dict(server.addresses)
                self._set_role("owner")
                await self._in_nats(lease.advertise(address))
                log.info("member %s owns the data after %.2f s", self.name, self.clock.monotonic() - began)
                self._note_ready()
                letting_in = self._loop.create_task(self._let_in(edge, server.core_end))
                given = self._loop.create_task(self._given.wait())
                await asyncio.wait((stopping, given), return_when=asyncio.FIRST_COMPLETED)
                given.cancel()
        except StorageError as error:
            if not error.retriable:
                raise
            log.error("member %s cannot own the data now: %s", self.name, error)
        finally:
            ending = self.clock.monotonic()
            self.server = None
            self._set_role("starting" if stopping.done() else "member")
            if letting_in is not None:
                letting_in.cancel()
            if is_started:
                await server.stop(goes_on=not stopping.done())
            else:
                await server.core_end.close()
            waiting = [*await edge.release(), *server.released]
            await edge.stop()
            self._core = None
            server.entrances.close()
            await self._release()
            if is_started:
                log.info("member %s: owner ended after %.2f s", self.name, self.clock.monotonic() - ending)
        if stopping.done():
            return False
        if not is_started:
            await asyncio.sleep(TAKE_AGAIN_SECONDS)
        await self._open_edge()
        assert self._edge is not None
        self._edge.adopt(waiting)
        return True

    async def _listen(self, core_end: CoreEnd) -> str:
        """Open the address for links, once; return where the other members reach it."""
        cluster = self.config.cluster
        if not core_end.address:
            await core_end.listen(cluster.host, cluster.port, self._tls, self._lease.held.key)
        return cluster.advertise or core_end.address

    async def _gather(self, core_end: CoreEnd, gathering: Gathering) -> list[Copy]:
        """Return the copies of sessions that the other members have: they link before anybody is served."""
        address = await self._listen(core_end)
        await self._in_nats(self._lease.advertise(address))
        return await gathering.wait(self._ownership.members.others)

    async def _let_in(self, edge: Edge, core_end: CoreEnd) -> None:
        """Connect the clients that have waited here for an owner to the core of this member, until they are gone."""
        if edge.waiting:
            ours, theirs = socket.socketpair()
            await asyncio.gather(core_end.adopt(ours, self.name, is_of_member=True), edge.connect_socket(theirs))
            await edge.wait_closed()
            edge.disconnect()

    async def _release(self) -> None:
        try:
            await self._in_nats(self._lease.release(self._heir or ""))
        except StorageError as error:
            log.warning("the lease ends by itself: %s", error)

    def _lose(self, error: StorageError) -> None:
        """Handle, in the thread of NATS, that the lease ended while this member owned the data."""
        log.error("member %s owns the data no more, and begins again as a new process: %s", self.name, error)
        core = self._core
        if core is not None:
            core.kill_edges()  # the new process needs their addresses
        self.on_ended()

    # -- the cluster, as the core shows it -----------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """Return what this owner knows of the cluster."""
        ownership, lease, server = self._ownership, self._lease, self.server
        held, settings = lease.held, self.config.jetstream
        return ClusterStatus(
            self.name,
            held.epoch,
            held.since_ms,
            babelbus.__version__,
            held.address,
            settings.prefix,
            settings.lease_seconds,
            lease.rest_seconds,
            ownership.nats.servers,
            ownership.nats.address,
            [
                MemberLine(
                    one.name, "away" if away else one.role, one.host, one.version, one.link_version,
                    one.owner, one.nats, one.connections, one.since_ms, round(heard, 1),
                )
                for one, heard, away in ownership.members.all()
            ],
            [
                LinkLine(link.name, link.peer, link.connections)
                for link in (() if server is None else server.core_end.links)
            ],
        )  # fmt: skip

    def reasons(self) -> list[str]:
        """Return what an operator should look at."""
        members = self._ownership.members
        reasons = self._ownership.failures()
        if not self.may_serve():
            reasons.append("the lease could not be renewed: nothing is served until it is")
        if members.twin is not None:
            reasons.append(
                f"another member on {members.twin.host} has the name {self.name!r} too: give each its own cluster.name"
            )
        return reasons

    def may_serve(self) -> bool:
        """Return whether the lease is valid."""
        lease = self._ownership.lease
        return lease is not None and lease.is_valid()

    def move(self, name: str | None) -> str:
        """Begin to give the data to a member."""
        if self.server is None or self._heir is not None:
            raise MoveRefusedError("a move is under way")
        others = {
            one.name: one
            for one, _, away in self._ownership.members.all()
            if one.name != self.name and not away and one.role == "member"
        }
        if name is None:
            linked = sorted(one.name for one in others.values() if one.owner == self.name) or sorted(others)
            if not linked:
                raise MoveRefusedError("no other member is there now that could take over")
            name = linked[0]
        elif name == self.name:
            raise MoveRefusedError(f"member {name} owns the data already")
        elif name not in others:
            there = ", ".join(sorted(others)) or "none"
            raise MoveRefusedError(f"member {name!r} is not there now; members that could take over: {there}")
        self._heir = name
        log.info("the data goes to member %s", name)
        # Behind the answer to who asked for it.
        self._loop.call_later(0.02, self._given.set)
        return name

    def _presence(self) -> "Presence":
        """Return what this member says of itself; called in the thread of NATS."""
        edge, server = self._edge, self.server
        connections = 0 if edge is None else edge.connections
        if server is not None:
            connections = sum(len(one) for one in server.connections().values())
        return import_jetstream().Presence(  # type: ignore[no-any-return]
            self.name, self._ownership.owner, socket.gethostname(), babelbus.__version__, LINK_VERSION, self._role,
            self._since_ms, self._owner_link.owner, self._ownership.nats.address, connections,
        )  # fmt: skip

    @property
    def enforcing(self) -> bool:
        """Whether the gate asks for rights here; at a member that is not the owner, the owner asks."""
        return self.server is None or self.server.enforcing

    async def reload(self, by: Identity) -> None:
        """Read the lists of clients and topics and the certificates again, where this member has them."""
        if self.server is not None:
            await self.server.reload(by)
        await self._in_thread(self._certificates.reload)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _set_role(self, role: str) -> None:
        self._role, self._since_ms = role, self.clock.now_ms()
        with contextlib.suppress(StorageError, RuntimeError):
            asyncio.run_coroutine_threadsafe(self._ownership.members.say(), self._ownership.nats.loop)

    def _note_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self.on_ready()

    async def _in_nats(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` gives in the thread of the connection to NATS."""
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._ownership.nats.loop)
        return await asyncio.wrap_future(future)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(None, work)

    async def _or(self, stopping: asyncio.Task[bool], work: Coroutine[Any, Any, Any]) -> bool:
        """Return whether `work` is done before the end is asked for; `work` is cancelled then."""
        task = self._loop.create_task(work)
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return False
        await task
        return True


def _load_core() -> None:
    """Import what a core imports when its first clients come, so that a take-over need not wait for it."""
    for module in CORE_MODULES:
        importlib.import_module(module)


def _freeze(_: object) -> None:
    """Call the cycle collector once, and let it pass over what is there by now: a take-over waits for neither."""
    gc.collect()
    gc.freeze()
