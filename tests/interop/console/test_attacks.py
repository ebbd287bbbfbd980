"""A publisher who writes markup and scripts into every field of every protocol: no page runs or loads any of it."""

import contextlib
import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser

from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from tests.interop.console.conftest import Window
from tests.interop.console.world import PASSWORD, World, running
from tests.support.eventmesh import MeshClient
from tests.support.zbus import HttpClient

pytestmark = pytest.mark.interop

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = '"><script>alert(2)</script>'
LINK = "javascript:alert(3)"
ENTITY = "&lt;svg onload=alert(4)&gt;${alert(5)}{{alert(6)}}"
BIDI = "\u202eevil\u2066txt.exe\u2069"
NUL = "a\x00b\x1b[31m\r\nX: y"
NAMES = (IMAGE, SCRIPT, LINK, ENTITY, BIDI)
"""Names that topics, groups and channels may have."""
TEXTS = (*NAMES, NUL)
PLAIN = ('"><script>alert(7)', "javascript:alert(8)")
"""Names that principals may have: those of one element, without blanks."""
WATCH = """window.intruders = []
const isOurs = (one) => one.matches("a, script") ? /^(https?:|blob:)/.test(one.href ?? one.src)
    : one.matches("img") && one.src.endsWith("/console/icon.svg")
new MutationObserver(() => window.intruders.push(
    ...[...document.querySelectorAll("img, iframe, object, embed, base, script, a")]
        .filter((one) => !isOurs(one)).map((one) => one.outerHTML)
)).observe(document, { attributes: true, childList: true, subtree: true })"""
"""Keeps each element that loads or runs something, and is no link or script of the console."""
OPEN_TABS = """async () => {
    const drawn = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))
    const dialog = document.querySelector("dialog[open]")
    const opened = []
    for (const tab of dialog.querySelector(".stack > .tabs").querySelectorAll("[role=tab]")) {
        tab.click()
        await drawn()
        opened.push(tab.textContent)
        for (const view of dialog.querySelectorAll("[role=tabpanel] [role=tab]")) {
            view.click()
            await drawn()
            opened.push(view.textContent)
        }
    }
    return opened
}"""
"""Opens all tabs of a record, one after the other."""
VIEWS = {"Text", "Hex", "As other protocols see it", "jebp", "zbus", "Wörterbuch", "sbus", "EventMesh"}


@pytest.fixture(scope="module")
def hostile(chromium: Browser) -> Iterator[World]:
    """A server on which a hostile client of each protocol has set what it may set."""
    with running() as world:
        over_jebp(world)
        over_zbus(world)
        over_worterbuch(world)
        over_sbus(world)
        over_eventmesh(world)
        over_http(world)
        yield world


def over_jebp(world: World) -> None:
    """Publish to hostile topics with hostile keys, headers and payloads; dead letters of hostile groups; state."""
    for name in NAMES:
        world.create(name)
        for text in TEXTS:
            data = text.encode()
            headers = ((data, data), (b"content-type", data), (b"traceparent", data), (b"none", None))
            world.client.publish(name, data, key=data, headers=headers)
        world.client.publish(name, json.dumps({text: [text, {text: text}] for text in TEXTS}).encode())
        settings = {"ack": "explicit", "attempts_max": 1, "ack_seconds": 3600}
        world.ask(
            "POST", "/api/groups", {"name": name, "topic": name, "settings": settings, "start": {"at": "beginning"}}
        )
        consumer = world.client.consume(name, name, window=len(TEXTS))
        world.stack.callback(consumer.leave)
        next(consumer).reject(reason=IMAGE)
        next(consumer)
    state = world.client.state
    for text in NAMES:
        state.set(f"hostile/{text}", text)
        state.set(f"{text}/below", {text: [text, NUL]})
        world.stack.enter_context(state.lock(f"locked/{text}"))
    state.will(delete=[f"hostile/{LINK}"], set={f"hostile/{SCRIPT}": IMAGE})


def over_zbus(world: World) -> None:
    """Create hostile queues and channels, and publish with hostile headers."""
    zbus = world.stack.enter_context(HttpClient(world.server.addresses["zbus"]))
    world.create("zbus")
    for text in (IMAGE, SCRIPT, LINK, ENTITY):
        assert zbus.do("create", mq="zbus", channel=text).status == 200
        assert zbus.do("pub", text.encode(), mq="zbus", tag=text, filter=text, sender=text, id=text).status == 200
    with contextlib.suppress(ConnectionResetError):
        zbus.do(IMAGE, user_agent=IMAGE, mq=IMAGE)


def over_worterbuch(world: World) -> None:
    """Take hostile client names, keys and wills, and subscribe to hostile patterns."""
    for text in TEXTS:
        tree = world.stack.enter_context(TreeClient(f"tcp://{world.server.addresses['worterbuch-tcp']}"))
        tree.set_name(text)
        tree.set_last_will({f"wb/{IMAGE}": text})
        tree.set_grave_goods([f"wb/{IMAGE}/#"])
        tree.set(f"wb/{text}", {text: text})
        tree.publish("zbus", {text: text})
        tree.subscribe(f"wb/{text}")


def over_sbus(world: World) -> None:
    """Publish under hostile keys, and subscribe to them."""
    sbus = world.stack.enter_context(contextlib.closing(SbusClient(world.server.addresses["sbus"])))
    world.create("sbus")
    for text in TEXTS:
        key = text.replace("\0", "").encode()  # a NUL ends the key in a packet
        sbus.subscribe(key)
        sbus.publish(b"sbus/" + key, text.encode())
    sbus.subscribe(b"\xff\xfe<script>")
    sbus.publish(b"sbus/\xff\xfe<script>", b"\xff<script>")
    assert sbus.whoami()


def over_eventmesh(world: World) -> None:
    """Say hello as a hostile user agent, and publish with hostile properties."""
    agent = {
        "env": IMAGE,
        "subsystem": SCRIPT,
        "path": LINK,
        "host": IMAGE,
        "version": SCRIPT,
        "username": IMAGE,
        "idc": LINK,
    }
    mesh = world.stack.enter_context(MeshClient(world.server.addresses["eventmesh-tcp"]))
    mesh.hello("sub", group=IMAGE, **agent)
    world.create("mesh")
    mesh.listen("mesh")
    for text in TEXTS:
        mesh.publish("mesh", text, **{text: text, "type": text})


def over_http(world: World) -> None:
    """Report hostile pipelines, and add hostile principals and rows."""
    for text in NAMES:
        graph = [{"name": text, "kind": kind, "about": text, "inputs": [text]} for kind in ("source", text, "sink")]
        sink = {"rows_in": 1, "failures": 1, "error": text, "error_seconds": 1, "graph": graph, "running": True}
        world.ask("PUT", f"/api/pipelines/{quote(text, safe='')}", {"sinks": {text: sink}})
    for text in PLAIN:
        issue = [{"kind": "password", "password": PASSWORD}]
        world.ask("POST", "/api/principals", {"name": text, "roles": [text], "issue": issue})
        row = {"who": text, "action": "read", "pattern": f"{IMAGE}/{SCRIPT}/#", "effect": "allow"}
        world.ask("POST", "/api/access/rows", {"rows": [row]})


def encoded(text: str) -> str:
    """Return a text as an element of an address."""
    return quote(text, safe="")


def check(window: Window) -> None:
    """Check that nothing of what was shown since the page was opened became an element that loads or runs something."""
    assert window.page.evaluate("window.intruders") == []
    assert window.faults == []


@pytest.fixture(scope="module")
def victim(chromium: Browser, hostile: World) -> Iterator[Window]:
    """The window of all tests here."""
    window = Window(chromium, hostile.url, cookie=hostile.cookie)
    window.page.add_init_script(WATCH)
    yield window
    window.close()


@pytest.fixture
def visitor(victim: Window) -> Iterator[Window]:
    """A window of the administrator at the attacked server."""
    yield victim
    victim.leave()


PAGES = {
    "/": ("Published",),
    "/topics": (IMAGE, SCRIPT, LINK),
    "/browse": (IMAGE, SCRIPT, LINK),
    "/groups": (IMAGE, SCRIPT, LINK),
    "/dead-letters": (IMAGE,),
    "/state": (IMAGE, LINK),
    "/state?tab=locks": (IMAGE,),
    "/state?tab=wills": (IMAGE,),
    "/connections": ("eventmesh", "worterbuch"),
    "/pipelines": (IMAGE, SCRIPT, LINK),
    "/access": (PLAIN[0],),
    "/audit": (PLAIN[0],),
}


def test_lists_show_names_as_text(visitor: Window) -> None:
    for fragment, texts in PAGES.items():
        visitor.open(fragment, *texts)
        check(visitor)


@pytest.mark.parametrize("name", NAMES, ids=["image", "script", "link", "entity", "bidi"])
def test_what_has_a_hostile_name_is_shown_as_text(visitor: Window, name: str) -> None:
    page = encoded(name)
    visitor.open(f"/topics/{page}", name)
    visitor.page.get_by_role("tab", name="Groups").click()
    visitor.page.get_by_role("link", name=name, exact=True).first.wait_for()
    check(visitor)
    visitor.open(f"/groups/{page}/{page}", name)
    visitor.wait("Oldest records in flight")
    check(visitor)
    visitor.open(f"/dead-letters/{encoded('dead-letters/' + name)}", IMAGE)
    check(visitor)
    visitor.open(f"/state?key={encoded(name + '/below')}", name)
    check(visitor)
    visitor.open(f"/browse/{page}", name)
    check(visitor)


@pytest.mark.parametrize("topic", [IMAGE, "zbus", "sbus", "mesh"], ids=["jebp", "zbus", "sbus", "eventmesh"])
def test_a_record_of_each_protocol_is_shown_as_text(visitor: Window, hostile: World, topic: str) -> None:
    count = hostile.ask("GET", f"/api/topics/{encoded(topic)}")["partitions"][0]["high_watermark"]
    assert count > 0
    visitor.open(f"/browse/{encoded(topic)}", "Partition 0 has the offsets")
    check(visitor)
    for offset in range(count):
        visitor.open(f"/browse/{encoded(topic)}?open={encoded(f'0:{offset}')}")
        visitor.dialog.get_by_role("tab", name="As other protocols see it").wait_for()
        assert set(visitor.page.evaluate(OPEN_TABS)) >= VIEWS
        check(visitor)


def test_principals_rows_and_what_they_did_are_shown_as_text(visitor: Window) -> None:
    for name in PLAIN:
        visitor.open(f"/access/{encoded(name)}", name)
        check(visitor)
    visitor.open("/audit", PLAIN[0])
    visitor.page.get_by_label("Open record").first.click()
    visitor.dialog.wait_for()
    check(visitor)


@pytest.mark.parametrize("text", [*NAMES, NUL], ids=["image", "script", "link", "entity", "bidi", "nul"])
def test_an_address_that_somebody_sends_runs_nothing(visitor: Window, text: str) -> None:
    part = encoded(text)
    for fragment in (
        f"/{part}",
        f"/topics/none{part}",
        f"/browse/none{part}?filter={part}&open={part}&offset={part}",
        f"/groups/none{part}/{part}",
        f"/state?key=none{part}&tab={part}&at={part}",
        f"/access/none{part}",
        f"/connections?protocol={part}&search={part}",
        f"/topics?sort={part}&search={part}&offset={part}",
    ):
        visitor.open(fragment)
        visitor.page.locator("main").get_by_text(".").first.wait_for()
        check(visitor)
