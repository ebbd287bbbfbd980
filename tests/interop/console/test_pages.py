"""Each page of the console with real data: what it shows, to whom, and on which screens."""

import json
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.interop.console.conftest import Theme, Window, Windows
from tests.interop.console.world import World

pytestmark = pytest.mark.interop

PAGES: dict[str, tuple[str, ...]] = {
    "/": ("Overview", "Published"),
    "/topics": ("orders", "flights"),
    "/topics/orders": ("Partitions", "Settings"),
    "/browse": ("orders", "flights"),
    "/browse/orders": ("customer-3", "Publish"),
    "/groups": ("billing",),
    "/groups/orders/billing": ("Why records wait", "Order per key", "Oldest records in flight"),
    "/dead-letters": ("billing",),
    "/state?key=plant%2Fline1%2Fconfig": ("plant/line1/config", "limits"),
    "/state?tab=locks": ("plant/line1/lock",),
    "/state?tab=wills": ("plant/line3",),
    "/connections": ("worterbuch", "zbus", "sbus", "eventmesh"),
    "/pipelines": ("delays", "Rows in", "the table delays has no column origin"),
    "/access": ("acme", "anna"),
    "/access/anna": ("operators",),
    "/audit": ("acme",),
}
"""The address of each page, and what it shows of the filled server."""
SERIOUS = ("serious", "critical")
RULES = {
    "light": {"resultTypes": ["violations"]},
    "dark": {"resultTypes": ["violations"], "runOnly": ["color-contrast"]},
}
"""All rules; in the other theme colours alone differ."""


@pytest.mark.parametrize("fragment", PAGES)
def test_a_page_shows_what_is_on_the_bus(window: Window, fragment: str) -> None:
    window.open(fragment, *PAGES[fragment])


def test_every_page_of_the_navigation_is_walked(window: Window) -> None:
    window.open("/", "Published")
    links = window.page.locator("nav a").evaluate_all("(all) => all.map((one) => one.getAttribute('href'))")
    assert {link.removeprefix("#") for link in links} <= PAGES.keys() | {"/state"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_what_a_reader_with_a_screen_reader_stumbles_over(
    windows: Windows, world: World, theme: Theme
) -> None:
    window = windows(world, theme=theme)
    script = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    window.open("/", "Published")
    # The policy forbids scripts of others: the debugger may evaluate them all the same.
    window.page.evaluate(script)
    found = {}
    for fragment, texts in PAGES.items():
        page = window.open(fragment, *texts)
        results = page.evaluate("(options) => axe.run(document, options)", RULES[theme])
        serious = [one for one in results["violations"] if one["impact"] in SERIOUS]
        if serious:
            found[fragment] = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in serious]
    assert found == {}, json.dumps(found, indent=1)


@pytest.mark.parametrize("width", [360, 1920])
def test_no_page_is_wider_than_the_screen(windows: Windows, world: World, width: int) -> None:
    window = windows(world, width=width)
    wide = []
    for fragment, texts in PAGES.items():
        page = window.open(fragment, *texts)
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(fragment)
    assert wide == []


def test_the_first_page_takes_less_than_100_kb(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    session = window.context.new_cdp_session(window.page)
    session.send("Network.enable")
    urls: dict[str, str] = {}
    sizes: dict[str, float] = {}
    session.on(
        "Network.requestWillBeSent",
        lambda event: urls.update({event["requestId"]: event["request"]["url"].removeprefix(world.url)}),
    )

    def loaded(event: dict[str, Any]) -> None:
        sizes.setdefault(urls[event["requestId"]], event["encodedDataLength"])

    # The first page is there before its charts are drawn, and before what a slow machine asks for again meanwhile.
    session.on("Network.loadingFinished", loaded)
    window.log_in(token=world.token)
    window.wait("Published")
    assert "/console/app.js" in sizes
    sizes.pop("/console/vendor/uplot.js", None)
    assert sum(sizes.values()) < 100_000, sizes


def test_the_keys_do_what_their_list_says(window: Window) -> None:
    page = window.open("/groups", "billing")
    page.keyboard.press("?")
    window.dialog.get_by_text("show these keys").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    page.keyboard.press("/")
    assert focused(page) == "INPUT"
    page.keyboard.type("billing")
    page.keyboard.press("Tab")
    assert focused(page) != "BODY"
    page.locator("h1").click()
    page.evaluate("const now = Date.now(); Date.now = () => now")  # a slow machine presses both keys at once, too
    page.keyboard.press("g")
    page.keyboard.press("s")
    window.wait("The last value of each key")


def focused(page: Page) -> str:
    """The kind of the element that has the focus."""
    return str(page.evaluate("document.activeElement.tagName"))


def test_a_record_is_shown_as_each_protocol_would_have_it(window: Window) -> None:
    page = window.open("/browse/orders", "customer-3")
    page.get_by_label("Open the record at offset 39").click()
    dialog = window.dialog
    dialog.get_by_text("customer 4").first.wait_for()
    dialog.get_by_role("tab", name="As other protocols see it").click()
    dialog.get_by_role("tabpanel").get_by_text("zbus").first.wait_for(state="attached")
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('dialog[open]')")


def test_a_search_says_how_far_it_went_and_stays_in_the_address(window: Window) -> None:
    page = window.open("/browse/flights", "Begin at")
    page.get_by_role("searchbox").or_(page.get_by_label("Filter")).first.fill('/origin = "JFK" and /dep_delay > 60')
    window.click("Search")
    window.wait("searched")
    assert "filter=" in page.url
    page.reload()
    window.wait("searched")


def test_a_filter_that_cannot_be_read_says_where(window: Window) -> None:
    page = window.open("/browse/flights", "Begin at")
    page.get_by_role("searchbox").or_(page.get_by_label("Filter")).first.fill("/origin = = 3")
    window.click("Search")
    window.wait("The filter cannot be read.")
