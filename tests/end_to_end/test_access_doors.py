"""The doors of jebp, sbus and the administration API in front of one table, through real sockets."""

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from babelbus.cli.api_http import basic, bearer
from babelbus.client import Client, RequestTimeoutError
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clock import SystemClock
from babelbus.config import AccessSettings, Config
from babelbus.core.access import SERVER, Credential, Effect, Principal, Row
from babelbus.core.access.table import Entry
from babelbus.errors import BabelbusError
from babelbus.identities.directory import make_process
from babelbus.identities.passwords import make_password
from babelbus.identities.tokens import make_token
from babelbus.protocols.jebp.identity import Identity
from babelbus.server.app import Server
from babelbus.web.token import read_token
from tests.support.bus import SAFETY_NET_SECONDS, in_loop, turns
from tests.support.clock import ShiftedClock
from tests.support.sbus import configured as sbus_configured
from tests.support.sbus import heard_before_barrier, join
from tests.support.server import LiveServer, configure, running

PASSWORD = "correct horse battery"
DENY = Effect.DENY


def enforcing(config: Config) -> Config:
    return msgspec.structs.replace(config, access=AccessSettings(mode="enforce"))


async def put(server: Server, *entries: Entry) -> None:
    await server.gate.put(entries, SERVER)


async def audit(server: Server) -> list[dict[str, Any]]:
    async with api(server, read_token(server.folder)) as ask:
        return list((await ask("GET", "/api/audit?count=1000"))[1]["records"])


class Api:
    """The administration API for one caller; the gate of the endpoint answers with status and body."""

    def __init__(self, server: Server, token: str | None, auth: tuple[str, str] | None) -> None:
        headers = {} if token is None else {"Authorization": bearer(token)}
        headers |= {} if auth is None else {"Authorization": basic(*auth)}
        self._base = f"http://{server.addresses['admin']}"
        self.session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def __call__(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        async with self.session.request(method, self._base + path, json=body) as reply:
            content = await reply.read()
            is_json = reply.content_type == "application/json"
            return reply.status, msgspec.json.decode(content) if is_json else content

    def open(self, path: str) -> Any:
        return self.session.get(self._base + path)


def api(server: Server, token: str | None = None, auth: tuple[str, str] | None = None) -> Api:
    return Api(server, token, auth)


def with_server(test: Callable[[Server], Coroutine[Any, Any, None]], folder: Path) -> None:
    @in_loop
    async def run() -> None:
        async with running(enforcing(configure(folder, admin=True))) as server:
            await test(server)

    run()


# -- the administration API ------------------------------------------------------------------------------------------


ROUTES: Sequence[tuple[str, str, object]] = (
    ("GET", "/api/topics/secret", None),
    ("POST", "/api/topics", {"name": "secret/more"}),
    ("PATCH", "/api/topics/secret", {"retention_bytes": 1}),
    ("DELETE", "/api/topics/secret", None),
    ("POST", "/api/reload", None),
    ("GET", "/api/state/value?key=secret/a", None),
    ("PUT", "/api/state/value?key=secret/a", 1),
    ("DELETE", "/api/state/value?key=secret/a", None),
    ("GET", "/api/state/values?pattern=secret/%23", None),
    ("GET", "/api/state/revisions?key=secret/a", None),
    ("GET", "/api/listen?pattern=secret/%23", None),
    ("GET", "/api/state/watch?pattern=secret/%23", None),
    ("POST", "/api/send", {"subject": "secret/a", "payload": "x"}),
    ("POST", "/api/request", {"subject": "secret/a", "payload": "x"}),
    ("GET", "/api/respond?subject=secret/a", None),
    ("POST", "/api/groups", {"topic": "secret", "name": "g"}),
    ("GET", "/api/topics/secret/groups/there", None),
    ("PATCH", "/api/topics/secret/groups/there", {"ack_seconds": 5}),
    ("DELETE", "/api/topics/secret/groups/there", None),
    ("POST", "/api/topics/secret/groups/there/seek", {"at": "end"}),
    ("POST", "/api/topics/secret/groups/there/pause", None),
    ("POST", "/api/topics/secret/groups/there/resume", None),
    ("GET", "/api/topics/secret/groups/there/consume", None),
    ("PUT", "/api/pipelines/p", {"sinks": {}}),
    ("GET", "/api/access", None),
    ("POST", "/api/access/rows", {"rows": []}),
    ("DELETE", "/api/access/rows", {"rows": []}),
    ("GET", "/api/access/explain?principal=a&action=read&subject=b", None),
    ("GET", "/api/access/faults", None),
    ("PUT", "/api/access/mode", {"enforce": False}),
    ("POST", "/api/access/apply", {"text": ""}),
    ("GET", "/api/principals", None),
    ("POST", "/api/principals", {"name": "eve", "roles": ["admin"]}),
    ("GET", "/api/principals/guest", None),
    ("PATCH", "/api/principals/guest", {"roles": ["admin"]}),
    ("DELETE", "/api/principals/guest", None),
    ("PUT", "/api/principals/guest/credentials", {"kind": "token"}),
    ("GET", "/api/audit", None),
    ("GET", "/metrics", None),
    ("GET", "/api/topics/secret/records", None),
    ("GET", "/api/topics/secret/records/0/0", None),
    ("GET", "/api/topics/secret/records/0/0/payload", None),
    ("GET", "/api/topics/secret/follow", None),
    ("GET", "/api/topics/secret/export", None),
    ("GET", "/api/topics/secret/search?filter=offset%3E0", None),
    ("POST", "/api/topics/secret/records", {"payload": "x"}),
    ("POST", "/api/topics/secret/copy", {"to": "mine", "partition": 0, "from": 0}),
    ("POST", "/api/state/values", {"values": [{"key": "secret/a", "value": 1}]}),
    ("DELETE", "/api/state/values?pattern=secret/%23", None),
    ("GET", "/api/state/search?pattern=secret/%23", None),
    ("GET", "/api/state/entry?key=secret/a", None),
    ("GET", "/api/state/differences?pattern=secret/%23&from_offset=0", None),
    ("GET", "/api/dead-letters/there", None),
    ("GET", "/api/dead-letters/there/0", None),
    ("POST", "/api/dead-letters/there/replay", {}),
    ("POST", "/api/dead-letters/there/purge", {"all": True}),
    ("GET", "/api/clients", None),
    ("POST", "/api/clients", {"name": "eve", "fingerprint": "e" * 64}),
    ("PATCH", f"/api/clients/{'e' * 64}", {"admin": True}),
    ("DELETE", f"/api/clients/{'e' * 64}", None),
    ("GET", "/api/status", None),
    ("GET", "/api/history", None),
    ("GET", "/api/connections", None),
    ("DELETE", "/api/connections/jebp-1", None),
    ("GET", "/api/cluster", None),
    ("POST", "/api/cluster/move", {}),
)
OWN_ROUTES: Sequence[tuple[str, str, object]] = (
    ("GET", "/api/server", None),
    ("GET", "/api/topics", None),
    ("GET", "/api/groups", None),
    ("GET", "/api/dead-letters", None),
    ("GET", "/api/pipelines", None),
    ("GET", "/api/changes", None),
    ("GET", "/api/state/tree", None),
    ("GET", "/api/state/nodes?parent=secret", None),
    ("GET", "/api/state/ends", None),
    ("GET", "/api/state/locks", None),
    ("GET", "/api/state/wills", None),
    ("POST", "/api/console/may", {"questions": []}),
    ("POST", "/api/console/links", None),
    ("POST", "/api/responders/ID/reply", {"number": 1}),
    ("POST", "/api/consumers/ID/ack", {"numbers": [1]}),
    ("POST", "/api/consumers/ID/nack", {"numbers": [1]}),
    ("POST", "/api/consumers/ID/leave", {}),
)
"""Requests that everybody may send who proves who it is: an answer has nothing of others."""


def test_the_tables_of_routes_have_every_route(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        asked = {(method, path.partition("?")[0]) for method, path, _ in (*ROUTES, *OWN_ROUTES)}

        def is_asked(method: str, pattern: str) -> bool:
            form = re.compile(re.sub(r"\{\w+\}", "[^/]+", pattern))
            return any(method == other and form.fullmatch(path) for other, path in asked)

        api = await server.administration.load_api()
        assert [route[:2] for route in api.direct.routes if not is_asked(*route[:2])] == []

    with_server(test, tmp_path)


def test_no_route_answers_a_client_that_proves_nothing(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with api(server) as nobody:
            for method, path, body in (*ROUTES, *OWN_ROUTES, ("GET", "/api/console/session", None)):
                status, answer = await nobody(method, path, body)
                assert (status, answer["code"]) == (401, "unauthorized"), (method, path)

    with_server(test, tmp_path)


def test_who_may_read_changes_nothing_and_sees_nothing_of_others(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        token = make_token(0)
        rows = [Row("reader", action, "secret/#") for action in ("read", "subscribe")]
        await put(server, Principal("reader", (), (token.credential,)), *rows)
        async with api(server, read_token(server.folder)) as boss, api(server, token.secret) as reader:
            for topic in ("secret", "hidden"):
                assert (await boss("POST", "/api/topics", {"name": topic}))[0] == 201
                assert (await boss("POST", "/api/groups", {"topic": topic, "name": "there"}))[0] == 201
                assert (await boss("PUT", f"/api/state/value?key={topic}/a", 1))[0] == 200
            for method, path, body in ROUTES:
                if method != "GET":
                    status, answer = await reader(method, path, body)
                    assert (status, answer["code"]) == (403, "refused"), (method, path)
            for method, path, body in OWN_ROUTES:
                assert "hidden" not in str((await reader(method, path, body))[1]), path
            assert (await boss("GET", "/api/state/value?key=secret/a"))[1]["value"] == 1

    with_server(test, tmp_path)


def test_every_route_asks_for_the_right_that_it_needs(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        token = make_token(0)
        await put(server, Principal("guest", (), (token.credential,)), Row("guest", "*", "mine/#"))
        async with api(server, read_token(server.folder)) as boss, api(server, token.secret) as guest:
            assert (await boss("POST", "/api/topics", {"name": "secret"}))[0] == 201
            assert (await boss("POST", "/api/groups", {"topic": "secret", "name": "there"}))[0] == 201
            for method, path, body in ROUTES:
                status, answer = await guest(method, path, body)
                assert (status, answer["code"]) == (403, "refused"), (method, path)
                assert "refusal" in answer["error"], (method, path)
            for path, name in (
                ("/api/topics", "topics"),
                ("/api/groups", "groups"),
                ("/api/dead-letters", "dead_letters"),
            ):
                assert await guest("GET", path) == (200, {name: []})
            async with guest.open("/api/state/tree") as tree:
                assert (await tree.read()) == b""
            assert server.gate.enforcing
            assert server.gate.table.principal("eve") is None
        tried = [one for one in await audit(server) if one["principal"] == "guest" and one["kind"] == "refusal"]
        assert len(tried) >= 10
        assert token.secret not in str(tried)

    with_server(test, tmp_path)


def test_paths_of_the_machine_are_told_to_administrators_alone(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        token = make_token(0)
        await put(server, Principal("guest", (), (token.credential,)))
        async with api(server, read_token(server.folder)) as boss, api(server, token.secret) as guest:
            told = [(await caller("GET", "/api/server"))[1] for caller in (boss, guest)]
        assert server.addresses["sbus"].startswith("/")
        assert (told[0]["data_folder"], told[0]["addresses"]) == (server.folder, server.addresses)
        assert str(tmp_path) not in str(told[1])
        assert told[1]["addresses"]["jebp"] == server.addresses["jebp"]
        assert told[1]["version"] == told[0]["version"]

    with_server(test, tmp_path)


def test_a_principal_does_what_is_granted_under_its_own_name(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        token = make_token(0)
        credentials = (token.credential, make_password(PASSWORD, 0))
        rows = {"rows": [{"who": "bob", "action": "read", "pattern": "x"}]}
        await put(server, Principal("alice", ("admin",), credentials), Row("alice", "read", "hidden/#", DENY))
        for caller in (api(server, token.secret), api(server, auth=("alice", PASSWORD))):
            async with caller as alice:
                assert (await alice("GET", "/metrics"))[0] == 200
                for method in ("POST", "DELETE"):
                    assert (await alice(method, "/api/access/rows", rows))[0] == 200
        changes = [one for one in await audit(server) if one["kind"] == "change" and one["principal"] == "alice"]
        assert len(changes) == 4
        logins = [one for one in await audit(server) if one["kind"] == "login" and one["principal"] == "alice"]
        assert len(logins) == 1
        assert PASSWORD not in str(await audit(server))

    with_server(test, tmp_path)


def test_wrong_proofs_are_refused_recorded_and_have_to_wait(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        await put(server, Principal("alice", ("admin",), (make_password(PASSWORD, 0),)))
        async with api(server, auth=("alice", "wrong horse")) as thief:
            assert (await thief("GET", "/api/access"))[0] == 401
            assert (await thief("GET", "/api/access"))[0] == 429
        async with api(server, auth=("wrong horse", "alice")) as absent:  # both in the wrong field
            assert (await absent("GET", "/api/access"))[0] == 401
        async with api(server) as nobody:
            assert (await nobody("GET", "/api/access"))[0] == 401
            assert (await nobody("GET", "/metrics"))[0] == 401
            assert (await nobody("GET", "/health"))[0] == 200
        refused = [one for one in await audit(server) if one["kind"] == "login-refused"]
        assert [one["principal"].partition("#")[0] for one in refused] == ["alice", "unknown"]
        assert "wrong horse" not in str(refused)

    with_server(test, tmp_path)


def test_while_the_gate_is_off_a_token_of_a_principal_is_no_administrator(tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        async with running(configure(tmp_path, admin=True)) as server:
            token = make_token(0)
            await put(server, Principal("guest", (), (token.credential,)))
            async with api(server, token.secret) as guest:
                assert (await guest("GET", "/api/principals"))[0] == 403
            async with api(server) as nobody:
                assert (await nobody("GET", "/metrics"))[0] == 200

    run()


def test_a_live_answer_shrinks_with_the_rights_and_ends_with_the_principal(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        token = make_token(0)
        guest = Principal("guest", (), (token.credential,))
        await put(server, guest, Row("guest", "subscribe", "mine/#"), Row("guest", "subscribe", "other/#"))
        async with api(server, token.secret) as caller, api(server, read_token(server.folder)) as boss:

            async def send(subject: str) -> None:
                assert (await boss("POST", "/api/send", {"subject": subject, "payload": subject}))[0] == 200

            async with caller.open("/api/listen?pattern=%23") as answer:
                lines = answer.content
                assert await lines.readline() == b"\n"
                for subject in ("mine/1", "foreign/1", "other/1"):
                    await send(subject)
                assert [msgspec.json.decode(await lines.readline())["subject"] for _ in range(2)] == [
                    "mine/1",
                    "other/1",
                ]
                await server.gate.remove([Row("guest", "subscribe", "other/#")], SERVER)
                for subject in ("other/2", "mine/2"):
                    await send(subject)
                assert msgspec.json.decode(await lines.readline())["subject"] == "mine/2"
                await server.gate.remove([guest], SERVER)
                with pytest.raises(aiohttp.ClientError):
                    await lines.read()
            assert (await caller("GET", "/api/topics"))[0] in (401, 429)

    with_server(test, tmp_path)


def test_two_who_change_one_principal_at_once_lose_nothing(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        async with api(server, read_token(server.folder)) as boss:
            assert (await boss("POST", "/api/principals", {"name": "alice"}))[0] == 201
            one = {"issue": [{"kind": "token"}]}
            answers = await asyncio.gather(*[boss("PATCH", "/api/principals/alice", one) for _ in range(10)])
            assert {status for status, _ in answers} == {200}
            secrets = [answer["secrets"][0]["secret"] for _, answer in answers]
            assert {proof and proof[0] for proof in map(server.proofs.directory.find_token, secrets)} == {"alice"}
            version = server.gate.table.version
            bodies = [{"roles": [role], "version": version} for role in ("a", "b")]
            answers = await asyncio.gather(*[boss("PATCH", "/api/principals/alice", body) for body in bodies])
            assert sorted(status for status, _ in answers) == [200, 409]

    with_server(test, tmp_path)


DAY_MS = 86_400_000


def expiring(credential: Credential) -> Credential:
    return msgspec.structs.replace(credential, expires=SystemClock().now_ms() + DAY_MS)


def test_a_live_answer_ends_when_the_token_or_password_of_its_caller_expires(tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        clock = ShiftedClock()
        async with running(enforcing(configure(tmp_path, admin=True)), clock) as server:
            token, other = make_token(0), make_token(0)
            password = make_password(PASSWORD, 0)
            credentials = (expiring(token.credential), other.credential, expiring(password))
            await put(server, Principal("guest", (), credentials), Row("guest", "subscribe", "#"))
            callers = [api(server, token.secret), api(server, auth=("guest", PASSWORD)), api(server, other.secret)]
            async with callers[0] as first, callers[1] as second, callers[2] as third:
                answers = [await one.open("/api/listen?pattern=%23") for one in (first, second, third)]
                for answer in answers:
                    assert await answer.content.readline() == b"\n"
                server.gate.expire()
                assert not any(answer.content.at_eof() for answer in answers)
                clock.shift_ms = DAY_MS
                server.gate.expire()
                for answer in answers[:2]:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.content.read()
                async with api(server, read_token(server.folder)) as boss:
                    assert (await boss("POST", "/api/send", {"subject": "a", "payload": "x"}))[0] == 200
                assert msgspec.json.decode(await answers[2].content.readline())["subject"] == "a"
                for answer in answers:
                    answer.close()

    run()


def test_a_jebp_connection_ends_when_its_certificate_expires(tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        clock = ShiftedClock()
        async with running(enforcing(configure(tmp_path)), clock) as server:
            alice = Identity.generate()
            made = principal("alice", alice)
            credentials = tuple(expiring(one) for one in made.credentials)
            await put(server, msgspec.structs.replace(made, credentials=credentials), Row("alice", "publish", "#"))
            await server.broker.create_topic("mine", principal=SERVER)
            connections = server.services["jebp"].listeners.connections  # type: ignore[attr-defined]
            async with Client(server.addresses["jebp"], identity=alice) as client:
                await client.publish("mine", b"1")
                (connection,) = connections
                clock.shift_ms = DAY_MS
                assert connection._session.principal == "alice"
                server.gate.expire()
                assert connection._session.principal is None
                async with asyncio.timeout(SAFETY_NET_SECONDS):
                    while connection in connections:
                        await turns()

    run()


def test_an_sbus_connection_ends_when_the_row_of_its_process_expires(tmp_path: Path) -> None:
    clock = ShiftedClock()
    with LiveServer(enforcing(sbus_configured(tmp_path)), clock=clock) as live:
        me = Principal("me", (), (expiring(make_process(0, uid=os.getuid())),))
        live.run(lambda: live.server.gate.put([me, Row("me", "subscribe", "a/#")], SERVER))
        with SbusClient(live.server.addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS) as client:
            client.subscribe(b"a/")
            live.until(lambda: live.server.broker.router.count > 0)
            clock.shift_ms = DAY_MS
            live.call(live.server.gate.expire)
            with pytest.raises(ConnectionError):
                client.receive()


# -- jebp ------------------------------------------------------------------------------------------------------------


def principal(name: str, identity: Identity) -> Principal:
    return Principal(name, (), (Credential("jebp", identity.fingerprint, {"fingerprint": identity.fingerprint}),))


def test_jebp_knows_principals_by_certificate_and_revocation_closes_at_once(tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        alice, stranger = Identity.generate(), Identity.generate()
        made = principal("alice", alice)
        await put(server, made, Row("alice", "publish", "mine/#"), Row("alice", "read", "mine/#"))
        await server.broker.create_topic("mine", principal=SERVER)
        await server.broker.create_topic("foreign", principal=SERVER)
        address = server.addresses["jebp"]
        with pytest.raises(BabelbusError):
            async with Client(address, identity=stranger) as client:
                await client.publish("mine", b"x")
        async with Client(address, identity=alice) as client:
            await client.publish("mine", b"1")
            with pytest.raises(BabelbusError):
                await client.publish("foreign", b"2")
            with pytest.raises(BabelbusError):
                await client.create_topic("more")
            await server.gate.remove([Row("alice", "publish", "mine/#")], SERVER)
            with pytest.raises(BabelbusError):
                await client.publish("mine", b"3")
            (connection,) = server.services["jebp"].listeners.connections  # type: ignore[attr-defined]
            assert connection._session.principal == "alice"
        async with Client(address, identity=alice, request_timeout_seconds=0.2) as client:
            await server.gate.remove([made], SERVER)
            async with asyncio.timeout(SAFETY_NET_SECONDS):
                while client.connected:
                    await turns()
            with pytest.raises(RequestTimeoutError, match="there is no connection: the "):
                await client.publish("mine", b"4")
        records = await audit(server)
        logins = [(one["kind"], one["principal"]) for one in records if one["source"].startswith("jebp 127.0.0.1:")]
        assert ("login", "alice") in logins
        assert ("login-refused", stranger.fingerprint) in logins
        assert server.broker.topic("mine").partitions[0].high_watermark == 1

    with_server(test, tmp_path)


# -- sbus ------------------------------------------------------------------------------------------------------------


def test_sbus_knows_principals_by_their_process_and_asks_for_both_ways(tmp_path: Path) -> None:
    with LiveServer(enforcing(sbus_configured(tmp_path))) as live:
        gate = live.server.gate
        me = Principal("me", (), (make_process(0, uid=os.getuid()),))
        rows = [Row("me", "publish", "a/#"), Row("me", "subscribe", "a/#"), Row("me", "subscribe", "b/#")]
        live.run(lambda: gate.put([me, *rows], SERVER))
        with join(live, b"") as client, join(live, b"a/") as other:
            client.publish(b"a/1", b"x")
            client.publish(b"c/1", b"refused")
            client.publish(b"a/2", b"y")
            assert [one.key for one in heard_before_barrier(client)] == [b"a/1", b"a/2"]
            assert [one.key for one in heard_before_barrier(other)] == [b"a/1", b"a/2"]
            live.run(lambda: gate.put([Row("me", "publish", "b/#")], SERVER))
            live.run(lambda: gate.remove([Row("me", "subscribe", "b/#")], SERVER))
            client.publish(b"b/1", b"granted, and heard by nobody")
            client.publish(b"a/3", b"z")
            assert [one.key for one in heard_before_barrier(client)] == [b"a/3"]
            with SbusClient(live.server.addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS) as refused:
                refused.subscribe(b"c/")
                with pytest.raises(ConnectionError):
                    refused.receive()
            sample = live.server.metrics.registry.get_sample_value
            labels = {"protocol": "sbus", "reason": "refused"}
            assert live.call(lambda: sample("babelbus_live_dropped_total", labels)) == 1
            live.run(lambda: gate.remove([me], SERVER))
            live.until(lambda: not live.server.services["sbus"].server.connections)  # type: ignore[attr-defined]


def test_a_process_without_a_principal_is_anonymous_and_what_is_off_asks_nobody(tmp_path: Path) -> None:
    with LiveServer(sbus_configured(tmp_path)) as live, join(live, b"") as client:
        gate = live.server.gate
        client.publish(b"a", b"before")
        assert [one.key for one in heard_before_barrier(client)] == [b"a"]
        live.run(lambda: gate.put([Row("anonymous", "*", "open/#")], SERVER))
        live.run(lambda: gate.enable(SERVER))
        client.publish(b"a", b"refused")
        client.publish(b"open/a", b"granted")
        assert [one.key for one in heard_before_barrier(client)] == [b"open/a"]
