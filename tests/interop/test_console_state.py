"""The pages of the console about the state, in a real browser at a whole server."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.config import AdminSettings
from tests.support.console_pages import Console, browsing
from tests.support.server import LiveServer, configure

MANY = 100_000
HOSTILE = '<img src=x onerror="alert(1)">'
PLACE = "shop/price"
ENDS = """async () => (await fetch("/api/state/ends", {headers: {"X-Babelbus-Console": "1"}})).json()"""

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path_factory.mktemp("console"), admin=True)) as live:
        yield live


@pytest.fixture
def console(live: LiveServer) -> Iterator[Console]:
    with browsing(live) as console:
        yield console


def put(live: LiveServer, values: dict[str, Any], source: str = "test:somebody") -> None:
    state = live.server.broker.state

    async def run() -> None:
        for key, value in values.items():
            state.put(key, json.dumps(value).encode())
        await state.commit(source).wait()

    live.run(run)


def item(page: Any, key: str) -> Any:
    """The row of a key in the tree."""
    return page.locator(f"[role=treeitem][title={json.dumps(key)}]")


def test_a_level_of_100_000_keys_draws_only_what_is_seen(live: LiveServer, console: Console) -> None:
    put(live, {f"many/{number:06}": number for number in range(MANY)})
    page = console.open("/state")
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


def test_a_value_changes_by_itself_until_it_is_paused(live: LiveServer, console: Console) -> None:
    put(live, {"live": "first value"})
    page = console.open("/state?key=live")
    value = page.locator(".state-value")
    value.get_by_text("first value").wait_for()
    put(live, {"live": "second value"}, "sbus:pump")
    value.get_by_text("second value").wait_for()
    page.get_by_text("pump").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused").wait_for()
    put(live, {"live": "third value"})
    page.get_by_role("tab", name="History").click()
    page.get_by_role("cell", name="second value").wait_for()
    page.get_by_role("tab", name="Value").click()
    assert value.get_by_text("third value").count() == 0
    page.get_by_role("button", name="Go on").click()
    put(live, {"live": "fourth value"})
    value.get_by_text("fourth value").wait_for()


def test_the_second_of_two_who_edit_a_value_sees_both_values(live: LiveServer, console: Console) -> None:
    put(live, {PLACE: {"euro": 10}})
    pages = [console.open("/state?key=shop%2Fprice") for _ in range(2)]
    for page, text in zip(pages, ('{"euro": 1.10}', '{"euro": 99}'), strict=True):
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Value (JSON)").fill(text)
    one, other = pages
    one.get_by_role("button", name="Save").click()
    one.get_by_text("The value is changed.").wait_for()
    other.get_by_role("button", name="Save").click()
    other.get_by_text("Somebody else has changed the value meanwhile.").wait_for()
    difference = other.get_by_label("Differing lines").inner_text()
    assert "1.1" in difference
    assert "99" in difference
    assert live.call(lambda: live.server.broker.state.find(PLACE)) == b'{"euro": 1.10}'  # as it was typed
    other.get_by_role("button", name="Go on with my value").click()
    other.get_by_role("button", name="Save").click()
    other.get_by_text("The value is changed.").wait_for()
    assert live.call(lambda: live.server.broker.state.find(PLACE)) == b'{"euro": 99}'


def test_what_is_no_json_cannot_be_saved(console: Console) -> None:
    page = console.open("/state")
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


def test_a_key_and_all_below_it_are_deleted_only_when_its_name_is_typed(live: LiveServer, console: Console) -> None:
    put(live, {"old": 1, "old/a": 2, "old/b/c": 3})
    page = console.open("/state?key=old")
    page.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("Also everything below")).check()
    button = dialog.get_by_role("button", name="Delete")
    assert button.is_disabled()
    dialog.get_by_label(re.compile("Type")).fill("old")
    button.click()
    page.get_by_text("3 values are deleted.").wait_for()
    assert live.call(lambda: live.server.broker.state.find("old/b/c")) is None


def test_the_past_is_shown_and_compared(live: LiveServer, console: Console) -> None:
    put(live, {"past/a": "before", "past/b": 1})
    page = console.open("/state?key=past%2Fa")
    page.locator(".state-value").get_by_text("before").wait_for()
    at = page.evaluate(ENDS)["latest"]["time_ms"]
    page.wait_for_function("(at) => Date.now() > at", arg=at)
    put(live, {"past/a": "after", "past/c": 2})
    page.locator(".state-value").get_by_text("after").wait_for()
    page.get_by_role("tab", name="History").click()
    page.get_by_role("button", name=re.compile("^Compare the change")).click()
    page.get_by_label("Differing lines").get_by_text('"after"').wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Close").last.click()
    page.get_by_role("button", name=re.compile("^Show the state as of")).last.click()
    page.get_by_text("This is the past.").wait_for()
    page.locator(".state-value").get_by_text("before").wait_for()
    assert page.get_by_role("button", name="Edit").count() == 0
    page.goto(f"{console.base}/#/state?tab=differences&pattern=past%2F%23&from={at}")
    page.get_by_role("row", name=re.compile("past.a changed")).wait_for()
    page.get_by_role("row", name=re.compile("past.c added")).wait_for()
    assert page.get_by_role("row", name=re.compile("past.b")).count() == 0


def test_the_slider_goes_to_the_past_by_keyboard(live: LiveServer, console: Console) -> None:
    put(live, {"slid": 1})
    page = console.open("/state")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    page.get_by_text("This is the past.").wait_for()
    page.get_by_role("button", name="Back to now").click()
    item(page, "slid").wait_for()


def test_locks_and_wills_name_their_owners(live: LiveServer, console: Console) -> None:
    with TreeClient(f"tcp://{live.server.addresses['worterbuch-tcp']}") as client:
        client.lock("plant/door")
        client.set_last_will({"plant/status": "gone"})
        page = console.open("/state?tab=locks")
        row = page.get_by_role("row", name=re.compile("plant.door"))
        row.get_by_text(client.client_id[:8]).wait_for()
        page.get_by_role("tab", name="Wills").click()
        page.get_by_role("row", name=re.compile(client.client_id[:8])).get_by_text("plant/status").wait_for()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (f"hostile/{HOSTILE}", HOSTILE, HOSTILE),
        ("huge", "x" * (16 * 2**20), "The first 64.0 KiB of 16.0 MiB are shown."),
        ("deep", json.loads("[" * 500 + "]" * 500), "items"),
        ("digits", 12345678901234567890, "12345678901234567890"),
        ("nothing/here", None, "null"),
    ],
    ids=["hostile", "huge", "deep", "digits", "null"],
)
def test_no_value_breaks_the_page(live: LiveServer, console: Console, key: str, value: Any, sentence: str) -> None:
    put(live, {key: value})
    page = console.open("/state")
    page.goto(f"{console.base}/#/state?key={page.evaluate('encodeURIComponent', key)}")
    page.locator(".state-value").get_by_text(sentence).first.wait_for()


def test_a_key_that_is_not_there_says_so(console: Console) -> None:
    page = console.open("/state?key=nobody%2Fset%2Fthis", width=360)
    page.get_by_text("The key has no value.").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_open_page_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    config = configure(tmp_path, admin=True)
    with ExitStack() as first, ExitStack() as browser:
        live = first.enter_context(LiveServer(config))
        put(live, {"kept": "old value"})
        console = browser.enter_context(browsing(live))
        page = console.open("/state?key=kept")
        page.locator(".state-value").get_by_text("old value").wait_for()
        first.close()
        page.get_by_text("The server does not answer.").first.wait_for()
        port = int(console.base.rpartition(":")[2])
        with LiveServer(msgspec.structs.replace(config, admin=AdminSettings(enabled=True, port=port))) as again:
            put(again, {"kept": "new value"})
            page.locator(".state-value").get_by_text("new value").wait_for()
