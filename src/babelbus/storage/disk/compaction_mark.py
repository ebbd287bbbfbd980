"""Up to which offset compaction has looked at a partition, so that nobody takes what is left for all there was.

The note `compacted` of a partition is written before the first record goes.
"""

from typing import Annotated

import msgspec

from babelbus.storage.files import FileSystem
from babelbus.storage.notes import FORMAT, Note

NAME = "compacted"


class Compacted(msgspec.Struct, frozen=True):
    """Compaction has looked at the records before the offset `until`."""

    until: Annotated[int, msgspec.Meta(ge=0)]
    format: int = FORMAT


def note(files: FileSystem, folder: str) -> Note[Compacted]:
    """Return the note of a partition; `recall` reads it."""
    return Note(files, f"{folder}/{NAME}", Compacted, advice="the segments are looked at instead")
