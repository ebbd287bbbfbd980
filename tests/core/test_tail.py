"""The newest records in memory: what a read gives, what goes first, and what a failed flush takes away."""

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.tail import BATCH_BYTES, PARTITION_BYTES_MAX, Tail, TailBudget
from babelbus.records.format import encode_payloads
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk


def batch(base_offset: int, *sizes: int) -> RecordBatch:
    return encode_payloads([b"x" * size for size in sizes], [1] * len(sizes), base_offset)


def records_of(one: RecordBatch) -> list[bytes]:
    data, ends = bytes(one.data), [*list(one.positions)[1:], len(one.data)]
    return [data[start:end] for start, end in zip(one.positions, ends, strict=True)]


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=20),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from([0, 1, 40, 100, 500, 10**6])), max_size=20),
)
def test_a_read_gives_what_was_appended_at_least_one_record_or_nothing_of_what_is_forgotten(
    sizes: list[list[int]], reads: list[tuple[float, float, int]]
) -> None:
    budget = TailBudget(6 * BATCH_BYTES)
    tail = Tail(budget)
    stored: list[bytes] = []
    for one in sizes:
        made = batch(len(stored), *one)
        stored += records_of(made)
        tail.add(made)
    assert budget.bytes_held == tail.bytes_held <= budget.bytes_max
    kept_from = next((n for n in range(len(stored)) if tail.read(n, 0, len(stored)) is not None), len(stored))
    for low, high, bytes_max in reads:
        offset = int(low * (len(stored) - 1))
        end = offset + 1 + int(high * (len(stored) - offset - 1))
        stop, size = offset, 0
        while stop < end and (stop == offset or size + len(stored[stop]) <= bytes_max):
            size += len(stored[stop])
            stop += 1
        expected = None if offset < kept_from else Chunk(b"".join(stored[offset:stop]), offset, stop)
        assert tail.read(offset, bytes_max, end) == expected


def test_the_partition_that_was_written_longest_ago_gives_up_first() -> None:
    budget = TailBudget(4 * (BATCH_BYTES + 200))
    quiet, busy = Tail(budget), Tail(budget)
    quiet.add(batch(0, 100))
    for offset in range(6):
        busy.add(batch(offset, 100))
    assert quiet.read(0, 1000, 1) is None
    assert busy.read(5, 1000, 6) is not None
    assert (quiet.bytes_held, budget.bytes_held) == (0, busy.bytes_held)


def test_one_partition_keeps_no_more_than_its_own_bound() -> None:
    tail = Tail(TailBudget(2**40))
    for offset in range(12):
        tail.add(batch(offset, 2**20))
    assert PARTITION_BYTES_MAX // 2 < tail.bytes_held <= PARTITION_BYTES_MAX
    assert tail.read(0, 1, 12) is None
    assert tail.read(11, 1, 12) is not None


def test_offsets_that_are_given_again_are_those_of_the_new_records() -> None:
    tail = Tail(TailBudget(2**20))
    for offset in range(0, 9, 3):
        tail.add(batch(offset, 1, 1, 1))
    tail.cut(4)
    assert tail.read(2, 1000, 9) is not None
    assert tail.read(3, 1000, 9) is None  # its batch reached beyond the cut
    tail.add(batch(4, 7))
    assert tail.read(2, 1000, 5) is None  # there is a gap now: nothing in front of it is kept
    chunk = tail.read(4, 1000, 5)
    assert chunk is not None
    assert chunk.data == bytes(batch(4, 7).data)


def test_a_budget_of_nothing_keeps_nothing() -> None:
    tail = Tail(TailBudget(0))
    tail.add(batch(0, 1))
    assert tail.read(0, 1000, 1) is None
