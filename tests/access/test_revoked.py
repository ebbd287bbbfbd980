"""What a client holds when its right is taken away: it is given back at once, for others to have."""

import contextlib
from collections.abc import Iterator

import pytest

from babelbus.clients.jebp.errors import ClientError, LockLostError
from babelbus.clients.worterbuch.errors import ClientError as TreeError
from tests.access.drivers import Driver, Jebp, Tree
from tests.access.house import House


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
