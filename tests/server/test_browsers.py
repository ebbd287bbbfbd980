"""What pages of other origins and rebound names cannot do, at every HTTP door of a server with its defaults."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from babelbus.config import ServerSettings, WorterbuchSettings, ZbusSettings
from babelbus.errors import ConfigError
from babelbus.protocols.browsers import read_browsers, read_origins
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.browsers import export, picture
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.http import Response
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, SocketClient, request_of

EVIL = "http://evil.example"
CHROME = {"user_agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/140.0.0.0 Safari/537.36"}
IMAGE = {**CHROME, "referer": f"{EVIL}/", "sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
FORM = {**CHROME, "origin": EVIL, "sec_fetch_site": "cross-site"}
BROWSERS = {
    "an image": IMAGE,
    "an image that hides its page": CHROME,
    "an image in a page of another port": {**CHROME, "sec_fetch_site": "same-site"},
    "a link in a mail": {**CHROME, "sec_fetch_site": "none"},
    "a form": FORM,
    "a form in a sandbox": {**FORM, "origin": "null"},
}
DOORS = ("zbus", "zbus-monitor", "worterbuch", "admin")


def serve(folder: Path, *, server: ServerSettings | None = None, **zbus: Any) -> LiveServer:
    settings = ZbusSettings(port=0, monitor_port=0, **zbus)
    return LiveServer(configure(folder, zbus=settings, server=server, admin=True))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("bus")) as running:
        assert ask(running, "zbus", "POST", "/", cmd="create", mq="T", channel="C").status == 200
        assert ask(running, "zbus", "POST", "/", b"first", cmd="pub", mq="T").status == 200
        assert ask(running, "worterbuch", "POST", "/api/v1/set/k", b"1", content_type="application/json").status == 200
        yield running


def ask(live: LiveServer, door: str, method: str, url: str, body: bytes = b"", /, **headers: str) -> Response:
    """Send one request over a connection of its own."""
    with HttpClient(live.server.addresses[door]) as client:
        return client.ask(method, url, body, **headers)


def refusals(live: LiveServer, protocol: str, reason: str) -> float:
    return float(live.server.metrics.browser_requests_refused_total.labels(protocol, reason)._value.get())


# -- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", BROWSERS.values(), ids=BROWSERS)
@pytest.mark.parametrize("door", ["zbus", "zbus-monitor"])
@pytest.mark.parametrize(
    "url",
    [
        *("/?cmd=remove&mq=T", "/?CMD=remove&mq=T", "/?cmd=remove&mq=T&channel=C", "/?cmd=create&mq=New"),
        *("/?cmd=pub&mq=T&body=x", "/?cmd=PUB&mq=T&body=x", "/?cmd=pub&mq=T&body=x&ack=false"),
        *("/?cmd=take&mq=T&channel=C", "/?cmd=bind&mq=T&body=%5B%5D", "/?cmd=route&target=x", "/?cmd=nonsense"),
        *("/T", "/T/deep?x=1"),
    ],
)
def test_a_get_of_a_browser_changes_nothing_at_zbus(
    live: LiveServer, door: str, url: str, marks: dict[str, str]
) -> None:
    before = picture(live)
    for method in ("GET", "HEAD"):
        assert ask(live, door, method, url, **marks).status == 403
    assert picture(live) == before


@pytest.mark.parametrize("marks", BROWSERS.values(), ids=BROWSERS)
@pytest.mark.parametrize(
    ("url", "content_type", "body"),
    [
        ("/", "application/x-www-form-urlencoded", b"cmd=remove&mq=T"),
        ("/?cmd=remove&mq=T", "application/x-www-form-urlencoded", b"a=1"),
        ("/?cmd=pub&mq=T", "text/plain", b"x"),
        (
            "/?cmd=pub&mq=T",
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n--b--\r\n',
        ),
        ("/T", "text/plain", b"x"),
    ],
)
def test_a_form_changes_nothing_at_zbus(
    live: LiveServer, url: str, content_type: str, body: bytes, marks: dict[str, str]
) -> None:
    before = picture(live)
    answer = ask(live, "zbus", "POST", url, body, content_type=content_type, **marks)
    # A form that only asks for the welcome page is no change.
    assert answer.status == 403 or (url == "/" and "origin" not in marks)
    assert picture(live) == before


def test_publications_of_a_page_that_come_at_once_are_all_refused(live: LiveServer) -> None:
    before = picture(live)
    headers = {"cmd": "pub", "mq": "T", "content_type": "text/plain"}
    with HttpClient(live.server.addresses["zbus"]) as client:
        client.send(b"".join(request_of("POST", "/", b"x", id=str(at), **headers, **IMAGE) for at in range(20)))
        assert {client.next().status for _ in range(20)} == {403}
    with HttpClient(live.server.addresses["zbus"]) as client:
        client.send(b"".join(request_of("POST", "/", b"x", id=str(at), **headers, **FORM) for at in range(20)))
        assert client.next().status == 403
        assert client.is_closed()
    assert picture(live) == before


def test_a_page_behind_a_tool_on_one_connection_is_refused(live: LiveServer) -> None:
    """The head that a connection knows by heart is another one."""
    headers = {"cmd": "pub", "mq": "T", "content_type": "text/plain"}
    with HttpClient(live.server.addresses["zbus"]) as client:
        for _ in range(5):
            assert client.ask("POST", "/", b"x", id="1", **headers).status == 200
        before = picture(live)
        for _ in range(3):
            assert client.ask("POST", "/", b"x", id="1", **headers, **IMAGE).status == 403
        assert client.ask("POST", "/", b"x", id="1", **headers, **FORM).status == 403
    assert picture(live) == before


@pytest.mark.parametrize("marks", BROWSERS.values(), ids=BROWSERS)
@pytest.mark.parametrize(
    ("method", "url", "content_type", "body"),
    [
        ("POST", "/api/set", "application/x-www-form-urlencoded", b"k=2&k/new=3"),
        ("POST", "/api/v1/set/k", "text/plain", b"2"),
        ("POST", "/api/v1/set/k", "application/json", b"2"),
        ("POST", "/api/v1/publish/k", "text/plain", b"2"),
        ("DELETE", "/api/v1/delete/k", "text/plain", b""),
        ("DELETE", "/api/v1/pdelete/%23", "text/plain", b""),
    ],
)
def test_a_form_changes_nothing_at_worterbuch(
    live: LiveServer, method: str, url: str, content_type: str, body: bytes, marks: dict[str, str]
) -> None:
    before = picture(live)
    assert ask(live, "worterbuch", method, url, body, content_type=content_type, **marks).status == 403
    assert picture(live) == before


@pytest.mark.parametrize("marks", BROWSERS.values(), ids=BROWSERS)
def test_a_form_imports_nothing(live: LiveServer, marks: dict[str, str]) -> None:
    old, before = export(live), picture(live)
    json_type = {"content_type": "application/json"}
    assert ask(live, "worterbuch", "POST", "/api/v1/set/k", b'"newer"', **json_type).status == 200
    assert ask(live, "worterbuch", "POST", "/api/v1/import", old, content_type="text/plain", **marks).status == 403
    assert picture(live) != before
    assert ask(live, "worterbuch", "POST", "/api/v1/import", old, content_type="text/plain").status == 200
    assert picture(live) == before


@pytest.mark.parametrize("marks", BROWSERS.values(), ids=BROWSERS)
def test_a_form_is_refused_by_the_admin_before_its_token_is_looked_at(live: LiveServer, marks: dict[str, str]) -> None:
    answer = ask(live, "admin", "POST", "/api/reload", b"x=1", content_type="text/plain", **marks)
    assert (answer.status, b'"forbidden"' in answer.body) == (403, True)


@pytest.mark.parametrize("door", ["zbus", "zbus-monitor", "worterbuch"])
def test_no_page_of_another_origin_opens_a_websocket(live: LiveServer, door: str) -> None:
    for headers in ([("origin", EVIL)], [("origin", "null")], [("user-agent", CHROME["user_agent"])]):
        with HttpClient(live.server.addresses[door]) as client:
            client.send(encode_upgrade_request("localhost", "/ws", make_key(), headers=headers) + b"\x81\x80\0\0\0\0")
            assert client.next().status == 403
            assert client.is_closed()


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", ["/", "/?cmd=query", "/metrics", "/health", "/api/v1/pget/%23", "/api/topics", "/none"])
def test_a_rebound_name_reads_nothing(live: LiveServer, door: str, url: str) -> None:
    host = "rebound.example:" + live.server.addresses[door].rpartition(":")[2]
    own = {**CHROME, "host": host, "referer": f"http://{host}/", "sec_fetch_site": "same-origin"}
    for marks in ({"host": host}, own, {**own, "origin": f"http://{host}"}):
        for method in ("GET", "OPTIONS"):
            answer = ask(live, door, method, url, **marks)
            assert answer.status == 421
            assert b"server.host_names" in answer.body


@pytest.mark.parametrize("door", DOORS)
def test_two_hosts_are_none(live: LiveServer, door: str) -> None:
    with HttpClient(live.server.addresses[door]) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: rebound.example\r\nconnection: close\r\n\r\n")
        assert client.next().status in (400, 421)


@pytest.mark.parametrize(
    ("door", "url"), [("zbus", "/?cmd=query"), ("worterbuch", "/api/v1/get/k"), ("admin", "/metrics")]
)
def test_a_page_of_another_origin_is_not_answered(live: LiveServer, door: str, url: str) -> None:
    for origin in (EVIL, "null", "http://localhost:1"):
        answer = ask(live, door, "GET", url, **CHROME, origin=origin)
        assert answer.status == 403
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert ask(live, door, "OPTIONS", url, origin=origin, access_control_request_method="GET").status == 403


@pytest.mark.parametrize(
    ("door", "url", "text"),
    [
        ("zbus", "/", b"Babelbus"),
        ("zbus", "/?cmd=query", b'"T"'),
        ("zbus", "/favicon.ico", b""),
        ("zbus-monitor", "/", b"T"),
        ("worterbuch", "/api/v1/get/k", b"1"),
        ("admin", "/metrics", b"babelbus_connections"),
        ("admin", "/health", b"ok"),
    ],
)
def test_who_types_an_address_may_read(live: LiveServer, door: str, url: str, text: bytes) -> None:
    for site in ({"sec_fetch_site": "none"}, {}):
        answer = ask(live, door, "GET", url, **CHROME, **site)
        assert (answer.status, text in answer.body) == (200, True)


# -- who may -----------------------------------------------------------------------------------------------------------


def test_tools_do_what_they_did(live: LiveServer) -> None:
    for marks in ({}, {"user_agent": "curl/8.5.0", "accept": "*/*"}, {"user_agent": "node", "sec_fetch_mode": "cors"}):
        for host in ("127.0.0.1:15555", "localhost", "[::1]:1", socket.gethostname()):
            assert ask(live, "zbus", "GET", "/?cmd=create&mq=Tools", host=host, **marks).status == 200
            assert ask(live, "zbus", "GET", "/?cmd=pub&mq=Tools&body=hi", host=host, **marks).status == 200
            assert ask(live, "worterbuch", "POST", "/api/set", b"tools=1", host=host, **marks,
                       content_type="application/x-www-form-urlencoded").status == 200  # fmt: skip
            assert ask(live, "admin", "GET", "/metrics", host=host, **marks).status == 200
    with HttpClient(live.server.addresses["zbus"]) as client:
        client.send(b"GET /?cmd=query HTTP/1.0\r\n\r\n")
        assert client.next().status == 200


def test_pages_of_the_server_itself_may_do_everything(live: LiveServer) -> None:
    own = "http://" + live.server.addresses["zbus"]
    host = {"host": live.server.addresses["zbus"], **CHROME}
    for marks in ({"origin": own}, {"sec_fetch_site": "same-origin"}, {"referer": f"{own}/page.html"}):
        assert ask(live, "zbus", "GET", "/?cmd=create&mq=Own", **host, **marks).status == 200
        assert ask(live, "worterbuch", "POST", "/api/v1/set/own", b"1", **host, **marks,
                   content_type="application/json").status == 200  # fmt: skip


def test_the_settings_let_further_names_and_pages_in(tmp_path: Path) -> None:
    page = "https://app.example"
    settings = ServerSettings(host_names="bus.example, Other.Example.", allowed_origins=f"{page}:443/")
    with serve(tmp_path, server=settings) as live:
        for door, url in (
            ("zbus", "/?cmd=query"),
            ("worterbuch", "/info"),
            ("admin", "/metrics"),
            ("zbus-monitor", "/"),
        ):
            for host in ("bus.example", "BUS.example:1234", "other.example"):
                assert ask(live, door, "GET", url, host=host).status == 200
            assert ask(live, door, "GET", url, host="evil.example").status == 421
            assert ask(live, door, "GET", url, origin=page).status == 200
            assert ask(live, door, "GET", url, origin=EVIL).status == 403
        preflight = {"origin": page, "access_control_request_method": "POST"}
        for door, url in (("zbus", "/"), ("worterbuch", "/api/v1/set/x")):
            answer = ask(live, door, "OPTIONS", url, **preflight)
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, page)
        assert ask(live, "zbus", "GET", "/?cmd=create&mq=Q", origin=page, **CHROME).status == 200
        assert ask(live, "worterbuch", "POST", "/api/set", b"x=1", origin=page, **CHROME,
                   content_type="application/x-www-form-urlencoded").status == 200  # fmt: skip
        for door in ("zbus", "worterbuch"):
            with HttpClient(live.server.addresses[door]) as client:
                client.send(encode_upgrade_request("localhost", "/ws", make_key(), headers=[("origin", page)]))
                assert client.next().status == 101


def test_a_list_of_one_protocol_holds_for_that_one_alone(tmp_path: Path) -> None:
    page = "http://page.example"
    config = configure(
        tmp_path,
        zbus=ZbusSettings(port=0, cors_origins=page),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, cors_origins="http://other.example"),
    )
    with LiveServer(config) as live:
        assert ask(live, "zbus", "GET", "/?cmd=create&mq=Q", origin=page).status == 200
        assert ask(live, "worterbuch", "GET", "/info", origin=page).status == 403
        assert ask(live, "worterbuch", "GET", "/info", origin="http://other.example").status == 200


def test_services_are_called_by_pages_of_the_server_and_tools_alone(live: LiveServer) -> None:
    with SocketClient(live.server.addresses["zbus"]) as service:
        service.do("create", mq="Svc", channel="C")
        service.do("sub", mq="Svc", channel="C")
        for marks in (IMAGE, {**CHROME, "sec_fetch_site": "none"}):
            assert ask(live, "zbus", "GET", "/Svc/page", **marks).status == 403
        with HttpClient(live.server.addresses["zbus"]) as client:
            client.send(request_of("GET", "/Svc/page", **CHROME, sec_fetch_site="same-origin"))
            call = service.next()["headers"]
            service.say("route", "hi", target=call["source"], id=call["id"])
            assert client.next().status == 200


# -- other protocols -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["worterbuch-tcp", "jebp"])
@pytest.mark.parametrize("cut", [None, b"\r\n", b"\r\n\r\n"])
def test_what_a_form_sends_to_a_port_without_http_is_not_carried_out(
    live: LiveServer, door: str, cut: bytes | None
) -> None:
    line = b'{"set":{"transactionId":1,"key":"k","value":"from a page"}}\n'
    body = b"\n" + line * 100
    request = request_of("POST", "/", body, **FORM, content_type="text/plain")
    before = picture(live)
    host, _, port = live.server.addresses[door].rpartition(":")
    with socket.create_connection((host, int(port)), SAFETY_NET_SECONDS) as client:
        end = len(request) if cut is None else request.index(cut) + len(cut)
        try:
            client.sendall(request[:end])
            client.sendall(request[end:])
            while client.recv(2**16):
                pass
        except (ConnectionResetError, BrokenPipeError):  # closed before all was sent
            pass
    assert picture(live) == before


# -- what the operator sees ------------------------------------------------------------------------------------------


def test_refusals_are_counted_and_the_first_of_each_kind_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as live:
        for _ in range(3):
            ask(live, "zbus", "GET", "/?cmd=remove&mq=T", **IMAGE)
            ask(live, "worterbuch", "GET", "/info", origin=EVIL)
            ask(live, "admin", "GET", "/metrics", host="rebound.example")
        counts = [("zbus", "change"), ("worterbuch", "origin"), ("admin", "host"), ("zbus", "host")]
        assert [refusals(live, *labels) for labels in counts] == [3, 3, 3, 0]
        assert b"babelbus_browser_requests_refused_total" in ask(live, "admin", "GET", "/metrics").body
    lines = [one.getMessage() for one in caplog.records if one.name == "babelbus.protocols.browsers"]
    assert len(lines) == 3
    assert "rebound.example" in lines[2]


def test_aiohttp_and_the_standard_library_are_tools(live: LiveServer) -> None:
    async def run() -> list[int]:
        address = live.server.addresses["zbus"]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/?cmd=create&mq=Aio") as answer:
                statuses = [answer.status]
            async with session.ws_connect(f"http://{address}/") as client:
                await client.send_json({"headers": {"cmd": "query", "id": "1"}})
                statuses.append((await client.receive_json())["status"])
        return statuses

    assert asyncio.run(run()) == [200, 200]


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["http://bus.example", "bus.example:80", "*", "*.example", "bus example", "b\xfcs", ".a"]
)
def test_a_name_that_no_browser_sends_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host_names"):
        read_browsers(ServerSettings(host_names=f"good.example, {name}"))


@pytest.mark.parametrize("text", ["*", "app.example", "https://app.example/path", "https://", "null"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allowed_origins"):
        read_browsers(ServerSettings(allowed_origins=text))
    with pytest.raises(ConfigError, match=r"worterbuch\.cors_origins"):
        read_origins("worterbuch.cors_origins", text)


def test_origins_are_read_as_browsers_send_them() -> None:
    text = " https://A.example/ ,http://b:1, http://c:80,https://d:443, https://e:80, http://[::80]"
    origins = {"https://a.example", "http://b:1", "http://c", "https://d", "https://e:80", "http://[::80]"}
    assert read_origins("x", text) == origins
    assert read_origins("x", None) == read_origins("x", "") == frozenset()
    assert read_origins("x", "*, http://a", any_allowed=True) == {"*", "http://a"}
