"""REST, server-sent events and files of the HTTP port, with real clients on real sockets (section 12)."""

import asyncio
import errno
import http.client
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import QuotaSettings, ServerSettings, WorterbuchSettings
from babelbus.core.quotas import Quotas
from babelbus.errors import ConfigError
from babelbus.identities.guessing import Guessing
from babelbus.limited_log import LimitedLog
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Door as ListenerDoor
from babelbus.metrics import Metrics
from babelbus.protocols.budget import Budget
from babelbus.protocols.connection import TURN_BYTES, Connection
from babelbus.protocols.worterbuch.gatekeeper import Gatekeeper
from babelbus.protocols.worterbuch.http import WebSession
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.service import WorterbuchService, read_file_name
from babelbus.protocols.worterbuch.web_options import WebOptions
from babelbus.wire.http import IDLE_SECONDS
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, Gate, in_loop, turns
from tests.support.clock import ManualClock
from tests.support.http import Response, ResponseDecoder
from tests.support.server import LiveServer, configure
from tests.support.web import SECRET, Events, Plain, Web, WebSocket, get_of, token

ORIGIN = "https://app.example"


def serve(folder: Path, **settings: Any) -> LiveServer:
    return LiveServer(configure(folder, worterbuch=WorterbuchSettings(port=0, tcp_port=0, **settings)))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("rest")) as server:
        yield server


@pytest.fixture
def web(live: LiveServer) -> Iterator[Web]:
    with Web(live) as client:
        yield client
        client.ask("DELETE", "/api/v1/pdelete/%23")


@pytest.fixture
def locked(locked_server: LiveServer) -> LiveServer:
    locked_server.server.proofs.guessing.clear()
    return locked_server


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "key").write_text(SECRET)
    (folder / "key").chmod(0o600)
    with serve(folder / "data", auth_key_file=str(folder / "key")) as server:
        yield server


def put(web: Web, key: str, value: object) -> None:
    assert web.post(f"/api/v1/set/{key}", json.dumps(value).encode()).status == 200


# -- values ----------------------------------------------------------------------------------------------------------


def test_info_tells_what_the_welcome_tells(web: Web) -> None:
    answer = web.get("/info")
    assert answer.status == 200
    assert answer.json["protocolVersion"] == "0.11"
    assert answer.json["supportedProtocolVersions"] == [[0, 11], [1, 1]]
    assert answer.json["authorizationRequired"] is False


def test_what_is_set_can_be_read_matched_listed_and_deleted(web: Web) -> None:
    answer = web.post("/api/v1/set/a/b", b' {"x": [1, null]}\r\n', "application/json; charset=utf-8")
    assert (answer.status, answer.json) == (200, "Ok")
    assert web.get("/api/v1/get/a/b").json == {"x": [1, None]}
    assert web.get("/api/v1/pget/a/%23").json == [{"key": "a/b", "value": {"x": [1, None]}}]
    assert web.get("/api/v1/pget/a/%3F").json == [{"key": "a/b", "value": {"x": [1, None]}}]
    assert web.get("/api/v1/ls").json == ["$SYS", "a"]
    assert web.get("/api/v1/ls/a").json == ["b"]
    assert web.ask("DELETE", "/api/v1/delete/a/b").json == {"x": [1, None]}
    assert web.get("/api/v1/get/a/b").status == 404


def test_a_pattern_deletes_all_that_it_means_and_tells_what_it_was(web: Web) -> None:
    put(web, "a/1", 1)
    put(web, "a/2", 2)
    deleted = web.ask("DELETE", "/api/v1/pdelete/a/%3f").json
    assert sorted(pair["value"] for pair in deleted) == [1, 2]
    assert web.ask("DELETE", "/api/v1/pdelete/a/%3f").json == []


def test_a_key_is_the_decoded_rest_of_the_path(web: Web) -> None:
    put(web, "a%2Fb//%C3%A4%20+%25/", 1)
    assert web.get("/api/v1/get/a/b//%c3%a4%20+%25%2f").json == 1
    assert web.get("/api/v1/pget/a/%23").json == [{"key": "a/b//ä +%/", "value": 1}]
    put(web, "/", 2)
    assert web.get("/api/v1/get/%2F").json == 2


def test_a_pointer_picks_a_part_exactly_as_it_stands_there(web: Web) -> None:
    web.post("/api/v1/set/p", b'{"a/b":{"~":[10, {"":1.50e1}]},"s":"text"}')
    assert web.get("/api/v1/get/p?pointer=/a~1b/~0/1/").body == b"1.50e1"
    assert web.get("/api/v1/get/p?pointer=").json["s"] == "text"
    assert web.get("/api/v1/get/p?pointer=/s&raw").body == b"text"
    for missing in ("/nix", "/a~1b/~0/2", "/a~1b/~0/01", "/a~1b/~0/-", "/s/0"):
        assert web.get(f"/api/v1/get/p?pointer={missing}").status == 404, missing
    for wrong in ("s", "/a~2"):
        assert web.get(f"/api/v1/get/p?pointer={wrong}").status == 400, wrong


def test_a_string_can_be_had_as_plain_text(web: Web) -> None:
    put(web, "s", "ä<b>")
    put(web, "n", 1)
    assert web.get("/api/v1/get/s").body == b'"\\u00e4<b>"'
    for answer in (web.get("/api/v1/get/s?raw"), web.get("/api/v1/get/s", content_type="text/plain")):
        assert answer.body.decode() == "ä<b>"
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert web.get("/api/v1/get/n?raw").json == 1


def test_a_publish_reaches_subscribers_and_stores_nothing(live: LiveServer, web: Web) -> None:
    with Events(live, "/api/v1/psubscribe/p/%23?liveOnly") as events:
        assert web.post("/api/v1/publish/p/q", b"[1]").json == "Ok"
        assert events.next() == {"keyValuePairs": [{"key": "p/q", "value": [1]}]}
    assert web.get("/api/v1/get/p/q").status == 404


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/get/x", 404),
        ("GET", "/api/v1/get/a/%3F", 400),
        ("GET", "/api/v1/get/a/%23/b", 400),
        ("GET", "/api/v1/pget/a/%23/b", 400),
        ("GET", "/api/v1/psubscribe/%23/b", 400),
        ("GET", "/api/v1/subscribe/%3F", 400),
        ("GET", "/api/v1/get/", 404),
        ("GET", f"/api/v1/psubscribe/a{'/a' * 1024}", 400),
        ("GET", f"/api/v1/get/{'a' * 4096}", 404),
        ("GET", f"/api/v1/get/{'a' * 4097}", 400),
        ("GET", f"/api/v1/subscribels/{'a' * 4097}", 400),
        ("GET", "/api/v1/get", 404),
        ("GET", "/api/v1/ls/", 404),
        ("GET", "/api/v1/ls/nix", 404),
        ("GET", "/api/v1/export/x", 404),
        ("GET", "/api/v1/nix/x", 404),
        ("GET", "/api/v1", 404),
        ("GET", "/api/subscribe/x", 404),
        ("GET", "/nix", 404),
        ("GET", "/api/v1/get/%", 400),
        ("GET", "/api/v1/get/%ff", 400),
        ("GET", "/api/v1/get/x?raw=%zz", 400),
        ("DELETE", "/api/v1/delete/x", 404),
        ("DELETE", "/api/v1/delete/$SYS/version", 405),
        ("DELETE", "/api/v1/pdelete/$SYS/%23", 405),
        ("DELETE", "/api/v1/get/x", 405),
        ("POST", "/api/v1/get/x", 405),
        ("GET", "/api/v1/set/x", 405),
        ("PUT", "/api/v1/set/x", 405),
        ("HEAD", "/api/v1/set/x", 405),
        ("POST", "/api/v1/login", 422),
    ],
)
def test_a_refusal_is_plain_text_and_the_connection_goes_on(web: Web, method: str, path: str, status: int) -> None:
    answer = web.ask(method, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.endswith(b"\n") or method == "HEAD"
    assert ("allow" in answer.headers) == (status == 405)
    assert web.get("/info").status == 200


@pytest.mark.parametrize("word", ["set", "publish"])
@pytest.mark.parametrize(
    ("key", "body", "content_type", "status"),
    [
        ("x", b"1", "text/plain", 415),
        ("x", b"1", "", 415),
        ("x", b"", "application/json", 400),
        ("x", b"{", "application/json", 400),
        ("x", b"NaN", "application/json", 400),
        ("x", b'"\xff"', "application/json", 400),
        ("x", b"[" * 10_000 + b"]" * 10_000, "application/json", 400),
        ("a/%23", b"1", "application/json", 400),
        ("$SYS/x", b"1", "application/json", 405),
    ],
)
def test_what_is_no_value_or_no_key_changes_nothing(
    web: Web, word: str, key: str, body: bytes, content_type: str, status: int
) -> None:
    assert web.post(f"/api/v1/{word}/{key}", body, content_type).status == status
    assert web.get("/api/v1/get/x").status == 404


def test_a_key_with_a_version_cannot_be_set_plainly(live: LiveServer, web: Web) -> None:
    live.call(lambda: live.server.broker.state.compare_and_set("c", b"1", 0))
    answer = web.post("/api/v1/set/c", b"2")
    assert (answer.status, web.get("/api/v1/get/c").json) == (409, 1)


def test_a_body_beyond_the_limit_is_refused_before_it_arrives(tmp_path: Path) -> None:
    with serve(tmp_path, message_bytes_max=1024) as live, Plain(live) as client:
        client.socket.sendall(
            b"POST /api/v1/set/x HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: 1025\r\n\r\n"
        )
        assert client.rest().startswith(b"HTTP/1.1 413 ")


# -- connections -----------------------------------------------------------------------------------------------------


def test_head_answers_as_get_without_the_body(web: Web) -> None:
    put(web, "x", "12345")
    assert web.ask("HEAD", "/api/v1/get/x").headers["content-length"] == "7"
    head = web.ask("HEAD", "/api/v1/psubscribe/%23")
    assert (head.status, head.headers["content-type"], head.body) == (200, "text/event-stream", b"")
    assert web.get("/api/v1/get/x").json == "12345"


def test_pipelined_requests_are_done_and_answered_in_order(live: LiveServer, web: Web) -> None:
    json_type = {"content_type": "application/json"}
    requests = [
        get_of("/api/v1/set/x", "POST", b"1", **json_type),
        get_of("/api/v1/get/x"),
        get_of("/nix"),
        get_of("/api/v1/export"),
        get_of("/api/v1/delete/x", "DELETE"),
        get_of("/api/v1/get/x"),
        get_of("/api/v1/get/%"),
        get_of("/info"),
    ]
    for size in (1, 7, 10_000):
        data = b"".join(requests)
        with Plain(live) as client:
            for at in range(0, len(data), size):
                client.socket.sendall(data[at : at + size])
            answers = client.read(len(requests))
        assert [answer.status for answer in answers] == [200, 200, 404, 200, 200, 404, 400, 200]
        assert answers[1].body == answers[4].body == b"1"


def test_a_connection_that_is_to_be_closed_is_closed_after_its_last_answer(live: LiveServer, web: Web) -> None:
    for last in (
        get_of("/api/v1/set/x", "POST", b"1", content_type="application/json").replace(
            b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1
        ),
        b"GET /api/v1/get/x HTTP/1.0\r\n\r\n",
        get_of("/api/v1/export").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    ):
        with Plain(live) as client:
            client.socket.sendall(get_of("/info") + last + get_of("/info"))
            answers = client.rest()
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert b"connection: close" in answers


def test_what_is_no_request_is_answered_behind_those_that_are_and_closes(live: LiveServer, web: Web) -> None:
    put(web, "x", 1)
    with Plain(live) as client:
        client.socket.sendall(get_of("/api/v1/get/x") + b"nonsense\r\n\r\n")
        answers = client.rest()
    assert answers.count(b"HTTP/1.1 200 ") == 1
    assert answers.count(b"HTTP/1.1 400 ") == 1
    assert answers.index(b" 200 ") < answers.index(b" 400 ")


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(live: LiveServer, web: Web) -> None:
    request = get_of("/api/v1/set/x", "POST", b"1", content_type="application/json", expect="100-continue")
    with Plain(live) as client:
        client.socket.sendall(request[:-1])
        assert client.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.socket.sendall(request[-1:])
        assert client.read(1)[0].status == 200


def test_large_answers_are_made_one_after_the_other_as_the_client_takes_them(live: LiveServer, web: Web) -> None:
    for number in range(64):
        put(web, f"big/{number}", "x" * 100_000)
    with Plain(live, receive_bytes=65_536) as client:
        client.socket.sendall(get_of("/api/v1/pget/big/%23") * 40)
        [first] = client.read(1)
        held = live.call(lambda: max(one.outbox_bytes for one in live.connections))
        assert held < 5 * len(first.body)
        assert {len(answer.body) for answer in client.read(39)} == {len(first.body)}


def test_a_request_for_a_websocket_elsewhere_is_answered_and_the_next_one_too(live: LiveServer) -> None:
    with Plain(live) as client:
        client.socket.sendall(get_of("/info", upgrade="websocket") + get_of("/info"))
        assert [answer.status for answer in client.read(2)] == [200, 200]


def test_a_silent_connection_is_closed_and_streams_and_websockets_stay(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    with LiveServer(configure(tmp_path), clock=clock) as live:
        service = live.server.services["worterbuch"]
        assert isinstance(service, WorterbuchService)
        with (
            Plain(live) as silent,
            Web(live) as client,
            Events(live, "/api/v1/subscribe/s") as stream,
            WebSocket(live) as socket,
        ):
            silent.socket.sendall(get_of("/info"))
            assert silent.read(1)[0].status == 200
            live.call(service.hub.tick)  # it has heard the request
            clock.advance(IDLE_SECONDS / 2)
            assert client.get("/info").status == 200
            live.call(service.hub.tick)
            clock.advance(IDLE_SECONDS / 2)
            live.call(service.hub.tick)
            assert silent.rest() == b""
            put(client, "s", 1)
            assert stream.next() == 1
            assert "state" in socket.ask({"get": {"transactionId": 1, "key": "s"}})


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_of_a_key_gives_its_value_then_each_change_and_null_when_it_goes(live: LiveServer, web: Web) -> None:
    put(web, "s", 1)
    with Events(live, "/api/v1/subscribe/s") as events:
        assert events.response.headers["content-type"] == "text/event-stream"
        assert events.next() == 1
        put(web, "s", 1)
        put(web, "s", {"x": "ä"})
        web.ask("DELETE", "/api/v1/delete/s")
        assert [events.next() for _ in range(3)] == [1, {"x": "ä"}, None]


def test_unique_and_live_only_hold_for_streams(live: LiveServer, web: Web) -> None:
    put(web, "s", 1)
    with (
        Events(live, "/api/v1/subscribe/s?unique=true&liveOnly") as events,
        Events(live, "/api/v1/subscribe/s?unique=false&liveOnly=false") as all_events,
    ):
        for value in (1, 2, 2, 3):
            put(web, "s", value)
        assert [events.next() for _ in range(2)] == [2, 3]
        assert [all_events.next() for _ in range(5)] == [1, 1, 2, 2, 3]


def test_a_stream_of_a_pattern_gives_pairs(live: LiveServer, web: Web) -> None:
    put(web, "p/a", 1)
    with Events(live, "/api/v1/psubscribe/p/%23") as events:
        assert events.next() == {"keyValuePairs": [{"key": "p/a", "value": 1}]}
        put(web, "p/b", 2)
        web.ask("DELETE", "/api/v1/delete/p/a")
        assert events.next() == {"keyValuePairs": [{"key": "p/b", "value": 2}]}
        assert events.next() == {"deleted": [{"key": "p/a", "value": 1}]}
    with Events(live, "/api/v1/psubscribe/nix/%23") as events:
        assert events.next() == {"keyValuePairs": []}


def test_a_stream_of_names_gives_them_whenever_they_change(live: LiveServer, web: Web) -> None:
    with Events(live, "/api/v1/subscribels/l") as events, Events(live, "/api/v1/subscribels") as roots:
        assert events.next() == []
        assert roots.next() == ["$SYS"]
        put(web, "l/a/b", 1)
        assert events.next() == ["a"]
        assert roots.next() == ["$SYS", "l"]
        web.ask("DELETE", "/api/v1/delete/l/a/b")
        assert events.next() == []


def test_a_stream_is_a_client_of_the_server_while_it_lives(live: LiveServer, web: Web) -> None:
    with Events(live, "/api/v1/subscribe/s"):
        clients = web.get("/api/v1/pget/$SYS/clients/%3F/protocol").json
        assert [pair["value"] for pair in clients] == ["HTTP"]
        assert web.get("/api/v1/get/$SYS/clients").json == 1
        assert web.get("/api/v1/get/$SYS/subscriptions").json == 1
    live.until(lambda: live.server.broker.state.find("$SYS/clients") == b"0")
    assert web.get("/api/v1/get/$SYS/clients").json == 0
    assert web.get("/api/v1/pget/$SYS/clients/%3F/%23").json == []


def test_a_server_that_stops_ends_its_streams(tmp_path: Path) -> None:
    live = serve(tmp_path)
    with live:
        events = Events(live, "/api/v1/subscribe/s")
        live.until(lambda: live.server.broker.state.find("$SYS/subscriptions") == b"1")
    with events, pytest.raises(http.client.IncompleteRead):
        events.response.read()


def test_json_within_json_is_a_setting(tmp_path: Path) -> None:
    with serve(tmp_path, sse_double_encoding=True) as live, Web(live) as web:
        put(web, "s", "ä")
        with Events(live, "/api/v1/subscribe/s") as events:
            assert events.next() == '"\\u00e4"'
            web.ask("DELETE", "/api/v1/delete/s")
            assert events.next() == "null"


def test_a_value_of_several_lines_is_one_event(live: LiveServer, web: Web) -> None:
    with Events(live, "/api/v1/subscribe/s") as events:
        web.post("/api/v1/set/s", b'{\r\n"x":\n1}')
        assert events.next() == {"x": 1}


def test_a_client_of_http_1_0_reads_a_stream_without_chunks(live: LiveServer, web: Web) -> None:
    put(web, "s", 1)
    with Plain(live) as client:
        client.socket.sendall(b"GET /api/v1/subscribe/s HTTP/1.0\r\n\r\n")
        data = b""
        while not data.endswith(b"data: 1\n\n"):
            data += client.socket.recv(1000)
        assert b"chunked" not in data
        assert b"\r\n\r\ndata: 1\n\n" in data


def test_a_reader_that_does_not_read_loses_its_stream_and_nobody_else_notices(tmp_path: Path) -> None:
    with serve(tmp_path, queue_bytes_max=65_536) as live, Web(live) as web, Plain(live, receive_bytes=4096) as slow:
        slow.socket.sendall(get_of("/api/v1/subscribe/s"))
        live.until(lambda: live.server.broker.state.find("$SYS/subscriptions") == b"1")
        with Events(live, "/api/v1/subscribe/s?liveOnly") as events:
            sent = 0
            while live.call(lambda: live.server.broker.state.find("$SYS/clients")) == b"2":
                put(web, "s", f"{sent:100000}")
                assert int(events.next()) == sent
                sent += 1
        assert sent > 1


# -- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "granted", "other"),
    [
        ("GET", "/api/v1/get/a", {"read": ["a"]}, {"write": ["#"], "delete": ["#"]}),
        ("GET", "/api/v1/pget/a/%23", {"read": ["a/#"]}, {"read": ["a/?"]}),
        ("GET", "/api/v1/ls", {"read": ["?"]}, {"read": ["a"]}),
        ("GET", "/api/v1/ls/a", {"read": ["a/?"]}, {"read": ["a"]}),
        ("POST", "/api/v1/set/a", {"write": ["a"]}, {"read": ["#"], "delete": ["#"]}),
        ("POST", "/api/v1/publish/a", {"write": ["a"]}, {"read": ["#"]}),
        ("DELETE", "/api/v1/delete/a", {"delete": ["a"]}, {"read": ["#"], "write": ["#"]}),
        ("DELETE", "/api/v1/pdelete/a/%23", {"delete": ["#"]}, {"delete": ["a"]}),
        ("GET", "/api/v1/export", {"read": ["#"]}, {"read": ["a/#"]}),
        ("POST", "/api/v1/import", {"write": ["#"]}, {"write": ["a/#"]}),
        ("GET", "/api/get/a", {"read": ["a"]}, {"write": ["#"]}),
        ("HEAD", "/api/v1/subscribe/a", {"read": ["a"]}, {"write": ["#"]}),
        ("HEAD", "/api/v1/subscribels/a", {"read": ["a/?"]}, {"read": ["a"]}),
    ],
)
def test_each_request_needs_its_privilege(
    locked: LiveServer, method: str, path: str, granted: dict[str, object], other: dict[str, object]
) -> None:
    with Web(locked) as web:

        def ask(bearer: str) -> int:
            return web.ask(method, path, b"1", content_type="application/json", authorization=bearer).status

        assert ask("") == 401
        assert ask(f"Bearer {token(granted, key='another' * 10)}") == 403
        assert ask(f"Bearer {token(granted, exp=1)}") == 403
        assert ask(f"Bearer {token(other)}") == 403
        assert ask(f"bearer  {token(granted)}") in (200, 404, 400)


def test_a_missing_token_is_asked_for(locked: LiveServer) -> None:
    with Web(locked) as web:
        answer = web.get("/api/v1/ls", authorization="Basic abc")
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert web.get("/info").json["authorizationRequired"] is True
        assert web.get("/api/v1/nix").status == 404


def test_login_puts_the_token_into_a_cookie_that_proves_the_same(locked: LiveServer) -> None:
    good = token({"read": ["#"], "web-login": True})
    with Web(locked) as web:
        answer = web.ask("POST", "/api/v1/login", authorization=f"Bearer {good}")
        assert (answer.status, answer.body) == (200, b"")
        cookie, *attributes = answer.headers["set-cookie"].split("; ")
        assert cookie == f"worterbuch_auth_jwt={good}"
        assert set(attributes) == {"Path=/api/v1/", "HttpOnly", "SameSite=Strict"}
        assert web.get("/api/v1/ls", cookie=f"other=1; {cookie}").status == 200
        assert web.get("/api/v1/ls", cookie="worterbuch_auth_jwt=nix").status == 403
        assert web.ask("POST", "/api/v1/login", authorization=f"Bearer {token({'read': ['#']})}").status == 403
        assert web.ask("POST", "/api/v1/login", cookie=cookie).status == 401


def test_the_cookie_of_a_login_over_tls_is_sent_over_tls_alone(locked: LiveServer) -> None:
    good = f"Bearer {token({'web-login': True})}"
    host = locked.server.addresses["worterbuch"]
    with Web(locked) as web:
        for origin, is_secure in ((f"https://{host}", True), (f"http://{host}", False)):
            answer = web.ask("POST", "/api/v1/login", authorization=good, origin=origin)
            assert answer.status == 200
            assert answer.headers["set-cookie"].endswith("; Secure") is is_secure


def test_a_form_needs_the_privilege_of_each_of_its_keys(locked: LiveServer) -> None:
    form = "application/x-www-form-urlencoded"
    with Web(locked) as web:
        bearer = f"Bearer {token({'write': ['a'], 'read': ['#']})}"
        assert web.post("/api/set", b"a=1&b=2", form, authorization=bearer).status == 403
        assert web.get("/api/v1/get/a", authorization=bearer).status == 404
        assert web.post("/api/set", b"a=1", form, authorization=bearer).status == 200


# -- browsers --------------------------------------------------------------------------------------------------------


def test_pages_of_listed_origins_and_of_no_others_may_use_it(tmp_path: Path) -> None:
    with serve(tmp_path, cors_origins=f"{ORIGIN}, http://localhost:3000") as live, Web(live) as web:
        asked = {"access_control_request_method": "DELETE", "access_control_request_headers": "authorization"}
        preflight = web.ask("OPTIONS", "/api/v1/delete/x", origin=ORIGIN, **asked)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert preflight.headers["access-control-allow-credentials"] == "true"
        assert "DELETE" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert web.get("/api/v1/get/x", origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
        with Events(live, "/api/v1/subscribe/x", origin="http://localhost:3000") as events:
            assert events.response.headers["access-control-allow-origin"] == "http://localhost:3000"
        for origin in ("https://evil.example", f"{ORIGIN}.evil", "null"):
            for answer in (
                web.ask("OPTIONS", "/api/v1/delete/x", origin=origin, **asked),
                web.get("/info", origin=origin),
            ):
                assert answer.status == 403
                assert not any(name.startswith("access-control") for name in answer.headers)


def test_without_a_list_no_origin_is_allowed(web: Web) -> None:
    assert web.ask("OPTIONS", "/api/v1/get/x", origin=ORIGIN).status == 403
    answer = web.ask("OPTIONS", "/api/v1/get/x")
    assert (answer.status, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_names_of_exports_are_read() -> None:
    assert read_file_name("my-export.1") == "my-export.1"
    for name in ("", "../x", 'a"b', ".x"):
        with pytest.raises(ConfigError, match="export_name"):
            read_file_name(name)


def test_files_of_the_web_root_are_served_and_nothing_outside_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (root / "index.html").write_text("<p>home")
    (root / "sub" / "index.html").write_text("<p>sub")
    (root / "app.js").write_text("1")
    (root / "a b.svg").write_text("<svg/>")
    (root / ".env").write_text("secret")
    (root / "inside.txt").symlink_to(root / "app.js")
    (root / "outside.txt").symlink_to(tmp_path / "secret.txt")
    (root / "up").symlink_to(tmp_path)
    (root / "large.bin").write_bytes(bytes(70_000))
    with serve(tmp_path / "data", web_root=str(root), message_bytes_max=65_536) as live, Web(live) as web:

        def kind(path: str) -> tuple[int, str, bytes]:
            answer = web.get(path)
            return answer.status, answer.headers["content-type"].partition(";")[0], answer.body

        assert kind("/") == (200, "text/html", b"<p>home")
        assert kind("/sub/") == kind("/sub") == (200, "text/html", b"<p>sub")
        assert kind("/app.js?v=1") == (200, "text/javascript", b"1")
        assert kind("/a%20b.svg") == (200, "image/svg+xml", b"<svg/>")
        assert kind("/inside.txt") == (200, "text/plain", b"1")
        assert kind("/some/page/of/the/application") == (200, "text/html", b"<p>home")
        for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/sub/..%2f..%2fsecret.txt", "/.env", "/x%00y", "/..%5cx"):
            assert web.get(path).status == 404, path
        for path in ("/outside.txt", "/up/secret.txt", "/app.js/x"):
            assert web.get(path).body == b"<p>home", path
        assert web.get("/large.bin").status == 500
        assert web.ask("POST", "/app.js").status == 405
        assert web.ask("HEAD", "/app.js").headers["content-length"] == "1"
        assert web.get("/api/v1/nix").status == web.get("/api/nix").status == 404


# -- older forms (section 13.1) --------------------------------------------------------------------------------------


def test_clients_of_0_35_to_0_41_find_their_routes(web: Web) -> None:
    assert web.post("/api/set/o%2Fa", b'{"x":1}').json == "Ok"
    assert web.get("/api/get/o%2Fa").json == {"key": "o/a", "value": {"x": 1}}
    assert web.get("/api/get/o%2Fa?extract=/x").json == {"key": "o/a", "value": 1}
    assert web.get("/api/get/raw/o%2Fa").json == {"x": 1}
    assert web.get("/api/pget/o%2F%23").json == [{"key": "o/a", "value": {"x": 1}}]
    assert web.get("/api/ls").json == ["$SYS", "o"]
    assert web.get("/api/ls/o").json == ["a"]
    assert web.post("/api/publish/o%2Fa", b"1").json == "Ok"
    assert web.ask("DELETE", "/api/delete/o%2Fa").json == {"key": "o/a", "value": {"x": 1}}
    assert web.ask("DELETE", "/api/pdelete/o%2F%23").json == []
    assert web.get("/api/get/o%2Fa").status == 400
    assert web.get("/api/get/%23").status == 400
    assert web.ask("DELETE", "/api/delete/$SYS%2Fversion").status == 400


def test_clients_of_0_30_to_0_34_find_their_routes(web: Web) -> None:
    form = "application/x-www-form-urlencoded"
    answer = web.post("/api/set", b"a%2Fb=0&a%2Fb=%7B%22x%22%3A+1%7D&raw%2Fa%2Fb=2", form)
    assert (answer.status, answer.body) == (200, b"Ok")
    assert web.get("/api/get/a/b").json == {"key": "a/b", "value": {"x": 1}}
    assert web.get("/api/get/a/b?raw").json == {"x": 1}
    assert web.get("/api/get/raw/a/b").json == {"key": "raw/a/b", "value": 2}
    assert web.get("/api/pget/a/%23").json == [{"key": "a/b", "value": {"x": 1}}]
    assert web.post("/api/set", b"c=1&d=nonsense", form).status == 400
    assert web.post("/api/set", b"c=1&d/%23=1", form).status == 400
    assert web.post("/api/set", b"c=1&" + b"%2F" * 1024 + b"=1", form).status == 400
    assert web.post("/api/set", b"c=1", "application/json").status == 415
    assert web.get("/api/get/c").status == 400


# -- the disk --------------------------------------------------------------------------------------------------------


class Door:
    """The HTTP port over a bus whose files can be held and can fail."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        self.bus = Bus(self.files)
        self.gate = Gate(self.files)
        self.bus.open_gate("off")
        self.state = self.bus.open_state(ack="flushed")

    async def __aenter__(self) -> "Door":
        metrics: Metrics = self.bus.metrics
        keeper = Gatekeeper(self.bus.broker, self.bus.clock, Guessing(self.bus.clock, metrics))
        hub = Hub(self.bus.broker, metrics, self.bus.clock, WorterbuchSettings(), keeper)
        options = WebOptions(paths={})
        self.connections: set[Connection] = set()

        def make(outbox: Any, close: Callable[[], None], peer: str | None) -> WebSession:
            return WebSession(hub, outbox, close, address=peer, options=options)

        door = ListenerDoor(
            "worterbuch",
            metrics,
            LimitedLog(logging.getLogger("test"), self.bus.clock),
            Crowd(ServerSettings()),
            connections_max=10,
            handshake_seconds=30,
        )

        quotas = Quotas(QuotaSettings(), self.bus.clock, metrics)

        def connect() -> Connection:
            budget = Budget(ServerSettings(), metrics)
            return Connection(door, make, metrics, self.connections, budget, quotas, bytes_max=2**20)

        self._server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
        self._reader, self._writer = await asyncio.open_connection(*self._server.sockets[0].getsockname()[:2])
        self._answers = ResponseDecoder()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        self._server.close()
        await self.bus.broker.close()

    def send(self, *requests: bytes) -> None:
        self._writer.write(b"".join(requests))

    async def read(self, count: int) -> list[Response]:
        found: list[Response] = []
        while len(found) < count:
            data = await self._reader.read(65_536)
            assert data, found
            self._answers.receive_data(data)
            found += self._answers.responses()
        return found


SET = get_of("/api/v1/set/x", "POST", b"1", content_type="application/json")
SET_AND_CLOSE = SET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@in_loop
@pytest.mark.parametrize("request_", [SET, SET_AND_CLOSE], ids=["open", "closed"])
async def test_an_answer_waits_until_what_it_tells_is_on_disk(request_: bytes) -> None:
    async with Door() as door:
        door.gate.shut()
        door.send(request_)
        await door.gate.reached()
        assert [one.busy for one in door.connections] == [True]
        reading = asyncio.ensure_future(door.read(1))
        await asyncio.sleep(0)
        assert not reading.done()
        door.gate.open()
        [answer] = await reading
        assert answer.status == 200


@in_loop
async def test_a_change_that_the_disk_refuses_is_a_500_and_what_was_read_after_it_is_asked_again() -> None:
    async with Door() as door:
        door.gate.shut()
        door.files.fail("flush", errno.EIO, suffix=".log")
        door.send(SET, get_of("/api/v1/get/x"), get_of("/api/v1/ls"))
        await door.gate.reached()
        door.gate.open()
        changed, read, listed = await door.read(3)
        assert changed.status == 500
        assert (read.status, read.body) in ((404, b"nothing stored under 'x'\n"), (200, b"1"))
        assert (read.status == 200) == ("x" in json.loads(listed.body))


@in_loop
async def test_a_client_that_sends_much_lets_others_have_their_turn() -> None:
    async with Door() as door:
        door.send(get_of("/info"))
        await door.read(1)
        (connection,) = door.connections
        transport = connection.transport

        def is_read_on(data: bytes) -> bool:
            connection.data_received(data)
            return bool(transport.is_reading())

        def request(size_bytes: int) -> bytes:
            head = len(get_of("/api/v1/set/a", "POST", b"1" * TURN_BYTES)) - TURN_BYTES
            return get_of("/api/v1/set/a", "POST", b"1" * (size_bytes - head))

        assert is_read_on(request(TURN_BYTES - 1))
        assert not is_read_on(request(TURN_BYTES))
        await turns()
        assert transport.is_reading()
        assert is_read_on(request(TURN_BYTES + 200_000)[:-1])  # kept until the rest comes
        assert not is_read_on(b"1")
        await turns()
        assert transport.is_reading()
