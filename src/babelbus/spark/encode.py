"""Arrow rows -> batches in the stored form, each for one topic and partition; rows that cannot be records stand aside.

A chunk of plain rows is encoded at once (`bulk`). Any other is looked at row by row: numbers are computed for all of
it, and what is paid for each row is a slice of its value, a CRC, and with headers a `Record`.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE, SUBJECT_HEADER
from babelbus.records.format import (
    HEADERS_MAX,
    RECORD_BYTES_MIN,
    RESERVED_HEADER_PREFIX,
    encode_batch,
    encode_headers,
    encode_keyed,
    encode_payloads,
)
from babelbus.records.record import Headers, Record, RecordBatch
from babelbus.spark.column_encoder import PlainRows, cut, numbers
from babelbus.spark.partitioner import ANY_PARTITION, Partitioner
from babelbus.spark.sink_options import SinkOptions

I64 = npt.NDArray[np.int64]
DEAD_REASON, DEAD_TOPIC, DEAD_TIME, DEAD_BYTES = b"dead-reason", b"dead-topic", b"dead-time", b"dead-bytes"
"""Headers of a dead letter, the first three as the bus's own have them; the last: the size of a cut value."""
NO_HEADERS = encode_headers(())
_DEAD_HEADERS = 4
_check_json = msgspec.json.Decoder().decode


class NoPlaceError(Exception):
    """Nothing can be published to a topic; the text says why."""


CountPartitions = Callable[[str], int]
"""Gives how many partitions a topic has, or -1 if the server is to choose one; raises `NoPlaceError`."""


class Piece(msgspec.Struct, frozen=True):
    """Batches of one topic and partition, in order."""

    topic: str
    partition: int
    batches: list[RecordBatch]


class _Rows:
    """The rows of one chunk; a row that cannot be a record has its reason in `refused`."""

    def __init__(self, batch: pa.RecordBatch, options: SinkOptions, now_ms: int) -> None:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self.count = batch.num_rows
        self.refused: dict[int, str] = {}
        self.values = _octets(columns["value"])
        self.keys = _octets(columns["key"]) if "key" in columns else None
        self.topics: list[str | None] | None = None if options.topic else columns["topic"].to_pylist()
        self.partitions = numbers(columns["partition"], ANY_PARTITION) if "partition" in columns else None
        self.headers: list[Headers] | None = self._read_headers(columns["headers"]) if "headers" in columns else None
        self.times: list[int] | None = (
            self._read_times(columns["timestamp"], now_ms) if "timestamp" in columns else None
        )
        self.subjects: list[str | None] | None = columns["subject"].to_pylist() if "subject" in columns else None
        self.now_ms = now_ms
        if options.to_state:
            self._to_state(options.topic)
        else:
            self._check_values()
            if self.subjects is not None:
                self._take_subjects(options.topic)
        self.sizes = self._measure()
        for row in np.flatnonzero(self.sizes > options.record_bytes_max).tolist():
            self._refuse(row, f"it has {self.sizes[row]} bytes, the most are {options.record_bytes_max}")

    def _refuse(self, row: int, reason: str) -> None:
        self.refused.setdefault(row, reason)

    def _read_headers(self, column: pa.Array) -> list[Headers]:
        found: list[Headers] = []
        for row, entries in enumerate(column.to_pylist()):
            if not entries:
                found.append(())
                continue
            named = [(one["key"], one["value"]) for one in entries if one is not None and one["key"] is not None]
            headers = tuple((name.encode(), value) for name, value in named)
            own = next((name for name, _ in headers if name.startswith(RESERVED_HEADER_PREFIX)), None)
            if len(named) < len(entries):
                self._refuse(row, "a header has no key")
            elif own is not None:
                self._refuse(row, f"header {own.decode()!r}: keys that begin with '$' are the server's own")
            elif len(headers) >= HEADERS_MAX:  # the server adds one
                self._refuse(row, f"it has {len(headers)} headers, the most are {HEADERS_MAX - 1}")
            found.append(headers)
        return found

    def _read_times(self, column: pa.Array, now_ms: int) -> list[int]:
        micros = numbers(column.cast(pa.int64()), now_ms * 1000)
        times = micros // 1000
        for row in np.flatnonzero(times <= 0).tolist():
            self._refuse(row, "its timestamp is not after 1970-01-01 00:00 UTC")
        found: list[int] = np.maximum(times, 1).tolist()
        return found

    def _check_values(self) -> None:
        if None not in self.values:
            return
        for row, value in enumerate(self.values):
            if value is None and (self.keys is None or self.keys[row] is None):
                self._refuse(row, "its value is null, which only removes a key, and it has none")

    def _take_subjects(self, topic: str) -> None:
        """Keep subjects as the bus keeps them: in a header, unless they are the topic's name."""
        assert self.subjects is not None
        headers = self.headers or [()] * self.count
        self.headers = headers
        for row, subject in enumerate(self.subjects):
            its = topic or (self.topics[row] if self.topics else None)
            if subject is None or subject == its:
                continue
            if its is not None and not subject.startswith(f"{its}/"):
                self._refuse(
                    row,
                    f"its subject {subject!r} is not below its topic {its!r}: drop the column subject, as with"
                    f" .drop('subject'), or give subjects that begin with '{its}/'",
                )
            headers[row] = (*headers[row], (SUBJECT_HEADER, subject.encode()))

    def _to_state(self, topic: str) -> None:
        """Build the events that a topic with retain="last" keeps: the key is the subject, the value is JSON."""
        assert self.keys is not None
        self.headers = []
        prefix, own = f"{topic}/".encode(), topic.encode()
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            named: Headers = ((CONTENT_TYPE, JSON_TYPE),)
            if key is None or not (key.startswith(prefix) or key == own):
                shown = None if key is None else key.decode("utf-8", "replace")
                self._refuse(row, f"its key {shown!r} is neither {topic!r} nor below it")
            elif key != own:
                named = ((SUBJECT_HEADER, key), *named)
            if value is not None:
                try:
                    _check_json(value)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    self._refuse(row, f"its value is no JSON: {error}")
            self.headers.append(named)

    def _measure(self) -> I64:
        sizes = _sizes(self.values) + RECORD_BYTES_MIN
        if self.keys is not None:
            sizes += _sizes(self.keys)
        if self.headers is not None:
            sizes += np.fromiter(
                (sum(8 + len(name) + len(value or b"") for name, value in one) for one in self.headers),
                np.int64,
                self.count,
            )
        return sizes


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
        plain = self._encode_plain(batch, now_ms)
        if plain is not None:
            yield from plain
            return
        rows = _Rows(batch, self._options, now_ms)
        pieces = [piece for topic, chosen in self._by_topic(rows) for piece in self._of_topic(rows, topic, chosen)]
        if rows.refused:
            yield from self._bury(rows)
        yield from pieces

    def _encode_plain(self, batch: pa.RecordBatch, now_ms: int) -> list[Piece] | None:
        """Return a chunk of plain rows; `None` when they are not, or something is wrong with one of them."""
        rows = PlainRows.find(batch, self._options, now_ms)
        if rows is None:
            return None
        try:
            count = self._count_partitions(rows.topic)
        except NoPlaceError:
            return None
        if count < 0:
            return [Piece(rows.topic, ANY_PARTITION, rows.encode())]
        targets = rows.targets(count, self._partitioner)
        if targets is None:
            return None
        found = np.unique(targets).tolist()
        if len(found) == 1:
            return [Piece(rows.topic, found[0], rows.encode())]
        return [Piece(rows.topic, number, rows.encode(np.flatnonzero(targets == number))) for number in found]

    def _by_topic(self, rows: _Rows) -> Iterator[tuple[str, I64]]:
        good = np.ones(rows.count, bool)
        if rows.topics is not None:
            for row, topic in enumerate(rows.topics):
                if topic is None:
                    rows.refused[row] = "its topic is null"
        good[list(rows.refused)] = False
        chosen = np.flatnonzero(good)
        if rows.topics is None:
            if len(chosen):
                yield self._options.topic, chosen
            return
        by_name: dict[str, list[int]] = {}
        for row in chosen.tolist():
            topic = rows.topics[row]
            assert topic is not None
            by_name.setdefault(topic, []).append(row)
        for topic, found in by_name.items():
            yield topic, np.array(found, np.int64)

    def _of_topic(self, rows: _Rows, topic: str, chosen: I64) -> Iterator[Piece]:
        try:
            count = self._count_partitions(topic)
        except NoPlaceError as error:
            for row in chosen.tolist():
                rows.refused[row] = str(error)
            return
        if count < 0:
            yield Piece(topic, ANY_PARTITION, list(_encode(rows, chosen)))
            return
        named = rows.partitions
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
            topic, len(chosen), count, named, None if keys is None else lambda: [keys[row] for row in chosen.tolist()]
        )
        for partition in np.unique(targets).tolist():
            yield Piece(topic, partition, list(_encode(rows, chosen[targets == partition])))

    def _bury(self, rows: _Rows) -> Iterator[Piece]:
        """Return the dead letters."""
        from babelbus.spark.sink_errors import RowRefusedError

        topic, reason = self._options.dead_letter_topic, next(iter(rows.refused.values()))
        if not topic:
            raise RowRefusedError(reason, "with the option deadLetterTopic such rows go there")
        try:
            count = self._count_partitions(topic)
        except NoPlaceError as error:
            raise RowRefusedError(reason, f"option deadLetterTopic: {error}") from None
        letters = [self._letter(rows, row, reason) for row, reason in sorted(rows.refused.items())]
        self.dead += len(letters)
        sizes = np.array([len(one.payload or b"") + len(one.key or b"") + RECORD_BYTES_MIN for one in letters])
        batches = [encode_batch(letters[start:stop]) for start, stop in cut(sizes)]
        yield Piece(topic, ANY_PARTITION if count < 0 else self._partitioner.next(count), batches)

    def _letter(self, rows: _Rows, row: int, reason: str) -> Record:
        """Return a row as a record that can be stored whatever it is, with the reason."""
        room = self._options.record_bytes_max // 4
        value, key = rows.values[row], rows.keys[row] if rows.keys else None
        its = self._options.topic or (rows.topics[row] if rows.topics else None)
        ours: list[tuple[bytes, bytes | None]] = [
            (DEAD_REASON, reason.encode("utf-8", "replace")[:1024]),
            (DEAD_TIME, b"%d" % rows.now_ms),
        ]
        if its is not None:
            ours.append((DEAD_TOPIC, its.encode()[:1024]))
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
        time_ms = rows.times[row] if rows.times else rows.now_ms
        # Without a payload it would be a tombstone: what compaction removes is no dead letter.
        return Record(value or b"", key, (*kept, *ours), time_ms)


def _encode(rows: _Rows, chosen: I64) -> Iterator[RecordBatch]:
    """Yield some rows in the stored form, in batches of about `BATCH_BYTES`."""
    whole = len(chosen) == rows.count
    sizes = rows.sizes if whole else rows.sizes[chosen]
    numbers = None if whole else chosen.tolist()
    values = rows.values if numbers is None else [rows.values[row] for row in numbers]
    keys = rows.keys if rows.keys is None or numbers is None else [rows.keys[row] for row in numbers]
    headers = rows.headers if rows.headers is None or numbers is None else [rows.headers[row] for row in numbers]
    times = rows.times if rows.times is None or numbers is None else [rows.times[row] for row in numbers]
    for start, stop in cut(sizes):
        part = slice(start, stop)
        yield _encode_batch(
            values[part],
            None if keys is None else keys[part],
            None if headers is None else headers[part],
            [rows.now_ms] * (stop - start) if times is None else times[part],
        )


def _encode_batch(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers] | None,
    times: list[int],
) -> RecordBatch:
    """Return one batch, in the fastest of three ways that can do it."""
    if None not in values and not (headers is not None and any(headers)):
        if keys is None:
            return encode_payloads(values, times)  # type: ignore[arg-type]  # no None among them
        if None not in keys and times.count(times[0]) == len(times):
            return encode_keyed(keys, values, NO_HEADERS, times[0], 0)  # type: ignore[arg-type]  # the same
    nothing = [None] * len(values)
    return encode_batch(
        [
            Record(value, key, named, time)
            for value, key, named, time in zip(
                values, keys or nothing, headers or [()] * len(values), times, strict=True
            )
        ]
    )


def _octets(column: pa.Array) -> list[bytes | None]:
    """Return a column of strings or bytes as bytes."""
    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return found


def _sizes(values: Sequence[bytes | None]) -> I64:
    try:
        return np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]  # None raises
    except TypeError:
        return np.fromiter((len(value or b"") for value in values), np.int64, len(values))
