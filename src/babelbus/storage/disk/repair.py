"""Mending a data folder that no server uses (docs/storage.md, check and repair).

Nothing that was stored is deleted: bytes that are no good record move from their log into a file beside it,
`<segment>.log.damaged-<position>`. Each step writes the new, flushes it and renames it, and a partition whose repair
was cut short is one that the next repair, or the next start, understands. Derived files are made again by the code
that a start uses.
"""

import logging
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from babelbus.clock import SystemClock
from babelbus.errors import StorageError
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.check import (
    NOTHING_EXPECTED,
    TOPICS,
    Look,
    Meter,
    Problem,
    Progress,
    Report,
    add_looks,
    all_problems,
    check_folder,
    find_partitions,
    look,
    make_meter,
    try_look,
    wrong_sums,
)
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.recovery import find_bases, finish_rescue
from babelbus.storage.disk.segment import DERIVED_SUFFIXES, Segment, base_name
from babelbus.storage.disk.store import LOCK_NAME, REMOVED_PREFIX
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

COPY_BYTES = 4 * 2**20
LOST_HEADER = b"$lost"
"""Header of the record that stands for a lost end behind which nothing was stored: first lost offset i64, next i64."""
LOST = struct.Struct(">qq")

REPAIR_AGAIN = "mend the disk, then repair again"

Range = tuple[int, int]


def repair_folder(
    files: FileSystem,
    data_folder: str,
    expected: Mapping[str, int] = NOTHING_EXPECTED,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Repair what `check_folder` finds; return the problems, where damaged bytes are kept and what is still wrong.

    A second repair finds nothing, but what its `repair` says it leaves alone, and what the disk refused: of that,
    nothing is lost. `dry_run` writes nothing.

    Raises:
        FolderLockedError: a server runs on the folder.
        StorageError: this is no data folder, or the disk refuses it.
    """
    if dry_run or not files.exists(f"{data_folder}/{TOPICS}"):
        return check_folder(files, data_folder, expected, progress=progress)
    lock = files.lock(f"{data_folder}/{LOCK_NAME}")
    try:
        return _repair(files, data_folder, expected, progress)
    finally:
        lock.close()


def _repair(files: FileSystem, data_folder: str, expected: Mapping[str, int], progress: Progress | None) -> Report:
    places, problems = find_partitions(files, data_folder, expected)
    meter = make_meter(files, places, progress)
    report = Report(list(problems))
    for problem in problems:
        with _refusals(problem.file, report.left):
            if problem.file.rpartition("/")[2].startswith(REMOVED_PREFIX):
                files.remove_tree(problem.file)
            elif problem.kind == "missing":
                _open_once(files, problem.file)
    report.left += find_partitions(files, data_folder, expected)[1]
    for topic, partition, folder in places:
        looks, problems = try_look(files, folder, meter, live=False)
        report.partitions.append((topic, partition))
        add_looks(report, looks, problems)
        amiss = all_problems(looks, problems)
        if amiss and not any(problem.kind == "unreadable" for problem in amiss):
            mender = _Mender(files, folder)
            with _refusals(folder, report.left):
                mender.mend()
            report.kept += mender.kept
            amiss = all_problems(*try_look(files, folder, Meter(None, 0), live=False))
        report.left += amiss
    return report


@contextmanager
def _refusals(path: str, left: list[Problem]) -> Iterator[None]:
    """Add to `left` that the disk refused a repair: the other repairs go on."""
    try:
        yield
    except (OSError, StorageError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        left.append(Problem("unreadable", path, f"the disk refused the repair: {reason}", REPAIR_AGAIN))


def _open_once(files: FileSystem, folder: str) -> None:
    """Open a partition as the server does, and close it: whatever is derived is made again, and durable."""
    Log(files, folder, LogSettings(), SystemClock()).close()


class _Mender:
    """Mends one partition. `kept` are the files that took damaged bytes."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._files = files
        self._folder = folder
        self.kept: list[str] = []

    def mend(self) -> None:
        """Repair the partition.

        Raises:
            OSError, StorageError: the disk refused; nothing is lost.
        """
        files, folder = self._files, self._folder
        finish_rescue(files, folder)
        looks = self._look()
        known = checkpoints.note(files, folder).recall()
        last = looks[-1].found if looks else None
        if known is not None and (last is None or last.next_offset < known.durable_end):
            _open_once(files, folder)  # which begins a segment at the durable end: no offset is given again
            looks = self._look()
        for base in find_bases(files, folder):
            if looks and base > looks[-1].base:  # never used: a start would remove it too
                Segment(files, folder, base).remove()
                files.flush_folder(folder)
        if looks and looks[-1].size:
            # It may vouch for what is written again. On an empty last segment it says that this one was in use, and
            # must say so until the end of the one before it is mended.
            self._forget_checkpoint()
        while self._cut_out(looks):
            looks = self._look()
        for each in looks:
            if each.found is not None and each.found.overlap:  # the opening below cuts them
                self._keep(each, each.found.end, each.size)
        self._join(looks)
        for each in self._look()[-1:]:
            if each.found is not None:  # the opening below cuts the tail, and the torn batch that it belongs to
                self._keep(each, each.found.end, each.size)
        self._forget_checkpoint()
        _open_once(files, folder)

    def _look(self) -> list[Look]:
        return look(self._files, self._folder, Meter(None, 0), live=False)[0]

    def _forget_checkpoint(self) -> None:
        self._files.unlink(f"{self._folder}/{checkpoints.NAME}")
        self._files.flush_folder(self._folder)

    # -- taking out what is damaged ----------------------------------------------------------------------------------

    def _cut_out(self, looks: list[Look]) -> bool:
        """Write the segments again without what is damaged in them; return whether that changed anything."""
        changed = False
        for number, each in enumerate(looks):
            found = each.found
            assert found is not None
            hides = number > 0 and (before := looks[number - 1].found) is not None and before.overlap
            if not found.index.record_count and (each.following is not None or (each.size and hides)):
                self._keep(each, 0, each.size)
                Segment(self._files, self._folder, each.base).remove()
                self._files.flush_folder(self._folder)
                return True  # what the one before it may hold is another question now
            cuts = [(bad.position, bad.end) for bad in found.bad]
            if cuts and each.following is None:
                # Only a segment without gaps is appended to, so the next one begins here.
                Segment(self._files, self._folder, found.next_offset).create()
            if (cuts or each.following is not None) and found.end < each.size and not found.overlap:
                cuts.append((found.end, each.size))
            if not cuts:
                positions = [*found.index.positions, found.end]
                cuts = [(positions[block], positions[block + 1]) for block in wrong_sums(self._files, each)]
            if cuts:
                for start, end in cuts:
                    self._keep(each, start, end)
                self._rewrite(each, cuts)
                changed = True
        return changed

    def _rewrite(self, each: Look, cuts: list[Range], behind: bytes = b"") -> None:
        """Write a log again without the bytes in `cuts`, with the bytes `behind` at its end."""
        files, path = self._files, f"{each.path}.log"
        kept: list[Range] = []
        position = 0
        for start, end in [*cuts, (each.size, each.size)]:
            kept.append((position, start))
            position = end
        temporary = f"{each.path}.compacting"  # which a start removes
        self._copy(path, kept, temporary, behind)
        for suffix in DERIVED_SUFFIXES:
            files.unlink(each.path + suffix)
        files.flush_folder(self._folder)
        files.rename(temporary, path)
        files.flush_folder(self._folder)
        log.warning("%s: written again, %d bytes taken out", path, sum(end - start for start, end in cuts))

    def _copy(self, source: str, ranges: list[Range], target: str, behind: bytes = b"") -> None:
        """Write some ranges of a file, and the bytes `behind`, to a new file, durably."""
        reader, writer = self._files.open(source, write=False), self._files.open(target, create=True)
        try:
            writer.truncate(0)
            size = 0
            for start, end in ranges:
                for at in range(start, end, COPY_BYTES):
                    data = reader.pread(min(COPY_BYTES, end - at), at)
                    writer.pwrite(data, size)
                    size += len(data)
            writer.pwrite(behind, size)
            writer.flush()
        finally:
            writer.close()
            reader.close()

    def _keep(self, each: Look, start: int, end: int) -> None:
        """Write damaged bytes of a log to a new file beside it."""
        if start == end:
            return
        name = target = f"{each.path}.log.damaged-{start}"
        number = 1
        while self._files.exists(target):
            number += 1
            target = f"{name}-{number}"
        temporary = f"{target}.new"  # which a start removes
        self._copy(f"{each.path}.log", [(start, end)], temporary)
        self._files.rename(temporary, target)
        self._files.flush_folder(self._folder)
        self.kept.append(target)

    # -- making ends meet --------------------------------------------------------------------------------------------

    def _join(self, looks: list[Look]) -> None:
        """Move the begin of each segment to the end of the segment before it, if that has lost records.

        A compacted segment keeps its last record, so one that ends early has lost something and is refused from there
        on. The offsets that are gone become a gap at the beginning of the next segment, as if compaction had made it.
        """
        files = self._files
        for number in range(1, len(looks)):
            before, each = looks[number - 1], looks[number]
            assert before.found is not None
            assert each.found is not None
            end = before.found.next_offset
            if end >= each.base:
                continue
            if not each.size:
                # No record says that offsets up to this base were given away, and no name would: so a record must.
                lost = Record(
                    None,
                    headers=((LOST_HEADER, LOST.pack(end, each.base)),),
                    timestamp=before.found.index.greatest_timestamp,
                )
                self._rewrite(before, [], bytes(encode_batch([lost], each.base - 1).data))
                continue
            if each.following is None:
                self._seal_last(each)
            renamed = f"{self._folder}/{base_name(end)}"
            for suffix in DERIVED_SUFFIXES:
                files.unlink(each.path + suffix)
                files.unlink(renamed + suffix)  # of a log that is lost
            files.rename(f"{each.path}.log", f"{renamed}.log")
            files.flush_folder(self._folder)
            log.warning("%s.log: named %s.log, since offsets %d to %d in front of it are lost",
                        each.path, base_name(end), end, each.base - 1)  # fmt: skip

    def _seal_last(self, each: Look) -> None:
        """Start a segment behind the last one, which gets a gap and so takes no more records; cut its torn tail."""
        assert each.found is not None
        Segment(self._files, self._folder, each.found.next_offset).create()
        if each.found.end < each.size:
            self._keep(each, each.found.end, each.size)
            self._rewrite(each, [(each.found.end, each.size)])
