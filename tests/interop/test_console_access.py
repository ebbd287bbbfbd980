"""The pages of the console about access and the audit, in a real browser at a whole server."""

import re
from collections.abc import Iterator

import pytest

from babelbus.core.access import SERVER, Principal, Row
from babelbus.identities.passwords import make_password
from babelbus.identities.tokens import make_token
from tests.support.console_pages import Console, browsing
from tests.support.server import LiveServer, configure

PASSWORD = "correct horse battery staple"
HOSTILE = '<img/src=x/onerror="alert(1)">'

pytestmark = pytest.mark.interop


@pytest.fixture
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path_factory.mktemp("console"), admin=True)) as live:
        yield live


@pytest.fixture
def console(live: LiveServer) -> Iterator[Console]:
    with browsing(live) as console:
        yield console


def add(live: LiveServer, *entries: Principal | Row) -> None:
    live.run(lambda: live.server.gate.put(entries, SERVER))


def add_anna(live: LiveServer, *roles: str) -> dict[str, str]:
    """Add a principal with a password; return its proof."""
    now = live.server.clock.now_ms()
    add(live, Principal("anna", roles, (make_password(PASSWORD, now), make_token(now).credential)))
    return {"user": "anna", "password": PASSWORD}


def test_a_principal_is_made_and_its_secret_is_shown_once(live: LiveServer, console: Console) -> None:
    page = console.open("/access")
    page.get_by_role("button", name="Add principal").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("pump")
    dialog.get_by_label("Roles").fill("walkers, drivers")
    dialog.get_by_role("button", name="Add").click()
    secret = page.locator("[data-secret]")
    token = secret.inner_text()
    assert token.startswith("bb_")
    close = page.get_by_role("dialog").get_by_role("button", name="Close").last
    assert close.is_disabled()
    page.get_by_label("I have kept it").check()
    close.click()
    page.get_by_role("link", name="pump").click()
    page.get_by_role("heading", name="pump").wait_for()
    page.get_by_text("drivers").wait_for()
    assert token not in page.content()
    console.log_in(token=token)
    principal = live.server.gate.table.principal("pump")
    assert principal is not None
    assert principal.roles == ("walkers", "drivers")


def test_rows_are_added_explained_and_removed(live: LiveServer, console: Console) -> None:
    add_anna(live, "walkers")
    page = console.open("/access?tab=rows")
    page.get_by_role("button", name="Add row").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Who").fill("role:walkers")
    dialog.get_by_label("Subjects").fill("walk/#/x")
    dialog.get_by_role("button", name="Add").click()
    dialog.get_by_role("alert").wait_for()  # the server says why the pattern is none
    dialog.get_by_label("Subjects").fill("walk/#")
    dialog.get_by_role("button", name="Add").click()
    row = page.get_by_role("row", name=re.compile("role:walkers allow publish"))
    row.wait_for()
    page.get_by_role("tab", name="Explain").click()
    page.get_by_label("Principal").fill("anna")
    page.get_by_label("Subject").fill("walk/a")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("anna may publish on walk/a.").wait_for()
    page.get_by_label("Subject").fill("run/a")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("anna may not publish on run/a.").wait_for()
    page.get_by_role("tab", name="Rows").click()
    row.get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    row.wait_for(state="detached")


def test_the_gate_is_turned_on_only_with_an_administrator(live: LiveServer, console: Console) -> None:
    page = console.open("/access")
    for principal in live.server.gate.table.principals():
        assert principal[0].roles == ("admin",)  # that of the local client list
    page.get_by_role("button", name="Turn it on").click()
    page.get_by_role("dialog").get_by_text("Administrators: admin.").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Turn on").click()
    page.get_by_text("The gate is on.").wait_for()
    assert live.call(lambda: live.server.gate.enforcing)


def test_nobody_locks_itself_out(live: LiveServer, console: Console) -> None:
    proof = add_anna(live, "admin")
    page = console.open("/access/anna", **proof)
    page.get_by_text("This is you.").wait_for()
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("dialog").get_by_label("Roles").fill("walkers")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.get_by_role("alert").get_by_text("another administrator can do it").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Remove", exact=True).first.click()
    page.get_by_role("dialog").get_by_label(re.compile("Type")).fill("anna")
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("alert").get_by_text("another administrator can do it").wait_for()


def test_the_secret_of_an_own_credential_outlives_the_session(live: LiveServer, console: Console) -> None:
    page = console.open("/access/anna", **add_anna(live, "admin"))
    page.get_by_role("button", name="Issue").click()
    page.get_by_role("dialog").get_by_role("button", name="Issue").click()
    token = page.locator("[data-secret]").inner_text()
    page.get_by_role("heading", name="Babelbus").wait_for()  # the page to log in, behind the dialog
    assert page.locator("[data-secret]").inner_text() == token
    console.log_in(token=token)


def test_a_user_without_the_right_is_told_so(live: LiveServer, console: Console) -> None:
    add(live, Row("anna", "subscribe", "plant/#"))
    proof = add_anna(live)

    async def fill() -> None:
        live.server.broker.state.set("plant/line1", b'"seen"')
        live.server.broker.state.set("secret/line1", b'"hidden"')
        await live.server.broker.state.commit("test").wait()

    live.run(fill)
    page = console.open("/access", **proof)
    page.get_by_text("You may not see this.").wait_for()
    assert page.get_by_role("button", name="Add principal").count() == 0
    page.goto(f"{console.base}/#/audit")
    page.get_by_text("You may not see this.").wait_for()
    page.goto(f"{console.base}/#/state?key=plant%2Fline1")
    page.locator(".state-value").get_by_text("seen").wait_for()
    page.get_by_role("button", name="Edit").wait_for(state="detached")
    assert page.get_by_role("treeitem", name="secret").count() == 0
    page.get_by_role("tab", name="History").click()
    page.get_by_text("You may not see this.").wait_for()


def test_the_audit_is_filtered_and_opened(live: LiveServer, console: Console) -> None:
    add(live, *(Row("anna", "publish", f"walk/{number}") for number in range(3)))
    add(live, Row("bob", "publish", HOSTILE.replace("#", "")))
    page = console.open("/audit")
    page.get_by_text(HOSTILE).wait_for()
    page.get_by_label("Search").fill("walk/2")
    page.get_by_text(HOSTILE).wait_for(state="detached")
    page.get_by_role("button", name="Open record").click()
    page.get_by_role("dialog").get_by_text("walk/1").wait_for()
    page.keyboard.press("Escape")
    page.get_by_label("Kind").select_option("refusal")
    page.get_by_text("No record fits the filters.").wait_for()
    page.reload()
    page.get_by_text("No record fits the filters.").wait_for()
    page.get_by_role("button", name="Without filters").click()
    page.get_by_text(HOSTILE).wait_for()
