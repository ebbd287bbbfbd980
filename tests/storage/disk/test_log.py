"""What a log on disk does beyond the contract: rolling, gaps, damage, bounds of a start, what the cleaner may touch."""

import errno
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk
from babelbus.records.format import TOMBSTONE, CorruptRecordError, encode_batch, mark_producer
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.errors import DiskError, OffsetOutOfRangeError
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, NOW, append, fill, number_of, numbered, open_log, payloads, read_all, records
from tests.support.clock import ManualClock

COMPACT = LogSettings(cleanup="compact", tombstone_seconds=60)


def keyed(key: str, payload: bytes | None, timestamp: int = NOW) -> Record:
    return Record(payload, key.encode(), timestamp=timestamp)


def kept(log: Log) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.payload) for record in read_all(log)]


# -- rolling -----------------------------------------------------------------------------------------------------------


def test_a_segment_is_named_by_its_first_offset_and_begins_when_the_last_is_full() -> None:
    files = FaultyFiles()
    log = open_log(files, LogSettings(segment_bytes=1000))
    fill(log, 100)
    bases = [int(path[-24:-4]) for path in files.paths() if path.endswith(".log")]
    assert bases == [0, 20, 40, 60, 80]
    assert log.part_count == 5
    assert [number_of(record) for record in read_all(log, bytes_max=300)] == list(range(100))


def test_a_segment_rolls_by_age_when_the_next_record_comes() -> None:
    clock = ManualClock(NOW)
    log = open_log(FaultyFiles(), LogSettings(segment_seconds=60), clock)
    fill(log, 1)
    clock.advance(59)
    fill(log, 1)
    assert log.part_count == 1
    clock.advance(1)
    assert log.part_count == 1
    fill(log, 1)
    assert log.part_count == 2


def test_a_batch_larger_than_a_segment_stays_together() -> None:
    log = open_log(FaultyFiles(), LogSettings(segment_bytes=1000))
    fill(log, 100, batch=100)
    assert log.part_count == 1


# -- reading -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(records(), min_size=1, max_size=30), min_size=1, max_size=8),
    st.integers(200, 3000),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 2000)), max_size=10),
)
def test_any_read_gives_the_records_that_were_appended(
    batches: list[list[Record]], segment_bytes: int, reads: list[tuple[float, float, int]]
) -> None:
    log = open_log(MemoryFiles(), LogSettings(segment_bytes=segment_bytes))
    sent = [record for batch in batches for record in batch]
    for batch in batches:
        append(log, batch)
    assert payloads(read_all(log)) == payloads(sent)
    for low, high, bytes_max in reads:
        offset, end = round(low * len(sent)), round(high * len(sent))
        chunk = log.read(offset, bytes_max, end)
        assert len(chunk.data) <= bytes_max or chunk.next_offset == offset + 1
        assert chunk.next_offset <= max(end, offset)
        columns = decode_chunk(chunk.data)
        assert columns.offsets.tolist() == list(range(offset, chunk.next_offset))
        assert columns.timestamps.tolist() == [record.timestamp for record in sent[offset : chunk.next_offset]]


def test_the_time_of_a_damaged_record_leads_to_it_and_not_past_it() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 3000, batch=100)
    log.close()
    at = log.read(0, 2**20).data.index(b"1500.") - 34
    files.content(f"{FOLDER}/{0:020d}.log")[at + 20] ^= 0x40
    log = open_log(files)
    assert log.find_time(NOW + 1400) == 1400
    assert log.find_time(NOW + 1500) == 1500
    with pytest.raises(CorruptRecordError):
        log.read(1500, 1000)
    assert log.find_time(NOW + 1501) in (1500, 1501)


# -- compaction --------------------------------------------------------------------------------------------------------


def compacted(files: FaultyFiles | MemoryFiles) -> Log:
    """Offsets 0 to 8999 of which compaction left every key's last, and the last of each segment."""
    log = open_log(files, COMPACT)
    chance = random.Random(3)
    for first in range(0, 9000, 3000):
        append(log, [keyed(f"k{chance.randrange(6000)}", b"%d." % n, NOW + n) for n in range(first, first + 3000)])
        log.roll()
    log.clean(NOW)
    return log


def test_a_read_from_a_removed_offset_goes_on_at_the_next_that_is_there() -> None:
    files = FaultyFiles()
    log = compacted(files)
    left = [offset for offset, _ in kept(log)]
    assert 3000 < len(left) < 6000
    log.close()
    for again in (log, open_log(files, COMPACT)):
        if again is log:
            continue
        for offset in range(0, 9000, 7):
            following = next((other for other in left if other >= offset), 9000)
            chunk = again.read(offset, 200)
            assert (chunk.base_offset if chunk.data else chunk.next_offset) == following
        for offset in range(0, 9000, 501):
            for end in range(offset, min(offset + 9, 9000)):
                chunk = again.read(offset, 10_000, end)
                inside = [other for other in left if offset <= other < end]
                assert chunk.next_offset <= max(end, offset)
                assert bool(chunk.data) == bool(inside)


def test_entries_of_a_compacted_segment_belong_to_every_1024th_record_of_the_file() -> None:
    files = FaultyFiles()
    log = compacted(files)
    left = [offset for offset, _ in kept(log) if offset < 3000]
    index = files.read_file(f"{FOLDER}/{0:020d}.index")
    content = files.read_file(f"{FOLDER}/{0:020d}.log")
    positions = [int.from_bytes(index[at : at + 8]) for at in range(0, len(index), 8)]
    assert [int.from_bytes(content[at : at + 8]) for at in positions] == left[::1024]


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
def test_a_changed_offset_in_a_compacted_segment_is_not_served(seed: int) -> None:
    files = FaultyFiles()
    log = compacted(files)
    left = dict(kept(log))
    log.close()
    content = files.content(f"{FOLDER}/{0:020d}.log")
    index = files.read_file(f"{FOLDER}/{0:020d}.index")
    chance = random.Random(seed)
    at = int.from_bytes(index[:8]) if seed % 4 else int.from_bytes(index[8:16])
    content[at + chance.choice([0, 3, 6, 7])] ^= 1 << chance.randrange(8)
    log = open_log(files, COMPACT)
    for offset in range(0, 3000, 13):
        try:
            chunk = log.read(offset, 300)
        except CorruptRecordError:
            continue
        assert chunk.base_offset in left


def test_compaction_keeps_the_last_of_each_segment_and_the_tombstone_that_takes_it_back() -> None:
    clock = ManualClock(NOW)
    log = open_log(MemoryFiles(), COMPACT, clock)
    append(log, [keyed("a", b"1"), keyed("b", b"2")])
    log.roll()
    append(log, [keyed("b", None), keyed("a", None), keyed("c", b"3")])
    log.roll()
    log.clean(NOW + 61_000)
    # The tombstone of `a` is old and goes; that of `b` stays as long as the value it removes.
    assert kept(log) == [(1, b"2"), (2, None), (4, b"3")]


def test_a_segment_that_is_sealed_while_compaction_runs_waits_for_the_next_one() -> None:
    files = FaultyFiles()
    log = open_log(files, COMPACT)
    append(log, [keyed("a", b"0"), keyed("x", b"1")])
    log.roll()
    append(log, [keyed("b", b"2")])

    def publish(operation: str, path: str) -> None:
        if operation == "flush":  # what comes from here on is not durable for this compaction
            files.before_call = lambda operation, path: None
            append(log, [keyed("a", b"3"), keyed("b", b"4"), keyed("y", b"5")])
            log.roll()

    files.before_call = publish
    log.clean(NOW)
    assert kept(log) == [(number, b"%d" % number) for number in range(6)]
    log.clean(NOW)
    assert kept(log) == [(number, b"%d" % number) for number in (1, 3, 4, 5)]


def test_a_damaged_segment_is_left_alone_by_compaction_and_its_tombstones_stay() -> None:
    files = FaultyFiles()
    log = open_log(files, COMPACT)
    append(log, [keyed("a", b"1"), keyed("a", b"2"), keyed("b", b"3")])
    log.roll()
    append(log, [keyed("a", None), keyed("x", b"4"), keyed("x", b"5"), keyed("y", b"6")])
    log.roll()
    log.flush()
    content = files.content(f"{FOLDER}/{0:020d}.log")
    content[20] ^= 1
    before = bytes(content)
    log = open_log(files, COMPACT)
    log.clean(NOW + 10**9)
    assert bytes(files.content(f"{FOLDER}/{0:020d}.log")) == before
    assert [record.payload for record in read_all(log, 3)] == [None, b"5", b"6"]


def test_what_stood_before_a_compaction_that_failed_is_still_served() -> None:
    for operation in ("open", "pwrite", "flush", "rename", "flush_folder"):
        for skip in range(4):
            files = FaultyFiles()
            log = open_log(files, COMPACT)
            append(log, [keyed("a", b"%d" % n) for n in range(50)])
            log.roll()
            log.flush()
            files.fail(operation, errno.EIO, skip=skip, suffix="" if operation == "flush_folder" else "compacting")
            try:
                log.clean(NOW)
            except DiskError:
                pass
            files.faults.clear()
            assert kept(log)[-1] == (49, b"49")
            log.clean(NOW)
            assert kept(log)[-1] == (49, b"49")
            files.power_loss(skip)
            assert kept(open_log(files, COMPACT))[-1] == (49, b"49")


def test_a_truncated_compacted_log_goes_on_behind_the_last_record_left() -> None:
    files = FaultyFiles()
    log = open_log(files, COMPACT)
    append(log, [keyed("a", b"%d" % n) for n in range(10)] + [keyed("b", b"x")])
    log.roll()
    log.clean(NOW)
    assert [offset for offset, _ in kept(log)] == [9, 10]
    log.truncate(10)
    append(log, [keyed("c", b"y")])
    assert kept(log) == [(9, b"9"), (10, b"y")]
    log.close()
    assert kept(open_log(files, COMPACT)) == [(9, b"9"), (10, b"y")]


def test_a_tombstone_is_stored_as_bit_3_of_the_attributes() -> None:
    log = open_log(MemoryFiles())
    append(log, [keyed("a", None)])
    assert decode_chunk(log.read(0, 1000).data).attributes.tolist() == [TOMBSTONE]


# -- starting ----------------------------------------------------------------------------------------------------------


def test_a_start_after_a_kill_reads_no_more_than_the_bound() -> None:
    files = MemoryFiles()
    settings = LogSettings(checkpoint_bytes=100_000, segment_bytes=400_000)
    log = open_log(files, settings)
    for _ in range(40):
        fill(log, 1000, batch=1000)
        log.flush()
    assert log.size_bytes > 2_000_000
    again = open_log(files, settings)
    assert again.next_offset == 40_000
    assert again.recovery.read_bytes < 100_000 + 2 * 60_000  # the bound, a batch and a block


def test_a_start_after_close_reads_at_most_a_block() -> None:
    files = MemoryFiles()
    log = open_log(files)
    fill(log, 10_500, batch=500)
    log.close()
    again = open_log(files)
    assert again.recovery.read_bytes < 1024 * 60
    again.close()
    assert open_log(files).recovery.read_bytes < 1024 * 60


def test_producers_survive_with_and_without_a_checkpoint() -> None:
    for lost in (False, True):
        files = MemoryFiles()
        log = open_log(files, LogSettings(segment_bytes=1000))
        for sequence in range(0, 100, 10):
            log.append(mark_producer(encode_batch(numbered(10, first=sequence), sequence), 5, sequence))
            log.producers.add(5, sequence, 10, sequence)
        log.close()
        if lost:
            files.unlink(f"{FOLDER}/checkpoint")
        found = list(open_log(files).producers.batches(5))
        assert [(batch.first_sequence, batch.count, batch.base_offset) for batch in found] == [
            (sequence, 10, sequence) for sequence in range(0, 100, 10)
        ]


def test_producers_forget_what_a_power_loss_took() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    log.producers.add(5, 0, 10, 10)
    log.checkpoint()
    assert list(open_log(files).producers.batches(5)) == []


# -- threads -----------------------------------------------------------------------------------------------------------


def test_appending_reading_flushing_and_cleaning_at_once_lose_nothing() -> None:
    log = open_log(MemoryFiles(), LogSettings(segment_bytes=5000, retention_bytes=100_000, checkpoint_bytes=10_000))
    failures: list[BaseException] = []
    done = threading.Event()

    def until_done(work: object) -> None:
        assert callable(work)
        try:
            while not done.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        offset = max(log.first_offset, log.next_offset - 100)
        try:
            assert [number_of(record) for record in read_all(log, offset)][:1] in ([], [offset])
        except OffsetOutOfRangeError as error:
            if error.first <= offset:  # retention did not pass it meanwhile
                raise

    threads = [threading.Thread(target=until_done, args=(work,)) for work in (log.flush, read, lambda: log.clean(NOW))]
    for thread in threads:
        thread.start()
    fill(log, 20_000)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [number_of(record) for record in read_all(log)] == list(range(log.first_offset, 20_000))


def test_a_batch_made_before_a_rescue_moved_the_end_gets_the_offsets_of_now() -> None:
    log = open_log(FaultyFiles())
    fill(log, 10)
    batch = encode_batch(numbered(3, first=10), log.next_offset)
    log.truncate(8)
    assert log.append(batch) == 8
    assert [record.offset for record in read_all(log)] == list(range(11))
    assert payloads(read_all(log))[8:] == [record.payload for record in numbered(3, first=10)]
