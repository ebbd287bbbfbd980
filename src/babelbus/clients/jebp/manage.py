"""Topics, groups and dead letters: what there is, and changes to it, with the rights of the client's identity.

Requests of the administration API (docs/operations.md) over the method `admin` of jebp/1.2.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from babelbus.clients.jebp.calls import Calls, Stream
from babelbus.clients.jebp.errors import (
    BadArgumentError,
    ConflictError,
    ConnectionLostError,
    ExistsError,
    NoRightsError,
    OutcomeUnknownError,
    QuotaError,
    RequestError,
    ServerDiskError,
    TopicExistsError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from babelbus.clients.portal import Twin, blocking

T = TypeVar("T")
METHOD: Final = "admin"
BY_CODE: Final[dict[str, type[RequestError]]] = {
    "unknown_topic": UnknownTopicError,
    "no_dead_letters": UnknownTopicError,
    "unknown_group": UnknownGroupError,
    "unknown_partition": UnknownPartitionError,
    "topic_exists": TopicExistsError,
    "group_exists": ExistsError,
}
BY_STATUS: Final[dict[int, type[RequestError]]] = {
    400: BadArgumentError,
    403: NoRightsError,
    409: ConflictError,
    429: QuotaError,
    503: ServerDiskError,
    507: ServerDiskError,
}
_decode_end: Final = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


class TopicPartition(msgspec.Struct, frozen=True):
    """A partition of a topic; records below `high_watermark` can be read."""

    partition: int
    first_offset: int
    next_offset: int
    high_watermark: int
    bytes: int
    segments: int


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic, with its settings by name (docs/storage.md)."""

    name: str
    partitions: list[TopicPartition]
    settings: dict[str, Any]


class GroupCursor(msgspec.Struct, frozen=True):
    """How far a group is in one partition."""

    partition: int
    position: int
    committed: int
    end: int
    lag: int
    in_flight: int


class GroupInfo(msgspec.Struct, frozen=True):
    """A consumer group: `lag` records are to be done, `in_flight` of them are with members.

    `counts` are what happened since the server started: `delivered`, `acknowledged`, `redelivered`, `dead_lettered` and
    others.
    """

    topic: str
    name: str
    settings: dict[str, Any]
    paused: bool
    members: int
    lag: int
    in_flight: int
    counts: dict[str, int]
    cursors: list[GroupCursor] = msgspec.field(name="lanes", default_factory=list)


class DeadLetterInfo(msgspec.Struct, frozen=True):
    """A topic of dead letters; `waiting` of its `letters` were not replayed."""

    topic: str
    partitions: int
    letters: int
    waiting: int


class Replayed(msgspec.Struct, frozen=True):
    """The outcome of a replay; `waiting` letters are left."""

    topic: str
    replayed: int
    failed: int
    waiting: int


class _Management:
    """Requests of the administration API."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def _ask(self, method: str, path: str, result: type[T], body: object = None) -> T:
        """Return the answer of a request.

        Raises:
            RequestError: the server refused; the kind of error says why.
            OutcomeUnknownError: the connection was lost before the answer to a change.
            RequestTimeoutError: there was no answer in time.
            UnsupportedByServerError: the server is too old.
            ClientError: there is no connection.
        """
        what = f"{method} {path}"
        content = b"" if body is None else msgspec.json.encode(body)
        now = asyncio.get_running_loop().time
        deadline = now() + self._calls.timeout_seconds
        while True:
            link = await self._calls.link(METHOD, max(deadline - now(), 0))
            try:
                status, answer = await self._answer(Stream(METHOD, link, (method, path, content)))
                break
            except ConnectionLostError as error:
                if method != "GET":
                    raise OutcomeUnknownError(f"{what}: {error}; it may be done or not") from error
                if not self._calls.resends or now() >= deadline:
                    raise
        if status >= 400:
            raise _refusal(what, status, answer)
        try:
            return msgspec.json.decode(answer, type=result)
        except msgspec.MsgspecError as error:
            raise RequestError(f"{what}: the server's answer is malformed: {error}") from error

    async def _answer(self, stream: Stream) -> tuple[int, bytes]:
        async with stream:
            parts = await stream.read_all(self._calls.timeout_seconds)
            assert stream.result is not None
            status, last = _decode_end(stream.result)
        return status, b"".join([*parts, last])


def _refusal(what: str, status: int, answer: bytes) -> RequestError:
    try:
        told = msgspec.json.decode(answer, type=dict[str, Any])
    except msgspec.MsgspecError:
        told = {}
    code = str(told.get("code", ""))
    kind = BY_CODE.get(code) or BY_STATUS.get(status, RequestError)
    error = kind(f"{what}: {told.get('error', f'status {status}')}", repeat=status in (503, 507))
    error.code = code
    return error


def _path(*names: str) -> str:
    from urllib.parse import quote

    return "/api/" + "/".join(quote(name, safe="") for name in names)


class Topics(_Management):
    """The topics that the client may see: `client.topics`."""

    async def list(self) -> "list[TopicInfo]":
        """Return all topics that the client may see. Raises: as `_ask`."""
        return (await self._ask("GET", "/api/topics", dict[str, list[TopicInfo]]))["topics"]

    async def show(self, name: str) -> TopicInfo:
        """Return one topic.

        Raises:
            UnknownTopicError, NoRightsError, ClientError: it is not there, or not for this client.
        """
        return await self._ask("GET", _path("topics", name), TopicInfo)

    async def create(
        self, name: str, *, partitions: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> TopicInfo:
        """Create a topic with settings such as `{"retention_seconds": 3600}`; needs the right to manage.

        Raises:
            TopicExistsError, BadArgumentError, NoRightsError: it was not created.
            OutcomeUnknownError, ClientError: as every change.
        """
        body: dict[str, object] = {"name": name, "settings": dict(settings or {})}
        if partitions is not None:
            body["partitions"] = partitions
        return await self._ask("POST", "/api/topics", TopicInfo, body)

    async def alter(self, name: str, settings: Mapping[str, Any]) -> TopicInfo:
        """Update settings of a topic; `partitions` can grow. Raises: as `create`."""
        return await self._ask("PATCH", _path("topics", name), TopicInfo, dict(settings))

    async def remove(self, name: str) -> None:
        """Remove a topic with all its records and groups. Raises: as `create`."""
        await self._ask("DELETE", _path("topics", name), dict[str, Any])


class Groups(_Management):
    """Consumer groups: `client.groups`."""

    async def list(self, topic: str | None = None) -> "list[GroupInfo]":
        """Return the groups of a topic, or all that the client may see."""
        from urllib.parse import urlencode

        query = "" if topic is None else "?" + urlencode({"topic": topic})
        return (await self._ask("GET", f"/api/groups{query}", dict[str, list[GroupInfo]]))["groups"]

    async def show(self, topic: str, group: str) -> GroupInfo:
        """Return one group.

        Raises:
            UnknownGroupError, NoRightsError, ClientError: it is not there, or not for this client.
        """
        return await self._ask("GET", _path("topics", topic, "groups", group), GroupInfo)

    async def create(
        self,
        topic: str,
        group: str,
        *,
        start: Literal["end", "beginning", "offset", "time"] = "end",
        value: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> GroupInfo:
        """Create a group that takes acks, unless `settings` say `{"ack": "on_delivery"}`.

        Args:
            topic, group: its names.
            start, value: where it begins; the value is an offset, or a time in milliseconds.
            settings: docs/groups.md.

        Raises:
            ExistsError, UnknownTopicError, BadArgumentError, NoRightsError: it was not created.
            OutcomeUnknownError, ClientError: as every change.
        """
        wanted = {"ack": "explicit", **(settings or {})}
        body = {"topic": topic, "name": group, "settings": wanted, "start": {"at": start, "value": value}}
        return await self._ask("POST", "/api/groups", GroupInfo, body)

    async def alter(self, topic: str, group: str, settings: Mapping[str, Any]) -> GroupInfo:
        """Update settings of a group while it is used. Raises: as `create`."""
        return await self._ask("PATCH", _path("topics", topic, "groups", group), GroupInfo, dict(settings))

    async def remove(self, topic: str, group: str) -> None:
        """Remove a group; its members are told. Raises: as `create`."""
        await self._ask("DELETE", _path("topics", topic, "groups", group), dict[str, Any])

    async def seek(
        self,
        topic: str,
        group: str,
        at: Literal["end", "beginning", "offset", "time"],
        value: int = 0,
        *,
        partition: int | None = None,
    ) -> GroupInfo:
        """Move the cursors of a group, of one partition or all. Outstanding deliveries are dropped."""
        body = {"at": at, "value": value, "partition": partition}
        return await self._ask("POST", _path("topics", topic, "groups", group, "seek"), GroupInfo, body)

    async def pause(self, topic: str, group: str) -> GroupInfo:
        """Stop all deliveries of a group until `resume`, also after a restart."""
        return await self._ask("POST", _path("topics", topic, "groups", group, "pause"), GroupInfo, {})

    async def resume(self, topic: str, group: str) -> GroupInfo:
        """Resume the deliveries of a group."""
        return await self._ask("POST", _path("topics", topic, "groups", group, "resume"), GroupInfo, {})


class DeadLetters(_Management):
    """Records that groups gave up: `client.dead_letters`. To read them, consume or follow the topic."""

    async def list(self) -> "list[DeadLetterInfo]":
        """Return the topics of dead letters."""
        return (await self._ask("GET", "/api/dead-letters", dict[str, list[DeadLetterInfo]]))["dead_letters"]

    async def show(self, name: str) -> DeadLetterInfo:
        """Return the dead letters of a group, or of a topic of dead letters.

        Raises:
            UnknownTopicError, NoRightsError, ClientError: there are none, or not for this client.
        """
        return await self._ask("GET", _path("dead-letters", name), DeadLetterInfo)

    async def replay(self, name: str, *, count_max: int | None = None) -> Replayed:
        """Publish the letters that wait where they came from, at most `count_max`; their groups get them again."""
        body = {} if count_max is None else {"max": count_max}
        return await self._ask("POST", _path("dead-letters", name, "replay"), Replayed, body)

    async def purge(self, name: str, *, everything: bool = False) -> None:
        """Remove the topic of the letters; refused while letters wait, unless `everything`.

        Raises:
            ConflictError: letters wait to be replayed.
            UnknownTopicError, NoRightsError, ClientError: as `show`.
        """
        await self._ask("POST", _path("dead-letters", name, "purge"), dict[str, Any], {"all": everything})


class BlockingTopics(Twin[Topics]):
    """`Topics` without `await`."""

    list = blocking(Topics.list)
    show = blocking(Topics.show)
    create = blocking(Topics.create)
    alter = blocking(Topics.alter)
    remove = blocking(Topics.remove)


class BlockingGroups(Twin[Groups]):
    """`Groups` without `await`."""

    list = blocking(Groups.list)
    show = blocking(Groups.show)
    create = blocking(Groups.create)
    alter = blocking(Groups.alter)
    remove = blocking(Groups.remove)
    seek = blocking(Groups.seek)
    pause = blocking(Groups.pause)
    resume = blocking(Groups.resume)


class BlockingDeadLetters(Twin[DeadLetters]):
    """`DeadLetters` without `await`."""

    list = blocking(DeadLetters.list)
    show = blocking(DeadLetters.show)
    replay = blocking(DeadLetters.replay)
    purge = blocking(DeadLetters.purge)
