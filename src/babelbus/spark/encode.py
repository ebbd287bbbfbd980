"""Arrow rows -> batches in the stored form, each for one topic and partition; rows that cannot be records stand aside.

Columns are checked and encoded a chunk at a time; only headers, subjects and values of the state are read row by row.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from babelbus.errors import UNREADABLE
from babelbus.records.arrow import encode_columns
from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE, SUBJECT_HEADER
from babelbus.records.format import HEADERS_MAX, RECORD_BYTES_MIN, RESERVED_HEADER_PREFIX, encode_batch
from babelbus.records.record import Headers, Record, RecordBatch
from babelbus.spark.decode import texts
from babelbus.spark.errors import RowRefusedError
from babelbus.spark.sink_options import Partitioning, SinkOptions

I64 = npt.NDArray[np.int64]
BATCH_BYTES = 2 * 2**20
BATCH_RECORDS = 2**15
DEAD_REASON, DEAD_TOPIC, DEAD_TIME, DEAD_BYTES = b"dead-reason", b"dead-topic", b"dead-time", b"dead-bytes"
"""Headers of a dead letter, the first three as the bus's own have them; the last: the size of a cut value."""
_DEAD_HEADERS = 4
ANY_PARTITION = -1
"""Partition number of a row that names no partition."""
_RAW_HEADERS = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
GetKeys = Callable[[], Sequence[bytes | None]]

_check_json = msgspec.json.Decoder().decode


class NoPlaceError(Exception):
    """Nothing can be published to a topic; the text says why."""


CountPartitions = Callable[[str, int], int]
"""Returns how many partitions a topic has, or -1 if the server is to choose one; raises `NoPlaceError`.

The second argument is how many there must be for the rows: where fewer are remembered, the server is asked again.
"""


class Piece(msgspec.Struct, frozen=True):
    """Batches of one topic and partition, in order."""

    topic: str
    partition: int
    batches: list[RecordBatch]


class Partitioner:
    """Chooses for the rows of one task, chunk after chunk: the same chunks go to the same partitions each time.

    A row goes to the partition that it names. For the other rows, `key` chooses the partition by the CRC-32 of the key,
    as the server and the command line do, so that a key is in one partition whichever client published it. The rows of
    a chunk without a key go to one partition, those of the next chunk to the next. `spread` assigns rows one by one.

    Args:
        turn: the first partition of a round; tasks have different ones.
    """

    def __init__(self, kind: Partitioning = "key", turn: int = 0) -> None:
        self._kind = kind
        self._first = self._turn = turn
        self._dealt: dict[str, int] = {}
        """Number of rows that were assigned, by topic."""

    def next(self, count: int) -> int:
        """Return the partition whose turn it is, of `count`."""
        self._turn += 1
        return self._turn % count

    def choose(self, topic: str, rows: int, count: int, named: I64 | None, keys: GetKeys | None) -> I64:
        """Return the partitions of some rows for a topic that has `count`.

        Args:
            named: what the rows say themselves, or `ANY_PARTITION`; it is not looked at whether there are such.
            keys: gives the keys of the rows.
        """
        if self._kind == "spread":
            return self._deal(topic, rows, count, named)
        turn = self.next(count)
        targets = np.full(rows, turn, np.int64) if keys is None or count == 1 else _of_keys(keys(), count, turn)
        return targets if named is None else np.where(named == ANY_PARTITION, targets, named)

    def _deal(self, topic: str, rows: int, count: int, named: I64 | None) -> I64:
        free = np.ones(rows, bool) if named is None else named == ANY_PARTITION
        dealt, more = self._dealt.get(topic, 0), int(free.sum())
        self._dealt[topic] = dealt + more
        targets = np.zeros(rows, np.int64) if named is None else named.copy()
        targets[free] = (self._first + dealt + np.arange(more)) % count
        return targets


def _of_keys(keys: Sequence[bytes | None], count: int, without: int) -> I64:
    """Return the partitions of keys, `without` for none."""
    crc32 = zlib.crc32
    try:
        return np.fromiter(map(crc32, keys), np.int64, len(keys)) % count  # type: ignore[arg-type]  # None raises
    except TypeError:
        return np.fromiter((without if key is None else crc32(key) % count for key in keys), np.int64, len(keys))


class _Rows:
    """The rows of one chunk; a row that cannot be a record has its reason in `refused`."""

    def __init__(self, batch: pa.RecordBatch, options: SinkOptions, now_ms: int) -> None:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self.count = batch.num_rows
        self.refused: dict[int, str] = {}
        self.values = columns["value"].cast(pa.binary())
        self.keys = columns["key"].cast(pa.binary()) if "key" in columns else None
        self.topics = None if options.topic else self._read_texts(columns["topic"], "topic")
        self.partitions = _numbers(columns["partition"], ANY_PARTITION) if "partition" in columns else None
        self.headers: list[Headers] | None = None
        if "headers" in columns and columns["headers"].null_count < self.count:
            self.headers = self._read_headers(columns["headers"])
        self.now_ms = now_ms
        self.times = np.full(self.count, now_ms, np.int64)
        if "timestamp" in columns:
            self.times = _numbers(columns["timestamp"].cast(pa.int64()), now_ms * 1000) // 1000
            self._refuse(self.times <= 0, "its timestamp is not after 1970-01-01 00:00 UTC")
            self.times = np.maximum(self.times, 1)
        if options.to_state:
            self._to_state(options.topic)
        else:
            keyless = True if self.keys is None else self.keys.is_null()
            bare = pc.and_(self.values.is_null(), keyless).to_numpy(zero_copy_only=False)
            self._refuse(bare, "its value is null, which only removes a key, and it has none")
            if "subject" in columns:
                self._take_subjects(self._read_texts(columns["subject"], "subject"), options.topic or self.topics)
        self.sizes = self._measure()
        for row in np.flatnonzero(self.sizes > options.record_bytes_max).tolist():
            self.refused.setdefault(row, f"it has {self.sizes[row]} bytes, the most are {options.record_bytes_max}")

    def _refuse(self, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            self.refused.setdefault(row, reason)

    def _read_texts(self, column: pa.Array, name: str) -> pa.Array:
        """Return a column of texts, and refuse the rows that are not UTF-8: Spark's strings can be any bytes."""
        given = column.cast(pa.binary())
        read = texts(given)
        other = pc.fill_null(pc.not_equal(read.cast(pa.binary()), given), False)
        self._refuse(other.to_numpy(zero_copy_only=False), f"its {name} is not UTF-8")
        return read

    def _read_headers(self, column: pa.Array) -> list[Headers]:
        rows: list[Headers] = []
        for row, entries in enumerate(column.cast(_RAW_HEADERS).to_pylist()):
            named = [entry for entry in entries or () if entry is not None and entry["key"] is not None]
            headers = tuple((entry["key"], entry["value"]) for entry in named)
            own = next((name for name, _ in headers if name.startswith(RESERVED_HEADER_PREFIX)), None)
            if len(named) < len(entries or ()):
                self.refused.setdefault(row, "a header has no key")
            elif not all(_is_utf8(name) for name, _ in headers):
                self.refused.setdefault(row, "the key of a header is not UTF-8")
            elif own is not None:
                self.refused.setdefault(row, f"header {own.decode()!r}: keys that begin with '$' are the server's own")
            elif len(headers) >= HEADERS_MAX:  # the server adds one
                self.refused.setdefault(row, f"it has {len(headers)} headers, the most are {HEADERS_MAX - 1}")
            rows.append(headers)
        return rows

    def _take_subjects(self, subjects: pa.Array, topics: pa.Array | str) -> None:
        """Keep subjects as the bus keeps them: in a header, unless they are the topic's name."""
        others = pc.fill_null(pc.not_equal(subjects, topics), subjects.is_valid())
        for row in np.flatnonzero(others.to_numpy(zero_copy_only=False)).tolist():
            subject, topic = subjects[row].as_py(), topics if isinstance(topics, str) else topics[row].as_py()
            if topic is not None and not subject.startswith(f"{topic}/"):
                self.refused.setdefault(
                    row,
                    f"its subject {subject!r} is not below its topic {topic!r}: drop the column subject, as with"
                    f" .drop('subject'), or give subjects that begin with '{topic}/'",
                )
            if self.headers is None:
                self.headers = [()] * self.count
            self.headers[row] = (*self.headers[row], (SUBJECT_HEADER, subject.encode()))

    def _to_state(self, topic: str) -> None:
        """Build the events that a topic with retain="last" keeps: the key is the subject, the value is JSON."""
        assert self.keys is not None
        self._read_texts(self.keys, "key")
        self.headers = []
        prefix, own = f"{topic}/".encode(), topic.encode()
        for row, (key, value) in enumerate(zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True)):
            named: Headers = ((CONTENT_TYPE, JSON_TYPE),)
            if key is None or not (key.startswith(prefix) or key == own):
                shown = None if key is None else key.decode("utf-8", "replace")
                self.refused.setdefault(row, f"its key {shown!r} is neither {topic!r} nor below it")
            elif key != own:
                named = ((SUBJECT_HEADER, key), *named)
            if value is not None:
                try:
                    _check_json(value)
                except UNREADABLE as error:
                    self.refused.setdefault(row, f"its value is no JSON: {error}")
            self.headers.append(named)

    def _measure(self) -> I64:
        sizes = _lengths(self.values) + RECORD_BYTES_MIN
        if self.keys is not None:
            sizes += _lengths(self.keys)
        if self.headers is not None:
            sizes += np.array(
                [sum(8 + len(name) + len(value or b"") for name, value in headers) for headers in self.headers]
            )
        return sizes

    def encode(self, chosen: I64) -> Iterator[RecordBatch]:
        """Yield some rows in batches of about `BATCH_BYTES`."""
        values, keys, times, sizes, headers = self.values, self.keys, self.times, self.sizes, self.headers
        if len(chosen) < self.count:
            taken = pa.array(chosen)
            values, keys = values.take(taken), None if keys is None else keys.take(taken)
            times, sizes = times[chosen], sizes[chosen]
            headers = None if headers is None else [headers[row] for row in chosen.tolist()]
        for start, stop in _cut(sizes):
            part_values = values.slice(start, stop - start)
            part_keys = None if keys is None else keys.slice(start, stop - start)
            if headers is None or not any(headers[start:stop]):
                yield encode_columns(part_values, part_keys, times[start:stop])
                continue
            fields = (
                part_values.to_pylist(),
                [None] * (stop - start) if part_keys is None else part_keys.to_pylist(),
                headers[start:stop],
                times[start:stop].tolist(),
            )
            yield encode_batch([Record(*record) for record in zip(*fields, strict=True)])


class Encoder:
    """Encodes the rows of one task.

    Args:
        count_partitions: asks for a topic's partitions.
        turn: where the records that no key sends anywhere begin to go round the partitions.
    """

    def __init__(self, options: SinkOptions, count_partitions: CountPartitions, *, turn: int = 0) -> None:
        self._options = options
        self._count_partitions = count_partitions
        self._partitioner = Partitioner(options.partitioner, turn)
        self.dead = 0
        """Number of rows that became dead letters."""

    def encode(self, batch: pa.RecordBatch, now_ms: int) -> Iterator[Piece]:
        """Yield the records of a chunk. `now_ms` is the time of those that have none.

        Raises:
            RowRefusedError: a row cannot be a record, and there is no dead-letter topic.
        """
        if not batch.num_rows:
            return
        rows = _Rows(batch, self._options, now_ms)
        pieces = [piece for topic, chosen in self._by_topic(rows) for piece in self._of_topic(rows, topic, chosen)]
        if rows.refused:
            yield from self._bury(rows)
        yield from pieces

    def _by_topic(self, rows: _Rows) -> Iterator[tuple[str, I64]]:
        names, numbers = [self._options.topic], np.zeros(rows.count, np.int64)
        if rows.topics is not None:
            encoded = rows.topics.dictionary_encode()
            names, numbers = encoded.dictionary.to_pylist(), _numbers(encoded.indices, -1)
            rows.refused |= dict.fromkeys(np.flatnonzero(numbers < 0).tolist(), "its topic is null")
        good = np.ones(rows.count, bool)
        good[list(rows.refused)] = False
        for number, topic in enumerate(names):
            chosen = np.flatnonzero(good & (numbers == number))
            if len(chosen):
                yield topic, chosen

    def _of_topic(self, rows: _Rows, topic: str, chosen: I64) -> Iterator[Piece]:
        named = rows.partitions
        try:
            count = self._count_partitions(topic, 0 if named is None else int(named[chosen].max()) + 1)
        except NoPlaceError as error:
            rows.refused |= dict.fromkeys(chosen.tolist(), str(error))
            return
        if count < 0:
            yield Piece(topic, ANY_PARTITION, list(rows.encode(chosen)))
            return
        if named is not None:
            wrong = (named[chosen] < ANY_PARTITION) | (named[chosen] >= count)
            for row in chosen[wrong].tolist():
                rows.refused[row] = (
                    f"topic {topic!r} has partitions 0 to {count - 1}, not {named[row]}: drop the column partition, as"
                    f" with .drop('partition'), or add partitions to the topic"
                )
            chosen = chosen[~wrong]
            named = named[chosen]
        keys = rows.keys
        targets = self._partitioner.choose(
            topic, len(chosen), count, named, None if keys is None else keys.take(pa.array(chosen)).to_pylist
        )
        for partition in np.unique(targets).tolist():
            yield Piece(topic, partition, list(rows.encode(chosen[targets == partition])))

    def _bury(self, rows: _Rows) -> Iterator[Piece]:
        """Return the dead letters."""
        topic, reason = self._options.dead_letter_topic, next(iter(rows.refused.values()))
        if not topic:
            raise RowRefusedError(reason, "with the option deadLetterTopic such rows go there")
        try:
            count = self._count_partitions(topic, 0)
        except NoPlaceError as error:
            raise RowRefusedError(reason, f"option deadLetterTopic: {error}") from None
        letters = [self._letter(rows, row, reason) for row, reason in sorted(rows.refused.items())]
        self.dead += len(letters)
        sizes = np.array([len(letter.payload or b"") + len(letter.key or b"") + RECORD_BYTES_MIN for letter in letters])
        batches = [encode_batch(letters[start:stop]) for start, stop in _cut(sizes)]
        yield Piece(topic, ANY_PARTITION if count < 0 else self._partitioner.next(count), batches)

    def _letter(self, rows: _Rows, row: int, reason: str) -> Record:
        """Return a row as a record that can be stored whatever it is, with the reason."""
        room = self._options.record_bytes_max // 4
        value, key = rows.values[row].as_py(), None if rows.keys is None else rows.keys[row].as_py()
        topic = self._options.topic if rows.topics is None else rows.topics[row].as_py()
        ours: list[tuple[bytes, bytes | None]] = [
            (DEAD_REASON, reason.encode("utf-8", "replace")[:1024]),
            (DEAD_TIME, b"%d" % rows.now_ms),
        ]
        if topic is not None:
            ours.append((DEAD_TOPIC, topic.encode()[:1024]))
        if value is not None and len(value) > room:
            ours.append((DEAD_BYTES, b"%d" % len(value)))
            value = value[:room]
        kept: list[tuple[bytes, bytes | None]] = []
        for name, content in rows.headers[row] if rows.headers else ():
            room -= 8 + len(name) + len(content or b"")
            full = len(kept) >= HEADERS_MAX - 1 - _DEAD_HEADERS
            if room < 0 or full or name.startswith(RESERVED_HEADER_PREFIX):
                continue
            kept.append((name, content))
        if key is not None:
            key = key[: self._options.record_bytes_max // 4]
        # Without a payload it would be a tombstone: what compaction removes is no dead letter.
        return Record(value or b"", key, (*kept, *ours), int(rows.times[row]))


def _cut(sizes: I64) -> Iterator[tuple[int, int]]:
    """Yield where batches begin and end: of `BATCH_BYTES` and `BATCH_RECORDS` at the most, or one record."""
    edges = np.concatenate(([0], np.cumsum(sizes)))
    start, count = 0, len(sizes)
    while start < count:
        stop = int(np.searchsorted(edges, edges[start] + BATCH_BYTES, "right")) - 1
        stop = min(max(stop, start + 1), start + BATCH_RECORDS, count)
        yield start, stop
        start = stop


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _numbers(column: pa.Array, default: int) -> I64:
    """Return a column of numbers; `default` replaces null."""
    return np.asarray(column.cast(pa.int64()).fill_null(default).to_numpy(zero_copy_only=False), np.int64)


def _lengths(column: pa.Array) -> I64:
    return _numbers(pc.binary_length(column), 0)
