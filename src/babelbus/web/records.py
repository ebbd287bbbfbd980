"""Records over the administration API: those of a topic from any offset or time, one record whole, new ones.

    GET /api/topics/TOPIC/records?partition=0&offset=5 | before=5 | time_ms=... | last=1 &count=50&bytes_max=1024
    GET /api/topics/TOPIC/records/PARTITION/OFFSET            the record, and as the client of each protocol gets it
    GET /api/topics/TOPIC/records/PARTITION/OFFSET/payload    the bytes of the payload
    GET /api/topics/TOPIC/follow?partition=0                  JSON lines: records, and {"skipped": n}
    GET /api/topics/TOPIC/export?format=csv                   JSON lines or CSV, up to the end of the moment

The right to read the topic is needed. No page can show all that a full bus publishes: `follow` sends the newest records
and the number of skipped ones.
"""

import asyncio
import csv
import io
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from babelbus.core.access import Action, Identity
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition, TopicClosedError
from babelbus.core.rooted import relative_chunk, relative_record
from babelbus.core.topic import Topic
from babelbus.records.format import CorruptRecordError
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.units import MIB
from babelbus.web import reading
from babelbus.web.answers import answer, read_number
from babelbus.web.callers import topic_of
from babelbus.web.calls import LINES_TYPE, SAFE_HEADERS, Answer, Call, Lines, Route
from babelbus.web.feed import came
from babelbus.web.reading import Page, read_backwards, read_forwards, read_limits, read_one, read_some, readable
from babelbus.web.shown_records import UNSET, WHOLE, Limits, ShownRecord, printable, show
from babelbus.web.slots import Slots
from babelbus.web.views import RECORD_BYTES_MAX, Encoders, StoredRecord, View, views_of

COUNT = 50
COUNT_MAX = 500
NEWEST_MAX = 2_000
"""Most records that are read to show the newest ones of all partitions."""
HEARTBEAT_SECONDS = 10.0
FOLLOW_SECONDS = 0.25
"""The pause behind the records of one turn: a page shows no more than some hundred a second."""
FOLLOW_COUNT = 50
"""Most records of one partition in a turn; older ones are skipped."""
FOLLOWERS_MAX = 64
READER_SECONDS = 60.0
"""How long a follower may take nothing: it keeps the place of another one."""
EXPORT = Limits(16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB)
CSV_TYPE = "text/csv; charset=utf-8; header=present"
CSV_COLUMNS = ("partition", "offset", "time_ms", "subject", "key", "payload", "headers", "encoding")
encode = msgspec.json.Encoder().encode
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet takes for a formula."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Records(msgspec.Struct, frozen=True):
    """Records of a page. `first_offset` and `end_offset` are those of the partition.

    `next_offset` is where to read on; `previous_offset` is the `before` of the page in front, null at the beginning.
    With records of all partitions these four are null.
    """

    records: list[ShownRecord]
    partition: int | None
    partitions: int
    first_offset: int | None
    end_offset: int | None
    next_offset: int | None
    previous_offset: int | None
    notes: list[str]


class WholeRecord(msgspec.Struct, frozen=True):
    """One record, and its views by protocol."""

    record: ShownRecord
    first_offset: int
    end_offset: int
    views: dict[str, View]


class RecordRoutes:
    """The requests that read records."""

    def __init__(self, broker: Broker, encoders: Encoders) -> None:
        self._broker = broker
        self._encoders = encoders
        self.followers = Slots("pages that follow topics", FOLLOWERS_MAX)
        self._waiting: set[asyncio.Event] = set()
        """Events that wake the followers which wait for records."""
        self._closed = False

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        place = "/api/topics/{name}/records/{partition}/{offset}"
        return (
            ("GET", "/api/topics/{name}/records", self._browse),
            ("GET", place, self._one),
            ("GET", f"{place}/payload", self._payload),
            ("GET", "/api/topics/{name}/follow", self._follow),
            ("GET", "/api/topics/{name}/export", self._export),
        )

    def close(self) -> None:
        """End the answers of followers: the server stops."""
        self._closed = True
        for some in self._waiting:
            some.set()

    async def _browse(self, call: Call) -> web.Response:
        name, principal = topic_of(call), call.principal
        topic = readable(self._broker, principal, name)
        count = min(read_number(call, "count", 1) or COUNT, COUNT_MAX)
        limits = read_limits(call, count)
        number = read_number(call, "partition")
        if number is None and len(topic.partitions) > 1 and not call.query.keys() & {"offset", "before", "time_ms"}:
            return answer(await _newest(topic, principal, count, limits))
        partition = topic.partition(number or 0)
        page = await _page(call, partition, count)
        first, end = partition.log.first_offset, partition.high_watermark
        return answer(
            Records(
                [show(record, partition.number, name, principal, limits) for record in page.records],
                partition.number,
                len(topic.partitions),
                first,
                end,
                page.next_offset,
                page.first_offset if page.first_offset > first else None,
                [principal.relative_text(note) for note in page.notes],
            )
        )

    def _place(self, call: Call) -> tuple[Topic, Partition, int]:
        """Return topic, partition and offset that a path names.

        Raises:
            web.HTTPNotFound: the path has no numbers there.
        """
        topic = readable(self._broker, call.principal, topic_of(call))
        number, offset = (call.path_values[part] for part in ("partition", "offset"))
        if not (is_number(number) and is_number(offset)):
            raise web.HTTPNotFound
        return topic, topic.partition(int(number)), int(offset)

    async def _one(self, call: Call) -> web.Response:
        topic, partition, offset = self._place(call)
        record, data = await read_one(partition, offset, topic.name)
        principal, name, root = call.principal, topic.name, call.principal.root
        shown = show(record, partition.number, name, principal, WHOLE)
        if root is not None and len(data) <= RECORD_BYTES_MAX:  # a larger one has no views
            record, data = relative_record(record, root), bytes(relative_chunk(data, root))
        stored = StoredRecord(principal.relative(name), name, topic.id, partition.number, record, data)
        first, end = partition.log.first_offset, partition.high_watermark
        return answer(WholeRecord(shown, first, end, views_of(stored, self._encoders)))

    async def _payload(self, call: Call) -> web.Response:
        topic, partition, offset = self._place(call)
        record, _ = await read_one(partition, offset, topic.name)
        file = f"{_file_name(call.principal.relative(topic.name))}-{partition.number}-{offset}.bin"
        headers = {**SAFE_HEADERS, "Content-Disposition": f'attachment; filename="{file}"'}
        return web.Response(body=record.payload or b"", content_type="application/octet-stream", headers=headers)

    # -- as records come ---------------------------------------------------------------------------------------------

    async def _follow(self, call: Call) -> Answer:
        name, principal = topic_of(call), call.principal
        topic = readable(self._broker, principal, name)
        number, offset = read_number(call, "partition"), read_number(call, "offset")
        limits = read_limits(call, FOLLOW_COUNT)
        partitions = topic.partitions if number is None else [topic.partition(number)]
        cursors = {one: one.high_watermark if offset is None else offset for one in partitions}
        with self.followers.take(principal):
            response = await call.begin_lines()
            await _write_in_time(response, b"\n")  # tells the reader that the records from here on come
            while self._holds(topic, principal):
                if self._closed or topic.partitions[0].closed:
                    return response  # the server stops: who follows asks the next one
                lines = [line for one in partitions for line in await _new_lines(one, cursors, name, principal, limits)]
                if lines:
                    await _write_in_time(response, b"\n".join(lines) + b"\n")
                    await asyncio.sleep(FOLLOW_SECONDS)
                elif not await self._any_beyond(cursors, HEARTBEAT_SECONDS):
                    await _write_in_time(response, b"\n")
            await _write_in_time(
                response, b'{"end":"The topic was removed, or the right to read it was taken away."}\n'
            )
            return response

    def _holds(self, topic: Topic, principal: Identity) -> bool:
        """Return whether the topic is still there and may be read."""
        broker = self._broker
        return broker.find_topic(topic.name) is topic and broker.may_topic(principal, Action.READ, topic.name)

    async def _any_beyond(self, cursors: dict[Partition, int], seconds: float) -> bool:
        """Wait for a record at a cursor, and for the end of a topic or the server; return whether one came in time."""
        some = asyncio.Event()
        cancels = [partition.watch(offset, some.set) for partition, offset in cursors.items()]
        self._waiting.add(some)
        try:
            return self._closed or await came(some, seconds)
        finally:
            self._waiting.discard(some)
            for cancel in cancels:
                cancel()

    # -- export ------------------------------------------------------------------------------------------------------

    async def _export(self, call: Call) -> Answer:
        name, principal = topic_of(call), call.principal
        topic = readable(self._broker, principal, name)
        kind = call.query.get("format", "jsonl")
        if kind not in ("jsonl", "csv"):
            raise web.HTTPBadRequest(text=f"format is jsonl or csv, not {kind[:40]!r}")
        number, left = read_number(call, "partition"), read_number(call, "count", 1)
        partitions = topic.partitions if number is None else [topic.partition(number)]
        spans = [await _span(call, one) for one in partitions]
        file = f'attachment; filename="{_file_name(principal.relative(name))}.{kind}"'
        type_ = LINES_TYPE if kind == "jsonl" else CSV_TYPE
        response = await call.begin_lines({hdrs.CONTENT_TYPE: type_, "Content-Disposition": file})
        if kind == "csv":
            await response.write(csv_rows([CSV_COLUMNS]))
        for partition, offset, end in spans:
            while offset < end and (left is None or left > 0):
                if not self._holds(topic, principal):  # half of an export must not look like a whole one
                    raise TopicClosedError("the topic was removed, or the right to read it was taken away")
                records, offset, _ = await read_some(partition, offset, end)
                records = records[:left]
                left = None if left is None else left - len(records)
                await _write(response, [show(one, partition.number, name, principal, EXPORT) for one in records], kind)
        return response


async def _page(call: Call, partition: Partition, count: int) -> Page:
    """Return the page that a query asks for; an offset outside of the partition is moved, and a note says so."""
    first, end = partition.log.first_offset, partition.high_watermark
    before, offset, time_ms = (read_number(call, name) for name in ("before", "offset", "time_ms"))
    notes: list[str] = []
    if time_ms is not None:
        offset = await partition.find_time(time_ms)
        if offset is None:
            notes.append("No record is as late as this time: these are the last records.")
        else:
            offset = max(offset, first)
    if offset is not None and offset < first:
        notes.append(f"Retention has removed the records below offset {first}: the partition begins there now.")
        offset = first
    if offset is not None and offset > end:
        notes.append(f"The partition ends at offset {end}: these are the last records.")
        offset = None
    if offset is not None:
        page = await read_forwards(partition, offset, end, count)
    else:
        page = await read_backwards(partition, first, end if before is None else max(min(before, end), first), count)
    page.notes[:0] = notes
    return page


async def _newest(topic: Topic, principal: Identity, count: int, limits: Limits) -> Records:
    """Return the newest records of all partitions, by time."""
    partitions = topic.partitions
    each, bytes_max = min(count, max(NEWEST_MAX // len(partitions), 1)), reading.ANSWER_BYTES_MAX // len(partitions)
    shown: list[ShownRecord] = []
    notes: dict[str, None] = {}
    for one in partitions:  # whole records of one partition at once: together they may be large
        page = await read_backwards(one, one.log.first_offset, one.high_watermark, each, bytes_max)
        shown += [show(record, one.number, topic.name, principal, limits) for record in page.records]
        shown.sort(key=lambda line: (line.time_ms, line.partition, line.offset))
        del shown[:-count]
        notes |= dict.fromkeys(map(principal.relative_text, page.notes))
    return Records(shown, None, len(partitions), None, None, None, None, list(notes))


async def _new_lines(
    partition: Partition, cursors: dict[Partition, int], name: str, principal: Identity, limits: Limits
) -> list[bytes]:
    """Return the lines of the newest records behind a cursor, and move the cursor."""
    end, offset = partition.high_watermark, cursors[partition]
    lines: list[bytes] = []
    start = max(offset, end - FOLLOW_COUNT, partition.log.first_offset)
    if offset < start:
        lines.append(b'{"skipped":%d,"partition":%d}' % (start - offset, partition.number))
    elif offset > end:  # the end was lost with the disk: its offsets are given again
        cursors[partition] = end
        return lines
    if start == end:
        cursors[partition] = end
        return lines
    try:
        records, cursors[partition], _ = await read_some(partition, start, end, FOLLOW_COUNT)
    except OffsetOutOfRangeError:  # retention was faster
        return lines
    except CorruptRecordError:
        cursors[partition] = start + 1
        return [*lines, b'{"skipped":1,"partition":%d}' % partition.number]
    return lines + [encode(show(record, partition.number, name, principal, limits)) for record in records]


async def _span(call: Call, partition: Partition) -> tuple[Partition, int, int]:
    """Return the offsets that a query names (`offset`, `time_ms`, `end`), as far as the partition has them."""
    first, end = partition.log.first_offset, partition.high_watermark
    offset, time_ms, stop = (read_number(call, name) for name in ("offset", "time_ms", "end"))
    if time_ms is not None:
        found = await partition.find_time(time_ms)
        offset = end if found is None else found
    return partition, max(offset or 0, first), end if stop is None else min(stop, end)


async def _write_in_time(response: Lines, data: bytes) -> None:
    """Write lines for a reader who takes them.

    Raises:
        ConnectionResetError: the reader takes nothing.
    """
    try:
        async with asyncio.timeout(READER_SECONDS):
            await response.write(data)
    except TimeoutError as error:
        raise ConnectionResetError("the follower takes nothing") from error


async def _write(response: Lines, records: list[ShownRecord], kind: str) -> None:
    if not records:
        return
    if kind == "csv":
        await response.write(csv_rows([_row(record) for record in records]))
    else:
        await response.write(b"\n".join(map(encode, records)) + b"\n")


def _row(record: ShownRecord) -> list[Any]:
    """Return the cells of a record; `encoding` says whether key or payload is base64."""
    coded = [name for name in ("key", "payload") if getattr(record, f"{name}_b64") is not UNSET]
    key = record.key_b64 if record.key is UNSET else record.key
    payload = record.payload_b64 if record.payload is UNSET else record.payload
    cells = ["" if value is UNSET or value is None else value for value in (key, payload)]
    headers = encode(record.headers).decode() if record.headers else ""
    encoding = " ".join(f"{name}:base64" for name in coded)
    return [record.partition, record.offset, record.time_ms, record.subject, *cells, headers, encoding]


def csv_rows(rows: Sequence[Sequence[object]]) -> bytes:
    """Return rows of CSV (RFC 4180) in which no cell is a formula: an apostrophe stands before one that would be."""
    text = io.StringIO()
    csv.writer(text).writerows([_harmless(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def _harmless(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULAS) else cell


def is_number(text: str) -> bool:
    """Return whether a segment of a path is the number of a partition or an offset."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def _file_name(topic: str) -> str:
    return _UNSAFE.sub("-", printable(topic))[:80].strip("-.") or "topic"
