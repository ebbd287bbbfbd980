"""The lease of a prefix: one server has it and renews it, others wait until it ends.

The lease is the last message of a stream of its own, replaced by compare-and-set. Nobody compares clocks: the owner
counts the time from when it sent its last renewal, others count from when they first saw it, both by the monotonic
clock; so the owner's time ends first. An owner whose time ended acknowledges nothing until it has renewed the lease.
The epochs of the streams keep order whatever clocks do; the lease says when it is time to take them over.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.storage.errors import StaleWriterError
from babelbus.storage.jetstream.client import NO_STREAM, PURGE_SECONDS, WRONG_SEQUENCE, ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError, NatsRefusedError

log = logging.getLogger(__name__)

RENEWALS = 5
"""How often an owner renews its lease within the time of the lease."""
SAFE_SHARE = 0.8
"""The part of its time after which an owner that could not renew stops to acknowledge."""


class _Held(msgspec.Struct, frozen=True):
    """The lease: `owner` is a process, `place` a data folder, which one process has at a time."""

    owner: str
    place: str
    host: str
    seconds: float
    released: bool = False


class Lease:
    """The right to write the streams of a prefix. Everything runs in the thread of the connection."""

    def __init__(
        self, nats: Nats, prefix: str, owner: str, folder: str, seconds: float, replicas: int, clock: Clock
    ) -> None:
        self._nats = nats
        self._stream, self._subject = f"{prefix}-lease", f"{prefix}.lease"
        host = socket.gethostname()
        self._held = _Held(owner, f"{host}:{folder}", host, seconds)
        self._seconds, self._replicas, self._clock = seconds, replicas, clock
        self._sequence = 0
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.lost: StaleWriterError | None = None
        """Why the lease is another server's now."""
        self.on_ended: list[Callable[[StorageError], None]] = []
        """Called when the time ended, or the lease is another server's: nothing more may be acknowledged."""

    def check(self) -> None:
        """Check that this server has the lease.

        Raises:
            StaleWriterError: another server has it.
            NatsAwayError: it could not be renewed in time; that may still work.
        """
        if self.lost is not None:
            raise self.lost
        if not self._is_valid():
            raise NatsAwayError("the lease could not be renewed in time; nothing is acknowledged until it is")

    def _is_valid(self) -> bool:
        return self._clock.monotonic() < self._until

    async def acquire(self) -> None:
        """Wait until no other server has the lease, then write it.

        Raises:
            NatsAwayError: NATS does not answer.
            NatsRefusedError: the stream of the lease cannot be made.
        """
        await self._make()
        seen, seen_at, said = 0, 0.0, False
        while True:
            sequence, held = await self._read()
            now = self._clock.monotonic()
            if sequence != seen:
                seen, seen_at = sequence, now
            free = held is None or held.released or held.place == self._held.place
            if (free or (held is not None and now - seen_at >= held.seconds)) and await self._put(sequence):
                self._task = self._nats.loop.create_task(self._renew())
                return
            if not said and held is not None and not free:
                said = True
                log.warning(
                    "standing by: the server on %s owns the streams; taking over when its lease ends", held.host
                )
            await asyncio.sleep(self._seconds / RENEWALS / 2)

    async def release(self) -> None:
        """Return the lease at once, so that another server need not wait for its end."""
        if self._task is None:
            return
        self._task.cancel()
        if self.lost is None:
            try:
                await self._put(self._sequence, released=True)
            except NatsAwayError as error:
                log.warning("the lease ends by itself: %s", error)

    async def _make(self) -> None:
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [self._subject],
            "storage": "file",
            "num_replicas": self._replicas,
            "max_msgs_per_subject": 1,
            "duplicate_window": 100_000_000,
        }
        try:
            await self._nats.api(f"STREAM.INFO.{self._stream}")
        except ApiError as error:
            if error.code != NO_STREAM:
                raise NatsRefusedError(f"stream {self._stream}: {error}") from error
            try:
                await self._nats.api(f"STREAM.CREATE.{self._stream}", config, PURGE_SECONDS)
            except ApiError as refused:
                raise NatsRefusedError(
                    f"stream {self._stream} cannot be made with {self._replicas} replicas"
                    f" (jetstream.replicas): {refused}"
                ) from refused

    async def _read(self) -> tuple[int, _Held | None]:
        """Return the sequence of the lease, and who has it."""
        try:
            message = await self._nats.get_from_leader(self._stream, last_by_subj=self._subject)
        except ApiError as error:
            raise NatsAwayError(f"stream {self._stream}: {error}") from error
        if message is None:
            return 0, None
        try:
            return message.sequence, msgspec.json.decode(message.data, type=_Held)
        except msgspec.DecodeError:
            log.error("stream %s: the lease is damaged, it counts as free", self._stream)
            return message.sequence, None

    async def _put(self, sequence: int, *, released: bool = False) -> bool:
        """Write the lease in the place of the message `sequence`; return whether that was still the last one."""
        sent_at = self._clock.monotonic()
        body = msgspec.json.encode(msgspec.structs.replace(self._held, released=released))
        headers = {"Nats-Expected-Last-Subject-Sequence": str(sequence)}
        answer = msgspec.json.decode((await self._nats.ask(self._subject, body, headers)).data)
        if "error" in answer:
            if answer["error"].get("err_code") in WRONG_SEQUENCE:
                return False
            raise NatsAwayError(f"stream {self._stream}: {answer['error'].get('description')}")
        self._sequence, self._until = answer["seq"], sent_at + self._seconds * SAFE_SHARE
        return True

    async def _renew(self) -> None:
        """Update the lease again and again, until another server has it."""
        said = False
        while True:
            await asyncio.sleep(self._seconds / RENEWALS)
            try:
                if not await self._put(self._sequence):
                    sequence, held = await self._read()
                    if held is None or held.owner == self._held.owner:  # an answer that did not come: it is stored
                        self._sequence = sequence
                        continue
                    self.lost = StaleWriterError(
                        f"the server on {held.host} has taken the lease of the streams; this one writes no more: stop"
                        " or restart it"
                    )
                    self._end(self.lost)
                    return
            except StorageError as error:
                if not self._is_valid() and not said:
                    said = True
                    self._end(NatsAwayError(f"the lease could not be renewed in time: {error}"))
            else:
                said = False

    def _end(self, error: StorageError) -> None:
        for tell in self.on_ended:
            tell(error)
