"""The names in what a principal with a root is told: relative at every door, also inside records, values and errors."""

import asyncio
import contextlib
import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

from babelbus.client import Client
from babelbus.clients.jebp.errors import ClientError as JebpError
from babelbus.clients.worterbuch.errors import ClientError as TreeError
from babelbus.core.access import SERVER
from babelbus.core.groups import GroupSettings
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.protocols.zbus.codec import encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.wire.websocket import encode_texts
from tests.access.drivers import Admin, Jebp, JebpCalls, Tree, TreeRest, ZbusSocket
from tests.access.house import VALUE, House
from tests.access.test_roots import ACME, GLOBEX, make, tenant, two_tenants
from tests.support.bus import SAFETY_NET_SECONDS, read
from tests.support.signing import sign_frame


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("names")) as house:
        house.grant("role:walkers * tenants/#")
        yield house


@pytest.fixture(autouse=True)
def forgive(house: House) -> None:
    """Let nobody wait for the wrong proofs of the test before."""
    house.call(house.server.proofs.guessing.clear)


def set_state(house: House, **values: int) -> None:
    """Set values with absolute keys (`_` is the separator)."""

    async def change() -> None:
        for name, value in values.items():
            house.broker.state.set(name.replace("_", "/"), b"%d" % value)
        await house.broker.state.commit("test").wait()

    house.run(change)


def ends(house: House, topic: str) -> int:
    """The offset behind the last record that can be read; in the loop of the server."""
    found = house.broker.find_topic(topic)
    return 0 if found is None else found.partition(0).high_watermark


class Told(Admin):
    """The administration endpoint, with the bodies of its answers, in which no root stands."""

    def tell(self, method: str, path: str, body: object = None, **query: str) -> Any:
        with contextlib.closing(self._send(method, path, body, query)) as connection:
            text = connection.getresponse().read().decode()
        assert "tenants" not in text
        lines = [json.loads(line) for line in text.splitlines()]
        return lines[0] if len(lines) == 1 else lines


# -- jebp ------------------------------------------------------------------------------------------------------------


def test_subjects_and_keys_in_records_are_relative(house: House) -> None:
    with tenant(house, ACME, Jebp) as (tenancy, proof), Jebp(tenancy, proof) as client:
        assert client.manage("news")
        set_state(house, tenants_acme_news_state=1)
        client.client.publish("news", b"1", key=b"key", headers=((b"ce_subject", b"news/x"), (b"more", b"tenants")))
        tenancy.emit("news/y", "news")
        records = list(client.client.follow("news", offset=0, until_end=True))
        assert [(one.offset, one.key, dict(one.headers).get(b"ce_subject")) for one in records] == [
            (0, b"news/state", b"news/state"),
            (1, b"key", b"news/x"),
            (2, None, b"news/y"),
            (3, None, None),
        ]
        topic = house.broker.find_topic(f"{ACME}/news")
        assert topic is not None
        stored = house.call(lambda: read(topic.partition(0)))
        assert dict(stored[1].headers)[b"ce_subject"] == f"{ACME}/news/x".encode()
        assert house.happened(f"{ACME}/news/x", b"1")
        assert [one.topic for one in client.client.positions()] == ["news"]
        assert [one.topic for one in client.client.fetch("news", offset=0).batches] == ["news"]


def test_a_transaction_is_staged_and_committed_below_the_root(house: House) -> None:
    make(house, f"{ACME}/staged", f"{GLOBEX}/staged")
    with tenant(house, ACME, Jebp) as (tenancy, proof), Jebp(tenancy, proof) as client:
        transaction = client.client.transaction("job")
        writer = transaction.writer(1, "part")
        writer.stage("staged", [b"1", b"2"])
        transaction.commit(1, [writer.staged])
        assert (tenancy.end_of("staged"), house.end_of(f"{GLOBEX}/staged")) == (2, 0)


def test_an_error_of_jebp_names_no_root(house: House) -> None:
    with tenant(house, ACME, Jebp) as (tenancy, proof), Jebp(tenancy, proof) as client:
        for call in (
            lambda: client.client.fetch("missing", offset=0),
            lambda: client.client.positions(["missing"]),
            lambda: client.client.transaction("job").writer(2, "part").stage("missing", [b"1"]),
        ):
            with pytest.raises(JebpError) as caught:
                call()
            assert "missing" in str(caught.value)
            assert "tenants" not in str(caught.value)


def test_a_consumer_over_jebp_gets_relative_records(house: House) -> None:
    make(house, f"{ACME}/consumed", f"{GLOBEX}/consumed")
    with tenant(house, ACME, Jebp) as (tenancy, proof):
        address = house.server.addresses["jebp"]

        async def consume() -> list[tuple[str, str, int]]:
            async with Client(address, identity=proof.identity) as client:
                heard = []
                async with client.consume("consumed", "workers", start="beginning") as consumer:
                    async for message in consumer:
                        assert b"tenants" not in b"".join(value or b"" for _, value in message.headers)
                        heard.append((message.topic, message.subject, message.offset))
                        message.ack()
                        if len(heard) == 2:
                            break
                for wrong in ("missing", "$state"):
                    with pytest.raises(JebpError) as caught:
                        async with client.consume(wrong, "workers"):
                            pass
                    assert "tenants" not in str(caught.value)
                return heard

        house.emit(f"{GLOBEX}/consumed/x")
        tenancy.emit("consumed/x", "consumed")
        assert asyncio.run(consume()) == [("consumed", "consumed/x", 0), ("consumed", "consumed", 1)]
        group = house.broker.groups.get(f"{ACME}/consumed", "workers")
        assert group.settings.dead_letter_topic == f"{ACME}/dead-letters/workers"


def test_events_and_requests_of_calls_are_below_the_root(house: House) -> None:
    make(house, f"{ACME}/heard", f"{GLOBEX}/heard")
    with two_tenants(house, Jebp) as (_, one, _, other):
        assert isinstance(one, Jebp)
        assert isinstance(other, Jebp)
        client, stranger = one.client, other.client
        with client.subscribe("#") as heard, stranger.subscribe("#") as not_heard, client.respond("ask/+") as responder:
            assert client.emit("live/x", b"1").topic is None
            placed = client.emit("heard/x", b"2", key=b"heard/x")
            assert (placed.topic, placed.offset) == ("heard", 0)
            assert house.happened(f"{ACME}/heard/x", b"2")
            events = [next(heard) for _ in range(2)]
            assert [(one.subject, one.payload, one.key) for one in events] == [
                ("live/x", b"1", None),
                ("heard/x", b"2", b"heard/x"),
            ]
            with ThreadPoolExecutor(1) as threads:
                asked = threads.submit(client.request, "ask/me")
                question = next(responder)
                assert question.subject == "ask/me"
                question.reply(VALUE)
                assert asked.result().payload == VALUE
            with pytest.raises(JebpError) as caught:
                stranger.request("ask/me")
            assert "tenants" not in str(caught.value)
            stranger.emit("end", b"")
            assert next(not_heard).subject == "end"


def test_the_state_over_jebp_is_below_the_root(house: House) -> None:
    set_state(house, tenants_acme_called_a=1, tenants_globex_called_b=2, called_c=3)
    with two_tenants(house, Jebp) as (acme, one, globex, other), contextlib.ExitStack() as stack:
        assert isinstance(one, Jebp)
        assert isinstance(other, Jebp)
        state = one.client.state
        assert state.get("called/a").value == 1
        assert list(state.match("called/#")) == ["called/a"]
        assert state.list("called") == ["a"]
        assert "tenants" not in state.list()
        state.set("called/new", 5)
        assert (acme.value("called/new"), globex.value("called/new")) == (b"5", None)
        assert state.history("called/new").revisions[0].value == 5
        stack.enter_context(state.lock("called/locked"))
        stack.enter_context(other.client.state.lock("called/locked", timeout=0))
        assert house.call(lambda: house.broker.state.locks.holder(f"{ACME}/called/locked")) is not None
        with pytest.raises(JebpError) as caught:
            state.set("called/#", 1)
        assert "tenants" not in str(caught.value)


def test_watches_wills_and_refusals_of_the_state_over_jebp_name_no_root(house: House) -> None:
    with tenant(house, ACME, Jebp) as (tenancy, proof), Jebp(tenancy, proof) as driver:
        set_state(house, tenants_globex_calls_a=7)
        state = driver.client.state
        state.set_many({"calls/a": 1, "calls/b": 2})
        assert state.compare_and_set("calls/v", 1, 0) == 1
        assert list(state.get_many(["calls/b"])) == ["calls/b"]
        revision = state.history("calls/a").revisions[-1]
        assert "calls/a" in state.as_of(offset=revision.offset).match("calls/#")
        changes = state.watch("calls/a")
        assert next(changes).key == "calls/a"
        set_state(house, tenants_globex_calls_a=8, tenants_acme_calls_a=3)
        assert (change := next(changes)).value == 3, change
        changes.close()
        with state.lock("calls/a", timeout=0):
            for call in (
                lambda: state.lock("calls/a", timeout=0).__enter__(),
                lambda: state.set("calls/v", 1),
                lambda: state.compare_and_set("calls/v", 1, 9),
                lambda: state.set_many({"calls/v": 1}),
            ):
                with pytest.raises(JebpError) as caught:
                    call()
                assert "calls/" in str(caught.value)
                assert "tenants" not in str(caught.value)
        state.will(delete=["calls/#"], set={"gone": 1})
        driver.client.close()
        house.until(lambda: house.broker.state.find(f"{ACME}/gone") == b"1")
        assert tenancy.value("calls/a") is None
        assert house.value(f"{GLOBEX}/calls/a") == b"8"


def test_a_topic_above_the_root_is_not_named_to_who_emits(house: House) -> None:
    with tenant(house, ACME, Jebp) as (tenancy, proof), Jebp(tenancy, proof) as client:
        make(house, "tenants")

        async def remove() -> None:
            await house.broker.remove_topic("tenants", SERVER)

        try:
            placed = client.client.emit("nowhere/x", b"1")
            assert (placed.topic, placed.offset) == (None, None)
            assert house.call(lambda: ends(house, "tenants")) == 1
        finally:
            house.run(remove)


def test_live_events_and_questions_over_jebp_are_relative(house: House) -> None:
    with two_tenants(house, JebpCalls) as (acme, one, globex, other):
        assert isinstance(one, JebpCalls)
        assert isinstance(other, JebpCalls)
        heard = one.client.subscribe("#")
        heard.begin()
        globex.emit("live/x")
        sent = one.client.emit("live/y", b"1")
        assert sent.topic is None
        assert acme.happened("live/y", b"1")
        assert next(heard).subject == "live/y"
        heard.close()
        asked = one.client.respond("asked/+")
        asked.begin()
        assert globex.ask("asked/x") is None

        def answer() -> None:
            question = next(asked)
            question.reply(question.subject.encode())

        one.do_beside(answer, asked.close)
        assert acme.ask("asked/x") == b"asked/x"
        with pytest.raises(JebpError) as caught:
            other.client.request("asked/x", b"")
        assert "asked/x" in str(caught.value)
        assert "tenants" not in str(caught.value)


# -- Wörterbuch ------------------------------------------------------------------------------------------------------


def test_keys_patterns_and_children_are_relative(house: House) -> None:
    set_state(house, tenants_acme_tree_a=1, tenants_acme_tree_b=2, tenants_globex_tree_c=3, tree_d=4)
    with tenant(house, ACME, Tree) as (tenancy, proof), Tree(tenancy, proof) as driver:
        client = driver.client
        assert client.pget("tree/#") == {"tree/a": 1, "tree/b": 2}
        assert client.pget("?/a")["tree/a"] == 1
        assert {key: value for key, value in client.pget("#").items() if key.startswith("tree/")} == {
            "tree/a": 1,
            "tree/b": 2,
        }
        assert "tree" in client.ls()
        assert "tenants" not in client.ls()
        assert sorted(client.ls("tree")) == ["a", "b"]
        assert {"a", "b"} <= set(client.pls("?"))
        assert "globex" not in client.pls("?")
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.psubscribe("#", heard.put, live_only=True)
        set_state(house, tenants_globex_tree_c=4, tenants_acme_tree_a=5)
        assert heard.get(timeout=SAFETY_NET_SECONDS).values == {"tree/a": 5}
        assert client.pdelete("tree/#") == {"tree/a": 5, "tree/b": 2}
        assert house.value(f"{GLOBEX}/tree/c") == b"4"
        with pytest.raises(TreeError) as caught:
            client.get("tree/a")
        assert "tenants" not in str(caught.value)


def test_locks_of_two_tenants_do_not_meet(house: House) -> None:
    with two_tenants(house, Tree) as (_, one, _, other):
        assert isinstance(one, Tree)
        assert isinstance(other, Tree)
        one.client.lock("locked")
        other.client.lock("locked")
        assert house.call(lambda: house.broker.state.locks.holder("locked")) is None
        assert house.call(lambda: house.broker.state.locks.holder(f"{ACME}/locked")) is not None


def test_a_testament_is_executed_below_the_root(house: House) -> None:
    set_state(house, tenants_acme_grave_a=1, tenants_globex_grave_a=1, grave_a=1)
    with tenant(house, ACME, Tree) as (tenancy, proof):
        with Tree(tenancy, proof) as driver:
            own = f"$SYS/clients/{driver.client.client_id}"
            driver.client.set(f"{own}/graveGoods", ["grave/#"])
            driver.client.set(f"{own}/lastWill", [{"key": "will", "value": 1}])
        house.until(lambda: house.broker.state.find(f"{ACME}/will") is not None)
        assert house.value(f"{ACME}/grave/a") is None
        assert (house.value(f"{GLOBEX}/grave/a"), house.value("grave/a")) == (b"1", b"1")
        assert (house.value("will"), house.value(f"{GLOBEX}/will")) == (None, None)


def test_keys_over_http_and_exports_are_relative(house: House) -> None:
    set_state(house, tenants_acme_rest_a=1, tenants_globex_rest_b=2)
    with tenant(house, ACME, TreeRest) as (tenancy, proof), TreeRest(tenancy, proof) as driver:
        headers = {"authorization": f"Bearer {proof.jwt}"}

        def ask(path: str) -> bytes:
            answer = driver.client.ask("GET", f"/api/v1/{path}", b"", **headers)
            assert b"tenants" not in answer.body
            return bytes(answer.body)

        assert json.loads(ask("pget/rest/%23")) == [{"key": "rest/a", "value": 1}]
        assert "rest" in json.loads(ask("ls"))
        assert json.loads(ask("ls/rest")) == ["a"]
        assert b"missing" in ask("get/missing")


# -- zbus ------------------------------------------------------------------------------------------------------------


def test_an_mq_is_created_filled_taken_and_described_by_its_relative_name(house: House) -> None:
    with tenant(house, ACME, ZbusSocket) as (tenancy, proof), ZbusSocket(tenancy, proof) as client:
        made = client.ask("create", mq="orders", channel="c", offset="0")
        assert (made["status"], "tenants" in str(made)) == (200, False)
        assert "tenants" not in str(client.ask("pub", {"n": 1}, mq="orders"))
        make(house, f"{GLOBEX}/orders/x")
        tenancy.emit("orders/y")
        first, second = (client.ask("take", mq="orders", channel="c")["body"][0] for _ in range(2))
        assert first["headers"]["mq"] == second["headers"]["mq"] == "orders"
        assert second["headers"]["ce_subject"] == "orders/y"
        assert "orders" in [one["name"] for one in client.ask("query")["body"]]
        assert "tenants" not in str(client.ask("query"))
        wrong = client.ask("take", mq="missing", channel="c")
        assert "missing" in str(wrong)
        assert "tenants" not in str(wrong)
        assert client.ask("remove", mq="orders")["status"] == 200
        assert house.broker.find_topic(f"{ACME}/orders") is None


def test_two_tenants_bind_one_url_and_each_calls_its_own_service(house: House) -> None:
    with two_tenants(house, ZbusSocket) as (acme, one, globex, other):
        for client in (one, other):
            assert isinstance(client, ZbusSocket)
            assert client.ask("create", mq="service")["status"] == 200
            assert client.ask("bind", [{"url": "/api", "mq": "service"}], mq="service")["status"] == 200
        for client, ends in ((one, (1, 0)), (other, (1, 1))):
            assert isinstance(client, ZbusSocket)
            call = Message({"id": f"call-{house.next_number()}"}, "/api/x", "GET")
            signed = sign_frame(call, client.proof.api_key, client.proof.api_secret)
            client.client.send(encode_texts([encode_message(signed)], mask=True))
            assert client.ask("query", mq="service")["status"] == 200  # behind it, the call is stored
            assert (acme.end_of("service"), globex.end_of("service")) == ends


# -- the administration endpoint -------------------------------------------------------------------------------------


def test_topics_groups_and_values_are_listed_by_their_relative_names(house: House) -> None:
    make(house, f"{ACME}/list", f"{ACME}/list/below", f"{GLOBEX}/list")
    set_state(house, tenants_acme_listed_a=1)
    with tenant(house, ACME, Told) as (tenancy, proof), Told(tenancy, proof) as client:
        names = [one["name"] for one in client.tell("GET", "/api/topics")["topics"]]
        assert [name for name in names if name.startswith("list")] == ["list", "list/below"]
        assert client.tell("GET", "/api/topics/list")["name"] == "list"
        group = client.tell("POST", "/api/groups", {"topic": "list", "name": "g"})
        assert (group["topic"], group["settings"]["dead_letter_topic"]) == ("list", "dead-letters/g")
        assert [one["topic"] for one in client.tell("GET", "/api/groups", topic="list")["groups"]] == ["list"]
        assert client.tell("GET", "/api/state/values", pattern="listed/#") == {"key": "listed/a", "value": 1}
        assert {"key": "listed/a", "value": 1} in [*client.tell("GET", "/api/state/tree")]
        assert "missing" in client.tell("GET", "/api/topics/missing")["error"]
        sent = client.tell("POST", "/api/send", {"subject": "list/x", "payload": "1"})
        assert (sent["topic"], sent["offset"]) == ("list", 0)


def test_dead_letters_of_a_tenant_stay_below_its_root(house: House) -> None:
    make(house, f"{ACME}/jobs")
    with tenant(house, ACME, Told) as (tenancy, proof), Told(tenancy, proof) as client:
        settings = {"ack": "explicit", "attempts_max": 1}
        client.tell("POST", "/api/groups", {"topic": "jobs", "name": "w", "settings": settings})
        tenancy.emit("jobs/1")
        response = client.open("GET", f"/api/topics/{quote('jobs', safe='')}/groups/w/consume", max="1")
        consumer = json.loads(response.readline())["consumer"]
        line = json.loads(response.readline())
        assert line["deliveries"][0]["subject"] == "jobs/1"
        client.tell("POST", f"/api/consumers/{consumer}/nack", {"numbers": [1], "final": True})
        house.until(lambda: ends(house, f"{ACME}/dead-letters/w") == 1)
        assert house.broker.find_topic("dead-letters/w") is None
        (found,) = client.tell("GET", "/api/dead-letters")["dead_letters"]
        assert (found["topic"], found["senders"][0]["topic"]) == ("dead-letters/w", "jobs")
        assert found["letters"] == 1
        (letter,) = client.tell("GET", "/api/dead-letters/w/0")["letters"]
        assert letter["origin"]["topic"] == "jobs"
        assert client.tell("POST", "/api/dead-letters/w/replay", {})["replayed"] == 1
        assert tenancy.end_of("jobs") == 2


def test_the_pages_of_groups_and_letters_name_nothing_above_the_root(house: House) -> None:
    make(house, f"{ACME}/paged", f"{GLOBEX}/paged")
    with tenant(house, ACME, Told) as (tenancy, proof), Told(tenancy, proof) as client:
        settings = {"ack": "explicit", "attempts_max": 1}
        client.tell("POST", "/api/groups", {"topic": "paged", "name": "p", "settings": settings})
        tenancy.emit("paged/1")
        path = f"/api/topics/{quote('paged', safe='')}/groups/p"
        response = client.open("GET", f"{path}/consume", max="1")
        consumer = json.loads(response.readline())["consumer"]
        response.readline()
        page = client.tell("GET", "/api/groups", count="9", search="paged")
        assert [group["topic"] for group in page["groups"]] == ["paged"]
        group = client.tell("GET", path)
        assert [record["offset"] for record in group["oldest"]] == [0]
        client.tell("POST", f"/api/consumers/{consumer}/nack", {"numbers": [1], "final": True})
        house.until(lambda: ends(house, f"{ACME}/dead-letters/p") == 1)
        effect = client.tell("POST", f"{path}/seek", {"at": "end"}, preview="1")
        assert effect["topic"] == "paged"
        letters = client.tell("GET", "/api/dead-letters/p/0", shortened="1")
        (letter,) = letters["letters"]
        assert (letter["origin"]["topic"], letter["record"]["subject"]) == ("paged", "paged/1")
        done = client.tell("POST", "/api/dead-letters/p/replay", {"progress": True})
        assert "tenants" not in json.dumps([page, group, effect, letters, done])


def test_the_server_s_own_topics_are_not_below_a_root(house: House) -> None:
    with tenant(house, ACME, Told) as (tenancy, proof), Told(tenancy, proof) as client:
        house.grant("role:walkers * #")
        for name in ("$state", "$access", "$audit"):
            assert client.tell("GET", f"/api/topics/{quote(name)}")["code"] == "refused"
        assert client.tell("GET", "/api/access")["code"] == "refused"
        assert client.tell("GET", "/api/audit")["code"] == "refused"
        assert client.ask("GET", "/metrics") == 403
        house.grant("role:walkers * tenants/#")


def test_a_group_of_the_server_s_own_choosing_keeps_its_letters(house: House) -> None:
    make(house, f"{ACME}/plain")
    group = house.call(lambda: house.broker.groups.create(f"{ACME}/plain", "g", GroupSettings(), principal=SERVER))
    assert group.settings.dead_letter_topic is None


def test_a_retained_value_is_below_the_root(house: House) -> None:
    make(house, f"{ACME}/kept", retain="last")
    with tenant(house, ACME, Told) as (tenancy, proof), Told(tenancy, proof) as client:
        assert client.publish("kept/a", VALUE)
        assert client.tell("GET", "/api/state/value", key="kept/a")["key"] == "kept/a"
        assert tenancy.value("kept/a") is not None
        assert house.value("kept/a") is None


def test_events_of_a_tenant_are_what_others_hear_by_the_absolute_name(house: House) -> None:
    make(house, f"{ACME}/shared")
    house.run(
        lambda: house.broker.publish(
            Publication(SERVER, "test", [Event(f"{ACME}/shared", VALUE)], f"{ACME}/shared")
        ).wait()
    )
    house.grant("role:walkers * tenants/#", f"bob read {ACME}/shared/#")
    with Jebp(house, house.bob) as client:
        assert client.read(f"{ACME}/shared")
    house.grant("role:walkers * tenants/#")


def test_a_name_that_begins_as_the_root_does_is_stripped_once(house: House) -> None:
    with tenant(house, ACME, JebpCalls) as (tenancy, proof), JebpCalls(tenancy, proof) as client:
        subscription = client.client.subscribe("#")
        subscription.begin()
        house.emit(f"{ACME}/{ACME}/x")
        assert next(subscription).subject == f"{ACME}/x"
