"""The edge's end of a link: accepts clients, speaks TLS with them, and passes their bytes to the core and back."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import babelbus
from babelbus.clock import Clock
from babelbus.descriptors import is_reserved
from babelbus.limited_log import LimitedLog
from babelbus.link.client import Client, EdgeListener, FrontedClient
from babelbus.link.frames import (
    ABORT,
    BATCH,
    CLOSE,
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
    OPEN,
    PAUSED,
    PAYLOAD_BYTES_MAX,
    PING,
    READY,
    REFUSE,
    RELOAD,
    SERVES,
    STOP,
    TAKEN,
    WELCOME,
    Frame,
    Hello,
    LinkError,
    LinkRefusedError,
    Loss,
    Opening,
    Serving,
    Welcome,
    read,
    read_copy,
    read_mark,
)
from babelbus.link.peer import SILENCE_SECONDS, Peer
from babelbus.link.waiting import Waiting
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import name_of
from babelbus.listening.fronts import Fronts

log = logging.getLogger(__name__)

WELCOME_SECONDS = 10.0
UNKNOWN_CERTIFICATE = (
    "so does a core that refuses the certificate of this edge: is cluster.cert_file signed by its cluster.ca_file?"
)
"""The handshake of TLS 1.3 ends at the edge before the core has seen the certificate, so no alert says it."""
SETTLE_SECONDS = 0.02
"""How long bytes that a client has taken may be uncounted at the core, if no data of the client carries the count."""
SLOW_SECONDS = 0.25
"""The same for clients that do not take what was sent."""
GATHER_SECONDS = 0.001
"""How long the front of a client may wait for others to fill its batch."""
LAST_SECONDS = 10.0
"""How long clients may take what was written to them when their link is gone. Nobody counts them any more."""
NUMBERS = 2**32 - 1
BACKLOG = 1024


class EdgeLink(Peer):
    """The link of an edge to the core."""

    def __init__(self, edge: "Edge", *, silence_seconds: float = 0.0, key: str = "") -> None:
        super().__init__(silence_seconds=silence_seconds)
        self._key = key
        self._edge = edge
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.clients: dict[int, Client] = {}
        self._number = 0
        self._gathering: dict[Fronts, str] = {}
        """Fronts that have batches to send, and the name of their listener."""
        self._gathers_now = False
        """Whether they are sent at the end of this turn."""
        self._batch_timer: asyncio.TimerHandle | None = None
        """Sends them later."""
        self._batches: dict[int, Fronts] = {}
        """Batches that the core has not answered."""
        self._batch_number = 0
        self.heard = 0
        """Up to which offset of the log of the state all clients with a copy have heard everything."""
        self.serving: Serving | None = None
        """There once the core has said that it takes clients, perhaps in one read with its welcome."""
        self.is_stopping = False
        """Whether the core has said that it stops, perhaps in one read with its welcome, too."""

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
                    client.close()
            elif kind == ABORT:
                if client is not None:
                    del clients[number]
                    self._edge.drop(client)
            elif kind == EOF:
                if client is not None:
                    client.end_output()
            elif kind == BATCH:
                fronts = self._batches.pop(number, None)
                if fronts is None:
                    raise LinkError(f"an answer to batch {number}, which was not sent")
                fronts.settle(number, payload)
            elif kind == WELCOME and not self.welcome.done():
                self.welcome.set_result(read(payload, Welcome))
            elif kind == REFUSE and not self.welcome.done():
                self.welcome.set_exception(LinkRefusedError(payload.decode(errors="replace")))
            elif kind == STOP:
                self.is_stopping = True
                self._edge.core_stops()
            elif kind == CONTINUED:
                if client is not None:
                    client.continues = payload.decode()
            elif kind == COPY:
                if client is not None:
                    client.keep_copy(read_copy(payload) if payload else None)
            elif kind == MARK:
                self.heard = read_mark(payload)
            elif kind == SERVES:
                self.serving = read(payload, Serving)
                self._edge.core_serves(self, self.serving)
            elif kind == RELOAD:
                self._reload()
            elif kind != PING:
                raise LinkError(f"frame {kind} of a core")

    # -- batches of fronts ---------------------------------------------------------------------------------------------

    def gather(self, fronts: Fronts, listener: str, *, later: bool = False) -> None:
        """Send the batches of the fronts of a listener at the end of this turn, or `later` within `GATHER_SECONDS`."""
        self._gathering[fronts] = listener
        if not later:
            self._gathers_now = True
            if not self._scheduled:
                self._schedule()
        elif self._batch_timer is None:
            self._batch_timer = self._loop.call_later(GATHER_SECONDS, self._flush_late)

    def _flush_late(self) -> None:
        self._batch_timer = None
        self.flush_batches()

    def flush_batches(self) -> None:
        """Send all batches: what is sent behind them comes behind them to the core."""
        self._gathers_now = False
        gathering, self._gathering = self._gathering, {}
        for fronts, listener in gathering.items():
            fronts.flush(partial(self._send_batch, listener, fronts))

    def _send_batch(self, listener: str, fronts: Fronts, data: bytes) -> int:
        encoded = listener.encode()
        payload = b"%c%b%b" % (len(encoded), encoded, data)
        assert len(payload) <= PAYLOAD_BYTES_MAX, f"a batch of {len(payload)} bytes"
        number = self._batch_number = self._batch_number % NUMBERS + 1
        self._batches[number] = fronts
        self.send(BATCH, number, payload)
        return number

    def _flush(self) -> None:
        if self._gathers_now:
            self.flush_batches()
        super()._flush()

    # -- life --------------------------------------------------------------------------------------------------------

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
            client.is_fronted,
            client.continues,
        )
        self.send_message(OPEN, opening, number)

    def pause(self) -> None:
        """Send nothing more of the clients that are open: the core hands their sessions over, or ends them."""
        self.flush_batches()
        for client in self.clients.values():
            client.hold()
        self.send(PAUSED)

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the link behind the frames that were put off: they say which sessions go on."""
        rest, self._put_off = self._put_off, []
        self._handle(rest)
        super().connection_lost(error)

    def ended(self, reason: str) -> None:
        """Close all clients whose sessions are gone; those that the next core continues wait for it."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        if not self.welcome.done():
            if not self.received_bytes and self.transport.get_extra_info("ssl_object") is not None:
                reason = f"{reason} before its welcome; {UNKNOWN_CERTIFICATE}"
            self.welcome.set_exception(LinkError(reason))
        clients, self.clients = self.clients, {}
        gone = [client for client in clients.values() if not self._edge.keep(client, self.heard)]
        for client in gone:
            self._edge.drop(client, gently=True)
        if gone:
            self._loop.call_later(LAST_SECONDS, _abort, gone)
        self._edge.unlinked(self, reason)


def _abort(clients: list[Client]) -> None:
    """Close the clients that do not take what was written to them: their sockets would never close."""
    for client in clients:
        if not client.lost:
            client.abort()


class Edge:
    """Listeners of an edge, and its link to the core.

    While there is no link, clients that connect wait: at most `waiting_max`, each at most `waiting_seconds`, and as
    many of one address as `crowd` lets in without a proof of who they are. The caller finds the core, and calls
    `connect` again when `on_lost` was called.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        waiting_max: int = 0,
        waiting_seconds: float = 0.0,
        crowd: Crowd | None = None,
        on_connected: Callable[[Welcome], None] = lambda welcome: None,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_stop: Callable[[], None] = lambda: None,
        stand_in: Callable[[str], asyncio.Protocol | None] = lambda listener: None,
        make_fronts: Mapping[str, Callable[[bytes], Fronts]] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.load_again: Callable[[], None] = lambda: None
        """Loads the certificates again; called in a thread when the core wants it."""
        self.stand_in = stand_in
        """Returns who serves a client of a listener while there is no link, `None` if such clients wait."""
        self._on_connected, self._on_lost, self._on_stop = on_connected, on_lost, on_stop
        self._make_fronts = make_fronts
        """Makes fronts of the content of a `FrontPlan`, by listener."""
        self._fronts: dict[str, Fronts] = {}
        """Those of new clients: the core of this link takes their batches."""
        self._link: EdgeLink | None = None
        self.waiting = Waiting(waiting_max, waiting_seconds, crowd)
        """Clients that wait for a link."""
        self._servers: list[asyncio.Server] = []
        self._log = LimitedLog(log, clock)
        self._unsettled: list[Client] = []
        self._slow: list[Client] = []
        self._settle_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._open_count = 0
        self._all_closed: asyncio.Future[None] | None = None
        self._core_serves = False
        """Whether the core of the link takes clients: it may gather copies so far, or stop."""
        self._stops = False
        """Whether the core of the link, or of the one before, stops in order: copies of it are of no use."""

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
                make = partial(Client, self, listener)
                self._servers.append(await loop.create_server(make, sock=one, backlog=BACKLOG))

    def _fronted(self, client: Client) -> Client:
        """Return what takes the place of a client that comes to the core: one with a front, if its listener has any."""
        fronts = self._fronts.get(client.listener.name)
        return client if fronts is None or client.continues else FrontedClient(client, fronts)

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
                lambda: EdgeLink(self, silence_seconds=SILENCE_SECONDS, key=key),
                host,
                port,
                ssl=tls,
                server_hostname=name,
            )
            return await self._begin(link)

    async def connect_socket(self, connection: socket.socket) -> Welcome:
        """Return the welcome of the core at the other end of a socket pair; errors are those of `connect`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WELCOME_SECONDS):
            _, link = await loop.create_unix_connection(lambda: EdgeLink(self), sock=connection)
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
        self._link, self._core_serves, self._stops = link, False, False
        self._on_connected(welcome)
        serving = welcome.serving or link.serving
        if link.is_stopping:
            self.core_stops()
        elif serving is not None:
            self.core_serves(link, serving)
        else:
            for copy in self.waiting.copies():
                link.send(COPY, payload=copy.encode())
            link.send(COPIED)
        return welcome

    def core_serves(self, link: EdgeLink, serving: Serving) -> None:
        """Open the clients that have waited for a core that takes clients."""
        if self._link is not link or self._core_serves or self._stops:
            return
        self._core_serves = True
        made = self._make_fronts
        self._fronts = {name: made[name](content) for name, content in serving.fronts.items() if name in made}
        for client in self.waiting:
            self.waiting.remove(client)
            client.copy = None
            self._open(link, self._fronted(client))

    def _open(self, link: EdgeLink, client: Client) -> None:
        has_left = bool(client.continues) and client.has_left()
        link.open(client)
        if has_left:
            client.abort()
        elif client.continues:
            client.go_on()
        elif client.is_secure:
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

    def disconnect(self, reason: str = "this edge left") -> None:
        """End the link and the connections of its clients; listeners stay open. `on_lost` is not called."""
        link, self._link = self._link, None
        if link is not None:
            link.end(reason)

    async def leave_core(self, reason: str) -> None:
        """End the link and the connections of its clients, but for those that wait for the next core with a copy."""
        link = self._link
        self.disconnect(reason)
        if link is not None:
            await link.done

    def core_stops(self) -> None:
        """Handle that the core takes no further clients: close the listeners, or let clients wait for the next core."""
        self._stops = True
        if self.waiting.newcomers_max:
            self._core_serves = False
            if self._link is not None:
                self._link.pause()
        else:
            self.stop_accepting()

    def close_listeners(self) -> None:
        """Close the listeners; connections that are open stay open, and clients that wait for a link wait on."""
        while self._servers:
            self._servers.pop().close()

    def stop_accepting(self) -> None:
        """Close the listeners; connections that are open stay open."""
        self.close_listeners()
        for client in self.waiting:
            self.waiting.refuse(client)
        self._on_stop()

    async def stop(self) -> None:
        """Close listeners, link and clients."""
        self._on_stop = lambda: None
        self.stop_accepting()
        link, self._link = self._link, None
        if link is not None:
            await link.close("this edge stops")
        for client in self.waiting:  # for the next core, which this edge does not wait for
            self.waiting.refuse(client)
        for timer in (self._settle_timer, self._slow_timer):
            if timer is not None:
                timer.cancel()

    async def wait_closed(self, seconds: float | None = None) -> None:
        """Wait until all clients are closed, at most for some seconds if a number is given."""
        if self._open_count:
            self._all_closed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_closed], timeout=seconds)

    # -- clients -----------------------------------------------------------------------------------------------------

    def enter(self, client: Client) -> bool:
        """Open a client at the core, or keep it until there is a link, or refuse it."""
        self._open_count += 1
        connection = client.raw.get_extra_info("socket")
        if connection is not None and is_reserved(connection.fileno(), is_admin=client.listener.is_admin):
            self._refuse(client, "file descriptors run out; raise LimitNOFILE (ulimit -n)")
            return False
        if self._link is not None and self._core_serves:
            self._link.open(self._fronted(client))
            return True
        if client.listener.tls is None and client.stand_in():
            return False
        refusal = self.waiting.admit(client)
        if refusal is not None:
            self._refuse(client, f"no core is linked, and {refusal}")
            return False
        if client.listener.tls is None:
            # Not before the next turn: asyncio begins to read behind `connection_made`, paused or not.
            asyncio.get_running_loop().call_soon(self._hold, client)
        return True

    def keep(self, client: Client, heard: int) -> bool:
        """Keep a client whose session the next core continues; return whether it is one.

        All clients with a copy have heard the changes of the state up to an offset.
        """
        copy = client.copy
        if client.continues:
            client.copy = None  # the session was handed over: an owner that lives has not ended it
        elif copy is not None and self.waiting.newcomers_max and not self._stops:
            client.copy = copy._replace(heard=max(copy.heard, heard))
            client.continues = copy.id
        if not client.continues or client.lost or client.transport.is_closing():
            client.copy = None
            return False
        client.wait()
        self.waiting.keep(client)
        return True

    async def release(self) -> list[Client]:
        """Return the clients whose sessions go on at the next core, for another edge of this member; end the link."""
        if self._link is not None:
            self._link.end("this member gives the data away")
            await self._link.done
        clients = [client for client in self.waiting if client.continues]
        for client in clients:
            self.waiting.remove(client)
            self._open_count -= 1
            client.entered = client.settling = False
        return clients

    def adopt(self, clients: Iterable[Client]) -> None:
        """Keep clients whose sessions have begun at this member until there is the core that continues them."""
        for client in clients:
            if client.lost:
                continue
            client.edge = self
            client.entered = True
            self._open_count += 1
            self.waiting.keep(client)

    def _hold(self, client: Client) -> None:
        if client in self.waiting:
            client.pause()

    def _refuse(self, client: Client, text: str) -> None:
        peer = name_of(client.raw.get_extra_info("peername"))
        self._log.write(logging.WARNING, "refused", "%s %s: refused: %s", client.listener.name, peer, text)
        client.raw.abort()

    def leave(self, client: Client, loss: Loss) -> None:
        """Send to the core that a client is gone."""
        if client.entered:
            client.entered = False
            self._open_count -= 1
            if not self._open_count and self._all_closed is not None and not self._all_closed.done():
                self._all_closed.set_result(None)
        if client in self.waiting:
            self.waiting.remove(client)
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
