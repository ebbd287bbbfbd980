"""Moving the whole data folder of a server into a cluster: topics, groups, state, access, keys (docs/cluster.md).

Topics are copied and compared as `migrate` does; a topic is moved when its settings are among the files of the cluster.
Then the files follow, each read back. Until the last one is there a file says that the folder is on its way, so no
member serves a half. A run that was stopped goes on where it was. The folder stays as it was, unless `remove` says so.
"""

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.config import Config
from babelbus.core.settings import TopicSettings
from babelbus.errors import StorageError
from babelbus.server.app import STAGING_NAME, STATE_NAME
from babelbus.server.migrate import Migrated, Seen, move
from babelbus.storage import notes
from babelbus.storage.disk import LOCK_NAME, FolderStore
from babelbus.storage.files import FileSystem, LocalFiles
from babelbus.storage.jetstream import MOVING_NAME, JetstreamStore, Ownership, ReplicatedFiles
from babelbus.storage.notes import MEMBERSHIP_NAME

CONF_NAME = "conf"
STREAMS_NAME = "jetstream.json"
NOT_MOVED = frozenset({LOCK_NAME, MEMBERSHIP_NAME, f"{CONF_NAME}/addresses"})
"""Files that belong to one machine."""
STEP_BYTES = 8 * 2**20


class EngineStaysError(StorageError):
    """A topic has an engine that no other member of a cluster could read."""

    retriable = False


def move_in(
    config: Config, clock: Clock, *, remove: bool = False, seen: Seen = lambda size: None
) -> Iterator[Migrated]:
    """Move a data folder into its cluster. Yield each topic when it is done, and the files at the end.

    With `remove`, what was moved is deleted from the folder afterwards.

    Raises:
        FolderLockedError: a server runs in the folder.
        EngineStaysError: a topic has engine `db`; nothing was moved.
        NatsRefusedError: the cluster has data already.
        StorageError: the disk or NATS refused, or a record is damaged or not equal.
    """
    local, folder = LocalFiles(), os.path.abspath(config.data.folder)
    lock = local.lock(os.path.join(folder, LOCK_NAME))
    try:
        source = FolderStore(local, folder, clock)
        topics = {name: _read_settings(source, name) for name in source.topics()}
        for name, kept in topics.items():
            if kept["settings"].get("engine") == "db":
                raise EngineStaysError(
                    f"topic {name!r} has engine db, which a cluster does not have: copy its records to another topic,"
                    " or remove it; nothing was moved"
                )
        ownership = Ownership(config.jetstream, local, folder, clock)
        ownership.connect("migrate")
        try:
            ownership.acquire()
            files = ReplicatedFiles(ownership, local, folder, clock, moves_in=True)
            yield from _Moving(config, clock, local, files, folder, source, ownership).run(topics, seen)
        finally:
            ownership.close()
        if remove:
            _remove(local, folder)
    finally:
        lock.close()


def _read_settings(source: FolderStore, name: str) -> dict[str, Any]:
    content = source.load_settings(name)
    if content is None:
        raise StorageError(f"topic {name!r} has no settings: put its settings.json back")
    kept: dict[str, Any] = notes.decode(content, dict[str, Any], path=f"settings.json of topic {name!r}", bare=True)
    return kept


class _Moving:
    """One run."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        local: FileSystem,
        files: ReplicatedFiles,
        folder: str,
        source: FolderStore,
        ownership: Ownership,
    ) -> None:
        self._config, self._clock, self._local, self._files = config, clock, local, files
        self._folder, self._source, self._ownership = folder, source, ownership
        self._marker = f"{folder}/{MOVING_NAME}"

    def run(self, topics: dict[str, dict[str, Any]], seen: Seen) -> Iterator[Migrated]:
        """Move what is not moved yet."""
        files, folder = self._files, self._folder
        if not files.exists(self._marker) and files.list_folder(folder):
            yield Migrated("", reason="the folder was moved into its cluster before")
            return
        files.replace_file(self._marker, b"")
        if self._local.exists(f"{folder}/{STREAMS_NAME}"):  # the streams that the folder has already
            self._copy(STREAMS_NAME)
        target = JetstreamStore(self._config.jetstream, files, folder, self._clock, self._ownership)
        catalog = FolderStore(files, folder, self._clock)
        for name, kept in topics.items():
            yield self._move_topic(target, catalog, name, kept, seen)
        names = [*self._names()]
        for name in names:
            self._copy(name)
        files.unlink(self._marker)
        yield Migrated("", files=len(names))

    def _move_topic(
        self, target: JetstreamStore, catalog: FolderStore, name: str, kept: dict[str, Any], seen: Seen
    ) -> Migrated:
        """Move a topic; its settings follow when every record was compared."""
        count = kept["partitions"]
        if catalog.load_settings(name) is not None:
            return Migrated(name, count, reason="it was moved before")
        settings = msgspec.convert(kept["settings"], TopicSettings)
        sizes = (0, 0)
        if settings.engine == "disk":
            layout = settings.for_log(self._config.storage.checkpoint_bytes)
            sizes = move(self._source, target, name, count, layout, seen)
            settings = msgspec.structs.replace(settings, engine="jetstream")
        moved = kept | {"settings": msgspec.to_builtins(settings)}
        catalog.save_settings(name, notes.encode(moved))
        return Migrated(name, count, *sizes)

    def _names(self) -> Iterator[str]:
        """Yield the files of the folder that belong to the cluster."""
        for below in ("", f"{CONF_NAME}/", f"{STAGING_NAME}/"):
            for name in self._local.list_folder(f"{self._folder}/{below}".rstrip("/")):
                path = f"{self._folder}/{below}{name}"
                is_kept = below or name.startswith("groups.") or name.endswith(".json")
                if is_kept and f"{below}{name}" not in NOT_MOVED and os.path.isfile(path):
                    yield f"{below}{name}"

    def _copy(self, name: str) -> None:
        """Write a file into the cluster in steps, and read it back.

        Raises:
            StorageError: the disk or NATS refused, or the copy is not equal.
        """
        path = f"{self._folder}/{name}"
        if name == STREAMS_NAME and self._files.exists(path):
            return  # the store has it, with the streams that it made since
        try:
            size = os.path.getsize(path)
            if size <= STEP_BYTES:
                self._files.replace_file(path, self._local.read_file(path))
            else:
                self._copy_in_steps(path, size)
            self._compare(path, size)
        except OSError as error:
            raise StorageError(f"{path} could not be moved: {error.strerror or error}") from error

    def _copy_in_steps(self, path: str, size: int) -> None:
        reader, writer = self._local.open(path, write=False), self._files.open(path, create=True)
        try:
            writer.truncate(0)
            for at in range(0, size, STEP_BYTES):
                writer.pwrite(reader.pread(STEP_BYTES, at), at)
                writer.flush()
        finally:
            reader.close()

    def _compare(self, path: str, size: int) -> None:
        reader, copy = self._local.open(path, write=False), self._files.open(path, write=False)
        try:
            for at in range(0, max(size, 1), STEP_BYTES):
                if reader.pread(STEP_BYTES, at) != copy.pread(STEP_BYTES, at) or copy.size() != size:
                    raise StorageError(f"{path}: the copy is not the file of the folder; call the command again")
        finally:
            reader.close()


def _remove(local: FileSystem, folder: str) -> None:
    """Delete what was moved; the keys stay, as copies of those of the cluster."""
    for name in ("topics", STATE_NAME, STAGING_NAME):
        local.remove_tree(f"{folder}/{name}")
    for name in local.list_folder(folder):
        if name.startswith("groups.") or (name.endswith(".json") and name != MEMBERSHIP_NAME):
            local.unlink(f"{folder}/{name}")
