"""What the messages of a client mean: the rows of specs/worterbuch.md, sections 2 and 4 to 11, on a scripted peer."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from babelbus.core.record import Event
from babelbus.protocols.worterbuch.hub import ELEMENTS_MAX
from babelbus.protocols.worterbuch.privileges import Verifier
from babelbus.protocols.worterbuch.profiles import MAIN, PROFILES
from babelbus.protocols.worterbuch.symbols import Symbols
from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop, turns
from tests.support.web import SECRET, token
from tests.support.worterbuch import (
    Talker,
    ack,
    delete,
    get,
    make_hub,
    named,
    names,
    pairs,
    pdelete,
    pget,
    pstate,
    pstate_deleted,
    psubscribe,
    publish,
    put,
    state,
    state_deleted,
    subscribe,
)

SWITCH = {"protocolSwitchRequest": {"version": 1}}


def ls(tid: int, parent: str | None = None) -> dict[str, Any]:
    return {"ls": {"transactionId": tid, "parent": parent}}


def pls(tid: int, pattern: str | None = None) -> dict[str, Any]:
    return {"pLs": {"transactionId": tid, "parentPattern": pattern}}


def cget(tid: int, key: str) -> dict[str, Any]:
    return named("cGet", tid, key)


def cset(tid: int, key: str, value: object, version: int) -> dict[str, Any]:
    return {"cSet": {"transactionId": tid, "key": key, "value": value, "version": version}}


def unsubscribe(tid: int) -> dict[str, Any]:
    return {"unsubscribe": {"transactionId": tid}}


# -- the worked exchange (section 8) and the greeting (section 4) -----------------------------------------------------


@in_loop
async def test_the_worked_exchange_of_the_specification() -> None:
    _, hub = make_hub()
    talker = Talker(hub, greeted=False)
    assert talker.heard() == [
        {
            "welcome": {
                "info": {
                    "version": "1.2.3",
                    "supportedProtocolVersions": [[0, 11], [1, 1]],
                    "protocolVersion": "0.11",
                    "authorizationRequired": False,
                },
                "clientId": talker.id,
            }
        }
    ]
    assert talker.ask(SWITCH) == [ack(0)]
    assert talker.ask(psubscribe(1, "home/#", liveOnly=False)) == [ack(1), pstate(1, "home/#", {})]
    heard = talker.ask(put(2, "home/lamp", True))
    assert sorted(map(str, heard)) == sorted(map(str, [ack(2), pstate(1, "home/#", {"home/lamp": True})]))
    error = talker.one(get(3, "home/door"))["err"]
    assert (error["transactionId"], error["errorCode"]) == (3, 5)
    assert json.loads(error["metadata"]) == "nothing stored under 'home/door'"
    heard = talker.ask(delete(4, "home/lamp"))
    assert sorted(map(str, heard)) == sorted(
        map(str, [state_deleted(4, True), pstate_deleted(1, "home/#", {"home/lamp": True})])
    )
    assert talker.ask(unsubscribe(1)) == [ack(1)]
    assert talker.ask(put(5, "home/lamp", 1)) == [ack(5)]


@in_loop
async def test_an_unsupported_major_version_is_told_and_ends_the_connection() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    heard = talker.ask(put(1, "a", 1), {"protocolSwitchRequest": {"version": 7}}, put(2, "b", 1))
    assert heard[0] == ack(1)
    assert heard[1]["err"]["errorCode"] == 7
    assert len(heard) == 2
    assert talker.ended is not None
    assert hub.state.find("b") is None


@in_loop
async def test_major_0_has_no_compare_and_set_and_no_locks() -> None:
    _, hub = make_hub()
    for message in (
        cget(1, "a"),
        cset(1, "a", 1, 0),
        named("lock", 1, "a"),
        named("acquireLock", 1, "a"),
        named("releaseLock", 1, "a"),
    ):
        talker = Talker(hub)
        heard = talker.ask({"protocolSwitchRequest": {"version": 0}}, message)
        assert heard[0] == ack(0)
        assert heard[1]["err"]["errorCode"] == 255  # a client of 0.11 knows no 19
        assert talker.ended is not None


@in_loop
async def test_transform_is_refused_and_ends_the_connection() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    error = talker.one({"transform": {"transactionId": 9, "key": "a", "template": {}}})["err"]
    assert (error["transactionId"], error["errorCode"]) == (9, 19)
    assert talker.ended is not None


@pytest.mark.parametrize(
    ("text", "transaction_id"),
    [
        (b"no JSON", None),
        (b"null", None),
        (b'{"nothing":{"transactionId":3}}', 3),
        (b'{"get":{"transactionId":3,"key":"a"},"set":{}}', 3),
        (b"{}", None),
        (b'{"get":{"transactionId":3}}', 3),
        (b'{"get":{"transactionId":3,"key":7}}', 3),
        (b'{"get":{"transactionId":-1,"key":"a"}}', None),
        (b'{"set":{"transactionId":3,"key":"a","value":NaN}}', None),
        (b'{"set":{"transactionId":3,"key":"a","value":"\\ud800"}}', None),
        (b'{"set":{"transactionId":3,"key":"a","value":%b1%b}}' % (b"[" * 10_000, b"]" * 10_000), None),
        (b"[" * 10_000, None),
        (b'{"a":' * 10_000, None),
        (b"\xff\xfe", None),
    ],
)
@in_loop
async def test_what_is_no_message_is_answered_if_it_has_an_id_and_ends_the_connection(
    text: bytes, transaction_id: int | None
) -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.say_bytes(b'{"set":{"transactionId":1,"key":"before","value":1}}\n' + text + b"\n")
    first, *rest = talker.heard()
    assert first == ack(1)
    assert talker.ended is not None
    if transaction_id is None:
        assert rest == []
    else:
        [answer] = rest
        assert (answer["err"]["transactionId"], answer["err"]["errorCode"]) == (transaction_id, 4)
    assert Talker(hub).one(get(1, "before")) == state(1, 1)


@in_loop
async def test_a_line_over_the_limit_ends_the_connection_before_it_is_complete() -> None:
    _, hub = make_hub(message_bytes_max=2000)
    talker, other = Talker(hub), Talker(hub)
    talker.say_bytes(b'{"set":{"transactionId":1,"key":"a","value":"' + b"x" * 2000)
    assert talker.ended is not None
    assert other.ask(put(1, "a", "x" * 1900)) == [ack(1)]


@in_loop
async def test_transaction_ids_are_echoed_and_may_come_again() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.ask(put(2**64 - 1, "a", 1), put(7, "b", 2), put(7, "c", 3), get(7, "a"), get(0, "b")) == [
        ack(2**64 - 1),
        ack(7),
        ack(7),
        state(7, 1),
        state(0, 2),
    ]


# -- keys, patterns, values (section 2) ------------------------------------------------------------------------------


@in_loop
async def test_keys_with_empty_elements_and_any_letters_are_keys_of_their_own() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    keys = ["a//b", "/a", "a/", "/", "", "a?", "#1", "x#y", ".", "..", "*", "+", "größe/ü", "\x00\n\u2028", "a\\b"]
    for number, key in enumerate(keys):
        assert talker.ask(put(number, key, key), get(number, key)) == [ack(number), state(number, key)]
    found = talker.one(pget(1, "#"))["pState"]["keyValuePairs"]
    assert {pair["key"] for pair in found if not pair["key"].startswith("$SYS")} == set(keys)


@in_loop
async def test_the_store_matches_the_key_itself_and_events_do_not() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(put(1, "a", 1), put(2, "a/b", 2), put(3, "a/b/c", 3), put(4, "x//y", 4))
    assert talker.one(pget(1, "a/#")) == pstate(1, "a/#", {"a": 1, "a/b": 2, "a/b/c": 3})
    assert talker.one(pget(1, "?/?/y")) == pstate(1, "?/?/y", {"x//y": 4})
    assert talker.one(pget(1, "a")) == pstate(1, "a", {"a": 1})
    assert talker.one(pget(1, "nothing/#")) == pstate(1, "nothing/#", {})
    watcher = Talker(hub)
    assert watcher.ask(psubscribe(1, "a/#")) == [ack(1), pstate(1, "a/#", {"a": 1, "a/b": 2, "a/b/c": 3})]
    talker.ask(put(5, "a", 5), put(6, "a/b", 6))
    assert watcher.heard() == [pstate(1, "a/#", {"a/b": 6})]


@in_loop
async def test_any_json_value_is_a_value_and_comes_back_as_it_was_written() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    for text in (b"null", b"1.0", b"18446744073709551615", b'{"z":1,"a":[true,null]}', b'"\\u0000"', b"1e300", b"-0"):
        talker.say_bytes(b'{"set":{"transactionId":1,"key":"k","value":%b}}\n' % text)
        talker.say_bytes(b'{"get":{"transactionId":2,"key":"k"}}\n')
        assert bytes(talker.transport.written).endswith(b'{"state":{"transactionId":2,"value":%b}}\n' % text)


KEYED = ("get", "cGet", "delete", "lock", "acquireLock", "releaseLock")
FORBIDDEN = {"?": 0, "a/?": 0, "?/#": 0, "#": 1, "a/#": 1, "#/?": 1, "a/#/b": 1}


@pytest.mark.parametrize(("key", "code"), FORBIDDEN.items())
@in_loop
async def test_wildcards_in_keys_are_refused_by_the_first_from_the_left(key: str, code: int) -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    for name in KEYED:
        assert talker.code(named(name, 1, key)) == code, name
    for message in (
        put(1, key, 1),
        cset(1, key, 1, 0),
        publish(1, key, 1),
        subscribe(1, key),
        subscribe(1, key, liveOnly=True),
    ):
        assert talker.code(message) == code
    assert talker.code(unsubscribe(1)) == 6  # no subscription was left behind
    assert talker.ask({"sPubInit": {"transactionId": 1, "key": key}}) == [ack(1)]
    for _ in range(2):
        assert talker.code({"sPub": {"transactionId": 1, "value": 1}}) == code
    assert talker.ask(put(1, "fine", 1), put(2, key, 1))[1]["err"]["errorCode"] == code


@in_loop
async def test_a_multi_wildcard_before_the_end_of_a_pattern_is_refused_with_or_without_data() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    for _ in range(2):
        for pattern in ("a/#/b", "#/#", "#/?"):
            assert talker.code(pget(1, pattern)) == 1
            assert talker.code(pdelete(1, pattern)) == 1
            assert talker.code(psubscribe(1, pattern)) == 1
            assert talker.code(psubscribe(1, pattern, liveOnly=True)) == 1
            assert talker.code(unsubscribe(1)) == 6
        talker.ask(put(1, "a/x/b", 1))


@in_loop
async def test_parents_take_wildcards_literally_and_parent_patterns_take_one_kind() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(put(1, "a/x/1", 1), put(2, "b/x/2", 1), put(3, "b/x/1", 1))
    assert talker.code(ls(1, "?")) == 5
    assert talker.code(ls(1, "a/#")) == 5
    assert talker.ask({"subscribeLs": {"transactionId": 5, "parent": "?"}}) == [ack(5), names(5)]
    assert sorted(talker.one(pls(1, "?/x"))["lsState"]["children"]) == ["1", "2"]
    assert talker.one(pls(1, "no/?")) == names(1)
    assert talker.code(pls(1, "a/#")) == 1
    assert talker.code(pls(1, "#/a")) == 1


@in_loop
async def test_more_elements_than_the_tree_takes_are_refused_everywhere() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    fits, over = "/" * (ELEMENTS_MAX - 1), "/" * ELEMENTS_MAX
    long_but_flat = "x" * 5000
    assert talker.ask(put(1, fits, 1), put(2, long_but_flat, 2), get(3, fits), delete(4, fits)) == [
        ack(1),
        ack(2),
        state(3, 1),
        state_deleted(4, 1),
    ]
    assert [one["err"]["errorCode"] for one in talker.ask(put(1, over, 1), put(2, over, 1))] == [255, 255]
    for message in (
        get(1, over),
        cset(1, over, 1, 0),
        publish(1, over, 1),
        subscribe(1, over),
        psubscribe(1, over),
        pget(1, over),
        delete(1, over),
        pdelete(1, over + "#"),
        ls(1, over),
        pls(1, over),
        {"subscribeLs": {"transactionId": 1, "parent": over}},
        {"sPubInit": {"transactionId": 1, "key": over}},
        named("lock", 1, over),
        named("acquireLock", 1, over),
        named("releaseLock", 1, over),
    ):
        assert talker.code(message) == 255, message
    base = f"$SYS/clients/{talker.id}"
    talker.ask(put(1, f"{base}/lastWill", pairs({over: 1, "left": 2})), put(2, f"{base}/graveGoods", [over, "gone"]))
    talker.ask(put(3, "gone", 1))
    talker.leave()
    assert hub.state.find("left") == b"2"
    assert hub.state.find("gone") is None
    assert hub.state.find(over) is None


# -- requests (section 5) --------------------------------------------------------------------------------------------


@in_loop
async def test_get_and_delete_of_nothing_is_error_5_and_null_is_a_value() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.code(get(1, "a")) == 5
    assert talker.code(delete(1, "a")) == 5
    assert talker.code(cget(1, "a")) == 5
    assert talker.ask(put(1, "a", None), get(2, "a"), delete(3, "a")) == [
        ack(1),
        state(2, None),
        state_deleted(3, None),
    ]


@in_loop
async def test_pdelete_takes_the_key_itself_and_tells_what_it_took_unless_quiet() -> None:
    _, hub = make_hub()
    talker, watcher = Talker(hub), Talker(hub)
    watcher.ask(psubscribe(9, "?/#", liveOnly=True))
    fill = (put(1, "a", 1), put(2, "a/b", 2))
    talker.ask(*fill)
    assert talker.one(pdelete(3, "a/#")) == pstate_deleted(3, "a/#", {"a": 1, "a/b": 2})
    talker.ask(*fill)
    assert talker.one(pdelete(4, "a/#", quiet=True)) == pstate_deleted(4, "a/#", {})
    assert talker.one(pdelete(5, "a/#")) == pstate_deleted(5, "a/#", {})
    events = [one for one in watcher.heard() if "deleted" in one["pState"]]
    assert events == [pstate_deleted(9, "?/#", {"a/b": 2})] * 2


@in_loop
async def test_publish_is_an_event_and_nothing_else() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(subscribe(1, "a"), subscribe(2, "a", unique=True), {"subscribeLs": {"transactionId": 3, "parent": None}})
    for _ in range(2):
        heard = talker.ask(publish(5, "a", {"x": 1}))
        assert sorted(map(str, heard)) == sorted(map(str, [ack(5), state(1, {"x": 1}), state(2, {"x": 1})]))
    assert talker.code(get(6, "a")) == 5
    assert talker.code(publish(7, "$SYS/x", 1)) == 9
    assert talker.code(publish(7, f"$SYS/clients/{talker.id}/clientName", 1)) == 9


@in_loop
async def test_a_publish_stream_is_bound_to_its_transaction_id() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(subscribe(1, "a"), subscribe(2, "b"))
    assert talker.code({"sPub": {"transactionId": 8, "value": 1}}) == 15
    assert talker.ask({"sPubInit": {"transactionId": 8, "key": "a"}}) == [ack(8)]
    assert sorted(map(str, talker.ask({"sPub": {"transactionId": 8, "value": 1}}))) == sorted(
        map(str, [ack(8), state(1, 1)])
    )
    assert talker.ask({"sPubInit": {"transactionId": 8, "key": "b"}}) == [ack(8)]
    assert state(2, 2) in talker.ask({"sPub": {"transactionId": 8, "value": 2}})
    assert talker.code({"sPubInit": {"transactionId": 8, "key": "$SYS/x"}}) == 9
    assert Talker(hub).code({"sPub": {"transactionId": 8, "value": 1}}) == 15


@in_loop
async def test_compare_and_set_counts_versions() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.code(cset(1, "a", 1, 1)) == 18
    assert talker.ask(cset(1, "a", 1, 0), cget(2, "a"), get(3, "a")) == [
        ack(1),
        {"cState": {"transactionId": 2, "value": 1, "version": 1}},
        state(3, 1),
    ]
    assert talker.code(cset(1, "a", 2, 0)) == 18
    assert talker.ask(cset(1, "a", 2, 1), cget(2, "a")) == [
        ack(1),
        {"cState": {"transactionId": 2, "value": 2, "version": 2}},
    ]
    assert talker.code(put(4, "a", 3)) == 17
    assert [one.get("err", {}).get("errorCode") for one in talker.ask(put(4, "b", 0), put(5, "a", 3))] == [None, 17]
    assert talker.ask(publish(6, "a", 3), put(7, "p", 1), cget(8, "p"), cset(9, "p", 2, 0), delete(10, "a")) == [
        ack(6),
        ack(7),
        {"cState": {"transactionId": 8, "value": 1, "version": 0}},
        ack(9),
        state_deleted(10, 2),
    ]
    assert talker.ask(put(11, "a", "plain"), pget(12, "p")) == [ack(11), pstate(12, "p", {"p": 2})]


@in_loop
async def test_ls_lists_children_and_knows_what_does_not_exist() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(put(1, "a/b/c", 1), put(2, "a/d", 1), put(3, "x", 1))
    assert sorted(talker.one(ls(1))["lsState"]["children"]) == ["$SYS", "a", "x"]
    assert sorted(talker.one({"ls": {"transactionId": 1}})["lsState"]["children"]) == ["$SYS", "a", "x"]
    assert sorted(talker.one(ls(1, "a"))["lsState"]["children"]) == ["b", "d"]
    assert talker.one(ls(1, "x")) == names(1)
    assert talker.code(ls(1, "none")) == 5
    assert talker.code(ls(1, "")) == 5
    talker.ask(put(4, "/z", 1))
    assert talker.one(ls(1, "")) == names(1, "z")
    assert sorted(talker.one(pls(1))["lsState"]["children"]) == ["", "$SYS", "a", "x"]
    talker.ask(delete(5, "a/b/c"), delete(6, "a/d"))
    assert talker.code(ls(1, "a")) == 5


# -- locks (section 5.6) ---------------------------------------------------------------------------------------------


@in_loop
async def test_locks_are_taken_refused_released_and_say_nothing_of_values() -> None:
    _, hub = make_hub()
    one, two = Talker(hub), Talker(hub)
    assert one.ask(named("lock", 1, "a"), named("lock", 2, "a")) == [ack(1), ack(2)]
    assert two.code(named("lock", 1, "a")) == 20
    assert two.code(named("releaseLock", 1, "a")) == 20
    assert two.code(named("releaseLock", 1, "free")) == 21
    assert two.ask(put(2, "a", 1), named("lock", 3, "a/b")) == [ack(2), ack(3)]
    assert one.code(get(3, "$SYS/locks/none")) == 5
    assert one.one(get(3, "$SYS/locks/a")) == state(3, one.id)
    assert one.ask(named("releaseLock", 4, "a")) == [ack(4)]
    assert one.code(get(3, "$SYS/locks/a")) == 5
    assert one.code(named("releaseLock", 5, "a")) == 21


@in_loop
async def test_who_waits_longest_for_a_lock_is_next_and_all_waits_of_a_client_are_one_place() -> None:
    _, hub = make_hub()
    holder, first, second = Talker(hub), Talker(hub), Talker(hub)
    holder.ask(named("acquireLock", 1, "a"))
    assert first.ask(named("acquireLock", 1, "a")) == []
    assert second.ask(named("acquireLock", 1, "a")) == []
    assert first.ask(named("acquireLock", 2, "a"), put(3, "x", 1)) == [ack(3)]  # other requests go on
    assert holder.ask(named("releaseLock", 2, "a")) == [ack(2)]
    assert first.heard() == [ack(1), ack(2)]
    assert second.heard() == []
    assert holder.ask(named("acquireLock", 3, "a")) == []
    first.leave()  # a connection that ends gives back
    assert second.heard() == [ack(1)]
    assert holder.heard() == []
    second.leave()
    assert holder.heard() == [ack(3)]


@in_loop
async def test_a_place_in_the_queue_is_given_up_with_releaselock() -> None:
    _, hub = make_hub()
    holder, waiter = Talker(hub), Talker(hub)
    holder.ask(named("lock", 1, "a"))
    waiter.ask(named("acquireLock", 1, "a"), named("acquireLock", 2, "a"))
    heard = waiter.ask(named("releaseLock", 3, "a"))
    found = [(one["err"]["transactionId"], one["err"]["errorCode"]) for one in heard]
    assert found == [(1, 22), (2, 22), (3, 20)]
    assert all(isinstance(json.loads(one["err"]["metadata"]), str) for one in heard)
    holder.ask(named("releaseLock", 2, "a"))
    assert waiter.heard() == []


@in_loop
async def test_a_grant_is_never_dropped_although_events_are() -> None:
    _, hub = make_hub(queue_bytes_max=1000, slow="discard")
    holder, waiter = Talker(hub), Talker(hub)
    waiter.ask(subscribe(1, "x"), named("lock", 2, "mine"))
    holder.ask(named("lock", 1, "a"))
    waiter.ask(named("acquireLock", 3, "a"))
    waiter.transport.stuck = True
    for number in range(100):
        holder.ask(put(number, "x", "y" * 100))
    holder.ask(named("releaseLock", 2, "a"))
    heard = waiter.heard()
    assert heard[-1] == ack(3)
    assert 0 < len(heard) < 50
    assert not waiter.aborted


# -- subscriptions (section 7) ---------------------------------------------------------------------------------------


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
async def test_a_transaction_id_that_comes_again_replaces_its_subscription() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    assert talker.ask(subscribe(1, "a"), subscribe(1, "b")) == [ack(1), ack(1)]
    assert talker.ask(put(2, "a", 1)) == [ack(2)]
    assert state(1, 2) in talker.ask(put(3, "b", 2))
    assert talker.ask(unsubscribe(1)) == [ack(1)]
    assert talker.code(unsubscribe(1)) == 6


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
    await _until(lambda: watcher.session.subscribers[1]._timer is None)
    assert watcher.heard() == [pstate_deleted(1, "a/#", {"a/y": 2})]
    talker.ask(put(5, "a/z", 1))
    watcher.ask(unsubscribe(1))
    assert watcher.heard() == []


async def _until(condition: Any) -> None:
    while not condition():
        await turns(1)


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
    await _until(lambda: talker.session.subscribers[1]._timer is None)
    assert talker.heard() == [pstate(1, "a", {"a": 1})]
    assert talker.session.subscribers[2]._pending


# -- a client that does not read (section 7.7) -----------------------------------------------------------------------


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
    for request in (get(2, "big"), pget(2, "big"), psubscribe(2, "big"), subscribe(2, "big")):
        talker.transport.stuck = True
        begun = len(talker.transport.written)
        talker.say(*[request] * 40)
        assert talker.lines.busy
        assert len(talker.transport.written) - begun < 500_000
        talker.transport.let_go()
        finish(talker)
        answers = [one for one in talker.heard() if "ack" not in one]
        assert len(answers) == 40


# -- $SYS, wills and grave goods (section 9) -------------------------------------------------------------------------


@in_loop
async def test_the_server_and_its_clients_are_shown_below_sys() -> None:
    bus, hub = make_hub(name="north")
    tcp, unix = Talker(hub), Talker(hub, transport_name="UNIX", address=None)
    tcp.ask(SWITCH, subscribe(1, "k"), psubscribe(2, "a/?/#"), psubscribe(3, "#"), psubscribe(4, "$SYS/#"))
    hub.tick()
    tcp.heard()
    found = {p["key"]: p["value"] for p in unix.one(pget(1, "$SYS/#"))["pState"]["keyValuePairs"]}
    shown = {key.removeprefix("$SYS/"): value for key, value in found.items()}
    assert shown["version"] == "1.2.3"
    assert shown["license"] == "Apache-2.0"
    assert shown["source-code"].startswith("https://")
    assert shown["protocolVersion"] == [[0, 11], [1, 1]]
    assert shown["name"] == "north"
    assert shown["uptime"] == 0
    assert shown["store/values/count"] == len(hub.state)
    assert shown["clients"] == 2
    assert shown["subscriptions"] == 2
    mine = f"clients/{tcp.id}"
    assert shown[f"{mine}/protocol"] == "TCP"
    assert shown[f"{mine}/address"] == "10.0.0.1:5"
    assert shown[f"{mine}/protocolVersion"] == 1
    assert shown[f"{mine}/connectedSince"] == "2023-11-14T22:13:20.000000000+00:00"
    assert shown[f"{mine}/subscriptions"] == 2
    assert shown[f"{mine}/subscriptions/k"] == 1
    assert shown[f"{mine}/subscriptions/a/%3F/%23"] == 2
    assert shown[f"clients/{unix.id}/protocol"] == "UNIX"
    assert shown[f"clients/{unix.id}/address"] is None
    tcp.ask(unsubscribe(1), unsubscribe(2), unsubscribe(3))
    assert unix.code(get(1, f"$SYS/{mine}/subscriptions")) == 5
    assert unix.one(get(1, "$SYS/subscriptions")) == state(1, 0)
    tcp.leave()
    assert unix.one(get(1, "$SYS/clients")) == state(1, 1)
    assert unix.one(pget(1, f"$SYS/{mine}/#")) == pstate(1, f"$SYS/{mine}/#", {})
    bus.clock.advance(5)
    hub.tick()
    assert unix.one(get(1, "$SYS/uptime")) == state(1, 5)


@in_loop
async def test_without_extended_monitoring_less_is_shown() -> None:
    _, hub = make_hub(extended_monitoring=False)
    talker = Talker(hub)
    talker.ask(SWITCH, subscribe(1, "k"), named("lock", 2, "k"))
    shown = {p["key"] for p in talker.one(pget(1, "$SYS/clients/#"))["pState"]["keyValuePairs"]}
    assert shown == {"$SYS/clients", f"$SYS/clients/{talker.id}/protocol", f"$SYS/clients/{talker.id}/address"}
    assert talker.code(get(1, "$SYS/locks/k")) == 5


@in_loop
async def test_only_ones_own_corner_of_sys_can_be_written() -> None:
    _, hub = make_hub()
    talker, other = Talker(hub), Talker(hub)
    own = f"$SYS/clients/{talker.id}"
    for key in (
        "$SYS",
        "$SYS/version",
        "$SYS/x/y",
        f"{own}/protocol",
        f"$SYS/clients/{other.id}/clientName",
        f"$SYS/clients/{other.id}/lastWill",
        own,
    ):
        assert talker.code(put(1, key, 1)) == 9, key
        assert talker.code(cset(1, key, 1, 0)) == 9
        assert talker.code(delete(1, key)) == 9
        assert talker.code(pdelete(1, key)) == 9
        assert talker.code({"sPubInit": {"transactionId": 1, "key": key}}) == 9
    for pattern in ("$SYS/#", "$SYS/clients/?/graveGoods", f"{own}/#", "$SYS/?"):
        assert talker.code(pdelete(1, pattern)) == 9
    for name in ("graveGoods", "lastWill", "clientName"):
        assert talker.ask(put(1, f"{own}/{name}", []), delete(2, f"{own}/{name}")) == [ack(1), state_deleted(2, [])]
    assert talker.ask(put(1, f"{own}/clientName/x", 1)) == [ack(1)]
    assert talker.ask(put(1, "$SYSTEM/x", 1), put(2, "x/$SYS", 1)) == [ack(1), ack(2)]
    before = talker.one(get(1, "$SYS/version"))
    talker.ask(pdelete(2, "#"), pdelete(3, "?/#"), pdelete(4, "?/version"))
    assert talker.one(get(1, "$SYS/version")) == before


@in_loop
async def test_a_client_that_is_gone_leaves_in_the_order_of_the_specification() -> None:
    _, hub = make_hub()
    watcher, talker, waiter = Talker(hub), Talker(hub), Talker(hub)
    own = f"$SYS/clients/{talker.id}"
    talker.ask(
        put(1, f"{own}/graveGoods", ["g/#", "bad/#/x", "$SYS/#"]),
        put(2, f"{own}/lastWill", pairs({"w": "will", "g/kept": 1, "$SYS/version": "hacked", "c": 5, "bad/?": 1})),
        put(3, "g/one", 1),
        cset(4, "c", 1, 0),
        named("lock", 5, "l"),
        subscribe(6, "k"),
    )
    waiter.ask(named("acquireLock", 1, "l"))
    watcher.ask(psubscribe(1, "#", liveOnly=True))
    talker.leave()
    assert waiter.heard() == [ack(1)]
    events: list[tuple[str, object]] = []
    for one in watcher.heard():
        for kind in ("keyValuePairs", "deleted"):
            sign = "-" if kind == "deleted" else ""
            events += [(sign + pair["key"], pair["value"]) for pair in one["pState"].get(kind, [])]
    keys = [key for key, _ in events]
    order = ["$SYS/locks/l", "$SYS/clients", f"-{own}/lastWill", "-g/one", "w", "g/kept", "c"]
    places = [keys.index(key) for key in order]
    assert places == sorted(places)
    assert keys[-1] == "$SYS/subscriptions"
    assert dict(events)["g/kept"] == 1
    assert hub.state.get_version("c") == (b"5", 0)
    assert hub.state.find("$SYS/version") == b'"1.2.3"'
    assert hub.state.find("bad/?") is None


@in_loop
async def test_wills_can_be_taken_back_and_what_has_another_shape_is_none() -> None:
    _, hub = make_hub()
    changes: tuple[Callable[[str], dict[str, Any]], ...] = (
        lambda path: delete(2, path),
        lambda path: pdelete(2, path),
        lambda path: put(2, path, []),
        lambda path: put(2, path, "not a list"),
        lambda path: put(2, path, [{"key": 1, "value": 2}]),
    )
    for change in changes:
        talker = Talker(hub)
        path = f"$SYS/clients/{talker.id}/lastWill"
        talker.ask(put(1, path, pairs({"left": 1})), change(path))
        talker.leave()
        assert hub.state.find("left") is None


# -- authorisation (section 10) --------------------------------------------------------------------------------------


def locked(**options: Any) -> Any:
    return make_hub(verifier=Verifier(SECRET), shared_secret=SECRET, **options)


def authorize(**granted: object) -> dict[str, Any]:
    return {"authorizationRequest": {"authToken": token(granted)}}


@in_loop
async def test_without_a_token_nothing_is_done_but_the_switch() -> None:
    _, hub = locked()
    talker = Talker(hub, greeted=False)
    assert talker.heard()[0]["welcome"]["info"]["authorizationRequired"] is True
    assert talker.ask(SWITCH) == [ack(0)]
    heard = talker.ask(put(5, "a", 1), put(6, "b", 1))
    assert [(one["err"]["transactionId"], one["err"]["errorCode"]) for one in heard] == [(5, 11)]
    assert talker.ended is not None
    assert hub.state.find("a") is None
    for shake in ({"supportedProtocolVersions": [{"major": 0, "minor": 6}], "lastWill": [], "graveGoods": []},):
        old = Talker(hub)
        assert old.ask({"handshakeRequest": shake})[0]["err"]["errorCode"] == 11
        assert old.ended is not None


@pytest.mark.parametrize("wrong", ["nonsense", "", "a.b.c"])
@in_loop
async def test_a_token_that_proves_nothing_ends_the_connection(wrong: str) -> None:
    _, hub = locked()
    talker = Talker(hub)
    error = talker.one({"authorizationRequest": {"authToken": wrong}})["err"]
    assert (error["transactionId"], error["errorCode"]) == (0, 14)
    assert talker.ended is not None
    other = Talker(hub)
    expired = {"authorizationRequest": {"authToken": token({"read": ["#"]}, exp=1.0)}}
    assert other.one(expired)["err"]["errorCode"] == 14
    assert other.ended is not None
    forged = {"authorizationRequest": {"authToken": token({"read": ["#"]}, key=SECRET + "!")}}
    third = Talker(hub)
    assert third.one(forged)["err"]["errorCode"] == 14


@in_loop
async def test_a_second_authorization_ends_the_connection() -> None:
    _, hub = locked()
    talker = Talker(hub)
    assert talker.ask(authorize(read=["#"])) == [{"authorized": {"transactionId": 0}}]
    assert talker.one(authorize(read=["#"]))["err"]["errorCode"] == 12
    assert talker.ended is not None


def asked(name: str) -> dict[str, Any]:
    """One request of each kind about `p/x`, or what is below it."""
    return {
        "get": get(1, "p/x"),
        "cGet": cget(1, "p/x"),
        "subscribe": subscribe(1, "p/x"),
        "pGet": pget(1, "p/?"),
        "pSubscribe": psubscribe(1, "p/?"),
        "ls": ls(1, "p"),
        "pLs": pls(1, "p"),
        "subscribeLs": {"subscribeLs": {"transactionId": 1, "parent": "p"}},
        "set": put(1, "p/x", 1),
        "cSet": cset(1, "p/c", 1, 0),
        "publish": publish(1, "p/x", 1),
        "sPubInit": {"sPubInit": {"transactionId": 1, "key": "p/x"}},
        "lock": named("lock", 1, "p/x"),
        "acquireLock": named("acquireLock", 1, "p/x"),
        "releaseLock": named("releaseLock", 1, "p/x"),
        "delete": delete(1, "p/x"),
        "pDelete": pdelete(1, "p/?"),
    }[name]


READS = ("get", "cGet", "subscribe", "pGet", "pSubscribe", "ls", "pLs", "subscribeLs")
WRITES = ("set", "cSet", "publish", "sPubInit", "lock", "acquireLock", "releaseLock")
DELETES = ("delete", "pDelete")


@pytest.mark.parametrize(
    ("privilege", "name"),
    [("read", name) for name in READS] + [("write", name) for name in WRITES] + [("delete", name) for name in DELETES],
)
@in_loop
async def test_each_request_needs_its_privilege_and_no_other(privilege: str, name: str) -> None:
    _, hub = locked()
    admin = Talker(hub)
    admin.ask(authorize(read=["#"], write=["#"], delete=["#"]), put(1, "p/x", 1))
    right = Talker(hub)
    right.ask(authorize(**{privilege: ["p/?"]}))
    if name == "releaseLock":
        right.ask(named("lock", 1, "p/x"))
    assert right.code(asked(name)) is None
    admin.ask(put(1, "p/x", 1))
    others = {"read": ["p/#"], "write": ["p/#"], "delete": ["p/#"]}
    del others[privilege]
    for granted in (others, {privilege: ["q/#", "p"]}):
        wrong = Talker(hub)
        wrong.ask(authorize(**granted))
        assert wrong.code(asked(name)) == 14
        assert wrong.ended is None


@in_loop
async def test_patterns_are_covered_element_by_element() -> None:
    _, hub = locked()
    talker = Talker(hub)
    talker.ask(authorize(read=["hello/?", "deep/#"], write=["$SYS/clients/#"]))
    assert talker.code(pget(1, "hello/?")) is None
    assert talker.code(pget(1, "hello/#")) == 14
    assert talker.code(pget(1, "deep/#")) is None
    assert talker.code(get(1, "deep")) == 14
    assert talker.code(ls(1)) == 14
    assert talker.code(psubscribe(1, "#")) == 14
    assert talker.code(put(1, f"$SYS/clients/{talker.id}/lastWill", [])) is None
    assert talker.code(unsubscribe(7)) == 6  # needs no privilege


@in_loop
async def test_a_public_key_is_no_shared_secret() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from babelbus.protocols.worterbuch.privileges import hashed_token

    key = Ed25519PrivateKey.generate().public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    _, hub = make_hub(verifier=Verifier(pem), shared_secret=pem)
    talker = Talker(hub, profile=PROFILES["0.7"])
    heard = talker.one({"authenticationRequest": {"authToken": hashed_token(talker.id, pem)}})
    assert heard["err"]["errorCode"] == 10
    assert talker.ended is not None


@in_loop
async def test_a_client_of_0_7_proves_the_shared_secret_by_its_hash() -> None:
    from babelbus.protocols.worterbuch.privileges import hashed_token

    _, hub = locked()
    talker = Talker(hub, profile=PROFILES["0.7"])
    good = {"authenticationRequest": {"authToken": hashed_token(talker.id, SECRET)}}
    assert talker.ask(good, put(1, "a", 1)) == [{"authenticated": {"transactionId": 0}}, ack(1)]
    wrong = Talker(hub, profile=PROFILES["0.7"])
    assert wrong.one(good)["err"]["errorCode"] == 10
    assert wrong.ended is not None


# -- older dialects (section 13) -------------------------------------------------------------------------------------

SHAKE = {
    "handshakeRequest": {
        "supportedProtocolVersions": [{"major": 0, "minor": 3}, {"major": 0, "minor": 6}],
        "lastWill": [{"key": "left", "value": 1}],
        "graveGoods": ["gone/#"],
    }
}


def shaken(minor: int) -> dict[str, Any]:
    return {
        "handshake": {
            "protocolVersion": {"major": 0, "minor": minor},
            "separator": "/",
            "wildcard": "?",
            "multiWildcard": "#",
        }
    }


def shake(minor: int) -> dict[str, Any]:
    versions = [{"major": 0, "minor": minor}]
    return {"handshakeRequest": {"supportedProtocolVersions": versions, "lastWill": [], "graveGoods": []}}


@in_loop
async def test_a_handshake_is_answered_first_and_what_it_leaves_is_done() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.6"], greeted=False)
    hub.tick()
    hub.tick()
    assert talker.heard() == []  # not even a keepalive comes before it
    assert talker.ask(put(1, "gone/x", 1)) == [ack(1)]
    assert talker.ask(SHAKE) == [shaken(6)]
    assert talker.ask(get(2, "gone/x")) == [{"state": {"transactionId": 2, "keyValue": {"key": "gone/x", "value": 1}}}]
    talker.leave()
    assert hub.state.find("gone/x") is None
    assert hub.state.find("left") == b"1"


@in_loop
async def test_a_second_handshake_replaces_will_and_goods() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.6"], greeted=False)
    talker.ask(SHAKE, shake(6))
    talker.leave()
    assert hub.state.find("left") is None


@in_loop
async def test_a_handshake_without_a_common_version_is_error_7_and_the_connection_stays() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.6"], greeted=False)
    assert talker.one(shake(9))["err"]["errorCode"] == 7
    assert talker.ask(shake(5)) == [shaken(5)]


@in_loop
async def test_a_handshake_on_a_main_endpoint_changes_the_dialect_of_what_follows_and_of_nobody_else() -> None:
    _, hub = make_hub()
    talker, other = Talker(hub), Talker(hub)
    other.ask(subscribe(1, "k"))
    heard = talker.ask(put(2, "k", 7), subscribe(1, "k"), get(3, "k"), shake(6), get(4, "k"), put(5, "k", 8))
    pair = {"key": "k", "value": 8}
    assert heard[:4] == [ack(2), ack(1), state(1, 7), state(3, 7)]
    assert shaken(6) in heard[4:6]  # an event may come between
    assert {"state": {"transactionId": 4, "keyValue": {"key": "k", "value": 7}}} in heard
    assert {"state": {"transactionId": 1, "keyValue": pair}} in heard
    assert other.heard() == [state(1, 7), state(1, 8)]


@in_loop
async def test_a_main_endpoint_may_wait_for_a_handshake_before_it_greets() -> None:
    _, hub = make_hub(handshake_wait_seconds=0.001)
    old, new, silent = (Talker(hub, greeted=False) for _ in range(3))
    assert old.heard() == new.heard() == []
    assert old.ask(shake(3)) == [shaken(3)]
    heard = new.ask(put(1, "a", 1))
    assert ("welcome" in heard[0], heard[1]) == (True, ack(1))
    await _until(lambda: silent.transport.written)
    [welcome] = silent.heard()
    assert "welcome" in welcome
    assert old.heard() == new.heard() == []


@in_loop
async def test_a_client_of_0_3_hears_of_no_deletions() -> None:
    _, hub = make_hub()
    talker, other = Talker(hub, profile=PROFILES["0.3"], greeted=False), Talker(hub)
    talker.ask(shake(3), subscribe(1, "k"), psubscribe(2, "?"), psubscribe(3, "?", aggregateEvents=0))
    other.ask(put(1, "k", 1), delete(2, "k"))
    await _until(lambda: talker.session.subscribers[3]._timer is None)
    heard = talker.heard()
    assert {"state": {"transactionId": 1, "keyValue": {"key": "k", "value": 1}}} in heard
    assert not [one for one in heard if "deleted" in json.dumps(one)]
    assert pstate(3, "?", {"k": 1}) in heard
    assert talker.ask(delete(4, "k"))[0]["err"]["errorCode"] == 255  # no message of 0.3; 19 came later
    assert talker.ended is not None


@in_loop
async def test_deletions_carry_the_pair_in_old_dialects() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.9"])
    talker.ask(put(1, "k", 1), subscribe(2, "k", liveOnly=True))
    pair = {"key": "k", "value": 1}
    heard = talker.ask(delete(3, "k"))
    assert {"state": {"transactionId": 3, "deleted": pair}} in heard
    assert {"state": {"transactionId": 2, "deleted": pair}} in heard


@in_loop
async def test_old_servers_had_one_code_for_wildcards_in_keys_and_one_for_a_second_hash() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.4"], greeted=False)
    talker.ask(shake(4))
    assert talker.code(put(1, "a/#", 1)) == 0
    assert talker.code(pget(1, "#/#")) == 2
    assert talker.code(pget(1, "#/a")) == 1


@in_loop
async def test_files_on_the_server_are_for_no_client() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.6"], greeted=False)
    talker.ask(shake(6))
    for name in ("export", "import"):
        assert talker.code({name: {"transactionId": 1, "path": "/etc/passwd"}}) == 255
    assert talker.ended is None


@pytest.mark.parametrize("name", ["0.7", "0.7-0.42", "0.7-0.43", "0.8", "0.9", "0.10", "0.11"])
@in_loop
async def test_an_exact_endpoint_greets_with_its_version_alone(name: str) -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES[name], greeted=False)
    info = talker.heard()[0]["welcome"]["info"]
    assert info["protocolVersion"] == name.partition("-")[0]
    assert "supportedProtocolVersions" not in info
    hub.tick()
    hub.tick()
    assert (talker.transport.written[-3:] == b'""\n') == PROFILES[name].keepalive


@in_loop
async def test_a_server_with_keepalives_sends_one_whenever_it_said_nothing_for_a_second() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.10"])
    hub.tick()
    assert talker.heard() == []  # it has greeted within this second
    hub.tick()
    hub.tick()
    assert talker.heard() == ["", ""]
    talker.ask(put(1, "a", 1))
    hub.tick()
    assert talker.heard() == []


@in_loop
async def test_a_client_that_ceases_its_keepalives_is_cut_and_one_that_never_sent_any_is_not() -> None:
    _, hub = make_hub()
    never, ceased, goes_on = (Talker(hub, profile=PROFILES["0.10"]) for _ in range(3))
    for one in (ceased, goes_on):
        one.say_bytes(b'""\n')
    for _ in range(8):
        goes_on.say_bytes(b'""\n')
        hub.tick()
    assert [never.aborted, ceased.aborted, goes_on.aborted] == [False, True, False]


@in_loop
async def test_the_clients_own_characters_are_translated_both_ways() -> None:
    _, hub = make_hub()
    talker = Talker(hub, profile=PROFILES["0.4"], symbols=Symbols(".", "*", ">"), greeted=False)
    other = Talker(hub)
    assert talker.ask(shake(4))[0]["handshake"]["separator"] == "."
    assert talker.ask(put(1, "a.b", 1), psubscribe(2, "a.>")) == [ack(1), ack(2), pstate(2, "a.>", {"a.b": 1})]
    assert other.one(get(1, "a/b")) == state(1, 1)
    other.ask(put(2, "a/c", 2), put(3, "a/x.y", 3), put(4, "a/*", 4))
    assert talker.heard() == [pstate(2, "a.>", {"a.c": 2})]  # the others have no name in these characters
    assert talker.code(put(5, "a/b", 1)) == 255
    assert talker.code(put(5, "a.*", 1)) == 0


# -- when the disk refuses or takes its time -------------------------------------------------------------------------


@in_loop
async def test_changes_that_the_log_refuses_are_answered_with_error_3_and_do_not_hold() -> None:
    files = FaultyFiles()
    bus, hub = make_hub(files)
    talker, watcher = Talker(hub), Talker(hub)
    talker.ask(put(1, "k", "old"), put(2, "gone", 1))
    watcher.ask(psubscribe(1, "?", liveOnly=True))
    for chunk in (
        [put(3, "k", "new"), put(4, "n", 1)],  # nothing but sets
        [put(3, "k", "new"), get(4, "k"), delete(5, "gone"), cset(6, "c", 1, 0), pget(7, "k")],
    ):
        files.fail("pwrite")
        heard = talker.ask(*chunk)
        for message, answer in zip(chunk, heard, strict=True):
            name = next(iter(message))
            if name == "get":
                assert answer == state(4, "old")
            elif name == "pGet":
                assert answer == pstate(7, "k", {"k": "old"})
            else:
                assert answer["err"]["errorCode"] == 3
                assert answer["err"]["transactionId"] == message[name]["transactionId"]
        assert hub.state.find("k") == b'"old"'
        assert hub.state.find("gone") == b"1"
        assert hub.state.find("c") is None
        assert hub.state.find("n") is None
    assert watcher.heard() == []
    assert talker.ask(put(9, "k", "new")) == [ack(9)]
    assert watcher.heard() == [pstate(1, "?", {"k": "new"})]
    await bus.die()


@in_loop
async def test_answers_wait_for_the_flush_and_keep_their_order() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    bus, hub = make_hub(files, ack="flushed")
    talker, reader = Talker(hub), Talker(hub)
    gate.shut()
    talker.say(put(1, "k", 1))
    await gate.reached()
    talker.say(get(2, "k"), subscribe(3, "k"), put(4, "k", 2), ls(5, "none"))
    reader.say(get(1, "k"))
    await turns()
    assert talker.heard() == reader.heard() == []  # nobody sees what might not be there after a crash
    gate.open()
    await _until(lambda: not talker.outbox.waiting)
    heard = talker.heard()
    replies = [one for one in heard if one != state(3, 2)]
    assert replies[:4] == [ack(1), state(2, 1), ack(3), state(3, 1)]
    assert replies[4] == ack(4)
    assert replies[5]["err"]["errorCode"] == 5
    assert heard.count(state(3, 2)) == 1
    assert heard.index(state(3, 2)) > heard.index(state(3, 1))
    assert len(reader.heard()) == 1
    await bus.broker.close()


@in_loop
async def test_a_failed_flush_is_error_3_and_a_subscription_begins_with_what_is_left() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    bus, hub = make_hub(files, ack="flushed")
    talker = Talker(hub)
    talker.say(put(1, "k", "old"))
    await _until(lambda: not talker.outbox.waiting)
    assert talker.heard() == [ack(1)]
    gate.shut()
    files.fail("flush", drop=True, suffix=".log")
    talker.say(put(2, "k", "lost"), subscribe(3, "k"), psubscribe(4, "k"), get(5, "k"))
    await gate.reached()
    gate.open()
    await _until(lambda: not talker.outbox.waiting)
    heard = talker.heard()
    assert heard[0]["err"]["errorCode"] == 3
    assert heard[1:] == [ack(3), state(3, "old"), ack(4), pstate(4, "k", {"k": "old"}), state(5, "old")]
    talker.say(put(6, "k", "new"))
    await _until(lambda: not talker.outbox.waiting)
    assert state(3, "new") in talker.heard()
    await bus.broker.close()


# -- what others publish ---------------------------------------------------------------------------------------------


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
        (b"\xff\x00", (), "/wA="),
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
        bus.broker.publish([Event("k", payload, None, headers)])
        assert talker.heard() == [pstate(1, "?", {"k": expected})], payload
    bus.broker.publish([Event("k", None)])
    assert talker.heard() == [pstate(1, "?", {"k": None})]
    bus.broker.publish([Event("\udcff", b"x")])
    assert talker.heard() == []


@in_loop
async def test_the_main_profile_is_what_an_endpoint_speaks_unless_told_otherwise() -> None:
    _, hub = make_hub()
    assert Talker(hub).session.profile is MAIN
