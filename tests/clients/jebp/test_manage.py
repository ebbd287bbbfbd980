"""Topics, groups and dead letters through the method `admin`: what is asked, and what answers become."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from babelbus.client import (
    BadArgumentError,
    Client,
    ConflictError,
    ExistsError,
    GroupInfo,
    NoRightsError,
    OutcomeUnknownError,
    QuotaError,
    RequestError,
    ServerDiskError,
    TopicExistsError,
    UnknownGroupError,
    UnknownTopicError,
)
from babelbus.protocols.jebp.items import SERVER_HEAD, encode_items
from babelbus.protocols.jebp.messages import CallItems, Request
from tests.clients.jebp.test_client_scripted import Script, with_peer

PARTITION = {
    "partition": 0, "first_offset": 0, "next_offset": 3, "high_watermark": 3, "bytes": 100, "segments": 1,
}  # fmt: skip
TOPIC = {"name": "t/x", "partitions": [PARTITION], "settings": {"ack": "flushed"}, "may_publish": True}
LANE = {"partition": 0, "position": 3, "committed": 1, "end": 5, "lag": 4, "in_flight": 2}
GROUP = {
    "topic": "t/x", "name": "g", "settings": {"ack": "explicit"}, "paused": False, "created_ms": 5, "members": 1,
    "lag": 4, "in_flight": 2, "lanes": [LANE], "counts": {"delivered": 3},
}  # fmt: skip
LETTERS = {"topic": "dead-letters/g", "partitions": 1, "letters": 2, "waiting": 1, "senders": []}
REPLAYED = {"topic": "dead-letters/g", "replayed": 1, "failed": 0, "failures": [], "waiting": 0}
Asked = list[tuple[str, str, Any]]


def serve(
    answers: list[tuple[int, Any]], test: Callable[[Client, Asked], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run a test with a server that gives these answers, in two parts each."""
    asked: Asked = []

    def answer(script: Script, request: Request) -> bytes:
        assert isinstance(request, CallItems)
        replies: list[tuple[int, int, Any]] = []
        for number, kind, body in request.items:
            if kind:
                continue
            name, (method, path, content) = msgspec.msgpack.decode(body)
            assert name == "admin"
            asked.append((method, path, json.loads(content) if content else None))
            status, told = answers.pop(0)
            if not status:
                asyncio.get_running_loop().call_soon(script.peers[-1].transport.abort)
                continue
            data = json.dumps(told).encode()
            end = msgspec.msgpack.encode((status, data[5:]))
            replies += [(number, 0, data[:5]), (number, 1, end)]
        return encode_items(SERVER_HEAD, replies)

    async def run(script: Script, client: Client) -> None:
        await test(client, asked)
        assert answers == []

    with_peer(answer, run, version=b"jebp/1.2", **options)


def test_topics() -> None:
    async def test(client: Client, asked: Asked) -> None:
        topics = client.topics
        (one,) = await topics.list()
        assert (one.name, one.partitions[0].high_watermark, one.settings) == ("t/x", 3, {"ack": "flushed"})
        assert await topics.show("t/x") == one
        await topics.create("t/x", partitions=4, settings={"ack": "written"})
        await topics.create("y")
        await topics.alter("t/x", {"retention_seconds": 5})
        await topics.remove("t/x")
        assert asked == [
            ("GET", "/api/topics", None),
            ("GET", "/api/topics/t%2Fx", None),
            ("POST", "/api/topics", {"name": "t/x", "settings": {"ack": "written"}, "partitions": 4}),
            ("POST", "/api/topics", {"name": "y", "settings": {}}),
            ("PATCH", "/api/topics/t%2Fx", {"retention_seconds": 5}),
            ("DELETE", "/api/topics/t%2Fx", None),
        ]

    answers = [(200, {"topics": [TOPIC]}), *[(200, TOPIC)] * 4, (200, {"removed": "t/x"})]
    serve(answers, test)


def test_groups() -> None:
    async def test(client: Client, asked: Asked) -> None:
        groups = client.groups
        assert [one.lag for one in await groups.list()] == [4]
        await groups.list("t/x")
        shown = await groups.show("t/x", "g")
        assert isinstance(shown, GroupInfo)
        assert (shown.cursors[0].lag, shown.counts) == (4, {"delivered": 3})
        await groups.create("t/x", "g", start="offset", value=7, settings={"attempts_max": 2})
        await groups.alter("t/x", "g", {"attempts_max": 3})
        await groups.seek("t/x", "g", "beginning", partition=1)
        await groups.pause("t/x", "g")
        await groups.resume("t/x", "g")
        await groups.remove("t/x", "g")
        path = "/api/topics/t%2Fx/groups/g"
        settings = {"ack": "explicit", "attempts_max": 2}
        made = {"topic": "t/x", "name": "g", "settings": settings, "start": {"at": "offset", "value": 7}}
        assert asked == [
            ("GET", "/api/groups", None),
            ("GET", "/api/groups?topic=t%2Fx", None),
            ("GET", path, None),
            ("POST", "/api/groups", made),
            ("PATCH", path, {"attempts_max": 3}),
            ("POST", f"{path}/seek", {"at": "beginning", "value": 0, "partition": 1}),
            ("POST", f"{path}/pause", {}),
            ("POST", f"{path}/resume", {}),
            ("DELETE", path, None),
        ]

    answers = [*[(200, {"groups": [GROUP]})] * 2, *[(200, GROUP)] * 6, (200, {"removed": "g"})]
    serve(answers, test)


def test_dead_letters() -> None:
    async def test(client: Client, asked: Asked) -> None:
        letters = client.dead_letters
        assert [one.waiting for one in await letters.list()] == [1]
        assert (await letters.show("g")).letters == 2
        assert (await letters.replay("g")).replayed == 1
        await letters.replay("g", count_max=5)
        await letters.purge("g", everything=True)
        assert asked[2:] == [
            ("POST", "/api/dead-letters/g/replay", {}),
            ("POST", "/api/dead-letters/g/replay", {"max": 5}),
            ("POST", "/api/dead-letters/g/purge", {"all": True}),
        ]

    serve([(200, {"dead_letters": [LETTERS]}), (200, LETTERS), *[(200, REPLAYED)] * 2, (200, {})], test)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "unknown_topic", UnknownTopicError),
        (404, "unknown_group", UnknownGroupError),
        (409, "topic_exists", TopicExistsError),
        (409, "group_exists", ExistsError),
        (409, "letters_waiting", ConflictError),
        (403, "refused", NoRightsError),
        (400, "invalid_setting", BadArgumentError),
        (429, "quota_exceeded", QuotaError),
        (507, "disk_full", ServerDiskError),
        (500, "internal", RequestError),
    ],
)
def test_a_refusal_is_the_error_of_its_code(status: int, code: str, kind: type[RequestError]) -> None:
    async def test(client: Client, asked: Asked) -> None:
        with pytest.raises(kind, match="why it is so") as caught:
            await client.topics.show("t")
        assert type(caught.value) is kind
        assert caught.value.code == code

    serve([(status, {"error": "why it is so", "code": code})], test)


def test_an_answer_that_is_none_is_an_error() -> None:
    async def test(client: Client, asked: Asked) -> None:
        with pytest.raises(RequestError, match="malformed"):
            await client.topics.show("t")
        with pytest.raises(RequestError, match="status 500"):
            await client.topics.show("t")

    serve([(200, {"no": "topic"}), (500, "no object")], test)


def test_a_lost_connection_asks_again_and_repeats_no_change() -> None:
    async def test(client: Client, asked: Asked) -> None:
        assert [one.name for one in await client.topics.list()] == ["t/x"]
        with pytest.raises(OutcomeUnknownError, match="it may be done or not"):
            await client.topics.remove("t")
        assert [path for _, path, _ in asked] == ["/api/topics", "/api/topics", "/api/topics/t"]

    serve([(0, None), (200, {"topics": [TOPIC]}), (0, None)], test)
