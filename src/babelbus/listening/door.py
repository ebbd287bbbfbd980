"""The door of one protocol: which connections are let in, and the TLS handshake of those that need one."""

import asyncio
import logging
import ssl
from typing import Any, Protocol

from babelbus.descriptors import is_reserved
from babelbus.limited_log import LimitedLog
from babelbus.listening.certificates import PeerCertificate, explain, read_peer_certificate
from babelbus.listening.crowd import Crowd
from babelbus.metrics import Metrics

TLS_HELLO = b"\x16\x03"
"""Beginning of a client that speaks TLS: a record of a handshake."""
SPEAKS_TLS = "the client speaks TLS, and this listener does not; set tls.cert_file, or connect without TLS"


class Place:
    """One connection that was let in. `leave` it when the connection is lost."""

    __slots__ = ("_door", "_left", "_transport", "_unfinished", "key")

    def __init__(self, door: "Door", key: str | None, transport: asyncio.Transport) -> None:
        self.key = key
        """The address under which the connection is counted; `None` if it is not."""
        self._door = door
        self._transport = transport
        self._unfinished = key is not None
        self._left = False

    def finish_handshake(self) -> None:
        """Count the client as one that has proved who it is, or has sent its first request."""
        if self._unfinished and self.key is not None:
            self._unfinished = False
            self._door.crowd.finish_handshake(self.key)

    def note_request(self) -> None:
        """Record that the client has sent a whole request: others give way before it."""
        self._door.unproved.move_back(self)

    def prove(self) -> None:
        """Record that the client has proved who it is: it gives way to nobody."""
        self._door.unproved.remove(self)

    def certify(self, certificate: PeerCertificate | None) -> bool:
        """End the connection when the certificate of its client expires; return whether it may begin.

        A client that resumes a session of TLS shows the certificate of that session, which may have expired since.
        """
        certified = self._door.crowd.certified
        if certificate is None or certified is None or certified.add(self, certificate.ends_ms):
            return True
        self._door.refuse(logging.INFO, self._peer, "tls", "the certificate of the client has expired")
        return False

    def end(self, text: str) -> None:
        """Close the connection, and write why into the log."""
        self._door.note(logging.INFO, self._peer, "end", f"closing: {text}")
        self._transport.abort()

    @property
    def _peer(self) -> str:
        return name_of(self._transport.get_extra_info("peername"))

    def leave(self) -> None:
        """Count the connection as closed; it may have given way before."""
        if self._left:
            return
        self._left = True
        if self._door.crowd.certified is not None:
            self._door.crowd.certified.remove(self)
        self.finish_handshake()
        self._door.unproved.remove(self)
        self._door.count -= 1
        if self.key is not None:
            self._door.crowd.leave(self.key)

    def give_way(self, text: str) -> None:
        """Close the connection, which makes room for another one."""
        self._door.refuse(logging.INFO, self._peer, "limit", text)
        self.leave()
        self._transport.abort()


class Unproved:
    """The places of clients that have proved nothing, by address; those without a request for longest are the first."""

    def __init__(self) -> None:
        self._places: dict[str | None, dict[Place, None]] = {}

    def add(self, place: Place) -> None:
        """Add a new place."""
        self._places.setdefault(place.key, {})[place] = None

    def remove(self, place: Place) -> None:
        """Remove a place, if it is there."""
        places = self._places.get(place.key)
        if places is None or place not in places:
            return
        del places[place]
        if not places:
            del self._places[place.key]

    def move_back(self, place: Place) -> None:
        """Record that the other places of its address give way before this one, if it is there."""
        places = self._places.get(place.key)
        if places is not None and place in places:
            del places[place]
            places[place] = None

    def first(self) -> Place | None:
        """Return the place that gives way next: one of the address with the most, so that no address ousts others."""
        if not self._places:
            return None
        address = max(self._places, key=lambda address: len(self._places[address]))
        return next(iter(self._places[address]))


class Door:
    """Lets connections in: those of all listeners of one protocol."""

    def __init__(
        self,
        protocol: str,
        metrics: Metrics,
        limited_log: LimitedLog,
        crowd: Crowd,
        *,
        connections_max: int,
        handshake_seconds: float,
        is_admin: bool = False,
    ) -> None:
        self.protocol = protocol
        self.crowd = crowd
        self.count = 0
        """Connections that are open."""
        self.handshake_seconds = handshake_seconds
        self.arriving: set[Arrival] = set()
        """TLS handshakes under way."""
        self._metrics = metrics
        self._log = limited_log
        self._connections_max = connections_max
        self._is_admin = is_admin
        self.unproved = Unproved()
        """Of the administration endpoint: who may not administer must not keep out who may."""
        metrics.connections_max.labels(protocol).set(connections_max)

    def enter(self, transport: asyncio.Transport) -> Place | None:
        """Return the place of a new connection, or close the connection and return `None`."""
        peer = transport.get_extra_info("peername")
        key = self.crowd.key_of(peer[0]) if isinstance(peer, tuple) else None
        refusal = self._refusal(key, transport)
        if refusal is not None:
            self.refuse(logging.WARNING, name_of(peer), *refusal)
            transport.abort()
            return None
        self.count += 1
        if key is not None:
            self.crowd.enter(key)
        place = Place(self, key, transport)
        if self._is_admin:
            self.unproved.add(place)
        return place

    def _refusal(self, key: str | None, transport: asyncio.Transport) -> tuple[str, str] | None:
        """Return reason and text if a connection cannot be let in; another one may give way to it."""
        refusal = None if key is None else self.crowd.refusal(key)
        if refusal is not None:
            return refusal
        if self._is_reserved(transport):
            return "descriptors", "file descriptors run out; raise LimitNOFILE (ulimit -n)"
        if self.count < self._connections_max:
            return None
        text = f"{self._connections_max} connections are open"
        place = self.unproved.first()
        if place is None:
            return "limit", text
        place.give_way(f"{text}, and this client has proved nothing: it gives way to a new one")
        return None

    def _is_reserved(self, transport: asyncio.Transport) -> bool:
        """Return whether the connection took a descriptor of the reserve; the client of an edge takes none here."""
        connection = transport.get_extra_info("socket")
        return connection is not None and is_reserved(connection.fileno(), is_admin=self._is_admin)

    def refuse(self, level: int, peer: str, reason: str, text: str) -> None:
        """Record that a connection was turned away."""
        self.note(level, peer, reason, f"refused: {text}")
        self._metrics.connections_refused_total.labels(self.protocol, reason).inc()

    def note(self, level: int, peer: str, cause: str, text: str) -> None:
        """Write a line to the log; peers that cause many lines do not fill the disk."""
        self._log.write(level, f"{self.protocol}, {cause}", "%s %s: %s", self.protocol, peer, text)

    def close(self) -> None:
        """End the handshakes that are under way."""
        for arrival in list(self.arriving):
            arrival.cancel()


class Guest(Protocol):
    """A connection that begins after its handshake. It takes its place, and leaves it when it is lost."""

    place: Place | None

    def connection_made(self, transport: Any) -> None:
        """Begin."""

    def data_received(self, data: bytes) -> None:
        """Handle the bytes of one read."""

    def eof_received(self) -> bool | None:
        """Handle the end of what the peer sends."""


class Admission(Protocol):
    """Admits connections: a door, or the lobby of links."""

    handshake_seconds: float
    arriving: "set[Arrival]"

    def enter(self, transport: asyncio.Transport) -> Place | None:
        """Return the place of a new connection, or close the connection and return `None`."""

    def refuse(self, level: int, peer: str, reason: str, text: str) -> None:
        """Record that a connection was turned away."""


class Arrival(asyncio.Protocol):
    """The TLS handshake of one connection, which begins when the handshake is done."""

    def __init__(self, door: Admission, context: ssl.SSLContext, guest: Guest) -> None:
        self._door = door
        self._context = context
        self._guest = guest
        self._early: list[bytes] = []
        self._eof = False
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake, if there is a place for the connection."""
        self._place = self._door.enter(transport)
        if self._place is None:
            return
        self._transport = transport
        self._peer = name_of(transport.get_extra_info("peername"))
        self._door.arriving.add(self)
        self._handshake = asyncio.get_running_loop().start_tls(
            transport, self, self._context, server_side=True, ssl_handshake_timeout=self._door.handshake_seconds
        )
        # It begins in this turn, which a task does not: what the client has sent already would come here and be lost.
        # So there is one wait, and what it waits for continues it.
        self._handshake.send(None).add_done_callback(self._end)

    def _end(self, _waiter: Any) -> None:
        """Continue when the handshake is done or has failed."""
        if self not in self._door.arriving:  # cancelled
            return
        self._door.arriving.discard(self)
        encrypted = None
        try:
            self._handshake.send(None)
        except StopIteration as end:
            encrypted = end.value
        except ConnectionAbortedError:
            text = f"no TLS handshake within {self._door.handshake_seconds:g} s"
            self._door.refuse(logging.INFO, self._peer, "handshake", text)
        except OSError as error:  # of OpenSSL, or the peer left
            self._door.refuse(logging.INFO, self._peer, "tls", explain(error))
        if encrypted is None or self._lost:
            self._give_up()
        else:
            self._begin(encrypted)

    def _give_up(self) -> None:
        self._transport.abort()
        if self._place is not None:
            self._place.leave()

    def _begin(self, transport: asyncio.Transport) -> None:
        guest, early = self._guest, self._early
        if self._place is not None and not self._place.certify(
            read_peer_certificate(transport.get_extra_info("ssl_object"))
        ):
            self._give_up()
            return
        guest.place = self._place
        # uvloop keeps a method of this object below the TLS, also when the session of the client goes on elsewhere.
        del self._guest, self._door, self._place, self._handshake, self._early
        transport.set_protocol(guest)  # type: ignore[arg-type]  # it has the methods of one
        guest.connection_made(transport)
        # The client may have sent its first request, and its end, together with its last bytes of the handshake.
        for data in early:
            guest.data_received(data)
        if self._eof and not guest.eof_received():
            transport.close()

    def cancel(self) -> None:
        """End the handshake."""
        self._door.arriving.discard(self)
        self._handshake.close()
        self._give_up()

    def data_received(self, data: bytes) -> None:
        """Record what comes before the connection begins."""
        self._early.append(data)

    def eof_received(self) -> bool:
        """Keep the transport open for the answers."""
        self._eof = True
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Handle that the client left before the connection began."""
        self._lost = True


def name_of(peer: object) -> str:
    """Return "ip:port" of a peer, or "local" of a unix socket."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
