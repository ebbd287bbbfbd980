"""A topic: which partition gets a record, resends of producers, and what live subscriptions are told."""

import zlib
from collections import Counter
from collections.abc import Sequence

import pytest

from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.core.subject import EVERYTHING, LENGTH_MAX, below
from babelbus.core.topic import (
    SequenceGapError,
    SequenceTooOldError,
    UnknownPartitionError,
    event_of,
)
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import InvalidRecordError
from babelbus.records.record import Record
from babelbus.storage.errors import DiskError, DiskFullError
from babelbus.storage.producers import BATCHES_MAX
from tests.storage.faults import FaultyFiles
from tests.support.bus import (
    NOW,
    Bus,
    Gate,
    batch,
    done,
    events,
    in_loop,
    payloads,
    publish,
    publish_batch,
    publish_payloads,
    read,
    turns,
)

PRODUCER = 7


# -- partitions ------------------------------------------------------------------------------------------------------


@in_loop
async def test_records_without_a_key_go_round_robin() -> None:
    bus = Bus()
    topic = bus.topic(partitions=3)
    await done(publish_payloads(topic, [b"0", b"1", b"2", b"3"], [NOW] * 4))
    await done(publish_payloads(topic, [b"4"], [NOW]))
    await done(publish_payloads(topic, [b"5", b"6"], [NOW] * 2))
    assert [payloads(one) for one in topic.partitions] == [[b"0", b"3", b"6"], [b"1", b"4"], [b"2", b"5"]]
    await bus.broker.close()


@in_loop
async def test_a_receipt_is_given_for_each_partition_that_got_some() -> None:
    bus = Bus()
    topic = bus.topic(partitions=3)
    receipts = await done(publish_payloads(topic, [b"0", b"1"], [NOW] * 2))
    assert [(one.partition, one.count) for one in receipts] == [(0, 1), (1, 1)]
    await bus.broker.close()


@in_loop
async def test_records_of_one_key_stay_in_one_partition_and_in_order() -> None:
    bus = Bus()
    topic = bus.topic(partitions=4)
    keys = [b"key-%d" % number for number in range(20)]
    await done(publish(topic, [Event("news", b"%d" % turn, key) for turn in range(3) for key in keys]))
    for number, partition in enumerate(topic.partitions):
        found = read(partition)
        assert {zlib.crc32(record.key or b"") % 4 for record in found} <= {number}
        for key in keys:
            mine = [record.payload for record in found if record.key == key]
            assert mine in ([], [b"0", b"1", b"2"])
    assert sum(partition.next_offset for partition in topic.partitions) == 60
    await bus.broker.close()


@in_loop
async def test_events_without_a_key_are_spread_evenly() -> None:
    bus = Bus()
    topic = bus.topic(partitions=3)
    await done(publish(topic, events(*[b"x"] * 9)))
    assert [partition.next_offset for partition in topic.partitions] == [3, 3, 3]
    await bus.broker.close()


@in_loop
async def test_small_publishes_of_one_turn_are_one_write() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic(ack="written")
    writes: Counter[str] = Counter()

    def count(operation: str, path: str) -> None:
        writes[operation] += path.endswith(".log")

    files.before_call = count
    receipts = [publish_payloads(topic, [b"%d" % number], [NOW])[0] for number in range(50)]
    assert not any(receipt.done for receipt in receipts)
    await done(receipts)
    assert writes["pwrite"] == 1
    assert payloads(topic.partitions[0]) == [b"%d" % number for number in range(50)]
    await bus.broker.close()


@in_loop
async def test_a_large_publish_does_not_overtake_what_was_gathered() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    first = publish_payloads(topic, [b"first"], [NOW])
    second = publish_payloads(topic, [b"x"] * 100, [NOW] * 100)
    third = publish(topic, events(b"third"))
    await done([*first, *second, *third])
    assert payloads(topic.partitions[0]) == [b"first", *[b"x"] * 100, b"third"]
    await bus.broker.close()


@in_loop
async def test_a_time_of_zero_is_the_servers_and_never_runs_backwards() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    await done(publish_payloads(topic, [b"a"], [0]))
    bus.clock.jump_to(NOW - 3_600_000)
    await done(publish_payloads(topic, [b"b", b"c"], [0, 5]))
    await done(publish(topic, events(b"d")))
    assert [record.timestamp for record in read(topic.partitions[0])] == [NOW, NOW, 5, NOW]
    await bus.broker.close()


@in_loop
async def test_a_full_disk_is_an_error_in_the_receipt() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic()
    files.bytes_max = files.bytes_used
    for receipts in (publish_payloads(topic, [b"x"], [NOW]), publish_payloads(topic, [b"x"] * 70, [NOW] * 70),
                     publish(topic, events(b"x"))):  # fmt: skip
        (receipt,) = await done(receipts)
        assert isinstance(receipt.error, DiskFullError)
    files.bytes_max = 2**62
    await done(publish_payloads(topic, [b"y"], [NOW]))
    assert payloads(topic.partitions[0]) == [b"y"]
    await bus.broker.close()


# -- producers -------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_resend_gets_the_first_answer_and_stores_nothing() -> None:
    bus = Bus()
    topic = bus.topic(partitions=2)
    first = publish_batch(topic, batch(b"a", b"b"), producer_id=PRODUCER, first_sequence=0)
    second = publish_batch(topic, batch(b"c"), producer_id=PRODUCER, first_sequence=2)
    await done([first, second])
    for sent, answer in ((batch(b"a", b"b"), first), (batch(b"c"), second)):
        sequence = 0 if answer is first else 2
        again = publish_batch(topic, sent, producer_id=PRODUCER, first_sequence=sequence)
        assert again.done
        assert (again.partition, again.base_offset) == (answer.partition, answer.base_offset)
    assert [payloads(one) for one in topic.partitions] == [[b"a", b"b"], [b"c"]]
    await bus.broker.close()


@in_loop
async def test_a_resend_while_the_first_is_being_flushed_waits_with_it() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, gate = bus.topic(), Gate(files)
    gate.shut()
    first = publish_batch(topic, batch(b"a"), producer_id=PRODUCER, first_sequence=0)
    await gate.reached()
    again = publish_batch(topic, batch(b"a"), producer_id=PRODUCER, first_sequence=0)
    await turns()
    assert not first.done
    assert not again.done
    gate.open()
    await done([first, again])
    assert (again.error, again.base_offset) == (None, 0)
    assert payloads(topic.partitions[0]) == [b"a"]
    await bus.broker.close()


@in_loop
async def test_a_resend_after_a_restart_gets_the_first_answer() -> None:
    bus = Bus()
    topic = bus.topic()
    await done([publish_batch(topic, batch(b"%d" % n), producer_id=PRODUCER, first_sequence=n) for n in range(5)])
    bus = await bus.restart()
    topic = bus.broker.topic("news")
    again = publish_batch(topic, batch(b"3"), producer_id=PRODUCER, first_sequence=3)
    await done([again])
    assert again.base_offset == 3
    following = publish_batch(topic, batch(b"5"), producer_id=PRODUCER, first_sequence=5)
    await done([following])
    assert payloads(topic.partitions[0]) == [b"%d" % number for number in range(6)]
    await bus.broker.close()


@in_loop
async def test_a_resend_after_a_kill_gets_the_first_answer() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic(ack="written")
    await done([publish_batch(topic, batch(b"%d" % n), producer_id=PRODUCER, first_sequence=n) for n in range(3)])
    files.kill()  # no close: the next start reads the log
    again = Bus(files)
    receipt = publish_batch(again.broker.topic("news"), batch(b"1"), producer_id=PRODUCER, first_sequence=1)
    await done([receipt])
    assert receipt.base_offset == 1
    assert payloads(again.broker.topic("news").partitions[0]) == [b"0", b"1", b"2"]
    await again.broker.close()


@in_loop
async def test_a_resend_after_a_failed_flush_is_stored_once() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic()
    await done([publish_batch(topic, batch(b"0"), producer_id=PRODUCER, first_sequence=0)])
    files.fail("flush", suffix=".log", drop=False)
    (unknown,) = await done([publish_batch(topic, batch(b"1"), producer_id=PRODUCER, first_sequence=1)])
    assert unknown.error is not None
    (again,) = await done([publish_batch(topic, batch(b"1"), producer_id=PRODUCER, first_sequence=1)])
    assert again.error is None
    assert payloads(topic.partitions[0]) == [b"0", b"1"]
    await bus.broker.close()


@in_loop
async def test_a_batch_ahead_of_the_next_sequence_is_refused_until_those_before_it_came() -> None:
    bus = Bus()
    topic = bus.topic()
    await done([publish_batch(topic, batch(b"0"), producer_id=PRODUCER, first_sequence=0)])
    with pytest.raises(SequenceGapError, match="1 is next"):
        publish_batch(topic, batch(b"2"), producer_id=PRODUCER, first_sequence=2)
    for number in (1, 2):
        await done([publish_batch(topic, batch(b"%d" % number), producer_id=PRODUCER, first_sequence=number)])
    assert payloads(topic.partitions[0]) == [b"0", b"1", b"2"]
    await bus.broker.close()


@in_loop
async def test_a_resend_of_what_is_not_remembered_any_more_is_refused() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    for number in range(BATCHES_MAX + 1):
        publish_batch(topic, batch(b"x"), producer_id=PRODUCER, first_sequence=number)
    with pytest.raises(SequenceTooOldError):
        publish_batch(topic, batch(b"x"), producer_id=PRODUCER, first_sequence=0)
    assert publish_batch(topic, batch(b"x"), producer_id=PRODUCER, first_sequence=1).base_offset == 1
    with pytest.raises(SequenceTooOldError):  # a resend is the same batch, not a part of it or more
        publish_batch(topic, batch(b"x", b"y"), producer_id=PRODUCER, first_sequence=1)
    await bus.broker.close()


@in_loop
async def test_producers_do_not_know_of_each_other_and_none_is_no_producer() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    publish_batch(topic, batch(b"a"), producer_id=1, first_sequence=0)
    publish_batch(topic, batch(b"b"), producer_id=2, first_sequence=0)
    publish_batch(topic, batch(b"c"))
    publish_batch(topic, batch(b"c"))
    assert payloads(topic.partitions[0]) == [b"a", b"b", b"c", b"c"]
    await bus.broker.close()


@in_loop
async def test_a_batch_goes_to_the_partition_that_it_names() -> None:
    bus = Bus()
    topic = bus.topic(partitions=2, ack="written")
    assert publish_batch(topic, batch(b"x"), partition=1).partition == 1
    for partition in (-2, 2):
        with pytest.raises(UnknownPartitionError):
            publish_batch(topic, batch(b"x"), partition=partition)
    assert [payloads(one) for one in topic.partitions] == [[], [b"x"]]
    await bus.broker.close()


# -- live subscriptions ----------------------------------------------------------------------------------------------


class Heard:
    def __init__(self, bus: Bus) -> None:
        self.events: list[Event] = []
        bus.broker.subscribe(EVERYTHING, self.take, principal=SERVER)

    def take(self, events: Sequence[Event]) -> None:
        self.events += events

    @property
    def payloads(self) -> list[bytes | None]:
        return [event.payload for event in self.events]


@in_loop
async def test_live_subscriptions_hear_of_a_record_when_its_level_is_reached() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, gate, heard = bus.topic(), Gate(files), Heard(bus)
    gate.shut()
    receipts = publish_payloads(topic, [b"a"], [NOW])
    await gate.reached()
    assert heard.events == []
    gate.open()
    await done(receipts)
    assert heard.events == [Event("news", b"a", None, (), NOW)]
    await bus.broker.close()


@in_loop
async def test_live_subscriptions_never_hear_of_what_was_refused() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, heard = bus.topic(), Heard(bus)
    files.bytes_max = files.bytes_used
    await done([*publish_payloads(topic, [b"a"], [NOW]), *publish(topic, events(b"b"))])
    with pytest.raises(DiskFullError):
        publish_batch(topic, batch(b"c"))
    files.bytes_max = 2**62
    files.fail("flush", suffix=".log")
    await done(publish_payloads(topic, [b"d"], [NOW]))
    assert heard.events == []
    await done(publish_payloads(topic, [b"e"], [NOW]))
    assert heard.payloads == [b"e"]
    await bus.broker.close()


@in_loop
async def test_a_resend_is_not_heard_again_and_what_marks_it_not_at_all() -> None:
    bus = Bus()
    topic, heard = bus.topic(), Heard(bus)
    for _ in range(2):
        await done([publish_batch(topic, batch(b"a", key=b"k"), producer_id=PRODUCER, first_sequence=0)])
    assert heard.events == [Event("news", b"a", b"k", (), NOW)]
    await bus.broker.close()


@in_loop
async def test_a_live_event_is_what_was_stored() -> None:
    bus = Bus()
    topic, heard = bus.topic(), Heard(bus)
    headers = ((b"ce_id", b"1"), (b"$batch", b"forged"))
    await done(publish(topic, [Event("news", b"a", b"k", headers)]))
    stored = [event_of("news", record) for record in read(topic.partitions[0])]
    assert stored == [Event("news", b"a", b"k", ((b"ce_id", b"1"),), NOW)]
    assert heard.events == stored
    await bus.broker.close()


@in_loop
async def test_a_subject_below_the_topic_travels_as_a_header_and_comes_back() -> None:
    bus = Bus()
    topic = bus.topic("plant")
    heard: list[Event] = []
    bus.broker.subscribe(below("plant"), heard.extend, principal=SERVER)
    await done(publish(bus.broker, events(b"hot", subject="plant/line1/temp")))
    (record,) = read(topic.partitions[0])
    assert record.headers == ((SUBJECT_HEADER, b"plant/line1/temp"),)
    assert event_of("plant", record) == Event("plant/line1/temp", b"hot", None, (), NOW)
    assert [event.subject for event in heard] == ["plant/line1/temp"]
    await bus.broker.close()


def test_a_record_cannot_claim_a_subject_of_another_topic() -> None:
    for claimed in (b"other/a", b"plants/a", b"", None, b"plant/" + b"x" * (LENGTH_MAX - 5)):
        record = Record(b"x", headers=((SUBJECT_HEADER, claimed),), timestamp=NOW)
        assert event_of("plant", record) == Event("plant", b"x", None, record.headers, NOW)
    longest = "plant/" + "x" * (LENGTH_MAX - 6)
    record = Record(b"x", headers=((SUBJECT_HEADER, longest.encode()),), timestamp=NOW)
    assert event_of("plant", record).subject == longest


@in_loop
async def test_an_event_that_cannot_be_stored_is_refused_alone() -> None:
    bus = Bus()
    topic = bus.topic()
    too_many = tuple((b"%d" % number, b"") for number in range(128))
    (receipt,) = await done(publish(topic, [Event("news", b"x", None, too_many)]))
    assert isinstance(receipt.error, InvalidRecordError)
    await done(publish(topic, events(b"fine")))
    assert payloads(topic.partitions[0]) == [b"fine"]
    await bus.broker.close()


@in_loop
async def test_an_append_that_writes_a_checkpoint_writes_the_batch_of_its_producer_into_it() -> None:
    bus = Bus()
    topic = bus.topic(segment_bytes=1024, ack="written")
    for number in range(8):  # each one rolls to a new segment, and rolling writes a checkpoint
        publish_batch(topic, batch(*[b"x" * 100] * 20), producer_id=PRODUCER, first_sequence=20 * number)
    await bus.die()
    again = await bus.restart()
    topic = again.broker.topic("news")
    receipt = publish_batch(topic, batch(*[b"x" * 100] * 20), producer_id=PRODUCER, first_sequence=140)
    assert receipt.base_offset == 140
    assert topic.partitions[0].next_offset == 160
    await again.broker.close()


@in_loop
async def test_a_batch_that_the_disk_refused_is_not_taken_for_stored_when_it_comes_again() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic(ack="written")
    files.fail("pwrite", suffix=".log")
    with pytest.raises(DiskError):
        publish_batch(topic, batch(b"one", b"two"), producer_id=PRODUCER, first_sequence=0)
    await turns()
    receipt = publish_batch(topic, batch(b"one", b"two"), producer_id=PRODUCER, first_sequence=0)
    assert receipt.base_offset == 0
    assert payloads(topic.partitions[0]) == [b"one", b"two"]
    await bus.broker.close()
