"""What waits for a receiver: order, size, and that answers of the server keep their place."""

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.flow_policy import Bound, Order
from babelbus.protocols.sbus.packets.backlog import Backlog
from babelbus.wire.packets import Packets


def put(backlog: Backlog, *packets: bytes, control: bool = False) -> None:
    backlog.put(Packets.of(list(packets)), 0, len(packets), control=control)


def take(backlog: Backlog, order: Order, at_once: int = 1) -> list[bytes]:
    packets, first, last = backlog.next(order)
    last = min(last, first + at_once)
    backlog.take(order, last - first)
    return [packets.packet(number) for number in range(first, last)]


def drain(backlog: Backlog, order: Order) -> list[bytes]:
    taken: list[bytes] = []
    while backlog:
        taken += take(backlog, order)
    return taken


def test_first_in_is_first_out_and_a_run_can_go_in_parts() -> None:
    backlog = Backlog()
    put(backlog, b"1", b"22", b"333")
    put(backlog, b"4")
    assert take(backlog, "queue", 2) == [b"1", b"22"]
    assert (backlog.count, backlog.size_bytes) == (2, 4)
    assert drain(backlog, "queue") == [b"333", b"4"]
    assert (backlog.count, backlog.size_bytes) == (0, 0)


def test_a_stack_gives_the_newest_first() -> None:
    backlog = Backlog()
    put(backlog, b"1", b"2")
    put(backlog, b"3")
    assert drain(backlog, "stack") == [b"3", b"2", b"1"]


def test_random_gives_the_largest_first_and_of_equal_ones_the_oldest() -> None:
    backlog = Backlog()
    put(backlog, b"a", b"bbb", b"cc")
    assert take(backlog, "random") == [b"bbb"]
    put(backlog, b"dd", b"eeee")
    assert drain(backlog, "random") == [b"eeee", b"cc", b"dd", b"a"]


def test_a_change_of_order_concerns_what_waits_already() -> None:
    backlog = Backlog()
    put(backlog, b"1", b"4444", b"22", b"3")
    assert take(backlog, "random") == [b"4444"]
    assert take(backlog, "queue") == [b"1"]
    assert take(backlog, "stack") == [b"3"]
    assert drain(backlog, "queue") == [b"22"]


def test_nothing_overtakes_an_answer_of_the_server() -> None:
    for order in ("stack", "random"):
        backlog = Backlog()
        put(backlog, b"1", b"22")
        put(backlog, b"answer", control=True)
        put(backlog, b"333", b"4444")
        assert drain(backlog, order) == [b"22", b"1", b"answer", b"4444", b"333"]


def test_it_is_full_over_either_bound() -> None:
    backlog = Backlog()
    put(backlog, b"12345", b"6")
    assert not backlog.exceeds(Bound(6, 2))
    assert backlog.exceeds(Bound(5, 2))
    assert backlog.exceeds(Bound(6, 1))


orders: st.SearchStrategy[Order] = st.sampled_from(["queue", "stack", "random"])


@given(st.lists(st.lists(st.binary(max_size=5), min_size=1, max_size=4) | orders, max_size=20))
def test_everything_comes_out_once_whatever_the_order(steps: list[list[bytes] | Order]) -> None:
    backlog, put_in, taken = Backlog(), [], []
    for step in steps:
        if isinstance(step, list):
            put(backlog, *step)
            put_in += step
        elif backlog:
            taken += take(backlog, step)
        assert backlog.count == len(put_in) - len(taken)
        assert backlog.size_bytes == sum(map(len, put_in)) - sum(map(len, taken))
    assert sorted(taken + drain(backlog, "queue")) == sorted(put_in)
