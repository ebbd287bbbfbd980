"""What browsers get at the port of zbus, through real sockets: files, pages of other origins, open urls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import ZbusSettings
from babelbus.errors import ConfigError
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.service import read_web_options
from tests.support.server import LiveServer, configure
from tests.support.signing import sign_frame
from tests.support.zbus import HttpClient, SocketClient, command, request_of

PAGE = "http://page.example"
OTHER = "http://other.example"


def serve(folder: Path, **settings: Any) -> LiveServer:
    return LiveServer(configure(folder, zbus=ZbusSettings(port=0, **settings)))


def allowed(headers: dict[str, str]) -> dict[str, str]:
    """What a response says about origins."""
    return {name: value for name, value in headers.items() if name.startswith("access-control") or name == "vary"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (made / "app.js").write_text("1")
    (made / "a+b c.json").write_text("{}")
    (made / "sub" / "index.html").write_text("<p>sub")
    (made / "out.txt").symlink_to(tmp_path / "secret.txt")
    (made / "large.bin").write_bytes(bytes(range(256)) * 4096)
    return made


@pytest.fixture
def web(tmp_path: Path, root: Path) -> Iterator[HttpClient]:
    settings = {"web_root": str(root), "package_bytes_max": 1_048_576}
    with serve(tmp_path / "data", **settings) as live, HttpClient(live.server.addresses["zbus"]) as client:
        yield client


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_are_given_where_no_url_is_a_services_and_services_come_first(web: HttpClient) -> None:
    found = web.ask("GET", "/app.js?v=1", id="7")
    assert (found.status, found.body, found.headers["id"]) == (200, b"1", "7")
    assert found.headers["content-type"] == "text/javascript; charset=utf-8"
    assert found.headers["cache-control"] == "no-cache"
    assert web.ask("GET", "/a+b%20c.json").body == b"{}"
    assert web.ask("GET", "/sub").body == web.ask("GET", "/sub/").body == b"<p>sub"
    with SocketClient(address_of(web)) as service:
        service.do("create", mq="sub", channel="C")
        service.do("sub", mq="sub", channel="C")
        web.send(request_of("GET", "/sub/"))
        call = service.next()
        service.say("route", "served", target=call["headers"]["source"], id=call["headers"]["id"])
        assert web.next().body == b'"served"'


def address_of(client: HttpClient) -> str:
    return "{}:{}".format(*client.socket.getpeername())


@pytest.mark.parametrize(
    "url",
    [
        *(
            "/../secret.txt",
            "/%2e%2e/secret.txt",
            "/sub/..%2f..%2fsecret.txt",
            "/..%5csecret.txt",
            "/out.txt",
            "/x%00y",
        ),
        *("/missing", "/app.js/", "/%ff"),
    ],
)
def test_what_is_no_file_below_the_folder_is_not_found(web: HttpClient, url: str) -> None:
    assert web.ask("GET", url).status == (400 if url == "/%ff" else 404)


def test_without_an_index_the_root_is_the_welcome_page_and_with_one_it_is_that(web: HttpClient, root: Path) -> None:
    assert b"Babelbus" in web.ask("GET", "/").body
    (root / "index.html").write_text("<p>home")
    assert web.ask("GET", "/").body == b"<p>home"
    assert web.ask("GET", "/?cmd=query").body == b"[]"
    assert web.ask("GET", "/missing", id="i").headers["id"] == "i"


def test_head_and_conditions_bring_no_body(web: HttpClient) -> None:
    first = web.ask("GET", "/app.js")
    head = web.ask("HEAD", "/app.js")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "1")
    for asked in ({"if_none_match": first.headers["etag"]}, {"if_modified_since": first.headers["last-modified"]}):
        same = web.ask("GET", "/app.js", **asked)
        assert (same.status, same.body, same.headers["etag"]) == (304, b"", first.headers["etag"])
    assert web.ask("GET", "/app.js", if_none_match='"other"').status == 200


def test_a_file_up_to_the_limit_of_a_message_is_given_and_a_larger_one_refused(web: HttpClient, root: Path) -> None:
    assert web.ask("GET", "/large.bin").body == bytes(range(256)) * 4096
    with (root / "large.bin").open("ab") as file:
        file.write(b"x")
    assert web.ask("GET", "/large.bin").status == 500


def test_pipelined_requests_for_files_and_commands_are_answered_in_order(web: HttpClient) -> None:
    web.do("create", mq="Q", channel="C")
    for _ in range(20):
        web.send(
            request_of("GET", "/app.js")
            + request_of("POST", "/", b"x", cmd="pub", mq="Q", id="p")
            + request_of("GET", "/large.bin")
            + request_of("GET", "/missing")
            + request_of(cmd="take", mq="Q", channel="C")
        )
        found = [web.next() for _ in range(5)]
        assert [one.status for one in found] == [200, 200, 200, 404, 200]
        assert len(found[2].body) == 1_048_576
    web.send(request_of("GET", "/app.js", connection="close") + request_of(cmd="remove", mq="Q"))
    assert web.next().body == b"1"
    assert web.is_closed()


def test_a_post_to_a_file_and_a_file_asked_for_over_websocket_are_not_found(web: HttpClient) -> None:
    assert web.ask("POST", "/app.js", b"x").status == 404
    with SocketClient(address_of(web)) as client:
        client.say_all([{"url": "/app.js"}])
        assert client.next()["status"] == 404


def test_browsers_may_keep_files_for_as_long_as_the_operator_says(tmp_path: Path, root: Path) -> None:
    settings = {"web_root": str(root), "web_cache_seconds": 60}
    with serve(tmp_path / "data", **settings) as live, HttpClient(live.server.addresses["zbus"]) as web:
        assert web.ask("GET", "/app.js").headers["cache-control"] == "max-age=60"


# -- pages of other origins ------------------------------------------------------------------------------------------


def test_a_listed_page_is_told_that_it_may_ask_and_another_is_not(tmp_path: Path) -> None:
    settings = {"cors_origins": f"{PAGE}, https://x", "cors_methods": "GET,POST", "cors_expose_headers": "id"}
    with serve(tmp_path, **settings) as live, HttpClient(live.server.addresses["zbus"]) as web:
        asked = {"access_control_request_method": "POST", "access_control_request_headers": "cmd, mq, bad name"}
        answer = web.ask("OPTIONS", "/any", origin=PAGE, **asked)
        assert (answer.status, answer.body) == (204, b"")
        assert allowed(answer.headers) == {
            "access-control-allow-origin": PAGE,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "cmd, mq",
            "access-control-max-age": "600",
            "vary": "origin",
        }
        said = {"access-control-allow-origin": PAGE, "access-control-expose-headers": "id", "vary": "origin"}
        web.do("create", mq="Q")
        for answer in (
            web.ask("GET", "/?cmd=query", origin=PAGE),
            web.ask("GET", "/missing", origin=PAGE),
            web.do("pub", b"x", mq="Q", origin=PAGE),
        ):
            assert allowed(answer.headers) == said
        assert allowed(web.ask("GET", "/?cmd=query").headers) == {"vary": "origin"}
        for url in ("/any", "/?cmd=query"):
            with HttpClient(address_of(web)) as other:
                answer = other.ask("OPTIONS", url, origin=OTHER, **asked)
                assert (answer.status, allowed(answer.headers)) == (403, {})


def test_publications_of_a_page_that_come_at_once_are_all_answered_for_it(tmp_path: Path) -> None:
    with serve(tmp_path, cors_origins=PAGE) as live, HttpClient(live.server.addresses["zbus"]) as web:
        web.do("create", mq="Q")
        headers = {"cmd": "pub", "mq": "Q", "content_type": "text/plain", "origin": PAGE}
        web.send(b"".join(request_of("POST", "/", b"x", id=str(at), **headers) for at in range(50)))
        found = [web.next() for _ in range(50)]
        assert [one.headers["id"] for one in found] == list(map(str, range(50)))
        assert {one.headers["access-control-allow-origin"] for one in found} == {PAGE}


def test_any_page_may_ask_if_the_operator_says_so_and_what_services_say_of_origins_does_not_count(
    tmp_path: Path,
) -> None:
    with serve(tmp_path, cors_origins="*") as live, SocketClient(live.server.addresses["zbus"]) as service:
        service.do("create", mq="Svc", channel="C")
        service.do("sub", mq="Svc", channel="C")
        with HttpClient(live.server.addresses["zbus"]) as web:
            web.send(request_of("GET", "/Svc/page", origin=OTHER))
            call = service.next()["headers"]
            told = {"content-type": "text/html", "Access-Control-Allow-Origin": "http://service.example"}
            service.say("route", "hi", target=call["source"], id=call["id"], **told)
            answer = web.next()
            assert (answer.status, answer.body) == (200, b"hi")
            assert allowed(answer.headers) == {
                "access-control-allow-origin": "*",
                "access-control-expose-headers": "*",
            }


def test_without_the_setting_nothing_is_said_of_origins_and_options_go_to_services(tmp_path: Path) -> None:
    with serve(tmp_path) as live, HttpClient(live.server.addresses["zbus"]) as web:
        for origin, status in (("http://localhost", 404), (PAGE, 403)):
            answer = web.ask("OPTIONS", "/any", origin=origin, access_control_request_method="POST")
            assert (answer.status, allowed(answer.headers)) == (status, {})


# -- urls without signature ------------------------------------------------------------------------------------------


def test_open_urls_need_no_signature_and_commands_always_do(tmp_path: Path, root: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key secret\n")
    keys.chmod(0o600)
    settings = {"auth_file": str(keys), "auth_excluded": "/ /sub/* /Svc/public*", "web_root": str(root)}
    with serve(tmp_path / "data", **settings) as live, SocketClient(live.server.addresses["zbus"]) as service:

        def signed(**message: Any) -> None:
            made = Message({name: str(value) for name, value in message["headers"].items()})
            service.say_all([{"headers": sign_frame(made, "key", "secret").headers}])

        for cmd in ("create", "sub"):
            signed(**command(cmd, mq="Svc", channel="C"))
            assert service.next()["status"] == 200
        with HttpClient(live.server.addresses["zbus"]) as web:
            assert web.ask("GET", "/sub/").body == b"<p>sub"
            assert b"Babelbus" in web.ask("GET", "/").body
            for url, headers in (
                ("/app.js", {}),
                ("/Svc/private", {}),
                ("/?cmd=query", {}),
                ("/?CMD=query", {}),
                ("/sub/", {"cmd": "query"}),
                ("/Svc/public", {"cmd": "remove", "mq": "Svc"}),
            ):
                answer = web.ask("GET", url, **headers)
                assert (answer.status, answer.body) == (403, b"missing apiKey in request"), url
            web.send(request_of("GET", "/Svc/public/page"))
            call = service.next()
            assert call["url"] == "/Svc/public/page"
            headers = {"target": call["headers"]["source"], "id": call["headers"]["id"]}
            signed(headers={"cmd": "route", **headers})
            assert web.next().status == 200
        with SocketClient(live.server.addresses["zbus"]) as client:
            client.say_all(
                [{"url": "/Svc/private"}, {"url": "/?cmd=query"}, {"url": "/Svc/public", "headers": {"cmd": "x"}}]
            )
            assert [client.next()["status"] for _ in range(3)] == [403] * 3
            client.say_all([{"url": "/Svc/public"}])
            assert service.next()["url"] == "/Svc/public"


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"web_root": "/no/such/folder"}, "no such folder"),
        ({"cors_origins": "page.example"}, "cors_origins: 'page.example'"),
        ({"cors_origins": "http://page.example/path"}, "cors_origins"),
        ({"cors_origins": "*", "cors_methods": "GET POST"}, "cors_methods: 'GET POST'"),
        ({"cors_origins": "*", "cors_headers": "a\r\nb"}, "cors_headers"),
        ({"auth_excluded": "/x"}, "without zbus.auth_file"),
        ({"auth_excluded": "x", "auth_file": "f"}, "auth_excluded: 'x'"),
        ({"auth_excluded": "/*x", "auth_file": "f"}, "auth_excluded"),
        ({"auth_excluded": "/?cmd=query", "auth_file": "f"}, "auth_excluded"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_web_options(ZbusSettings(**settings))


def test_an_origin_may_be_written_with_a_slash_and_capitals() -> None:
    cors = read_web_options(ZbusSettings(cors_origins="HTTP://Page.example/")).cors
    assert cors is not None
    assert cors.origins == {PAGE}
