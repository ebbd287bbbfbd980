"""The log behind the state: the compacted topic `$state`, and a checkpoint so that a start need not read all of it.

record := key (UTF-8, or 0xFF and the owner of a testament), payload (JSON text; a tombstone when it is gone), headers
`ce_source` and, for a value with a version, `version` (decimal).

The checkpoint is a memory of the log: all values as they were before one offset. When it is missing, torn or does not
fit, the log is read from its beginning instead. In a cluster each member has its own, of when it was the owner last.
"""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import repeat

import msgspec

from babelbus import arrays
from babelbus.core.access import SERVER
from babelbus.core.publish import Publication, Publish
from babelbus.core.receipt import Receipt, settled
from babelbus.core.state.reunion import tail_of
from babelbus.core.subject import is_secret
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError, StorageError
from babelbus.records.columns import Columns, decode_chunk, iterate_rows
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.format import (
    TOMBSTONE,
    CorruptRecordError,
    decode_headers,
    encode_batch,
    encode_headers,
    encode_keyed,
)
from babelbus.records.record import Headers, Record, RecordBatch
from babelbus.storage.contract import PartitionLog
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

VERSION_HEADER = b"version"
TESTAMENT_MARK = b"\xff"
"""Begins the key of a testament's record: no key of a value does, for it is UTF-8."""
READ_BYTES = 8 * 2**20
CHECKPOINT_NAME = "checkpoint"
CHECKPOINT_FORMAT = 1
BLOCK_KEYS = 8192
SOURCES_KEPT = 1024
UNHEARD_MAX = 200_000
"""Most changes that are remembered for sessions that go on: about 300 bytes each, without their values."""
_BLOCK_HEAD_BYTES = 8


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A value that has a version, 1 or more."""

    value: bytes
    version: int


Entry = bytes | Kept
"""A plain value, or one with a version."""


def parts_of(entry: Entry) -> tuple[bytes, int]:
    """Return the value and the version of an entry, 0 for a plain value."""
    return (entry.value, entry.version) if isinstance(entry, Kept) else (entry, 0)


class Kind(IntEnum):
    """The kind of a change."""

    SET = 0
    DELETED = 1
    PUBLISHED = 2
    """A value was published and not stored."""
    CHILDREN = 3
    """A child of the key appeared or vanished; the root's key is `None`."""
    RETAINED = 4
    """An event of a topic that retains the last one was stored, or with an empty text took the value away; who listens
    heard it as an event."""
    TESTAMENT = 5
    """The testament of the owner, who is in the place of the key, was set; an empty text takes it back."""


LOGGED = frozenset((Kind.SET, Kind.RETAINED, Kind.DELETED, Kind.TESTAMENT))

Change = tuple[Kind, str | None, bytes, Entry | None, int]
"""Kind, key, value (of a deletion the deleted one), the entry before the change, the new version."""


Unheard = tuple[int, Change]
"""A change as it stands in the log, and its offset."""


class Commit(msgspec.Struct, frozen=True):
    """One commit. `number` rises: a listener that began at this number has seen the result."""

    number: int
    source: str

    @property
    def protocol(self) -> str:
        """The protocol that the changes came through: the source up to its first colon."""
        return self.source.partition(":")[0]


class _Head(msgspec.Struct, frozen=True):
    """First block of a checkpoint; `blocks` others follow, then the testaments."""

    format: int
    offset: int
    blocks: int
    mark: tuple[str, int] | None = None
    """The id of the topic and the CRC of the last record in front of the offset, if the log is in no folder: it may be
    another one when this member is the owner again."""


_Block = tuple[list[str], list[bytes], list[int]]


class Loaded(msgspec.Struct):
    """The state up to an offset: values by key, testaments by owner."""

    values: dict[str, Entry]
    testaments: dict[str, bytes]
    offset: int
    since: int | None = None
    """The offset from which on changes are remembered; `None`: no changes are."""
    unheard: list[Unheard] | None = msgspec.field(default_factory=list)
    """The changes from `since` on; `None` if the log does not have them all, or more than `UNHEARD_MAX`."""

    def add_unheard(self, change: Unheard) -> None:
        """Add a change, unless there are too many or some are missing."""
        if self.unheard is None:
            return
        self.unheard.append(change)
        if len(self.unheard) > UNHEARD_MAX:
            self.unheard = None


class _Snapshot(msgspec.Struct, frozen=True):
    """The state before an offset. Two lists take half the memory of a second dictionary."""

    keys: list[str]
    entries: list[Entry]
    testaments: dict[str, bytes]
    offset: int


class StateLog:
    """Appends changes and loads them again. `transient` is the first element of keys that are not logged."""

    def __init__(
        self,
        topic: Topic,
        publish: Publish,
        files: FileSystem,
        folder: str,
        *,
        checkpoint_bytes: int,
        transient: str | None = None,
    ) -> None:
        # What is logged is told from what is not by its first letter, as long as nothing else is to be looked at.
        assert transient is None or transient.startswith("$")
        self._topic = topic
        self._publish = publish
        self._partition = topic.partition(0)
        self._files = files
        self._folder = folder
        self._checkpoint_bytes = checkpoint_bytes
        self._transient = None if transient is None else f"{transient}/"
        self._headers: dict[str, tuple[str, Headers, bytes]] = {}
        self._bytes_since = 0
        self._last: Receipt | None = None
        self._end = 0
        self.lost_some = False
        """Whether a failed flush lost records although their receipts said that they were stored (`written`)."""
        self._known_offset = 0
        """Up to which offset the last checkpoint knows the log."""
        self._writing: asyncio.Task[None] | None = None

    @property
    def end(self) -> int:
        """Offset behind the last change that was appended or loaded."""
        return self._end

    @property
    def next_offset(self) -> int:
        """Offset that the next change gets."""
        return self._partition.next_offset

    def is_transient(self, key: str) -> bool:
        """Return whether a key is not logged."""
        beginning = self._transient
        return beginning is not None and (key.startswith(beginning) or key == beginning[:-1])

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, changes: Sequence[Change], source: str) -> Receipt | None:
        """Append what is to be kept of some changes; `None` when nothing is. About 1 us a change.

        Raises:
            StorageError: nothing was appended.
        """
        protocol, headers, encoded = self._headers.get(source) or self._headers_of(source)
        offset = self._partition.next_offset
        batch = self._encode(changes, headers, encoded, offset)
        if batch is None:
            return None
        if not self._bytes_since:
            arrays.load_soon()  # larger changes need it
        receipt = self._publish(Publication(SERVER, protocol, batch, self._topic.name, partition=0, at_once=True))
        if receipt.error is not None:  # refused at once; a flush that fails says so later
            raise receipt.error
        self._last = receipt
        self.lost_some |= offset < self._end
        self._end = receipt.base_offset + receipt.count
        self._bytes_since += len(batch.data)
        return receipt

    def _headers_of(self, source: str) -> tuple[str, Headers, bytes]:
        """Return the protocol of a source, and the headers of its changes also as they are stored."""
        if len(self._headers) >= SOURCES_KEPT:
            self._headers.clear()
        headers = ((SOURCE_HEADER, source.encode()),)
        made = self._headers[source] = source.partition(":")[0], headers, encode_headers(headers)
        return made

    def _encode(self, changes: Sequence[Change], headers: Headers, encoded: bytes, offset: int) -> RecordBatch | None:
        keys: list[bytes] = []
        values: list[bytes] = []
        kind_set, now = Kind.SET, self._topic.stamp()
        for kind, key, value, _, version in changes:  # columns by `zip` cost three times as much for one, or a million
            if kind is not kind_set or version or key is None or key[:1] == "$":
                records = list(self._records(changes, headers, now))
                return encode_batch(records, offset) if records else None
            keys.append(key.encode())
            values.append(value)
        return encode_keyed(keys, values, encoded, now, offset)

    def _records(self, changes: Sequence[Change], headers: Headers, now: int) -> Iterator[Record]:
        for kind, key, value, _, version in changes:
            if key is None or kind not in LOGGED:
                continue
            if kind is Kind.TESTAMENT:
                yield Record(value or None, TESTAMENT_MARK + key.encode(), headers, now)
            elif not self.is_transient(key):
                versioned = (*headers, (VERSION_HEADER, b"%d" % version)) if version else headers
                yield Record(None if kind is Kind.DELETED or not value else value, key.encode(), versioned, now)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, since: int | None = None) -> Loaded:
        """Return the state as the log has it: from the checkpoint and what came after it, about 1 us a record.

        Damaged records are left out and counted in the server's log: the rest must still be served. With `since`, the
        changes from this offset on are remembered if the log still has them all.

        Raises:
            StorageError: the log cannot be read.
        """
        loaded = self._load_checkpoint()
        partition_log = self._partition.log
        # Compaction may have removed the tombstone of a key that an older checkpoint still has.
        first, end = max(partition_log.first_offset, partition_log.compacted_until), partition_log.next_offset
        has_all = since is not None and first <= since <= end
        # A checkpoint behind `since` has the results of changes that are to be remembered.
        if loaded is None or not first <= loaded.offset <= (since if since is not None and has_all else end):
            loaded = Loaded({}, {}, partition_log.first_offset)
        if since is not None:
            loaded.since, loaded.unheard = since, [] if has_all else None
        self._known_offset = loaded.offset
        self._bytes_since = replay(partition_log, loaded, end)
        self._end = end
        self.lost_some = False
        return loaded

    def changed_last(self) -> Iterator[str]:
        """Yield the keys of the last changes behind the checkpoint; after a stop in order there are no such changes."""
        for record in tail_of(self._partition, self._known_offset):
            if record.key is not None and not record.key.startswith(TESTAMENT_MARK):
                key = record.key.decode()
                if not is_secret(key):
                    yield key

    def _path(self) -> str:
        return f"{self._folder}/{CHECKPOINT_NAME}"

    def _load_checkpoint(self) -> Loaded | None:
        try:
            content = self._files.read_file(self._path())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: cannot be read, reading the log instead: %s", self._path(), error)
            return None
        try:
            blocks = _blocks(content)
            head = msgspec.msgpack.decode(next(blocks), type=_Head)
            if head.format != CHECKPOINT_FORMAT:
                raise ValueError(f"its format is {head.format}")
            if head.mark != self._mark(head.offset):
                raise ValueError("it is of another log")
            loaded = Loaded({}, {}, head.offset)
            for _ in range(head.blocks):
                keys, values, versions = msgspec.msgpack.decode(next(blocks), type=_Block)
                if versions:
                    entries = zip(values, versions, strict=True)
                    kept = [Kept(value, version) if version else value for value, version in entries]
                    loaded.values.update(zip(keys, kept, strict=True))
                else:
                    loaded.values.update(zip(keys, values, strict=True))
            for key in list(filter(is_secret, loaded.values)):
                del loaded.values[key]
            loaded.testaments.update(msgspec.msgpack.decode(next(blocks), type=dict[str, bytes]))
        except (ValueError, StopIteration, msgspec.DecodeError, StorageError) as error:
            log.warning(
                "%s: damaged, of another log or of another format, reading the log instead: %s", self._path(), error
            )
            return None
        return loaded

    def _mark(self, offset: int) -> tuple[str, int] | None:
        """Return what tells the log up to an offset from other logs; `None` if the checkpoint lies beside the log."""
        if self._topic.settings.engine == "disk":
            return None
        kept = self._partition.log
        is_there = kept.first_offset < offset <= kept.next_offset
        return self._topic.id, zlib.crc32(kept.read(offset - 1, 1, offset).data if is_there else b"")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def wants_checkpoint(self) -> bool:
        """Whether enough was appended since the last one, or compaction has made it worthless."""
        if self._writing is not None:
            return False
        return self._bytes_since >= self._checkpoint_bytes or self._known_offset < self._partition.log.compacted_until

    def begin_checkpoint(self, values: dict[str, Entry], testaments: dict[str, bytes]) -> None:
        """Write a checkpoint in a thread. Lists keys and values first: about 20 ms for a million keys."""
        snapshot = _Snapshot(list(values), list(values.values()), dict(testaments), self._partition.next_offset)
        self._bytes_since = 0
        self._known_offset = snapshot.offset  # even if it fails: a full disk must not make each commit copy everything
        self._writing = asyncio.get_running_loop().create_task(self._checkpoint(snapshot, self._last))

    async def _checkpoint(self, snapshot: _Snapshot, last: Receipt | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            # What a failed flush loses must not come back with a checkpoint, although its offsets are given again.
            error = None if last is None else await settled((last,))
            if error is not None:
                raise error
            # What is not durable may be lost and its offset given again: no checkpoint may know more than the disk.
            if await self._partition.flush() < snapshot.offset:
                raise StorageError("the log is not durable up to it")
            await loop.run_in_executor(None, self._write_checkpoint, snapshot)
        except (BabelbusError, OSError) as error:
            log.warning("%s: not written, a start reads more of the log: %s", self._path(), error)
        finally:
            self._writing = None

    async def close(self, values: dict[str, Entry], testaments: dict[str, bytes]) -> None:
        """Write a last checkpoint, if something was appended since the last one."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._bytes_since:
            self.begin_checkpoint(values, testaments)
            assert self._writing is not None
            await asyncio.wait([self._writing])

    def _write_checkpoint(self, snapshot: _Snapshot) -> None:
        """Write all values in blocks, each with its CRC, and put the file in the place of the last one.

        Raises:
            StorageError, OSError: the disk refused; the last one still stands.
        """
        self._files.make_folder(self._folder)
        path = f"{self._path()}.new"
        try:
            self._write_blocks(path, self._bodies(snapshot))
            self._files.rename(path, self._path())
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(path)  # half a checkpoint fills a full disk even more
            raise
        self._files.flush_folder(self._folder)

    def _write_blocks(self, path: str, bodies: Iterator[bytes]) -> None:
        file = self._files.open(path, create=True)
        try:
            file.truncate(0)
            position = 0
            for body in bodies:
                block = len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body
                file.pwrite(block, position)
                position += len(block)
            file.flush()
        finally:
            file.close()

    def _bodies(self, snapshot: _Snapshot) -> Iterator[bytes]:
        encode, is_transient = msgspec.msgpack.encode, self.is_transient
        blocks = range(0, len(snapshot.keys), BLOCK_KEYS)
        yield encode(_Head(CHECKPOINT_FORMAT, snapshot.offset, len(blocks), self._mark(snapshot.offset)))
        for first in blocks:  # block by block: a list of a million pairs would stay in the heap
            part = slice(first, first + BLOCK_KEYS)
            keys: Sequence[str] = snapshot.keys[part]
            entries: Sequence[Entry] = snapshot.entries[part]
            versions: Sequence[int] = ()
            # Clients wait while this thread works in Python: most blocks have plain values alone, and none transient.
            if Kept in set(map(type, entries)) or any(map(str.startswith, keys, repeat("$"))):
                pairs = zip(keys, entries, strict=True)
                block = [(key, *parts_of(entry)) for key, entry in pairs if not is_transient(key)]
                keys, entries, versions = zip(*block, strict=True) if block else ((), (), ())
            yield encode((keys, entries, versions if any(versions) else []))
        yield encode(snapshot.testaments)


def _blocks(content: bytes) -> Iterator[bytes]:
    """Yield the bodies of a checkpoint's blocks.

    Raises:
        ValueError: a block is cut off or not what was written.
    """
    position = 0
    while position + _BLOCK_HEAD_BYTES <= len(content):
        size = int.from_bytes(content[position : position + 4], "big")
        crc = int.from_bytes(content[position + 4 : position + 8], "big")
        body = content[position + _BLOCK_HEAD_BYTES : position + _BLOCK_HEAD_BYTES + size]
        if len(body) != size or zlib.crc32(body) != crc:
            raise ValueError(f"bad block at byte {position}")
        yield body
        position += _BLOCK_HEAD_BYTES + size


def replay(partition_log: PartitionLog, loaded: Loaded, end: int, wanted: Callable[[str], bool] | None = None) -> int:
    """Read the log from the offset of `loaded` up to `end` into `loaded`, in any thread; return the bytes read.

    Only the keys that are `wanted` are kept, and with a choice no testaments.

    Raises:
        StorageError: the log cannot be read; damaged records are left out.
    """
    bad = size = 0
    while loaded.offset < end:
        try:
            chunk = partition_log.read(loaded.offset, READ_BYTES, end)
        except CorruptRecordError as error:
            if not bad:
                log.error("state: damaged records are left out: %s", error)
            after = max(loaded.offset + 1, min(error.after, end))
            bad += after - loaded.offset
            loaded.offset = after
            if loaded.since is not None and after > loaded.since:
                loaded.unheard = None
            continue
        if chunk.data:
            _apply(decode_chunk(chunk.data, verified=True), loaded, wanted)
            size += len(chunk.data)
        loaded.offset = chunk.next_offset
    if bad:
        log.error("state: %d damaged records were left out ('babelbus check' names them)", bad)
    return size


def _apply(columns: Columns, loaded: Loaded, wanted: Callable[[str], bool] | None) -> None:
    data, values, since = bytes(columns.data), loaded.values, loaded.since
    for offset, _, start, stop, key_length, attributes, count in iterate_rows(columns):
        if key_length < 0:
            continue
        raw = data[start - 4 - key_length : start - 4]
        gone = attributes & TOMBSTONE
        if raw[:1] == TESTAMENT_MARK:
            owner = raw[1:].decode()
            if gone:
                loaded.testaments.pop(owner, None)
            elif wanted is None:
                loaded.testaments.pop(owner, None)  # its place is where it was set last: see State.set_testament
                loaded.testaments[owner] = data[start:stop]
            continue
        key = raw.decode()
        if (wanted is not None and not wanted(key)) or is_secret(key):  # of versions that kept such keys
            continue
        if since is not None and offset >= since:
            version = dict(decode_headers(data, stop + 1, count)).get(VERSION_HEADER) if count > 1 else None
            _follow(loaded, offset, key, None if gone else data[start:stop], int(version or 0))
        elif gone:
            values.pop(key, None)
        elif count > 1:
            version = dict(decode_headers(data, stop + 1, count)).get(VERSION_HEADER)
            values[key] = Kept(data[start:stop], int(version)) if version else data[start:stop]
        else:
            values[key] = data[start:stop]


def _follow(loaded: Loaded, offset: int, key: str, value: bytes | None, version: int) -> None:
    """Record one change in the values and as unheard; `None` deletes the key."""
    before = loaded.values.get(key)
    if value is not None:
        loaded.values[key] = Kept(value, version) if version else value
        loaded.add_unheard((offset, (Kind.SET, key, value, before, version)))
    elif before is not None:  # nobody hears of the deletion of a key that was not there
        del loaded.values[key]
        loaded.add_unheard((offset, (Kind.DELETED, key, parts_of(before)[0], before, 0)))
