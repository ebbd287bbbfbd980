"""What `check_folder` finds and `repair_folder` mends, for each kind of damage."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from babelbus.errors import StorageError
from babelbus.records.format import encode_payloads, mark_producer, walk
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.check import Problem, Report, check_folder
from babelbus.storage.disk.index import BLOCK_ENTRY
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.repair import repair_folder
from babelbus.storage.disk.segment import DERIVED_SUFFIXES, base_name
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.errors import FolderLockedError
from babelbus.storage.files import LocalFiles
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, NOW, append, fill, numbered, open_log, read_all
from tests.support.clock import ManualClock

DATA = "data"


def path_of(base: int, suffix: str = ".log") -> str:
    return f"{FOLDER}/{base_name(base)}{suffix}"


def stored(segments: int = 3, records: int = 3000) -> FaultyFiles:
    """A log of some segments with so many records each, closed as a server does."""
    files = FaultyFiles()
    log = open_log(files)
    for segment in range(segments):
        for first in range(segment * records, (segment + 1) * records, 100):
            batch = [b"%d." % number + bytes(20) for number in range(first, first + 100)]
            log.append(encode_payloads(batch, list(range(NOW + first, NOW + first + 100)), first))
        if segment < segments - 1:
            log.roll()
    log.close()
    return files


def snapshot(files: FaultyFiles) -> dict[str, bytes]:
    return {path: bytes(files.content(path)) for path in files.paths()}


def raw_records(files: FaultyFiles) -> dict[int, bytes]:
    """The bytes of every good record that the log serves."""
    log = open_log(files)
    found: dict[int, bytes] = {}
    offset = log.first_offset
    while offset < log.next_offset:
        chunk = log.read(offset, 2**22)
        at = walk(chunk.data)
        for begin, end in pairwise(at):
            found[int.from_bytes(chunk.data[begin : begin + 8], "big")] = chunk.data[begin:end]
        offset = chunk.next_offset
    log.close()
    return found


def kinds(problems: list[Problem]) -> list[tuple[str, str, int | None, int | None]]:
    return [(each.kind, each.file, each.offset, each.next_offset) for each in problems]


def repaired(files: FaultyFiles) -> Report:
    """Repair, and see that nothing is left to do and the log goes on where it ended."""
    report = repair_folder(files, DATA)
    assert report.left == []
    assert check_folder(files, DATA).problems == []
    before = snapshot(files)
    again = repair_folder(files, DATA)
    assert again.problems == []
    assert {**snapshot(files), f"{DATA}/lock": b""} == {**before, f"{DATA}/lock": b""}
    return report


def assert_goes_on(files: FaultyFiles, next_offset: int) -> None:
    log = open_log(files)
    assert log.recovery.bad == []
    assert log.next_offset == next_offset
    append(log, numbered(1, first=next_offset))
    assert read_all(log, next_offset)[0].offset == next_offset
    log.close()


def test_a_whole_folder_has_no_problems_and_is_counted() -> None:
    files = stored()
    seen: list[tuple[int, int]] = []
    report = check_folder(files, DATA, progress=lambda done, total: seen.append((done, total)))
    assert report.problems == []
    assert (report.records, report.segments) == (9000, 3)
    assert seen[-1] == (report.size_bytes, report.size_bytes)


@pytest.mark.parametrize("base", [0, 3000, 6000])
def test_a_flipped_bit_is_named_and_its_record_becomes_a_gap(base: int) -> None:
    files = stored()
    before = raw_records(files)
    positions = walk(bytes(files.content(path_of(base))))
    files.content(path_of(base))[positions[1500] + 40] ^= 4
    damaged = bytes(files.content(path_of(base))[positions[1500] : positions[1501]])
    problems = check_folder(files, DATA).problems
    assert kinds(problems) == [("damaged", path_of(base), base + 1500, base + 1501)]
    assert problems[0].position == positions[1500]
    report = repaired(files)
    assert report.kept == [f"{path_of(base)}.damaged-{positions[1500]}"]
    assert bytes(files.content(report.kept[0])) == damaged
    del before[base + 1500]
    assert raw_records(files) == before
    assert_goes_on(files, 9000)


@pytest.mark.parametrize("number", [0, 2999])
def test_damage_at_the_edge_of_an_old_segment_becomes_a_gap(number: int) -> None:
    files = stored()
    before = raw_records(files)
    position = walk(bytes(files.content(path_of(3000))))[number]
    files.content(path_of(3000))[position + 40] ^= 4
    (problem,) = check_folder(files, DATA).problems
    assert (problem.kind, problem.position, problem.offset) == ("damaged", position, 3000 + number)
    repaired(files)
    del before[3000 + number]
    assert raw_records(files) == before
    assert_goes_on(files, 9000)


def test_several_damaged_ranges_in_all_segments_are_taken_out_together() -> None:
    files = stored()
    before = raw_records(files)
    for base in (0, 3000, 6000):
        positions = walk(bytes(files.content(path_of(base))))
        for number in (5, 6, 1024, 2998):
            files.content(path_of(base))[positions[number] + 14] ^= 1
            del before[base + number]
    assert len(check_folder(files, DATA).problems) == 9
    assert len(repaired(files).kept) == 9
    assert raw_records(files) == before
    assert_goes_on(files, 9000)


@pytest.mark.parametrize(("cut", "behind"), [(1, 0), (30, 0), (50, 0), (30, 2**16)])
def test_a_torn_tail_is_named_kept_and_cut(cut: int, behind: int) -> None:
    files = stored()
    before = raw_records(files)
    content = files.content(path_of(6000))
    log = open_log(files)
    append(log, numbered(1, first=9000))
    del content[log.parts()[-1].size_bytes - cut :]
    tail = bytes(content[walk(bytes(content))[-1] :]) + bytes(behind)
    content.extend(bytes(behind))
    (problem,) = check_folder(files, DATA).problems
    assert (problem.kind, problem.file, problem.offset) == ("torn_tail", path_of(6000), 9000)
    (kept,) = repaired(files).kept
    assert bytes(files.content(kept)) == tail
    assert raw_records(files) == before
    assert_goes_on(files, 9000)


def test_the_batch_of_a_torn_write_is_cut_as_a_whole_and_its_torn_record_kept() -> None:
    files = stored(1)
    log = open_log(files)
    batch = encode_payloads([b"one", b"two"], [NOW, NOW], 3000)
    log.append(mark_producer(batch, 7, 1))
    content = files.content(path_of(0))
    del content[log.size_bytes :]
    whole = bytes(content)
    del content[-1:]
    (kept,) = repaired(files).kept
    assert bytes(files.content(kept)) == whole[walk(whole)[-2] : -1]
    assert max(raw_records(files)) == 2999
    assert_goes_on(files, 3000)


def change_entry(content: bytearray) -> None:
    content[-BLOCK_ENTRY.size - 1] ^= 1


@pytest.mark.parametrize("base", [0, 6000])
@pytest.mark.parametrize("suffix", DERIVED_SUFFIXES)
@pytest.mark.parametrize(
    "damage", [None, change_entry, lambda content: content.clear(), lambda content: content.pop(3)]
)
def test_wrong_derived_files_are_named_and_made_again(
    base: int, suffix: str, damage: Callable[[bytearray], object] | None
) -> None:
    files = stored()
    before = snapshot(files)
    if damage is None:
        files.unlink(path_of(base, suffix))
    else:
        damage(files.content(path_of(base, suffix)))
    problems = check_folder(files, DATA).problems
    assert [(each.kind, each.file) for each in problems] == [("index", path_of(base, suffix))]
    repaired(files)
    files.unlink(f"{DATA}/lock")
    assert snapshot(files) == before


def test_bytes_behind_the_entries_of_an_index_are_named() -> None:
    files = stored()
    files.content(path_of(6000, ".index")).extend(bytes(8))
    assert [each.kind for each in check_folder(files, DATA).problems] == ["index"]
    repaired(files)


def test_entries_that_a_crash_kept_from_the_index_are_no_problem() -> None:
    files = FaultyFiles()
    log = open_log(files)
    fill(log, 5000, batch=500)
    log.flush()
    del files.content(path_of(0, ".index"))[8:]
    files.content(path_of(0, ".blocks")).clear()
    assert check_folder(files, DATA).problems == []


@pytest.mark.parametrize("content", [b"", b"00000000\n{}", None])
def test_a_damaged_or_missing_checkpoint_is_named_and_made_again(content: bytes | None) -> None:
    files = stored()
    before = snapshot(files)
    path = f"{FOLDER}/{checkpoints.NAME}"
    if content is None:
        files.unlink(path)
    else:
        files.replace_file(path, content)
    (problem,) = check_folder(files, DATA).problems
    assert (problem.kind, problem.file) == ("checkpoint", path)
    repaired(files)
    files.unlink(f"{DATA}/lock")
    assert snapshot(files) == before


@pytest.mark.parametrize(("segment", "position", "offset"), [(6000, 77, 8048), (6000, 2**40, 8000), (9, 0, 9)])
def test_a_checkpoint_that_does_not_fit_the_log_is_named(segment: int, position: int, offset: int) -> None:
    files = stored()
    checkpoints.note(files, FOLDER).write(checkpoints.Checkpoint(segment, position, offset, {}))
    (problem,) = check_folder(files, DATA).problems
    assert problem.kind == "checkpoint"
    repaired(files)
    assert len(raw_records(files)) == 9000


def test_a_lost_end_of_the_last_segment_is_told_by_the_checkpoint() -> None:
    files = stored()
    before = raw_records(files)
    content = files.content(path_of(6000))
    del content[walk(bytes(content))[1000] :]
    (problem,) = [each for each in check_folder(files, DATA).problems if each.kind != "index"]
    assert problem.kind == "checkpoint"
    assert problem.offset == 7000
    assert problem.next_offset == 9000
    assert "the log's end is lost" in problem.reason
    repaired(files)
    after = raw_records(files)
    assert after.pop(8999) != before[8999]  # the record that keeps the offsets from being given again
    assert after == {offset: data for offset, data in before.items() if offset < 7000}
    assert_goes_on(files, 9000)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_missing_last_segment_is_named_and_its_offsets_are_not_given_again(emptied: bool) -> None:
    files = stored()
    if emptied:
        files.content(path_of(6000)).clear()
    else:
        files.unlink(path_of(6000))
    (problem,) = [each for each in check_folder(files, DATA).problems if each.kind == "checkpoint"]
    assert (problem.offset, problem.next_offset) == (6000, 9000)
    repaired(files)
    assert_goes_on(files, 9000)


def test_a_missing_segment_becomes_a_gap() -> None:
    files = stored()
    before = raw_records(files)
    for path in files.paths():
        if base_name(3000) in path:
            files.unlink(path)
    problems = check_folder(files, DATA).problems
    assert kinds(problems) == [("ends_early", path_of(0), 3000, 6000)]
    repaired(files)
    assert raw_records(files) == {offset: data for offset, data in before.items() if not 3000 <= offset < 6000}
    assert_goes_on(files, 9000)
    log = open_log(files)
    assert log.read(4000, 1000).base_offset == 6000
    assert log.find_time(NOW + 4000) == 6000


@pytest.mark.parametrize("size", [0, 10, 60_000])
def test_a_truncated_old_segment_serves_what_is_left(size: int) -> None:
    files = stored()
    before = raw_records(files)
    content = files.content(path_of(3000))
    good = 3000 + len(walk(bytes(content[:size]))) - 1
    del content[size:]
    (problem,) = [each for each in check_folder(files, DATA).problems if each.kind != "index"]
    assert (problem.file, problem.offset, problem.next_offset) == (path_of(3000), good, 6000)
    repaired(files)
    assert raw_records(files) == {offset: data for offset, data in before.items() if not good <= offset < 6000}
    assert_goes_on(files, 9000)


def test_a_lost_end_behind_which_nothing_was_stored_keeps_its_offsets() -> None:
    files = stored(2)
    log = open_log(files)
    log.roll()
    log.close()
    content = files.content(path_of(3000))
    del content[walk(bytes(content))[1000] :]
    repaired(files)
    found = read_all(open_log(files))
    assert (len(found), found[-2].offset, found[-1].offset) == (4001, 3999, 5999)
    assert found[-1].payload is None
    assert_goes_on(files, 6000)


def test_a_segment_begun_before_a_power_loss_is_removed_as_a_start_would() -> None:
    files = stored(1)
    for suffix in (".log", *DERIVED_SUFFIXES):
        files.replace_file(path_of(3000, suffix), b"")
    content = files.content(path_of(0))
    content[walk(bytes(content))[1000] + 40] ^= 4  # and damage in the one that is the last then
    del content[-1:]
    checkpoints.note(files, FOLDER).write(checkpoints.Checkpoint(0, 0, 0, {}, end=2999))
    assert "leftover" in {each.kind for each in check_folder(files, DATA).problems}
    repaired(files)
    assert set(raw_records(files)) == set(range(2999)) - {1000}
    assert_goes_on(files, 2999)


@pytest.mark.parametrize("content", [b"", b"no record"])
@pytest.mark.parametrize("base", [0, 100, 8999])
def test_a_file_that_looks_like_a_rescue_does_not_replace_durable_records(base: int, content: bytes) -> None:
    for mend in (repaired, raw_records):
        files = stored()
        files.replace_file(path_of(base, ".rescued"), content)
        (problem,) = check_folder(files, DATA).problems
        assert (problem.kind, problem.file) == ("leftover", path_of(base, ".rescued"))
        assert "give it another name" in problem.repair
        mend(files)
        assert set(raw_records(files)) == set(range(9000))
        assert bytes(files.content(path_of(base, ".rescued.damaged"))) == content


@pytest.mark.parametrize("records", [0, 10])
def test_a_rescue_that_was_cut_short_is_finished(records: int) -> None:
    files = stored(1)
    rescued = encode_payloads([b"new"] * records, [NOW] * records, 3000).data if records else b""
    files.replace_file(path_of(3000, ".rescued"), bytes(rescued))
    files.replace_file(path_of(3010), b"")  # which the rescue replaces
    assert "finish it" in {each.repair for each in check_folder(files, DATA).problems}
    repaired(files)
    assert_goes_on(files, 3000 + records)


def compacted() -> FaultyFiles:
    files = FaultyFiles()
    settings = LogSettings(cleanup="compact")
    log = open_log(files, settings)
    for round_ in range(3):
        keyed = [Record(b"%d" % n, b"k%d" % (round_ * 90 + n), timestamp=NOW) for n in range(100)]
        append(log, keyed)
        log.roll()
    log.clean(NOW)
    log.close()
    return files


def test_a_compacted_log_is_whole() -> None:
    files = compacted()
    assert len(raw_records(files)) < 300
    assert check_folder(files, DATA).problems == []


def test_a_wrong_offset_in_a_compacted_segment_takes_its_block_out() -> None:
    files = compacted()
    before = raw_records(files)
    content = files.content(path_of(0))
    at = walk(bytes(content))[-2]
    assert content[at + 7] == 99
    content[at + 7] ^= 4  # 103: the limit of the segment is 100
    assert [each.kind for each in check_folder(files, DATA).problems] == ["damaged"]
    content[at + 7] ^= 4
    content[walk(bytes(content))[-3] + 7] = 89 ^ 2  # 91: still rising, so only the sum of the block can tell
    problems = check_folder(files, DATA).problems
    assert [(each.kind, each.file) for each in problems] == [("offset", path_of(0))]
    assert len(repaired(files).kept) == 1
    assert raw_records(files) == {offset: data for offset, data in before.items() if offset >= 100}


def test_leftovers_are_removed_and_foreign_files_left_alone() -> None:
    files = stored()
    foreign = ["notes.txt", "5.log", f"{9:021d}.log", f"{7:020d}.log.damaged-55"]
    leftovers = ["checkpoint.new", f"{3000:020d}.compacting", f"{777:020d}.index"]
    for name in foreign + leftovers:
        files.replace_file(f"{FOLDER}/{name}", b"x")
    removed = f"{DATA}/topics/.removed-0011223344556677/gone/0"
    files.make_folder(removed)
    files.replace_file(f"{removed}/{base_name(0)}.log", b"")
    problems = check_folder(files, DATA).problems
    assert {each.kind for each in problems} == {"leftover"}
    assert {each.file.rpartition("/")[2] for each in problems} == {*leftovers, ".removed-0011223344556677"}
    assert check_folder(files, DATA, live=True).problems == []  # they may be a running server's work
    repaired(files)
    assert all(files.exists(f"{FOLDER}/{name}") for name in foreign)
    assert not any(files.exists(f"{FOLDER}/{name}") for name in leftovers)
    assert len(raw_records(files)) == 9000


def test_an_end_that_the_next_segment_has_too_is_cut() -> None:
    files = stored()
    before = raw_records(files)
    start = walk(bytes(files.content(path_of(3000))))[10]
    files.content(path_of(0)).extend(bytes(files.content(path_of(3000))[:start]))
    (problem,) = check_folder(files, DATA).problems
    assert (problem.kind, problem.file) == ("overlap", path_of(0))
    assert len(repaired(files).kept) == 1
    assert raw_records(files) == before


def test_a_file_that_pretends_to_be_a_segment_hides_no_records() -> None:
    files = stored()
    before = raw_records(files)
    files.replace_file(path_of(4000), bytes(files.content(path_of(0))))
    problems = check_folder(files, DATA).problems
    assert path_of(4000) in {each.file for each in problems}
    repaired(files)
    assert raw_records(files) == before
    assert_goes_on(files, 9000)


def test_names_of_folders_are_checked() -> None:
    files = stored(1)
    files.make_folder(f"{DATA}/topics/a b")
    files.make_folder(f"{DATA}/topics/t/2")
    open_log(files).close()
    Log(files, f"{DATA}/topics/t/2", LogSettings(), ManualClock(NOW)).close()
    problems = check_folder(files, DATA).problems
    assert [(each.kind, each.file) for each in problems] == [
        ("name", f"{DATA}/topics/a b"),
        ("missing", f"{DATA}/topics/t/1"),
    ]
    report = repair_folder(files, DATA)
    assert [(each.kind, each.file) for each in report.left] == [("name", f"{DATA}/topics/a b")]


def test_a_dry_run_changes_nothing() -> None:
    files = stored()
    files.content(path_of(3000))[5000] ^= 4
    files.unlink(path_of(0, ".index"))
    before = snapshot(files)
    report = repair_folder(files, DATA, dry_run=True)
    assert {each.kind for each in report.problems} == {"damaged", "index"}
    assert all(each.repair for each in report.problems)
    assert snapshot(files) == before


class PowerCutError(Exception):
    """Stands for the end of the process: nothing of ours catches it."""


def test_a_power_loss_anywhere_in_a_repair_loses_nothing() -> None:
    step = 0
    while True:
        files = stored(records=200)
        before = raw_records(files)
        for base, number in ((200, 199), (400, 150)):
            at = walk(bytes(files.content(path_of(base))))[number] + 40
            files.content(path_of(base))[at] ^= 4
            del before[base + number]
        files.settle()
        left = step

        def cut(operation: str, path: str) -> None:
            nonlocal left
            if operation not in ("pread", "read_file", "list_folder"):
                left -= 1
                if left < 0:
                    raise PowerCutError

        files.before_call = cut
        try:
            repair_folder(files, DATA)
        except PowerCutError:
            step += 4
        else:
            break
        finally:
            files.before_call = lambda operation, path: None
        files.power_loss(step)
        if step % 8:
            open_log(files).close()  # a start between the two
        report = repair_folder(files, DATA)
        assert report.left == []
        assert raw_records(files) == before
        assert_goes_on(files, 600)
    assert step > 50


def test_a_repair_that_is_killed_leaves_no_derived_files_of_a_lost_log_beside_another_one() -> None:
    files = FaultyFiles()
    log = open_log(files)
    for base in (0, 200, 400):
        log.roll()
        append(log, [Record(b"%d" % number, timestamp=NOW) for number in range(base, base + 200)])
    log.close()
    before = raw_records(files)
    files.unlink(path_of(200))

    def kill(operation: str, path: str) -> None:
        if operation == "flush_folder" and files.exists(path_of(200)):  # the log behind it has taken its name
            raise PowerCutError

    files.before_call = kill
    with pytest.raises(PowerCutError):
        repair_folder(files, DATA)
    files.before_call = lambda operation, path: None
    files.kill()
    repaired(files)
    assert raw_records(files) == {offset: data for offset, data in before.items() if not 200 <= offset < 400}
    assert_goes_on(files, 600)


def test_a_log_that_is_appended_to_has_no_problems() -> None:
    files = FaultyFiles()
    log = open_log(files, LogSettings(segment_bytes=50_000))

    def go_on(done: int, total: int) -> None:
        if done < total:
            fill(log, 600, batch=100)
            log.flush()

    fill(log, 3000, batch=100)
    for _ in range(3):
        size = log.size_bytes
        assert check_folder(files, DATA, progress=go_on, live=True).problems == []
        assert log.size_bytes > size


def test_repair_waits_for_no_server_and_touches_nothing_of_one(tmp_path: Path) -> None:
    files = LocalFiles()
    store = FolderStore(files, str(tmp_path), ManualClock(NOW))
    log = store.open_partition("plant/line1", 0, LogSettings())
    append(log, numbered(100))
    log.close()
    lock = files.lock(str(tmp_path / "lock"))
    with pytest.raises(FolderLockedError):
        repair_folder(files, str(tmp_path))
    lock.close()
    file = tmp_path / "topics" / "plant%2Fline1" / "0" / f"{base_name(0)}.log"
    content = bytearray(file.read_bytes())
    content[walk(bytes(content))[50] + 40] ^= 1
    file.write_bytes(content)
    (problem,) = check_folder(files, str(tmp_path)).problems
    assert (problem.file, problem.offset) == (str(file), 50)
    assert repair_folder(files, str(tmp_path)).left == []
    assert check_folder(files, str(tmp_path)).problems == []
    log = store.open_partition("plant/line1", 0, LogSettings())
    assert [record.offset for record in read_all(log)] == [n for n in range(100) if n != 50]
    log.close()


def test_a_folder_without_topics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no data folder"):
        check_folder(LocalFiles(), str(tmp_path))
    with pytest.raises(StorageError, match="no data folder"):
        repair_folder(LocalFiles(), str(tmp_path))
