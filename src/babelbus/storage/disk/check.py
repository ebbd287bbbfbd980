"""Reading a whole data folder and saying what is wrong with it; nothing is written (docs/storage.md, check and repair).

Every record's CRC is checked, and all that is derived is compared with what the logs give. The server may be up: each
log is read as far as it went when its turn came, and what looks wrong is looked at twice, since a server that appends,
compacts or rolls between two reads leaves different things behind while damage stays the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

import msgspec

from babelbus.arrays import np
from babelbus.errors import StorageError
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.checkpoint import Checkpoint
from babelbus.storage.disk.index import BLOCK_ENTRY, BLOCK_RECORDS, ENTRY_BYTES, UNKNOWN_SUM, decode
from babelbus.storage.disk.recovery import RESCUED_SUFFIX, find_bases, find_leftovers, is_foreign_rescue, parse_base
from babelbus.storage.disk.scan import OFFSET_MAX, Scan, scan, written_size
from babelbus.storage.disk.segment import DERIVED_SUFFIXES, base_name
from babelbus.storage.disk.store import REMOVED_PREFIX, parse_number, topic_of
from babelbus.storage.files import FileSystem, disk_error

NOTHING_EXPECTED: Mapping[str, int] = MappingProxyType({})
Progress = Callable[[int, int], None]
"""Called with the bytes of records that were read and those that there are."""

TOPICS = "topics"
ACCEPT_LOSS = "continue behind the lost records; or restore the file"
REBUILD = "make it again from the log"
MEND_FIRST = "nothing: mend the disk, or move away what is in its place, first"
CUT_TAIL = "keep the bytes beside it and cut them, with the unacknowledged batch that they belong to"
CUT_OUT = "keep the bytes in a file beside the log and write the log again without them; readers jump over the offsets"


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong. `position` is a byte of `file`; the offsets `offset` to `next_offset` - 1 are lost.

    `kind`: `damaged` (bytes that are no good record), `torn_tail` (the same at the end of the last segment),
    `ends_early` (offsets without any bytes), `overlap` (records that the next segment has too), `offset` (a whole
    record whose offset is wrong, which no CRC of its own covers), `unreadable` (the disk refuses), `index` (a derived
    file), `checkpoint`, `missing` (a partition or all its segments), `leftover` (what a step cut short by a crash has
    left), `name` (a folder that is no topic), `range` (of engine `db`: a row says something else of its
    batch than the data).
    """

    kind: str
    file: str
    reason: str
    repair: str
    """The action of `repair_folder`."""
    position: int | None = None
    offset: int | None = None
    next_offset: int | None = None


class Report(msgspec.Struct):
    """Contents and problems of a data folder or a database; of a repair also what it did.

    `partitions` are topics and numbers, `records` the good records, `size_bytes` the bytes of all logs. `kept` are the
    files with the damaged bytes that a repair took out of logs; `left` is what is still wrong after it.
    """

    problems: list[Problem] = []
    partitions: list[tuple[str, int]] = []
    segments: int = 0
    records: int = 0
    size_bytes: int = 0
    kept: list[str] = []
    left: list[Problem] = []


class Look(msgspec.Struct):
    """One segment as it was read. `following` is where the next one begins; without `found` it could not be read.

    `size` is that of the file, once it was read without the zeros that wait for the next records.
    """

    base: int
    following: int | None
    path: str
    size: int
    found: Scan | None
    problems: list[Problem]


class Meter:
    """Adds up what was read, for `progress`."""

    def __init__(self, progress: Progress | None, bytes_total: int) -> None:
        self._progress = progress
        self._total = bytes_total
        self._done = 0

    def add(self, size: int) -> None:
        """Count `size` more bytes of records; a second look must not go past the end."""
        if self._progress is not None:
            self._done = min(self._done + size, self._total)
            self._progress(self._done, self._total)


def check_folder(
    files: FileSystem,
    data_folder: str,
    expected: Mapping[str, int] = NOTHING_EXPECTED,
    *,
    progress: Progress | None = None,
    live: bool = False,
) -> Report:
    """Read all that a data folder stores and return what is wrong with it. About 0.5 s for 100 MiB of small records.

    `expected` are the topics of engine `disk`, with how many partitions each has. `live` says that a server runs on
    the folder: files that look like leftovers may be its own work then.

    Raises:
        StorageError: this is no data folder, or the disk refuses it.
    """
    places, amiss = find_partitions(files, data_folder, expected)
    meter = make_meter(files, places, progress)
    report = Report()
    for topic, partition, folder in places:
        looks, problems = _look_twice(files, folder, meter, live=live)
        report.partitions.append((topic, partition))
        add_looks(report, looks, problems)
    if live:  # what was made or removed meanwhile looked wrong once
        again = find_partitions(files, data_folder, expected)[1]
        amiss = [problem for problem in amiss if problem.kind != "leftover" and problem in again]
    report.problems[:0] = amiss
    return report


def add_looks(report: Report, looks: list[Look], problems: list[Problem]) -> None:
    """Add what `look` returned of a partition to a report."""
    report.problems += all_problems(looks, problems)
    report.segments += len(looks)
    report.size_bytes += sum(each.size for each in looks)
    report.records += sum(each.found.index.record_count for each in looks if each.found is not None)


def all_problems(looks: list[Look], problems: list[Problem]) -> list[Problem]:
    """Return the problems of a partition and its segments."""
    return problems + [problem for each in looks for problem in each.problems]


def make_meter(files: FileSystem, places: list[tuple[str, int, str]], progress: Progress | None) -> Meter:
    """Return a meter that knows how many bytes of records there are."""
    total = 0
    if progress is not None:
        for _, _, folder in places:
            with contextlib.suppress(OSError):  # which a look at it names
                total += sum(_size(files, f"{folder}/{base_name(base)}.log") or 0 for base in find_bases(files, folder))
    return Meter(progress, total)


def find_partitions(
    files: FileSystem, data_folder: str, expected: Mapping[str, int] = NOTHING_EXPECTED
) -> tuple[list[tuple[str, int, str]], list[Problem]]:
    """Return topic, number and folder of each partition, and what is wrong with the names (DECISION 30 and 42).

    Raises:
        StorageError: there is no folder of topics, or the disk refuses it.
    """
    root = f"{data_folder}/{TOPICS}"
    if not files.exists(root):
        raise StorageError(f"{data_folder} is no data folder: it has no folder {TOPICS!r}")
    try:
        names = files.list_folder(root)
    except OSError as error:
        raise disk_error(error, f"reading {root}") from error
    places: list[tuple[str, int, str]] = []
    problems: list[Problem] = []
    for name in names:
        path = f"{root}/{name}"
        if name.startswith(REMOVED_PREFIX):
            problems.append(Problem("leftover", path, "the removal of a topic was cut short", "finish it"))
        elif name.startswith("."):
            continue  # the server does not look at it
        elif (topic := topic_of(name)) is None:
            problems.append(Problem("name", path, "no topic has a folder of this name", "nothing: move it away"))
        else:
            try:
                there = set(map(parse_number, files.list_folder(path)))
            except OSError as error:
                problems.append(unreadable(path, error))
                continue
            stored = max((number for number in there if number is not None), default=-1) + 1
            for number in range(max(stored, expected.get(topic, 0))):
                if number in there:
                    places.append((topic, number, f"{path}/{number}"))
                else:
                    problems.append(Problem("missing", f"{path}/{number}", "the partition is missing", "begin it anew"))
    return places, problems


def unreadable(path: str, error: OSError) -> Problem:
    """Return the problem that the disk refuses a file or folder."""
    return Problem("unreadable", path, f"the disk refuses it: {error.strerror or error}", MEND_FIRST)


def _look_twice(files: FileSystem, folder: str, meter: Meter, *, live: bool) -> tuple[list[Look], list[Problem]]:
    """Read a partition; where something looks wrong, read it again and believe what looks the same both times."""
    looks, problems = try_look(files, folder, meter, live=live)
    if live and (first := all_problems(looks, problems)):
        looks, problems = try_look(files, folder, meter, live=live)
        problems = [problem for problem in problems if problem in first]
        for each in looks:
            each.problems = [problem for problem in each.problems if problem in first]
    return looks, problems


def try_look(files: FileSystem, folder: str, meter: Meter, *, live: bool) -> tuple[list[Look], list[Problem]]:
    """Read as `look` does; a folder that the disk refuses is a problem."""
    try:
        return look(files, folder, meter, live=live)
    except OSError as error:
        return [], [unreadable(folder, error)]


def look(files: FileSystem, folder: str, meter: Meter, *, live: bool) -> tuple[list[Look], list[Problem]]:
    """Read the segments of a partition once; return them, and what is wrong with the partition as a whole.

    Raises:
        OSError: the disk refuses the folder.
    """
    # In this order: what a running server adds meanwhile is behind the sizes, and the checkpoint in front of them.
    known = checkpoints.note(files, folder).recall()
    problems = _leftovers(files, folder, known) if not live else []
    bases = find_bases(files, folder)
    sizes = {base: _size(files, f"{folder}/{base_name(base)}.log") for base in bases}
    if live:
        bases = [base for base in bases if sizes[base] is not None]  # retention took it a moment ago
    if not bases:
        problems.append(Problem("missing", folder, "the partition has no segment", "begin it anew"))
    looks = []
    for base, following in pairwise([*bases, None]):
        assert base is not None  # only the last `following` is
        each = Look(base, following, f"{folder}/{base_name(base)}", sizes[base] or 0, None, [])
        _look_at_segment(files, each, known, meter)
        path = "" if following is None else f"{folder}/{base_name(following)}.log"
        if following == bases[-1] and never_used(files, each, path, known):
            reason = "it was begun before the end of the segment in front of it was durable"
            problems.append(Problem("leftover", path, reason, "remove it"))
            each = Look(base, None, each.path, each.size, None, [])
            _look_at_segment(files, each, known, meter)
            looks.append(each)
            break
        looks.append(each)
    problems += _look_at_checkpoint(files, folder, known, looks)
    return looks, problems


def never_used(files: FileSystem, before: Look, last: str, known: Checkpoint | None) -> bool:
    """Return whether the last segment, with the log `last`, is one that a start removes: see recovery.py."""
    if before.found is None or before.following is None:
        return False
    amiss = before.found.overlap or before.found.next_offset < before.following
    return amiss and (known is None or known.segment < before.following) and _is_blank(files, last)


def _is_blank(files: FileSystem, path: str) -> bool:
    try:
        file = files.open(path, write=False)
    except OSError:
        return False
    try:
        return not written_size(file)
    finally:
        file.close()


def _look_at_segment(files: FileSystem, each: Look, known: Checkpoint | None, meter: Meter) -> None:
    try:
        _look_at_records(files, each, meter)
        if not each.problems:
            _look_at_derived(files, each, known)
    except OSError as error:
        each.problems.append(unreadable(f"{each.path}.log", error))


def _size(files: FileSystem, path: str) -> int | None:
    try:
        file = files.open(path, write=False)
    except OSError:
        return None
    try:
        return file.size()
    finally:
        file.close()


def _leftovers(files: FileSystem, folder: str, known: Checkpoint | None) -> list[Problem]:
    """Find what the next start would remove or finish (recovery.py)."""
    names = files.list_folder(folder)
    found = []
    for name in names:
        if (parsed := parse_base(name)) is None or parsed[1] != RESCUED_SUFFIX:
            continue
        reason, fix = "a rescue after a failed flush was cut short", "finish it"
        if is_foreign_rescue(parsed[0], known):
            reason, fix = "no rescue of this log: the records behind its offset were durable", "give it another name"
        found.append(Problem("leftover", f"{folder}/{name}", reason, fix))
    leftovers = find_leftovers(names).items()
    return found + [Problem("leftover", f"{folder}/{name}", why, "remove it") for name, why in leftovers]


def _look_at_records(files: FileSystem, each: Look, meter: Meter) -> None:
    path, following = f"{each.path}.log", each.following
    file = files.open(path, write=False)
    try:
        each.found = found = scan(
            file,
            0,
            each.base,
            gaps=following is not None,
            size=each.size,
            limit=OFFSET_MAX if following is None else following,
        )
    finally:
        file.close()
    meter.add(each.size)
    each.size = found.size
    for bad in found.bad:
        each.problems.append(Problem("damaged", path, bad.reason, CUT_OUT, bad.position, bad.offset, bad.next_offset))
    if following is not None and found.next_offset < following:
        kind, reason = (
            ("damaged", found.tail) if found.tail else ("ends_early", "the log ends before the next one begins")
        )
        each.problems.append(Problem(kind, path, reason, CUT_OUT, found.end, found.next_offset, following))
    elif found.overlap:
        reason = "the records from here on stand in the next segment too"
        each.problems.append(Problem("overlap", path, reason, "keep the bytes beside it and cut them", found.end))
    elif found.end < each.size:
        kind, fix = ("damaged", CUT_OUT) if following is not None else ("torn_tail", CUT_TAIL)
        each.problems.append(Problem(kind, path, found.tail or "no record", fix, found.end, found.next_offset))


def _look_at_derived(files: FileSystem, each: Look, known: Checkpoint | None) -> None:
    """Check the derived files against the log, byte for byte as far as a start believes them."""
    assert each.found is not None
    index, sealed = each.found.index, each.following is not None
    full = index.full_blocks
    needed = len(index)
    if known is not None and known.segment <= each.base:
        # A start reads what is behind the checkpoint anyway, and makes the entries again that a crash kept from it.
        needed = int(np.searchsorted(index.positions, known.position)) if known.segment == each.base else 0
    wanted = index.encode(0, len(index), 0, len(index) if sealed else full)
    blocks = wrong_sums(files, each)
    if blocks:
        reason = "the CRCs of its records are right and the sum of their block is not: the offset of one is wrong"
        each.problems += [Problem("offset", f"{each.path}.log", reason, CUT_OUT, index.positions[at]) for at in blocks]
        return
    for suffix, want in zip(DERIVED_SUFFIXES, wanted, strict=True):
        path, entry = each.path + suffix, BLOCK_ENTRY.size if suffix == ".blocks" else ENTRY_BYTES
        try:
            got = files.read_file(path)
        except FileNotFoundError:
            each.problems.append(Problem("index", path, "it is missing", REBUILD))
            continue
        except OSError as error:
            each.problems.append(unreadable(path, error))
            continue
        if got == want or (needed < len(index) and want.startswith(got) and len(got) >= min(needed, full) * entry):
            continue
        if got.startswith(want) and (_size(files, f"{each.path}.log") or 0) > each.size:
            continue  # the server has appended since
        each.problems.append(Problem("index", path, "it is not what the log gives", REBUILD))


def wrong_sums(files: FileSystem, each: Look) -> list[int]:
    """Return the blocks of a segment with gaps whose sums alone are not those in `.blocks`.

    Where offsets only rise, nothing else tells that one of them is wrong. In a segment without gaps, or when more than
    the sum differs, it is the derived file that is wrong.
    """
    assert each.found is not None
    index = each.found.index
    if each.following is None or index.record_count == each.following - each.base:
        return []
    try:
        parts = [files.read_file(each.path + suffix) for suffix in DERIVED_SUFFIXES]
    except OSError:  # whoever reads the derived files names it
        return []
    stored = decode(parts[0], parts[1], parts[2], each.size)
    if stored is None or (stored.positions, stored.timestamps, stored.greatest) != (
        index.positions, index.timestamps, index.greatest,
    ):  # fmt: skip
        return []
    pairs = enumerate(zip(stored.sums, index.sums, strict=True))
    return [block for block, sums in pairs if sums[0] != sums[1] and UNKNOWN_SUM not in sums]


def _look_at_checkpoint(
    files: FileSystem, folder: str, known: Checkpoint | None, looks: list[Look]
) -> Iterator[Problem]:
    path = f"{folder}/{checkpoints.NAME}"
    if known is None:
        reason = "it is damaged or of another format" if files.exists(path) else "it is missing"
        yield Problem("checkpoint", path, reason, REBUILD)
        return
    last = looks[-1].found if looks else None
    if last is not None and last.next_offset < known.durable_end:
        reason = f"records below offset {known.durable_end} were durable and are not there: the log's end is lost"
        yield Problem("checkpoint", path, reason, ACCEPT_LOSS, None, last.next_offset, known.durable_end)
        return
    each = next((each for each in looks if each.base == known.segment), None)
    if each is None:
        yield Problem("checkpoint", path, f"there is no segment {known.segment}", REBUILD)
    elif each.found is not None and not each.found.bad:
        positions = [*each.found.index.positions, each.found.end]
        block = int(np.searchsorted(positions, known.position))
        offset = each.found.next_offset if known.position == each.found.end else each.base + block * BLOCK_RECORDS
        if known.position not in positions or known.next_offset != offset:
            yield Problem("checkpoint", path, f"it does not fit {each.path}.log", REBUILD)
