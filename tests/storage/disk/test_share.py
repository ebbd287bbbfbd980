"""The bytes of a log that another process may read: open, at the right byte, also when its segment is removed."""

import os
from pathlib import Path

import pytest

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.errors import OffsetOutOfRangeError
from babelbus.storage.files import FileSystem, LocalFiles
from tests.storage.faults import FaultyFiles
from tests.support.clock import ManualClock


def filled(files: FileSystem, folder: str) -> Log:
    log = Log(files, folder, LogSettings(segment_bytes=2**16), ManualClock())
    for number in range(10):
        log.append(encode_payloads([b"%d" % number * 1000] * 10, [1] * 10, log.next_offset))
    return log


def test_what_is_shared_holds_the_records_from_its_offset_to_the_end_of_a_segment(tmp_path: Path) -> None:
    log = filled(LocalFiles(), str(tmp_path / "0"))
    offset, seen = 3, list[int]()
    while (part := log.share(offset)) is not None:
        log.trim(part.next_offset)  # what is open stays readable
        data = os.pread(part.file, part.end - part.position, part.position)
        os.close(part.file)
        records = list(iterate(decode_chunk(data)))
        assert (records[0].offset, records[-1].offset + 1) == (part.offset, part.next_offset)
        seen += [record.offset for record in records]
        offset = part.next_offset
    assert seen == list(range(3, 100))
    with pytest.raises(OffsetOutOfRangeError):
        log.share(101)


def test_the_blocks_of_what_is_shared_are_a_number_of_records_apart(tmp_path: Path) -> None:
    log = Log(LocalFiles(), str(tmp_path / "0"), LogSettings(), ManualClock())
    payloads = [b"x" * (number % 50) for number in range(5_000)]
    log.append(encode_payloads(payloads, [1] * len(payloads), 0))
    part = log.share(1_500)
    assert part is not None
    data = os.pread(part.file, part.end, 0)
    os.close(part.file)
    offsets = [int.from_bytes(data[position : position + 8]) for position in part.blocks]
    assert offsets == [2_048, 3_072, 4_096]
    assert part.block_records == 1_024


def test_a_log_that_is_in_no_file_is_not_shared() -> None:
    assert filled(FaultyFiles(), "0").share(3) is None
