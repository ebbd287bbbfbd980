"""The two files that groups and their cursors are kept in.

`groups.0` and `groups.1` are written in turn, each as a whole with all groups: 8 hex digits of a CRC-32, a line end,
JSON. The one with the higher `sequence` counts; if it is damaged the other stands, one commit older.
"""

import logging
import threading
import zlib
from collections.abc import Sequence

import msgspec

from babelbus.core.groups.info import StoredLane
from babelbus.core.groups.settings import GroupSettings
from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem, disk_error

log = logging.getLogger(__name__)

NAMES = ("groups.0", "groups.1")
FORMAT = 1
_CRC_BYTES = 9

EncodedGroup = msgspec.Raw


class DamagedGroupsError(StorageError):
    """Neither file of the groups can be read; the message says what to do."""


class StoredGroup(msgspec.Struct, frozen=True):
    """What is kept of a group."""

    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    created_ms: int
    lanes: dict[int, StoredLane]


class _Stored(msgspec.Struct, frozen=True):
    format: int
    sequence: int
    groups: list[msgspec.Raw]


class GroupFile:
    """The files of one data folder."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._written = 0
        self._lock = threading.Lock()

    def load(self) -> tuple[int, list[StoredGroup]]:
        """Return the number of the last version, and the groups in it.

        Raises:
            DamagedGroupsError: there is a file, and none that can be read, or a group in it cannot.
            StorageError: the disk refused.
        """
        found: list[_Stored] = []
        damaged: list[str] = []
        for name in NAMES:
            path = f"{self._folder}/{name}"
            try:
                content = self._files.read_file(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise disk_error(error, f"reading {path}") from error
            decoded = _decode(content)
            if decoded is None:
                damaged.append(path)
            else:
                found.append(decoded)
        if not found:
            if damaged:
                raise DamagedGroupsError(
                    f"{' and '.join(damaged)}: damaged or of a later version; put a copy back, or move them away: "
                    "then there are no consumer groups until they are made anew"
                )
            return 0, []
        if damaged:
            log.error("%s: damaged, its groups go on one commit earlier", damaged[0])
        newest = max(found, key=lambda one: one.sequence)
        self._written = newest.sequence
        try:
            return newest.sequence, [msgspec.json.decode(one, type=StoredGroup) for one in newest.groups]
        except msgspec.DecodeError as error:
            raise DamagedGroupsError(f"{self._folder}/{NAMES[newest.sequence % 2]}: {error}") from error

    def write(self, sequence: int, content: bytes) -> None:
        """Write a version, durably, unless a later one is there; from any thread.

        Raises:
            StorageError: the disk refused; the last version stands.
        """
        path = f"{self._folder}/{NAMES[sequence % 2]}"
        with self._lock:
            if sequence < self._written:
                return
            try:
                self._files.replace_file(path, content)
            except OSError as error:
                raise disk_error(error, f"writing {path}") from error
            self._written = sequence


def encode_group(group: StoredGroup) -> EncodedGroup:
    """Return what a file says of one group."""
    return msgspec.Raw(msgspec.json.encode(group))


def encode_file(sequence: int, groups: Sequence[EncodedGroup]) -> bytes:
    """Return the content of a file."""
    body = msgspec.json.encode(_Stored(FORMAT, sequence, list(groups)))
    return b"%08x\n" % zlib.crc32(body) + body


def _decode(content: bytes) -> _Stored | None:
    """Return what a file holds, `None` if it is not what was written."""
    body = content[_CRC_BYTES:]
    try:
        if int(content[: _CRC_BYTES - 1], 16) == zlib.crc32(body):
            found = msgspec.json.decode(body, type=_Stored)
            return found if found.format == FORMAT else None
    except (ValueError, msgspec.DecodeError):
        return None
    return None
