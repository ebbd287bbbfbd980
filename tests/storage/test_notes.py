"""Notes: what was written is read again or its damage is named, whichever bit of it is wrong."""

import errno
import logging

import msgspec
import pytest

from babelbus.storage.errors import DiskError, DiskFullError
from babelbus.storage.notes import DamagedNoteError, Note, decode, encode
from tests.storage.faults import FaultyFiles


class Mark(msgspec.Struct, frozen=True):
    until: int
    who: str = "jürgen"
    format: int = 1


def note(files: FaultyFiles, *, bare: bool = False) -> Note[Mark]:
    files.make_folder("data")
    return Note(files, "data/mark", Mark, advice="remove the file", bare=bare)


def test_a_note_is_read_as_it_was_written_and_a_missing_one_is_none() -> None:
    files = FaultyFiles()
    assert note(files).read() is None
    note(files).write(Mark(7))
    assert note(files).read() == note(files).recall() == Mark(7)
    assert files.content("data/mark") == b'774924e2\n{"until":7,"who":"j\xc3\xbcrgen","format":1}'


@pytest.mark.parametrize("bare", [False, True])
def test_each_wrong_bit_and_each_lost_end_is_named_with_the_file_and_what_to_do(bare: bool) -> None:
    content = encode(Mark(7))
    wrong = [content[:size] for size in range(len(content))]
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        wrong.append(bytes(damaged))
    for some in wrong:
        with pytest.raises(DamagedNoteError, match=r"^data/mark is damaged .*: remove the file$"):
            decode(some, Mark, path="data/mark", advice="remove the file", bare=bare)


@pytest.mark.parametrize("body", [b"\xfb", b'{"until": 1, "who": "\xfb"}', b'{"until": "many"}', b"", b"null"])
def test_what_is_no_note_of_ours_is_damaged_also_without_a_checksum(body: bytes) -> None:
    with pytest.raises(DamagedNoteError):
        decode(body, Mark, path="data/mark", bare=True)


def test_a_file_of_the_time_before_checksums_is_read_and_written_anew_with_one() -> None:
    files = FaultyFiles()
    files.make_folder("data")
    files.replace_file("data/mark", b'{"until": 3}')
    old = note(files, bare=True)
    assert old.read() == Mark(3)
    with pytest.raises(DamagedNoteError, match="checksum"):
        note(files).read()
    old.write(Mark(4))
    assert note(files).read() == old.read() == Mark(4)


def test_a_note_of_a_later_version_is_not_taken_for_ours() -> None:
    with pytest.raises(DamagedNoteError, match="later version"):
        decode(encode(Mark(7, format=2)), Mark, path="data/mark")


def test_what_only_spares_work_is_recalled_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    note(files).write(Mark(7))
    files.content("data/mark")[-3] ^= 0x80
    with caplog.at_level(logging.WARNING):
        assert note(files).recall() is None
    assert "data/mark is damaged" in caplog.text


def test_a_disk_that_refuses_leaves_the_last_note() -> None:
    files = FaultyFiles()
    note(files).write(Mark(7))
    files.fail("pwrite", errno.ENOSPC, suffix="mark.new")
    with pytest.raises(DiskFullError, match="data/mark"):
        note(files).write(Mark(8))
    assert note(files).read() == Mark(7)
    files.fail("pwrite", errno.EIO, suffix="mark.new")
    with pytest.raises(DiskError, match="data/mark"):
        note(files).write(Mark(8))
