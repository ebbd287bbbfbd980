"""What changed of late: noted by whom it was done, and told to who may know of it."""

from collections.abc import Iterator

import pytest

from babelbus.core.access import SERVER
from babelbus.web.change_calls import NOTED
from babelbus.web.changes import KEPT
from tests.access.house import House
from tests.support.console import Browser
from tests.web.test_admin import Caller, FakeServer, serve


async def texts(call: Caller, count: int = 50) -> list[str]:
    status, body = await call("GET", f"/api/changes?count={count}")
    assert status == 200
    return [one["text"] for one in body["changes"]]


def test_each_request_that_is_noted_exists() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        assert set(NOTED) <= {(method, path) for method, path, _ in call.api.direct.routes}

    serve(test)


def test_changes_are_told_newest_first_with_who_made_them() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await call("POST", "/api/topics", {"name": "orders"})
        await call("PATCH", "/api/topics/orders", {"ack": "written", "partitions": 2})
        group = {"topic": "orders", "name": "billing", "ensure": True}
        assert (await call("POST", "/api/groups", group))[0] == 201
        assert (await call("POST", "/api/groups", group))[0] == 200
        bus.bus.clock.advance(5)
        await call("POST", "/api/topics/orders/groups/billing/pause")
        await call("POST", "/api/topics/orders/groups/nobody/pause")
        await call("POST", "/api/reload")
        await call("DELETE", "/api/topics/orders")
        assert await texts(call) == [
            "topic 'orders' was removed",
            "the lists of clients and topics were read again",
            "group 'billing' of topic 'orders' was paused",
            "group 'billing' of topic 'orders' was made",
            "topic 'orders' was changed: ack, partitions",
            "topic 'orders' was made",
        ]
        (newest,) = (await call("GET", "/api/changes?count=1"))[1]["changes"]
        assert newest == {
            "time_ms": bus.bus.clock.now_ms(),
            "kind": "topic",
            "text": "topic 'orders' was removed",
            "principal": "admin",
        }
        assert (await call("GET", "/api/changes?count=0"))[0] == 400

    serve(test)


def test_only_the_newest_are_kept() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        for number in range(KEPT + 10):
            bus.changes.note("topic", f"{number} " + "x" * 1_000)
        found = await texts(call, 5_000)
        assert len(found) == KEPT
        assert (found[0].split()[0], len(found[0])) == (str(KEPT + 9), 300)

    serve(test)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("changes")) as house:
        yield house


def told(house: House, token: str, field: str = "text") -> list[str]:
    with Browser(house.server.addresses["admin"]) as one:
        answer = one.ask("GET", "/api/changes", headers={"Authorization": f"Bearer {token}"}, count="1000")
        assert answer.status == 200
        return [change[field] for change in answer.body["changes"]]


def test_a_principal_is_told_of_the_topics_that_it_may_know_of(house: House) -> None:
    house.grant("alice read walk/a/#")
    assert told(house, house.alice.token) == ["topic 'walk/a' was made"]
    house.grant("alice read walk/#", "alice admin #")
    found = told(house, house.alice.token)
    assert found[0].startswith("the table of access has version ")
    assert found[-1].startswith("the server started, version ")


def test_the_principal_of_a_change_is_told_to_who_may_manage_the_topic(house: House) -> None:
    house.grant("alice read walk/a/#")
    assert told(house, house.alice.token, "principal") == [""]
    house.grant("alice read walk/a/#", "alice manage walk/a/#")
    assert told(house, house.alice.token, "principal") != [""]


def test_a_tenant_is_told_its_own_names(house: House) -> None:
    proof = house.prove("tenant", root="tenants/acme")
    house.grant("tenant read tenants/acme/#")

    async def make() -> None:
        for name in ("tenants/acme/news", "tenants/globex/news"):
            await house.broker.create_topic(name, principal=SERVER)

    house.run(make)
    assert told(house, proof.token) == ["topic 'news' was made"]
