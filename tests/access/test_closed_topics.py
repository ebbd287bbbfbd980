"""A topic that could not be opened: who may use the topic hears that it is closed, others what they always hear."""

import json
from collections.abc import Iterator

import pytest

from babelbus.clients.jebp import NoRightsError, ServerDiskError
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.messages import FROM_OFFSET, NO_OFFSET, FetchPartition, TellPositions
from babelbus.storage.errors import AlteredError
from tests.access.drivers import Admin, JebpCalls, MeshTcp, ZbusSocket
from tests.access.house import House, Proof
from tests.support.jebp import Caller, create, said, subscribe

NAME = "walk/closed"
CLOSED = f"topic {NAME!r} is closed: somebody altered its stream"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("closed")) as house:
        damaged = house.broker.damaged_topics
        assert isinstance(damaged, dict)
        damaged[NAME] = AlteredError("somebody altered its stream")
        house.grant("alice * walk/#")
        yield house


def ask_jebp(house: House, proof: Proof) -> list[str]:
    read = FetchPartition(NAME, 0, FROM_OFFSET, 0, NO_OFFSET, 1024, 0)
    requests = (subscribe(NAME), encode_request(read), encode_request(TellPositions((NAME,))), create(NAME, b"x"))
    with Caller(house.address, proof.identity).connect() as caller:
        return [said(caller.ask(request)[0])[:4] for request in requests]


def test_jebp_says_to_try_again(house: House) -> None:
    assert ask_jebp(house, house.alice) == ["b031", "b331", "b331", "b331"]
    assert ask_jebp(house, house.bob) == ["b130", "b130", "b130", "b330"]


def test_a_member_of_a_group_of_jebp_hears_that_the_topic_is_closed(house: House) -> None:
    with JebpCalls(house, house.alice) as alice, JebpCalls(house, house.bob) as bob:
        with pytest.raises(ServerDiskError, match=CLOSED) as error:
            next(alice.client.consume(NAME, "g"))
        assert error.value.repeat
        with pytest.raises(NoRightsError):
            next(bob.client.consume(NAME, "g"))


def test_zbus_says_that_the_queue_is_closed(house: House) -> None:
    with ZbusSocket(house, house.alice) as alice, ZbusSocket(house, house.bob) as bob:
        for command in ("sub", "take", "query", "pub", "remove"):
            answer = alice.ask(command, mq=NAME, channel="c")
            assert (answer["status"], CLOSED in str(answer["body"])) == (500, True), (command, answer)
            assert bob.ask(command, mq=NAME, channel="c")["status"] == 403


@pytest.mark.parametrize("mode", ["CLUSTERING", "BROADCASTING"])
def test_eventmesh_says_that_the_topic_is_closed_also_to_who_may_not_make_topics(house: House, mode: str) -> None:
    item = {"topic": NAME, "mode": mode, "type": "ASYNC"}
    house.grant("alice consume walk/#", "alice subscribe walk/#")
    try:
        for proof, reason in ((house.alice, CLOSED), (house.bob, "no right to ")):
            with MeshTcp(house, proof) as client:
                assert reason in client.ask(client.client, "SUBSCRIBE_REQUEST", {"topicList": [item]})["desc"]
    finally:
        house.grant("alice * walk/#")


@pytest.mark.parametrize("path", ["", "/groups/g", "/records"])
def test_the_api_of_administration_says_that_the_topic_is_closed(house: House, path: str) -> None:
    url = f"/api/topics/{NAME.replace('/', '%2F')}{path}"
    with Admin(house, house.alice) as alice, Admin(house, house.bob) as bob:
        response = alice.open("GET", url)
        told = json.load(response)
        assert (response.status, told["code"], told["error"]) == (503, "topic_closed", CLOSED)
        assert bob.ask("GET", url) == 403
