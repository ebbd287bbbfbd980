"""EventMesh over HTTP against a real server: the coded API, webhooks and the URI API."""

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest

from babelbus.config import EventmeshSettings
from babelbus.protocols.eventmesh.calls import Allowed, Origin, TargetRefusedError, read_networks
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import SETTINGS, MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, request_of

IDENTITY = {"env": "t", "idc": "d", "ip": "1.1.1.1", "pid": "7", "sys": "1234", "version": "1.0", "language": "JAVA"}
Answer = tuple[int, bytes, dict[str, str]]
DONE: Answer = (200, b'{"retCode": 1}', {})


class Hook(ThreadingHTTPServer):
    """A webhook: `pushes` has the form and the headers of each push; `answers` says what to answer, `DONE` behind."""

    daemon_threads = True

    def __init__(self, *answers: Answer, allows: str | None = None) -> None:
        self.pushes: Queue[tuple[dict[str, str], dict[str, str]]] = Queue()
        self.answers = list(answers)
        self.allows = allows
        self.asked: list[str | None] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/push?a=b"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "Hook":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def next(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.pushes.get(timeout=SAFETY_NET_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hook

    def do_OPTIONS(self) -> None:
        self.server.asked.append(self.headers.get("webhook-request-origin"))
        self.send_response(200)
        if self.server.allows is not None:
            self.send_header("webhook-allowed-origin", self.server.allows)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        assert self.path == "/push?a=b"
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body, keep_blank_values=True).items()}
        status, content, headers = self.server.answers.pop(0) if self.server.answers else DONE
        self.server.pushes.put((form, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def ask(web: HttpClient, code: str, fields: dict[str, str], **headers: str) -> dict[str, Any]:
    """A request of the coded API as the Java SDK sends it, and the JSON of its answer."""
    form = urlencode(fields).encode()
    given = {**IDENTITY, "code": code, "content_type": "application/x-www-form-urlencoded;charset=UTF-8", **headers}
    response = web.ask("POST", "/", form, **given)
    assert response.headers.get("code") == code
    answer = json.loads(response.body)
    assert sorted(answer) == ["resTime", "retCode", "retMsg"]  # SDKs up to 1.8 refuse other members
    assert isinstance(answer["retCode"], int)
    assert isinstance(answer["resTime"], int)
    return {"status": response.status, **answer}


def publish(web: HttpClient, topic: str, content: str, **more: str) -> dict[str, Any]:
    fields = {"producergroup": "P", "topic": topic, "content": content, "bizseqno": "1", "uniqueid": "2", **more}
    return ask(web, "104", fields, protocoltype="eventmeshmessage")


def subscribe(
    web: HttpClient, hook: Hook, topic: str, group: str, mode: str = "CLUSTERING", kind: str = "ASYNC"
) -> None:
    items = json.dumps([{"topic": topic, "mode": mode, "type": kind}])
    assert ask(web, "206", {"topic": items, "url": hook.url, "consumerGroup": group})["retCode"] == 0


# -- webhooks ----------------------------------------------------------------------------------------------------------


def test_a_message_is_pushed_to_the_webhook_of_each_group(web: HttpClient) -> None:
    with Hook() as one, Hook((200, b"", {})) as other:
        subscribe(web, one, "http/push", "a")
        subscribe(web, other, "http/push", "b")
        assert one.asked == ["babelbus"]
        answer = publish(web, "http/push", "text & more", extFields=json.dumps({"k": "v"}), ttl="4000", tag="t")
        assert (answer["status"], answer["retCode"]) == (200, 0)
        for hook in (one, other):
            form, headers = hook.next()
            assert (form["content"], form["topic"], form["bizseqno"], form["uniqueId"]) == (
                "text & more", "http/push", "1", "2",
            )  # fmt: skip
            extensions = json.loads(form["extFields"])
            assert (extensions["k"], extensions["ttl"], extensions["tag"]) == ("v", "4000", "t")
            assert (headers["code"], headers["version"], headers["protocoltype"]) == ("105", "1.0", "eventmeshmessage")
            assert "eventmeshcluster" in headers


def test_a_group_of_webhooks_takes_turns_and_broadcasting_reaches_all(web: HttpClient) -> None:
    with Hook() as one, Hook() as other:
        for hook in (one, other):
            subscribe(web, hook, "http/turns", "g")
            subscribe(web, hook, "http/all", "g", "BROADCASTING")
        for number in range(4):
            publish(web, "http/turns", str(number))
        found = [[hook.next()[0]["content"] for _ in range(2)] for hook in (one, other)]
        assert sorted(found[0] + found[1]) == ["0", "1", "2", "3"]
        publish(web, "http/all", "x")
        assert [hook.next()[0]["content"] for hook in (one, other)] == ["x", "x"]


@pytest.mark.parametrize(
    "answer",
    [(500, b"", {}), (200, b'{"retCode": 2}', {}), (200, b'{"retCode":5}', {}), (302, b"", {"location": "/elsewhere"})],
)
def test_a_push_that_may_be_repeated_is_repeated(
    web: HttpClient, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr("babelbus.protocols.eventmesh.webhook_codec.RETRY_SECONDS", 0.01)
    topic = f"http/again{answer[0]}{answer[1].decode()[-2:-1]}"
    with Hook(answer, answer, (429, b"", {"retry-after": "0"})) as hook:
        subscribe(web, hook, topic, "g")
        publish(web, topic, "x")
        assert [hook.next()[0]["content"] for _ in range(4)] == ["x"] * 4
        publish(web, topic, "y")
        assert hook.next()[0]["content"] == "y"


@pytest.mark.parametrize("answer", [(410, b"", {}), (415, b"", {}), (200, b'{"retCode": 3}', {})])
def test_a_push_that_a_webhook_refuses_becomes_a_dead_letter(live: LiveServer, web: HttpClient, answer: Answer) -> None:
    group = f"dead{answer[0]}"
    with Hook(answer) as hook:
        subscribe(web, hook, "http/dead", group)
        publish(web, "http/dead", "bad")
        hook.next()
        live.until(lambda: live.server.broker.find_topic(f"dead-letters/{group}") is not None)
        assert ask(web, "207", {"topic": '["http/dead"]', "url": hook.url, "consumerGroup": group})["retCode"] == 0


def test_a_webhook_that_is_gone_gets_a_message_after_a_restart(tmp_path: Path) -> None:
    config = configure(tmp_path, eventmesh=SETTINGS)
    with Hook() as hook:
        with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as web:
            subscribe(web, hook, "kept", "g")
        with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as web:
            publish(web, "kept", "later")
            assert hook.next()[0]["content"] == "later"
            assert ask(web, "207", {"topic": '["kept"]', "url": hook.url, "consumerGroup": "g"})["retCode"] == 0
        with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as web:
            listed = json.loads(json.loads(web.ask("GET", "/eventmesh/subscrition/query").body)["retMsg"])
            assert listed == []


def test_a_webhook_that_allows_another_origin_is_not_subscribed(web: HttpClient) -> None:
    with Hook(allows="somebody.else") as hook:
        answer = ask(web, "206", {"topic": '[{"topic":"t"}]', "url": hook.url, "consumerGroup": "g"})
        assert (answer["retCode"], "somebody.else" in answer["retMsg"]) == (19, True)


def test_private_addresses_are_called_only_where_a_setting_names_them(tmp_path: Path) -> None:
    settings = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_consent=False)
    with (
        ExitStack() as stack,
        LiveServer(configure(tmp_path, eventmesh=settings)) as live,
        HttpClient(live.server.addresses["eventmesh-http"]) as web,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("babelbus.protocols.eventmesh.webhook_codec.RETRY_SECONDS", 0.01)
        hook = stack.enter_context(Hook())
        subscribe(web, hook, "hidden", "g")
        publish(web, "hidden", "x")
        live.until(lambda: live.server.broker.find_topic("dead-letters/g") is not None)
        assert hook.pushes.empty()


@pytest.mark.parametrize(
    ("address", "found"),
    [("8.8.8.8", True), ("127.0.0.1", False), ("10.1.2.3", True), ("10.2.0.1", False), ("169.254.169.254", False),
     ("::1", False), ("::ffff:127.0.0.1", False), ("fe80::1%eth0", False), ("2606:4700::1", True), ("0.0.0.0", False),
     ("64:ff9b::a9fe:a9fe", False), ("64:ff9b::a02:1", False), ("64:ff9b::a01:203", True), ("64:ff9b::808:808", True),
     ("::127.0.0.1", False), ("::ffff:10.1.2.3", True), ("fec0::1", False), ("ff02::1", False), ("239.1.1.1", False)],
)  # fmt: skip
def test_the_addresses_that_may_be_called(address: str, found: bool) -> None:
    assert read_networks("10.1.0.0/16").has(address) is found
    assert Allowed().has("127.0.0.1") is False


@pytest.mark.parametrize(
    "url", ["", "ftp://a/", "http://", "http://a:b/", "http://u:p@a/", "http://a/b c", "http://a/\r\nx: y"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TargetRefusedError):
        Origin(url)


# -- the coded API -----------------------------------------------------------------------------------------------------


def test_each_webhook_of_a_group_is_pushed_to_by_its_own_type(web: HttpClient, live: LiveServer) -> None:
    topic = "http/types"
    with Hook() as plain, Hook() as responder, MeshClient(live.server.addresses["eventmesh-tcp"]).hello() as requester:
        subscribe(web, plain, topic, "g")
        subscribe(web, responder, topic, "g", kind="SYNC")
        for text in "abcd":
            publish(web, topic, text)
        pushed = [(hook, *hook.next()) for hook in (plain, responder) for _ in range(2)]  # they take turns
        assert sorted(form["content"] for _, form, _ in pushed) == list("abcd")
        assert all(headers["code"] == ("105" if hook is plain else "106") for hook, _, headers in pushed)
        for text in ("first?", "second?"):  # asked is who answers
            requester.send("REQUEST_TO_SERVER", {"topic": topic, "body": text, "properties": {"ttl": "60000"}})
            form, headers = responder.next()
            assert (form["content"], headers["code"]) == (text, "106")
            fields = {"origtopic": topic, "content": "!", "extFields": form["extFields"], "producergroup": "P"}
            assert ask(web, "301", fields)["retCode"] == 0
            assert requester.next()[1]["body"] == "!"


def test_cloud_events_are_pushed_as_cloud_events(web: HttpClient) -> None:
    event = {"specversion": "1.0", "id": "i", "source": "/s", "type": "t", "subject": "http/ce", "data": {"a": 1},
             "datacontenttype": "application/json", "username": "u", "passwd": "p"}  # fmt: skip
    with Hook() as hook:
        subscribe(web, hook, "http/ce", "g")
        fields = {"producergroup": "P", "content": json.dumps(event)}
        assert ask(web, "104", fields, protocoltype="cloudevents")["retCode"] == 0
        pushed = json.loads(hook.next()[0]["content"])
        assert (pushed["id"], pushed["data"], pushed["protocoltype"]) == ("i", {"a": 1}, "cloudevents")
        assert not {"username", "passwd"} & set(pushed)


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        ("104", {"topic": "t", "content": "x"}, (200, 7)),
        ("104", {"producergroup": "P", "content": "x"}, (200, 7)),
        ("104", {"producergroup": "P", "topic": "t"}, (200, 7)),
        ("104", {"producergroup": "P", "topic": "a\0", "content": "x"}, (200, 15)),
        ("104", {"producergroup": "P", "topic": "t", "content": "x", "extFields": "[]"}, (200, 7)),
        ("102", {"producerGroup": "P", "contents": "{"}, (200, 7)),
        ("102", {"producerGroup": "P", "contents": json.dumps([{"topic": "t", "msg": "m"}] * 11)}, (200, 7)),
        ("206", {"topic": "[{", "url": "http://a/", "consumerGroup": "g"}, (200, 7)),
        ("206", {"topic": "t", "url": "file:///etc/passwd", "consumerGroup": "g"}, (200, 7)),
        ("203", {"clientType": "PUB", "consumerGroup": "g", "heartbeatEntities": "[]"}, (200, 7)),
        ("301", {"content": "x"}, (200, 16)),
        ("201", {}, (400, 2)),
        ("105", {}, (400, 2)),
    ],
)
def test_a_request_that_says_too_little_gets_its_code(
    web: HttpClient, code: str, fields: dict[str, str], expected: tuple[int, int]
) -> None:
    answer = ask(web, code, fields)
    assert (answer["status"], answer["retCode"]) == expected
    assert publish(web, "http/right", "x")["retCode"] == 0


def test_bare_fields_capital_headers_and_gets_are_read(web: HttpClient) -> None:
    response = web.ask("POST", "/", b"producergroup=P&topic=http/bare&content=x&ttl", Code="104", Env="t")
    assert json.loads(response.body)["retCode"] == 0
    response = web.ask("GET", "/?code=104&producergroup=P&topic=http/bare&content=x")
    assert json.loads(response.body)["retCode"] == 0
    assert web.ask("POST", "/", b"a=b", code="104", version="3.0").status == 400
    assert web.ask("PUT", "/", b"a=b").status == 405


def test_members_of_a_batch_may_be_null_or_numbers(web: HttpClient) -> None:
    with Hook() as hook:
        subscribe(web, hook, "http/nulls", "g")
        for item, number in (
            ({"bizSeqNo": None, "tag": None, "ttl": None}, None),
            ({"bizSeqNo": 7, "ttl": 60000}, "7"),
        ):
            contents = json.dumps([{"topic": "http/nulls", "msg": "m", **item}])
            assert ask(web, "102", {"producerGroup": "P", "contents": contents})["retCode"] == 0
            form = hook.next()[0]
            assert json.loads(form["extFields"]).get("bizseqno") == number
            assert form["bizseqno"] == number or number is None


def test_batches_are_published(web: HttpClient) -> None:
    with Hook() as hook:
        subscribe(web, hook, "http/batch", "g")
        contents = [
            {"bizSeqNo": str(n), "topic": "http/batch", "msg": f"m{n}", "tag": "", "ttl": "60000"} for n in range(3)
        ]
        fields = {"batchId": "1", "size": "3", "producerGroup": "P", "contents": json.dumps(contents)}
        assert ask(web, "102", fields)["retCode"] == 0
        fields = {"bizseqno": "3", "topic": "http/batch", "msg": "m3", "tag": "", "ttl": "60000", "producergroup": "P"}
        assert ask(web, "107", fields)["retCode"] == 0
        assert sorted(hook.next()[0]["content"] for _ in range(4)) == ["m0", "m1", "m2", "m3"]


def test_a_heartbeat_brings_back_a_webhook_that_was_forgotten(web: HttpClient) -> None:
    with Hook() as hook:
        beats = json.dumps([{"topic": "http/beat", "url": hook.url, "serviceId": "", "instanceId": ""}])
        for _ in range(2):
            fields = {"clientType": "SUB", "consumerGroup": "g", "heartbeatEntities": beats}
            assert ask(web, "203", fields)["retCode"] == 0
        publish(web, "http/beat", "x")
        assert hook.next()[0]["content"] == "x"


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_over_http_is_answered_over_tcp(live: LiveServer, web: HttpClient) -> None:
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="s") as responder:
        responder.listen("http/ask", kind="SYNC")

        def respond() -> None:
            _, body = responder.push()
            responder.send("RESPONSE_TO_SERVER", {**body, "body": body["body"] + "!"})

        thread = threading.Thread(target=respond, daemon=True)
        thread.start()
        fields = {"producergroup": "P", "topic": "http/ask", "content": "who", "ttl": "60000"}
        answer = ask(web, "101", fields)
        thread.join()
        reply = json.loads(answer["retMsg"])
        assert (answer["retCode"], reply["body"], sorted(reply)) == (0, "who!", ["body", "properties", "topic"])


def test_a_request_over_tcp_is_answered_by_a_webhook(live: LiveServer, web: HttpClient) -> None:
    with Hook() as hook, MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as requester:
        subscribe(web, hook, "http/sync", "g", kind="SYNC")
        requester.send(
            "REQUEST_TO_SERVER", {"topic": "http/sync", "body": "who", "properties": {"ttl": "60000"}}, seq="r"
        )
        form, headers = hook.next()
        assert (form["content"], headers["code"]) == ("who", "106")
        fields = {"origtopic": "http/sync", "content": "me", "extFields": form["extFields"], "producergroup": "P"}
        assert ask(web, "301", fields)["retCode"] == 0
        header, body = requester.next()
        assert (header["cmd"], header["seq"], body["body"]) == ("RESPONSE_TO_CLIENT", "r", "me")


def test_a_request_that_nobody_answers_is_told_at_once(web: HttpClient) -> None:
    fields = {"producergroup": "P", "topic": "http/nobody", "content": "?", "ttl": "60000"}
    assert ask(web, "101", fields)["retCode"] == 4


# -- the URI API -------------------------------------------------------------------------------------------------------


def test_the_uri_api_publishes_subscribes_and_makes_topics(web: HttpClient) -> None:
    with Hook() as hook:
        body = {
            "url": hook.url,
            "consumerGroup": "u",
            "topic": [{"mode": "CLUSTERING", "topic": "uri", "type": "ASYNC"}],
        }
        response = web.ask(
            "POST", "/eventmesh/subscribe/local", json.dumps(body).encode(), content_type="application/json"
        )
        assert (json.loads(response.body)["retCode"], response.headers["uri"]) == (0, "/eventmesh/subscribe/local")
        response = web.ask("POST", "/eventmesh/publish/uri", b'{"a": 1}', content_type="application/json")
        assert json.loads(response.body)["retCode"] == 0
        form, headers = hook.next()
        assert (form["content"], headers["protocoltype"], headers["method"]) == ('{"a": 1}', "http", "POST")
        body["topic"] = ["uri"]
        response = web.ask("POST", "/eventmesh/unsubscribe/local", json.dumps(body).encode())
        assert json.loads(response.body)["retCode"] == 0
        response = web.ask("POST", "/eventmesh/topic/create", b'{"topic":"u1;u2"}')
        assert json.loads(response.body)["retCode"] == 0
        response = web.ask("POST", "/eventmesh/topic/delete", b'{"topic":"u1;none"}')
        answer = json.loads(response.body)
        assert (answer["retCode"], answer["retMsg"]) == (18, answer["retMessage"])
        assert web.ask("POST", "/eventmesh/nothing", b"{}").status == 404


def test_a_thousand_first_publications_to_a_topic_are_all_answered(live: LiveServer) -> None:
    form = urlencode({"producergroup": "P", "topic": "http/first", "content": "x"}).encode()
    publications = request_of("POST", "/", form, code="104") * 100
    with ExitStack() as stack:
        address = live.server.addresses["eventmesh-http"]
        clients = [stack.enter_context(HttpClient(address)) for _ in range(10)]
        for client in clients:
            client.send(publications)
        answers = [json.loads(client.next().body)["retCode"] for client in clients for _ in range(100)]
    assert answers == [0] * 1000


def test_answers_of_both_apis_on_one_connection_keep_their_own_heads(web: HttpClient) -> None:
    assert [publish(web, "heads", "x")["retCode"] for _ in range(2)] == [0, 0]
    for _ in range(2):
        response = web.ask("POST", "/eventmesh/publish/heads", b"x", code="104")
        assert (response.headers["uri"], "code" in response.headers) == ("/eventmesh/publish/heads", False)
        assert json.loads(response.body)["retCode"] == 0
    assert publish(web, "", "x")["retCode"] != 0
    assert publish(web, "heads", "x")["retCode"] == 0
    assert ask(web, "107", {"producergroup": "P", "topic": "heads", "content": "x"})["retCode"] == 0
