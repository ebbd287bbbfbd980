"""The data folder of a cluster: small files in a stream of their own, written by the owner of the prefix alone.

A file is the last message of its subject: up to 128 KiB with its content, else its size and the name of its chunks,
which are messages too. A write returns when the quorum has its messages. A message of an owner whose time was over
counts as not there, as in a shard. All files are loaded, or listed if they have chunks, when the owner opens them.

A few files stay on the disk of each member: the lock, the checkpoint of the state, which is a cache of the log, and
the note that says which cluster the folder belongs to. The text of an error of NATS becomes that of an `OSError`.
"""

import asyncio
import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.storage.errors import DiskFullError, StaleWriterError
from babelbus.storage.files import FILE_MODE, FOLDER_MODE, File, FileSystem
from babelbus.storage.jetstream.client import PURGE_SECONDS, ApiError, Stored
from babelbus.storage.jetstream.content import CHUNK_BYTES, ID, Content
from babelbus.storage.jetstream.errors import NatsAwayError, NatsRefusedError, StreamAlteredError
from babelbus.storage.jetstream.frame import Frame, Head, Kind, decode
from babelbus.storage.jetstream.membership import FILE, FIXED_FILES, LABEL, config_of, open_membership, token_of
from babelbus.storage.jetstream.ownership import Ownership
from babelbus.storage.jetstream.shard import Message
from babelbus.storage.jetstream.streams import NOTE_NAME as STREAMS_NAME
from babelbus.storage.jetstream.streams import stream_name
from babelbus.storage.notes import MEMBERSHIP_NAME

log = logging.getLogger(__name__)

CHUNK = "$chunk"
LOCAL_NAMES = frozenset({MEMBERSHIP_NAME, "lock", "state"})
CACHE_BYTES = 16 * 2**20
MOVING_NAME = "moving-in"
"""A file that is there while `babelbus migrate` moves a data folder in."""
PAGE_BYTES = 4 * 2**20
PAGE_MESSAGES = 1000
TOGETHER = 8
"""Chunks that are asked for at once."""
SUBJECT_BYTES_MAX = 2048
WAIT_SECONDS = 1.0
"""A wait looks this often whether its time is over."""


class ReplicatedFile:
    """An open file; see `files.File`."""

    __slots__ = ("_content", "_files")

    def __init__(self, files: "ReplicatedFiles", content: Content) -> None:
        self._files = files
        self._content = content

    def pwrite(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write in memory; `flush` stores."""
        self._content.write(data, position)

    def pread(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes; NATS is asked for chunks that are not in memory."""
        return self._files.read(self._content, size, position)

    def truncate(self, size: int) -> None:
        """Set the size in memory; `flush` stores."""
        self._content.truncate(size)

    def flush(self) -> None:
        """Return when the quorum has the file."""
        self._files.store(self._content)

    def size(self) -> int:
        """Return the size of the file."""
        return self._content.size

    def close(self) -> None:
        """Return: nothing is held."""


class ReplicatedFiles:
    """The files of a data folder in a cluster; see `files.FileSystem`. Calls come from any thread; writes wait."""

    def __init__(
        self, ownership: Ownership, local: FileSystem, folder: str, clock: Clock, *, moves_in: bool = False
    ) -> None:
        """Open the stream as its only writer, and load the files; `ownership` has the lease.

        With `moves_in`, the folder has the data of a server that comes into the cluster.

        Raises:
            StreamAlteredError: the stream is gone, altered, or of another installation than the folder.
            NatsRefusedError: JetStream cannot make the stream.
        """
        self._ownership, self._local, self._folder, self._clock = ownership, local, folder, clock
        self._nats, settings = ownership.nats, ownership.settings
        self._timeout = settings.timeout_seconds
        self._writing = threading.Lock()
        """Held by whoever writes, until the outcome is known or given up."""
        self._lock = threading.Lock()
        self._contents: dict[str, Content] = {}
        self._folders: set[str] = set()
        """Folders that were made by this process; others are those that have files."""
        self._stored: set[str] = set()
        """The files that the stream has."""
        self._coming: set[str] = set()
        """Those that it has when the write that is under way is stored."""
        self._unknown: StorageError | None = None
        """Why nothing is known of the outcome of the last write."""
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._cached_bytes = 0
        self._tombstones: list[tuple[str, int]] = []
        """Removed files whose last message is in the stream, with its sequence."""
        member = ownership.patiently(lambda: open_membership(ownership, local, folder, make=True, moves_in=moves_in))
        assert member is not None
        self._shard = ownership.shard(
            LABEL, stream_name(settings.prefix, LABEL), member.installation, member.stream, FIXED_FILES
        )
        ownership.patiently(self._load)
        self._coming |= self._stored
        if not moves_in:
            self._check_whole()

    def _check_whole(self) -> None:
        """Check that the files are those of a cluster that can be used.

        Raises:
            StreamAlteredError: they are gone.
            NatsRefusedError: a data folder is being moved in.
        """
        stream, shard = self._shard.stream, stream_name(self._ownership.settings.prefix, "0")
        if MOVING_NAME in self._stored:
            raise NatsRefusedError(
                f"stream {stream}: a data folder is not moved in yet: call 'babelbus migrate' with that folder again"
            )
        if STREAMS_NAME not in self._stored and self._ownership.patiently(lambda: config_of(self._ownership, shard)):
            raise StreamAlteredError(f"stream {stream} has no files: somebody purged it; restore the stream")

    # -- reading -----------------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        """Open a file; a new one is stored when it is flushed."""
        if self._is_local(path):
            return self._local.open(path, create=create, write=write)
        name = self._name(path)
        with self._lock:
            content = self._contents.get(name)
            if content is None:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                content = self._contents[name] = Content(name)
        return ReplicatedFile(self, content)

    def read_file(self, path: str) -> bytes:
        """Return the whole content of a file."""
        if self._is_local(path):
            return self._local.read_file(path)
        file = self.open(path, write=False)
        return file.pread(file.size(), 0)

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; a missing folder is an empty one."""
        if self._is_local(path):
            return self._local.list_folder(path)
        start = f"{self._name(path)}/" if path != self._folder else ""
        with self._lock:
            names = {name[len(start) :] for name in (*self._contents, *self._folders) if name.startswith(start)}
        return sorted({name.partition("/")[0] for name in names})

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of this name."""
        if self._is_local(path):
            return self._local.exists(path)
        name = self._name(path)
        with self._lock:
            return name in self._contents or name in self._folders or self._has_below(name)

    def _has_below(self, name: str) -> bool:
        return any(one.startswith(f"{name}/") for one in self._contents)

    def read(self, content: Content, size: int, position: int) -> bytes:
        """Return bytes of a file."""
        with content.lock:
            end = min(position + size, content.size)
        if position >= end:
            return b""
        first, last = position // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        parts = []
        for begin in range(first, last + 1, TOGETHER):
            numbers = range(begin, min(begin + TOGETHER, last + 1))
            stored = self._fetch(content, [number for number in numbers if content.is_missing(number)])
            parts += [content.read_chunk(number, stored.get(number, b"")) for number in numbers]
        at = position - first * CHUNK_BYTES
        return b"".join(parts)[at : at + end - position]

    def _fetch(self, content: Content, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return chunks of a file from the stream."""
        with self._lock:
            known = {
                number: self._cache[content.id, number] for number in numbers if (content.id, number) in self._cache
            }
        missing = [number for number in numbers if number not in known]
        if not missing:
            return known
        try:
            found = self._nats.call(self._get_chunks(content.id, missing), self._timeout)
        except StorageError as error:
            raise _os_error(error) from error
        with self._lock:
            for number, data in zip(missing, found, strict=True):
                known[number] = data
                if (content.id, number) not in self._cache:
                    self._cache[content.id, number] = data
                    self._cached_bytes += len(data)
            while self._cached_bytes > CACHE_BYTES:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        return known

    async def _get_chunks(self, name: str, numbers: Sequence[int]) -> list[bytes]:
        return await asyncio.gather(*(self._get_chunk(name, number) for number in numbers))

    async def _get_chunk(self, name: str, number: int) -> bytes:
        subject, stream = self._subject(CHUNK, name, str(number)), self._shard.stream
        while True:
            message = await self._nats.read_from_leader(stream, last_by_subj=subject)
            if message is None:
                raise StreamAlteredError(f"stream {stream}: {subject} is gone: somebody deleted it; restore the stream")
            frame = decode(message.data, message.sequence)
            if frame is None or frame.data is None:
                raise _damaged(stream, message.sequence, subject)
            if self._shard.is_valid(frame.head):
                return frame.data
            await self._delete(message.sequence)

    async def _delete(self, sequence: int) -> None:
        """Delete a message whose writer was not the owner any more."""
        stream = self._shard.stream
        log.warning("stream %s: sequence %d is removed: its writer was not the owner any more", stream, sequence)
        try:
            await self._nats.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
        except ApiError as error:
            raise NatsAwayError(f"stream {stream}: {error}") from error

    # -- writing -----------------------------------------------------------------------------------------------------

    def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        """Replace the file by one with `content`; after an error, the old file or the new one is there."""
        if self._is_local(path):
            self._local.replace_file(path, content, mode=mode)
            return
        with self._writing:
            self._store(Content(self._name(path), content))

    def store(self, content: Content) -> None:
        """Write what of a file is not in the stream."""
        with self._writing:
            if content.path is None or (not content.dirty and content.entry == (content.size, content.id)):
                return
            with content.lock:
                patched = sorted(content.patches)
            for number, data in self._fetch(content, patched).items():
                content.bring(number, data)
            self._store(content)

    def _store(self, content: Content) -> None:
        """Send the dirty chunks of a file and its entry; `_writing` is held."""
        name = content.path
        assert name is not None
        before = self._contents.get(name)
        old_id = "" if before is None else before.id
        size, chunk_id, chunks = content.take_dirty()
        try:
            self._send(self._messages(content, size, chunk_id, chunks))
        except OSError:
            content.give_back(chunks)
            raise
        content.forget_clean()
        if old_id and old_id != content.id:
            self._purge(self._subject(CHUNK, old_id, ">"), None)

    def _messages(self, content: Content, size: int, chunk_id: str, chunks: dict[int, bytes]) -> list[Message]:
        """Return the messages that store a file, the entry last; see `Content.take_dirty`."""
        name = content.path
        assert name is not None

        def stored(message: Message) -> None:
            content.note_stored(size, chunk_id)
            with self._lock:
                replaced = self._contents.get(name)
                if replaced is not None and replaced is not content:
                    replaced.path = None
                self._contents[name] = content
                self._stored.add(name)
                for number in chunks:
                    self._cached_bytes -= len(self._cache.pop((chunk_id, number), b""))

        if not chunk_id:
            return [self._entry(Kind.FILE, name, size, chunks.get(0, b"").ljust(size, b"\0"), stored)]
        messages = []
        for number, chunk in chunks.items():
            head = Head(Kind.CHUNK, chunk_id, number)
            messages.append(Message(self._subject(CHUNK, chunk_id, str(number)), head, chunk, self, _nothing))
        return [*messages, self._entry(Kind.CHUNKED, name, size, chunk_id.encode(), stored)]

    def _entry(self, kind: Kind, name: str, size: int, data: bytes, stored: Callable[[Message], None]) -> Message:
        """Return the message of a file, which says how many files there are when it is stored."""
        if kind is Kind.GONE:
            self._coming.discard(name)
        else:
            self._coming.add(name)
        head = Head(kind, name, 0, 0, size, len(self._coming))
        return Message(self._subject(FILE, *name.split("/")), head, data, self, stored)

    def make_folder(self, path: str) -> None:
        """Build a folder in memory: the stream has files alone, and a folder is there as long as it has files."""
        if self._is_local(path) or path == self._folder:
            self._local.make_folder(path)
            return
        name = self._name(path)
        with self._lock:
            while name:
                self._folders.add(name)
                name = name.rpartition("/")[0]

    def close_to_others(self, path: str, names: Sequence[str], *, mode: int = FOLDER_MODE) -> None:
        """Set the modes of a folder of this machine."""
        self._local.close_to_others(path, names, mode=mode)

    def unlink(self, path: str) -> None:
        """Remove a file; it may be missing."""
        if self._is_local(path):
            self._local.unlink(path)
            return
        with self._writing:
            self._remove([self._name(path)])

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it."""
        if self._is_local(path):
            self._local.remove_tree(path)
            return
        start = f"{self._name(path)}/"
        with self._writing:
            with self._lock:
                names = [name for name in self._contents if name.startswith(start)]
            self._remove(names)
            with self._lock:
                self._folders = {name for name in self._folders if not f"{name}/".startswith(start)}

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files; `_writing` is held."""
        ids = [content.id for name in names if (content := self._contents.get(name)) is not None and content.id]
        self._send(self._removals(names))
        for chunk_id in ids:
            self._purge(self._subject(CHUNK, chunk_id, ">"), None)

    def _removals(self, names: Sequence[str]) -> list[Message]:
        """Return the messages that remove files."""
        messages = []
        for name in names:
            if name in self._stored:
                messages.append(self._entry(Kind.GONE, name, 0, b"", self._removed))
            else:
                self._forget(name)
        return messages

    def _removed(self, message: Message) -> None:
        self._forget(message.head.topic)
        self._tombstones.append((message.subject, message.sequence))

    def _forget(self, name: str) -> None:
        with self._lock:
            content = self._contents.pop(name, None)
            if content is not None:
                content.path = None
            self._stored.discard(name)

    def rename(self, source: str, target: str) -> None:
        """Return a file or folder another name: a crash may leave both names, and each file whole."""
        if self._is_local(source) or self._is_local(target):
            self._local.rename(source, target)
            return
        with self._writing:
            self._rename(self._name(source), self._name(target), source)

    def _rename(self, source: str, target: str, path: str) -> None:
        with self._lock:
            names = [name for name in self._contents if name == source or name.startswith(f"{source}/")]
            if not names and source not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "no such file or folder", path)
            moved = {name for name in self._folders if name == source or name.startswith(f"{source}/")}
            self._folders = (self._folders - moved) | {target + name[len(source) :] for name in moved}
        messages: list[Message] = []
        ids = [self._contents[name].id for name in names]
        for name in names:
            old = self._contents[name]
            made = Content(target + name[len(source) :], self.read(old, old.size, 0))
            messages += self._messages(made, *made.take_dirty())
        self._send([*messages, *self._removals(names)])
        for chunk_id in filter(None, ids):
            self._purge(self._subject(CHUNK, chunk_id, ">"), None)

    def flush_folder(self, path: str) -> None:
        """Return: a name is stored with its file."""
        if self._is_local(path):
            self._local.flush_folder(path)

    def lock(self, path: str) -> File:
        """Lock the lock file of the folder on this machine."""
        self._local.make_folder(path.rpartition("/")[0])
        return self._local.lock(path)

    # -- sending -----------------------------------------------------------------------------------------------------

    def take_message(self) -> Message | None:
        """Return `None`: messages are sent by themselves; see `shard.Source`."""
        return None

    def settled(self) -> None:
        """Handle that the outcome of the last write is known; see `shard.Source`."""
        self._unknown, self._coming = None, set(self._stored)

    def _send(self, messages: Sequence[Message]) -> None:
        """Return when the quorum has the messages; `_writing` is held.

        Raises:
            OSError: NATS refused, or whether they are stored is unknown.
        """
        if not messages:
            return
        try:
            self._send_all(messages)
        except StorageError as error:
            raise _os_error(error) from error
        tombstones, self._tombstones = self._tombstones, []
        for subject, sequence in tombstones:  # a later message says how many files there are
            if sequence < messages[-1].sequence:
                self._purge(subject, sequence + 1)
            else:
                self._tombstones.append((subject, sequence))

    def _send_all(self, messages: Sequence[Message]) -> None:
        shard, begun = self._shard, self._clock.monotonic()
        with shard.done:
            while self._unknown is not None:
                if (error := self._failure(begun, shard.refusals)) is not None:
                    raise error
                shard.done.wait(WAIT_SECONDS)
            if shard.failure is not None:
                raise shard.failure
            refusals = shard.refusals
        for message in messages:
            shard.push(message)
        left = list(messages)
        with shard.done:
            while True:
                still = [message for message in left if not message.is_stored]
                if not still:
                    return
                if len(still) < len(left):
                    left, begun = still, self._clock.monotonic()
                elif (error := self._failure(begun, refusals)) is not None:
                    self._unknown = error
                    shard.drop(self)
                    raise error
                shard.done.wait(WAIT_SECONDS)

    def _failure(self, begun: float, refusals: int) -> StorageError | None:
        return self._shard.fault(
            begun, refusals, self._timeout, "NATS does not acknowledge; whether the file is stored"
        )

    def _purge(self, subject: str, sequence: int | None) -> None:
        """Delete messages of a subject, in front of a sequence if one is given; a refusal costs space alone."""
        asked: dict[str, Any] = {"filter": subject} if sequence is None else {"filter": subject, "seq": sequence}
        try:
            self._nats.call(self._nats.api(f"STREAM.PURGE.{self._shard.stream}", asked, PURGE_SECONDS), self._timeout)
        except (StorageError, ApiError) as error:
            log.warning("stream %s: space is given back later: %s", self._shard.stream, error)

    # -- opening -----------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Load the entries of all files.

        Raises:
            StreamAlteredError: an entry is damaged or missing.
            NatsAwayError: NATS does not answer.
        """
        stream = self._shard.stream
        newest: dict[str, tuple[int, Frame | None]] = {}
        sequence = 1
        pattern = self._subject(FILE, ">")
        while True:
            messages = await self._nats.get_batch(stream, pattern, sequence, PAGE_BYTES, PAGE_MESSAGES)
            if not messages:  # the replica may lag: the leader has the last word
                last = await self._from_leader(seq=sequence, next_by_subj=pattern)
                if last is None:
                    break
                messages = [last]
            for message in messages:
                frame = decode(message.data, message.sequence)
                if frame is None or frame.data is None or self._shard.is_valid(frame.head):
                    newest[message.subject] = (message.sequence, frame)
            sequence = messages[-1].sequence + 1
        there = set(await self._ownership.subjects(stream, pattern))
        newest = {subject: found for subject, found in newest.items() if subject in there}
        self._take(newest)
        used = {content.id for content in self._contents.values()}
        for subject in await self._ownership.subjects(stream, self._subject(CHUNK, "*", "0")):
            chunk_id = subject.rsplit(".", 2)[1]
            if chunk_id not in used:  # a crash came before the entry, or before the purge; later chunks are not ours
                asked = {"filter": self._subject(CHUNK, chunk_id, ">"), "seq": self._shard.epoch_sequence}
                try:
                    await self._nats.api(f"STREAM.PURGE.{stream}", asked, PURGE_SECONDS)
                except ApiError as error:
                    log.warning("stream %s: space is given back later: %s", stream, error)

    async def _from_leader(self, **chosen: str | int) -> Stored | None:
        try:
            return await self._nats.get_from_leader(self._shard.stream, **chosen)
        except ApiError as error:
            raise NatsAwayError(f"stream {self._shard.stream}: {error}") from error

    def _take(self, newest: dict[str, tuple[int, Frame | None]]) -> None:
        """Keep the last entry of each file."""
        stream, count, last = self._shard.stream, 0, 0
        for subject, (sequence, frame) in newest.items():
            if frame is None or frame.data is None or self._subject(FILE, *frame.head.topic.split("/")) != subject:
                raise _damaged(stream, sequence, subject)
            head = frame.head
            if sequence > last:
                last, count = sequence, head.next_offset
            if head.kind == Kind.GONE:
                self._tombstones.append((subject, sequence))
                continue
            name, size, is_chunked = head.topic, head.base_offset, head.kind == Kind.CHUNKED
            # Chunks are read and purged by this name: a wildcard would reach those of every file.
            if not ID.fullmatch(frame.data) if is_chunked else size > CHUNK_BYTES:
                raise _damaged(stream, sequence, subject)
            content = Content(name, b"" if is_chunked else frame.data)
            content.size = size
            content.dirty.clear()
            content.note_stored(size, frame.data.decode() if is_chunked else "")
            self._contents[name] = content
            self._stored.add(name)
        if count != len(self._stored):
            raise StreamAlteredError(
                f"stream {stream} has {len(self._stored)} files, and {count} were stored: somebody deleted messages;"
                " restore the stream from a backup of NATS ('nats stream restore')"
            )

    # -- names -------------------------------------------------------------------------------------------------------

    def _is_local(self, path: str) -> bool:
        if not path.startswith(f"{self._folder}/"):
            return path != self._folder
        return path[len(self._folder) + 1 :].partition("/")[0] in LOCAL_NAMES

    def _name(self, path: str) -> str:
        return path[len(self._folder) + 1 :].rstrip("/")

    def _subject(self, kind: str, *parts: str) -> str:
        tokens = [part if part in (">", "*") else token_of(part) for part in parts]
        subject = ".".join((self._ownership.settings.prefix, LABEL, kind, *tokens))
        if len(subject) > SUBJECT_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, f"a file's name is longer than {SUBJECT_BYTES_MAX} bytes in NATS")
        return subject


def _nothing(message: Message) -> None:
    """Return: the entry of the file counts."""


def _damaged(stream: str, sequence: int, subject: str) -> StreamAlteredError:
    return StreamAlteredError(
        f"stream {stream}, sequence {sequence}: the message of {subject} is damaged or not of Babelbus; restore the"
        " stream from a backup of NATS ('nats stream restore')"
    )


def _os_error(error: StorageError) -> OSError:
    """Return the error that a file system raises."""
    if isinstance(error, DiskFullError):
        return OSError(errno.ENOSPC, str(error))
    return OSError(errno.EROFS if isinstance(error, StaleWriterError) else errno.EIO, str(error))
