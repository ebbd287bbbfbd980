"""The same client without `await`, for programs without an event loop: calls from any thread."""

import asyncio
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Self, Unpack

from babelbus.clients.jebp.batching import Flushed, check_bytes, check_headers, record_bytes
from babelbus.clients.jebp.client import Client
from babelbus.clients.jebp.consumer import Consumer
from babelbus.clients.jebp.errors import ClientClosedError
from babelbus.clients.jebp.live import Event, Subscription
from babelbus.clients.jebp.manage import BlockingDeadLetters, BlockingGroups, BlockingTopics
from babelbus.clients.jebp.messages import Delivery, Holder, Membership, Message
from babelbus.clients.jebp.reader import FollowOptions
from babelbus.clients.jebp.respond import Question, Responder
from babelbus.clients.jebp.state_blocking import BlockingState
from babelbus.clients.jebp.transactions import PartWriter, Transaction
from babelbus.clients.portal import Portal, Twin, blocking, building, streaming
from babelbus.errors import BabelbusError
from babelbus.protocols.jebp.call_messages import Reply
from babelbus.protocols.jebp.messages import ANY_PARTITION, PartRecords
from babelbus.records.plain import InvalidRecordError
from babelbus.records.record import Headers, Record

ACK_SECONDS = 0.002
"""How long acks of other threads are collected before they are sent, unless the reader comes for more messages."""

_Sent = tuple[str, bytes | None, bytes | None, Headers, int, int]


class BlockingClient(Twin[Client]):
    """`Client` for programs without an event loop; the arguments, calls and errors are the same, without `await`.

    Safe for several threads. A call costs about 50 us more than its asynchronous brother, for waking two threads, but
    `send` only takes a lock: the loop gets all collected records together. `send` blocks while
    `in_flight_bytes_max` bytes wait for their acknowledgement.
    """

    @building(Client)
    def __init__(self, client: Client) -> None:
        refusal = "the client is not connected: use 'with', once for each client"
        super().__init__(Portal("jebp client", lambda: ClientClosedError(refusal)), client)
        self.topics = BlockingTopics(self._portal, client.topics)
        self.groups = BlockingGroups(self._portal, client.groups)
        self.dead_letters = BlockingDeadLetters(self._portal, client.dead_letters)
        self.state = BlockingState(self._portal, client.state)
        """The state; see `Client.state`."""
        self._lock = threading.Lock()
        self._sent: list[_Sent] = []
        self._sent_bytes = 0
        self._error: BabelbusError | None = None

    # -- connection --------------------------------------------------------------------------------------------------

    def __enter__(self) -> "BlockingClient":
        """Start the thread and connect; see `Client.__aenter__`."""
        self._portal.open()
        try:
            self._portal.call(self._twin.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Flush the sent records, unless an error is being raised, and disconnect."""
        try:
            if error is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect without a flush, and end the thread."""
        try:
            if self._portal.is_open:
                self._portal.call(self._twin.close())
        finally:
            self._portal.close()

    @property
    def server_fingerprint(self) -> str:
        """The fingerprint of the server's certificate."""
        return self._twin.server_fingerprint

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._twin.connected

    @property
    def acknowledged(self) -> int:
        """How many records of `publish`, `publish_many` and `send` the server has acknowledged."""
        return self._twin.acknowledged

    def transaction(self, transaction: str) -> "BlockingTransaction":
        """Return the staged batches under a transaction id; see `Client.transaction`."""
        return BlockingTransaction(self._portal, self._twin.transaction(transaction))

    create_topic = blocking(Client.create_topic)
    remove_topic = blocking(Client.remove_topic)

    # -- groups, live events and requests ------------------------------------------------------------------------------

    def consume(self, topic: str, group: str, **options: Any) -> "BlockingConsumer":
        """Return a member of a consumer group: `for message in client.consume("orders", "billing")`.

        The options are those of `Client.consume`. Messages are answered from any thread.
        """
        return BlockingConsumer(self._portal, self._twin.consume(topic, group, **options))

    def subscribe(self, *patterns: str, window: int = 4_096) -> "BlockingSubscription":
        """Return a live subscription: `for event in client.subscribe("plant/+/temp")`; see `Client.subscribe`."""
        return BlockingSubscription(self._portal, self._twin.subscribe(*patterns, window=window))

    def respond(self, pattern: str, *, group: str = "respond", window: int = 100) -> "BlockingResponder":
        """Return a responder: `for question in client.respond("calc/+")`; see `Client.respond`."""
        return BlockingResponder(self._portal, self._twin.respond(pattern, group=group, window=window))

    emit = blocking(Client.emit)
    request = blocking(Client.request)

    def subscriber(
        self, topic: str, group: str, *, concurrency: int = 1, **options: Any
    ) -> Callable[[Callable[[Message], object]], Callable[[Message], object]]:
        """Return a decorator for a handler of messages, which runs in threads while `run` runs.

        As `Client.subscriber`; `concurrency` is the number of threads. A call that takes longer than `timeout` is not
        interrupted, but its message is nacked.
        """

        def register(handler: Callable[[Message], object]) -> Callable[[Message], object]:
            from concurrent.futures import ThreadPoolExecutor

            threads = ThreadPoolExecutor(concurrency, f"{group} of {topic}")

            async def handle(message: Message) -> None:
                await asyncio.get_running_loop().run_in_executor(threads, handler, message)

            self._twin.subscriber(topic, group, concurrency=concurrency, holder_of=self._answers, **options)(handle)
            return handler

        return register

    def _answers(self, membership: Membership) -> Holder:
        return _Answers(self._portal, membership)

    def responder(
        self, pattern: str, *, group: str = "respond", concurrency: int = 16, timeout: float | None = None
    ) -> Callable[[Callable[[Question], bytes | Reply | None]], Callable[[Question], bytes | Reply | None]]:
        """Return a decorator for a handler of requests, which runs in threads while `run` runs."""

        def register(handler: Callable[[Question], bytes | Reply | None]) -> Callable[[Question], bytes | Reply | None]:
            from concurrent.futures import ThreadPoolExecutor

            threads = ThreadPoolExecutor(concurrency, f"responder of {pattern}")

            async def handle(question: Question) -> bytes | Reply | None:
                return await asyncio.get_running_loop().run_in_executor(threads, handler, question)

            self._twin.responder(pattern, group=group, concurrency=concurrency, timeout=timeout)(handle)
            return handler

        return register

    def run(self, *, stop_seconds: float = 30.0, signals: bool = True) -> None:
        """Run the handlers until SIGTERM or SIGINT, or until `stop`; see `Client.run`. Connects if need be."""
        if not self._portal.is_open:
            with self:
                self.run(stop_seconds=stop_seconds, signals=signals)
            return
        caught = {}
        if signals and threading.current_thread() is threading.main_thread():
            caught = {one: signal.signal(one, lambda *_: self.stop()) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._portal.call(self._twin.run(stop_seconds=stop_seconds, signals=False))
        finally:
            for one, before in caught.items():
                signal.signal(one, before)

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        self._portal.post(self._twin.stop)

    # -- publishing --------------------------------------------------------------------------------------------------

    publish = blocking(Client.publish)
    publish_many = blocking(Client.publish_many)
    drain = blocking(Client.drain)

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
        """Send a record with the next batch; see `Client.send`. Blocks while too much is on the way."""
        if timestamp < 0:
            raise InvalidRecordError(f"a record's time is {timestamp} ms, it must not be negative")
        check_bytes(payload, key)
        if headers:
            check_headers(headers)
        with self._lock:
            if not self._sent:  # the first one wakes the loop, for all that come until it is awake
                self._portal.post(self._hand_over)
            self._sent.append((topic, payload, key, headers, timestamp, partition))
            self._sent_bytes += record_bytes(payload, key, headers)
            full = self._twin.full or self._sent_bytes >= self._twin.in_flight_bytes_max
        if full:
            self.drain()

    def _hand_over(self) -> None:
        """Send the records that other threads have collected; the loop keeps them in front of later calls."""
        with self._lock:
            sent, self._sent, self._sent_bytes = self._sent, [], 0
        for topic, payload, key, headers, timestamp, partition in sent:
            try:
                self._twin.send(topic, payload, key=key, headers=headers, timestamp=timestamp, partition=partition)
            except BabelbusError as error:
                self._error = self._error or error

    @property
    def full(self) -> bool:
        """Whether the next `send` would block."""
        return self._twin.full

    def flush(self) -> Flushed:
        """Return when everything sent so far is acknowledged; see `Client.flush`."""
        flushed = self._portal.call(self._twin.flush())
        error, self._error = self._error, None
        if error is not None:
            raise error
        return flushed

    # -- reading -----------------------------------------------------------------------------------------------------

    fetch = blocking(Client.fetch)
    positions = blocking(Client.positions)
    move_group = blocking(Client.move_group)
    fetch_partition = blocking(Client.fetch_partition)
    first_offset = blocking(Client.first_offset)
    end_offset = blocking(Client.end_offset)
    follow_batches = streaming(Client.follow_batches)

    def follow(self, topic: str, **options: Unpack[FollowOptions]) -> Generator[Record, None, None]:
        """Yield records from an offset, a time (ms) or the first one on, and new ones later; see `Client.follow`."""
        with closing(self.follow_batches(topic, **options)) as batches:  # a change of threads for each batch
            for batch in batches:
                yield from batch.records()


class _Answers:
    """The answers to messages of one membership, from any thread: collected, and sent by the loop some at a time."""

    def __init__(self, portal: Portal, membership: Membership) -> None:
        self.topic, self.group = membership.topic, membership.group
        self._portal = portal
        self._membership = membership
        self._lock = threading.Lock()
        self._acks: list[tuple[Delivery, int]] = []

    @property
    def ended_now(self) -> bool:
        """Whether no answer counts any more."""
        return self._membership.ended_now

    def ack(self, delivery: Delivery, number: int) -> None:
        """Add an ack; the first one of some wakes the loop."""
        with self._lock:
            self._acks.append((delivery, number))
            first = len(self._acks) == 1
        if first:
            self._portal.post(self._arm)

    def _arm(self) -> None:
        asyncio.get_running_loop().call_later(ACK_SECONDS, self.flush)

    def flush(self) -> None:
        """Send the acks; in the loop."""
        with self._lock:
            acks, self._acks = self._acks, []
        ack = self._membership.ack
        for delivery, number in acks:
            ack(delivery, number)
        self._membership.flush_acks()

    def nack(self, delivery: Delivery, number: int, reason: str, delay: float | None, *, final: bool) -> None:
        self._portal.post(lambda: self._membership.nack(delivery, number, reason, delay, final=final))

    def extend(self, ranges: list[int]) -> None:
        self._portal.post(lambda: self._membership.extend(ranges))


class _Collector:
    """The answers to messages of one consumer, over one membership after the other.

    It does not know the consumer: a cycle would keep messages, and the membership, until the cycle collector runs.
    """

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._answers: _Answers | None = None

    def holder_of(self, membership: Membership) -> Holder:
        """Return the one object that takes the answers of a membership."""
        if self._answers is None or self._answers._membership is not membership:
            self._answers = _Answers(self._portal, membership)
        return self._answers

    def flush(self) -> None:
        """Send the acks; in the loop."""
        if self._answers is not None:
            self._answers.flush()


class BlockingConsumer(Twin[Consumer]):
    """`Consumer` for threads: `for message in consumer`. Several threads may read it."""

    def __init__(self, portal: Portal, twin: Consumer) -> None:
        super().__init__(portal, twin)
        self._answers = _Collector(portal)
        self._messages: Iterator[Message] = iter(())
        self._loading = threading.Lock()
        twin.holder_of = self._answers.holder_of

    topic = property(lambda self: self._twin.topic)
    group = property(lambda self: self._twin.group)
    rejoined = property(lambda self: self._twin.rejoined)

    join = blocking(Consumer.join)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Wait for the next message; see `Consumer.__anext__`."""
        while True:
            message = next(self._messages, None)
            if message is not None:
                return message
            with self._loading:  # of the threads that read together, one asks for more
                message = next(self._messages, None)
                if message is not None:
                    return message
                messages = self._portal.call(self._take())
                if not messages:
                    raise StopIteration
                self._messages = iter(messages)

    async def _take(self) -> list[Message]:
        self._answers.flush()
        return await self._twin.take()

    def next(self, timeout: float | None = None) -> Message | None:
        """Return the next message, `None` if no message comes within `timeout` seconds or the consumer has left."""
        message = next(self._messages, None)
        if message is None:
            self._portal.post(self._answers.flush)
            message = self._portal.call(self._twin.next(timeout))
        return message

    def set_window(self, window: int) -> None:
        """Set the most messages that the member holds unanswered; see `Consumer.set_window`."""
        self._portal.post(lambda: self._twin.set_window(window))

    async def _leave(self) -> None:
        self._answers.flush()
        await self._twin.leave()

    def leave(self) -> None:
        """End the membership; see `Consumer.leave`."""
        self._messages = iter(())
        self._portal.call(self._leave())

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._portal.is_open:
            self.leave()


class BlockingSubscription(Twin[Subscription]):
    """`Subscription` for threads: `for event in subscription`."""

    def __init__(self, portal: Portal, twin: Subscription) -> None:
        super().__init__(portal, twin)
        self._events: Iterator[Event] = iter(())
        self._loading = threading.Lock()

    dropped = property(lambda self: self._twin.dropped)
    resubscribed = property(lambda self: self._twin.resubscribed)
    narrowed = property(lambda self: self._twin.narrowed)

    begin = blocking(Subscription.begin)
    close = blocking(Subscription.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """Wait for the next event; see `Subscription.__anext__`."""
        event = next(self._events, None)
        if event is not None:
            return event
        with self._loading:  # of the threads that read together, one asks for more
            event = next(self._events, None)
            if event is None:
                events = self._portal.call(self._twin.take())
                if not events:
                    raise StopIteration
                event, *rest = events
                self._events = iter(rest)
            return event

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._portal.is_open:
            self.close()


class BlockingResponder(Twin[Responder]):
    """`Responder` for threads: `for question in responder`. Several threads may read it."""

    def __init__(self, portal: Portal, twin: Responder) -> None:
        super().__init__(portal, twin)
        # Without `self`: a cycle would keep a responder that nobody refers to until the cycle collector runs.
        twin.send_over = lambda stream: lambda answer: portal.post(lambda: stream.send(answer))

    begin = blocking(Responder.begin)
    close = blocking(Responder.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Question:
        """Wait for the next question; see `Responder.__anext__`."""
        question = self._portal.call(self._twin.take())
        if question is None:
            raise StopIteration
        return question

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._portal.is_open:
            self.close()


class BlockingPartWriter(Twin[PartWriter]):
    """`PartWriter`; the calls and errors are the same, without `await`. The client's thread asks for batches."""

    @property
    def staged(self) -> PartRecords:
        """The description of this part for the commit; picklable."""
        return self._twin.staged

    stage = blocking(PartWriter.stage)
    put = blocking(PartWriter.put)
    drain = blocking(PartWriter.drain)
    stage_stored = blocking(PartWriter.stage_stored)
    abort = blocking(PartWriter.abort)


class BlockingTransaction(Twin[Transaction]):
    """`Transaction`; the calls and errors are the same, without `await`."""

    @property
    def id(self) -> str:
        """The transaction id."""
        return self._twin.id

    def writer(self, batch_id: int, part: str) -> BlockingPartWriter:
        """Return the writer of one part; see `Transaction.writer`."""
        return BlockingPartWriter(self._portal, self._twin.writer(batch_id, part))

    commit = blocking(Transaction.commit)
    abort = blocking(Transaction.abort)
    ask = blocking(Transaction.ask)
