"""Sessions that go on at another server: a scripted client of one hub, then of the next."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from babelbus.errors import BabelbusError
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.worterbuch.continuation import KeptSession, decode_session
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import Symbols
from babelbus.protocols.worterbuch.profiles import PROFILES, Endpoint
from tests.protocols.worterbuch.test_session_access import authorize
from tests.storage.faults import FaultyFiles
from tests.support.bus import in_loop
from tests.support.web import SECRET
from tests.support.worterbuch import (
    Talker,
    ack,
    cset,
    delete,
    get,
    make_hub,
    named,
    names,
    pdelete,
    pstate,
    pstate_deleted,
    psubscribe,
    put,
    state,
    subscribe,
    unsubscribe,
)

KEYS = ("a/b", "a/c", "a/b/d", "c/d")


def kept(talker: Talker) -> KeptSession:
    """Hand over the session of a client."""
    continuation = talker.lines.continuation()
    assert continuation is not None
    assert continuation.owner == talker.id
    talker.outbox.close()
    talker.lines.leave()
    return decode_session(continuation.content)


def go_on(hub: Hub, session: KeptSession, **options: object) -> Talker:
    """Continue a session at another hub; it sends nothing of itself."""
    endpoint = Endpoint(PROFILES[session.profile], session.symbols)
    talker = Talker(hub, kept=session, profile=endpoint.profile, symbols=endpoint.symbols, greeted=False, **options)  # type: ignore[arg-type]
    assert talker.heard() == []
    return talker


@in_loop
async def test_every_kind_of_subscription_goes_on() -> None:
    _, first = make_hub()
    before = Talker(first)
    before.ask(put(1, "a/b", 1), put(2, "a/c", 1))
    before.ask(
        subscribe(3, "a/b", liveOnly=True),
        subscribe(4, "a/b", unique=True, liveOnly=True),
        psubscribe(5, "a/?", liveOnly=True),
        {"subscribeLs": {"transactionId": 6, "parent": "a"}},
        subscribe(7, "gone"),
    )
    before.ask(unsubscribe(7))
    session = kept(before)
    assert before.id not in first.clients

    _, second = make_hub()
    second.state.put("a/b", b"1")
    after = go_on(second, session)
    assert after.id == before.id
    other = Talker(second)
    other.say(put(1, "a/b", 1), put(2, "a/b", 2), delete(3, "a/b"), put(4, "gone", 1))
    heard = after.heard()
    assert [one for one in heard if one.get("state", {}).get("transactionId") == 3] == [
        state(3, 1),
        state(3, 2),
        {"state": {"transactionId": 3, "deleted": 2}},
    ]
    assert [one for one in heard if one.get("state", {}).get("transactionId") == 4] == [
        state(4, 2),
        {"state": {"transactionId": 4, "deleted": 2}},
    ]
    patterns = [one for one in heard if "pState" in one]
    assert patterns[-1] == pstate_deleted(5, "a/?", {"a/b": 2})
    assert names(6) in heard
    assert after.one(unsubscribe(5)) == ack(5)
    other.say(put(5, "a/z", 1))
    assert after.heard() == [names(6, "z")]


@in_loop
async def test_what_was_collected_for_a_client_is_sent_before_it_goes_on() -> None:
    _, first = make_hub()
    before = Talker(first)
    before.ask(psubscribe(1, "a/#", aggregateEvents=3_600_000, liveOnly=True))
    Talker(first).say(put(1, "a/b", 1))
    assert before.heard() == []
    session = kept(before)
    assert before.heard() == [pstate(1, "a/#", {"a/b": 1})]
    assert session.subscriptions[0].aggregate_ms == 3_600_000


@in_loop
async def test_keys_that_a_client_has_bound_go_on() -> None:
    _, first = make_hub()
    before = Talker(first)
    assert before.one(named("sPubInit", 7, "a/b")) == ack(7)
    _, second = make_hub()
    after = go_on(second, kept(before))
    watcher = Talker(second)
    watcher.ask(subscribe(1, "a/b"))
    assert after.one({"sPub": {"transactionId": 7, "value": 1}}) == ack(7)
    assert watcher.heard() == [state(1, 1)]


@in_loop
async def test_locks_are_held_from_the_first_moment_and_their_queues_keep_their_order() -> None:
    _, first = make_hub()
    owner, one, two = Talker(first), Talker(first), Talker(first)
    assert owner.one(named("lock", 1, "job")) == ack(1)
    one.say(named("acquireLock", 2, "job"))
    two.say(named("acquireLock", 3, "job"))
    sessions = [kept(talker) for talker in (two, one, owner)]

    _, second = make_hub()
    after = {session.client_id: go_on(second, session) for session in sessions}
    waits = [(wait, session.client_id) for session in sessions for wait in session.waits]
    waits.sort(key=lambda pair: pair[0].place)
    for wait, client_id in waits:
        after[client_id].session.wait_again(wait)
    assert Talker(second).code(named("lock", 9, "job")) is not None
    after[owner.id].ask(named("releaseLock", 4, "job"))
    assert (after[one.id].heard(), after[two.id].heard()) == ([ack(2)], [])
    after[one.id].leave()
    await asyncio.sleep(0)
    assert after[two.id].heard() == [ack(3)]


@in_loop
async def test_a_wait_for_a_lock_whose_holder_is_gone_ends_with_the_lock() -> None:
    _, first = make_hub()
    owner, waiter = Talker(first), Talker(first)
    owner.ask(named("lock", 1, "job"))
    waiter.say(named("acquireLock", 2, "job"))
    session = kept(waiter)
    _, second = make_hub()
    after = go_on(second, session)
    after.session.wait_again(session.waits[0])
    assert after.heard() == [ack(2)]
    assert second.state.locks.holder("job") == waiter.id


@in_loop
async def test_the_token_of_a_client_holds_at_the_next_server_and_a_missing_one_is_still_missing() -> None:
    _, first = make_hub(key=SECRET)
    proved, stranger = Talker(first), Talker(first)
    proved.ask(authorize(read=["mine/#"], write=["mine/#"]))
    sessions = [kept(proved), kept(stranger)]
    _, second = make_hub(key=SECRET)
    after, still = (go_on(second, session) for session in sessions)
    assert after.one(put(1, "mine/a", 1)) == ack(1)
    assert after.code(put(2, "other", 1)) is not None
    assert still.code(get(3, "mine/a")) is not None
    assert still.ended is not None


@in_loop
async def test_dialect_symbols_and_what_a_client_shows_go_on() -> None:
    _, first = make_hub()
    symbols = Symbols(".", "*", ">")
    before = Talker(first, profile=PROFILES["0.10"], symbols=symbols)
    will = f"$SYS/clients/{before.id}/lastWill".replace("/", ".")
    assert before.one(put(1, will, [{"key": "left", "value": 1}])) == ack(1)
    before.ask(psubscribe(2, "a.*", liveOnly=True))
    session = kept(before)
    _, second = make_hub()
    second.state.set_testament(before.id, first.state.testaments()[before.id])  # which is in the log of both
    after = go_on(second, session)
    second.state.put("a/b", b"1")
    second.commit()
    assert after.heard() == [pstate(2, "a.*", {"a.b": 1})]
    assert second.state.find(f"$SYS/clients/{before.id}/lastWill") == b'[{"key": "left", "value": 1}]'


@in_loop
async def test_a_client_whose_principal_is_gone_does_not_go_on() -> None:
    certificate = PeerCertificate((), ("device",), (), "f")
    known: set[str] = {"device"}
    _, first = make_hub(by_names=lambda names: "device" if known else None)
    session = kept(Talker(first, certificate=certificate))
    _, second = make_hub(access="enforce", by_names=lambda names: "device")
    with pytest.raises(BabelbusError):
        Talker(second, kept=session, certificate=certificate, greeted=False)
    assert second.clients == {}


@in_loop
async def test_a_session_that_has_not_begun_does_not_go_on() -> None:
    _, hub = make_hub(handshake_wait_seconds=60.0)
    talker = Talker(hub, greeted=False)
    assert talker.lines.continuation() is None
    talker.leave()


def copied(talker: Talker) -> KeptSession:
    """Copy the session of a quiet client, without an effect."""
    assert talker.lines.is_copyable
    first, second = talker.lines.continuation(), talker.lines.continuation()
    assert first is not None
    assert first == second
    assert talker.heard() == []
    return decode_session(first.content)


Step = tuple[str, str, int]
STEP = st.tuples(st.sampled_from(["put", "cset", "delete", "pdelete"]), st.sampled_from(KEYS), st.integers(1, 2))


def change(talker: Talker, number: int, step: Step) -> None:
    """Change the tree in one chunk."""
    kind, key, value = step
    if kind == "put":
        talker.ask(put(number, key, value))
    elif kind == "cset":
        found = talker.session._state.find_entry(key)
        talker.ask(cset(number, key, value, 0 if found is None else found[2]))
    elif kind == "delete":
        talker.ask(delete(number, key))
    else:
        talker.ask(pdelete(number, f"{key.split('/')[0]}/#"))


def values(messages: list[Any]) -> dict[int, list[Any]]:
    """Return the messages of each subscription to values: each has an order, but all of a client together have none."""
    by_subscription: dict[int, list[Any]] = {}
    for one in messages:
        [(kind, fields)] = one.items()
        if kind != "lsState":
            by_subscription.setdefault(fields["transactionId"], []).append(one)
    return by_subscription


def last_names(messages: list[Any], number: int, before: Any) -> Any:
    """Return the names that a client knows after some messages; they have no order."""
    known = [one["lsState"] for one in messages if one.get("lsState", {}).get("transactionId") == number]
    return sorted(known[-1]["children"]) if known else before


@given(st.lists(STEP, max_size=6), st.lists(STEP, max_size=8), st.lists(STEP, max_size=4))
@example([], [("put", "a/b", 1), ("put", "a/b", 1)], [])
@example([], [("put", "a/b", 1), ("put", "a/c", 1), ("put", "a/b/d", 1), ("delete", "a/b", 1)], [])
@in_loop
async def test_a_client_whose_copy_goes_on_hears_what_one_hears_that_never_moved(
    early: list[Step], unheard: list[Step], late: list[Step]
) -> None:
    bus, first = make_hub(FaultyFiles())
    talker, other = Talker(first), Talker(first)
    for number, step in enumerate(early):
        change(other, number, step)
    begun = talker.ask(
        subscribe(1, "a/b"),
        subscribe(2, "a/b", unique=True),
        psubscribe(3, "a/#"),
        psubscribe(4, "c/?", unique=True, liveOnly=True),
        {"subscribeLs": {"transactionId": 5, "parent": "a"}},
    )
    names_before = last_names(begun, 5, [])
    session, mark = copied(talker), bus.broker.state.told_offset
    for number, step in enumerate(unheard):
        change(other, number, step)
    expected = talker.heard()
    await bus.die()

    second_bus, second = make_hub(bus.files, since=mark)
    after, stranger, fresh = go_on(second, session), Talker(second), Talker(second)
    fresh.ask(psubscribe(1, "a/#", liveOnly=True))
    assert second_bus.broker.state.unheard is not None
    second.tell_again(second_bus.broker.state.unheard, {after.id: mark})
    heard = after.heard()
    assert fresh.heard() == stranger.heard() == []
    assert values(heard) == values(expected)
    assert last_names(heard, 5, names_before) == last_names(expected, 5, names_before)
    for number, step in enumerate(late):
        change(other, number, step)
        change(stranger, number, step)
        assert values(after.heard()) == values(talker.heard())
    await second_bus.die()


@in_loop
async def test_each_client_is_told_from_its_own_mark() -> None:
    bus, first = make_hub(FaultyFiles())
    one, two, other = Talker(first), Talker(first), Talker(first)
    for talker in (one, two):
        talker.ask(psubscribe(1, "a/#"))
    early, mark = copied(one), bus.broker.state.told_offset
    other.ask(put(1, "a/b", 1))
    two.heard()
    late, later = copied(two), bus.broker.state.told_offset
    other.ask(put(2, "a/b", 2), put(3, "elsewhere", 1))
    await bus.die()
    second_bus, second = make_hub(bus.files, since=mark)
    after_one, after_two = go_on(second, early), go_on(second, late)
    second.tell_again(second_bus.broker.state.unheard or (), {one.id: mark, two.id: later, "gone": 0})
    assert after_one.heard() == [pstate(1, "a/#", {"a/b": 1}), pstate(1, "a/#", {"a/b": 2})]
    assert after_two.heard() == [pstate(1, "a/#", {"a/b": 2})]
    await second_bus.die()


@pytest.mark.parametrize(
    ("message", "copyable"),
    [
        (subscribe(1, "a/b"), True),
        (psubscribe(1, "a/#"), True),
        ({"subscribeLs": {"transactionId": 1, "parent": "a"}}, True),
        (psubscribe(1, "#"), False),
        (psubscribe(1, "?/b"), False),
        (subscribe(1, "$SYS/uptime"), False),
        (psubscribe(1, "a/#", aggregateEvents=1000), False),
        ({"subscribeLs": {"transactionId": 1, "parent": None}}, False),
        ({"subscribeLs": {"transactionId": 1, "parent": "$SYS/clients"}}, False),
    ],
)
@in_loop
async def test_a_copy_of_a_client_counts_unless_others_than_the_log_tell_it_something(
    message: dict[str, Any], copyable: bool
) -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.lines.is_copyable
    talker.ask(message)
    assert talker.lines.is_copyable is copyable
    talker.ask(unsubscribe(1))
    assert talker.lines.is_copyable


@pytest.mark.parametrize("name", ["0.6", "0.10"])
@in_loop
async def test_a_dialect_with_keepalives_has_no_copies(name: str) -> None:
    _, hub = make_hub()
    assert not Talker(hub, profile=PROFILES[name]).lines.is_copyable


@in_loop
async def test_a_client_that_is_not_greeted_has_no_copy() -> None:
    _, hub = make_hub(handshake_wait_seconds=60.0)
    talker = Talker(hub, greeted=False)
    assert not talker.lines.is_copyable
    talker.leave()


@in_loop
async def test_waits_in_copies_of_different_moments_keep_their_order() -> None:
    _, first = make_hub()
    owner, one, two = Talker(first), Talker(first), Talker(first)
    owner.ask(named("lock", 1, "job"))
    passing = Talker(first)
    passing.say(named("acquireLock", 2, "job"))
    one.say(named("acquireLock", 3, "job"))
    early = copied(one)
    passing.leave()
    two.say(named("acquireLock", 4, "job"))
    late = copied(two)
    assert early.waits[0].place < late.waits[0].place
    assert copied(one) == early


@in_loop
async def test_names_that_were_sent_before_the_copy_are_not_sent_again() -> None:
    bus, first = make_hub(FaultyFiles())
    talker = Talker(first)
    talker.ask({"subscribeLs": {"transactionId": 1, "parent": "a"}})
    Talker(first).ask(put(1, "a/b", 1))
    assert talker.heard() == [names(1, "b")]
    session, mark = copied(talker), bus.broker.state.told_offset
    await bus.die()
    second_bus, second = make_hub(bus.files, since=mark)
    after = go_on(second, session)
    second.tell_again([], {after.id: mark})
    assert after.heard() == []
    await second_bus.die()
