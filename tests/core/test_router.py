"""Live subscriptions: who gets what, and that nobody's mistake is another one's."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core import router as routers
from babelbus.core.record import Event
from babelbus.core.router import Router
from babelbus.core.subject import EVERYTHING, Pattern, below, exactly

elements = st.sampled_from(["a", "b"])
subjects_of_few = st.lists(elements, min_size=1, max_size=3).map("/".join)
patterns = st.builds(Pattern, st.lists(elements | st.none(), min_size=1, max_size=3).map(tuple), st.booleans())


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
def test_the_look_up_finds_what_the_patterns_say(wanted: list[Pattern], subjects: list[str]) -> None:
    router = Router()
    made = [router.add(pattern, Listener()) for pattern in wanted]
    for subject in subjects * 2:
        assert set(router.find(subject)) == {one for one in made if one.pattern.matches(subject)}


@pytest.mark.parametrize("pattern", [exactly("a"), Pattern((None,)), EVERYTHING])
def test_a_subscription_begins_and_ends_at_once_although_look_ups_are_remembered(pattern: Pattern) -> None:
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
