"""The pages of the console about the state, in a real browser at a whole server."""

import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page

from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from tests.interop.console.conftest import Window, Windows
from tests.interop.console.world import World

MANY = 100_000
DEEP = 118
"""The deepest value that the server takes over HTTP."""
HOSTILE = '<img src=x onerror="alert(1)">'
PLACE = "shop/price"
ENDS = """async () => (await fetch("/api/state/ends", {headers: {"X-Babelbus-Console": "1"}})).json()"""

pytestmark = pytest.mark.interop


def item(page: Page, key: str) -> Locator:
    """The row of a key in the tree."""
    return page.locator(f"[role=treeitem][title={json.dumps(key)}]")


def test_a_level_of_100_000_keys_draws_only_what_is_seen(window: Window, world: World) -> None:
    world.set({f"many/{number:06}": number for number in range(MANY)})
    page = window.open("/state")
    item(page, "many").click()
    item(page, "many/000001").wait_for()
    assert page.get_by_role("treeitem").count() < 100
    tree = page.get_by_role("tree")
    tree.press("ArrowDown")
    item(page, "many/000000").and_(page.locator("[aria-selected=true]")).wait_for()
    tree.evaluate("(tree) => { tree.scrollTop = tree.scrollHeight }")  # the next names come by themselves
    item(page, "many/000310").wait_for()
    page.get_by_label("Search all keys").fill("99999")
    item(page, "many/099999").click()
    page.get_by_role("heading", name="many/099999").wait_for()


def test_a_value_changes_by_itself_until_it_is_paused(window: Window, world: World) -> None:
    world.set({"live": "first value"})
    page = window.open("/state?key=live")
    value = page.locator(".state-value")
    value.get_by_text("first value").wait_for()
    with TreeClient(f"tcp://{world.server.addresses['worterbuch-tcp']}") as client:
        client.set("live", "second value")
    value.get_by_text("second value").wait_for()
    page.locator("main").get_by_text("worterbuch").first.wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused").wait_for()
    world.set({"live": "third value"})
    page.get_by_role("tab", name="History").click()
    page.get_by_role("cell", name="second value").wait_for()
    page.get_by_role("tab", name="Value").click()
    assert value.get_by_text("third value").count() == 0
    page.get_by_role("button", name="Go on").click()
    world.set({"live": "fourth value"})
    value.get_by_text("fourth value").wait_for()


def test_the_second_of_two_who_edit_a_value_sees_both_values(windows: Windows, world: World) -> None:
    world.set({PLACE: {"euro": 10}})
    editors = [windows(world) for _ in range(2)]
    pages = [editor.open("/state?key=shop%2Fprice") for editor in editors]
    for page, text in zip(pages, ('{"euro": 1.10}', '{"euro": 99}'), strict=True):
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Value (JSON)").fill(text)
    one, other = pages
    one.get_by_role("button", name="Save").click()
    editors[0].wait("The value is changed.")
    other.get_by_role("button", name="Save").click()
    other.get_by_text("Somebody else has changed the value meanwhile.").wait_for()
    difference = other.get_by_label("Differing lines").inner_text()
    assert "1.1" in difference
    assert "99" in difference
    assert world.client.state.get(PLACE).raw == b'{"euro": 1.10}'  # as it was typed
    other.get_by_role("button", name="Go on with my value").click()
    other.get_by_role("button", name="Save").click()
    editors[1].wait("The value is changed.")
    assert world.client.state.get(PLACE).raw == b'{"euro": 99}'


def test_what_is_no_json_cannot_be_saved(window: Window) -> None:
    page = window.open("/state")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key").fill("made/here")
    dialog.get_by_label("Value (JSON)").fill("[1, 2")
    dialog.get_by_text("This is no JSON").wait_for()
    assert dialog.get_by_role("button", name="Save").is_disabled()
    dialog.get_by_label("Value (JSON)").fill("[1, 2]")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="made/here").wait_for()
    item(page, "made/here").wait_for()


def test_a_key_and_all_below_it_are_deleted_only_when_its_name_is_typed(window: Window, world: World) -> None:
    world.set({"old": 1, "old/a": 2, "old/b/c": 3})
    page = window.open("/state?key=old")
    page.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("Also everything below")).check()
    button = dialog.get_by_role("button", name="Delete")
    assert button.is_disabled()
    dialog.get_by_label(re.compile("Type")).fill("old")
    button.click()
    window.wait("3 values are deleted.")
    assert world.client.state.find("old/b/c") is None


def test_the_past_is_shown_and_compared(window: Window, world: World) -> None:
    world.set({"past/a": "before", "past/b": 1})
    page = window.open("/state?key=past%2Fa")
    page.locator(".state-value").get_by_text("before").wait_for()
    at = page.evaluate(ENDS)["latest"]["time_ms"]
    page.wait_for_function("(at) => Date.now() > at", arg=at)
    world.set({"past/a": "after", "past/c": 2})
    page.locator(".state-value").get_by_text("after").wait_for()
    page.get_by_role("tab", name="History").click()
    page.get_by_role("button", name=re.compile("^Compare the change")).click()
    page.get_by_label("Differing lines").get_by_text('"after"').wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Close").last.click()
    page.get_by_role("button", name=re.compile("^Show the state as of")).last.click()
    page.get_by_text("This is the past.").wait_for()
    page.locator(".state-value").get_by_text("before").wait_for()
    page.get_by_role("button", name="Edit").wait_for(state="detached")
    page.goto(f"{world.url}/#/state?tab=differences&pattern=past%2F%23&from={at}")
    page.get_by_role("row", name=re.compile("past.a changed")).wait_for()
    page.get_by_role("row", name=re.compile("past.c added")).wait_for()
    assert page.get_by_role("row", name=re.compile("past.b")).count() == 0


def test_the_slider_goes_to_the_past_by_keyboard(window: Window, world: World) -> None:
    world.set({"slid": 1})
    page = window.open("/state")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    page.get_by_text("This is the past.").wait_for()
    page.get_by_role("button", name="Back to now").click()
    item(page, "slid").wait_for()


def test_locks_and_wills_name_their_owners(window: Window, world: World) -> None:
    with TreeClient(f"tcp://{world.server.addresses['worterbuch-tcp']}") as client:
        client.lock("plant/door")
        client.set_last_will({"plant/status": "gone"})
        page = window.open("/state?tab=locks")
        row = page.get_by_role("row", name=re.compile("plant.door"))
        row.get_by_text(client.client_id[:8]).wait_for()
        page.get_by_role("tab", name="Wills").click()
        page.get_by_role("row", name=re.compile(client.client_id[:8])).get_by_text("plant/status").wait_for()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (f"hostile/{HOSTILE}", HOSTILE, HOSTILE),
        ("huge", "x" * (16 * 2**20), "The first 64.0 KiB of 16.0 MiB are shown."),
        ("deep", json.loads("[" * DEEP + "]" * DEEP), "1 item"),
        ("digits", 12345678901234567890, "12345678901234567890"),
        ("nothing/here", None, "null"),
    ],
    ids=["hostile", "huge", "deep", "digits", "null"],
)
def test_no_value_breaks_the_page(window: Window, world: World, key: str, value: Any, sentence: str) -> None:
    world.set({key: value})
    page = window.open(f"/state?key={quote(key, safe='')}")
    page.locator(".state-value").get_by_text(sentence).first.wait_for()


def test_a_key_that_is_not_there_says_so(windows: Windows, world: World) -> None:
    page = windows(world, width=360).open("/state?key=nobody%2Fset%2Fthis")
    page.get_by_text("The key has no value.").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
