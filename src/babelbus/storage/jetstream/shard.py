"""One stream and its one writer: messages go out with the sequence that they must get, several at once.

NATS takes a message only when the message in front of it is there. So if a message is refused or lost, all behind it
are refused, and order, fence and idempotence are one mechanism. When an outcome is unknown, nothing is sent again
before the stream was read: the writer takes a new epoch, a record that only one writer can store. A message of a lower
epoch behind that record, however late it comes, counts as not there. So all in front of the record is final.

Everything here runs in the thread of the connection, but for what says otherwise.
"""

import asyncio
import logging
import socket
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import msgspec
from nats.aio.msg import Msg

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.storage.errors import DiskError, DiskFullError, StaleWriterError
from babelbus.storage.jetstream.client import NO_STREAM, WRONG_SEQUENCE, ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError, StreamAlteredError
from babelbus.storage.jetstream.frame import Frame, Head, Kind, crc_of, decode, encode
from babelbus.storage.jetstream.lease import Lease
from babelbus.storage.jetstream.streams import FIXED, check_config

log = logging.getLogger(__name__)

WINDOW = 8
"""Messages of a shard that are on the way at once; what comes meanwhile is gathered into the next ones."""
WINDOW_BYTES = 4 * 2**20
ACK_SECONDS = 2.0
"""When no acknowledgement came for so long, the outcome counts as unknown."""
SETTLE_SECONDS_MAX = 1.0
TAKE_AGAIN_SECONDS = 0.02
EPOCHS_TOGETHER, EPOCHS_BYTES = 1000, 2**20
FULL = {10023, 10047, 10077, 10122}
"""JetStream's codes for: no storage, no memory, over the bytes of the stream or of the account."""


class Message:
    """A frame that is to be stored."""

    __slots__ = (
        "data",
        "data_crc",
        "dropped",
        "epoch",
        "head",
        "is_acked",
        "is_stored",
        "on_stored",
        "owner",
        "sequence",
        "subject",
    )

    def __init__(self, subject: str, head: Head, data: bytes, owner: object, on_stored: "Callable[[Message], None]"):
        self.subject = subject
        self.head = head
        self.data = data
        self.data_crc = crc_of(data)
        self.owner = owner
        self.on_stored = on_stored
        self.epoch = self.sequence = 0
        """Where it was sent to, at the last attempt."""
        self.is_acked = False
        self.is_stored = False
        self.dropped = False


class Source(Protocol):
    """A partition that has records to send."""

    def take_message(self) -> Message | None:
        """Return the next message, `None` if there is nothing to send."""

    def settled(self) -> None:
        """Handle that none of the messages that were dropped is on the way any more. `done` is held."""


class _State(Enum):
    CLOSED = 0
    OPEN = 1
    DOUBT = 2
    FAILED = 3


class _Acknowledgement(msgspec.Struct):
    seq: int = 0
    error: dict[str, int | str] | None = None


class _Taken(msgspec.Struct):
    """The data of an epoch's record."""

    owner: str
    host: str


class Shard:
    """A stream, written by one server. `done` is notified when something was stored or failed."""

    def __init__(
        self,
        nats: Nats,
        label: str,
        stream: str,
        prefix: str,
        installation: str,
        identity: str,
        owner: str,
        clock: Clock,
        fixed: dict[str, Any] = FIXED,
    ) -> None:
        self.label = label
        """The part of the subjects behind the prefix: the number of a shard of records."""
        self.stream = stream
        self.prefix = f"{prefix}.{label}"
        self.done = threading.Condition()
        self.failure: StorageError | None = None
        """Why this server must not write any more: another one does, or the stream is not what it was."""
        self.refusal: StorageError = DiskError("NATS refused a message")
        """Why JetStream refused the last message that it refused for another reason than its sequence: no room."""
        self.refusals = 0
        """How many messages it refused so."""
        self.doubt_since: float | None = None
        """Since when an outcome is unknown (monotonic), `None` if none is."""
        self.doubts = 0
        """How often an outcome was unknown; acks of earlier attempts are passed over."""
        self.reason: StorageError = NatsAwayError("NATS does not answer; try again")
        self.lease: Lease | None = None
        self._nats = nats
        self._installation, self._identity, self._owner = installation, identity, owner
        self._fixed = fixed
        self._clock = clock
        self._state = _State.CLOSED
        self._epoch = 0
        self._epochs: list[tuple[int, int]] = []
        """Sequence and number of each epoch's record."""
        self._stored = 0
        """The sequence up to which everything is known."""
        self._sent = 0
        self._queue: deque[Message | Source] = deque()
        self._in_flight: deque[Message] = deque()
        self._in_flight_bytes = 0
        self._dropping: list[Source] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- opening -----------------------------------------------------------------------------------------------------

    def end(self, reason: StorageError) -> None:
        """Stop to acknowledge: the lease has ended. It goes on when the lease was renewed."""
        self._doubt(reason)

    async def open(self) -> None:
        """Open the stream as its only writer: the writer before it is refused from now on.

        Raises:
            StorageError: the stream is not what it was, or cannot be read or written now.
        """
        await self._take_epoch(opening=True)
        self._stored = self._sent = self._epochs[-1][0]
        self._state = _State.OPEN
        self._nats.on_lost.append(self._lost)
        if self.lease is not None:
            self.lease.on_ended.append(self.end)
        self._task = self._nats.loop.create_task(self._run())

    async def close(self) -> None:
        """Stop to write."""
        self._state = _State.CLOSED
        if self._lost in self._nats.on_lost:
            self._nats.on_lost.remove(self._lost)
        if self.lease is not None and self.end in self.lease.on_ended:
            self.lease.on_ended.remove(self.end)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    @property
    def is_owned(self) -> bool:
        """Whether no other server can write the stream now. From any thread."""
        return self.failure is None and (self.lease is None or self.lease.is_valid())

    def check_owner(self) -> None:
        """Check that no other server can write the stream now. From any thread.

        Raises:
            StaleWriterError: another server has taken the stream, or the lease.
            NatsAwayError: the lease could not be renewed.
        """
        if self.failure is not None:
            raise self.failure
        if self.lease is not None:
            self.lease.check()

    def fault(self, begun: float, refusals: int, timeout: float, what: str) -> StorageError | None:
        """Return why waiting for acks since `begun`, when there were so many refusals, is in vain."""
        if self.failure is not None:
            return self.failure
        if self.refusals != refusals:
            return self.refusal
        since = begun if self.doubt_since is None else min(begun, self.doubt_since)
        if self._clock.monotonic() - since < timeout:
            return None
        return NatsAwayError(f"{what} is unknown") if self.doubt_since is None else self.reason

    @property
    def epoch(self) -> int:
        """The epoch of this server."""
        return self._epoch

    @property
    def epoch_sequence(self) -> int:
        """The sequence of the record of that epoch: all in front of it is final."""
        return self._epochs[-1][0]

    @property
    def _epoch_subject(self) -> str:
        return f"{self.prefix}.$epoch"

    async def check(self) -> None:
        """Check that the stream is as it was made.

        Raises:
            StreamAlteredError: it is not.
            NatsAwayError: NATS does not answer.
        """
        try:
            info = await self._nats.api(f"STREAM.INFO.{self.stream}")
        except ApiError as error:
            if error.code == NO_STREAM:
                raise StreamAlteredError(f"stream {self.stream} is gone: somebody deleted it; restore it") from error
            raise NatsAwayError(f"stream {self.stream}: {error}") from error
        check_config(self.stream, info["config"], self._installation, self._identity, self._fixed)

    async def _take_epoch(self, *, opening: bool) -> None:
        """Write the record of the next epoch.

        Raises:
            StaleWriterError: another server has taken the stream.
            StreamAlteredError, NatsAwayError: as `check`.
        """
        while True:
            await self.check()
            last = self._epochs[-1][0] if self._epochs else 0
            while records := await self._get_epochs(last + 1, many=not self._epochs):
                record = records[-1]
                taken = msgspec.json.decode(record.data or b"", type=_Taken)
                if not opening and taken.owner != self._owner:
                    raise StaleWriterError(
                        f"stream {self.stream}: the server on {taken.host} has taken it (epoch {record.head.epoch},"
                        f" ours is {self._epoch}); nothing more is written here: stop one of the two servers"
                    )
                last = record.head.sequence
                self._epochs += [(one.head.sequence, one.head.epoch) for one in records]
            head = Head(Kind.EPOCH, "", 0, (self._epochs[-1][1] if self._epochs else 0) + 1)
            data = msgspec.json.encode(_Taken(self._owner, socket.gethostname()))
            # By the last epoch's record, not by the last message: a busy writer must not keep us out.
            headers = {"Nats-Expected-Last-Subject-Sequence": str(last)}
            reply = await self._nats.ask(self._epoch_subject, encode(head, data, crc_of(data)), headers)
            answer = msgspec.json.decode(reply.data, type=_Acknowledgement)
            if answer.error is None:
                if answer.seq <= self._stored:
                    raise StreamAlteredError(
                        f"stream {self.stream} ended at sequence {answer.seq - 1}, and this server has stored up to"
                        f" {self._stored}: somebody purged it, or put an older copy in its place"
                    )
                self._epoch = head.epoch
                self._epochs.append((answer.seq, head.epoch))
                return
            if answer.error.get("err_code") not in WRONG_SEQUENCE:
                raise _refusal(self.stream, answer.error)
            await asyncio.sleep(TAKE_AGAIN_SECONDS)  # a new leader may not know yet all that was stored

    async def _get_epochs(self, sequence: int, *, many: bool) -> list[Frame]:
        """Return the records of the first epochs from a sequence on: one from the leader, or many from any replica."""
        while True:
            try:
                if many:
                    messages = await self._nats.get_batch(
                        self.stream, self._epoch_subject, sequence, EPOCHS_BYTES, EPOCHS_TOGETHER
                    )
                else:
                    message = await self._nats.get_from_leader(
                        self.stream, seq=sequence, next_by_subj=self._epoch_subject
                    )
                    messages = [] if message is None else [message]
            except ApiError as error:
                raise NatsAwayError(f"stream {self.stream}: {error}") from error
            frames = []
            for message in messages:
                frame = decode(message.data, message.sequence)
                if frame is not None and frame.data is not None and frame.head.kind == Kind.EPOCH:
                    frames.append(frame)
                else:
                    log.error("stream %s, sequence %d: a damaged record of an epoch", self.stream, message.sequence)
                sequence = message.sequence + 1
            if frames or (not messages and not many):
                return frames
            many = many and bool(messages)  # the replica may lag: the leader has the last word

    def is_valid(self, head: Head) -> bool:
        """Return whether a frame was stored by the writer that owned the stream then. From any thread."""
        place = bisect_left(self._epochs, (head.sequence, 0))
        return place == 0 or self._epochs[place - 1][1] <= head.epoch

    # -- from any thread ---------------------------------------------------------------------------------------------

    def push(self, item: Message | Source) -> None:
        """Send a message, or what a partition has to send."""
        try:
            self._nats.loop.call_soon_threadsafe(self._push, item)
        except RuntimeError:  # the connection is closed
            self.failure = self.failure or NatsAwayError("the connection to NATS is closed")

    def drop(self, source: Source) -> None:
        """Drop what a partition has sent; `source.settled` is called when the outcome is known."""
        try:
            self._nats.loop.call_soon_threadsafe(self._drop, source)
        except RuntimeError:  # the connection is closed
            source.settled()

    # -- sending -----------------------------------------------------------------------------------------------------

    def _push(self, item: Message | Source) -> None:
        self._queue.append(item)
        self._wake.set()

    async def _run(self) -> None:
        while self._state is not _State.CLOSED:
            await self._wake.wait()
            self._wake.clear()
            if self._state is _State.DOUBT:
                await self._settle()
            while self._state is _State.OPEN and self._queue and self._has_room():
                item = self._queue.popleft()
                if isinstance(item, Message):
                    await self._send(item)
                elif (message := item.take_message()) is not None:
                    self._queue.append(item)  # behind the others, until it has nothing more
                    await self._send(message)
            if self._state is _State.FAILED:
                self._give_up()

    def _has_room(self) -> bool:
        return len(self._in_flight) < WINDOW and (not self._in_flight or self._in_flight_bytes < WINDOW_BYTES)

    async def _send(self, message: Message) -> None:
        self._sent += 1
        message.epoch, message.sequence, message.is_acked = self._epoch, self._sent, False
        self._in_flight.append(message)
        self._in_flight_bytes += len(message.data)
        if self._timer is None:
            self._watch(message)
        head = msgspec.structs.replace(message.head, epoch=self._epoch)
        token = f"{self.label}.{self.doubts}.{self._sent}"
        try:
            await self._nats.publish(
                message.subject, encode(head, message.data, message.data_crc), self._sent - 1, token
            )
        except Exception as error:  # of the client or of the socket: whether it went out is unknown
            self._doubt(error if isinstance(error, StorageError) else NatsAwayError(f"NATS: {error}"))

    def _watch(self, message: Message) -> None:
        """Check in a while that a message is not on the way any more."""

        def look() -> None:
            self._timer = None
            if not self._in_flight or self._state is not _State.OPEN:
                return
            if self._in_flight[0] is message:
                self._doubt(NatsAwayError(f"stream {self.stream} does not acknowledge; it may have no leader now"))
            else:
                self._watch(self._in_flight[0])

        self._timer = self._nats.loop.call_later(ACK_SECONDS, look)

    def receive_ack(self, doubts: int, sequence: int, message: Msg) -> None:
        """Handle the acknowledgement of a message."""
        if doubts != self.doubts or self._state is not _State.OPEN or not self._in_flight:
            return
        if message.headers and "Status" in message.headers:
            self._doubt(NatsAwayError(f"stream {self.stream} has no leader now; try again"))
            return
        answer = msgspec.json.decode(message.data, type=_Acknowledgement)
        if answer.error is not None or answer.seq != sequence:
            error = _refusal(self.stream, answer.error or {"description": f"stored at {answer.seq}"})
            if answer.error is not None and answer.error.get("err_code") not in WRONG_SEQUENCE:
                self.refusal, self.refusals = error, self.refusals + 1
            self._doubt(error)
            return
        self._in_flight[sequence - self._in_flight[0].sequence].is_acked = True
        if self._in_flight[0].is_acked:
            with self.done:
                while self._in_flight and self._in_flight[0].is_acked:
                    self._stored_first()
                self.done.notify_all()
            self._wake.set()

    def _stored_first(self) -> None:
        message = self._in_flight.popleft()
        self._in_flight_bytes -= len(message.data)
        self._stored = message.sequence
        message.is_stored = True
        message.on_stored(message)

    def _drop(self, source: Source) -> None:
        with self.done:
            is_sent = False
            for message in (*self._in_flight, *self._queue):
                if isinstance(message, Message) and message.owner is source:
                    message.dropped = is_sent = True
            if not is_sent or self._state is _State.FAILED:
                source.settled()
                self.done.notify_all()
                return
            self._dropping.append(source)
            if self._state is _State.OPEN:
                self._doubt(NatsAwayError(f"stream {self.stream} does not acknowledge; try again"))

    def _finish_dropping(self) -> None:
        dropping, self._dropping = self._dropping, []
        for source in dropping:
            source.settled()
        self.done.notify_all()

    # -- unknown outcomes --------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        if self._state is _State.OPEN:  # also with nothing on the way: another server may write meanwhile
            self._doubt(NatsAwayError("the connection to NATS is lost; try again"))

    def _doubt(self, reason: StorageError) -> None:
        if self._state is not _State.OPEN:
            return
        self._state = _State.DOUBT
        self.reason = reason
        self.doubts += 1
        log.warning("%s", reason)
        with self.done:
            self.doubt_since = self._clock.monotonic()
            self.done.notify_all()
        self._wake.set()

    async def _settle(self) -> None:
        """Find which messages on the way are stored, and send the others again."""
        seconds, said = 0.05, ""
        while self._state is _State.DOUBT:
            try:
                await self._look()
            except (StaleWriterError, StreamAlteredError) as error:
                self._fail(error)
            except (StorageError, ApiError, msgspec.DecodeError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("stream %s: %s", self.stream, error)
                await asyncio.sleep(seconds)
                seconds = min(seconds * 2, SETTLE_SECONDS_MAX)

    async def _look(self) -> None:
        before = self._stored
        if self.lease is not None:
            self.lease.check()
        await self._take_epoch(opening=False)
        end = self._epochs[-1][0]
        stored: dict[int, int] = {}
        sequence = before + 1
        while self._in_flight and sequence < end:
            message = await self._nats.get_from_leader(self.stream, seq=sequence, next_by_subj=">")
            if message is None or message.sequence >= end:
                break
            frame = decode(message.data, message.sequence)
            if frame is not None and self.is_valid(frame.head):
                stored[message.sequence] = frame.head.epoch
            sequence = message.sequence + 1
        await self._remove_out_of_turn(stored)
        with self.done:
            while self._in_flight and stored.get(self._in_flight[0].sequence) == self._in_flight[0].epoch:
                self._stored_first()
            again = [message for message in self._in_flight if not message.dropped]
            waiting = [one for one in self._queue if not (isinstance(one, Message) and one.dropped)]
            log.warning(
                "stream %s: looked after an unknown outcome, epoch %d; %d messages go out again",
                self.stream, self._epoch, len(again),
            )  # fmt: skip
            self._queue = deque([*again, *waiting])
            self._in_flight.clear()
            self._in_flight_bytes = 0
            self._stored = self._sent = end
            self._state = _State.OPEN
            self.doubt_since = None
            self._finish_dropping()
        self._wake.set()

    async def _remove_out_of_turn(self, stored: dict[int, int]) -> None:
        """Delete messages on the way that are stored although one before them is not: all of these go out again.

        A late message of the writer before may have taken the sequence of one message, which is refused then; the
        messages behind it still find the sequence that they expect.
        """
        are_stored = [stored.get(message.sequence) == message.epoch for message in self._in_flight]
        if all(are_stored):
            return
        for message in list(self._in_flight)[are_stored.index(False) :]:
            if stored.get(message.sequence) == message.epoch:
                log.warning(
                    "stream %s: sequence %d was stored out of turn, and is removed", self.stream, message.sequence
                )
                await self._nats.api(f"STREAM.MSG.DELETE.{self.stream}", {"seq": message.sequence, "no_erase": True})

    def _fail(self, error: StorageError) -> None:
        log.error("%s", error)
        self._state = _State.FAILED
        with self.done:
            self.failure = error
            self._give_up()

    def _give_up(self) -> None:
        with self.done:
            self._queue.clear()
            self._in_flight.clear()
            self._in_flight_bytes = 0
            self._finish_dropping()


def _refusal(stream: str, error: dict[str, int | str]) -> StorageError:
    text = f"stream {stream}: NATS refused a message: {error.get('description')}"
    return DiskFullError(text) if error.get("err_code") in FULL else DiskError(text)
