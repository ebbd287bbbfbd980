"""Members of a cluster: clients of any member reach the owner, also when the owner moves, dies or sleeps."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from tests.cli.shell import Shell
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import ROOT
from tests.support.jebp import fetch, subscribe
from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer, Relay, nats_server


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    party = Party(nats, tmp_path)
    yield party
    party.close()


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
    token = (party.folder / "a" / "conf" / "admin_token").read_text()
    assert (party.folder / "b" / "conf" / "admin_token").read_text() == token
    assert (party.folder / "b" / "conf" / "admin_key").exists()
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


@pytest.mark.usefixtures("nats")
def test_a_member_that_reaches_no_nats_says_so_and_serves_later(tmp_path: Path) -> None:
    with nats_server() as nats:
        nats.kill()
        party = Party(nats, tmp_path)
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.child", msgspec.json.encode(party.config("a")).decode()], cwd=ROOT
        )
        guard = threading.Timer(SAFETY_NET_SECONDS, child.kill)
        guard.start()
        while (told := party.ask("a", "/ready"))[0] == 0:
            pass
        assert told[0] == 503
        assert "has not reached NATS" in told[1]["reasons"][0]
        nats.start()
        assert party.owner("a")["owner"] == "a"
        child.terminate()
        assert child.wait() == 0
        guard.cancel()
