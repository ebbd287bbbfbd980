"""Who may do what, on a scripted peer (section 10)."""

from typing import Any

import jwt
import pytest

from babelbus.protocols.worterbuch.profiles import PROFILES
from tests.support.bus import in_loop
from tests.support.web import SECRET, token
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
    pdelete,
    pget,
    pls,
    psubscribe,
    publish,
    put,
    subscribe,
    unsubscribe,
)


def locked(**options: Any) -> Any:
    return make_hub(key=SECRET, **options)


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
    _, hub = make_hub(key=pem)
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


@in_loop
async def test_a_connection_ends_a_minute_after_its_token() -> None:
    bus, hub = locked()
    now = bus.clock.now_ms() // 1000
    talker, other = Talker(hub), Talker(hub)
    for one, end in ((talker, now + 100), (other, now + 10_000)):
        granted = {"authorizationRequest": {"authToken": token({"read": ["#"]}, exp=end)}}
        assert one.ask(granted) == [{"authorized": {"transactionId": 0}}]
    bus.clock.advance(160)
    hub.tick()
    assert not talker.aborted
    bus.clock.advance(1)
    hub.tick()
    assert (talker.aborted, other.aborted) == (True, False)
    bus.clock.jump_to(2**50)  # a clock that jumps forward ends every token
    hub.tick()
    assert other.aborted


@in_loop
async def test_a_token_that_begins_later_ends_the_connection() -> None:
    bus, hub = locked()
    now = bus.clock.now_ms() // 1000
    claims = {"sub": "me", "name": "me", "exp": now + 500, "nbf": now + 61, "worterbuchPrivileges": {"read": ["#"]}}
    heard = Talker(hub).ask({"authorizationRequest": {"authToken": jwt.encode(claims, SECRET, "HS256")}})
    assert heard[0]["err"]["errorCode"] == 14
    assert "not valid yet" in heard[0]["err"]["metadata"]


@in_loop
async def test_wrong_tokens_are_told_to_wait_and_right_ones_are_taken_all_the_while() -> None:
    bus, hub = locked()
    wrong = {"authorizationRequest": {"authToken": token({}, key="another" * 10)}}
    texts = [Talker(hub).ask(wrong)[0]["err"]["metadata"] for _ in range(3)]
    assert ["wait" in text or "try again in 1 s" in text for text in texts] == [False, True, True]
    assert Talker(hub).ask(authorize(read=["#"])) == [{"authorized": {"transactionId": 0}}]
    expired = {"authorizationRequest": {"authToken": token({}, exp=1)}}
    assert "expired" in Talker(hub).ask(expired)[0]["err"]["metadata"]  # no guess
    bus.clock.advance(1)
    assert "try again" not in Talker(hub).ask(wrong)[0]["err"]["metadata"]


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
@in_loop
async def test_a_short_secret_is_not_looked_at_while_its_address_waits() -> None:
    bus, hub = make_hub(key="a word")
    granted = {"authorizationRequest": {"authToken": token({"read": ["#"]}, key="a word")}}
    wrong = {"authorizationRequest": {"authToken": token({}, key="another" * 10)}}
    Talker(hub).ask(wrong)
    assert "try again in 1 s" in Talker(hub).ask(granted)[0]["err"]["metadata"]
    bus.clock.advance(1)
    assert Talker(hub).ask(granted) == [{"authorized": {"transactionId": 0}}]
