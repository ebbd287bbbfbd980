"""The methods `state.*` on the server: what a frame of them does, who may, and what a slow reader of a watch gets."""

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.config import QuotaSettings
from babelbus.core.access import NOBODY, Identity
from babelbus.core.state import Granted, State, store_pattern
from babelbus.protocols.jebp import state_messages as m
from babelbus.protocols.jebp.calls import state_streams
from babelbus.protocols.jebp.calls.methods import METHODS
from babelbus.protocols.jebp.calls.state import StateMethods
from babelbus.protocols.registry import read_value
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, Gate, done, in_loop, turns
from tests.support.jebp import Conversation

OPEN, MORE, CANCEL = range(3)
ITEM, END, ERROR = range(3)


class House:
    """A bus with its state, and conversations that share the methods of one server."""

    def __init__(self, files: FaultyFiles | None = None, **settings: Any) -> None:
        self.bus = Bus(files)
        self.state: State = self.bus.open_state(**settings)
        self.shared = StateMethods(self.state, self.bus.clock, read_value, self.bus.metrics)

    def talk(self, principal: Identity | None = None, bytes_max: int = 8 * 2**20) -> Conversation:
        methods = METHODS | self.shared.methods
        options: dict[str, Any] = {} if principal is None else {"authorise": lambda _: principal}
        return Conversation(self.bus, methods=methods, bytes_max=bytes_max, **options).connect()

    async def close(self) -> None:
        await self.bus.broker.close()


async def ask(conversation: Conversation, method: str, *parameters: object) -> object:
    """The result of one call."""
    items = conversation.call((1, OPEN, [f"state.{method}", list(parameters)]))
    while not items or items[-1][1] == ITEM:
        items += await conversation.next_items()
    return items[-1][2] if len(items) == 1 else [body for _, _, body in items]


def code(answer: object) -> object:
    assert isinstance(answer, list)
    return answer[0]


@in_loop
async def test_values_are_kept_as_the_text_that_came_and_read_back() -> None:
    house = House()
    talk = house.talk()
    assert await ask(talk, "set", "a/b", b'{"x": 1}') is None
    assert await ask(talk, "get", "a/b") == [b'{"x": 1}', 0]
    assert await ask(talk, "get", "a") is None
    assert await ask(talk, "compare_and_set", "v", b"1", 0) == 1
    assert await ask(talk, "get_many", ["v", "no", "a/b"]) == [["v", b"1", 1], ["a/b", b'{"x": 1}', 0]]
    assert await ask(talk, "list", None) == ["a", "v"]
    assert await ask(talk, "list", "no") is None
    assert await ask(talk, "delete", "a/b") == [b'{"x": 1}', 0]
    assert await ask(talk, "delete", "a/b") is None
    await house.close()


@in_loop
async def test_a_key_that_is_asked_for_many_times_takes_no_memory_for_each() -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "set", "k", b'"%b"' % bytes(20_000).replace(b"\0", b"x"))
    tracemalloc.start()
    try:
        assert code(await ask(talk, "get_many", ["k"] * m.KEYS_MAX)) == "too_large"
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000_000
    await house.close()


@in_loop
async def test_the_calls_of_a_frame_see_each_other_and_are_one_append() -> None:
    house = House()
    talk, topic = house.talk(), house.bus.broker.find_topic("$state")
    assert topic is not None
    sets = [(number, OPEN, ["state.set", ["k", b"%d" % number]]) for number in range(20)]
    items = talk.call(*sets, (20, OPEN, ["state.get", ["k"]]))
    assert items[0] == (20, END, [b"19", 0])
    items += await talk.next_items()
    assert sorted(items[1:]) == [(number, END, None) for number in range(20)]
    assert talk.wire.frames == 2
    assert topic.partition(0).log.next_offset == 20
    await house.close()


@pytest.mark.parametrize(
    ("method", "parameters", "said"),
    [
        ("set", ["a/?", b"1"], "bad_argument"),
        ("set", ["k" * 5000, b"1"], "bad_argument"),
        ("set", ["a", b"no json"], "bad_argument"),
        ("set", ["a", b"1e400"], "bad_argument"),
        ("set", ["a"], "bad_argument"),
        ("set", ["$SYS/x", b"1"], "refused"),
        ("set", ["!/cred/1/2/3/x", b"1"], "refused"),
        ("set", ["versioned", b"1"], "conflict"),
        ("set_many", [[["a", b"1"], ["versioned", b"1"]]], "conflict"),
        ("set_many", [[["a", b"1"], ["b", b"{"]]], "bad_argument"),
        ("set_many", [[["a", b"1"]] * 10_001], "bad_argument"),
        ("get_many", [["a"] * 10_001], "bad_argument"),
        ("compare_and_set", ["versioned", b"1", 7], "conflict"),
        ("delete", ["$SYS/x"], "refused"),
        ("delete_match", ["$SYS/#"], "refused"),
        ("match", ["#/a"], "bad_argument"),
        ("watch", ["#/a"], "bad_argument"),
        ("as_of", ["a", None, 99, None], "bad_argument"),
        ("as_of", ["a", "#", 0, None], "bad_argument"),
        ("as_of", ["a", None, None, None], "bad_argument"),
        ("history", ["a", None, 0], "bad_argument"),
        ("history", ["#", None, 1], "bad_argument"),
        ("lock", ["a/#", None], "bad_argument"),
        ("will", ["me", ["#/a"], []], "bad_argument"),
        ("will", ["me", [], [["a", b"?"]]], "bad_argument"),
        ("will", ["me", ["$SYS/#"], []], "refused"),
        ("will", ["me", ["!/cred/#"], []], "refused"),
        ("will", ["me", ["a"] * 10_000, [["a", b"1"]]], "bad_argument"),
    ],
)
@in_loop
async def test_what_is_refused_changes_nothing(method: str, parameters: list[object], said: str) -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "compare_and_set", "versioned", b"1", 0)
    assert code(await ask(talk, method, *parameters)) == said
    assert [key for key, _, _ in house.state.entries(store_pattern("#"))] == ["versioned"]
    await house.close()


@in_loop
async def test_a_conflict_says_the_version_that_the_key_has() -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "compare_and_set", "k", b"1", 0)
    assert await ask(talk, "compare_and_set", "k", b"2", 5) == ["conflict", "'k' has version 1, not 5", 1]
    await house.close()


@in_loop
async def test_changes_that_the_disk_refuses_are_an_error_of_each_call() -> None:
    files = FaultyFiles()
    house = House(files, ack="flushed")
    talk, gate = house.talk(), Gate(files)
    gate.shut()
    assert talk.call((1, OPEN, ["state.set", ["a", b"1"]]), (2, OPEN, ["state.set", ["b", b"1"]])) == []
    await gate.reached()
    files.fail("flush", 1)
    gate.open()
    items = await talk.next_items()
    assert [(number, kind, code(body)) for number, kind, body in items] == [(1, ERROR, "disk"), (2, ERROR, "disk")]
    await house.close()


@in_loop
async def test_patterns_and_the_past_come_in_pages_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PAGE_BYTES", 100)
    house = House()
    talk = house.talk()
    await ask(talk, "set_many", [[f"a/{number:02}", b'"12345678"'] for number in range(20)])
    for method, parameters in (("match", ["a/#"]), ("as_of", [None, "a/#", 19, None])):
        answers = await ask(talk, method, *parameters)
        assert isinstance(answers, list)
        *pages, count = answers
        assert count == 20
        assert len(pages) > 5
        assert [key for page in pages for key, _, _ in page] == [f"a/{number:02}" for number in range(20)]
    assert await ask(talk, "as_of", "a/07", None, 7, None) == [[["a/07", b'"12345678"', 0]], 1]
    assert await ask(talk, "as_of", "a/07", None, 6, None) == 0
    await house.close()


@in_loop
async def test_streams_of_one_connection_have_their_turn_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PAGE_BYTES", 100)
    house = House()
    talk = house.talk(bytes_max=1_000)
    house.state.set_all([f"a/{number:03}" for number in range(300)], [b"1"] * 300)
    await done([house.state.commit("test")])
    names = ["match", "as_of", "match", "watch", "history", "match", "watch"]
    asked = [["a/#"], [None, "a/#", 299, None], ["#/a"], ["a/#"], ["a/000", None, 9], ["a/0?/#"], ["a/#"]]
    items: list[tuple[int, int, Any]] = list(
        talk.call(*[(number, OPEN, [f"state.{name}", asked[number]]) for number, name in enumerate(names)])
    )
    items += talk.call((6, CANCEL, None))  # before its turn
    while not any(number == 5 and kind == END for number, kind, _ in items):
        await talk.pipe.grown.wait()
        items += talk.items()
        talk.session.release()
    ends = {number: body for number, kind, body in items if kind != ITEM}
    assert {number: code(body) if number == 2 else body for number, body in ends.items()} == {
        0: 300, 1: 300, 2: "bad_argument", 4: 0, 5: 0, 6: None,
    }  # fmt: skip
    for number in (0, 1):
        assert [key for at, kind, page in items if (at, kind) == (number, ITEM) for key, *_ in page] == [
            f"a/{key:03}" for key in range(300)
        ]
    watched = [body for number, kind, body in items if (number, kind) == (3, ITEM)]
    assert sum(len(page) for _, page in watched) == 300
    assert len(house.state.watches) == 1
    await house.close()


@in_loop
async def test_the_changes_of_a_key_are_told_with_who_and_when() -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "compare_and_set", "k", b"1", 0)
    await ask(talk, "delete", "k")
    told = [[0, NOW, b"1", 1, "jebp:test"], [1, NOW, None, 0, "jebp:test"]]
    assert await ask(talk, "history", "k", None, 10) == [told, 0]
    assert await ask(talk, "history", "k", 1, 10) == [told[:1], 0]
    await house.close()


@in_loop
async def test_a_watch_begins_with_what_there_is_and_tells_each_change_once_and_in_order() -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "set", "a/b", b"1")
    items = talk.call((2, OPEN, ["state.set", ["a/c", b"2"]]), (1, OPEN, ["state.watch", ["a/#"]]))
    items += await talk.next_items()
    assert [body for number, _, body in items if number == 1] == [
        [m.PRESENT_LAST, [["a/b", b"1", 0], ["a/c", b"2", 0]]]
    ]
    talk.call(
        (3, OPEN, ["state.set", ["a/b", b"2"]]),
        (4, OPEN, ["state.set", ["b", b"0"]]),
        (5, OPEN, ["state.delete", ["a/b"]]),
    )
    changes: list[Any] = []
    while not changes:
        changes = [body for number, _, body in await talk.next_items() if number == 1]
    assert changes == [[m.CHANGES, [["a/b", b"2", 0, NOW, "jebp:test"], ["a/b", None, 0, NOW, "jebp:test"]]]]
    assert talk.call((1, CANCEL, None)) == [(1, END, None)]
    assert len(house.state.watches) == 0
    await house.close()


@in_loop
async def test_a_unique_watch_leaves_out_what_changes_nothing() -> None:
    house = House()
    talk, other = house.talk(), house.talk()
    talk.call((1, OPEN, ["state.watch", ["k", True]]))
    assert await talk.next_items() == [(1, ITEM, [m.PRESENT_LAST, []])]
    for value in (b"1", b"1", b"2"):
        await ask(other, "set", "k", value)
    told: list[Any] = []
    while len(told) < 2:
        told += [one for _, _, body in await talk.next_items() for one in body[1]]  # type: ignore[index]
    assert [value for _, value, *_ in told] == [b"1", b"2"]
    await house.close()


@in_loop
async def test_a_slow_reader_gets_the_last_change_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_streams, "CHANGES_MAX", 8)
    house = House()
    talk, other = house.talk(bytes_max=64), house.talk()
    talk.call((1, OPEN, ["state.watch", ["a/#"]]))
    assert await talk.next_items() == [(1, ITEM, [m.PRESENT_LAST, []])]
    talk.outbox.answer(lambda: b"x" * 100)  # the client takes nothing
    for number in range(50):
        await ask(other, "set", f"a/{number % 3}", b"%d" % number)
    await turns()
    talk.pipe.take()
    talk.session.release()
    told: list[Any] = []
    while not told:
        await talk.pipe.grown.wait()
        told = [one for _, _, body in talk.items() for one in body[1]]  # type: ignore[index]
    assert {key: value for key, value, *_ in told} == {"a/0": b"48", "a/1": b"49", "a/2": b"47"}
    assert len(told) < 16
    sample = house.bus.metrics.registry.get_sample_value
    assert sample("babelbus_live_dropped_total", {"protocol": "jebp", "reason": "slow"}) == 50 - len(told)
    assert sample("babelbus_live_delivered_total", {"protocol": "jebp"}) == len(told)
    assert sample("babelbus_live_received_total", {"protocol": "jebp"}) == 50
    await house.close()


@in_loop
async def test_a_reader_that_is_much_too_slow_gets_the_present_values_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_streams, "CHANGES_MAX", 8)
    monkeypatch.setattr(state_streams, "WAITING_BYTES_MAX", 100)
    house = House()
    talk, other = house.talk(bytes_max=64), house.talk()
    talk.call((1, OPEN, ["state.watch", ["a/#"]]))
    assert await talk.next_items() == [(1, ITEM, [m.PRESENT_LAST, []])]
    talk.outbox.answer(lambda: b"x" * 100)
    for number in range(50):
        await ask(other, "set", f"a/{number:02}", b"%d" % number)
    await ask(other, "delete", "a/00")
    await turns()
    talk.pipe.take()
    talk.session.release()
    kinds: list[int] = []
    values: dict[str, bytes | None] = {}
    while values != {"a/00": None} | {f"a/{number:02}": b"%d" % number for number in range(1, 50)}:
        await talk.pipe.grown.wait()
        items: list[Any] = talk.items()
        kinds += [body[0] for _, _, body in items]
        values |= {one[0]: one[1] for _, _, body in items for one in body[1] or ()}
        talk.session.release()
        values.setdefault("a/00")
    assert kinds[0] == m.RESYNC
    assert m.PRESENT_LAST in kinds
    await house.close()


@in_loop
async def test_a_watch_counts_as_a_subscription_of_its_principal() -> None:
    house = House()
    house.bus.broker.quotas.set_limits({"test": QuotaSettings(subscriptions=1)})
    talk = house.talk()
    assert code(await ask(talk, "watch", "#/a")) == "bad_argument"
    talk.call((5, OPEN, ["state.watch", ["#"]]))
    await talk.next_items()
    assert code(await ask(talk, "watch", "a")) == "quota"
    talk.call((5, CANCEL, None))
    talk.call((6, OPEN, ["state.watch", ["#"]]))
    assert await talk.next_items() == [(6, ITEM, [m.PRESENT_LAST, []])]
    talk.session.close()
    assert house.bus.broker.quotas.describe() == {}
    await house.close()


@in_loop
async def test_a_value_over_the_frame_limit_ends_the_stream_with_an_error() -> None:
    house = House()
    talk = house.talk()
    house.state.set("big", b'"%b"' % (b"x" * 2**24))
    await done([house.state.commit("test")])
    assert code(await ask(talk, "get", "big")) == "too_large"
    assert code(await ask(talk, "match", "#")) == "too_large"
    await house.close()


# -- locks and wills ---------------------------------------------------------------------------------------------------


@in_loop
async def test_a_lock_is_its_stream_and_goes_to_who_waits_longest() -> None:
    house = House()
    first, second = house.talk(), house.talk()
    assert first.call((1, OPEN, ["state.lock", ["k", None]])) == [(1, ITEM, None)]
    assert first.call((2, OPEN, ["state.lock", ["k", 0]])) == [
        (2, ERROR, ["locked", "'k' is locked by another client", None])
    ]
    assert second.call((1, OPEN, ["state.lock", ["k", None]])) == []
    assert first.call((3, OPEN, ["state.lock", ["k", None]])) == []
    assert first.call((1, CANCEL, None)) == [(1, END, None)]
    assert await second.next_items() == [(1, ITEM, None)]
    second.session.close()
    assert await first.next_items() == [(3, ITEM, None)]
    first.session.close()
    assert house.state.locks.holder("k") is None
    assert house.shared.locks == {}
    await house.close()


@in_loop
async def test_a_wait_for_a_lock_ends_with_its_time_and_leaves_the_queue() -> None:
    house = House()
    talk = house.talk()
    talk.call((1, OPEN, ["state.lock", ["k", None]]))
    assert talk.call((2, OPEN, ["state.lock", ["k", 1]])) == []
    assert code((await talk.next_items())[0][2]) == "locked"
    talk.call((1, CANCEL, None))
    assert house.state.locks.holder("k") is None
    await house.close()


@in_loop
async def test_clients_of_another_protocol_wait_in_the_same_queue() -> None:
    house = House()
    talk = house.talk()
    heard: list[Granted] = []
    house.state.locks.receivers.append(heard.append)
    house.state.locks.lock("k", "another")
    assert talk.call((1, OPEN, ["state.lock", ["k", None]])) == []
    house.state.locks.acquire("k", "third", 9)
    house.state.locks.release("k", "another")
    assert await talk.next_items() == [(1, ITEM, None)]
    talk.call((1, CANCEL, None))
    assert heard[-1] == Granted("k", "third", (9,))
    await house.close()


@pytest.mark.parametrize("lost", [True, False])
@in_loop
async def test_a_will_happens_once_when_the_connection_ends(lost: bool) -> None:
    house = House()
    talk = house.talk()
    await ask(talk, "set_many", [["on/me", b"1"], ["on/you", b"1"]])
    assert await ask(talk, "will", "me", ["on/m?"], [["x", b"0"]]) is None
    assert code(await ask(talk, "will", "you", [], [["x", b"0"]])) == "bad_argument"
    assert await ask(talk, "will", "me", ["on/me"], [["off/me", b"1"]]) is None
    if not lost:
        talk.session.end_waits()
    talk.session.close()
    talk.session.close()
    assert house.state.find("on/me") is None
    assert (house.state.find("on/you"), house.state.find("off/me"), house.state.find("x")) == (b"1", b"1", None)
    house.state.delete("off/me")
    await house.close()
    again = Bus(house.bus.files).open_state()
    assert again.find("off/me") is None


@in_loop
async def test_a_will_that_was_taken_back_or_set_on_a_newer_connection_does_not_happen() -> None:
    house = House()
    old, new = house.talk(), house.talk()
    await ask(old, "will", "me", [], [["off", b"1"]])
    await ask(old, "will", "me", [], [])
    await ask(old, "will", "client", [], [["off", b"2"]])
    await ask(new, "will", "client", [], [["off", b"3"]])
    old.session.close()
    assert house.state.find("off") is None
    new.session.close()
    assert house.state.find("off") == b"3"
    assert house.shared.wills == {}
    await house.close()


@in_loop
async def test_clients_whose_names_and_ids_look_alike_together_have_wills_of_their_own() -> None:
    house = House()
    plant = house.talk(Identity("jebp/plant", "plant", None))
    line = house.talk(Identity("jebp/plant/line", "plant/line", None))
    await ask(line, "will", "me", [], [["off", b"1"]])
    await ask(plant, "will", "line/me", [], [])
    line.session.close()
    assert house.state.find("off") == b"1"
    plant.session.close()
    await house.close()


@in_loop
async def test_who_has_no_rights_gets_nothing() -> None:
    house = House()
    house.state.set("a", b"1")
    await done([house.state.commit("test")])
    talk = house.talk(NOBODY)
    for method, parameters in (
        ("get", ["a"]),
        ("get_many", [["a"]]),
        ("match", ["#"]),
        ("watch", ["#"]),
        ("as_of", [None, "#", 0, None]),
        ("as_of", ["a", None, 0, None]),
        ("history", ["a", None, 1]),
        ("set", ["a", b"2"]),
        ("set_many", [[["a", b"2"]]]),
        ("compare_and_set", ["a", b"2", 0]),
        ("delete", ["a"]),
        ("delete_match", ["#"]),
        ("lock", ["a", 0]),
        ("will", ["me", ["#"], []]),
        ("will", ["me", [], [["a", b"2"]]]),
    ):
        assert code(await ask(talk, method, *parameters)) == "refused", method
    assert await ask(talk, "list", None) == []
    assert house.state.find("a") == b"1"
    await house.close()


texts = st.text(max_size=30)


@given(
    st.one_of(
        st.builds(m.GetValue, texts),
        st.builds(m.GetValues, st.lists(texts)),
        st.builds(m.MatchValues, texts),
        st.builds(m.ReadPast, *[st.none() | texts] * 2, *[st.none() | st.integers(0, 2**63 - 1)] * 2),
        st.builds(m.ReadHistory, texts, st.none() | st.integers(0, 2**62), st.integers(0, 2**31)),
        st.builds(m.SetValue, texts, st.binary()),
        st.builds(m.SetValues, st.lists(st.tuples(texts, st.binary()))),
        st.builds(m.CompareAndSet, texts, st.binary(), st.integers(0, 2**63 - 1)),
        st.builds(m.ListChildren, st.none() | texts),
        st.builds(m.WatchValues, texts, st.booleans()),
        st.builds(m.LockKey, texts, st.none() | st.integers(0, 2**31)),
        st.builds(m.SetWill, texts, st.lists(texts), st.lists(st.tuples(texts, st.binary()))),
        st.builds(m.Change, texts, st.none() | st.binary(), st.integers(0, 2**62), st.integers(0, 2**62), texts),
        st.builds(m.Revision, st.integers(0, 2**62), st.integers(0, 2**62), st.none() | st.binary(), st.just(0), texts),
    )
)
def test_messages_come_back_as_they_were_said(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
