"""Reads that wait for the disk: nobody else waits with them, and whoever asked goes on when the records are there."""

import asyncio
import threading
from collections.abc import Callable

from babelbus.core.access import SERVER
from babelbus.core.groups.settings import END, GroupSettings
from babelbus.core.record import Event
from babelbus.core.work import Work
from babelbus.errors import StorageError
from babelbus.storage.contract import Chunk
from tests.core.groups.support import EXPLICIT, Crew, Taker, take
from tests.storage.faults import FaultyFiles
from tests.support.bus import SAFETY_NET_SECONDS, in_loop, publish, turns

ON_DELIVERY = GroupSettings(ack="on_delivery")


class Cold:
    """A disk whose reads stand still until they are let through."""

    def __init__(self, files: FaultyFiles) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self.readers: set[str] = set()
        files.before_call = self._pass

    def _pass(self, operation: str, path: str) -> None:
        if operation == "pread" and path.endswith(".log"):
            self.readers.add(threading.current_thread().name)
            self._reached.set()
            assert self._open.wait(SAFETY_NET_SECONDS)

    async def reached(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self._reached.wait, SAFETY_NET_SECONDS)

    def thaw(self) -> None:
        self._open.set()


def cold_crew() -> tuple[Crew, Cold]:
    files = FaultyFiles()
    crew = Crew(files, reads_wait=True, tail_cache_bytes=0)
    return crew, Cold(files)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until_got(taker: Taker, count: int) -> list[int]:
    await until(lambda: len(taker.got) >= count)
    return taker.numbers


@in_loop
async def test_a_read_at_the_tail_asks_no_thread() -> None:
    crew = Crew(reads_wait=True)
    crew.publish(*range(5))
    partition = crew.broker.topic("work").partitions[0]
    chunk = partition.read_cached(1, 2**20, 4)
    assert chunk is not None
    assert (chunk.base_offset, chunk.next_offset) == (1, 4)
    assert Work(partition.read(0, 2**20)).done
    partition.forget_tail()
    assert partition.read_cached(0, 2**20) is None
    await crew.close()


@in_loop
async def test_a_cold_read_stops_no_publisher_and_no_other_reader_and_goes_on() -> None:
    crew, cold = cold_crew()
    crew.publish(*range(4))
    read: Work[Chunk] = Work(crew.broker.topic("work").partitions[0].read(0, 2**20))
    await cold.reached()
    other = crew.bus.topic("other", engine="memory")
    publish(crew.broker, [Event("other", b"x")])
    assert other.partitions[0].high_watermark == 1
    crew.publish(4)
    assert crew.broker.topic("work").partitions[0].high_watermark == 5
    assert [one.done for one in [read]] == [False]
    cold.thaw()
    await until(lambda: read.done)
    assert read.result().next_offset == 4
    assert all(name.startswith("reader-disk") for name in cold.readers)
    await crew.close()


@in_loop
async def test_a_group_hands_out_what_is_loaded_and_in_order() -> None:
    crew, cold = cold_crew()
    cold.thaw()
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(300))
    taker = Taker(group)
    assert await until_got(taker, 300) == list(range(300))
    assert all(name.startswith("reader-disk") for name in cold.readers)
    await crew.close()


@in_loop
async def test_take_says_what_is_on_its_way() -> None:
    crew, cold = cold_crew()
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(3))
    assert take(group, 10) == []
    loading = group.loading
    assert loading is not None
    arrived = asyncio.Event()
    loading.when_done(lambda _: arrived.set())
    cold.thaw()
    await arrived.wait()
    assert [one.payload for one in take(group, 10)] == [b"0", b"1", b"2"]
    assert group.loading is None
    await crew.close()


@in_loop
async def test_a_seek_forgets_what_is_on_its_way() -> None:
    crew, cold = cold_crew()
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(6))
    taker = Taker(group)
    await turns()
    await cold.reached()
    group.seek(END, principal=SERVER)
    crew.publish(6)
    cold.thaw()
    assert await until_got(taker, 1) == [6]
    await crew.close()


@in_loop
async def test_what_comes_again_is_loaded_too_and_what_failed_too_often_is_buried() -> None:
    crew, cold = cold_crew()
    cold.thaw()
    group = crew.group(EXPLICIT)
    crew.publish(*range(3))
    taker = Taker(group)
    for _ in range(2):
        await until_got(taker, 3)
        taker.member.nack(taker.got, delay_seconds=0)
        taker.clear()
    await until_got(taker, 3)
    assert {one.attempt for one in taker.got} == {3}
    taker.member.nack(taker.got)
    await until(lambda: group.counts.dead_lettered == 3)
    letters = crew.broker.topic("dead-letters/g").partitions[0]
    assert letters.high_watermark == 3
    assert all(name.startswith("reader-disk") for name in cold.readers)
    await crew.close()


@in_loop
async def test_a_load_that_fails_is_tried_again() -> None:
    files = FaultyFiles()
    crew = Crew(files, reads_wait=True, tail_cache_bytes=0)
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(3))
    files.fail("pread", suffix=".log")
    taker = Taker(group)
    await until(lambda: group.stall is not None)
    assert taker.numbers == []
    group._go_on()  # what its timer calls
    assert await until_got(taker, 3) == [0, 1, 2]
    await crew.close()


@in_loop
async def test_work_that_ends_in_a_bug_is_answered() -> None:
    async def fail() -> int:
        raise ZeroDivisionError

    work = Work(fail())
    assert work.done
    assert isinstance(work.error, StorageError)
