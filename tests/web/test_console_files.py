"""The files of the console: served whole and guarded, equal to the released packages, and closed to the outside."""

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.web.browsing import Get, browse

CONSOLE = Path(__file__).parents[2] / "src" / "babelbus" / "web" / "console"
VENDOR = CONSOLE / "vendor"
FILES = sorted(path for path in CONSOLE.rglob("*") if path.is_file())
MODULES = [path for path in FILES if path.suffix == ".js"]
OWN = [path for path in FILES if VENDOR not in path.parents]
NAMESPACE = "http://www.w3.org/2000/svg"


def name(path: Path) -> str:
    return str(path.relative_to(CONSOLE))


def vendored() -> list[dict[str, str]]:
    files = json.loads((VENDOR / "VENDOR.json").read_text(encoding="utf-8"))["files"]
    assert isinstance(files, list)
    return files


def test_the_copies_of_packages_are_those_that_the_list_names() -> None:
    listed = {entry["file"]: entry["sha256"] for entry in vendored()}
    kept = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del kept["VENDOR.json"]
    assert kept == listed
    assert all(entry["licence"] and entry["version"] for entry in vendored())


@pytest.mark.parametrize("path", OWN, ids=name)
def test_no_file_of_ours_names_an_outside_address(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(NAMESPACE, "")
    assert re.findall(r"(?:\b(?:https?|wss?|ftp):|[\"'(]//)[^\s\"')]*", text) == []


def test_the_copies_load_nothing_themselves() -> None:
    for path in VENDOR.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"\bimport\s*\(|\bimport\b[^;\n]*\bfrom\s*[\"']|@import|url\(|\bfetch\(|XMLHttpRequest|new WebSocket", text
        ), path


@pytest.mark.parametrize("path", OWN, ids=name)
def test_no_file_of_ours_needs_an_exception_of_the_policy(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|javascript:", text
    )
    if path.suffix == ".html":
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", text)
    if path.suffix == ".js":
        assert not re.search(r"\sstyle=\"", text), "use style=${{...}}, which the policy allows"
        assert not re.search(r"(?:local|session)Storage", text) or path.name == "prefs.js", "only choices are kept"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to parse modules")
def test_every_module_is_valid() -> None:
    for path in MODULES:
        done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [one for one in MODULES if one in OWN], ids=name)
def test_every_import_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for names, source in re.findall(r"(?:import|export)\s*(\{[^}]*\})?[^;\"'\n]*?from\s*\"([^\"]+)\"", text):
        target = (path.parent / source).resolve()
        assert target.is_file(), f"{source} is not there"
        exported = target.read_text(encoding="utf-8")
        for one in re.findall(r"(\w+)(?:\s+as\s+\w+)?\s*[,}]", names):
            assert re.search(
                rf"export (?:async )?(?:function|const|class|let) {one}\b|export\s*\{{[^}}]*\b{one}\b", exported
            ), f"{source} does not export {one}"


def test_every_page_of_the_list_has_its_module() -> None:
    names = re.findall(r"\{ name: \"([^\"]+)\"", (CONSOLE / "pages.js").read_text(encoding="utf-8"))
    assert names
    assert len(set(names)) == len(names)
    assert {path.stem for path in (CONSOLE / "pages").glob("*.js")} >= set(names)


def test_the_console_is_served_with_a_policy_without_exceptions() -> None:
    async def test(get: Get) -> None:
        status, reply, body = await get("/")
        assert (status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert body == (CONSOLE / "index.html").read_bytes()
        policy = dict(one.strip().split(" ", 1) for one in reply.headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in reply.headers["Content-Security-Policy"]
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Referrer-Policy"] == "no-referrer"
        status, reply, body = await get("/console/app.js")
        assert (status, reply.headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
        assert body == (CONSOLE / "app.js").read_bytes()

    browse(test)


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    async def test(get: Get) -> None:
        _, first, _ = await get("/console/style.css")
        assert first.headers["Cache-Control"] == "no-cache"
        status, _, body = await get("/console/style.css", **{"If-None-Match": first.headers["ETag"]})
        assert (status, body) == (304, b"")

    browse(test)


@pytest.mark.parametrize(
    "path", ["/console/nothing.js", "/console/../console.py", "/console/%2e%2e/console.py", "/console/"]
)
def test_nothing_else_is_served(path: str) -> None:
    async def test(get: Get) -> None:
        status, _, body = await get(path)
        assert status in (200, 404)
        assert b"ConsoleFiles" not in body

    browse(test)


def test_the_first_paint_is_below_100_kilobytes() -> None:
    """The files that the overview loads, as they are sent to a browser that takes gzip."""
    loaded, waiting = set[Path](), [CONSOLE / "app.js", CONSOLE / "pages" / "overview.js", VENDOR / "uplot.js"]
    while waiting:
        path = waiting.pop().resolve()
        if path not in loaded:
            loaded.add(path)
            waiting += [path.parent / one for one in re.findall(r"from \"([^\"]+)\"", path.read_text(encoding="utf-8"))]
    pages = [CONSOLE / one for one in ("index.html", "boot.js", "style.css", "icon.svg")]
    size = sum(len(gzip.compress(path.read_bytes(), 9)) + 600 for path in [*loaded, *pages])
    assert size < 100_000, f"{size} bytes"
