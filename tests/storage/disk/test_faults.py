"""The fault matrix at the level of storage (rows 2, 6, 7 and 8): whatever fails, what was flushed stays."""

import contextlib
import errno
import random

import pytest

from babelbus.errors import StorageError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import CorruptRecordError, encode_batch, mark_producer
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.errors import DiskError, DiskFullError
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, NOW, append, fill, number_of, numbered, open_log, payloads, read_all
from tests.support.clock import ManualClock

SMALL = LogSettings(segment_bytes=20_000, checkpoint_bytes=30_000)
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))]


class PowerCutError(Exception):
    """The power went in the middle of a call."""


def publish_until_cut(files: FaultyFiles, log: Log, chance: random.Random, durable: list[int], steps: int) -> None:
    """Append, flush, roll and clean in any order; `durable[0]` is the offset below which all was flushed."""
    for _ in range(steps):
        step = chance.random()
        if step < 0.7:
            count = chance.choice([1, 3, 40, 300])
            records = numbered(count, first=log.next_offset, bytes_each=chance.choice([0, 20, 200]))
            batch = encode_batch(records, log.next_offset)
            if chance.random() < 0.5:
                batch = mark_producer(batch, 7, log.next_offset)
                log.producers.add(7, log.next_offset, count, log.next_offset)
            log.append(batch)
        elif step < 0.95:
            durable[0] = max(durable[0], log.flush())
        elif step < 0.98:
            log.checkpoint()
            durable[0] = max(durable[0], log.next_offset)
        else:
            log.roll()


def check_log(log: Log, durable: int) -> None:
    """All that was flushed is there, dense and in order; what more there is follows without a hole up to damage."""
    assert log.next_offset >= durable
    found = []
    offset = 0
    while offset < log.next_offset:
        try:
            chunk_records = read_all_from(log, offset)
        except CorruptRecordError:
            assert offset >= durable, f"record {offset} was flushed"
            break
        assert chunk_records, f"record {offset} was passed over"
        found += chunk_records
        offset = found[-1] + 1
    assert found == list(range(len(found)))
    assert len(found) >= durable
    for batch in log.producers.batches(7):
        assert batch.base_offset + batch.count <= log.next_offset


def read_all_from(log: Log, offset: int) -> list[int]:
    chunk = log.read(offset, 100_000)
    records = list(iterate(decode_chunk(chunk.data)))
    assert [number_of(record) for record in records] == [record.offset for record in records]
    return [record.offset for record in records]


def lose_power_often(seed: int) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    durable = [0]
    for _ in range(3):
        log = open_log(files, SMALL)
        check_log(log, durable[0])
        durable[0] = log.next_offset if not log.recovery.bad else durable[0]
        if log.recovery.bad:
            return  # what was not flushed came back with a hole: named, and the rest of it was checked
        left = [chance.randint(1, 300)]

        def cut(operation: str, path: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise PowerCutError

        files.before_call = cut
        try:
            publish_until_cut(files, log, chance, durable, 40)
        except PowerCutError:
            pass
        files.before_call = lambda operation, path: None
        if chance.random() < 0.7:
            files.power_loss(chance.randrange(2**32))
        else:
            files.kill()
    check_log(open_log(files, SMALL), durable[0])


@pytest.mark.parametrize("seed", range(50))
def test_what_was_flushed_survives_power_loss(seed: int) -> None:
    lose_power_often(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 5200))
def test_what_was_flushed_survives_power_loss_long_form(seed: int) -> None:
    lose_power_often(seed)


def fail_flushes(seed: int) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    log = open_log(files, SMALL)
    acknowledged = 0
    for _ in range(20):
        fill(log, chance.choice([1, 30, 200]))
        if chance.random() < 0.3:
            number = chance.choice([errno.EIO, errno.ENOSPC])
            files.fail("flush", number, drop=chance.random() < 0.5, skip=chance.choice([0, 0, 1]), suffix=".log")
        try:
            acknowledged = log.flush()
        except StorageError:
            with pytest.raises(DiskError):
                append(log, numbered(1, first=log.next_offset))
            with pytest.raises(DiskError):
                log.flush()
            for _ in range(chance.randint(0, 2)):
                files.fail(
                    chance.choice(["pwrite", "flush", "rename", "flush_folder", "open"]), skip=chance.randint(0, 2)
                )
                try:
                    log.recover_flush()
                except StorageError:
                    continue
                break
            files.faults.clear()
            if log.failed:
                if chance.random() < 0.2:  # or the power goes before it can be put right
                    files.power_loss(chance.randrange(2**32))
                    log = open_log(files, SMALL)
                    if log.recovery.bad:
                        check_log(log, acknowledged)
                        return
                else:
                    log.recover_flush()
            assert log.next_offset >= acknowledged
            check_log(log, acknowledged)
            acknowledged = log.next_offset
        files.faults.clear()
    check_log(log, acknowledged)
    files.power_loss(chance.randrange(2**32))
    check_log(open_log(files, SMALL), acknowledged)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_failed_flush_nothing_acknowledged_is_lost(seed: int) -> None:
    fail_flushes(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 2540))
def test_after_a_failed_flush_nothing_acknowledged_is_lost_long_form(seed: int) -> None:
    fail_flushes(seed)


def test_a_failed_flush_is_never_retried_on_the_same_file() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    log.flush()
    fill(log, 5)
    files.fail("flush", drop=True)
    with pytest.raises(DiskError):
        log.flush()
    with pytest.raises(DiskError, match="a flush failed"):
        log.flush()
    log.recover_flush()
    # The system dropped what it could not write: nobody was told that it was stored.
    assert log.next_offset == 10
    fill(log, 5)
    assert log.flush() == 15
    assert log.part_count == 2
    files.power_loss(0)
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(15))


def test_records_that_can_be_read_back_keep_their_offsets_after_a_failed_flush() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    log.flush()
    fill(log, 5)
    files.fail("flush")
    with pytest.raises(DiskError):
        log.flush()
    log.recover_flush()
    assert log.next_offset == 15
    files.power_loss(1)
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(15))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rescue_that_is_tried_again_is_durable_before_anybody_is_told(seed: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    log.flush()
    fill(log, 5)
    files.fail("flush")
    with pytest.raises(DiskError):
        log.flush()
    files.fail("flush_folder", skip=2)  # behind the renaming of the rescued records
    with pytest.raises(DiskError):
        log.recover_flush()
    files.fail("flush_folder")  # and the next one: that of a checkpoint does not count for the rescue
    while log.failed:
        with contextlib.suppress(DiskError):
            log.recover_flush()
    fill(log, 5)
    assert log.flush() == 20
    files.power_loss(seed)
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(20))


def test_a_full_disk_refuses_appends_and_goes_on_when_there_is_room() -> None:
    files = FaultyFiles(bytes_max=10_000)
    log = open_log(files)
    with pytest.raises(DiskFullError):
        fill(log, 10_000)
    end, size = log.next_offset, log.size_bytes
    with pytest.raises(DiskFullError):
        fill(log, 10)
    assert (log.next_offset, log.size_bytes) == (end, size)
    assert len(read_all(log)) == end
    files.bytes_max = 20_000
    fill(log, 10)
    assert [number_of(record) for record in read_all(log)] == list(range(end + 10))
    assert log.flush() == end + 10
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(end + 10))


def test_a_full_disk_lets_no_new_segment_half_made() -> None:
    files = FaultyFiles()
    log = open_log(files, LogSettings(segment_bytes=1000))
    fill(log, 20)
    for suffix in (".log", ".index", ".timeindex", ".blocks"):
        files.fail("open", errno.ENOSPC, suffix=f"{log.next_offset:020d}{suffix}")
        with pytest.raises(DiskFullError):
            fill(log, 1)
    files.faults.clear()
    assert f"{FOLDER}/{20:020d}.log" not in files.paths()
    # An empty segment left behind would hide what goes into the one before it.
    log.configure(LogSettings())
    fill(log, 20)
    log.flush()
    assert len(read_all(open_log(files))) == 40


def test_a_start_works_on_a_full_disk() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 3000)
    log.flush()
    files.kill()
    for path in files.paths():
        if not path.endswith(".log"):
            files.unlink(path)
    files.bytes_max = files.bytes_used
    log = open_log(files)
    assert len(read_all(log)) == 3000
    with pytest.raises(DiskFullError):
        fill(log, 1)
    files.bytes_max = 2**40
    fill(log, 1)
    log.close()
    assert len(read_all(open_log(files))) == 3001


@pytest.mark.parametrize("written", [0, 1, 100, 400])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_short_write_that_fails_leaves_nothing(number: int, written: int) -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    files.fail("pwrite", number, written=written)
    with pytest.raises(DiskFullError if number == errno.ENOSPC else DiskError):
        fill(log, 10)
    assert log.next_offset == 10
    append(log, numbered(1, first=10))
    assert [number_of(record) for record in read_all(log)] == list(range(11))
    log.close()
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(11))


def test_a_failed_read_is_an_error_and_passes() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    files.fail("pread")
    with pytest.raises(DiskError):
        log.read(0, 1000)
    assert len(read_all(log)) == 10


def test_a_segment_that_the_system_does_not_open_is_an_error_and_passes() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 10)
    log.roll()
    log.flush()  # closes the sealed segment
    files.fail("open", errno.EMFILE)
    with pytest.raises(DiskError, match=r"opening .*\.log"):
        log.read(0, 1000)
    assert len(read_all(log)) == 10


def test_a_checkpoint_does_not_vouch_for_what_was_appended_while_the_disk_flushed() -> None:
    files = FaultyFiles()
    log = open_log(files, LogSettings(checkpoint_bytes=1))
    fill(log, 2048, batch=64)
    appended = False

    def append_meanwhile(operation: str, path: str) -> None:
        nonlocal appended
        if operation == "flush" and path.endswith("checkpoint.new") and not appended:
            appended = True
            fill(log, 4096, batch=64)
            log.producers.add(7, 0, 64, log.next_offset - 64)

    files.before_call = append_meanwhile
    log.flush()
    files.before_call = lambda operation, path: None
    assert appended
    for seed in range(20):
        log_files = files
        log_files.power_loss(seed)
        reopened = open_log(log_files)
        check_log(reopened, 2048)


@pytest.mark.parametrize("between_records", [False, True])
def test_a_batch_whose_write_was_torn_is_cut_whole(between_records: bool) -> None:
    files = FaultyFiles()
    log = open_log(files)
    log.append(mark_producer(encode_batch(numbered(20)), 7, 0))
    second = mark_producer(encode_batch(numbered(20, first=20), 20), 7, 20)
    log.append(second)
    path = f"{FOLDER}/{0:020d}.log"
    torn = len(second.data) - int(second.positions[12]) if between_records else 100
    del files.content(path)[-torn:]
    log = open_log(files)
    assert log.next_offset == 20
    assert [batch.first_sequence for batch in log.producers.batches(7)] == [0]
    assert len(read_all(log)) == 20


def test_compaction_keeps_what_an_unflushed_record_would_replace() -> None:
    files = FaultyFiles()
    settings = LogSettings(cleanup="compact")
    log = open_log(files, settings)
    append(log, [Record(b"old", b"k", timestamp=NOW), Record(b"x", b"other", timestamp=NOW)])
    log.roll()
    log.flush()
    append(log, [Record(b"new", b"k", timestamp=NOW)])
    files.fail("flush", suffix=".log")
    with pytest.raises(DiskError):
        log.clean(NOW)
    files.power_loss(3)
    found = payloads(read_all(open_log(files, settings)))
    assert b"old" in found or b"new" in found


def test_a_slow_disk_is_only_slow() -> None:
    files = FaultyFiles()
    clock = ManualClock(NOW)
    files.before_call = lambda operation, path: clock.advance(5) if operation == "flush" else None
    log = open_log(files, clock=clock)
    fill(log, 100)
    log.close()
    assert len(read_all(open_log(files))) == 100


@pytest.mark.parametrize("seed", SEEDS)
def test_records_that_came_one_by_one_survive_power_loss_if_they_were_flushed(seed: int) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    durable = 0
    for _ in range(6):
        log = open_log(files, LogSettings(segment_bytes=100_000))
        check_log(log, durable)
        if log.recovery.bad:
            return
        for _ in range(chance.randint(0, 1200)):
            fill(log, 1, bytes_each=chance.choice([0, 20, 200]))
            if chance.random() < 0.3:
                durable = log.flush()
        if chance.random() < 0.3:
            files.kill()
        else:
            files.power_loss(chance.randrange(2**32))
    check_log(open_log(files, LogSettings(segment_bytes=100_000)), durable)
