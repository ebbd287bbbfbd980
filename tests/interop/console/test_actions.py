"""What a user changes on the pages of topics, records and connections, checked at the server.

Groups, dead letters, state and access have such tests of their own beside this folder.
"""

import csv
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Download

from babelbus.testing.ports import free_ports
from tests.interop.console.conftest import Window, Windows
from tests.interop.console.world import World, running
from tests.support.eventmesh import MeshClient

pytestmark = pytest.mark.interop

HOUR = 3_600


def records(world: World, topic: str) -> list[dict[str, Any]]:
    """Return the records of partition 0."""
    found: list[dict[str, Any]] = world.ask("GET", f"/api/topics/{topic}/records?partition=0&offset=0")["records"]
    return found


def names(world: World) -> set[str]:
    """Return the names of the topics."""
    return {one["name"] for one in world.ask("GET", "/api/topics")["topics"]}


def download(window: Window, within: str) -> Download:
    """Press a button of the open dialog that saves a file."""
    with window.page.expect_download() as coming:
        window.dialog.get_by_role("button", name=within, exact=True).click()
    return coming.value


def test_a_topic_is_created_altered_and_removed(window: Window, world: World) -> None:
    window.open("/topics", "orders")
    window.click("New topic")
    window.fill("Name", "made")
    window.fill("Partitions", "2")
    window.fill("Keep for", "3h")
    window.finish("Create")
    window.wait("The topic made is created.")
    made = world.ask("GET", "/api/topics/made")
    assert (len(made["partitions"]), made["settings"]["retention_seconds"]) == (2, 3 * HOUR)
    window.click("Alter")
    window.fill("Partitions", "3")
    window.fill("Keep for", "")
    window.finish("Save")
    window.wait("The topic made is altered.")
    made = world.ask("GET", "/api/topics/made")
    assert (len(made["partitions"]), made["settings"]["retention_seconds"]) == (3, None)
    window.click("Remove")
    remove = window.dialog.get_by_role("button", name="Remove", exact=True)
    assert remove.is_disabled()
    window.dialog.get_by_role("textbox").fill("made")
    window.finish("Remove")
    window.wait("The topic made is removed.")
    assert "made" not in names(world)


def test_a_topic_that_cannot_be_created_leaves_what_was_typed(window: Window, world: World) -> None:
    window.open("/topics", "orders")
    window.click("New topic")
    window.fill("Name", "orders")
    window.dialog.get_by_role("button", name="Create", exact=True).click()
    window.dialog.get_by_text("exists").wait_for()
    assert window.dialog.get_by_label("Name", exact=True).input_value() == "orders"


def test_a_record_is_published_published_again_and_copied(window: Window, world: World) -> None:
    world.create("desk")
    world.create("copies")
    window.open("/browse/desk", "There is no record here now.")
    window.click("Publish")
    window.fill("Key", "k")
    window.fill("Subject", "desk/left")
    window.fill("Payload", '{"n": 1}')
    window.fill("Headers", "trace: abc\nempty:")
    window.finish("Publish")
    window.wait("Published to partition 0 at offset 0.")
    (record,) = records(world, "desk")
    assert (record["key"], record["subject"], record["payload"]) == ("k", "desk/left", '{"n": 1}')
    assert [one for one in record["headers"] if one[0] in {"trace", "empty"}] == [["trace", "abc"], ["empty", ""]]
    window.page.get_by_label("Open the record at offset 0").click()
    window.click("Publish again …", window.dialog)
    window.fill("Payload", '{"n": 2}')
    window.finish("Publish")
    window.wait("Published to partition 0 at offset 1.")
    window.click("Copy to …", window.dialog)
    window.fill("To the topic", "copies")
    window.finish("Copy")
    window.wait("1 record was copied to copies.")
    assert [one["payload"] for one in records(world, "desk")] == ['{"n": 1}', '{"n": 2}']
    assert [(one["subject"], one["payload"]) for one in records(world, "copies")] == [("copies/left", '{"n": 1}')]


def test_the_records_of_a_range_are_copied(window: Window, world: World) -> None:
    world.create("range")
    window.open("/browse/orders", "customer-3")
    window.click("Copy")
    window.fill("To the topic", "range")
    window.fill("From offset", "10")
    window.fill("Up to offset", "15")
    window.finish("Copy")
    window.wait("5 records were copied to range.")
    assert [json.loads(one["payload"])["id"] for one in records(world, "range")] == [10, 11, 12, 13, 14]


def test_records_are_exported_as_json_lines_and_csv(window: Window, tmp_path: Path) -> None:
    window.open("/browse/orders", "customer-3")
    window.click("Export")
    window.fill("Up to offset", "3")
    file = download(window, "Export")
    window.wait("The file is saved.")
    assert file.suggested_filename.endswith(".jsonl")
    file.save_as(tmp_path / "lines")
    lines = (tmp_path / "lines").read_text(encoding="utf-8").splitlines()
    assert [json.loads(json.loads(line)["payload"])["id"] for line in lines] == [0, 1, 2]
    window.click("Export")
    window.dialog.get_by_label("Format").select_option("csv")
    window.fill("Records at most", "2")
    file = download(window, "Export")
    assert file.suggested_filename.endswith(".csv")
    file.save_as(tmp_path / "table")
    with (tmp_path / "table").open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [json.loads(row["payload"])["id"] for row in rows] == [0, 1]


def test_records_from_a_time_on_are_found_in_both_zones(windows: Windows, world: World) -> None:
    world.create("hours")
    for hour in range(3):
        world.client.publish("hours", b"at hour %d" % hour, timestamp=1_577_836_800_000 + hour * HOUR * 1000)
    window = windows(world, zone="Europe/Vienna")
    window.open("/browse/hours", "at hour 0")
    for hours, zone in ((2, "local"), (1, "UTC")):
        window.page.get_by_label("Begin at").select_option("time")
        window.page.get_by_label(f"Time ({zone})").fill(f"2020-01-01T{hours:02}:00:00")
        window.click("Show")
        window.page.get_by_text("at hour 0").wait_for(state="detached")
        window.wait("at hour 1", "at hour 2")
        window.click("Newest")
        window.wait("at hour 0")
        if zone == "local":
            window.click("Times in local time. Change to UTC.")


def test_a_payload_is_saved_as_it_is(window: Window, world: World, tmp_path: Path) -> None:
    payload = bytes(range(256)) * 9
    world.create("files")
    world.client.publish("files", payload)
    window.open("/browse/files?open=0%3A0")
    window.dialog.get_by_label("Bytes in hex").wait_for()
    window.dialog.get_by_role("tab", name="Text").click()
    window.wait("The payload is no text")
    file = download(window, "Payload")
    file.save_as(tmp_path / "payload")
    assert (tmp_path / "payload").read_bytes() == payload


def test_records_come_while_the_page_is_open(window: Window, world: World) -> None:
    world.create("ticker")
    window.open("/browse/ticker", "There is no record here now.")
    with window.page.expect_response(lambda answer: "/follow" in answer.url):
        window.click("Live")
    world.client.publish("ticker", b"it has come")
    window.wait("it has come")
    window.click("End live")
    window.wait("Partition 0 has the offsets")


def test_a_connection_is_closed(window: Window, world: World) -> None:
    with MeshClient(world.server.addresses["eventmesh-tcp"]).hello("sub", group="closed") as mesh:
        host, port = mesh.socket.getsockname()[:2]
        row = window.open("/connections").get_by_role("row").filter(has_text=f"{host}:{port}")
        row.get_by_role("button", name="Close").click()
        window.finish("Close the connection")
        window.wait("The connection is closed.")
        row.wait_for(state="detached")
        while _read(mesh.socket):
            pass


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**16)
    except ConnectionResetError:
        return b""


def test_two_browsers_see_what_the_other_does(windows: Windows, world: World) -> None:
    first, second = windows(world, token=world.token), windows(world)
    first.open("/topics/orders", "Partitions")
    world.create("shared")
    first.open("/topics/shared", "Partitions")
    second.open("/topics/shared", "Partitions")
    first.click("Alter")
    first.fill("Partitions", "4")
    first.finish("Save")
    second.look()
    second.page.get_by_role("tab", name="Partitions").filter(has_text="4").wait_for()
    first.click("Log out")
    first.page.get_by_label("Token", exact=True).wait_for()
    second.open("/browse/orders", "customer-3")


def test_open_pages_come_back_with_the_server(windows: Windows) -> None:
    with running({"admin-port": free_ports(1)[0]}) as world:
        world.create("kept")
        world.set({"kept": "old value"})
        topic, state, live = windows(world), windows(world), windows(world)
        topic.open("/topics/kept", "Partitions")
        state.open("/state?key=kept", "old value")
        with live.page.expect_response(lambda answer: "/follow" in answer.url):
            live.open("/browse/kept?live=1", "Waiting for records.")
        world.server.stop()
        for window in (topic, state, live):
            window.wait("The server does not answer.")
        with live.page.expect_response(lambda answer: "/follow" in answer.url and answer.ok):
            world.server.start()
        world.set({"kept": "new value"})
        world.client.publish("kept", b"it goes on")
        for window in (topic, state, live):
            window.page.get_by_text("The server does not answer.").first.wait_for(state="hidden")
        state.wait("new value")
        live.wait("it goes on")
        world.create("after")
        topic.open("/topics", "after")
