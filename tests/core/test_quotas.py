"""Quotas of principals, with a clock that the test moves."""

import msgspec
import pytest

from babelbus.config import QuotaSettings
from babelbus.core.access import ANONYMOUS, SERVER, Identity, Principal, Row
from babelbus.core.access.table_file import TableFileError, read_table_file
from babelbus.core.catalog import TopicExistsError
from babelbus.core.quotas import Bucket, QuotaExceededError, Quotas
from babelbus.core.request import Question, Reply, Request, RequestTimeoutError
from babelbus.core.subject import below, exactly
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, in_loop
from tests.support.clock import ManualClock


def make(settings: QuotaSettings | None = None) -> tuple[Quotas, ManualClock]:
    clock = ManualClock()
    return Quotas(settings or QuotaSettings(), clock, Metrics()), clock


def test_a_bucket_passes_a_second_at_once_and_then_makes_wait_for_its_debt() -> None:
    clock = ManualClock()
    bucket = Bucket(clock, 100)
    assert bucket.take(100) == 0
    assert bucket.take(50) == pytest.approx(0.5)
    clock.advance(0.25)
    assert bucket.take(0) == pytest.approx(0.25)
    clock.advance(0.25)
    assert bucket.take(0) == 0
    clock.advance(1000)
    assert bucket.take(101) == pytest.approx(0.01)  # no more than a second is saved up


def test_without_a_rate_nothing_is_counted() -> None:
    assert Bucket(ManualClock(), None).take(2**60) == 0


def test_connections_of_a_principal_share_its_quota_and_others_have_their_own() -> None:
    quotas, _ = make(QuotaSettings(publish_bytes_per_second=100, connections=2))
    first, second, other = (
        quotas.take("alice", "connections"),
        quotas.take("alice", "connections"),
        quotas.take("bob", "connections"),
    )
    assert first is second
    first.publish.take(100)
    assert second.publish.take(1) > 0
    assert other.publish.take(1) == 0
    with pytest.raises(QuotaExceededError, match="2 connections of 'alice'"):
        quotas.take("alice", "connections")
    first.give("connections")
    quotas.take("alice", "connections")
    assert quotas.describe() == {"alice": {"connections": 2}, "bob": {"connections": 1}}


def test_a_debt_outlives_the_connection() -> None:
    quotas, clock = make(QuotaSettings(publish_bytes_per_second=100))
    quota = quotas.take("alice", "connections")
    quota.publish.take(300)
    quota.give("connections")
    assert quotas.take("alice", "connections") is quota
    quota.give("connections")
    clock.advance(60)
    quotas.take("bob", "connections").give("connections")
    assert quotas.describe() == {}


def test_limits_of_one_principal_replace_the_defaults_and_hold_at_once() -> None:
    quotas, _ = make()
    assert quotas.active is False
    quota = quotas.take("alice", "connections")
    quotas.set_limits({"alice": QuotaSettings(publish_bytes_per_second=10, connections=1)})
    assert bool(quotas.active)
    assert quota.publish.take(20) == pytest.approx(1)
    with pytest.raises(QuotaExceededError):
        quotas.take("alice", "connections")
    quotas.take("bob", "connections")
    quotas.set_limits({})
    assert not bool(quotas.active)
    assert quota.publish.take(2**40) == 0


def test_the_server_has_no_quota_and_clients_without_a_name_count_by_their_source() -> None:
    quotas, _ = make(QuotaSettings(subscriptions=1))
    for _ in range(2):
        assert quotas.take_for(SERVER, "subscriptions") is None
    quotas.take_for(Identity("test:1.2.3.4", ANONYMOUS, None), "subscriptions")
    quotas.take_for(Identity("test:1.2.3.5", ANONYMOUS, None), "subscriptions")
    quotas.take_for(Identity("test:alice", "alice", None), "subscriptions")
    assert sorted(quotas.describe()) == ["alice", "test:1.2.3.4", "test:1.2.3.5"]
    with pytest.raises(QuotaExceededError, match="1 subscriptions of 'alice'"):
        quotas.take_for(Identity("other:alice", "alice", None), "subscriptions")


def test_what_was_held_before_the_limit_counts_and_is_not_taken_away() -> None:
    quotas, _ = make()
    for _ in range(3):
        quotas.restore("alice", "topics")
    quotas.set_limits({"alice": QuotaSettings(topics=2)})
    quotas.give("alice", "topics")
    with pytest.raises(QuotaExceededError):
        quotas.take("alice", "topics")
    assert quotas.describe() == {"alice": {"topics": 2}}
    quotas.give("alice", "topics")
    quotas.take("alice", "topics")


ALICE = Identity("test:alice", "alice", None)
BOB = Identity("test:bob", "bob", None)


def refusals(bus: Bus, what: str) -> float | None:
    return bus.metrics.registry.get_sample_value("babelbus_quota_refusals_total", {"what": what})


@in_loop
async def test_responders_count_as_subscriptions() -> None:
    bus = Bus(quotas=QuotaSettings(subscriptions=1))
    responders = bus.broker.responders
    responder = responders.add(below("svc"), lambda _: None, principal=ALICE)
    for _ in range(2):
        with pytest.raises(QuotaExceededError, match="1 subscriptions of 'alice'"):
            responders.add(below("svc"), lambda _: None, principal=ALICE)
    responders.add(below("svc"), lambda _: None, principal=ALICE, counted=False)
    responders.remove(responder)
    responders.add(below("svc"), lambda _: None, principal=ALICE)
    assert bus.quotas.describe() == {"alice": {"subscriptions": 1}}
    await bus.broker.close()


@in_loop
async def test_live_subscriptions_and_memberships_share_a_quota_until_they_end() -> None:
    bus = Bus(quotas=QuotaSettings(subscriptions=2))
    broker = bus.broker
    bus.topic("work")
    groups = broker.open_groups(bus.files, "data")
    group = groups.ensure("work", "g", principal=SERVER)
    first = broker.subscribe(below("a"), lambda _: None, ALICE)
    member = group.join(lambda _: None, principal=ALICE)
    with pytest.raises(QuotaExceededError, match="2 subscriptions of 'alice'"):
        broker.subscribe(below("a"), lambda _: None, ALICE)
    with pytest.raises(QuotaExceededError):
        group.join(lambda _: None, principal=ALICE)
    assert (broker.router.count, len(group.members), refusals(bus, "subscriptions")) == (1, 1, 2)
    broker.subscribe(below("a"), lambda _: None, BOB)
    broker.unsubscribe(first)
    broker.unsubscribe(first)  # the second end counts nothing
    member.leave()
    member.leave()
    assert bus.quotas.describe() == {"bob": {"subscriptions": 1}}
    for _ in range(2):
        group.join(lambda _: None, principal=ALICE)
    await groups.remove("work", "g", principal=SERVER).wait()
    assert bus.quotas.describe() == {"bob": {"subscriptions": 1}}
    await broker.close()


@in_loop
async def test_a_principal_makes_so_many_topics_and_owns_them_after_a_restart() -> None:
    bus = Bus(quotas=QuotaSettings(topics=2))
    alice = bus.open_gate().identity("test:alice", "alice")
    bus.broker.gate.import_entries("test", [Row("alice", "*", "#"), Principal("alice")])
    create, remove = bus.broker.create_topic, bus.broker.remove_topic
    both = [create("a", principal=alice), create("b", principal=alice), create("c", principal=alice)]
    assert await both[0].wait()
    assert await both[1].wait()
    with pytest.raises(QuotaExceededError, match="2 topics of 'alice'"):
        await both[2].wait()
    assert (bus.broker.find_topic("c"), refusals(bus, "topics")) == (None, 1)
    await create("d", principal=SERVER).wait()  # by the server itself
    await bus.broker.close()

    again = Bus(bus.files, quotas=QuotaSettings(topics=2))
    alice = again.open_gate().identity("test:alice", "alice")
    again.broker.gate.import_entries("test", [Row("alice", "*", "#"), Principal("alice")])
    create, remove = again.broker.create_topic, again.broker.remove_topic
    with pytest.raises(QuotaExceededError):
        await create("c", principal=alice).wait()
    await remove("a", principal=SERVER).wait()
    with pytest.raises(TopicExistsError):
        await create("b", principal=alice).wait()
    await create("c", principal=alice).wait()
    assert again.quotas.describe() == {"alice": {"topics": 2}}
    await again.broker.close()


@in_loop
async def test_a_topic_that_could_not_be_made_is_not_counted() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.open_gate()
    bus.broker.gate.import_entries("test", [Row("alice", "*", "#"), Principal("alice")])
    alice = bus.broker.gate.identity("test:alice", "alice")
    files.fail("open")
    with pytest.raises(StorageError):
        await bus.broker.create_topic("a", principal=alice).wait()
    assert bus.quotas.describe() == {}
    await bus.broker.close()


@in_loop
async def test_requests_in_flight_have_a_quota_until_their_reply_or_deadline() -> None:
    bus = Bus(quotas=QuotaSettings(requests=2))
    asked: list[Question] = []
    bus.broker.responders.add(exactly("svc"), asked.append, principal=SERVER)

    def ask(principal: Identity) -> Request[Reply]:
        return bus.broker.request("svc", b"?", (), bus.clock.monotonic() + 10, principal)

    first, second = ask(ALICE), ask(ALICE)
    refused = ask(ALICE)
    assert isinstance(refused.error, QuotaExceededError)
    assert (len(asked), refusals(bus, "requests"), ask(BOB).done) == (2, 1, False)
    bus.broker.respond(asked[0].key, Reply(b"!"))
    assert first.done
    assert not ask(ALICE).done
    bus.clock.advance(11)
    bus.broker.responders.requests.tick()
    assert isinstance(second.error, RequestTimeoutError)
    assert bus.quotas.describe() == {}
    await bus.broker.close()


@in_loop
async def test_the_table_gives_a_principal_quotas_of_its_own_at_once_and_after_a_restart() -> None:
    bus = Bus(quotas=QuotaSettings(subscriptions=1))
    gate = bus.open_gate("off")
    text = '[[principals]]\nname = "alice"\n\n[[principals]]\nname = "bob"\nquotas = {subscriptions = 3}\n'
    await gate.apply_file(text, "table.toml", SERVER)
    for _ in range(3):
        bus.broker.subscribe(below("a"), lambda _: None, BOB)
    bus.broker.subscribe(below("a"), lambda _: None, ALICE)
    for principal in (ALICE, BOB):
        with pytest.raises(QuotaExceededError):
            bus.broker.subscribe(below("a"), lambda _: None, principal)
    await gate.put([Principal("alice", quotas=QuotaSettings(topics=7))], SERVER)
    bus.broker.subscribe(below("a"), lambda _: None, ALICE)
    await bus.broker.close()

    again = Bus(bus.files, quotas=QuotaSettings(subscriptions=1))
    gate = again.open_gate("off")
    assert gate.table.quotas() == {"alice": QuotaSettings(topics=7), "bob": QuotaSettings(subscriptions=3)}
    for _ in range(3):
        again.broker.subscribe(below("a"), lambda _: None, BOB)
    await again.broker.close()


@pytest.mark.parametrize(
    ("line", "reason"),
    [("quotas = {subscribtions = 3}", "subscribtions"), ("quotas = {topics = 0}", ">= 1"), ("quotas = 3", "object")],
)
def test_wrong_quotas_in_a_table_file_are_named_with_their_line(line: str, reason: str) -> None:
    with pytest.raises(TableFileError, match=reason) as failure:
        read_table_file(f'[[principals]]\nname = "alice"\n{line}\n', "table.toml")
    assert failure.value.line == 3


def test_a_principal_without_quotas_is_stored_as_before() -> None:
    assert msgspec.json.encode(Principal("alice")) == b'{"name":"alice","roles":[],"credentials":[]}'
