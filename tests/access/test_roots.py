"""Principals with a root: at every door they see their subjects without the root, and never anything outside.

The drivers of the walk are used as they are: a `Tenancy` shows them the house from below a root.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from babelbus.core.access import SERVER
from tests.access.drivers import DRIVERS, VERBS, Driver
from tests.access.house import END, VALUE, House, Proof
from tests.access.test_walk import attempt

ACME, GLOBEX = "tenants/acme", "tenants/globex"
NAMES = ("a", "b", END)
ADMINISTRATION = {"admin", "console", "jebp admin"}
"""Doors to the API of administration, which reads the history of a key that has none as empty."""
OPERATORS = {"zbus-monitor", "zbus-monitor-websocket", "eventmesh-admin"}
"""Doors for administrators of the server, which a tenant never is."""
DOORS = [driver for driver in DRIVERS if driver.name not in OPERATORS]
WALK = [
    pytest.param(driver, verb, id=f"{driver.name}-{verb}")
    for driver in DOORS
    for verb in VERBS
    if verb not in driver.lacks
]
LISTENERS = [driver for driver in DOORS if "subscribe" not in driver.lacks]


class Tenancy:
    """The house as it is below a root: what the test does from inside, with relative names."""

    def __init__(self, house: House, root: str) -> None:
        self._house = house
        self._root = root
        self.broker = self
        self.responders = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._house, name)

    def absolute(self, subject: str) -> str:
        return f"{self._root}/{subject}"

    def emit(self, *subjects: str) -> None:
        self._house.emit(*map(self.absolute, subjects))

    def happened(self, subject: str, payload: bytes) -> bool:
        return self._house.happened(self.absolute(subject), payload)

    def end_of(self, topic: str) -> int:
        return self._house.end_of(self.absolute(topic))

    def value(self, key: str) -> bytes | None:
        return self._house.value(self.absolute(key))

    def answer(self, subject: str) -> Any:
        return self._house.answer(self.absolute(subject))

    def ask(self, subject: str) -> bytes | None:
        return self._house.ask(self.absolute(subject))

    def find_topic(self, name: str) -> Any:
        return self._house.broker.find_topic(self.absolute(name))

    def answers(self, subject: str) -> bool:
        return self._house.broker.responders.answers(self.absolute(subject))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("roots")) as house:
        house.run(lambda: make_topics(house))
        house.grant("role:walkers * tenants/#")
        yield house


def make(house: House, *names: str, **settings: object) -> None:
    """Make topics with absolute names."""

    async def create() -> None:
        for name in names:
            await house.broker.create_topic(name, None, settings, SERVER)

    house.run(create)


async def make_topics(house: House) -> None:
    for root in (ACME, GLOBEX):
        for name in NAMES:
            await house.broker.create_topic(f"{root}/{name}", principal=SERVER)
            house.broker.state.set(f"{root}/{name}", VALUE)
    await house.broker.state.commit("test").wait()


@pytest.fixture(autouse=True)
def forgive(house: House) -> None:
    """Let nobody wait for the wrong proofs of the test before."""
    house.call(house.server.proofs.guessing.clear)


@contextmanager
def tenant(house: House, root: str, driver: type[Driver]) -> Iterator[tuple[Any, Proof]]:
    """A tenant and the house as it sees it."""
    name = root.rpartition("/")[2]
    if driver.service == "sbus":
        with house.lend_process(name, root) as proof:
            yield Tenancy(house, root), proof
    else:
        try:
            yield Tenancy(house, root), house.prove(name, root=root)
        finally:
            house.remove(name)


@pytest.mark.parametrize(("driver", "verb"), WALK)
def test_a_tenant_does_everything_below_its_root_by_relative_names(
    house: House, driver: type[Driver], verb: str
) -> None:
    with tenant(house, ACME, driver) as (tenancy, proof):
        tenancy.emit("a", "b")  # there is something to read
        with driver(tenancy, proof) as client:
            assert attempt(tenancy, client, verb, "a")


@pytest.mark.parametrize(
    ("driver", "verb"), [one for one in WALK if one.values[1] not in ("subscribe", "consume", "respond")]
)
def test_the_names_of_others_mean_something_else_to_a_tenant(house: House, driver: type[Driver], verb: str) -> None:
    house.grant("role:walkers * #")
    number = house.next_number()
    payload = b'{"number":%d}' % number
    with tenant(house, ACME, driver) as (_, proof), driver(house, proof) as client:
        match verb:
            case "publish":
                client.publish("walk/a", payload)
                assert not house.happened("walk/a", payload)
            case "write_state":
                client.write_state("walk/a", payload)
                assert house.value("walk/a") != payload
            case "manage":
                client.manage(f"walk/a/made{number}")
                assert house.broker.find_topic(f"walk/a/made{number}") is None
            case "request":
                stop = house.answer("walk/a")
                assert not client.request("walk/a")
                stop()
            case "read" if driver.name in ADMINISTRATION:
                pass  # a key that nobody has set has no revisions, which is no error
            case _:
                assert not getattr(client, verb)("walk/b")  # nobody has made that below the root
    house.grant("role:walkers * tenants/#")


@pytest.mark.parametrize("driver", LISTENERS)
def test_a_tenant_hears_its_own_events_alone(house: House, driver: type[Driver]) -> None:
    with tenant(house, ACME, driver) as (tenancy, proof), driver(tenancy, proof) as client:
        if driver.wildcards:
            client.subscribe("a", below=True)
        else:
            client.subscribe("a")
        house.emit("a", "a/b", "walk/a", f"{GLOBEX}/a", f"{GLOBEX}/a/b", f"{GLOBEX}/{END}", END)
        tenancy.emit("a", "a/b", END)
        heard = client.hear()
        assert heard == [one for one in ("a", "a/b") if one in heard]
        assert heard


@pytest.mark.parametrize("driver", DOORS, ids=lambda driver: driver.name)
def test_the_connections_of_a_tenant_end_when_its_root_changes(house: House, driver: type[Driver]) -> None:
    with tenant(house, ACME, driver) as (tenancy, proof), driver(tenancy, proof) as client:
        verb = "publish"
        assert attempt(tenancy, client, verb, "a")
        known = house.call(lambda: house.broker.gate.table.principal(proof.name))
        assert known is not None
        house.change(msgspec.structs.replace(known, root=GLOBEX))
        payload = b'{"number":%d}' % house.next_number()
        client.publish("a", payload)
        assert not tenancy.happened("a", payload)


# -- two tenants with the same names ---------------------------------------------------------------------------------

TALKING = [driver for driver in DOORS if driver.service != "sbus"]  # of one process there is one principal at a time


@contextmanager
def two_tenants(house: House, driver: type[Driver]) -> Iterator[tuple[Any, Driver, Any, Driver]]:
    """Two tenants, each connected by the same door, with the house as each sees it."""
    with (
        tenant(house, ACME, driver) as (acme, first),
        tenant(house, GLOBEX, driver) as (globex, second),
        driver(acme, first) as one,
        driver(globex, second) as other,
    ):
        yield acme, one, globex, other


@pytest.mark.parametrize("driver", TALKING, ids=lambda driver: driver.name)
def test_what_a_tenant_publishes_stays_below_its_root(house: House, driver: type[Driver]) -> None:
    with two_tenants(house, driver) as (acme, one, globex, other):
        payload = b'{"number":%d}' % house.next_number()
        if "subscribe" not in driver.lacks:
            other.subscribe("a")
        assert one.publish("a", payload)
        assert acme.happened("a", payload)
        assert not globex.happened("a", payload)
        assert not house.happened("a", payload)
        if "subscribe" not in driver.lacks:
            globex.emit(END)
            assert other.hear() == []


@pytest.mark.parametrize("driver", [one for one in TALKING if one.wildcards and "subscribe" not in one.lacks])
def test_a_wildcard_ends_at_the_root(house: House, driver: type[Driver]) -> None:
    with two_tenants(house, driver) as (acme, one, globex, other):
        other.subscribe("c", below=True)
        assert one.publish("c/d", VALUE)
        acme.emit("c/e", END)
        house.emit("c/f", END)
        globex.emit("c/g", END)
        assert other.hear() == ["c/g"]


@pytest.mark.parametrize("driver", [one for one in TALKING if "write_state" not in one.lacks])
def test_a_value_of_one_tenant_is_not_there_for_another(house: House, driver: type[Driver]) -> None:
    with two_tenants(house, driver) as (acme, one, _, other):
        key = f"value{house.next_number()}"
        assert one.write_state(key, VALUE)
        assert acme.value(key) == VALUE
        assert one.get(key)
        assert not other.get(key)


@pytest.mark.parametrize("driver", [one for one in TALKING if "manage" not in one.lacks])
def test_two_tenants_have_topics_of_one_name(house: House, driver: type[Driver]) -> None:
    with two_tenants(house, driver) as (acme, one, globex, other):
        name = f"topic{house.next_number()}"
        assert one.manage(name)
        if "read" not in driver.lacks and driver.name not in ADMINISTRATION:
            assert not other.read(name)
        assert other.manage(name)
        acme.emit(name)
        assert (acme.end_of(name), globex.end_of(name)) == (1, 0)


@pytest.mark.parametrize("driver", [one for one in TALKING if {"request", "respond"}.isdisjoint(one.lacks)])
def test_a_request_of_one_tenant_reaches_no_responder_of_another(house: House, driver: type[Driver]) -> None:
    with two_tenants(house, driver) as (_, one, globex, other):
        subject = f"asked{house.next_number()}"
        make(house, f"{ACME}/{subject}", f"{GLOBEX}/{subject}")
        assert one.respond(subject) is not False
        assert globex.ask(subject) is None
        assert not other.request(subject)
