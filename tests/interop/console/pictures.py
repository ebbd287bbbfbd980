"""`make console-pictures`: the pictures of docs/console.md, of the filled server, in both themes and two widths."""

import base64
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from babelbus.client import Record
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from tests.interop.console.conftest import Window
from tests.interop.console.world import World, filled
from tests.support.chromium import find_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = Path(__file__).parents[3] / "docs" / "assets" / "console"
PAGES = {
    "overview": ("/", "healthy"),
    "topics": ("/topics", "flights"),
    "topic": ("/topics/orders", "Partitions"),
    "browse": ("/browse/orders", "customer-3"),
    "record": ("/browse/orders?open=0:39", "Payload"),
    "search": ('/browse/flights?filter=/origin = "JFK" and /dep_delay > 60', "searched"),
    "groups": ("/groups", "billing"),
    "group": ("/groups/orders/billing", "Order per key"),
    "dead-letters": ("/dead-letters", "billing"),
    "state": ("/state?key=plant%2Fline1%2Fconfig", "limits"),
    "connections": ("/connections", "worterbuch"),
    "pipelines": ("/pipelines", "Rows in"),
    "access": ("/access", "acme"),
    "audit": ("/audit", "acme"),
}
"""Name of the picture -> address of the page, and what it shows when it is drawn."""
WIDTHS = {1280: 900, 360: 780}
QUALITY = 75
SECONDS = 60
SETTLE_MS = 2_500
"""A rate is known with the second look at a counter, and two seconds are between them."""


def take(browser: "Browser", world: World, theme: str, width: int) -> None:
    """Take the pictures of all pages."""
    window = Window(browser, world.url, width=width, theme="dark" if theme == "dark" else "light", cookie=world.cookie)
    window.page.set_viewport_size({"width": width, "height": WIDTHS[width]})
    session = window.context.new_cdp_session(window.page)
    for name, (fragment, text) in PAGES.items():
        page = window.open(fragment, text)
        page.wait_for_timeout(SETTLE_MS)
        page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
        taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
        (FOLDER / f"{name}-{theme}-{width}.webp").write_bytes(base64.b64decode(taken["data"]))
    window.close()


def work(world: World) -> None:
    """Publish and consume for a minute, now more and now less, so that the charts have something to draw."""
    consumer = world.client.consume("flights", "dashboard", start="beginning")
    tree = world.stack.enter_context(TreeClient(f"tcp://{world.server.addresses['worterbuch-tcp']}"))
    for second in range(SECONDS):
        rate = 120 + int(80 * math.sin(second / 6)) + 15 * (second % 4)
        world.client.publish_many("flights", [Record(b'{"origin":"JFK","dep_delay":%d}' % one) for one in range(rate)])
        for number in range(rate // 3):
            tree.set(f"plant/line{number % 3 + 1}/temp", second)
        for _ in range(rate // 2):
            next(consumer).ack()
        time.sleep(1)
    world.stack.callback(consumer.leave)


def main() -> None:
    """Take all pictures."""
    program = find_browser()
    if program is None:
        sys.exit("no browser is installed (Debian: apt-get install chromium)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with filled() as world, sync_playwright() as playwright:
        work(world)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width in WIDTHS:
            for theme in ("light", "dark"):
                take(browser, world, theme, width)
        browser.close()


if __name__ == "__main__":
    main()
