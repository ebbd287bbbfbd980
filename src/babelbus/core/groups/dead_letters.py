"""Dead letters: records that a group gave up, in a topic of their own, with why and where they came from.

A dead letter has the payload, the key and the headers of its record, and seven headers of ours (`REASON` to `TIME`).
One that comes from a dead letter has ours anew. A crash between a dead letter's write and the group's next commit
makes it a second time: dead letters are at least once, as their records are.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import quote

import msgspec

from babelbus.core.access import CLIENT, NOBODY, SERVER, Action, Identity
from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.core.record import Event, Headers, Record
from babelbus.core.subject import NAME_BYTES_MAX
from babelbus.core.topic import DEAD_LETTERS_PREFIX as PREFIX
from babelbus.core.topic import ClosedTopicError, Topic, event_of
from babelbus.core.work import Work, Writer
from babelbus.errors import BabelbusError, StorageError
from babelbus.records.format import HEADERS_MAX

PROTOCOL = "groups"
"""The name of the publisher of dead letters in metrics."""
REASON = b"dead-reason"
ATTEMPTS = b"dead-attempts"
TOPIC = b"dead-topic"
PARTITION = b"dead-partition"
OFFSET = b"dead-offset"
GROUP = b"dead-group"
TIME = b"dead-time"
"""When it became one, in milliseconds since the epoch; as all numbers here, decimal text."""
OURS = frozenset({REASON, ATTEMPTS, TOPIC, PARTITION, OFFSET, GROUP, TIME})


class NoDeadLetterError(BabelbusError):
    """A record of a dead-letter topic does not say where it came from."""


class TopicDoor(Protocol):
    """The part of the broker that groups use."""

    @property
    def damaged_topics(self) -> Mapping[str, StorageError]:
        """Why topics are not open whose names stay taken."""

    def has_topic(self, name: str) -> bool:
        """Return whether there is a topic of this name."""

    def find_topic(self, name: str) -> Topic | None:
        """Return a topic, `None` if the name is free."""

    def topics(self) -> list[Topic]:
        """Return all topics, by name."""

    def publish(self, publication: Publication) -> Receipt:
        """Publish; whatever prevents it is the error of the receipt."""

    def create_topic(self, name: str, *, principal: Identity = NOBODY, source: str | None = None) -> Work[Topic]:
        """Create a topic, durably; `source` is the topic whose records it is to hold copies of."""

    def remove_topic(self, name: str, principal: Identity = NOBODY) -> Work[None]:
        """Remove a topic and its records, durably."""

    def add_source(self, name: str, source: str) -> Work[None]:
        """Record, durably, that a topic has copies of the records of another topic."""

    def check_topic(self, principal: Identity, action: Action, name: str) -> None:
        """Check that a principal may do this with everything that a topic holds."""

    def may_see(self, principal: Identity, name: str) -> bool:
        """Return whether a principal may know of a topic: it may do something with it."""

    def may_manage(self, principal: Identity, name: str, owner: str) -> bool:
        """Return whether a principal may manage a topic, or something on the topic whose owner is given."""

    def writer(self, what: str, prepare: Callable[[], Callable[[], None]]) -> Writer:
        """Return a writer of one small file, whose content `what` names."""

    def topic(self, name: str) -> Topic:
        """Return a topic, or raise `UnknownTopicError` or `ClosedTopicError`."""

    def why_closed(self, name: str) -> ClosedTopicError | None:
        """Return the error of a topic that could not be opened, `None` for other names."""


class DeadLetter(msgspec.Struct, frozen=True):
    """Where a record came from that is a dead letter now."""

    topic: str
    partition: int
    offset: int
    group: str
    attempts: int
    reason: str
    time_ms: int


def topic_name(group: str) -> str:
    """Return where the dead letters of a group go unless it says otherwise: `dead-letters/<group>`.

    Commas are written `%2C` and `%` is `%25`, since a topic's name has no comma. Groups of one name on several topics
    share it, unless they are kept apart (`own_topic_name`).
    """
    return _named(_quoted(group), group)


def own_topic_name(group: str, topic: str) -> str:
    """Return where the dead letters of a group go that shares them with no group on another topic.

    `%40` stands in no name that `topic_name` returns.
    """
    return _named(f"{_quoted(group)}%40{_quoted(topic)}", f"{group}\n{topic}")


def _quoted(name: str) -> str:
    return name.replace("%", "%25").replace(",", "%2C")


def _named(name: str, whole: str) -> str:
    """Return the name of a topic of dead letters, shortened if it is too long; `whole` tells such names apart."""
    if fits(PREFIX + name):
        return PREFIX + name
    short = quote(name, safe="")[:64].rpartition("%")[0] or "group"
    return f"{PREFIX}{short}-{zlib.crc32(whole.encode('utf-8', 'surrogateescape')):08x}"


def fits(topic: str) -> bool:
    """Return whether a topic may have a name of this length."""
    # The folder's name is the topic's, percent-encoded, and has a limit too (storage/disk/store.py).
    return len(topic.encode()) <= NAME_BYTES_MAX and len(quote(topic, safe="")) <= 255


def make(topic: str, record: Record, letter: DeadLetter) -> Event:
    """Return the event that a dead letter of a record is, under the subject `topic`."""
    kept = [pair for pair in record.headers if pair[0] not in OURS][: HEADERS_MAX - len(OURS) - 1]
    ours: Headers = (
        (REASON, letter.reason.encode("utf-8", "replace")),
        (ATTEMPTS, b"%d" % letter.attempts),
        (TOPIC, letter.topic.encode("utf-8", "surrogateescape")),
        (PARTITION, b"%d" % letter.partition),
        (OFFSET, b"%d" % letter.offset),
        (GROUP, letter.group.encode()),
        (TIME, b"%d" % letter.time_ms),
    )
    return Event(topic, record.payload, record.key, (*kept, *ours), record.timestamp)


def read(record: Record) -> DeadLetter:
    """Return where a dead letter came from.

    Raises:
        NoDeadLetterError: somebody else published the record to the topic.
    """
    found = {name: value for name, value in record.headers if name in OURS and value is not None}
    try:
        return DeadLetter(
            found[TOPIC].decode("utf-8", "surrogateescape"),
            int(found[PARTITION]),
            int(found[OFFSET]),
            found[GROUP].decode(),
            int(found[ATTEMPTS]),
            found[REASON].decode(),
            int(found[TIME]),
        )
    except (KeyError, ValueError) as error:
        raise NoDeadLetterError(f"the record {record.offset} is no dead letter: {error!r}") from None


def origin(record: Record) -> Event:
    """Return the event that a dead letter was, to publish it again: its topic and subject, without our headers and
    time.

    Raises:
        NoDeadLetterError: the record is not a dead letter.
    """
    letter = read(record)
    kept = tuple(pair for pair in record.headers if pair[0] not in OURS)
    return event_of(letter.topic, Record(record.payload, record.key, kept))


class DeadLetters:
    """Writes the dead letters of all groups; makes their topics when they are needed."""

    def __init__(self, door: TopicDoor) -> None:
        self._door = door

    def send(self, name: str, record: Record, letter: DeadLetter) -> Receipt:
        """Publish a dead letter to the topic `name`; make the topic if there is no such topic.

        The record may be passed when the receipt is done without error.
        """
        publication = Publication(CLIENT, PROTOCOL, [make(name, record, letter)], name)
        topic = self._door.find_topic(name)
        if topic is not None and letter.topic in topic.sources:
            return self._door.publish(publication)
        receipt = Receipt()

        def publish(noted: Work[None]) -> None:
            if noted.error is not None:
                receipt.resolve(noted.error)
            else:
                receipt.follow(self._door.publish(publication))

        def note(made: Work[Topic]) -> None:
            if made.error is not None and not self._door.has_topic(name):
                receipt.resolve(made.error)
            else:  # somebody else may have made it
                self._door.add_source(name, letter.topic).when_done(publish)

        if topic is None:
            self._door.create_topic(name, principal=SERVER, source=letter.topic).when_done(note)
        else:
            self._door.add_source(name, letter.topic).when_done(publish)
        return receipt
