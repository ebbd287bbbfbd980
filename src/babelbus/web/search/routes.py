"""Search over the administration API: records of a topic that match a filter, as JSON lines.

    GET /api/topics/TOPIC/search?filter=...&partition=0&offset=5 | time_ms=... &count=50&budget_ms=10000

Lines are {"record": ...} and {"progress": ...}. Each search says how far it came, why it ended, and with `next` where
to go on: `partition:offset`, the parameter `from` of the next request. The server keeps the rights and the end that
readers see; the process that searches is told from where to where it may look.
"""

import asyncio
import os
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from babelbus.clock import Clock
from babelbus.core.access import Action, Identity
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.records.format import CorruptRecordError
from babelbus.records.record import Record
from babelbus.storage.contract import Shared
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.units import MIB
from babelbus.web.answers import read_number, read_text
from babelbus.web.callers import topic_of
from babelbus.web.calls import Answer, Call, Route
from babelbus.web.errors import NoRecordError
from babelbus.web.reading import read_limits, read_one, readable
from babelbus.web.search.language import parse
from babelbus.web.search.process import SearchEndedError, Searcher
from babelbus.web.search.tasks import Outcome, Task
from babelbus.web.shown_records import Limits, ShownRecord, show
from babelbus.web.slots import Slots

COUNT = 50
COUNT_MAX = 1_000
BUDGET_MS = 10_000
BUDGET_MS_MAX = 60_000
SEARCHES_MAX = 8
"""Most searches at once: they share one process."""
READER_SECONDS = 60.0
"""How long the reader of a search may need beyond its time: one that reads nothing must not keep the others out."""
SLICE_SECONDS = 0.25
BLOCKS_MAX = 1_024
"""More blocks than a step passes."""
encode = msgspec.json.Encoder().encode

REASONS = {
    "end": "All records up to the end of the topic were searched.",
    "count": "As many records as were asked for have been found.",
    "budget": "The time of this search is over.",
    "ended": "The process that searches has ended; the search can go on from here.",
    "removed": "The topic was removed, or the right to read it was taken away.",
}


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a search came: the next offset of a partition, records and hits so far, the time of the last record.

    `why` is empty while the search goes on, else a word of `REASONS`, whose sentence is `text`.
    """

    partition: int
    offset: int
    end_offset: int
    records: int
    hits: int
    time_ms: int
    done: bool
    why: str = ""
    text: str = ""
    next: str = ""
    notes: list[str] = []


class RecordFound(msgspec.Struct, frozen=True):
    """A line with a record."""

    record: ShownRecord


class ProgressLine(msgspec.Struct, frozen=True):
    """A line about the search."""

    progress: Progress


class SearchRoutes:
    """The requests that search."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self.searcher = Searcher()
        self.slots = Slots("searches", SEARCHES_MAX)

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/topics/{name}/search", self._search),)

    def close(self) -> None:
        """Stop the process that searches."""
        self.searcher.close()

    async def _search(self, call: Call) -> Answer:
        principal = call.principal
        topic = readable(self._broker, principal, topic_of(call))
        text = read_text(call, "filter")
        parse(text)
        count = min(read_number(call, "count", 1) or COUNT, COUNT_MAX)
        budget_ms = min(read_number(call, "budget_ms", 1) or BUDGET_MS, BUDGET_MS_MAX)
        limits = read_limits(call, count)
        starts = await _starts(call, topic)
        deadline = self._clock.monotonic() + budget_ms / 1000
        with self.slots.take(principal):
            search = Search(self._broker, self.searcher, self._clock, topic, principal, text, count, deadline)
            return await self._answer(call, search, starts, limits, budget_ms / 1000 + READER_SECONDS)

    async def _answer(
        self, call: Call, search: "Search", starts: list[tuple[Partition, int]], limits: Limits, seconds: float
    ) -> Answer:
        name, principal = topic_of(call), call.principal
        try:
            async with asyncio.timeout(seconds):
                response = await call.begin_lines()
                async for partition, offsets, progress in search.run(starts):
                    for offset in offsets:  # one by one: together they may be large
                        record = await _record(partition, offset, name)
                        if record is not None and search.may_read():
                            found = RecordFound(show(record, partition.number, name, principal, limits))
                            await response.write(encode(found) + b"\n")
                    await response.write(encode(ProgressLine(progress)) + b"\n")
            return response
        except TimeoutError as error:
            raise ConnectionResetError("the reader of a search takes nothing") from error
        finally:
            search.close()


class Search:
    """One search: it goes through partitions, and tells its progress after each short task."""

    def __init__(
        self,
        broker: Broker,
        searcher: Searcher,
        clock: Clock,
        topic: Topic,
        principal: Identity,
        text: str,
        count: int,
        deadline: float,
    ) -> None:
        self._broker = broker
        self._searcher = searcher
        self._clock = clock
        self._topic = topic
        self._principal = principal
        self._text = text
        self._left = count
        self._count = count
        self._deadline = deadline
        self._records = 0
        self._time_ms = 0
        self._notes: list[str] = []
        self._part: tuple[Partition, Shared] | None = None
        """The open file of the last step: to find a place in a file costs the server more than to search from there."""

    def close(self) -> None:
        """Close the file."""
        if self._part is not None:
            os.close(self._part[1].file)
            self._part = None

    async def run(
        self, starts: Sequence[tuple[Partition, int]]
    ) -> AsyncIterator[tuple[Partition, list[int], Progress]]:
        """Yield a partition, offsets of records that match, and the progress; the last progress says why it ended."""
        for number, (partition, start) in enumerate(starts):
            offset, end = max(start, partition.log.first_offset), partition.high_watermark
            is_last = number == len(starts) - 1
            while offset < end:
                why = self._stopped()
                if why:
                    yield partition, [], self._progress(partition, offset, end, why)
                    return
                try:
                    hits, offset = await self._step(partition, offset, end)
                except SearchEndedError:
                    yield partition, [], self._progress(partition, offset, end, "ended")
                    return
                except StorageError as error:
                    self._notes.append(self._principal.relative_text(str(error)))
                    yield partition, [], self._progress(partition, offset, end, "removed")
                    return
                self._left -= len(hits)
                if hits or offset < end:
                    yield partition, hits, self._progress(partition, offset, end, "")
            if is_last:
                yield partition, [], self._progress(partition, offset, end, "end" if self.may_read() else "removed")

    def may_read(self) -> bool:
        """Return whether the topic is still there and may be read."""
        broker, name = self._broker, self._topic.name
        return broker.find_topic(name) is self._topic and broker.may_topic(self._principal, Action.READ, name)

    def _stopped(self) -> str:
        """Return why the search ends here, or nothing."""
        if not self.may_read():
            return "removed"
        if self._left <= 0:
            return "count"
        return "budget" if self._clock.monotonic() >= self._deadline else ""

    def _progress(self, partition: Partition, offset: int, end: int, why: str) -> Progress:
        notes, self._notes = self._notes, []
        return Progress(
            partition=partition.number,
            offset=offset,
            end_offset=end,
            records=self._records,
            hits=self._count - self._left,
            time_ms=self._time_ms,
            done=why == "end",
            why=why,
            text=REASONS.get(why, ""),
            next=f"{partition.number}:{offset}" if why and why != "removed" else "",
            notes=notes,
        )

    async def _step(self, partition: Partition, offset: int, end: int) -> tuple[list[int], int]:
        """Return the offsets that match, found within a moment, and where to go on.

        Raises:
            SearchEndedError: the process has ended.
            StorageError: the topic went away.
        """
        try:
            part = await self._open(partition, offset)
            if part is not None:
                outcome = await self._searcher.run(self._task(part, min(end, part.next_offset)), part.file)
                if not outcome.fault:
                    following = outcome.offset
                    if outcome.position < part.end and following < part.next_offset:
                        self._part = partition, part._replace(position=outcome.position, offset=following)
                    else:
                        following = max(following, part.next_offset)
                        self.close()
                    return self._note(outcome), min(following, end)
                self.close()
                if outcome.offset > offset:
                    return self._note(outcome), outcome.offset
            chunk = await partition.read(offset, MIB, end)
        except OffsetOutOfRangeError:
            first = partition.log.first_offset
            self._notes.append(f"Retention has removed the records below offset {first} during the search.")
            return [], max(first, offset + 1)
        except CorruptRecordError as error:
            self._notes.append(
                f"The record at offset {offset} of partition {partition.number} is damaged: {error.reason}."
            )
            return [], offset + 1
        if not chunk.data:
            return [], max(chunk.next_offset, offset + 1)
        part = Shared(-1, 0, len(chunk.data), offset, chunk.next_offset, (), 0)
        outcome = await self._searcher.run(self._task(part, end, chunk.data))
        whole = len(outcome.hits) < self._left
        return self._note(outcome), max(chunk.next_offset if whole else outcome.offset, offset + 1)

    async def _open(self, partition: Partition, offset: int) -> Shared | None:
        """Return where the process reads on: in the file of the last step, or in another one."""
        kept = self._part
        if kept is not None and kept[0] is partition and kept[1].offset == offset:
            return kept[1]
        self.close()
        part = await partition.ask(lambda: partition.log.share(offset))
        if part is not None:
            self._part = partition, part
        return part

    def _task(self, part: Shared, end_offset: int, data: bytes | None = None) -> Task:
        root = self._principal.root
        first = bisect_left(part.blocks, part.position)
        return Task(
            filter=self._text,
            topic=self._topic.name,
            root="" if root is None else root.name,
            position=part.position,
            end=part.end,
            offset=part.offset,
            end_offset=end_offset,
            count=self._left,
            seconds=SLICE_SECONDS,
            data=data,
            blocks=list(part.blocks[first : first + BLOCKS_MAX]),
            block_records=part.block_records,
        )

    def _note(self, outcome: Outcome) -> list[int]:
        self._records += outcome.records
        self._time_ms = outcome.time_ms or self._time_ms
        return outcome.hits


async def _record(partition: Partition, offset: int, name: str) -> Record | None:
    """Return a record that was found, `None` if it is gone meanwhile."""
    try:
        return (await read_one(partition, offset, name))[0]
    except (NoRecordError, StorageError):
        return None


async def _starts(call: Call, topic: Topic) -> list[tuple[Partition, int]]:
    """Return the partitions of a search, and where it begins in each.

    Raises:
        web.HTTPBadRequest: `from` is no place.
    """
    number, offset, time_ms = (read_number(call, name) for name in ("partition", "offset", "time_ms"))
    partitions = topic.partitions if number is None else [topic.partition(number)]
    place = call.query.get("from", "")
    first, _, at = place.partition(":")
    if place and not (first.isascii() and first.isdigit() and at.isascii() and at.isdigit() and len(place) < 30):
        raise web.HTTPBadRequest(text=f"from is a place such as 0:1500 (partition and offset), not {place[:40]!r}")
    starts = []
    for partition in partitions:
        if place and partition.number < int(first):
            continue
        start = offset or 0
        if place and partition.number == int(first):
            start = int(at)
        elif time_ms is not None:
            found = await partition.find_time(time_ms)
            start = partition.high_watermark if found is None else found
        starts.append((partition, start))
    return starts or [(partitions[-1], partitions[-1].high_watermark)]
