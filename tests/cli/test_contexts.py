"""Contexts: which server a command uses, and what their file may hold."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from babelbus.cli import program
from babelbus.client import Identity

PIN = "7d" * 32


class User:
    """A user with a configuration of its own, in a folder without a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "config" / "babelbus" / "contexts.toml"

    def run(self, *args: str, code: int = 0, variables: dict[str, str] | None = None) -> Result:
        environment: dict[str, str | None] = {name: None for name in os.environ if name.startswith("BABELBUS_")}
        environment |= {"XDG_CONFIG_HOME": str(self.folder / "config")} | (variables or {})
        result = CliRunner().invoke(program, list(args), env=environment)
        assert result.exit_code == code, result.output
        return result

    def shown(self, *args: str, **variables: str) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.run("context", "show", "--json", *args, variables=variables).stdout)
        return shown


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.chdir(tmp_path)
    user = User(tmp_path)
    user.run("context", "add", "prod", "--server", "bus:1", "--fingerprint", PIN.upper())
    user.run("context", "add", "test", "--server", "other:2")
    return user


def test_a_file_of_contexts_that_the_disk_refuses_is_named(user: User) -> None:
    user.file.unlink()
    user.file.symlink_to("/proc/self/mem")  # whose first byte cannot be read
    told = user.run("context", "list", code=1).output
    assert f"the file of contexts {user.file} cannot be read: Input/output error" in told


def test_options_go_before_the_environment_that_before_the_context_in_use_and_that_before_the_folder(
    user: User,
) -> None:
    assert user.shown()["server"] is None
    user.run("context", "use", "test")
    assert user.shown()["server"] == "other:2"
    assert user.shown(BABELBUS_CONTEXT="prod")["server"] == "bus:1"
    assert user.shown("--context", "test", BABELBUS_CONTEXT="prod")["server"] == "other:2"
    assert user.shown("--context", "test", BABELBUS_SERVER="env:3")["server"] == "other:2"
    assert user.shown("--server", "option:4", BABELBUS_CONTEXT="prod")["server"] == "option:4"
    assert user.shown(BABELBUS_SERVER="env:3", BABELBUS_CONTEXT="prod")["server"] == "env:3"
    assert user.shown(BABELBUS_SERVER="env:3")["fingerprint"] is None
    assert user.shown("--data-folder", "here")["server"] is None
    assert user.shown(BABELBUS_DATA_FOLDER="here")["server"] is None
    assert user.shown("--context", "none")["server"] is None
    user.run("context", "use", "none")
    assert user.shown()["server"] is None


def test_the_parts_of_a_context_can_be_replaced(user: User) -> None:
    shown = user.shown("--context", "prod", "--identity", "x.key", "--server-fingerprint", "AB" * 32)
    assert (shown["server"], shown["fingerprint"]) == ("bus:1", "ab" * 32)
    assert user.shown("--context", "prod")["fingerprint"] == PIN
    assert "not pinned" in user.run("context", "show", "--context", "test").stdout


def test_a_context_and_another_server_do_not_go_together(user: User) -> None:
    for other in (["--server", "a:1"], ["--data-folder", "x"], ["--admin", "a:1"]):
        told = user.run("topics", "list", "--context", "prod", *other, code=2).stderr
        assert f"--context and {other[0]} both name a server" in told
    assert "user" in user.run("topics", "list", "--context", "prod", "--user", "ada", code=2).stderr


def test_a_context_also_stands_before_the_command(user: User) -> None:
    result = user.run("--context", "prod", "context", "show", "--json")
    assert json.loads(result.stdout)["server"] == "bus:1"


def test_contexts_are_listed_used_and_removed(user: User) -> None:
    user.run("context", "use", "prod")
    rows = [json.loads(line) for line in user.run("context", "list", "--json").stdout.splitlines()]
    assert [(row["name"], row["in_use"]) for row in rows] == [("prod", True), ("test", False)]
    assert "there is a context 'prod' already" in user.run("context", "add", "prod", "--server", "x:1", code=1).stderr
    user.run("context", "add", "prod", "--server", "x:1", "--replace")
    assert user.shown()["server"] == "x:1"
    assert "data folder here" in user.run("context", "remove", "prod").stdout
    assert user.shown()["server"] is None
    for command in (["use", "prod"], ["remove", "prod"], ["show", "--context", "prod"]):
        assert "there is no context 'prod' (test)" in user.run("context", *command, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none", "--server", "a:1"], "no name of a context"),
        (["a/b", "--server", "a:1"], "no name of a context"),
        (["a", "--server", "a"], "HOST:PORT"),
        (["a", "--server", "a:70000"], "HOST:PORT"),
        (["a", "--server", "a:1", "--fingerprint", "12"], "64 hex digits"),
    ],
)
def test_wrong_values_are_refused(user: User, arguments: list[str], told: str) -> None:
    assert told in user.run("context", "add", *arguments, code=1).stderr


@pytest.mark.parametrize(
    "content",
    [
        "current = 7",
        "nothing = 1",
        "[contexts.a]\nserver = 'a'",
        "[contexts.a]\nserver = 'a:1'\nidentity = 'relative.key'",
        "current = 'gone'",
        "[contexts",
        "\xff",
    ],
)
def test_a_wrong_file_is_named_with_what_to_do(user: User, content: str) -> None:
    user.file.write_text(content, encoding="latin-1")
    told = user.run("context", "list", code=1).stderr
    assert str(user.file) in told.replace("\n", "")
    assert "correct it, or remove it" in told
    assert "Traceback" not in told


def test_a_file_that_others_may_read_is_refused(user: User) -> None:
    assert user.file.stat().st_mode & 0o777 == 0o600
    user.file.chmod(0o640)
    assert "chmod 600" in user.run("context", "list", code=1).stderr


def test_names_with_quotes_survive_the_file(user: User) -> None:
    path = user.folder / 'a "quoted" \\ file.key'
    Identity.generate().save(path)
    user.run("context", "add", "q", "--server", "a:1", "--identity", str(path))
    assert user.shown("--context", "q")["identity"] == str(path)


def test_login_says_what_to_do_where_nothing_listens(user: User) -> None:
    assert "add --server" in user.run("login", "new", code=2).stderr
    told = user.run("login", "new", "--server", "127.0.0.1:1", code=1)
    assert "nothing listens on 127.0.0.1:1" in told.stderr
    assert (user.file.parent / "identity.key").stat().st_mode & 0o777 == 0o600


def test_serve_and_check_have_no_context(user: User) -> None:
    user.run("context", "use", "prod")
    for command in ("check", "repair"):
        assert "works on a data folder" in user.run(command, code=1).stderr
    assert "No such option" in user.run("serve", "--context", "prod", code=2).stderr
