"""Sockets of the kind SOCK_SEQPACKET: batches of packets in and out, no client waits for a slow one.

One turn of the event loop takes up to `BATCH` packets of one client (mmsg.py). Packets that a receiver's socket does
not take wait in its backlog; the receiver's policy (`Flow`) says what happens when that is full. No task per packet.
"""

import asyncio
import errno
import itertools
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from babelbus.config import SbusSettings
from babelbus.core.access import Identity
from babelbus.core.flow_policy import NOTHING, Bound, Flow
from babelbus.descriptors import is_reserved
from babelbus.errors import RemoteProtocolError
from babelbus.listening.connections import ConnectionInfo, SubscriptionInfo
from babelbus.protocols.sbus.credentials import Credentials
from babelbus.protocols.sbus.hub import PROTOCOL, Hub
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.protocols.sbus.packets.backlog import Backlog
from babelbus.protocols.sbus.packets.listeners import OpenDoor, credentials_of
from babelbus.protocols.sbus.packets.mmsg import BATCH, Exchange
from babelbus.protocols.sbus.ports import Port
from babelbus.protocols.sbus.session import Session
from babelbus.wire.packets import Packets

if TYPE_CHECKING:
    from babelbus.metrics import Metrics

log = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 204_816
"""The kernel doubles it to 409,632, which lets exactly 409,600 bytes through (docs/specifications/sbus.md, 10)."""
ACCEPTS_MAX = 64
"""Connections that one turn accepts of one door."""
ACCEPT_PAUSE_SECONDS = 0.5
"""How long a door stays shut when there are no descriptors left."""
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class PacketServer:
    """All doors and connections of one bus. Its calls, and those of its connections, come from one event loop."""

    def __init__(
        self,
        hub: Hub,
        metrics: "Metrics",
        settings: SbusSettings,
        on_login: Callable[[Identity], None] = lambda principal: None,
    ) -> None:
        self.hub = hub
        self._on_login = on_login
        self.metrics = metrics
        self.bound = Bound(settings.queue_bytes_max, settings.queue_packets_max)
        self.flow = Flow(settings.soft, settings.hard, settings.order)
        """The policy that a client starts with."""
        self._connections_max = settings.connections_max
        self.loop = asyncio.get_running_loop()
        self.exchange = Exchange(PACKET_BYTES_MAX)
        self.connections: set[PacketConnection] = set()
        self.on_empty: Callable[[], None] = lambda: None
        """Called when the last connection has gone."""
        self.numbers = itertools.count(1)
        self._doors: list[OpenDoor] = []
        metrics.connections_max.labels(PROTOCOL).set(settings.connections_max)
        metrics.outbox_bytes_max.labels(PROTOCOL).set(settings.queue_bytes_max)
        metrics.outbox_bytes.labels(PROTOCOL).set_function(lambda: self.waiting_bytes)
        self._count_open = metrics.connections.labels(PROTOCOL)
        self._count_accepted = metrics.connections_total.labels(PROTOCOL)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for all receivers."""
        return sum(one.backlog.size_bytes for one in list(self.connections))

    def listen(self, door: OpenDoor) -> None:
        """Add a door, and open it to connections."""
        self._doors.append(door)
        self.loop.add_reader(door.listener.fileno(), self._accept, door)

    def _accept(self, door: OpenDoor) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                connection, _address = door.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: nothing is gained by trying at once
                log.warning("%s: cannot accept: %s", PROTOCOL, error)
                self.loop.remove_reader(door.listener.fileno())
                self.loop.call_later(ACCEPT_PAUSE_SECONDS, self._open_again, door)
                return
            self._admit(door, connection)

    def _open_again(self, door: OpenDoor) -> None:
        if door in self._doors:
            self.loop.add_reader(door.listener.fileno(), self._accept, door)

    def _admit(self, door: OpenDoor, connection: socket.socket) -> None:
        credentials = credentials_of(connection)
        reason = ""
        if not door.lets_in(credentials):
            reason = "identity"
        elif len(self.connections) >= self._connections_max:
            reason = "limit"
        elif is_reserved(connection.fileno()):
            reason = "descriptors"
        if reason:
            log.info("%s: refused uid %d pid %d: %s", PROTOCOL, credentials.uid, credentials.pid, reason)
            self.metrics.connections_refused_total.labels(PROTOCOL, reason).inc()
            connection.close()
            return
        connection.setblocking(False)
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * SEND_BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        made = PacketConnection(self, connection, credentials)
        self.connections.add(made)
        self._on_login(made.principal)
        self._count_open.inc()
        self._count_accepted.inc()

    def forget(self, connection: "PacketConnection") -> None:
        """Record that a connection has closed."""
        self.connections.discard(connection)
        self._count_open.dec()
        if not self.connections:
            self.on_empty()

    def access_changed(self) -> None:
        """Update who each client is; clients whose principal is gone are disconnected."""
        for connection in list(self.connections):
            if connection.access_changed():
                log.info("%s %s: closing: its principal is gone", PROTOCOL, connection.name)
                connection.close()
        self.hub.router.forget_all()

    def close_doors(self) -> None:
        """Close the doors."""
        for door in self._doors:
            self.loop.remove_reader(door.listener.fileno())
            door.close()
        self._doors.clear()

    def stop_reading(self) -> None:
        """Read nothing more; packets that wait for receivers are still sent."""
        self.close_doors()
        for connection in self.connections:
            connection.stop_reading()

    def close(self) -> None:
        """Close everything."""
        self.close_doors()
        self.on_empty = lambda: None
        for connection in list(self.connections):
            connection.close()
        self.exchange.close()


class PacketConnection:
    """One client: its socket, its backlog, and who waits for whom. It is its session's `Port`."""

    def __init__(self, server: PacketServer, connection: socket.socket, credentials: Credentials) -> None:
        self._server = server
        self._loop = server.loop
        self._exchange = server.exchange
        self._socket = connection
        self._descriptor = connection.fileno()
        self._bound = server.bound
        self.backlog = Backlog()
        self.flow = server.flow
        self.closed = False
        self._deaf = False
        self._reading = True
        self._writing = False
        self._was_reset = False
        self._halted = False
        self._held = False
        self._stopped_by: set[PacketConnection] = set()
        self._stopping: set[PacketConnection] = set()
        self.number = next(server.numbers)
        self._began = server.loop.time()
        self.name = f"pid {credentials.pid} uid {credentials.uid}"
        self._session = Session(server.hub, self, credentials)
        self._loop.add_reader(self._descriptor, self._readable)

    @property
    def principal(self) -> Identity:
        """The identity of the client."""
        return self._session.principal

    @property
    def peer(self) -> str:
        """The process of the client."""
        return self.name

    @property
    def principal_name(self) -> str | None:
        """Name of the principal of the process."""
        return self.principal.name or None

    def describe(self) -> ConnectionInfo:
        """Return the figures of the connection. Nobody counts the bytes to one client: that would cost each packet."""
        subscriptions = [SubscriptionInfo(*one) for one in self._session.subscriptions]
        open_seconds = self._loop.time() - self._began
        received = self._session.received_bytes
        return ConnectionInfo(open_seconds, received, None, self.backlog.size_bytes, False, subscriptions)

    def abort(self) -> None:
        """Close at once."""
        self.close()

    def access_changed(self) -> bool:
        """Update who the client is; return whether the client has to go."""
        return self._session.access_changed()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        if not self.closed:
            self._read()

    def _read(self) -> bool:
        """Handle one batch; return whether there may be more."""
        try:
            count = self._exchange.receive(self._descriptor)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.ECONNRESET and not self._was_reset:
                self._was_reset = True  # told once by the kernel; what was sent before is still there
                return True
            self.close()
            return False
        packets = self._exchange.packets
        ended = 0 in packets.sizes
        if ended:  # an empty packet is no packet of the protocol, and looks like the end
            count = packets.sizes.index(0)
        try:
            self._receive(packets, count)
        except RemoteProtocolError as error:
            log.info("%s %s: closing: %s", PROTOCOL, self.name, error)
            self._server.metrics.protocol_errors_total.labels(PROTOCOL).inc()
            ended = True
        except Exception:
            log.exception("%s %s: internal error, closing", PROTOCOL, self.name)
            ended = True
        if ended:
            self.close()
        return not ended and count == BATCH

    def _receive(self, packets: Packets, count: int) -> None:
        first = 0
        if count and max(packets.sizes) > PACKET_BYTES_MAX:
            for number in range(count):
                if packets.sizes[number] > PACKET_BYTES_MAX:  # both sides stay connected (section 10)
                    self._server.hub.drop("oversized", 1)
                    self._session.receive(packets, first, number)
                    first = number + 1
        self._session.receive(packets, first, count)

    def wait_for(self, other: Port) -> None:
        """Read no more until `other` has taken enough."""
        assert isinstance(other, PacketConnection)
        if self.closed or self._deaf or other.closed:
            return
        self._stopped_by.add(other)
        other._stopping.add(self)
        self._pause()

    def hold(self, holds: bool) -> None:
        """Read no more until the call that holds it no longer."""
        if holds == self._held:
            return
        self._held = holds
        if holds:
            self._pause()
        else:
            self._resume()

    def stop_reading(self) -> None:
        """Read no more at all."""
        self._halted = True
        self._pause()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _go_on(self, other: "PacketConnection") -> None:
        self._stopped_by.discard(other)
        self._resume()

    def _resume(self) -> None:
        if not (self._stopped_by or self._held or self._reading or self.closed or self._halted):
            self._reading = True
            self._loop.add_reader(self._descriptor, self._readable)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, packets: Packets, first: int, last: int, *, stoppable: bool) -> bool:
        """Send at once what the socket takes; do with the rest what the client's flow policy says."""
        if self._deaf:
            return False
        begin = first
        if not self.backlog:
            first = self._push(packets, first, last)
            if first == last:
                return False
        soft = self.flow.soft
        if soft == "discard":
            self._server.hub.drop("soft", last - first)
            return False
        if soft == "error":
            log.info("%s %s: closing: it does not take what it subscribed to", PROTOCOL, self.name)
            self._lose()
            return False
        if packets.fleeting:
            packets, first, last = packets.packed(begin, last), first - begin, last - begin
        return self._keep(packets, first, last, stoppable)

    def _keep(self, packets: Packets, first: int, last: int, stoppable: bool) -> bool:
        bound = NOTHING if self.flow.soft == "block" else self._bound
        hard = "block" if self.flow.soft == "block" else self.flow.hard
        backlog = self.backlog
        must_stop = False
        if hard == "block" and stoppable:
            # All of the run is taken and its sender stopped: nothing is lost, and nothing overtakes. So the bound may
            # be passed by what one client had under way, for each client that waits.
            backlog.put(packets, first, last)
            must_stop = backlog.exceeds(bound)
        else:
            if hard == "block":  # nobody to stop: the events of other protocols wait as long as there is room
                bound = self._bound
            end = self._fitting(packets, first, last, bound)
            if end > first:
                backlog.put(packets, first, end)
            if end < last and hard == "error":
                log.info("%s %s: closing: its queue is full", PROTOCOL, self.name)
                self._lose()
                return False
            if end < last:
                self._server.hub.drop("hard", last - end)
        if backlog and not self._writing:
            self._writing = True
            self._loop.add_writer(self._descriptor, self._writable)
        return must_stop

    def _fitting(self, packets: Packets, first: int, last: int, bound: Bound) -> int:
        size_bytes, count = self.backlog.size_bytes, self.backlog.count
        for number in range(first, last):
            size_bytes += packets.sizes[number]
            count += 1
            if size_bytes > bound.size_bytes or count > bound.count:
                return number
        return last

    def reply(self, packet: bytes) -> None:
        """Send an answer, behind all that waits; it is never dropped."""
        if self._deaf:
            return
        packets = Packets.of([packet])
        if self.backlog or self._push(packets, 0, 1) == 0:
            self.backlog.put(packets, 0, 1, control=True)
            if self.backlog.exceeds(self._bound):
                self.wait_for(self)
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._descriptor, self._writable)

    def _push(self, packets: Packets, first: int, last: int) -> int:
        """Return to the kernel what it takes; return where it stopped, and `last` if the client is gone."""
        while first < last:
            sent, error = self._exchange.send(self._socket, packets, first, last)
            first += sent
            if not error:
                continue
            if error in _FULL:
                break
            if error == errno.EMSGSIZE:
                self._server.hub.drop("too_long_for_receiver", 1)
                first += 1
                continue
            if error != errno.EINTR:
                self._lose()
                return last
        return first

    def _writable(self) -> None:
        backlog = self.backlog
        while backlog:
            order = self.flow.order
            packets, first, last = backlog.next(order)
            reached = self._push(packets, first, last)
            if not backlog:  # the client is gone, and with it what waited
                return
            if reached > first:
                backlog.take(order, reached - first)
            if reached < last:
                break
        if not backlog:
            self._stop_writing()
        self._release()

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop the packets that wait for the client and are not wanted."""
        dropped = self.backlog.keep(wanted) if self.backlog else 0
        if dropped:
            self._server.hub.drop("refused", dropped)
            if not self.backlog:
                self._stop_writing()
            self._release()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)

    def _release(self) -> None:
        """Resume the clients that wait for this one, once a good part of its queue is free."""
        if not self._stopping:
            return
        bound = self._bound
        roomy = self.backlog.size_bytes <= bound.size_bytes // 2 and self.backlog.count <= bound.count // 2
        if self._deaf or not self.backlog or (roomy and self.flow.soft != "block"):
            self._resume_all()

    def flow_changed(self) -> None:
        """Resume the clients that wait for this one, if its policy stops nobody any more."""
        if self.flow.soft in ("discard", "error") or self.flow.hard != "block":
            self._resume_all()

    def _resume_all(self) -> None:
        stopping, self._stopping = self._stopping, set()
        for connection in stopping:
            connection._go_on(self)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        """Drop what waits for the client, handle what it sent, then close; not at once: its session may be at work."""
        if self._deaf:
            return
        self._deaf = True
        self.backlog.clear()
        self._stop_writing()
        self._session.close()
        self._release()
        self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        while not self.closed and self._read():
            pass
        self.close()

    def close(self) -> None:
        """Close at once."""
        if self.closed:
            return
        self.closed = self._deaf = True
        self.backlog.clear()
        self._stop_writing()
        self._pause()
        for other in self._stopped_by:
            other._stopping.discard(self)
        self._stopped_by.clear()
        self._release()
        self._session.close()
        self._socket.close()
        self._server.forget(self)
