"""The administration endpoint over a real socket, in front of a real broker."""

import asyncio
import errno
import gzip
import io
import os
import stat
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

import babelbus
from babelbus.clock import Clock
from babelbus.config import AdminSettings, Config, QuotaSettings
from babelbus.core.access import SERVER, Identity
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.subject import exactly
from babelbus.errors import StorageError
from babelbus.listening.connections import Connected
from babelbus.listening.sockets import open_sockets
from babelbus.records.format import encode_payloads
from babelbus.server.views import VIEWS
from babelbus.storage.contract import BadRange, Store
from babelbus.storage.errors import DiskFullError
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.errors import RecordTooLargeError
from babelbus.web import callers
from babelbus.web.admin import AdminServer
from babelbus.web.answers import answer_of
from babelbus.web.api import AdminApi
from babelbus.web.changes import Changes
from babelbus.web.clients import ClientLine
from babelbus.web.cluster import Cluster
from babelbus.web.history import History
from babelbus.web.token import TokenError, ensure_token, read_token, token_path
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus

TOKEN = "a token for tests"


class FakeServer:
    """A `Host` around a real broker."""

    def __init__(self, files: FileSystem | None = None, others: dict[str, Store] | None = None) -> None:
        self.bus = Bus(files, others=others)
        self.broker = self.bus.broker
        self.bus.open_gate("off")
        self.bus.open_state()
        self.broker.open_groups(self.bus.files, "data", 3600)
        self.config = Config()
        self.clock: Clock = self.bus.clock
        self.folder = "/var/lib/bus"
        self.addresses = {"jebp": "127.0.0.1:5320"}
        self.started_at = self.clock.monotonic()
        self.stopping = False
        self.admin_tls = False
        self.changes = Changes(self.clock)
        self.changes.watch(self.broker)
        self.history: History | None = None
        self.cluster: Cluster | None = None
        self.reloads = 0
        self.fingerprint = "f" * 64
        self.listed: dict[str, ClientLine] = {}

    def connections(self) -> dict[str, Collection[Connected]]:
        return {}

    async def reload(self, by: Identity = SERVER) -> None:
        self.reloads += 1

    def clients(self) -> list[ClientLine]:
        return sorted(self.listed.values(), key=lambda client: client.name)

    async def put_client(self, client: ClientLine) -> None:
        self.listed[client.fingerprint] = client

    async def remove_client(self, fingerprint: str) -> None:
        del self.listed[fingerprint]

    @property
    def topics(self) -> list[str]:
        return [name for name in self.broker.topic_names() if not name.startswith("$")]


class Caller:
    """What asks: one HTTP session with the token, unless told otherwise."""

    def __init__(self, session: aiohttp.ClientSession, base: str, api: AdminApi) -> None:
        self.session, self.base, self.api = session, base, api

    async def __call__(
        self, method: str, path: str, body: object = None, *, authorization: str | None = f"Bearer {TOKEN}"
    ) -> tuple[int, Any]:
        headers = {"Authorization": authorization} if authorization else {}
        async with self.session.request(
            method, URL(self.base + path, encoded=True), json=body, headers=headers
        ) as reply:
            return reply.status, await reply.json()


def serve(
    test: Callable[[Caller, FakeServer], Coroutine[Any, Any, None]],
    files: FileSystem | None = None,
    others: dict[str, Store] | None = None,
) -> None:
    @asynccontextmanager
    async def served(bus: FakeServer) -> AsyncIterator[Caller]:
        api = AdminApi(bus, bus.bus.metrics, read_value=bytes, views=VIEWS)
        server = AdminServer(bus, api, token=TOKEN, settings=AdminSettings(port=0))
        sockets = await open_sockets("127.0.0.1", 0)
        host, port = sockets[0].getsockname()
        await server.start(sockets)
        try:
            async with aiohttp.ClientSession() as session:
                yield Caller(session, f"http://{host}:{port}", api)
        finally:
            await server.stop()
            await bus.broker.close()

    async def run() -> None:
        bus = FakeServer(files, others)
        async with served(bus) as call:
            await test(call, bus)

    asyncio.run(run())


def test_the_api_needs_the_token_and_metrics_and_health_do_not() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
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
                assert ("nothing says who asks" in body["error"]) == (wrong is None), (wrong, body)
                bus.bus.clock.advance(60)
        assert bus.reloads == 0
        assert (await call("GET", "/health", authorization=None))[0] == 200
        assert (await call("GET", "/ready", authorization=None))[0] == 200
        async with call.session.get(call.base + "/metrics") as reply:
            assert reply.status == 200

    serve(test)


def test_the_name_of_the_scheme_knows_no_letter_case() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        for right in (f"bearer {TOKEN}", f"BEARER {TOKEN}", f"Bearer  {TOKEN}"):
            assert (await call("GET", "/api/topics", authorization=right))[0] == 200

    serve(test)


def test_a_client_that_guesses_the_token_is_told_to_wait_and_the_token_is_taken_all_the_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "REFUSAL_SECONDS", 0.0)

    async def test(call: Caller, bus: FakeServer) -> None:
        assert (await call("GET", "/api/topics", authorization=None))[0] == 401  # no guess
        for guess, expected in enumerate((401, 429, 429)):
            status, body = await call("GET", "/api/topics", authorization=f"Bearer {guess}")
            assert (status, body["code"]) == (expected, {401: "unauthorized", 429: "too_many_guesses"}[expected])
        headers = {"Authorization": "Bearer guess"}
        async with call.session.get(call.base + "/api/topics", headers=headers) as reply:
            assert (reply.status, reply.headers["Retry-After"], reply.headers["Connection"]) == (429, "1", "close")
        assert (await call("GET", "/api/topics"))[0] == 200
        bus.bus.clock.advance(1)
        assert (await call("GET", "/api/topics", authorization="Bearer 4"))[0] == 401

    serve(test)


def test_a_topic_is_made_listed_shown_changed_and_removed() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        wanted = {"name": "orders", "partitions": 2, "settings": {"ack": "written", "retention_seconds": "7d"}}
        status, made = await call("POST", "/api/topics", wanted)
        assert status == 201
        assert {**made["settings"], "ack": "written", "retention_seconds": 604_800.0} == made["settings"]
        assert [partition["partition"] for partition in made["partitions"]] == [0, 1]
        assert made in (await call("GET", "/api/topics"))[1]["topics"]
        shown = (await call("GET", "/api/topics/orders"))[1]
        assert shown == made | {"sources": shown["sources"]}
        changed = await call("PATCH", "/api/topics/orders", {"retention_bytes": "1GiB", "retention_seconds": None})
        altered = {"ack": "written", "retention_seconds": None, "retention_bytes": 2**30}
        assert changed[1]["settings"] == made["settings"] | altered
        assert await call("DELETE", "/api/topics/orders") == (200, {"removed": "orders"})
        assert bus.topics == []

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
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.broker.create_topic(name, 1, {}, SERVER).result()
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
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.broker.create_topic("a", 1, {}, SERVER).result()
        status, body = await call("PATCH", "/api/topics/a", changes)
        assert (status, body["code"]) == (400, "invalid_setting")
        assert told in body["error"]
        assert bus.broker.topic("a").settings == bus.broker.create_topic("b", 1, {}, SERVER).result().settings

    serve(test)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"name": 5}, {"name": "a", "partition": 2}, {"name": "a", "partitions": "2"}]
)
def test_a_body_of_the_wrong_shape_is_refused(body: object) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        status, answer = await call("POST", "/api/topics", body)
        assert (status, answer["code"]) == (400, "bad_request")
        assert bus.topics == []

    serve(test)


@pytest.mark.parametrize("text", [f"{2**63}", "9" * 30, "0" * 20 + "9" * 30, "0" * 20 + "9" * 5000, "1_0", "-1", ""])
def test_a_number_of_the_query_that_is_none_is_refused(text: str) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        for path in ("/api/topics?offset=", "/api/topics?count="):
            status, body = await call("GET", path + text)
            assert (status, body["code"]) == (400, "bad_request")
            assert len(body["error"]) < 100

    serve(test)


def test_a_body_that_is_nested_too_deep_is_refused() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        deep = b'{"retention_seconds":' + b"[" * 100_000
        async with call.session.patch(call.base + "/api/topics/a", data=deep, headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]) == (400, "the body is wrong: it is nested too deep")

    serve(test)


def test_every_error_is_json_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.broker.create_topic("a", 1, {}, SERVER).result()
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

            def fail(name: str, principal: object, error: StorageError = error) -> None:
                raise error

            monkeypatch.setattr(bus.broker, "remove_topic", fail)
            assert await call("DELETE", "/api/topics/a") == expected

    serve(test)


def test_what_was_not_foreseen_is_logged_and_not_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        def fail() -> None:
            raise RuntimeError("the inside of the server")

        monkeypatch.setattr(bus.broker, "topics", fail)
        status, body = await call("GET", "/api/topics")
        assert (status, body["code"]) == (500, "internal")
        assert "inside" not in body["error"]

    serve(test)
    assert "the inside of the server" in caplog.text
    assert TOKEN not in caplog.text


def test_a_body_over_one_mebibyte_is_refused() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for size, expected in ((2**20, 400), (2**20 + 1, 413)):
            async with call.session.post(
                f"{call.base}/api/topics", data=io.BytesIO(b" " * size), headers=headers
            ) as reply:
                assert reply.status == expected

    serve(test)


def test_a_compressed_body_is_refused() -> None:
    async def check(call: Caller, bus: FakeServer) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "gzip"}
        async with call.session.post(
            f"{call.base}/api/topics", data=gzip.compress(b'{"name": "news"}'), headers=headers
        ) as reply:
            assert (reply.status, (await reply.json())["code"]) == (400, "bad_request")
        assert bus.topics == []

    serve(check)


def test_health_names_its_reasons_and_stays_200_while_readiness_may_fail() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        assert await call("GET", "/health") == (200, {"status": "ok", "reasons": []})
        bus.broker.create_topic("a", 1, {}, SERVER).result().partitions[0].failing = DiskFullError("the disk is full")
        reasons = ["topic a: the disk is full"]
        assert await call("GET", "/health") == (200, {"status": "degraded", "reasons": reasons})
        assert await call("GET", "/ready") == (200, {"ready": True, "reasons": reasons})
        bus.stopping = True
        reasons.append("the server stops")
        assert await call("GET", "/ready") == (503, {"ready": False, "reasons": reasons})

    serve(test)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_is_named_until_it_takes_records_again(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        partition = bus.broker.create_topic("a", 1, {}, SERVER).result().partitions[0]
        assert isinstance(bus.bus.files, FaultyFiles)
        bus.bus.files.fail("pwrite", number, times=2, suffix="0.log")
        for _ in range(2):
            with pytest.raises(StorageError):
                partition.append(encode_payloads([b"x"], [1], partition.next_offset))
        await partition.flush()
        partition.flushed(partition.next_offset, None)
        status, body = await call("GET", "/health")
        assert (status, body["status"]) == (200, "degraded")
        assert (await call("GET", "/ready"))[0] == 503
        partition.append(encode_payloads([b"x"], [1], partition.next_offset))
        assert await call("GET", "/health") == (200, {"status": "ok", "reasons": []})
        assert (await call("GET", "/ready"))[0] == 200

    serve(test)
    lines = [1, 1] if number == errno.ENOSPC else [0, 0]
    assert [caplog.text.count("the disk is full"), caplog.text.count("room again")] == lines


def test_a_failed_flush_is_named_until_a_flush_works() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        partition = bus.broker.create_topic("a", 1, {"ack": "written"}, SERVER).result().partitions[0]
        assert isinstance(bus.bus.files, FaultyFiles)
        bus.bus.files.fail("flush", errno.EIO, suffix=".log")
        partition.append(encode_payloads([b"x"], [1], partition.next_offset))
        with pytest.raises(StorageError):
            await partition.flush()
        partition.append(encode_payloads([b"y"], [1], partition.next_offset))  # says nothing of the flush
        assert (await call("GET", "/health"))[1]["status"] == "degraded"
        assert (await call("GET", "/ready"))[0] == 503
        await partition.flush()
        assert await call("GET", "/health") == (200, {"status": "ok", "reasons": []})
        assert (await call("GET", "/ready"))[0] == 200

    serve(test)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_cursors_that_could_not_be_saved_are_named_until_they_are(number: int) -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        groups, files = bus.broker.groups, bus.bus.files
        assert isinstance(files, FaultyFiles)
        bus.broker.create_topic("a", 1, {}, SERVER).result()
        group = groups.create("a", "g", principal=SERVER)
        await groups.commit()
        files.fail("pwrite", number, suffix="groups.0.new")
        group.pause(SERVER)
        with pytest.raises(StorageError):
            await groups.commit()
        reason = f"not saved: the cursors of consumer groups (writing data/groups.0: {os.strerror(number)})"
        assert await call("GET", "/health") == (200, {"status": "degraded", "reasons": [reason]})
        assert await call("GET", "/ready") == (200, {"ready": True, "reasons": [reason]})
        await groups.commit()
        assert await call("GET", "/health") == (200, {"status": "ok", "reasons": []})

    serve(test)


def test_records_that_cannot_be_stored_and_topics_of_the_server_are_mistakes_of_the_client() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.broker.create_topic("a", 1, {}, SERVER).result()
        assert (await call("POST", "/api/principals", {"name": "alice"}))[0] == 201  # makes the topic $access
        many = [(f"h{number}", "x") for number in range(200)]
        for path, body, expected in (
            ("/api/send", {"subject": "a", "headers": dict(many)}, (400, "invalid_event")),
            ("/api/topics/a/records", {"payload": "x", "headers": many}, (400, "invalid_event")),
            ("/api/topics/a/records", {"payload": "x", "headers": many, "partition": 0}, (400, "invalid_event")),
            ("/api/topics/$access/records", {"payload": "x"}, (403, "refused")),
            ("/api/topics/a/copy", {"to": "$access", "partition": 0, "from": 0}, (403, "refused")),
        ):
            status, answer = await call("POST", path, body)
            assert (status, answer["code"]) == expected, (path, answer)

    serve(test)


def test_a_record_that_nats_does_not_take_is_a_mistake_of_the_client() -> None:
    reply = answer_of(RecordTooLargeError("a record has 2000000 bytes, NATS takes 1000000"), "POST /api/send", None)
    assert (reply.status, reply.body) == (
        400,
        b'{"error":"a record has 2000000 bytes, NATS takes 1000000","code":"invalid_event"}',
    )


def test_a_scraper_that_asks_for_a_wrong_version_is_told_so() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        for accept, expected in (
            ("application/openmetrics-text; version=abc", 400),
            ("text/plain; version=1.x", 400),
            ("application/openmetrics-text; version=1.0.0", 200),
            ("\u00fc;=,;", 200),
        ):
            async with call.session.get(call.base + "/metrics", headers={"Accept": accept}) as reply:
                assert reply.status == expected, accept

    serve(test)


def test_a_topic_that_a_full_disk_refuses_is_507() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        assert isinstance(bus.bus.files, FaultyFiles)
        bus.bus.files.fail("open", errno.ENOSPC, suffix="settings.json.new")
        status, body = await call("POST", "/api/topics", {"name": "a"})
        assert (status, body["code"]) == (507, "disk_full")

    serve(test)


def test_health_names_the_offsets_that_a_start_found_damaged() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        partition = bus.broker.create_topic("a", 2, {}, SERVER).result().partitions[1]
        partition.log.recovery.bad.append(("a.log", BadRange(0, 0, 160, 200, "the segment ends early")))
        status, body = await call("GET", "/health")
        assert (status, body["status"]) == (200, "degraded")
        (reason,) = body["reasons"]
        assert reason.startswith("topic a, partition 1: offsets 160 to 199 cannot be read (the segment ends early)")
        assert "restore the file" in reason
        assert "babelbus repair" in reason

    serve(test)


def test_the_server_tells_what_it_is_and_reloads() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        status, body = await call("GET", "/api/server")
        assert (status, body["version"], body["addresses"]) == (200, babelbus.__version__, {"jebp": "127.0.0.1:5320"})
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


def test_quotas_of_a_principal_are_set_shown_with_what_it_uses_and_kept_by_other_changes() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.open_gate("off")
        added = {"name": "alice", "quotas": {"subscriptions": 1}}
        assert (await call("POST", "/api/principals", added))[0] == 201
        alice = Identity("test:alice", "alice", None)
        bus.broker.subscribe(exactly("a"), lambda _: None, alice)
        with pytest.raises(QuotaExceededError):
            bus.broker.subscribe(exactly("a"), lambda _: None, alice)
        assert (await call("PATCH", "/api/principals/alice", {"roles": ["readers"]}))[0] == 200
        enabled = {"enforce": False, "admin": "alice"}
        assert (await call("PUT", "/api/access/mode", enabled))[0] == 200
        _, shown = await call("GET", "/api/principals/alice")
        assert (shown["quotas"], shown["used"]) == ({"subscriptions": 1}, {"subscriptions": 1})
        assert shown["roles"] == ["readers", "admin"]
        assert (await call("PATCH", "/api/principals/alice", {"quotas": {"topics": 2}}))[0] == 200
        assert (await call("GET", "/api/principals/alice"))[1]["quotas"] == {"topics": 2}
        status, fault = await call("PATCH", "/api/principals/alice", {"quotas": {"topics": 0}})
        assert (status, "topics" in fault["error"]) == (400, True)

    serve(test)


def test_what_a_quota_refuses_has_a_status_of_its_own() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        quota = bus.bus.quotas
        quota.set_limits({"admin": QuotaSettings(requests=1)})
        bus.broker.responders.add(exactly("svc"), lambda _: None, principal=SERVER)
        quota.take("admin", "requests")
        status, fault = await call("POST", "/api/request", {"subject": "svc"})
        assert (status, fault["code"]) == (429, "quota_exceeded"), fault

    serve(test)


def test_a_long_answer_comes_packed_to_who_takes_it() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        for number in range(60):
            await bus.broker.create_topic(f"topic/{number:03}", principal=SERVER)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for path, accepted, packed in (
            ("/api/topics", "gzip, br", "gzip"),
            ("/api/topics", "gzip;q=0", None),
            ("/api/topics", "identity", None),
            ("/api/topics?count=1", "gzip", None),
        ):
            async with call.session.get(call.base + path, headers={**headers, "Accept-Encoding": accepted}) as reply:
                assert reply.headers.get("Content-Encoding") == packed
                assert (await reply.json())["topics"]

    serve(test)
