"""How far the last segment of a partition is known to be good and durable, so that a start reads only what is behind.

The note `checkpoint` of a partition is a memory of the log like the index files: when it is
missing, torn or does not fit, the segments are read instead.
"""

from typing import Annotated

import msgspec

from babelbus.storage.files import FileSystem
from babelbus.storage.notes import FORMAT, Note
from babelbus.storage.producers import ProducerBatch

NAME = "checkpoint"


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything before byte `position` of the segment `segment` is durable, where the record `next_offset` begins.

    `position` begins a block of 1,024 records. `producers` is what was known of them when it was written. All records
    below `end` are durable; checkpoints had no `end` once, and then vouched for `next_offset` alone. `lost` are the
    bases of segments in front of which records were missing: each start reads the segments in front of them again.
    """

    segment: int
    position: Annotated[int, msgspec.Meta(ge=0)]
    next_offset: int
    producers: dict[int, list[ProducerBatch]]
    format: int = FORMAT
    end: int = 0
    lost: list[int] = []

    @property
    def durable_end(self) -> int:
        """The offset up to which the log was durable: a log that ends before it has lost records."""
        return max(self.end, self.next_offset)


def note(files: FileSystem, folder: str) -> Note[Checkpoint]:
    """Return the note of a partition; `recall` reads it."""
    return Note(files, f"{folder}/{NAME}", Checkpoint, advice="the segments are read instead")
