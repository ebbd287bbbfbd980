"""State, live answers and sending over the administration endpoint of a whole server."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from babelbus.client import BlockingClient
from babelbus.clients.sbus import Client as SbusClient
from babelbus.config import StateSettings, StorageSettings
from babelbus.core.access import SERVER
from babelbus.core.flow_policy import Bound
from babelbus.core.record import Event
from babelbus.web.token import read_token
from tests.support.bus import SAFETY_NET_SECONDS, publish
from tests.support.server import LiveServer, configure


class Api:
    """A server, and HTTP requests to it with the token."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self.token = read_token(live.config.data.folder)

    def open(self, method: str, path: str, query: dict[str, Any], body: bytes | None = None) -> "Answer":
        host, port = self.live.server.addresses["admin"].rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=SAFETY_NET_SECONDS)
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request(method, f"{path}?{urlencode(query)}", body, headers)
        return Answer(connection)

    def __call__(self, method: str, path: str, body: bytes | None = None, **query: Any) -> tuple[int, bytes]:
        with self.open(method, path, query, body) as answer:
            return answer.response.status, answer.response.read()

    def json(self, method: str, path: str, body: bytes | None = None, **query: Any) -> Any:
        status, content = self(method, path, body, **query)
        assert status == 200, content
        return json.loads(content)

    def fails(self, method: str, path: str, body: bytes | None = None, **query: Any) -> tuple[int, str]:
        status, content = self(method, path, body, **query)
        return status, json.loads(content)["code"]

    def set(self, key: str, value: str) -> None:
        self.json("PUT", "/api/state/value", value.encode(), key=key)


class Answer:
    """An answer that may go on for long; leaving it closes its connection."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.response = connection.getresponse()

    def line(self) -> Any:
        """The next line that says something."""
        while line := self.response.readline():
            if line != b"\n":
                return json.loads(line)
        return None

    def begin(self) -> "Answer":
        """Go on once the server listens for us."""
        assert self.response.readline() == b"\n"
        return self

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self.connection.close()


def metric(api: Api, name: str) -> float:
    status, content = api("GET", "/metrics")
    assert status == 200
    return sum(float(line.split()[-1]) for line in content.decode().splitlines() if line.startswith(name))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/state/value"),
        ("PUT", "/api/state/value"),
        ("DELETE", "/api/state/value"),
        ("GET", "/api/state/values"),
        ("POST", "/api/state/values"),
        ("DELETE", "/api/state/values"),
        ("GET", "/api/state/tree"),
        ("GET", "/api/state/revisions"),
        ("GET", "/api/state/watch"),
        ("GET", "/api/listen"),
        ("POST", "/api/send"),
    ],
)
def test_nothing_of_it_works_without_the_token(api: Api, method: str, path: str) -> None:
    api.set("a", "1")
    api.token = "wrong"
    assert api.fails(method, path, key="a", pattern="#") == (401, "unauthorized")


@pytest.mark.parametrize("key", ["a", "a//b/", "", "Wörter/büch", "a b&c=d?e#f", "..", "50%2Foff", "x/" * 200])
def test_a_key_survives_the_query(api: Api, key: str) -> None:
    api.set(key, "[1]")
    assert api.json("GET", "/api/state/value", key=key) == {"key": key, "value": [1]}
    assert api.json("DELETE", "/api/state/value", key=key) == {"key": key, "value": [1]}
    assert api.fails("GET", "/api/state/value", key=key) == (404, "no_such_key")


def test_a_value_comes_back_as_the_text_that_was_set(api: Api) -> None:
    for text in ("1.10", '"\\u00e4 ä"', "null", '{"b":1, "a":2}', '"' + "x" * 2**20 + '"'):
        api.set("a", text)
        assert api("GET", "/api/state/value", key="a") == (200, f'{{"key":"a","value":{text}}}'.encode())


@pytest.mark.parametrize("value", [b"", b"hello", b"{", b"1 2", b"\xff", b'"\xff"', b"1e999", b"[" * 5000])
def test_what_is_no_json_is_refused_and_changes_nothing(api: Api, value: bytes) -> None:
    api.set("a", "1")
    assert api.fails("PUT", "/api/state/value", value, key="a") == (400, "invalid_value")
    assert api.json("GET", "/api/state/value", key="a")["value"] == 1


def test_compare_and_set_counts_versions_and_guards_them(api: Api) -> None:
    assert api.json("PUT", "/api/state/value", b"1", key="a", version=0)["version"] == 1
    assert api.fails("PUT", "/api/state/value", b"2", key="a", version=0) == (409, "version_mismatch")
    assert api.fails("PUT", "/api/state/value", b"2", key="a") == (409, "versioned")
    assert api.json("PUT", "/api/state/value", b"2", key="a", version=1)["version"] == 2
    assert api.json("GET", "/api/state/value", key="a") == {"key": "a", "value": 2, "version": 2}


def test_the_servers_own_keys_can_be_read_and_not_changed(api: Api) -> None:
    assert "value" in api.json("GET", "/api/state/value", key="$SYS/version")
    assert api.fails("PUT", "/api/state/value", b"1", key="$SYS/version") == (403, "read_only_key")
    assert api.fails("PUT", "/api/state/value", b"1", key="!/cred/1/2/3/x") == (403, "read_only_key")
    assert api.fails("DELETE", "/api/state/value", key="$SYS/version") == (403, "read_only_key")
    assert api.fails("DELETE", "/api/state/values", pattern="$SYS/#") == (403, "read_only_key")
    assert api.fails("POST", "/api/state/values", b'{"values":[{"key":"$SYS","value":1}]}') == (403, "read_only_key")


def test_wildcards_and_numbers_in_wrong_places_are_refused(api: Api) -> None:
    assert api.fails("PUT", "/api/state/value", b"1", key="a/?") == (400, "invalid_key")
    assert api.fails("GET", "/api/state/values", pattern="a/#/b") == (400, "invalid_pattern")
    assert api.fails("GET", "/api/listen", pattern="#/a") == (400, "invalid_pattern")
    assert api.fails("GET", "/api/state/watch", pattern="#/a") == (400, "invalid_pattern")
    assert api.fails("GET", "/api/state/value") == (400, "bad_request")
    for wrong in ("-1", "x", "1.5", "9" * 30, ""):
        assert api.fails("GET", "/api/state/value", key="a", as_of_offset=wrong) == (400, "bad_request")
    assert api.fails("GET", "/api/state/value", key="a", as_of_offset=1, as_of_time=1) == (400, "bad_request")


def test_keys_patterns_and_subjects_that_are_too_long_are_refused(api: Api) -> None:
    fits, over = "x" * 4096, "x" * 4097
    api.set(fits, "1")
    assert api.json("GET", "/api/state/values", pattern=fits) == {"key": fits, "value": 1}
    for method in ("PUT", "GET", "DELETE"):
        assert api.fails(method, "/api/state/value", b"1", key=over) == (400, "invalid_key")
    for path in ("/api/state/values", "/api/listen", "/api/state/watch"):
        assert api.fails("GET", path, pattern=over) == (400, "invalid_pattern")
    assert api.fails("POST", "/api/send", b'{"subject":"%b"}' % over.encode()) == (400, "invalid_event")
    assert api.json("POST", "/api/send", b'{"subject":"%b"}' % fits.encode())["topic"] is None


def test_a_batch_is_stored_whole_or_not_at_all(api: Api) -> None:
    bad = b'{"values":[{"key":"a","value":1},{"key":"b/#","value":2}]}'
    assert api.fails("POST", "/api/state/values", bad) == (400, "invalid_key")
    assert api("GET", "/api/state/tree") == (200, b"")
    good = b'{"values":[{"key":"a","value":1},{"key":"b","value":2,"version":7}]}'
    assert api.json("POST", "/api/state/values", good) == {"stored": 2}
    assert api("GET", "/api/state/tree")[1] == b'{"key":"a","value":1}\n{"key":"b","value":2,"version":7}\n'


def test_the_past_is_told_and_what_is_not_known_is_refused(api: Api) -> None:
    for value in ("1", "2"):
        api.set("a", value)
    api.json("DELETE", "/api/state/value", key="a")
    answer = api.json("GET", "/api/state/revisions", key="a")
    assert [(one.get("value"), one.get("deleted", False)) for one in answer["revisions"]] == [
        (1, False),
        (2, False),
        (None, True),
    ]
    first, second, _ = [one["offset"] for one in answer["revisions"]]
    assert api.json("GET", "/api/state/value", key="a", as_of_offset=second)["value"] == 2
    assert api.json("GET", "/api/state/values", pattern="#", as_of_offset=first)["value"] == 1
    assert api.fails("GET", "/api/state/tree", as_of_offset=10**6) == (416, "offset_out_of_range")
    assert [one["value"] for one in api.json("GET", "/api/state/revisions", key="a", max=1, before=second)["revisions"]]
    assert api("GET", "/api/state/tree", as_of_time=1) == (200, b"")


def test_a_watch_begins_with_what_there_is_and_follows_each_change(api: Api) -> None:
    api.set("a/b", "1")
    api.set("c", "1")
    with api.open("GET", "/api/state/watch", {"pattern": "a/#"}) as watch:
        assert watch.begin().line() == {"key": "a/b", "value": 1}
        api.set("c", "2")
        api.set("a", "3")
        api.json("DELETE", "/api/state/values", pattern="a/#")
        line = watch.line()
        assert (line["key"], line["value"], line["source"]) == ("a", 3, "admin")
        assert {(line["key"], line["deleted"]) for line in (watch.line(), watch.line())} == {("a", True), ("a/b", True)}


def test_a_value_that_a_topic_retains_is_a_change_too(api: Api) -> None:
    broker = api.live.server.broker
    api.live.call(lambda: broker.create_topic("t", 1, {"retain": "last"}, principal=SERVER))
    with api.open("GET", "/api/state/watch", {"pattern": "t/x", "new_only": ""}) as watch:
        watch.begin()
        headers = ((b"content-type", b"application/json"),)
        api.live.call(lambda: publish(broker, [Event("t/x", b'{\n"a": 1}', None, headers)]))
        line = watch.line()
        assert (line["key"], line["value"]) == ("t/x", {"a": 1})


def test_a_listener_hears_text_bytes_keys_headers_and_who_it_was(api: Api) -> None:
    broker = api.live.server.broker
    events = [
        Event("a/ä", "grüß".encode(), b"k", ((b"ce_source", b"sbus:uid=1"), (b"x", None)), 5),
        Event("a/\udcff", b"\xff", b"\xfe", ((b"x", b"1"), (b"x", b"2")), 6),
        Event("a/b", None, None, (), 7),
        Event("a", b"not below a", None, (), 8),
        Event("a/b/c", b"", None, (), 9),
    ]
    with api.open("GET", "/api/listen", {"pattern": "a/#"}) as listener:
        listener.begin()
        assert metric(api, "babelbus_live_subscriptions") == 1
        api.live.call(lambda: publish(broker, events))
        assert [listener.line() for _ in range(4)] == [
            {
                "timestamp": 5,
                "subject": "a/ä",
                "source": "sbus:uid=1",
                "key": "k",
                "payload": "grüß",
                "headers": {"x": None},
            },
            {
                "timestamp": 6,
                "subject_base64": "YS//",
                "key_base64": "/g==",
                "payload_base64": "/w==",
                "headers_base64": [["eA==", "MQ=="], ["eA==", "Mg=="]],
            },
            {"timestamp": 7, "subject": "a/b", "payload": None},
            {"timestamp": 9, "subject": "a/b/c", "payload": ""},
        ]


def test_of_two_forms_of_a_sent_thing_that_in_base64_holds(api: Api) -> None:
    with api.open("GET", "/api/listen", {"pattern": "#"}) as listener:
        listener.begin()
        plain = {"subject": "a", "payload": "b", "key": "c", "headers": {"d": "e"}}
        other = {
            "subject_base64": "QQ==",
            "payload_base64": "Qg==",
            "key_base64": "Qw==",
            "headers_base64": [["RA==", "RQ=="]],
        }
        api.json("POST", "/api/send", json.dumps(plain | other).encode())
        line = listener.line()
        assert [line[name] for name in plain] == ["A", "B", "C", {"D": "E"}]


def test_a_slow_listener_is_told_what_it_missed_and_the_metric_counts_it(api: Api) -> None:
    server = api.live.server
    api("GET", "/api/server")  # the first connection opens the endpoint
    assert server.administration.endpoint is not None
    server.administration.endpoint.api.live._bound = Bound(count=3)
    with api.open("GET", "/api/listen", {"pattern": "#"}) as listener:
        listener.begin()
        api.live.call(lambda: publish(server.broker, [Event("a", b"%d" % number) for number in range(10)]))
        assert [listener.line()["payload"] for _ in range(3)] == ["0", "1", "2"]
        assert listener.line() == {"dropped": 7}
        api.live.call(lambda: publish(server.broker, [Event("a", b"again")]))
        assert listener.line()["payload"] == "again"
    assert metric(api, 'babelbus_live_dropped_total{protocol="admin",reason="slow"}') == 7


def test_a_listener_that_goes_away_leaves_nothing_behind(api: Api) -> None:
    server = api.live.server
    with api.open("GET", "/api/listen", {"pattern": "#"}) as listener:
        listener.begin()
        assert not api.live.call(lambda: server.broker.router.empty)
    api.live.until(lambda: server.broker.router.empty)
    with api.open("GET", "/api/state/watch", {"pattern": "#"}) as watch:
        watch.begin()
        assert len(server.broker.state.watches) == 1
    api.live.until(lambda: not len(server.broker.state.watches))


def test_there_is_a_limit_of_listeners(api: Api) -> None:
    server = api.live.server
    api("GET", "/api/server")  # the first connection opens the endpoint
    assert server.administration.endpoint is not None
    feeds = server.administration.endpoint.api.live._feeds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("babelbus.web.live.FEEDS_MAX", 1)
        with api.open("GET", "/api/listen", {"pattern": "#"}) as listener:
            listener.begin()
            assert api.fails("GET", "/api/listen", pattern="#") == (503, "busy")
        api.live.until(lambda: not feeds)


def test_a_stop_of_the_server_ends_a_listener_in_good_order(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, admin=True)) as live:
        listener = Api(live).open("GET", "/api/listen", {"pattern": "#"}).begin()
    with listener:
        assert listener.line() is None


def test_what_is_sent_is_recorded_where_a_topic_covers_it_and_else_live_only(api: Api) -> None:
    broker = api.live.server.broker
    with api.open("GET", "/api/listen", {"pattern": "#"}) as listener:
        listener.begin()
        body = json.dumps({"subject": "t/x", "payload": "ä", "key": "k", "headers": {"a": "b"}}).encode()
        live_only = {"topic": None, "partition": None, "offset": None, "receivers": 1}
        assert api.json("POST", "/api/send", body) == live_only
        event = listener.line()
        assert (event["source"], event["key"], event["payload"], event["headers"]) == ("admin", "k", "ä", {"a": "b"})
        api.live.call(lambda: broker.create_topic("t", 1, principal=SERVER))
        assert api.json("POST", "/api/send", body) == {"topic": "t", "partition": 0, "offset": 0, "receivers": 1}
        assert listener.line()["subject"] == "t/x"
    assert metric(api, 'babelbus_records_published_total{protocol="admin",topic="t"}') == 1


@pytest.mark.parametrize(
    "body",
    [
        {"subject": ""},
        {"subject": "$state"},
        {"subject": "a", "headers": {"ce_source": "me"}},
        {"subject": "a", "headers": {"ce_subject": "b"}},
    ],
)
def test_an_event_that_would_lie_is_refused(api: Api, body: dict[str, Any]) -> None:
    assert api.fails("POST", "/api/send", json.dumps(body).encode()) == (400, "invalid_event")


def test_a_moment_that_compaction_has_gone_past_is_refused_with_what_can_be_asked(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        configure(tmp_path, admin=True),
        storage=StorageSettings(segment_bytes=4096),
        state=StateSettings(history_seconds=None),
    )
    with LiveServer(config) as live:
        api = Api(live)
        for number in range(200):
            api.set("a", str(number))
        log = live.server.broker.topic("$state").partition(0).log
        live.call(lambda: log.clean(2**50))
        status, content = api("GET", "/api/state/value", key="a", as_of_offset=3)
        answer = json.loads(content)
        assert (status, answer["code"]) == (410, "history_gone")
        assert f"the earliest is offset {answer['offset']} (" in answer["error"]
        assert api.json("GET", "/api/state/value", key="a", as_of_offset=answer["offset"])["value"] >= 3
        assert api.json("GET", "/api/state/revisions", key="a")["complete_from"] == answer["offset"] + 1


def test_a_listener_hears_sbus_worterbuch_and_jebp_clients_alike(api: Api) -> None:
    addresses = api.live.server.addresses
    api.live.call(lambda: api.live.server.broker.create_topic("t", 1, principal=SERVER))
    host, port = addresses["worterbuch-tcp"].rsplit(":", 1)
    with (
        api.open("GET", "/api/listen", {"pattern": "t/#"}) as below,
        api.open("GET", "/api/listen", {"pattern": "t"}) as itself,
        SbusClient(addresses["sbus"]) as sbus,
        BlockingClient(addresses["jebp"], identity=api.live.admin) as jebp,
        socket.create_connection((host, int(port)), SAFETY_NET_SECONDS) as worterbuch,
    ):
        below.begin()
        itself.begin()
        sbus.publish(b"t/sbus", b"\xff")
        line = below.line()
        assert (line["subject"], line["payload_base64"], line["source"][:9]) == ("t/sbus", "/w==", "sbus:uid=")
        worterbuch.sendall(
            b'{"protocolSwitchRequest":{"version":1}}\n{"set":{"transactionId":1,"key":"t/wb","value":"v"}}\n'
        )
        line = below.line()
        assert (line["subject"], line["payload"], line["source"].partition(":")[0]) == ("t/wb", '"v"', "worterbuch")
        jebp.publish("t", b"from jebp")
        assert itself.line()["payload"] == "from jebp"
