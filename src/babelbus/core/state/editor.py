"""The state as an operator reads and changes it: keys and patterns are checked, values are read as JSON.

A change returns when it is as durable as `state.ack` says.
"""

from collections.abc import Callable, Sequence

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import Root
from babelbus.core.state.guard import GuardedHistory, GuardedState
from babelbus.core.state.history import AsOf, History, Revision
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.log import Change, Kind
from babelbus.core.state.patterns import MULTI_WILDCARD, check_key, check_pattern, size_fault, store_pattern
from babelbus.core.state.tree import Commit, InvalidKeyError, State
from babelbus.errors import BabelbusError

EVERYTHING = KeyPattern((), rest=True)
_TOLD_KINDS = frozenset((Kind.SET, Kind.DELETED, Kind.RETAINED))

Entry = tuple[str, bytes, int]
"""Key, value (JSON text) and version (0: a plain value)."""


Stop = Callable[[], None]


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
    """One change of the state; `value` is `None` when it was deleted. `source` is who made it."""

    key: str
    value: bytes | None
    version: int
    source: str
    timestamp: int


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
        self._check_key(key)
        value, version = self._state.get_version(key) if moment is None else await self._history.get(key, moment)
        return key, value, version

    async def match(self, pattern: str, moment: AsOf | None) -> list[Entry]:
        """Return the entries that match a pattern."""
        wanted = self._read_pattern(pattern)
        return self._state.entries(wanted) if moment is None else await self._history.match(wanted, moment)

    async def tree(self, moment: AsOf | None) -> list[Entry]:
        """Return all entries but the server's own."""
        if moment is not None:
            return await self._history.match(None, moment)
        return [entry for entry in self._state.entries(EVERYTHING) if not self._state.is_transient(entry[0])]

    async def set(self, key: str, value: bytes) -> None:
        """Set a plain value, or raise `InvalidValueError` or `VersionedError`."""
        self._check_writable(key)
        self._state.set(key, self._read_value(key, value))
        await self._state.commit(self._source).wait()

    async def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value if the key has `version`, and return the next version; or raise `VersionMismatchError`."""
        self._check_writable(key)
        made = self._state.compare_and_set(key, self._read_value(key, value), version)
        await self._state.commit(self._source).wait()
        return made

    async def put_all(self, entries: Sequence[Entry]) -> None:
        """Set all entries or, if an entry is invalid, none; replace what the keys have."""
        checked = []
        for key, value, version in entries:
            self._check_writable(key)
            if not 0 <= version < 2**63:
                raise InvalidValueError(f"{key!r}: a version is a whole number from 0 on, not {version}")
            checked.append((key, self._read_value(key, value), version))
        for key, value, version in checked:
            self._state.put(key, value, version)
        await self._state.commit(self._source).wait()

    async def delete(self, key: str) -> Entry:
        """Delete a value and return the entry with version 0, or raise `NoSuchKeyError`."""
        self._check_writable(key)
        value = self._state.delete(key)
        await self._state.commit(self._source).wait()
        return key, value, 0

    async def delete_matching(self, pattern: str) -> list[Entry]:
        """Delete the entries that match a pattern and return them."""
        if self._state.is_transient(pattern):
            raise ReadOnlyKeyError(pattern)
        found = self._state.delete_matching(self._read_pattern(pattern))
        await self._state.commit(self._source).wait()
        return [(key, value, 0) for key, value in found]

    async def revisions(self, key: str, before: int | None, count_max: int) -> tuple[list[Revision], int]:
        """Return the last stored changes of a key below an offset, and from which offset on they are complete."""
        self._check_key(key)
        return await self._history.revisions(key, before=before, count_max=count_max)

    def watch(self, pattern: str, receiver: Callable[[Sequence[StateChange]], None]) -> tuple[list[Entry], Stop]:
        """Return the entries that match, call `receiver` for each later change; the second value ends that."""
        wanted = self._read_pattern(pattern)
        state, clock = self._state, self._clock
        since = state.commit_number
        matches = _matcher(wanted)

        def hear(changes: Sequence[Change], commit: Commit) -> None:
            if commit.number <= since:
                return  # told with what there was
            found = [
                change
                for change in changes
                if change[0] in _TOLD_KINDS and matches(change[1]) and state.may_see(change[1])
            ]
            if found:
                now = clock.now_ms()
                receiver([_change_of(change, commit.source, now) for change in found])

        state.listeners.append(hear)
        return state.entries(wanted), lambda: state.listeners.remove(hear)

    def _check_key(self, key: str) -> None:
        fault = size_fault(key, self._state.key_bytes_max)
        if fault is not None:
            raise InvalidKeyError(f"the key '{key[:80]}...' {fault}")
        if check_key(key) is not None:
            raise InvalidKeyError(f"{key!r} has a wildcard where a key is needed")

    def _check_writable(self, key: str) -> None:
        self._check_key(key)
        if self._state.is_transient(key):
            raise ReadOnlyKeyError(key)

    def _read_pattern(self, pattern: str) -> KeyPattern:
        check_state_pattern(pattern, self._state.key_bytes_max)
        return store_pattern(pattern)

    def _read_value(self, key: str, text: bytes) -> bytes:
        try:
            return self._parse(text)
        except (ValueError, msgspec.DecodeError) as error:
            raise InvalidValueError(f"the value of {key!r} is no JSON: {error}") from error


class RootedStateEditor(StateEditor):
    """The state below a root: keys and patterns are relative to the root."""

    def __init__(
        self,
        root: Root,
        state: State | GuardedState,
        history: History | GuardedHistory,
        clock: Clock,
        source: str,
        read_value: Callable[[bytes], bytes],
    ) -> None:
        super().__init__(state, history, clock, source, read_value)
        self._root = root

    def _shown(self, entries: Sequence[Entry]) -> list[Entry]:
        return [(self._root.relative(key), value, version) for key, value, version in entries]

    async def get(self, key: str, moment: AsOf | None) -> Entry:
        """Return a value, or raise `NoSuchKeyError`."""
        return self._shown([await super().get(self._root.absolute(key), moment)])[0]

    async def match(self, pattern: str, moment: AsOf | None) -> list[Entry]:
        """Return the entries that match a pattern."""
        return self._shown(await super().match(self._root.absolute(pattern), moment))

    async def tree(self, moment: AsOf | None) -> list[Entry]:
        """Return all entries."""
        return await self.match(MULTI_WILDCARD, moment)

    async def set(self, key: str, value: bytes) -> None:
        """Set a plain value, or raise `InvalidValueError` or `VersionedError`."""
        await super().set(self._root.absolute(key), value)

    async def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value if the key has `version`, and return the next version; or raise `VersionMismatchError`."""
        return await super().compare_and_set(self._root.absolute(key), value, version)

    async def put_all(self, entries: Sequence[Entry]) -> None:
        """Set all entries or, if an entry is invalid, none; replace what the keys have."""
        await super().put_all([(self._root.absolute(key), value, version) for key, value, version in entries])

    async def delete(self, key: str) -> Entry:
        """Delete a value and return the entry with version 0, or raise `NoSuchKeyError`."""
        return self._shown([await super().delete(self._root.absolute(key))])[0]

    async def delete_matching(self, pattern: str) -> list[Entry]:
        """Delete the entries that match a pattern and return them."""
        return self._shown(await super().delete_matching(self._root.absolute(pattern)))

    async def revisions(self, key: str, before: int | None, count_max: int) -> tuple[list[Revision], int]:
        """Return the last stored changes of a key below an offset, and from which offset on they are complete."""
        return await super().revisions(self._root.absolute(key), before, count_max)

    def watch(self, pattern: str, receiver: Callable[[Sequence[StateChange]], None]) -> tuple[list[Entry], Stop]:
        """Return the entries that match, call `receiver` for each later change; the second value ends that."""
        relative = self._root.relative

        def hear(changes: Sequence[StateChange]) -> None:
            receiver([msgspec.structs.replace(change, key=relative(change.key)) for change in changes])

        entries, stop = super().watch(self._root.absolute(pattern), hear)
        return self._shown(entries), stop


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


def _matcher(pattern: KeyPattern) -> Callable[[str | None], bool]:
    if None not in pattern.elements and not pattern.rest:
        return "/".join(element for element in pattern.elements if element is not None).__eq__
    return lambda key: key is not None and pattern.matches(key)


def _change_of(change: Change, source: str, now_ms: int) -> StateChange:
    kind, key, value, _, version = change
    assert key is not None
    gone = kind == Kind.DELETED or not value  # a retained event without payload takes the value away
    return StateChange(key, None if gone else value, version, source, now_ms)
