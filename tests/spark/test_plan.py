import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.spark.plan import Span, limit, make_tasks

spans = st.lists(
    st.builds(
        lambda number, start, count, size: Span("t", number, start, start + count, count * size),
        st.integers(0, 5),
        st.integers(0, 1000),
        st.integers(0, 5000),
        st.integers(1, 300),
    ),
    max_size=12,
)


@given(spans, st.integers(1, 10**6), st.none() | st.integers(1, 3000), st.none() | st.integers(1, 20))
def test_the_tasks_together_read_each_span_once(
    wanted: list[Span], target_bytes: int, records_max: int | None, tasks_min: int | None
) -> None:
    tasks = make_tasks(wanted, target_bytes=target_bytes, records_max=records_max, tasks_min=tasks_min)
    pieces = [piece for task in tasks for piece in task]
    joined: list[tuple[int, int, int]] = []
    for piece in pieces:
        if joined and joined[-1][0] == piece.partition and joined[-1][2] == piece.start:
            joined[-1] = (piece.partition, joined[-1][1], piece.end)
        else:
            joined.append((piece.partition, piece.start, piece.end))
    flat = [offset for number, start, end in joined for offset in ((number, start), (number, end))]
    expected = [(span.partition, offset) for span in wanted if len(span) for offset in (span.start, span.end)]
    merged = [at for at in flat if flat.count(at) == 1]
    assert merged == [at for at in expected if expected.count(at) == 1]
    assert sum(map(len, pieces)) == sum(map(len, wanted))
    assert all(len(piece) for piece in pieces)
    if records_max is not None:
        assert all(sum(map(len, task)) <= records_max for task in tasks)


def test_a_large_partition_is_cut_and_small_ones_share_a_task() -> None:
    large = Span("t", 0, 100, 1100, 10_000)
    assert [(one.start, one.end) for [one] in make_tasks([large], target_bytes=2500)] == [
        (100, 350),
        (350, 600),
        (600, 850),
        (850, 1100),
    ]
    small = [Span("t", number, 0, 10, 100) for number in range(10)]
    assert [len(task) for task in make_tasks(small, target_bytes=400)] == [4, 4, 2]


def test_at_least_so_many_tasks_as_asked_for() -> None:
    assert len(make_tasks([Span("t", 0, 0, 1000, 1000)], target_bytes=2**20, tasks_min=7)) == 7


def test_no_core_is_idle_while_others_read_much() -> None:
    def tasks(megabytes: int, cores: int) -> int:
        return len(make_tasks([Span("t", 0, 0, 10**6, megabytes * 2**20)], target_bytes=128 * 2**20, cores=cores))

    assert [tasks(size, 2) for size in (1, 8, 16, 100, 257, 640)] == [1, 1, 2, 2, 4, 6]
    assert [tasks(size, 4) for size in (1, 16, 24, 100, 640)] == [1, 2, 3, 4, 8]


def test_a_limit_is_shared_in_proportion_to_what_waits() -> None:
    start = {("t", 0): 0, ("t", 1): 50, ("t", 2): 7}
    end = {("t", 0): 900, ("t", 1): 150, ("t", 2): 7}
    assert limit(start, end, 100) == {("t", 0): 90, ("t", 1): 60, ("t", 2): 7}
    assert limit(start, end, 1000) == end
    assert limit(start, end, 1000, {("t", 0): 10.0, ("t", 1): 10.0, ("t", 2): 1.0}) == {
        ("t", 0): 90,
        ("t", 1): 60,
        ("t", 2): 7,
    }


def test_each_partition_that_has_something_gets_at_least_one_record() -> None:
    start = {("t", n): 0 for n in range(5)}
    end = {("t", n): 1000 if n == 0 else 1 for n in range(5)}
    assert limit(start, end, 2) == {("t", 0): 1, **{("t", n): 1 for n in range(1, 5)}}


@pytest.mark.parametrize("most", [1, 7, 50, 1_000])
def test_one_partition_gets_exactly_its_limit(most: int) -> None:
    for waiting in range(most, 4_000):
        assert limit({("t", 0): 0}, {("t", 0): waiting}, most) == {("t", 0): most}
