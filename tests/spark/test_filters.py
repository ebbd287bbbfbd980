from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from babelbus.spark.filters import FilteringReader, is_exact, is_push_down, prune
from babelbus.spark.folder import FolderReach
from babelbus.spark.plan import Span
from babelbus.spark.reader import BatchReader
from babelbus.spark.schema import full_schema
from tests.spark.support import NOW, Folder, numbered

SPANS = [Span("news", 0, 0, 100, 1000), Span("news", 1, 50, 60, 100), Span("other", 0, 0, 10, 100)]


def pruned(*filters: Any, reach: Any = None) -> list[tuple[str, int, int, int]]:
    return [(one.topic, one.partition, one.start, one.end) for one in prune(SPANS, filters, reach)]


@pytest.mark.parametrize(
    ("one", "left"),
    [
        (EqualTo(("topic",), "other"), [("other", 0, 0, 10)]),
        (In(("topic",), ("other", "third")), [("other", 0, 0, 10)]),
        (EqualTo(("partition",), 1), [("news", 1, 50, 60)]),
        (EqualNullSafe(("partition",), 1), [("news", 1, 50, 60)]),
        (GreaterThan(("partition",), 0), [("news", 1, 50, 60)]),
        (LessThanOrEqual(("partition",), 0), [("news", 0, 0, 100), ("other", 0, 0, 10)]),
        (In(("partition",), (5, 6)), []),
        (EqualTo(("offset",), 55), [("news", 0, 55, 56), ("news", 1, 55, 56)]),
        (GreaterThan(("offset",), 57), [("news", 0, 58, 100), ("news", 1, 58, 60)]),
        (GreaterThanOrEqual(("offset",), 57), [("news", 0, 57, 100), ("news", 1, 57, 60)]),
        (LessThan(("offset",), 5), [("news", 0, 0, 5), ("other", 0, 0, 5)]),
        (LessThanOrEqual(("offset",), 5), [("news", 0, 0, 6), ("other", 0, 0, 6)]),
        (In(("offset",), (2, 4)), [("news", 0, 2, 5), ("other", 0, 2, 5)]),
    ],
)
def test_a_filter_leaves_the_offsets_that_it_lets_through(one: Any, left: list[tuple[str, int, int, int]]) -> None:
    assert pruned(one) == left
    assert is_exact(one) == (one != In(("offset",), (2, 4)))


def test_filters_that_say_nothing_of_places_are_left_to_spark() -> None:
    every = [(one.topic, one.partition, one.start, one.end) for one in SPANS]
    for one in (
        EqualTo(("key",), b"k"),
        EqualTo(("headers", "key"), "k"),
        Not(EqualTo(("partition",), 0)),
        IsNull(("offset",)),
        StringStartsWith(("topic",), "n"),
        EqualTo(("partition",), "1"),
        LessThan(("timestamp",), datetime.fromtimestamp(0, UTC)),
    ):
        assert pruned(one) == every
        assert not is_exact(one)
    assert is_exact(IsNotNull(("timestamp",)))
    assert not is_exact(IsNotNull(("key",)))


def test_a_time_cuts_off_what_is_in_front_and_spark_looks_again(folder: Folder) -> None:
    folder.add(numbered(100))
    reach = FolderReach(str(folder.path))
    spans = [Span("news", 0, 0, 100, 1000)]
    at = datetime.fromtimestamp((NOW + 40) / 1000, UTC)
    for one in (GreaterThan(("timestamp",), at), GreaterThanOrEqual(("timestamp",), at), EqualTo(("timestamp",), at)):
        assert [(span.start, span.end) for span in prune(spans, [one], reach)] == [(40, 100)]
        assert not is_exact(one)
    late = datetime.fromtimestamp((NOW + 100) / 1000, UTC)
    assert prune(spans, [GreaterThan(("timestamp",), late)], reach) == []


def test_only_a_reader_for_push_down_takes_filters(folder: Folder) -> None:
    # Spark refuses a reader that takes filters unless they are switched on.
    assert BatchReader.pushFilters is DataSourceReader.pushFilters
    assert not is_push_down()
    folder.add(numbered(3))
    reader = FilteringReader(folder.options(), full_schema(include_headers=False))
    exact, rest = EqualTo(("offset",), 1), EqualTo(("value",), b"1")
    assert list(reader.pushFilters([exact, rest])) == [rest]
    [task] = reader.partitions()
    assert [batch.column("offset").to_pylist() for batch in reader.read(task)] == [[1]]
