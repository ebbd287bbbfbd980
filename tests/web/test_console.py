"""The files of the console, over a real socket."""

import gzip
from pathlib import Path

import pytest

from babelbus.config import AdminSettings
from babelbus.web import console
from tests.web.browsing import Get, browse

SCRIPT = b"export default 1; // " + b"x" * 5_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "console"
    (made / "pages").mkdir(parents=True)
    (made / "index.html").write_bytes(b"<!doctype html>")
    (made / "app.js").write_bytes(SCRIPT)
    (made / "pages" / "topics.js").write_bytes(b"1")
    (made / ".hidden").write_bytes(b"hidden")
    (tmp_path / "secret").write_bytes(b"secret")
    (made / "link").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(console, "PACKAGED", made)
    return made


def test_the_files_come_with_their_types_and_headers_that_let_nothing_else_run(folder: Path) -> None:
    async def test(get: Get) -> None:
        for path, kind, content in (
            ("/", "text/html; charset=utf-8", b"<!doctype html>"),
            ("/console/index.html", "text/html; charset=utf-8", b"<!doctype html>"),
            ("/console/app.js", "text/javascript; charset=utf-8", SCRIPT),
            ("/console/pages/topics.js", "text/javascript; charset=utf-8", b"1"),
        ):
            status, reply, body = await get(path)
            assert (status, reply.headers["Content-Type"], body) == (200, kind, content)
            policy = reply.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';")
            assert "unsafe" not in policy
            assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            for name, value in (
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Cross-Origin-Opener-Policy", "same-origin"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("Cache-Control", "no-cache"),
            ):
                assert reply.headers[name] == value
        assert (await get("/", method="HEAD"))[0] == 200

    browse(test)


def test_a_file_comes_packed_to_who_takes_it(folder: Path) -> None:
    async def test(get: Get) -> None:
        for accepted in ("gzip", "gzip, deflate, br", "br;q=1.0, GZIP;q=0.5"):
            status, reply, body = await get("/console/app.js", **{"Accept-Encoding": accepted})
            assert (status, reply.headers["Content-Encoding"]) == (200, "gzip")
            assert gzip.decompress(body) == SCRIPT
            assert len(body) < 200
            assert reply.headers["Vary"] == "Accept-Encoding"
        for accepted in ("identity", "br", "gzip;q=0", "gzipped", ""):
            _, reply, body = await get("/console/app.js", **{"Accept-Encoding": accepted})
            assert ("Content-Encoding" in reply.headers, body) == (False, SCRIPT)
        _, reply, _ = await get("/console/pages/topics.js", **{"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in reply.headers

    browse(test)


def test_a_file_that_the_browser_has_is_not_sent_again_until_it_changes(folder: Path) -> None:
    async def test(get: Get) -> None:
        _, first, _ = await get("/console/app.js", **{"Accept-Encoding": "gzip"})
        tag = first.headers["ETag"]
        status, reply, body = await get("/console/app.js", **{"If-None-Match": tag})
        assert (status, body, reply.headers["ETag"]) == (304, b"", tag)
        (folder / "app.js").write_bytes(b"another release " * 100)
        status, reply, body = await get("/console/app.js", **{"If-None-Match": tag, "Accept-Encoding": "gzip"})
        assert (status, gzip.decompress(body)) == (200, b"another release " * 100)

    browse(test)


@pytest.mark.parametrize(
    "path",
    [
        "/console",
        "/console/",
        "/console/pages",
        "/console/pages/",
        "/console/nothing.js",
        "/console/.hidden",
        "/console/link",
        "/console/../secret",
        "/console/%2e%2e/secret",
        "/console/..%2fsecret",
        "/console/..%5csecret",
        "/console/%2fetc%2fpasswd",
        "/console/app.js%00",
        "/index.html",
        "/app.js",
        "/topics",
    ],
)
def test_a_path_that_names_no_file_is_not_found(folder: Path, path: str) -> None:
    async def test(get: Get) -> None:
        status, _, body = await get(path)
        assert status == 404
        assert b"secret" not in body

    browse(test)


def test_a_file_cannot_be_changed(folder: Path) -> None:
    async def test(get: Get) -> None:
        for path in ("/", "/console/app.js"):
            for method in ("POST", "PUT", "DELETE"):
                assert (await get(path, method=method))[0] == 405

    browse(test)


def test_without_the_console_there_are_no_files(folder: Path) -> None:
    async def test(get: Get) -> None:
        for path in ("/", "/console/app.js", "/console/index.html"):
            assert (await get(path))[0] == 404

    browse(test, AdminSettings(port=0, console=False))
