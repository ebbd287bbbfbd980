"""The state below a root, as an operator with this root reads and changes it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import Identity, Root
from babelbus.core.state.differences import Differences, Revision
from babelbus.core.state.editor import Entry, Lock, Nodes, StateChange, StateEditor, Stop
from babelbus.core.state.guard import GuardedHistory, GuardedState
from babelbus.core.state.history import AsOf, History
from babelbus.core.state.paging import PageRequest
from babelbus.core.state.patterns import MULTI_WILDCARD
from babelbus.core.state.tree import State, Testament


class RootedStateEditor(StateEditor):
    """The state below a root: keys and patterns are relative to the root.

    Each method translates once: a method of the base class that calls another public one would translate twice.
    """

    def __init__(self, root: Root, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._root = root

    def _shown_nodes(self, nodes: Nodes, *, are_keys: bool = False) -> Nodes:
        relative = self._root.relative
        shown = [
            msgspec.structs.replace(one, key=relative(one.key), name=relative(one.name) if are_keys else one.name)
            for one in nodes.nodes
        ]
        after = relative(nodes.after) if are_keys and nodes.after is not None else nodes.after
        return Nodes(shown, nodes.total, after)

    async def level(self, parent: str | None, request: PageRequest, moment: AsOf | None) -> Nodes:
        """Return a page of the direct children of a key, `None` is the root; no nodes if it has none."""
        absolute = self._root.name if parent is None else self._root.absolute(parent)
        return self._shown_nodes(await super().level(absolute, request, moment))

    async def search(self, pattern: str, request: PageRequest) -> Nodes:
        """Return a page of the present entries that match a pattern; their names are their keys."""
        after = None if request.after is None else self._root.absolute(request.after)
        request = msgspec.structs.replace(request, after=after)
        return self._shown_nodes(await super().search(self._root.absolute(pattern), request), are_keys=True)

    def child_count(self, key: str) -> int:
        """Return how many direct children a key has; 0 if not all that is below it may be seen."""
        return super().child_count(self._root.absolute(key))

    async def differences(
        self, pattern: str, first: AsOf, second: AsOf | None, *, after: str | None, count: int
    ) -> Differences:
        """Return how the keys of a pattern differ between two moments, `None` is now, a page in their order."""
        absolute, relative = self._root.absolute, self._root.relative
        after = None if after is None else absolute(after)
        differences = await super().differences(absolute(pattern), first, second, after=after, count=count)
        rows = [msgspec.structs.replace(row, key=relative(row.key)) for row in differences.rows]
        next_after = None if differences.next_after is None else relative(differences.next_after)
        return msgspec.structs.replace(differences, rows=rows, next_after=next_after)

    def locks(self) -> list[Lock]:
        """Return the locks that somebody holds."""
        return [msgspec.structs.replace(one, key=self._root.relative(one.key)) for one in super().locks()]

    def testaments(self) -> dict[str, tuple[Testament, list[str]]]:
        """Return the testaments by their owners, each with its grave goods as patterns."""
        relative, shown = self._root.relative, {}
        for owner, (testament, goods) in super().testaments().items():
            will = tuple((relative(key), value) for key, value in testament.last_will)
            shown[owner] = msgspec.structs.replace(testament, last_will=will), [relative(one) for one in goods]
        return shown

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

    def find(self, key: str) -> Entry | None:
        """Return the entry of a key, `None` if the key has no value."""
        entry = super().find(self._root.absolute(key))
        return None if entry is None else self._shown([entry])[0]

    def entries(self, pattern: str) -> list[Entry]:
        """Return the present entries that match a pattern."""
        return self._shown(super().entries(self._root.absolute(pattern)))

    def children(self, parent: str | None) -> list[str]:
        """Return the names of the direct children of a key, `None` is the root; or raise `NoSuchKeyError`."""
        return super().children(self._root.name if parent is None else self._root.absolute(parent))

    def set(self, key: str, value: bytes) -> None:
        """Set a plain value, or raise `InvalidValueError` or `VersionedError`."""
        super().set(self._root.absolute(key), value)

    def set_all(self, entries: Sequence[tuple[str, bytes]]) -> None:
        """Set plain values or, if a value is invalid or a key holds a version, none; see `set`."""
        super().set_all([(self._root.absolute(key), value) for key, value in entries])

    def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value if the key has `version`, and return the next version; or raise `VersionMismatchError`."""
        return super().compare_and_set(self._root.absolute(key), value, version)

    def put_all(self, entries: Sequence[Entry]) -> None:
        """Set all entries or, if an entry is invalid, none; replace what the keys have."""
        super().put_all([(self._root.absolute(key), value, version) for key, value, version in entries])

    def delete(self, key: str) -> Entry:
        """Delete a value and return the entry with version 0, or raise `NoSuchKeyError`."""
        return self._shown([super().delete(self._root.absolute(key))])[0]

    def delete_matching(self, pattern: str) -> list[Entry]:
        """Delete the entries that match a pattern and return them."""
        return self._shown(super().delete_matching(self._root.absolute(pattern)))

    def set_testament(self, owner: str, goods: Sequence[str], will: Sequence[tuple[str, bytes]]) -> None:
        """Keep a testament: patterns whose keys are deleted, and values that are set then, when `owner` is gone."""
        absolute = self._root.absolute
        super().set_testament(owner, [absolute(one) for one in goods], [(absolute(key), value) for key, value in will])

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

    def check_watch(self, pattern: str) -> None:
        """Check that something of a pattern may be seen by the rights of now. Raises: AccessRefusedError."""
        super().check_watch(self._root.absolute(pattern))


def editor_for(
    principal: Identity,
    state: State | GuardedState,
    history: History | GuardedHistory,
    clock: Clock,
    read_value: Callable[[bytes], bytes],
) -> StateEditor:
    """Return the editor of a principal, whose keys are relative to its root if it has one."""
    if principal.root is not None:
        return RootedStateEditor(principal.root, state, history, clock, principal.source, read_value)
    return StateEditor(state, history, clock, principal.source, read_value)
