"""Consumer groups over the administration endpoint: what there is, make, change, seek, pause, remove."""

import asyncio
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal

import msgspec
from aiohttp import web

from babelbus.core.access import Action, Identity, refusal
from babelbus.core.broker import Broker
from babelbus.core.groups import Group, GroupInfo, Groups, InFlightInfo, MemberInfo, Obstacle, Place, SeekPreview
from babelbus.core.settings import change_settings
from babelbus.web.answers import answer, read_body, read_number
from babelbus.web.callers import topic_of
from babelbus.web.calls import Call, Route


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


class GroupShown(GroupInfo, frozen=True, kw_only=True):
    """A group, with what it does now. Times are milliseconds since 1970."""

    may_manage: bool
    """Whether who asks may change, move, pause and remove the group."""
    obstacles: list[Obstacle]
    """Why records wait; empty while they are delivered, and when all are done."""
    joined: tuple[MemberInfo, ...]
    """The members, as far as they are shown; names and addresses are told to those who may manage the group."""
    oldest: tuple[InFlightInfo, ...]
    """The oldest records in flight."""
    attempts: int
    """The most deliveries of a record that failed and is in flight."""
    next_redelivery_ms: int | None


class Preview(msgspec.Struct, frozen=True):
    """The effect that a seek would have: sums, and for each partition."""

    topic: str
    name: str
    again: int
    skipped: int
    in_flight: int
    partitions: list[SeekPreview]


COUNT_MAX = 1_000
"""Most groups of one page."""
GROUPS_AT_ONCE = 500
"""Groups whose places are read in one turn of the event loop: each takes some microseconds."""
LISTED_MEMBERS = 3
"""Members of each group that a page of groups shows."""
SORTS: dict[str, Callable[[Group], Any]] = {
    "topic": lambda group: (group.topic.name, group.name),
    "name": lambda group: (group.name, group.topic.name),
    "lag": lambda group: sum(cursor.info().lag for cursor in group.cursors),
    "in_flight": lambda group: 0 if group.flight is None else group.flight.count,
    "members": lambda group: len(group.members),
    "redelivered": lambda group: group.counts.redelivered,
    "dead_lettered": lambda group: group.counts.dead_lettered,
}


class GroupRoutes:
    """The requests about groups, but for the live one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups = broker.groups

    @property
    def routes(self) -> Sequence[Route]:
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

    async def _list(self, call: Call) -> web.Response:
        groups, topic = self._groups, call.query.get("topic")
        principal = call.principal
        found = groups.all() if topic is None else groups.on_topic(principal.absolute(topic))
        count = read_number(call, "count", 1)

        def is_seen(group: Group) -> bool:
            return may_see(self._broker, principal, group.topic.name)

        if count is None:
            return answer({"groups": [_shown(group, principal) for group in found if is_seen(group)]})
        return answer(await _page(call, found, is_seen, min(count, COUNT_MAX)))

    async def _create(self, call: Call) -> web.Response:
        """Create a group: 201 for a new group, 200 for an existing one."""
        wanted = await read_body(call, CreateGroup)
        groups, principal = self._groups, call.principal
        topic = principal.absolute(wanted.topic)
        self._broker.check_topic(principal, Action.CONSUME, topic)
        found = groups.find(topic, wanted.name) if wanted.ensure else None
        if found is not None:
            return answer(_shown(found, principal))
        settings = change_settings(groups.defaults, _absolute(wanted.settings, principal), of="a group")
        start = await wanted.start.place(groups, topic)
        made = groups.create(topic, wanted.name, settings, start=start, principal=principal)
        await made.saved.wait()
        return answer(_shown(made, principal), status=201)

    async def _show(self, call: Call) -> web.Response:
        return answer(_inspected(self._group(call), call.principal))

    async def _alter(self, call: Call) -> web.Response:
        changes = await read_body(call, dict[str, Any])
        topic, name = names(call)
        principal = call.principal
        group = self._groups.alter(topic, name, _absolute(changes, principal), principal)
        await group.saved.wait()
        return answer(_shown(group, principal))

    async def _remove(self, call: Call) -> web.Response:
        topic, name = names(call)
        await self._groups.remove(topic, name, call.principal).wait()
        return answer({"removed": name, "topic": call.principal.relative(topic)})

    async def _seek(self, call: Call) -> web.Response:
        """Move the cursor; the answer follows once the new cursor is durable. With `preview`, tell the effect only."""
        body, groups = await read_body(call, PlaceBody), self._groups
        group = self._group(call)
        place = await body.place(groups, group.topic.name)
        if "preview" in call.query:
            return answer(_preview(group, group.preview_seek(place, call.principal), call.principal))
        group.seek(place, call.principal)
        await groups.commit()
        return answer(_shown(group, call.principal))

    async def _pause(self, call: Call) -> web.Response:
        return await self._set_paused(call, paused=True)

    async def _resume(self, call: Call) -> web.Response:
        return await self._set_paused(call, paused=False)

    async def _set_paused(self, call: Call, *, paused: bool) -> web.Response:
        group = self._group(call)
        if paused:
            group.pause(call.principal)
        else:
            group.resume(call.principal)
        await self._groups.commit()
        return answer(_shown(group, call.principal))

    def _group(self, call: Call) -> Group:
        topic, name = names(call)
        check_sees(self._broker, call.principal, topic)
        return self._groups.get(topic, name)


def _absolute(settings: dict[str, Any], principal: Identity) -> dict[str, Any]:
    """Return settings of a group with the topic of dead letters that the principal means."""
    topic = settings.get("dead_letter_topic")
    return settings | {"dead_letter_topic": principal.absolute(topic)} if isinstance(topic, str) else settings


def _shown(group: Group, principal: Identity) -> GroupInfo:
    """Return what a principal is told of a group."""
    info = group.info()
    if principal.root is None:
        return info
    letters, relative = info.settings.dead_letter_topic, principal.root.relative
    settings = msgspec.structs.replace(info.settings, dead_letter_topic=letters and relative(letters))
    return msgspec.structs.replace(info, topic=relative(info.topic), settings=settings)


def _inspected(group: Group, principal: Identity, **limits: int) -> GroupShown:
    """Return a group with what it does now, as far as a principal is told."""
    may_manage = group.may_manage(principal)
    now = group.inspect(names=may_manage, **limits)
    obstacles = [msgspec.structs.replace(one, text=principal.relative_text(one.text)) for one in now.obstacles]
    return GroupShown(
        *msgspec.structs.astuple(_shown(group, principal)),
        may_manage=may_manage,
        obstacles=obstacles,
        joined=now.members,
        oldest=now.oldest,
        attempts=now.attempts,
        next_redelivery_ms=now.next_redelivery_ms,
    )


async def _page(call: Call, groups: Sequence[Group], is_seen: Callable[[Group], bool], count: int) -> dict[str, Any]:
    """Return a page of groups, with what they do now: of those that contain `search`, in the order of `sort`.

    The server's own groups, such as `$replay`, are left out: nobody waits for them.
    """
    principal, search = call.principal, call.query.get("search", "").lower()
    sort = call.query.get("sort", "topic")
    if sort not in SORTS:
        raise web.HTTPBadRequest(text=f"sort is one of {', '.join(SORTS)}, not {sort[:40]!r}")
    relative, offset, key = principal.relative, read_number(call, "offset") or 0, SORTS[sort]
    chosen: list[tuple[Any, Group]] = []
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        chosen += [
            (key(group), group)
            for group in groups[start : start + GROUPS_AT_ONCE]
            if not group.name.startswith("$")
            and search in f"{relative(group.topic.name)} {group.name}".lower()
            and is_seen(group)
        ]
        await asyncio.sleep(0)
    chosen.sort(key=itemgetter(0), reverse=call.query.get("descending") == "1")
    shown = [group for _, group in chosen[offset : offset + count] if is_seen(group)]  # rights may have changed
    return {
        "groups": [_inspected(group, principal, members_max=LISTED_MEMBERS, oldest_max=0) for group in shown],
        "total": len(chosen),
    }


def _preview(group: Group, partitions: list[SeekPreview], principal: Identity) -> Preview:
    again, skipped = sum(one.again for one in partitions), sum(one.skipped for one in partitions)
    in_flight = sum(one.in_flight for one in partitions)
    return Preview(principal.relative(group.topic.name), group.name, again, skipped, in_flight, partitions)


def may_see(broker: Broker, principal: Identity, topic: str) -> bool:
    """Return whether a principal may know of a topic: it may do something with it."""
    return broker.may_see(principal, topic)


def check_sees(broker: Broker, principal: Identity, topic: str) -> None:
    """Check that a principal may know of a topic.

    Raises:
        AccessRefusedError: it may not.
    """
    if not may_see(broker, principal, topic):
        raise refusal(principal, Action.READ, topic)


def names(call: Call) -> tuple[str, str]:
    """Return topic and group of a request's path."""
    return topic_of(call, "topic"), call.path_values["group"]
