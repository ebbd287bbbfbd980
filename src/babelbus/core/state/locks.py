"""Locks by name with a fair queue: the owner that waits longest is next. Locks are on no disk."""

from collections.abc import Callable, Hashable

import msgspec

from babelbus.errors import BabelbusError


class LockHeldError(BabelbusError):
    """Another owner holds the lock. `cancelled` are the waits of the refused owner, which end."""

    def __init__(self, key: str, cancelled: tuple[int, ...] = ()) -> None:
        super().__init__(f"{key!r} is locked by another client")
        self.cancelled = cancelled


class NotLockedError(BabelbusError):
    """Nobody holds the lock."""


class Granted(msgspec.Struct, frozen=True):
    """A lock whose holder changed: who has it now (`None`: nobody), and the numbers of the waits that this ends."""

    key: str
    owner: Hashable | None
    waits: tuple[int, ...] = ()


class _Waits:
    """The waits of one owner for one lock, and their place in the queue."""

    __slots__ = ("numbers", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.numbers: list[int] = []


class Locks:
    """All locks. An owner is whatever stands for a client; a wait is a number that the owner chose.

    `receivers` are called with each change of a holder: clients of several protocols wait in one queue.
    """

    def __init__(self) -> None:
        self.receivers: list[Callable[[Granted], None]] = []
        self._holders: dict[str, Hashable] = {}
        self._queues: dict[str, dict[Hashable, _Waits]] = {}
        self._begun = 0
        """The place of the next owner that begins to wait. Places only rise, so they compare at any two moments."""
        self._keys: dict[Hashable, dict[str, None]] = {}
        """The keys that each owner holds or waits for, in the order of the requests."""

    def holder(self, key: str) -> Hashable | None:
        """Return who holds a lock."""
        return self._holders.get(key)

    def keys(self, owner: Hashable) -> tuple[str, ...]:
        """Return the keys that an owner holds or waits for."""
        return tuple(self._keys.get(owner, ()))

    def waits(self, owner: Hashable) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return each key that an owner waits for, its place in the queue (see `_begun`), and its waits."""
        return [
            (key, waits.place, tuple(waits.numbers))
            for key in self.keys(owner)
            if (waits := self._queues.get(key, {}).get(owner)) is not None
        ]

    def has_room(self, owner: Hashable, key: str, count_max: int) -> bool:
        """Return whether an owner may hold or wait for a key, if it may do so for `count_max` keys."""
        keys = self._keys.get(owner, {})
        return key in keys or len(keys) < count_max

    def held(self) -> list[str]:
        """Return the keys of all locks that somebody holds."""
        return list(self._holders)

    def waiting(self, key: str) -> tuple[Hashable, ...]:
        """Return the owners that wait for a lock, the next one first."""
        return tuple(self._queues.get(key, ()))

    def lock(self, key: str, owner: Hashable) -> bool:
        """Lock a key that is free or the owner's own; return whether it was free.

        Raises:
            LockHeldError: somebody else has it.
        """
        holder = self._holders.setdefault(key, owner)
        if holder != owner:
            raise LockHeldError(key)
        return self._hold(key, owner)

    def acquire(self, key: str, owner: Hashable, wait: int, place: int | None = None) -> bool:
        """Lock a key or wait for it; return whether the owner has it now. All waits of one owner have one place.

        A wait that began at another server keeps its `place`; such waits are acquired in the order of their places.
        """
        if place is not None:
            self._begun = max(self._begun, place + 1)
        holder = self._holders.setdefault(key, owner)
        if holder == owner:
            self._hold(key, owner)
            return True
        self._keys.setdefault(owner, {})[key] = None
        queue = self._queues.setdefault(key, {})
        waits = queue.get(owner)
        if waits is None:
            if place is None:
                place = self._begun
                self._begun += 1
            waits = queue[owner] = _Waits(place)
        waits.numbers.append(wait)
        return False

    def release(self, key: str, owner: Hashable) -> Granted:
        """Release a lock; return its next owner.

        Raises:
            NotLockedError: nobody holds it.
            LockHeldError: somebody else does; the owner's own waits for it are given up.
        """
        holder = self._holders.get(key)
        if holder is None:
            raise NotLockedError(f"{key!r} is not locked")
        if holder != owner:
            raise LockHeldError(key, self._leave(key, owner))
        self._forget(owner, key)
        return self._pass_on(key)

    def drop(self, owner: Hashable) -> list[Granted]:
        """Release all that an owner holds and waits for; return the next owners."""
        granted = []
        for key in list(self._keys.pop(owner, ())):
            if self._holders.get(key) == owner:
                granted.append(self._pass_on(key))
            else:
                self._leave(key, owner)
        return granted

    def _hold(self, key: str, owner: Hashable) -> bool:
        """Record that an owner has a lock; return whether the lock was free."""
        keys = self._keys.setdefault(owner, {})
        fresh = key not in keys
        keys[key] = None
        if fresh:
            self._tell(Granted(key, owner))
        return fresh

    def _pass_on(self, key: str) -> Granted:
        queue = self._queues.get(key)
        if not queue:
            del self._holders[key]
            granted = Granted(key, None)
        else:
            owner = next(iter(queue))
            waits = queue.pop(owner)
            if not queue:
                del self._queues[key]
            self._holders[key] = owner
            granted = Granted(key, owner, tuple(waits.numbers))
        self._tell(granted)
        return granted

    def _tell(self, granted: Granted) -> None:
        for receiver in self.receivers:
            receiver(granted)

    def _leave(self, key: str, owner: Hashable) -> tuple[int, ...]:
        """Remove an owner from a queue; return the waits that end."""
        queue = self._queues.get(key, {})
        waits = queue.pop(owner, None)
        if waits is None:
            return ()
        if not queue:
            del self._queues[key]
        self._forget(owner, key)
        return tuple(waits.numbers)

    def _forget(self, owner: Hashable, key: str) -> None:
        keys = self._keys.get(owner)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._keys[owner]
