"""Members of a cluster: clients of any member reach the owner, also when the owner moves, dies or sleeps."""

import http.client
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.config import AdminSettings, ClusterSettings, Config, JebpSettings, JetstreamSettings, TopicDefaults
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.identity import Identity
from tests.cli.shell import Shell
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.jebp import Caller, create, fetch, fetched, said, subscribe
from tests.support.nats import NatsServer, Relay, free_ports
from tests.support.server import configure

_prefixes = itertools.count()


class Party:
    """The members of one cluster, each a process with fixed ports."""

    def __init__(self, nats: NatsServer, folder: Path, lease_seconds: float = 2.0) -> None:
        self.prefix = f"members{next(_prefixes)}"
        self.folder = folder
        self._url, self._lease_seconds = nats.url, lease_seconds
        self._stack = ExitStack()
        self.children: dict[str, Child] = {}
        self._ports: dict[str, list[int]] = {}

    def config(self, name: str, url: str | None = None) -> Config:
        ports = self._ports.setdefault(name, free_ports(3))
        return msgspec.structs.replace(
            configure(self.folder / name, jebp=JebpSettings(port=ports[0]), topics=TopicDefaults(engine="jetstream")),
            admin=AdminSettings(port=ports[1]),
            jetstream=JetstreamSettings(
                url or self._url, prefix=self.prefix, replicas=1, shards=2, lease_seconds=self._lease_seconds
            ),
            cluster=ClusterSettings(enabled=True, name=name, port=ports[2]),
        )

    def start(self, name: str, url: str | None = None) -> Child:
        child = self._stack.enter_context(Child(self.config(name, url)))
        self.children[name] = child
        return child

    def ask(self, name: str, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """Ask the administration endpoint of a member; 0 stands for a connection that ended."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[name][1], timeout=SAFETY_NET_SECONDS)
        token = self.token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def token(self) -> str:
        found = [path / "conf" / "admin_token" for path in self.folder.iterdir()]
        return next((path.read_text().strip() for path in found if path.exists()), "")

    def owner(self, name: str, above: int = 0) -> dict[str, Any]:
        """Return the status of the cluster as a member passes it on, once its epoch is above a number."""
        deadline = time.monotonic() + SAFETY_NET_SECONDS
        while time.monotonic() < deadline:
            status, found = self.ask(name, "/api/cluster")
            if status == 200 and found["epoch"] > above:
                assert isinstance(found, dict)
                return found
        raise AssertionError(f"member {name} reaches no owner")

    def until_all_present(self, name: str, *others: str) -> None:
        while {one["name"] for one in self.owner(name)["members"] if one["role"] in ("owner", "member")} != {*others}:
            pass

    def admin(self) -> Identity:
        found = [path / "conf" / "admin_key" for path in self.folder.iterdir()]
        return Identity.load(next(path for path in found if path.exists()))

    def caller(self, name: str) -> Caller:
        """Connect through a member, once it is ready."""
        while True:
            while self.ask(name, "/ready")[0] != 200:
                pass
            caller = Caller(f"127.0.0.1:{self._ports[name][0]}", self.admin())
            try:
                return caller.connect()
            except (OSError, RemoteProtocolError):  # the owner changes just now
                caller.close()

    def publish(self, name: str, *payloads: bytes) -> None:
        """Publish through a member, which may change its role meanwhile, until each payload is acknowledged."""
        for payload in payloads:
            while True:
                with self.caller(name) as caller:
                    try:
                        if said(caller.ask(create("orders", payload))[0]) == "a130":
                            break
                    except OSError:
                        continue

    def read(self, name: str) -> list[bytes | None]:
        with self.caller(name) as caller:
            _, answer = caller.ask(subscribe("orders"), fetch(0))
            return fetched(answer)["orders", 0]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    party = Party(nats, tmp_path)
    yield party
    party.close()


def make_topic(party: Party, name: str) -> None:
    status, answer = party.ask(name, "/api/topics", "POST", {"name": "orders", "partitions": 1})
    assert status == 201, answer


def test_clients_of_any_member_reach_the_owner(party: Party) -> None:
    party.start("a")
    party.start("b")
    assert party.owner("b")["owner"] == "a"
    make_topic(party, "b")
    party.publish("b", b"1")
    party.publish("a", b"2")
    assert party.read("a") == party.read("b") == [b"1", b"2"]
    assert party.ask("b", "/ready") == (200, {"ready": True, "reasons": []})
    party.until_all_present("b", "a", "b")
    found = party.owner("b")
    assert [link["name"] for link in found["links"]] == ["b"]
    assert (found["epoch"], found["prefix"], found["lease_seconds"]) == (1, party.prefix, 2.0)


def test_the_data_moves_to_a_named_member_and_back(party: Party) -> None:
    party.start("a")
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    party.until_all_present("a", "a", "b")
    shell = Shell(party.folder)
    folder = ("--data-folder", str(party.folder / "a"), "--admin", party.children["a"].addresses["admin"])
    assert json.loads(shell.run("cluster", "move", "--to", "b", "--json", *folder))["to"] == "b"
    party.publish("a", b"2")
    assert party.read("b") == [b"1", b"2"]
    assert "owns the data already" in shell.run("cluster", "move", "--to", "b", *folder, code=1)
    party.until_all_present("a", "a", "b")
    assert "a owns the data" in shell.run("cluster", "move", *folder)
    assert party.owner("b")["owner"] == "a"
    party.until_all_present("a", "a", "b")
    shown = shell.run("cluster", "status", *folder)
    assert "owner a at 127.0.0.1:" in shown
    assert "epoch 3" in shown
    assert party.read("a") == [b"1", b"2"]
    _, audit = party.ask("a", "/api/audit?kind=move")
    assert [one["subject"] for one in audit["records"]] == ["b", "a"]


def test_a_member_without_an_owner_is_not_ready_and_takes_over_after_a_kill(party: Party) -> None:
    party.start("a")
    party.start("b")
    make_topic(party, "b")
    party.publish("b", b"1")
    party.children["a"].kill()
    status, answer = party.ask("b", "/ready")
    assert (status, answer["ready"]) == (503, False)
    assert "reaches no owner" in answer["reasons"][0]
    assert party.ask("b", "/health")[0] == 200
    assert party.ask("b", "/api/topics")[1]["code"] == "no_owner"
    assert party.owner("b", above=1)["owner"] == "b"
    party.publish("b", b"2")
    party.start("a")
    assert party.read("a") == [b"1", b"2"]


def test_an_owner_that_slept_longer_than_its_lease_serves_nothing_and_is_a_member_again(party: Party) -> None:
    sleeper = party.start("a")
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    before = party.caller("a")
    sleeper.signal(signal.SIGSTOP)
    party.owner("b", above=1)
    party.publish("b", b"2")
    sleeper.signal(signal.SIGCONT)
    with pytest.raises(OSError):
        before.ask(subscribe("orders"), fetch(0))
    before.close()
    party.publish("a", b"3")
    assert party.read("a") == [b"1", b"2", b"3"]
    assert os.waitpid(sleeper.pid, os.WNOHANG) == (0, 0)
    assert party.owner("a")["owner"] == "b"


def test_an_owner_that_is_cut_off_from_nats_serves_nothing(party: Party, nats: NatsServer) -> None:
    relay = Relay(nats.port)
    party.start("a", relay.url)
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    relay.loses_requests = relay.loses_replies = True
    assert party.owner("b", above=1)["owner"] == "b"
    party.publish("b", b"2")
    relay.cut()
    party.publish("a", b"3")
    assert party.read("a") == [b"1", b"2", b"3"]
    relay.close()


def test_an_owner_that_stops_gives_the_data_away_at_once(nats: NatsServer, tmp_path: Path) -> None:
    party = Party(nats, tmp_path, lease_seconds=3600.0)
    party.start("a")
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    assert party.children["a"].stop() == 0
    assert party.owner("b", above=1)["owner"] == "b"
    assert party.read("b") == [b"1"]
    party.close()
