"""Engine `jetstream`: topics in streams of a NATS cluster, which are the shards (docs/cluster.md).

A topic lies in one shard, which its subjects tell; the checksum of its name chooses the shard of a new topic. One
server writes all shards of a prefix. `client` is the connection, `streams` makes and checks the streams, `shard` sends,
`frame` is the form of a message, `log` a partition, `reading` and `cleaner` the rest of the partition.
"""

import logging
import re
import secrets
import threading
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from babelbus.clock import Clock
from babelbus.config import JetstreamSettings
from babelbus.errors import ConfigError, InvalidTopicNameError, StorageError
from babelbus.storage.contract import Fit, LogSettings
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.client import PURGE_SECONDS, ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError
from babelbus.storage.jetstream.frame import Head, Kind, decode
from babelbus.storage.jetstream.lease import Lease
from babelbus.storage.jetstream.reading import FrameCache
from babelbus.storage.jetstream.shard import Message, Shard
from babelbus.storage.jetstream.streams import prepare_streams, read_installation
from babelbus.storage.room import QUEUE_BYTES_MAX, Room

log = logging.getLogger(__name__)

T = TypeVar("T")

CACHE_BYTES = 16 * 2**20
TOKEN_BYTES_MAX = 1024
"""The longest name of a topic in a subject, of which NATS takes 4096 bytes with its own parts."""
REMOVED = "$removed"
"""In the place of a topic's name, which has no `$` in a subject."""
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}")


def subject_token(topic: str) -> str:
    """Return the name of a topic as one token of a subject.

    Raises:
        InvalidTopicNameError: it would be too long.
    """
    token = quote(topic, safe="").replace(".", "%2E")
    if not 1 <= len(token) <= TOKEN_BYTES_MAX:
        raise InvalidTopicNameError(
            f"the subject of topic {topic!r} would have {len(token)} bytes, the limit is {TOKEN_BYTES_MAX}"
        )
    return token


class _Removal(msgspec.Struct, frozen=True):
    """The data of the record of a removed topic: its messages up to `sequence` are to be purged."""

    topic: str
    sequence: int


class JetstreamStore:
    """The topics of one prefix; see `contract.Store`."""

    fit = Fit(appends_wait=True)

    def __init__(self, settings: JetstreamSettings, files: FileSystem, folder: str, clock: Clock) -> None:
        """Connect to NATS, wait for it if it is away, and become the only writer of the streams.

        Raises:
            ConfigError: a setting cannot be used.
            NatsRefusedError: NATS cannot be used: credentials, version.
            StreamAlteredError: a stream is not as this installation left it.
        """
        if settings.servers is None:
            raise ConfigError("engine jetstream needs jetstream.servers: the addresses of your NATS servers")
        if not PREFIX.fullmatch(settings.prefix):
            raise ConfigError(f"jetstream.prefix: {settings.prefix!r} is not 1 to 32 letters, digits, _ and -")
        password = None
        if settings.password_file is not None:
            try:
                password = files.read_file(settings.password_file).decode().strip()
            except OSError as error:
                raise ConfigError(f"jetstream.password_file: {error}") from error
        self._settings = settings
        self._clock = clock
        self._room = Room(QUEUE_BYTES_MAX)
        self._cache = FrameCache(CACHE_BYTES)
        self._lock = threading.Lock()
        self._writers: dict[tuple[str, int], StreamLog] = {}
        self._topics: dict[str, tuple[int, int]] = {}
        """The shard and the number of partitions of each topic."""
        self._removed: dict[str, tuple[int, _Removal]] = {}
        """The shard and the record of each removal that is not finished, by its token."""
        self.lease: Lease | None = None
        note, installation = read_installation(files, folder, settings.prefix)
        self.nats = Nats(settings, installation.installation, password)
        try:
            self.nats.start()
            streams = self._patiently(lambda: prepare_streams(self.nats, settings, note))
            known = note.read()
            assert known is not None
            owner = secrets.token_hex(8)
            self.shards = [
                Shard(
                    self.nats, number, stream, settings.prefix, known.installation, known.streams[stream], owner, clock
                )
                for number, stream in enumerate(streams)
            ]
            self.nats.on_ack = lambda parts, message: self.shards[int(parts[0])].receive_ack(
                int(parts[1]), int(parts[2]), message
            )
            if settings.lease_seconds:
                self.lease = Lease(
                    self.nats, settings.prefix, owner, folder, settings.lease_seconds, settings.replicas, clock
                )
                self._patiently(self.lease.acquire)
            for shard in self.shards:
                shard.lease = self.lease
                self._patiently(shard.open)
                self._list(shard)
        except BaseException:
            self.nats.stop()
            raise

    def _patiently(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `work` gives; wait for a NATS that is away, or has no leader yet."""

        async def run() -> T:
            while True:
                try:
                    return await work()
                except NatsAwayError as error:
                    await self.nats.wait_again(error)

        return self.nats.call(run())

    def _list(self, shard: Shard) -> None:
        """Find the topics and the unfinished removals of a shard by its subjects."""
        for subject in self.nats.call(self._subjects(shard, f"{shard.prefix}.{REMOVED}.*")):
            message = self.nats.call(self.nats.get_from_leader(shard.stream, last_by_subj=subject))
            frame = None if message is None else decode(message.data, message.sequence)
            if frame is None or frame.data is None:
                log.error("%s: a record of a removed topic is damaged, its space is not given back", subject)
                continue
            self._removed[subject.split(".")[3]] = shard.number, msgspec.json.decode(frame.data, type=_Removal)
        for token in [token for token, (number, _) in self._removed.items() if number == shard.number]:
            self._purge(token)  # the names may be taken again; `erase` finishes what this leaves
        for subject in self.nats.call(self._subjects(shard, f"{shard.prefix}.>")):
            parts = subject.split(".")
            if len(parts) < 4 or parts[2] == REMOVED or not parts[3].isdecimal():
                continue
            topic = unquote(parts[2])
            _, count = self._topics.get(topic, (0, 0))
            self._topics[topic] = shard.number, max(count, int(parts[3]) + 1)

    async def _subjects(self, shard: Shard, pattern: str) -> list[str]:
        found: list[str] = []
        while True:
            asked = {"subjects_filter": pattern, "offset": len(found)}
            try:
                info = await self.nats.api(f"STREAM.INFO.{shard.stream}", asked)
            except ApiError as error:
                raise NatsAwayError(f"stream {shard.stream}: {error}") from error
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= info.get("total", 0):
                return found

    # -- topics ------------------------------------------------------------------------------------------------------

    def removed(self) -> dict[str, str]:
        """Return the topics whose removal was cut short by a crash: token for `erase` -> name of the topic."""
        return {token: removal.topic for token, (_, removal) in self._removed.items()}

    def partition_count(self, topic: str) -> int:
        """Return how many partitions of a topic are stored."""
        return self._topics.get(topic, (0, 0))[1]

    def open_partition(self, topic: str, partition: int, settings: LogSettings) -> StreamLog:
        """Open a partition as its only writer, or make it; see `contract.Store`."""
        token = subject_token(topic)
        with self._lock:
            before = self._writers.get((topic, partition))
            if before is not None:
                before.fence_off()
            number, count = self._topics.get(topic, (zlib.crc32(topic.encode()) % len(self.shards), 0))
            shard = self.shards[number]
            if shard.failure is not None:
                raise shard.failure
            for old in [old for old, (_, removal) in self._removed.items() if removal.topic == topic]:
                self._purge(old)
            opened = StreamLog(
                self._cache, self.nats, shard, f"{shard.prefix}.{token}.{partition}", topic, partition, settings,
                self._clock, self._room, self._settings.timeout_seconds,
            )  # fmt: skip
            self._topics[topic] = number, max(count, partition + 1)
            self._writers[topic, partition] = opened
        return opened

    def hide(self, topic: str) -> str:
        """Remove a topic at once and durably; see `contract.Store`."""
        token = secrets.token_hex(8)
        with self._lock:
            if topic not in self._topics:
                return token
            number, count = self._topics[topic]
            shard = self.shards[number]
            for partition in range(count):
                writer = self._writers.pop((topic, partition), None)
                if writer is not None:
                    writer.fence_off()
            removal = _Removal(topic, self.nats.call(self._last_sequence(shard)) + 1)
            data = msgspec.json.encode(removal)
            self._write(shard, f"{shard.prefix}.{REMOVED}.{token}", data)
            self._removed[token] = number, removal
            del self._topics[topic]
        return token

    async def _last_sequence(self, shard: Shard) -> int:
        try:
            return int((await self.nats.api(f"STREAM.INFO.{shard.stream}"))["state"]["last_seq"])
        except ApiError as error:
            raise NatsAwayError(f"stream {shard.stream}: {error}") from error

    def _write(self, shard: Shard, subject: str, data: bytes) -> None:
        stored = threading.Event()
        shard.push(Message(subject, Head(Kind.REMOVED, "", 0), data, None, lambda message: stored.set()))
        if not stored.wait(self._settings.timeout_seconds):
            raise shard.failure or shard.reason

    def _purge(self, token: str) -> None:
        number, removal = self._removed[token]
        shard = self.shards[number]
        asked = {"filter": f"{shard.prefix}.{subject_token(removal.topic)}.>", "seq": removal.sequence}
        try:
            self.nats.call(self.nats.api(f"STREAM.PURGE.{shard.stream}", asked, PURGE_SECONDS))
        except ApiError as error:
            raise NatsAwayError(f"stream {shard.stream}: {error}") from error

    def erase(self, token: str) -> None:
        """Delete what `hide` took away. May take long."""
        if token not in self._removed:
            return
        self._purge(token)
        number, _ = self._removed[token]
        shard = self.shards[number]
        try:
            self.nats.call(
                self.nats.api(f"STREAM.PURGE.{shard.stream}", {"filter": f"{shard.prefix}.{REMOVED}.{token}"})
            )
        except ApiError as error:
            raise NatsAwayError(f"stream {shard.stream}: {error}") from error
        del self._removed[token]

    def close(self) -> None:
        """Release the lease and end the connection."""
        for shard in self.shards:
            try:
                self.nats.call(shard.close())
            except StorageError:
                break
        if self.lease is not None:
            try:
                self.nats.call(self.lease.release())
            except StorageError as error:
                log.warning("the lease ends by itself: %s", error)
        self.nats.stop()
