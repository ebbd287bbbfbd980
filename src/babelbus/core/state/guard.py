"""The state and its history as one principal may read and change them.

Reading a value and watching it is `subscribe`, the past is `read`, every change and every lock is `write-state`, and
publishing without storing is `publish`. A pattern brings the entries whose keys are granted; a pattern of which nothing
is granted is refused.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from babelbus.core.access import (
    Action,
    Granted,
    Identity,
    Narrowing,
    refusal,
)
from babelbus.core.receipt import Promise
from babelbus.core.state.differences import Differences, Revision
from babelbus.core.state.history import REVISIONS_MAX, AsOf, History
from babelbus.core.state.key_index import SEPARATOR, KeyPattern
from babelbus.core.state.locks import Granted as GrantedLock
from babelbus.core.state.locks import Locks
from babelbus.core.state.paging import granted_of
from babelbus.core.state.patterns import pattern_text, subjects_of
from babelbus.core.state.tree import NoSuchKeyError, State, Testament
from babelbus.core.state.watches import Receive, Watch
from babelbus.core.subject import ANY, EVERYTHING, Pattern, below, exactly
from babelbus.core.topic import RESERVED_PREFIX

UNSEEN: Final = b"null"
"""The answer in place of a value that the principal may not see."""


class _Guard:
    """The questions that state and history ask."""

    def __init__(self, principal: Identity) -> None:
        assert principal.rights is not None
        self.principal = principal
        self._rights: Granted = principal.rights

    def _check(self, action: Action, key: str) -> None:
        if not self._rights.may(action, key):
            raise refusal(self.principal, action, key)

    def _check_all(self, action: Action, keys: Sequence[str]) -> None:
        refused = self._rights.find_refused(action, keys)
        if refused is not None:
            raise refusal(self.principal, action, refused)

    def _check_pattern(self, action: Action, pattern: KeyPattern) -> None:
        """Check that something of a pattern is granted. Raises: AccessRefusedError."""
        if all(self._rights.overlaps(action, part) is Narrowing.NONE for part in subjects_of(pattern)):
            raise refusal(self.principal, action, pattern_text(pattern))


class GuardedState(_Guard):
    """`State` for one principal; every method may raise `AccessRefusedError` beside the errors of the state."""

    def __init__(self, state: State, principal: Identity) -> None:
        super().__init__(principal)
        self._state = state
        self.key_bytes_max = state.key_bytes_max
        self.locks = GuardedLocks(state.locks, principal)

    # -- reading -----------------------------------------------------------------------------------------------------

    def is_transient(self, key: str) -> bool:
        """Return whether a key, or a pattern, is one of those that are not logged."""
        return self._state.is_transient(key)

    def may_see(self, key: str | None) -> bool:
        """Return whether the principal may see the value of a key."""
        return key is not None and self._rights.may(Action.SUBSCRIBE, key) and not self._is_hidden(key)

    def _is_hidden(self, key: str) -> bool:
        """Return whether a key shows other keys and the principal may not see all keys: then it is not there."""
        return self._state.shows_keys(key) and not self._rights.covers(Action.SUBSCRIBE, EVERYTHING)

    def find(self, key: str) -> bytes | None:
        """Return a value, `None` if the key has no value."""
        entry = self.find_entry(key)
        return None if entry is None else entry[1]

    def find_entry(self, key: str) -> tuple[str, bytes, int] | None:
        """Return the entry of a key, `None` if the key has no value."""
        self._check(Action.SUBSCRIBE, key)
        return None if self._is_hidden(key) else self._state.find_entry(key)

    def get(self, key: str) -> bytes:
        """Return a value; see `State.get`."""
        return self.get_version(key)[0]

    def get_version(self, key: str) -> tuple[bytes, int]:
        """Return a value and its version; see `State.get_version`."""
        self._check(Action.SUBSCRIBE, key)
        if self._is_hidden(key):
            raise NoSuchKeyError(key)
        return self._state.get_version(key)

    def match(self, pattern: KeyPattern) -> list[tuple[str, bytes]]:
        """Return the keys and values that match a pattern and may be seen."""
        return [(key, value) for key, value, _ in self.entries(pattern)]

    def entries(self, pattern: KeyPattern) -> list[tuple[str, bytes, int]]:
        """Return key, value and version of all entries that match a pattern and may be seen."""
        self._check_pattern(Action.SUBSCRIBE, pattern)
        may_see = self.may_see
        return [entry for entry in self._state.entries(pattern) if may_see(entry[0])]

    def children(self, parent: str | None) -> list[str]:
        """Return the names of the direct children of a key at or below which the principal may see something."""
        names = [name for name in self._state.children(parent) if self._may_list(_child(parent, name))]
        if not names and parent is not None and not self._may_list(parent):
            raise NoSuchKeyError(parent)
        return names

    def children_matching(self, pattern: KeyPattern) -> list[str]:
        """Return the names of the children of all nodes that the elements of a pattern mean, each once."""
        nodes: list[str | None] = [None]
        for element in pattern.elements:
            following: list[str | None] = []
            for node in nodes:
                names = self._children_or_none(node) if element is None else [element]
                following += [_child(node, name) for name in names]
            nodes = following
        return list(dict.fromkeys(name for node in nodes for name in self._children_or_none(node)))

    def _children_or_none(self, node: str | None) -> Iterable[str]:
        try:
            return self.children(node)
        except NoSuchKeyError:
            return ()

    def _may_list(self, key: str) -> bool:
        patterns: tuple[Pattern, ...] = (exactly(key), below(key))
        return not self._is_hidden(key) and any(
            self._rights.overlaps(Action.SUBSCRIBE, part) is not Narrowing.NONE for part in patterns
        )

    def all_children(self, parent: str | None) -> list[str]:
        """Return the names of all direct children of a key: show only those that `may_list` grants."""
        return self._state.all_children(parent)

    def child_count(self, key: str) -> int:
        """Return how many direct children a key has; 0 if not all that is below it may be seen."""
        return self._state.child_count(key) if self.sees_below(key) else 0

    def keys(self, pattern: KeyPattern) -> list[str]:
        """Return all keys that match a pattern: show only those that `may_see` grants."""
        self._check_pattern(Action.SUBSCRIBE, pattern)
        return self._state.keys(pattern)

    def may_list(self, key: str) -> bool:
        """Return whether something at or below a key may be seen."""
        return self._may_list(key)

    def sees_all(self, pattern: KeyPattern) -> bool:
        """Return whether every key of a pattern may be seen."""
        return self._sees(*subjects_of(pattern))

    def sees_below(self, parent: str | None) -> bool:
        """Return whether everything below a key may be seen, `None` is the root."""
        return self._sees(EVERYTHING if parent is None else below(parent))

    def _sees(self, *patterns: Pattern) -> bool:
        """Return whether every key of patterns may be seen; keys that show other keys are the server's own."""
        if any((pattern.element(0) or ANY)[0][:1] in ("", RESERVED_PREFIX) for pattern in patterns):
            patterns = (*patterns, EVERYTHING)
        return self._rights.covers(Action.SUBSCRIBE, *patterns)

    def testaments(self) -> dict[str, Testament]:
        """Return the testaments by their owners, as far as their keys may be seen."""
        testaments = {}
        for owner, testament in self._state.testaments().items():
            goods = tuple(one for one in testament.grave_goods if self.sees_all(one))
            will = tuple(pair for pair in testament.last_will if self.may_see(pair[0]))
            if goods or will:
                testaments[owner] = Testament(goods, will, testament.principal)
        return testaments

    def check_watch(self, pattern: KeyPattern) -> None:
        """Check that something of a pattern may be seen."""
        self._check_pattern(Action.SUBSCRIBE, pattern)

    def watch(self, pattern: KeyPattern, receive: Receive) -> Watch:
        """Call `receive` with what may be seen of a pattern; see `State.watch`."""
        self.check_watch(pattern)
        return self._state.watch(pattern, receive, self.may_see)

    def end_watch(self, watch: Watch) -> None:
        """End a watch."""
        self._state.end_watch(watch)

    # -- changing ----------------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a plain value; see `State.set`."""
        self._check(Action.WRITE_STATE, key)
        self._state.set(key, value)

    def set_all(self, keys: Sequence[str], values: Sequence[bytes]) -> bool:
        """Set plain values, or none; see `State.set_all`."""
        self._check_all(Action.WRITE_STATE, keys)
        return self._state.set_all(keys, values)

    def put_all(self, entries: Sequence[tuple[str, bytes, int]]) -> None:
        """Set values whatever the keys hold, or none; see `State.put_all`."""
        self._check_all(Action.WRITE_STATE, [key for key, _, _ in entries])
        self._state.put_all(entries)

    def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value with the next version; see `State.compare_and_set`."""
        self._check(Action.WRITE_STATE, key)
        return self._state.compare_and_set(key, value, version)

    def delete(self, key: str) -> bytes:
        """Delete a value and return it, `null` if it may not be seen; see `State.delete`."""
        self._check(Action.WRITE_STATE, key)
        return self._shown(key, self._state.delete(key))

    def delete_matching(self, pattern: KeyPattern) -> list[tuple[str, bytes]]:
        """Delete the values that match a pattern and may be deleted, and return them as `delete` does."""
        self._check_pattern(Action.WRITE_STATE, pattern)
        may = self._rights.may
        deleted = self._state.delete_matching(pattern, lambda key: may(Action.WRITE_STATE, key))
        return [(key, self._shown(key, value)) for key, value in deleted]

    def _shown(self, key: str, value: bytes) -> bytes:
        """Return a value that was deleted: the right to delete is not the right to read."""
        return value if self.may_see(key) else UNSEEN

    def note(self, key: str, value: bytes) -> None:
        """Publish a value to the listeners; it is not stored."""
        self._check(Action.PUBLISH, key)
        self._state.note(key, value)

    def set_testament(self, owner: str, testament: Testament) -> None:
        """Keep the testament of `owner`; its keys are checked now, and when it is executed."""
        self.check_testament(testament)
        self._state.set_testament(owner, testament, self.principal.name)

    def check_testament(self, testament: Testament) -> None:
        """Check that the principal may do what a testament does."""
        for pattern in testament.grave_goods:
            self._check_pattern(Action.WRITE_STATE, pattern)
        for key, _ in testament.last_will:
            self._check(Action.WRITE_STATE, key)

    def commit(self, source: str) -> Promise:
        """Append all changes since the last commit to the log; see `State.commit`."""
        return self._state.commit(source)


class GuardedLocks(_Guard):
    """`Locks` for one principal: who may set a key may lock it."""

    def __init__(self, locks: Locks, principal: Identity) -> None:
        super().__init__(principal)
        self._locks = locks

    def holder(self, key: str) -> Hashable | None:
        """Return who holds a lock."""
        return self._locks.holder(key)

    def held(self) -> list[str]:
        """Return the keys of the locks that somebody holds and the principal may take."""
        return [key for key in self._locks.held() if self._rights.may(Action.WRITE_STATE, key)]

    def waiting(self, key: str) -> tuple[Hashable, ...]:
        """Return the owners that wait for a lock, the next one first."""
        return self._locks.waiting(key)

    def lock(self, key: str, owner: Hashable) -> bool:
        """Lock a key; see `Locks.lock`."""
        self._check(Action.WRITE_STATE, key)
        return self._locks.lock(key, owner)

    def acquire(self, key: str, owner: Hashable, wait: int, place: int | None = None) -> bool:
        """Lock a key or wait for it; see `Locks.acquire`."""
        self._check(Action.WRITE_STATE, key)
        return self._locks.acquire(key, owner, wait, place)

    def release(self, key: str, owner: Hashable) -> GrantedLock:
        """Release a lock; see `Locks.release`, whose errors say whether somebody holds it."""
        self._check(Action.WRITE_STATE, key)
        return self._locks.release(key, owner)

    def drop(self, owner: Hashable) -> list[GrantedLock]:
        """Release all that an owner holds; see `Locks.drop`."""
        return self._locks.drop(owner)


class GuardedHistory(_Guard):
    """`History` for one principal."""

    def __init__(self, history: History, principal: Identity) -> None:
        super().__init__(principal)
        self._history = history

    async def get(self, key: str, moment: AsOf) -> tuple[bytes, int]:
        """Return a value and its version as of a moment; see `History.get`."""
        self._check(Action.READ, key)
        return await self._history.get(key, moment)

    async def match(self, pattern: KeyPattern | None, moment: AsOf) -> list[tuple[str, bytes, int]]:
        """Return the entries of a moment that match and may be read."""
        asked = KeyPattern((), rest=True) if pattern is None else pattern
        self._check_pattern(Action.READ, asked)
        entries = await self._history.match(pattern, moment)
        if self._rights.covers(Action.READ, *subjects_of(asked)):
            return entries
        return [entry for entry in entries if self._rights.may(Action.READ, entry[0])]

    async def differences(
        self, pattern: KeyPattern, first: AsOf, second: AsOf | None, *, after: str | None = None, count: int
    ) -> Differences:
        """Return how the keys that may be read differ between two moments; see `History.differences`."""
        self._check_pattern(Action.READ, pattern)

        async def grant(keys: list[str]) -> list[str]:
            return await granted_of(keys, lambda key: self._rights.may(Action.READ, key))

        return await self._history.differences(pattern, first, second, after=after, count=count, grant=grant)

    async def revisions(
        self, key: str, *, before: int | None = None, count_max: int = REVISIONS_MAX
    ) -> tuple[list[Revision], int]:
        """Return the last changes of a key; see `History.revisions`."""
        self._check(Action.READ, key)
        return await self._history.revisions(key, before=before, count_max=count_max)

    async def earliest(self) -> tuple[int, int | None]:
        """Return the earliest moment that can be asked for."""
        return await self._history.earliest()

    async def latest(self) -> tuple[int, int | None]:
        """Return offset and time of the last record."""
        return await self._history.latest()


def _child(parent: str | None, name: str) -> str:
    return name if parent is None else f"{parent}{SEPARATOR}{name}"
