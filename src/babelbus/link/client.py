"""The clients of an edge: their sockets, their TLS, what of their bytes is on its way, and their fronts."""

import asyncio
import select
import socket
from typing import Any, Protocol

import msgspec

from babelbus.link.frames import (
    BLOCKED,
    EOF,
    SECURE,
    TAKEN,
    TLS_RECORD_BYTES_MAX,
    WINDOW_BYTES,
    Copy,
    LinkError,
    Loss,
    Secured,
)
from babelbus.listening.certificates import Tls, explain
from babelbus.listening.fronts import Fronts

QUANTUM_BYTES = 16 * 1024
"""So many bytes that a client has taken are counted at once."""
UNTAKEN_BYTES_MAX = 1024 * 1024
"""Bytes of its front that a client has not taken, and at which it is not read any more."""


class ClientLink(Protocol):
    """The link of an edge, as its clients see it."""

    clients: "dict[int, Client]"

    def send(self, kind: int, connection: int = 0, payload: bytes = b"", taken: int = 0) -> None:
        """Send a frame at the end of this turn."""

    def send_data(self, connection: int, taken: int, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of a client at the end of this turn."""

    def send_message(self, kind: int, message: msgspec.Struct, connection: int = 0) -> None:
        """Send a frame whose payload is a message.

        Raises:
            LinkError: the message is too long for a frame.
        """

    def gather(self, fronts: Fronts, listener: str, *, later: bool = False) -> None:
        """Send the batches of the fronts of a listener at the end of this turn, or soon."""

    def flush_batches(self) -> None:
        """Send all batches now."""


class ClientEdge(Protocol):
    """The edge, as its clients see it."""

    def enter(self, client: "Client") -> bool:
        """Open a client at the core, or keep it until there is a link, or refuse it."""

    def leave(self, client: "Client", loss: Loss) -> None:
        """Send to the core that a client is gone."""

    def stand_in(self, listener: str) -> asyncio.Protocol | None:
        """Return what serves a client in place of the core, `None` if nothing does."""

    def settle_later(self, client: "Client") -> None:
        """Count soon what a client has taken."""


class EdgeListener(msgspec.Struct, frozen=True):
    """A listener that an edge opens for the core: its name there, its sockets here."""

    name: str
    sockets: list[socket.socket]
    tls: Tls | None = None
    handshake_seconds: float = 10.0
    is_admin: bool = False
    """Whether clients may take the descriptors that are kept for the administration."""


class Client(asyncio.Protocol):
    """One client of an edge. Its TLS is done before its bytes come here."""

    is_fronted = False
    """Whether a front proves who the client is."""

    __slots__ = (
        "blocked",
        "continues",
        "copy",
        "delivered",
        "early",
        "edge",
        "entered",
        "eof",
        "handshake",
        "held",
        "is_secure",
        "link",
        "listener",
        "lost",
        "number",
        "outstanding",
        "paused",
        "raw",
        "sent_bytes",
        "settling",
        "timer",
        "told",
        "transport",
    )

    def __init__(self, edge: "ClientEdge", listener: EdgeListener) -> None:
        self.edge = edge
        self.listener = listener
        self.link: ClientLink | None = None
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
        """Bytes that came with the last ones of the handshake, or while there was no core to take them."""
        self.held = False
        """Whether the core stops, and takes nothing more."""
        self.continues = ""
        """The id of the session that the core has handed over to the next one."""
        self.copy: Copy | None = None
        """The copy of its session, until the next byte."""
        self.sent_bytes = 0
        """Bytes that were sent to the core over this link."""
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

    @classmethod
    def of_session(cls, transport: Any, listener: EdgeListener, session_id: str) -> "Client":
        """Return the client of a connection whose session goes on at the next core; see `Edge.adopt`."""
        client = cls(_NO_EDGE, listener)
        client.transport = client.raw = transport
        client.is_secure = True
        client.continues = session_id
        transport.set_protocol(client)
        client.wait()
        return client

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
        # Below a TLS that is paused asyncio reads on, and hands all of it over at once when it is resumed.
        encrypted.set_read_buffer_limits(TLS_RECORD_BYTES_MAX, TLS_RECORD_BYTES_MAX)
        self.transport = encrypted
        self.is_secure = True
        if self.link is None and self.stand_in():
            return
        if self.link is not None:
            self.begin_secure()
        if self.link is None or self.held:
            self.pause()

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
        if link is None or not self.is_secure or self.held:
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
        self.copy = None
        self.sent_bytes += size
        self.outstanding += size
        if self.outstanding >= WINDOW_BYTES and not self.paused:
            self.pause()

    def pause(self) -> None:
        """Read no more from the client."""
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        """Read on, unless the core stops."""
        if self.paused and not self.held:
            self.paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def hold(self) -> None:
        """Send nothing of the client to this core any more."""
        self.held = True
        if self.is_secure and not self.paused:
            self.pause()

    def wait(self) -> None:
        """Wait for a link to the next core."""
        self.link = None
        self.number = self.outstanding = self.delivered = self.told = self.sent_bytes = 0
        self.blocked = False
        self.held = True
        if not self.paused:
            self.pause()

    def has_left(self) -> bool:
        """Return whether the client has closed its connection, which nobody has read for a while.

        Its last requests must not be carried out any more: it may have sent newer ones over another connection.
        """
        poller = select.poll()
        poller.register(self.raw.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poller.poll(0))

    def go_on(self) -> None:
        """Send to the core of a new link what has come meanwhile, and read on."""
        self.held = False
        self.continues = ""
        self.send_early()
        self.resume()

    def eof_received(self) -> bool:
        """Send the end of what the client sends to the core, which decides when to close."""
        self.eof = True
        self.copy = None
        if self.link is not None and self.is_secure and not self.held:
            self.link.send(EOF, self.number)
        return bool(self.transport.can_write_eof())

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
        self.copy = None
        self.transport.write(data)
        self.count_delivered(len(data))

    def count_delivered(self, size_bytes: int) -> None:
        """Count bytes of the core that were written to the client."""
        self.delivered += size_bytes
        if self.delivered - self.told >= QUANTUM_BYTES:
            self.settle()
        if not self.settling:
            self.settling = True
            self.edge.settle_later(self)

    def keep_copy(self, copy: Copy | None) -> None:
        """Keep a copy of the session, unless bytes of the client were on their way when the core made it.

        `None` withdraws the last one.
        """
        is_true = copy is not None and copy.received_bytes == self.sent_bytes and not (self.early or self.eof)
        self.copy = copy if is_true else None

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

    def close(self) -> None:
        """Close behind what was written."""
        self.copy = None
        self.transport.close()

    def end_output(self) -> None:
        """Send the end of what is sent."""
        self.copy = None
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


class _NoEdge:
    """The edge of a client between two edges of its member."""

    def enter(self, client: Client) -> bool:
        return False

    def leave(self, client: Client, loss: Loss) -> None:
        return

    def stand_in(self, listener: str) -> asyncio.Protocol | None:
        return None

    def settle_later(self, client: Client) -> None:
        return


_NO_EDGE = _NoEdge()


class FrontedClient(Client):
    """A client with a front between its bytes and those of the core; the `Way` of that front."""

    is_fronted = True

    __slots__ = ("choked", "front", "fronts", "stopped", "untaken")

    def __init__(self, client: Client, fronts: Fronts) -> None:
        """Build the client with a front for its core that takes the place of one without, which no core knows."""
        super().__init__(client.edge, client.listener)
        self.transport = self.raw = client.transport
        self.early, self.eof, self.paused = client.early, client.eof, client.paused
        self.transport.set_protocol(self)
        self.fronts = fronts
        self.front = fronts.make(self)
        self.untaken = 0
        """At most so many bytes of the front were not taken."""
        self.choked = False
        """Whether that is too much."""
        self.stopped = False
        """Whether the front wants nothing."""

    def data_received(self, data: bytes) -> None:
        """Send bytes of the client to its front, which has no core to send them on to while the core changes."""
        if self.link is None or self.held:
            self.early.append(data)
        else:
            self.front.receive_data(data)

    def deliver(self, data: bytes, taken: int) -> None:
        """Send bytes of the core to the front."""
        if taken:
            self.take(taken)
        self.front.deliver(data)

    def close(self) -> None:
        """Close behind what the front has to write."""
        self.front.close()

    def eof_received(self) -> bool:
        """Send the end of what the client sends to the core, behind its batch."""
        self._send_batch()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Send to the core that the client is gone, behind its batch."""
        self._send_batch()
        super().connection_lost(error)

    def resume(self) -> None:
        """Read on, unless the front or the client takes nothing."""
        if not self.choked and not self.stopped:
            super().resume()

    def resume_writing(self) -> None:
        """Read on: the client has taken enough."""
        self.settle()
        if self.choked:
            self.choked = False
            self.untaken = 0
            if self.outstanding < WINDOW_BYTES:
                self.resume()

    def _send_batch(self) -> None:
        if self.front.unsent:
            self.flush()

    # -- the way of the front ------------------------------------------------------------------------------------------

    def forward(self, data: bytes) -> None:
        """Send bytes to the session."""
        if self.link is not None and not self.held:
            self._send_batch()
            super().data_received(data)

    def gather(self, *, later: bool = False) -> None:
        """Send the batches at the end of this turn, or later."""
        if self.link is not None:
            self.link.gather(self.fronts, self.listener.name, later=later)

    def flush(self) -> None:
        """Send the batches."""
        if self.link is not None:
            self.link.gather(self.fronts, self.listener.name)
            self.link.flush_batches()

    def write(self, data: bytes | bytearray, delivered_bytes: int = 0) -> None:
        """Write bytes to the client."""
        transport = self.transport
        if transport.is_closing():
            return
        transport.write(data)
        if delivered_bytes:
            self.count_delivered(delivered_bytes)
            return
        self.untaken += len(data)
        if self.untaken >= UNTAKEN_BYTES_MAX and not self.choked:
            self.untaken = min(self.untaken, transport.get_write_buffer_size())
            if self.untaken >= UNTAKEN_BYTES_MAX:
                self.choked = True
                self.pause()

    def pause_front(self) -> None:
        """Read no more until the front wants bytes."""
        self.stopped = True
        self.pause()

    def resume_front(self) -> None:
        """Read on."""
        self.stopped = False
        self.resume()

    def end(self) -> None:
        """Close behind what was written."""
        self.transport.close()
