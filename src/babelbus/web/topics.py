"""Topics over the administration API: what there is, make, change, remove."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from babelbus.config import read_topic_changes
from babelbus.core.access import Action, Identity, may
from babelbus.core.broker import Broker
from babelbus.core.topic import Topic
from babelbus.web.answers import answer, read_body
from babelbus.web.callers import topic_of
from babelbus.web.calls import Call, Route
from babelbus.web.groups import check_sees, may_see


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


class TopicInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One topic with its partitions and its settings (keys of `core.settings.TopicSettings`)."""

    name: str
    partitions: list[PartitionInfo]
    settings: dict[str, object]
    may_publish: bool = True
    """Whether who asks may publish records there that have no subject of their own."""
    failing: str | None = None
    """Why the disk refuses records of the topic now."""


class CreateTopic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/topics."""

    name: str
    partitions: int | None = None
    settings: dict[str, object] = {}


class TopicRoutes:
    """The requests about topics; `segment_bytes` is the setting of a topic that has none of its own."""

    def __init__(self, broker: Broker, segment_bytes: int) -> None:
        self._broker = broker
        self._segment_bytes = segment_bytes

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
        principal = call.principal
        return answer(
            {
                "topics": [
                    describe(topic, principal)
                    for topic in self._broker.topics()
                    if may_see(self._broker, principal, topic.name)
                ]
            }
        )

    async def _show(self, call: Call) -> web.Response:
        name, principal = topic_of(call), call.principal
        check_sees(self._broker, principal, name)
        topic = self._broker.topic(name)
        failing = next((one.failing for one in topic.partitions if one.failing is not None), None)
        info = msgspec.structs.replace(
            describe(topic, principal),
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
