"""Records, topics and servers that are hard to show: each page says so in a sentence, and shows a way on."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator

from babelbus.units import MIB
from tests.interop.console.conftest import Window, Windows
from tests.interop.console.world import World, running
from tests.support.bus import SAFETY_NET_SECONDS

pytestmark = pytest.mark.interop

HEADERS = 126
"""Most headers that a client sends: one of the 127 of a record is the server's."""
DEPTH = 100_000
KEYS = 100_000
SHORT_KEYS = 10_000
"""So many fit into what a page shows of a record."""
CONNECTIONS = 40


def show(window: Window, world: World, name: str, payload: bytes, **record: Any) -> Locator:
    """Publish a record to a topic of its own, and open the record from its list."""
    world.create(name)
    world.client.publish(name, payload, **record)
    return shown(window, name)


def shown(window: Window, name: str) -> Locator:
    """Open the only record of a topic from its list."""
    window.open(f"/browse/{name}", "Partition 0 has the offsets")
    window.page.get_by_label("Open the record at offset 0").click()
    return window.dialog


def panel(dialog: Locator, tab: str) -> Locator:
    """Choose how a record is shown."""
    dialog.get_by_role("tab", name=tab).first.click()
    return dialog.get_by_role("tabpanel")


def test_a_payload_of_16_mib_is_shortened_and_says_so(window: Window, world: World) -> None:
    world.create("hard-large")
    world.ask("POST", "/api/topics/hard-large/records", {"payload": "x" * 16 * MIB})
    dialog = shown(window, "hard-large")
    dialog.get_by_text("16.0 MiB (only the beginning is shown; download it to see all)").wait_for()
    text = panel(dialog, "Text")
    text.get_by_text("These are the first 256 KiB of 16.0 MiB.").wait_for()
    assert text.locator("pre").inner_text() == "x" * 2**18
    panel(dialog, "Hex").get_by_text(f"These are the first 4096 of {16 * MIB} bytes.").wait_for()
    panel(dialog, "As other protocols see it").get_by_text("views are made of records up to 262144 bytes").wait_for()
    assert dialog.get_by_role("button", name="Publish again …").is_disabled()
    window.page.keyboard.press("Escape")
    row = window.page.get_by_role("row").filter(has=window.page.get_by_label("Open the record at offset 0"))
    assert "shortened" in row.inner_text()
    assert "16.0 MiB" in row.inner_text()


def test_bytes_that_are_no_text_are_shown_as_bytes(window: Window, world: World) -> None:
    bad = b"\xff\xfe\x00"
    headers = ((b"\xff", bad), (b"whole", b"text"))
    dialog = show(window, world, "hard-bytes", bad * 100, key=b"\xfe\xff", headers=headers)
    dialog.get_by_label("Bytes in hex").get_by_text("000000  ff fe 00 ff fe 00").wait_for()
    dialog.get_by_text("fe ff", exact=True).wait_for()
    panel(dialog, "Text").get_by_text("The payload is no text (UTF-8). Look at its bytes.").wait_for()
    rows = panel(dialog, "Headers").get_by_role("row")
    rows.filter(has_text="\N{REPLACEMENT CHARACTER}").get_by_text("//4A").wait_for()
    rows.filter(has_text="(base64)").wait_for()
    rows.filter(has_text="whole").get_by_text("text", exact=True).wait_for()
    views = panel(dialog, "As other protocols see it")
    for protocol in ("zbus", "Wörterbuch", "sbus", "EventMesh"):
        views.get_by_role("tab", name=protocol).click()
        views.locator("pre, .json, .notice").first.wait_for()
    window.page.keyboard.press("Escape")
    row = window.page.get_by_role("row").filter(has=window.page.get_by_label("Open the record at offset 0"))
    assert "ff fe 00 ff" in row.inner_text()
    assert "bytes" in row.inner_text()


def test_headers_of_63_megabytes_are_shortened_and_say_so(window: Window, world: World) -> None:
    world.create("hard-headers")
    headers = [(f"h{number:03}", f"{number:03} " * 125_000) for number in range(HEADERS)]
    world.ask("POST", "/api/topics/hard-headers/records", {"headers": headers})
    dialog = shown(window, "hard-headers")
    panel(dialog, "Text").get_by_text("The payload is empty.").wait_for()
    listed = panel(dialog, "Headers")
    listed.get_by_text("The headers have 60.1 MiB together, so that some are shortened.").wait_for()
    rows = listed.get_by_role("row").filter(has_text="shortened; 488 KiB")
    assert rows.count() == HEADERS
    rows.first.get_by_text("000 000 000").wait_for()
    assert dialog.get_by_role("button", name="Publish again …").is_disabled()


def test_json_that_is_deep_is_opened_level_by_level(window: Window, world: World) -> None:
    dialog = show(window, world, "hard-deep", b"[" * DEPTH + b"]" * DEPTH)
    folds = panel(dialog, "JSON").locator("button.fold")
    for level in range(2, 6):
        folds.nth(level).get_by_text("1 item").wait_for()
        folds.nth(level).click()
    folds.nth(6).get_by_text("1 item").wait_for()
    assert panel(dialog, "Text").locator("pre").inner_text() == "[" * DEPTH + "]" * DEPTH
    views = panel(dialog, "As other protocols see it")
    views.get_by_role("tab", name="Wörterbuch").click()
    views.locator("pre, .json, .notice").first.wait_for()


def test_json_with_many_keys_at_one_level_is_opened_in_parts(window: Window, world: World) -> None:
    value = json.dumps({f"key {number}": number for number in range(SHORT_KEYS)}).encode()
    fields = panel(show(window, world, "hard-wide", value), "JSON")
    fields.get_by_role("button", name=f"{SHORT_KEYS:,} fields").click()
    fields.get_by_text("key 99", exact=True).wait_for()
    assert fields.locator("li").count() == 101
    fields.get_by_role("button", name=f"and {SHORT_KEYS - 100:,} more").click()
    fields.get_by_text("key 999", exact=True).wait_for()


def test_json_with_100_000_keys_is_shown_as_the_text_of_its_beginning(window: Window, world: World) -> None:
    value = json.dumps({f"key {number}": number for number in range(KEYS)}).encode()
    dialog = show(window, world, "hard-keys", value)
    assert panel(dialog, "Text").locator("pre").inner_text().startswith('{"key 0": 0, "key 1": 1,')
    dialog.get_by_text("These are the first 256 KiB of").wait_for()
    assert dialog.get_by_role("tab", name="JSON").count() == 0


# -- what is gone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "before", "sentence", "after"),
    [
        ("/topics/{}", "Partitions", "There is no such topic.", "There is no such topic."),
        ("/groups/{}/readers", "All records are done.", "has no group 'readers'", "There is no such group."),
    ],
    ids=["topic", "group"],
)
def test_a_topic_that_is_removed_under_an_open_page_says_so(
    window: Window, world: World, request: pytest.FixtureRequest, page: str, before: str, sentence: str, after: str
) -> None:
    name = f"short-lived-{request.node.callspec.id}"
    world.create(name)
    world.ask("POST", "/api/groups", {"name": "readers", "topic": name})
    window.open(page.format(name), before)
    world.ask("DELETE", f"/api/topics/{name}")
    window.look()
    window.wait(sentence)
    window.page.reload()
    window.wait(after)


def test_a_topic_that_is_removed_while_its_records_come_says_so(window: Window, world: World) -> None:
    world.create("short-lived-live")
    with window.page.expect_response(lambda answer: "/follow" in answer.url):
        window.open("/browse/short-lived-live?live=1", "Waiting for records.")
    world.ask("DELETE", "/api/topics/short-lived-live")
    window.wait("The topic was removed, or the right to read it was taken away.")


def test_a_topic_that_is_removed_under_its_records_says_so_with_the_next_page(window: Window, world: World) -> None:
    world.create("short-lived")
    world.client.publish("short-lived", b"still here")
    window.open("/browse/short-lived", "still here")
    world.ask("DELETE", "/api/topics/short-lived")
    window.click("Again")
    window.wait("The records could not be loaded.")
    window.page.get_by_label("Open the record at offset 0").click()
    window.dialog.get_by_text("The record could not be loaded.").wait_for()
    window.page.keyboard.press("Escape")
    window.click("Publish")
    window.fill("Payload", "too late")
    window.dialog.get_by_role("button", name="Publish", exact=True).click()
    window.dialog.get_by_role("alert").get_by_text("short-lived").wait_for()
    assert window.dialog.get_by_label("Payload", exact=True).input_value() == "too late"


@pytest.fixture(scope="module")
def cut(world: World) -> int:
    """The offset at which a topic begins from whose beginning retention has removed records."""
    world.create("cut", settings={"segment_bytes": 4096})
    for number in range(40):
        world.client.publish("cut", b"record %03d " % number * 50)
    world.ask("PATCH", "/api/topics/cut", {"retention_records": 1})

    def begin(topic: dict[str, Any]) -> int:
        (partition,) = topic["partitions"]
        return int(partition["first_offset"]) if partition["segments"] == 1 else 0

    return world.wait("/api/topics/cut", begin)


def test_an_offset_that_retention_removed_shows_the_nearest_records(window: Window, cut: int) -> None:
    window.open("/browse/cut?partition=0&offset=0", f"Retention has removed the records below offset {cut}:")
    window.wait("the partition begins there now.", f"record {cut:03}")


def test_a_record_that_retention_removed_says_so_and_leads_to_the_nearest(window: Window, cut: int) -> None:
    window.open("/browse/cut?open=0:0", f"begins at offset {cut} now: retention has removed the record at 0.")
    window.click("Show the nearest records", window.dialog)
    window.wait(f"Retention has removed the records below offset {cut}:", f"record {cut:03}")
    assert window.page.locator("dialog[open]").count() == 0


def test_a_search_from_an_offset_that_retention_removed_finds_the_rest(window: Window, cut: int) -> None:
    window.open('/browse/cut?partition=0&offset=0&filter=payload contains "record 039"', "1 found", "record 039")


def test_offsets_that_are_to_come_show_the_end(window: Window) -> None:
    window.open("/browse/orders?partition=0&offset=999999", "The partition ends at offset 40", "customer-4")


# -- a server that takes no more connections ---------------------------------------------------------------------------


@contextlib.contextmanager
def full(world: World, *, free: int) -> Iterator[None]:
    """Take the places for connections until so many are free, as other administrators who stay."""
    with contextlib.ExitStack() as stack:
        taken = []
        while client := _stay(world):
            taken.append(stack.enter_context(contextlib.closing(client)))
        for one in taken[:free]:
            one.close()
        # The server has seen that they are closed before anybody asks for their places.
        while free and (held := _connections(taken[-1])) > CONNECTIONS - free:
            assert held <= CONNECTIONS
        yield


def _stay(world: World) -> http.client.HTTPConnection | None:
    """Return a connection whose request with a proof was answered, `None` if there is no place for another."""
    client = http.client.HTTPConnection(world.server.addresses["admin"], timeout=SAFETY_NET_SECONDS)
    try:
        client.request("GET", "/api/topics", headers={"Authorization": f"Bearer {world.token}"})
        with client.getresponse() as answer:
            assert answer.status == 200
            answer.read()
    except (ConnectionError, http.client.BadStatusLine):
        client.close()
        return None
    return client


def _connections(client: http.client.HTTPConnection) -> float:
    """Ask a connection that stays how many the endpoint has."""
    client.request("GET", "/metrics")
    with client.getresponse() as answer:
        found = re.search(r'^babelbus_connections\{protocol="admin"\} (\S+)$', answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_server_at_its_connection_limit_is_told_and_comes_back(windows: Windows) -> None:
    with running({"admin-connections-max": CONNECTIONS}) as world:
        world.create("patience")
        window = windows(world)
        with full(world, free=2):
            window.page.goto(world.url)
            window.wait("The server has not sent all files of the console")
        window.wait("Published")
        with full(world, free=0):
            window.page.goto(f"{world.url}/#/topics")
            window.page.locator("main").get_by_text(".").or_(window.page.get_by_text("patience")).first.wait_for()
        window.wait("patience")
