"""The documentation that the administration endpoint serves, over a real socket."""

from pathlib import Path

import pytest

from babelbus.config import AdminSettings
from babelbus.web import pages
from tests.web.browsing import Get, browse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    (site / "assets").mkdir(parents=True)
    (site / "concepts").mkdir()
    (site / "index.html").write_text("<h1>Babelbus</h1>", encoding="utf-8")
    (site / "concepts" / "state.html").write_text("state", encoding="utf-8")
    (site / "assets" / "site.css").write_text("body {}", encoding="utf-8")
    (site / ".hidden").write_text("hidden", encoding="utf-8")
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (site / "link").symlink_to(tmp_path / "secret")
    return site


def serving(folder: Path) -> AdminSettings:
    return AdminSettings(port=0, docs_folder=str(folder))


def test_the_pages_are_served_with_their_types_and_without_a_token(folder: Path) -> None:
    async def test(get: Get) -> None:
        for path, kind, content in (
            ("/docs/", "text/html; charset=utf-8", b"<h1>Babelbus</h1>"),
            ("/docs/index.html", "text/html; charset=utf-8", b"<h1>Babelbus</h1>"),
            ("/docs/concepts/state.html", "text/html; charset=utf-8", b"state"),
            ("/docs/assets/site.css", "text/css; charset=utf-8", b"body {}"),
        ):
            status, reply, body = await get(path)
            assert (status, reply.headers["Content-Type"], body) == (200, kind, content)
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]
        assert (await get("/docs/", method="HEAD"))[0] == 200

    browse(test, serving(folder))


def test_the_address_without_a_slash_leads_to_the_pages(folder: Path) -> None:
    async def test(get: Get) -> None:
        status, reply, _ = await get("/docs")
        assert (status, reply.headers["Location"]) == (308, "/docs/")

    browse(test, serving(folder))


def test_a_page_that_the_browser_has_is_not_sent_again(folder: Path) -> None:
    async def test(get: Get) -> None:
        _, first, _ = await get("/docs/")
        assert first.headers["Cache-Control"] == "no-cache"
        status, _, body = await get("/docs/", **{"If-None-Match": first.headers["ETag"]})
        assert (status, body) == (304, b"")
        (folder / "index.html").write_text("another release", encoding="utf-8")
        assert (await get("/docs/", **{"If-None-Match": first.headers["ETag"]}))[0] == 200

    browse(test, serving(folder))


@pytest.mark.parametrize(
    "path",
    [
        "/docs/../secret",
        "/docs/%2e%2e/secret",
        "/docs/..%2fsecret",
        "/docs/assets/..%2f..%2f..%2fsecret",
        "/docs/..%5csecret",
        "/docs//etc/passwd",
        "/docs/%2fetc%2fpasswd",
        "/docs/link",
        "/docs/.hidden",
        "/docs/concepts",
        "/docs/nothing%00",
        "/docs/nothing.html",
    ],
)
def test_a_path_that_leaves_the_folder_or_names_no_page_is_not_found(folder: Path, path: str) -> None:
    async def test(get: Get) -> None:
        status, _, body = await get(path)
        assert status == 404
        assert b"secret" not in body

    browse(test, serving(folder))


def test_a_page_cannot_be_changed(folder: Path) -> None:
    async def test(get: Get) -> None:
        for method in ("POST", "PUT", "DELETE"):
            assert (await get("/docs/index.html", method=method))[0] == 405

    browse(test, serving(folder))


def test_a_package_without_pages_answers_404_and_with_pages_serves_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(get: Get) -> None:
        assert (await get("/docs/"))[0] == 404

    async def packaged(get: Get) -> None:
        assert (await get("/docs/"))[0] == 200

    monkeypatch.setattr(pages, "PACKAGED", folder / "nothing")
    browse(missing)
    monkeypatch.setattr(pages, "PACKAGED", folder)
    browse(packaged)
