"""What a client holds when its right is taken away: it is given back at once, for others to have."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from babelbus.clients.jebp.errors import ClientError, LockLostError, NoRightsError
from babelbus.clients.worterbuch.errors import ClientError as TreeError
from babelbus.core.access import SERVER
from babelbus.core.request import Reply, Request
from babelbus.web import consumers, live, requests
from tests.access.drivers import Admin, AdminJebp, Driver, Jebp, Tree
from tests.access.house import House
from tests.support.bus import SAFETY_NET_SECONDS


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("revoked")) as house:
        yield house


def wait_until_free(house: House, key: str) -> None:
    house.until(lambda: house.broker.state.locks.holder(key) is None)


def test_a_lock_over_jebp_ends_with_the_right(house: House) -> None:
    house.grant("alice write-state walk/#", "bob write-state walk/#")
    with Jebp(house, house.alice) as alice, Jebp(house, house.bob) as bob:
        lost = alice.client.state.lock("walk/a")
        lost.__enter__()
        house.grant("bob write-state walk/#")
        with bob.client.state.lock("walk/a"):
            pass
        with pytest.raises(LockLostError):
            lost.__exit__(None, None, None)
        wait_until_free(house, "walk/a")


def test_a_lock_of_the_tree_ends_with_the_right(house: House) -> None:
    house.grant("alice write-state walk/#", "bob write-state walk/#")
    with Tree(house, house.alice) as alice, Jebp(house, house.bob) as bob:
        alice.client.lock("walk/a")
        house.grant("bob write-state walk/#")
        with bob.client.state.lock("walk/a"):
            pass
        wait_until_free(house, "walk/a")


@pytest.mark.parametrize("driver", [Jebp, Tree])
def test_a_wait_for_a_lock_ends_with_the_right(house: House, driver: type[Driver]) -> None:
    house.grant("alice write-state walk/#", "bob write-state walk/#")
    with Jebp(house, house.bob) as bob, driver(house, house.alice) as alice:
        assert isinstance(alice, Jebp | Tree)

        def wait() -> None:
            with contextlib.suppress(ClientError, TreeError):
                if isinstance(alice, Tree):
                    alice.client.acquire_lock("walk/b")
                else:
                    alice.client.state.lock("walk/b").__enter__()

        with bob.client.state.lock("walk/b"):
            alice.do_beside(wait, alice.client.close)
            house.until(lambda: "walk/b" in house.broker.state.locks._queues)
            house.grant("bob write-state walk/#")
            house.until(lambda: "walk/b" not in house.broker.state.locks._queues)
        wait_until_free(house, "walk/b")


def set_value(house: House, key: str, value: bytes) -> None:
    async def write() -> None:
        house.broker.state.set(key, value)
        await house.broker.state.commit("test").wait()

    house.run(write)


def test_a_watch_over_jebp_shrinks_and_grows_and_ends_with_its_last_right(house: House) -> None:
    house.grant("alice subscribe walk/#")
    with Jebp(house, house.alice) as alice, contextlib.closing(alice.client.state.watch("walk/#")) as watch:
        assert {next(watch).key for _ in range(4)} == {"walk/a", "walk/b", "walk/alice", "walk/bob"}
        house.grant("alice subscribe walk/b")
        set_value(house, "walk/a", b"2")
        set_value(house, "walk/b", b"2")
        assert next(watch).key == "walk/b"
        house.grant("alice subscribe walk/#")
        set_value(house, "walk/a", b"3")
        assert (change := next(watch)).key == "walk/a"
        assert change.value == 3
        house.grant("alice read walk/#")
        with pytest.raises(NoRightsError):
            next(watch)
        with pytest.raises(NoRightsError):
            next(alice.client.state.watch("walk/#"))


@pytest.mark.parametrize("path", ["/api/state/watch", "/api/listen"])
@pytest.mark.parametrize("driver", [Admin, AdminJebp])
def test_an_answer_of_the_api_shrinks_and_ends_with_its_last_right(
    house: House, driver: type[Admin], path: str
) -> None:
    def lines() -> Iterator[dict[str, Any]]:
        """The lines that say something."""
        return (json.loads(line) for line in answer if line != b"\n")

    house.grant("alice subscribe walk/#")
    with driver(house, house.alice) as alice:
        answer = alice.open("GET", path, pattern="walk/#", new_only="1")
        assert answer.readline() == b"\n"
        house.grant("alice subscribe walk/b")
        set_value(house, "walk/a", b"1")
        set_value(house, "walk/b", b"2")
        line = next(lines())
        assert (line.get("key") or line["subject"]) == "walk/b"
        house.grant()
        line = next(lines())
        assert line.keys() == {"end"}
        assert line["end"].startswith("no right to subscribe 'walk/#'")
        assert next(lines(), None) is None
        assert alice.open("GET", path, pattern="walk/#").status == 403


def ask(house: House, *subjects: str) -> list[Request[Reply]]:
    """Send requests for whose replies nobody waits yet."""
    broker, deadline = house.broker, house.server.clock.monotonic() + SAFETY_NET_SECONDS
    return house.call(lambda: [broker.request(one, one.encode(), (), deadline, SERVER) for one in subjects])


def test_questions_that_wait_for_a_responder_without_the_right_go_to_others(house: House) -> None:
    house.grant("alice subscribe walk/#", "bob subscribe walk/#")
    with Jebp(house, house.alice) as alice, Jebp(house, house.bob) as bob:
        first, second = alice.client.respond("walk/+", window=1), bob.client.respond("walk/+")
        first.begin()
        asked = ask(house, "walk/a", "walk/b", "walk/a")
        question = next(first)
        second.begin()
        house.grant("alice subscribe walk/a", "bob subscribe walk/#")
        next(second).reply(b"bob")
        question.reply(b"alice")
        next(first).reply(b"alice")
        house.until(lambda: all(one.done for one in asked))
        assert [one.reply and one.reply.payload for one in asked] == [b"alice", b"bob", b"alice"]


def test_a_responder_ends_with_its_last_right(house: House) -> None:
    house.grant("alice subscribe walk/#", "bob subscribe walk/#")
    with Jebp(house, house.alice) as alice, Jebp(house, house.bob) as bob:
        first, second = alice.client.respond("walk/a", window=1), bob.client.respond("walk/a")
        first.begin()
        asked = ask(house, "walk/a", "walk/a")
        next(first)
        second.begin()
        house.grant("bob subscribe walk/#")
        for _ in asked:
            next(second).reply(b"bob")
        house.until(lambda: all(one.done for one in asked))
        with pytest.raises(NoRightsError):
            next(first)


def test_one_principal_does_not_take_the_live_answers_of_all(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FEEDS_PER_PRINCIPAL_MAX", 2)
    house.grant("alice subscribe walk/#", "bob subscribe walk/#")
    with Admin(house, house.alice) as alice, Admin(house, house.bob) as bob:
        statuses = [
            alice.open("GET", path, pattern="walk/a").status for path in ("/api/listen", "/api/state/watch") * 2
        ]
        assert statuses == [200, 200, 503, 503]
        assert bob.open("GET", "/api/listen", pattern="walk/a").status == 200


def test_one_principal_does_not_take_the_consumers_of_all(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "CONSUMERS_PER_PRINCIPAL_MAX", 2)
    house.grant("alice consume walk/#", "bob consume walk/#")
    path = "/api/topics/walk%2Fa/groups/shares/consume"
    with Admin(house, house.alice) as alice, Admin(house, house.bob) as bob:
        assert alice.ask("POST", "/api/groups", {"topic": "walk/a", "name": "shares"}) == 201
        assert [alice.open("GET", path).status for _ in range(3)] == [200, 200, 503]
        assert bob.open("GET", path).status == 200


def test_one_principal_does_not_take_the_responders_of_all(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RESPONDERS_PER_PRINCIPAL_MAX", 2)
    house.grant("alice subscribe walk/#", "bob subscribe walk/#")
    with Admin(house, house.alice) as alice, Admin(house, house.bob) as bob:
        statuses = [alice.open("GET", "/api/respond", subject="walk/a").status for _ in range(3)]
        assert statuses == [200, 200, 503]
        assert bob.open("GET", "/api/respond", subject="walk/a").status == 200
