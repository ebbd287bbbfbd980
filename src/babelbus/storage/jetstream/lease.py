"""The lease of a prefix: one server has it and renews it, others wait until it ends.

The lease is the last message of a stream of its own, replaced by compare-and-set. Nobody compares clocks: the owner
counts the time from when it sent its last renewal, others count from when they first saw it, both by the monotonic
clock; so the owner's time ends first. An owner whose time ended serves and acknowledges nothing until it has renewed
the lease. The epochs of the streams keep order whatever clocks do; the lease says when it is time to take them over.

A message on the subject of news, which no stream keeps, tells those who wait to look at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.storage.errors import StaleWriterError
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.client import NO_STREAM, PURGE_SECONDS, REPLY_SECONDS, WRONG_SEQUENCE, ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError, NatsRefusedError

log = logging.getLogger(__name__)

RENEWALS = 10
"""How often an owner renews its lease within the time of the lease, whether NATS is slow to answer or not."""
SAFE_SHARE = 0.9
"""The part of its time after which an owner that could not renew stops to acknowledge."""
AGAIN_SECONDS = 0.1
"""How soon a renewal is tried again that could not be sent, or that NATS refused."""
HEIR_SECONDS = 3.0
"""How long the others wait for the server that a lease was given to."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""Where Linux says which start of the machine this is."""
SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"


class Held(msgspec.Struct, frozen=True):
    """The lease: `owner` is a process, `place` a data folder (`place_of`), which one process has at a time."""

    owner: str
    place: str
    host: str
    seconds: float
    released: bool = False
    name: str = ""
    """The name of the owner among the members of a cluster."""
    address: str = ""
    """Where members of the cluster reach the owner, from when it serves."""
    version: str = ""
    epoch: int = 0
    """How often the lease was acquired."""
    since_ms: int = 0
    """When it was acquired, by the clock of the owner: for people, never compared."""
    heir: str = ""
    """The member that a released lease was given to; the others wait for it for a while."""
    key: str = ""
    """Other members show the key when they link to the owner: a reader of the lease belongs to the cluster."""


def place_of(files: FileSystem, folder: str) -> str:
    """Return the place of a data folder: no other folder has it, on this machine or another one.

    A process that has the lock of the folder knows that every other process with the same place is gone. Names of
    hosts and paths are the same on machines that were made from one image, so the start of the machine and the inode
    belong to the place. A system that does not tell these has a new place every time, which is nobody else's.
    """
    parts = [socket.gethostname(), folder]
    try:
        boot = files.open(BOOT_ID, write=False)
        try:
            parts.append(boot.pread(64, 0).decode("ascii", "replace").strip())
        finally:
            boot.close()
        found = os.stat(folder)
        parts.append(f"{found.st_dev}:{found.st_ino}")
    except OSError:
        parts.append(secrets.token_hex(16))
    return ":".join(parts)


class Lease:
    """The right to write the streams of a prefix. Everything runs in the thread of the connection."""

    def __init__(
        self,
        nats: Nats,
        prefix: str,
        owner: str,
        place: str,
        seconds: float,
        replicas: int,
        clock: Clock,
        *,
        name: str = "",
        version: str = "",
    ) -> None:
        self._nats = nats
        self._stream, self._subject, self._news = f"{prefix}-lease", f"{prefix}.lease", f"{prefix}.news"
        self._held = Held(
            owner, place, socket.gethostname(), seconds, name=name, version=version, key=secrets.token_hex(32)
        )
        self._seconds, self._replicas, self._clock = seconds, replicas, clock
        self._sequence = 0
        """The message that the next write replaces: our last one that is known to be stored."""
        self._stored: Held | None = None
        """The content of that message."""
        self._until = 0.0
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[bool]] = set()
        """The renewals that were sent and are not answered."""
        self._tenure = 0
        """How often the lease was released or lost: an answer to what was sent before counts no more."""
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._is_made = False
        self._seen = -1
        """The sequence of the lease that was seen last, and since when."""
        self._seen_at = 0.0
        self.seen: Held | None = None
        """The lease as it was seen last."""
        self.seen_count = 0
        """How often another server's lease was seen to change: its owner lives while this rises."""
        self.last_owner = ""
        """The member that had the lease before this server and did not give it back; it was killed, or cut off."""
        self.lost: StaleWriterError | None = None
        """Why the lease is another server's now."""
        self.on_ended: list[Callable[[StorageError], None]] = []
        """Called when the time ended, or the lease is another server's: nothing more may be acknowledged."""
        self.on_seen: list[Callable[[], None]] = []
        """Called when the lease that is `seen` has changed, while another server has it."""

    # -- from any thread ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that this server has the lease.

        Raises:
            StaleWriterError: another server has it.
            NatsAwayError: it could not be renewed in time; that may still work.
        """
        if self.lost is not None:
            raise self.lost
        if not self.is_valid():
            raise NatsAwayError("the lease could not be renewed in time; nothing is served or acknowledged until it is")

    def is_valid(self) -> bool:
        """Return whether this server has the lease now, so that no other server can have it."""
        return self._clock.monotonic() < self._until

    @property
    def rest_seconds(self) -> float:
        """How long this server may serve on if it cannot renew the lease."""
        return max(self._until - self._clock.monotonic(), 0.0)

    @property
    def held(self) -> Held:
        """The lease as this server has it."""
        return self._held

    async def prepare(self) -> None:
        """Create the stream of the lease if it is missing, and subscribe to the news.

        Raises:
            NatsAwayError, NatsRefusedError: as `acquire`.
        """
        if not self._is_made:
            await self._make()
            await self._nats.hear(self._news, lambda message: self._wake.set())
            self._is_made = True

    # -- to have it --------------------------------------------------------------------------------------------------

    async def acquire(self) -> None:
        """Wait until no other server has the lease, then write it.

        Raises:
            NatsAwayError: NATS does not answer.
            NatsRefusedError: the stream of the lease cannot be made.
        """
        await self.prepare()
        said = False
        while True:
            self._wake.clear()
            sequence, held = await self._read()
            self._look(sequence, held)
            rest = self._rest(held)
            if rest <= 0 and await self._take(sequence, held):
                return
            if not said and held is not None and rest > 0:
                said = True
                log.warning(
                    "standing by: the server on %s owns the streams; taking over when its lease ends", held.host
                )
            poll = self._seconds / RENEWALS / 2
            with contextlib.suppress(TimeoutError):  # not `wait_for`, which may lose a cancellation in Python 3.11
                async with asyncio.timeout(min(poll, rest) if rest > 0 else AGAIN_SECONDS):
                    await self._wake.wait()

    def _look(self, sequence: int, held: Held | None) -> None:
        """Record the lease of another server, and since when it is so."""
        if sequence == self._seen:
            return
        self._seen, self._seen_at, before = sequence, self._clock.monotonic(), self.seen
        self.seen_count += 1
        self.seen = held
        if before != held:
            for tell in self.on_seen:
                tell()

    def _rest(self, held: Held | None) -> float:
        """Return how many seconds the lease must not be taken; 0 or less if it is free."""
        if held is None:
            return 0.0
        silent = self._clock.monotonic() - self._seen_at
        if held.released:
            return 0.0 if held.heir in ("", self._held.name) else HEIR_SECONDS - silent
        return 0.0 if held.place == self._held.place else held.seconds - silent

    async def _take(self, sequence: int, held: Held | None) -> bool:
        epoch = 1 if held is None else held.epoch + 1
        self._held = msgspec.structs.replace(
            self._held, epoch=epoch, since_ms=self._clock.now_ms(), address="", heir="", released=False
        )
        self._sequence = sequence
        if not await self._put():
            return False
        self.lost, self._has_ended = None, False
        self.last_owner = "" if held is None or held.released else held.name
        self.seen = self._held
        self._task = self._nats.loop.create_task(self._renew())
        return True

    async def advertise(self, address: str) -> None:
        """Write the address at which members reach this server, which has the lease.

        If NATS does not answer within `REPLY_SECONDS`, this returns all the same: every renewal has the address.
        """
        self._held = msgspec.structs.replace(self._held, address=address)
        await asyncio.wait([self._begin_renewal()], timeout=REPLY_SECONDS)
        await self._tell()

    async def release(self, heir: str = "") -> None:
        """Return the lease at once, so that another server need not wait for its end; give it to `heir` if named."""
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        self._end_renewals()
        if self.lost is None:
            try:
                self._held = msgspec.structs.replace(self._held, heir=heir, released=True, address="")
                while not await self._put() and await self._find() is None:
                    pass  # what was refused came behind a renewal of ours whose answer was not read
                await self._tell()
            except NatsAwayError as error:
                log.warning("the lease ends by itself: %s", error)
        self._until, self._seen = 0.0, -1

    def _end_renewals(self) -> None:
        """Cancel the renewals that are not answered; no answer to what was sent so far counts any more."""
        self._tenure += 1
        for renewal in self._renewals:
            renewal.cancel()
        self._stop_timer()

    async def _tell(self) -> None:
        """Send the news to the servers that wait; without the news they look again in a while."""
        with contextlib.suppress(Exception):  # of the client: the news are lost, and nothing depends on them
            await self._nats.client.publish(self._news, b"")

    # -- the record --------------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        config: dict[str, Any] = {
            "name": self._stream,
            "subjects": [self._subject, f"{self._subject}.>"],
            "storage": "file",
            "num_replicas": self._replicas,
            "max_msgs_per_subject": 1,
            "duplicate_window": 100_000_000,
        }
        try:
            made = (await self._nats.api(f"STREAM.INFO.{self._stream}"))["config"]
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
            return
        if made.get("subjects") == [self._subject]:  # an earlier version made it
            try:
                await self._nats.api(f"STREAM.UPDATE.{self._stream}", made | {"subjects": config["subjects"]})
            except ApiError as refused:
                raise NatsRefusedError(f"stream {self._stream}: {refused}") from refused

    async def _read(self) -> tuple[int, Held | None]:
        """Return the sequence of the lease, and who has it."""
        try:
            message = await self._nats.get_from_leader(self._stream, last_by_subj=self._subject)
        except ApiError as error:
            raise NatsAwayError(f"stream {self._stream}: {error}") from error
        if message is None:
            return 0, None
        try:
            return message.sequence, msgspec.json.decode(message.data, type=Held)
        except msgspec.DecodeError:
            log.error("stream %s: the lease is damaged, it counts as free", self._stream)
            return message.sequence, None

    async def _put(self, seconds: float = REPLY_SECONDS) -> bool:
        """Write the lease in the place of our last message; return whether that was the last one.

        The time of the lease counts from this call, whenever the answer comes within `seconds`.

        Raises:
            NatsAwayError: NATS does not answer; the lease may be written.
        """
        held, tenure, sent_at = self._held, self._tenure, self._clock.monotonic()
        headers = {SEQUENCE_HEADER: str(self._sequence)}
        reply = await self._nats.ask(self._subject, msgspec.json.encode(held), headers, seconds)
        answer = msgspec.json.decode(reply.data)
        if "error" in answer:
            if answer["error"].get("err_code") in WRONG_SEQUENCE:
                return False
            raise NatsAwayError(f"stream {self._stream}: {answer['error'].get('description')}")
        if tenure == self._tenure and answer["seq"] >= self._sequence:
            self._sequence, self._stored = answer["seq"], held
            self._until = max(self._until, sent_at + self._seconds * SAFE_SHARE)
            if self.is_valid():
                self._has_ended = False
            self._watch()
        return True

    async def _find(self) -> Held | None:
        """Read the lease after a refused write; return the lease of another server, `None` if the next write may do.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        before = self._sequence
        sequence, held = await self._read()
        if held is not None and held.owner != self._held.owner:
            return held
        if self._sequence == before:  # else an answer has come meanwhile, which is newer
            self._sequence, self._stored = sequence, held
        return None

    # -- renewals ----------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Update the lease again and again, until another server has it; a slow answer holds up no later renewal."""
        pause = self._seconds / RENEWALS
        while self.lost is None:
            await asyncio.sleep(pause)
            renewal = self._begin_renewal()
            pause = self._seconds / RENEWALS
            await asyncio.wait([renewal], timeout=pause)
            if not renewal.done():
                pause = 0.0
            elif renewal.cancelled() or not renewal.result():
                pause = min(pause, AGAIN_SECONDS)

    def _begin_renewal(self) -> asyncio.Task[bool]:
        renewal = self._nats.loop.create_task(self._renew_or_tell())
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)
        return renewal

    async def _renew_or_tell(self) -> bool:
        """Update the lease; return whether NATS answered."""
        try:
            await self._renew_once()
        except StorageError as error:
            self._check_time(error)
            return False
        return True

    async def _renew_once(self) -> None:
        """Update the lease, or note that another server has it.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        while True:
            sequence = self._sequence
            if await self._put(self._seconds * SAFE_SHARE):
                return
            if self._sequence == sequence:
                other = await self._find()
                if other is not None:
                    self._lose(other)
                    return
            elif self._stored == self._held:  # a renewal before this one was answered meanwhile
                return

    def _lose(self, other: Held) -> None:
        """Handle that another server has the lease."""
        if self._task is None or self.lost is not None:
            return
        self.lost = StaleWriterError(
            f"the server on {other.host} has taken the lease of the streams; this one writes no more:"
            " stop or restart it"
        )
        self._until = 0.0
        self._end_renewals()
        self._end(self.lost)

    # -- the end of the time -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Handle the end of the time at once, also while NATS lets a renewal wait."""
        self._stop_timer()
        rest = max(self._until - self._clock.monotonic(), 0.0)
        self._timer = self._nats.loop.call_later(rest, self._check_time, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_time(self, error: StorageError | None) -> None:
        if self.is_valid() or self._has_ended or self._task is None:
            return
        self._has_ended = True
        self._end(NatsAwayError(f"the lease could not be renewed in time: {error or 'NATS does not answer'}"))

    def _end(self, error: StorageError) -> None:
        for tell in self.on_ended:
            tell(error)
