"""Members of a cluster: clients of any member reach the owner, also when the owner moves, dies or sleeps."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from tests.cli.shell import Shell
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.child import ROOT
from tests.support.cluster import until
from tests.support.jebp import Caller, fetch, fetched, subscribe
from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer, Relay, ask_jetstream, nats_server


@contextmanager
def starting(party: Party, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a member that serves no clients so far."""
    config = msgspec.json.encode(party.config(name)).decode()
    child = subprocess.Popen([sys.executable, "-m", "tests.support.child", config], cwd=ROOT)
    guard = threading.Timer(SAFETY_NET_SECONDS, child.kill)
    guard.start()
    try:
        yield child
    finally:
        child.terminate()
        child.wait()
        guard.cancel()


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    """Members whose lease no busy machine lets end."""
    party = Party(nats, tmp_path, lease_seconds=3600.0)
    yield party
    party.close()


@pytest.fixture
def hasty(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    """Members whose lease a test lets end."""
    party = Party(nats, tmp_path)
    yield party
    party.close()


def test_clients_of_any_member_reach_the_owner_over_links_with_tls(
    party: Party, nats: NatsServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    for name in ("a", "b"):
        party.secure(name, authority)
    party.start("a", nats.url.replace("//", "//user:secret@"))
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
    assert (found["epoch"], found["prefix"], found["lease_seconds"]) == (1, party.prefix, 3600.0)
    assert found["nats_servers"] == [nats.url]


def test_the_data_moves_to_a_named_member_and_back(party: Party) -> None:
    party.start("a")
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    party.until_all_present("a", "a", "b")
    shell = Shell(party.folder)
    folder = ("--data-folder", str(party.folder / "a"), "--admin", party.children["a"].addresses["admin"])

    def move(to: str, said: str, *options: str) -> None:
        """Move the data; again if the heir is slower than the 3 s that the others wait for it."""
        done: list[subprocess.CompletedProcess[str]] = []

        def is_moved() -> bool:
            party.until_all_present("a", "a", "b")
            done[:] = [shell.run_raw("cluster", "move", *options, *folder)]
            if done[0].returncode == 0:
                assert said in done[0].stdout
            return bool(party.owner("a")["owner"] == to)

        assert until(is_moved), done[0].stderr

    move("b", '"to":"b"', "--to", "b", "--json")
    party.publish("a", b"2")
    assert party.read("b") == [b"1", b"2"]
    assert "owns the data already" in shell.run("cluster", "move", "--to", "b", *folder, code=1)
    move("a", "a owns the data")
    found = party.owner("b")
    assert found["owner"] == "a"
    assert found["epoch"] >= 3
    party.until_all_present("a", "a", "b")
    shown = shell.run("cluster", "status", *folder)
    assert "owner a at 127.0.0.1:" in shown
    assert f"epoch {found['epoch']}" in shown
    assert party.read("a") == [b"1", b"2"]
    _, audit = party.ask("a", "/api/audit?kind=move")
    subjects = [one["subject"] for one in audit["records"]]
    assert (subjects[0], subjects[-1]) == ("b", "a")


def test_a_member_without_an_owner_is_not_ready_and_takes_over_after_a_kill(hasty: Party) -> None:
    hasty.start("a")
    hasty.start("b")
    make_topic(hasty, "b")
    hasty.publish("b", b"1")
    epoch = hasty.owner("b")["epoch"]
    hasty.children["a"].kill()
    hasty.until_not_ready("b", "reaches no owner")
    assert hasty.ask("b", "/health")[0] == 200
    assert hasty.ask("b", "/api/topics")[1]["code"] == "no_owner"
    assert hasty.owner("b", above=epoch)["owner"] == "b"
    hasty.publish("b", b"2")
    hasty.start("a")
    assert hasty.read("a") == [b"1", b"2"]


def test_clients_that_wait_at_a_member_are_served_when_it_takes_over(hasty: Party) -> None:
    first = hasty.start("a")
    hasty.owner("a")
    hasty.start("b")
    make_topic(hasty, "b")
    hasty.publish("b", b"one")
    first.kill()
    hasty.until_not_ready("b", "reaches no owner")
    with Caller(hasty.address("b"), hasty.admin()).connect() as caller:  # which waits for its handshake
        _, answer = caller.ask(subscribe("orders"), fetch(0))
        assert fetched(answer)["orders", 0] == [b"one"]
        assert [one["name"] for one in hasty.owner("b")["links"]] == ["b"]
    assert until(lambda: hasty.owner("b")["links"] == [])


def test_an_owner_that_slept_longer_than_its_lease_serves_nothing_and_is_a_member_again(hasty: Party) -> None:
    sleeper = hasty.start("a")
    hasty.start("b")
    make_topic(hasty, "a")
    hasty.publish("a", b"1")
    before = hasty.caller("a")
    epoch = hasty.owner("a")["epoch"]
    sleeper.signal(signal.SIGSTOP)
    hasty.owner("b", above=epoch)
    hasty.publish("b", b"2")
    sleeper.signal(signal.SIGCONT)
    with pytest.raises(OSError):
        before.ask(subscribe("orders"), fetch(0))
    before.close()
    hasty.publish("a", b"3")
    assert hasty.read("a") == [b"1", b"2", b"3"]
    assert os.waitpid(sleeper.pid, os.WNOHANG) == (0, 0)
    assert hasty.owner("a")["owner"] == "b"


def test_an_owner_that_is_cut_off_from_nats_serves_nothing(hasty: Party, nats: NatsServer) -> None:
    relay = Relay(nats.port)
    hasty.start("a", relay.url)
    hasty.start("b")
    make_topic(hasty, "a")
    hasty.publish("a", b"1")
    epoch = hasty.owner("a")["epoch"]
    relay.loses_requests = relay.loses_replies = True
    assert hasty.owner("b", above=epoch)["owner"] == "b"
    hasty.publish("b", b"2")
    relay.cut()
    hasty.publish("a", b"3")
    assert hasty.read("a") == [b"1", b"2", b"3"]
    relay.close()


def test_an_owner_that_stops_gives_the_data_away_at_once(party: Party) -> None:
    party.start("a")
    party.start("b")
    make_topic(party, "a")
    party.publish("a", b"1")
    assert party.children["a"].stop() == 0
    assert "member a: owner ended after" in party.children["a"].said
    assert party.owner("b", above=1)["owner"] == "b"
    assert party.read("b") == [b"1"]


def test_a_member_with_a_certificate_of_another_authority_is_refused_until_it_has_a_new_one(
    party: Party, tmp_path: Path
) -> None:
    ours = Authority(tmp_path / "ours")
    party.secure("a", ours)
    party.secure("b", Authority(tmp_path / "others"), trusted=ours)
    party.start("a")
    with starting(party, "b") as child:
        said = party.until_not_ready("b", "is cluster.cert_file signed by its cluster.ca_file?")
        assert "member a at 127.0.0.1:" in said
        assert party.owner("a")["links"] == []
        for path in ours.issue("b"):
            path.replace(tmp_path / "others" / path.name)
        child.send_signal(signal.SIGHUP)
        party.until_ready("b")


def test_health_names_a_stream_that_somebody_deleted(party: Party, nats: NatsServer) -> None:
    party.start("a")
    party.owner("a")
    assert ask_jetstream(nats.url, f"STREAM.DELETE.{party.prefix}-files")["success"]
    assert party.ask("a", "/api/topics", "POST", {"name": "orders", "partitions": 1})[0] == 503
    status, answer = party.ask("a", "/health")
    assert (status, answer["status"]) == (200, "degraded")
    assert f"stream {party.prefix}-files is gone" in answer["reasons"][0]


@pytest.mark.usefixtures("nats")
def test_a_member_that_reaches_no_nats_says_so_and_serves_later(tmp_path: Path) -> None:
    with nats_server() as nats:
        nats.kill()
        party = Party(nats, tmp_path)
        with starting(party, "a") as child:
            party.until_not_ready("a", "has not reached NATS")
            nats.start()
            assert party.owner("a")["owner"] == "a"
        assert child.returncode == 0
