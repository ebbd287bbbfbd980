"""The audit over the administration endpoint: the newest records, and pages of them backwards."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.core.access.audit import AUDIT_TOPIC, AuditRecord
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition
from babelbus.records.columns import decode_chunk, iterate
from babelbus.web.answers import answer, read_number
from babelbus.web.callers import AUDIT_SUBJECT, check_admin
from babelbus.web.calls import Call, Route

COUNT = 100
COUNT_MAX = 10_000
READ_BYTES = 2**20
WINDOW = 1_000
"""Offsets that are read at once on the way back."""
SCAN_MAX = 50_000
"""Most records that a request looks at on the way back; the next page goes on in front of them."""


class AuditRoutes:
    """The requests about the audit, for those who may administer it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/audit", self._audit),)

    async def _audit(self, call: Call) -> web.Response:
        """Return the newest records, oldest first; with `newest` or `before`, a page of them, newest first.

        `id` chooses one refusal, `principal` and `kind` those of one principal or kind, `offset` those from there on.
        """
        check_admin(call, AUDIT_SUBJECT)
        written = self._broker.gate.audit.flush()
        if written is not None:
            await written.wait()
        topic = self._broker.find_topic(AUDIT_TOPIC)
        partition = None if topic is None else topic.partition(0)
        count = min(read_number(call, "count", 1) or COUNT, COUNT_MAX)
        if "newest" in call.query or "before" in call.query:
            return answer(await _backwards(call, partition, count))
        return answer(await _forwards(call, partition, count))


async def _forwards(call: Call, partition: Partition | None, count: int) -> dict[str, Any]:
    after, is_wanted = read_number(call, "offset"), _filter_of(call)
    if partition is None:
        return {"records": [], "next_offset": 0}
    end = partition.high_watermark
    is_filtered = any(call.query.get(name) for name in ("id", "principal", "kind"))
    offset = max(partition.log.first_offset, (0 if is_filtered else end - count) if after is None else after)
    records: list[AuditRecord] = []
    while offset < end:
        chunk = await partition.read(offset, READ_BYTES, end)
        records += [one for _, one in _records(chunk.data) if is_wanted(one)]
        del records[:-count]
        offset = chunk.next_offset
    return {"records": records, "next_offset": end}


async def _backwards(call: Call, partition: Partition | None, count: int) -> dict[str, Any]:
    """Return the last records in front of the offset `before` that are wanted, between `since_ms` and `until_ms`.

    `before` of the answer is where the next page begins, `None` behind the last one; `looked_ms` is the time of the
    oldest record that was looked at.
    """
    before, since_ms, until_ms = (read_number(call, name) for name in ("before", "since_ms", "until_ms"))
    is_wanted, looked_ms = _filter_of(call), None
    records: list[dict[str, Any]] = []
    if partition is None:
        return {"records": [], "before": None, "looked_ms": None}
    log = partition.log
    first, end = log.first_offset, partition.high_watermark
    if until_ms is not None:
        behind = await partition.ask(lambda: log.find_time(until_ms + 1))
        end = end if behind is None else min(end, behind)
    if since_ms is not None:
        start = await partition.ask(lambda: log.find_time(since_ms))
        first = end if start is None else max(first, start)
    if before is not None:
        end = min(end, before)
    looked = 0
    while end > first and len(records) < count and looked < SCAN_MAX:
        start = max(first, end - WINDOW)
        part = await _read(partition, start, end)
        looked += end - start
        for offset, one in reversed(part):
            looked_ms, end = one.time_ms, offset
            if is_wanted(one):
                records.append({"offset": offset} | msgspec.to_builtins(one))
                if len(records) == count:
                    break
        else:
            end = start
    return {"records": records, "before": end if end > first else None, "looked_ms": looked_ms}


async def _read(partition: Partition, offset: int, end: int) -> list[tuple[int, AuditRecord]]:
    records: list[tuple[int, AuditRecord]] = []
    while offset < end:
        chunk = await partition.read(offset, READ_BYTES, end)
        records += _records(chunk.data)
        offset = chunk.next_offset
    return records


def _records(data: bytes | memoryview) -> list[tuple[int, AuditRecord]]:
    """Return the records of a chunk with their offsets."""
    if not data:
        return []
    columns = decode_chunk(data, verified=True)
    records = [msgspec.json.decode(one.payload or b"{}", type=AuditRecord) for one in iterate(columns)]
    return list(zip(columns.offsets.tolist(), records, strict=True))


def _filter_of(call: Call) -> Callable[[AuditRecord], bool]:
    """Return whether a record is asked for; `search` is a part of any text of it."""
    id_, principal, kind = (call.query.get(name) for name in ("id", "principal", "kind"))
    search = call.query.get("search", "").lower()

    def is_wanted(one: AuditRecord) -> bool:
        if (id_ and one.id != id_) or (kind and one.kind != kind) or (principal and one.principal != principal):
            return False
        if not search:
            return True
        entries = msgspec.json.encode([one.before, one.after]).decode()
        texts = (one.principal, one.source, one.action, one.subject, one.reason, one.id, entries)
        return any(search in text.lower() for text in texts)

    return is_wanted
