"""The bytes that docs/storage.md prints are those that the code writes."""

from pathlib import Path

from babelbus.records.format import encode_batch, mark_producer
from babelbus.records.record import Record
from babelbus.storage.disk.segment import DERIVED_SUFFIXES
from tests.storage.faults import FaultyFiles
from tests.storage.helpers import FOLDER, append, open_log

PAGE = (Path(__file__).parents[3] / "docs" / "storage.md").read_text(encoding="utf-8")
TIME = 1_700_000_000_123
KEYED = Record(b"hi", b"user-1", ((b"ct", b"text"), (b"id", b"42")), TIME)


def test_the_records_on_the_page_are_the_ones_that_are_stored() -> None:
    assert encode_batch([KEYED], 7).data.hex() in PAGE
    assert encode_batch([Record(None, b"user-1", (), TIME)], 7).data.hex() in PAGE
    assert mark_producer(encode_batch([Record(b"hi", timestamp=TIME)]), 258, 0).data.hex() in PAGE


def test_the_derived_files_on_the_page_are_the_ones_that_are_written() -> None:
    files = FaultyFiles()
    log = open_log(files)
    append(log, [KEYED])
    log.roll()
    log.close()
    derived = [files.read_file(f"{FOLDER}/{0:020d}{suffix}").hex() for suffix in DERIVED_SUFFIXES]
    assert "\n".join(derived) in PAGE
    assert files.read_file(f"{FOLDER}/checkpoint").decode() in PAGE
