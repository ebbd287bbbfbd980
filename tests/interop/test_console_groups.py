"""Groups, dead letters and pipelines in a real browser, on a real server (`make interop`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import TopicDefaults
from babelbus.core.access import SERVER
from babelbus.core.groups.dead_letters import DeadLetter, make
from babelbus.core.record import Event, Record
from tests.support.bus import publish as publish_events
from tests.support.console_pages import Console, browsing
from tests.support.server import LiveServer, configure
from tests.web.test_state import Api

HOSTILE = "<img src=x onerror=alert(1)>"
LETTERS = "dead-letters/g"


class Page:
    """A page of the console, and the words in which a user acts on it."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def press(self, name: str, within: Any = None) -> None:
        (within or self.page).get_by_role("button", name=name, exact=True).click()

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    @property
    def dialog(self) -> Any:
        return self.page.get_by_role("dialog")

    def close(self) -> None:
        """Press the button at the foot of the dialog."""
        self.press("Close", self.dialog.locator(".dialog-actions"))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with LiveServer(configure(tmp_path, admin=True, topics=TopicDefaults(ack="written"))) as live:
        live.call(lambda: live.server.broker.create_topic("work", principal=SERVER))
        yield Api(live)


@pytest.fixture
def console(api: Api) -> Iterator[Console]:
    with browsing(api.live) as opened:
        yield opened


def post(api: Api, path: str, **body: Any) -> Any:
    status, content = api("POST", path, json.dumps(body).encode())
    assert status in (200, 201), content
    return json.loads(content)


def publish(api: Api, *events: Event) -> None:
    api.live.call(lambda: publish_events(api.live.server.broker, list(events)))


def group(api: Api, name: str = "g") -> Any:
    return api.json("GET", f"/api/topics/work/groups/{name}")


@pytest.mark.interop
def test_a_group_shows_why_its_records_wait_and_is_paused_moved_changed_and_removed(api: Api, console: Console) -> None:
    post(api, "/api/groups", topic="work", name="g", settings={"ack": "explicit"}, start={"at": "beginning"})
    publish(api, *(Event("work", b"%d" % number) for number in range(5)))
    page = Page(console.open("/groups"))
    page.sees("The group has no members.")
    page.page.get_by_role("link", name="g", exact=True).click()
    page.press("Pause")
    page.sees("The group is paused: nothing is delivered until it is resumed.")
    assert group(api)["paused"]
    page.press("Resume")
    page.press("Move …")
    page.page.get_by_label("Go on").select_option("offset")
    page.page.get_by_label("Offset", exact=True).fill("3")
    page.sees("3 would be skipped")
    assert group(api)["lag"] == 5
    page.press("Move the group")
    page.sees("goes on at its new position")
    assert group(api)["lag"] == 2
    page.press("Change …")
    page.page.get_by_label("Deliveries at most").fill("7")
    page.press("Save")
    page.sees("Group g is changed.")
    assert group(api)["settings"]["attempts_max"] == 7
    page.press("Remove …")
    remove = page.dialog.get_by_role("button", name="Remove the group")
    assert remove.is_disabled()
    page.dialog.get_by_role("textbox").fill("g")
    remove.click()
    page.sees("There are no consumer groups.")
    assert api.json("GET", "/api/groups")["groups"] == []


@pytest.mark.interop
def test_a_group_is_created_and_its_members_come_and_go(api: Api, console: Console) -> None:
    publish(api, Event("work", b"1"))
    page = Page(console.open("/groups"))
    page.press("Create a group")
    page.page.get_by_label("Topic", exact=True).fill("none")
    page.page.get_by_label("Name of the group").fill("made")
    page.page.get_by_label("Begin").select_option("beginning")
    page.press("Create the group")
    page.dialog.get_by_role("alert").wait_for()  # what was typed is still there
    page.page.get_by_label("Topic", exact=True).fill("work")
    page.press("Create the group")
    page.sees("Nobody has joined the group.")
    answer = api.open("GET", "/api/topics/work/groups/made/consume", {"window": 1})
    with answer:
        answer.line()
        page.sees("has no credit")
        page.sees("with a member")
    page.sees("Nobody has joined the group.")
    page.sees("the connection of the last member broke")


@pytest.mark.interop
def test_letters_are_shown_replayed_and_purged_and_run_nothing(api: Api, console: Console) -> None:
    api.live.call(lambda: api.live.server.broker.create_topic(LETTERS, principal=SERVER, source="work"))
    hostile = HOSTILE.encode()
    record = Record(hostile, hostile, ((hostile, hostile), (b"ce_source", hostile)))
    letters = [DeadLetter("work", 0, number, "g", 3, f"{HOSTILE} {number}", 1_700_000_000_000) for number in range(3)]
    publish(api, *(make(LETTERS, record, letter) for letter in letters))
    page = Page(console.open("/dead-letters"))
    page.page.get_by_role("link", name=LETTERS).click()
    page.sees(f"{HOSTILE} 2")
    page.press("Show letter 0:1")
    page.sees(f"Header {HOSTILE}")
    page.close()
    page.page.get_by_label("Select 0:1", exact=True).check()
    page.press("Replay 1")
    page.sees("1 letter replayed, 2 not replayed are left.")
    page.close()
    page.page.get_by_label("Select 0:1", exact=True).wait_for(state="detached")
    page.press("Replay all …")
    page.press("Replay 2 letters", page.dialog)
    page.sees("2 letters replayed, 0 not replayed are left.")
    page.close()
    page.sees("All letters of this partition were replayed.")
    assert api.json("GET", "/api/topics/work")["partitions"][0]["next_offset"] == 3
    page.press("Purge …")
    page.press("Purge", page.dialog)
    page.sees("There are no dead letters.")


@pytest.mark.interop
def test_a_pipeline_is_drawn_and_is_a_table_for_those_who_cannot_see_it(api: Api, console: Console) -> None:
    nodes = [
        {"name": "flights", "kind": "source", "about": "topic flights"},
        {"name": "delays", "kind": "step", "about": HOSTILE, "inputs": ["flights"]},
        {"name": "out", "kind": "sink", "about": "topic rollup", "inputs": ["delays"]},
    ]
    sink = {"rows_in": 7, "failures": 2, "error": f"no such column {HOSTILE}", "error_seconds": 1, "graph": nodes}
    page = Page(console.open("/pipelines"))
    page.sees("No pipeline has reported.")
    assert api("PUT", "/api/pipelines/rollup", json.dumps({"sinks": {"out": sink}}).encode())[0] == 200
    page.sees(f"no such column {HOSTILE}")
    assert page.page.locator("svg.graph .graph-node").count() == 3
    assert page.page.locator("svg.graph .graph-edge").count() == 2
    page.press("Show the graph of rollup as a table")
    page.page.get_by_role("table", name="Sources, steps and sinks").wait_for()
    page.page.keyboard.press("t")
    page.page.keyboard.press("t")
    page.page.locator("svg.graph").wait_for()


@pytest.mark.interop
def test_a_group_that_is_removed_under_an_open_page_says_so(api: Api, console: Console) -> None:
    post(api, "/api/groups", topic="work", name="g", settings={"ack": "explicit"})
    page = Page(console.open("/groups/work/g"))
    page.sees("All records are done.")
    assert api("DELETE", "/api/topics/work/groups/g")[0] == 200
    page.sees("no group 'g'")
    page.page.reload()
    page.sees("There is no such group.")
