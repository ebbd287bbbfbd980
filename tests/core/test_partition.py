"""One partition: who is answered when, what readers see of it, and what a disk's bad days change."""

import asyncio
import errno
import functools

import msgspec
import pytest

from babelbus.config import Ack
from babelbus.core.access import SERVER
from babelbus.core.partition import DEFERRED_BYTES_MAX, Partition, TopicClosedError
from babelbus.core.receipt import Receipt
from babelbus.errors import StorageError
from babelbus.records.format import encode_payloads
from babelbus.storage.errors import DiskFullError, OffsetOutOfRangeError
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, Gate, disk_log, done, in_loop, payloads, turns


class Held:
    """A topic with one partition whose flushes can be held."""

    def __init__(self, ack: Ack = "flushed", *, bytes_max: int = 2**62) -> None:
        self.files = FaultyFiles(bytes_max=bytes_max)
        self.bus = Bus(self.files)
        self.topic = self.bus.topic(ack=ack)
        self.partition: Partition = self.topic.partitions[0]
        self.gate = Gate(self.files)

    def append(self, *values: bytes, timestamp: int = NOW) -> Receipt:
        batch = encode_payloads(values, [timestamp] * len(values), self.partition.next_offset)
        return self.partition.append(batch)

    def alter(self, ack: Ack) -> None:
        self.bus.broker.alter_topic("news", {"ack": ack}, principal=SERVER).result()

    def failing(self) -> StorageError | None:
        return self.partition.failing

    def fill_disk(self) -> None:
        self.files.bytes_max = self.files.bytes_used

    def free_disk(self) -> None:
        self.files.bytes_max = 2**62

    async def close(self) -> None:
        self.gate.open()
        await self.bus.broker.close()


@in_loop
async def test_flushed_answers_and_shows_a_record_after_the_flush_and_not_before() -> None:
    held = Held("flushed")
    held.gate.shut()
    receipt = held.append(b"one")
    await held.gate.reached()
    await turns()
    assert not receipt.done
    assert held.partition.high_watermark == 0
    assert payloads(held.partition) == []
    held.gate.open()
    await done([receipt])
    assert receipt.error is None
    assert payloads(held.partition) == [b"one"]
    await held.close()


@in_loop
async def test_written_answers_at_once_with_the_record_in_the_file() -> None:
    held = Held("written")
    held.gate.shut()
    receipt = held.append(b"one")
    assert receipt.done
    assert b"one" in held.files.content("data/topics/news/0/00000000000000000000.log")
    assert payloads(held.partition) == [b"one"]
    assert held.gate.flushes == 0
    await held.close()


@in_loop
async def test_accepted_answers_whatever_the_disk_says_and_shows_what_is_written() -> None:
    held = Held("accepted")
    held.fill_disk()
    receipts = [held.append(b"one"), held.append(b"two")]
    assert [(receipt.done, receipt.error) for receipt in receipts] == [(True, None)] * 2
    assert [receipt.base_offset for receipt in receipts] == [0, 1]
    assert held.partition.next_offset == 2
    assert payloads(held.partition) == []  # what is in memory alone may still vanish
    held.free_disk()
    receipts.append(held.append(b"three"))
    assert payloads(held.partition) == [b"one", b"two", b"three"]
    await held.close()


@in_loop
async def test_everything_that_came_during_a_flush_is_covered_by_the_next_one() -> None:
    held = Held("flushed")
    held.gate.shut()
    receipts = [held.append(b"first")]
    await held.gate.reached()
    receipts += [held.append(b"%d" % number) for number in range(500)]
    held.gate.open()
    await done(receipts)
    assert held.gate.flushes == 2
    assert held.partition.high_watermark == 501
    await held.close()


@in_loop
async def test_receipts_are_answered_in_order_with_the_place_of_their_batch() -> None:
    held = Held("flushed")
    order: list[int] = []
    receipts = []
    for size in (1, 3, 2):
        receipt = held.append(*[b"x"] * size)
        receipt.when_done(lambda made: order.append(made.base_offset))
        receipts.append(receipt)
    await done(receipts)
    assert order == [0, 1, 4]
    assert [(one.partition, one.base_offset, one.count) for one in receipts] == [(0, 0, 1), (0, 1, 3), (0, 4, 2)]
    await held.close()


@in_loop
async def test_a_callback_that_fails_costs_the_others_of_its_flush_nothing() -> None:
    held = Held("flushed")

    def broken(_: Receipt) -> None:
        raise ValueError("a bug")

    first, second = held.append(b"1"), held.append(b"2")
    first.when_done(broken)
    await done([first, second])
    assert held.partition.high_watermark == 2
    await held.close()


# -- reading ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_readers_stop_at_the_high_watermark() -> None:
    held = Held("flushed")
    await done([held.append(b"seen")])
    held.gate.shut()
    receipt = held.append(b"hidden")
    assert (await held.partition.read(1, 1000)).data == b""
    assert payloads(held.partition) == [b"seen"]
    with pytest.raises(OffsetOutOfRangeError):
        await held.partition.read(2, 1000)
    held.gate.open()
    await done([receipt])
    assert payloads(held.partition) == [b"seen", b"hidden"]
    await held.close()


@in_loop
async def test_a_time_is_found_below_the_high_watermark_only() -> None:
    held = Held("flushed")
    await done([held.append(b"old", timestamp=NOW)])
    held.gate.shut()
    receipt = held.append(b"new", timestamp=NOW + 10)
    assert await held.partition.find_time(NOW) == 0
    assert await held.partition.find_time(NOW + 1) is None
    held.gate.open()
    await done([receipt])
    assert await held.partition.find_time(NOW + 1) == 1
    assert await held.partition.find_time(NOW + 11) is None
    await held.close()


@in_loop
async def test_a_watcher_is_called_once_when_its_record_can_be_read() -> None:
    held = Held("flushed")
    called: list[int] = []
    for offset in (2, 0, 1):
        held.partition.watch(offset, functools.partial(called.append, offset))
    await done([held.append(b"0", b"1")])
    assert called == [0, 1]
    held.partition.watch(1, functools.partial(called.append, 11))  # can be read already
    await done([held.append(b"2")])
    assert called == [0, 1, 11, 2]
    await held.close()


@in_loop
async def test_a_watcher_that_was_cancelled_is_not_called() -> None:
    held = Held("written")
    called: list[int] = []
    cancels = [held.partition.watch(0, functools.partial(called.append, number)) for number in range(3)]
    cancels[1]()
    cancels[1]()
    held.append(b"x")
    assert called == [0, 2]
    await held.close()


@in_loop
async def test_waiting_ends_with_the_record_and_leaves_nothing_behind_when_given_up() -> None:
    held = Held("written")
    waiting = asyncio.ensure_future(held.partition.wait(0))
    given_up = asyncio.ensure_future(held.partition.wait(5))
    await turns()
    assert not waiting.done()
    held.append(b"x")
    await waiting
    given_up.cancel()
    await turns()
    assert held.partition._watchers == []
    await held.close()


@in_loop
async def test_waiting_ends_when_the_topic_goes_away() -> None:
    held = Held("written")
    waiting = asyncio.ensure_future(held.partition.wait(0))
    await turns()
    held.bus.broker.remove_topic("news", principal=SERVER).result()
    with pytest.raises(TopicClosedError):
        await waiting
    with pytest.raises(TopicClosedError):
        await held.partition.wait(0)
    await held.close()


@in_loop
async def test_a_partition_that_was_closed_takes_no_records() -> None:
    held = Held("flushed")
    await held.close()
    with pytest.raises(TopicClosedError):
        held.append(b"late")


@in_loop
async def test_what_waits_for_a_flush_is_answered_when_the_server_stops() -> None:
    held = Held("flushed")
    receipt = held.append(b"last")
    await held.close()
    assert receipt.done
    assert receipt.error is None
    again = Bus(held.files)
    assert payloads(again.broker.topic("news").partitions[0]) == [b"last"]
    await again.broker.close()


# -- other levels at run time ----------------------------------------------------------------------------------------


@in_loop
async def test_a_lower_level_shows_no_record_that_still_waits_for_its_flush() -> None:
    held = Held("flushed")
    held.gate.shut()
    strict = held.append(b"strict")
    await held.gate.reached()
    held.alter("written")
    loose = held.append(b"loose")
    assert payloads(held.partition) == []
    assert not strict.done
    held.gate.open()
    await done([strict, loose])
    assert payloads(held.partition) == [b"strict", b"loose"]
    assert held.append(b"now").done
    await held.close()


@in_loop
async def test_accepted_behind_flushed_is_seen_when_the_flush_is_done() -> None:
    held = Held("flushed")
    held.gate.shut()
    strict = held.append(b"strict")
    await held.gate.reached()
    held.alter("accepted")
    assert held.append(b"loose").done
    await turns()
    assert payloads(held.partition) == []
    held.gate.open()
    await done([strict])
    assert payloads(held.partition) == [b"strict", b"loose"]
    await held.close()


@in_loop
async def test_a_higher_level_is_not_answered_behind_records_that_are_in_memory_alone() -> None:
    held = Held("accepted")
    held.fill_disk()
    held.append(b"accepted")
    await turns()
    held.partition.configure(msgspec.structs.replace(held.topic.settings, ack="flushed"), 2**20)
    with pytest.raises(DiskFullError):
        held.append(b"refused")
    held.free_disk()
    receipt = held.append(b"flushed")
    assert not receipt.done
    await done([receipt])
    assert payloads(held.partition) == [b"accepted", b"flushed"]
    await held.close()


# -- bad days --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_full_disk_refuses_publishers_serves_readers_and_ends_by_itself() -> None:
    held = Held("flushed")
    await done([held.append(b"before")])
    held.fill_disk()
    with pytest.raises(DiskFullError):
        held.append(b"refused")
    assert isinstance(held.failing(), DiskFullError)
    assert payloads(held.partition) == [b"before"]
    held.free_disk()
    receipt = held.append(b"after")
    await done([receipt])
    assert held.failing() is None
    assert (receipt.error, receipt.base_offset) == (None, 1)
    assert payloads(held.partition) == [b"before", b"after"]
    await held.close()


@in_loop
async def test_accepted_records_wait_for_room_and_the_next_one_tries_again() -> None:
    held = Held("accepted")
    held.fill_disk()
    assert held.append(b"one").done
    await turns()
    assert held.failing() is not None
    assert payloads(held.partition) == []
    held.free_disk()
    held.append(b"two")
    await turns()
    assert held.failing() is None
    assert payloads(held.partition) == [b"one", b"two"]
    await held.close()


@in_loop
async def test_accepted_records_are_tried_again_without_another_publish() -> None:
    held = Held("accepted")
    held.fill_disk()
    held.append(b"one")
    await turns()
    held.free_disk()
    await held.partition.wait(0)
    assert payloads(held.partition) == [b"one"]
    await held.close()


@in_loop
async def test_what_a_full_disk_lets_accepted_records_hold_in_memory_is_bounded() -> None:
    held = Held("accepted")
    held.fill_disk()
    large = b"x" * (DEFERRED_BYTES_MAX // 2)
    held.append(large)
    with pytest.raises(DiskFullError):
        held.append(large)
    assert held.partition.next_offset == 1
    held.free_disk()
    held.append(large)
    await turns()
    assert held.partition.high_watermark == 2
    await held.close()


@in_loop
async def test_a_failed_flush_is_told_to_publishers_and_later_ones_are_answered() -> None:
    held = Held("flushed")
    await done([held.append(b"safe")])
    held.files.fail("flush", suffix=".log")
    (unknown,) = await done([held.append(b"unknown")])
    assert isinstance(unknown.error, StorageError)
    assert held.bus.metrics.flush_failures_total._value.get() == 1
    (after,) = await done([held.append(b"after")])
    assert after.error is None
    assert payloads(held.partition)[0] == b"safe"
    assert payloads(held.partition)[-1] == b"after"
    await held.close()


@in_loop
async def test_a_disk_that_refuses_for_long_is_used_again_once_it_works() -> None:
    held = Held("flushed")
    await done([held.append(b"safe")])
    held.files.fail("flush", suffix=".log", times=6)
    refused = 0
    while True:
        try:
            (receipt,) = await done([held.append(b"try")])
        except StorageError:
            refused += 1
            await held.gate.reached()
            await turns()
            continue
        if receipt.error is None:
            break
        refused += 1
    assert refused
    assert payloads(held.partition)[0] == b"safe"
    assert payloads(held.partition)[-1] == b"try"
    await held.close()


@in_loop
async def test_a_full_disk_keeps_no_stop_from_ending() -> None:
    held = Held("written")
    held.append(b"kept")
    held.fill_disk()
    held.files.fail("open", errno.ENOSPC, suffix=".new", times=100)
    await held.close()
    held.free_disk()
    held.files.kill()
    again = Bus(held.files)
    assert payloads(again.broker.topic("news").partitions[0]) == [b"kept"]
    await again.broker.close()


@in_loop
async def test_readers_step_back_when_the_disk_lost_what_they_saw_at_a_lower_level() -> None:
    held = Held("written")
    held.append(*[b"%d" % number for number in range(10)])
    assert held.partition.high_watermark == 10
    disk_log(held.partition).truncate(6)  # what a rescue does with records that cannot be read back
    held.partition.flushed(-1, StorageError("the flush failed"))
    assert held.partition.high_watermark == 6
    assert payloads(held.partition) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert held.append(b"new").base_offset == 6
    await held.close()
