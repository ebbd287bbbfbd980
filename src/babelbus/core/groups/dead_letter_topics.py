"""The topics of dead letters: list and show them, replay letters to where the records came from, purge.

The letters that were replayed are the cursor of a consumer group of its own on the topic, `$replay`: durable like every
cursor, so a crash may let letters that were replayed within `groups.commit_seconds` be replayed again, and skips none.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain

import msgspec

from babelbus.core.access import CLIENT, NOBODY, SERVER, STATE_TOPIC, Action, Identity, refusal
from babelbus.core.groups.cursor_files import StoredCursor
from babelbus.core.groups.dead_letters import (
    PROTOCOL,
    DeadLetter,
    NoDeadLetterError,
    TopicDoor,
    origin,
    read,
    topic_name,
)
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Delivery
from babelbus.core.groups.member import Member
from babelbus.core.groups.registry import Groups
from babelbus.core.groups.settings import BEGINNING, GroupSettings
from babelbus.core.partition import Partition
from babelbus.core.publish import Publication
from babelbus.core.receipt import DONE, Promise, Receipt, settled
from babelbus.core.record import Record
from babelbus.core.topic import DEAD_LETTERS_PREFIX as PREFIX
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.storage.errors import OffsetOutOfRangeError

REPLAY_GROUP = "$replay"
REPLAY_SETTINGS = GroupSettings(
    ack="explicit",
    # What cannot be replayed stays for the next time; it is no dead letter's dead letter.
    attempts_max=None,
    # A replay ends with its member, and may take long.
    ack_seconds=86_400.0,
    retry_seconds=0.0,
    order="none",
    # To replay one letter, those before it are held meanwhile.
    in_flight_max=10_000_000,
)
TAKE_COUNT = 500
"""Letters that are published before their receipts are waited for."""
READ_BYTES = 2**20
FAILURES_MAX = 100
"""How many letters that could not be replayed are told of one by one."""


class NoDeadLetterTopicError(BabelbusError):
    """The name is neither a topic of dead letters nor a group that has one."""


class AmbiguousGroupError(BabelbusError):
    """Groups of one name on several topics send their dead letters to different topics."""

    def __init__(self, group: str, topics: Sequence[str]) -> None:
        named = ", ".join(map(repr, topics))
        super().__init__(f"groups {group!r} send their dead letters to several topics; name the topic: {named}")
        self.group, self.topics = group, tuple(topics)


class LettersWaitingError(BabelbusError):
    """Letters that were not replayed would be lost with their topic."""

    def __init__(self, topic: str, waiting: int, letters: int) -> None:
        super().__init__(f"{waiting} of the {letters} dead letters in topic {topic!r} were not replayed")
        self.topic, self.waiting, self.letters = topic, waiting, letters


class Sender(msgspec.Struct, frozen=True):
    """A group whose dead letters go to a topic; `dead_lettered` counts since the server started."""

    topic: str
    group: str
    dead_lettered: int


class DeadLetterTopicInfo(msgspec.Struct, frozen=True):
    """A topic of dead letters. `waiting` of its `letters` were not replayed."""

    topic: str
    partitions: int
    letters: int
    waiting: int
    senders: tuple[Sender, ...]


class Letter(msgspec.Struct, frozen=True):
    """One record of such a topic; `letter` is `None` when somebody else published it."""

    partition: int
    record: Record
    letter: DeadLetter | None
    replayed: bool


class Failed(msgspec.Struct, frozen=True):
    """A letter that could not be replayed, and why."""

    partition: int
    offset: int
    reason: str


class Replayed(msgspec.Struct):
    """The outcome of a replay. `failures` are the first of `failed`; `waiting` letters were not replayed, and stay."""

    topic: str
    replayed: int = 0
    failed: int = 0
    failures: list[Failed] = []
    waiting: int = 0

    def fail(self, partition: int, offset: int, reason: str) -> None:
        """Record a letter that could not be replayed."""
        self.failed += 1
        if len(self.failures) < FAILURES_MAX:
            self.failures.append(Failed(partition, offset, reason))


Tell = Callable[[Replayed], Awaitable[None]]
"""Takes the outcome of a replay so far; what it raises ends the replay."""


class DeadLetterTopics:
    """All topics of dead letters: those named `dead-letters/...`, and those that a group's settings name.

    All calls come from the event loop. `name` is such a topic or the name of a group that sends there.
    """

    def __init__(self, door: TopicDoor, groups: Groups) -> None:
        self._door = door
        self._groups = groups

    def all(self, principal: Identity = NOBODY) -> list[DeadLetterTopicInfo]:
        """Return the topics of dead letters that a principal may know of, by name."""
        senders: dict[str, list[Group]] = {}
        for group in self._groups.all():
            senders.setdefault(_target(group), []).append(group)
        topics = [topic for topic in self._door.topics() if topic.name in senders or topic.name.startswith(PREFIX)]
        return [
            self._describe(topic, principal, senders.get(topic.name, []))
            for topic in topics
            if self._door.may_see(principal, topic.name)
        ]

    def info(self, name: str, principal: Identity = NOBODY) -> DeadLetterTopicInfo:
        """Return one topic of dead letters.

        Raises:
            AccessRefusedError: the principal may do nothing with such a topic.
            AmbiguousGroupError, NoDeadLetterTopicError: the name means several topics, or none.
        """
        return self._describe(self._find(name, principal), principal)

    async def read(
        self,
        name: str,
        partition: int,
        offset: int,
        count_max: int,
        principal: Identity = NOBODY,
        *,
        only_waiting: bool = False,
    ) -> list[Letter]:
        """Return up to `count_max` letters of a partition from an offset on, the oldest first.

        With `only_waiting` letters that were replayed are left out.

        Raises:
            AccessRefusedError: the principal may not read the topic, or a topic that its letters come from.
            NoDeadLetterTopicError, UnknownPartitionError: there is no such topic or partition.
            StorageError: the disk refused, or a letter is damaged.
        """
        topic = self._find(name, principal)
        self._door.check_topic(principal, Action.READ, topic.name)
        source = topic.partition(partition)
        group = self._groups.find(topic.name, REPLAY_GROUP)
        kept = StoredCursor(0) if group is None else group.stored().get(partition, StoredCursor(0))
        letters: list[Letter] = []
        if only_waiting:
            offset = max(offset, kept.committed)
        async for record in _records(source, offset):
            replayed = record.offset < kept.committed or any(start <= record.offset < end for start, end in kept.done)
            if replayed and only_waiting:
                continue
            letters.append(Letter(partition, record, _read(record), replayed))
            if len(letters) == count_max:
                break
        return letters

    async def replay(
        self,
        name: str,
        *,
        count_max: int | None = None,
        places: Sequence[tuple[int, int]] = (),
        principal: Identity = NOBODY,
        tell: Tell | None = None,
    ) -> Replayed:
        """Publish letters that were not replayed yet to the topics that they came from, and record that.

        At most `count_max`, the oldest first; or those at `places` (partition, offset). All groups on such a topic see
        the record again, behind what has come meanwhile. `tell` is called with the outcome so far, time and again.

        Raises:
            AccessRefusedError: the principal may not consume the topic; each letter needs the right to publish it.
            AmbiguousGroupError, NoDeadLetterTopicError: the name means several topics, or none.
            GroupOwnedError: a replay of it is under way.
            StorageError: the disk refused to save the replay.
        """
        topic = self._find(name, principal)
        self._door.check_topic(principal, Action.CONSUME, topic.name)
        group = self._groups.ensure(topic.name, REPLAY_GROUP, REPLAY_SETTINGS, start=BEGINNING, principal=SERVER)
        group.resume(SERVER)
        outcome, chosen, left = Replayed(topic.name), set(places), count_max
        member = group.join(lambda _: None, credit=0, exclusive=True, principal=SERVER)
        try:
            while (left is None or left > 0) and (chosen or not places):
                count = TAKE_COUNT if left is None else min(TAKE_COUNT, left)
                letters = [*chain.from_iterable(member.take(count))]
                if not letters:
                    loading = group.loading
                    if loading is None:
                        break
                    await settled([loading])
                elif places:
                    letters = [letter for letter in letters if (letter.partition, letter.offset) in chosen]
                    chosen.difference_update((letter.partition, letter.offset) for letter in letters)
                elif left is not None:
                    left -= len(letters)
                receipts = [self._publish(topic, member, letter, outcome, principal) for letter in letters]
                try:
                    await settled(receipts)
                except asyncio.CancelledError:  # the caller has gone; what was published is recorded before the end
                    await settled(receipts)
                    raise
                if tell is not None and letters:
                    outcome.waiting = self._waiting(topic, group)
                    await tell(outcome)
        finally:
            member.leave()
        for place in sorted(chosen):
            outcome.fail(*place, "there is no letter at this offset, or it was replayed")
        outcome.waiting = self._waiting(topic, group)
        return outcome

    def _publish(
        self, topic: Topic, member: Member, letter: Delivery, outcome: Replayed, principal: Identity
    ) -> Promise:
        """Publish what a letter was; ack the letter when that is as durable as the topic says."""
        try:
            event, target = origin(letter), read(letter).topic
            if not _comes_from(topic, target, letter):
                raise NoDeadLetterError(f"no group has sent the record {letter.offset} here from topic {target!r}")
        except NoDeadLetterError as error:
            outcome.fail(letter.partition, letter.offset, str(error))
            return DONE

        def settle(receipt: Receipt) -> None:
            if receipt.error is not None:
                outcome.fail(letter.partition, letter.offset, str(receipt.error))
            elif not member.closed:
                outcome.replayed += 1
                member.ack([letter])

        receipt = self._door.publish(
            Publication(CLIENT if principal is SERVER else principal, PROTOCOL, [event], target)
        )
        receipt.when_done(settle)
        return receipt

    async def purge(self, name: str, *, everything: bool = False, principal: Identity = NOBODY) -> DeadLetterTopicInfo:
        """Remove a topic of dead letters and return its last figures; the next dead letter makes the topic anew.

        Raises:
            AccessRefusedError: the principal may not manage the topic.
            AmbiguousGroupError, NoDeadLetterTopicError: the name means several topics, or none.
            LettersWaitingError: letters were not replayed, and `everything` was not asked for.
            StorageError: the disk refused.
        """
        info = self._describe(self._find(name, principal), principal)
        if info.waiting and not everything:
            raise LettersWaitingError(info.topic, info.waiting, info.letters)
        await self._door.remove_topic(info.topic, principal)
        return info

    def _find(self, name: str, principal: Identity) -> Topic:
        """Return the topic that a principal means; topics and groups of others stay unknown to it.

        Raises:
            AccessRefusedError: the principal may know of no such topic, and not of the name.
            AmbiguousGroupError: it is the name of groups whose dead letters are in several topics.
            NoDeadLetterTopicError: there is no such topic.
        """
        door, groups = self._door, self._groups.all()
        targets = [_target(group) for group in groups]
        own = [name] if name.startswith(PREFIX) or name in targets else []
        of_groups = [target for group, target in zip(groups, targets, strict=True) if group.name == name]
        for names in (own, dict.fromkeys(of_groups), [topic_name(name)]):
            topics = [topic for one in names if (topic := door.find_topic(one)) and door.may_see(principal, one)]
            if len(topics) > 1:
                raise AmbiguousGroupError(name, [topic.name for topic in topics])
            if topics:
                return topics[0]
        if not door.may_see(principal, name):
            raise refusal(principal, Action.READ, name)
        if door.has_topic(name):
            raise NoDeadLetterTopicError(f"topic {name!r} has no dead letters")
        raise NoDeadLetterTopicError(f"there are no dead letters of {name!r}")

    def _describe(
        self, topic: Topic, principal: Identity, groups: Sequence[Group] | None = None
    ) -> DeadLetterTopicInfo:
        """Return the figures of a topic; `groups` are those that send there, if the caller has looked for them."""
        if groups is None:
            groups = [one for one in self._groups.all() if _target(one) == topic.name]
        letters = sum(one.next_offset - one.log.first_offset for one in topic.partitions)
        group = self._groups.find(topic.name, REPLAY_GROUP)
        waiting = letters if group is None else self._waiting(topic, group)
        senders = tuple(
            Sender(one.topic.name, one.name, one.counts.dead_lettered)
            for one in groups
            if one.topic is not topic and self._door.may_see(principal, one.topic.name)
        )
        return DeadLetterTopicInfo(topic.name, len(topic.partitions), letters, waiting, senders)

    def _waiting(self, topic: Topic, group: Group) -> int:
        unflushed = sum(one.next_offset - one.high_watermark for one in topic.partitions)
        return group.info().lag + unflushed


def _target(group: Group) -> str:
    """Return where the dead letters of a group go."""
    return group.settings.dead_letter_topic or topic_name(group.name)


def _comes_from(topic: Topic, source: str, letter: Delivery) -> bool:
    """Return whether a letter may come from the topic that its headers name: clients can write headers, too.

    A principal that writes here while a topic is a source has the right to publish to the source itself.
    """
    if STATE_TOPIC in topic.sources or (not topic.sources and topic.name.startswith(PREFIX)):
        return True  # from before sources were kept: who could write here may publish everything
    since = topic.since.get(source, ())
    return source in topic.sources and (letter.partition >= len(since) or letter.offset >= since[letter.partition])


def _read(record: Record) -> DeadLetter | None:
    try:
        return read(record)
    except NoDeadLetterError:
        return None


async def _records(partition: Partition, offset: int) -> AsyncIterator[Record]:
    """Yield the records of a partition from an offset on; the event loop goes round behind each chunk."""
    offset = max(offset, partition.log.first_offset)
    while offset < partition.high_watermark:
        try:
            chunk = await partition.read(offset, READ_BYTES)
        except OffsetOutOfRangeError as error:
            if error.first <= offset:  # the end stepped back while we looked
                return
            offset = error.first  # retention was here
            continue
        for record in iterate(decode_chunk(chunk.data, verified=True)):
            yield record
        await asyncio.sleep(0)
        offset = chunk.next_offset
