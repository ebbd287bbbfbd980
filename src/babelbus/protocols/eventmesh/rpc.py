"""EventMesh over gRPC: both packages on one port (specification, 7 and 8)."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from babelbus.core.access import AccessRefusedError, Identity
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import Promise
from babelbus.core.request import STOPS, NoRespondersError, Reply, Request, RequestAbandonedError, RequestTimeoutError
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.protocols import contract
from babelbus.protocols.contract import LOST_RIGHT, Outbox
from babelbus.protocols.eventmesh.callers import REFUSALS, Caller, Given, address_of, name_of
from babelbus.protocols.eventmesh.dialects import RefusedError
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.methods import Method, Methods
from babelbus.protocols.eventmesh.streams import Standing, Stream
from babelbus.protocols.eventmesh.webhooks import Webhooks
from babelbus.wire import http2
from babelbus.wire.http2 import Asked, Began, CallLimit, Calls, Came, Cancelled, Http2Error

log = logging.getLogger(__name__)

PROOF_IS_OVER = "the credentials do not hold any more"
PING_SECONDS = 20.0
"""A silent client that does not answer a ping for so long is closed."""


class RpcServer:
    """The shared part of all gRPC connections of a server: the methods, the streams, and the bound of open calls."""

    def __init__(self, hub: Hub, webhooks: Webhooks) -> None:
        self.hub = hub
        methods = Methods(hub, webhooks, lambda: self._streams)
        self.methods, self.refuse = methods.by_path, methods.refuse
        self.kinds = {path: method.handle is None for path, method in self.methods.items()}
        """Which methods are streaming."""
        self.limit = CallLimit(hub.settings.calls_max)
        self.sessions: set[RpcSession] = set()
        self.idle = asyncio.Event()
        """Set by a session that leaves and has no open call."""

    # -- life --------------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, str]]:
        """Return the subscriptions of all streams, in the server's loop."""
        return [
            {"group": group, "topic": one.topic, "mode": one.item.mode, "type": one.item.type,
             "client": stream.client, "protocol": "grpc"}
            for stream in self._streams
            for (group, _), one in stream.subscribed.items()
        ]  # fmt: skip

    @property
    def _streams(self) -> list[Stream]:
        return [stream for session in self.sessions for stream in session.streams.values()]

    def make_session(self, outbox: Outbox, close: Callable[[], None], peer: str | None) -> "RpcSession":
        """Return the session of a new connection."""
        return RpcSession(self, outbox, close, peer)

    def tick(self) -> None:
        """Send pings to silent clients, and close those that do not answer; called about once a second."""
        for session in list(self.sessions):
            session.tick()

    async def stop(self, seconds: float, *, reads: bool = True) -> None:
        """End all streams, and the calls that are not answered after some seconds.

        Without `reads`, nothing that needs another word of a client is waited for.
        """
        for session in list(self.sessions):
            session.drain(reads=reads)
        try:
            async with asyncio.timeout(seconds):
                while not all(session.idle for session in self.sessions):
                    self.idle.clear()
                    await self.idle.wait()
        except TimeoutError:
            for session in list(self.sessions):
                session.end_calls()


class RpcSession(contract.Session):
    """One connection: its calls, and the streams among them."""

    def __init__(self, server: RpcServer, outbox: Outbox, close: Callable[[], None], peer: str | None) -> None:
        settings = server.hub.settings
        self.streams: dict[int, Stream] = {}
        self._server = server
        self._outbox = outbox
        self._close = close
        self._peer = peer or "local"
        self._address = address_of(peer)
        self._caller: Caller | None = None
        """The caller of the last call, while the gate is on."""
        self._clock = server.hub.clock
        self._heard_at = self._clock.monotonic()
        self._pinged_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: dict[int, Stream] = {}
        """Streams with something to handle or to write."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Deadlines of open calls."""
        self._requests: dict[int, Request[Reply]] = {}
        """Requests that unary calls wait for."""
        self._unanswered: set[int] = set()
        """Unary calls that were asked and wait for their answer."""
        self._reads = True
        """Whether the client is waited for when the server stops."""
        self._working = False
        self._scheduled = False
        self._closed = False
        self._calls = Calls(
            server.kinds,
            server.limit,
            streams_max=settings.streams_max,
            message_bytes_max=settings.grpc_bytes_max,
            inflated_bytes_max=lambda: outbox.room_bytes(),
        )
        server.sessions.add(self)
        if server.hub.stopping:
            self._calls.connection.leave()

    # -- calls -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Handle one chunk.

        Raises:
            Http2Error: the client broke the protocol, and was told.
        """
        self._heard_at = now = self._clock.monotonic()
        self._pinged_at = None
        self._working = True
        try:
            for event in self._calls.receive_data(data, now):
                self._handle(event)
            self._work()
        except Http2Error:
            self._flush()
            raise
        finally:
            self._working = False

    def _handle(self, event: http2.Event) -> None:
        stream = event.stream
        if isinstance(event, Asked):
            self._ask(event)
        elif isinstance(event, Began):
            method = self._server.methods[event.path]
            wake = partial(self._wake, stream)
            began = Stream(self._server.hub, method.dialect, method.read, wake, self._identify, self._outbox.peer)
            self.streams[stream] = began
            self._set_deadline(stream, event.deadline)
            if self._server.hub.stopping:
                self._end(stream, began)
        elif isinstance(event, Cancelled):
            self._drop(stream)
        elif (found := self.streams.get(stream)) is None:
            return
        elif isinstance(event, Came):
            self._come(stream, found, event)
        else:
            found.finished = True
            self._ready[stream] = found

    def _ask(self, asked: Asked) -> None:
        """Handle a unary call."""
        stream, method = asked.stream, self._server.methods[asked.path]
        if self._calls.answers.unsent_bytes > self._outbox.bytes_max:
            self._calls.fail(stream, http2.RESOURCE_EXHAUSTED, "the client does not read its answers")
            return
        try:
            message = method.read(asked.message)
        except DecodeError:
            self._calls.fail(stream, http2.INTERNAL, "the message cannot be read")
            return
        self._unanswered.add(stream)
        if asked.deadline is not None:
            self._set_deadline(stream, asked.deadline)
        if not self._server.hub.callers.enforcing:
            self._carry_out(stream, method, message, None)
            return
        self._prove(stream, asked.path, method, message)

    def _carry_out(self, stream: int, method: Method, message: Any, principal: Identity | None) -> None:
        assert method.handle is not None
        request = method.handle(method.dialect, message, principal, partial(self._answer, stream))
        if request is not None:
            self._requests[stream] = request

    def _prove(self, stream: int, path: bytes, method: Method, message: Any) -> None:
        """Handle a call as soon as its caller is known."""
        answer = partial(self._answer, stream)

        def carry_out(_: Promise) -> None:
            if work.error is not None:
                self._server.refuse(method, path, work.error, answer)
            elif not self._closed:
                self._caller = work.value
                self._carry_out(stream, method, message, work.value.principal)

        try:
            caller = self._identify(method.dialect.credentials(message))
        except REFUSALS as error:
            self._server.refuse(method, path, error, answer)
            return
        if isinstance(caller, Work):
            work = caller
            work.when_done(carry_out)
        else:
            self._caller = caller
            self._carry_out(stream, method, message, caller.principal)

    def _identify(self, given: Given) -> Caller | Work[Caller]:
        return self._server.hub.callers.identify(given, self._address, self._outbox.peer_certificate)

    def access_changed(self) -> bool:
        """Check again who made the streams, and what they may be sent; return whether that is less than before."""
        callers, certificate = self._server.hub.callers, self._outbox.peer_certificate
        is_less = False
        for stream, found in list(self.streams.items()):
            standing = found.access_changed(lambda caller: callers.renew(caller, self._address, certificate))
            is_less |= standing is not Standing.SAME
            if standing is Standing.GONE:
                self._lose(stream, PROOF_IS_OVER)
            elif standing is Standing.LESS and self._calls.answers.waits(stream):  # half of a message is sent
                self._lose(stream, LOST_RIGHT)
        self._caller = None
        return is_less

    def _lose(self, stream: int, reason: str) -> None:
        """End a stream whose client has lost a right; what waits for its window is not sent."""
        self._calls.abort(stream, http2.PERMISSION_DENIED, reason)
        self._drop(stream)
        self._schedule()

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The topics of all streams."""
        return [(one.topic, False) for stream in self.streams.values() for one in stream.subscribed.values()]

    @property
    def principal(self) -> str | None:
        """Name of the principal that the last call has proved."""
        return name_of(self._caller)

    def _answer(self, stream: int, answer: Any) -> None:
        self._unanswered.discard(stream)
        self._requests.pop(stream, None)
        self._cancel_deadline(stream)
        calls = self._calls
        if isinstance(answer, BabelbusError):
            calls.fail(stream, _status(answer), str(answer))
        else:
            message = answer if isinstance(answer, bytes) else answer.SerializeToString()
            limit = self._server.hub.settings.body_bytes_max
            if len(message) > limit or calls.answers.unsent_bytes > self._outbox.bytes_max:
                text = f"an answer of {len(message)} bytes" if len(message) > limit else "answers that are not read"
                calls.fail(stream, http2.RESOURCE_EXHAUSTED, text)
            else:
                calls.answer(stream, message)
        self._schedule()

    def _come(self, stream: int, found: Stream, came: Came) -> None:
        """Handle a message of a stream."""
        try:
            message = found.read(came.message)
        except DecodeError:
            self._calls.fail(stream, http2.INTERNAL, "the message cannot be read")
            self._drop(stream)
            return
        found.request(message, came.size_bytes, len(came.message))
        self._ready[stream] = found

    def _set_deadline(self, stream: int, deadline: float | None) -> None:
        if deadline is not None:
            seconds = max(deadline - self._clock.monotonic(), 0)
            self._timers[stream] = self._loop.call_later(seconds, self._expire, stream)

    def _cancel_deadline(self, stream: int) -> None:
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, stream: int) -> None:
        self._calls.fail(stream, http2.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        self._drop(stream)
        self._schedule()

    def _drop(self, stream: int) -> None:
        """Release what the session holds of a call that is over."""
        self._cancel_deadline(stream)
        self._unanswered.discard(stream)
        self._ready.pop(stream, None)
        request = self._requests.pop(stream, None)
        if request is not None:
            self._server.hub.abandon((request,))
        found = self.streams.pop(stream, None)
        if found is not None:
            found.close()

    # -- streams -----------------------------------------------------------------------------------------------------

    def _wake(self, stream: int) -> None:
        found = self.streams.get(stream)
        if found is not None:
            self._ready[stream] = found
            self._schedule()

    def _schedule(self) -> None:
        """Run `_work` at the end of this turn of the event loop, so that what the turn brings is one write."""
        if not self._working and not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        self._working = True
        try:
            self._work()
        finally:
            self._working = False

    def _work(self) -> None:
        """Handle and write what streams have, as far as outbox and windows have room."""
        room_bytes = self._outbox.bytes_max - self._outbox.size_bytes
        has_more = False
        for stream, found in list(self._ready.items()):
            size_bytes = self._write(stream, found, room_bytes)
            room_bytes -= size_bytes
            if found.over:
                self._calls.end(stream)
                self._drop(stream)
            elif not found.has_output and not found.requests:
                self._ready.pop(stream, None)
            elif size_bytes:
                has_more = True
        self._flush()
        if has_more and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)
        if self._server.hub.stopping and self.idle:
            self._server.idle.set()

    def _write(self, stream: int, found: Stream, room_bytes: int) -> int:
        """Write messages of a stream; what is written counts as acknowledged. Return how many bytes went."""
        calls, answers = self._calls, self._calls.answers
        calls.take(stream, found.advance())
        if answers.waits(stream):
            return 0
        found.settle()
        messages, done, is_last = found.encode(min(room_bytes, answers.room(stream)))
        if not messages:
            return 0
        calls.begin(stream)
        calls.send(stream, messages)
        if is_last and answers.waits(stream):
            found.hold(done.pop())
        found.written(done)
        calls.take(stream, found.advance())
        return sum(map(len, messages))

    def _flush(self) -> None:
        data = self._calls.answers.take_output()
        if data:
            self._outbox.answer(lambda: data, len(data))

    # -- the connection ----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continue with calls that were put off."""
        if self.busy:
            self.receive_data(b"")

    @property
    def busy(self) -> bool:
        """Whether calls are put off to the next turn of the event loop."""
        return self._calls.busy

    @property
    def idle(self) -> bool:
        """Whether no call is open or on its way, and no answer waits for a window of the client."""
        if not self._reads:
            return not (self._unanswered or self.busy)
        return self._calls.answers.idle and self._calls.connection.has_left

    @property
    def has_left(self) -> bool:
        """Whether the client has heard the goodbye, or is gone."""
        return self._closed or self._calls.connection.has_left

    @property
    def established(self) -> bool:
        """Whether the client has begun with its settings."""
        return self._calls.connection.established

    @property
    def trusted(self) -> bool:
        """Return true: the calls of EventMesh need no proof."""
        return True

    @property
    def unfinished_bytes(self) -> int:
        """Memory of messages that have not come whole, and of requests that are put off."""
        return self._calls.unfinished_bytes + sum(stream.request_bytes for stream in self._ready.values())

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Close the connection with a GOAWAY.

        Raises:
            Http2Error: always.
        """
        self._calls.connection.fail(http2.ENHANCE_YOUR_CALM, text)
        self._flush()
        raise Http2Error(http2.ENHANCE_YOUR_CALM, text)

    def release(self) -> None:
        """Resume deliveries: the outbox may have room again."""
        if self._ready:
            self._schedule()

    def tick(self) -> None:
        """Send a ping to a silent client; close one that does not answer."""
        for stream in [stream for stream, found in self.streams.items() if found.proof_is_over]:
            self._lose(stream, PROOF_IS_OVER)
        now = self._clock.monotonic()
        if self._pinged_at is not None:
            if now - self._pinged_at > PING_SECONDS:
                log.info("%s %s: closing, the client does not answer a ping", PROTOCOL, self._peer)
                self._close()
        elif now - self._heard_at > self._server.hub.settings.idle_seconds:
            self._pinged_at = now
            self._calls.connection.ping()
            self._flush()

    def say_goodbye(self) -> None:
        """Send a goodbye: calls that are open go on, and so do calls that are on their way."""
        self._calls.connection.leave()
        self._schedule()

    def drain(self, *, reads: bool) -> None:
        """Send a goodbye: streams end, calls that are open are answered.

        Without `reads`, no further call is carried out, and what needs another word of the client ends at once.
        """
        self._reads = reads
        self._calls.connection.leave()
        for stream, found in self.streams.items():
            self._end(stream, found)
        self._run()
        if not reads:
            self._end_all(stream for stream in self._calls.open if stream not in self._unanswered)

    def _end(self, stream: int, found: Stream) -> None:
        """End a stream behind what it has to send."""
        found.ending = True
        self._ready[stream] = found

    def end_calls(self) -> None:
        """End the calls that are not answered: the server stops."""
        self._end_all(self._calls.open)

    def _end_all(self, streams: Iterable[int]) -> None:
        for stream in list(streams):
            self._calls.fail(stream, http2.UNAVAILABLE, STOPS)
            self._drop(stream)
        self._calls.connection.end_goodbye()
        self._flush()

    def close(self) -> None:
        """Release what the session holds: the connection is gone."""
        self._closed = True
        self._unanswered.clear()
        for stream in [*self.streams, *self._timers, *self._requests]:
            self._drop(stream)
        self._calls.close()
        self._server.sessions.discard(self)
        self._server.idle.set()


def _status(error: BabelbusError) -> int:
    if isinstance(error, RequestTimeoutError):
        return http2.DEADLINE_EXCEEDED
    if isinstance(error, RefusedError):
        return http2.INVALID_ARGUMENT
    if isinstance(error, AccessRefusedError | InvalidProofError):
        return http2.PERMISSION_DENIED
    if isinstance(error, TooManyProofsError | QuotaExceededError):
        return http2.RESOURCE_EXHAUSTED
    is_away = isinstance(error, NoRespondersError | RequestAbandonedError)
    return http2.UNAVAILABLE if is_away else http2.FAILED_PRECONDITION
