"""The console in a real browser: a page that is logged in, and what no page of it may do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from babelbus.web.token import read_token
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.chromium import find_browser
from tests.support.server import LiveServer

LOGIN = """async (proof) => (await fetch("/api/console/login", {method: "POST", body: JSON.stringify(proof),
    headers: {"X-Babelbus-Console": "1", "Content-Type": "application/json"}})).status"""


class Console:
    """Pages of one browser at one server. `faults` is what went wrong in them, `foreign` what they loaded elsewhere."""

    def __init__(self, live: LiveServer, browser: Any) -> None:
        self.live = live
        self.base = f"http://{live.server.addresses['admin']}"
        self.faults: list[str] = []
        self.foreign: list[str] = []
        self._browser = browser

    def log_in(self, *, width: int = 1280, **proof: str) -> Any:
        """Return a page of a fresh browser that is logged in, with the token of the data folder by default."""
        context = self._browser.new_context(viewport={"width": width, "height": 900})
        context.set_default_timeout(SAFETY_NET_SECONDS * 1000)
        page = context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: self.faults.append(f"a dialog: {dialog.message}"))
        page.on("request", self._note)
        page.goto(f"{self.base}/console/icon.svg")
        assert page.evaluate(LOGIN, proof or {"token": read_token(self.live.config.data.folder)}) == 200
        return page

    def open(self, fragment: str, **how: Any) -> Any:
        """Return a page at a fragment."""
        page = self.log_in(**how)
        page.goto(f"{self.base}/#{fragment}")
        return page

    def _note(self, request: Any) -> None:
        if not request.url.startswith((self.base, "blob:", "data:")):
            self.foreign.append(request.url)


@contextmanager
def browsing(live: LiveServer) -> Iterator[Console]:
    """Run a browser; skip the test where there is none. Afterwards nothing may have failed or come from elsewhere."""
    program = find_browser()
    if program is None:
        pytest.skip("there is no browser on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            console = Console(live, browser)
            yield console
            assert (console.faults, console.foreign) == ([], [])
        finally:
            browser.close()
