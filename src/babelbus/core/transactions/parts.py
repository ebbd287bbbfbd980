"""All staged parts of a server: their files, their limits, and which of them hold a file descriptor."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import closing

from babelbus.clock import Clock
from babelbus.config import StagingLimits
from babelbus.core.flusher import Flusher
from babelbus.core.receipt import Receipt
from babelbus.core.transactions.model import ID_BYTES_MAX, STATE_SUFFIX, StagingFullError, note, token_of
from babelbus.core.transactions.part_file import PartHead, PartReader, Place, StagedPart
from babelbus.errors import StorageError
from babelbus.records.record import RecordBatch
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import DamagedNoteError

log = logging.getLogger(__name__)

PART_SUFFIX = ".part"
OPEN_FILES_MAX = 64
"""Parts whose file stays open between two batches."""

PartId = tuple[str, int, str]
"""Transaction id, batch id, part."""
Keep = Callable[[PartHead, int], bool]
"""Says of a part and its number whether it is wanted."""


class Parts:
    """The parts, by whose they are. Calls come from the event loop.

    Attributes:
        staged_bytes: size of all their files.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: str,
        *,
        flusher: Flusher,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settings: StagingLimits,
    ) -> None:
        self.staged_bytes = 0
        self._files = files
        self._folder = folder
        self._flusher = flusher
        self._clock = clock
        self._loop = loop
        self._settings = settings
        self._parts: dict[str, dict[tuple[int, str], StagedPart]] = {}
        self._bytes: Counter[str] = Counter()
        """Size of the parts of each transaction."""
        self._count = 0
        self._open: OrderedDict[StagedPart, None] = OrderedDict()
        self._next_number = 0
        self._removing: set[asyncio.Future[None]] = set()

    # -- what there is -----------------------------------------------------------------------------------------------

    def of(self, transaction_id: str) -> list[StagedPart]:
        """Return the parts of a transaction."""
        return list(self._parts.get(transaction_id, {}).values())

    def find(self, transaction_id: str, batch_id: int, part: str) -> StagedPart | None:
        """Return a part, `None` when it is not staged."""
        return self._parts.get(transaction_id, {}).get((batch_id, part))

    def bytes_of(self, transaction_id: str) -> int:
        """Return the size of a transaction's parts."""
        return self._bytes[transaction_id]

    # -- growing -----------------------------------------------------------------------------------------------------

    def append(self, whose: PartId, place: Place, batch: RecordBatch) -> Receipt:
        """Add a batch to a part, which is made if it is new; the receipt is done when it is durable.

        Raises:
            StagingFullError: it would be more than the limits allow.
            StorageError: the disk refused; nothing was staged.
        """
        transaction_id, settings = whose[0], self._settings
        size = len(batch.data) + 2 * ID_BYTES_MAX  # with what stands in front of it
        if self.bytes_of(transaction_id) + size > settings.transaction_bytes_max:
            raise StagingFullError(f"a transaction stages {settings.transaction_bytes_max} bytes at the most")
        if self.staged_bytes + size > settings.bytes_max:
            raise StagingFullError(f"all transactions stage {settings.bytes_max} bytes at the most")
        known = self.find(*whose)
        part = known or self._make(whose)
        before = part.size_bytes
        try:
            receipt = part.append(place, batch, self._clock.monotonic())
        except StorageError:
            if known is None:
                self.remove([part])
            raise
        self._grow(transaction_id, part.size_bytes - before)
        if part.wants_flush():
            self._flusher.request(part)
        self._keep_open(part)
        return receipt

    def _make(self, whose: PartId) -> StagedPart:
        if self._count >= self._settings.parts_max:
            raise StagingFullError(f"{self._settings.parts_max} parts are staged, no more fit")
        number = self._next_number
        path = f"{self._folder}/{token_of(whose[0])}-{number}{PART_SUFFIX}"
        part = self._part(number, path, PartHead(*whose))
        part.create()
        self._next_number += 1
        self._add(part)
        return part

    def _part(self, number: int, path: str, head: PartHead) -> StagedPart:
        return StagedPart(self._files, self._folder, number, path, head, self._clock.monotonic())

    def _add(self, part: StagedPart) -> None:
        head = part.head
        self._parts.setdefault(head.transaction_id, {})[head.batch_id, head.part] = part
        self._grow(head.transaction_id, part.size_bytes)
        self._count += 1

    def _grow(self, transaction_id: str, size: int) -> None:
        self.staged_bytes += size
        self._bytes[transaction_id] += size

    def _keep_open(self, part: StagedPart) -> None:
        """Keep the files of the parts that grew last open, and no others but those that wait for the disk."""
        self._open[part] = None
        self._open.move_to_end(part)
        excess = max(len(self._open) - OPEN_FILES_MAX, 0)
        for oldest in [part for part in self._open if part.idle][:excess]:
            del self._open[oldest]
            oldest.close()

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self, parts: Iterable[StagedPart]) -> None:
        """Drop parts; their space is given back in the background, for a large file takes long to delete."""
        paths = []
        for part in parts:
            head = part.head
            mine = self._parts.get(head.transaction_id, {})
            if mine.get((head.batch_id, head.part)) is part:
                del mine[head.batch_id, head.part]
                self._grow(head.transaction_id, -part.size_bytes)
                self._count -= 1
                if not mine:
                    del self._parts[head.transaction_id], self._bytes[head.transaction_id]
            self._open.pop(part, None)
            part.retire()
            paths.append(part.path)
        if paths:
            removing = self._loop.run_in_executor(None, self._unlink, paths)
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)

    def _unlink(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._files.unlink(path)
            except OSError as error:  # the next start, or the time-out after it, tries again
                log.warning("%s: a staged part that was dropped stays: %s", path, error)

    async def settle(self) -> None:
        """Return when what was dropped is deleted."""
        if self._removing:
            await asyncio.wait(set(self._removing))

    # -- life --------------------------------------------------------------------------------------------------------

    def recover(self, name: str, *, keep: Keep, named: Keep) -> None:
        """Add the part in a file of the folder, as a crash left it; delete the file if the part is not wanted.

        Args:
            name: the file's name.
            keep: whether a part is wanted.
            named: whether a commit names it.

        Raises:
            OSError, DiskError: the disk refused.
        """
        path = f"{self._folder}/{name}"
        _, _, digits = name.removesuffix(PART_SUFFIX).partition("-")
        if not digits.isdecimal():
            log.warning("%s: not ours, left alone", path)
            return
        number = int(digits)
        self._next_number = max(self._next_number, number + 1)
        with closing(PartReader(self._files, path)) as reader:
            head = reader.read_head()
            if head is None and reader.is_damaged():
                log.error("a staged part is not opened: %s", reader.damage())
                return
        if head is None or not keep(head, number):  # without a head, a crash cut its making short
            self._files.unlink(path)
            return
        part = self._part(number, path, head)
        part.recover()
        other = self.find(head.transaction_id, head.batch_id, head.part)
        if other is not None:
            # An aborted part came back after a loss of power, and a newer one has its id; but the commit's own stays.
            if named(head, other.number) or (other.number > number and not named(head, number)):
                self._files.unlink(path)
                return
            self.remove([other])
        self._add(part)

    def close(self) -> None:
        """Close the files; nothing may be under way in the flusher."""
        for parts in self._parts.values():
            for part in parts.values():
                part.close()


def find_damage(files: FileSystem, path: str) -> str:
    """Return what is damaged in a file of staged records, and what to do; an empty text if there is no damage.

    Raises:
        DiskError: the disk refused.
    """
    if path.endswith(STATE_SUFFIX):
        try:
            note(files, path).read()
        except DamagedNoteError as error:
            return str(error)
    elif path.endswith(PART_SUFFIX):
        with closing(PartReader(files, path)) as reader:
            while reader.next_body() is not None:
                pass
            return str(reader.damage()) if reader.is_damaged() else ""
    return ""
