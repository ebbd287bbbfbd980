"""What all clients of one server share: the fan-out and its caches, and what is dropped."""

import pytest

from babelbus.core import fanout
from babelbus.core.record import Event
from babelbus.protocols.worterbuch.codec import encode_state
from babelbus.protocols.worterbuch.hub import foreign_value
from tests.support.bus import in_loop
from tests.support.worterbuch import (
    Talker,
    ack,
    delete,
    get,
    make_hub,
    pstate,
    psubscribe,
    publish,
    put,
    state,
    subscribe,
)


@in_loop
async def test_a_key_is_looked_up_once_until_a_subscription_changes_it() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask(subscribe(1, "k"))
    talker.ask(put(1, "k", 1))
    fan = hub._fanout.fans["k"]
    talker.ask(put(2, "k", 2), put(3, "other", 1))
    assert hub._fanout.fans["k"] is fan
    watcher.ask(subscribe(2, "elsewhere"))
    talker.ask(put(4, "k", 3))
    assert hub._fanout.fans["k"] is fan
    watcher.ask(psubscribe(3, "?", liveOnly=True))
    talker.ask(put(5, "k", 4))
    assert hub._fanout.fans["k"] is not fan
    events = watcher.heard()[-2:]
    assert state(1, 4) in events
    assert pstate(3, "?", {"k": 4}) in events


@in_loop
async def test_more_keys_than_are_remembered_are_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "FANS_MAX", 10)
    monkeypatch.setattr(fanout, "SETS_MAX", 3)
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask(*[subscribe(number, f"k/{number}") for number in range(30)])
    for _ in range(2):
        talker.ask(*[put(number, f"k/{number}", number) for number in range(30)])
        assert watcher.heard() == [state(number, number) for number in range(30)]
        assert len(hub._fanout.fans) <= 10
        assert len(hub._fanout._sets) <= 3


@in_loop
async def test_a_change_is_encoded_once_for_all_subscribers_of_one_shape() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    watchers = [Talker(hub) for _ in range(50)]
    for watcher in watchers:
        watcher.ask(subscribe(1, "k"))
    before = len(hub._fanout.find("k").receivers)
    talker.ask(put(1, "k", 1), publish(2, "k", 2), delete(3, "k"))
    written = {bytes(watcher.transport.written).partition(b'{"ack"')[2] for watcher in watchers}
    assert before == 50
    assert len(written) == 1
    assert encode_state(1, b"2") in written.pop()


@in_loop
async def test_nobody_is_told_twice_of_a_run_that_mixes_keys() -> None:
    _, hub = make_hub()
    talker, one, all_of_them = Talker(hub), Talker(hub), Talker(hub)
    one.ask(subscribe(1, "a"))
    all_of_them.ask(psubscribe(1, "?", liveOnly=True))
    assert talker.ask(put(1, "a", 1), put(2, "b", 1), put(3, "a", 2)) == [ack(1), ack(2), ack(3)]
    assert one.heard() == [state(1, 1), state(1, 2)]
    assert all_of_them.heard() == [
        pstate(1, "?", {"a": 1}),
        pstate(1, "?", {"b": 1}),
        pstate(1, "?", {"a": 2}),
    ]


@in_loop
async def test_a_client_that_left_is_told_nothing_and_remembered_nowhere() -> None:
    bus, hub = make_hub()
    talker, gone = Talker(hub), Talker(hub)
    gone.ask(subscribe(1, "k"), psubscribe(2, "#", liveOnly=True), {"subscribeLs": {"transactionId": 3}})
    gone.leave()
    gone.leave()
    written = len(gone.transport.written)
    talker.ask(put(1, "k", 1))
    assert len(gone.transport.written) == written
    assert bus.broker.router.empty
    assert not hub._ls
    assert gone.id not in hub.clients


def test_json_that_no_client_could_read_is_a_text() -> None:
    json_type = ((b"content-type", b"application/json"),)
    assert foreign_value(Event("k", b"[1,\n2]", None, json_type)) == b"[1,2]"
    assert foreign_value(Event("k", b"[" * 121 + b"]" * 121, None, json_type))[:1] == b'"'
    assert foreign_value(Event("k", b"[" * 120 + b"]" * 120, None, json_type))[:1] == b"["
    assert foreign_value(Event("k", b"[1]")) == b'"[1]"'
    assert foreign_value(Event("k", None)) == b"null"


@in_loop
async def test_the_count_of_subscriptions_is_right_when_a_client_leaves_with_some() -> None:
    _, hub = make_hub()
    stays, goes = Talker(hub), Talker(hub)
    stays.ask(subscribe(1, "k"), subscribe(2, "l"))
    goes.ask(subscribe(1, "k"), psubscribe(2, "a/#"), psubscribe(3, "#", liveOnly=True))
    goes.leave()
    assert stays.one(get(3, "$SYS/subscriptions")) == state(3, 2)
    stays.ask({"unsubscribe": {"transactionId": 1}})
    assert stays.one(get(4, "$SYS/subscriptions")) == state(4, 1)
