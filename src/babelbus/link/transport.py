"""The socket of a client of an edge, as the core has it: an asyncio transport over a link."""

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

from babelbus.link.frames import ABORT, CLOSE, DATA, EOF, READ_BYTES_MAX, TAKEN, WINDOW_BYTES, LinkError, Secured
from babelbus.listening.door import name_of
from babelbus.units import MIB

log = logging.getLogger(__name__)

HIGH_BYTES = 64 * 1024
"""Bytes that wait for the client before its protocol is told to pause, unless the protocol sets a limit: asyncio's."""

PASSED_BYTES_MAX = MIB
"""Bytes of one client at its edge, or on their way there, at which further writes wait here: an event for many slow
clients is one object here, and a copy for each of them at the edges. A write is never cut: a front needs whole frames.
"""
FRONT_BYTES_MAX = 32 * 1024
"""Bytes that a front may have held back, and sends behind one read of the edge."""


class Link(Protocol):
    """The core's end of a link, as its transports see it."""

    def send(self, kind: int, connection: int = 0, payload: bytes = b"", taken: int = 0) -> None:
        """Send a frame at the end of this turn."""

    def send_data(self, connection: int, taken: int, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of a connection at the end of this turn."""

    def forget(self, transport: "LinkedTransport") -> None:
        """Drop a transport that is closed here."""

    def exceed(self, transport: "LinkedTransport") -> None:
        """Close a transport whose edge sends more than its window."""


class Absence:
    """The link of a client whose edge has not come yet: keeps what is sent to the client."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes, int]] = []
        """Kind, payload and `taken` of each frame."""

    def send(self, kind: int, connection: int = 0, payload: bytes = b"", taken: int = 0) -> None:
        """Keep a frame."""
        self.frames.append((kind, payload, taken))

    def send_data(self, connection: int, taken: int, data: bytes | bytearray | memoryview) -> None:
        """Keep bytes of the connection."""
        self.frames.append((DATA, bytes(data), taken))

    def forget(self, transport: "LinkedTransport") -> None:
        """Return: no link knows the transport."""

    def exceed(self, transport: "LinkedTransport") -> None:
        """Return: nothing comes from a client without a link."""


class LinkedTls:
    """The TLS of a client, which ends at the edge: the part of an `ssl.SSLObject` that is asked for."""

    def __init__(self, secured: Secured) -> None:
        self._secured = secured

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Return the certificate of the client in DER, or its fields; `None` if the client showed none."""
        return (self._secured.certificate if binary_form else self._secured.fields) or None


class LinkedTransport(asyncio.Transport):
    """One client of an edge.

    `get_write_buffer_size` counts the bytes that the client has not taken yet, wherever they wait: so the bounds of an
    outbox hold as over a socket. Data that comes while reading is paused waits here, at most `WINDOW_BYTES`: the edge
    reads no more from the client then. Data for the client waits here, too, from `PASSED_BYTES_MAX` on.
    """

    __slots__ = (
        "__weakref__",
        "_behind",
        "_closing",
        "_consumed",
        "_eof_received",
        "_eof_sent",
        "_facts",
        "_has_ended",
        "_high",
        "_link",
        "_loop",
        "_lost",
        "_low",
        "_passed_bytes",
        "_protocol",
        "_reading",
        "_waiting",
        "_wants_room",
        "blocked",
        "held",
        "held_bytes",
        "number",
        "received_bytes",
        "unsent_bytes",
        "written_bytes",
    )

    def __init__(self, link: Link, number: int, protocol: asyncio.Protocol | None, extra: dict[str, Any]) -> None:
        super().__init__(extra)
        self._facts = extra
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._protocol = protocol
        self.number = number
        self.received_bytes = self.written_bytes = 0
        """Bytes that have come from the client, and bytes for it, since it came over this link."""
        self.unsent_bytes = 0
        """Bytes that were written, and that the client has not taken as far as the edge has said."""
        self._passed_bytes = 0
        """Of those, bytes that are at the edge or on their way."""
        self._waiting: deque[bytes] = deque()
        """The others, as they were written."""
        self._behind: list[int] = []
        """Frames behind those that wait: the end of what is sent, or of the connection."""
        self.blocked = False
        """Whether the edge has said that the client does not take what was sent."""
        self.held: deque[bytes] = deque()
        """Data that came while reading was paused."""
        self.held_bytes = 0
        self._consumed = 0
        """Bytes that the protocol has taken, and that the edge has not been told of."""
        self._reading = True
        self._closing = False
        self._lost = False
        self._has_ended = False
        """Whether the client sends nothing more."""
        self._eof_received = False
        """Whether the protocol has to be told so."""
        self._eof_sent = False
        self._wants_room = False
        """Whether the protocol has paused its writing."""
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4

    @classmethod
    def absent(cls, extra: dict[str, Any], data: bytes = b"") -> "LinkedTransport":
        """Return the transport of a client whose edge has not come yet, and for which these bytes wait."""
        transport = cls(Absence(), 0, None, extra)
        if data:
            transport.unsent_bytes = len(data)
            transport._wants_room = True  # the protocol did not write them, so it is not asked to pause
            transport._pass(data)
        return transport

    @property
    def unclaimed(self) -> bytes | None:
        """The bytes that wait for a client whose edge has not come; `None` if it has, or if more than bytes waits."""
        absence = self._link
        if not isinstance(absence, Absence) or any(kind != DATA for kind, _, _ in absence.frames):
            return None
        return b"".join(payload for _, payload, _ in absence.frames)

    def attach(self, link: Link, number: int, edge: str) -> None:
        """Continue over the link to the edge of the client, which has come: until now it was absent.

        The protocol is called as one whose peer has taken what was sent.
        """
        absence = self._link
        assert isinstance(absence, Absence), "the client has a link"
        self._link, self.number = link, number
        self._facts["edge"] = edge
        for kind, payload, taken in absence.frames:
            if kind == DATA:
                link.send_data(number, taken, payload)
            else:
                link.send(kind, number, payload, taken)
        self._call_for_more()

    @property
    def is_settled(self) -> bool:
        """Whether nothing of the client waits here, in either direction."""
        return self._reading and not (self.held or self._waiting or self._closing or self._has_ended)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost

    def leave(self) -> None:
        """Drop the protocol without a call: the session goes on elsewhere."""
        self._protocol = None
        self._lost = self._closing = True

    # -- what comes from the edge ------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Send data of the client to the protocol, or keep it while reading is paused; drop what is behind its end."""
        if self._has_ended:
            return
        self.received_bytes += len(data)
        if self._reading and not self.held:
            self._deliver(data)
            return
        self.held.append(data)
        self.held_bytes += len(data)
        if self.held_bytes > WINDOW_BYTES + READ_BYTES_MAX + FRONT_BYTES_MAX:
            self._link.exceed(self)

    def receive_aside(self, data: bytes) -> None:
        """Send data to the protocol that the edge has not counted as data: see `listening.fronts.Linked`."""
        self._consumed -= len(data)
        self.receive_data(data)

    @property
    def protocol(self) -> asyncio.Protocol | None:
        """The protocol; `None` before the client is let in, and when it is gone."""
        return self._protocol

    @property
    def idle_protocol(self) -> asyncio.Protocol | None:
        """The protocol, if it reads and nothing waits, for it or for the client: answers aside overtake nothing."""
        waits = self.held or self._waiting
        return self._protocol if self._reading and not waits and not self._closing else None

    def receive_eof(self) -> None:
        """Handle that the client sends nothing more."""
        if self._has_ended:
            return
        self._has_ended = self._eof_received = True
        if self._reading and not self.held:
            self._end_input()

    def receive_taken(self, size_bytes: int) -> None:
        """Count bytes that the client has taken.

        Raises:
            LinkError: more bytes than were sent.
        """
        self.blocked = False
        self.unsent_bytes -= size_bytes
        self._passed_bytes -= size_bytes
        if self._passed_bytes < 0:
            raise LinkError("a client has taken more bytes than were sent")
        if self._waiting:
            self._pass_on()
        if self._wants_room and self.unsent_bytes <= self._low:
            self._wants_room = False
            self._call_for_more()

    def _call_for_more(self) -> None:
        assert self._protocol is not None
        try:
            self._protocol.resume_writing()
        except Exception as error:
            self.fail(error)

    def lose(self, error: Exception | None) -> None:
        """Call the protocol, in the next turn, because the client is gone."""
        if self._lost:
            return
        self._lost = self._closing = True
        self.held.clear()
        self.held_bytes = 0
        self._waiting.clear()
        self._behind.clear()
        self.unsent_bytes = self._passed_bytes = 0
        self._loop.call_soon(self._call_lost, error)

    def fail(self, error: Exception) -> None:
        """Close at once because a call of the protocol failed: a defect of ours, which no other client may feel."""
        peer, edge = name_of(self._facts.get("peername")), self._facts.get("edge")
        log.error("client %s of edge %s: its connection ends, because its session failed", peer, edge, exc_info=error)
        self._end(error)

    def _call_lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def _deliver(self, data: bytes) -> None:
        if self._closing:
            return
        self._consumed += len(data)
        if self._consumed >= WINDOW_BYTES // 2:
            self._link.send(TAKEN, self.number, taken=self._consumed)
            self._consumed = 0
        assert self._protocol is not None
        try:
            self._protocol.data_received(data)
        except Exception as error:
            self.fail(error)

    def _deliver_held(self) -> None:
        held = self.held
        while held and self._reading and not self._lost:
            data = held.popleft()
            self.held_bytes -= len(data)
            self._deliver(data)
        if not held and self._reading and self._eof_received:
            self._end_input()

    def _end_input(self) -> None:
        """Call the protocol: no data comes any more; close, unless it wants to go on writing."""
        self._eof_received = False
        if self._closing or self._protocol is None:
            return
        try:
            if not self._protocol.eof_received():
                self.close()
        except Exception as error:
            self.fail(error)

    def secure(self, tls: LinkedTls) -> None:
        """Set that the client speaks TLS with the edge."""
        self._facts["ssl_object"] = tls

    # -- the transport -----------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        assert self._protocol is not None, "the connection is gone"
        return self._protocol

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._closing

    def is_blocked(self) -> bool:
        """Return whether the client does not take what was sent: see `listening.transports.is_blocked`.

        Many bytes count before the edge has said what the client takes of them: they may wait there for long.
        """
        return self.blocked or self.unsent_bytes > HIGH_BYTES

    def is_reading(self) -> bool:
        """Return whether data goes to the protocol."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Keep data of the client, and let the edge stop to read when it has sent its window."""
        self._reading = False

    def resume_reading(self) -> None:
        """Send data to the protocol again, from the next turn on."""
        if self._closing or self._reading:
            return
        self._reading = True
        if self.held or self._eof_received:
            self._loop.call_soon(self._deliver_held)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set above which size of what waits the protocol pauses, and at which size it resumes."""
        if high is None:
            high = HIGH_BYTES if low is None else 4 * low
        self._high = high
        self._low = high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return both limits."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the client has not taken yet."""
        return self.unsent_bytes

    def write(self, data: Any) -> None:
        """Send bytes to the client."""
        if self._closing or self._eof_sent or not data:
            return
        self.unsent_bytes += len(data)
        self.written_bytes += len(data)
        if self._passed_bytes < PASSED_BYTES_MAX:
            self._pass(data)
        else:
            self._waiting.append(bytes(data))  # no copy of bytes; its writer may change another buffer
        if self.unsent_bytes > self._high and not self._wants_room:
            self._wants_room = True
            assert self._protocol is not None
            try:
                self._protocol.pause_writing()
            except Exception as error:  # of the session of this client, while that of another one writes
                self.fail(error)

    def _pass(self, data: Any) -> None:
        """Send bytes to the edge, with the count of those that were taken here."""
        taken = max(0, self._consumed)
        self._consumed -= taken
        self._passed_bytes += len(data)
        self._link.send_data(self.number, taken, data)

    def _pass_on(self) -> None:
        """Send bytes that wait, as long as the edge has room, and what is behind them."""
        waiting = self._waiting
        while waiting and self._passed_bytes < PASSED_BYTES_MAX:
            self._pass(waiting.popleft())
        if not waiting:
            while self._behind:
                self._link.send(self._behind.pop(0), self.number)

    def _send_behind(self, kind: int) -> None:
        """Send a frame behind what was written."""
        self._behind.append(kind)
        self._pass_on()

    def can_write_eof(self) -> bool:
        """Return whether the end of what is sent can be sent: a connection with TLS has no such end."""
        return self.get_extra_info("ssl_object") is None

    def write_eof(self) -> None:
        """Send nothing more."""
        if not self._closing and not self._eof_sent:
            self._eof_sent = True
            self._send_behind(EOF)

    def close(self) -> None:
        """Close when the client has taken what was written."""
        if not self._closing:
            self._closing = True
            self.held.clear()
            self.held_bytes = 0
            self._send_behind(CLOSE)

    def abort(self) -> None:
        """Close at once."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._lost:
            self._link.forget(self)
            self._link.send(ABORT, self.number)
            self.lose(error)
