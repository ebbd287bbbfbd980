"""Every request asks the gate, on a scripted peer (docs/access.md)."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from babelbus.config import QuotaSettings
from babelbus.core.access import ANONYMOUS, SERVER, Effect, Principal, Row
from babelbus.core.access.table import edits_for
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.worterbuch.continuation import decode_session
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.storage.files import FileSystem
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, in_loop
from tests.support.web import SECRET, token
from tests.support.worterbuch import (
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
    pdelete,
    pget,
    pls,
    pstate,
    pstate_deleted,
    psubscribe,
    publish,
    put,
    state,
    subscribe,
    unsubscribe,
)

UNAUTHORIZED = 14
EVERY_READ = ("get", "cGet", "pGet", "subscribe", "pSubscribe")
EVERY_CHANGE = ("set", "cSet", "delete", "pDelete", "lock", "acquireLock")
EVERY_PUBLICATION = ("publish", "sPubInit")


class House:
    """A hub with the gate on, and a client of it."""

    def __init__(self, *, key: str | None = None, files: FileSystem | None = None, **options: Any) -> None:
        self.bus: Bus
        self.hub: Hub
        self.bus, self.hub = make_hub(files, access=options.pop("access", "enforce"), key=key, **options)
        self.gate = self.bus.broker.gate
        self.rows: list[Row] = []

    async def grant(self, *rows: tuple[str, ...], add: Sequence[Principal] = ()) -> None:
        """Replace all rows: principal, action, pattern, and the effect of those that deny."""
        made = [Row(who, action, pattern, Effect(*effect or ("allow",))) for who, action, pattern, *effect in rows]
        await self.gate.change(edits_for([*made, *add], [row for row in self.rows if row not in made]), SERVER)
        self.rows = made

    def publish(self, *subjects: str) -> None:
        """Publish as a client of another protocol does."""
        self.bus.broker.publish(Publication(SERVER, "test", [Event(one, b"1") for one in subjects]))

    def audited(self) -> list[tuple[str, str, str]]:
        """The refusals and logins that the audit has folded: kind, principal and action."""
        return [(one.kind, one.principal, one.action) for one in self.gate.audit._folded.values()]


def request(name: str, key: str = "p/x") -> dict[str, Any]:
    """A request of a kind about a key, or the pattern of its neighbours."""
    pattern = key.rpartition("/")[0] + "/?"
    return {
        "get": get(1, key),
        "cGet": cget(1, key),
        "subscribe": subscribe(1, key),
        "pGet": pget(1, pattern),
        "pSubscribe": psubscribe(1, pattern),
        "set": put(1, key, 1),
        "cSet": cset(1, key + "c", 1, 0),
        "publish": publish(1, key, 1),
        "sPubInit": named("sPubInit", 1, key),
        "lock": named("lock", 1, key),
        "acquireLock": named("acquireLock", 1, key),
        "delete": delete(1, key),
        "pDelete": pdelete(1, pattern),
    }[name]


@pytest.mark.parametrize(
    ("action", "name"),
    [("subscribe", name) for name in EVERY_READ]
    + [("write-state", name) for name in EVERY_CHANGE]
    + [("publish", name) for name in EVERY_PUBLICATION],
)
@in_loop
async def test_each_request_needs_its_right_and_no_other(action: str, name: str) -> None:
    house = House()
    house.hub.state.set("p/x", b"1")
    talker = Talker(house.hub)
    others = {"subscribe", "write-state", "publish", "read", "consume", "manage", "admin"} - {action}
    for rows in ([], [(ANONYMOUS, other, "#") for other in others], [(ANONYMOUS, action, "q/#")]):
        await house.grant(*rows)
        error = talker.one(request(name))["err"]
        assert (error["transactionId"], error["errorCode"]) == (1, UNAUTHORIZED)
        assert "(refusal " in error["metadata"]
    assert ("refusal", ANONYMOUS, action) in house.audited()
    assert house.hub.state.find("p/x") == b"1"
    await house.grant((ANONYMOUS, action, "p/#"))
    assert talker.code(request(name)) is None
    await house.grant((ANONYMOUS, action, "#"), (ANONYMOUS, "*", "p/#", "deny"))
    assert Talker(house.hub).code(request(name)) == UNAUTHORIZED


@in_loop
async def test_a_batch_of_sets_stores_those_that_are_granted() -> None:
    house = House()
    await house.grant((ANONYMOUS, "write-state", "p/#"))
    talker = Talker(house.hub)
    heard = talker.ask(put(1, "p/a", 1), put(2, "q/a", 1), put(3, "p/b", 1))
    assert [next(iter(one)) for one in heard] == ["ack", "err", "ack"]
    assert talker.ask(put(4, "p/a", 2), put(5, "p/b", 2)) == [ack(4), ack(5)]
    assert [house.hub.state.find(key) for key in ("p/a", "q/a", "p/b")] == [b"2", None, b"2"]


@in_loop
async def test_patterns_bring_and_delete_what_is_granted() -> None:
    house = House()
    await house.grant((ANONYMOUS, "subscribe", "p/#"), (ANONYMOUS, "*", "p/hidden/#", "deny"))
    for key in ("p/a", "p/hidden/a", "q/a"):
        house.hub.state.set(key, b"1")
    talker = Talker(house.hub)
    assert talker.ask(pget(1, "#")) == [pstate(1, "#", {"p/a": 1})]
    assert talker.ask(ls(2), ls(3, "p"), pls(4, "?")) == [names(2, "p"), names(3, "a"), names(4, "a")]
    assert talker.code(ls(5, "q")) == 5
    await house.grant((ANONYMOUS, "write-state", "p/?"))
    assert talker.ask(pdelete(6, "#")) == [pstate_deleted(6, "#", {"p/a": None})]
    assert [house.hub.state.find(key) for key in ("p/a", "p/hidden/a", "q/a")] == [None, b"1", b"1"]


@in_loop
async def test_a_subscription_is_narrowed_visibly_and_shrinks_and_grows_at_once() -> None:
    house = House()
    everything = [(ANONYMOUS, "subscribe", "$SYS/#"), (ANONYMOUS, "write-state", "#")]
    await house.grant((ANONYMOUS, "subscribe", "p/a"), (ANONYMOUS, "subscribe", "p/b"), *everything)
    talker, writer = Talker(house.hub), Talker(house.hub)
    writer.ask(put(1, "p/a", 0), put(2, "p/c", 0))
    narrowed = f"$SYS/clients/{talker.id}/narrowed/p/%3F"
    assert talker.ask(psubscribe(7, "p/?")) == [ack(7), pstate(7, "p/?", {"p/a": 0})]
    assert talker.ask(get(3, narrowed)) == [state(3, 7)]

    def told(value: int) -> list[Any]:
        writer.ask(*(put(1, f"p/{name}", value) for name in "abc"))
        house.publish("p/a", "p/c")
        return [next(iter(one["pState"]["keyValuePairs"]))["key"] for one in talker.heard()]

    assert told(1) == ["p/a", "p/b", "p/a"]
    await house.grant((ANONYMOUS, "subscribe", "p/b"), *everything)
    assert told(2) == ["p/b"]
    await house.grant((ANONYMOUS, "subscribe", "p/?"), *everything)
    assert told(3) == ["p/a", "p/b", "p/c", "p/a", "p/c"]
    assert talker.code(get(4, narrowed)) == 5
    await house.grant(*everything)
    assert told(4) == []
    assert talker.ask(get(5, narrowed)) == [state(5, 7)]
    talker.ask(unsubscribe(7))
    assert talker.code(get(6, narrowed)) == 5


@in_loop
async def test_a_part_is_refused_if_the_operator_wants_that() -> None:
    house = House(wildcards="refuse")
    await house.grant((ANONYMOUS, "subscribe", "p/a"))
    talker = Talker(house.hub)
    assert talker.code(psubscribe(1, "p/?")) == UNAUTHORIZED
    assert talker.code(subscribe(2, "p/a")) is None


@in_loop
async def test_collected_events_of_a_key_that_is_not_granted_any_more_are_dropped() -> None:
    house = House()
    write = (ANONYMOUS, "write-state", "#")
    await house.grant((ANONYMOUS, "subscribe", "p/#"), write)
    talker, writer = Talker(house.hub), Talker(house.hub)
    talker.ask(psubscribe(1, "p/#", aggregateEvents=60_000, liveOnly=True))
    writer.ask(put(1, "p/a", 1), put(2, "p/b", 1))
    await house.grant((ANONYMOUS, "subscribe", "p/b"), write)
    (subscriber,) = talker.session.subscribers.values()
    subscriber.send_pending()
    talker.session.flush()
    assert talker.heard() == [pstate(1, "p/#", {"p/b": 1})]


@pytest.mark.parametrize("keeps_source", [False, True])
@in_loop
async def test_collected_dead_letters_whose_source_is_not_granted_any_more_are_dropped(keeps_source: bool) -> None:
    house = House()
    await house.bus.broker.create_topic("letters", principal=SERVER, source="work")
    letters, source = (ANONYMOUS, "subscribe", "letters/#"), (ANONYMOUS, "subscribe", "work/#")
    await house.grant(letters, source)
    talker = Talker(house.hub)
    talker.ask(psubscribe(1, "letters/#", aggregateEvents=60_000, liveOnly=True))
    await house.bus.broker.publish(Publication(SERVER, "test", [Event("letters/x", b"1")])).wait()
    await house.grant(letters, *([source] if keeps_source else []))
    (subscriber,) = talker.session.subscribers.values()
    subscriber.send_pending()
    talker.session.flush()
    assert bool(talker.heard()) is keeps_source


@in_loop
async def test_names_are_told_as_far_as_they_are_granted() -> None:
    house = House()
    write = (ANONYMOUS, "write-state", "#")
    await house.grant((ANONYMOUS, "subscribe", "p/a/#"), write)
    talker, writer = Talker(house.hub), Talker(house.hub)
    writer.ask(put(1, "p/a/x", 1), put(2, "p/b/x", 1))
    request = {"subscribeLs": {"transactionId": 1, "parent": "p"}}
    assert talker.ask(request) == [ack(1), names(1, "a")]
    writer.ask(put(3, "p/c", 1))
    assert talker.heard() == []
    await house.grant((ANONYMOUS, "subscribe", "p/b/#"), write)
    assert talker.heard() == [names(1, "b")]


# -- who a client is -------------------------------------------------------------------------------------------------


def authorize(name: str = "me", **granted: object) -> dict[str, Any]:
    assert name == "me"
    return {"authorizationRequest": {"authToken": token(granted)}}


@in_loop
async def test_a_token_and_the_table_both_have_to_grant() -> None:
    house = House(key=SECRET)
    talker = Talker(house.hub)
    refused = talker.one(authorize(read=["#"]))["err"]
    assert (refused["errorCode"], refused["metadata"]) == (14, '"the token names no principal of the table of access"')
    assert talker.ended is not None
    await house.grant(("me", "subscribe", "a/#"), ("me", "write-state", "a/#"), add=[Principal("me")])
    for key in ("a/x", "b/x"):
        house.hub.state.set(key, b"1")
    talker = Talker(house.hub)
    talker.ask(authorize(read=["#"], write=["a/?"]))
    assert talker.lines.principal == "me"
    assert talker.session.access.source == "worterbuch:me"
    assert [talker.code(get(1, key)) for key in ("a/x", "b/x")] == [None, 14]
    assert [talker.code(put(1, key, 2)) for key in ("a/x", "a/x/y", "b/x")] == [None, 14, 14]
    assert talker.code(delete(1, "a/x")) == 14  # the table grants it, the token does not
    assert talker.ask(pget(3, "#")) == [pstate(3, "#", {"a/x": 2})]
    assert [one for one in house.audited() if "login" in one[0]] == [("login-refused", "me", ""), ("login", "me", "")]


@in_loop
async def test_a_token_cannot_name_a_client_of_a_list() -> None:
    house = House(key=SECRET)
    for origin in ("client lists", "zbus.auth_file"):
        house.gate.import_entries(origin, [Principal("me", ("admin",))])
        talker = Talker(house.hub)
        [refused] = [one["err"] for one in talker.ask(authorize(read=["#"], write=["#"])) if "err" in one]
        assert refused["errorCode"] == UNAUTHORIZED
        house.gate.import_entries(origin, [])
    house.gate.import_entries("client lists", [Principal("me", ("admin",))])
    await house.grant(("me", "subscribe", "a/#"), add=[Principal("me")])
    talker = Talker(house.hub)
    talker.ask(authorize(read=["#"], write=["#"]))
    assert [talker.code(request) for request in (get(1, "a"), put(2, "b", 1))] == [5, UNAUTHORIZED]


@pytest.mark.parametrize("access", ["off", "enforce"])
@in_loop
async def test_logins_and_wrong_tokens_stand_in_the_audit_while_the_gate_is_on(
    access: Literal["off", "enforce"],
) -> None:
    house = House(key=SECRET, access=access)
    Talker(house.hub).ask({"authorizationRequest": {"authToken": token({}, key="another" * 10)}})
    Talker(house.hub).ask(authorize(read=["#"]))
    logins = [("login-refused", "", ""), ("login-refused", "me", "")]
    assert house.audited() == ([] if access == "off" else logins)
    assert not any(SECRET in repr(one) for one in house.gate.audit._folded.values())


@in_loop
async def test_a_removed_principal_is_closed_and_its_locks_are_free() -> None:
    house = House(key=SECRET)
    await house.grant(("me", "*", "#"), ("other", "*", "#"), add=[Principal("me"), Principal("other")])
    talker = Talker(house.hub)
    talker.ask(authorize(read=["#"], write=["#"]), named("lock", 1, "a"), psubscribe(2, "a/#"))
    await house.gate.remove([Principal("me")], SERVER)
    assert talker.aborted
    house.hub.state.set("a/x", b"1")
    house.hub.commit()
    talker.leave()
    assert talker.heard() == [] or "ack" in talker.heard()[0]
    assert house.hub.state.locks.holder("a") is None


@in_loop
async def test_a_client_that_came_before_the_gate_was_turned_on_is_asked_too() -> None:
    house = House(access="off")
    talker, stays = Talker(house.hub), Talker(house.hub)
    assert talker.ask(put(1, "a/x", 1)) == [ack(1)]
    assert stays.ask(psubscribe(1, "#", liveOnly=True)) == [ack(1)]
    await house.grant((ANONYMOUS, "subscribe", "b/#"))
    await house.gate.enable(SERVER)
    assert talker.code(put(2, "a/x", 2)) == UNAUTHORIZED
    for key in ("a/x", "b/x"):
        house.hub.state.set(key, b"3")
    house.hub.commit()
    assert [one["pState"]["keyValuePairs"][0]["key"] for one in stays.heard()] == ["b/x"]
    await house.gate.enable(SERVER, enforce=False)
    assert talker.ask(put(3, "a/x", 4)) == [ack(3)]


CERTIFICATE = PeerCertificate(("spiffe://example/me",), ("me.example",), ("me",), "00")


@in_loop
async def test_a_client_certificate_names_the_principal_and_needs_no_token() -> None:
    known = {("uri", "spiffe://example/me"): "me"}
    house = House(key=SECRET, by_names=lambda given: next((known[one] for one in given if one in known), None))
    await house.grant(("me", "subscribe", "a/#"), add=[Principal("me")])
    talker = Talker(house.hub, certificate=CERTIFICATE)
    assert [talker.code(pget(1, pattern)) for pattern in ("a/#", "b/#")] == [None, 14]
    assert ("login", "me", "") in house.audited()
    assert Talker(house.hub).code(get(1, "a")) == 11  # nothing proved: a token is needed
    known.clear()
    await house.grant(("me", "subscribe", "#"))
    assert talker.aborted  # the certificate is nobody's any more


# -- testaments ------------------------------------------------------------------------------------------------------


def goods_of(talker: Talker, *patterns: str) -> dict[str, Any]:
    return put(1, f"$SYS/clients/{talker.id}/graveGoods", patterns)


def will_of(talker: Talker, **values: int) -> dict[str, Any]:
    return put(1, f"$SYS/clients/{talker.id}/lastWill", [{"key": key, "value": one} for key, one in values.items()])


@in_loop
async def test_a_testament_does_not_go_around_the_token() -> None:
    _, hub = make_hub(key=SECRET)
    hub.state.set("secret/a", b"1")
    talker = Talker(hub)
    talker.ask(authorize(read=["#"], write=["#"]))
    assert talker.code(goods_of(talker, "secret/#")) == UNAUTHORIZED
    talker.leave()
    other = Talker(hub)
    other.ask(authorize(write=["$SYS/clients/?/?", "mine"]))
    assert other.code(will_of(other, **{"secret/a": 2})) == UNAUTHORIZED
    assert other.code(will_of(other, mine=2)) is None
    other.leave()
    assert [hub.state.find(key) for key in ("secret/a", "mine")] == [b"1", b"2"]


@in_loop
async def test_a_testament_is_checked_when_it_is_set_and_when_it_is_executed() -> None:
    house = House()
    await house.grant((ANONYMOUS, "write-state", "p/#"))
    for key in ("p/a", "p/b", "q/a"):
        house.hub.state.set(key, b"1")
    talker = Talker(house.hub)
    assert talker.code(goods_of(talker, "q/#")) == UNAUTHORIZED
    assert talker.code(will_of(talker, **{"q/a": 2})) == UNAUTHORIZED
    assert talker.ask(get(2, f"$SYS/clients/{talker.id}/lastWill"))[0]["err"]["errorCode"] == 5
    assert talker.ask(goods_of(talker, "p/#"), will_of(talker, **{"p/c": 3, "p/b/x": 3})) == [ack(1), ack(1)]
    await house.grant((ANONYMOUS, "write-state", "p/b/#"))
    talker.leave()
    found = {key: house.hub.state.find(key) for key in ("p/a", "p/b", "p/c", "p/b/x", "q/a")}
    assert found == {"p/a": b"1", "p/b": None, "p/c": None, "p/b/x": b"3", "q/a": b"1"}


@in_loop
async def test_a_testament_that_outlives_the_server_has_the_rights_of_its_principal() -> None:
    house = House(key=SECRET)
    await house.grant(("me", "write-state", "#"), add=[Principal("me")])
    talker = Talker(house.hub)
    talker.ask(authorize(write=["#"], delete=["#"]), will_of(talker, a=2, b=2))
    await house.grant(("me", "write-state", "b"))
    await house.bus.die()
    bus = Bus(house.bus.files, clock=house.bus.clock)
    bus.open_gate()
    kept = bus.open_state()
    assert [kept.find(key) for key in ("a", "b")] == [None, b"2"]


@in_loop
async def test_a_testament_of_an_old_client_is_refused_with_its_handshake() -> None:
    house = House()
    await house.grant((ANONYMOUS, "write-state", "p/#"))
    for key, code in (("q", UNAUTHORIZED), ("p/x", None)):
        talker = Talker(house.hub, greeted=False)
        will = {"lastWill": [{"key": key, "value": 1}], "graveGoods": []}
        talker.say({"handshakeRequest": {"supportedProtocolVersions": [{"major": 0, "minor": 6}], **will}})
        answer = talker.heard()[-1]
        assert ("err" in answer) is (code is not None)
        talker.leave()
    assert [house.hub.state.find(key) for key in ("q", "p/x")] == [None, b"1"]


@in_loop
async def test_a_client_sees_and_writes_its_own_keys_without_a_right_and_nobody_elses() -> None:
    house = House()
    talker, other = Talker(house.hub), Talker(house.hub)
    path = f"$SYS/clients/{talker.id}/clientName"
    assert talker.ask(put(1, path, "me"), get(2, path)) == [ack(1), state(2, "me")]
    assert other.code(get(1, path)) == UNAUTHORIZED
    assert other.code(put(1, path, "you")) == 9
    await house.grant((ANONYMOUS, "subscribe", "$SYS/#"))
    assert other.ask(get(2, path)) == [state(2, "me")]
    assert talker.ask(delete(3, path))[0]["state"]["deleted"] == "me"


@in_loop
async def test_a_client_without_rights_has_a_bound_for_its_own_keys() -> None:
    house = House(subscriptions_max=2, message_bytes_max=1024)
    talker = Talker(house.hub)
    path = f"$SYS/clients/{talker.id}/clientName"
    keys, text = [f"{path}/{number}" for number in range(4)], "x" * 400
    assert [talker.code(put(1, key, 1)) for key in keys[:3]] == [None, None, 255]
    assert talker.code(cset(1, keys[2], 1, 0)) == 255
    assert [talker.code(put(1, keys[0], text)), talker.code(put(1, keys[1], text + text))] == [None, 255]
    assert [talker.code(delete(1, keys[0])), talker.code(put(1, keys[1], text + text))] == [None, None]
    assert talker.code(put(1, keys[0], text)) == 255
    assert talker.code(pdelete(1, f"{path}/#")) is None
    assert [talker.code(cset(1, key, text, 0)) for key in keys[:3]] == [None, None, 255]


NOT_ALL = [
    [(ANONYMOUS, "subscribe", "$SYS/#"), (ANONYMOUS, "subscribe", "p/#")],
    [(ANONYMOUS, "subscribe", "#"), (ANONYMOUS, "subscribe", "secret/#", "deny")],
]
SHOWING = ("locks", "subscriptions", "graveGoods", "lastWill", "narrowed")


@pytest.mark.parametrize("rows", NOT_ALL)
@in_loop
async def test_what_clients_leave_behind_lock_and_subscribe_to_is_shown_to_who_may_see_everything(
    rows: list[tuple[str, ...]],
) -> None:
    house = House()
    changes = (ANONYMOUS, "write-state", "#")
    await house.grant(changes, (ANONYMOUS, "subscribe", "#"))
    boss, reader = Talker(house.hub), Talker(house.hub)
    boss.ask(goods_of(boss, "secret/#"), will_of(boss, **{"secret/a": 1}), named("lock", 1, "secret/b"))
    boss.ask(psubscribe(2, "secret/#", liveOnly=True))

    def shown(reader: Talker) -> list[str]:
        """Ask all that a client can ask about another one."""
        told: list[Any] = []
        path = f"$SYS/clients/{boss.id}"
        for number, key in enumerate(
            (f"{path}/lastWill", f"{path}/graveGoods", "$SYS/locks/secret/b", f"{path}/subscriptions/secret/%23"), 10
        ):
            told += reader.ask(get(number, key), cget(number, key), subscribe(number, key))
            told += reader.ask(unsubscribe(number))
        for number, pattern in enumerate(("$SYS/#", "$SYS/clients/?/lastWill", "$SYS/locks/#", "#"), 20):
            told += reader.ask(pget(number, pattern), psubscribe(number, pattern))
            told += reader.ask(unsubscribe(number))
        for parent in (path, "$SYS/locks", "$SYS/locks/secret", f"{path}/subscriptions"):
            told += reader.ask(ls(30, parent))
        told += reader.ask(pls(31, "$SYS/clients/?"), pls(32, "$SYS/?"))
        for one in told:
            one.get("pState", {}).pop("requestPattern", None)
        text = str([one for one in told if "err" not in one])
        for its_own in (f"{reader.id}/narrowed", "$SYS/subscriptions"):
            text = text.replace(its_own, "")
        return [name for name in ("secret", *SHOWING) if name in text]

    await house.grant(changes, *rows)
    assert shown(reader) == []
    assert reader.ask(get(1, f"$SYS/clients/{boss.id}/protocol")) == [state(1, "TCP")]
    assert reader.ask(psubscribe(2, "$SYS/#", liveOnly=True)) == [ack(2)]
    boss.ask(will_of(boss, **{"secret/new": 1}), named("releaseLock", 3, "secret/b"), named("lock", 3, "secret/c"))
    assert "secret" not in str(reader.heard())
    own = will_of(reader, mine=1)
    key, value = own["set"]["key"], own["set"]["value"]
    answers = reader.ask(own, get(1, key), pget(1, key))
    assert all(
        one in answers for one in (state(1, value), pstate(1, key, {key: value}), pstate(2, "$SYS/#", {key: value}))
    )
    await house.grant(changes, (ANONYMOUS, "subscribe", "#"))
    reader.heard()
    boss.ask(will_of(boss, **{"secret/newer": 1}), named("lock", 4, "secret/d"))
    heard = str(reader.heard())
    assert "secret/newer" in heard
    assert "locks/secret/d" in heard
    assert shown(reader) == ["secret", "locks", "subscriptions", "graveGoods", "lastWill"]


# -- keys that are secret to some processes --------------------------------------------------------------------------


@in_loop
async def test_keys_of_sbus_credentials_are_neither_written_nor_shown() -> None:
    bus, hub = make_hub()
    bus.topic("!", 1)
    talker = Talker(hub)
    key = "!/cred/1/2/3/x"
    for message in (put(1, key, 1), cset(1, key, 1, 0), publish(1, key, 1), named("sPubInit", 1, key), delete(1, key)):
        assert talker.code(message) == 9
    talker.ask(goods_of(talker, "!/cred/#"), will_of(talker, **{key: 1}))
    talker.leave()
    assert hub.state.find(key) is None
    assert bus.broker.find_topic("!").partition(0).next_offset == 0  # type: ignore[union-attr]  # it was made above
    hub.state.set(key, b"1")  # as a version before this stored it
    reader = Talker(hub)
    assert reader.code(get(1, key)) == 5
    assert [one["key"] for one in reader.one(pget(1, "!/#"))["pState"]["keyValuePairs"]] == []
    assert reader.ask(psubscribe(2, "!/#", liveOnly=True)) == [ack(2)]
    bus.broker.publish(Publication(SERVER, "test", [Event(key, b"1")]))
    assert reader.heard() == []


@in_loop
async def test_a_subscription_beyond_the_quota_is_refused_and_the_connection_goes_on() -> None:
    house = House()
    await house.grant((ANONYMOUS, "subscribe", "#"))
    talker = Talker(house.hub)
    house.bus.broker.quotas.set_limits({f"worterbuch:{talker.id}": QuotaSettings(subscriptions=1)})
    assert talker.code(psubscribe(1, "a/?", liveOnly=True)) is None
    assert talker.code(psubscribe(2, "b/?", liveOnly=True)) == 255
    assert talker.ask(unsubscribe(1), psubscribe(3, "b/?", liveOnly=True)) == [ack(1), ack(3)]


@in_loop
async def test_changes_that_a_client_may_not_hear_any_more_are_not_told_again() -> None:
    files = FaultyFiles()
    house = House(files=files)
    allowed = [(ANONYMOUS, "subscribe", "a/#"), (ANONYMOUS, "write-state", "a/#")]
    await house.grant(*allowed)
    talker, other = Talker(house.hub), Talker(house.hub)
    talker.ask(psubscribe(1, "a/#"), {"subscribeLs": {"transactionId": 2, "parent": "a"}})
    assert talker.lines.is_copyable
    continuation, mark = talker.lines.continuation(), house.bus.broker.state.told_offset
    assert continuation is not None
    other.ask(put(1, "a/b", 1), put(2, "a/c", 1))
    await house.bus.die()

    second = House(files=files, since=mark)
    second.rows = house.rows
    await second.grant(*allowed, (ANONYMOUS, "subscribe", "a/c", "deny"), (ANONYMOUS, "subscribe", "a/c/#", "deny"))
    after = Talker(second.hub, kept=decode_session(continuation.content), greeted=False)
    second.hub.tell_again(second.bus.broker.state.unheard or (), {after.id: mark})
    assert after.heard() == [names(2, "b"), pstate(1, "a/#", {"a/b": 1})]
    await second.bus.die()
