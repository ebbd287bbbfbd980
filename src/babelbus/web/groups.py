"""Consumer groups over the administration endpoint: what there is, make, change, seek, pause, remove."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from babelbus.core.access import Action, Identity, refusal
from babelbus.core.broker import Broker
from babelbus.core.groups import Group, Groups, Place
from babelbus.core.settings import change_settings
from babelbus.core.topic import RESERVED_PREFIX
from babelbus.web.answers import Handler, answer, read_body
from babelbus.web.callers import principal_of


class PlaceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to begin or to go on: `value` is the offset, or the time in ms since 1970."""

    at: Literal["beginning", "end", "offset", "time"]
    value: int = 0
    partition: int | None = None

    async def place(self, groups: Groups, topic: str) -> Place:
        """Return the place as the groups understand it.

        Raises:
            UnknownTopicError, UnknownPartitionError: there is no such topic or partition.
            StorageError: the topic cannot be read.
        """
        if self.at == "time":
            return await groups.at_time(topic, self.value, self.partition)
        return Place(self.at, self.value, self.partition)


class CreateGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/groups. With `ensure`, a group that is there is left as it is."""

    topic: str
    name: str
    settings: dict[str, Any] = {}
    start: PlaceBody = PlaceBody("end")
    ensure: bool = False


class GroupRoutes:
    """The requests about groups, but for the live one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups = broker.groups

    @property
    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Method, path, and who answers."""
        one = "/api/topics/{topic}/groups/{group}"
        return (
            ("GET", "/api/groups", self._list),
            ("POST", "/api/groups", self._create),
            ("GET", one, self._show),
            ("PATCH", one, self._alter),
            ("DELETE", one, self._remove),
            ("POST", f"{one}/seek", self._seek),
            ("POST", f"{one}/pause", self._pause),
            ("POST", f"{one}/resume", self._resume),
        )

    async def _list(self, request: web.Request) -> web.Response:
        groups, topic = self._groups, request.query.get("topic")
        found = groups.all() if topic is None else groups.on_topic(topic)
        principal = principal_of(request)
        return answer(
            {"groups": [group.info() for group in found if may_see(self._broker, principal, group.topic.name)]}
        )

    async def _create(self, request: web.Request) -> web.Response:
        """Create a group: 201 for a new group, 200 for an existing one."""
        wanted = await read_body(request, CreateGroup)
        groups, principal = self._groups, principal_of(request)
        self._broker.check_topic(principal, Action.CONSUME, wanted.topic)
        found = groups.find(wanted.topic, wanted.name) if wanted.ensure else None
        if found is not None:
            return answer(found.info())
        settings = change_settings(groups.defaults, wanted.settings, of="a group")
        made = groups.create(
            wanted.topic,
            wanted.name,
            settings,
            start=await wanted.start.place(groups, wanted.topic),
            principal=principal,
        )
        await made.saved.wait()
        return answer(made.info(), status=201)

    async def _show(self, request: web.Request) -> web.Response:
        return answer(self._group(request).info())

    async def _alter(self, request: web.Request) -> web.Response:
        changes = await read_body(request, dict[str, Any])
        topic, name = names(request)
        group = self._groups.alter(topic, name, changes, principal_of(request))
        await group.saved.wait()
        return answer(group.info())

    async def _remove(self, request: web.Request) -> web.Response:
        topic, name = names(request)
        await self._groups.remove(topic, name, principal_of(request)).wait()
        return answer({"removed": name, "topic": topic})

    async def _seek(self, request: web.Request) -> web.Response:
        """Move the cursor; the answer follows once the new cursor is durable."""
        body, groups = await read_body(request, PlaceBody), self._groups
        group = self._group(request)
        group.seek(await body.place(groups, group.topic.name), principal_of(request))
        await groups.commit()
        return answer(group.info())

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, paused=True)

    async def _resume(self, request: web.Request) -> web.Response:
        return await self._set_paused(request, paused=False)

    async def _set_paused(self, request: web.Request, *, paused: bool) -> web.Response:
        group = self._group(request)
        if paused:
            group.pause(principal_of(request))
        else:
            group.resume(principal_of(request))
        await self._groups.commit()
        return answer(group.info())

    def _group(self, request: web.Request) -> Group:
        topic, name = names(request)
        check_sees(self._broker, principal_of(request), topic)
        return self._groups.get(topic, name)


def may_see(broker: Broker, principal: Identity, topic: str) -> bool:
    """Return whether a principal may know of a topic: it may do something with it."""
    return any(
        broker.may_topic(principal, action, topic) for action in (Action.READ, Action.CONSUME, Action.MANAGE)
    ) or (not topic.startswith(RESERVED_PREFIX) and broker.may_some(principal, Action.PUBLISH, topic))


def check_sees(broker: Broker, principal: Identity, topic: str) -> None:
    """Check that a principal may know of a topic.

    Raises:
        AccessRefusedError: it may not.
    """
    if not may_see(broker, principal, topic):
        raise refusal(principal, Action.READ, topic)


def names(request: web.Request) -> tuple[str, str]:
    """Return topic and group of a request's path."""
    return request.match_info["topic"], request.match_info["group"]
