"""How far compaction has looked, and what it leaves alone because it is young."""

import errno

import pytest

from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.errors import DiskFullError
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, NOW, append, open_log, read_all


def append_keyed(log: Log, key: bytes, *, age_seconds: float = 0) -> None:
    append(log, [Record(b"." * 600, key=key, timestamp=NOW - round(age_seconds * 1000))])


def offsets(log: Log) -> list[int]:
    return [record.offset for record in read_all(log)]


def test_compaction_leaves_young_segments_alone_and_they_replace_nothing() -> None:
    settings = LogSettings(segment_bytes=1000, cleanup="compact", compact_after_seconds=60)
    log = open_log(FaultyFiles(), settings)
    for age in (100, 90, 80, 70, 65, 62, 50, 99, 98, 97):  # two a segment; from the fourth on, one is young
        append_keyed(log, b"k", age_seconds=age)
    log.clean(NOW)
    assert offsets(log) == [1, 3, 5, 6, 7, 8, 9]
    assert log.compacted_until == 6
    log.clean(NOW + 20_000)
    assert offsets(log) == [1, 3, 5, 7, 8, 9]
    assert log.compacted_until == 8


def test_how_far_compaction_has_looked_is_known_after_a_restart() -> None:
    files = FaultyFiles()
    settings = LogSettings(segment_bytes=1000, cleanup="compact")
    log = open_log(files, settings)
    assert log.compacted_until == 0
    for number in range(5):
        append_keyed(log, b"%d" % number)
    log.clean(NOW)
    assert log.compacted_until == 0  # nothing was replaced
    append_keyed(log, b"0")
    log.clean(NOW)
    assert log.compacted_until == 0  # no segment was sealed since
    append_keyed(log, b"x")
    log.clean(NOW)
    assert (offsets(log), log.compacted_until) == ([1, 2, 3, 4, 5, 6], 7)
    append_keyed(log, b"y")
    log.flush()
    files.power_loss(0)
    log = open_log(files, settings)
    assert (log.next_offset, log.compacted_until) == (8, 7)


@pytest.mark.parametrize("content", [None, b"", b"00000000\n{}", b"garbage"])
def test_without_that_memory_a_log_with_gaps_has_forgotten_all_that_was_there(content: bytes | None) -> None:
    files = FaultyFiles()
    settings = LogSettings(segment_bytes=1000, cleanup="compact")
    log = open_log(files, settings)
    for _ in range(5):
        append_keyed(log, b"k")
    log.clean(NOW)
    assert log.compacted_until == 5
    append_keyed(log, b"k")
    log.close()
    path = f"{FOLDER}/compacted"
    if content is None:
        files.unlink(path)
    else:
        files.content(path)[:] = content
    log = open_log(files, settings)
    append_keyed(log, b"k")
    assert (log.next_offset, log.compacted_until) == (7, 6)


def test_without_that_memory_a_log_without_gaps_has_all_there_was() -> None:
    log = open_log(FaultyFiles(), LogSettings(segment_bytes=1000))
    for _ in range(5):
        append_keyed(log, b"k")
    assert log.compacted_until == 0


def test_nothing_is_removed_before_it_is_remembered_that_it_may_be() -> None:
    files = FaultyFiles()
    log = open_log(files, LogSettings(segment_bytes=1000, cleanup="compact"))
    for _ in range(5):
        append_keyed(log, b"k")
    files.fail("pwrite", errno.ENOSPC, suffix="compacted.new")
    with pytest.raises(DiskFullError):
        log.clean(NOW)
    assert (offsets(log), log.compacted_until) == ([0, 1, 2, 3, 4], 0)
    log.clean(NOW)
    assert (offsets(log), log.compacted_until) == ([1, 3, 4], 5)
