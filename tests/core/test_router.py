"""Live subscriptions: who gets what, and that nobody's mistake is another one's."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from babelbus.core import router as routers
from babelbus.core import subject_index
from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.core.router import INDEXED_MAX, Route, Router, Subscription
from babelbus.core.subject import EVERYTHING, PathPattern, Pattern, below, exactly
from babelbus.protocols.sbus.patterns import SbusPattern


class Listener:
    def __init__(self) -> None:
        self.calls: list[list[bytes | None]] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.calls.append([event.payload for event in events])


def event(subject: str, payload: bytes = b"") -> Event:
    return Event(subject, payload)


def test_each_receiver_gets_its_events_together_and_in_order() -> None:
    router, exact, wide = Router(), Listener(), Listener()
    router.add(exactly("a/b"), exact, principal=SERVER)
    router.add(below("a"), wide, principal=SERVER)
    router.route([event("a/b", b"1"), event("a/c", b"2"), event("x", b"3"), event("a/b", b"4")])
    assert exact.calls == [[b"1", b"4"]]
    assert wide.calls == [[b"1", b"2", b"4"]]


def test_who_wants_nothing_of_it_is_not_called() -> None:
    router, listener = Router(), Listener()
    router.add(exactly("a"), listener, principal=SERVER)
    router.route([event("b")])
    assert listener.calls == []


@pytest.mark.parametrize("pattern", [exactly("a"), PathPattern((None,)), EVERYTHING])
def test_a_subscription_begins_and_ends_at_once_although_look_ups_are_remembered(pattern: PathPattern) -> None:
    router, listener = Router(), Listener()
    assert router.find("a") == ()
    subscription = router.add(pattern, listener, principal=SERVER)
    assert not router.empty
    router.route([event("a", b"1")])
    router.remove(subscription)
    router.remove(subscription)  # once more is no error
    router.route([event("a", b"2")])
    assert listener.calls == [[b"1"]]
    assert router.empty


def test_a_receiver_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    router, listener = Router(), Listener()

    def broken(events: Sequence[Event]) -> None:
        raise ValueError("a bug")

    router.add(exactly("a"), broken, principal=SERVER)
    router.add(exactly("a"), listener, principal=SERVER)
    with caplog.at_level(logging.ERROR):
        router.route([event("a", b"1")])
    assert listener.calls == [[b"1"]]
    assert "a live subscription failed" in caplog.text


def test_subjects_that_clients_choose_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "CACHE_MAX", 4)
    router = Router()
    router.add(EVERYTHING, Listener(), principal=SERVER)
    for number in range(20):
        assert len(router.find(str(number))) == 1
    assert len(router._cache) <= 4


def test_an_exact_subscription_concerns_its_own_subject_alone() -> None:
    router = Router()
    routes = {subject: router.route_of(subject) for subject in ("a/b", "a/c", "x")}
    subscription = router.add(exactly("a/b"), Listener(), principal=SERVER)
    assert [route.valid for route in routes.values()] == [False, True, True]
    again = router.route_of("a/b")
    router.remove(subscription)
    assert not again.valid
    assert [router.route_of(subject) is route for subject, route in routes.items()] == [False, True, True]


@pytest.mark.parametrize("pattern", [below("a"), PathPattern((None, "b")), PathPattern(("a", None))])
def test_a_pattern_concerns_the_remembered_subjects_that_it_matches(pattern: PathPattern) -> None:
    router = Router()
    routes = {subject: router.route_of(subject) for subject in ("a/b", "x", "x/y")}
    router.remove(router.add(pattern, Listener(), principal=SERVER))
    assert [route.valid for route in routes.values()] == [False, True, True]


def test_with_many_subjects_remembered_a_pattern_forgets_those_below_its_first_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject_index, "SCAN_MAX", 2)
    router = Router()
    plant = [router.route_of(f"plant/{number}") for number in range(20)]
    other = [router.route_of(f"other/{number}") for number in range(20)]
    router.add(PathPattern(("plant", None, "x")), Listener(), principal=SERVER)
    assert not any(route.valid for route in plant)
    assert all(route.valid for route in other)
    assert [router.route_of(route.subject) is route for route in (*plant, *other)] == [False] * 20 + [True] * 20
    router.add(PathPattern((None, "x")), Listener(), principal=SERVER)
    assert not any(route.valid for route in other)
    assert not router._cached


def test_subscriptions_that_share_a_receiver_get_an_event_once_between_them() -> None:
    router, listener = Router(), Listener()
    for owner, pattern in enumerate((exactly("a"), EVERYTHING, PathPattern((None,)))):
        router.add(pattern, listener, shared=True, owner=owner, principal=SERVER)
    router.route([event("a", b"1"), event("b", b"2")])
    assert listener.calls == [[b"1", b"2"]]
    assert [one.owner for one in router.find("a")] == [0, 1, 2]


def test_an_event_does_not_come_back_to_the_receiver_that_it_came_via() -> None:
    router, own, other = Router(), Listener(), Listener()
    router.add(EVERYTHING, own, shared=True, principal=SERVER)
    router.add(EVERYTHING, other, principal=SERVER)
    router.route([Event("a", b"1", via=own), event("a", b"2")])
    assert own.calls == [[b"2"]]
    assert other.calls == [[b"1", b"2"]]


def test_very_long_subjects_are_not_remembered() -> None:
    router, listener = Router(), Listener()
    subject = "x" * 100_000
    assert router.find(subject) == ()
    router.add(exactly(subject), listener, principal=SERVER)
    router.route([event(subject, b"1")])
    assert listener.calls == [[b"1"]]
    assert not router._cache


# -- cost ------------------------------------------------------------------------------------------------------------


class Counting:
    """A pattern that counts how often it is compared with a subject."""

    compared = 0

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self.literal, self.rest, self.element = pattern.literal, pattern.rest, pattern.element

    def matches(self, subject: str) -> bool:
        Counting.compared += 1
        return self._pattern.matches(subject)


SHAPES: list[Callable[[int], Pattern]] = [
    lambda number: PathPattern(("plant", f"d{number}", None)),
    lambda number: PathPattern((None, f"d{number}")),
    lambda number: PathPattern((None, None, None, f"d{number}"), rest=True),
    lambda number: below(f"d{number}"),
    lambda number: PathPattern(("plant", None) * number),
    lambda number: SbusPattern(b"plant/d%d*/" % number),
    lambda number: SbusPattern(b"*/d%d" % number),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_30_000_unrelated_patterns_are_not_compared_with_a_new_subject(shape: Callable[[int], Pattern]) -> None:
    router = Router()
    count = 300 if shape is SHAPES[4] else 30_000
    for number in range(1, count):
        router.add(Counting(shape(number)), Listener(), shared=True, principal=SERVER)
    Counting.compared = 0
    for number in range(100):
        assert not router.find(f"plant/new{number}/x/y/z")
    assert Counting.compared <= 100 * subject_index.FEW_MAX


def test_the_coming_and_going_of_a_pattern_is_compared_with_the_subjects_below_its_first_elements() -> None:
    router = Router()
    for number in range(10_000):
        router.route_of(f"plant/{number % 100}/{number}")
        if number % INDEXED_MAX == 0:  # new subjects enter the index when some pattern changes
            router.remove(router.add(PathPattern(("elsewhere", None)), Listener(), principal=SERVER))
    router.remove(router.add(PathPattern(("elsewhere", None)), Listener(), principal=SERVER))
    Counting.compared = 0
    router.remove(router.add(Counting(PathPattern(("plant", "7", None))), Listener(), principal=SERVER))
    assert Counting.compared <= 200
    assert len(router._cache) == 10_000 - 100


def test_many_new_subjects_are_forgotten_when_a_pattern_changes_and_found_again() -> None:
    router = Router()
    routes = [router.route_of(f"plant/{number}") for number in range(INDEXED_MAX + 1)]
    made = router.add(PathPattern(("elsewhere", None)), Listener(), principal=SERVER)
    assert not router._cache
    assert not any(route.valid for route in routes)
    assert router.find("plant/1") == ()
    assert router.find("elsewhere/1") == (made,)


DEEP = subject_index.DEPTH_MAX + 1


@pytest.mark.parametrize(
    ("make", "subject"),
    [
        (lambda number: PathPattern(("a",) * DEEP + (None, str(number))), "a/" * DEEP + "q/"),
        (lambda number: PathPattern((None,) * DEEP + (str(number),)), "q/" * DEEP),
        (lambda number: SbusPattern(b"a*/" * DEEP + b"%d" % number), "aa/" * DEEP),
    ],
)
def test_patterns_that_differ_only_behind_the_deepest_branch_are_found(
    make: Callable[[int], Pattern], subject: str
) -> None:
    router = Router()
    made = [router.add(make(number), Listener(), principal=SERVER) for number in range(2 * subject_index.FEW_MAX)]
    assert [router.find(f"{subject}{number}") for number in range(len(made))] == [(one,) for one in made]
    for one in made:
        router.remove(one)
    assert router.empty
    assert not list(router._patterns._root)


# -- against a look at everything ------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "ab", "", "é", "\udcc3"])
subjects = st.lists(names, min_size=1, max_size=4).map("/".join)
some_elements = st.lists(names | st.none(), min_size=1, max_size=4).map(tuple)
path_patterns = st.just(EVERYTHING) | st.builds(PathPattern, some_elements, st.booleans())
sbus_patterns = st.lists(st.sampled_from([b"a", b"b", b"*", b"/", b"\xc3", b"\xa9", b"a*", b"*/"]), max_size=8).map(
    lambda parts: SbusPattern(b"".join(parts))
)


class AgainstAScan(RuleBasedStateMachine):
    """A router, and a list of everything that is added to it. The tree is small enough that lists become branches."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.present: list[Subscription] = []
        self.routes: list[Route] = []
        self.patch = pytest.MonkeyPatch()
        for name, value in (("FEW_MAX", 2), ("FEW_AGAIN", 1), ("DEPTH_MAX", 3), ("SCAN_MAX", 4)):
            self.patch.setattr(subject_index, name, value)

    def teardown(self) -> None:
        self.patch.undo()

    def scan(self, subject: str) -> tuple[Subscription, ...]:
        matching = [one for one in self.present if one.pattern.matches(subject)]
        return tuple(sorted(matching, key=lambda one: (one.pattern.literal is None, one.number)))

    @rule(patterns=st.lists(path_patterns | sbus_patterns, min_size=1, max_size=6))
    def add(self, patterns: list[Pattern]) -> None:
        for pattern in patterns:
            self.present.append(self.router.add(pattern, Listener(), principal=SERVER))

    @rule(data=st.data(), again=st.booleans())
    def remove(self, data: st.DataObject, again: bool) -> None:
        if self.present:
            one = self.present.pop(data.draw(st.integers(0, len(self.present) - 1)))
            for _ in range(1 + again):
                self.router.remove(one)

    @rule(subjects=st.lists(subjects, min_size=1, max_size=8))
    def find(self, subjects: list[str]) -> None:
        for subject in subjects:
            assert self.router.find(subject) == self.scan(subject)
            self.routes.append(self.router.route_of(subject))

    @invariant()
    def every_route_that_is_valid_is_right(self) -> None:
        for route in self.routes:
            if route.valid:
                assert route.subscriptions == self.scan(route.subject)
                assert self.router.route_of(route.subject) is route
        new = [route for route in self.router._unindexed if route.valid]
        assert len(self.router._cached) == len(list(self.router._cached._root))
        assert len(self.router._cached) + len(new) == len(self.router._cache)
        assert self.router.count == len(self.present)
        assert self.router.empty is (not self.present)

    @invariant()
    def nothing_is_left_of_what_went(self) -> None:
        patterns = [one for one in self.present if one.pattern.literal is None]
        assert sorted(one.number for one in self.router._patterns._root) == [one.number for one in patterns]
        assert_tidy(self.router._patterns._root)
        assert_tidy(self.router._cached._root)


def assert_tidy(branch: Any) -> None:
    assert branch.size == len(list(branch))
    lengths = [len(text) for text in branch.beginnings]
    assert branch.lengths == {length: lengths.count(length) for length in lengths}
    for edges in (branch.literals, branch.beginnings):
        for child in edges.values():
            if isinstance(child, list):
                assert 1 <= len(child) <= subject_index.FEW_MAX
            else:
                assert child.size > subject_index.FEW_AGAIN
                assert_tidy(child)


TestAgainstAScan = AgainstAScan.TestCase
