"""Filter push-down: conditions on topic, partition, offset and timestamp choose what is read at all.

Spark offers filters only with `spark.sql.python.filterPushdown.enabled`, which is off by default, and then refuses
every reader that has a `pushFilters`. So the class that has one is returned only in the processes that push filters
down: Spark starts them with a module of their own. If Spark renames that module, nothing breaks: filters are then
applied by Spark alone, and a test of ours fails.
"""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from babelbus.spark.available_offsets import Survey
from babelbus.spark.plan import Span
from babelbus.spark.reader import BatchReader, plan_tasks
from babelbus.spark.record_source import Reach, open_reach

_PUSH_DOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
_NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp"})
_COMPARISONS = EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual


def is_push_down() -> bool:
    """Return whether this process is one that pushes filters down."""
    main = getattr(sys.modules["__main__"], "__spec__", None)  # where Spark runs no daemon that imports the module
    return _PUSH_DOWN_WORKER in sys.modules or getattr(main, "name", "") == _PUSH_DOWN_WORKER


class FilteringReader(BatchReader):
    """A batch reader that Spark hands its filters to."""

    _filters: Sequence[Filter] = ()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Keep the filters that choose what is read, and return the filters that Spark must still apply."""
        self._filters = [one for one in filters if _column(one) in _NEVER_NULL]
        return [one for one in filters if not is_exact(one)]

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks, without the records that no filter accepts."""
        reach = open_reach(self._options.place)
        spans = prune(Survey(self._options, reach).batch(), self._filters, reach)
        return plan_tasks(self._options, spans)


def _column(one: Filter) -> str:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


def is_exact(one: Filter) -> bool:
    """Return whether `prune` leaves nothing of what a filter refuses; times are found a block at a time."""
    column = _column(one)
    if isinstance(one, IsNotNull):
        return column in _NEVER_NULL
    if column == "topic":
        return isinstance(one, EqualTo | EqualNullSafe | In) and _is_known(one)
    exact = _COMPARISONS | In if column == "partition" else _COMPARISONS
    return column in ("partition", "offset") and isinstance(one, exact) and _is_known(one)


def _is_known(one: Any) -> bool:
    values = one.value if isinstance(one, In) else (one.value,)
    return all(isinstance(value, str if _column(one) == "topic" else int) for value in values)


def prune(spans: list[Span], filters: Iterable[Filter], reach: Reach) -> list[Span]:
    """Return the spans without what the filters refuse for certain."""
    for one in filters:
        if _column(one) == "timestamp":
            spans = [kept for span in spans for kept in _by_time(span, one, reach)]
        elif not isinstance(one, IsNotNull) and is_exact(one):
            spans = [kept for span in spans for kept in _by_number(span, one)]
        elif isinstance(one, In) and _column(one) == "offset" and _is_known(one) and one.value:
            low, high = min(one.value), max(one.value) + 1
            spans = [kept for span in spans for kept in _cut(span, low, high)]
    return spans


def _by_number(span: Span, one: Any) -> list[Span]:
    column, value = _column(one), one.value
    if column == "topic" or isinstance(one, In):
        have: Any = span.topic if column == "topic" else span.partition
        return [span] if have in (value if isinstance(one, In) else (value,)) else []
    low, high = _range(one, value)
    if column == "offset":
        return _cut(span, span.start if low is None else low, span.end if high is None else high)
    number = span.partition
    return [span] if (low is None or number >= low) and (high is None or number < high) else []


def _range(one: Any, value: int) -> tuple[int | None, int | None]:
    """Return the first number that a comparison lets through, and the one after the last."""
    match one:
        case GreaterThan():
            return value + 1, None
        case GreaterThanOrEqual():
            return value, None
        case LessThan():
            return None, value
        case LessThanOrEqual():
            return None, value + 1
        case _:
            return value, value + 1


def _by_time(span: Span, one: Any, reach: Reach) -> list[Span]:
    """Begin at the first record that is late enough; nothing can be left out at the end, for times need not rise."""
    if not isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual) or not isinstance(one.value, datetime):
        return [span]
    begin = reach.find_time(span.topic, span.partition, int(one.value.timestamp() * 1000))
    return [] if begin is None else _cut(span, begin, span.end)


def _cut(span: Span, start: int, end: int) -> list[Span]:
    first, last = max(span.start, start), min(span.end, end)
    if last <= first:
        return []
    return [Span(span.topic, span.partition, first, last, span.size_bytes * (last - first) // len(span))]
