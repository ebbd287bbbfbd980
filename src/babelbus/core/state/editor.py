"""The state as an operator reads and changes it: keys and patterns are checked, values are read as JSON.

Changes take effect at once; `commit` logs all changes since the last commit, and they are as durable as `state.ack`
says when its promise is done.
"""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.clock import Clock
from babelbus.core.receipt import Promise
from babelbus.core.state.differences import Differences, Revision
from babelbus.core.state.guard import GuardedHistory, GuardedState
from babelbus.core.state.history import AsOf, History
from babelbus.core.state.key_index import SEPARATOR, KeyPattern
from babelbus.core.state.log import Change, Kept, Kind
from babelbus.core.state.paging import Page, PageRequest, choose_page, in_thread
from babelbus.core.state.patterns import (
    check_key,
    check_pattern,
    pattern_text,
    size_fault,
    store_pattern,
)
from babelbus.core.state.tree import InvalidKeyError, State, Testament, VersionedError
from babelbus.core.subject import is_secret
from babelbus.errors import BabelbusError

EVERYTHING = KeyPattern((), rest=True)

Entry = tuple[str, bytes, int]
"""Key, value (JSON text) and version (0: a plain value)."""


Stop = Callable[[], None]


class Node(msgspec.Struct, frozen=True, gc=False):
    """One name of a level of the tree. `value` is `None` if the key has none.

    `children` is how many direct children the key has, `None` if that cannot be told but it may have some.
    """

    name: str
    key: str
    value: bytes | None
    version: int
    children: int | None


class Nodes(msgspec.Struct, frozen=True):
    """A page of nodes; `total` and `after` are those of `Page`."""

    nodes: list[Node]
    total: int | None
    after: str | None


class Lock(msgspec.Struct, frozen=True):
    """A lock that somebody holds: its holder, and the owners that wait, the next one first."""

    key: str
    holder: str
    waiting: list[str]


class ValueChangedError(BabelbusError):
    """The key has another value than the editor has seen."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} has another value by now: somebody else has changed it; look at it again")
        self.key = key


class InvalidPatternError(BabelbusError):
    """A text is no pattern over keys or subjects; the message says why."""


class InvalidValueError(BabelbusError):
    """A value of the state is no JSON text, or one that not every client could read."""


class ReadOnlyKeyError(BabelbusError):
    """The key or pattern is the server's own."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} is the server's own and read-only")
        self.key = key


class StateChange(msgspec.Struct, frozen=True, gc=False):
    """One change of the state; `value` is `None` when it was deleted. `source` is who made it.

    `news` is false when the value is the text that the key had before.
    """

    key: str
    value: bytes | None
    version: int
    source: str
    timestamp: int
    news: bool = True


class StateEditor:
    """The state for one kind of operator, who is the `source` of changes.

    `read_value` returns a text as a value that every client can read, or raises `ValueError`. Transient keys are the
    server's own and read-only. Methods raise `InvalidKeyError`, `InvalidPatternError`, `ReadOnlyKeyError` or
    `StorageError`, and with a moment also `HistoryGoneError` and `OffsetOutOfRangeError`.
    """

    def __init__(
        self,
        state: State | GuardedState,
        history: History | GuardedHistory,
        clock: Clock,
        source: str,
        read_value: Callable[[bytes], bytes],
    ) -> None:
        self._state = state
        self._history = history
        self._clock = clock
        self._source = source
        self._parse = read_value

    async def get(self, key: str, moment: AsOf | None) -> Entry:
        """Return a value, or raise `NoSuchKeyError`."""
        self.check_key(key)
        value, version = self._state.get_version(key) if moment is None else await self._history.get(key, moment)
        return key, value, version

    async def match(self, pattern: str, moment: AsOf | None) -> list[Entry]:
        """Return the entries that match a pattern."""
        elements = self.read_pattern(pattern)
        return self._state.entries(elements) if moment is None else await self._history.match(elements, moment)

    async def tree(self, moment: AsOf | None) -> list[Entry]:
        """Return all entries but the server's own."""
        if moment is not None:
            return await self._history.match(None, moment)
        return [entry for entry in self._state.entries(EVERYTHING) if not self._state.is_transient(entry[0])]

    async def revisions(self, key: str, before: int | None, count_max: int) -> tuple[list[Revision], int]:
        """Return the last stored changes of a key below an offset, and from which offset on they are complete."""
        self.check_key(key)
        return await self._history.revisions(key, before=before, count_max=count_max)

    def find(self, key: str) -> Entry | None:
        """Return the entry of a key, `None` if the key has no value."""
        self.check_key(key)
        return self._state.find_entry(key)

    def entries(self, pattern: str) -> list[Entry]:
        """Return the present entries that match a pattern."""
        return self._state.entries(self.read_pattern(pattern))

    def children(self, parent: str | None) -> list[str]:
        """Return the names of the direct children of a key, `None` is the root; or raise `NoSuchKeyError`."""
        if parent is not None:
            self.check_key(parent)
        return self._state.children(parent)

    async def level(self, parent: str | None, request: PageRequest, moment: AsOf | None) -> Nodes:
        """Return a page of the direct children of a key, `None` is the root; no nodes if it has none."""
        if parent is not None:
            self.check_key(parent)
        if moment is None:
            return await self._level_now(parent, request)
        pattern = EVERYTHING if parent is None else KeyPattern(tuple(parent.split(SEPARATOR)), rest=True)
        entries = await self._history.match(pattern, moment)
        start = 0 if parent is None else len(parent) + 1
        level, counts = await in_thread(len(entries), lambda: _level_of(entries, start))
        page = await choose_page(list(counts), request)
        nodes = []
        for name in page.names:
            value, version = level.get(name, (None, 0))
            nodes.append(Node(name, _child(parent, name), value, version, counts[name]))
        return Nodes(nodes, page.total, page.after)

    async def _level_now(self, parent: str | None, request: PageRequest) -> Nodes:
        state = self._state
        may_list = None if state.sees_below(parent) else lambda name: state.may_list(_child(parent, name))
        return self._nodes(await choose_page(state.all_children(parent), request, may_list), parent, may_list is None)

    async def search(self, pattern: str, request: PageRequest) -> Nodes:
        """Return a page of the present entries that match a pattern; their names are their keys."""
        elements, state = self.read_pattern(pattern), self._state
        sees_all = state.sees_all(elements)
        page = await choose_page(state.keys(elements), request, None if sees_all else state.may_see)
        return self._nodes(page, None, sees_all)

    def _nodes(self, page: Page, parent: str | None, sees_all: bool) -> Nodes:
        state, nodes = self._state, []
        for name in page.names:
            key = _child(parent, name)
            entry = state.find_entry(key) if state.may_see(key) else None
            children: int | None = state.child_count(key)
            if not children and not sees_all:
                children = None
            value, version = (None, 0) if entry is None else entry[1:]
            nodes.append(Node(name, key, value, version, children))
        return Nodes(nodes, page.total, page.after)

    def child_count(self, key: str) -> int:
        """Return how many direct children a key has; 0 if not all that is below it may be seen."""
        return self._state.child_count(key)

    async def differences(
        self, pattern: str, first: AsOf, second: AsOf | None, *, after: str | None, count: int
    ) -> Differences:
        """Return how the keys of a pattern differ between two moments, `None` is now, a page in their order."""
        elements = self.read_pattern(pattern)
        return await self._history.differences(elements, first, second, after=after, count=count)

    async def ends(self) -> tuple[tuple[int, int | None], tuple[int, int | None]]:
        """Return offset and time of the earliest moment that can be asked for, and those of the last change."""
        return await self._history.earliest(), await self._history.latest()

    def locks(self) -> list[Lock]:
        """Return the locks that somebody holds."""
        locks = self._state.locks
        return [Lock(key, str(locks.holder(key)), [str(one) for one in locks.waiting(key)]) for key in locks.held()]

    def testaments(self) -> dict[str, tuple[Testament, list[str]]]:
        """Return the testaments by their owners, each with its grave goods as patterns."""
        return {
            owner: (testament, [pattern_text(one) for one in testament.grave_goods])
            for owner, testament in self._state.testaments().items()
        }

    # -- changing ----------------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a plain value, or raise `InvalidValueError` or `VersionedError`."""
        self._check_writable(key)
        self._state.set(key, self._read_value(key, value))

    def set_all(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Set plain values or, if a value is invalid or a key holds a version, none; see `set`."""
        for key, _ in entries:
            self._check_writable(key)
        keys = [key for key, _ in entries]
        if not self._state.set_all(keys, [self._read_value(key, value) for key, value in entries]):
            versioned = (key for key in keys if (self._state.find_entry(key) or ("", b"", 0))[2])
            raise VersionedError(next(versioned))

    def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value if the key has `version`, and return the next version; or raise `VersionMismatchError`."""
        self._check_writable(key)
        return self._state.compare_and_set(key, self._read_value(key, value), version)

    def put_all(self, entries: Sequence[Entry]) -> None:
        """Set all entries or, if an entry is invalid, none; replace what the keys have."""
        checked = []
        for key, value, version in entries:
            self._check_writable(key)
            if not 0 <= version < 2**63:
                raise InvalidValueError(f"{key!r}: a version is a whole number from 0 on, not {version}")
            checked.append((key, self._read_value(key, value), version))
        self._state.put_all(checked)

    def delete(self, key: str) -> Entry:
        """Delete a value and return the entry with version 0, or raise `NoSuchKeyError`."""
        self._check_writable(key)
        return key, self._state.delete(key), 0

    def delete_matching(self, pattern: str) -> list[Entry]:
        """Delete the entries that match a pattern and return them."""
        self._check_not_own(pattern)
        return [(key, value, 0) for key, value in self._state.delete_matching(self.read_pattern(pattern))]

    def set_testament(self, owner: str, goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> None:
        """Keep a testament: patterns whose keys are deleted, and values that are set then, when `owner` is gone."""
        for pattern in goods:
            self._check_not_own(pattern)
        for key, _ in will:
            self._check_writable(key)
        values = [(key, msgspec.Raw(self._read_value(key, value))) for key, value in will]
        self._state.set_testament(owner, Testament(tuple(map(self.read_pattern, goods)), tuple(values)))

    def commit(self) -> Promise:
        """Append all changes since the last commit to the log; call it in the turn of the loop that made them."""
        return self._state.commit(self._source)

    # -- watching ----------------------------------------------------------------------------------------------------

    def watch(self, pattern: str, receiver: Callable[[Sequence[StateChange]], None]) -> tuple[list[Entry], Stop]:
        """Return the entries that match, call `receiver` for each later change; the second value ends that."""
        state, clock, elements = self._state, self._clock, self.read_pattern(pattern)

        def receive(changes: Sequence[Change], source: str) -> None:
            now = clock.now_ms()
            receiver([_change_of(change, source, now) for change in changes])

        watch = state.watch(elements, receive)
        return state.entries(elements), lambda: state.end_watch(watch)

    def check_watch(self, pattern: str) -> None:
        """Check that something of a pattern may be seen by the rights of now. Raises: AccessRefusedError."""
        self._state.check_watch(self.read_pattern(pattern))

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_key(self, key: str) -> None:
        """Check that a text is a key. Raises: InvalidKeyError."""
        fault = size_fault(key, self._state.key_bytes_max)
        if fault is not None:
            raise InvalidKeyError(f"the key '{key[:80]}...' {fault}")
        if check_key(key) is not None:
            raise InvalidKeyError(f"{key!r} has a wildcard where a key is needed")

    def _check_writable(self, key: str) -> None:
        self.check_key(key)
        self._check_not_own(key)

    def _check_not_own(self, key: str) -> None:
        if self._state.is_transient(key) or is_secret(key):
            raise ReadOnlyKeyError(key)

    def read_pattern(self, pattern: str) -> KeyPattern:
        """Return what the store is asked for a pattern. Raises: InvalidPatternError."""
        check_state_pattern(pattern, self._state.key_bytes_max)
        return store_pattern(pattern)

    def _read_value(self, key: str, text: bytes) -> bytes:
        try:
            return self._parse(text)
        except (ValueError, msgspec.DecodeError) as error:
            raise InvalidValueError(f"the value of {key!r} is no JSON: {error}") from error


def check_state_pattern(pattern: str, bytes_max: int) -> None:
    """Check that a text is a pattern over keys.

    Raises:
        InvalidPatternError: the text is too long, or has a wildcard in the wrong place.
    """
    fault = size_fault(pattern, bytes_max)
    if fault is not None:
        raise InvalidPatternError(f"the pattern '{pattern[:80]}...' {fault}")
    if check_pattern(pattern) is not None:
        raise InvalidPatternError(f"{pattern!r} is no pattern: '#' stands only at the end")


def _change_of(change: Change, source: str, now_ms: int) -> StateChange:
    kind, key, value, before, version = change
    assert key is not None
    if kind == Kind.DELETED or not value:  # a retained event without payload takes the value away
        return StateChange(key, None, version, source, now_ms)
    return StateChange(
        key, value, version, source, now_ms, (before.value if isinstance(before, Kept) else before) != value
    )


def _child(parent: str | None, name: str) -> str:
    return name if parent is None else f"{parent}{SEPARATOR}{name}"


def _level_of(entries: Sequence[Entry], start: int) -> tuple[dict[str, tuple[bytes, int]], dict[str, int | None]]:
    """Return the values of the direct children among entries whose names begin at `start`, and which have children.

    The number of children is 0 or `None`: to count them in the past is not worth its price.
    """
    level: dict[str, tuple[bytes, int]] = {}
    counts: dict[str, int | None] = {}
    for key, value, version in entries:
        if len(key) < start:
            continue  # the parent
        name, separator, _ = key[start:].partition(SEPARATOR)
        if separator:
            counts[name] = None
        else:
            level[name] = value, version
            counts.setdefault(name, 0)
    return level, counts
