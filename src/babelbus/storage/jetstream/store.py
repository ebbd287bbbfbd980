"""Engine `jetstream`: topics in streams of a NATS cluster, which are the shards (docs/cluster.md).

A topic lies in one shard, which its subjects tell; the checksum of its name chooses the shard of a new topic. One
server writes all shards of a prefix. `client` is the connection, `streams` makes and checks the streams, `shard` sends,
`frame` is the form of a message, `log` a partition, `reading` and `cleaner` the rest of the partition.
"""

import logging
import secrets
import threading
import zlib
from urllib.parse import quote, unquote

import msgspec

from babelbus.clock import Clock
from babelbus.config import JetstreamSettings
from babelbus.errors import InvalidTopicNameError
from babelbus.storage.contract import Fit, LogSettings
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.client import PURGE_SECONDS, ApiError
from babelbus.storage.jetstream.errors import NatsAwayError
from babelbus.storage.jetstream.frame import Head, Kind, decode
from babelbus.storage.jetstream.ownership import Ownership
from babelbus.storage.jetstream.reading import FrameCache
from babelbus.storage.jetstream.shard import Message, Shard
from babelbus.storage.jetstream.streams import prepare_streams, read_installation
from babelbus.storage.room import QUEUE_BYTES_MAX, Room

log = logging.getLogger(__name__)

CACHE_BYTES = 16 * 2**20
TOKEN_BYTES_MAX = 1024
"""The longest name of a topic in a subject, of which NATS takes 4096 bytes with its own parts."""
REMOVED = "$removed"
"""In the place of a topic's name, which has no `$` in a subject."""


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

    fit = Fit(appends_wait=True, opens_at_once=16)

    def __init__(
        self,
        settings: JetstreamSettings,
        files: FileSystem,
        folder: str,
        clock: Clock,
        ownership: Ownership | None = None,
    ) -> None:
        """Open the streams as their only writer; without an `ownership` connect first, and wait for the lease.

        Raises:
            ConfigError: a setting cannot be used.
            NatsRefusedError: NATS cannot be used: credentials, version.
            StreamAlteredError: a stream is not as this installation left it.
        """
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
        self._owns_connection = ownership is None
        self._ownership = ownership = ownership or Ownership(settings, files, folder, clock)
        self.nats = ownership.nats
        try:
            note, installation = read_installation(files, folder, settings.prefix)
            if self._owns_connection:
                ownership.connect(installation.installation)
            streams = ownership.patiently(lambda: prepare_streams(self.nats, settings, note))
            known = note.read()
            assert known is not None
            if self._owns_connection:
                ownership.acquire()
            self.shards = [
                ownership.shard(str(number), stream, known.installation, known.streams[stream])
                for number, stream in enumerate(streams)
            ]
            for number in range(len(self.shards)):
                self._list(number)
        except BaseException:
            if self._owns_connection:
                self.nats.stop()
            raise

    def _list(self, number: int) -> None:
        """Find the topics and the unfinished removals of a shard by its subjects."""
        shard = self.shards[number]
        for subject in self.nats.call(self._ownership.subjects(shard.stream, f"{shard.prefix}.{REMOVED}.*")):
            message = self.nats.call(self.nats.read_from_leader(shard.stream, last_by_subj=subject))
            frame = None if message is None else decode(message.data, message.sequence)
            if frame is None or frame.data is None:
                log.error("%s: a record of a removed topic is damaged, its space is not given back", subject)
                continue
            self._removed[subject.split(".")[3]] = number, msgspec.json.decode(frame.data, type=_Removal)
        for token in [token for token, (shard_of, _) in self._removed.items() if shard_of == number]:
            self._purge(token)  # the names may be taken again; `erase` finishes what this leaves
        for subject in self.nats.call(self._ownership.subjects(shard.stream, f"{shard.prefix}.>")):
            parts = subject.split(".")
            if len(parts) < 4 or parts[2] == REMOVED or not parts[3].isdecimal():
                continue
            topic = unquote(parts[2])
            _, count = self._topics.get(topic, (0, 0))
            self._topics[topic] = number, max(count, int(parts[3]) + 1)

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
            number, _ = self._topics.get(topic, (zlib.crc32(topic.encode()) % len(self.shards), 0))
            shard = self.shards[number]
            if shard.failure is not None:
                raise shard.failure
            for old in [old for old, (_, removal) in self._removed.items() if removal.topic == topic]:
                self._purge(old)
        opened = StreamLog(
            self._cache, self._room, self.nats, shard, f"{shard.prefix}.{token}.{partition}", topic, partition,
            settings, self._clock, self._settings.timeout_seconds,
        )  # fmt: skip
        with self._lock:
            number, count = self._topics.get(topic, (number, 0))
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
        """Return the lease and end the connection, if the store made them."""
        if self._owns_connection:
            self._ownership.close()
