"""How far the last segment of a partition is known to be good and durable, so that a start reads only what is behind.

The file `checkpoint` of a partition is JSON and a CRC. It is a memory of the log like the index files: when it is
missing, torn or does not fit, the segments are read instead.
"""

import logging
import zlib

import msgspec

from babelbus.storage.files import FileSystem
from babelbus.storage.producers import ProducerBatch

log = logging.getLogger(__name__)

NAME = "checkpoint"
FORMAT = 1
_CRC_BYTES = 9
"""Eight hex digits and a line end stand in front of the JSON."""


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything before byte `position` of the segment `segment` is durable, where the record `next_offset` begins.

    `position` begins a block of 1,024 records. `producers` is what was known of them when it was written.
    """

    segment: int
    position: int
    next_offset: int
    producers: dict[int, list[ProducerBatch]]
    format: int = FORMAT


def save(files: FileSystem, folder: str, checkpoint: Checkpoint) -> None:
    """Put the checkpoint of a partition in the place of the last one, durably.

    Raises:
        OSError: the disk refused; the last one still stands.
    """
    body = msgspec.json.encode(checkpoint)
    files.replace_file(f"{folder}/{NAME}", b"%08x\n" % zlib.crc32(body) + body)


def load(files: FileSystem, folder: str) -> Checkpoint | None:
    """Return the checkpoint of a partition, or `None` when there is none that can be trusted."""
    try:
        content = files.read_file(f"{folder}/{NAME}")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s/%s: cannot be read, reading the segments instead: %s", folder, NAME, error)
        return None
    body = content[_CRC_BYTES:]
    try:
        if int(content[: _CRC_BYTES - 1], 16) == zlib.crc32(body):
            found = msgspec.json.decode(body, type=Checkpoint)
            if found.format == FORMAT and found.position >= 0:
                return found
    except ValueError:  # no number, or not the JSON that we write
        pass
    log.warning("%s/%s: damaged or of another format, reading the segments instead", folder, NAME)
    return None
