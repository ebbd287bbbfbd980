"""The two notes that groups and their cursors are kept in.

`groups.0` and `groups.1` are written in turn, each as a whole with all groups. The note with the higher `sequence`
counts; if it cannot be read, the other note counts, which is one commit older.
"""

import logging
from collections.abc import Sequence

import msgspec

from babelbus.core.groups.settings import GroupSettings
from babelbus.errors import StorageError
from babelbus.storage import notes
from babelbus.storage.errors import TooManyFilesError
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import DamagedNoteError, Note

log = logging.getLogger(__name__)

NAMES = ("groups.0", "groups.1")


class StoredCursor(msgspec.Struct, frozen=True, array_like=True):
    """The stored form of a cursor: records below `committed` and in `done` ([start, end) each) are done."""

    committed: int
    done: list[tuple[int, int]] = []


class StoredGroup(msgspec.Struct, frozen=True):
    """The stored form of a group."""

    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    created_ms: int
    cursors: dict[int, StoredCursor] = msgspec.field(name="lanes")
    owner: str = ""


class _Stored(msgspec.Struct, frozen=True):
    format: int
    sequence: int
    groups: list[msgspec.Raw]


class GroupFile:
    """The files of one data folder."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._notes = [Note(files, f"{folder}/{name}", _Stored) for name in NAMES]

    def load(self) -> tuple[int, list[StoredGroup]]:
        """Return the number of the last version, and the groups in it.

        Raises:
            DamagedNoteError: there is a file, but no file can be read, or a group in it cannot.
            TooManyFilesError: no further file can be opened.
        """
        versions: list[_Stored] = []
        unreadable: list[str] = []
        for note in self._notes:
            try:
                stored = note.read()
            except TooManyFilesError:
                raise
            except StorageError as error:
                unreadable.append(note.path)
                log.error("%s; the groups go on one commit earlier, if the other file can be read", error)
            else:
                versions += [stored] if stored is not None else []
        if not versions:
            if unreadable:
                raise DamagedNoteError(
                    " and ".join(unreadable),
                    "none can be read",
                    "put a copy back, or move them away: then there are no consumer groups until they are made anew",
                )
            return 0, []
        newest = max(versions, key=lambda version: version.sequence)
        if len(versions) == 1 and not unreadable and newest.sequence > 1:
            missing = self._notes[(newest.sequence + 1) % 2].path
            log.error("%s is missing; perhaps the groups go on one commit earlier", missing)
        try:
            return newest.sequence, [msgspec.json.decode(group, type=StoredGroup) for group in newest.groups]
        except msgspec.DecodeError as error:
            path = self._notes[newest.sequence % 2].path
            raise DamagedNoteError(path, str(error), notes.COPY_BACK) from error

    def write(self, sequence: int, groups: Sequence[msgspec.Raw]) -> None:
        """Write a version, durably, from any thread: one version after the other. `groups` are encoded `StoredGroup`s.

        Raises:
            StorageError: the disk refused; the last version counts.
        """
        self._notes[sequence % 2].write(_Stored(notes.FORMAT, sequence, list(groups)))
