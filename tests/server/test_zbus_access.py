"""zbus asks the gate: each command allowed, denied, narrowed and revoked, over real sockets."""

import contextlib
import json
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import AccessSettings, TlsSettings, ZbusSettings
from babelbus.core.access import ACTIONS, SERVER, Effect, Principal, Row
from babelbus.core.access.audit import AUDIT_TOPIC, AuditRecord
from babelbus.core.groups import GroupSettings
from babelbus.core.receipt import Promise
from babelbus.identities.credential import Credential
from babelbus.identities.directory import make_client_name
from babelbus.identities.vault import make_api_key
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.records.columns import decode_chunk, iterate
from babelbus.wire.websocket import encode_texts
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.server import LiveServer, configure
from tests.support.signing import sign_frame, sign_request
from tests.support.zbus import HttpClient, SocketClient, command, request_of

NOW = SystemClock().now_ms()


class Bus:
    """A server whose gate is on, and the table of the test."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self.gate = live.server.gate
        self.broker = live.server.broker
        self.secrets: dict[str, str] = {}
        self._credentials: dict[str, Credential] = {}
        for name in ("alice", "bob"):
            issued = make_api_key(live.server.proofs.vault, NOW, key=f"key-{name}")
            self.secrets[name], self._credentials[name] = issued.secret, issued.credential

    def set(self, *rows: tuple[str, ...], names: tuple[str, ...] = ("alice", "bob")) -> None:
        """Replace the table; the effect of a row of four is to deny."""
        made = [Row(row[0], row[1], row[2], Effect.DENY if len(row) > 3 else Effect.ALLOW) for row in rows]
        people = [Principal(name, (), (self._credentials[name],)) for name in names]
        self.live.call(lambda: self.gate.import_entries("test", [*people, *made]))

    def make(self, mq: str = "Q", *channels: str) -> None:
        """Make an MQ, anew and for the server, with channels of zbus."""
        if self.broker.has_topic(mq):
            self.live.call(lambda: self.broker.remove_topic(mq, principal=SERVER))
        self.live.call(lambda: self.broker.create_topic(mq, 1, {"engine": "disk"}, principal=SERVER))
        settings = GroupSettings(filter_kind="zbus")
        for channel in channels:
            self.live.call(partial(self._make_channel, mq, channel, settings))

    def _make_channel(self, mq: str, channel: str, settings: GroupSettings) -> Promise:
        return self.broker.groups.create(mq, channel, settings, principal=SERVER).saved

    def join(self, name: str | None = None) -> "Client":
        """Open a WebSocket for a principal."""
        return Client(self.live.server.addresses["zbus"], name, self.secrets.get(name or "", ""))

    def http(self, port: str = "zbus") -> HttpClient:
        """Open a connection for HTTP."""
        return HttpClient(self.live.server.addresses[port])

    def audit(self) -> list[AuditRecord]:
        """The records of the audit."""

        async def read() -> list[AuditRecord]:
            written = self.gate.audit.flush()
            if written is not None:
                await written.wait()
            log = self.broker.topic(AUDIT_TOPIC).partition(0).log
            data = log.read(log.first_offset, 2**24, log.next_offset).data
            return [msgspec.json.decode(one.payload or b"", type=AuditRecord) for one in iterate(decode_chunk(data))]

        return self.live.run(read)


class Client(SocketClient):
    """A WebSocket client that signs its messages if it has a name."""

    def __init__(
        self, address: str, name: str | None = None, secret: str = "", context: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(address, context)
        self._name, self._secret = name, secret

    def sign(self, message: dict[str, Any]) -> bytes:
        text = json.dumps(message).encode()
        if self._name is None:
            return text
        return encode_message(sign_frame(decode_message(text), f"key-{self._name}", self._secret))

    def say(self, cmd: str, body: Any = None, **headers: Any) -> None:
        self.send(encode_texts([self.sign(command(cmd, body, **headers))], mask=True))

    def status(self, cmd: str, body: Any = None, **headers: Any) -> int:
        """Send a command, and give the status of its answer."""
        found = self.do(cmd, body, **headers)["status"]
        assert isinstance(found, int)
        return found


def enforcing(folder: Path, mode: str = "enforce", tls: TlsSettings | None = None, **zbus: Any) -> LiveServer:
    config = configure(folder, zbus=ZbusSettings(port=0, **zbus), tls=tls)
    return LiveServer(msgspec.structs.replace(config, access=AccessSettings(mode=mode)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bus]:
    with enforcing(tmp_path_factory.mktemp("bus"), monitor_port=0, rpc_timeout_seconds=SAFETY_NET_SECONDS) as live:
        yield Bus(live)


@pytest.fixture
def bus(shared: Bus) -> Bus:
    shared.live.call(shared.live.server.proofs.guessing.clear)
    shared.set()
    shared.make("Q", "C")
    return shared


# -- each command with each right --------------------------------------------------------------------------------------

BIND = [{"url": "/Q/x", "mq": "Q"}]
COMMANDS: dict[str, tuple[str, Any, dict[str, Any], set[str]]] = {
    "pub": ("pub", "x", {}, {"publish"}),
    "sub": ("sub", None, {"channel": "C"}, {"consume"}),
    "take": ("take", None, {"channel": "C"}, {"consume"}),
    "create what is there": ("create", None, {}, {"publish", "consume", "manage"}),
    "create a channel": ("create", None, {"channel": "new"}, {"consume"}),
    "create a channel that is there": ("create", None, {"channel": "C"}, {"consume", "manage"}),
    "set a mask": ("create", None, {"mqMask": 1}, {"manage"}),
    "set the mask of a channel": ("create", None, {"channel": "C", "channelMask": 1}, {"manage"}),
    "set the filter of a channel": ("create", None, {"channel": "C", "filter": "a"}, {"manage"}),
    "move a channel": ("create", None, {"channel": "C", "offset": 0}, {"manage"}),
    "remove a channel": ("remove", None, {"channel": "C"}, {"manage"}),
    "remove": ("remove", None, {}, {"manage"}),
    "query": ("query", None, {}, {"consume", "manage"}),
    "query a channel": ("query", None, {"channel": "C"}, {"consume", "manage"}),
    "bind": ("bind", BIND, {}, {"consume", "manage"}),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_needs_its_right_and_no_other_right_will_do(bus: Bus, case: str) -> None:
    cmd, body, headers, granting = COMMANDS[case]
    for action in (*sorted(ACTIONS), None):
        bus.make("Q", "C")
        # A row of another principal, and of this principal for another MQ, grants nothing here.
        rows = [] if action is None else [("alice", action, "Q/#")]
        bus.set(*rows, ("bob", "*", "#"), ("alice", "*", "other/#"))
        with bus.join("alice") as client:
            found = client.do(cmd, body, mq="Q", **headers)
        if action in granting:
            assert found["status"] in (200, 604), (action, found)
        else:
            assert found["status"] == 403, (action, found)
            assert "(refusal " in found["body"]


def test_an_mq_is_created_by_who_may_manage_its_name_and_then_has_an_owner(bus: Bus) -> None:
    bus.set(("alice", "manage", "mine/#"), ("alice", "consume", "#"))
    with bus.join("alice") as client:
        assert client.status("create", mq="mine-not") == 403
        assert client.status("create", mq="mine", channel="C") == 200
    assert bus.live.call(lambda: bus.broker.topic("mine").owner) == "alice"
    bus.set(("alice", "consume", "#"), ("bob", "consume", "#"))
    with bus.join("bob") as other, bus.join("alice") as client:
        assert other.status("remove", mq="mine", channel="C") == 403
        assert other.status("remove", mq="mine") == 403
        assert client.status("create", mq="mine", channel="C", offset=0) == 200
        assert client.status("remove", mq="mine") == 200
        assert client.status("create", mq="mine") == 403


def test_query_shows_what_the_principal_may_see(bus: Bus) -> None:
    bus.make("P")
    bus.set(("alice", "consume", "Q/#"), ("bob", "consume", "#"), ("bob", "manage", "Q/#"))
    with bus.join("alice") as client, bus.join("bob") as other:
        assert other.status("sub", mq="Q", channel="C") == 200
        assert [one["name"] for one in client.do("query")["body"]] == ["Q"]
        assert client.do("query", mq="Q")["body"]["channels"][0]["subscriptions"] == []
        assert len(other.do("query", mq="Q")["body"]["channels"][0]["subscriptions"]) == 1
        assert {"P", "Q"} <= {one["name"] for one in other.do("query")["body"]}


@pytest.mark.parametrize(
    "rows", [[("alice", "publish", "Q/a")], [("alice", "publish", "Q/#"), ("alice", "write-state", "Q/b", "deny")]]
)
def test_a_message_under_a_subject_below_the_mq_needs_the_right_to_that_subject(
    bus: Bus, rows: list[tuple[str, ...]]
) -> None:
    bus.live.call(lambda: bus.broker.alter_topic("Q", {"retain": "last"}, principal=SERVER))
    bus.set(*rows)
    with bus.join("alice") as client:
        texts = [client.sign(command("pub", "x", mq="Q", ce_subject=subject)) for subject in ("Q/a", "Q/b", "Q/a")]
        client.send(encode_texts(texts, mask=True))
        assert [client.next()["status"] for _ in texts] == [200, 403, 200]


def test_unsigned_messages_are_of_the_principal_anonymous_in_runs_too(bus: Bus) -> None:
    with bus.join() as client, bus.http() as http:
        assert client.status("pub", "x", mq="Q") == 403
        assert http.do("pub", b"x", mq="Q").status == 403
        bus.set(("anonymous", "publish", "Q/#"))
        client.say_all([command("pub", "x", mq="Q", id=str(number)) for number in range(100)])
        assert {client.next()["status"] for _ in range(100)} == {200}
        assert http.do("pub", b"x", mq="Q").status == 200
        bus.set()
        client.say_all([command("pub", "x", mq="Q", id=str(number)) for number in range(100)])
        assert {client.next()["status"] for _ in range(100)} == {403}
        assert http.do("pub", b"x", mq="Q").status == 403
        assert http.ask("GET", "/?cmd=pub&mq=Q&body=x", host="localhost").status == 403


def test_one_connection_may_be_several_principals_each_with_its_own_rights(bus: Bus) -> None:
    bus.set(("alice", "publish", "Q/#"), ("bob", "consume", "Q/#"))
    with bus.join("alice") as client, bus.join("bob") as other, bus.join() as nobody:
        texts = []
        for who, cmd in ((client, "pub"), (other, "pub"), (nobody, "pub"), (client, "pub"), (other, "take")):
            texts.append(who.sign(command(cmd, "x" if cmd == "pub" else None, mq="Q", channel="C")))
        client.send(encode_texts(texts, mask=True))
        assert [client.next()["status"] for _ in texts] == [200, 403, 403, 200, 200]


def test_a_key_that_is_unknown_or_a_wrong_signature_is_refused_and_stands_in_the_audit(bus: Bus) -> None:
    bus.set(("alice", "publish", "#"))
    with Client(bus.live.server.addresses["zbus"], "alice", "wrong") as client:
        assert client.do("pub", "x", mq="Q")["body"] == "signature mismatched"
    with Client(bus.live.server.addresses["zbus"], "mallory", "x") as client:
        assert client.do("pub", "x", mq="Q")["body"] == "apiKey not exists"
    bus.live.call(bus.live.server.proofs.guessing.clear)
    with bus.join("alice") as client, bus.join("bob") as other:
        client.do("pub", "x", mq="Q")
        client.do("pub", "x", mq="Q")
        refused = other.do("pub", "x", mq="Q")["body"]
    records = bus.audit()
    found = {(one.kind, one.principal, one.reason) for one in records}
    assert ("login", "alice", "") in found
    assert ("login-refused", "key-alice", "signature mismatched") in found
    [unknown] = [one.principal for one in records if one.reason == "apiKey not exists"]
    assert unknown.startswith("unknown#")  # it may be a secret in the wrong field
    [refusal] = [one for one in records if one.id and one.id in refused]
    assert (refusal.kind, refusal.principal, refusal.action, refusal.subject) == ("refusal", "bob", "publish", "Q")
    assert not any(secret in str(record) for record in records for secret in bus.secrets.values())


def test_a_connection_counts_for_the_quota_of_its_principal(bus: Bus) -> None:
    with bus.join("alice") as client:
        client.do("query")
        names = bus.live.call(lambda: [one._session.principal for one in bus.live.connections if one._session])
        assert "alice" in names


# -- revocation --------------------------------------------------------------------------------------------------------


def members(bus: Bus, channel: str = "C") -> int:
    return bus.live.call(lambda: len(bus.broker.groups.get("Q", channel).members))


def test_a_principal_that_loses_the_right_loses_its_channels_and_no_other(bus: Bus) -> None:
    bus.make("P", "C")
    bus.set(("alice", "consume", "#"))
    with bus.join("alice") as client:
        assert client.status("sub", mq="Q", channel="C") == 200
        assert client.status("sub", mq="P", channel="C") == 200
        assert members(bus) == 1
        bus.set(("alice", "consume", "P/#"), ("bob", "publish", "#"))
        assert members(bus) == 0
        with bus.join("bob") as other:
            assert other.status("pub", "lost", mq="Q") == 200
            assert other.status("pub", "still", mq="P") == 200
        assert client.next()["body"] == "still"
        assert client.status("sub", mq="Q", channel="C") == 403
        # A channel that is made again does not take who has lost the right.
        bus.live.call(lambda: bus.broker.groups.remove("Q", "C", principal=SERVER))
        bus.live.call(lambda: bus.broker.groups.create("Q", "C", principal=SERVER).saved)
        assert members(bus) == 0


def test_a_principal_that_is_removed_loses_its_connections(bus: Bus) -> None:
    bus.set(("alice", "consume", "#"))
    with bus.join("alice") as client, bus.join("bob") as other:
        assert client.status("sub", mq="Q", channel="C") == 200
        assert other.status("query") == 200
        bus.set(("bob", "consume", "#"), names=("bob",))
        with pytest.raises(ConnectionResetError):
            client.next()
        assert other.status("query", mq="Q") == 200


def test_an_api_key_that_is_removed_proves_nothing_and_closes_what_it_has_opened(bus: Bus) -> None:
    bus.set(("alice", "consume", "#"))
    with bus.join("alice") as client:
        assert client.status("sub", mq="Q", channel="C") == 200
        bus.live.call(lambda: bus.gate.import_entries("test", [Principal("alice"), Row("alice", "consume", "#")]))
        with pytest.raises(ConnectionResetError):
            client.next()
    with bus.join("alice") as client:
        assert client.do("query", mq="Q")["body"] == "apiKey not exists"


def test_a_mask_has_the_rights_of_its_owner_when_it_is_executed(bus: Bus) -> None:
    bus.set(("alice", "manage", "Q/#"), ("alice", "consume", "Q/#"))
    with bus.join("alice") as client:
        assert client.status("create", mq="Q", mqMask=1, channel="D", channelMask=1) == 200
        assert client.status("sub", mq="Q", channel="D") == 200
        bus.set(("alice", "manage", "Q/#", "deny"), ("alice", "consume", "Q/#"))
    bus.live.until(lambda: not bus.broker.groups.get("Q", "D").members)
    assert bus.live.call(lambda: bus.broker.has_topic("Q"))
    bus.set(("alice", "manage", "Q/#"), ("alice", "consume", "Q/#"))
    with bus.join("alice") as client:
        assert client.status("sub", mq="Q", channel="D") == 200
    bus.live.until(lambda: not bus.broker.has_topic("Q"))


def test_a_mask_from_before_the_gate_has_the_rights_of_strangers(tmp_path: Path) -> None:
    with enforcing(tmp_path, "off") as live:
        bus = Bus(live)
        with bus.join() as client:
            assert client.status("create", mq="Q", mqMask=1, channel="D") == 200
        bus.set(("alice", "consume", "#"), ("anonymous", "manage", "free/#"))
        live.run(lambda: bus.gate.enable(SERVER))
        with bus.join("alice") as client:
            assert client.status("sub", mq="Q", channel="D") == 200
        live.until(lambda: not bus.broker.groups.get("Q", "D").members)
        assert ("anonymous", "manage") in [(one.principal, one.action) for one in bus.audit()]
        assert live.call(lambda: bus.broker.has_topic("Q"))
        bus.set(("alice", "consume", "#"), ("anonymous", "manage", "Q/#"))
        with bus.join("alice") as client:
            assert client.status("sub", mq="Q", channel="D") == 200
        live.until(lambda: not bus.broker.has_topic("Q"))


def test_the_gate_turned_on_asks_connections_that_are_open(tmp_path: Path) -> None:
    with enforcing(tmp_path, "off") as live:
        bus = Bus(live)
        bus.set(("alice", "consume", "#"))
        with bus.join() as client, bus.http() as http, bus.join() as other:
            assert client.status("create", mq="Q", channel="C") == 200
            assert client.status("sub", mq="Q", channel="C") == 200
            live.run(lambda: bus.gate.enable(SERVER))
            assert members(bus) == 0
            assert other.status("pub", "x", mq="Q") == 403
            assert http.do("query", mq="Q").status == 403
            assert client.status("sub", mq="Q", channel="C") == 403
            with bus.join("alice") as known:
                assert known.status("sub", mq="Q", channel="C") == 200


# -- proofs ------------------------------------------------------------------------------------------------------------


def test_a_client_certificate_is_a_principal_without_signatures(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    cert, key = authority.issue("server")
    tls = TlsSettings(
        cert_file=str(cert), key_file=str(key), client_ca_file=str(authority.path), client_certificates="optional"
    )
    with enforcing(tmp_path / "data", tls=tls) as live:
        name = make_client_name("uri", "spiffe://plant/carol", NOW)
        bus = Bus(live)
        rows = [Row("carol", "consume", "Q/#"), Row("carol", "publish", "Q/#")]
        live.call(lambda: bus.gate.import_entries("test", [Principal("carol", (), (name,)), *rows]))
        bus.make("Q", "C")
        context = authority.client_context(authority.issue("client", uris=("spiffe://plant/carol",)))
        address = live.server.addresses["zbus"]
        with Client(address, context=context) as client, Client(address, context=authority.client_context()) as nobody:
            assert client.status("pub", "x", mq="Q") == 200
            assert client.do("take", mq="Q", channel="C")["body"][0]["body"] == "x"
            assert client.status("remove", mq="Q") == 403
            assert nobody.status("pub", "x", mq="Q") == 403
            assert client.status("sub", mq="Q", channel="C") == 200
            live.call(lambda: bus.gate.import_entries("test", rows))
            with pytest.raises(ConnectionResetError):
                client.next()
        assert ("login", "carol") in {(one.kind, one.principal) for one in bus.audit()}


def test_the_keys_of_the_old_file_are_principals_with_the_role_of_a_client(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("key-dave dave's-secret\nanonymous its-secret\n")
    with enforcing(tmp_path / "data", auth_file=str(keys)) as live:
        bus = Bus(live)
        bus.set()
        bus.make("Q", "C")
        found = {
            one.name: one.roles for one, origin in live.call(bus.gate.table.principals) if origin == "zbus.auth_file"
        }
        assert found == {"key-dave": ("client",)}
        bus.secrets["dave"] = "dave's-secret"
        with bus.join("dave") as client, bus.join() as nobody, bus.join("alice") as other:
            assert client.status("pub", "x", mq="Q") == 200
            assert client.status("take", mq="Q", channel="C") == 200
            assert client.status("remove", mq="Q") == 403
            assert nobody.do("pub", "x", mq="Q")["body"] == "missing apiKey in request"
            assert other.status("pub", "x", mq="Q") == 403


def test_a_captured_message_is_refused_on_every_way_in(tmp_path: Path) -> None:
    with enforcing(tmp_path, replay_window_seconds=60) as live:
        bus = Bus(live)
        bus.make("Q", "C")
        bus.set(("alice", "publish", "Q/#"))

        def sign(number: int) -> Message:
            headers = {"cmd": "pub", "mq": "Q", "id": str(number), "content-type": "text/plain"}
            message = Message(headers, None, None, None, b"x", "text")
            return sign_request(message, "key-alice", bus.secrets["alice"], "h.cmd,h.mq,h.id,body")

        first, second = sign(1), sign(2)
        with bus.http() as http, bus.join() as client, bus.http() as again, bus.join() as other:
            assert http.ask("POST", "/", b"x", **first.headers).status == 200
            client.send(encode_texts([encode_message(second)], mask=True))
            assert client.next()["status"] == 200
            for replayed in (first, second):
                live.call(live.server.proofs.guessing.clear)
                assert again.ask("POST", "/", b"x", **replayed.headers).body == b"signature mismatched"
                for socket in (client, other):
                    socket.send(encode_texts([encode_message(replayed)], mask=True))
                    assert socket.next()["body"] == "signature mismatched"


def test_the_monitor_is_for_administrators(bus: Bus) -> None:
    def monitor() -> int:
        with bus.http("zbus-monitor") as http:
            return http.ask("GET", "/").status

    bus.set(("anonymous", "consume", "#"))
    assert monitor() == 403
    bus.set(("anonymous", "admin", "#"))
    assert monitor() == 200


def test_the_monitor_refuses_publications_that_come_together(bus: Bus) -> None:
    bus.set(("anonymous", "publish", "#"))
    publications = [command("pub", "x", mq="Q", id=str(number)) for number in range(8)]
    with bus.http("zbus-monitor") as http:
        http.send(b"".join(request_of("POST", "/", b"x", cmd="pub", mq="Q", id=str(number)) for number in range(8)))
        assert [http.next().status for _ in publications] == [403] * 8
    with Client(bus.live.server.addresses["zbus-monitor"], None, "") as client:
        client.say_all(publications)
        assert [client.next()["status"] for _ in publications] == [403] * 8
    assert bus.live.call(lambda: bus.broker.topic("Q").partition(0).high_watermark) == 0


# -- calls -------------------------------------------------------------------------------------------------------------


def call(bus: Bus, http: HttpClient, name: str = "alice") -> None:
    """Send a call of the service Q over HTTP."""
    message = Message({"id": "call"}, "/Q/plus", "GET")
    signed = sign_request(message, f"key-{name}", bus.secrets[name], "h.id,url,body")
    lines = "".join(f"{header}: {value}\r\n" for header, value in signed.headers.items())
    http.send(f"GET /Q/plus HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())


def test_a_call_needs_the_right_to_publish_and_only_who_took_it_may_answer(bus: Bus) -> None:
    bus.set(("bob", "consume", "Q/#"))
    with bus.join("bob") as service, bus.http() as http, bus.join("alice") as forger, bus.join() as nobody:
        assert service.status("sub", mq="Q", channel="C") == 200
        call(bus, http)
        refused = http.next()
        assert (refused.status, refused.body[:26]) == (403, b"no right to publish 'Q' (r")
        bus.set(("bob", "consume", "Q/#"), ("alice", "publish", "Q/#"))
        call(bus, http)
        request = service.next()["headers"]
        for other in (forger, nobody):
            answer = other.do("route", "forged", target=request["source"], id=request["id"], ack=True)
            assert (answer["status"], answer["body"][:37]) == (403, "only who took a request may answer it")
        service.say("route", "3", target=request["source"], id=request["id"])
        response = http.next()
        assert (response.status, response.body) == (200, b'"3"')


def test_an_answer_over_websocket_comes_from_who_consumes_what_the_caller_has_called(bus: Bus) -> None:
    bus.set(("bob", "consume", "Q/#"), ("alice", "publish", "Q/#"))
    with bus.join("bob") as service, bus.join("alice") as caller, bus.join() as forger:
        assert service.status("sub", mq="Q", channel="C") == 200
        caller.say("pub", "1", mq="Q", id="call", ack=False)
        request = service.next()["headers"]
        assert forger.status("route", "forged", target=request["source"], id="call", ack=True) == 403
        service.say("route", "3", target=request["source"], id="call")
        assert caller.next()["body"] == "3"


def test_urls_of_the_services_of_others_cannot_be_bound(bus: Bus) -> None:
    bus.make("P")
    bus.set(("alice", "consume", "P/#"), ("bob", "consume", "Q/#"))
    with bus.join("alice") as client, bus.join("bob") as service:
        assert service.status("bind", [{"url": "/api/q", "mq": "Q"}], mq="Q") == 200
        for url in ("/", "/Q", "/Q/admin", "/api/q/admin", "/a"):
            assert client.status("bind", [{"url": url, "mq": "P"}], mq="P") == 403, url
        assert client.status("bind", [{"url": "/api/p", "mq": "P"}], mq="P") == 200


# -- without keys: what other protocols have made ----------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Bus]:
    with enforcing(tmp_path, "off") as live:
        bus = Bus(live)
        bus.make("Q")  # as a client of jebp makes it
        live.call(lambda: bus.broker.groups.create("Q", "work", GroupSettings(ack="explicit"), principal=SERVER).saved)
        with bus.http() as http:
            for number in range(5):
                assert http.do("pub", b"%d" % number, mq="Q").status == 200
        yield bus


def lag(bus: Bus) -> int:
    return bus.live.call(lambda: bus.broker.groups.get("Q", "work").info().lag)


def test_a_topic_of_another_protocol_cannot_be_removed_also_by_a_mask(plain: Bus) -> None:
    with plain.join() as client, plain.http() as http:
        assert client.status("remove", mq="Q") == 403
        assert http.ask("GET", "/?cmd=remove&mq=Q").status == 403
        for mask in (1, 2, 3):
            assert client.status("create", mq="Q", mqMask=mask) == 403
        assert client.status("create", mq="Q", channel="mine", channelMask=1) == 200
        assert client.status("sub", mq="Q", channel="mine") == 200
    plain.live.until(lambda: plain.broker.groups.find("Q", "mine") is None)
    assert plain.live.call(lambda: plain.broker.has_topic("Q"))


def test_a_group_of_another_protocol_cannot_be_removed_or_moved_and_is_consumed_together(plain: Bus) -> None:
    with plain.join() as client:
        assert client.status("remove", mq="Q", channel="work") == 403
        for change in ({"offset": 3}, {"filter": "a"}, {"channelMask": 1}):
            assert client.status("create", mq="Q", channel="work", **change) == 403
        assert lag(plain) == 5
        assert client.status("create", mq="Q", channel="work") == 200
        assert client.status("take", mq="Q", channel="work", window=2) == 200
        assert lag(plain) == 3  # what was handed out here, and nothing else


def test_a_mask_that_was_noted_for_a_topic_of_another_protocol_removes_nothing(plain: Bus) -> None:
    hub = plain.live.server.services["zbus"].hub  # type: ignore[attr-defined]
    topic_id = plain.live.call(lambda: plain.broker.topic("Q").id)
    noted = msgspec.structs.replace(hub.entry(plain.broker.topic("Q")), mask=1, topic_id=topic_id)
    plain.live.run(lambda: hub._book.put("Q", noted))
    with plain.join() as client:
        assert client.status("create", mq="Q", channel="mine") == 200
        assert client.status("sub", mq="Q", channel="mine") == 200
    plain.live.until(lambda: not plain.broker.groups.get("Q", "mine").members)
    with plain.join() as client:
        assert client.status("query", mq="Q") == 200


def test_an_answer_of_a_client_that_was_not_handed_the_call_is_refused_without_keys_too(plain: Bus) -> None:
    with plain.join() as service, plain.join() as forger, plain.http() as http:
        assert service.status("create", mq="Rpc", channel="C") == 200
        assert service.status("sub", mq="Rpc", channel="C") == 200
        http.send(b"GET /Rpc/plus HTTP/1.1\r\nhost: localhost\r\n\r\n")
        request = service.next()["headers"]
        assert forger.status("route", "forged", target=request["source"], id=request["id"]) == 403
        service.say("route", "3", target=request["source"], id=request["id"])
        assert http.next().body == b'"3"'


def test_a_service_over_plain_http_takes_and_answers_on_connections_of_its_own(plain: Bus) -> None:
    with plain.join() as forger, plain.http() as http:
        assert forger.status("create", mq="Rpc", channel="C") == 200
        http.send(b"GET /Rpc/plus HTTP/1.1\r\nhost: localhost\r\n\r\n")
        taken: list[Any] = []
        while not taken:
            with plain.http() as taker:
                taken = json.loads(taker.do("take", mq="Rpc", channel="C").body)
        request = taken[0]["headers"]
        with contextlib.closing(plain.http()) as answerer:
            headers = {"target": request["source"], "id": request["id"], "content_type": "text/plain"}
            assert answerer.do("route", b"3", **headers).status == 200
        assert http.next().body == b"3"
