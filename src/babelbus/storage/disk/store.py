"""Where the topics of an engine lie: folders `<data>/topics/<topic>/<partition>/` (jebp.md, DECISION 30 and 42)."""

import logging
import secrets
from urllib.parse import quote, unquote

from babelbus.clock import Clock
from babelbus.errors import InvalidTopicNameError
from babelbus.storage.contract import PARTITIONS_MAX, Fit, LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

LOCK_NAME = "lock"
"""The lock file of a data folder: one process owns it."""
SETTINGS_NAME = "settings.json"
REMOVED_PREFIX = ".removed-"
FOLDER_BYTES_MAX = 255
"""The longest file name that common file systems take."""


def folder_name(topic: str) -> str:
    """Return the folder of a topic: its name, percent-encoded but for letters, digits, `.`, `_` and `-`.

    Raises:
        InvalidTopicNameError: the folder's name would be too long for a file system.
    """
    name = quote(topic, safe="")
    if topic.startswith("."):  # neither hidden nor "." nor ".." nor taken for a removed topic
        name = "%2E" + name[1:]
    if not 1 <= len(name) <= FOLDER_BYTES_MAX:
        raise InvalidTopicNameError(
            f"the folder of topic {topic!r} would have a name of {len(name)} bytes, the limit is {FOLDER_BYTES_MAX}"
        )
    return name


def parse_number(name: str) -> int | None:
    """Return the number of the partition whose folder has this name, `None` for another name."""
    if not (name.isascii() and name.isdecimal()) or name != (name.lstrip("0") or "0"):
        return None
    return number if (number := int(name)) < PARTITIONS_MAX else None  # a copy may be named by its day


def topic_of(folder: str) -> str | None:
    """Return the topic whose folder has this name, `None` if no topic has."""
    try:
        return topic if folder_name(topic := unquote(folder)) == folder else None
    except (InvalidTopicNameError, UnicodeEncodeError):
        return None


class FolderStore:
    """The topics below one folder of a file system; see `contract.Store`.

    The engine `disk` is this on `files.LocalFiles`, the engine `memory` is this on `memory.MemoryFiles`. The lock file
    of the data folder keeps other processes out; within the process the last one that opened a partition writes it.
    """

    def __init__(self, files: FileSystem, folder: str, clock: Clock, fit: Fit | None = None) -> None:
        self.fit = fit or Fit()
        self._writers: dict[str, Log] = {}
        self._files = files
        self._clock = clock
        self._folder = f"{folder}/topics"
        files.make_folder(self._folder)

    def topics(self) -> list[str]:
        """Return the names of the topics that are stored, sorted."""
        found = []
        for name in self._files.list_folder(self._folder):
            if name.startswith("."):
                continue
            topic = topic_of(name)
            if topic is None:
                log.warning("%r in the folder of the topics is left alone: no topic has this name; move it away", name)
            else:
                found.append(topic)
        return sorted(found)

    def removed(self) -> dict[str, str]:
        """Return the topics whose removal was cut short by a crash: token for `erase` -> name of the topic."""
        found = {}
        for token in self._files.list_folder(self._folder):
            if token.startswith(REMOVED_PREFIX):
                try:
                    inside = self._files.list_folder(f"{self._folder}/{token}")
                except OSError as error:
                    log.warning("%r in the folder of the topics is left alone: %s", token, error.strerror)
                    continue
                found[token] = unquote(inside[0]) if inside else ""
        return found

    def partition_count(self, topic: str) -> int:
        """Return how many partitions of a topic are stored."""
        names = self._files.list_folder(self._path(topic))
        return max((number + 1 for number in map(parse_number, names) if number is not None), default=0)

    def open_partition(self, topic: str, partition: int, settings: LogSettings, *, anew: bool = True) -> Log:
        """Open a partition as its only writer, or make it; see `contract.Catalog`."""
        path = f"{self._path(topic)}/{partition}"
        if path in self._writers:
            self._writers[path].fence_off()
        opened = self._writers[path] = Log(self._files, path, settings, self._clock, anew=anew)
        return opened

    def load_settings(self, topic: str) -> bytes | None:
        """Return what `save_settings` was given, or `None`."""
        return self._load(self._path(topic))

    def load_removed(self, token: str) -> bytes | None:
        """Return the settings of a topic that `hide` took away, or `None`."""
        grave = f"{self._folder}/{token}"
        inside = self._files.list_folder(grave)
        return self._load(f"{grave}/{inside[0]}") if inside else None

    def _load(self, folder: str) -> bytes | None:
        try:
            return self._files.read_file(f"{folder}/{SETTINGS_NAME}")
        except FileNotFoundError:
            return None

    def save_settings(self, topic: str, content: bytes) -> None:
        """Keep the settings of a topic, durably; makes the topic's folder."""
        self._files.make_folder(self._path(topic))
        self._files.replace_file(f"{self._path(topic)}/{SETTINGS_NAME}", content)

    def remove_partitions(self, topic: str) -> None:
        """Delete the logs of a topic and keep its settings: its records are in another engine. May take long."""
        for number in range(self.partition_count(topic)):
            self._files.remove_tree(f"{self._path(topic)}/{number}")

    def hide(self, topic: str) -> str:
        """Remove a topic from `topics` at once and durably; see `contract.Store`."""
        token = f"{REMOVED_PREFIX}{secrets.token_hex(8)}"
        grave = f"{self._folder}/{token}"
        path, hidden = self._path(topic), f"{grave}/{folder_name(topic)}"
        self._files.make_folder(grave)
        self._files.rename(path, hidden)
        try:
            self._files.flush_folder(grave)
            self._files.flush_folder(self._folder)
        except OSError:  # a loss of power could undo the removal: the topic stays
            self._files.rename(hidden, path)
            self._files.flush_folder(self._folder)
            raise
        return token

    def erase_records(self, token: str) -> None:
        """Delete the records of what `hide` took away; see `contract.Catalog`."""
        grave = f"{self._folder}/{token}"
        for folder in self._files.list_folder(grave):
            for name in self._files.list_folder(f"{grave}/{folder}"):
                if parse_number(name) is not None:
                    self._files.remove_tree(f"{grave}/{folder}/{name}")

    def erase(self, token: str) -> None:
        """Delete what `hide` took away. May take long."""
        self._files.remove_tree(f"{self._folder}/{token}")

    def close(self) -> None:
        """Close nothing: the store holds nothing beside the logs."""

    def _path(self, topic: str) -> str:
        return f"{self._folder}/{folder_name(topic)}"
