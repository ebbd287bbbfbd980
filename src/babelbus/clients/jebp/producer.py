"""Publishing with command 13: batches in the stored form, several on the way, each stored once however often sent.

A topic's batches go through its `TopicQueue` in order. The server remembers the last batches of a producer id by their
sequence numbers, so that a resend after a lost connection gets the first answer again (docs/protocols/jebp.md).
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from babelbus.clients.jebp.connection import Link
from babelbus.clients.jebp.errors import (
    ClientClosedError,
    ClientError,
    RequestError,
    RequestTimeoutError,
    UnsupportedByServerError,
    copy_error,
)
from babelbus.clients.jebp.requests import UNKNOWN_COMMAND_STATUS
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.protocols.jebp.codec import request_parts
from babelbus.protocols.jebp.fields import decode_numbers, encode_name
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.protocols.jebp.messages import CREATE_RECORDS, CreateRecords, Data, RecordsCreated, Response
from babelbus.protocols.jebp.status import is_success

log = logging.getLogger(__name__)

BATCHES_IN_FLIGHT_MAX = 32
"""Batches of a topic on the way: fewer than the 64 that the server remembers, or a resend could be a stranger to it."""
BATCH_RECORDS_MAX = 2**16
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 1.0
_HEAD_BYTES_MAX = 300  # command, name, partition, producer and sequence, tag


class Published(msgspec.Struct, frozen=True):
    """Where a batch was stored: `count` records of one partition, the first at `base_offset`."""

    partition: int
    base_offset: int
    count: int


class Waiter(Protocol):
    """Waits for the place of a batch; a future is one."""

    def done(self) -> bool:
        """Return whether nobody waits any more."""

    def set_result(self, result: Published, /) -> None:
        """Handle the place."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Handle the error."""


class Batch:
    """Some records of one topic and partition from `submit` until their answer; it is the `Pending` of a link.

    `done` gets their place, or the error.
    """

    __slots__ = ("count", "data", "done", "partition", "queue", "repeated_since", "sent_at", "sequence", "submitted_at")

    def __init__(self, queue: "TopicQueue", partition: int, data: Data, count: int, done: Waiter) -> None:
        self.queue = queue
        self.partition = partition
        self.data = data
        self.count = count
        self.done = done
        self.sequence = -1
        self.submitted_at = 0.0
        self.sent_at = 0.0
        self.repeated_since = 0.0

    def answered(self, responses: Sequence[Response]) -> None:
        """Handle the one answer."""
        self.queue.answered(self, responses[0])

    def lost(self, error: ClientError) -> None:
        """Return: `Producer.disconnected` puts the batches of a lost connection back in order."""


class TopicQueue:
    """The batches of one topic, in the order in which they are to be stored.

    Two rules keep the order and store each batch once. After a batch was not stored nothing more is sent until all that
    is on the way is answered, then everything is sent again from there. And as long as the server has stored nothing of
    a producer id, one batch at a time is on the way: from a producer that it does not know it takes any first sequence
    number, so a second batch could slip in before a first that it refused.
    """

    def __init__(self, producer: "Producer", topic: str, producer_id: int) -> None:
        self.topic = topic
        self._producer = producer
        self._producer_id = producer_id
        self._next_sequence = 0
        self._known = False  # the server has stored something of this producer id
        self._hole = False  # a batch was given up, so the numbers behind it would never be taken
        self._stopped = False
        self._pause_seconds = 0.0
        self._warned = False  # the server answers "not now", and the log has a line about that
        self._queue: deque[Batch] = deque()
        self._in_flight: deque[Batch] = deque()
        self._again: list[Batch] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._queue or self._in_flight or self._again)

    def outstanding(self) -> list[Batch]:
        """Return all batches that are not answered, in order."""
        return [*self._again, *self._in_flight, *self._queue]

    def submit(self, batch: Batch) -> None:
        """Add a batch; without a connection its time begins at once."""
        batch.submitted_at = self._producer.now()
        if self._producer.link is None:
            batch.sent_at = batch.submitted_at
        self._queue.append(batch)
        self.pump()

    def pump(self) -> None:
        """Send as many batches as may be on the way."""
        link = self._producer.link
        while self._queue and link is not None and not self._stopped:
            if len(self._in_flight) >= (BATCHES_IN_FLIGHT_MAX if self._known else 1):
                return
            self._send(self._queue.popleft(), link)

    def _send(self, batch: Batch, link: Link) -> None:
        if batch.sequence < 0:
            batch.sequence = self._next_sequence
            self._next_sequence += batch.count
        batch.sent_at = batch.sent_at or self._producer.now()
        request = CreateRecords(self.topic, batch.partition, self._producer_id, batch.sequence, batch.data)
        self._in_flight.append(batch)
        link.send(link.sealer.seal_parts(request_parts(request)), 1, batch)

    def answered(self, batch: Batch, response: Response) -> None:
        """Handle the answer to the batch that was sent first."""
        assert self._in_flight[0] is batch, "answers come in the order of the requests"
        # Read first: a broken answer ends the connection, and the batch must then still be among those on the way.
        place = decode_numbers(RecordsCreated, response.content) if is_success(response.status) else None
        self._in_flight.popleft()
        self._producer.answered_at = self._producer.now()
        if place is not None:
            self._known, self._hole, self._warned = True, False, False
            self._pause_seconds = 0.0
            self._producer.finish(batch, Published(place.partition, place.base_offset, batch.count), None)
        elif response.repeat:
            self._put_back(batch, response)
        else:
            self._give_up(batch, _refusal(self.topic, response))
        if self._stopped and not self._in_flight:
            self._restart()
        else:
            self.pump()

    def _put_back(self, batch: Batch, response: Response) -> None:
        producer = self._producer
        now = producer.now()
        batch.repeated_since = batch.repeated_since or now
        batch.sent_at = now  # the server answers, so this is no silence
        seconds = now - batch.repeated_since
        if seconds >= producer.timeout_seconds:
            reason = f"{self._not_now()}; given up after {seconds:.1f} s"
            self._give_up(batch, RequestError(reason, response.status, True))
            return
        if not self._warned:
            self._warned = True
            log.warning("%s; trying for %g s", self._not_now(), producer.timeout_seconds)
        self._again.append(batch)
        self._stopped = True

    def _not_now(self) -> str:
        producer = self._producer
        return (
            f"topic {self.topic!r}: the server cannot store at present (its disk may be full): "
            f"{producer.acknowledged} of {producer.submitted} records are stored"
        )

    def _give_up(self, batch: Batch, error: BabelbusError) -> None:
        self._hole = self._stopped = True
        self._producer.finish(batch, None, error)

    def _restart(self) -> None:
        """Send all batches that were not stored again, at once or after a pause, under numbers without a hole."""
        self._queue.extendleft(reversed(self._again))
        if self._hole:
            self._producer_id, self._next_sequence, self._known, self._hole = _new_producer_id(), 0, False, False
            for batch in self._queue:
                batch.sequence = -1
            self._again.clear()
            self._go_on()
            return
        self._again.clear()
        self._pause_seconds = min(max(2 * self._pause_seconds, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)
        self._producer.call_later(self._pause_seconds, self._go_on)

    def _go_on(self) -> None:
        if not self._in_flight:
            self._stopped = False
            self.pump()

    def disconnected(self) -> None:
        """Move the batches in flight back to the front: they are sent again under the same numbers."""
        self._queue.extendleft(reversed([*self._again, *self._in_flight]))
        self._again.clear()
        self._in_flight.clear()
        self._stopped = False

    def fail_late(self, before: float, error: BabelbusError) -> None:
        """Drop queued batches that were first sent (or, without a connection, submitted) before this time."""
        while self._queue and 0 < self._queue[0].sent_at <= before:
            batch = self._queue.popleft()
            self._hole = True
            self._producer.finish(batch, None, error)

    def fail_all(self, error: BabelbusError) -> None:
        """Drop all batches."""
        batches = self.outstanding()
        self._queue.clear()
        self._in_flight.clear()
        self._again.clear()
        for batch in batches:
            self._hole = True
            self._producer.finish(batch, None, copy_error(error))


class Producer:
    """The queues of all topics of a client. `link` is the connection, `None` without a connection.

    Attributes:
        held_bytes: of batches that are not answered yet.
        acknowledged: records that the server has stored, as safely as their topic promises.
        submitted: records that were handed in.
        answered_at: when the server last answered a batch.
    """

    def __init__(self, now: Callable[[], float], *, in_flight_bytes_max: int, timeout_seconds: float) -> None:
        self.now = now
        self.link: Link | None = None
        self.timeout_seconds = timeout_seconds
        self.in_flight_bytes_max = in_flight_bytes_max
        self.held_bytes = 0
        self.acknowledged = 0
        self.submitted = 0
        self.answered_at = 0.0
        self.closed: ClientError | None = ClientClosedError("the client is not connected: use 'async with'")
        self._loop: asyncio.AbstractEventLoop
        self._producer_id = _new_producer_id()
        self._queues: dict[str, TopicQueue] = {}
        self._waiting_for_room: dict[asyncio.Future[None], None] = {}  # in order

    def open(self) -> None:
        """Start to accept batches."""
        self._loop = asyncio.get_running_loop()
        self.closed = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back later."""
        self._loop.call_later(seconds, callback)

    def submit(self, topic: str, partition: int, data: Data, count: int) -> "asyncio.Future[Published]":
        """Send a batch in the stored form; the future has its place, once it is stored.

        Raises: the errors of `put`.
        """
        done: asyncio.Future[Published] = self._loop.create_future()
        self.put(topic, partition, data, count, done)
        return done

    def put(self, topic: str, partition: int, data: Data, count: int, done: Waiter) -> None:
        """Send a batch in the stored form; `done` gets its place, once it is stored.

        Raises:
            LocalProtocolError: the topic's name is invalid, or the batch is over the frame limit.
            ClientError: the client is closed or has lost its connection for good.
        """
        if self.closed is not None:
            raise copy_error(self.closed)
        if len(data) > FRAME_BYTES_MAX - _HEAD_BYTES_MAX:
            raise LocalProtocolError(f"batch of {len(data)} bytes, limit {FRAME_BYTES_MAX - _HEAD_BYTES_MAX}")
        queue = self._queues.get(topic)
        if queue is None:
            encode_name(topic)
            queue = self._queues[topic] = TopicQueue(self, topic, self._producer_id)
        self.held_bytes += len(data)
        self.submitted += count
        queue.submit(Batch(queue, partition, data, count, done))

    def outstanding(self) -> list[Batch]:
        """Return all batches that are not answered."""
        return [batch for queue in self._queues.values() for batch in queue.outstanding()]

    def finish(self, batch: Batch, published: Published | None, error: BabelbusError | None) -> None:
        """Set the result of a batch and notify its waiters."""
        self.held_bytes -= len(batch.data)
        if published is not None:
            self.acknowledged += batch.count
        if self._waiting_for_room and self.held_bytes < self.in_flight_bytes_max:
            waiting, self._waiting_for_room = self._waiting_for_room, {}
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        if batch.done.done():  # the caller gave up
            return
        if published is not None:
            batch.done.set_result(published)
        elif error is not None:
            batch.done.set_exception(error)

    @property
    def full(self) -> bool:
        """Whether publishers should wait."""
        return self.held_bytes >= self.in_flight_bytes_max

    async def room(self) -> None:
        """Wait until there is room for more."""
        while self.full:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting_for_room[future] = None
            try:
                await future
            finally:
                self._waiting_for_room.pop(future, None)  # a caller that gives up leaves nothing behind

    # -- the connection ----------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        """Continue to send on a new connection."""
        self.link = link
        for queue in list(self._queues.values()):
            queue.pump()

    def disconnected(self) -> None:
        """Keep the batches in flight for the next connection."""
        self.link = None
        for queue in self._queues.values():
            queue.disconnected()
            for batch in queue.outstanding():
                # Its time runs while nothing can be sent, and did while the server answered no batch before it.
                batch.sent_at = batch.sent_at or max(batch.submitted_at, self.answered_at)

    def expire(self, lost: ClientError | None) -> None:
        """Drop batches without an answer for too long although they were sent again; called regularly.

        If there is no connection, `lost` says why.
        """
        before = self.now() - self.timeout_seconds
        why = "" if lost is None else f"; there is no connection: {lost}"
        error = RequestTimeoutError(
            f"a batch has had no answer for {self.timeout_seconds:g} s; it may be stored or not{why}"
        )
        error.__cause__ = lost
        for queue in self._queues.values():
            if not queue.idle:
                queue.fail_late(before, error)

    def close(self, error: ClientError) -> None:
        """Refuse further batches, and fail all waiting ones."""
        self.closed = self.closed or error
        self.link = None
        for queue in self._queues.values():
            queue.fail_all(error)


def _new_producer_id() -> int:
    return int.from_bytes(os.urandom(8), "big") >> 1


def _refusal(topic: str, response: Response) -> ClientError:
    if response.status == UNKNOWN_COMMAND_STATUS:
        return UnsupportedByServerError(f"publish to {topic!r}", CREATE_RECORDS)
    return RequestError(
        f"the server refused a batch of topic {topic!r}: no such topic or partition, no right to publish, or a record "
        f"that it does not take",
        response.status,
        False,
    )
