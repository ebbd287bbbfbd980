"""The paths of EventMesh's admin server against a real server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from babelbus.config import EventmeshSettings
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, admin_port=0)
    with LiveServer(configure(tmp_path_factory.mktemp("mesh"), eventmesh=settings)) as server:
        yield server


@pytest.fixture
def admin(live: LiveServer) -> Iterator[HttpClient]:
    with HttpClient(live.server.addresses["eventmesh-admin"]) as client:
        yield client


def dial(live: LiveServer, **agent: str) -> MeshClient:
    return MeshClient(live.server.addresses["eventmesh-tcp"]).hello(**agent)


def ask(admin: HttpClient, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    response = admin.ask(method, path, data, **headers)
    answer = json.loads(response.body)
    return response.status, answer.get("data", answer.get("message"))


def test_sessions_are_listed_without_secrets(live: LiveServer, admin: HttpClient) -> None:
    with dial(live, subsystem="listed").listen("admin/heard"):
        for path in (
            "/client/tcp", "/clientManage/showClient", "/clientManage/showClientBySystem?subsystem=listed",
            "/clientManage/showListenClientByTopic?topic=admin/heard",
        ):  # fmt: skip
            status, found = ask(admin, "GET", path)
            assert status == 200
            (session,) = [one for one in found if one["subsystem"] == "listed"]
            assert (session["group"], session["topics"]) == ("G", ["admin/heard"])
            assert not {"username", "password", "token"} & set(session)
        assert ask(admin, "GET", "/clientManage/showClientBySystem?subsystem=other") == (200, [])
        assert ask(admin, "GET", "/client/http") == (200, [])
        assert ask(admin, "GET", "/client/grpc") == (200, [])


def test_the_answer_to_a_head_request_has_no_body(admin: HttpClient) -> None:
    response = admin.ask("HEAD", "/client/http")
    assert (response.status, response.body) == (404, b"")
    assert ask(admin, "GET", "/client/http") == (200, [])  # nothing stands in front of the next answer


@pytest.mark.parametrize("way", ["system", "address", "delete", "all"])
def test_a_rejected_session_gets_a_goodbye(live: LiveServer, admin: HttpClient, way: str) -> None:
    with dial(live, subsystem="other") as other, dial(live, subsystem="rejected") as client:
        host, port = client.socket.getsockname()
        method, path, body = {
            "system": ("GET", "/clientManage/rejectClientBySubSystem?subsystem=rejected", None),
            "address": ("GET", f"/clientManage/rejectClientByIpPort?ip={host}&port={port}", None),
            "delete": ("DELETE", "/client/tcp", {"host": host, "port": port}),
            "all": ("GET", "/clientManage/rejectAllClient", None),
        }[way]
        status, rejected = ask(admin, method, path, body)
        assert (status, len(rejected)) == (200, 2 if way == "all" else 1)
        header, _ = client.next()
        assert (header["cmd"], header["code"]) == ("SERVER_GOODBYE_REQUEST", 0)
        if way != "all":
            assert other.ask("HEARTBEAT_REQUEST")["code"] == 0


def test_a_redirected_session_is_told_where_to_go(live: LiveServer, admin: HttpClient) -> None:
    with dial(live, path="/moved") as client:
        path = "/clientManage/redirectClientByPath?path=/moved&desteventMeshIp=10.0.0.2&desteventMeshPort="
        assert ask(admin, "GET", f"{path}x")[0] == 400
        assert ask(admin, "GET", f"{path}10000")[0] == 200
        header, body = client.next()
        assert (header["cmd"], body) == ("REDIRECT_TO_CLIENT", {"ip": "10.0.0.2", "port": 10000})


def test_topics_are_made_listed_and_removed_and_events_published(live: LiveServer, admin: HttpClient) -> None:
    assert ask(admin, "POST", "/topic", {"name": "admin/made"}) == (200, "success")
    assert {"name": "admin/made"} in ask(admin, "GET", "/topic")[1]
    with dial(live).listen("admin/made") as client:
        event = {"specversion": "1.0", "id": "1", "source": "/", "type": "t", "subject": "admin/made", "data": 1}
        assert ask(admin, "POST", "/event", event) == (200, "success")
        assert client.push()[1]["data"] == 1
    assert ask(admin, "DELETE", "/topic", {"name": "admin/made"}) == (200, "success")
    assert {"name": "admin/made"} not in ask(admin, "GET", "/topic")[1]
    assert ask(admin, "DELETE", "/topic", {"name": "admin/none"})[0] == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/configuration", None, 404), ("GET", "/clientManage/whatever", None, 404),
        ("PUT", "/topic", None, 404), ("POST", "/topic", None, 400), ("POST", "/topic", [1], 400),
        ("POST", "/topic", {"name": "$state"}, 400), ("POST", "/event", {"a": 1}, 400),
        ("DELETE", "/client/tcp", None, 400), ("GET", "/clientManage/rejectClientByIpPort?ip=1", None, 400),
        ("GET", "/clientManage/rejectClientByIpPort?ip=%zz", None, 400),
    ],
)  # fmt: skip
def test_what_is_not_served_is_answered_with_a_sentence(
    admin: HttpClient, method: str, path: str, body: object, status: int
) -> None:
    found, text = ask(admin, method, path, body)
    assert (found, " " in text) == (status, True)


@pytest.mark.parametrize("path", ["/clientManage/rejectAllClient", "/topic"])
def test_a_web_page_changes_nothing(live: LiveServer, path: str) -> None:
    agent = {"user_agent": "Mozilla/5.0", "host": "localhost", "origin": "http://evil.example"}
    for headers in (agent, {"user_agent": "Mozilla/5.0", "host": "localhost"}):
        with HttpClient(live.server.addresses["eventmesh-admin"]) as admin:
            method = "GET" if "reject" in path else "POST"
            assert admin.ask(method, path, b'{"name": "x"}', **headers).status in (403, 421)


def test_without_a_setting_nothing_listens(tmp_path: Any) -> None:
    with LiveServer(configure(tmp_path)) as live:
        assert "eventmesh-admin" not in live.server.addresses
