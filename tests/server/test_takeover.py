"""Two members of a cluster with a folder each: the second one begins with an empty folder and has everything."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

import nats as nats_client

from tests.cli.shell import Shell
from tests.support.nats import NatsServer

CONFIG = """
[cluster]
enabled = true
name = "{name}"
[jetstream]
servers = "{url}"
replicas = 1
shards = 2
lease_seconds = 2
[groups]
commit_seconds = 0.2
"""


KEYS = ("server_key", "admin_key", "admin_token", "access.key")


class Member(Shell):
    """A member with a folder of its own. It serves when `serve` returns."""

    def __init__(self, folder: Path, name: str, url: str) -> None:
        super().__init__(folder / name)
        self.folder.mkdir()
        (self.folder / "bus.toml").write_text(CONFIG.format(name=name, url=url))
        self.process = self.start(
            "serve", "--server-any-port", "--json", "--log-level", "warning", "--config", "bus.toml"
        )

    def serve(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready = json.loads(line)

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


def kept(member: Member) -> dict[str, Any]:
    """Return what a client sees of a member, but for what belongs to the process."""
    return {
        "topics": member.rows("topics", "list", "--json"),
        "orders": member.rows("fetch", "orders", "--json"),
        "state": member.run("state", "get", "plant/line"),
        "principals": member.rows("principals", "list", "--json"),
        "access": member.rows("access", "list", "--json"),
        "audit": member.rows("audit", "--json"),
        "keys": {name: (member.data / "conf" / name).read_bytes() for name in KEYS},
        "shown": member.run("topics", "show", "orders", "--json"),
    }


def test_a_member_with_an_empty_folder_has_everything_when_the_owner_was_killed(
    nats: NatsServer, tmp_path: Path
) -> None:
    first = Member(tmp_path, "first", nats.url)
    first.serve()
    second = Member(tmp_path, "second", nats.url)
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
    after = kept(second)
    assert after == before
    second.run("publish", "orders", input="10")
    found = [row["payload"] for row in second.rows("consume", "orders", "--group", "w", "--max", "7", "--json")]
    assert found == [str(number) for number in range(4, 11)]
    assert not (second.data / "topics").exists()
    for member in (first, second):
        member.kill_started()
