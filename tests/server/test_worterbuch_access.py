"""Wörterbuch asks the gate on real sockets: WebSocket, REST, server-sent events, files, and who came through TLS."""

import gzip
import http.client
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.config import AccessSettings, TlsSettings, WorterbuchSettings
from babelbus.core.access import ANONYMOUS, SERVER, Effect, Principal, Row
from babelbus.core.access.table import edits_for
from babelbus.identities.directory import make_certificate, make_client_name
from babelbus.protocols.worterbuch.service import WorterbuchService
from tests.server.test_identities import secret_file
from tests.server.test_worterbuch import Lines
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.jebp import GUEST, Caller, create_topic, said
from tests.support.jebp import subscribe as subscribe_topics
from tests.support.server import LiveServer, configure
from tests.support.web import SECRET, Events, Web, WebSocket, token
from tests.support.worterbuch import ack, delete, get, named, pdelete, pget, psubscribe, publish, put, subscribe

JSON = {"content_type": "application/json"}


class Served:
    """A live server and the rows of its table."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self._rows: list[Row] = []

    @property
    def hub(self) -> Any:
        service = self.live.server.services["worterbuch"]
        assert isinstance(service, WorterbuchService)
        return service.hub

    def grant(self, *rows: tuple[str, ...], add: tuple[Principal, ...] = ()) -> None:
        """Replace all rows."""
        made = [Row(who, action, pattern, Effect(*effect or ("allow",))) for who, action, pattern, *effect in rows]
        gone = [row for row in self._rows if row not in made]
        self.live.run(lambda: self.live.server.gate.change(edits_for([*made, *add], gone), SERVER))
        self._rows = made

    def set(self, **values: str) -> None:
        """Set values as the server itself."""

        def do() -> None:
            for key, value in values.items():
                self.hub.state.set(key.replace("__", "/"), value.encode())
            self.hub.commit()

        self.live.call(do)

    def find(self, key: str) -> bytes | None:
        found: bytes | None = self.live.call(lambda: self.hub.state.find(key))
        return found


def serve(folder: Path, *, mode: str = "enforce", tls: TlsSettings | None = None, **options: Any) -> LiveServer:
    made = configure(folder / "data", worterbuch=WorterbuchSettings(port=0, tcp_port=0, **options), tls=tls)
    return LiveServer(msgspec.structs.replace(made, access=AccessSettings(mode=mode)))  # type: ignore[arg-type]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as live:
        yield Served(live)


REQUESTS = [
    ("subscribe", get(1, "p/x")),
    ("subscribe", pget(1, "p/?")),
    ("subscribe", subscribe(1, "p/x")),
    ("subscribe", psubscribe(1, "p/?")),
    ("write-state", put(1, "p/x", 1)),
    ("write-state", delete(1, "p/x")),
    ("write-state", pdelete(1, "p/?")),
    ("write-state", named("lock", 1, "p/x")),
    ("publish", publish(1, "p/x", 1)),
]


@pytest.mark.parametrize("transport", ["TCP", "WS"])
def test_each_request_over_sockets_is_refused_and_granted(served: Served, transport: str) -> None:
    client: Any = Lines(served.live) if transport == "TCP" else WebSocket(served.live)

    def ask(message: object) -> Any:
        if transport == "WS":
            return client.ask(message)
        client.socket.sendall(json.dumps(message).encode() + b"\n")
        return client.next()

    with client:
        for action, request in REQUESTS:
            served.set(p__x="1")
            served.grant((ANONYMOUS, action, "q/#"))
            error = ask(request)["err"]
            assert (error["transactionId"], error["errorCode"]) == (1, 14)
            assert served.find("p/x") == b"1"
        for action, request in REQUESTS:
            served.set(p__x="1")
            served.grant((ANONYMOUS, action, "p/#"))
            name = next(iter(request))
            answer = ask(request)
            assert "err" not in answer, answer
            if name == "lock":  # a client that loses the right to a lock is disconnected
                assert ask(named("releaseLock", 1, "p/x")) == ack(1)
            if "ubscribe" in name:
                assert "err" not in client.next()
                assert ask({"unsubscribe": {"transactionId": 1}}) == ack(1)


def test_each_request_over_rest_is_refused_and_granted(served: Served) -> None:
    requests = [
        ("subscribe", "GET", "get/p/x", None),
        ("subscribe", "GET", "pget/p/%3F", None),
        ("write-state", "POST", "set/p/x", b"1"),
        ("write-state", "DELETE", "delete/p/x", None),
        ("write-state", "DELETE", "pdelete/p/%3F", None),
        ("publish", "POST", "publish/p/x", b"1"),
        ("subscribe", "GET", "export", None),
        ("write-state", "POST", "import", gzip.compress(b'{"data":{"t":{"p":{"t":{"x":{"v":1}}}}}}')),
    ]
    with Web(served.live) as web:
        for granted, status in ((False, 403), (True, 200)):
            for action, method, path, body in requests:
                served.set(p__x="1")
                served.grant((ANONYMOUS, action, "p/#" if granted else "q/#"))
                answer = web.ask(method, f"/api/v1/{path}", body, **JSON)
                if not granted and path == "export":
                    continue  # it has what may be seen: nothing; see below
                assert answer.status == status, (path, answer)
                assert granted or b"(refusal " in answer.body
                assert granted or served.find("p/x") == b"1"


def test_lists_exports_and_patterns_have_what_may_be_seen(served: Served) -> None:
    served.set(p__x="1", q__x="1", **{"!/cred/1/2/3": "1"})
    served.grant((ANONYMOUS, "subscribe", "p/#"))
    with Web(served.live) as web:
        assert web.get("/api/v1/ls").json == ["p"]
        assert web.get("/api/v1/ls/q").status == 404
        assert web.get("/api/v1/pget/%23").json == [{"key": "p/x", "value": 1}]
        assert json.loads(gzip.decompress(web.get("/api/v1/export").body))["data"]["t"].keys() == {"p"}
        served.grant((ANONYMOUS, "subscribe", "#"))
        assert json.loads(gzip.decompress(web.get("/api/v1/export").body))["data"]["t"].keys() == {"p", "q"}
        served.grant((ANONYMOUS, "write-state", "p/#"))
        file = gzip.compress(b'{"data":{"t":{"p":{"t":{"y":{"v":1}}},"q":{"t":{"y":{"v":1}}}}}}')
        assert web.post("/api/v1/import", file).status == 403
        assert (served.find("p/y"), served.find("q/y")) == (None, None)


def test_event_streams_are_refused_narrowed_and_shrink(served: Served) -> None:
    served.set(p__x="1", q__x="1")
    write = (ANONYMOUS, "write-state", "#")
    served.grant((ANONYMOUS, "subscribe", "p/#"), write)
    for path in ("subscribe/q/x", "psubscribe/q/%23"):
        with Events(served.live, f"/api/v1/{path}") as refused:
            assert refused.response.status == 403
    with Events(served.live, "/api/v1/psubscribe/%23") as events, Web(served.live) as web:
        assert events.next() == {"keyValuePairs": [{"key": "p/x", "value": 1}]}
        web.post("/api/v1/set/q/x", b"2")
        web.post("/api/v1/set/p/x", b"2")
        assert events.next() == {"keyValuePairs": [{"key": "p/x", "value": 2}]}
        served.grant((ANONYMOUS, "subscribe", "r/#"), write)
        web.post("/api/v1/set/p/x", b"3")
        web.post("/api/v1/set/r/x", b"3")
        assert events.next() == {"keyValuePairs": [{"key": "r/x", "value": 3}]}


def test_a_stream_of_a_removed_principal_is_closed(tmp_path: Path) -> None:
    with serve(tmp_path, auth_key_file=secret_file(tmp_path, "key", SECRET)) as live:
        served = Served(live)
        served.grant(("me", "subscribe", "#"), add=(Principal("me"),))
        headers = {"authorization": f"Bearer {token({'read': ['#']})}"}
        with Web(live) as web, Events(live, "/api/v1/subscribe/a?liveOnly", **headers) as events:
            assert web.get("/api/v1/pget/%23", **headers).status == 200
            live.run(lambda: live.server.gate.remove([Principal("me")], SERVER))
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                events.response.read()
            assert web.get("/api/v1/pget/%23", **headers).status == 403


def test_a_claim_of_the_token_names_the_principal(tmp_path: Path) -> None:
    key = secret_file(tmp_path, "key", SECRET)
    with serve(tmp_path, auth_key_file=key, auth_claim="name") as live, Web(live) as web:
        served = Served(live)
        served.set(a="1")
        served.grant(("tester", "subscribe", "a"), add=(Principal("tester"),))
        assert web.get("/api/v1/get/a", authorization=f"Bearer {token({'read': ['#']})}").status == 200


def test_a_token_protects_nothing_from_other_protocols_without_the_gate_and_the_server_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = secret_file(tmp_path, "key", SECRET)
    for mode, count in (("off", 1), ("enforce", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), serve(tmp_path / mode, mode=mode, auth_key_file=key):
            lines = [one.getMessage() for one in caplog.records if "babelbus access enable" in one.getMessage()]
        assert len(lines) == count, lines
        assert all("jebp, zbus, eventmesh" in line for line in lines)
    caplog.clear()
    with caplog.at_level(logging.WARNING), serve(tmp_path / "open", mode="off"):
        assert not [one for one in caplog.records if "babelbus access enable" in one.getMessage()]


def test_what_tokens_protect_is_behind_no_other_door_with_the_gate(tmp_path: Path) -> None:
    """Trial 2, S4: a topic over `secret` recorded each set, and `$state` showed all, to any client of jebp."""
    with serve(tmp_path, auth_key_file=secret_file(tmp_path, "key", SECRET)) as live:
        served = Served(live)
        guest = Principal("guest", (), (make_certificate(GUEST.fingerprint, 0),))
        served.grant(("me", "*", "#"), ("guest", "*", "free/#"), add=(Principal("me"), guest))
        served.set(secret__a="1")
        with Web(live) as web:
            assert web.get("/api/v1/get/secret/a").status == 401
        with Caller(live.address, GUEST).connect() as caller:
            assert [said(one) for one in caller.ask(create_topic("secret"))] == ["b730"]
            assert [said(one) for one in caller.ask(subscribe_topics("$state"))] == ["b130" + b"$state".hex()]


def test_a_client_certificate_names_the_principal(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("localhost")
    mine = authority.issue("me", dns_names=("me.example",))
    tls = TlsSettings(
        cert_file=str(cert), key_file=str(key), client_ca_file=str(authority.path), client_certificates="optional"
    )
    with serve(tmp_path, tls=tls) as live:
        served = Served(live)
        served.set(a="1")
        credential = make_client_name("dns", "me.example", live.server.clock.now_ms())
        served.grant(("me", "subscribe", "a"), add=(Principal("me", (), (credential,)),))
        host, _, port = live.server.addresses["worterbuch-tcp"].rpartition(":")
        for identity, word in ((mine, "state"), (None, "err")):
            context = authority.client_context(identity)
            with (
                socket.create_connection((host, int(port)), SAFETY_NET_SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as client,
                client.makefile("rb") as file,
            ):
                file.readline()
                client.sendall(json.dumps(get(1, "a")).encode() + b"\n")
                assert word in json.loads(file.readline())
