"""The notes of a partition: how far its log is good and durable, and how far compaction has looked.

Both are a memory of the log like the index files: if a note is missing, torn or does not fit, the segments are read
instead. `checkpoint` spares a start everything in front of it. `compacted` is written before the first record goes, so
that nobody takes what is left for all there was.
"""

from typing import Annotated

import msgspec

from babelbus.storage.files import FileSystem
from babelbus.storage.notes import FORMAT, Note
from babelbus.storage.producers import ProducerBatch

NAME = "checkpoint"
COMPACTED_NAME = "compacted"


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
    """Return the note of how far the log is durable; `recall` reads it."""
    return Note(files, f"{folder}/{NAME}", Checkpoint, advice="the segments are read instead")


class Compacted(msgspec.Struct, frozen=True):
    """Compaction has looked at the records before the offset `until`."""

    until: Annotated[int, msgspec.Meta(ge=0)]
    format: int = FORMAT


def compaction_note(files: FileSystem, folder: str) -> Note[Compacted]:
    """Return the note of how far compaction has looked; `recall` reads it."""
    return Note(files, f"{folder}/{COMPACTED_NAME}", Compacted, advice="the segments are looked at instead")
