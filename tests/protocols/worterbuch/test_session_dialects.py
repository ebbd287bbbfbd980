"""Clients of 0.3 to 0.11, and endpoints with other characters, on a scripted peer (section 13)."""

import json
from typing import Any

import pytest

from babelbus.protocols.worterbuch.names import Symbols
from babelbus.protocols.worterbuch.profiles import PROFILES
from tests.support.bus import in_loop
from tests.support.worterbuch import (
    Talker,
    ack,
    delete,
    get,
    make_hub,
    pget,
    pstate,
    psubscribe,
    put,
    state,
    subscribe,
    until,
)

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
    await until(lambda: silent.transport.written)
    [welcome] = silent.heard()
    assert "welcome" in welcome
    assert old.heard() == new.heard() == []


@in_loop
async def test_a_client_of_0_3_hears_of_no_deletions() -> None:
    _, hub = make_hub()
    talker, other = Talker(hub, profile=PROFILES["0.3"], greeted=False), Talker(hub)
    talker.ask(shake(3), subscribe(1, "k"), psubscribe(2, "?"), psubscribe(3, "?", aggregateEvents=0))
    other.ask(put(1, "k", 1), delete(2, "k"))
    await until(lambda: talker.session.subscribers[3]._timer is None)
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
