"""The method `consume` on the server: the bytes of the specification, answers of every kind, and nonsense."""

import asyncio
import struct
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups import Group
from babelbus.core.settings import TopicSettings
from babelbus.protocols.jebp.calls import groups
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.messages import CallItems
from babelbus.records.columns import decode_chunk, iterate
from tests.support.bus import Bus, in_loop, publish_payloads, turns
from tests.support.jebp import Conversation, encode

OPEN, MORE, CANCEL = range(3)
ITEM, END, ERROR = range(3)
Raw = tuple[int, int, bytes]


class House:
    """A bus with the topic `work`, its groups, and a conversation."""

    def __init__(self, records: int = 5) -> None:
        self.bus = Bus(defaults=TopicSettings(ack="written"))
        self.bus.broker.open_groups(self.bus.files, "data")
        topic = self.bus.topic("work")
        if records:
            publish_payloads(topic, [b"%d" % number for number in range(records)], [5] * records)
        self.talk = Conversation(self.bus).connect()

    @property
    def group(self) -> Group:
        return self.bus.broker.groups.get("work", "g")

    def send(self, *items: tuple[int, int, object]) -> None:
        self.talk.send(encode_request(CallItems([(number, kind, encode(body)) for number, kind, body in items])))

    async def hear(self) -> list[Raw]:
        """The items of the next turns."""
        await turns(5)
        assert self.talk.answers() == []
        items, self.talk.wire.items = self.talk.wire.items, []
        return items

    async def join(self, **options: object) -> list[Raw]:
        parameters = {"topic": "work", "group": "g", "window": 100, "create": True, "start": "beginning", **options}
        self.send((1, OPEN, ["consume", list(parameters.values())]))
        heard: list[Raw] = []
        while len(heard) < 2:  # the group is saved first, by a thread
            await asyncio.sleep(0)
            heard += await self.hear()
        return heard

    async def close(self) -> None:
        self.talk.session.close()
        await self.bus.broker.close()


@in_loop
async def test_a_member_is_told_how_the_group_works_and_gets_stored_records() -> None:
    house = House(2)
    joined, delivered = await house.join()
    assert joined == (1, ITEM, msgspec.msgpack.encode(["explicit", 60.0, "key", False]))
    number, kind, body = delivered
    assert (number, kind) == (1, ITEM)
    assert struct.unpack_from(">IiI", body) == (1, 0, 1)
    assert [(one.offset, one.payload) for one in iterate(decode_chunk(body[12:]))] == [(0, b"0"), (1, b"1")]
    await house.close()


@in_loop
async def test_answers_name_records_by_delivery_and_place() -> None:
    house = House()
    await house.join()
    house.send((1, MORE, [0, [1, 0, 2, 1, 4, 1]]))
    assert house.group.info().counts.acknowledged == 3
    house.send((1, MORE, [1, [1, 2, 1], "why", 0.0, False]))
    ((_, _, again),) = await house.hear()
    assert struct.unpack_from(">IiI", again) == (2, 0, 2)
    house.send((1, MORE, [2, [1, 3, 1]]), (1, MORE, [0, [1, 3, 1, 2, 0, 1]]))
    info = house.group.info()
    assert (info.lag, info.counts.acknowledged, info.counts.stale) == (0, 5, 0)
    house.send((1, MORE, [0, [1, 0, 5, 2, 0, 1, 7, 0, 1]]))  # all are answered: nothing is left to be stale
    assert house.group.info().counts.acknowledged == 5
    await house.close()


def test_one_message_extends_no_more_records_than_a_window_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WINDOW_MAX", 100)

    @in_loop
    async def check() -> None:
        house = House()
        await house.join()
        house.send((1, MORE, [2, [1, 0, 2**32 - 1] * 20]))
        assert await house.hear() == []
        house.send((1, MORE, [2, [1, 0, 2**32 - 1] * 20 + [1, 0, 1]]))
        ((_, kind, body),) = await house.hear()
        assert (kind, msgspec.msgpack.decode(body)[0]) == (ERROR, "quota")
        assert not house.group.members
        await house.close()

    check()


@in_loop
async def test_cancel_leaves_in_order_and_a_break_counts_an_attempt() -> None:
    house = House()
    await house.join()
    house.send((1, CANCEL, None))
    assert await house.hear() == [(1, END, b"\xc0")]
    assert not house.group.members
    assert {struct.unpack_from(">IiI", body)[2] for _, _, body in (await house.join())[1:]} == {1}
    house.talk.session.close()
    other = Conversation(house.bus).connect()
    house.talk = other
    heard = await house.join()
    assert {struct.unpack_from(">IiI", body)[2] for _, _, body in heard[1:]} == {2}
    await house.close()


@in_loop
async def test_a_window_is_kept_and_changed() -> None:
    house = House()
    _, delivered = await house.join(window=2)
    assert len(list(iterate(decode_chunk(delivered[2][12:])))) == 2
    house.send((1, MORE, [3, 0]), (1, MORE, [0, [1, 0, 2]]))
    assert await house.hear() == []
    house.send((1, MORE, [3, 3]))
    ((_, _, body),) = await house.hear()
    assert [one.offset for one in iterate(decode_chunk(body[12:]))] == [2, 3, 4]
    await house.close()


@pytest.mark.parametrize(
    "message", [[0, [1, 0]], [0, ["a"]], [7, []], {}, [3, -1], [3, 10**9], [1, [1, 0, 1], 5], None]
)
@in_loop
async def test_a_message_that_is_none_ends_the_member_and_not_the_connection(message: object) -> None:
    house = House()
    await house.join()
    house.send((1, MORE, message), (2, OPEN, ["methods", []]))
    (_, kind, failure), (_, other, _) = await house.hear()
    assert (kind, msgspec.msgpack.decode(failure)[0], other) == (ERROR, "bad_argument", END)
    assert not house.group.members
    await house.close()


numbers = st.integers(-3, 7) | st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.tuples(numbers, numbers, numbers))), max_size=8))
def test_no_answer_ends_more_than_the_records_that_the_member_holds(
    answers: Sequence[tuple[int, Sequence[tuple[int, int, int]]]],
) -> None:
    @in_loop
    async def check() -> None:
        house = House()
        other = Conversation(house.bus).connect()
        first, house.talk = house.talk, other
        await house.join(window=2)  # holds the first two
        house.talk = first
        await house.join(window=2)
        for kind, ranges in answers:
            message: list[object] = [kind, [number for part in ranges for number in part]]
            house.send((1, MORE, [*message, "", 1000.0, False] if kind == 1 else message))
        others = {member for member in house.group.members if member.in_flight == 2}
        assert others, "the records of another member are not touched"
        assert house.group.info().counts.acknowledged <= 2
        assert house.talk.session._calls is not None
        other.session.close()
        await house.close()

    check()


@in_loop
async def test_deliveries_that_are_over_are_forgotten_however_slow_the_member_is() -> None:
    house = House(0)
    house.send((1, OPEN, ["consume", ["work", "g", 100, True, "beginning", 0, {"ack_seconds": 1.0, "order": "none"}]]))
    assert await house.talk.next_items()
    topic = house.bus.broker.topic("work")
    (member,) = house.group.members
    consumer = member.owner
    assert isinstance(consumer, groups.Consumer)
    for _ in range(300):  # one delivery each, given to nobody else and never answered
        publish_payloads(topic, [b"x"], [5])
        await turns(3)
        house.bus.clock.advance(2.0)
        house.group.tick()
        await turns(3)
    assert len(consumer._sent) <= 2 * (100 + groups.SENT_MAX)
    await house.close()
