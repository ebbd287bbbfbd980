"""Subscriptions on a scripted peer: what they begin with, what they hear, and who does not read (section 7)."""

import itertools
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.record import Event
from babelbus.protocols.worterbuch.profiles import MAIN
from tests.support.bus import in_loop, publish
from tests.support.worterbuch import (
    Talker,
    ack,
    delete,
    get,
    make_hub,
    names,
    pdelete,
    pget,
    pstate,
    pstate_deleted,
    psubscribe,
    put,
    state,
    state_deleted,
    subscribe,
    unsubscribe,
    until,
)

# -- subscriptions (section 7) ----------------------------------------------------------------------------------------


@in_loop
async def test_a_subscription_begins_with_its_ack_and_what_is_there() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(put(1, "a/b", 1))
    assert talker.ask(subscribe(2, "a/b")) == [ack(2), state(2, 1)]
    assert talker.ask(subscribe(3, "none")) == [ack(3)]
    assert talker.ask(psubscribe(4, "a/?")) == [ack(4), pstate(4, "a/?", {"a/b": 1})]
    assert talker.ask(psubscribe(5, "none/#")) == [ack(5), pstate(5, "none/#", {})]
    assert talker.ask(subscribe(6, "a/b", liveOnly=True)) == [ack(6)]
    assert talker.ask(psubscribe(7, "a/?", liveOnly=True)) == [ack(7)]
    assert talker.ask({"subscribeLs": {"transactionId": 8, "parent": "none"}}) == [ack(8), names(8)]
    assert talker.ask({"subscribeLs": {"transactionId": 9, "parent": "a"}}) == [ack(9), names(9, "b")]


@in_loop
async def test_each_change_reaches_each_subscription_once_and_in_order_within_one_chunk() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    heard = talker.ask(
        put(1, "k", 1),
        subscribe(2, "k"),
        put(3, "k", 2),
        psubscribe(4, "#/".rstrip("/")),
        put(5, "k", 3),
        delete(6, "k"),
    )
    mine = [one["state"] for one in heard if one.get("state", {}).get("transactionId") == 2]
    assert [one.get("value", one.get("deleted")) for one in mine] == [1, 2, 3, 3]
    others = [one["pState"] for one in heard if "pState" in one]
    snapshot = {pair["key"]: pair["value"] for pair in others[0]["keyValuePairs"]}
    assert snapshot["k"] == 2
    of_k = [one for one in others[1:] if [p["key"] for p in one.get("keyValuePairs", one.get("deleted"))] == ["k"]]
    assert [next(iter(set(one) & {"keyValuePairs", "deleted"})) for one in of_k] == ["keyValuePairs", "deleted"]


@in_loop
async def test_without_unique_the_same_value_is_an_event_and_with_it_only_news_is() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask(subscribe(1, "k"), subscribe(2, "k", unique=True), psubscribe(3, "k", unique=True))
    values: list[object] = [1, 1, 1.0, True, "1", {"a": 1, "b": [2]}, {"b": [2], "a": 1}]
    for number, value in enumerate(values):
        talker.ask(put(number, "k", value))
    heard = watcher.heard()
    assert [one["state"]["value"] for one in heard if one.get("state", {}).get("transactionId") == 1] == values
    unique = [one["state"]["value"] for one in heard if one.get("state", {}).get("transactionId") == 2]
    assert list(map(json.dumps, unique)) == ["1", "1.0", "true", '"1"', '{"a": 1, "b": [2]}']
    assert len([one for one in heard if "pState" in one]) == 5
    talker.ask(delete(1, "k"), put(2, "k", 1))
    heard = watcher.heard()
    assert [one for one in heard if one.get("state", {}).get("transactionId") == 2] == [
        state_deleted(2, {"b": [2], "a": 1}),
        state(2, 1),
    ]


@in_loop
async def test_many_subscriptions_of_one_client_have_their_own_events() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask(*[subscribe(number, "k") for number in range(20)], psubscribe(20, "?"), psubscribe(21, "k"))
    talker.ask(put(1, "k", 7))
    heard = watcher.heard()
    assert [one for one in heard if "state" in one] == [state(number, 7) for number in range(20)]
    assert pstate(20, "?", {"k": 7}) in heard
    assert pstate(21, "k", {"k": 7}) in heard
    assert len(heard) == 22


@in_loop
async def test_a_client_has_a_limited_number_of_subscriptions() -> None:
    bus, hub = make_hub(subscriptions_max=3)
    talker, other = Talker(hub), Talker(hub)
    subscribe_ls = {"subscribeLs": {"transactionId": 3, "parent": "a"}}
    assert talker.ask(subscribe(1, "a"), psubscribe(2, "?", liveOnly=True), subscribe_ls)[:2] == [ack(1), ack(2)]
    refused = talker.one(subscribe(4, "b"))["err"]
    assert refused["errorCode"] == 255
    assert "at most 3 subscriptions (worterbuch.subscriptions_max)" in refused["metadata"]
    assert talker.code(psubscribe(4, "?")) == 255
    assert talker.code({"subscribeLs": {"transactionId": 1, "parent": "a"}}) == 255
    assert bus.broker.router.count == 2
    assert talker.ask(unsubscribe(2)) == [ack(2)]
    assert talker.ask(subscribe(4, "c")) == [ack(4)]
    assert other.ask(subscribe(1, "a")) == [ack(1)]  # the limit is that of each client


@in_loop
async def test_a_second_subscription_under_one_transaction_id_is_refused_and_the_first_goes_on() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.ask(subscribe(1, "a")) == [ack(1)]
    assert talker.code(subscribe(1, "b")) == talker.code(psubscribe(1, "#")) == 255
    assert talker.ask(put(2, "b", 1)) == [ack(2)]
    assert state(1, 2) in talker.ask(put(3, "a", 2))
    assert talker.ask(unsubscribe(1)) == [ack(1)]
    assert talker.code(unsubscribe(1)) == 6
    assert talker.ask(subscribe(1, "c")) == [ack(1)]
    names_of_a = {"subscribeLs": {"transactionId": 5, "parent": "a"}}
    assert talker.ask(names_of_a)[0] == ack(5)
    assert talker.code(names_of_a) == 255


@in_loop
async def test_unsubscribe_ends_either_kind_and_knows_none() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.code(unsubscribe(1)) == 6
    assert talker.code({"unsubscribeLs": {"transactionId": 1}}) == 6
    talker.ask({"subscribeLs": {"transactionId": 1, "parent": None}}, {"subscribeLs": {"transactionId": 2}})
    assert talker.ask({"unsubscribeLs": {"transactionId": 1}}, unsubscribe(2)) == [ack(1), ack(2)]
    assert talker.ask(put(3, "new", 1)) == [ack(3)]
    assert not hub.state.watches_children
    other = Talker(hub)
    other.ask(subscribe(1, "new"))
    assert talker.code(unsubscribe(1)) == 6


@in_loop
async def test_changes_before_an_unsubscribe_in_the_same_chunk_are_told() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(subscribe(1, "k"))
    heard = talker.ask(put(2, "k", 1), unsubscribe(1), put(3, "k", 2))
    assert [one for one in heard if "state" in one] == [state(1, 1)]


@in_loop
async def test_ls_subscriptions_hear_the_whole_list_when_a_child_comes_or_goes() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask({"subscribeLs": {"transactionId": 1, "parent": "a"}})
    talker.ask(put(1, "a/b/c/d", 1))
    assert watcher.heard() == [names(1, "b")]
    talker.ask(put(2, "a/b/c/d", 2), put(3, "a/b/x", 2), put(4, "a", 1))
    assert watcher.heard() == []
    talker.ask(put(5, "a/z", 1))
    assert [sorted(one["lsState"]["children"]) for one in watcher.heard()] == [["b", "z"]]
    talker.ask(delete(6, "a/b/x"))
    assert watcher.heard() == []
    talker.ask(pdelete(7, "a/#"))
    assert watcher.heard()[-1] == names(1)


@in_loop
async def test_aggregated_events_come_together_but_no_key_twice_and_no_kinds_mixed() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    talker.ask(put(0, "a/0", 0))
    assert watcher.ask(psubscribe(1, "a/#", aggregateEvents=1)) == [ack(1), pstate(1, "a/#", {"a/0": 0})]
    talker.ask(put(1, "a/x", 1), put(2, "a/y", 2))
    assert watcher.heard() == []
    talker.ask(put(3, "a/x", 3))  # a key that is in the buffer: it goes out first
    assert watcher.heard() == [pstate(1, "a/#", {"a/x": 1, "a/y": 2})]
    talker.ask(delete(4, "a/y"))  # another kind
    assert watcher.heard() == [pstate(1, "a/#", {"a/x": 3})]
    await until(lambda: watcher.session.subscribers[1]._timer is None)
    assert watcher.heard() == [pstate_deleted(1, "a/#", {"a/y": 2})]
    talker.ask(put(5, "a/z", 1))
    watcher.ask(unsubscribe(1))
    assert watcher.heard() == []


@in_loop
async def test_many_milliseconds_of_aggregation_and_none_are_served() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(psubscribe(1, "a", aggregateEvents=0), psubscribe(2, "a", aggregateEvents=2**64 - 1, unique=True))
    assert talker.ask(put(3, "a", 1), put(4, "a", 1)) == [
        pstate(1, "a", {"a": 1}),
        ack(3),
        ack(4),
    ]
    await until(lambda: talker.session.subscribers[1]._timer is None)
    assert talker.heard() == [pstate(1, "a", {"a": 1})]
    assert talker.session.subscribers[2]._pending


# -- a client that does not read (section 7.7) ------------------------------------------------------------------------


@in_loop
async def test_a_subscriber_that_does_not_read_is_cut_and_others_hear_everything() -> None:
    _, hub = make_hub(queue_bytes_max=10_000)
    talker, stuck, fine = Talker(hub), Talker(hub), Talker(hub)
    for one in (stuck, fine):
        one.ask(subscribe(1, "k"))
    stuck.transport.stuck = True
    for number in range(500):
        talker.ask(put(number, "k", [number, "x" * 50]))
    assert stuck.aborted
    assert len(stuck.transport.written) < 12_000
    assert [one["state"]["value"][0] for one in fine.heard()] == list(range(500))
    sample = hub._metrics.registry.get_sample_value
    labels = {"protocol": "worterbuch", "reason": "slow"}
    assert (sample("babelbus_live_dropped_total", labels) or 0) >= 1


@in_loop
async def test_a_subscriber_that_does_not_read_loses_events_and_no_more_where_the_operator_says_so() -> None:
    _, hub = make_hub(queue_bytes_max=10_000, slow="discard")
    talker, stuck = Talker(hub), Talker(hub)
    stuck.ask(subscribe(1, "k"))
    stuck.transport.stuck = True
    for number in range(500):
        talker.ask(put(number, "k", [number, "x" * 50]))
    some = [one["state"]["value"][0] for one in stuck.heard()]
    assert some == list(range(len(some)))
    assert 0 < len(some) < 500
    assert not stuck.aborted
    stuck.transport.let_go()
    talker.ask(put(1, "k", "again"))
    assert stuck.heard() == [state(1, "again")]


def finish(talker: Talker) -> None:
    """Let a client that reads again have the rest."""
    while talker.lines.busy:
        talker.say_bytes(b"")


@in_loop
async def test_requests_for_more_than_a_client_takes_are_done_in_turns() -> None:
    _, hub = make_hub()
    talker = Talker(hub, bytes_max=200_000)
    talker.ask(put(1, "big", "x" * 100_000))
    ids = itertools.count(2)
    for request in (get, pget, psubscribe, subscribe):
        talker.transport.stuck = True
        begun = len(talker.transport.written)
        talker.say(*[request(next(ids), "big") for _ in range(40)])
        assert talker.lines.busy
        assert len(talker.transport.written) - begun < 500_000
        talker.transport.let_go()
        finish(talker)
        answers = [one for one in talker.heard() if "ack" not in one]
        assert len(answers) == 40


# -- what others publish ----------------------------------------------------------------------------------------------


@in_loop
async def test_events_of_other_protocols_become_values_that_every_client_reads() -> None:
    bus, hub = make_hub()
    talker = Talker(hub)
    talker.ask(psubscribe(1, "?", liveOnly=True))
    json_type = ((b"content-type", b"application/json"),)
    deep = b"[" * 500 + b"]" * 500
    cases: list[tuple[bytes, Any, Any]] = [
        (b"text", (), "text"),
        (b"", (), ""),
        (b"\xff\x00", (), {"base64": "/wA="}),
        (b'{"a":1}', (), '{"a":1}'),
        (b'{"a":1}', json_type, {"a": 1}),
        (b' {\n"a": [1,\r\n2]} ', json_type, {"a": [1, 2]}),
        (
            b'{"a":"gr\xc3\xb6\xc3\x9fe"}',
            ((b"content-type", b"application/cloudevents+json; charset=utf-8"),),
            {"a": "größe"},
        ),
        (b"no JSON", json_type, "no JSON"),
        (b"1e400", json_type, "1e400"),
        (b'"\\ud800"', json_type, '"\\ud800"'),
        (deep, json_type, deep.decode()),
        (b"", json_type, ""),
    ]
    for payload, headers, expected in cases:
        publish(bus.broker, [Event("k", payload, None, headers)])
        assert talker.heard() == [pstate(1, "?", {"k": expected})], payload
    publish(bus.broker, [Event("k", None)])
    assert talker.heard() == [pstate(1, "?", {"k": None})]
    publish(bus.broker, [Event("\udcff", b"x")])
    assert talker.heard() == []


@in_loop
async def test_the_main_profile_is_what_an_endpoint_speaks_unless_told_otherwise() -> None:
    _, hub = make_hub()
    assert Talker(hub).session.profile is MAIN


KEYS = ("a", "a/b", "a/c", "b")
STEPS = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(KEYS), st.integers(0, 2)),
    st.tuples(st.just("delete"), st.sampled_from(KEYS), st.just(0)),
    st.tuples(st.just("pdelete"), st.sampled_from(("a/#", "?")), st.just(0)),
    st.tuples(st.just("psubscribe"), st.sampled_from(("#", "a/?", "b")), st.booleans()),
)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(STEPS, min_size=1, max_size=6)), max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_snapshot_and_the_events_behind_it_are_the_state_without_loss_or_doubling(
    chunks: list[tuple[int, list[tuple[str, str, int]]]], flushed: bool
) -> None:
    @in_loop
    async def talk() -> None:
        bus, hub = make_hub(ack="flushed" if flushed else "written")
        talkers = [Talker(hub) for _ in range(3)]
        subscriptions: dict[tuple[int, int], tuple[str, bool]] = {}
        number = 0
        for who, steps in chunks:
            messages = []
            for kind, key, value in steps:
                number += 1
                if kind == "set":
                    messages.append(put(number, key, value))
                elif kind == "delete":
                    messages.append(delete(number, key))
                elif kind == "pdelete":
                    messages.append(pdelete(number, key))
                else:
                    messages.append(psubscribe(number, key, unique=bool(value)))
                    subscriptions[who, number] = (key, bool(value))
            talkers[who].say(*messages)
        await until(lambda: not any(talker.outbox.waiting for talker in talkers))
        heard = [talker.heard() for talker in talkers]
        for (who, tid), (pattern, unique) in subscriptions.items():
            seen: dict[str, int] = {}
            mine = [one["pState"] for one in heard[who] if one.get("pState", {}).get("transactionId") == tid]
            begins = heard[who].index(ack(tid))
            assert heard[who][begins + 1]["pState"] == mine[0]  # the snapshot is first
            for event in mine:
                for pair in without_sys(event.get("deleted", ())):
                    assert seen.pop(pair["key"]) == pair["value"]  # nothing goes twice, nothing that was not there
                for pair in without_sys(event.get("keyValuePairs", ())):
                    assert not (unique and seen.get(pair["key"], -1) == pair["value"])
                    seen[pair["key"]] = pair["value"]
            now = {key: int(hub.state.find(key) or b"") for key in KEYS if hub.state.find(key) is not None}
            wanted = {key: value for key, value in now.items() if matches(pattern, key)}
            assert seen == wanted
        await bus.broker.close()

    talk()


def matches(pattern: str, key: str) -> bool:
    """Whether a key is meant by one of the patterns above."""
    return pattern == "#" or (pattern == "b" and key == "b") or (pattern == "a/?" and key.startswith("a/"))


def without_sys(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give pairs without those of the server's own keys."""
    return [pair for pair in found if not pair["key"].startswith("$SYS")]
