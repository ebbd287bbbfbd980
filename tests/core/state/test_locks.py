"""Locks (docs/specifications/worterbuch.md, section 5.6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.state.locks import Granted, LockHeldError, Locks, NotLockedError

owners = st.sampled_from(["one", "two", "three"])
keys = st.sampled_from(["k", "k/child"])


def test_a_free_lock_is_taken_and_its_owner_may_take_it_again() -> None:
    locks = Locks()
    assert locks.lock("k", "one") is True
    assert locks.lock("k", "one") is False
    assert locks.holder("k") == "one"


def test_a_lock_of_another_one_is_refused() -> None:
    locks = Locks()
    locks.lock("k", "one")
    with pytest.raises(LockHeldError) as caught:
        locks.lock("k", "two")
    assert caught.value.cancelled == ()
    assert locks.drop("two") == []
    assert locks.holder("k") == "one"


def test_keys_are_exact_so_a_child_is_another_lock() -> None:
    locks = Locks()
    locks.lock("k", "one")
    assert locks.lock("k/child", "two")
    locks.release("k", "one")
    assert locks.holder("k/child") == "two"


def test_acquiring_what_is_free_or_ones_own_does_not_wait() -> None:
    locks = Locks()
    assert locks.acquire("k", "one", 1)
    assert locks.acquire("k", "one", 2)
    assert locks.release("k", "one") == Granted("k", None)


def test_who_waits_longest_is_next_and_all_its_waits_end_together() -> None:
    locks = Locks()
    locks.lock("k", "one")
    assert not locks.acquire("k", "two", 1)
    assert not locks.acquire("k", "three", 2)
    assert not locks.acquire("k", "two", 3)
    assert locks.release("k", "one") == Granted("k", "two", (1, 3))
    assert locks.release("k", "two") == Granted("k", "three", (2,))
    assert locks.release("k", "three") == Granted("k", None)
    assert locks.holder("k") is None


def test_one_that_gives_a_lock_back_and_wants_it_again_waits_behind_the_others() -> None:
    locks = Locks()
    locks.lock("k", "one")
    locks.acquire("k", "two", 1)
    locks.release("k", "one")
    assert not locks.acquire("k", "one", 2)
    assert locks.release("k", "two").owner == "one"


def test_releasing_what_nobody_holds_is_an_error() -> None:
    with pytest.raises(NotLockedError):
        Locks().release("k", "one")


def test_releasing_what_another_one_holds_gives_up_ones_place() -> None:
    locks = Locks()
    locks.lock("k", "one")
    locks.acquire("k", "two", 7)
    locks.acquire("k", "two", 8)
    with pytest.raises(LockHeldError) as caught:
        locks.release("k", "two")
    assert caught.value.cancelled == (7, 8)
    assert locks.release("k", "one") == Granted("k", None)
    with pytest.raises(NotLockedError):
        locks.release("k", "two")


def test_an_owner_that_is_gone_gives_everything_back_in_the_order_of_asking() -> None:
    locks = Locks()
    locks.lock("a", "one")
    locks.lock("b", "two")
    locks.acquire("b", "one", 1)
    locks.lock("c", "one")
    locks.acquire("a", "three", 2)
    assert locks.drop("one") == [Granted("a", "three", (2,)), Granted("c", None)]
    assert locks.release("b", "two") == Granted("b", None)
    assert locks.drop("one") == []


@given(st.lists(st.tuples(st.sampled_from(["lock", "acquire", "release", "drop"]), keys, owners), max_size=30))
def test_any_course_of_things_is_that_of_a_plain_queue(steps: list[tuple[str, str, str]]) -> None:
    locks = Locks()
    queues: dict[str, list[str]] = {"k": [], "k/child": []}  # the holder stands first
    waits: dict[tuple[str, str], list[int]] = {}

    def take_out(key: str, owner: str) -> Granted | None:
        queue = queues[key]
        held = queue[:1] == [owner]
        if owner in queue:
            queue.remove(owner)
        waits.pop((key, owner), None)
        if not held:
            return None
        following = queue[0] if queue else None
        return Granted(key, following, tuple(waits.pop((key, following), ())) if following else ())

    for number, (step, key, owner) in enumerate(steps):
        queue = queues[key]
        if step == "lock":
            if queue[:1] in ([], [owner]):
                locks.lock(key, owner)
                queues[key] = queue or [owner]
            else:
                with pytest.raises(LockHeldError):
                    locks.lock(key, owner)
        elif step == "acquire":
            assert locks.acquire(key, owner, number) == (queue[:1] in ([], [owner]))
            if owner not in queue:
                queue.append(owner)
            if queue[0] != owner:
                waits.setdefault((key, owner), []).append(number)
        elif step == "drop":
            expected = {one for one in (take_out(name, owner) for name in queues) if one is not None}
            assert set(locks.drop(owner)) == expected
        elif not queue:
            with pytest.raises(NotLockedError):
                locks.release(key, owner)
        elif queue[0] == owner:
            assert locks.release(key, owner) == take_out(key, owner)
        else:
            expected_waits = tuple(waits.get((key, owner), ()))
            with pytest.raises(LockHeldError) as caught:
                locks.release(key, owner)
            assert caught.value.cancelled == expected_waits
            take_out(key, owner)
        assert {name: locks.holder(name) for name in queues} == {
            name: (names[0] if names else None) for name, names in queues.items()
        }


def test_receivers_hear_of_each_change_of_a_holder_and_of_nothing_else() -> None:
    locks = Locks()
    heard: list[Granted] = []
    locks.receivers.append(heard.append)
    locks.lock("k", "one")
    locks.lock("k", "one")
    assert not locks.acquire("k", "two", 1)
    assert heard == [Granted("k", "one")]
    locks.release("k", "one")
    assert locks.acquire("k", "two", 2)
    locks.drop("two")
    assert heard == [Granted("k", "one"), Granted("k", "two", (1,)), Granted("k", None)]


def test_the_place_of_a_wait_only_rises_and_stays_at_the_next_server() -> None:
    locks = Locks()
    for key in ("a", "b"):
        locks.lock(key, "one")
    locks.acquire("a", "two", 1)
    early = locks.waits("two")
    locks.drop("two")
    locks.acquire("a", "three", 2)
    locks.acquire("b", "two", 3)
    [(_, place, _)] = early
    [(_, later, _)] = locks.waits("three")
    [(_, last, _)] = locks.waits("two")
    assert place < later < last

    following = Locks()
    following.lock("a", "one")
    following.acquire("a", "two", 1, place)
    following.acquire("a", "three", 2, later)
    following.acquire("a", "four", 4)
    assert following.waits("two") == early
    assert following.waits("three") == [("a", later, (2,))]
    [(_, new, _)] = following.waits("four")
    assert new > later
    assert following.waiting("a") == ("two", "three", "four")
