"""Logging in and out of the console, in a real browser."""

import subprocess
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from babelbus.testing import START
from tests.interop.console.conftest import Windows
from tests.interop.console.world import PASSWORD, World

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = pytest.mark.interop


def test_a_wrong_token_is_refused_with_a_sentence(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    window.page.goto(world.url)
    window.page.get_by_label("Token", exact=True).fill("wrong")
    window.click("Log in")
    window.wait("the token is wrong")


def test_who_logs_in_by_token_is_the_administrator_and_leaves_nothing_behind(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    window.log_in(token=world.token)
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


def test_who_logs_out_is_not_thrown_out_by_what_the_page_asks_meanwhile(windows: Windows, world: World) -> None:
    window = windows(world, token=world.token)
    window.open("/connections", "worterbuch")

    def answer_late(route: "Route") -> None:
        """Keep the answer until a request of the page has been refused: the server has ended the log-in."""
        answer = route.fetch()
        with window.page.expect_response(lambda response: response.status == HTTPStatus.UNAUTHORIZED):
            window.look()
        window.page.get_by_role("button", name="Log out").wait_for()
        route.fulfill(response=answer)

    window.page.route("**/api/console/logout", answer_late)
    window.click("Log out")
    window.page.get_by_label("Token", exact=True).wait_for()
    assert window.page.get_by_text("The log-in has ended.").count() == 0
    assert window.context.cookies() == []


def test_a_principal_logs_in_with_a_password_and_sees_what_is_granted(windows: Windows, world: World) -> None:
    window = windows(world, logged_in=False)
    window.log_in(user="anna", password=PASSWORD)
    window.open("/browse/orders", "customer-3")
    # It waits: the page shows the records while it still asks for the rights.
    window.page.get_by_role("button", name="Publish", disabled=True).wait_for()
    window.open("/browse/flights", "may not")
    window.open("/access", "may not")


def test_a_tenant_sees_its_own_names_alone(windows: Windows, world: World) -> None:
    world.create("tenants/acme/jobs")
    world.client.publish("tenants/acme/jobs", b"a job of acme")
    window = windows(world, user="acme", password=PASSWORD)
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


@pytest.mark.parametrize("place", ["server", "browser"])
def test_a_log_in_that_has_ended_says_so_and_comes_back_to_the_page(windows: Windows, world: World, place: str) -> None:
    window = windows(world, token=world.token)
    window.open("/browse/orders?open=0:7", "customer 0")
    if place == "server":
        ((name, value),) = ((one["name"], one["value"]) for one in window.context.cookies())
        world.ask("POST", "/api/console/logout", cookie=f"{name}={value}")
    else:
        window.context.clear_cookies()
    window.page.get_by_label("The record after").click()
    window.wait("The log-in has ended.", "Log in again to go on where you were.")
    window.page.get_by_label("Token", exact=True).fill(world.token)
    window.click("Log in")
    window.dialog.get_by_text("customer 1").first.wait_for()
    assert "open=0%3A8" in window.page.url


def test_a_page_that_asks_by_itself_notices_the_end_of_the_log_in(windows: Windows, world: World) -> None:
    window = windows(world, token=world.token)
    other = window.context.new_page()
    window.open("/connections", "worterbuch")
    other.goto(f"{world.url}/#/topics")
    other.get_by_role("button", name="Log out").click()
    other.get_by_label("Token", exact=True).wait_for()
    assert other.get_by_text("The log-in has ended.").count() == 0
    window.wait("The log-in has ended.")
