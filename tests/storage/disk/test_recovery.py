"""Opening a log after damage: only a torn tail is cut; what is damaged is refused by name, the rest is served."""

import errno
import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import CorruptRecordError, encode_batch, encode_payloads, walk
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import check_folder, checkpoint
from babelbus.storage.disk.checkpoint import Checkpoint
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.segment import DERIVED_SUFFIXES
from babelbus.storage.errors import OffsetOutOfRangeError
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, NOW, append, fill, number_of, numbered, open_log, read_all

FIRST = f"{FOLDER}/{0:020d}"
LOG = f"{FIRST}.log"


def stored(count: int = 12, *, rolled: bool = False) -> FaultyFiles:
    """A small log of records with keys and headers, closed; with `rolled`, an empty segment behind it."""
    files = FaultyFiles()
    log = open_log(files)
    for number in range(count):
        record = Record(b"%d." % number + bytes(number), b"key", ((b"h", b"v"), (b"n", None)), NOW + number)
        append(log, [record])
    if rolled:
        log.roll()
    log.close()
    return files


def forget_derived(files: FaultyFiles) -> None:
    for path in files.paths():
        if not path.endswith(".log"):
            files.unlink(path)


def served(log: Log) -> Iterator[tuple[int, Record | None]]:
    """Read each offset by itself: the record that is served for it, or `None` where it is refused."""
    for offset in range(log.first_offset, log.next_offset):
        try:
            chunk = log.read(offset, 200)
            if not chunk.data and chunk.next_offset == offset:
                chunk = log.read(offset, 2**20)
        except CorruptRecordError as error:
            yield offset, None
            if not error.path or error.offset != offset:
                raise
            continue
        assert chunk.base_offset == offset, "an offset was passed over"
        records = list(iterate(decode_chunk(chunk.data)))
        assert [record.offset for record in records] == list(range(offset, chunk.next_offset))
        assert [number_of(record) for record in records] == [record.offset for record in records]
        yield offset, records[0]


@pytest.mark.parametrize(
    "behind",
    [b"", b"\0" * 100, b"\xff" * 100, bytes(range(256)), b"\0" * 5000],
    ids=["nothing", "zeros", "ones", "bytes", "pages"],
)
def test_a_torn_tail_of_every_length_is_cut_and_no_more(behind: bytes) -> None:
    whole = stored()
    positions = walk(bytes(whole.content(LOG)))
    for cut in range(positions[-4], positions[-1]):
        files = stored()
        files.unlink(f"{FOLDER}/checkpoint")  # a killed server noted no end
        del files.content(LOG)[cut:]
        files.content(LOG).extend(behind)
        # A few bytes of what is behind may happen to be those that were cut.
        same = takewhile(
            lambda pair: pair[0] == pair[1], zip(files.content(LOG)[cut:], whole.content(LOG)[cut:], strict=False)
        )
        cut += len(list(same))
        size = len(files.content(LOG))
        good = sum(position <= cut for position in positions[1:])
        # Zeros alone are no torn record: they are room for the next records, as a killed server leaves it.
        is_torn = any(files.content(LOG)[positions[good] :])
        log = open_log(files)
        assert log.next_offset == good
        assert log.recovery.cut_bytes == (size - positions[good] if is_torn else 0)
        assert not log.recovery.bad
        assert len(read_all(log)) == good
        append(log, [Record(b"%d." % good, timestamp=NOW)])
        assert len(read_all(log)) == good + 1


def test_garbage_behind_a_whole_log_is_cut_and_zeros_are_room_for_the_next_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    garbage = random.Random(1).randbytes(10_000)
    for behind, cut in ((b"\0", 0), (b"\0" * 10_000, 0), (garbage, 10_000), (garbage + bytes(70_000), 80_000)):
        files = stored()
        size = len(files.content(LOG))
        files.content(LOG).extend(behind)
        caplog.clear()
        log = open_log(files)
        assert (log.next_offset, log.size_bytes, log.recovery.cut_bytes) == (12, size, cut)
        assert bool(caplog.records) == bool(cut)
        append(log, [Record(b"12.", timestamp=NOW)])
        log.close()
        assert len(files.content(LOG)) == log.size_bytes, "a clean stop leaves no zeros"
        assert len(read_all(open_log(files))) == 13


def test_a_segment_is_made_longer_in_steps_and_ends_with_its_last_record_when_it_is_sealed() -> None:
    files = FaultyFiles()
    log = open_log(files)
    sizes = set()
    for _ in range(3000):
        append(log, numbered(1, first=log.next_offset))
        sizes.add(len(files.content(LOG)))
    assert {size for size in sizes if size > 4096 + 100} == {2**16, 2**17, 3 * 2**16}
    log.roll()
    assert len(files.content(LOG)) == log.size_bytes
    fill(log, 1000, batch=1000)
    assert len(files.content(f"{FOLDER}/{3000:020d}.log")) == log.parts()[-1].size_bytes
    log.close()
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(4000))


def test_a_disk_that_makes_no_file_longer_takes_records_all_the_same() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 200, batch=1)
    files.fail("truncate", errno.EFBIG, times=100)
    fill(log, 1800, batch=1)
    files.faults.clear()
    log.flush()
    files.power_loss(1)
    assert [number_of(record) for record in read_all(open_log(files))] == list(range(2000))


@given(st.integers(0, 2**31), st.integers(0, 300), st.data())
def test_any_cut_behind_which_zeros_stand_gives_the_records_in_front_of_it(
    seed: int, size_max: int, data: st.DataObject
) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    log = open_log(files)
    while log.size_bytes < 5000:
        # Payloads of zeros, and headers, so that records end with zeros and without.
        size = chance.randint(0, size_max)
        payload = b"%d." % log.next_offset + (bytes(size) if chance.random() < 0.5 else chance.randbytes(size))
        append(log, [Record(payload, None, ((b"h", b"v"),) * chance.randint(0, 1), NOW)])
    append(log, numbered(1, first=log.next_offset))
    end = log.size_bytes
    content = files.content(LOG)
    assert len(content) == 2**16
    whole = bytes(content)
    positions = walk(whole[:end])
    cut = data.draw(st.integers(positions[-8], end))
    content[cut:] = bytes(len(content) - cut)
    good = sum(bytes(content[:position]) == whole[:position] for position in positions[1:])
    looked = check_folder(files, "data").problems
    torn = any(content[positions[good] :])
    assert [problem.kind for problem in looked] == ["torn_tail"] * torn
    log = open_log(files)
    assert (log.next_offset, bool(log.recovery.cut_bytes), log.recovery.bad) == (good, torn, [])
    append(log, [Record(b"%d." % good, timestamp=NOW)])
    assert [number_of(record) for record in read_all(log)] == list(range(good + 1))
    log.close()
    assert check_folder(files, "data").problems == []


def test_a_record_inside_the_payload_of_a_torn_one_in_front_of_zeros_is_not_taken_for_a_stored_one() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 200, batch=1)
    inner = bytes(encode_batch(numbered(3, first=201), 201).data)
    append(log, [Record(b"200." + inner + b"." * 500, timestamp=NOW)])
    log.flush()
    end = log.size_bytes
    files.content(LOG)[end - 100 : end] = bytes(100)
    log = open_log(files)
    assert log.next_offset == 200
    assert not log.recovery.bad


def test_a_sealed_segment_that_the_power_left_with_zeros_is_whole() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 200, batch=1)
    log.flush()
    size = log.size_bytes
    log.roll()
    files.content(LOG).extend(bytes(2**16))
    assert [problem.kind for problem in check_folder(files, "data").problems] == []
    log = open_log(files)
    assert (log.next_offset, log.recovery.bad) == (200, [])
    assert len(files.content(LOG)) == size
    fill(log, 100, batch=1)
    assert [number_of(record) for record in read_all(log)] == list(range(300))


def test_a_segment_of_zeros_behind_a_segment_that_lost_its_end_is_removed() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 200, batch=1)
    log.flush()
    durable = log.size_bytes
    fill(log, 10, batch=1)
    log.roll()
    append(log, numbered(1, first=210))
    del files.content(LOG)[durable:]
    after = f"{FOLDER}/{210:020d}.log"
    files.content(after)[:] = bytes(2**16)
    found = check_folder(files, "data").problems
    assert [problem.file for problem in found if problem.kind == "leftover"] == [after], found
    assert {problem.kind for problem in found} <= {"leftover", "index"}
    log = open_log(files)
    assert (log.next_offset, log.recovery.bad) == (200, [])


def test_a_writer_that_was_replaced_cuts_nothing_when_it_closes() -> None:
    files = FaultyFiles()
    old = open_log(files)
    fill(old, 200, batch=1)
    new = open_log(files)
    old.fence_off()
    fill(new, 100, batch=1)
    old.roll()
    old.close()
    assert [number_of(record) for record in read_all(new)] == list(range(300))


def test_a_record_inside_the_payload_of_a_torn_one_is_not_taken_for_a_stored_one() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 5)
    inner = bytes(encode_batch(numbered(3, first=6), 6).data)
    append(log, [Record(b"5." + inner + bytes(500), timestamp=NOW)])
    log.flush()
    del files.content(LOG)[-10:]
    log = open_log(files)
    assert log.next_offset == 5
    assert not log.recovery.bad


def test_a_record_inside_the_payload_of_a_damaged_one_is_not_taken_for_a_stored_one() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 5)
    inner = bytes(encode_batch(numbered(3, first=6), 6).data)
    append(log, [Record(b"5." + inner + bytes(500), timestamp=NOW)])
    fill(log, 5)
    log.close()
    files.content(LOG)[-400] ^= 1
    at = walk(bytes(files.content(LOG)))[5]
    files.content(LOG)[at + 40] ^= 1
    forget_derived(files)
    assert refused(open_log(files)) == [5]


@pytest.mark.parametrize("derived", ["there", "missing"])
@pytest.mark.parametrize("rolled", [False, True])
def test_a_flipped_bit_anywhere_is_never_served_and_harms_no_other_record(rolled: bool, derived: str) -> None:
    chance = random.Random(5)
    whole = bytes(stored(6, rolled=rolled).content(LOG))
    positions = walk(whole)
    for at in range(len(whole)):
        files = stored(6, rolled=rolled)
        files.content(LOG)[at] ^= 1 << chance.randrange(8)
        if derived == "missing":
            forget_derived(files)
        hit = max(number for number, position in enumerate(positions) if position <= at)
        log = open_log(files)
        found = dict(served(log))
        last = hit == 5 and (not rolled or derived == "missing")  # nothing says that the log goes on
        if last and log.next_offset == 5:
            assert log.recovery.cut_bytes == len(whole) - positions[5]  # the last record looks like a torn tail
        else:
            assert found[hit] is None
        assert [offset for offset, record in found.items() if record is None] in ([hit], [])
        assert len(found) == log.next_offset
        # What is appended later stands behind all of it, in a segment of its own if this one is damaged.
        next_offset = log.next_offset
        append(log, [Record(b"%d." % next_offset, timestamp=NOW)])
        log.close()
        again = dict(served(open_log(files)))
        assert again == {**found, next_offset: again[next_offset]}
        assert again[next_offset] is not None


def test_a_damaged_middle_is_named_and_what_follows_goes_into_a_new_segment() -> None:
    files = stored()
    positions = walk(bytes(files.content(LOG)))
    files.content(LOG)[positions[3] : positions[6] - 1] = bytes(positions[6] - positions[3] - 1)
    forget_derived(files)
    log = open_log(files)
    ((path, bad),) = log.recovery.bad
    assert (path, bad.position, bad.end, bad.offset, bad.next_offset) == (LOG, positions[3], positions[6], 3, 6)
    assert {offset for offset, record in served(log) if record is None} == {3, 4, 5}
    assert log.part_count == 2
    append(log, numbered(1, first=12))
    assert number_of(read_all(log, 12)[0]) == 12
    with pytest.raises(CorruptRecordError, match=r"00000000000000000000\.log.*offset 4"):
        log.read(4, 1000)
    assert log.read(0, 10_000, 5).next_offset == 3  # those in front of it are served, whatever the bound


@pytest.mark.parametrize("lost", [7, 8])
def test_an_offset_that_the_damage_reached_is_not_believed(lost: int) -> None:
    files = FaultyFiles()
    fill(open_log(files), 500)
    content = files.content(LOG)
    at = walk(bytes(content))[300]
    content[: at + lost] = bytes(at + lost)
    forget_derived(files)
    log = open_log(files)
    assert refused(log) == list(range(301))


def big_log(segments: int = 3, records: int = 3000) -> FaultyFiles:
    files = FaultyFiles()
    log = open_log(files)
    for segment in range(segments):
        for first in range(segment * records, (segment + 1) * records, 500):
            batch = [b"%d." % number + bytes(20) for number in range(first, first + 500)]
            log.append(encode_payloads(batch, list(range(NOW + first, NOW + first + 500)), first))
        if segment < segments - 1:
            log.roll()
    log.close()
    return files


@pytest.mark.parametrize("suffix", [*DERIVED_SUFFIXES, "checkpoint"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "wrong", "zeros"])
def test_derived_files_are_never_believed_against_the_log(suffix: str, damage: str) -> None:
    files = big_log()
    paths = [path for path in files.paths() if path.endswith(suffix)]
    assert paths
    for path in paths:
        content = files.content(path)
        if damage == "missing":
            files.unlink(path)
        elif damage == "empty":
            content.clear()
        elif damage == "cut":
            del content[-3:]
        elif damage == "longer":
            content.extend(bytes(8))
        elif damage == "wrong":
            content[len(content) // 2] ^= 0x10
        else:
            content[:] = bytes(len(content))
    log = open_log(files)
    assert [number_of(record) for record in read_all(log, bytes_max=100_000)] == list(range(9000))
    for offset in (0, 1023, 1024, 2999, 3000, 5123, 8999):
        assert number_of(next(iter(iterate(decode_chunk(log.read(offset, 100).data))))) == offset
    assert log.find_time(NOW + 4321) == 4321
    assert not log.recovery.bad
    fill(log, 100)
    log.close()
    assert len(read_all(open_log(files))) == 9100


def test_a_start_changes_no_file_and_flushes_what_may_not_be_durable() -> None:
    files, changes = FaultyFiles(), list[tuple[str, str]]()
    fill(open_log(files), 300)
    files.kill()

    def note(operation: str, path: str) -> None:
        if operation in ("pwrite", "truncate", "flush", "replace_file", "flush_folder", "rename", "unlink"):
            changes.append((operation, path))

    files.before_call = note
    log = open_log(files)
    assert changes == [("flush", f"{FOLDER}/{0:020d}.log")]
    log.close()
    changes.clear()
    assert len(read_all(open_log(files))) == 300
    assert changes == []  # the checkpoint vouches for all of it


@pytest.mark.parametrize("entry", range(9))
def test_a_wrong_index_entry_is_noticed_when_it_is_used(entry: int) -> None:
    files = big_log()
    name = f"{FOLDER}/{(entry // 3) * 3000:020d}.index"
    content = files.content(name)
    content[entry % 3 * 8 + 7] ^= 0x15
    log = open_log(files)
    order = list(range(9000))
    random.Random(entry).shuffle(order)
    for offset in order[:60]:
        assert number_of(next(iter(iterate(decode_chunk(log.read(offset, 100).data))))) == offset
    assert [number_of(record) for record in read_all(log, bytes_max=50_000)] == list(range(9000))


@pytest.mark.parametrize(
    "wrong",
    [
        Checkpoint(0, 10**9, 8000, {}),
        Checkpoint(6000, 55, 6001, {}),
        Checkpoint(6000, 1, 6000, {}),
        Checkpoint(6000, 61_000, 7024, {}),
        Checkpoint(6000, 10**7, 7024, {}),
        Checkpoint(1234, 0, 1234, {}),
        Checkpoint(3000, 0, 3000, {}),
        Checkpoint(6000, 0, 6000, {}, format=2),
    ],
)
def test_a_checkpoint_that_does_not_fit_cuts_nothing(wrong: Checkpoint) -> None:
    files = big_log()
    checkpoint.note(files, FOLDER).write(wrong)
    log = open_log(files)
    assert log.next_offset == 9000
    assert log.recovery.cut_bytes == 0
    assert [number_of(record) for record in read_all(log)] == list(range(9000))


def test_a_checkpoint_of_another_log_of_equal_shape_cuts_nothing() -> None:
    files, other = big_log(), big_log()
    assert files.read_file(f"{FOLDER}/checkpoint") == other.read_file(f"{FOLDER}/checkpoint")
    log = open_log(files)
    assert log.recovery.read_bytes < 60_000  # what it vouches for was not read again
    assert len(read_all(log)) == 9000


def refused(log: Log) -> list[int]:
    return [offset for offset, record in served(log) if record is None]


@pytest.mark.parametrize("how", ["removed", "emptied", "shortened", "all removed"])
def test_a_log_that_ends_before_its_durable_end_is_refused_there_and_gives_no_offset_twice(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    log = open_log(files)
    for _ in range(5):
        fill(log, 40)
        log.roll()
    log.trim(40)
    fill(log, 7)
    log.close()
    kept = {path: files.read_file(path) for path in files.paths()}
    last = f"{FOLDER}/{200:020d}"
    first = 200
    if how == "removed":
        files.unlink(f"{last}.log")
    elif how == "emptied":
        files.content(f"{last}.log").clear()
    elif how == "shortened":
        del files.content(f"{last}.log")[-1:]
        first = 206
    else:
        for path in files.paths():
            if path.endswith(".log"):
                files.unlink(path)
    for start in range(3):  # the checkpoint of an earlier start must not hide the loss
        caplog.clear()
        log = open_log(files)
        assert log.next_offset == 207 + start
        if how != "all removed":
            assert [(bad.offset, bad.next_offset) for _, bad in log.recovery.bad] == [(first, 207)]
            assert f"offsets {first} to 206 cannot be read" in caplog.text
        assert "restore the file, or accept the loss with 'babelbus repair'" in caplog.text
        with pytest.raises(CorruptRecordError):
            log.read(first, 1000)
        assert append(log, numbered(1, first=207 + start)) == 207 + start
        log.close()
    if how != "all removed":
        files.replace_file(f"{last}.log", kept[f"{last}.log"])
        log = open_log(files)
        assert not log.recovery.bad
        assert [number_of(record) for record in read_all(log)] == list(range(40, 210))


def test_a_missing_segment_is_refused_and_the_rest_served() -> None:
    files = big_log()
    for path in files.paths():
        if f"{3000:020d}" in path:
            files.unlink(path)
    log = open_log(files)
    assert refused(log) == list(range(3000, 6000))
    assert [(bad.offset, bad.next_offset) for _, bad in log.recovery.bad] == [(3000, 6000)]


@pytest.mark.parametrize(("count", "size"), [(60, 10), (3000, 10), (60, 9000)], ids=["small", "blocks", "large"])
@pytest.mark.parametrize("cleanup", ["delete", "compact"])
def test_a_missing_small_segment_is_noticed_at_the_start(
    cleanup: Literal["delete", "compact"], count: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    settings = LogSettings(cleanup=cleanup)
    log = open_log(files, settings)
    for first, records in ((0, count), (count, 20), (count + 20, 20)):
        numbers = range(first, first + records)
        append(log, [Record(b"%d." % n + bytes(size), b"k%d" % (n % 17), (), NOW) for n in numbers])
        log.roll()
    log.clean(NOW)
    log.close()
    log = open_log(files, settings)
    assert not log.recovery.bad
    assert log.recovery.read_bytes == 0
    log.close()
    for path in files.paths():
        if f"{count:020d}" in path:
            files.unlink(path)
    for _ in range(2):
        log = open_log(files, settings)
        assert [(bad.offset, bad.next_offset) for _, bad in log.recovery.bad] == [(count, count + 20)]
        assert f"offsets {count} to {count + 19} cannot be read" in caplog.text
        with pytest.raises(CorruptRecordError):
            log.read(count, 1000)
        assert log.read(count + 20, 1000).base_offset >= count + 20
        log.close()


def test_a_missing_first_segment_begins_the_log_later() -> None:
    files = big_log()
    files.unlink(f"{FIRST}.log")
    log = open_log(files)
    assert log.first_offset == 3000
    with pytest.raises(OffsetOutOfRangeError):
        log.read(0, 1000)


@pytest.mark.parametrize("size", [0, 1, 59, 60, 60_000, 100_000, -1])
def test_a_truncated_old_segment_is_refused_from_there_on(size: int) -> None:
    files = big_log()
    content = files.content(f"{FOLDER}/{3000:020d}.log")
    good = sum(position <= size % len(content) for position in walk(bytes(content))[1:])
    del content[size:]
    log = open_log(files)
    assert refused(log) == list(range(3000 + good, 6000))


def test_swapped_segments_are_refused() -> None:
    files = big_log()
    one, two = files.content(f"{FIRST}.log"), files.content(f"{FOLDER}/{3000:020d}.log")
    one[:], two[:] = bytes(two), bytes(one)
    log = open_log(files)
    assert refused(log) == list(range(6000))
    assert {bad.next_offset for _, bad in log.recovery.bad} == {3000, 6000}


def test_files_of_other_names_are_left_alone() -> None:
    files = big_log()
    names = ["notes.txt", "5.log", f"{7:020d}.log.damaged-55", "settings.json", f"{9:021d}.log"]
    for name in names:
        files.replace_file(f"{FOLDER}/{name}", b"x")
    assert len(read_all(open_log(files))) == 9000
    assert all(files.exists(f"{FOLDER}/{name}") for name in names)


def test_leftovers_of_a_crash_are_removed() -> None:
    files = big_log()
    names = ["checkpoint.new", f"{3000:020d}.compacting", f"{777:020d}.index", f"{777:020d}.blocks"]
    for name in names:
        files.replace_file(f"{FOLDER}/{name}", b"x")
    assert len(read_all(open_log(files))) == 9000
    assert not any(files.exists(f"{FOLDER}/{name}") for name in names)


def test_a_compacted_segment_is_whole_when_nothing_vouches_for_it() -> None:
    files = FaultyFiles()
    settings = LogSettings(cleanup="compact")
    log = open_log(files, settings)
    for round_ in range(3):
        append(log, [Record(b"%d." % (round_ * 50 + n), b"k%d" % (n % 7), timestamp=NOW) for n in range(50)])
        log.roll()
    log.clean(NOW)
    kept = [record.offset for record in read_all(log)]
    assert len(kept) < 15
    log.close()
    forget_derived(files)
    log = open_log(files, settings)
    assert not log.recovery.bad
    assert [record.offset for record in read_all(log)] == kept
