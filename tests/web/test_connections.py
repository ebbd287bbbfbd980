"""The connections of all protocols in one list: real clients of each door, and their end by an administrator."""

from collections.abc import Iterator
from typing import Any

import pytest

from babelbus.web.token import read_token
from tests.access.drivers import DRIVERS, Driver
from tests.access.house import House
from tests.support.console import Browser, Told

OTHERS = {"eventmesh-http", "eventmesh-uri", "jebp admin"}
"""Doors whose clients are called back, and the requests of administration, which are no subscriptions."""
LASTING = [
    driver
    for driver in DRIVERS
    if driver.service not in ("admin", "spark") and "subscribe" not in driver.lacks and driver.name not in OTHERS
]
"""Doors whose clients stay connected and read live."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("connections")) as house:
        yield house


def ask(house: House, method: str, path: str, *, token: str | None = None, **query: str) -> Told:
    token = token or read_token(house.config.data.folder)
    with Browser(house.server.addresses["admin"]) as one:
        return one.ask(method, path, headers={"Authorization": f"Bearer {token}"}, **query)


def listed(house: House, **query: str) -> list[dict[str, Any]]:
    told = ask(house, "GET", "/api/connections", **query)
    assert told.status == 200, told
    assert told.body["total"] >= len(told.body["connections"])
    found: list[dict[str, Any]] = told.body["connections"]
    return found


@pytest.mark.parametrize("driver", LASTING, ids=lambda driver: driver.name)
def test_a_client_of_each_door_is_listed_with_its_subscription(house: House, driver: type[Driver]) -> None:
    house.grant("alice * walk/#", "alice manage #")
    before = {one["id"] for one in listed(house)}
    with driver(house, house.alice) as client:
        assert client.subscribe("walk/a") is not False
        house.emit("walk/a", "end")
        client.hear()
        mine = [one for one in listed(house, protocol=driver.service) if one["id"] not in before]
        (one,) = [one for one in mine if any("walk/a" in sub["pattern"] for sub in one["subscriptions"])]
        assert one["protocol"] == driver.service
        assert one["received"] > 0
        assert one["since_ms"] <= house.server.clock.now_ms()
        assert one["sent"] is None or one["sent"] > 0
        assert one["subscription_count"] == len(one["subscriptions"])
        assert one["encrypted"] is (driver.service == "jebp")
        if driver.service in ("jebp", "sbus", "worterbuch"):
            assert one["principal"] == "alice"
            assert one["id"] in [line["id"] for line in listed(house, search="ALICE")]
        assert one["id"] in [line["id"] for line in listed(house, search=one["address"][-8:])]
        assert ask(house, "DELETE", f"/api/connections/{one['id']}").body == {"closed": one["id"]}
        house.until(lambda: one["id"] not in ids(house))
        assert ask(house, "DELETE", f"/api/connections/{one['id']}").code == "unknown_connection"
    closed = [record for record in house.audit() if record["kind"] == "close"]
    assert one["id"] in closed[-1]["subject"]
    assert closed[-1]["principal"] == "admin"


def ids(house: House) -> set[str]:
    return {f"{name}-{one.number}" for name, some in house.server.connections().items() for one in some}


def test_a_narrowed_subscription_says_to_what(house: House) -> None:
    house.grant("alice subscribe walk/b/#", "role:walkers subscribe other/#")
    tree = next(driver for driver in LASTING if driver.service == "worterbuch" and driver.wildcards)
    with tree(house, house.alice) as client:
        assert client.subscribe("walk", below=True) is not False
        patterns = [sub for one in listed(house, protocol="worterbuch") for sub in one["subscriptions"]]
        (sub,) = [sub for sub in patterns if sub["pattern"] == "walk/#"]
        assert {"walk/b/#", "other/#"} <= set(sub["narrowed_to"])


def test_a_list_is_cut_into_pages(house: House) -> None:
    house.grant("alice * walk/#")
    driver = next(driver for driver in LASTING if driver.service == "sbus")
    with driver(house, house.alice), driver(house, house.alice), driver(house, house.alice):
        every = [one["id"] for one in listed(house, protocol="sbus")]
        assert len(every) >= 3
        assert [one["id"] for one in listed(house, protocol="sbus", offset="1", count="1")] == every[1:2]
        told = ask(house, "GET", "/api/connections", protocol="sbus", count="0")
        assert (told.body["connections"], told.body["total"]) == ([], len(every))
        assert told.body["protocols"]["sbus"] == len(every)
        assert set(told.body["protocols"]) == set(house.server.services)


def test_only_an_administrator_sees_and_closes_connections(house: House) -> None:
    house.grant("alice read #", "alice manage #")
    for method, path in (("GET", "/api/connections"), ("DELETE", "/api/connections/jebp-1")):
        assert ask(house, method, path, token=house.alice.token).status == 403
    house.grant("alice admin $server")
    assert ask(house, "GET", "/api/connections", token=house.alice.token).status == 200


@pytest.mark.parametrize("wrong", ["jebp", "jebp-0", "jebp-x", "nothing-1", "-", "%00", "jebp-" + "9" * 400])
def test_a_connection_that_is_not_there_is_not_closed(house: House, wrong: str) -> None:
    assert ask(house, "DELETE", f"/api/connections/{wrong}").code == "unknown_connection"


def test_a_wrong_protocol_is_named(house: House) -> None:
    assert ask(house, "GET", "/api/connections", protocol="smtp").status == 400
