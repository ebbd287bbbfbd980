"""`babelbus console`, beside the server and away from it."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import COMMAND, ENVIRONMENT, Served
from tests.cli.test_away import Away, away
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.console import Browser

__all__ = ["away"]


def log_in(url: str) -> Any:
    match = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/#/login\?code=([\w-]+)", url.strip())
    assert match is not None, url
    with Browser(match[1]) as one:
        told = one.log_in(code=match[2])
        assert one.log_in(code=match[2]).status in (401, 429)  # once
        return told.body


def test_the_address_logs_in_once(served: Served) -> None:
    assert log_in(served.run("console"))["source"] == "console"


def test_the_address_is_told_as_json(served: Served) -> None:
    (told,) = served.rows("console", "--json")
    assert sorted(told) == ["expires_ms", "url"]
    assert log_in(told["url"])["principal"] == "admin"


def test_away_from_the_server_the_log_in_is_that_of_the_key(away: Away) -> None:
    assert log_in(away.run("console"))["source"] == "console:ops"


@pytest.mark.parametrize(("options", "opens"), [((), True), (("--no-browser",), False)])
def test_a_browser_is_opened_where_there_is_one(
    served: Served, tmp_path: Path, options: tuple[str, ...], opens: bool
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f"#!{sys.executable}\nimport sys\nopen({str(opened)!r}, 'w').write(sys.argv[1])\n")
    browser.chmod(0o755)
    environment = ENVIRONMENT | {"BROWSER": str(browser)}
    near, far = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, "console", *options], cwd=served.folder, env=environment, stdout=far, stderr=subprocess.PIPE,
            check=False, timeout=SAFETY_NET_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = ""
        while not shown.endswith("\n"):  # a terminal gives what it has by now
            shown += os.read(near, 4096).decode()
    finally:
        os.close(near)
        os.close(far)
    assert opened.exists() is opens
    assert log_in(opened.read_text() if opens else shown)["source"] == "console"


def test_without_a_console_the_command_says_so(tmp_path: Path) -> None:
    server = Served(tmp_path, "--no-admin-console")
    try:
        assert "admin.console" in server.run("console", code=1)
        assert json.loads(server.run("status", "--json"))["health"] == "ok"
    finally:
        assert server.stop() == 0
