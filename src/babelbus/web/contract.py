"""What the administration endpoint needs of a server, and what it tells of one.

The server implements `Administration`; the endpoint and its tests know nothing else of the bus.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from babelbus.core.groups import DeadLetterTopics, Groups
from babelbus.core.record import Event
from babelbus.core.state import AsOf, Revision
from babelbus.errors import BabelbusError


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition: `first_offset` is the oldest record's, `next_offset` the next to be given out.

    All below `high_watermark` can be read. `bytes` are those of the `.log` files.
    """

    partition: int
    first_offset: int
    next_offset: int
    high_watermark: int
    bytes: int
    segments: int


class TopicInfo(msgspec.Struct, frozen=True):
    """One topic with its partitions and its settings (keys of `core.settings.TopicSettings`)."""

    name: str
    partitions: list[PartitionInfo]
    settings: dict[str, object]


class Health(msgspec.Struct, frozen=True):
    """How the server is: `ready` when it serves requests; a reason for each thing an operator should look at."""

    ready: bool
    reasons: list[str] = []


class ServerInfo(msgspec.Struct, frozen=True):
    """What runs here: `addresses` are "host:port" by protocol."""

    version: str
    uptime_seconds: float
    data_folder: str
    addresses: dict[str, str]


class Administration(Protocol):
    """The server as its administrator sees it. Called on the event loop; no method may block for long.

    Any method may raise a `BabelbusError`; admin.py says which one the caller is answered with what. Settings come
    checked and with their units read (`config.read_topic_changes`).
    """

    @property
    def state(self) -> "StateAccess":
        """The state."""

    @property
    def live(self) -> "LiveAccess":
        """What happens on the bus."""

    @property
    def groups(self) -> Groups:
        """The consumer groups."""

    @property
    def dead_letters(self) -> DeadLetterTopics:
        """What groups gave up."""

    def list_topics(self) -> list[TopicInfo]:
        """Return all topics, by name."""

    def topic(self, name: str) -> TopicInfo:
        """Return one topic."""

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> TopicInfo:
        """Create a topic; what is None or not in `settings` comes from the configuration's [topics]."""

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        """Change settings of a topic while it is in use; `partitions` may be among them."""

    async def remove_topic(self, name: str) -> None:
        """Remove a topic and its records; returns when a crash can no longer bring it back."""

    def health(self) -> Health:
        """Return how the server is. Cheap: it is asked every few seconds."""

    def reload(self) -> None:
        """Read the lists of clients and rights again, as on SIGHUP."""

    def info(self) -> ServerInfo:
        """Return what runs here."""


class InvalidPatternError(BabelbusError):
    """A pattern over keys or subjects is none; the message says why."""


class InvalidValueError(BabelbusError):
    """A value of the state is no JSON text, or one that not every client could read."""


class InvalidEventError(BabelbusError):
    """An event cannot be published like this; the message says why."""


class UnknownConsumerError(BabelbusError):
    """The consumer's answer is not open any more: what it held has gone to others."""


class TooManyPipelinesError(BabelbusError):
    """So many pipelines, or sinks of one, are not shown: each is a series for Prometheus."""


class ReadOnlyKeyError(BabelbusError):
    """The key or pattern is the server's own, which tells of itself there."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} is the server's own and read-only")
        self.key = key


Entry = tuple[str, bytes, int]
"""Key, value (JSON text) and version (0: a plain value)."""


class StateChange(msgspec.Struct, frozen=True, gc=False):
    """One change of the state; `value` is `None` when it was deleted. `source` is who made it."""

    key: str
    value: bytes | None
    version: int
    source: str
    timestamp: int


class Sent(msgspec.Struct, frozen=True):
    """What became of an event: the topic that recorded it and where, `None` for all three where none did.

    `receivers` is how many live subscriptions wanted it.
    """

    topic: str | None
    partition: int | None
    offset: int | None
    receivers: int


Stop = Callable[[], None]


class StateAccess(Protocol):
    """The state as its administrator reads and changes it. Patterns are those of Wörterbuch: `?` one element, `#` at
    the end any number, also none. Changes return when they are as durable as `state.ack` says.

    Any method may raise `InvalidKeyError`, `InvalidPatternError`, `ReadOnlyKeyError` or `StorageError`; with a moment
    also `HistoryGoneError` and `OffsetOutOfRangeError`.
    """

    async def get(self, key: str, moment: AsOf | None) -> Entry:
        """Return a value, or raise `NoSuchKeyError`."""

    async def match(self, pattern: str, moment: AsOf | None) -> list[Entry]:
        """Return what a pattern means."""

    async def tree(self, moment: AsOf | None) -> list[Entry]:
        """Return everything but what the server tells of itself."""

    async def set(self, key: str, value: bytes) -> None:
        """Store a plain value, or raise `InvalidValueError` or `VersionedError`."""

    async def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Store a value if the key has `version`, and return the next one; or raise `VersionMismatchError`."""

    async def put_all(self, entries: Sequence[Entry]) -> None:
        """Store all or nothing, whatever the keys hold."""

    async def delete(self, key: str) -> Entry:
        """Take a value away and return it with version 0, or raise `NoSuchKeyError`."""

    async def delete_matching(self, pattern: str) -> list[Entry]:
        """Take away what a pattern means and return it."""

    async def revisions(self, key: str, before: int | None, count_max: int) -> tuple[list[Revision], int]:
        """Return the last stored changes of a key below an offset, and from which offset on they are complete."""

    def watch(self, pattern: str, receiver: Callable[[Sequence[StateChange]], None]) -> tuple[list[Entry], Stop]:
        """Return what a pattern means now, let `receiver` have each change that follows, and return what ends that."""


class LiveAccess(Protocol):
    """What happens on the bus, as its administrator hears it and takes part."""

    def listen(self, pattern: str, receiver: Callable[[Sequence[Event]], None]) -> Stop:
        """Let `receiver` have the events of all protocols, and return what ends that; or raise `InvalidPatternError`.

        The pattern is one of Wörterbuch's for events: `?` one element, `#` at the end one or more.
        """

    async def send(self, event: Event) -> Sent:
        """Publish an event; return when it is as durable as its topic says. Or raise `InvalidEventError`."""
