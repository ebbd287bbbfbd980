"""The words between the server and the process that searches: a task, and what came of it; each is one frame."""

import struct
from collections.abc import Sequence

import msgspec

LENGTH = struct.Struct("!I")
TASK_SECONDS = 20
"""How long a task may take, whatever it is about: the process ends then, also if its server is gone."""


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Search records for a while: those in `data`, or in the file that comes with the task, from `position` to `end`.

    `offset` and `end_offset` bound the records, `count` the hits, `seconds` the time. `blocks` are positions of records
    in the file: from each to the next are `block_records` records.
    """

    filter: str
    topic: str
    root: str
    position: int
    end: int
    offset: int
    end_offset: int
    count: int
    seconds: float
    data: bytes | None = None
    blocks: Sequence[int] = ()
    block_records: int = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The offsets that match, and how far the search came. `fault` says that the bytes there are no records.

    `time_ms` is the time of the last record, or of a record that is less than a block in front of the last one.
    """

    hits: list[int]
    position: int
    offset: int
    records: int
    time_ms: int
    fault: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def frame(content: bytes) -> bytes:
    """Return a frame."""
    return LENGTH.pack(len(content)) + content
