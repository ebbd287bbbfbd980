"""Fan-out of a protocol hub: the receivers of a key, looked up once, and runs of items with the same receivers.

A hub of many clients adds each subscription to the router with one shared receiver and the client's own object as
`owner`. The hub finds the owners of a key here, and sends items that follow each other and have the same owners as one
run, which is encoded once.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from babelbus.core.router import Route

FANS_MAX = 65_536
SETS_MAX = 4096
"""Different sets of receivers that are remembered; every change of a subscription may make a new one."""
CACHED_LENGTH_MAX = 256
"""Longer keys are looked up each time: clients choose the keys, and a key may have 400 kB."""

Key = TypeVar("Key", str, bytes)
Receiver = TypeVar("Receiver")
Item = TypeVar("Item")


class Fan(Generic[Receiver]):
    """Where items of one key go, valid as long as its route is. Equal receivers of several fans are one object."""

    __slots__ = ("receivers", "route")

    def __init__(self, route: Route, receivers: tuple[Receiver, ...]) -> None:
        self.route = route
        self.receivers = receivers


MadeFan = TypeVar("MadeFan", bound=Fan[Any])


class Fanout(Generic[Key, Receiver, MadeFan]):
    """The fans of one hub. `make` builds the fan of a key from the router."""

    def __init__(self, make: Callable[[Key], MadeFan]) -> None:
        self.fans: dict[Key, MadeFan] = {}
        """For hot loops, which must look at `route.valid` themselves."""
        self._make: Callable[[Key], MadeFan] = make
        self._sets: dict[tuple[Receiver, ...], tuple[Receiver, ...]] = {}

    def find(self, key: Key) -> MadeFan:
        """Return the fan of a key; mostly a dictionary look-up."""
        fan = self.fans.get(key)
        if fan is not None and fan.route.valid:
            return fan
        if len(self.fans) >= FANS_MAX or len(self._sets) >= SETS_MAX:
            self.clear()
        fan = self._make(key)
        fan.receivers = self._sets.setdefault(fan.receivers, fan.receivers)
        if len(key) <= CACHED_LENGTH_MAX:
            self.fans[key] = fan
        return fan

    def runs(self, items: list[Item], keys: list[Key]) -> list[tuple[list[Item], tuple[Receiver, ...]]]:
        """Return items that follow each other and have the same receivers, in order; items without receivers are left
        out. `keys` has the key of each item.
        """
        if len(items) == 1:
            receivers: tuple[Receiver, ...] = self.find(keys[0]).receivers
            return [(items, receivers)] if receivers else []
        get, find = self.fans.get, self.find
        runs: list[tuple[list[Item], tuple[Receiver, ...]]] = []
        run: list[Item] = []
        current: tuple[Receiver, ...] = ()
        for item, key in zip(items, keys):  # noqa: B905  # checking their lengths costs more than a short run
            fan = get(key)
            receivers = fan.receivers if fan is not None and fan.route.valid else find(key).receivers
            if receivers is not current:
                current = receivers
                if receivers:
                    run = []
                    runs.append((run, receivers))
            if receivers:
                run.append(item)
        return runs

    def clear(self) -> None:
        """Remove all fans: more than subscriptions has changed."""
        self.fans.clear()
        self._sets.clear()
