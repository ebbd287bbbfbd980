"""Fan-out: a key is looked up once until a subscription changes it; items with the same receivers are one run."""

import pytest

from babelbus.core import fanout
from babelbus.core.access import SERVER
from babelbus.core.fanout import Fan, Fanout
from babelbus.core.router import Router
from babelbus.core.subject import EVERYTHING, exactly


class Hub:
    """Receivers by key on a real router; counts how often a fan is made."""

    def __init__(self) -> None:
        self.router = Router()
        self.made = 0
        self.fanout: Fanout[str, str, Fan[str]] = Fanout(self._make)

    def add(self, key: str | None, owner: str) -> None:
        self.router.add(EVERYTHING if key is None else exactly(key), lambda events: None, owner=owner, principal=SERVER)

    def _make(self, key: str) -> Fan[str]:
        self.made += 1
        route = self.router.route_of(key)
        return Fan(route, tuple(str(one.owner) for one in route.subscriptions))

    def runs(self, keys: str) -> list[tuple[str, tuple[str, ...]]]:
        return [("".join(run), receivers) for run, receivers in self.fanout.runs([*keys.upper()], [*keys])]


def test_items_with_the_same_receivers_are_one_run_and_those_without_are_left_out() -> None:
    hub = Hub()
    for key, owner in (("a", "x"), ("b", "x"), ("c", "x"), ("c", "y")):
        hub.add(key, owner)
    assert hub.runs("") == []
    assert hub.runs("zz") == []
    assert hub.runs("abzac") == [("AB", ("x",)), ("A", ("x",)), ("C", ("x", "y"))]
    assert hub.runs("ca") == [("C", ("x", "y")), ("A", ("x",))]


def test_a_fan_is_made_anew_only_when_a_subscription_of_its_key_changes() -> None:
    hub = Hub()
    hub.add("a", "x")
    for _ in range(3):
        hub.runs("ab")
    assert hub.made == 2
    hub.add("b", "y")
    assert hub.runs("ab") == [("A", ("x",)), ("B", ("y",))]
    assert hub.made == 3
    hub.add(None, "z")
    assert hub.runs("ab") == [("A", ("x", "z")), ("B", ("y", "z"))]
    hub.fanout.clear()
    made = hub.made
    hub.runs("ab")
    assert hub.made == made + 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "FANS_MAX", 4)
    monkeypatch.setattr(fanout, "CACHED_LENGTH_MAX", 1)
    hub = Hub()
    hub.add(None, "x")
    for key in "abcdefgh":
        assert hub.runs(key) == [(key.upper(), ("x",))]
        assert len(hub.fanout.fans) <= 4
    hub.fanout.find("long")
    assert "long" not in hub.fanout.fans
