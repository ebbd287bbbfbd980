"""What the messages of a client mean: the rows of docs/specifications/worterbuch.md, 2, 4 to 6 and 9, scripted."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from babelbus import __version__
from babelbus.core.state.patterns import ELEMENTS_MAX, KEY_BYTES_MAX
from babelbus.protocols.worterbuch.testament import ENTRIES_MAX
from tests.support.bus import in_loop
from tests.support.worterbuch import (
    SWITCH,
    Talker,
    ack,
    cget,
    cset,
    delete,
    get,
    ls,
    make_hub,
    named,
    names,
    pairs,
    pdelete,
    pget,
    pls,
    pstate,
    pstate_deleted,
    psubscribe,
    publish,
    put,
    state,
    state_deleted,
    subscribe,
    unsubscribe,
)

# -- the worked exchange (section 8) and the greeting (section 4) -----------------------------------------------------


@in_loop
async def test_the_worked_exchange_of_the_specification() -> None:
    _, hub = make_hub()
    talker = Talker(hub, greeted=False)
    assert talker.heard() == [
        {
            "welcome": {
                "info": {
                    "version": __version__,
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


# -- keys, patterns, values (section 2) -------------------------------------------------------------------------------


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
@pytest.mark.parametrize("bytes_max", [256, 5000])
async def test_the_longest_key_is_a_setting(bytes_max: int) -> None:
    _, hub = make_hub(key_bytes_max=bytes_max)
    talker = Talker(hub)
    for letter in ("x", "ü", "𝄞"):
        fits = letter * (bytes_max // len(letter.encode()))
        assert talker.ask(put(1, fits, 1), put(2, fits, 2)) == [ack(1), ack(2)]
        over = fits + "x" * (bytes_max % len(letter.encode()) + 1)
        assert [one["err"]["errorCode"] for one in talker.ask(put(1, over, 1), put(2, over, 2))] == [255, 255]


LONGEST = KEY_BYTES_MAX // 2 * "ü"


@in_loop
@pytest.mark.parametrize(
    ("fits", "over"), [("/" * (ELEMENTS_MAX - 1), "/" * ELEMENTS_MAX), (LONGEST[:-1] + "xx", LONGEST + "x")]
)
async def test_longer_keys_and_patterns_than_the_tree_takes_are_refused_everywhere(fits: str, over: str) -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    long_but_flat = "x" * KEY_BYTES_MAX
    assert talker.ask(put(1, fits, 1), put(2, long_but_flat, 2), get(3, fits), delete(4, fits)) == [
        ack(1),
        ack(2),
        state(3, 1),
        state_deleted(4, 1),
    ]
    assert [one["err"]["errorCode"] for one in talker.ask(put(1, over, 1), put(2, over, 1))] == [255, 255]
    assert [one["err"]["errorCode"] for one in talker.ask(put(1, over, 1), get(2, over))] == [255, 255]
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


# -- requests (section 5) ---------------------------------------------------------------------------------------------


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


# -- locks (section 5.6) ----------------------------------------------------------------------------------------------


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


# -- $SYS, wills and grave goods (section 9) --------------------------------------------------------------------------


@in_loop
async def test_the_server_and_its_clients_are_shown_below_sys() -> None:
    bus, hub = make_hub(instance_name="north")
    tcp, unix = Talker(hub), Talker(hub, transport_name="UNIX", address=None)
    tcp.ask(SWITCH, subscribe(1, "k"), psubscribe(2, "a/?/#"), psubscribe(3, "#"), psubscribe(4, "$SYS/#"))
    hub.tick()
    tcp.heard()
    found = {p["key"]: p["value"] for p in unix.one(pget(1, "$SYS/#"))["pState"]["keyValuePairs"]}
    shown = {key.removeprefix("$SYS/"): value for key, value in found.items()}
    assert shown["version"] == __version__
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
        "$SYS/clients/?/graveGoods",
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
    assert hub.state.find("$SYS/version") == f'"{__version__}"'.encode()
    assert hub.state.find("bad/?") is None


@in_loop
async def test_wills_can_be_taken_back() -> None:
    _, hub = make_hub()
    changes: tuple[Callable[[str], dict[str, Any]], ...] = (
        lambda path: delete(2, path),
        lambda path: pdelete(2, path),
        lambda path: put(2, path, []),
    )
    for change in changes:
        talker = Talker(hub)
        path = f"$SYS/clients/{talker.id}/lastWill"
        talker.ask(put(1, path, pairs({"left": 1})), change(path))
        talker.leave()
        assert hub.state.find("left") is None


@in_loop
async def test_a_testament_has_a_bound() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    will, goods = (f"$SYS/clients/{talker.id}/{part}" for part in ("lastWill", "graveGoods"))
    assert talker.code(put(1, goods, ["gone"] * ENTRIES_MAX)) is None
    assert talker.code(put(2, goods, ["gone"] * (ENTRIES_MAX + 1))) == 255
    assert talker.code(put(3, will, pairs({"left": 1}))) == 255
    assert talker.code(put(4, goods, ["gone"] * (ENTRIES_MAX - 1))) is None
    assert talker.code(put(5, will, pairs({"left": 1}))) is None
    hub.state.set("gone", b"1")
    talker.leave()
    assert hub.state.find("left") == b"1"
    assert hub.state.find("gone") is None


@in_loop
async def test_a_testament_of_another_shape_is_refused_and_the_one_before_it_stays() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    will, goods = (f"$SYS/clients/{talker.id}/{part}" for part in ("lastWill", "graveGoods"))
    assert talker.ask(put(1, will, pairs({"left": 1})), put(2, goods, ["gone"]), put(3, "gone", 1)) == [
        ack(1), ack(2), ack(3),
    ]  # fmt: skip
    for path, value in (
        (will, "not a list"),
        (will, None),
        (will, [{"key": 1, "value": 2}]),
        (will, [{"key": "left"}]),
        (goods, {"gone": 1}),
        (goods, [1]),
    ):
        assert talker.code(put(4, path, value)) == 3, value
        assert talker.code(cset(5, path, value, 0)) == 3, value
    talker.leave()
    assert hub.state.find("left") == b"1"
    assert hub.state.find("gone") is None


@in_loop
async def test_a_will_may_have_fields_that_the_server_does_not_know() -> None:
    _, hub = make_hub()
    talker = Talker(hub)
    talker.ask(put(1, f"$SYS/clients/{talker.id}/lastWill", [{"key": "left", "value": 1, "x": 2}]))
    talker.leave()
    assert hub.state.find("left") == b"1"


@in_loop
async def test_only_elements_that_are_wildcards_are_escaped_in_the_subscriptions_shown() -> None:
    _, hub = make_hub(extended_monitoring=True)
    talker = Talker(hub)
    talker.ask(psubscribe(1, "q/a?/?/x#/#"))
    shown = f"$SYS/clients/{talker.id}/subscriptions/q/a?/%3F/x#/%23"
    assert hub.state.find(shown) == b"1"
    talker.ask(unsubscribe(1))
    assert hub.state.find(shown) is None


@in_loop
async def test_a_client_holds_a_limited_number_of_locks_and_bound_ids() -> None:
    _, hub = make_hub(subscriptions_max=2)
    talker, other = Talker(hub), Talker(hub)
    for name in ("sPubInit", "lock", "acquireLock"):
        assert talker.ask(named(name, 1, "a"), named(name, 2, "b")) == [ack(1), ack(2)]
        refused = talker.one(named(name, 3, "c"))["err"]
        assert refused["errorCode"] == 255
        assert "(worterbuch.subscriptions_max)" in refused["metadata"]
        assert talker.ask(named(name, 2, "b")) == [ack(2)]
    assert talker.ask(named("releaseLock", 1, "a"), named("lock", 3, "c")) == [ack(1), ack(3)]
    assert other.ask(named("lock", 1, "a"), named("acquireLock", 2, "b")) == [ack(1)]
    assert other.code(named("lock", 3, "d")) == 255
