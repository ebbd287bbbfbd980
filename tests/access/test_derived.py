"""What is derived from events needs the rights of their subjects: the log of the state, topics, retained values."""

from collections.abc import Iterator

import pytest

from babelbus.clients.jebp.errors import RequestError
from babelbus.core.access import SERVER
from tests.access.drivers import DRIVERS, Admin, Driver, Jebp, JebpCalls, Spark, Tree, TreeRest
from tests.access.house import House
from tests.access.test_walk import attempt, lines


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("derived")) as house:
        yield house


@pytest.mark.parametrize("driver", [Jebp, Spark])
def test_the_log_of_the_state_needs_every_subject(house: House, driver: type[Driver]) -> None:
    house.grant("alice read walk/#", "alice read $state/#")
    with driver(house, house.alice) as client:
        assert not client.read("$state")
        house.grant("alice read #")
        assert client.read("$state")
        house.grant("alice read #", "deny alice read walk/b/#")
        assert not client.read("$state")


@pytest.mark.parametrize("driver", [Jebp, Spark])
def test_a_topic_needs_all_subjects_that_it_records(house: House, driver: type[Driver]) -> None:
    house.grant("alice read walk/a")
    with driver(house, house.alice) as client:
        assert not client.read("walk/a")
        house.grant("alice read walk/a/#", "deny alice read walk/a/secret/#")
        assert not client.read("walk/a")
        house.grant("alice read walk/a/#")
        assert client.read("walk/a")


@pytest.mark.parametrize("driver", [Tree, TreeRest, Admin])
def test_a_retained_value_needs_the_right_to_the_events_of_its_subject(house: House, driver: type[Driver]) -> None:
    topic = f"kept/{driver.name}"
    house.call(lambda: house.broker.create_topic(topic, settings={"retain": "last"}, principal=SERVER))
    house.emit(topic)
    assert house.value(topic) is not None
    house.grant(f"alice read {topic}/#", f"alice consume {topic}/#")
    with driver(house, house.alice) as client:
        assert not client.get(topic)
        house.grant(f"alice subscribe {topic}/#")
        assert client.get(topic)


# What Wörterbuch publishes is no value: it is neither stored nor retained.
PUBLISHERS = [driver for driver in DRIVERS if "publish" not in driver.lacks and driver.service != "worterbuch"]


@pytest.mark.parametrize("driver", PUBLISHERS)
def test_an_event_that_sets_a_value_which_a_row_denies_is_refused(house: House, driver: type[Driver]) -> None:
    topic = f"retained/{driver.name.replace(' ', '-')}"
    house.call(lambda: house.broker.create_topic(topic, principal=SERVER))
    allowed = lines(("alice ACTION retained/#",), driver, "publish")
    with driver(house, house.alice) as client:
        house.grant(*allowed, f"deny alice write-state {topic}")
        assert attempt(house, client, "publish", topic)
        house.call(lambda: house.broker.alter_topic(topic, {"retain": "last"}, principal=SERVER))
        assert not attempt(house, client, "publish", topic)
        house.grant(*allowed)
        assert attempt(house, client, "publish", topic)


def test_a_transaction_sets_no_values_of_the_state_that_a_row_denies(house: House) -> None:
    house.call(lambda: house.broker.create_topic("staged", settings={"retain": "last"}, principal=SERVER))
    house.grant("alice publish staged/#")
    with Jebp(house, house.alice) as client:
        transaction = client.client.transaction("job")
        for batch, rows in enumerate((("deny role:walkers write-state staged/secret",), ("deny alice * staged/x",))):
            house.grant("alice publish staged/#", *rows)
            with pytest.raises(RequestError, match="no right to"):
                transaction.writer(batch, "p").stage("staged", [b"1"])
        house.grant("alice publish staged/#")
        writer = transaction.writer(2, "p")
        writer.stage("staged", [b"1"])
        house.grant("alice publish staged/#", "deny * write-state staged/secret")
        with pytest.raises(RequestError, match="no right to write-state 'staged'"):
            transaction.commit(2, [writer.staged])
        assert house.end_of("staged") == 0
        house.grant("alice publish staged/#", "deny * write-state other")
        transaction.commit(2, [writer.staged])
        assert house.end_of("staged") == 1


def test_who_may_delete_a_value_is_not_told_what_it_was(house: House) -> None:
    keys = ("deleted/a", "deleted/b", "deleted/c", "deleted/d", "deleted/e")

    async def fill() -> None:
        for key in keys:
            house.broker.state.set(key, b'"of somebody else"')
        await house.broker.state.commit("test").wait()

    def delete() -> list[object]:
        house.run(fill)
        answers = [tree.client.delete("deleted/a"), *tree.client.pdelete("deleted/b").values()]
        for path in ("delete/deleted/c", "pdelete/deleted/d"):
            headers = {"authorization": f"Bearer {house.alice.jwt}"}
            answers.append(rest.client.ask("DELETE", f"/api/v1/{path}", b"", **headers).body)
        return [*answers, calls.client.state.delete("deleted/e")]

    with (
        Tree(house, house.alice) as tree,
        TreeRest(house, house.alice) as rest,
        JebpCalls(house, house.alice) as calls,
    ):
        house.grant("alice write-state deleted/#")
        assert "of somebody else" not in str(delete())
        assert [house.value(key) for key in keys] == [None] * len(keys)
        house.grant("alice write-state deleted/#", "alice subscribe deleted/#")
        assert all("of somebody else" in str(one) for one in delete())


def test_the_labels_of_metrics_need_a_right_of_their_own(house: House) -> None:
    house.grant("alice read walk/#")
    with Admin(house, house.alice) as client:
        assert client.ask("GET", "/metrics") == 403
        house.grant("alice read $metrics")
        assert client.ask("GET", "/metrics") == 200
