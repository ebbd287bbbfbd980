import struct
import zlib
from pathlib import Path

import google_crc32c
import pytest

from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.files import LocalFiles
from tests.storage.helpers import append, fill, numbered, read_all
from tests.support.clock import ManualClock

NAMES = (".index", ".timeindex", ".blocks")


def open_log(folder: Path, segment_bytes: int = 2**27) -> Log:
    return Log(LocalFiles(), str(folder), LogSettings(segment_bytes=segment_bytes), ManualClock())


def file_of(folder: Path, suffix: str, base: int = 0) -> Path:
    return folder / f"{base:020d}{suffix}"


def test_a_segment_of_2050_records_has_3_entries_that_tell_position_and_time(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    sent = numbered(2050)
    append(log, sent)
    positions = struct.unpack(">3q", file_of(tmp_path, ".index").read_bytes())
    times = struct.unpack(">3q", file_of(tmp_path, ".timeindex").read_bytes())
    data = file_of(tmp_path, ".log").read_bytes()
    assert [struct.unpack_from(">q", data, at)[0] for at in positions] == [0, 1024, 2048]
    assert list(times) == [sent[0].timestamp, sent[1024].timestamp, sent[2048].timestamp]


def test_the_entry_of_a_block_is_its_crc_a_check_and_its_greatest_time(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    sent = numbered(2050)
    append(log, sent)
    data = file_of(tmp_path, ".log").read_bytes()
    positions = struct.unpack(">3q", file_of(tmp_path, ".index").read_bytes())
    blocks = file_of(tmp_path, ".blocks").read_bytes()
    assert len(blocks) == 2 * 16, "the last block is not full"
    for number in range(2):
        crc, check, greatest = struct.unpack_from(">IIq", blocks, 16 * number)
        assert crc == google_crc32c.value(data[positions[number] : positions[number + 1]])
        assert greatest == max(record.timestamp for record in sent[1024 * number : 1024 * (number + 1)])
        first = sent[1024 * number].timestamp
        assert check == zlib.crc32(struct.pack(">qqqIq", number, positions[number], first, crc, greatest))


@pytest.mark.parametrize("suffix", NAMES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "zeros", "shifted"])
@pytest.mark.parametrize("segment_bytes", [2**27, 100_000])
def test_a_derived_file_that_is_wrong_is_made_again_from_the_log(
    tmp_path: Path, suffix: str, damage: str, segment_bytes: int
) -> None:
    log = open_log(tmp_path, segment_bytes)
    fill(log, 5000, batch=500)
    before = read_all(log)
    log.close()
    path = file_of(tmp_path, suffix)
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        changed = {
            "empty": b"",
            "cut": good[:-3],
            "longer": good + good[-8:],
            "zeros": bytes(len(good)),
            "shifted": good[8:] + good[:8],
        }
        path.write_bytes(changed[damage])
    again = open_log(tmp_path, segment_bytes)
    assert read_all(again) == before
    for offset in (0, 1, 1023, 1024, 3000, 4999):
        assert again.read(offset, 200).base_offset == offset
        assert again.find_time(before[offset].timestamp) == offset
    again.close()
    if suffix != ".blocks":
        assert path.read_bytes() == good
