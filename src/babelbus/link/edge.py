"""The edge's end of a link: accepts clients, speaks TLS with them, and passes their bytes to the core and back."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import babelbus
from babelbus.clock import Clock
from babelbus.descriptors import is_reserved
from babelbus.limited_log import LimitedLog
from babelbus.link.frames import (
    ABORT,
    BLOCKED,
    CLOSE,
    DATA,
    EOF,
    HELLO,
    LINK_VERSION,
    LOST,
    MAGIC,
    OPEN,
    PING,
    READY,
    REFUSE,
    RELOAD,
    SECURE,
    STATS,
    STOP,
    TAKEN,
    WELCOME,
    WINDOW_BYTES,
    Frame,
    Hello,
    LinkError,
    LinkRefusedError,
    Loss,
    Opening,
    Secured,
    Stats,
    Welcome,
    read,
)
from babelbus.link.peer import Peer
from babelbus.listening.certificates import Tls, explain
from babelbus.listening.door import name_of

log = logging.getLogger(__name__)

WELCOME_SECONDS = 10.0
SETTLE_SECONDS = 0.02
"""How long bytes that a client has taken may be uncounted at the core, if no data of the client carries the count."""
SLOW_SECONDS = 0.25
"""The same for clients that do not take what was sent."""
QUANTUM_BYTES = 16 * 1024
"""So many bytes that a client has taken are counted at once."""
NUMBERS = 2**32 - 1
BACKLOG = 1024


class EdgeListener(msgspec.Struct, frozen=True):
    """A listener that an edge opens for the core: its name there, its sockets here."""

    name: str
    sockets: list[socket.socket]
    tls: Tls | None = None
    handshake_seconds: float = 10.0


class Client(asyncio.Protocol):
    """One client of an edge. Its TLS is done before its bytes come here."""

    __slots__ = (
        "blocked",
        "delivered",
        "early",
        "edge",
        "entered",
        "eof",
        "handshake",
        "is_secure",
        "link",
        "listener",
        "lost",
        "number",
        "outstanding",
        "paused",
        "raw",
        "settling",
        "timer",
        "told",
        "transport",
    )

    def __init__(self, edge: "Edge", listener: EdgeListener) -> None:
        self.edge = edge
        self.listener = listener
        self.link: EdgeLink | None = None
        self.number = 0
        self.transport: Any = None
        self.raw: Any = None
        """The transport below the TLS."""
        self.is_secure = listener.tls is None
        """Whether bytes of the client may come: its handshake is done, or it needs none."""
        self.handshake: Any = None
        self.timer: asyncio.TimerHandle | None = None
        """The end of the wait for a link."""
        self.early: list[bytes] = []
        """Bytes that came with the last ones of the handshake."""
        self.eof = False
        self.entered = True
        self.lost = False
        self.paused = False
        self.blocked = False
        self.settling = False
        self.outstanding = 0
        """Bytes that the core has not taken."""
        self.delivered = 0
        """Bytes that were written to the client."""
        self.told = 0
        """Of those, bytes that the core knows as taken by the client."""

    # -- the client --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Open the client at the core, and begin its TLS handshake if it needs one."""
        if self.transport is not None:  # the handshake is done
            return
        self.transport = self.raw = transport
        if not self.edge.enter(self):
            return
        tls = self.listener.tls
        if tls is None:
            return
        seconds = self.listener.handshake_seconds
        self.handshake = asyncio.get_running_loop().start_tls(
            transport, self, tls.context, server_side=True, ssl_handshake_timeout=seconds
        )
        # It begins in this turn: what the client has sent already would be lost (`listening.door.Arrival`).
        self.handshake.send(None).add_done_callback(self._end_handshake)

    def _end_handshake(self, _waiter: Any) -> None:
        handshake, self.handshake = self.handshake, None
        if handshake is None:
            return
        encrypted, loss = None, Loss("tls", "the client left")
        try:
            handshake.send(None)
        except StopIteration as end:
            encrypted = end.value
        except ConnectionAbortedError:
            loss = Loss("handshake", f"no TLS handshake within {self.listener.handshake_seconds:g} s")
        except OSError as error:
            loss = Loss("tls", explain(error))
        if encrypted is None or self.lost:
            self.edge.leave(self, loss)
            self.raw.abort()
            return
        self.transport = encrypted
        self.is_secure = True
        if self.link is None and self.stand_in():
            return
        if self.link is None:
            self.pause()
        else:
            self.begin_secure()

    def stand_in(self) -> bool:
        """Return whether somebody here serves the client in place of the core, from now on."""
        guest = self.edge.stand_in(self.listener.name)
        if guest is None:
            return False
        self.edge.leave(self, Loss())
        self.transport.set_protocol(guest)
        guest.connection_made(self.transport)
        for data in self.early:
            guest.data_received(data)
        return True

    def begin_secure(self) -> None:
        """Send the certificate of the client to the core, and what the client has sent since its handshake."""
        link = self.link
        assert link is not None
        ssl_object = self.transport.get_extra_info("ssl_object")
        secured = Secured(ssl_object.getpeercert(True) or b"", ssl_object.getpeercert() or {})
        try:
            link.send_message(SECURE, secured, self.number)
        except LinkError as error:
            self.edge.leave(self, Loss("tls", str(error)))
            self.transport.abort()
            return
        self.send_early()

    def send_early(self) -> None:
        """Send what the client has sent before the core could take it."""
        early, self.early = self.early, []
        for data in early:
            self.data_received(data)
        if self.eof and self.link is not None:
            self.link.send(EOF, self.number)

    def data_received(self, data: bytes) -> None:
        """Send bytes of the client to the core; read no more when the core has its window full."""
        link = self.link
        if link is None or not self.is_secure:
            self.early.append(data)
            return
        size = len(data)
        taken = 0
        if self.delivered != self.told:
            taken = self.delivered - self.transport.get_write_buffer_size() - self.told
            if taken > 0:
                self.told += taken
                self.blocked = False
            else:
                taken = 0
        link.send_data(self.number, taken, data)
        self.outstanding += size
        if self.outstanding >= WINDOW_BYTES and not self.paused:
            self.pause()

    def pause(self) -> None:
        """Read no more from the client."""
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.paused:
            self.paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Send the end of what the client sends to the core, which decides when to close."""
        self.eof = True
        if self.link is not None and self.is_secure:
            self.link.send(EOF, self.number)
        return self.listener.tls is None

    def connection_lost(self, error: Exception | None) -> None:
        """Send to the core that the client is gone."""
        self.lost = True
        if self.handshake is None:  # else the end of the handshake says it
            self.edge.leave(self, Loss())

    def pause_writing(self) -> None:
        """Send to the core that the client does not take what was sent."""
        self._block()

    def resume_writing(self) -> None:
        """Count what the client has taken."""
        self.settle()

    # -- the core ----------------------------------------------------------------------------------------------------

    def deliver(self, data: bytes, taken: int) -> None:
        """Write bytes of the core to the client."""
        if taken:
            self.take(taken)
        self.transport.write(data)
        self.delivered += len(data)
        if self.delivered - self.told >= QUANTUM_BYTES:
            self.settle()
        if not self.settling:
            self.settling = True
            self.edge.settle_later(self)

    def take(self, size_bytes: int) -> None:
        """Count bytes that the core has taken, and read on if it has room."""
        self.outstanding -= size_bytes
        if self.paused and self.outstanding <= WINDOW_BYTES // 2:
            self.resume()

    def settle(self) -> bool:
        """Send to the core how much the client has taken; return whether all is taken."""
        left = self.transport.get_write_buffer_size()
        taken = self.delivered - left - self.told
        if taken > 0 and self.link is not None:
            self.told += taken
            self.blocked = False
            self.link.send(TAKEN, self.number, taken=taken)
        return bool(left == 0)

    def _block(self) -> None:
        if not self.blocked and self.link is not None:
            self.blocked = True
            self.link.send(BLOCKED, self.number)

    def check(self) -> bool:
        """Check after a while what the client has taken; return whether the client still has to take something."""
        if self.transport.is_closing() or self.settle():
            self.settling = False
            return False
        self._block()
        return True

    def end_output(self) -> None:
        """Send the end of what is sent."""
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def abort(self) -> None:
        """Close at once."""
        if self.handshake is not None:
            self.handshake.close()
            self.handshake = None
        self.raw.abort()
        if self.transport is not self.raw:
            self.transport.abort()


class EdgeLink(Peer):
    """The link of an edge to the core."""

    def __init__(self, edge: "Edge", *, watched: bool, key: str = "") -> None:
        super().__init__(watched=watched)
        self._key = key
        self._edge = edge
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.clients: dict[int, Client] = {}
        self._number = 0

    def connection_made(self, transport: Any) -> None:
        """Send the hello of this edge."""
        super().connection_made(transport)
        self._decoder.trust()  # this edge has chosen whom it asks
        self.send_message(HELLO, Hello(MAGIC, LINK_VERSION, self._edge.name, babelbus.__version__, self._key))

    def handle(self, frames: list[Frame]) -> None:
        """Handle frames of the core."""
        clients = self.clients
        for kind, number, taken, payload in frames:
            client = clients.get(number)
            if kind == DATA:
                if client is not None:
                    client.deliver(payload, taken)
            elif kind == TAKEN:
                if client is not None:
                    client.take(taken)
            elif kind == CLOSE:
                if client is not None:
                    client.transport.close()
            elif kind == ABORT:
                if client is not None:
                    del clients[number]
                    self._edge.drop(client)
            elif kind == EOF:
                if client is not None:
                    client.end_output()
            elif kind == WELCOME and not self.welcome.done():
                self.welcome.set_result(read(payload, Welcome))
            elif kind == REFUSE and not self.welcome.done():
                self.welcome.set_exception(LinkRefusedError(payload.decode(errors="replace")))
            elif kind == STOP:
                self._edge.core_stops()
            elif kind == RELOAD:
                self._reload()
            elif kind != PING:
                raise LinkError(f"frame {kind} of a core")

    def _reload(self) -> None:
        """Load the certificates again, and send that this is done."""
        loading = self._loop.run_in_executor(None, self._edge.load_again)

        def end(_: object) -> None:
            self.send(READY)
            if loading.exception() is not None:
                log.error("certificates are not loaded again", exc_info=loading.exception())

        loading.add_done_callback(end)

    def open(self, client: Client) -> None:
        """Open a client at the core."""
        number = self._number
        while True:
            number = number % NUMBERS + 1
            if number not in self.clients:
                break
        self._number = client.number = number
        client.link = self
        self.clients[number] = client
        peer, local = (client.raw.get_extra_info(name) for name in ("peername", "sockname"))
        opening = Opening(
            client.listener.name,
            list(peer) if isinstance(peer, tuple) else None,
            list(local) if isinstance(local, tuple) else None,
        )
        self.send_message(OPEN, opening, number)

    def beat(self) -> None:
        """Send the figures of this edge, which are a sign of life."""
        if self.welcome.done() and not self.welcome.cancelled() and self.welcome.exception() is None:
            self.send_message(STATS, self._edge.stats())

    def ended(self, reason: str) -> None:
        """Close all clients: their sessions are gone."""
        if not self.welcome.done():
            self.welcome.set_exception(LinkError(reason))
        clients, self.clients = self.clients, {}
        for client in clients.values():
            self._edge.drop(client, gently=True)
        self._edge.unlinked(self, reason)


class Edge:
    """Listeners of an edge, and its link to the core.

    While there is no link, clients that connect wait: at most `waiting_max`, each at most `waiting_seconds`. The
    caller finds the core, and calls `connect` again when `on_lost` was called.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        waiting_max: int = 0,
        waiting_seconds: float = 0.0,
        on_connected: Callable[[Welcome], None] = lambda welcome: None,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_stop: Callable[[], None] = lambda: None,
        stand_in: Callable[[str], asyncio.Protocol | None] = lambda listener: None,
    ) -> None:
        self.name = name
        self.load_again: Callable[[], None] = lambda: None
        """Loads the certificates again; called in a thread when the core wants it."""
        self.stand_in = stand_in
        """Returns who serves a client of a listener while there is no link, `None` if such clients wait."""
        self._on_connected, self._on_lost, self._on_stop = on_connected, on_lost, on_stop
        self._waiting_max, self._waiting_seconds = waiting_max, waiting_seconds
        self._link: EdgeLink | None = None
        self.waiting: dict[Client, None] = {}
        """Clients that wait for a link, the oldest first."""
        self._servers: list[asyncio.Server] = []
        self._listeners: list[EdgeListener] = []
        self._log = LimitedLog(log, clock)
        self._unsettled: list[Client] = []
        self._slow: list[Client] = []
        self._settle_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._received_bytes = self._sent_bytes = 0
        """Bytes of links that are gone."""
        self._accepted = self._refused = self._open_count = 0
        self._all_closed: asyncio.Future[None] | None = None
        self._core_stops = False
        """Whether the core of the link takes no further clients."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self, listeners: Sequence[EdgeListener]) -> None:
        """Start to accept clients on some listeners; their sockets are closed by `stop`.

        Raises:
            OSError: an address is taken.
        """
        loop = asyncio.get_running_loop()
        for listener in listeners:
            for one in listener.sockets:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                make = self._make_client(listener)
                self._servers.append(await loop.create_server(make, sock=one, backlog=BACKLOG))

    def _make_client(self, listener: EdgeListener) -> Callable[[], Client]:
        return lambda: Client(self, listener)

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None, key: str = "") -> Welcome:
        """Return the welcome of the core at an address of another machine, once it has taken this edge in.

        Raises:
            OSError: the core cannot be reached, or has no valid certificate.
            LinkRefusedError: the core does not take this edge in.
            LinkError: this is no core.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WELCOME_SECONDS):
            name = None if tls is None else host
            _, link = await loop.create_connection(
                lambda: EdgeLink(self, watched=True, key=key), host, port, ssl=tls, server_hostname=name
            )
            return await self._begin(link)

    async def connect_socket(self, connection: socket.socket) -> Welcome:
        """Return the welcome of the core at the other end of a socket pair; errors are those of `connect`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WELCOME_SECONDS):
            _, link = await loop.create_unix_connection(lambda: EdgeLink(self, watched=False), sock=connection)
            return await self._begin(link)

    async def _begin(self, link: EdgeLink) -> Welcome:
        try:
            welcome = await link.welcome
        except BaseException:
            link.end("refused")
            raise
        if self._link is not None or link.done.done():
            link.end("this edge has another link")
            raise LinkError("the link ended before it began, or there is another link")
        self._link, self._core_stops = link, False
        self._on_connected(welcome)
        waiting, self.waiting = self.waiting, {}
        for client in waiting:
            if client.timer is not None:
                client.timer.cancel()
            self._open(link, client)
        return welcome

    def _open(self, link: EdgeLink, client: Client) -> None:
        link.open(client)
        if client.is_secure:
            if client.listener.tls is None:
                client.send_early()
            else:
                client.begin_secure()
            client.resume()

    def send_ready(self) -> None:
        """Send to the core that the listeners are open."""
        assert self._link is not None, "no link"
        self._link.send(READY)

    @property
    def is_connected(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    @property
    def connections(self) -> int:
        """Clients of this edge."""
        return len(self.waiting) + (0 if self._link is None else len(self._link.clients))

    def stats(self) -> Stats:
        """Return the figures of this edge."""
        link = self._link
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Stats(
            self.connections,
            self._accepted,
            self._refused,
            self._received_bytes + (0 if link is None else link.received_bytes),
            self._sent_bytes + (0 if link is None else link.sent_bytes),
            usage.ru_utime + usage.ru_stime,
        )

    def disconnect(self, reason: str = "this edge left") -> None:
        """End the link and the connections of its clients; listeners stay open. `on_lost` is not called."""
        link, self._link = self._link, None
        if link is not None:
            link.end(reason)

    def core_stops(self) -> None:
        """Handle that the core takes no further clients: close the listeners, or let clients wait for the next core."""
        if self._waiting_max:
            self._core_stops = True
        else:
            self.stop_accepting()

    def stop_accepting(self) -> None:
        """Close the listeners; connections that are open stay open."""
        while self._servers:
            self._servers.pop().close()
        for client in list(self.waiting):
            self._refuse_waiting(client)
        self._on_stop()

    async def stop(self) -> None:
        """Close listeners, link and clients."""
        self._on_stop = lambda: None
        self.stop_accepting()
        link, self._link = self._link, None
        if link is not None:
            await link.close("this edge stops")
        for timer in (self._settle_timer, self._slow_timer):
            if timer is not None:
                timer.cancel()

    async def wait_closed(self, seconds: float) -> None:
        """Wait until all clients are closed, at most for some seconds."""
        if self._open_count:
            self._all_closed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_closed], timeout=seconds)

    # -- clients -----------------------------------------------------------------------------------------------------

    def enter(self, client: Client) -> bool:
        """Open a client at the core, or keep it until there is a link, or refuse it."""
        self._accepted += 1
        self._open_count += 1
        connection = client.raw.get_extra_info("socket")
        if connection is not None and is_reserved(connection.fileno()):
            self._refuse(client, "file descriptors run out; raise LimitNOFILE (ulimit -n)")
            return False
        if self._link is not None and not self._core_stops:
            self._link.open(client)
            return True
        if client.listener.tls is None and client.stand_in():
            return False
        if len(self.waiting) >= self._waiting_max:
            self._refuse(client, f"no core is linked, and {self._waiting_max} clients wait for one")
            return False
        self.waiting[client] = None
        if client.listener.tls is None:
            # Not before the next turn: asyncio begins to read behind `connection_made`, paused or not.
            asyncio.get_running_loop().call_soon(self._hold, client)
        client.timer = asyncio.get_running_loop().call_later(self._waiting_seconds, self._refuse_waiting, client)
        return True

    def _hold(self, client: Client) -> None:
        if client in self.waiting:
            client.pause()

    def _refuse(self, client: Client, text: str) -> None:
        self._refused += 1
        peer = name_of(client.raw.get_extra_info("peername"))
        self._log.write(logging.WARNING, "refused", "%s %s: refused: %s", client.listener.name, peer, text)
        client.raw.abort()

    def _refuse_waiting(self, client: Client) -> None:
        if client in self.waiting:
            del self.waiting[client]
            if client.timer is not None:
                client.timer.cancel()
            self._refused += 1
            client.abort()

    def leave(self, client: Client, loss: Loss) -> None:
        """Send to the core that a client is gone."""
        if client.entered:
            client.entered = False
            self._open_count -= 1
            if not self._open_count and self._all_closed is not None and not self._all_closed.done():
                self._all_closed.set_result(None)
        if client in self.waiting:
            del self.waiting[client]
            if client.timer is not None:
                client.timer.cancel()
        link, client.link = client.link, None
        if link is not None and link.clients.pop(client.number, None) is not None:
            link.send_message(LOST, loss, client.number)

    def drop(self, client: Client, *, gently: bool = False) -> None:
        """Close a client that the core knows no more; `gently` sends what was written."""
        client.link = None
        if gently and client.handshake is None:
            client.transport.close()
        else:
            client.abort()

    def unlinked(self, link: EdgeLink, reason: str) -> None:
        """Handle that a link is gone."""
        self._received_bytes += link.received_bytes
        self._sent_bytes += link.sent_bytes
        if self._link is link:
            self._link = None
            self._on_lost(reason)

    # -- what clients have taken ---------------------------------------------------------------------------------------

    def settle_later(self, client: Client) -> None:
        """Count soon what a client has taken."""
        self._unsettled.append(client)
        if self._settle_timer is None:
            self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settle_timer = None
        clients, self._unsettled = self._unsettled, []
        self._slow += [client for client in clients if client.check()]
        if self._slow and self._slow_timer is None:
            self._slow_timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._settle_slow)

    def _settle_slow(self) -> None:
        self._slow_timer = None
        self._slow = [client for client in self._slow if client.check()]
        if self._slow:
            self._slow_timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._settle_slow)
