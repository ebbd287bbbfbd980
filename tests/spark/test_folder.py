import os
from pathlib import Path

import pytest

from babelbus.records.columns import iterate
from babelbus.records.format import CorruptRecordError, encode_batch
from babelbus.records.record import Record
from babelbus.spark.available_offsets import Survey
from babelbus.spark.errors import OptionError, UnknownTopicError
from babelbus.spark.folder import FolderReach, PartitionFolder
from babelbus.storage.errors import OffsetOutOfRangeError
from tests.spark.support import NOW, Folder, numbered, snapshot


def reach(folder: Folder) -> PartitionFolder:
    return PartitionFolder(str(folder.file().parent))


def payloads(partition: PartitionFolder, start: int, end: int) -> list[bytes | None]:
    found = [record for columns in partition.read(start, end) for record in iterate(columns)]
    return [record.payload for record in found if start <= record.offset < end]


def told(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_all_that_a_closed_log_holds_is_read(folder: Folder) -> None:
    for first in range(0, 5000, 500):
        folder.add(numbered(500, first=first), segment_bytes=40_000)
    folder.close()
    partition = reach(folder)
    bounds = partition.bounds()
    assert (bounds.first, bounds.end) == (0, 5000)
    assert payloads(partition, 0, 5000) == told(*range(5000))
    assert payloads(partition, 1023, 3073) == told(*range(1023, 3073))


def test_the_end_moves_while_a_server_appends(folder: Folder) -> None:
    folder.add(numbered(3))
    partition = reach(folder)
    assert partition.bounds().end == 3
    folder.add(numbered(2000, first=3))
    assert partition.bounds().end == 2003
    folder.log().roll()
    assert partition.bounds().end == 2003
    folder.add(numbered(1, first=2003))
    assert partition.bounds().end == 2004
    assert payloads(partition, 2000, 2004) == told(2000, 2001, 2002, 2003)


def test_zeros_that_wait_for_the_next_records_are_the_end(folder: Folder) -> None:
    for number in range(300):
        folder.add(numbered(1, first=number))
    partition = reach(folder)
    assert folder.file().stat().st_size > folder.log().size_bytes
    assert partition.bounds().end == 300
    assert reach(folder).bounds().end == 300
    folder.add(numbered(1, first=300))
    assert partition.bounds().end == 301
    assert payloads(partition, 290, 301) == told(*range(290, 301))
    folder.log().roll()
    folder.add(numbered(1, first=301))
    assert payloads(partition, 290, partition.bounds().end) == told(*range(290, 302))
    folder.close()
    assert folder.file(base=301).stat().st_size < 100
    assert payloads(reach(folder), 290, 302) == told(*range(290, 302))


def test_reading_changes_no_file_and_takes_no_lock(folder: Folder) -> None:
    folder.add(numbered(3000), segment_bytes=40_000)
    folder.add(numbered(3000, first=3000))
    folder.close()
    for name in os.listdir(folder.file().parent):
        if name.endswith((".index", ".blocks")):  # what is missing would be made again by a server
            os.unlink(folder.file().parent / name)
    before = snapshot(folder.path)
    partition = reach(folder)
    assert payloads(partition, 0, partition.bounds().end) == told(*range(6000))
    assert snapshot(folder.path) == before


def test_an_incomplete_record_at_the_tail_is_not_there_yet(folder: Folder) -> None:
    folder.add(numbered(10))
    partition = reach(folder)
    following = encode_batch(numbered(1, first=10), 10).data
    for size in range(len(following)):
        with open(folder.file(), "r+b") as file:
            file.seek(0, os.SEEK_END)
            end = file.tell()
            file.write(following[:size])
        assert partition.bounds().end == 10
        assert reach(folder).bounds().end == 10
        os.truncate(folder.file(), end)
    with open(folder.file(), "ab") as file:
        file.write(following)
    assert partition.bounds().end == 11


def test_an_incomplete_batch_of_a_producer_is_not_there_yet(folder: Folder) -> None:
    folder.add_produced(numbered(10))
    partition = reach(folder)
    size = folder.file().stat().st_size
    batch = folder.add_produced(numbered(5, first=10), sequence=10)
    whole = folder.file().read_bytes()
    cut = size + int(batch.positions[3])
    folder.file().write_bytes(whole[:cut])
    assert partition.bounds().end == 10  # a start of the server would cut the three records that are there
    folder.file().write_bytes(whole)
    assert partition.bounds().end == 15


def test_the_end_is_durable_before_it_is_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fdatasync

    def note(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    log = folder.log()
    log.append(encode_batch(numbered(5), 0))  # and no flush
    monkeypatch.setattr("os.fdatasync", note)
    partition = reach(folder)
    assert partition.bounds().end == 5
    assert flushed == [str(folder.file())]
    assert partition.bounds().end == 5
    assert flushed == [str(folder.file())]  # once is enough


def test_offsets_that_compaction_removed_are_left_out(folder: Folder) -> None:
    records = [Record(b"%d" % n, key=b"%d" % (n % 7), timestamp=NOW + n) for n in range(4000)]
    folder.add(records, cleanup="compact")
    log = folder.log()
    log.roll()
    folder.add([Record(b"last", key=b"0", timestamp=NOW)])
    log.clean(NOW)
    partition = reach(folder)
    bounds = partition.bounds()
    assert (bounds.first, bounds.end) == (0, 4001)
    assert payloads(partition, 0, 4001) == [*told(3993, 3994, 3995, 3996, 3998, 3999), b"last"]
    assert payloads(partition, 100, 3998) == told(3993, 3994, 3995, 3996)
    assert payloads(partition, 100, 200) == []


def test_what_retention_removed_is_out_of_range(folder: Folder) -> None:
    for first in range(0, 30, 10):
        folder.add(numbered(10, first=first), retention_bytes=1)
        folder.log().roll()
    folder.log().clean(NOW)
    partition = reach(folder)
    assert partition.bounds().first == 20
    with pytest.raises(OffsetOutOfRangeError) as caught:
        payloads(partition, 5, 30)
    assert (caught.value.offset, caught.value.first) == (5, 20)


def test_a_damaged_record_is_an_error_that_names_file_and_offset(folder: Folder) -> None:
    folder.add(numbered(2000))
    folder.log().roll()
    folder.add(numbered(10, first=2000))
    content = bytearray(folder.file().read_bytes())
    at = content.index(b"\x041500") + 2
    content[at] ^= 0x40
    folder.file().write_bytes(content)
    partition = reach(folder)
    assert payloads(partition, 0, 1500) == told(*range(1500))
    with pytest.raises(CorruptRecordError, match=r"00000\.log: .*offset 1500") as caught:
        payloads(partition, 0, 2010)
    assert caught.value.path == str(folder.file())
    assert payloads(partition, 1501, 2010) == told(*range(1501, 2010))


def test_a_time_leads_to_the_first_record_that_is_not_older(folder: Folder) -> None:
    folder.add(numbered(3000), segment_bytes=30_000)
    folder.add(numbered(3000, first=3000))
    partition = reach(folder)
    for wanted in (0, NOW, NOW + 1, NOW + 2999, NOW + 3000, NOW + 5999):
        assert partition.find_time(wanted) == max(wanted - NOW, 0)
    assert partition.find_time(NOW + 6000) is None


def test_records_that_a_rescue_is_about_to_replace_are_not_there_yet(folder: Folder) -> None:
    folder.add(numbered(10))
    folder.file().with_name(f"{6:020d}.rescued").write_bytes(b"")
    assert reach(folder).bounds().end == 6


def test_the_topics_of_a_folder_are_listed_under_their_names(folder: Folder, tmp_path: Path) -> None:
    names = ["plant/line 1", "Öl", ".hidden", "plain"]
    for name in names:
        folder.add(numbered(2), name, 1)
    found = FolderReach(str(folder.path))
    assert found.topics() == sorted(names)
    assert {number: (one.first, one.end) for number, one in found.bounds("Öl", None).items()} == {1: (0, 2)}
    assert found.bounds("Öl", (0,)) == {}
    with pytest.raises(UnknownTopicError, match="'nothing'"):
        found.bounds("nothing", None)


def test_a_batch_that_can_have_no_records_is_refused_when_the_topics_are_known(folder: Folder) -> None:
    folder.add(numbered(10))

    def batch(**given: object) -> int:
        options = folder.options(**given)
        return sum(len(span) for span in Survey(options, FolderReach(str(folder.path))).batch())

    ends = {"startingOffsets": '{"news": {"0": 7}}', "endingOffsets": '{"news": {"0": 5}}'}
    with pytest.raises(
        OptionError, match=r"startingOffsets: .* at offset 7, after its end at 5 \(option endingOffsets"
    ):
        batch(**ends)
    assert batch(**ends | {"startingOffsets": '{"news": {"0": 5}}'}) == 0
    assert batch(subscribePattern="ne.*") == 10
    with pytest.raises(OptionError, match=r"subscribePattern: no topic has a name that 'ne' fits"):
        batch(subscribePattern="ne")
