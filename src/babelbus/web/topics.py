"""Topics over the administration API: what there is, make, change, remove."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.config import Config, TopicLayout, read_topic_changes
from babelbus.core.access import Action, Identity, may
from babelbus.core.broker import Broker
from babelbus.core.settings import TopicSettings
from babelbus.core.topic import Topic
from babelbus.metrics import Metrics
from babelbus.storage.contract import Part
from babelbus.web.answers import answer, read_body, read_number
from babelbus.web.callers import topic_of
from babelbus.web.calls import Call, Route
from babelbus.web.groups import check_sees, may_see

PARTS_MAX = 500
"""Most pieces of a partition in an answer: the oldest ones, which retention takes first."""


class PartInfo(msgspec.Struct, frozen=True):
    """A piece of a partition: a segment of the disk. Times are milliseconds since 1970.

    Retention by age removes it at `removed_ms` or soon after; null if nothing is removed by age, or nobody knows when.
    """

    first_offset: int
    next_offset: int
    bytes: int
    newest_ms: int | None
    removed_ms: int | None


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition: `first_offset` is the oldest record's, `next_offset` the next to be given out.

    All below `high_watermark` can be read. `bytes` are those of the `.log` files. `bytes_left` may come
    before retention by size removes the first of the `parts`, the oldest of the pieces.
    """

    partition: int
    first_offset: int
    next_offset: int
    high_watermark: int
    bytes: int
    segments: int
    bytes_left: int | msgspec.UnsetType | None = msgspec.UNSET
    parts: list[PartInfo] | msgspec.UnsetType = msgspec.UNSET


class TopicInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One topic with its partitions and its settings (keys of `core.settings.TopicSettings`)."""

    name: str
    partitions: list[PartitionInfo]
    settings: dict[str, object]
    may_publish: bool = True
    """Whether who asks may publish records there that have no subject of their own."""
    failing: str | None = None
    """Why the disk refuses records of the topic now."""
    published: int | msgspec.UnsetType = msgspec.UNSET
    """Records since the start of the server."""
    sources: dict[str, str] = {}
    """Where the value of each setting comes from: `default` (built in), `config` (of the server), or `topic`."""


class CreateTopic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/topics."""

    name: str
    partitions: int | None = None
    settings: dict[str, object] = {}


class TopicRoutes:
    """The requests about topics; the configuration has the settings of a topic that has none of its own."""

    def __init__(self, broker: Broker, metrics: Metrics, config: Config) -> None:
        self._broker = broker
        self._metrics = metrics
        self._segment_bytes = config.storage.segment_bytes
        topics = config.topics
        layout = {name: getattr(topics, name) for name in TopicLayout.__struct_fields__}
        self._defaults = TopicSettings(**layout, segment_bytes=topics.segment_bytes or self._segment_bytes)

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/topics", self._list),
            ("POST", "/api/topics", self._create),
            ("GET", "/api/topics/{name}", self._show),
            ("PATCH", "/api/topics/{name}", self._alter),
            ("DELETE", "/api/topics/{name}", self._remove),
        )

    async def _list(self, call: Call) -> web.Response:
        """Answer with all topics; with a parameter, those of a page of the topics that were searched and sorted."""
        principal = call.principal
        topics = [topic for topic in self._broker.topics() if may_see(self._broker, principal, topic.name)]
        if _PAGE.isdisjoint(call.query):
            return answer({"topics": [describe(topic, principal) for topic in topics]})
        published = self._published()
        found = _sort(_search(topics, call, principal), call, published)
        offset, count = read_number(call, "offset") or 0, read_number(call, "count")
        page = found[offset : None if count is None else offset + count]
        lines = [
            msgspec.structs.replace(describe(topic, principal), published=published.get(topic.name, 0))
            for topic in page
        ]
        return answer({"topics": lines, "total": len(found)})

    def _published(self) -> dict[str, int]:
        """Return the records of each topic since the start, those of all protocols together."""
        counts: dict[str, int] = {}
        for (_, topic), traffic in self._metrics.published.items():
            counts[topic] = counts.get(topic, 0) + traffic.records_total
        return counts

    async def _show(self, call: Call) -> web.Response:
        name, principal = topic_of(call), call.principal
        check_sees(self._broker, principal, name)
        topic = self._broker.topic(name)
        failing = next((one.failing for one in topic.partitions if one.failing is not None), None)
        info = describe(topic, principal)
        if call.query.get("parts"):
            # A disk that hangs, or a database that is away, must not stop the bus.
            parts = await asyncio.to_thread(lambda: [partition.log.parts() for partition in topic.partitions])
            described = zip(info.partitions, parts, strict=False)  # partitions that came meanwhile are not shown
            partitions = [_describe_parts(one, pieces, topic.settings) for one, pieces in described]
            info = msgspec.structs.replace(info, partitions=partitions)
        info = msgspec.structs.replace(
            info,
            sources=self._sources(topic.settings),
            may_publish=may(principal, Action.PUBLISH, name),
            failing=None if failing is None else principal.relative_text(str(failing)),
        )
        return answer(info)

    async def _create(self, call: Call) -> web.Response:
        wanted = await read_body(call, CreateTopic)
        count = {} if wanted.partitions is None else {"partitions": wanted.partitions}
        settings = read_topic_changes(wanted.settings | count)
        partitions = settings.pop("partitions", None)
        assert partitions is None or isinstance(partitions, int)  # read_topic_changes has checked it
        principal = call.principal
        name = principal.absolute(wanted.name)
        topic = await self._broker.create_topic(name, partitions, self._resolve(settings), principal)
        return answer(describe(topic, principal), status=201)

    async def _alter(self, call: Call) -> web.Response:
        changes = read_topic_changes(await read_body(call, dict[str, object]))
        principal = call.principal
        topic = await self._broker.alter_topic(topic_of(call), self._resolve(changes), principal)
        return answer(describe(topic, principal))

    async def _remove(self, call: Call) -> web.Response:
        await self._broker.remove_topic(topic_of(call), call.principal)
        return answer({"removed": call.path_values["name"]})

    def _sources(self, settings: TopicSettings) -> dict[str, str]:
        """Return where the value of each setting comes from. A topic keeps a copy of all of them, so who has chosen
        the very value of the configuration has chosen nothing.
        """
        sources = {}
        for name in TopicSettings.__struct_fields__:
            value, configured = getattr(settings, name), getattr(self._defaults, name)
            is_default = configured == getattr(_BUILT_IN, name)
            sources[name] = "topic" if value != configured else "default" if is_default else "config"
        return sources

    def _resolve(self, settings: dict[str, object]) -> dict[str, object]:
        """Replace a setting that a topic does not have by the server's value."""
        if "segment_bytes" in settings and settings["segment_bytes"] is None:
            return settings | {"segment_bytes": self._segment_bytes}
        return settings


def describe(topic: Topic, principal: Identity) -> TopicInfo:
    """Return a topic with its partitions and its settings, as a principal knows it."""
    partitions = [
        PartitionInfo(
            one.number,
            one.log.first_offset,
            one.next_offset,
            one.high_watermark,
            one.log.size_bytes,
            one.log.part_count,
        )
        for one in topic.partitions
    ]
    return TopicInfo(principal.relative(topic.name), partitions, msgspec.to_builtins(topic.settings))


_BUILT_IN = TopicSettings()
_PAGE = frozenset({"search", "sort", "descending", "offset", "count"})


def _search(topics: list[Topic], call: Call, principal: Identity) -> list[Topic]:
    """Return the topics whose name has the text of `search` in it, in capital letters or not."""
    text = call.query.get("search", "").casefold()
    return [topic for topic in topics if text in principal.relative(topic.name).casefold()] if text else topics


def _sort(topics: list[Topic], call: Call, published: dict[str, int]) -> list[Topic]:
    """Return the topics in the order of `sort`, those with one value by name.

    Raises:
        web.HTTPBadRequest: there is no such order.
    """
    orders: dict[str, Callable[[Topic], Any] | None] = {
        "name": None,
        "records": lambda topic: sum([one.high_watermark - one.log.first_offset for one in topic.partitions]),
        "bytes": lambda topic: sum([one.log.size_bytes for one in topic.partitions]),
        "published": lambda topic: published.get(topic.name, 0),
    }
    order = call.query.get("sort", "name")
    if order not in orders:
        raise web.HTTPBadRequest(text=f"topics are sorted by {', '.join(orders)}, not by {order[:40]!r}")
    key, descending = orders[order], call.query.get("descending") == "1"
    by_name = sorted(topics, key=lambda topic: topic.name.casefold(), reverse=descending and key is None)
    return by_name if key is None else sorted(by_name, key=key, reverse=descending)


def _describe_parts(info: PartitionInfo, parts: list[Part], settings: TopicSettings) -> PartitionInfo:
    """Return a partition with its pieces, and when retention takes them."""
    age_ms = None if settings.retention_seconds is None else int(settings.retention_seconds * 1000)
    lines, newest_ms = [], -1
    for part in parts[:PARTS_MAX]:
        newest_ms = max(newest_ms, part.newest_ms)  # retention takes no piece before the one in front of it
        # A database loses single batches, whose times nobody asks it for here.
        is_known = age_ms is not None and newest_ms >= 0 and settings.engine != "db"
        removed_ms = newest_ms + age_ms if is_known and age_ms is not None else None
        newest = None if part.newest_ms < 0 else part.newest_ms
        lines.append(PartInfo(part.base_offset, part.next_offset, part.size_bytes, newest, removed_ms))
    left = None
    if settings.retention_bytes is not None and parts:
        left = max(settings.retention_bytes + parts[0].size_bytes - sum(part.size_bytes for part in parts), 0)
    return msgspec.structs.replace(info, parts=lines, bytes_left=left)
