"""The walk: every door, every action, every kind of subject and row; one table says what must happen.

What a verb did is looked at inside the server: an answer that says so proves nothing.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest

from babelbus.protocols.registry import SERVICES
from tests.access.drivers import DRIVERS, METHODS, VERBS, Driver
from tests.access.house import END, House
from tests.support.console import PAGE, Browser
from tests.support.zbus import HttpClient

UPGRADE = (
    b"GET %b HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
OTHER_DOORS = {"admin", "spark"}
"""Doors that are no service of the registry."""


class Case(NamedTuple):
    """Rows (`ACTION` is the one that is asked for, `OTHERS` is each of the others), a subject, and the answer."""

    name: str
    rows: tuple[str, ...]
    subject: str
    allowed: bool


CASES = (
    Case("no row", (), "walk/a", False),
    Case("allowed", ("alice ACTION walk/#",), "walk/a", True),
    Case("allowed with every action", ("alice * walk/#",), "walk/a", True),
    Case("allowed to a role", ("role:walkers ACTION walk/#",), "walk/a", True),
    Case("allowed to another role", ("role:drivers ACTION walk/#",), "walk/a", False),
    Case("allowed to everybody", ("* ACTION walk/#",), "walk/a", True),
    Case("allowed to somebody else", ("bob ACTION walk/#",), "walk/a", False),
    Case("another action is allowed", ("alice OTHERS walk/#",), "walk/a", False),
    Case("another subject is allowed", ("alice ACTION walk/b/#",), "walk/a", False),
    Case("below its own name", ("* ACTION walk/{name}/#",), "walk/alice", True),
    Case("below the name of another", ("* ACTION walk/{name}/#",), "walk/bob", False),
    Case("one element", ("alice ACTION walk/?/#",), "walk/a", True),
    Case("denied inside", ("alice ACTION walk/#", "deny alice ACTION walk/a/#"), "walk/a", False),
    Case("denied to its role", ("alice ACTION walk/#", "deny role:walkers ACTION walk/a/#"), "walk/a", False),
    Case("denied to everybody, with every action", ("alice ACTION walk/#", "deny * * walk/a/#"), "walk/a", False),
    Case("denied beside", ("alice ACTION walk/#", "deny alice ACTION walk/b/#"), "walk/a", True),
    Case("another action is denied", ("alice ACTION walk/#", "deny alice OTHERS walk/a/#"), "walk/a", True),
    Case("denied to somebody else", ("alice ACTION walk/#", "deny bob ACTION walk/a/#"), "walk/a", True),
)
ACTIONS = sorted(set(VERBS.values()))
WALK = [
    pytest.param(driver, verb, id=f"{driver.name}-{verb}")
    for driver in DRIVERS
    for verb in VERBS
    if verb not in driver.lacks
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("walk")) as house:
        yield house


@pytest.fixture(autouse=True)
def forgive(house: House) -> None:
    """Let nobody wait for the wrong proofs of the test before."""
    house.call(house.server.proofs.guessing.clear)


def lines(rows: tuple[str, ...], driver: type[Driver], verb: str) -> list[str]:
    """The rows of a case for a verb, and those for what the door needs beside."""
    action, also = driver.instead.get(verb, VERBS[verb]), driver.also.get(verb)
    made = [] if also is None else [f"alice {also} #"]
    for row in rows:
        others = [one for one in ACTIONS if one not in (action, also)] if "OTHERS" in row else [action]
        made += [row.replace("OTHERS", one).replace("ACTION", one) for one in others]
    return made


def attempt(house: House, driver: Driver, verb: str, subject: str) -> bool:
    """Do it, and return whether it happened: the answer, where there is one, must not say anything else."""
    number = house.next_number()
    payload = b'{"number":%d}' % number
    said: bool | None
    match verb:
        case "publish":
            said = driver.publish(subject, payload)
            if said is None:
                house.emit(subject)  # behind it, what was published is recorded too
            happened = house.happened(subject, payload)
        case "write_state":
            said, happened = driver.write_state(subject, payload), house.value(subject) == payload
        case "manage":
            subject = f"{subject}/made{number}"
            said, happened = driver.manage(subject), house.broker.find_topic(subject) is not None
        case "subscribe":
            said = driver.subscribe(subject)
            house.emit(subject, END)
            happened = said is not False and driver.hear() == [subject]
        case "request":
            stop = house.answer(subject)
            happened = said = driver.request(subject)
            stop()
        case "respond":
            house.until(lambda: not house.broker.responders.answers(subject))  # those of clients that have left
            said, happened = driver.respond(subject), house.ask(subject) is not None
        case _:
            happened = said = getattr(driver, verb)(subject)
    assert said in (None, happened), f"the answer says {said}"
    return bool(happened)


def ways_of(house: House) -> set[tuple[str, str]]:
    """Each listener of the server, and the further ways of a listener that has several."""
    ways = {(listener, "") for listener in house.server.addresses}
    for listener, address in house.server.addresses.items():
        if listener in ("sbus", "worterbuch-unix"):
            continue
        for path in ("/", "/ws"):
            with suppress(OSError), HttpClient(address) as client:
                client.send(UPGRADE % path.encode())
                if client.socket.recv(12).endswith(b" 101"):
                    ways.add((listener, "websocket"))
    with Browser(house.server.addresses["admin"]) as one:
        if one.ask("POST", "/api/console/login", {}).status != 404:
            ways.add(("admin", "console"))
    paths = house.server.services["eventmesh"]._rpc.methods  # type: ignore[attr-defined]
    packages = {path[1:].rpartition(b"/")[0].rpartition(b".")[0].decode() for path in paths}
    return ways - {("eventmesh-grpc", "")} | {("eventmesh-grpc", package) for package in packages}


def test_each_door_has_a_driver_and_each_verb_or_a_reason(house: House) -> None:
    assert {driver.service for driver in DRIVERS} == set(SERVICES) | OTHER_DOORS
    assert {(driver.listener, driver.way) for driver in DRIVERS} == ways_of(house)
    for driver in DRIVERS:
        has = {verb for verb in VERBS if getattr(driver, verb) is not getattr(Driver, verb)}
        assert has - set(driver.lacks) == set(VERBS) - set(driver.lacks), driver.name
        assert all(driver.lacks.values())


def test_each_method_of_jebp_has_a_verb_or_a_reason(house: House) -> None:
    methods = house.server.services["jebp"].methods  # type: ignore[attr-defined]
    assert set(METHODS) == set(methods)
    assert all(METHODS.values())


def test_each_request_of_the_api_needs_a_proof_and_a_page_more_than_a_cookie(house: House) -> None:
    with Browser(house.server.addresses["admin"]) as one:
        assert one.log_in(token=house.alice.token).status == 200
        routes = house.run(house.server.administration.load_api).direct.routes
        assert len(routes) > 60
        for method, path, _ in routes:
            asked = re.sub("{[a-z]+}", "x", path)
            assert one.ask(method, asked, headers={"Cookie": "none"}).status == 401, asked
            assert one.ask(method, asked, headers={"Cookie": str(one.cookie)}).status == 403, asked
            other = PAGE | {"Sec-Fetch-Site": "cross-site"}
            assert one.ask(method, asked, headers=other).status == 403, asked


def test_every_listener_that_the_configuration_has_is_open(house: House) -> None:
    """A listener that is not open has no door to be found by the test above."""
    sections = [getattr(house.config, name) for name in (*SERVICES, "admin")]
    for section in sections:
        for name in section.__struct_fields__:
            if name.endswith(("port", "unix_path")):
                assert getattr(section, name) is not None, f"{type(section).__name__}.{name}"


@pytest.mark.parametrize(("driver", "verb"), WALK)
def test_what_the_table_says_happens(house: House, driver: type[Driver], verb: str) -> None:
    wrong = []
    for case in CASES:
        house.grant(*lines(case.rows, driver, verb))
        with driver(house, house.alice) as client:
            if attempt(house, client, verb, case.subject) is not case.allowed:
                wrong.append(case.name)
    assert wrong == []


@pytest.mark.parametrize(("driver", "verb"), WALK)
def test_a_right_that_is_taken_away_ends_at_once_on_an_open_connection(
    house: House, driver: type[Driver], verb: str
) -> None:
    house.grant(*lines(("alice ACTION walk/#",), driver, verb))
    with driver(house, house.alice) as client:
        assert attempt(house, client, verb, "walk/a")
        house.grant(*lines((), driver, verb))
        if verb == "respond":
            assert house.ask("walk/a") is None  # who answered the first attempt is not asked any more
        assert not attempt(house, client, verb, "walk/a")


LISTENERS = [driver for driver in DRIVERS if "subscribe" not in driver.lacks]


@pytest.mark.parametrize("driver", LISTENERS)
def test_a_subscription_shrinks_and_grows_with_its_rights(house: House, driver: type[Driver]) -> None:
    def heard() -> list[str]:
        house.emit("walk/a", "walk/b", END)
        return client.hear()

    house.grant("alice subscribe walk/#")
    with driver(house, house.alice) as client:
        if driver.wildcards:
            client.subscribe("walk", below=True)
            assert heard() == ["walk/a", "walk/b"]
            house.grant("alice subscribe walk/#", "deny * * walk/a/#")
            assert heard() == ["walk/b"]
            house.grant("alice subscribe walk/#")
            assert heard() == ["walk/a", "walk/b"]
        else:
            client.subscribe("walk/a")
            assert heard() == ["walk/a"]
        house.grant()
        assert heard() == []


@pytest.mark.parametrize("driver", [driver for driver in LISTENERS if driver.wildcards])
def test_a_pattern_that_is_granted_in_part_gets_that_part(house: House, driver: type[Driver]) -> None:
    house.grant("alice subscribe walk/b/#")
    with driver(house, house.alice) as client:
        assert client.subscribe("walk", below=True) is not False
        house.emit("walk/a", "walk/b", END)
        assert client.hear() == ["walk/b"]


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_the_connections_of_a_removed_principal_end(house: House, driver: type[Driver]) -> None:
    house.grant("role:walkers * #")
    with house.lend_process("carol") as carol, driver(house, carol) as client:
        assert not client.is_cut()
        house.remove("carol")
        assert client.is_cut()


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_a_wrong_proof_gives_nothing(house: House, driver: type[Driver]) -> None:
    if driver.service == "sbus":
        pytest.skip("the system tells who a process is")
    house.grant("alice * #")
    with driver(house, house.alice) as client:
        assert attempt(house, client, "publish", "walk/a")  # the proof is all that is wrong below
    wrong = house.forged()
    try:
        client = driver(house, wrong)
    except driver.refusals:
        return
    assert driver.refusals == (), "the wrong proof was taken"
    with client:
        payload = b'{"number":%d}' % house.next_number()
        assert not client.publish("walk/a", payload)
        assert not house.happened("walk/a", payload)
