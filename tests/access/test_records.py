"""Records over the API of administration: a copy needs two rights, and a root has names of its own."""

import base64
import json
from collections.abc import Iterator

import pytest

from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from tests.access.drivers import AdminRecords
from tests.access.house import VALUE, House


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("records")) as house:
        yield house


def test_a_copy_needs_the_right_to_read_its_source_and_to_publish_to_its_target(house: House) -> None:
    with AdminRecords(house, house.alice) as client:
        for rows, status in (
            (("alice read walk/a/#",), 403),
            (("alice publish walk/b/#",), 403),
            (("alice read walk/a/#", "alice publish walk/b/#"), 200),
            (("alice read walk/a/#", "alice publish walk/b/#", "deny alice read walk/a/secret"), 403),
        ):
            house.grant(*rows)
            assert client.ask("POST", "/api/topics/walk%2Fa/copy", {"to": "walk/b", "offsets": [0]}) == status, rows


def test_a_follower_ends_with_the_right_to_read(house: House) -> None:
    house.grant("alice read walk/#")
    with AdminRecords(house, house.alice) as client:
        answer = client.open("GET", "/api/topics/walk%2Fa/follow")
        assert answer.readline() == b"\n"
        house.emit("walk/a")
        assert json.loads(answer.readline())["subject"] == "walk/a"
        house.grant()
        house.emit("walk/a")
        lines = [line for line in answer if line != b"\n"]
        assert "right" in json.loads(lines[-1])["end"]
        assert len(lines) == 1, "nothing came behind the right"


def test_a_root_is_in_no_answer(house: House) -> None:
    event = Event("acme/orders/eu", VALUE, b"acme/orders/eu", ((b"x", b"y"),))

    async def prepare() -> None:
        await house.broker.create_topic("acme/orders", principal=SERVER)
        await house.broker.publish(Publication(SERVER, "test", [event], "acme/orders")).wait()

    house.run(prepare)
    tenant = house.prove("tenant", root="acme")
    house.grant("tenant * acme/#")
    queries: tuple[tuple[str, dict[str, str]], ...] = (
        ("records", {}),
        ("records/0/0", {}),
        ("export", {"format": "csv"}),
        ("search", {"filter": 'subject = "orders/eu" and key = "orders/eu"'}),
        ("search", {"filter": "not key exists"}),
    )
    with AdminRecords(house, tenant) as client:
        for way, query in queries:
            answer = client.open("GET", f"/api/topics/orders/{way}", **query)
            content = answer.read()
            assert answer.status == 200
            assert b"acme" not in content.replace(b"acme_", b""), (way, content)
            assert (b'"orders/eu"' in content or b",orders/eu," in content) is (query.get("filter") != "not key exists")
        views = json.loads(client.open("GET", "/api/topics/orders/records/0/0").read())["views"]
        assert b"acme" not in base64.b64decode(views["jebp"]["b64"]) + base64.b64decode(views["sbus"]["b64"])


def test_a_filter_of_a_root_that_is_wrong_is_told_to_its_author(house: House) -> None:
    with AdminRecords(house, house.prove("tenant", root="acme")) as client:
        answer = client.open("GET", "/api/topics/orders/search", filter='key = "')
        assert (answer.status, json.loads(answer.read())["column"]) == (400, 7)
