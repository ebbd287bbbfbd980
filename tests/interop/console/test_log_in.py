"""Logging in and out of the console, in a real browser."""

import subprocess
import sys

import pytest

from babelbus.testing import START
from tests.interop.console.conftest import Window, Windows
from tests.interop.console.world import PASSWORD, World

pytestmark = pytest.mark.interop


def test_a_wrong_token_is_refused_with_a_sentence(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    window.page.goto(world.url)
    window.page.get_by_label("Token", exact=True).fill("wrong")
    window.click("Log in")
    window.wait("the token is wrong")


def test_who_logs_in_by_token_is_the_administrator_and_leaves_nothing_behind(window: Window, world: World) -> None:
    window.wait("admin")
    stored = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, history.state])"
    assert world.token not in str(window.page.evaluate(stored))
    (cookie,) = window.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    window.click("Log out")
    window.page.get_by_label("Token", exact=True).wait_for()
    assert window.context.cookies() == []
    window.context.add_cookies([{"name": cookie["name"], "value": cookie["value"], "url": world.url}])
    window.page.reload()
    window.page.get_by_label("Token", exact=True).wait_for()


def test_a_principal_logs_in_with_a_password_and_sees_what_is_granted(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    window.log_in(user="anna", password=PASSWORD)
    window.open("/browse/orders", "customer-3")
    assert window.page.get_by_role("button", name="Publish").is_disabled()
    window.open("/browse/flights", "may not")
    window.open("/access", "may not")


def test_a_tenant_sees_its_own_names_alone(windows: Windows, world: World) -> None:
    world.create("tenants/acme/jobs")
    world.client.publish("tenants/acme/jobs", b"a job of acme")
    window = windows(world, logged_in=False)
    window.log_in(user="acme", password=PASSWORD)
    window.open("/browse", "jobs")
    shown = window.page.inner_text("main")
    assert not any(name in shown for name in ("tenants", "orders", "flights"))
    window.open("/browse/jobs", "a job of acme")


def test_the_address_of_the_command_line_logs_in_once(windows: Windows, world: World) -> None:
    command = [sys.executable, "-c", START, "console", "--no-browser", "--data-folder", str(world.server.folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    url = next(word for word in told.stdout.split() if word.startswith("http"))
    first, second = windows(world, logged_in=False), windows(world, logged_in=False)
    first.page.goto(url)
    first.page.locator("aside").wait_for(state="attached")
    assert "code" not in first.page.url
    second.page.goto(url)
    second.wait("the code is wrong, old or used")


def test_a_log_in_that_has_ended_asks_again_and_comes_back_to_the_page(window: Window, world: World) -> None:
    window.open("/browse/orders", "customer-3")
    window.context.clear_cookies()
    window.click("Newest")
    window.page.get_by_label("Token", exact=True).fill(world.token)
    window.click("Log in")
    window.wait("customer-3")
    assert "/browse/orders" in window.page.url
