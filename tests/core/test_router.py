"""Live subscriptions: who gets what, and that nobody's mistake is another one's."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core import router as routers
from babelbus.core.record import Event
from babelbus.core.router import Router
from babelbus.core.subject import EVERYTHING, PathPattern, below, exactly

elements = st.sampled_from(["a", "b"])
subjects_of_few = st.lists(elements, min_size=1, max_size=3).map("/".join)
patterns = st.builds(PathPattern, st.lists(elements | st.none(), min_size=1, max_size=3).map(tuple), st.booleans())


class Listener:
    def __init__(self) -> None:
        self.calls: list[list[bytes | None]] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.calls.append([event.payload for event in events])


def event(subject: str, payload: bytes = b"") -> Event:
    return Event(subject, payload)


def test_each_receiver_gets_its_events_together_and_in_order() -> None:
    router, exact, wide = Router(), Listener(), Listener()
    router.add(exactly("a/b"), exact)
    router.add(below("a"), wide)
    router.route([event("a/b", b"1"), event("a/c", b"2"), event("x", b"3"), event("a/b", b"4")])
    assert exact.calls == [[b"1", b"4"]]
    assert wide.calls == [[b"1", b"2", b"4"]]


def test_who_wants_nothing_of_it_is_not_called() -> None:
    router, listener = Router(), Listener()
    router.add(exactly("a"), listener)
    router.route([event("b")])
    assert listener.calls == []


@given(st.lists(patterns, max_size=5), st.lists(subjects_of_few, min_size=1, max_size=5))
def test_the_look_up_finds_what_the_patterns_say(wanted: list[PathPattern], subjects: list[str]) -> None:
    router = Router()
    made = [router.add(pattern, Listener()) for pattern in wanted]
    for subject in subjects * 2:
        assert set(router.find(subject)) == {one for one in made if one.pattern.matches(subject)}


@pytest.mark.parametrize("pattern", [exactly("a"), PathPattern((None,)), EVERYTHING])
def test_a_subscription_begins_and_ends_at_once_although_look_ups_are_remembered(pattern: PathPattern) -> None:
    router, listener = Router(), Listener()
    assert router.find("a") == ()
    subscription = router.add(pattern, listener)
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

    router.add(exactly("a"), broken)
    router.add(exactly("a"), listener)
    with caplog.at_level(logging.ERROR):
        router.route([event("a", b"1")])
    assert listener.calls == [[b"1"]]
    assert "a live subscription failed" in caplog.text


def test_subjects_that_clients_choose_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "CACHE_MAX", 4)
    router = Router()
    router.add(EVERYTHING, Listener())
    for number in range(20):
        assert len(router.find(str(number))) == 1
    assert len(router._cache) <= 4


def test_an_exact_subscription_concerns_its_own_subject_alone() -> None:
    router = Router()
    routes = {subject: router.route_of(subject) for subject in ("a/b", "a/c", "x")}
    subscription = router.add(exactly("a/b"), Listener())
    assert [route.valid for route in routes.values()] == [False, True, True]
    again = router.route_of("a/b")
    router.remove(subscription)
    assert not again.valid
    assert [router.route_of(subject) is route for subject, route in routes.items()] == [False, True, True]


@pytest.mark.parametrize("pattern", [below("a"), PathPattern((None, "b")), PathPattern(("a", None))])
def test_a_pattern_concerns_the_remembered_subjects_that_it_matches(pattern: PathPattern) -> None:
    router = Router()
    routes = {subject: router.route_of(subject) for subject in ("a/b", "x", "x/y")}
    router.remove(router.add(pattern, Listener()))
    assert [route.valid for route in routes.values()] == [False, True, True]


def test_with_many_subjects_remembered_a_pattern_forgets_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "SCAN_MAX", 2)
    router = Router()
    routes = [router.route_of(subject) for subject in ("a/b", "x", "y")]
    router.add(below("a"), Listener())
    assert not any(route.valid for route in routes)


def test_subscriptions_that_share_a_receiver_get_an_event_once_between_them() -> None:
    router, listener = Router(), Listener()
    for owner, pattern in enumerate((exactly("a"), EVERYTHING, PathPattern((None,)))):
        router.add(pattern, listener, shared=True, owner=owner)
    router.route([event("a", b"1"), event("b", b"2")])
    assert listener.calls == [[b"1", b"2"]]
    assert [one.owner for one in router.find("a")] == [0, 1, 2]


def test_an_event_does_not_come_back_to_the_receiver_that_it_came_via() -> None:
    router, own, other = Router(), Listener(), Listener()
    router.add(EVERYTHING, own, shared=True)
    router.add(EVERYTHING, other)
    router.route([Event("a", b"1", via=own), event("a", b"2")])
    assert own.calls == [[b"2"]]
    assert other.calls == [[b"1", b"2"]]


def test_very_long_subjects_are_not_remembered() -> None:
    router, listener = Router(), Listener()
    subject = "x" * 100_000
    assert router.find(subject) == ()
    router.add(exactly(subject), listener)
    router.route([event(subject, b"1")])
    assert listener.calls == [[b"1"]]
    assert not router._cache


@given(patterns, subjects_of_few)
def test_what_matches_begins_with_the_prefix_of_its_pattern(pattern: PathPattern, subject: str) -> None:
    assert not pattern.matches(subject) or subject.startswith(pattern.prefix)
