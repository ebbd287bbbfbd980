"""Records -> batches: `send` collects them until a batch is full or old enough, lists are cut."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import msgspec

from babelbus.clients.jebp.errors import RequestError, copy_error
from babelbus.clients.jebp.producer import BATCH_RECORDS_MAX, Producer, Published
from babelbus.clock import Clock
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.records.plain import (
    HEADERS_MAX,
    RECORD_BYTES_MIN,
    RESERVED_HEADER_PREFIX,
    InvalidRecordError,
    encode_records,
    join_bodies,
    payload_bodies,
)
from babelbus.records.record import Headers, Record, RecordBatch


class Position(msgspec.Struct, frozen=True, gc=False):
    """Where one record was stored."""

    partition: int
    offset: int


class Flushed(msgspec.Struct, frozen=True):
    """The acknowledged records of `send` since the last flush."""

    records: int
    batches: int


class _Open:
    """A batch that is still collected."""

    __slots__ = ("bytes", "now_ms", "records")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.records: list[Record] = []
        self.bytes = 0


class _Turn:
    """The records of `publish` that one turn of the event loop brings for a topic and partition.

    It is the `Waiter` of their batch: a future for the batch would wake the callers a turn later.
    """

    __slots__ = ("_send_alone", "bytes", "futures", "records")

    def __init__(self, send_alone: "Callable[[_Turn], object]") -> None:
        self.records: list[Record] = []
        self.futures: list[asyncio.Future[Position]] = []
        self.bytes = 0
        self._send_alone = send_alone

    def done(self) -> bool:
        """Return that callers wait, or may wait."""
        return False

    def set_result(self, published: Published) -> None:
        """Return the places of the records to the callers."""
        partition = published.partition
        for number, future in enumerate(self.futures, published.base_offset):
            if not future.done():
                future.set_result(Position(partition, number))

    def set_exception(self, error: BaseException) -> None:
        """Raise the error in the callers, or send the records again alone: the reason may be one of them."""
        if isinstance(error, RequestError) and not error.repeat and len(self.records) > 1:
            asyncio.get_running_loop().call_soon(self._send_alone, self)
            return
        for future in self.futures:
            if not future.done():
                future.set_exception(copy_error(error) if isinstance(error, BabelbusError) else error)


class Batcher:
    """Collects single records, a batch for each topic and partition, with one timer for all batches.

    Records of `publish` are collected for one turn of the event loop: a thousand calls that wait together are a batch,
    and one call alone goes out at once.
    """

    def __init__(self, producer: Producer, clock: Clock, *, linger_seconds: float, batch_bytes_max: int) -> None:
        self._producer = producer
        self._clock = clock
        self._linger_seconds = linger_seconds
        self._batch_bytes_max = batch_bytes_max
        self._open: dict[tuple[str, int], _Open] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._outstanding: set[asyncio.Future[Published]] = set()
        self._error: Exception | None = None
        self._records = self._batches = 0
        self._turns: dict[tuple[str, int], _Turn] = {}

    # -- publish -----------------------------------------------------------------------------------------------------

    def publish(self, topic: str, partition: int, record: Record) -> "asyncio.Future[Position]":
        """Send a record with all others of this turn; the future has its place.

        Raises:
            InvalidRecordError, ClientError: the record cannot be sent.
        """
        if self._producer.closed is not None:
            raise copy_error(self._producer.closed)
        check_record(record)
        place = (topic, partition)
        if place in self._open:
            self.close_batch(topic, partition)  # earlier records are sent first
        loop = asyncio.get_running_loop()
        turn = self._turns.get(place)
        if turn is None:
            if not self._turns:
                loop.call_soon(self._turn_over)
            turn = self._turns[place] = _Turn(partial(self._send_alone, topic, partition))
        future: asyncio.Future[Position] = loop.create_future()
        turn.records.append(record)
        turn.futures.append(future)
        turn.bytes += record_bytes(record.payload, record.key, record.headers)
        if turn.bytes >= self._batch_bytes_max or len(turn.records) >= BATCH_RECORDS_MAX:
            self._send_turn(topic, partition)
        return future

    def _turn_over(self) -> None:
        for topic, partition in list(self._turns):
            self._send_turn(topic, partition)

    def _send_turn(self, topic: str, partition: int) -> None:
        turn = self._turns.pop((topic, partition), None)
        if turn is None:
            return
        try:
            data = encode_records(turn.records).data
        except Exception as error:  # a value that no record can have: only its caller is told
            if len(turn.records) > 1:
                self._send_alone(topic, partition, turn)
            else:
                turn.set_exception(error)
            return
        try:
            self._producer.put(topic, partition, data, len(turn.records), turn)
        except BabelbusError as error:
            turn.set_exception(error)

    def _send_alone(self, topic: str, partition: int, turn: _Turn) -> None:
        """Send the records of a batch that the server refused one by one."""
        for record, future in zip(turn.records, turn.futures, strict=True):
            self._turns[topic, partition] = alone = _Turn(partial(self._send_alone, topic, partition))
            alone.records, alone.futures = [record], [future]
            self._send_turn(topic, partition)

    # -- send --------------------------------------------------------------------------------------------------------

    def add(
        self, topic: str, payload: bytes | None, key: bytes | None, headers: Headers, timestamp: int, partition: int
    ) -> None:
        """Add one record to the batch of its topic and partition; about 1 us.

        Raises:
            InvalidRecordError, ClientError: the record cannot be sent.
        """
        if self._producer.closed is not None:
            raise copy_error(self._producer.closed)
        if timestamp < 0:
            raise InvalidRecordError(f"a record's time is {timestamp} ms, it must not be negative")
        check_bytes(payload, key)
        if headers:
            check_headers(headers)
        place = (topic, partition)
        batch = self._open.get(place)
        if batch is None:
            batch = self._open[place] = _Open(self._clock.now_ms())
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._linger_seconds, self._linger_over)
        # All records without a time get that of their batch's beginning: a batch of one time is encoded faster.
        batch.records.append(Record(payload, key, headers, timestamp or batch.now_ms))
        batch.bytes += record_bytes(payload, key, headers)
        if batch.bytes >= self._batch_bytes_max or len(batch.records) >= BATCH_RECORDS_MAX:
            self.close_batch(topic, partition)

    def _linger_over(self) -> None:
        self._timer = None
        self.close_all()

    def close_all(self) -> None:
        """Send all collected batches."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for topic, partition in list(self._open):
            self.close_batch(topic, partition)

    def close_batch(self, topic: str, partition: int) -> None:
        """Send the batch of a topic and partition; the next `flush` raises its error."""
        self._send_turn(topic, partition)  # earlier records are sent first
        batch = self._open.pop((topic, partition), None)
        if batch is None:
            return
        try:
            done = self._producer.submit(topic, partition, encode_records(batch.records).data, len(batch.records))
        except Exception as error:  # also of a value that no record can have
            self._error = self._error or error
            return
        self._outstanding.add(done)
        done.add_done_callback(self._note)

    def _note(self, done: "asyncio.Future[Published]") -> None:
        self._outstanding.discard(done)
        error = done.exception()
        if error is None:
            self._records += done.result().count
            self._batches += 1
        elif isinstance(error, BabelbusError):
            self._error = self._error or error

    async def flush(self) -> Flushed:
        """Send the open batches and return when every batch so far is answered.

        Raises:
            BabelbusError: the first error of a batch since the last flush; other batches may be stored.
        """
        self.close_all()
        if self._outstanding:
            await asyncio.wait(self._outstanding)  # which ends behind `_note`
        flushed = Flushed(self._records, self._batches)
        self._records = self._batches = 0
        error, self._error = self._error, None
        if error is not None:
            raise error
        return flushed


async def publish_batches(
    producer: Producer, topic: str, partition: int, batches: Iterator[RecordBatch]
) -> list[Published]:
    """Publish batches as there is room for them; return their places in order when all are answered.

    Raises:
        BabelbusError: the first error; no batch was submitted after it, and all submitted ones are answered.
    """
    submitted: list[asyncio.Future[Published]] = []
    errors: list[BaseException] = []

    def note(done: "asyncio.Future[Published]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            errors.append(error)

    try:
        for batch in batches:
            await producer.room()
            if errors:
                break
            done = producer.submit(topic, partition, batch.data, batch.count)
            done.add_done_callback(note)
            submitted.append(done)
            # The loop sends written bytes and reads answers before the next batch is encoded.
            await asyncio.sleep(0)
    except BabelbusError as error:  # of a record that cannot be stored, or of a client that was closed
        errors.append(error)
    if submitted:
        await asyncio.wait(submitted)
    if errors:
        raise errors[0]
    return [done.result() for done in submitted]


def cut_batches(
    payloads: Sequence[bytes] | Sequence[Record],
    timestamps: Sequence[int] | None,
    *,
    now_ms: Callable[[], int],
    batch_records: int,
    batch_bytes_max: int,
) -> Iterator[RecordBatch]:
    """Yield payloads or records in batches of at most `batch_records` and, but for a single one, `batch_bytes_max`.

    Raises:
        InvalidRecordError: a record cannot be stored.
        LocalProtocolError: there is not a time for each payload.
    """
    if timestamps is not None and len(timestamps) != len(payloads):
        raise LocalProtocolError(f"{len(timestamps)} timestamps for {len(payloads)} records")
    for at in range(0, len(payloads), batch_records):
        part = payloads[at : at + batch_records]
        times = None if timestamps is None else list(timestamps[at : at + len(part)])
        for start, stop in _cut_by_bytes(part, batch_bytes_max):
            piece = part if stop - start == len(part) else part[start:stop]
            yield encode(piece, None if times is None else times[start:stop], now_ms())


def _cut_by_bytes(part: Sequence[bytes] | Sequence[Record], bytes_max: int) -> Iterator[tuple[int, int]]:
    if not isinstance(part[0], Record):
        total = sum(map(len, part)) + RECORD_BYTES_MIN * len(part)  # type: ignore[arg-type]  # bytes, as the first is
        if total <= bytes_max:
            yield 0, len(part)
            return
    sizes = [
        record_bytes(record.payload, record.key, record.headers)
        if isinstance(record, Record)
        else RECORD_BYTES_MIN + len(record)
        for record in part
    ]
    start = before = 0
    for stop, total in enumerate(accumulate(sizes)):
        if total - before > bytes_max and stop > start:
            yield start, stop
            start, before = stop, total - sizes[stop]
    yield start, len(part)


def encode(part: Sequence[bytes] | Sequence[Record], timestamps: list[int] | None, now_ms: int) -> RecordBatch:
    """Return payloads or records as a batch; `now_ms` is the time of those without one.

    Raises:
        InvalidRecordError: a record cannot be stored.
    """
    if isinstance(part[0], Record):
        records: Sequence[Record] = part  # type: ignore[assignment]  # records, as the first is
        if timestamps is not None:
            records = [
                msgspec.structs.replace(record, timestamp=at or record.timestamp)
                for record, at in zip(records, timestamps, strict=True)
            ]
        if not all([record.timestamp for record in records]):  # noqa: C419  # a list is faster
            records = [
                record if record.timestamp else msgspec.structs.replace(record, timestamp=now_ms) for record in records
            ]
        for record in records:
            if record.headers:
                check_headers(record.headers)
        return encode_records(records)
    payloads: Sequence[bytes] = part  # type: ignore[assignment]  # the same
    if timestamps is None:
        timestamps = [now_ms] * len(payloads)
    elif 0 in timestamps:
        timestamps = [at or now_ms for at in timestamps]
    return join_bodies(payload_bodies(payloads, timestamps), timestamps, 0)


def record_bytes(payload: bytes | None, key: bytes | None, headers: Headers) -> int:
    """Return how many bytes the stored form of a record has."""
    size = RECORD_BYTES_MIN + len(payload or b"") + len(key or b"")
    for name, value in headers:
        size += 8 + len(name) + len(value or b"")
    return size


def check_record(record: Record) -> None:
    """Refuse a record that would spoil the batch that it goes out with.

    Raises:
        InvalidRecordError: it cannot be stored.
        TypeError: payload or key are no bytes.
    """
    check_bytes(record.payload, record.key)
    if record.timestamp < 0:
        raise InvalidRecordError(f"a record's time is {record.timestamp} ms, it must not be negative")
    if record.headers:
        check_headers(record.headers)


def check_bytes(payload: object, key: object) -> None:
    """Refuse what is no payload or no key.

    Raises:
        TypeError: one of them is neither bytes nor `None`.
    """
    for name, value in (("payload", payload), ("key", key)):
        if value is not None and type(value) is not bytes and not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"a record's {name} is bytes, not {type(value).__name__}: encode it first")


def check_headers(headers: Headers) -> None:
    """Refuse headers that the server would refuse the whole batch for.

    Raises:
        InvalidRecordError: there are more than 126 (the server adds one), or a key is the server's own.
    """
    if len(headers) >= HEADERS_MAX:
        raise InvalidRecordError(f"a record has {len(headers)} headers, the most are {HEADERS_MAX - 1}")
    for name, _ in headers:
        if name.startswith(RESERVED_HEADER_PREFIX):
            raise InvalidRecordError(f"header {name!r}: keys that begin with '$' are the server's own")
