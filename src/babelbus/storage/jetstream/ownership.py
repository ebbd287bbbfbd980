"""The right of one process to write the streams of a prefix: its connection to NATS, its name, and its lease."""

import logging
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from nats.aio.msg import Msg

import babelbus
from babelbus.clock import Clock
from babelbus.config import JetstreamSettings
from babelbus.errors import ConfigError, StorageError
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.client import ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError
from babelbus.storage.jetstream.lease import Lease, place_of
from babelbus.storage.jetstream.presence import Members
from babelbus.storage.jetstream.shard import Shard
from babelbus.storage.jetstream.streams import FIXED

log = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Ownership:
    """A process at the streams of one prefix. It may write when `acquire` has returned. Calls come from any thread."""

    def __init__(
        self, settings: JetstreamSettings, files: FileSystem, folder: str, clock: Clock, name: str = ""
    ) -> None:
        """Read the settings of the connection; `name` is that of a member of a cluster.

        Raises:
            ConfigError: a setting cannot be used.
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
        self.settings = settings
        self.folder = folder
        """The data folder of this process."""
        self.owner = secrets.token_hex(8)
        """The name of this process in the streams."""
        self.nats = Nats(settings, password)
        self.nats.on_ack = self._receive_ack
        self.lease: Lease | None = None
        if settings.lease_seconds:
            self.lease = Lease(
                self.nats, settings.prefix, self.owner, place_of(files, folder), settings.lease_seconds,
                settings.replicas, clock, name=name, version=babelbus.__version__,
            )  # fmt: skip
        self.members = Members(self.nats, settings.prefix, self.owner, clock)
        self._clock = clock
        self._shards: dict[str, Shard] = {}

    def connect(self, name: str) -> None:
        """Connect to NATS; wait for a NATS that is away. The `name` is what NATS calls the connection.

        Raises:
            NatsRefusedError: NATS cannot be used: credentials, version.
        """
        try:
            self.nats.start(name)
        except BaseException:
            self.nats.stop()
            raise

    def acquire(self) -> None:
        """Wait until no other process has the lease, and take the lease."""
        if self.lease is not None:
            self.patiently(self.lease.acquire)

    def patiently(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `work` gives; wait for a NATS that is away, or has no leader yet."""
        return self.nats.call(self.wait_for(work))

    async def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the same in the thread of the connection."""
        while True:
            try:
                return await work()
            except NatsAwayError as error:
                await self.nats.wait_again(error)

    def shard(self, label: str, stream: str, installation: str, identity: str, fixed: dict[str, Any] = FIXED) -> Shard:
        """Return a stream, opened by this process as its only writer.

        Raises:
            StorageError: the stream is not what it was.
        """
        shard = self._shards[label] = Shard(
            self.nats, label, stream, self.settings.prefix, installation, identity, self.owner, self._clock, fixed
        )
        shard.lease = self.lease
        self.patiently(shard.open)
        return shard

    def failures(self) -> list[str]:
        """Return why streams are not written any more; topics and files of other streams go on."""
        return [str(shard.failure) for shard in list(self._shards.values()) if shard.failure is not None]

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Return the subjects of a stream that match, as its leader knows them; in the thread of the connection.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        found: list[str] = []
        while True:
            asked = {"subjects_filter": pattern, "offset": len(found)}
            try:
                info = await self.nats.api(f"STREAM.INFO.{stream}", asked)
            except ApiError as error:
                raise NatsAwayError(f"stream {stream}: {error}") from error
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= info.get("total", 0):
                return found

    def _receive_ack(self, parts: list[str], message: Msg) -> None:
        self._shards[parts[0]].receive_ack(int(parts[1]), int(parts[2]), message)

    def close_shards(self) -> None:
        """Stop to write."""
        shards, self._shards = dict(self._shards), {}
        for label, shard in shards.items():
            try:
                self.nats.call(shard.close())
            except StorageError as error:
                log.debug("stream %s: %s", label, error)

    def close(self) -> None:
        """Return the lease, so that another process need not wait for its end, and end the connection."""
        self.close_shards()
        if self.lease is not None:
            try:
                self.nats.call(self.lease.release())
            except StorageError as error:
                log.warning("the lease ends by itself: %s", error)
        self.nats.stop()
