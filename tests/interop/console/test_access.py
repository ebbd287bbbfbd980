"""The pages of the console about access and the audit, in a real browser at a whole server."""

import re

import pytest

from tests.interop.console.conftest import Window, Windows
from tests.interop.console.world import PASSWORD, World, running

HOSTILE = '<img/src=x/onerror="alert(1)">'

pytestmark = pytest.mark.interop


def add(world: World, name: str, *roles: str) -> dict[str, str]:
    """Add a principal with a password and a token; return a proof."""
    issue = [{"kind": "password", "password": PASSWORD}, {"kind": "token"}]
    world.ask("POST", "/api/principals", {"name": name, "roles": roles, "issue": issue})
    return {"user": name, "password": PASSWORD}


def grant(world: World, *rows: tuple[str, str]) -> None:
    """Add rows that allow to publish."""
    fields = [{"who": who, "action": "publish", "pattern": pattern, "effect": "allow"} for who, pattern in rows]
    world.ask("POST", "/api/access/rows", {"rows": fields})


def test_a_principal_is_made_and_its_secret_is_shown_once(window: Window, world: World) -> None:
    page = window.open("/access")
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
    assert world.log_in(token=token)
    assert world.ask("GET", "/api/principals/pump")["roles"] == ["walkers", "drivers"]


def test_rows_are_added_explained_and_removed(window: Window, world: World) -> None:
    add(world, "wanda", "walkers")
    page = window.open("/access?tab=rows")
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
    page.get_by_label("Principal").fill("wanda")
    page.get_by_label("Subject").fill("walk/a")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("wanda may publish on walk/a.").wait_for()
    page.get_by_label("Subject").fill("run/a")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("wanda may not publish on run/a.").wait_for()
    page.get_by_role("tab", name="Rows").click()
    row.get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    row.wait_for(state="detached")


def test_the_gate_is_turned_on_only_with_an_administrator(windows: Windows) -> None:
    with running() as world:
        for principal in world.ask("GET", "/api/principals")["principals"]:
            assert principal["roles"] == ["admin"]  # that of the local client list
        window = windows(world)
        page = window.open("/access")
        page.get_by_role("button", name="Turn it on").click()
        page.get_by_role("dialog").get_by_text("Administrators: admin.").wait_for()
        page.get_by_role("dialog").get_by_role("button", name="Turn on").click()
        window.wait("The gate is on.")
        assert world.ask("GET", "/api/access")["enforcing"]


def test_nobody_locks_itself_out(windows: Windows, world: World) -> None:
    page = windows(world, **add(world, "locke", "admin")).open("/access/locke")
    page.get_by_text("This is you.").wait_for()
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("dialog").get_by_label("Roles").fill("walkers")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.get_by_role("alert").get_by_text("another administrator can do it").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Remove", exact=True).first.click()
    page.get_by_role("dialog").get_by_label(re.compile("Type")).fill("locke")
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("alert").get_by_text("another administrator can do it").wait_for()


def test_the_secret_of_an_own_credential_outlives_the_session(windows: Windows, world: World) -> None:
    page = windows(world, **add(world, "keira", "admin")).open("/access/keira")
    page.get_by_role("button", name="Issue").click()
    page.get_by_role("dialog").get_by_role("button", name="Issue").click()
    token = page.locator("[data-secret]").inner_text()
    page.get_by_role("heading", name="Babelbus").wait_for()  # the page to log in, behind the dialog
    assert page.locator("[data-secret]").inner_text() == token
    assert world.log_in(token=token)


def test_a_user_without_the_right_is_told_so(windows: Windows, world: World) -> None:
    world.set({"plant/seen": "seen", "secret/line1": "hidden"})
    window = windows(world, user="anna", password=PASSWORD)
    page = window.open("/access", "You may not see this.")
    assert page.get_by_role("button", name="Add principal").count() == 0
    window.open("/audit", "You may not see this.")
    window.open("/state?key=plant%2Fseen")
    page.locator(".state-value").get_by_text("seen").wait_for()
    page.get_by_role("button", name="Edit").wait_for(state="detached")
    assert page.get_by_role("treeitem", name="secret").count() == 0
    page.get_by_role("tab", name="History").click()
    window.wait("You may not see this.")


def test_the_audit_is_filtered_and_opened(window: Window, world: World) -> None:
    grant(world, *(("anna", f"parcel/{number}") for number in range(3)))
    grant(world, ("bob", HOSTILE))
    page = window.open("/audit")
    page.get_by_text(HOSTILE).wait_for()
    page.get_by_label("Search").fill("parcel/2")
    page.get_by_text(HOSTILE).wait_for(state="detached")
    page.get_by_role("button", name="Open record").click()
    page.get_by_role("dialog").get_by_text("parcel/1").wait_for()
    page.keyboard.press("Escape")
    page.get_by_label("Kind").select_option("refusal")
    page.get_by_text("No record fits the filters.").wait_for()
    page.reload()
    page.get_by_text("No record fits the filters.").wait_for()
    page.get_by_role("button", name="Without filters").click()
    page.get_by_text(HOSTILE).wait_for()
