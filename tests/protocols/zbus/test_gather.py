"""What many connections publish in one turn of the event loop is one append, in order, with one fate."""

from babelbus.protocols.zbus.gather import GATHER_MAX, Gatherer
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.stored import Recorder
from tests.protocols.zbus.peer import House
from tests.support.bus import in_loop, payloads, turns

RECORDER = Recorder({"source": "S", "remote-addr": "/local"})


def body(number: int) -> bytes:
    return RECORDER.encode(Message({"id": "i"}, body=b"%d" % number), 1)


def gatherer_of(house: House) -> Gatherer:
    return house.hub.gatherer


@in_loop
async def test_few_records_wait_for_the_end_of_the_turn_and_share_a_receipt() -> None:
    house = House()
    topic = house.bus.topic("Q")
    receipts = [gatherer_of(house).append(topic, [body(number)], 1, 1) for number in range(5)]
    assert len(set(receipts)) == 1
    assert [one.done for one in receipts] == [False] * 5
    await turns()
    assert [(one.done, one.error) for one in receipts] == [(True, None)] * 5
    assert payloads(topic.partitions[0]) == [b"0", b"1", b"2", b"3", b"4"]


@in_loop
async def test_many_records_are_appended_at_once_behind_those_that_wait() -> None:
    house = House()
    topic = house.bus.topic("Q")
    gatherer_of(house).append(topic, [body(0)], 1, 1)
    receipt = gatherer_of(house).append(topic, [body(number) for number in range(1, GATHER_MAX + 1)], 1, 1)
    assert receipt.done
    assert payloads(topic.partitions[0]) == [b"%d" % number for number in range(GATHER_MAX + 1)]


@in_loop
async def test_all_that_waited_for_a_topic_hear_that_it_is_gone() -> None:
    house = House()
    topic, other = house.bus.topic("Q"), house.bus.topic("R")
    lost, kept = (gatherer_of(house).append(one, [body(0)], 1, 1) for one in (topic, other))
    house.bus.broker.remove_topic("Q")
    await turns()
    assert lost.error is not None
    assert (kept.done, kept.error) == (True, None)
