"""Names of others: who may do nothing with them is told the same, whether they are there or not."""

from collections.abc import Iterator

import pytest

from babelbus.clients.worterbuch.errors import ClientError
from babelbus.core.access import SERVER
from babelbus.core.groups import GroupSettings
from tests.access.drivers import (
    Admin,
    Driver,
    MeshGrpc,
    MeshHttp,
    MeshTcp,
    MeshUri,
    Tree,
    TreeSocket,
    ZbusHttp,
    ZbusSocket,
)
from tests.access.house import House
from tests.access.test_roots import make

LETTERS = "tenants/acme/dead-letters/workers"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("unknown")) as house:
        make(house, "tenants/acme/jobs", LETTERS, "walk/jobs", "walk/letters")
        house.run(lambda: make_group(house, "tenants/acme/jobs", LETTERS))
        house.run(lambda: make_group(house, "walk/jobs", "walk/letters"))
        house.grant("alice * walk/#")
        yield house


async def make_group(house: House, topic: str, letters: str) -> None:
    settings = GroupSettings(ack="explicit", dead_letter_topic=letters)
    await house.broker.groups.create(topic, "workers", settings, principal=SERVER).saved.wait()


def path_of(topic: str) -> str:
    return f"/api/topics/{topic.replace('/', '%2F')}"


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
def test_a_group_of_others_is_refused_like_a_group_that_is_not_there(house: House, method: str) -> None:
    with Admin(house, house.alice) as alice:
        for topic in ("tenants/acme/jobs", "tenants/acme/none"):
            for group in ("workers", "none"):
                assert alice.ask(method, f"{path_of(topic)}/groups/{group}", {}) == 403
        assert alice.ask(method, f"{path_of('walk/jobs')}/groups/none", {}) == 404


@pytest.mark.parametrize(("method", "below"), [("GET", ""), ("GET", "/0"), ("POST", "/replay"), ("POST", "/purge")])
def test_dead_letters_of_others_are_refused_like_those_that_are_not_there(
    house: House, method: str, below: str
) -> None:
    with Admin(house, house.bob) as bob:
        for name in ("workers", "none", LETTERS, "tenants/acme/jobs", "tenants/acme/none"):
            assert bob.ask(method, f"/api/dead-letters/{name.replace('/', '%2F')}{below}", {}) == 403


def test_a_group_of_others_hides_no_dead_letters_of_a_group_of_its_name(house: House) -> None:
    with Admin(house, house.alice) as alice:
        assert alice.ask("GET", "/api/dead-letters/workers") == 200
        assert alice.ask("POST", "/api/dead-letters/workers/replay", {}) == 200


def test_a_record_under_another_subject_does_not_tell_whether_its_topic_is_there(house: House) -> None:
    with Admin(house, house.alice) as alice:
        for topic in ("tenants/acme/jobs", "tenants/acme/none"):
            record = {"payload": "1", "subject": "walk/jobs"}
            assert alice.ask("POST", f"{path_of(topic)}/records", record) == 400


ZBUS_COMMANDS = [
    (command, channel)
    for command in ("query", "create", "remove", "pub", "sub", "take", "bind")
    for channel in (False, True)
]


@pytest.mark.parametrize(("command", "names_channel"), ZBUS_COMMANDS)
def test_mqs_and_channels_of_others_are_refused_over_zbus_like_those_that_are_not_there(
    house: House, command: str, names_channel: bool
) -> None:
    with ZbusSocket(house, house.bob) as bob:
        told = set()
        for mq in ("walk/jobs", "walk/none"):
            body = [{"url": "/x", "mq": mq}] if command == "bind" else None
            for channel in ("workers", "none"):
                about = {"mq": mq, "channel": channel} if names_channel or command in ("sub", "take") else {"mq": mq}
                answer = bob.ask(command, body, **about)
                told.add((answer["status"], answer["body"].partition(" (refusal ")[0].replace(mq, "MQ")))
        assert len(told) == 1
        assert told.pop()[0] == 403


def test_a_call_of_an_mq_of_others_is_refused_over_http_like_one_that_is_not_there(house: House) -> None:
    with ZbusHttp(house, house.bob) as bob:
        for mq in ("walk/jobs", "walk/none"):
            assert bob.ask("pub", b"1", mq=mq, ack="false") == 403


@pytest.mark.parametrize("mask", ["--1", "1" * 5000, "²"])
def test_a_label_of_another_protocol_that_is_no_mask_spoils_no_query(house: House, mask: str) -> None:
    path = f"{path_of('walk/jobs')}/groups/marked"
    with Admin(house, house.alice) as admin, ZbusSocket(house, house.alice) as alice:
        settings = {"labels": {"zbus.mask": mask}}
        assert admin.ask("POST", "/api/groups", {"topic": "walk/jobs", "name": "marked", "settings": settings}) == 201
        assert alice.ask("query")["status"] == 200
        assert admin.ask("DELETE", path) == 200


def test_a_url_that_takes_calls_of_others_is_refused_without_their_name(house: House) -> None:
    house.run(lambda: house.broker.create_topic("secret", principal=SERVER).wait())
    with ZbusSocket(house, house.alice) as alice:
        answer = alice.ask("bind", [{"url": "/sec", "mq": "walk/jobs"}], mq="walk/jobs")
        assert answer["status"] == 403
        assert "secret" not in answer["body"]
        (record,) = [one for one in house.audit() if one.get("id", "?") in answer["body"]]
        assert (record["subject"], record["action"]) == ("secret", "consume")


@pytest.mark.parametrize("driver", [Tree, TreeSocket])
def test_locks_of_others_are_refused_like_those_that_nobody_holds(house: House, driver: type[Tree]) -> None:
    house.call(lambda: house.broker.state.locks.lock("walk/held", "somebody"))
    with driver(house, house.bob) as bob:
        for command in (bob.client.lock, bob.client.release_lock):
            told = set()
            for key in ("walk/held", "walk/free"):
                with pytest.raises(ClientError) as caught:
                    command(key)
                told.add((type(caught.value), str(caught.value).partition(" (refusal ")[0].replace(key, "KEY")))
            assert len(told) == 1
    house.call(lambda: house.broker.state.locks.release("walk/held", "somebody"))


@pytest.mark.parametrize("driver", [MeshTcp, MeshHttp, MeshUri, MeshGrpc])
def test_topics_of_others_are_refused_over_eventmesh_like_those_that_are_not_there(
    house: House, driver: type[Driver]
) -> None:
    told: dict[str, list[str]] = {}
    for topic in ("walk/jobs", "walk/none"):
        before = len(house.audit())
        with driver(house, house.bob) as bob:
            assert not bob.publish(topic, b"1")
            assert not bob.consume(topic)
            assert "manage" in driver.lacks or not bob.manage(topic)
        told[topic] = [one["action"] for one in house.audit()[before:] if one["kind"] == "refusal"]
    assert told["walk/jobs"] == told["walk/none"]
