"""The core's end of links: takes edges in, and runs the sessions of their clients."""

import asyncio
import hmac
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import babelbus
from babelbus.clock import Clock
from babelbus.limited_log import LimitedLog
from babelbus.link.frames import (
    ABORT,
    BATCH,
    BLOCKED,
    CONTINUED,
    COPIED,
    COPY,
    DATA,
    EOF,
    HELLO,
    LINK_VERSION,
    LOST,
    MAGIC,
    MARK,
    MARK_FORM,
    OPEN,
    PAUSED,
    PING,
    READY,
    REFUSE,
    RELOAD,
    SECURE,
    SERVES,
    STOP,
    TAKEN,
    WELCOME,
    WINDOW_BYTES,
    Copy,
    Frame,
    Hello,
    LinkError,
    ListenerInfo,
    Loss,
    Opening,
    Secured,
    Serving,
    Welcome,
    read,
    read_copy,
)
from babelbus.link.lobby import Lobby
from babelbus.link.peer import LOCAL_SILENCE_SECONDS, SILENCE_SECONDS, Peer
from babelbus.link.security import LinkTls
from babelbus.link.transport import LinkedTls, LinkedTransport
from babelbus.listening.certificates import read_peer_certificate
from babelbus.listening.door import Arrival, Place, name_of
from babelbus.listening.entrances import Entrance, Entrances
from babelbus.listening.fronts import FrontPlan
from babelbus.listening.sockets import open_sockets
from babelbus.metrics import Metrics
from babelbus.units import MIB

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long an edge elsewhere may take to say who it is. A process of this machine has the time of its start."""
RELOAD_SECONDS = 10.0
"""How long edges may take to load their certificates again."""
LOST_MAX = 100
"""Sessions that end in one turn of the event loop when their link is gone."""
LINKS_MAX = 256
ADDRESSES: list[list[type]] = [[str, int], [str, int, int, int]]
"""The parts of an address of IPv4, and those of IPv6."""
UNTAKEN_BYTES_MAX = 64 * MIB
"""Bytes that wait for an edge before the core handles no further frame of it, until a quarter of them is left.

No number of bytes tells an edge that does not read from a slow one: what waits for its clients is limited by all their
outboxes alone, and bytes for clients that have left wait with it. So the link does not end here. New clients and
requests would add to what waits, and their answers would wait behind it in any case. An edge that takes nothing at all
ends as a silent one does.
"""


class CoreLink(Peer):
    """The link of one edge, and the transports of its clients."""

    def __init__(
        self,
        core: "CoreEnd",
        *,
        local_name: str | None = None,
        listeners: Sequence[ListenerInfo] = (),
        is_of_member: bool = True,
    ) -> None:
        super().__init__(silence_seconds=SILENCE_SECONDS if local_name is None else LOCAL_SILENCE_SECONDS)
        self._core = core
        self._listeners = listeners
        self._local_name = local_name
        self.is_of_member = is_of_member
        """Whether the edge is that of a member of the cluster, this one or another one, and no edge process."""
        self.name = ""
        """Name of the edge; empty until it has said it."""
        self.place: Place | None = None
        """The place of a connection of another machine in the lobby."""
        self.peer = "local"
        self.transports: dict[int, LinkedTransport] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._arriving: dict[int, _Arriving] = {}
        """Clients whose TLS handshake is not done."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the edge has opened its listeners; the exception of a link that ended before says why."""
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())

        self.paused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the edge of a member reads nothing more of its clients, or is gone."""
        self.batches: Counter[str] = Counter()
        """By listener, how many batches of fronts are not answered."""
        self.reloaded: asyncio.Future[None] | None = None
        """Done when the edge has loaded its certificates again."""

    @property
    def connections(self) -> int:
        """Clients whose session runs here."""
        return len(self.transports)

    @property
    def is_known(self) -> bool:
        """Whether the edge has said its hello: nobody waits for the end of a stranger."""
        return bool(self.name)

    @property
    def is_local(self) -> bool:
        """Whether the edge is on this machine: an edge process, or that of this member."""
        return self._local_name is not None

    def connection_made(self, transport: Any) -> None:
        """Wait for the hello of the edge."""
        super().connection_made(transport)
        if self._local_name is None:
            self.peer = name_of(transport.get_extra_info("peername"))
            self.place = self.place or self._core.lobby.enter(transport)
            self._deadline = self._loop.call_later(HELLO_SECONDS, self._check_hello)
        transport.set_write_buffer_limits(UNTAKEN_BYTES_MAX)
        self._core.add(self)

    def _check_hello(self) -> None:
        if not self.name:
            self.end(f"no hello of an edge within {HELLO_SECONDS:g} s")

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def pause_writing(self) -> None:
        """Handle no further frames of the edge, which does not take what they make the core send."""
        self.hold()

    def resume_writing(self) -> None:
        """Handle frames of the edge again."""
        self.go_on()

    def handle(self, frames: list[Frame]) -> None:
        """Handle frames of the edge; once the core ends they are read, and mean nothing any more."""
        if self.is_closing:
            return
        transports = self.transports
        if not self.name and frames:
            kind, _, _, payload = frames.pop(0)
            if kind != HELLO:
                raise LinkError(f"frame {kind} before the hello")
            self._greet(read(payload, Hello), frames)
        for kind, number, taken, payload in frames:
            if kind == DATA:
                transport = transports.get(number)
                if transport is not None:  # else it was closed here meanwhile
                    if taken:
                        transport.receive_taken(taken)
                    if payload:
                        transport.receive_data(payload)
            else:
                self._handle_other(kind, number, taken, payload)

    def _handle_other(self, kind: int, number: int, taken: int, payload: bytes) -> None:
        if kind == OPEN:
            self._open(number, read(payload, Opening))
        elif kind == SECURE:
            self._secure(number, read(payload, Secured))
        elif kind == LOST:
            self._lose(number, read(payload, Loss))
        elif kind in (TAKEN, BLOCKED, EOF):
            transport = self.transports.get(number)
            if transport is None:
                return
            if taken:
                transport.receive_taken(taken)
            if kind == BLOCKED:
                transport.blocked = True
            elif kind == EOF:
                transport.receive_eof()
        elif kind == BATCH:
            self._receive_batch(number, payload)
        elif kind == READY:
            for waiting in (self.ready, self.reloaded):
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
                    break
        elif kind == COPY:
            self._core.on_copy(read_copy(payload))
        elif kind == COPIED:
            self._core.copied.add(self.name)
            self._core.on_copied()
        elif kind == PAUSED:
            if not self.paused.done():
                self.paused.set_result(None)
        elif kind != PING:
            raise LinkError(f"frame {kind} of an edge")

    def _greet(self, hello: Hello, frames: list[Frame]) -> None:
        if hello.magic != MAGIC or not hello.name or len(hello.name) > 255:
            raise LinkError("no hello of an edge")
        refusal = self._core.refusal(hello, is_local=self._local_name is not None)
        if refusal is not None:
            self._core.log.write(
                logging.WARNING, "refused", "link of %s (%s) refused: %s", hello.name, self.peer, refusal
            )
            self.send(REFUSE, payload=refusal.encode())
            self._flush()
            self.end_reason = "refused"
            self.transport.close()
            frames.clear()
            return
        if self.place is not None:
            self.place.finish_handshake()
        self.name = self._local_name or hello.name
        self._stop_deadline()
        self._decoder.trust()
        serving = self._core.serving if self._is_served else None
        self.send_message(WELCOME, Welcome(LINK_VERSION, self._core.name, list(self._listeners), serving))
        log.log(logging.DEBUG if self._local_name else logging.INFO, "edge %s (%s) is linked", self.name, self.peer)
        self._core.linked(self)

    # -- clients -----------------------------------------------------------------------------------------------------

    @property
    def _is_served(self) -> bool:
        """Whether clients are taken: those of an edge process as soon as it runs, for it has no place to wait."""
        return self._core.serves or not self.is_of_member

    def _open(self, number: int, opening: Opening) -> None:
        if number in self.transports or not number:
            raise LinkError(f"connection {number} is open")
        if not self._is_served:
            raise LinkError("a client for a core that takes none yet")
        if opening.continues:
            self._continue(number, opening.continues)
            return
        peer, local = _read_address(opening.peer), _read_address(opening.local)
        extra: dict[str, Any] = {"peername": peer, "sockname": local, "edge": self.name}
        transport = LinkedTransport(self, number, None, extra)
        self.transports[number] = transport
        entrance = self._core.entrances.by_name.get(opening.listener)
        if entrance is None:
            text = "edge %s: no listener %r here: closing %s"
            self._core.log.write(logging.WARNING, "listener", text, self.name, opening.listener[:100], name_of(peer))
            transport.abort()
        elif opening.fronted:
            self._begin(entrance, transport, None, self._front_of(opening.listener).make)
        elif entrance.tls is None:
            self._begin(entrance, transport, None)
        else:
            arriving = self._arriving[number] = _Arriving(entrance)
            transport.set_protocol(arriving)
            arriving.connection_made(transport)

    def _continue(self, number: int, session_id: str) -> None:
        """Connect a client to its session, which another core has begun; close it if the session has ended."""
        transport = self._core.absent.pop(session_id, None)
        if transport is None or transport.is_lost:
            self.send(ABORT, number)
        else:
            self.transports[number] = transport
            transport.attach(self, number, self.name)

    def _front_of(self, listener: str) -> FrontPlan:
        """Return what a listener offers to fronts.

        Raises:
            LinkError: the listener has none.
        """
        entrance = self._core.entrances.by_name.get(listener)
        if entrance is None or entrance.front is None:
            raise LinkError(f"edge {self.name}: there are no fronts of {listener!r}")
        return entrance.front

    def _receive_batch(self, number: int, payload: bytes) -> None:
        start = 1 + (payload[0] if payload else 0)
        listener = payload[1:start].decode(errors="replace")
        plan = self._front_of(listener)
        self.batches[listener] += 1
        plan.receive(payload[start:], self.transports.get, partial(self._answer_batch, listener, number))

    def _answer_batch(self, listener: str, number: int, answer: bytes) -> None:
        self.batches[listener] -= 1
        self.send(BATCH, number, answer)

    def _begin(
        self,
        entrance: Entrance,
        transport: LinkedTransport,
        place: Place | None,
        make: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        """Run the session of a client, behind the loading of the entrance; `make` makes that of a fronted client."""
        if entrance.prepare is not None and not entrance.is_ready():
            transport.pause_reading()
            waiting = _Loading(place)
            transport.set_protocol(waiting)
            self._core.prepare(entrance, lambda: self._end_loading(entrance, transport, waiting))
            return
        try:
            guest = (make or entrance.make)()
            if place is not None:
                guest.place, place = place, None  # type: ignore[attr-defined]
            transport.set_protocol(guest)
            guest.connection_made(transport)
        except Exception as error:
            if place is not None:
                place.leave()
            transport.fail(error)

    def _end_loading(self, entrance: Entrance, transport: LinkedTransport, waiting: "_Loading") -> None:
        if transport.is_closing():
            return
        if not entrance.is_ready():
            transport.abort()
            return
        place, waiting.place = waiting.place, None
        self._begin(entrance, transport, place)
        transport.resume_reading()

    def _secure(self, number: int, secured: Secured) -> None:
        tls = LinkedTls(secured)
        try:
            certificate = read_peer_certificate(tls)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise LinkError("the certificate of a client cannot be read") from error
        arriving, transport = self._arriving.pop(number, None), self.transports.get(number)
        if arriving is None or transport is None:
            return  # refused, or closed here meanwhile
        transport.secure(tls)
        place, arriving.place = arriving.place, None
        if place is not None and not place.certify(certificate):
            place.leave()
            transport.abort()
            return
        self._begin(arriving.entrance, transport, place)

    def _lose(self, number: int, loss: Loss) -> None:
        transport = self.transports.pop(number, None)
        arriving = self._arriving.pop(number, None)
        if transport is None:
            return
        if arriving is not None and loss.reason in ("tls", "handshake"):
            level, peer = logging.INFO, name_of(transport.get_extra_info("peername"))
            arriving.entrance.door.refuse(level, peer, loss.reason, loss.text)
        transport.lose(None)

    def hand_over(self, transport: LinkedTransport, session_id: str) -> None:
        """Send that the next core continues the session of a client, which is nobody's here from now on."""
        self.send(CONTINUED, transport.number, session_id.encode())
        del self.transports[transport.number]
        transport.leave()

    def send_copy(self, transport: LinkedTransport, copy: Copy) -> None:
        """Send a copy of the session of a client to its member."""
        self.send(COPY, transport.number, copy.encode())

    def withdraw_copy(self, transport: LinkedTransport) -> None:
        """Send that a copy is not true any more."""
        self.send(COPY, transport.number)

    def send_mark(self, heard: int) -> None:
        """Send up to which offset of the log of the state the clients with a copy have heard everything."""
        self.send(MARK, payload=MARK_FORM.pack(heard))

    def forget(self, transport: LinkedTransport) -> None:
        """Drop a transport that is closed here."""
        self.transports.pop(transport.number, None)
        self._arriving.pop(transport.number, None)

    def exceed(self, transport: LinkedTransport) -> None:
        """Close a transport whose edge sends more than its window, and nothing else."""
        peer, held = name_of(transport.get_extra_info("peername")), transport.held_bytes
        text = "client %s of edge %s is closed: %d bytes wait to be read, and the window is %d"
        self._core.log.write(logging.WARNING, "window", text, peer, self.name, held, WINDOW_BYTES)
        transport.abort()

    def reload(self) -> asyncio.Future[None]:
        """Send a call to load the certificates again; return what is done when the edge has loaded them."""
        self.reloaded = self._loop.create_future()
        self.send(RELOAD)
        return self.reloaded

    def end_handshakes(self) -> None:
        """Close the clients whose TLS handshake is under way."""
        for number in list(self._arriving):
            self.transports[number].abort()

    def ended(self, reason: str) -> None:
        """End the sessions of all clients."""
        self._stop_deadline()
        if self.place is not None:
            self.place.leave()
        if not self.ready.done():
            self.ready.set_exception(LinkError(reason))
        if not self.paused.done():
            self.paused.set_result(None)
        if self.reloaded is not None and not self.reloaded.done():
            self.reloaded.set_result(None)
        transports = list(self.transports.values())
        self.transports.clear()
        self._arriving.clear()
        self._lose_some(transports, ConnectionResetError(f"the edge is gone: {reason}"))
        self._core.unlinked(self, reason, len(transports))

    def _lose_some(self, transports: list[LinkedTransport], error: Exception) -> None:
        """End some sessions in each turn: thousands would hold the event loop."""
        for transport in transports[:LOST_MAX]:
            transport.lose(error)
        if len(transports) > LOST_MAX:
            self._loop.call_soon(self._lose_some, transports[LOST_MAX:], error)


def _read_address(parts: list[str | int] | None) -> tuple[str | int, ...] | None:
    """Return an address as a socket has it: of IPv4 or of IPv6.

    Raises:
        LinkError: there is no such address.
    """
    if parts is None:
        return None
    if [type(part) for part in parts] not in ADDRESSES:
        raise LinkError("a client has no address of a socket")
    return tuple(parts)


class _Arriving(asyncio.Protocol):
    """A client whose TLS handshake runs at the edge: it has a place, so that handshakes count for its address."""

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance
        self.place: Place | None = None

    def connection_made(self, transport: Any) -> None:
        self.place = self.entrance.door.enter(transport)

    def connection_lost(self, error: Exception | None) -> None:
        place, self.place = self.place, None
        if place is not None:
            place.leave()


class _Loading(asyncio.Protocol):
    """A client that waits until the code of its session is loaded."""

    def __init__(self, place: Place | None) -> None:
        self.place = place

    def connection_lost(self, error: Exception | None) -> None:
        place, self.place = self.place, None
        if place is not None:
            place.leave()


class CoreEnd:
    """All links of a server that runs the core.

    `adopt` takes the socket of an edge process of this machine; `listen` opens an address for the members of a cluster.
    """

    def __init__(self, entrances: Entrances, metrics: Metrics, clock: Clock, *, name: str) -> None:
        self.entrances = entrances
        self.clock = clock
        self.name = name
        self.links: set[CoreLink] = set()
        """Links whose edge has said who it is."""
        self.absent: dict[str, LinkedTransport] = {}
        """Clients whose sessions another core has handed over, and whose edges have not come yet, by session."""
        self.serves = True
        """Whether clients are taken; edges link before, and send the copies of sessions that they have."""
        self.copied: set[str] = set()
        """The edges that have sent all copies."""
        self.on_copy: Callable[[Copy], None] = lambda copy: None
        self.on_copied: Callable[[], None] = lambda: None
        self.address = ""
        """Where `listen` listens: "host:port"."""
        self.on_linked: Callable[[CoreLink], None] = lambda link: None
        self.on_unlinked: Callable[[CoreLink, str], None] = lambda link, reason: None
        self._all: set[CoreLink] = set()
        self._key = ""
        self._listeners: list[asyncio.Server] = []
        self.log = LimitedLog(log, clock)
        self.lobby = Lobby(self.log, HELLO_SECONDS)
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        metrics.links.set_function(lambda: len(self.links))
        metrics.edge_bytes.read = lambda: self._by_name(lambda link: link.received_bytes + link.sent_bytes)
        metrics.edge_connections.read = lambda: self._by_name(lambda link: link.connections)

    def _by_name(self, figure: Callable[[CoreLink], int]) -> list[tuple[str, int]]:
        """Return a figure of the links for each name: two links may have one, and Prometheus takes it once."""
        sums: Counter[str] = Counter()
        for link in self.links:
            sums[link.name] += figure(link)
        return list(sums.items())

    @property
    def serving(self) -> Serving:
        """The facts that edges need of this core, which takes clients."""
        fronts = {name: entrance.front for name, entrance in self.entrances.by_name.items()}
        return Serving({name: front.content for name, front in fronts.items() if front is not None})

    def serve(self) -> None:
        """Begin to take clients."""
        self.serves = True
        self.on_copy, self.on_copied = lambda copy: None, lambda: None
        for link in self.links:
            link.send_message(SERVES, self.serving)

    async def listen(self, host: str, port: int, tls: LinkTls | None = None, key: str = "") -> None:
        """Open an address for links of other machines; `tls` asks edges for a certificate, and all need the key.

        Raises:
            OSError: the address is taken.
        """
        loop = asyncio.get_running_loop()
        self._key = key
        sockets = await open_sockets(host, port)
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._listeners.append(await loop.create_server(lambda: self._make_link(tls), sock=one))
        self.address = "{}:{}".format(*sockets[0].getsockname()[:2])
        log.info("links of other members: %s", self.address)

    def _make_link(self, tls: LinkTls | None) -> asyncio.Protocol:
        link = CoreLink(self)
        return link if tls is None else Arrival(self.lobby, tls.server, link)

    async def adopt(
        self,
        connection: socket.socket,
        name: str,
        listeners: Sequence[ListenerInfo] = (),
        *,
        is_of_member: bool = False,
    ) -> CoreLink:
        """Return the link over the socket of an edge process, which opens some listeners, or of this member."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(
            lambda: CoreLink(self, local_name=name, listeners=listeners, is_of_member=is_of_member), sock=connection
        )
        return link

    def refusal(self, hello: Hello, *, is_local: bool) -> str | None:
        """Return why an edge is not taken in; the edge processes of this machine need no key."""
        if hello.version != LINK_VERSION:
            older = "edge" if hello.version < LINK_VERSION else "core"
            return (
                f"the core ({babelbus.__version__}) speaks version {LINK_VERSION} of the link, the edge {hello.name} "
                f"({hello.software or 'unknown'}) version {hello.version}: upgrade the {older}"
            )
        if self._stopping:
            return "the core stops"
        if len(self.links) >= LINKS_MAX:
            return f"{LINKS_MAX} edges are linked"
        if not is_local and not hmac.compare_digest(hello.key.encode(), self._key.encode()):
            return f"the edge {hello.name} has not the key of this core, which stands in the lease of its cluster"
        return None

    def prepare(self, entrance: Entrance, then: Callable[[], None]) -> None:
        """Load the code of an entrance, and call `then` also if that fails."""
        loading = self._preparing.get(entrance.name)
        if loading is None or loading.done():
            assert entrance.prepare is not None
            loading = self._preparing[entrance.name] = asyncio.ensure_future(entrance.prepare())
            loading.add_done_callback(lambda task: self._check(entrance, task))
        loading.add_done_callback(lambda _: then())

    def _check(self, entrance: Entrance, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s cannot serve its clients", entrance.name, exc_info=task.exception())

    def add(self, link: CoreLink) -> None:
        """Keep a link that has not said who it is until it ends."""
        self._all.add(link)

    def linked(self, link: CoreLink) -> None:
        """Count a link as one of an edge."""
        self.links.add(link)
        if self._stopping:
            link.send(STOP)
        self.on_linked(link)

    def unlinked(self, link: CoreLink, reason: str, connections: int) -> None:
        """Handle that a link is gone."""
        self._all.discard(link)
        if link in self.links:
            self.links.discard(link)
            if not self._stopping:
                log.warning("the link of edge %s is lost, with %d connections: %s", link.name, connections, reason)
            self.on_unlinked(link, reason)
        else:
            self.log.write(logging.INFO, "link", "link of %s: %s", link.peer, reason)

    async def reload(self) -> None:
        """Call all edges to load their certificates again, and wait until they have."""
        links = list(self.links)
        if not links:
            return
        await asyncio.wait([link.reload() for link in links], timeout=RELOAD_SECONDS)
        for link in links:
            if link.reloaded is not None and not link.reloaded.done():
                log.warning("edge %s has not loaded its certificates after %g s", link.name, RELOAD_SECONDS)

    async def pause_members(self, seconds: float) -> list[CoreLink]:
        """Return the links of members that send nothing more of their clients; `stop_accepting` has asked them."""
        links = [link for link in self.links if link.is_of_member]
        if links:
            await asyncio.wait([link.paused for link in links], timeout=seconds)
        return [link for link in links if link.paused.done() and link in self.links]

    def stop_accepting(self) -> None:
        """Call all edges to close their listeners, and take in no further edge; connections that are open stay open."""
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for link in self.links:
            link.send(STOP)
            link.end_handshakes()

    async def close(self) -> None:
        """End all links, behind what was written to them."""
        self.stop_accepting()
        for task in self._preparing.values():
            task.cancel()
        for arrival in list(self.lobby.arriving):
            arrival.cancel()
        links: Collection[CoreLink] = list(self._all)
        if links:
            await asyncio.gather(*[link.close("the core stops") for link in links])
