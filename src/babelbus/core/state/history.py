"""The state as it was: values and the whole tree as of an earlier offset or time, and all changes of a key.

Everything is read from the log of `$state` in a thread, so the event loop goes on. Compaction removes what was
replaced: a moment before what it has gone through cannot be told exactly, and is refused (docs/state.md). How far back
one can ask is the topic's setting `compact_after_seconds`.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from babelbus.core.state.differences import (
    Differences,
    InvalidMomentsError,
    Revision,
    changed_keys,
    compare,
    revision_of,
)
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.log import READ_BYTES, Loaded, parts_of, replay
from babelbus.core.state.tree import NoSuchKeyError
from babelbus.core.subject import is_secret
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError
from babelbus.records.columns import decode_chunk, rows_of_key
from babelbus.records.fields import timestamp_of
from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import PartitionLog
from babelbus.storage.errors import OffsetOutOfRangeError

REVISIONS_MAX = 1000
"""Most changes of a key in an answer, unless the request names another number."""
REVISIONS_BYTES_MAX = 64 * 2**20
"""Most bytes of values that one answer has; the oldest are left out."""

WINDOW = 4_096
"""Offsets that are looked at first for the last changes of a key; then twice as many, and so on."""

T = TypeVar("T")


class HistoryGoneError(BabelbusError):
    """Compaction has gone past the moment. `offset` and `time_ms` are the earliest that can be asked for.

    `time_ms` is `None` when the log has no record that would tell it.
    """

    def __init__(self, offset: int, time_ms: int | None) -> None:
        when = "" if time_ms is None else f" ({datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()})"
        super().__init__(f"compaction has removed changes of that time; the earliest is offset {offset}{when}")
        self.offset, self.time_ms = offset, time_ms


class AsOf(msgspec.Struct, frozen=True):
    """A moment, told by one of the two: after the record `offset`, or after all up to `time_ms` (since the epoch)."""

    offset: int | None = None
    time_ms: int | None = None

    def __post_init__(self) -> None:
        if (self.offset is None) == (self.time_ms is None):
            raise ValueError("as of an offset or as of a time")


class History:
    """The state of the past, read from its log. All calls come from the event loop and read in a thread.

    A call reads the log up to the moment: about 1 us a record, for `match` 3 to 5.
    `match` leaves out damaged records, as loading the state does; the other calls refuse them.
    """

    def __init__(self, topic: Topic) -> None:
        self._partition = topic.partition(0)

    async def get(self, key: str, moment: AsOf) -> tuple[bytes, int]:
        """Return a value and its version as of a moment. Memory: one chunk of the log.

        Raises:
            NoSuchKeyError: it had none.
            HistoryGoneError, OffsetOutOfRangeError: compaction has gone past the moment, or it has not come yet.
            CorruptRecordError: a record is damaged that may be the one.
            StorageError: the log cannot be read.
        """
        revisions = await self._as_of(moment, lambda log, end: _newest(log, key, end, 1))
        if not revisions or revisions[-1].value is None:
            raise NoSuchKeyError(key)
        return revisions[-1].value, revisions[-1].version

    async def match(self, pattern: KeyPattern | None, moment: AsOf) -> list[tuple[str, bytes, int]]:
        """Return key, value and version (0: plain) of all entries that matched, without a pattern of all entries.

        Memory: the entries.

        Raises:
            HistoryGoneError, OffsetOutOfRangeError: compaction has gone past the moment, or the moment has not come.
            StorageError: the log cannot be read.
        """

        def find(log: PartitionLog, end: int) -> Loaded:
            loaded = Loaded({}, {}, log.first_offset)
            replay(log, loaded, end, None if pattern is None else pattern.matches)
            return loaded

        loaded = await self._as_of(moment, find)
        return [(key, *parts_of(entry)) for key, entry in loaded.values.items()]

    async def revisions(
        self, key: str, *, before: int | None = None, count_max: int = REVISIONS_MAX
    ) -> tuple[list[Revision], int]:
        """Return the last changes of a key that are stored, below the offset `before`, oldest first.

        The second value is the offset from which on all changes are there: of those in front of it, compaction may
        have removed some. Memory: what is given, `REVISIONS_BYTES_MAX` at most, and one chunk of the log.

        Raises:
            CorruptRecordError: a record is damaged that may be one of them.
            StorageError: the log cannot be read.
        """
        log = self._partition.log
        end = self._partition.high_watermark
        if before is not None:
            end = min(end, before)
        found = await self._partition.ask(lambda: _newest(log, key, end, count_max))
        return found, max(log.compacted_until, log.first_offset)

    async def earliest(self) -> tuple[int, int | None]:
        """Return offset and time (ms) of the earliest moment that can be asked for; offset -1 is the very beginning.

        Raises:
            StorageError: the log cannot be read.
        """
        return await self._partition.ask(lambda: _earliest(self._partition.log))

    async def latest(self) -> tuple[int, int | None]:
        """Return offset and time (ms) of the last record; offset -1 of an empty log.

        Raises:
            StorageError: the log cannot be read.
        """
        offset = self._partition.high_watermark - 1
        return await self._partition.ask(lambda: (offset, _time_at(self._partition.log, offset)))

    async def differences(
        self,
        pattern: KeyPattern,
        first: AsOf,
        second: AsOf | None,
        *,
        after: str | None = None,
        count: int,
        grant: Callable[[list[str]], Awaitable[list[str]]] | None = None,
    ) -> Differences:
        """Return how the keys of a pattern differ between two moments, `None` is now, a page in the order of the keys.

        `grant` returns those of the changed keys that may be read.

        Raises:
            InvalidMomentsError, TooManyChangesError: the first moment is the later one, or too many keys differ.
            HistoryGoneError, OffsetOutOfRangeError: compaction has gone past a moment, or it has not come yet.
            StorageError: the log cannot be read.
        """
        log, visible = self._partition.log, self._partition.high_watermark

        def ends() -> tuple[int, int]:
            start, end = _end(log, first, visible), visible if second is None else _end(log, second, visible)
            _check(log, start)
            if start > end:
                raise InvalidMomentsError("the first moment comes after the second one: exchange them")
            return start, end

        def matches(key: str) -> bool:
            return pattern.matches(key) and not is_secret(key)

        start, end = await self._partition.ask(ends)
        later = await self._partition.ask(lambda: changed_keys(log, start, end, matches))
        if grant is not None:
            later = {key: later[key] for key in await grant(list(later))}

        def run() -> Differences:
            differences = compare(log, start, end, later, after=after, count=count)
            _check(log, start)  # compaction may have come past while we read
            return differences

        return await self._partition.ask(run)

    async def _as_of(self, moment: AsOf, find: Callable[[PartitionLog, int], T]) -> T:
        """Answer a question about the records up to a moment, in a thread."""
        log, visible = self._partition.log, self._partition.high_watermark

        def run() -> T:
            end = _end(log, moment, visible)
            _check(log, end)
            found = find(log, end)
            _check(log, end)  # compaction may have come past while we read
            return found

        return await self._partition.ask(run)


def _end(log: PartitionLog, moment: AsOf, visible: int) -> int:
    """Return the offset of the first record behind a moment.

    Raises:
        OffsetOutOfRangeError: there is no such record yet.
    """
    if moment.offset is not None:
        if not log.first_offset <= moment.offset + 1 <= visible or moment.offset < 0:
            raise OffsetOutOfRangeError(moment.offset, max(log.first_offset - 1, 0), visible)
        return moment.offset + 1
    assert moment.time_ms is not None
    found = log.find_time(moment.time_ms + 1)
    return visible if found is None else min(found, visible)


def _check(log: PartitionLog, end: int) -> None:
    """Check that nothing is missing of what must be known of the records in front of `end`.

    Raises:
        HistoryGoneError: something may be.
    """
    if end < log.compacted_until:
        raise HistoryGoneError(*_earliest(log))


def _earliest(log: PartitionLog) -> tuple[int, int | None]:
    offset = max(log.compacted_until, log.first_offset) - 1
    return offset, _time_at(log, max(offset, log.first_offset))


def _time_at(log: PartitionLog, offset: int) -> int | None:
    """Return the time of the record at an offset, `None` if no record is there or it is damaged."""
    if not log.first_offset <= offset < log.next_offset:
        return None
    try:
        data = log.read(offset, 0, offset + 1).data
    except CorruptRecordError:
        return None
    return timestamp_of(data) if data else None


def _newest(log: PartitionLog, key: str, end: int, count_max: int) -> list[Revision]:
    """Return the last changes of a key in front of `end`, oldest first, as many as the bounds allow.

    The log is read from its end in growing windows: a key that changes often costs little, however long the log is.

    Raises:
        CorruptRecordError: a record is damaged that may be one of them.
    """
    newest: deque[Revision] = deque()
    if is_secret(key):  # of versions that kept such keys
        return []
    size, window, is_full = 0, WINDOW, False
    while end > log.first_offset and not is_full:
        start = max(log.first_offset, end - window)
        part: deque[Revision] = deque()
        for revision in _revisions(log, key, start, end):
            part.append(revision)
            size += len(revision.value or b"")
            while part and _are_too_many(len(part) + len(newest), size, count_max):
                size -= len(part.popleft().value or b"")
                is_full = True
        newest.extendleft(reversed(part))
        is_full |= len(newest) >= count_max
        end, window = start, window * 2
    return list(newest)


def _are_too_many(count: int, size: int, count_max: int) -> bool:
    """Return whether so many revisions with so many bytes are more than one answer has; one always fits."""
    return count > count_max or (size > REVISIONS_BYTES_MAX and count > 1)


def _revisions(log: PartitionLog, key: str, offset: int, end: int) -> Iterator[Revision]:
    """Yield the stored changes of a key between two offsets, in order.

    Raises:
        CorruptRecordError: a record in between is damaged.
    """
    raw = key.encode("utf-8", "surrogatepass")
    while offset < end:
        chunk = log.read(offset, READ_BYTES, end)
        if chunk.data:
            columns = decode_chunk(chunk.data, verified=True)
            for row in rows_of_key(columns, raw).tolist():
                yield revision_of(columns, row)
        offset = chunk.next_offset
