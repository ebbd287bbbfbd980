"""A socket and its session: written once, for all stream protocols (docs/design/design.md, section 3)."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from babelbus.core.quotas import Quota, QuotaExceededError, Quotas
from babelbus.errors import BabelbusError, PeerLeavesError, RemoteProtocolError, without_frames
from babelbus.listening.certificates import read_peer_certificate
from babelbus.listening.connections import ConnectionInfo, SubscriptionInfo
from babelbus.listening.door import SPEAKS_TLS, TLS_HELLO, Door, Place, name_of
from babelbus.listening.transports import holds_data, is_blocked, is_settled
from babelbus.metrics import Metrics
from babelbus.protocols.budget import Budget
from babelbus.protocols.busy_poll import BusyPoll
from babelbus.protocols.contract import LOST_RIGHT, Continuation, Outbox, Session
from babelbus.units import KIB

log = logging.getLogger(__name__)

UNAUTHENTICATED = "unauthenticated"
"""Reason of a connection that is refused because its client sends much before it proves who it is."""

TURN_BYTES = 128 * KIB
"""After so many bytes the other clients have their turn: uvloop reads up to 8 MB in a row, a million small frames."""

MakeSession = Callable[[Outbox, Callable[[], None], str | None], Session]
"""Makes the session of a new connection from its outbox, a way to close it, and the peer's "ip:port", if it has one."""


class Connection(asyncio.Protocol):
    """Bytes of one peer -> session -> outbox; no task and no await per message.

    Reading stops while the outbox is full and goes on when the peer has taken enough, so that what one peer can make
    the server hold is bounded. A peer that breaks the protocol loses this connection and nothing else.
    """

    def __init__(
        self,
        door: Door,
        make_session: MakeSession,
        metrics: Metrics,
        connections: set["Connection"],
        budget: Budget,
        quotas: Quotas,
        *,
        bytes_max: int,
        number: int = 0,
        busy_poll: BusyPoll | None = None,
    ) -> None:
        self.number = number
        self.place: Place | None = None
        """Set when the door let the connection in; with TLS that is before it begins."""
        self._door = door
        self._may_serve = door.crowd.may_serve
        self.protocol = door.protocol
        self._make_session = make_session
        self._metrics = metrics
        self._connections = connections
        self._budget = budget
        self._quotas = quotas
        self._busy_poll = busy_poll
        self._quota: Quota | None = None
        """That of the principal, while quotas are active."""
        self._rest: asyncio.TimerHandle | None = None
        """The end of the time in which nothing is read, because the principal has sent too much."""
        self._unfinished_bytes = 0
        self._received_bytes = 0
        self._beside_at: int | None = None
        """While a request beside the bytes of the client is not answered, bytes that were sent before it."""
        self._bytes_max = bytes_max
        self._paused = False
        self._eof = False
        self._ended = False
        self._given_up = False
        self._unproved = True
        """Whether the client has not proved who it is, or has not sent its first request."""
        self._is_first = True
        """Whether nothing was received, so that a client may begin TLS where this listener does not speak it."""
        self._session: Session | None = None
        self.stays = False
        """Whether the session may go on at another server when this one stops."""
        self._reads = True
        """Whether anything is read that the client has not sent yet."""
        self.address = "local"
        self.peer = "?"

    def connection_made(self, transport: Any) -> None:
        """Begin: the session may send first."""
        self.transport = transport
        peer = transport.get_extra_info("peername")
        address = name_of(peer) if isinstance(peer, tuple) else None
        self.peer = name_of(peer)
        if address is not None:
            self.address = peer[0]
        # resume_writing comes when half of the bound is taken, not when all of it is.
        self.transport.set_write_buffer_limits(high=self._bytes_max // 2, low=self._bytes_max // 4)
        self._outbox = Outbox(self.transport, self._bytes_max)
        self._outbox.on_drained = self.room
        self._outbox.room_bytes = self._room_bytes
        self._outbox.peer = self.peer
        if self._busy_poll is not None:
            self._outbox.on_answered = partial(self._busy_poll.answered, self.number)
        self._outbox.is_blocked = partial(is_blocked, transport)
        if self.place is None:
            self.place = self._door.enter(transport)
            if self.place is None:
                return
        else:
            self._is_first = False
            self._outbox.peer_certificate = read_peer_certificate(transport.get_extra_info("ssl_object"))
        try:
            # A client that lost its leave goes at once, also if it does not read what was sent.
            self._session = self._make_session(self._outbox, self.abort, address)
        except BabelbusError as error:
            self._door.note(logging.INFO, self.peer, "begin", f"closing: {error}")
            self.abort()
            return
        except Exception:
            self._fail()
            return
        self._connections.add(self)
        self._metrics.connections.labels(self.protocol).inc()
        self._metrics.connections_total.labels(self.protocol).inc()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deadline = self._loop.call_later(self._door.handshake_seconds, self._check_handshake)
        if self._session.established:
            self.place.finish_handshake()

    def go_on(self) -> None:
        """Count a client that has proved who it is to the server that began its session.

        The principal keeps the connection, whatever its quota is by now.
        """
        session = self._session
        if session is None or not session.established:
            return
        self._finish_handshake()
        if self._quotas.active:
            self._hold(self._quotas.restore(self._name(session), "connections"))

    def _fail(self) -> None:
        log.exception("%s %s: internal error, closing", self.protocol, self.peer)
        self.abort()

    def _finish_handshake(self) -> None:
        self._unproved = False
        if self.place is not None:
            self.place.finish_handshake()

    def _check_handshake(self) -> None:
        if self._session is None:
            return
        if self._session.established:
            self._finish_handshake()
            return
        text = f"no handshake within {self._door.handshake_seconds:g} s"
        self._door.refuse(logging.INFO, self.peer, "handshake", text)
        self.abort()

    def data_received(self, data: bytes) -> None:
        """Handle one chunk as one batch."""
        session = self._session
        if self._may_serve is not None and not self._may_serve():
            self.abort()  # the data may be another server's by now
            return
        if session is not None and not self._ended and not self._given_up:
            self._received_bytes += len(data)
            if self._busy_poll is not None:
                self._busy_poll.received(self.number)
            unproved = self._unproved
            self._run(session, session.receive_data, data)
            session.release()
            if unproved:
                self._check_beginning(session, data)
            if self._quotas.active:
                self._charge(session, len(data))

    def _check_beginning(self, session: Session, data: bytes) -> None:
        """Check how far the client has come, until it has proved who it is."""
        is_first, self._is_first = self._is_first, False
        if is_first and data.startswith(TLS_HELLO):
            self._door.refuse(logging.INFO, self.peer, "tls", SPEAKS_TLS)
            self._finish()
        elif session.established:
            self._finish_handshake()

    # -- requests that come beside the bytes of the client (listening.fronts) ------------------------------------------

    @property
    def idle_session(self) -> Session | None:
        """The session, if it would handle a request at once, so that one beside its bytes overtakes nothing."""
        outbox = self._outbox
        if self._paused or self._eof or self._ended or self._given_up or outbox.waiting or outbox.full:
            return None
        return self._session

    def count_received(self, size_bytes: int) -> None:
        """Count bytes of such requests. Answers that are sent later wait at the edge for the answer to them."""
        self._beside_at = self._outbox.sent_bytes
        self._received_bytes += size_bytes
        if self._busy_poll is not None:
            self._busy_poll.received(self.number)
        if self._quotas.active and self._session is not None:
            self._charge(self._session, size_bytes)

    def count_sent(self, size_bytes: int) -> None:
        """Count bytes of the answers to such requests."""
        self._beside_at = None
        self._outbox.count_sent(size_bytes)

    # -- quotas ------------------------------------------------------------------------------------------------------

    def _charge(self, session: Session, size_bytes: int) -> None:
        """Count what came, and read later if that is more than the principal may send."""
        if self._unproved or self._session is None:  # known later, or lost
            return
        name = self._name(session)
        quota = self._quota
        if quota is None or quota.name != name:
            self._leave_quota()
            try:
                quota = self._quotas.take(name, "connections")
            except QuotaExceededError as error:
                self._door.refuse(logging.INFO, self.peer, "quota", str(error))
                self.abort()
                return
            self._hold(quota)
        seconds = quota.publish.take(size_bytes)
        if seconds and self._rest is None:
            self._quotas.count_rest(self.protocol, "publish", seconds)
            self._rest_for(seconds)

    def _name(self, session: Session) -> str:
        """Return the name under which the client counts."""
        return session.principal or f"{self.protocol} {self.address}"

    def _hold(self, quota: Quota) -> None:
        """Record the quota that is charged from now on."""
        self._quota = quota
        self._outbox.on_sent = self._charge_sent

    def _rest_for(self, seconds: float) -> None:
        self.transport.pause_reading()
        self._rest = self._loop.call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        """Read on, unless others of the principal have used up what came meanwhile."""
        self._rest = None
        seconds = 0.0 if self._quota is None else self._quota.publish.take(0)
        if seconds:
            self._rest_for(seconds)
        else:
            self._read_on()

    def _charge_sent(self, size_bytes: int) -> None:
        """Count what was sent, and send no more for a while if that is more than the principal may read."""
        seconds = 0.0 if self._quota is None else self._quota.read.take(size_bytes)
        if seconds and not self._outbox.resting:
            self._outbox.resting = True
            self._quotas.count_rest(self.protocol, "read", seconds)
            self._loop.call_later(seconds, self._end_sending_rest)

    def _end_sending_rest(self) -> None:
        seconds = 0.0 if self._quota is None else self._quota.read.take(0)
        if seconds:
            self._loop.call_later(seconds, self._end_sending_rest)
        else:
            self._outbox.resting = False
            self.room()

    def _leave_quota(self) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.give("connections")

    # -- messages that have not come whole ---------------------------------------------------------------------------

    def _room_bytes(self) -> int:
        trusted = self._session is not None and self._session.trusted
        room = self._budget.room(self.address)
        return room if trusted else min(room, self._budget.unauthenticated_bytes_max)

    def _weigh(self, session: Session) -> None:
        """Count what the session holds of a message that has not come whole; end the connection if that is too much."""
        if self._given_up:
            return
        size_bytes = self._unfinished_bytes = session.unfinished_bytes
        self._budget.hold(self, size_bytes)
        limit = self._budget.unauthenticated_bytes_max
        if size_bytes > limit and not session.trusted:
            self._budget.hold(self, 0)
            self.give_up(UNAUTHENTICATED, f"a message of more than {limit} bytes before the client proved who it is")

    def give_up(self, reason: str, text: str) -> None:
        """Drop the message that has not come whole, and close; not at once, because its session may be at work."""
        self._given_up = True
        self._metrics.connections_refused_total.labels(self.protocol, reason).inc()
        self._loop.call_soon(self._refuse_unfinished, reason, text)

    def _refuse_unfinished(self, reason: str, text: str) -> None:
        session = self._session
        if session is not None and not self._ended:
            self._run(session, lambda: session.refuse_unfinished(text, later=reason != UNAUTHENTICATED))

    def _run(self, session: Session, step: Callable[..., None], *arguments: bytes) -> None:
        outbox = self._outbox
        outbox.holding = True
        try:
            step(*arguments)
        except PeerLeavesError as error:
            self._finish()
            without_frames(error)
            return
        except RemoteProtocolError as error:
            self._door.note(logging.INFO, self.peer, "protocol error", f"closing: {error}")
            if not self._given_up:
                self._metrics.protocol_errors_total.labels(self.protocol).inc()
            self._finish()
            without_frames(error)
            return
        except Exception:
            self._fail()
            return
        outbox.release()
        unfinished_bytes = self._unfinished_bytes
        if session.unfinished_bytes != unfinished_bytes:
            self._weigh(session)
        # What is kept until more of it comes costs next to nothing.
        done_bytes = (len(arguments[0]) if arguments else 0) - (self._unfinished_bytes - unfinished_bytes)
        full = outbox.full
        if full or session.busy or abs(done_bytes) >= TURN_BYTES:
            if not self._paused:
                self._paused = True
                self.transport.pause_reading()
            if not full:  # the peer took the answers at once: go on, after the other connections had their turn
                self._loop.call_soon(self.room)

    def _finish(self) -> None:
        """Read nothing more, and close when what came before is answered: an answer may wait for the disk."""
        self._ended = True
        self._outbox.release()
        if self._outbox.waiting:
            self.transport.pause_reading()
        else:
            self.close()

    def room(self) -> None:
        """Continue with requests that were put off, then read on: the outbox may have room again."""
        session = self._session
        if session is not None:
            self._resume(session)
            session.release()

    def _resume(self, session: Session) -> None:
        if self._ended:
            if not self._outbox.waiting:
                self.close()
            return
        if self._paused and not self._outbox.full and not self._outbox.closed:
            self._paused = False
            self._run(session, session.resume)
            self._read_on()
        if self._eof and not self.busy:
            self.close()

    def _read_on(self) -> None:
        waits = self._paused or self._rest is not None
        if self._reads and not (waits or self._ended or self._eof or self.transport.is_closing()):
            self.transport.resume_reading()

    def resume_writing(self) -> None:
        """Continue: the peer took the bytes that were sent."""
        self.room()

    def eof_received(self) -> bool:
        """Answer the requests that came whole, at once those that wait for events: the peer sends nothing more."""
        self._eof = True
        if self._session is not None:
            self._session.end_fetches()
        return self.busy

    def connection_lost(self, error: Exception | None) -> None:
        """Drop session and outbox: what the peer sent is free at once, without the cycle collector."""
        session = self._release()
        if session is not None:
            session.close()
            log.debug("%s %s: closed%s", self.protocol, self.peer, f": {error}" if error else "")

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session, once nothing of it is under way."""
        return self._session is not None and self._session.is_portable

    def stay(self) -> None:
        """Keep the client while the server stops: its session may go on at another server."""
        self.stays = True
        if self._session is not None:
            self._session.stay()

    def stop_reading(self) -> None:
        """Read nothing more from the socket of the client; what came is carried out and answered."""
        self._reads = False
        self.transport.pause_reading()

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the session; `None` if it cannot be continued now."""
        session = self._session
        if session is None or self._paused or self._eof or self._ended or self._given_up:
            return None
        if self._outbox.waiting or session.busy or session.unfinished_bytes:
            return None
        return session.continuation()

    @property
    def is_copyable(self) -> bool:
        """Whether a copy of the session is true until a byte comes or goes."""
        return self._session is not None and self._session.is_copyable

    def copy(self) -> Continuation | None:
        """Return a copy of the session that is true until a byte comes or goes; `None` if there is no such copy."""
        return self.continuation() if self.is_copyable else None

    def leave(self) -> None:
        """Release the client, whose session goes on at another server."""
        session = self._release()
        if session is not None:
            session.leave()

    def _release(self) -> Session | None:
        """Return the session, which has no connection any more; `None` if it had none before."""
        self._outbox.close()
        session, self._session = self._session, None
        place, self.place = self.place, None
        if place is not None:
            place.leave()
        if session is None:
            return None
        self._deadline.cancel()
        if self._rest is not None:
            self._rest.cancel()
        self._leave_quota()
        self._connections.discard(self)
        self._budget.hold(self, 0)
        self._metrics.connections.labels(self.protocol).dec()
        return session

    @property
    def busy(self) -> bool:
        """Whether requests are put off or answers outstanding."""
        if self._session is None:
            return False
        return self._outbox.waiting > 0 or (self._session.busy and not self._ended)

    @property
    def unsent(self) -> bool:
        """Whether something that was asked for has not gone out to the peer yet.

        Bytes for a client that stays are out when they have reached the buffer of its socket, which stays open.
        """
        return self.busy or (not is_settled(self.transport) if self.stays else self._outbox.size_bytes > 0)

    @property
    def unanswered(self) -> bool:
        """Whether the server owes answers that its client does not hold up, or has to carry out what came."""
        outbox = self._outbox
        if outbox.waiting:
            return True
        # Above the mark at which `resume_writing` comes, what was put off waits for the client.
        if outbox.resting or outbox.size_bytes > self._bytes_max // 4 or self._rest is not None:
            return False
        return self.busy or (self.stays and holds_data(self.transport))

    @property
    def outbox_bytes(self) -> int:
        """Bytes of answers that wait to be sent."""
        return self._outbox.size_bytes

    @property
    def principal_name(self) -> str | None:
        """Name of the principal that the client is; `None` while that is unknown."""
        return None if self._session is None else self._session.principal

    def describe(self) -> ConnectionInfo:
        """Return the figures of the connection."""
        session, outbox = self._session, self._outbox
        return ConnectionInfo(
            self._loop.time() - self._began,
            self._received_bytes,
            outbox.sent_bytes,
            outbox.size_bytes,
            self.transport.get_extra_info("ssl_object") is not None or (session is not None and session.is_encrypted),
            [] if session is None else [SubscriptionInfo(*one) for one in session.subscriptions],
            self.transport.get_extra_info("edge"),
        )

    def access_changed(self) -> None:
        """Check the rights of the client again; close at once if it may not have the bytes that wait for it."""
        outbox = self._outbox
        is_stuck = outbox.is_stuck or (self._beside_at is not None and outbox.sent_bytes > self._beside_at)
        if self._session is not None and self._session.access_changed() and is_stuck:
            self._door.note(logging.INFO, self.peer, "access", f"closing: {LOST_RIGHT}")
            self.abort()

    def drain(self) -> None:
        """Read no more requests; requests that came are answered, and no request waits longer for events."""
        self._eof = True
        self.transport.pause_reading()
        if self._session is not None:
            self._session.end_waits()

    def close(self) -> None:
        """Close once what was written is sent."""
        self.transport.close()

    def close_late(self) -> None:
        """Close once what was written is sent, at once if the client does not take it: it had the time for that."""
        if is_blocked(self.transport):
            self.abort()
        else:
            self.close()

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()
