"""Two members of a cluster with a folder each: the second one begins with an empty folder and has everything."""

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

import nats as nats_client

from tests.cli.shell import Served, Shell
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.cluster import until
from tests.support.nats import NatsServer, ask_jetstream

CONFIG = """
[cluster]
enabled = true
name = "{name}"
[jetstream]
servers = "{url}"
prefix = "{prefix}"
replicas = 1
shards = 2
lease_seconds = {lease_seconds}
[groups]
commit_seconds = 0.2
"""
LEASE_SECONDS = 5
"""The time of a lease that a test lets end: long enough for an owner on a busy machine."""
UNCHANGED = ("orders", "state", "principals", "access", "keys")
KEYS = ("server_key", "admin_key", "admin_token", "access.key")


class Member(Shell):
    """A member with a folder of its own. It serves when `serve` returns."""

    def __init__(self, folder: Path, name: str, url: str, prefix: str = "bb", lease_seconds: int = 3600) -> None:
        super().__init__(folder / name)
        self.folder.mkdir(exist_ok=True)
        config = CONFIG.format(name=name, url=url, prefix=prefix, lease_seconds=lease_seconds)
        (self.folder / "bus.toml").write_text(config)

    def begin(self) -> None:
        """Start the process; it may have to wait for the owner."""
        self.process = self.start(
            "serve", "--server-any-port", "--json", "--log-level", "warning", "--config", "bus.toml"
        )

    def serve(self) -> None:
        """Return when it listens."""
        if not hasattr(self, "process"):
            self.begin()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready = json.loads(line)

    def wait_for_owner(self) -> None:
        """Return when a request is answered: while no member owns, it is refused."""

        def is_answered() -> bool:
            try:
                return ask(self, "topics")[0] == 200
            except (OSError, http.client.HTTPException):  # the connection ended with its owner
                return False

        assert until(is_answered)

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        assert any(text in line for line in self.process.stderr)


async def stored_cursor(url: str, offset: int) -> None:
    """Wait until a position of a group is in NATS."""
    client = await nats_client.connect(url)
    stream = client.jetstream()
    while True:
        for name in ("groups%2E0", "groups%2E1"):
            try:
                message = await stream.get_last_msg("bb-files", f"bb.files.$file.{name}")
            except nats_client.js.errors.NotFoundError:
                continue
            if b'"lanes":{"0":[%d' % offset in (message.data or b""):
                await client.close()
                return


def ask(server: Served | Member, path: str) -> tuple[int, Any]:
    """Return the answer of the administration endpoint: a command of the shell takes a hundred times the time."""
    token = server.data / "conf" / "admin_token"
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
    connection = http.client.HTTPConnection(server.ready["addresses"]["admin"], timeout=SAFETY_NET_SECONDS)
    try:
        connection.request("GET", f"/api/{path}", headers=headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def read(server: Served | Member, path: str) -> Any:
    status, answer = ask(server, path)
    assert status == 200, answer
    return answer


def kept(server: Served | Member) -> dict[str, Any]:
    """Return what a client sees of a server, but for what belongs to the process."""
    return {
        "topics": {row["name"]: row["settings"] for row in read(server, "topics")["topics"]},
        "orders": read(server, "topics/orders/records?offset=0")["records"],
        "state": read(server, "state/value?key=plant/line")["value"],
        "principals": read(server, "principals")["principals"],
        "access": read(server, "access")["rows"],
        "audit": read(server, "audit")["records"],
        "keys": {name: (server.data / "conf" / name).read_bytes() for name in KEYS},
    }


def test_a_member_with_an_empty_folder_has_everything_when_the_owner_was_killed(
    nats: NatsServer, tmp_path: Path
) -> None:
    first = Member(tmp_path, "first", nats.url, lease_seconds=LEASE_SECONDS)
    first.serve()
    second = Member(tmp_path, "second", nats.url, lease_seconds=LEASE_SECONDS)
    second.begin()
    second.wait_for("standing by")
    first.run("topics", "create", "orders", "--retention-seconds", "7d")
    first.run("topics", "create", "quick", "--engine", "memory")
    assert "in a cluster" in first.run("topics", "create", "here", "--engine", "disk", code=1)
    first.run("publish", "orders", input="\n".join(str(number) for number in range(10)))
    first.run("consume", "orders", "--group", "w", "--from", "beginning", "--max", "4")
    first.run("state", "set", "plant/line", "7")
    first.run("principals", "add", "sensor7", "--api-key")
    first.run("access", "grant", "sensor7", "publish", "orders")
    asyncio.run(stored_cursor(nats.url, 4))
    before = kept(first)
    first.process.kill()
    first.process.wait()
    second.serve()
    second.wait_for_owner()
    after = kept(second)
    assert after == before
    second.run("publish", "orders", input="10")
    found = [row["payload"] for row in second.rows("consume", "orders", "--group", "w", "--max", "7", "--json")]
    assert found == [str(number) for number in range(4, 11)]
    assert not (second.data / "topics").exists()
    assert "are in the cluster" in first.run("clients", "list", code=1)
    second.run("state", "set", "plant/line", "8")
    before = kept(second)
    first.begin()  # with a folder, and a checkpoint, of when it was the owner
    first.wait_for("standing by")
    first.serve()
    assert kept(first) == before  # through the owner
    second.process.terminate()
    assert second.process.wait() == 0
    first.wait_for_owner()
    assert kept(first) == before
    assert before["state"] == 8
    for member in (first, second):
        member.kill_started()


def test_a_whole_data_folder_moves_into_a_cluster(nats: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    alone = Served(tmp_path / "old")
    alone.run("topics", "create", "orders", "--retention-seconds", "7d")
    alone.run("publish", "orders", input="\n".join(str(number) for number in range(10)))
    alone.run("consume", "orders", "--group", "w", "--from", "beginning", "--max", "4")
    alone.run("state", "set", "plant/line", "7")
    alone.run("principals", "add", "sensor7", "--api-key")
    alone.run("access", "grant", "sensor7", "publish", "orders")
    before = kept(alone)
    assert alone.stop() == 0
    member = Member(tmp_path, "old", nats.url, "moved")
    assert "no topics" in member.run("migrate", "--config", "bus.toml", "orders", code=1)
    said = member.run("migrate", "--config", "bus.toml")
    assert "orders: 1 partition moved" in said
    assert "$state: 1 partition moved" in said
    assert "was moved into its cluster before" in member.run("migrate", "--config", "bus.toml", "--remove")
    assert not (member.data / "topics").exists()
    refused = member.run_raw("serve", "--server-any-port")
    assert refused.returncode == 1
    assert "belongs to a cluster" in refused.stderr
    other = Member(tmp_path, "other", nats.url, "moved")
    other.serve()
    after = kept(other)
    assert after["topics"]["orders"] == before["topics"]["orders"] | {"engine": "jetstream"}
    assert {name: after[name] for name in UNCHANGED} == {name: before[name] for name in UNCHANGED}
    found = [row["payload"] for row in other.rows("consume", "orders", "--group", "w", "--max", "6", "--json")]
    assert found == [str(number) for number in range(4, 10)]
    for shell in (alone, member, other):
        shell.kill_started()


@pytest.mark.parametrize("purged", [">", "0"])
def test_an_owner_whose_table_of_access_somebody_has_purged_does_not_start(
    nats: NatsServer, tmp_path: Path, purged: str
) -> None:
    """An empty table would turn the gate off."""
    prefix = "purged" if purged == "0" else "emptied"
    member = Member(tmp_path, "one", nats.url, prefix)
    member.serve()
    member.run("principals", "add", "alice", "--api-key")
    member.run("access", "enable", "--administrator", "alice", "--yes")
    member.process.kill()
    member.process.wait()
    for shard in range(2):
        content = {"filter": f"{prefix}.{shard}.%24access.{purged}"}
        assert ask_jetstream(nats.url, f"STREAM.PURGE.{prefix}-{shard}", content)["success"]
    for _ in range(2):
        member.begin()
        _, told = member.process.communicate(timeout=SAFETY_NET_SECONDS)
        assert member.process.returncode == 1
        assert "topic '$access', the table of access, has version 0 and had version 2" in told
    member.kill_started()


def test_a_member_that_stands_by_ends_when_it_is_asked_to(nats: NatsServer, tmp_path: Path) -> None:
    owner = Member(tmp_path, "owner", nats.url, "ends")
    owner.serve()
    waiting = Member(tmp_path, "waiting", nats.url, "ends")
    waiting.begin()
    waiting.wait_for("standing by")
    waiting.process.terminate()
    assert waiting.process.wait() == 0
    owner.process.terminate()
    assert owner.process.wait() == 0
    for member in (owner, waiting):
        member.kill_started()
