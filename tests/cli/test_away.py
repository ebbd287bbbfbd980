"""Every command gives the same answer beside the server and away from it, over jebp with a context."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.shell import COMMAND, ENVIRONMENT, Served
from tests.support.bus import SAFETY_NET_SECONDS

HERE, AWAY = "here", "away"
VARIABLE = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z|[\d,]+ a second"
    r"|\"(version|offset|time|timestamp|seconds|created_ms|now|next_offset|uptime_seconds)\":[\d.]+"
    r"|\"(id|created|address)\":[^,}]*|refusal \w+|[0-9a-f]{64}"
)


class Away:
    """A user of another machine: nothing but a context and a key."""

    def __init__(self, folder: Path, served: Served) -> None:
        self.served = served
        self.folder = folder
        self.environment = ENVIRONMENT | {"XDG_CONFIG_HOME": str(folder / "config")}

    def run(self, *args: str, input: str = "", code: int = 0) -> str:  # noqa: A002 - the name that subprocess has
        done = subprocess.run(
            [*COMMAND, *args], cwd=self.folder, env=self.environment, input=input, text=True, capture_output=True,
            check=False, timeout=SAFETY_NET_SECONDS,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def both(self, *args: str, input: str = "", code: int = 0) -> str:  # noqa: A002 - the same
        """Run a command beside the server and away from it; return the answer, which must be the same.

        `@` in an argument is "here" or "away", for names that exist once.
        """
        here = self.served.run(*(one.replace("@", HERE) for one in args), input=input, code=code)
        away = self.run(*(one.replace("@", AWAY) for one in args), input=input, code=code)
        assert plain(here) == plain(away)
        return away


def plain(text: str) -> str:
    """Return an answer without what differs between two runs of one command."""
    return VARIABLE.sub("~", text).replace(HERE, "@").replace(AWAY, "@").replace("jebp:ops", "admin")


@pytest.fixture(scope="module")
def away(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Away:
    user = Away(tmp_path_factory.mktemp("away"), served)
    address = served.ready["addresses"]["jebp"]
    told = user.run("login", "prod", "--server", address, "--use", code=1)
    own = re.search(r"babelbus clients add \w+ --fingerprint ([0-9a-f]{64})", told)
    assert own is not None, told
    served.run("clients", "add", "ops", "--fingerprint", own[1], "--admin")
    user.run("login", "prod", "--fingerprint", served.ready["server_fingerprint"])
    return user


def test_topics(away: Away) -> None:
    away.both("topics", "create", "t-@", "--partitions", "2", "--retention", "7d")
    away.both("topics", "create", "t-@", code=1)
    away.both("topics", "show", "t-@", "--json")
    away.both("topics", "alter", "t-@", "--retention", "30d")
    away.both("topics", "show", "nobody", code=1)
    away.both("topics", "list")
    away.both("topics", "remove", "t-@", "--yes")
    away.both("topics", "remove", "t-@", "--yes", code=1)


def test_records(away: Away) -> None:
    away.both("topics", "create", "r-@")
    assert away.both("publish", "r-@", "first", "--key", "k") == "0:0\n"
    away.both("publish", "r-@", input="a\nb\n")
    away.both("fetch", "r-@")
    away.both("fetch", "r-@", "--from-offset", "7", code=1)
    away.both("search", "r-@", 'payload = "a"')
    away.both("search", "r-@", "payload =", code=1)
    away.both("fetch", "nobody", code=1)
    away.both("publish", "nobody", "x", code=1)
    away.both("tail", "r-@", "--from-offset", "0", "--max", "3", "--json")
    exported = away.both("export", "r-@", "-")
    away.both("import", "i-@", "-", "--create", "--json", input=exported)
    away.both("import", "i2-@", "-", input=exported, code=1)
    away.both("fetch", "i-@")


def test_groups_and_dead_letters(away: Away) -> None:
    away.both("topics", "create", "g-@")
    away.both("publish", "g-@", "x")
    away.both("groups", "create", "g-@", "w-@", "--from", "beginning", "--attempts-max", "1")
    away.both("groups", "list", "g-@", "--json")
    away.both("groups", "show", "g-@", "w-@")
    away.both("groups", "alter", "g-@", "w-@", "--ack-seconds", "5m")
    away.both("groups", "show", "g-@", "nobody", code=1)
    away.both("consume", "g-@", "--group", "w-@", "--max", "1", "--exec", "exit 3", code=1)
    away.both("groups", "seek", "g-@", "w-@", "--to", "beginning")
    away.both("consume", "g-@", "--group", "w-@", "--max", "1", "--json")
    away.both("groups", "pause", "g-@", "w-@")
    away.both("groups", "resume", "g-@", "w-@")
    away.both("dead-letters", "list")
    away.both("dead-letters", "show", "w-@")
    away.both("groups", "remove", "g-@", "w-@", "--yes")


def test_state(away: Away) -> None:
    away.both("state", "set", "s/@/a", "21.5")
    away.both("state", "get", "s/@/a")
    away.both("state", "match", "s/@/#")
    away.both("state", "history", "s/@/a", "--json")
    away.both("state", "watch", "s/@/#", "--max", "1")
    exported = away.both("state", "export", "-")
    away.both("state", "import", "-", input=exported)
    away.both("state", "delete", "s/@/a")
    away.both("state", "get", "s/@/a", code=1)


def test_events_and_requests(away: Away) -> None:
    away.both("send", "e/@", "hello")
    away.both("request", "nobody/@", "x", code=3)


def test_principals_access_and_audit(away: Away) -> None:
    away.both("principals", "add", "p-@", "--role", "sensors")
    away.both("principals", "list")
    away.both("principals", "show", "p-@", "--json")
    away.both("access", "grant", "p-@", "publish", "plant/#", "--json")
    away.both("access", "list", "p-@")
    away.both("access", "explain", "p-@", "publish", "plant/a")
    away.both("access", "roles")
    away.both("access", "revoke", "p-@", "publish", "plant/#", "--json")
    away.both("principals", "remove", "p-@", "--yes")
    away.both("audit")


def test_clients(away: Away) -> None:
    one = away.served.run("clients", "add", "c-here", "--fingerprint", "ab" * 32)
    other = away.run("clients", "add", "c-away", "--fingerprint", "cd" * 32)
    assert plain(one) == plain(other)
    away.both("clients", "list")
    away.both("clients", "change", "c-@", "--admin")
    away.both("clients", "remove", "c-@", "--yes")
    assert away.served.ready["server_fingerprint"] in away.run("clients", "list", "--json")


def test_events_are_heard_away_until_ctrl_c(away: Away) -> None:
    listener = subprocess.Popen(
        [*COMMAND, "listen", "plant/#", "--max", "1", "--json"],
        cwd=away.folder, env=away.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        receivers = 0
        while not receivers:
            sent = json.loads(away.served.run("send", "plant/a", "1", "--json"))
            receivers = sent["receivers"]
        told, _ = listener.communicate(timeout=SAFETY_NET_SECONDS)
        assert json.loads(told)["subject"] == "plant/a"
    finally:
        listener.kill()


def test_commands_of_a_data_folder_say_so_where_a_context_is_in_use(away: Away) -> None:
    for command in ("check", "repair"):
        told = away.run(command, code=1)
        assert f"context prod is a server elsewhere ({away.served.ready['addresses']['jebp']})" in told
        assert "works on a data folder" in told


def test_who_may_nothing_is_refused_away(away: Away, tmp_path: Path) -> None:
    guest = Away(tmp_path, away.served)
    told = guest.run("login", "prod", "--server", away.served.ready["addresses"]["jebp"], "--use", code=1)
    own = re.search(r"--fingerprint ([0-9a-f]{64})", told)
    assert own is not None
    away.served.run("clients", "add", "guest", "--fingerprint", own[1])
    guest.run("login", "--yes")
    for command in (["topics", "create", "x"], ["access", "list"], ["clients", "list"], ["principals", "list"]):
        assert "no right to" in guest.run(*command, code=1), command
    assert "topics" in guest.run("topics", "create", "--help")


def test_the_file_of_contexts_is_the_owners_alone(away: Away) -> None:
    path = away.folder / "config" / "babelbus" / "contexts.toml"
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o644)
    assert "chmod 600" in away.run("topics", "list", code=1)
    os.chmod(path, 0o600)
