"""The gate is turned on while clients are connected that it binds from then on."""

from collections.abc import Iterator

import msgspec
import pytest

from babelbus.config import AccessSettings
from babelbus.core.access import SERVER
from tests.access.drivers import Driver, MeshEvents, MeshGrpc, MeshTcp, Sbus, Tree, TreeRest, TreeSocket
from tests.access.house import House, configured
from tests.access.test_blocked import MARKER, Valve, Zbus, behind, flood
from tests.access.test_roots import ACME, make


@pytest.fixture
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("turned")
    config = msgspec.structs.replace(configured(folder), access=AccessSettings(mode="off"))
    with House(folder, config) as house:
        make(house, f"{ACME}/walk/a")
        house.grant("role:walkers * #")
        yield house


def turn_on(house: House) -> None:
    house.run(lambda: house.broker.gate.enable(SERVER))


CONNECTED = (Tree, TreeSocket, TreeRest, Zbus, MeshTcp, MeshGrpc, MeshEvents)


@pytest.mark.parametrize("driver", CONNECTED, ids=lambda driver: driver.name)
def test_a_connected_tenant_hears_nothing_from_outside_its_root_any_more(house: House, driver: type[Driver]) -> None:
    tenant = house.prove("acme", root=ACME)
    with Valve(house.server.addresses[driver.listener]) as valve:
        with behind(driver, valve)(house, tenant) as client:
            assert client.subscribe("walk/a")
            flood(house, 0, "walk/a")
            turn_on(house)
            flood(house, 1, "walk/a")
            payload = b'{"number":%d}' % house.next_number()
            client.publish("walk/a", payload)
            assert not house.happened("walk/a", payload)
        assert {int(number) for number in MARKER.findall(valve.drain())} == {0}


def test_a_connected_tenant_of_sbus_is_disconnected(house: House) -> None:
    with house.lend_process("acme", ACME) as tenant, Sbus(house, tenant) as client:
        client.subscribe("walk/a")
        assert not client.is_cut()
        turn_on(house)
        assert client.is_cut()


def test_others_stay_connected_and_are_asked_for_their_rights(house: House) -> None:
    with Tree(house, house.alice) as alice:
        alice.client.get("walk/a")
        turn_on(house)
        assert alice.get("walk/a")
        house.grant()
        assert not alice.get("walk/a")
