"""Groups, dead letters and pipelines in a real browser, on a real server."""

from typing import Any

import pytest

from tests.interop.console.conftest import Window
from tests.interop.console.world import World

HOSTILE = "<img src=x onerror=alert(1)>"
LETTERS = "dead-letters/breakage"

pytestmark = pytest.mark.interop


def group(world: World, topic: str, name: str = "g") -> Any:
    """Return a group as the server has it."""
    return world.ask("GET", f"/api/topics/{topic}/groups/{name}")


def make(world: World, topic: str, name: str = "g") -> None:
    """Create a topic with a group that acknowledges its records."""
    world.create(topic)
    settings = {"ack": "explicit", "attempts_max": 1}
    world.ask("POST", "/api/groups", {"topic": topic, "name": name, "settings": settings, "start": {"at": "beginning"}})


def test_a_group_shows_why_its_records_wait_and_is_paused_moved_changed_and_removed(
    window: Window, world: World
) -> None:
    make(world, "work")
    for number in range(5):
        world.client.publish("work", b"%d" % number)
    page = window.open("/groups", "The group has no members.")
    page.get_by_role("row").filter(has_text="work").get_by_role("link", name="g", exact=True).click()
    window.click("Pause")
    window.wait("The group is paused: nothing is delivered until it is resumed.")
    assert group(world, "work")["paused"]
    window.click("Resume")
    window.click("Move …")
    page.get_by_label("Go on").select_option("offset")
    page.get_by_label("Offset", exact=True).fill("3")
    window.wait("3 would be skipped")
    assert group(world, "work")["lag"] == 5
    window.finish("Move the group")
    window.wait("goes on at its new position")
    assert group(world, "work")["lag"] == 2
    window.click("Change …")
    page.get_by_label("Deliveries at most").fill("7")
    window.finish("Save")
    window.wait("Group g is changed.")
    assert group(world, "work")["settings"]["attempts_max"] == 7
    window.click("Remove …")
    assert window.dialog.get_by_role("button", name="Remove the group").is_disabled()
    window.dialog.get_by_role("textbox").fill("g")
    window.finish("Remove the group")
    page.get_by_role("link", name="billing", exact=True).wait_for()
    assert "work" not in {one["topic"] for one in world.ask("GET", "/api/groups")["groups"]}


def test_a_group_is_created_and_its_members_come_and_go(window: Window, world: World) -> None:
    world.create("crew")
    world.client.publish("crew", b"1")
    page = window.open("/groups", "billing")
    window.click("Create a group")
    page.get_by_label("Topic", exact=True).fill("none")
    page.get_by_label("Name of the group").fill("made")
    page.get_by_label("Begin").select_option("beginning")
    window.click("Create the group")
    window.dialog.get_by_role("alert").wait_for()  # what was typed is still there
    page.get_by_label("Topic", exact=True).fill("crew")
    window.finish("Create the group")
    window.wait("Nobody has joined the group.")
    with world.request("GET", "/api/topics/crew/groups/made/consume?window=1") as answer:
        answer.readline()
        window.look()
        window.wait("has no credit", "with a member")
    world.wait("/api/topics/crew/groups/made", lambda made: not made["members"])
    window.wait("Nobody has joined the group.", "the connection of the last member broke")  # without a look


def test_letters_are_shown_replayed_and_purged_and_run_nothing(window: Window, world: World) -> None:
    make(world, "parts", "breakage")
    hostile = HOSTILE.encode()
    for _ in range(3):
        world.client.publish("parts", hostile, key=hostile, headers=((hostile, hostile),))
    with world.client.consume("parts", "breakage", window=3) as consumer:
        for number in range(3):
            next(consumer).reject(reason=f"{HOSTILE} {number}")
    world.wait("/api/dead-letters", lambda all_: LETTERS in {one["topic"] for one in all_["dead_letters"]})
    page = window.open("/dead-letters", LETTERS)
    page.get_by_role("link", name=LETTERS).click()
    window.wait(f"{HOSTILE} 2")
    window.click("Show letter 0:1")
    window.wait(f"Header {HOSTILE}")
    window.finish("Close")
    page.get_by_label("Select 0:1", exact=True).check()
    window.click("Replay 1")
    window.wait("1 letter replayed, 2 not replayed are left.")
    window.finish("Close")
    page.get_by_label("Select 0:1", exact=True).wait_for(state="detached")
    window.click("Replay all …")
    window.click("Replay 2 letters", window.dialog)
    window.wait("2 letters replayed, 0 not replayed are left.")
    window.finish("Close")
    window.wait("All letters of this partition were replayed.")
    assert world.ask("GET", "/api/topics/parts")["partitions"][0]["next_offset"] == 6
    window.click("Purge …")
    window.finish("Purge")
    page.get_by_role("link", name="billing").first.wait_for()
    page.get_by_role("link", name=LETTERS).wait_for(state="detached")


def test_a_pipeline_is_drawn_and_is_a_table_for_those_who_cannot_see_it(window: Window, world: World) -> None:
    nodes = [
        {"name": "flights", "kind": "source", "about": "topic flights"},
        {"name": "delays", "kind": "step", "about": HOSTILE, "inputs": ["flights"]},
        {"name": "out", "kind": "sink", "about": "topic rollup", "inputs": ["delays"]},
    ]
    sink = {"rows_in": 7, "failures": 2, "error": f"no such column {HOSTILE}", "error_seconds": 1, "graph": nodes}
    page = window.open("/pipelines", "Rows in")
    world.ask("PUT", "/api/pipelines/rollup", {"sinks": {"out": sink}})
    window.look()
    window.wait(f"no such column {HOSTILE}")
    graph = page.get_by_role("region", name="rollup").locator("svg.graph")
    assert graph.locator(".graph-node").count() == 3
    assert graph.locator(".graph-edge").count() == 2
    window.click("Show the graph of rollup as a table")
    page.get_by_role("table", name="Sources, steps and sinks").wait_for()
    page.keyboard.press("t")
    page.keyboard.press("t")
    graph.wait_for()


def test_a_group_that_is_removed_under_an_open_page_says_so(window: Window, world: World) -> None:
    make(world, "lonely")
    window.open("/groups/lonely/g", "All records are done.")
    world.ask("DELETE", "/api/topics/lonely/groups/g")
    window.look()
    window.wait("no group 'g'")
    window.page.reload()
    window.wait("There is no such group.")
