"""The administration endpoint over a real socket, in front of a bus that lives in a dictionary."""

import asyncio
import io
import os
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from yarl import URL

from babelbus.config import AdminSettings
from babelbus.core.broker import TopicExistsError, UnknownTopicError
from babelbus.core.groups.dead_letter_topics import DeadLetterTopics
from babelbus.core.groups.registry import Groups
from babelbus.core.settings import InvalidSettingError
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.storage.errors import DiskFullError
from babelbus.web.admin import AdminServer, Health, PartitionInfo, ServerInfo, TopicInfo
from babelbus.web.contract import LiveAccess, StateAccess
from babelbus.web.token import TokenError, ensure_token, read_token, token_path

TOKEN = "a token for tests"


class FakeBus:
    """An `Administration` whose topics are a dictionary."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicInfo] = {}
        self.condition = Health(ready=True)
        self.state = cast("StateAccess", None)  # test_state.py asks a real bus
        self.live = cast("LiveAccess", None)
        self.groups = cast("Groups", None)  # test_consumers.py asks a real one
        self.dead_letters = cast("DeadLetterTopics", None)
        self.reloads = 0
        self.error: Exception | None = None

    def list_topics(self) -> list[TopicInfo]:
        if self.error:
            raise self.error
        return [self.topics[name] for name in sorted(self.topics)]

    def topic(self, name: str) -> TopicInfo:
        if name not in self.topics:
            raise UnknownTopicError(f"there is no topic {name!r}")
        return self.topics[name]

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> TopicInfo:
        if name in self.topics:
            raise TopicExistsError(f"topic {name!r} exists")
        made = [PartitionInfo(number, 0, 0, 0, 0, 1) for number in range(partitions or 1)]
        self.topics[name] = TopicInfo(name, made, dict(settings))
        return self.topics[name]

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicInfo:
        old = self.topic(name)
        if "engine" in changes:
            raise InvalidSettingError("engine is fixed when a topic is made")
        self.topics[name] = TopicInfo(name, old.partitions, {**old.settings, **changes})
        return self.topics[name]

    async def remove_topic(self, name: str) -> None:
        self.topic(name)
        await asyncio.sleep(0)
        del self.topics[name]

    def health(self) -> Health:
        return self.condition

    def reload(self) -> None:
        self.reloads += 1

    def info(self) -> ServerInfo:
        return ServerInfo("1.2.3", 4.5, "/var/lib/bus", {"jebp": "127.0.0.1:5320"})


class Caller:
    """What asks: one HTTP session with the token, unless told otherwise."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self.session, self.base = session, base

    async def __call__(
        self, method: str, path: str, body: object = None, *, authorization: str | None = f"Bearer {TOKEN}"
    ) -> tuple[int, Any]:
        headers = {"Authorization": authorization} if authorization else {}
        async with self.session.request(
            method, URL(self.base + path, encoded=True), json=body, headers=headers
        ) as reply:
            return reply.status, await reply.json()


def serve(test: Callable[[Caller, FakeBus], Coroutine[Any, Any, None]]) -> None:
    @asynccontextmanager
    async def served(bus: FakeBus) -> AsyncIterator[Caller]:
        server = AdminServer(bus, Metrics(), token=TOKEN, settings=AdminSettings(port=0))
        await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                host, port = server.address
                yield Caller(session, f"http://{host}:{port}")
        finally:
            await server.stop()

    async def run() -> None:
        bus = FakeBus()
        async with served(bus) as call:
            await test(call, bus)

    asyncio.run(run())


def test_the_api_needs_the_token_and_metrics_and_health_do_not() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        for method, path in (
            ("GET", "/api/topics"),
            ("POST", "/api/topics"),
            ("GET", "/api/topics/a"),
            ("PATCH", "/api/topics/a"),
            ("DELETE", "/api/topics/a"),
            ("GET", "/api/server"),
            ("POST", "/api/reload"),
        ):
            for wrong in (None, "Bearer", "Bearer ", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}", "Bearer \u00fc"):
                status, body = await call(method, path, authorization=wrong)
                assert (status, body["code"]) == (401, "unauthorized"), (method, path, wrong)
        assert bus.reloads == 0
        assert (await call("GET", "/health", authorization=None))[0] == 200
        assert (await call("GET", "/ready", authorization=None))[0] == 200
        async with call.session.get(call.base + "/metrics") as reply:
            assert reply.status == 200

    serve(test)


def test_a_topic_is_made_listed_shown_changed_and_removed() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        wanted = {"name": "orders", "partitions": 2, "settings": {"ack": "written", "retention_seconds": "7d"}}
        status, made = await call("POST", "/api/topics", wanted)
        assert status == 201
        assert made["settings"] == {"ack": "written", "retention_seconds": 604_800.0}
        assert [partition["partition"] for partition in made["partitions"]] == [0, 1]
        assert await call("GET", "/api/topics") == (200, {"topics": [made]})
        assert await call("GET", "/api/topics/orders") == (200, made)
        changed = await call("PATCH", "/api/topics/orders", {"retention_bytes": "1GiB", "retention_seconds": None})
        assert changed[1]["settings"] == {"ack": "written", "retention_seconds": None, "retention_bytes": 2**30}
        assert await call("DELETE", "/api/topics/orders") == (200, {"removed": "orders"})
        assert await call("GET", "/api/topics") == (200, {"topics": []})

    serve(test)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("plant/line1", "plant%2Fline1"),
        ("plant/line1", "plant%2fline1"),
        ("50%2Foff", "50%252Foff"),
        ("a b?c#d", "a%20b%3Fc%23d"),
        ("Wörter/büch", "W%C3%B6rter%2Fb%C3%BCch"),
    ],
)
def test_a_topic_name_survives_the_path(name: str, path: str) -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        bus.create_topic(name, 1, {})
        status, shown = await call("GET", f"/api/topics/{path}")
        assert (status, shown["name"]) == (200, name)
        assert (await call("PATCH", f"/api/topics/{path}", {"ack": "written"}))[0] == 200
        assert await call("DELETE", f"/api/topics/{path}") == (200, {"removed": name})

    serve(test)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"retention_second": 5}, "retention_seconds"),
        ({"ack": "maybe"}, "ack"),
        ({"retention_bytes": "lots"}, "retention_bytes"),
        ({"retention_seconds": -1}, "retention_seconds"),
        ({"partitions": "three"}, "partitions"),
        ({"engine": "memory"}, "engine"),
    ],
)
def test_a_wrong_setting_is_refused_and_named(changes: dict[str, object], told: str) -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        bus.create_topic("a", 1, {})
        status, body = await call("PATCH", "/api/topics/a", changes)
        assert (status, body["code"]) == (400, "invalid_setting")
        assert told in body["error"]
        assert bus.topics["a"].settings == {}

    serve(test)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"name": 5}, {"name": "a", "partition": 2}, {"name": "a", "partitions": "2"}]
)
def test_a_body_of_the_wrong_shape_is_refused(body: object) -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        status, answer = await call("POST", "/api/topics", body)
        assert (status, answer["code"]) == (400, "bad_request")
        assert bus.topics == {}

    serve(test)


def test_every_error_is_json_with_a_code() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        bus.create_topic("a", 1, {})
        assert (await call("GET", "/api/topics/b"))[1]["code"] == "unknown_topic"
        status, body = await call("POST", "/api/topics", {"name": "a"})
        assert (status, body["code"]) == (409, "topic_exists")
        assert (await call("GET", "/nowhere")) == (404, {"error": "Not Found", "code": "not_found"})
        status, body = await call("PUT", "/api/topics")
        assert (status, body["code"]) == (405, "method_not_allowed")
        for error, expected in (
            (DiskFullError("no room"), (507, {"error": "no room", "code": "disk_full"})),
            (StorageError("sick disk"), (503, {"error": "sick disk", "code": "storage"})),
        ):
            bus.error = error
            assert await call("GET", "/api/topics") == expected

    serve(test)


def test_what_was_not_foreseen_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        bus.error = RuntimeError("the inside of the server")
        status, body = await call("GET", "/api/topics")
        assert (status, body["code"]) == (500, "internal")
        assert "inside" not in body["error"]

    serve(test)
    assert "the inside of the server" in caplog.text
    assert TOKEN not in caplog.text


def test_a_body_over_one_mebibyte_is_refused() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for size, expected in ((2**20, 400), (2**20 + 1, 413)):
            async with call.session.post(
                f"{call.base}/api/topics", data=io.BytesIO(b" " * size), headers=headers
            ) as reply:
                assert reply.status == expected

    serve(test)


def test_health_names_its_reasons_and_stays_200_while_readiness_may_fail() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        assert await call("GET", "/health") == (200, {"status": "ok", "reasons": []})
        bus.condition = Health(ready=False, reasons=["the disk is full"])
        assert await call("GET", "/health") == (200, {"status": "degraded", "reasons": ["the disk is full"]})
        assert await call("GET", "/ready") == (503, {"ready": False, "reasons": ["the disk is full"]})

    serve(test)


def test_the_server_tells_what_it_is_and_reloads() -> None:
    async def test(call: Caller, bus: FakeBus) -> None:
        status, body = await call("GET", "/api/server")
        assert (status, body["version"], body["addresses"]) == (200, "1.2.3", {"jebp": "127.0.0.1:5320"})
        assert await call("POST", "/api/reload") == (200, {"reloaded": True})
        assert bus.reloads == 1

    serve(test)


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    made = ensure_token(str(tmp_path))
    assert len(made) >= 40
    assert stat.S_IMODE(os.stat(token_path(str(tmp_path))).st_mode) == 0o600
    assert ensure_token(str(tmp_path)) == read_token(str(tmp_path)) == made


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    ensure_token(str(tmp_path))
    os.chmod(token_path(str(tmp_path)), 0o644)
    with pytest.raises(TokenError, match="may be read by others"):
        ensure_token(str(tmp_path))


def test_a_missing_or_empty_token_is_told(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="makes it at its first start"):
        read_token(str(tmp_path))
    ensure_token(str(tmp_path))
    Path(token_path(str(tmp_path))).write_text("\n")
    with pytest.raises(TokenError, match="is empty"):
        read_token(str(tmp_path))
