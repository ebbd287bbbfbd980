"""Up to which offset compaction has looked at a partition, so that nobody takes what is left for all there was.

The file `compacted` of a partition is JSON and a CRC. It is written before the first record goes.
"""

import logging
import zlib

import msgspec

from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

NAME = "compacted"
FORMAT = 1
_CRC_BYTES = 9
"""Eight hex digits and a line end stand in front of the JSON."""


class _Compacted(msgspec.Struct, frozen=True):
    until: int
    format: int = FORMAT


def save(files: FileSystem, folder: str, until: int) -> None:
    """Record the offset in the place of the last one, durably.

    Raises:
        OSError: the disk refused; the last one still stands.
    """
    body = msgspec.json.encode(_Compacted(until))
    files.replace_file(f"{folder}/{NAME}", b"%08x\n" % zlib.crc32(body) + body)


def load(files: FileSystem, folder: str) -> int | None:
    """Return the offset, or `None` when there is none that can be trusted."""
    try:
        content = files.read_file(f"{folder}/{NAME}")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s/%s: cannot be read, looking at the segments instead: %s", folder, NAME, error)
        return None
    body = content[_CRC_BYTES:]
    try:
        if int(content[: _CRC_BYTES - 1], 16) == zlib.crc32(body):
            found = msgspec.json.decode(body, type=_Compacted)
            if found.format == FORMAT and found.until >= 0:
                return found.until
    except ValueError:  # no number, or not the JSON that we write
        pass
    log.warning("%s/%s: damaged or of another format, looking at the segments instead", folder, NAME)
    return None
