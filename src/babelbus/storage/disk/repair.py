"""Mending a data folder that no server uses (docs/storage.md, check and repair).

Nothing that was stored is deleted: bytes that are no good record move from their log into a file beside it,
`<segment>.log.damaged-<position>`. Each step writes the new, flushes it and renames it, and a partition whose repair
was cut short is one that the next repair, or the next start, understands. What is derived is made again by the code
that a start uses.
"""

import logging
import struct

from babelbus.clock import SystemClock
from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at
from babelbus.records.format import INT64, encode_batch
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.check import (
    TOPICS,
    Look,
    Meter,
    PartitionReport,
    Problem,
    Progress,
    Report,
    SegmentReport,
    check_folder,
    find_partitions,
    look,
    make_meter,
    report_partition,
    wrong_sums,
)
from babelbus.storage.disk.index import BLOCK_RECORDS, crc32c
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.recovery import RESCUED_SUFFIX, find_bases, parse_base, replace_from
from babelbus.storage.disk.segment import DERIVED_SUFFIXES, Segment, base_name
from babelbus.storage.disk.store import LOCK_NAME, REMOVED_PREFIX
from babelbus.storage.files import File, FileSystem, disk_error

__all__ = ["PartitionReport", "Problem", "Progress", "Report", "SegmentReport", "check_folder", "repair_folder"]

log = logging.getLogger(__name__)

COPY_BYTES = 4 * 2**20
LOST_HEADER = b"$lost"
"""Header of the record that stands for a lost end behind which nothing was stored: first lost offset i64, next i64."""
LOST = struct.Struct(">qq")

Range = tuple[int, int]


def repair_folder(
    files: FileSystem, data_folder: str, *, dry_run: bool = False, progress: Progress | None = None
) -> Report:
    """Mend what `check_folder` finds; return what that was, where damaged bytes are kept and what is still wrong.

    A second repair finds nothing, but what its `repair` says it leaves alone. `dry_run` writes nothing.

    Raises:
        FolderLockedError: a server runs on the folder.
        DiskFullError, DiskError: the disk refused; nothing is lost, repair again.
        StorageError: this is no data folder.
    """
    if dry_run or not files.exists(f"{data_folder}/{TOPICS}"):
        return check_folder(files, data_folder, progress=progress)
    lock = files.lock(f"{data_folder}/{LOCK_NAME}")
    try:
        return _repair(files, data_folder, progress)
    except OSError as error:
        raise disk_error(error, f"repair of {data_folder}") from error
    finally:
        lock.close()


def _repair(files: FileSystem, data_folder: str, progress: Progress | None) -> Report:
    places, problems = find_partitions(files, data_folder)
    meter = make_meter(files, places, progress)
    report = Report([], problems)
    for problem in problems:
        if problem.file.rpartition("/")[2].startswith(REMOVED_PREFIX):
            files.remove_tree(problem.file)
        elif problem.kind == "missing":
            _open_once(files, problem.file)
    report.left += find_partitions(files, data_folder)[1]
    for topic, partition, folder in places:
        looks, problems = look(files, folder, meter, live=False)
        found = report_partition(topic, partition, looks, problems)
        report.partitions.append(found)
        if not found.all_problems:
            continue
        if not any(problem.kind == "unreadable" for problem in found.all_problems):
            report.kept += _Mender(files, folder).mend()
        looks, problems = look(files, folder, Meter(None, 0), live=False)
        report.left += report_partition(topic, partition, looks, problems).all_problems
    return report


def _open_once(files: FileSystem, folder: str) -> None:
    """Open a partition as the server does, and close it: whatever is derived is made again, and durable."""
    Log(files, folder, LogSettings(), SystemClock()).close()


class _Mender:
    """Mends one partition. `kept` are the files that took damaged bytes."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._kept: list[str] = []

    def mend(self) -> list[str]:
        """Do all that there is to do; return the files that hold damaged bytes."""
        files, folder = self._files, self._folder
        for name in files.list_folder(folder):
            parsed = parse_base(name)
            if parsed is not None and parsed[1] == RESCUED_SUFFIX:
                replace_from(files, folder, parsed[0])
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
        self._keep_tail(self._look())
        self._forget_checkpoint()
        _open_once(files, folder)
        return self._kept

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
            patches: dict[int, bytes] = {}
            if not cuts:
                cuts, patches = self._mend_offsets(each)
            if cuts or patches:
                for start, end in cuts:
                    self._keep(each, start, end)
                self._rewrite(each, cuts, patches)
                changed = True
        return changed

    def _mend_offsets(self, each: Look) -> tuple[list[Range], dict[int, bytes]]:
        """Return the blocks to cut out because an offset in them is wrong, and the bytes to put where it can be
        told.
        """
        assert each.found is not None
        cuts: list[Range] = []
        patches: dict[int, bytes] = {}
        positions = [*each.found.index.positions, each.found.end]
        for block, said in wrong_sums(self._files, each):
            start, end = positions[block], positions[block + 1]
            file = self._files.open(f"{each.path}.log", write=False)
            try:
                data = file.pread(end - start, start)
            finally:
                file.close()
            patch = _find_flipped_bit(data, said)
            if patch is None:
                cuts.append((start, end))
            else:
                patches[start + patch[0]] = patch[1]
        return cuts, patches

    def _rewrite(self, each: Look, cuts: list[Range], patches: dict[int, bytes], behind: bytes = b"") -> None:
        """Write a log again without the bytes in `cuts`, with others in some places, and with some more at its end."""
        files, path = self._files, f"{each.path}.log"
        kept: list[Range] = []
        position = 0
        for start, end in [*cuts, (each.size, each.size)]:
            kept.append((position, start))
            position = end
        temporary = f"{each.path}.compacting"  # what a start removes
        self._copy(path, kept, temporary, patches, behind)
        for suffix in DERIVED_SUFFIXES:
            files.unlink(each.path + suffix)
        files.flush_folder(self._folder)
        files.rename(temporary, path)
        files.flush_folder(self._folder)
        log.warning("%s: written again, %d bytes taken out", path, sum(end - start for start, end in cuts))

    def _copy(
        self,
        source: str,
        ranges: list[Range],
        target: str,
        patches: dict[int, bytes] | None = None,
        behind: bytes = b"",
    ) -> None:
        """Write some ranges of a file to a new one, durably."""
        reader = self._files.open(source, write=False)
        try:
            writer = self._files.open(target, create=True)
            try:
                writer.truncate(0)
                size = _copy_ranges(reader, ranges, writer, patches or {})
                writer.pwrite(behind, size)
                writer.flush()
            finally:
                writer.close()
        finally:
            reader.close()

    def _keep(self, each: Look, start: int, end: int) -> None:
        """Copy damaged bytes of a log into a file beside it, unless an earlier repair that was cut short did."""
        if start == end:
            return
        source = f"{each.path}.log"
        name = target = f"{source}.damaged-{start}"
        number = 1
        while self._files.exists(target):
            if self._same(source, start, end, target):
                break
            number += 1
            target = f"{name}-{number}"
        else:
            temporary = f"{target}.new"  # what a start removes
            self._copy(source, [(start, end)], temporary)
            self._files.rename(temporary, target)
            self._files.flush_folder(self._folder)
        self._kept.append(target)

    def _same(self, source: str, start: int, end: int, target: str) -> bool:
        one, other = self._files.open(source, write=False), self._files.open(target, write=False)
        try:
            return other.size() == end - start and all(
                one.pread(min(COPY_BYTES, end - at), at) == other.pread(min(COPY_BYTES, end - at), at - start)
                for at in range(start, end, COPY_BYTES)
            )
        finally:
            one.close()
            other.close()

    # -- making ends meet --------------------------------------------------------------------------------------------

    def _join(self, looks: list[Look]) -> None:
        """Let each segment begin where the one before it ends, when that has lost its end.

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
                self._rewrite(before, [], {}, bytes(encode_batch([lost], each.base - 1).data))
                continue
            if each.following is None:
                self._seal_last(each)
            for suffix in DERIVED_SUFFIXES:
                files.unlink(each.path + suffix)
            files.rename(f"{each.path}.log", f"{self._folder}/{base_name(end)}.log")
            files.flush_folder(self._folder)
            log.warning("%s.log: named %s.log, since offsets %d to %d in front of it are lost",
                        each.path, base_name(end), end, each.base - 1)  # fmt: skip

    def _seal_last(self, each: Look) -> None:
        """Start a segment behind the last one, which gets a gap and so takes no more records; cut its torn tail."""
        assert each.found is not None
        Segment(self._files, self._folder, each.found.next_offset).create()
        if each.found.end < each.size:
            self._keep(each, each.found.end, each.size)
            self._rewrite(each, [(each.found.end, each.size)], {})

    def _keep_tail(self, looks: list[Look]) -> None:
        """Keep what the next opening cuts from the end of the log: a torn write, with the batch that it is part of."""
        if not looks or looks[-1].found is None or looks[-1].found.end == looks[-1].size:
            return
        each, found = looks[-1], looks[-1].found
        start = found.end
        batch = found.producers[-1] if found.producers else None
        if batch is not None and batch.base_offset + batch.count > found.next_offset:
            number = batch.base_offset - each.base
            begin = found.index.positions[number // BLOCK_RECORDS]
            file = self._files.open(f"{each.path}.log", write=False)
            try:
                data = file.pread(found.end - begin, begin)
            finally:
                file.close()
            start = begin + int(find_positions(data, 0, len(data))[0][number % BLOCK_RECORDS])
        self._keep(each, start, each.size)


def _copy_ranges(reader: File, ranges: list[Range], writer: File, patches: dict[int, bytes]) -> int:
    """Copy ranges one behind the other; `patches` are the bytes for some positions of the source. Returns the size."""
    size = 0
    for start, end in ranges:
        for at in range(start, end, COPY_BYTES):
            data = reader.pread(min(COPY_BYTES, end - at), at)
            writer.pwrite(data, size + at - start)
        for at, patch in patches.items():
            if start <= at < end:
                writer.pwrite(patch, size + at - start)
        size += end - start
    return size


def _find_flipped_bit(data: bytes, total: int) -> tuple[int, bytes] | None:
    """Return position and bytes of the offset that makes the CRC-32C of a block `total`, if one flipped bit explains
    it.

    Only bits that leave the offsets rising are tried: a handful for each record, 10 us each.
    """
    positions, _ = find_positions(data, 0, len(data))
    offsets = offsets_at(data, positions).tolist()
    changed = bytearray(data)
    for number, at in enumerate(positions.tolist()):
        lowest = offsets[number - 1] if number else -1
        highest = offsets[number + 1] if number + 1 < len(offsets) else 2**63 - 1
        for bit in range(63):
            offset = offsets[number] ^ (1 << bit)
            if lowest < offset < highest:
                INT64.pack_into(changed, at, offset)
                if crc32c(bytes(changed)) == total:
                    return at, INT64.pack(offset)
        INT64.pack_into(changed, at, offsets[number])
    return None
