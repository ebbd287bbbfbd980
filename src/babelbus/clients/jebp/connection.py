"""One connection of a client: handshake, then requests that are answered in order, any number on the way at once.

No task, future or await per message: the bytes of one read are decoded together and delivered in runs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from babelbus.clients.jebp.errors import (
    ClientError,
    ConnectionLostError,
    NotAuthorisedError,
    RequestTimeoutError,
    UntrustedServerError,
    copy_error,
)
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.decoder import ClientDecoder
from babelbus.protocols.jebp.handshake import ClientHandshake, UntrustedPeerError
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.items import (
    CALLS_MAX,
    CANCEL,
    CLIENT_HEAD,
    END,
    GATHERED_BYTES_MAX,
    ITEM,
    ITEM_HEAD,
    MORE,
    OPEN,
)
from babelbus.protocols.jebp.messages import CallItems, Data, Response, Subscribe

GREETING_SECONDS = 3.0
"""How long a server may be silent behind `connect`: one of jebp speaks first, at once; one of HTTP waits for us."""
WRONG_PORT = "this may be the port of another protocol; that of jebp is 5320 unless jebp.port is set"

_PROBE = encode_request(Subscribe(()))


CALLS_AT_ONCE = CALLS_MAX - 24
"""Beyond so many open calls the next one waits; the other places are for streams."""


class Pending(Protocol):
    """The receiver of the answers to one or more requests that were sent together."""

    def answered(self, responses: Sequence[Response]) -> None:
        """Handle the next answers, in order; at least one, and maybe not all outstanding ones."""

    def lost(self, error: ClientError) -> None:
        """Handle the end of the connection before all answers came."""


class Receiver(Protocol):
    """The receiver of the items of one call of jebp/1.2; nothing comes behind `ended` or `failed`."""

    deadline: float
    """Loop time after which the call is given up, `inf` for a stream."""

    def item(self, body: Data) -> None:
        """Handle an item of the stream; the body is a part of the frame it came in."""

    def ended(self, result: Data) -> None:
        """Handle the end."""

    def failed(self, code: str, message: str, details: object) -> None:
        """Handle an error of the server."""

    def lost(self, error: ClientError) -> None:
        """Handle the end of the connection, or of the client's patience."""


class Nobody:
    """A receiver that hears nothing, as that of a call that was given up, until the server has ended it."""

    deadline = inf

    def item(self, body: Data) -> None:
        """Drop an item."""

    def ended(self, result: Data) -> None:
        """Drop the result."""

    def failed(self, code: str, message: str, details: object) -> None:
        """Drop an error of the server."""

    def lost(self, error: ClientError) -> None:
        """Drop the end of the connection."""


_NOBODY: Receiver = Nobody()
_FAILURE = msgspec.msgpack.Decoder(tuple[str, str, Any])


class Call:
    """A `Pending` with one future for all its answers."""

    __slots__ = ("_count", "_responses", "future")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[Response]] = loop.create_future()
        # The caller may be gone by then; the loop must not complain.
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._count = count
        self._responses: list[Response] = []

    def answered(self, responses: Sequence[Response]) -> None:
        """Collect, and wake the caller with the last one."""
        self._responses += responses
        if len(self._responses) == self._count and not self.future.done():
            self.future.set_result(self._responses)

    def lost(self, error: ClientError) -> None:
        """Raise the reason in the caller."""
        if not self.future.done():
            self.future.set_exception(error)


class Link(asyncio.Protocol):
    """A connection; made by `connect`, spent once it is lost. All calls come from its event loop.

    The handshake ends with an empty subscribe, which every server answers: a server that does not know us only closes
    (DECISION 12), and without the answer that would look like success.

    Attributes:
        fingerprint: the server's, from the handshake on.
        lost_error: why it ended; `None` while it lives.
        outstanding: answers that are still to come.
        heard_at: when (loop time, seconds) the server last sent data, or got the first request after that.
        answered_at: when the server last sent an answer, or got the first request after that.
        minor: the minor number of the server's version of jebp.
    """

    def __init__(
        self,
        identity: Identity,
        expected_fingerprint: str | None,
        *,
        bare_certificates: bool,
        on_lost: Callable[["Link", ClientError], None],
    ) -> None:
        self.fingerprint = ""
        self.lost_error: ClientError | None = None
        self.outstanding = 0
        self.heard_at = 0.0
        self.answered_at = 0.0
        self._items_came = False  # since the last call of `stalled`
        self.sealer: Sealer
        self.minor = 0
        self._calls: dict[int, Receiver] = {}
        self._number = 0
        self._items: list[Data] = [CLIENT_HEAD]
        self._items_bytes = 0
        self._scheduled = False
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._expected = expected_fingerprint
        self._on_lost = on_lost
        self._handshake = ClientHandshake(identity, self._trusts, bare_certificates=bare_certificates)
        self._decoder: ClientDecoder | None = None
        self._transport: asyncio.Transport
        self._pending: deque[list[Any]] = deque()  # [answers still to come, Pending]
        self._probe = Call(1, self._loop)

    def _trusts(self, fingerprint: str) -> bool:
        self.fingerprint = fingerprint
        return self._expected is None or fingerprint == self._expected

    async def ready(self) -> None:
        """Return when the server has answered for the first time.

        Raises:
            ClientError: it did not let us in, or is not the one that we expect.
        """
        await self._probe.future

    def send(self, frames: bytes | bytearray, count: int, pending: Pending) -> None:
        """Write sealed requests (by `sealer`, in its order); `pending` gets their `count` answers, or the loss."""
        if self.lost_error is not None:
            pending.lost(copy_error(self.lost_error))
            return
        if not self.outstanding:
            self.heard_at = self.answered_at = self._loop.time()
        self.outstanding += count
        self._pending.append([count, pending])
        self._transport.write(frames)

    def call(self, *contents: Data) -> "asyncio.Future[list[Response]]":
        """Send requests with one write; the future has their answers.

        Raises:
            LocalProtocolError: a request is over the frame limit; none was sent.
            ClientError: (from the future) the connection was lost.
        """
        call = Call(len(contents), self._loop)
        if self.lost_error is not None:
            call.lost(copy_error(self.lost_error))
        else:
            self.send(self.sealer.seal_many(contents), len(contents), call)
        return call.future

    # -- calls (jebp/1.2) --------------------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether the next call has to wait; some places are left for streams."""
        return len(self._calls) >= CALLS_AT_ONCE and self.lost_error is None

    async def room(self) -> None:
        """Return when one more call may be opened."""
        while self.crowded:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting_for_room.append(future)
            await future

    def open_call(self, body: Data, receiver: Receiver) -> int:
        """Open a call and return its number; the receiver gets what the server says, or the loss.

        Raises:
            LocalProtocolError: the body is over the frame limit.
        """
        if self.lost_error is not None:
            receiver.lost(copy_error(self.lost_error))
            return -1
        self._check_size(body)
        number = self._number
        while number in self._calls:
            number = (number + 1) & 0xFFFFFFFF
        self._number = (number + 1) & 0xFFFFFFFF
        self._calls[number] = receiver
        self._put(number, OPEN, body)
        return number

    def send_more(self, number: int, body: Data) -> None:
        """Send a message of an open call; nothing happens if it has ended.

        Raises:
            LocalProtocolError: the body is over the frame limit.
        """
        if number in self._calls:
            self._check_size(body)
            self._put(number, MORE, body)

    def cancel_call(self, number: int) -> None:
        """End a stream: its receiver hears no more."""
        if number in self._calls:
            self._calls[number] = _NOBODY
            self._put(number, CANCEL, b"")

    def end_call(self, number: int) -> None:
        """End a stream whose receiver hears of the end."""
        if number in self._calls:
            self._put(number, CANCEL, b"")

    def _check_size(self, body: Data) -> None:
        most = self.sealer.content_bytes_max - len(CLIENT_HEAD) - ITEM_HEAD.size
        if len(body) > most:
            raise LocalProtocolError(f"a call of {len(body)} bytes is over the frame limit, {most}")

    def _put(self, number: int, kind: int, body: Data) -> None:
        total = self._items_bytes + ITEM_HEAD.size + len(body)
        if self._items_bytes and total > GATHERED_BYTES_MAX:
            self.flush_items()
            total = ITEM_HEAD.size + len(body)
        self._items_bytes = total
        self._items += (ITEM_HEAD.pack(number, kind, len(body)), body)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._scheduled = False
        self.flush_items()

    def flush_items(self) -> None:
        """Write the items of this turn."""
        if self._items_bytes and self.lost_error is None:
            items, self._items, self._items_bytes = self._items, [CLIENT_HEAD], 0
            self._transport.write(self.sealer.seal_parts(items))

    def _receive_items(self, message: CallItems) -> None:
        calls = self._calls
        self._items_came = True
        for number, kind, body in message.items:
            receiver = calls.get(number)
            if receiver is None:
                raise RemoteProtocolError(f"the server sent an item of call {number}, which is not open")
            if kind == ITEM:
                receiver.item(body)
                continue
            if kind == END:
                del calls[number]
                receiver.ended(body)
                continue
            try:
                code, text, details = _FAILURE.decode(body)
            except msgspec.MsgspecError as error:
                raise RemoteProtocolError(f"the error of call {number} is malformed: {error}") from error
            del calls[number]
            receiver.failed(code, text, details)
        while self._waiting_for_room and len(calls) < CALLS_AT_ONCE:
            self._wake_one()

    def _wake_one(self) -> None:
        future = self._waiting_for_room.popleft()
        if not future.done():
            future.set_result(None)

    def stalled(self, now: float, seconds: float) -> bool:
        """Return whether requests have had no answer for so long; called regularly.

        Items of calls do not count: a busy subscription would hide that the server answers nothing. Other bytes do,
        for they may be the beginning of a large answer over a slow connection.
        """
        items_came, self._items_came = self._items_came, False
        since = self.answered_at if items_came else self.heard_at
        return self.outstanding > 0 and now - since >= seconds

    def check_calls(self, now: float, idle_seconds: float) -> None:
        """End calls that have waited too long, and ask a silent server for a sign of life while calls are open."""
        if not self._calls or self.lost_error is not None:
            return
        late = [number for number, receiver in self._calls.items() if receiver.deadline <= now]
        for number in late:
            receiver, self._calls[number] = self._calls[number], _NOBODY
            self._put(number, CANCEL, b"")
            receiver.lost(RequestTimeoutError("no answer in time; it may be done or not"))
        if not self.outstanding and now - self.heard_at >= idle_seconds:
            self.call(_PROBE)

    # -- the end -----------------------------------------------------------------------------------------------------

    def abort(self, error: ClientError) -> None:
        """Close the connection at once, for this reason."""
        self._end(error)
        self._transport.abort()

    def close(self, error: ClientError) -> None:
        """Close the connection after all written bytes are sent."""
        self._end(error)
        self._transport.close()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begin; the server speaks first."""
        self._transport = transport
        self._loop.call_later(GREETING_SECONDS, self._expect_greeting)

    def _expect_greeting(self) -> None:
        if not self.heard_at and self.lost_error is None:
            silence = f"the server took the connection and said nothing for {GREETING_SECONDS:g} s"
            self.abort(ConnectionLostError(f"{silence}: {WRONG_PORT}"))

    def data_received(self, data: bytes) -> None:
        """Handle one chunk as one batch."""
        if self.lost_error is not None:
            return
        self.heard_at = self._loop.time()
        try:
            decoder = self._decoder
            if decoder is None:
                decoder = self._shake(data)
                if decoder is None:
                    return
            else:
                decoder.receive_data(data)
            messages = decoder.events()
            if self._calls:
                self._sort(messages)
            elif CallItems in set(map(type, messages)):
                raise RemoteProtocolError("the server sent items of a call, and no call is open")
            else:
                self._hand_out(messages)  # type: ignore[arg-type]  # the types were looked at
            if decoder.error is not None:
                raise decoder.error
        except UntrustedPeerError as error:
            self.abort(UntrustedServerError(error.fingerprint, self._expected or ""))
        except RemoteProtocolError as error:
            hint = f"; {WRONG_PORT}" if self._decoder is None else ""
            lost = ConnectionLostError(f"the server broke the protocol: {error}{hint}")
            lost.__cause__ = error
            self.abort(lost)

    def _shake(self, data: bytes) -> ClientDecoder | None:
        out = self._handshake.receive_data(data)
        established = self._handshake.established
        if established is None:
            if out:
                self._transport.write(out)
            return None
        self.fingerprint = established.fingerprint
        self.sealer = established.sealer
        self.minor = established.minor
        self._decoder = ClientDecoder(established.opener)
        self._decoder.receive_data(established.surplus)
        self.send(out + self.sealer.seal_many([_PROBE]), 1, self._probe)
        return self._decoder

    def _sort(self, messages: list[Response | CallItems]) -> None:
        """Handle items of calls, and hand out the answers to requests that stand between them."""
        responses: list[Response] = []
        for message in messages:
            if isinstance(message, CallItems):
                self._receive_items(message)
            else:
                responses.append(message)
        if responses:
            self._hand_out(responses)

    def _hand_out(self, responses: list[Response]) -> None:
        pending, count, at = self._pending, len(responses), 0
        self.outstanding -= count
        self.answered_at = self.heard_at
        while at < count:
            if not pending:
                raise RemoteProtocolError("the server sent more answers than there were requests")
            first = pending[0]
            take = min(first[0], count - at)
            first[0] -= take
            if not first[0]:
                pending.popleft()
            first[1].answered(responses if take == count else responses[at : at + take])
            at += take

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        if self.lost_error is not None:
            return
        lost: ClientError
        if self._decoder is None:
            lost = ConnectionLostError(f"the server ended the connection during the handshake: {error or 'closed'}")
        elif not self._probe.future.done():
            lost = NotAuthorisedError(self._identity.fingerprint)
        else:
            lost = ConnectionLostError(f"the connection was lost: {error or 'the server closed it'}")
        lost.__cause__ = error
        self._end(lost)

    def _end(self, error: ClientError) -> None:
        if self.lost_error is not None:
            return
        self.lost_error = error
        self.outstanding = 0
        waiting, self._pending = self._pending, deque()
        for _, pending in waiting:
            pending.lost(copy_error(error))
        calls, self._calls = self._calls, {}
        for receiver in calls.values():
            receiver.lost(copy_error(error))
        while self._waiting_for_room:
            self._wake_one()
        probe = self._probe.future
        # Cancelled if the handshake took too long: asking such a future for its exception raises.
        entered = probe.done() and not probe.cancelled() and probe.exception() is None
        self._probe.lost(error)
        if entered:  # else the waiter of `ready` gets the error
            self._on_lost(self, error)


async def connect(
    address: str,
    identity: Identity,
    expected_fingerprint: str | None,
    *,
    bare_certificates: bool,
    timeout_seconds: float,
    on_lost: Callable[[Link, ClientError], None],
) -> Link:
    """Connect to `host:port` (an IPv6 address in brackets) and complete the handshake.

    Raises:
        ConnectionLostError: no server, no jebp server, or no handshake within `timeout_seconds`.
        NotAuthorisedError: the server does not know `identity`.
        UntrustedServerError: the server's fingerprint is not `expected_fingerprint`.
        ValueError: the address is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not host:
        raise ValueError(f"address {address!r} is not host:port")
    link = Link(identity, expected_fingerprint, bare_certificates=bare_certificates, on_lost=on_lost)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_seconds):
            await loop.create_connection(lambda: link, host.strip("[]"), int(port))
            await link.ready()
    except TimeoutError:
        error = ConnectionLostError(f"no handshake with {address} within {timeout_seconds:g} s")
        if hasattr(link, "_transport"):
            link.abort(error)
        raise error from None
    except OSError as failure:
        raise ConnectionLostError(f"cannot connect to {address}: {failure.strerror or failure}") from failure
    except asyncio.CancelledError:
        if hasattr(link, "_transport"):
            link.abort(ConnectionLostError("connecting was given up"))
        raise
    return link
