"""Records over the API of administration: a copy needs two rights, and a root has names of its own."""

import json
from collections.abc import Iterator

import pytest

from tests.access.drivers import AdminRecords
from tests.access.house import House


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
