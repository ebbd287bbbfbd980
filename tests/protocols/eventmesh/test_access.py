"""The gate in front of EventMesh, on real sockets: each transport proves who asks, and gets what the table grants."""

import json
import logging
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import msgspec
import pytest
from prometheus_client import generate_latest

from babelbus.clock import SystemClock
from babelbus.config import AccessSettings, EventmeshSettings, QuotaSettings, TlsSettings
from babelbus.core.access import SERVER, Effect, Principal, Row
from babelbus.core.subject import exactly
from babelbus.identities.directory import make_client_name
from babelbus.identities.passwords import make_password
from babelbus.identities.tokens import make_token
from babelbus.records.columns import decode_chunk, iterate
from tests.protocols.eventmesh.test_grpc import Events, Legacy
from tests.protocols.eventmesh.test_http import IDENTITY, Hook
from tests.support.certificates import Authority
from tests.support.clock import ManualClock
from tests.support.eventmesh import AGENT, NEW, MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, request_of

PASSWORD = "correct-horse-battery"
WRONG = "wrong-horse-battery"
TOKEN = make_token(0)
PRINCIPALS = (
    Principal("alice", credentials=(make_password(PASSWORD, 0),)),
    Principal("bob", credentials=(TOKEN.credential,)),
    Principal("boss", ("admin",), (make_password(PASSWORD + "!", 0),)),
)
SETTINGS = EventmeshSettings(
    tcp_port=0, http_port=0, grpc_port=0, admin_port=0, webhook_networks="127.0.0.0/8", webhook_consent=False
)
DENY = Effect.DENY
SECRETS = (PASSWORD, TOKEN.secret, WRONG)


class House:
    """A server whose gate is on, with alice (password), bob (token) and boss (administrator)."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live

    @property
    def addresses(self) -> dict[str, str]:
        return self.live.server.addresses

    def set(self, *rows: tuple[str, str, str], principals: tuple[Principal, ...] = PRINCIPALS) -> None:
        """Replace principals and rows; a row that begins with `!` denies."""
        made = [
            Row(who.removeprefix("!"), action, pattern, DENY if who.startswith("!") else Effect.ALLOW)
            for who, action, pattern in rows
        ]
        self.live.call(lambda: self.live.server.gate.import_entries("test", [*principals, *made]))
        self.live.call(self.live.server.proofs.guessing.clear)

    def topic(self, name: str) -> str:
        async def create() -> None:
            if self.live.server.broker.find_topic(name) is None:
                await self.live.server.broker.create_topic(name, principal=SERVER)

        self.live.run(create)
        return name

    def has_topic(self, name: str) -> bool:
        return self.live.call(lambda: self.live.server.broker.has_topic(name))

    def audit(self) -> list[dict[str, Any]]:
        """What the audit has so far."""

        async def read() -> list[dict[str, Any]]:
            written = self.live.server.gate.audit.flush()
            if written is not None:
                await written.wait()
            topic = self.live.server.broker.find_topic("$audit")
            return [] if topic is None else [json.loads(one) for one in read_all(topic)]

        return self.live.run(read)


def read_all(topic: Any) -> list[bytes]:
    found = []
    for partition in topic.partitions:
        log = partition.log
        offset = log.first_offset
        while offset < log.next_offset:
            chunk = log.read(offset, 2**20, log.next_offset)
            found += [record.payload or b"" for record in iterate(decode_chunk(chunk.data, verified=True))]
            offset = chunk.next_offset
    return found


def config_of(folder: Path, mode: str = "enforce") -> Any:
    config = configure(folder, eventmesh=SETTINGS)
    return msgspec.structs.replace(config, access=AccessSettings(mode=mode))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(config_of(tmp_path_factory.mktemp("gate"))) as live:
        yield live


@pytest.fixture
def house(running: LiveServer) -> House:
    house = House(running)
    house.set()
    return house


class Client(ABC):
    """One transport, as a user with a password (or the token of bob)."""

    name: str

    def __init__(self, house: House, stack: ExitStack, user: str = "", password: str = "", token: str = "") -> None:
        self.house, self.stack = house, stack
        self.user, self.password, self.token = user, password, token

    @abstractmethod
    def publish(self, topic: str, text: str = "x") -> tuple[bool, str]:
        """Publish; return whether the server took it, and what it said."""

    @abstractmethod
    def listen(self, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> tuple[bool, str]:
        """Subscribe; return whether the server took it, and what it said."""

    @abstractmethod
    def hear(self) -> str:
        """Return the text of the next push."""


class Tcp(Client):
    name = "tcp"
    _session: MeshClient | None = None

    @property
    def session(self) -> MeshClient:
        if self._session is None:
            self._session = self.stack.enter_context(MeshClient(self.house.addresses["eventmesh-tcp"], NEW))
            self.said = self._session.ask("HELLO_REQUEST", self.agent)
        return self._session

    @property
    def agent(self) -> dict[str, Any]:
        return {**AGENT, "username": self.user, "password": self.password, "token": self.token or None}

    def publish(self, topic: str, text: str = "x") -> tuple[bool, str]:
        session = self.session
        answer = self.said if self.said["code"] else session.publish(topic, text)
        return answer["code"] == 0, answer["desc"]

    def listen(self, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> tuple[bool, str]:
        session = self.session
        if self.said["code"]:
            return False, self.said["desc"]
        item = {"topic": topic, "mode": mode, "type": kind}
        answer = session.ask("SUBSCRIBE_REQUEST", {"topicList": [item]})
        if answer["code"] == 0:
            answer = session.ask("LISTEN_REQUEST")
        return answer["code"] == 0, answer["desc"]

    def hear(self) -> str:
        return str(self.session.push()[1]["body"])


class Http(Client):
    name = "http"
    _web: HttpClient | None = None
    _hook: Hook | None = None

    @property
    def web(self) -> HttpClient:
        if self._web is None:
            self._web = self.stack.enter_context(HttpClient(self.house.addresses["eventmesh-http"]))
        return self._web

    @property
    def proof(self) -> dict[str, str]:
        given = {"username": self.user, "passwd": self.password, "token": self.token}
        return {name: value for name, value in given.items() if value}

    def ask(self, code: str, fields: dict[str, str]) -> dict[str, Any]:
        response = self.web.ask("POST", "/", urlencode(fields).encode(), **IDENTITY, code=code, **self.proof)
        answer: dict[str, Any] = json.loads(response.body)
        return answer

    def publish(self, topic: str, text: str = "x") -> tuple[bool, str]:
        fields = {"producergroup": "P", "topic": topic, "content": text, "bizseqno": "1", "uniqueid": "2"}
        answer = self.ask("104", fields)
        assert answer["retCode"] in (0, 1, 22), answer
        return answer["retCode"] == 0, answer["retMsg"]

    def listen(self, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> tuple[bool, str]:
        if self._hook is None:
            self._hook = self.stack.enter_context(Hook())
        items = json.dumps([{"topic": topic, "mode": mode, "type": kind}])
        answer = self.ask("206", {"topic": items, "url": self._hook.url, "consumerGroup": f"g-{topic}"})
        assert answer["retCode"] in (0, 1, 22), answer
        return answer["retCode"] == 0, answer["retMsg"]

    def hear(self) -> str:
        assert self._hook is not None
        return self._hook.next()[0]["content"]


class Uri(Http):
    name = "uri"

    def publish(self, topic: str, text: str = "x") -> tuple[bool, str]:
        response = self.web.ask("POST", f"/eventmesh/publish/{topic}", text.encode(), **self.proof)
        answer = json.loads(response.body)
        assert answer["retCode"] in (0, 1, 22), answer
        return answer["retCode"] == 0, answer["retMsg"]

    def listen(self, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> tuple[bool, str]:
        if self._hook is None:
            self._hook = self.stack.enter_context(Hook())
        body = {"url": self._hook.url, "consumerGroup": f"g-{topic}", "topic": [{"topic": topic, "mode": mode}]}
        response = self.web.ask("POST", "/eventmesh/subscribe/local", json.dumps(body).encode(), **self.proof)
        answer = json.loads(response.body)
        assert answer["retCode"] in (0, 1, 22), answer
        return answer["retCode"] == 0, answer["retMsg"]


class Grpc(Client):
    package: Any
    _made: Any = None

    @property
    def mesh(self) -> Any:
        if self._made is None:
            channel = self.stack.enter_context(grpc.insecure_channel(self.house.addresses["eventmesh-grpc"]))
            self._made = self.package(channel, self.user or "u", self.password, self.token)
        return self._made

    def _outcome(self, answer: Any) -> tuple[bool, str]:
        code = self.mesh.code(answer)
        assert code in ("0", "1", "20"), answer
        return code == "0", str(answer)

    def publish(self, topic: str, text: str = "x") -> tuple[bool, str]:
        more = {"token": self.token} if self.token else {}
        return self._outcome(self.mesh.ask("publish", self.mesh.publication(topic, text, **more)))

    def listen(self, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> tuple[bool, str]:
        try:
            self.listening = self.stack.enter_context(self.mesh.stream(f"g-{topic}", topic, mode, kind))
        except PermissionError as error:
            return False, str(error)
        return True, ""

    def hear(self) -> str:
        return str(self.listening.text())


class LegacyGrpc(Grpc):
    name = "grpc"
    package = Legacy


class EventsGrpc(Grpc):
    name = "cloudevents"
    package = Events


EVERY = pytest.mark.parametrize("kind", [Tcp, Http, Uri, LegacyGrpc, EventsGrpc])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def alice(kind: type[Client], house: House, stack: ExitStack) -> Client:
    return kind(house, stack, "alice", PASSWORD)


def test_a_session_ends_when_the_password_that_opened_it_expires(tmp_path: Path, stack: ExitStack) -> None:
    clock = ManualClock(SystemClock().now_ms())
    live = stack.enter_context(LiveServer(config_of(tmp_path), clock=clock))
    credential = msgspec.structs.replace(make_password(PASSWORD, 0), expires=clock.now_ms() + 60_000)
    house = House(live)
    house.set(("alice", "publish", "a"), principals=(Principal("alice", (), (credential,)),))
    client = Tcp(house, stack, "alice", PASSWORD)
    assert client.publish(house.topic("a"))[0]
    clock.advance(59)
    live.call(live.server.gate.expire)
    assert client.publish("a")[0]
    clock.advance(1)
    live.call(live.server.gate.expire)
    assert client.session.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"


def test_a_quota_that_is_used_up_is_an_overload(house: House, stack: ExitStack) -> None:
    few = tuple(msgspec.structs.replace(one, quotas=QuotaSettings(requests=1)) for one in PRINCIPALS)
    topic, broker = house.topic("quota/a"), house.live.server.broker
    house.set(("alice", "publish", topic), principals=few)
    one = house.live.server.gate.identity("test", "alice")
    responder = house.live.call(lambda: broker.responders.add(exactly(topic), lambda question: None, "", SERVER))
    deadline = broker._clock.monotonic() + 600
    house.live.call(lambda: broker.request(topic, b"", (), deadline, one) and None)
    fields = {"producergroup": "P", "topic": topic, "content": "x", "bizseqno": "1", "uniqueid": "2"}
    legacy, events = LegacyGrpc(house, stack, "alice", PASSWORD), EventsGrpc(house, stack, "alice", PASSWORD)
    assert Http(house, stack, "alice", PASSWORD).ask("101", fields)["retCode"] == 23
    answer = legacy.mesh.ask("requestReply", legacy.mesh.publication(topic, "x"))
    assert answer.content.count('"21"') == 1
    with pytest.raises(grpc.RpcError) as refused:
        events.mesh.ask("requestReply", events.mesh.publication(topic, "x"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    house.live.call(lambda: broker.responders.remove(responder))


@EVERY
def test_publishing_needs_the_right(kind: type[Client], house: House, stack: ExitStack) -> None:
    topic, other = house.topic(f"pub/{kind.name}/a"), house.topic(f"pub/{kind.name}/b")
    house.set(("alice", "publish", topic), ("anonymous", "publish", other))
    client = alice(kind, house, stack)
    assert client.publish(topic)[0]
    taken, said = client.publish(other)
    assert not taken
    assert "refusal" in said
    stranger = kind(house, stack)
    assert stranger.publish(other)[0]
    assert not stranger.publish(topic)[0]
    house.set(("alice", "publish", topic), ("!alice", "publish", topic))
    assert not client.publish(topic)[0]


@EVERY
def test_a_topic_is_made_by_those_who_may_manage_it(kind: type[Client], house: House, stack: ExitStack) -> None:
    topic = f"made/{kind.name}"
    house.set(("alice", "publish", topic))
    client = alice(kind, house, stack)
    assert not client.publish(topic)[0]
    assert not house.has_topic(topic)
    house.set(("alice", "publish", topic), ("alice", "manage", f"{topic}/#"))
    assert client.publish(topic)[0]
    assert house.has_topic(topic)


@EVERY
@pytest.mark.parametrize(("mode", "action"), [("CLUSTERING", "consume"), ("BROADCASTING", "subscribe")])
def test_subscribing_needs_the_right_and_ends_with_it(
    kind: type[Client], house: House, stack: ExitStack, mode: str, action: str
) -> None:
    topic = house.topic(f"sub/{kind.name}/{mode.lower()}")
    rows = (("alice", action, f"{topic}/#"), ("boss", "publish", topic))
    house.set(*rows)
    stranger = kind(house, stack)
    taken, said = stranger.listen(topic, mode)
    assert not taken
    assert "no right" in said
    client = alice(kind, house, stack)
    assert client.listen(topic, mode)[0]
    boss = Http(house, stack, "boss", PASSWORD + "!")
    assert boss.publish(topic, "one")[0]
    assert client.hear() == "one"
    house.set(rows[1])
    assert boss.publish(topic, "two")[0]
    house.set(*rows)
    if kind in (Http, Uri):  # a webhook begins again, and a group keeps its place
        if mode == "BROADCASTING":
            assert boss.publish(topic, "two")[0]
    else:  # a subscription that was revoked is over
        client = alice(kind, house, stack)
        assert client.listen(topic, mode)[0]
        assert boss.publish(topic, "two")[0]
    while (text := client.hear()) == "one":  # a webhook whose answer had not come when the right ended gets it again
        assert kind in (Http, Uri)
    assert text == "two"


def test_a_refused_change_of_a_subscription_keeps_no_member_that_cannot_leave(house: House, stack: ExitStack) -> None:
    topic = house.topic("sub/changed")
    house.set(("alice", "consume", f"{topic}/#"), ("boss", "publish", topic))
    client, other, boss = (
        Tcp(house, stack, "alice", PASSWORD),
        Tcp(house, stack, "alice", PASSWORD),
        Http(house, stack, "boss", PASSWORD + "!"),
    )
    assert client.listen(topic) == (True, "success")
    assert "no right" in client.listen(topic, "BROADCASTING")[1]
    assert boss.publish(topic, "kept")[0]
    assert client.hear() == "kept"
    assert client.session.ask("UNSUBSCRIBE_REQUEST")["code"] == 0
    assert other.listen(topic)[0]
    for text in ("one", "two"):
        assert boss.publish(topic, text)[0]
    assert [other.hear(), other.hear()] == ["one", "two"]


@EVERY
def test_wrong_credentials_are_refused_and_delayed(kind: type[Client], house: House, stack: ExitStack) -> None:
    topic = house.topic(f"wrong/{kind.name}")
    house.set(("*", "publish", topic))
    taken, said = kind(house, stack, "alice", WRONG).publish(topic)
    assert not taken
    assert "prove nothing" in said
    assert WRONG not in said
    taken, said = kind(house, stack, "alice", PASSWORD).publish(topic)
    assert not taken
    assert "try again in" in said
    house.set(("*", "publish", topic))
    assert not kind(house, stack, "nobody", PASSWORD).publish(topic)[0]
    house.set(("*", "publish", topic))
    assert kind(house, stack, "alice", PASSWORD).publish(topic)[0]
    if kind is LegacyGrpc or not issubclass(kind, Grpc):
        bad = kind(house, stack, "bob", "", TOKEN.secret[:-1] + ("a" if TOKEN.secret[-1] != "a" else "b"))
        assert not bad.publish(topic)[0]
    assert kind(house, stack, "bob", "", TOKEN.secret).publish(topic)[0]
    logins = {(one["kind"], one["principal"].partition("#")[0]) for one in house.audit() if "login" in one["kind"]}
    assert {("login", "alice"), ("login", "bob"), ("login-refused", "alice"), ("login-refused", "unknown")} <= logins
    assert ("login-refused", "nobody") not in logins


@EVERY
def test_a_principal_that_is_removed_may_nothing_more(kind: type[Client], house: House, stack: ExitStack) -> None:
    topic = house.topic(f"gone/{kind.name}")
    rows = (("alice", "consume", f"{topic}/#"), ("*", "publish", topic))
    house.set(*rows)
    client = alice(kind, house, stack)
    assert client.listen(topic)[0]
    assert client.publish(topic, "one")[0]
    assert client.hear() == "one"
    house.set(*rows, principals=PRINCIPALS[1:])
    if isinstance(client, Tcp):
        assert client.session.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"
        assert client.session.is_closed()
    else:
        assert not client.publish(topic)[0]
    if isinstance(client, Grpc):
        with pytest.raises(grpc.RpcError) as raised:
            client.listening.next()
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    house.set(*rows)
    if isinstance(client, Http):  # its webhooks are forgotten: who has the name later does not inherit them
        assert Http(house, stack, "bob", "", TOKEN.secret).publish(topic, "two")[0]
        assert house.live.call(lambda: _webhooks(house, topic)) == []


def test_nobody_but_who_was_asked_answers_a_request(house: House, stack: ExitStack) -> None:
    topic = house.topic("ask/forged")
    house.set(("alice", "*", f"{topic}/#"), ("bob", "publish", f"{topic}/#"))
    responder, asking = alice(Tcp, house, stack), Http(house, stack, "bob", "", TOKEN.secret)
    assert isinstance(responder, Tcp)
    assert responder.listen(topic, kind="SYNC")[0]
    fields = {"producergroup": "P", "topic": topic, "content": "question", "bizseqno": "1", "uniqueid": "2"}
    form = urlencode(fields).encode()
    asking.web._responses.expect("POST")
    asking.web.send(request_of("POST", "/", form, **IDENTITY, code="101", **asking.proof))
    header, body = responder.session.next()
    assert (header["cmd"], body["body"]) == ("REQUEST_TO_CLIENT", "question")
    forger = Http(house, stack, "boss", PASSWORD + "!")
    extensions = json.dumps({"correlation99id": body["properties"]["correlation99id"]})
    forged = {"producergroup": "P", "origtopic": topic, "content": "forged", "extFields": extensions}
    assert forger.ask("301", forged)["retCode"] == 16
    answer = {"topic": topic, "properties": body["properties"], "body": "right"}
    responder.session.send("RESPONSE_TO_SERVER", answer)
    assert json.loads(json.loads(asking.web.next().body)["retMsg"])["body"] == "right"
    house.set(("alice", "*", f"{topic}/#"))
    assert asking.ask("101", fields)["retCode"] == 22  # a request is a publication


def test_a_batch_is_published_whole_or_not_at_all(house: House, stack: ExitStack) -> None:
    mine, other = house.topic("batch/mine"), house.topic("batch/other")
    house.set(("alice", "publish", mine), ("boss", "*", "#"))
    client = alice(Http, house, stack)
    assert isinstance(client, Http)
    items = [{"topic": mine, "msg": "1"}, {"topic": other, "msg": "2"}]
    assert client.ask("102", {"producerGroup": "P", "contents": json.dumps(items)})["retCode"] == 22
    assert house.live.call(lambda: house.live.server.broker.topic(mine).partition(0).high_watermark) == 0
    legacy = alice(LegacyGrpc, house, stack)
    assert isinstance(legacy, Grpc)
    assert legacy.mesh.code(legacy.mesh.ask("batchPublish", legacy.mesh.batch(other, "1"))) == "20"
    mesh = alice(EventsGrpc, house, stack).mesh  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError) as raised:
        mesh.ask("requestReply", mesh.publication(other, "1"))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert legacy.mesh.ask("requestReply", legacy.mesh.publication(other, "1")).content.count('"20"') == 1


def test_topics_are_made_and_removed_by_those_who_may(house: House, stack: ExitStack) -> None:
    client = alice(Uri, house, stack)
    assert isinstance(client, Uri)
    body = json.dumps({"topic": "uri/made"}).encode()

    def change(action: str) -> int:
        answer = client.web.ask("POST", f"/eventmesh/topic/{action}", body, **client.proof)
        return int(json.loads(answer.body)["retCode"])

    assert change("create") == 22
    house.set(("alice", "manage", "uri/made/#"))
    assert change("create") == 0
    house.set(("!alice", "manage", "uri/made/#"))
    assert change("delete") == 22
    house.set(("alice", "manage", "uri/made/#"))
    assert change("delete") == 0


def test_webhooks_belong_to_their_principal(house: House, stack: ExitStack) -> None:
    topic = house.topic("hooks/own")
    house.set(("alice", "consume", f"{topic}/#"), ("bob", "consume", f"{topic}/#"), ("*", "publish", topic))
    client, other = alice(Http, house, stack), Http(house, stack, "bob", "", TOKEN.secret)
    assert isinstance(client, Http)
    assert client.listen(topic)[0]
    assert client._hook is not None
    fields = {"topic": topic, "url": client._hook.url, "consumerGroup": f"g-{topic}"}
    assert other.ask("207", fields)["retCode"] == 0
    seen = other.web.ask("GET", "/eventmesh/subscrition/query", b"", **other.proof)
    assert json.loads(json.loads(seen.body)["retMsg"]) == []
    assert client.publish(topic, "still")[0]
    assert client.hear() == "still"
    (entry,) = _webhooks(house, topic)
    assert entry.principal == "alice"
    assert client.ask("207", fields)["retCode"] == 0
    assert _webhooks(house, topic) == []


def test_a_webhook_whose_principal_is_removed_before_it_agrees_is_not_kept(
    house: House, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = house.topic("hooks/late")
    rows = (("bob", "consume", f"{topic}/#"),)
    house.set(*rows)
    removed = threading.Event()

    class Asked(list[str | None]):
        def append(self, origin: str | None) -> None:
            house.set(*rows, principals=(PRINCIPALS[0], PRINCIPALS[2]))
            removed.set()

    hub = house.live.server.services["eventmesh"].webhooks.hub  # type: ignore[attr-defined]
    monkeypatch.setattr(hub, "settings", msgspec.structs.replace(hub.settings, webhook_consent=True))
    client = Http(house, stack, "bob", "", TOKEN.secret)
    client._hook = stack.enter_context(Hook())
    client._hook.asked = Asked()
    assert not client.listen(topic)[0]
    assert removed.is_set()
    assert _webhooks(house, topic) == []


@EVERY
def test_two_tenants_with_topics_and_groups_of_one_name_do_not_meet(
    kind: type[Client], house: House, stack: ExitStack
) -> None:
    topic = f"tenancy-{kind.name}"
    tenants = tuple(msgspec.structs.replace(one, root=f"tenants/{one.name}") for one in PRINCIPALS)
    house.set(("*", "*", "tenants/#"), principals=tenants)
    first, second = alice(kind, house, stack), kind(house, stack, "boss", PASSWORD + "!")
    for client in (first, second):
        assert client.listen(topic)[0]
    assert first.publish(topic, "of alice")[0]
    assert second.publish(topic, "of boss")[0]
    assert (first.hear(), second.hear()) == ("of alice", "of boss")
    assert house.has_topic(f"tenants/alice/{topic}")
    assert not house.has_topic(topic)
    taken, said = first.publish("$state", "x")
    assert not taken
    assert "tenants" not in said
    if isinstance(first, Http):
        assert isinstance(second, Http)
        assert first._hook is not None
        seen = first.web.ask("GET", "/eventmesh/subscrition/query", b"", **first.proof)
        assert [one["topic"] for one in json.loads(json.loads(seen.body)["retMsg"])] == [topic]
        fields = {"topic": topic, "url": first._hook.url, "consumerGroup": f"g-{topic}"}
        assert second.ask("207", fields)["retCode"] == 0  # that is no webhook of the second one
        assert len(_webhooks(house, f"tenants/alice/{topic}")) == 1
        assert first.ask("207", fields)["retCode"] == 0
        assert _webhooks(house, f"tenants/alice/{topic}") == []


@EVERY
def test_a_failure_names_no_root(kind: type[Client], house: House, stack: ExitStack) -> None:
    tenants = tuple(msgspec.structs.replace(one, root=f"tenants/{one.name}") for one in PRINCIPALS)
    house.set(("alice", "publish", "tenants/alice/other"), principals=tenants)
    client = alice(kind, house, stack)
    for taken, said in (client.publish("orders"), client.listen("orders")):
        assert not taken
        assert "orders" in said
        assert "tenants" not in said


def test_the_admin_paths_are_for_administrators(house: House, stack: ExitStack) -> None:
    house.set(("alice", "*", "#"))
    web = stack.enter_context(HttpClient(house.addresses["eventmesh-admin"]))

    def ask(**proof: str) -> int:
        return web.ask("GET", "/client/tcp", b"", **proof).status

    assert ask() == 403
    assert ask(username="alice", passwd=WRONG) == 401
    assert ask(username="alice", passwd=PASSWORD) == 429
    assert ask(username="boss", passwd=PASSWORD + "!") == 200
    house.set(("!alice", "admin", "#"), ("alice", "publish", "#"))
    assert ask(username="alice", passwd=PASSWORD) == 403


def test_no_secret_is_stored_logged_or_handed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stack: ExitStack
) -> None:
    caplog.set_level(logging.DEBUG)
    heard: list[str] = []
    with LiveServer(config_of(tmp_path)) as live:
        house = House(live)
        topic = house.topic("secret/free")
        house.set(("*", "*", f"{topic}/#"))
        listeners = [kind(house, stack, "alice", PASSWORD) for kind in (Tcp, Http, LegacyGrpc, EventsGrpc)]
        for listener in listeners:
            assert listener.listen(topic, "BROADCASTING")[0]
        received: list[str] = []
        house.live.call(
            lambda: live.server.broker.subscribe(
                exactly(topic), lambda events: received.extend(map(repr, events)), SERVER
            )
        )
        count = 0
        for kind in (Tcp, Http, Uri, LegacyGrpc, EventsGrpc):
            assert kind(house, stack, "alice", PASSWORD).publish(topic)[0]
            assert kind(house, stack, "bob", "", TOKEN.secret).publish(topic)[0]
            assert not kind(house, stack, "boss", WRONG).publish(topic)[0]
            house.live.call(live.server.proofs.guessing.clear)
            count += 2
        tcp = listeners[0]
        assert isinstance(tcp, Tcp)
        more = {"Passwd": PASSWORD, "TOKEN": TOKEN.secret, "password": PASSWORD, "kept": "yes"}
        message = {"topic": topic, "properties": more, "headers": more, "body": "x"}
        assert tcp.session.ask("ASYNC_MESSAGE_TO_SERVER", message, **more)["code"] == 0
        for _ in range(count + 1):
            heard.append(str(tcp.session.push()))
            hook = listeners[1]
            assert isinstance(hook, Http)
            assert hook._hook is not None
            heard.append(str(hook._hook.next()))
            heard += [str(one.listening.next()) for one in listeners[2:] if isinstance(one, Grpc)]
        assert len(received) == count + 1
        assert "yes" in received[-1]
        heard += [*received, json.dumps(house.audit()), generate_latest(live.server.metrics.registry).decode()]
        stack.close()
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert not [text for text in heard if secret in text]
        assert secret not in caplog.text
        assert not [content for content in stored if secret.encode() in content]


def test_the_gate_can_be_turned_on_while_clients_are_connected(tmp_path: Path, stack: ExitStack) -> None:
    with LiveServer(config_of(tmp_path, "off")) as live:
        house = House(live)
        house.set(("alice", "consume", "late/#"), ("anonymous", "consume", "open/#"), ("*", "publish", "#"))
        tried, silent = Tcp(house, stack, "alice", WRONG), Tcp(house, stack)
        assert tried.listen("late")[0]  # nobody looks at credentials
        assert silent.listen("late", "BROADCASTING")[0]
        assert silent.listen("open")[0]
        hook = Http(house, stack, "alice", WRONG)
        assert hook.listen("late")[0]
        stream = LegacyGrpc(house, stack, "alice", WRONG)
        assert stream.listen("late", "BROADCASTING")[0]
        house.live.run(lambda: live.server.gate.enable(SERVER))
        with pytest.raises(grpc.RpcError) as raised:
            stream.listening.next()
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert tried.session.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"
        assert tried.session.is_closed()
        right = alice(Tcp, house, stack)
        assert right.listen("late")[0]
        assert right.publish("late", "one")[0]
        assert right.hear() == "one"
        assert silent.publish("open", "two")[0]
        assert silent.hear() == "two"  # and not what was published to "late"
        assert not hook.publish("late")[0]
        assert hook._hook is not None
        assert hook._hook.pushes.empty()
        stack.close()


def test_a_password_that_is_replaced_ends_the_sessions_that_it_opened(house: House, stack: ExitStack) -> None:
    topic = house.topic("rotated/a")
    house.set(("alice", "*", f"{topic}/#"))
    old, web = alice(Tcp, house, stack), alice(Http, house, stack)
    assert old.publish(topic)[0]
    assert web.publish(topic)[0]
    house.set(("alice", "*", f"{topic}/#"), principals=(Principal("alice", credentials=(make_password(WRONG, 1),)),))
    assert isinstance(old, Tcp)
    assert old.session.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"
    assert old.session.is_closed()
    assert not web.publish(topic)[0]
    house.live.call(house.live.server.proofs.guessing.clear)
    assert Http(house, stack, "alice", WRONG).publish(topic)[0]


def test_a_full_queue_of_passwords_is_overload(house: House, stack: ExitStack) -> None:
    topic = house.topic("overload/a")
    house.set(("*", "publish", topic))
    passwords, go = house.live.server.proofs.passwords, threading.Event()
    stack.callback(go.set)
    house.live.call(lambda: passwords._threads.submit(go.wait) and None)
    first = [alice(kind, house, stack) for kind in (Http, Http)]
    web = first[0]
    assert isinstance(web, Http)
    fields = urlencode({"producergroup": "P", "topic": topic, "content": "x", "bizseqno": "1", "uniqueid": "2"})
    web.web._responses.expect("POST")
    web.web.send(request_of("POST", "/", fields.encode(), **IDENTITY, code="104", username="eve", passwd=PASSWORD))
    house.live.until(lambda: bool(passwords._running))
    house.live.call(lambda: setattr(passwords, "_waiting_max", 1))
    stack.callback(lambda: house.live.call(lambda: setattr(passwords, "_waiting_max", 64)))
    for kind in (Tcp, Http, Uri, LegacyGrpc, EventsGrpc):
        taken, said = kind(house, stack, "mallory", PASSWORD).publish(topic)
        assert not taken
        assert "too many passwords" in said
    go.set()
    assert json.loads(web.web.next().body)["retCode"] == 22


def test_the_audit_has_a_row_for_each_address(house: House) -> None:
    audit = house.live.server.gate.audit
    house.live.call(lambda: [audit.login("carol", f"eventmesh:10.0.0.{number % 2}") for number in range(4)] and None)
    rows = [(one["source"], one.get("count", 1)) for one in house.audit() if one["principal"] == "carol"]
    assert sorted(rows) == [("eventmesh:10.0.0.0", 2), ("eventmesh:10.0.0.1", 2)]


def test_a_client_certificate_proves_a_principal(tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path / "certificates")
    cert, key = authority.issue("server")
    tls = TlsSettings(
        cert_file=str(cert), key_file=str(key), client_ca_file=str(authority.path), client_certificates="optional"
    )
    cert, key = authority.issue("client7")
    context = ssl.create_default_context(cafile=str(authority.path))
    context.load_cert_chain(cert, key)
    principals = (Principal("dora", credentials=(make_client_name("cn", "client7", 0),)),)
    with LiveServer(msgspec.structs.replace(config_of(tmp_path / "data"), tls=tls)) as live:
        house = House(live)
        topic = house.topic("tls/a")
        house.set(("dora", "publish", topic), principals=principals)
        mesh = MeshClient(house.addresses["eventmesh-tcp"], NEW, context)
        stack.enter_context(mesh)
        mesh.hello("pub", username="", password="")
        assert mesh.publish(topic, "x")["code"] == 0
        web = Http(house, stack)
        web._web = stack.enter_context(HttpClient(house.addresses["eventmesh-http"], context))
        assert web.publish(topic)[0]
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes(), key.read_bytes(), cert.read_bytes())
        address = house.addresses["eventmesh-grpc"].replace("127.0.0.1", "localhost")
        for package in (Legacy, Events):
            channel = stack.enter_context(grpc.secure_channel(address, credentials))
            made: Any = package(channel, "u", "")
            assert made.code(made.ask("publish", made.publication(topic, "x"))) == "0"
        house.set(("dora", "publish", topic), principals=())
        assert mesh.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"
        assert not web.publish(topic)[0]
        stack.close()


def _webhooks(house: House, topic: str) -> list[Any]:
    service: Any = house.live.server.services["eventmesh"]
    return [entry for entry in service.webhooks.entries() if entry.topic == topic]
