"""Data folders written by the storage layer itself, and what must come out of them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from babelbus.config import Config, StorageSettings, TopicDefaults
from babelbus.records.format import encode_batch, mark_producer, rebase
from babelbus.records.record import Record, RecordBatch
from babelbus.spark.options import SourceOptions, parse
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.files import LocalFiles
from tests.support.clock import ManualClock
from tests.support.server import configure

NOW = 1_700_000_000_000


class Folder:
    """A data folder with topics, as a server keeps it; logs stay open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = FolderStore(LocalFiles(), str(path), ManualClock(NOW))
        self._logs: dict[tuple[str, int], Log] = {}

    def log(self, topic: str = "news", partition: int = 0, **settings: Any) -> Log:
        found = self._logs.get((topic, partition))
        if found is None:
            self.store.save_settings(topic, b"{}")
            found = self.store.open_partition(topic, partition, LogSettings(**settings))
            self._logs[topic, partition] = found
        return found

    def add(self, records: Sequence[Record], topic: str = "news", partition: int = 0, **settings: Any) -> None:
        log = self.log(topic, partition, **settings)
        log.append(encode_batch(records, log.next_offset))
        log.flush()

    def add_produced(self, records: Sequence[Record], topic: str = "news", *, sequence: int = 0) -> RecordBatch:
        """Append what a client sent as one batch with a producer id."""
        log = self.log(topic)
        batch = rebase(mark_producer(encode_batch(records), 7, sequence), log.next_offset)
        log.append(batch)
        log.flush()
        return batch

    def file(self, topic: str = "news", partition: int = 0, base: int = 0) -> Path:
        return self.path / "topics" / topic / str(partition) / f"{base:020d}.log"

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def options(self, query: Any = "batch", **given: Any) -> SourceOptions:
        named = any(name in given for name in ("subscribe", "subscribePattern", "assign"))
        options = {"path": str(self.path)} | ({} if named else {"subscribe": "news"}) | given
        return parse({name: str(value) for name, value in options.items()}, query)


def on_disk(folder: Path, topics: TopicDefaults | None = None) -> Config:
    """A server that serves what its files have; from memory it would also serve what is removed or damaged there."""
    return msgspec.structs.replace(configure(folder, topics=topics), storage=StorageSettings(tail_cache_bytes=0))


def numbered(count: int, *, first: int = 0) -> list[Record]:
    """Records that tell their offset, when they are the first of a partition."""
    return [Record(b"%d" % number, timestamp=NOW + number) for number in range(first, first + count)]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with its time of change and content."""
    files: Iterable[Path] = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
