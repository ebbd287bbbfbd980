"""Webhooks on bad days, and requests of the coded API that are wrong in other ways than a missing field."""

import json
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import grpc
import msgspec
import pytest

from babelbus.client import BlockingClient
from babelbus.config import EventmeshSettings, QuotaSettings
from babelbus.core.access import SERVER
from babelbus.protocols.eventmesh.calls import CONNECTIONS_MAX
from babelbus.protocols.eventmesh.webhooks import Webhooks
from babelbus.records.format import HEADERS_MAX
from babelbus.units import MIB
from tests.protocols.eventmesh.test_grpc import Events, Legacy
from tests.protocols.eventmesh.test_http import Hook, ask, publish, subscribe
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient

MODULE = "babelbus.protocols.eventmesh"


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[tuple[LiveServer, HttpClient]]:
    values = {"tcp_port": 0, "http_port": 0, "grpc_port": 0, "webhook_networks": "127.0.0.0/8", **settings}
    made = EventmeshSettings(**values)  # type: ignore[arg-type]
    with (
        LiveServer(configure(folder, eventmesh=made)) as live,
        HttpClient(live.server.addresses["eventmesh-http"]) as web,
    ):
        yield live, web


@contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a webhook that is no good HTTP server; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}/"
        listener.shutdown(socket.SHUT_RDWR)


def subscribe_url(web: HttpClient, url: str, topic: str, group: str) -> dict[str, object]:
    fields = {"topic": json.dumps([{"topic": topic}]), "url": url, "consumerGroup": group}
    return ask(web, "206", fields)


@contextmanager
def serving_no_consent(live: LiveServer) -> Iterator[Webhooks]:
    """The webhooks of a server, which are not asked whether they agree."""
    webhooks = live.server.services["eventmesh"].webhooks  # type: ignore[attr-defined]
    webhooks.hub.settings = msgspec.structs.replace(webhooks.hub.settings, webhook_consent=False)
    yield webhooks
    webhooks.hub.settings = msgspec.structs.replace(webhooks.hub.settings, webhook_consent=True)


def is_dead(live: LiveServer, group: str) -> bool:
    return live.server.broker.find_topic(f"dead-letters/{group}") is not None


# -- webhooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-le"], ids=["hangs", "answers slowly"])
def test_a_webhook_that_does_not_answer_is_given_up_and_others_go_on(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(f"{MODULE}.calls.CALL_SECONDS", 0.2)
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.01)
    monkeypatch.setattr(f"{MODULE}.webhooks.RETRIES_MAX", 1)
    group = f"hangs{len(answer)}"

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(2**16):
                connection.sendall(answer)

    with peer(serve) as url, Hook() as good:
        assert subscribe_url(web, f"http://{url}", group, group)["retCode"] == 0
        subscribe(web, good, group, "good")
        publish(web, group, "x")
        assert good.next()[0]["content"] == "x"
        live.until(lambda: is_dead(live, group))


def test_a_push_that_takes_longer_than_the_time_for_acknowledgements_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 1.5)  # beyond a lease, and the wait behind its end
    with serving(tmp_path, ack_seconds=0.05) as (live, web), Hook((500, b"", {})) as hook:
        subscribe(web, hook, "long", "long")
        publish(web, "long", "x")
        assert [hook.next()[0]["content"] for _ in range(2)] == ["x", "x"]
        publish(web, "long", "y")
        assert hook.next()[0]["content"] == "y"
        group = live.server.broker.groups.find("long", "long")
        assert group is not None
        live.until(lambda: group.counts.acknowledged == 2)
        assert (group.counts.delivered, group.counts.redelivered, group.counts.stale) == (2, 0, 0)


@pytest.mark.parametrize(
    "answer", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n", b"close"]
)
def test_a_webhook_that_speaks_no_http_gets_the_message_again_and_then_no_more(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.01)
    group = f"babble{len(answer)}"

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(2**16)
            if answer != b"close":
                connection.sendall(answer)

    with peer(serve) as url:
        assert subscribe_url(web, f"http://{url}", group, group)["retCode"] == 0
        publish(web, group, "x")
        live.until(lambda: is_dead(live, group))


@pytest.mark.parametrize(("body", "is_taken"), [(b'{"retCode":0}', True), (b"", True), (b'{"retCode":3}', False)])
def test_the_answer_of_a_webhook_may_end_with_its_connection(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch, body: bytes, is_taken: bool
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.01)
    group = f"until-close-{body.decode()[11:12]}"
    heard: list[str] = []

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            size, line = 0, file.readline()
            method = line.split()[0]
            while (line := file.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    size = int(line[15:])
            if b"content=" in (form := file.read(size)):
                heard.append(parse_qs(form.decode())["content"][0])
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + (b"" if method == b"OPTIONS" else body))

    with peer(serve) as url:
        assert subscribe_url(web, f"http://{url}", group, group)["retCode"] == 0
        publish(web, group, "one")
        publish(web, group, "two")
        live.until(lambda: live.server.broker.groups.get(group, group).info().lag == 0)
    assert sorted(heard) == ["one", "two"]
    assert is_dead(live, group) is not is_taken


def test_a_webhook_with_a_certificate_of_its_own_making_gets_nothing(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.01)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path).issue("webhook"))
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
            heard.append(secure.recv(2**16))

    with peer(serve) as url:
        assert subscribe_url(web, f"https://{url}", "tls", "tls")["retCode"] == 0
        publish(web, "tls", "x")
        live.until(lambda: is_dead(live, "tls"))
    assert not any(heard)


def test_before_a_server_hands_over_webhooks_have_time_to_answer_and_get_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.service.CLIENT_SECONDS", 1e6)
    pushes, may_answer = queue.Queue[str](), threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            data = b""
            while not data.endswith(b"%7D"):  # the end of the last field of a push
                data += connection.recv(2**16)
            pushes.put(parse_qs(data.rpartition(b"\r\n")[2].decode())["content"][0])
            may_answer.wait(SAFETY_NET_SECONDS)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with peer(serve) as url:
        with serving(tmp_path, webhook_consent=False) as (live, web):
            assert subscribe_url(web, f"http://{url}", "slow", "slow")["retCode"] == 0
            publish(web, "slow", "a")
            assert pushes.get(timeout=SAFETY_NET_SECONDS) == "a"
            settling = threading.Thread(target=live.run, args=(live.server.services["eventmesh"].settle,))  # type: ignore[attr-defined]
            settling.start()
            live.until(lambda: live.server.services["eventmesh"].webhooks.rests)  # type: ignore[attr-defined]
            publish(web, "slow", "b")
            assert settling.is_alive()
            may_answer.set()
            settling.join(SAFETY_NET_SECONDS)
            assert not settling.is_alive()
        assert pushes.empty()
        with serving(tmp_path, webhook_consent=False):
            assert pushes.get(timeout=SAFETY_NET_SECONDS) == "b"
        assert pushes.empty()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "webhook.example"])
def test_a_webhook_at_a_private_address_is_refused_when_it_subscribes(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda name, *rest, **more: resolve("10.1.2.3" if name == "webhook.example" else name, *rest, **more),
    )  # fmt: skip
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0)
    with (
        LiveServer(configure(tmp_path, eventmesh=made), use_uvloop=False) as live,
        HttpClient(live.server.addresses["eventmesh-http"]) as web,
    ):
        answer = subscribe_url(web, f"http://{host}:9/", "private", "g")
        assert (answer["retCode"], "invalid URL" in str(answer["retMsg"])) == (7, True)
        assert live.call(live.server.services["eventmesh"].webhooks.entries) == []  # type: ignore[attr-defined]


def test_a_name_that_no_resolver_takes_is_an_error_of_the_call(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.01)
    assert subscribe_url(web, f"http://{'x' * 80}.example/", "label", "label")["retCode"] == 0
    publish(web, "label", "x")
    live.until(lambda: is_dead(live, "label"))


def test_no_event_sets_the_framing_of_a_push(live: LiveServer, web: HttpClient) -> None:
    headers = ((b"eventmesh.flavour", b"http"), (b"content-length", b"0"), (b"Transfer-Encoding", b"chunked"),
               (b"host", b"other"), (b"colour", b"red"))  # fmt: skip
    with Hook() as hook, BlockingClient(live.address, identity=live.admin) as jebp:
        subscribe(web, hook, "framing", "g")
        jebp.publish("framing", b"payload", headers=headers)
        form, pushed = hook.next()
        assert (form["content"], pushed["colour"], pushed["host"]) == ("payload", "red", hook.url[7:-9])
        assert "transfer-encoding" not in pushed


@pytest.mark.parametrize("mode", ["CLUSTERING", "BROADCASTING"])
def test_a_webhook_that_was_unsubscribed_gets_no_retry(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.0)
    topic = f"left/{mode}"
    answered = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(2**16):
                pushes.append(1)
                answered.wait(SAFETY_NET_SECONDS)
                connection.sendall(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n")

    pushes: list[int] = []
    with serving_no_consent(live) as webhooks, peer(serve) as address:
        item = json.dumps([{"topic": topic, "mode": mode}])
        fields = {"topic": item, "url": f"http://{address}", "consumerGroup": "g"}
        assert ask(web, "206", fields)["retCode"] == 0
        for number in range(CONNECTIONS_MAX + 3):  # the last of them wait for a connection
            publish(web, topic, str(number))
        live.until(lambda: len(pushes) == CONNECTIONS_MAX)
        assert ask(web, "207", fields)["retCode"] == 0
        answered.set()
        live.until(lambda: not webhooks._timers and not any(pool.waiting for pool in webhooks.calls._pools.values()))
        live.until(lambda: all(one.call is None for pool in webhooks.calls._pools.values() for one in pool.connections))
        assert len(pushes) == CONNECTIONS_MAX


def test_a_webhook_that_hangs_holds_a_bound_of_events_and_gets_events_again_later(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.webhook_codec.RETRY_SECONDS", 0.0)
    monkeypatch.setattr(f"{MODULE}.calls.CALL_SECONDS", SAFETY_NET_SECONDS)
    answers = threading.Event()
    events: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as file:
            while file.readline():
                head = dict(line.split(b": ", 1) for line in iter(file.readline, b"\r\n"))
                events.append(file.read(int(head[b"content-length"])))
                answers.wait(SAFETY_NET_SECONDS)
                connection.sendall(b"HTTP/1.1 204 Done\r\n\r\n")

    with serving_no_consent(live) as webhooks, peer(serve) as address:
        fields = {"topic": json.dumps([{"topic": "hanging", "mode": "BROADCASTING"}])}
        assert ask(web, "206", {**fields, "url": f"http://{address}", "consumerGroup": "g"})["retCode"] == 0
        for _ in range(30):
            publish(web, "hanging", "x" * 500_000)

        def held() -> int:
            pools = webhooks.calls._pools.values()
            return sum(len(call.data) for pool in pools for call in pool.waiting) + sum(
                len(one.call.data) for pool in pools for one in pool.connections if one.call is not None
            )

        assert 0 < live.call(held) < 6 * 2**20
        answers.set()
        live.until(lambda: held() == 0)
        publish(web, "hanging", "later")
        live.until(lambda: b"content=later" in events[-1])


@pytest.mark.parametrize("what", ["topic", "group"])
@pytest.mark.parametrize("by", ["206", "203"])
def test_a_webhook_whose_topic_or_group_was_removed_subscribes_again(
    live: LiveServer, web: HttpClient, what: str, by: str
) -> None:
    broker, topic = live.server.broker, f"again/{what}/{by}"
    with Hook() as hook:
        subscribe(web, hook, topic, "g")
        if what == "topic":
            live.call(lambda: broker.remove_topic(topic, principal=SERVER))
            live.until(lambda: broker.find_topic(topic) is None)
            publish(web, topic, "nobody subscribes")
        else:
            live.call(lambda: broker.groups.remove(topic, "g", SERVER))
        if by == "206":
            subscribe(web, hook, topic, "g")
        else:
            beats = json.dumps([{"topic": topic, "url": hook.url}])
            fields = {"clientType": "SUB", "consumerGroup": "g", "heartbeatEntities": beats}
            assert ask(web, "203", fields)["retCode"] == 0
        publish(web, topic, "x")
        assert hook.next()[0]["content"] == "x"


# -- the coded API -----------------------------------------------------------------------------------------------------


def test_an_identity_may_be_empty_as_java_sends_it_and_a_pid_is_a_number(web: HttpClient) -> None:
    fields = {"producergroup": "P", "topic": "identity", "content": "x", "bizseqno": "1", "uniqueid": "2"}
    assert ask(web, "104", fields, env="", idc="", sys="", pid="", ip="")["retCode"] == 0
    answer = ask(web, "104", fields, pid="seven")
    assert (answer["status"], answer["retCode"]) == (200, 6)


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        ("104", {"topic": "t", "content": "x" * 1001}, 8),
        ("101", {"topic": "t", "content": "x" * 1001}, 7),
        ("102", {"contents": json.dumps([{"topic": "t", "msg": "x" * 1001}])}, 6),
    ],
)
@pytest.mark.parametrize("retcodes", ["current", "seed"])
def test_a_content_over_the_limit_has_a_code_for_each_request(
    tmp_path: Path, code: str, fields: dict[str, str], expected: int, retcodes: str
) -> None:
    with serving(tmp_path, content_bytes_max=1000, retcodes=retcodes) as (_, web):
        answer = ask(web, code, {"producergroup": "P", **fields})
        assert answer["retCode"] == (7 if expected == 8 and retcodes == "seed" else expected)
        assert answer["retMsg"] == "event size exceeds the limit: 1000"


def test_the_first_document_has_other_numbers_for_errors(tmp_path: Path) -> None:
    with serving(tmp_path, retcodes="seed") as (_, web), Hook(allows="somebody.else") as hook:
        assert subscribe_url(web, hook.url, "t", "g")["retCode"] == 17
        assert ask(web, "301", {"content": "x"})["retCode"] == 15
        assert ask(web, "104", {"producergroup": "P", "topic": "a\0", "content": "x"})["retCode"] == 14
        assert publish(web, "t", "x")["retCode"] == 0


def test_a_heartbeat_for_what_is_no_url_is_refused(web: HttpClient) -> None:
    beats = json.dumps([{"topic": "beat", "url": "ftp://a/"}])
    fields = {"clientType": "SUB", "consumerGroup": "g", "heartbeatEntities": beats}
    assert ask(web, "203", fields)["retCode"] == 7


def test_a_webhook_that_a_heartbeat_brought_back_is_forgotten_without_heartbeats(
    live: LiveServer, web: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hook() as hook:
        beats = json.dumps([{"topic": "beat/again", "url": hook.url}])
        fields = {"clientType": "SUB", "consumerGroup": "g", "heartbeatEntities": beats}
        assert ask(web, "203", fields)["retCode"] == 0
        monkeypatch.setattr(f"{MODULE}.webhooks.EXPIRE_SECONDS", 0.0)
        webhooks = live.server.services["eventmesh"].webhooks  # type: ignore[attr-defined]
        live.until(lambda: "beat/again" not in [entry.topic for entry in webhooks.entries()])


def test_a_get_publishes_by_its_code_alone(web: HttpClient) -> None:
    response = web.ask("GET", "/?code=104&producergroup=P&topic=get&content=x")
    assert (json.loads(response.body)["retCode"], response.headers["code"]) == (0, "104")
    response = web.ask("GET", "/eventmesh/publish/get")
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert web.ask("GET", "/eventmesh/subscrition/query").status == 200


@pytest.mark.parametrize("code", ["104%0d%0aevil:%201", "%00", "%E4%BD%A0"])
def test_a_code_that_no_header_can_carry_is_answered_without_it(web: HttpClient, code: str) -> None:
    response = web.ask("GET", f"/?code={code}&topic=t")
    assert (response.status, json.loads(response.body)["retCode"], response.headers["code"]) == (400, 2, "")
    assert "evil" not in response.headers


@pytest.mark.parametrize("body", [b"\xff\xfe", b"topic=%zz", b"&" * 1000, b"a=1&" * 1000, b"=" * 1000])
def test_forms_that_make_no_sense_are_answered(web: HttpClient, body: bytes) -> None:
    response = web.ask("POST", "/", body, code="104")
    assert json.loads(response.body)["retCode"] in (7, 18)


@pytest.mark.parametrize("content", [b"a\xffb", b"a%FFb", b"%ED%A0%80", "é%C3".encode(), b"%FF%zz"])
def test_a_form_that_is_not_utf_8_is_refused_and_nothing_is_stored(
    live: LiveServer, web: HttpClient, content: bytes
) -> None:
    response = web.ask("POST", "/", b"producergroup=P&topic=no-utf-8&content=" + content, code="104")
    assert (response.status, json.loads(response.body)["retCode"]) == (500, 18)
    body = b"url=http://127.0.0.1:1/&topic=no-utf-8&consumerGroup=" + content
    response = web.ask("POST", "/eventmesh/subscribe/local", body, content_type="application/x-www-form-urlencoded")
    assert (response.status, json.loads(response.body)["retCode"]) == (200, 7)
    assert live.server.broker.find_topic("no-utf-8") is None


def test_no_topic_is_made_whose_name_is_not_utf_8(live: LiveServer, web: HttpClient) -> None:
    response = web.ask("POST", "/eventmesh/topic/create", b'{"topic":"bad\xffname"}')
    assert json.loads(response.body)["retCode"] == 7
    assert live.server.broker.find_topic("bad\ufffdname") is None


def test_a_reply_that_cannot_be_read_has_the_code_of_a_bad_body(web: HttpClient) -> None:
    wrong = [
        {"content": "no base64!", "extFields": '{"content-encoding":"base64"}'},
        {"content": "x", "extFields": json.dumps({str(number): "" for number in range(HEADERS_MAX)})},
        {"content": "x", "extFields": "{"},
    ]
    assert [ask(web, "301", fields)["retCode"] for fields in wrong] == [7, 7, 7]


def test_deep_and_wrong_json_in_fields_is_answered(web: HttpClient) -> None:
    deep = "[" * 1000 + "]" * 1000
    fields = {"producergroup": "P", "topic": "t", "content": "x", "extFields": '{"a":' + deep + "}"}
    assert ask(web, "104", fields)["retCode"] in (0, 7)
    for code, name in (("206", "topic"), ("207", "topic"), ("203", "heartbeatEntities"), ("102", "contents")):
        more = {"url": "http://a/", "consumerGroup": "g", "clientType": "SUB", "producerGroup": "P"}
        assert ask(web, code, {**more, name: deep})["retCode"] == 7
    assert web.ask("POST", "/eventmesh/topic/create", deep.encode()).status == 200


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["create", "delete"])
def test_a_request_that_names_more_topics_than_the_limit_changes_none(tmp_path: Path, action: str) -> None:
    with serving(tmp_path, subscriptions_max=2) as (live, web):

        def change(action: str, names: str) -> int:
            response = web.ask("POST", f"/eventmesh/topic/{action}", json.dumps({"topic": names}).encode())
            return int(json.loads(response.body)["retCode"])

        assert change("create", "a;b") == 0
        assert change(action, "c;a;b") == 7
        assert [live.server.broker.has_topic(name) for name in "abc"] == [True, True, False]
        assert change("delete", "a;b") == 0


def test_a_subscription_names_no_more_topics_than_the_limit(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1/"
    with serving(tmp_path, webhook_consent=False, subscriptions_max=2) as (live, web):

        def codes(*topics: str) -> list[int]:
            fields = {"topic": json.dumps(topics), "url": url, "consumerGroup": "g"}
            body = json.dumps({"topic": topics, "url": url, "consumerGroup": "g"}).encode()
            local = [
                web.ask("POST", f"/eventmesh/{action}/local", body).body for action in ("subscribe", "unsubscribe")
            ]
            return [ask(web, "206", fields)["retCode"], ask(web, "207", fields)["retCode"]] + [
                json.loads(answer)["retCode"] for answer in local
            ]

        assert codes("a", "a") == [0, 0, 0, 0]
        assert codes("a", "a", "a") == [7, 7, 7, 7]
        assert not entries(live)


def test_a_request_without_a_message_has_at_most_the_bytes_of_a_frame(web: HttpClient) -> None:
    def code(path: str, size: int, **headers: str) -> int:
        return int(json.loads(web.ask("POST", path, b" " * size, **headers).body)["retCode"])

    assert code("/eventmesh/topic/create", 4 * MIB) == 7  # it names no topic
    assert code("/eventmesh/topic/create", 4 * MIB + 1) == 8
    assert code("/eventmesh/subscribe/local", 4 * MIB + 1, code="104") == 8  # paths have no code
    assert code("/", 4 * MIB + 1, code="206", version="1.0") == 8
    assert code("/eventmesh/publish/long", 4 * MIB + 1) == 0


def entries(live: LiveServer) -> list[tuple[str, str]]:
    webhooks = live.server.services["eventmesh"].webhooks  # type: ignore[attr-defined]
    return [(entry.topic, entry.url) for entry in live.call(webhooks.entries)]


def test_webhooks_of_a_principal_have_a_limit(tmp_path: Path) -> None:
    one, other = "http://127.0.0.1:1/a", "http://127.0.0.1:1/b"
    with serving(tmp_path, webhook_consent=False, subscriptions_max=3) as (live, web):
        assert [subscribe_url(web, one, topic, "g")["retCode"] for topic in ("a", "b")] == [0, 0]
        fields = {"topic": json.dumps([{"topic": "c"}, {"topic": "d"}]), "url": one, "consumerGroup": "g"}
        assert ask(web, "206", fields)["retCode"] == 19
        assert live.server.broker.find_topic("c") is None
        assert subscribe_url(web, other, "a", "g")["retCode"] == 0
        assert subscribe_url(web, other, "b", "g")["retCode"] == 19
        assert subscribe_url(web, one, "a", "g")["retCode"] == 0  # once more
        with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
            for package in (Legacy(channel), Events(channel)):
                assert package.code(package.ask("subscribe", package.subscription("h", "a", url=one))) == "17"
        assert sorted(entries(live)) == [("a", one), ("a", other), ("b", one)]
        assert ask(web, "207", {"topic": '["a"]', "url": one, "consumerGroup": "g"})["retCode"] == 0
        assert subscribe_url(web, other, "b", "g")["retCode"] == 0


def test_the_bytes_of_the_webhooks_of_a_principal_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, webhook_consent=False) as (live, web):

        def code(topic: str, idc: str) -> object:
            fields = {"topic": json.dumps([{"topic": topic}]), "url": "http://127.0.0.1:1/", "consumerGroup": "g"}
            return ask(web, "206", {**fields, "idc": idc})["retCode"]

        assert code("a", "ä" * 10) == 0
        (entry,) = live.call(live.server.services["eventmesh"].webhooks.entries)  # type: ignore[attr-defined]
        assert entry.size_bytes == len(f"ga{entry.url}{entry.idc}{entry.pid}") + 10
        monkeypatch.setattr("babelbus.protocols.eventmesh.webhooks.WEBHOOKS_BYTES_MAX", 2 * entry.size_bytes)
        assert code("b", "ä" * 10 + "x") == 19
        assert not live.server.broker.has_topic("b")
        assert code("b", "ä" * 10) == 0
        assert code("a", "ä" * 10 + "x") == 19  # it would replace the first one
        assert code("a", "ä" * 9 + "x") == 0
        assert ask(web, "207", {"topic": '["b"]', "url": entry.url, "consumerGroup": "g"})["retCode"] == 0
        assert code("c", "ä" * 10 + "x") == 0


def test_a_heartbeat_makes_no_topics_of_webhooks_over_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, webhook_consent=False, subscriptions_max=3) as (live, web):

        def beat(*topics: str) -> int:
            beats = json.dumps([{"topic": topic, "url": "http://127.0.0.1:1/"} for topic in topics])
            fields = {"clientType": "SUB", "consumerGroup": "g", "heartbeatEntities": beats}
            return int(ask(web, "203", fields)["retCode"])

        assert beat("a", "b", "b", "c", "d") == 21
        assert not any(map(live.server.broker.has_topic, "abcd"))
        assert beat("a", "b", "b", "c") == 0
        assert beat("a", "b", "c", "d") == 21
        assert not live.server.broker.has_topic("d")
        assert sorted(topic for topic, _ in entries(live)) == ["a", "b", "c"]


def test_a_webhook_that_a_quota_refuses_is_not_kept(tmp_path: Path) -> None:
    made = EventmeshSettings(
        tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8", webhook_consent=False
    )
    config = msgspec.structs.replace(configure(tmp_path, eventmesh=made), quotas=QuotaSettings(subscriptions=1))
    with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as web:
        url = "http://127.0.0.1:1/a"
        assert subscribe_url(web, url, "a", "g")["retCode"] == 0
        assert subscribe_url(web, url, "b", "g")["retCode"] == 23
        assert entries(live) == [("a", url)]


@pytest.mark.parametrize(
    ("field", "text"), [("url", "http://127.0.0.1:1/" + "1" * 8192), ("idc", "ä" * 4096), ("pid", "1" * 8192)]
)
def test_a_webhook_of_many_bytes_is_refused(live: LiveServer, web: HttpClient, field: str, text: str) -> None:
    fields = {"topic": '["wide"]', "url": "http://127.0.0.1:1/", "consumerGroup": "g", field: text}
    form = urlencode(fields).encode()
    answer = json.loads(web.ask("POST", "/", form, code="206").body)
    assert answer["retCode"] == 7
    assert "wide" not in dict(entries(live))
