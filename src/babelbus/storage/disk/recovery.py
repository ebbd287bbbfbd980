"""Opening a partition: which segments there are, what of them must be read, what is cut, what is damaged.

Records that a checkpoint vouches for are not read. A torn tail of the last segment is cut; nothing else is removed but
files that only a step cut short by a crash can have left (docs/storage.md, recovery).
"""

import logging
from itertools import pairwise

import msgspec

from babelbus.records.fields import size_of
from babelbus.records.format import RECORD_BYTES_MIN
from babelbus.storage.contract import BadRange, Recovery
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.checkpoint import Checkpoint
from babelbus.storage.disk.scan import Scan, written_size
from babelbus.storage.disk.segment import DERIVED_SUFFIXES, SUFFIXES, Segment, base_name
from babelbus.storage.files import FileSystem, disk_error
from babelbus.storage.producers import Producers

log = logging.getLogger(__name__)

RESCUED_SUFFIX = ".rescued"
"""Records behind a failed flush, whole and durable: they become a segment in the place of all from this base on."""
FOREIGN_SUFFIX = ".damaged"
TORN_RECORD_BYTES_MAX = 64 * 2**20
"""The largest record that a lost page can be told of: what one append brings is no larger."""
PAGE_BYTES = 4096
LEFTOVER_SUFFIXES = ("new", "compacting")
BASE_DIGITS = 20


class Opened(msgspec.Struct):
    """The segments of a partition, those of them that were read, and the checkpoint that was believed.

    `lost` are the bases of the segments in front of which records are missing.
    """

    segments: list[Segment]
    scanned: list[Segment]
    known: Checkpoint | None
    lost: list[int] = []


def parse_base(name: str) -> tuple[int, str] | None:
    """Return base offset and suffix of a segment's file, or `None` for another file."""
    stem, dot, suffix = name.partition(".")
    if dot and len(stem) == BASE_DIGITS and stem.isascii() and stem.isdecimal():
        return int(stem), dot + suffix
    return None


def find_bases(files: FileSystem, folder: str) -> list[int]:
    """Return the base offsets of the segments, sorted."""
    return _bases_of(files.list_folder(folder))


def _bases_of(names: list[str]) -> list[int]:
    named = [parse_base(name) for name in names if name.endswith(".log")]
    return sorted(base for base, suffix in filter(None, named) if suffix == ".log")


def open_segments(files: FileSystem, folder: str, producers: Producers, recovery: Recovery) -> Opened:
    """Open what a folder holds; return no segment when it holds none.

    Raises:
        OSError: the disk refused.
    """
    names = files.list_folder(folder)
    if any(name.endswith(RESCUED_SUFFIX) for name in names):
        finish_rescue(files, folder)
        names = files.list_folder(folder)
    for name in find_leftovers(names):
        files.unlink(f"{folder}/{name}")
    bases = _bases_of(names)
    known = checkpoints.note(files, folder).recall()
    durable_end = 0 if known is None else known.durable_end
    if not bases and known is not None and durable_end:
        bases = [known.segment if known.segment < durable_end else 0]
        Segment(files, folder, bases[0]).create()
    if known is not None and known.segment not in bases:
        known = None
    opened = Opened([], [], known)
    if known is not None:
        producers.load(known.producers)
    fresh: Segment | None = None
    for base, following in pairwise([*bases, None]):
        assert base is not None  # only the last `following` is
        segment = Segment(files, folder, base)
        if following is not None and known is not None and base < known.segment and following not in known.lost:
            found = segment.open_sealed(following)
        else:
            position, offset = (known.position, known.next_offset) if known and known.segment == base else (0, base)
            found = segment.recover(position, offset, following)
            amiss = following is not None and (found.overlap or found.next_offset < following)
            if amiss and following == bases[-1] and _never_used(files, folder, following):
                # The power went after the next segment was made and before this one's end was durable.
                Segment(files, folder, following).remove()
                files.flush_folder(folder)
                following, segment = None, Segment(files, folder, base)
                found = segment.recover(position, offset)
            if following is None and found.next_offset < durable_end:
                # The records up to the noted end were acknowledged: nobody gets their offsets again.
                following, segment = durable_end, Segment(files, folder, base)
                found = segment.recover(0, base, following)
                fresh = Segment(files, folder, durable_end)
                fresh.create()
                fresh.recover(0, durable_end)
            opened.scanned.append(segment)
        if found is not None:
            _take_note(segment, found, following, recovery)
            producers.restore(found.producers)
            if following is not None and found.next_offset < following:
                opened.lost.append(following)
            if found.overlap:
                _keep_overlap(files, segment, found.end)
                segment.cut_tail(found.end)
            if following is not None:
                segment.trim()
        if following is not None:
            segment.close()  # a partition may have thousands
        opened.segments.append(segment)
        if following is None:
            break
    if fresh is not None:
        opened.segments.append(fresh)
        opened.scanned.append(fresh)
    if opened.segments:
        producers.forget_from(opened.segments[-1].next_offset)
    for path, bad in recovery.bad:
        log.error(
            "%s: damaged from byte %d to %d, offsets %d to %d cannot be read: %s; "
            "restore the file, or accept the loss with 'babelbus repair'",
            path, bad.position, bad.end, bad.offset, bad.next_offset - 1, bad.reason,
        )  # fmt: skip
    return opened


def finish_rescue(files: FileSystem, folder: str) -> None:
    """Replace the segments of a rescue that a crash cut short; only the rescued records are surely durable."""
    for name in files.list_folder(folder):
        parsed = parse_base(name)
        if parsed is None or parsed[1] != RESCUED_SUFFIX:
            continue
        if is_foreign_rescue(parsed[0], checkpoints.note(files, folder).recall()):
            files.rename(f"{folder}/{name}", f"{folder}/{name}{FOREIGN_SUFFIX}")
            files.flush_folder(folder)
            log.error("%s/%s: renamed and not used: the records behind its offset were durable", folder, name)
        else:
            replace_from(files, folder, parsed[0])


def is_foreign_rescue(base: int, known: Checkpoint | None) -> bool:
    """Return whether a rescue would replace records that were durable: a rescue begins where they end."""
    return known is not None and base < known.durable_end


def replace_from(files: FileSystem, folder: str, base: int) -> None:
    """Replace the segments that begin at `base` or later by the rescued records; may be done again.

    Raises:
        OSError: the disk refused.
    """
    rescued = f"{folder}/{base_name(base)}{RESCUED_SUFFIX}"
    if not files.exists(rescued):
        files.flush_folder(folder)  # an earlier try may have renamed it, and ended before that was durable
        return
    files.unlink(f"{folder}/{checkpoints.NAME}")
    for later in reversed(find_bases(files, folder)):
        if later > base:
            for suffix in SUFFIXES:
                files.unlink(f"{folder}/{base_name(later)}{suffix}")
    for suffix in DERIVED_SUFFIXES:
        files.unlink(f"{folder}/{base_name(base)}{suffix}")
    files.flush_folder(folder)
    files.rename(rescued, f"{folder}/{base_name(base)}.log")
    files.flush_folder(folder)


def find_leftovers(names: list[str]) -> dict[str, str]:
    """Return temporary files, and derived files without a log, with the reason why they are there."""
    found = {}
    for name in names:
        suffix = name.rpartition(".")[2]
        if suffix in LEFTOVER_SUFFIXES:
            found[name] = "a crash cut its making short"
        elif f".{suffix}" in DERIVED_SUFFIXES and parse_base(name) and name.replace(suffix, "log") not in names:
            found[name] = "there is no log of this name"
    return found


def _never_used(files: FileSystem, folder: str, base: int) -> bool:
    """Return whether a segment has no record and no checkpoint stands on it: then the one before it may be
    unflushed.
    """
    known = checkpoints.note(files, folder).recall()
    return (known is None or known.segment < base) and not written_size(Segment(files, folder, base).file())


def _take_note(segment: Segment, found: Scan, following: int | None, recovery: Recovery) -> None:
    """Count what a scan read and found damaged, and cut the torn tail of the last segment."""
    recovery.read_bytes += segment.size_bytes - found.start
    path = f"{segment.path}.log"
    recovery.bad += [(path, bad) for bad in found.bad]
    if following is not None:
        if found.next_offset < following:
            reason = found.tail or "the segment ends early"
            lost = BadRange(found.end, segment.size_bytes, found.next_offset, following, reason)
            recovery.bad.append((path, lost))
            if segment.bad is not None:
                segment.bad = [*segment.bad, lost]
        return
    last = found.producers[-1] if found.producers else None
    torn = last is not None and last.base_offset + last.count > found.next_offset and not found.bad
    if found.size == found.end and not torn:
        return  # zeros behind it stay for the next records
    size = found.size
    if torn and last is not None:
        # The write of this batch was torn, perhaps between two records, so it was not acknowledged, and its producer
        # sends all of it again.
        found.producers.pop()
        position, _ = segment.locate(last.base_offset)
        segment.cut(position)
    log.warning("%s: cut %d bytes of a torn tail at byte %d: %s",
                path, size - segment.size_bytes, segment.size_bytes, found.tail)  # fmt: skip
    recovery.cut_bytes += size - segment.size_bytes
    segment.cut_tail(segment.size_bytes)


def _keep_overlap(files: FileSystem, segment: Segment, position: int) -> None:
    """Write the bytes behind `position` to a file beside the log, before they are cut: a start deletes no records.

    The next segment usually holds the same records (a rescue after a failed flush was cut short). If somebody put a
    wrong file there, these bytes are the only copy.
    """
    kept = f"{segment.path}.log.damaged-{position}"
    if not files.exists(kept):
        files.replace_file(kept, segment.pread(segment.file_bytes() - position, position))
        log.warning(
            "%s.log: the next segment begins in it; its bytes from %d on are kept in %s", segment.path, position, kept
        )


def is_lost_page(files: FileSystem, path: str, position: int) -> bool:
    """Return whether the record at a position has lost a page: all of it that lies in the page is zero."""
    try:
        file = files.open(path, write=False)
        try:
            size = size_of(file.pread(RECORD_BYTES_MIN, position))
            if not RECORD_BYTES_MIN <= size <= TORN_RECORD_BYTES_MAX:
                size = RECORD_BYTES_MIN
            data = file.pread(size, position)
        finally:
            file.close()
    except OSError as error:
        raise disk_error(error, f"reading {path}") from error
    at = 0
    while at < len(data):
        stop = at + PAGE_BYTES - (position + at) % PAGE_BYTES
        page = data[at:stop]
        if not any(page):
            return True
        at = stop
    return False
