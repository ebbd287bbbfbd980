"""A real Chromium with the console's policy on; whatever a page does that it may not fails the test."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import pytest

from tests.interop.console.world import Cookie, World, filled
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.chromium import find_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Locator, Page

Theme = Literal["dark", "light"]
SETTINGS = {"storage-cleaner-interval-seconds": 0.2}
"""No test waits for retention."""
MESSAGES = """window.messages = []
new MutationObserver((changes) => changes.forEach(({ addedNodes }) => addedNodes.forEach((one) => {
    if (one.classList?.contains("toast")) window.messages.push(one.textContent)
}))).observe(document, { childList: true, subtree: true })"""
"""Keeps the messages that a page shows for some seconds: a slow machine may look later."""
EXPECTED = ("Failed to load resource", "net::ERR_")
"""What Chromium itself writes about answers that are no success; the page tells them to its user."""


class Window:
    """One browser with a log-in of its own, at one page of the console."""

    def __init__(
        self,
        browser: "Browser",
        url: str,
        *,
        width: int = 1280,
        theme: Theme = "light",
        zone: str = "UTC",
        cookie: Cookie | None = None,
    ) -> None:
        self.url = url
        self.faults: list[str] = []
        self.outside: list[str] = []
        self.context: BrowserContext = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=theme, timezone_id=zone, reduced_motion="reduce"
        )
        self.context.set_default_timeout(SAFETY_NET_SECONDS * 1000 / 2)
        if cookie is not None:
            self.context.add_cookies([{"name": cookie[0], "value": cookie[1], "url": url}])
        self.page: Page = self.context.new_page()
        self.page.add_init_script(MESSAGES)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", self._interrupted)
        self.page.on("request", lambda request: self._asked(request.url))

    def _heard(self, message: "ConsoleMessage") -> None:
        if message.type == "error" and not message.text.startswith(EXPECTED[0]) and EXPECTED[1] not in message.text:
            self.faults.append(message.text)

    def _interrupted(self, dialog: "Dialog") -> None:
        self.faults.append(f"a dialog of a script: {dialog.message}")
        dialog.dismiss()

    def _asked(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc and not url.startswith("blob:"):
            self.outside.append(url)

    def look(self) -> None:
        """Come back to the tab: what the page shows is asked for now, and not within some seconds."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def log_in(self, *, token: str | None = None, user: str = "", password: str = "") -> None:
        """Log in with a token, or with a user and a password."""
        page = self.page
        page.goto(self.url)
        if token is None:
            page.get_by_role("tab", name="User and password").click()
            page.get_by_label("User", exact=True).fill(user)
            page.get_by_label("Password", exact=True).fill(password)
        else:
            page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Log in").click()
        page.locator("aside").wait_for(state="attached")

    def open(self, fragment: str, *texts: str) -> "Page":
        """Open a page of the console, and wait until it shows the texts."""
        self.page.goto(f"{self.url}/#{fragment}")
        self.wait(*texts)
        return self.page

    def wait(self, *texts: str) -> None:
        """Wait until the page shows the texts; a message that has gone again has been shown."""
        for text in texts:
            if not any(text in one for one in self.page.evaluate("window.messages ?? []")):
                self.page.get_by_text(text).filter(visible=True).first.wait_for()

    def click(self, name: str, within: "Locator | None" = None) -> None:
        """Press a button."""
        (within or self.page).get_by_role("button", name=name, exact=True).first.click()

    @property
    def dialog(self) -> "Locator":
        """The open dialog."""
        return self.page.locator("dialog[open]").last

    def fill(self, label: str, text: str) -> None:
        """Fill a field of the open dialog."""
        self.dialog.get_by_label(label, exact=True).fill(text)

    def finish(self, name: str) -> None:
        """Press a button of the open dialog, and wait until the dialog is gone."""
        button = self.dialog.get_by_role("button", name=name, exact=True).last
        button.wait_for()  # the dialog is there, so that it counts
        before = self.page.locator("dialog[open]").count()
        button.click()
        self.page.wait_for_function("(count) => document.querySelectorAll('dialog[open]').length < count", arg=before)

    def check(self) -> None:
        """Check what the pages did, and forget it."""
        faults, self.faults = self.faults, []
        outside, self.outside = self.outside, []
        assert (faults, outside) == ([], [])

    def leave(self) -> None:
        """Close the page for the next test, and check what the page did."""
        if self.page.url.startswith(self.url):
            self.page.evaluate("localStorage.clear()")
        self.page.goto("about:blank")
        self.check()

    def close(self) -> None:
        """Close the browser, and check what its pages did."""
        self.context.close()
        self.check()


@pytest.fixture(scope="package")
def chromium() -> "Iterator[Browser]":
    """A browser, or a skip that says what is missing; Playwright's event loop is in the way of tests elsewhere."""
    program = find_browser()
    if program is None:
        pytest.skip("no browser is installed (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        patience = SAFETY_NET_SECONDS * 1000
        browser = playwright.chromium.launch(executable_path=program, args=options, timeout=patience)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def world(chromium: "Browser") -> Iterator[World]:
    """The filled server of all tests; who changes something changes what is its own."""
    with filled(SETTINGS) as found:
        yield found


Windows = Callable[..., Window]


@pytest.fixture
def windows(chromium: "Browser") -> Iterator[Windows]:
    """Open windows; at the end each is checked."""
    with contextlib.ExitStack() as stack:

        def make(
            world: World,
            *,
            logged_in: bool = True,
            width: int = 1280,
            theme: Theme = "light",
            zone: str = "UTC",
            **proof: str,
        ) -> Window:
            """Open a window with a log-in of its own for a proof, with that of the administrator, or with none."""
            cookie = world.log_in(**proof) if proof else world.cookie if logged_in else None
            window = Window(chromium, world.url, width=width, theme=theme, zone=zone, cookie=cookie)
            stack.callback(window.close)
            return window

        yield make


@pytest.fixture(scope="package")
def shared(chromium: "Browser", world: World) -> Iterator[Window]:
    """The window of the tests that need none of their own: what the browser has loaded, it keeps."""
    window = Window(chromium, world.url, cookie=world.cookie)
    yield window
    window.close()


@pytest.fixture
def window(shared: Window) -> Iterator[Window]:
    """A window of the administrator at the filled server."""
    yield shared
    shared.leave()
