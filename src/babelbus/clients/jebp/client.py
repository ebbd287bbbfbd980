"""The client of jebp: publish, fetch and follow over one encrypted connection that is opened again when it is lost.

    async with Client("127.0.0.1:5320", identity=Identity.load("admin_key")) as client:
        await client.create_topic("plant")
        await client.publish("plant", b"21.5", key=b"line1/temp")
        async for record in client.follow("plant", until_end=True):
            print(record.offset, record.payload)

Everything runs in one event loop; the calls may come from any number of its tasks. `blocking` has the same for threads.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from babelbus.clients.jebp.batching import Batcher, Flushed, Position, cut_batches, publish_batches
from babelbus.clients.jebp.calls import Calls
from babelbus.clients.jebp.consumer import Consumer, Start
from babelbus.clients.jebp.errors import (
    ClientError,
    ConnectionLostError,
    NoRightsError,
    OutcomeUnknownError,
    RequestError,
    RequestTimeoutError,
    TopicExistsError,
    UnknownTopicError,
)
from babelbus.clients.jebp.live import Subscription
from babelbus.clients.jebp.manage import DeadLetters, Groups, Topics
from babelbus.clients.jebp.messages import Holder, Membership
from babelbus.clients.jebp.producer import BATCH_RECORDS_MAX, Producer, Published
from babelbus.clients.jebp.reader import Reader
from babelbus.clients.jebp.reconnect import Keeper
from babelbus.clients.jebp.requests import Requests
from babelbus.clients.jebp.respond import Responder
from babelbus.clients.jebp.service import Answerer, Handler, ResponderService, Service, SubscriberService, run_services
from babelbus.clients.jebp.state import State
from babelbus.clients.jebp.tracing import Traced, Tracing
from babelbus.clients.jebp.transactions import Transaction
from babelbus.clock import Clock, SystemClock
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.call_messages import Ask, Consume, Emit, Emitted, Reply, Respond
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import ANY_PARTITION, CreateTopic, RemoveTopic, Response
from babelbus.protocols.jebp.status import is_success
from babelbus.records.record import Headers, Record

REPLY_GRACE_SECONDS = 5.0
"""How much longer than the server a client waits for the answer to a request: the server knows the reason."""
SECONDS_LEFT_MIN = 0.001
"""The shortest time of a request: a server refuses one without any."""


class Client(Reader):
    """A connection to one server, under one identity. Use it with `async with`; it cannot be entered twice.

    Args:
        address: `host:port` of the server's jebp listener.
        identity: the key that the server knows us by.
        server_fingerprint: the server's, 64 hex digits. Without it the first server that answers is believed, and on
            reconnects only that one: right on loopback, a risk beyond.
        linger_seconds: how long `send` waits for company before a batch goes out.
        batch_bytes_max: a batch of `send` or `publish_many` goes out at this size.
        in_flight_bytes_max: bytes of records that wait for their acknowledgement before publishers have to wait.
        request_timeout_seconds: how long one request may go without an answer, reconnects and retries included.
        reconnect: whether a lost connection is made again, and requests that cannot do harm are sent again.
        reconnect_seconds_max: longest pause between two attempts; the first is 50 ms, each one doubles.
        on_connection: called in the event loop with the error when the connection is lost, and with `None` when there
            is a new one; it must not raise. Not called for the end of the client.
        bare_certificates: the server has the option `jebp_bare_certificates`.
        tracing: OpenTelemetry spans for `publish`, `emit`, `request` and handlers, and the trace context in headers.
            Needs `pip install babelbus[otel]`; raises `TracingUnavailableError` without it.
        clock: where records without a time get theirs from.

    A lost connection: publishing (command 13, by sequence numbers: stored once), fetching and following go on when the
    server is back. Creating and removing topics raise `OutcomeUnknownError`.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:5320",
        *,
        identity: Identity,
        server_fingerprint: str | None = None,
        linger_seconds: float = 0.002,
        batch_bytes_max: int = 256 * 1024,
        in_flight_bytes_max: int = 8 * 2**20,
        request_timeout_seconds: float = 30.0,
        reconnect: bool = True,
        reconnect_seconds_max: float = 5.0,
        on_connection: Callable[[ClientError | None], None] | None = None,
        bare_certificates: bool = False,
        tracing: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._tracing = Tracing() if tracing else None
        self._timeout_seconds = request_timeout_seconds
        self._batch_bytes_max = batch_bytes_max
        self.in_flight_bytes_max = in_flight_bytes_max
        self._clock = clock or SystemClock()
        self._producer = Producer(
            self._clock.monotonic,
            in_flight_bytes_max=in_flight_bytes_max,
            timeout_seconds=request_timeout_seconds,
        )
        self._keeper = Keeper(
            address,
            identity,
            self._producer,
            fingerprint=server_fingerprint,
            bare_certificates=bare_certificates,
            timeout_seconds=request_timeout_seconds,
            reconnect=reconnect,
            reconnect_seconds_max=reconnect_seconds_max,
            on_connection=on_connection,
        )
        self._batcher = Batcher(
            self._producer, self._clock, linger_seconds=linger_seconds, batch_bytes_max=batch_bytes_max
        )
        self._requests = Requests(self._keeper.get, timeout_seconds=request_timeout_seconds, resend=reconnect)
        self._services: list[Service] = []
        self._stop_asked = asyncio.Event()
        self.calls = Calls(self._keeper.get, timeout_seconds=request_timeout_seconds, resend=reconnect)
        """Calls and streams of jebp/1.2 by the names of their methods."""
        self.topics = Topics(self.calls)
        """Topics with their settings."""
        self.groups = Groups(self.calls)
        """Consumer groups: figures, settings, cursors."""
        self.dead_letters = DeadLetters(self.calls)
        """Records that groups gave up."""
        self.state = State(self.calls, reconnect=reconnect)
        """The state: values, watches, locks."""
        self._keeper.beginnings.append(self.state.connected)

    # -- connection --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "Client":
        """Connect, within 10 seconds.

        Raises:
            ConnectionLostError: no server answers, or not as a jebp server does.
            NotAuthorisedError: the server does not know our fingerprint.
            UntrustedServerError: the server's fingerprint is not the expected one.
        """
        await self._keeper.open()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Flush the sent records, unless an error is being raised, and disconnect."""
        try:
            if error is None:
                await self.flush()
        finally:
            await self.close()

    async def close(self) -> None:
        """Disconnect without a flush; requests without an answer raise `ClientClosedError`."""
        await self._keeper.close()

    @property
    def server_fingerprint(self) -> str:
        """The fingerprint of the server's certificate; empty before the first connection."""
        return self._keeper.fingerprint or ""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._keeper.link is not None

    @property
    def acknowledged(self) -> int:
        """How many records of `publish`, `publish_many` and `send` the server has acknowledged."""
        return self._producer.acknowledged

    def transaction(self, transaction: str) -> Transaction:
        """Return the staged batches under a transaction id: records that a commit publishes all at once, and once."""
        return Transaction(self._requests, self._clock, transaction)

    # -- consumer groups ---------------------------------------------------------------------------------------------

    def consume(
        self,
        topic: str,
        group: str,
        *,
        window: int = 1_000,
        create: bool = True,
        start: Start = "end",
        start_time: int | None = None,
        settings: Mapping[str, Any] | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        """Return a member of a consumer group: `async for message in client.consume("orders", "billing")`.

        Each message is answered with `ack`, `nack` or `reject`; until then it counts for `window`. Answers of one turn
        of the event loop leave together. A message that is not answered within the group's `ack_seconds` goes to
        another member; those that the program has not read yet do not.

        Args:
            topic: an existing topic.
            group: the name of the group; its members share the records of the topic.
            window: the most messages that this member holds unanswered. Small windows share fairly and hold up less
                when the member is slow; large ones are faster.
            create: make the group if it does not exist. It takes acks (mode `explicit`).
            start: where a group that is made begins: `"end"`, `"beginning"` or an offset.
            start_time: or the time (ms) to begin at.
            settings: of a group that is made: `ack_seconds`, `attempts_max`, `retry_seconds`, `order` and others
                (docs/groups.md).
            exclusive: be the only member, or none.

        Raises:
            LocalProtocolError: a window below 1.
        """
        if window < 1:
            raise LocalProtocolError(f"a window of {window} messages")
        at: Literal["end", "beginning", "offset", "time"] = "offset" if isinstance(start, int) else start
        value = start if isinstance(start, int) else 0
        if start_time is not None:
            at, value = "time", start_time
        return Consumer(self.calls, Consume(topic, group, window, create, at, value, dict(settings or {}), exclusive))

    # -- live events and requests ------------------------------------------------------------------------------------

    def subscribe(self, *patterns: str, window: int = 4_096) -> Subscription:
        """Return a live subscription: `async for event in client.subscribe("plant/+/temp")`.

        It brings the events of every protocol that are published from now on under subjects that match. `+` is one
        element of a subject, `#` at the end one or more. An event that matches two patterns comes once.

        Args:
            patterns: one or more.
            window: how many events may be on the way; beyond it the server keeps some and then drops.

        Raises:
            LocalProtocolError: no pattern.
        """
        if not patterns or window < 1:
            raise LocalProtocolError("a subscription has a pattern, and a window of at least 1")
        return Subscription(self.calls, patterns, window)

    async def emit(
        self,
        subject: str,
        payload: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int = 0,
    ) -> Emitted:
        """Publish an event under a subject; return where it was recorded, when it is as safe as the topic promises.

        The topic is the one whose name the subject begins with (`plant` records `plant/1/temp`). Without such a
        topic the event goes to live subscriptions alone. `publish` is faster, and stores once through any reconnect.

        Raises:
            NoRightsError: the client may not publish under the subject.
            BadArgumentError: the subject or a header is wrong.
            OutcomeUnknownError: the connection was lost before the answer.
            ClientError: as `Calls.call`.
        """
        with self._sending("emit", subject) as trace:
            event = Emit(subject, payload, key, (*headers, *trace), timestamp)
            return await self.calls.call("emit", event, Emitted, safe=False)

    async def request(
        self,
        subject: str,
        payload: bytes | None = b"",
        *,
        headers: Headers = (),
        timeout: float = 30.0,  # noqa: ASYNC109
    ) -> Reply:
        """Send a request and return the reply of whoever answers the subject, over any protocol.

        Args:
            subject: what is asked for.
            payload, headers: of the request.
            timeout: how long to wait for the reply, in seconds, up to an hour; it includes waiting for a connection.

        Raises:
            NoRespondersError: nobody answers the subject; told at once.
            RequestTimeoutError: no reply came in time; the request may have been carried out.
            RequestFailedError: the responder says that it failed.
            OutcomeUnknownError: the connection was lost before the reply.
            ConnectionLostError: there was no connection within `timeout`; the request was not sent.
            NoRightsError: the client may not publish under the subject.
        """
        if not 0 < timeout <= 3_600:
            raise LocalProtocolError(f"a request waits for 0 to 3,600 seconds, not {timeout:g}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        with self._sending("request", subject) as trace:
            # Before the request is made: its time on the server is what this wait has left of it.
            await self.calls.link_with_room("request", deadline)
            left = max(deadline - loop.time(), SECONDS_LEFT_MIN)
            ask = Ask(subject, payload, (*headers, *trace), left)
            return await self.calls.call("request", ask, Reply, safe=False, timeout_seconds=left + REPLY_GRACE_SECONDS)

    def _sending(self, operation: str, subject: str) -> AbstractContextManager[Headers]:
        return nullcontext(()) if self._tracing is None else self._tracing.sending(operation, subject)

    def span(self, message: Traced) -> AbstractContextManager[None]:
        """Return a span for handling a message of `consume`, a `Question` or an event: `with client.span(message):`.

        It is a part of the trace that the publisher began. Without `tracing` nothing happens. Handlers of `subscriber`
        and `responder` have such a span around them already.
        """
        return self._span(message.subject, "process", message)

    def _span(self, destination: str, operation: str, message: Traced) -> AbstractContextManager[None]:
        return nullcontext() if self._tracing is None else self._tracing.handling(destination, operation, message)

    def respond(self, pattern: str, *, group: str = "respond", window: int = 100) -> Responder:
        """Return a responder: `async for question in client.respond("calc/+")`.

        Args:
            pattern: which subjects it answers, as in `subscribe`.
            group: responders of one group share the questions, whatever protocol they speak; of several groups the
                first reply counts.
            window: the most questions that it has without an answer; further ones wait on the server.
        """
        return Responder(self.calls, Respond(pattern, group, window))

    # -- services ----------------------------------------------------------------------------------------------------

    def subscriber(
        self,
        topic: str,
        group: str,
        *,
        concurrency: int = 1,
        timeout: float | None = None,
        window: int | None = None,
        holder_of: Callable[[Membership], Holder] | None = None,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Return a decorator: the handler gets the messages of a group while `run` runs.

        A handler that returns acks its message, unless it answered the message itself; a handler that raises nacks it
        with the error as the reason. Messages are extended while they are handled. Messages of one key are handled one
        after the other.

        Args:
            topic, group: as in `consume`.
            concurrency: the most handlers that run at the same time.
            timeout: the most seconds of one call; then it is cancelled and the message nacked.
            window: the most messages held; twice the concurrency plus 16 by default.
            holder_of: of the blocking client, whose handlers run in threads.
            options: further ones of `consume`: `start`, `settings`, `create`.
        """
        size = 2 * concurrency + 16 if window is None else window
        consumer = self.consume(topic, group, window=size, **options)
        consumer.holder_of = holder_of or consumer.holder_of

        def register(handler: Handler) -> Handler:
            self._services.append(SubscriberService(consumer, handler, concurrency, timeout, self._span))
            return handler

        return register

    def responder(
        self, pattern: str, *, group: str = "respond", concurrency: int = 16, timeout: float | None = None
    ) -> Callable[[Answerer], Answerer]:
        """Return a decorator: the handler answers requests while `run` runs.

        It gets a `Question` and returns the payload of the reply, or a `Reply`; its exceptions are told to the
        requester.

        Args:
            pattern, group: as in `respond`.
            concurrency: the most handlers that run at the same time.
            timeout: the most seconds of one call; by default as long as the requester waits.
        """
        responder = self.respond(pattern, group=group, window=2 * concurrency)

        def register(handler: Answerer) -> Answerer:
            self._services.append(ResponderService(responder, handler, concurrency, timeout, self._span))
            return handler

        return register

    async def run(self, *, stop_seconds: float = 30.0, signals: bool = True) -> None:
        """Run the handlers of `subscriber` and `responder` until SIGTERM or SIGINT, or until it is cancelled.

        Connects if the client is not connected yet, and then disconnects at the end. A lost connection is made again,
        as long as it takes. At the end running handlers get `stop_seconds`; other messages go to other members.

        Raises:
            ClientError: a handler cannot go on: its topic or group was removed, or the right to it taken away.
        """
        if not self._services:
            raise LocalProtocolError("no handlers: decorate them with 'subscriber' or 'responder' first")
        if self._keeper.entered:
            await run_services(self._services, self._stop_asked, stop_seconds=stop_seconds, signals=signals)
            return
        async with self:
            await run_services(self._services, self._stop_asked, stop_seconds=stop_seconds, signals=signals)

    def stop(self) -> None:
        """Stop `run`, as SIGTERM does."""
        self._stop_asked.set()

    # -- topics ------------------------------------------------------------------------------------------------------

    async def create_topic(self, name: str) -> None:
        """Create a topic with the server's default settings. Needs administrative rights.

        Raises:
            TopicExistsError: there is one of this name.
            NoRightsError: we may not.
            RequestError: the server refused for another reason; `repeat` is true if a retry may help.
            OutcomeUnknownError: the connection was lost before the answer.
            LocalProtocolError: jebp has no such name.
        """
        response = await self._call_once(encode_request(CreateTopic(name)), f"create topic {name!r}")
        if is_success(response.status):
            return
        status, repeat = response.status, response.repeat
        if status == 0xB6:
            raise TopicExistsError(f"topic {name!r} exists", status, repeat)
        if status in (0xB5, 0xB7):
            raise NoRightsError(f"no administrative rights to create topic {name!r}", status, repeat)
        # With `jebp_status=table` the server says b4 for a topic that exists, and we cannot know its reading.
        raise RequestError(f"the server could not create topic {name!r}, or it exists", status, repeat)

    async def remove_topic(self, name: str) -> None:
        """Remove a topic with all its records. Needs administrative rights.

        Raises:
            UnknownTopicError: there is no topic of this name.
            NoRightsError: no right to remove topics, or the removal failed: jebp has one status for both.
            RequestError, OutcomeUnknownError, LocalProtocolError: as `create_topic`.
        """
        response = await self._call_once(encode_request(RemoveTopic(name)), f"remove topic {name!r}")
        if is_success(response.status):
            return
        status, repeat = response.status, response.repeat
        if status == 0xB7:
            raise UnknownTopicError(f"there is no topic {name!r}", status, repeat)
        if status == 0xB8:
            raise NoRightsError(f"no administrative rights to remove topic {name!r}", status, repeat)
        raise RequestError(f"the server could not remove topic {name!r}", status, repeat)

    async def _call_once(self, content: bytes, what: str) -> Response:
        link = await self._keeper.get(self._timeout_seconds)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                (response,) = await link.call(content)
        except TimeoutError:
            raise RequestTimeoutError(f"{what}: no answer for {self._timeout_seconds:g} s") from None
        except ConnectionLostError as error:
            raise OutcomeUnknownError(f"{what}: {error}; it may be done or not") from error
        return response

    # -- publishing --------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        payload: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int = 0,
        partition: int = ANY_PARTITION,
    ) -> Position:
        """Publish one record and return where it is, once it is as safe as its topic promises (a round trip).

        Calls of one turn of the event loop go out together, as one batch: `asyncio.gather` of a thousand of them costs
        little more than `publish_many`.

        Args:
            topic: an existing topic.
            payload: the bytes; `None` is a tombstone, which removes the key from a compacted topic.
            key: compaction keeps the last record of each key.
            headers: pairs of a key and a value or `None`; 126 at the most, no key begins with `$`.
            timestamp: milliseconds since the epoch; 0 is this machine's time.
            partition: its partition; -1 lets the server choose one for all that go out together, regardless of the
                key. To have all records of a key in one partition, pass `zlib.crc32(key) % partitions`, as the server
                does for others.

        Raises:
            RequestError: the server refused it, or could not store it for `request_timeout_seconds`.
            RequestTimeoutError: no answer came; the record may be stored or not.
            InvalidRecordError, LocalProtocolError: the record cannot be stored.
            ClientError: there is no connection any more.
        """
        if self._producer.full:
            await self._producer.room()
        timestamp = timestamp or self._clock.now_ms()
        if self._tracing is None:
            return await self._batcher.publish(topic, partition, Record(payload, key, headers, timestamp))
        with self._tracing.sending("publish", topic) as trace:
            record = Record(payload, key, (*headers, *trace), timestamp)
            return await self._batcher.publish(topic, partition, record)

    async def publish_many(
        self,
        topic: str,
        payloads: Sequence[bytes] | Sequence[Record],
        *,
        timestamps: Sequence[int] | None = None,
        partition: int = ANY_PARTITION,
        batch_records: int = 1_000,
    ) -> list[Published]:
        """Publish a list in batches, several on the way at once; return where each batch is when all are safe.

        With `partition` -1 the server chooses a partition for each batch; give one to keep the order of a topic with
        several. A batch of 1,000 payloads of 100 bytes costs this side about 1 ms. Others of this client's tasks
        may have batches stored in between.

        Args:
            topic: an existing topic.
            payloads: all `bytes`, or all `Record` (their `offset` is ignored).
            timestamps: milliseconds since the epoch for each; 0 or no list is this machine's time, or the record's own.
            partition: as in `publish`.
            batch_records: most records of a batch; `batch_bytes_max` bounds it too.

        Raises:
            BabelbusError: as `publish`, the first one there was. Batches before and behind it may be stored.
        """
        if not 1 <= batch_records <= BATCH_RECORDS_MAX:
            raise LocalProtocolError(f"batches of {batch_records} records, 1 to {BATCH_RECORDS_MAX} are possible")
        batches = cut_batches(
            payloads,
            timestamps,
            now_ms=self._clock.now_ms,
            batch_records=batch_records,
            batch_bytes_max=self._batch_bytes_max,
        )
        return await publish_batches(self._producer, topic, partition, batches)

    def send(
        self,
        topic: str,
        payload: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int = 0,
        partition: int = ANY_PARTITION,
    ) -> None:
        """Add a record (as in `publish`) to the batch of its topic and partition, and return at once; about 1 us.

        A batch goes out when it has `batch_bytes_max` bytes or is `linger_seconds` old. With `partition` -1 the server
        chooses one for the whole batch. `flush` raises its error. This method never waits: endless senders must
        check `full`:

            client.send(topic, payload)
            if client.full:
                await client.drain()

        Raises:
            InvalidRecordError: the record cannot be stored.
            ClientError: the client is closed.
        """
        self._batcher.add(topic, payload, key, headers, timestamp, partition)

    @property
    def full(self) -> bool:
        """Whether `in_flight_bytes_max` bytes wait for their acknowledgement: time for `drain`."""
        return self._producer.full

    async def drain(self) -> None:
        """Return when there is room below `in_flight_bytes_max`. Errors wait for `flush`."""
        await self._producer.room()

    async def flush(self) -> Flushed:
        """Send the records that `send` has collected, and return when every record so far is acknowledged.

        Raises:
            BabelbusError: the first error of a batch since the last flush; the others may be stored all the same.
        """
        return await self._batcher.flush()
