"""The bytes of a replicated file in memory: what is written until it is flushed, and which chunks the stream has."""

import re
import secrets
import threading
from collections.abc import Iterable

CHUNK_BYTES = 2**17
ID_BYTES = 8
ID = re.compile(rb"[0-9a-f]{%d}" % (2 * ID_BYTES))
"""The name of the chunks of a file in the stream."""


class Content:
    """The bytes of a file, for all who have the file open. The lock is held for a moment, never while NATS is asked.

    Invariant: each chunk below `stored_chunks` is in the stream, or the content of the entry is the only chunk.
    """

    __slots__ = ("chunks", "dirty", "entry", "id", "lock", "patches", "path", "size", "stored_chunks")

    def __init__(self, path: str | None, content: bytes = b"") -> None:
        self.path = path
        """Below the data folder; `None` when the name is gone or is another file's."""
        self.lock = threading.Lock()
        self.size = len(content)
        self.chunks = {
            number: bytearray(content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            for number in range(count_chunks(len(content)))
        }
        """The chunks that are in memory."""
        self.patches: dict[int, list[tuple[int, bytes | None]]] = {}
        """Writes to chunks that are not in memory: place and bytes, or `None` for a cut."""
        self.dirty = set(self.chunks)
        self.id = ""
        """The name of the chunks in the stream; empty while the entry has the content."""
        self.stored_chunks = 0
        self.entry: tuple[int, str] | None = None
        """Size and name of the chunks, as the stream has them."""

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write in memory."""
        view = memoryview(data)
        with self.lock:
            self._grow(position + len(view))
            while len(view):
                number, at = divmod(position, CHUNK_BYTES)
                piece = bytes(view[: CHUNK_BYTES - at])
                chunk = self.chunks.get(number)
                if chunk is None:
                    self.patches.setdefault(number, []).append((at, piece))
                else:
                    patch(chunk, at, piece)
                self.dirty.add(number)
                position += len(piece)
                view = view[len(piece) :]

    def truncate(self, size: int) -> None:
        """Set the size in memory."""
        with self.lock:
            if size >= self.size:
                self._grow(size)
                return
            count = count_chunks(size)
            for number in [number for number in {*self.chunks, *self.patches, *self.dirty} if number >= count]:
                self.chunks.pop(number, None)
                self.patches.pop(number, None)
                self.dirty.discard(number)
            self.stored_chunks = min(self.stored_chunks, count)
            if size % CHUNK_BYTES:
                number, at = divmod(size, CHUNK_BYTES)
                chunk = self.chunks.get(number)
                if chunk is None:
                    self.patches.setdefault(number, []).append((at, None))
                else:
                    del chunk[at:]
                self.dirty.add(number)
            self.size = size

    def _grow(self, size: int) -> None:
        """Add zeros at the end; a chunk that nobody wrote is stored as well."""
        for number in range(count_chunks(self.size), count_chunks(size)):
            self.chunks[number] = bytearray()
            self.dirty.add(number)
        self.size = max(self.size, size)

    def is_missing(self, number: int) -> bool:
        """Return whether a chunk must be read from the stream."""
        with self.lock:
            return number not in self.chunks and number < self.stored_chunks

    def bring(self, number: int, stored: bytes) -> None:
        """Keep a chunk in memory, as the stream has it, with the writes that wait for it."""
        with self.lock:
            if number in self.chunks:
                return
            chunk = bytearray(stored)
            for at, piece in self.patches.pop(number, ()):
                if piece is None:
                    del chunk[at:]
                else:
                    patch(chunk, at, piece)
            self.chunks[number] = chunk

    def read_chunk(self, number: int, stored: bytes) -> bytes:
        """Return a chunk, filled up with zeros; `stored` is the chunk in the stream."""
        if number in self.patches:
            self.bring(number, stored)
        with self.lock:
            return bytes(self.chunks.get(number, stored)).ljust(CHUNK_BYTES, b"\0")

    def take_dirty(self) -> tuple[int, str, dict[int, bytes]]:
        """Return size, name of the chunks, and the chunks that are to be stored, which are clean from now on.

        A chunk that is not in memory yet stays dirty: the write to it began after the flush.
        """
        with self.lock:
            size = self.size
            name = self.id or ("" if size <= CHUNK_BYTES else secrets.token_hex(ID_BYTES))
            numbers = sorted(self.dirty) if self.id else range(count_chunks(size))
            taken = {
                number: bytes(self.chunks[number][: size - number * CHUNK_BYTES])
                for number in numbers
                if number in self.chunks
            }
            self.dirty.difference_update(taken)
            return size, name, taken

    def give_back(self, chunks: Iterable[int]) -> None:
        """Record that chunks which `take_dirty` returned may not be stored."""
        with self.lock:
            self.dirty.update(number for number in chunks if number < count_chunks(self.size))

    def note_stored(self, size: int, name: str) -> None:
        """Record what the stream has; a truncation since may have made it less."""
        with self.lock:
            self.entry, self.id = (size, name), name
            self.stored_chunks = min(count_chunks(size), count_chunks(self.size)) if name else 0

    def forget_clean(self) -> None:
        """Drop the chunks that the stream has, but for the last one: more is appended to it."""
        with self.lock:
            last = count_chunks(self.size) - 1
            for number in [number for number in self.chunks if number not in self.dirty and number != last]:
                del self.chunks[number]


def count_chunks(size: int) -> int:
    """Return how many chunks a file of this size has."""
    return -(-size // CHUNK_BYTES)


def patch(chunk: bytearray, at: int, piece: bytes) -> None:
    """Write in a chunk, which is filled up with zeros in front of the place."""
    if len(chunk) < at:
        chunk.extend(bytes(at - len(chunk)))
    chunk[at : at + len(piece)] = piece
