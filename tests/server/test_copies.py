"""Quiet clients keep their sessions when the owner of a cluster is killed."""

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from tests.server.test_handover import begin_work, lines, mesh, start, taken, zbus
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.cluster import until
from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer
from tests.support.passage import Passage
from tests.support.web import WebSocket
from tests.support.worterbuch import ack, named, pstate, put, state, subscribe
from tests.support.zbus import SocketClient


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    """Members whose lease a test lets end."""
    party = Party(nats, tmp_path)
    yield party
    party.close()


def until_copied(party: Party, owner: str, count: int) -> None:
    """Wait until so many sessions have copies."""
    address = party.children[owner].addresses["admin"]

    def is_copied() -> bool:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SAFETY_NET_SECONDS) as reply:
            return f"babelbus_cluster_session_copies {count}.0" in reply.read().decode()

    assert until(is_copied)


def kill(party: Party, owner: str, *, then: str) -> None:
    """Kill the owner, and wait until another member owns the data."""
    epoch = party.owner(then)["epoch"]
    party.children[owner].kill()
    party.owner(then, above=epoch)


def test_a_quiet_client_keeps_its_lock_its_testament_and_its_subscription(party: Party) -> None:
    start(party, "a", "b", "c")
    with lines(party, "b") as device, lines(party, "c") as rival, WebSocket(party.children["c"]) as page:
        begin_work(device, rival, page)
        until_copied(party, "a", 3)
        kill(party, "a", then="b")
        assert device.ask(put(10, "rooms/one", 10)) == ack(10)
        assert rival.hear() == pstate(5, "rooms/#", {"rooms/one": 10})
        assert device.ask(named("releaseLock", 20, "job")) == ack(20)
        assert rival.hear() == ack(4)
        device.close()
        assert page.next() == state(6, "off")


def test_the_testament_of_a_client_of_the_dead_owner_is_told_to_those_that_go_on(party: Party) -> None:
    start(party, "a", "b")
    with lines(party, "b") as watcher, lines(party, "a") as device:
        assert watcher.ask(subscribe(1, "state", liveOnly=True)) == ack(1)
        will = f"$SYS/clients/{device.client_id}/lastWill"
        assert device.ask(put(1, will, [{"key": "state", "value": "off"}])) == ack(1)
        until_copied(party, "a", 1)
        kill(party, "a", then="b")
        assert watcher.hear() == state(1, "off")


def test_a_client_that_speaks_while_the_owner_dies_connects_again(party: Party) -> None:
    start(party, "a", "b")
    with lines(party, "b") as quiet, lines(party, "b") as speaker:
        assert quiet.ask(named("lock", 1, "job")) == ack(1)
        until_copied(party, "a", 2)
        epoch = party.owner("b")["epoch"]
        party.children["a"].signal(signal.SIGSTOP)
        speaker.say(put(1, "state", 1))
        party.owner("b", above=epoch)
        with pytest.raises((AssertionError, OSError)):
            speaker.hear()
        with lines(party, "b") as other:
            assert "errorCode" in str(other.ask(named("lock", 2, "job")))
        assert quiet.ask(named("releaseLock", 2, "job")) == ack(2)


def test_a_call_of_zbus_is_answered_whose_service_works_while_the_owner_dies(party: Party) -> None:
    start(party, "a", "b")
    with SocketClient(zbus(party, "b")) as service, SocketClient(zbus(party, "b")) as caller:
        for cmd in ("create", "sub"):
            assert service.do(cmd, mq="Svc", channel="Svc")["status"] == 200
        caller.say("pub", "hello?", mq="Svc", id="1", ack="false")
        call = service.next()
        until_copied(party, "a", 2)
        kill(party, "a", then="b")
        headers = {"cmd": "route", "target": call["headers"]["source"], "id": call["headers"]["id"]}
        service.say_all([{"headers": headers, "body": "hello", "status": 200}])
        assert caller.next()["body"] == "hello"


def test_a_client_whose_link_alone_is_lost_is_closed_when_the_owner_turns_out_to_live(party: Party) -> None:
    way = party.advertise("a")
    start(party, "a", "b")
    with lines(party, "b") as device, lines(party, "a") as rival:
        assert device.ask(named("lock", 1, "job")) == ack(1)
        rival.say(named("acquireLock", 1, "job"))
        until_copied(party, "a", 1)
        Passage.cut(way)
        way.loses_requests = True  # so that no new link shows it either
        assert rival.hear() == ack(1)
        with pytest.raises((AssertionError, OSError)):
            device.hear()
    way.close()


def test_a_client_of_eventmesh_goes_on_in_its_group(party: Party) -> None:
    start(party, "a", "b")
    make_topic(party, "a")
    with mesh(party, "b", group="g") as consumer:
        consumer.listen("orders")
        until_copied(party, "a", 1)
        kill(party, "a", then="b")
        party.publish("b", b"1")
        assert taken(consumer) == "1"
