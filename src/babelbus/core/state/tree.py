"""State: the last value of each key, a hierarchical tree, backed by the compacted topic `$state` (docs/state.md).

A value is JSON text. A change takes effect at once for whoever reads, and is told to listeners and answered when the
log has it at its ack level: one `commit` for all changes of a chunk, so that a chunk costs one append. When the log
refuses, the changes are taken back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter

import msgspec

from babelbus.core.access import Action, Rights
from babelbus.core.receipt import DONE, Promise, settled
from babelbus.core.state.key_index import SEPARATOR, KeyPattern, Names
from babelbus.core.state.locks import Locks
from babelbus.core.state.log import Change, Commit, Entry, Kept, Kind, StateLog, Unheard, parts_of
from babelbus.core.state.patterns import KEY_BYTES_MAX
from babelbus.core.state.reunion import missing_keys
from babelbus.core.state.watches import Receive, Watch, Watches
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError, StorageError

log = logging.getLogger(__name__)


class NoSuchKeyError(BabelbusError):
    """The key has no value; of a parent: it does not exist."""

    def __init__(self, key: str) -> None:
        super().__init__(f"nothing stored under {key!r}")
        self.key = key


class InvalidKeyError(BabelbusError):
    """No value can have this key."""


class VersionedError(BabelbusError):
    """The key holds a value with a version, which only compare-and-set may change."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} holds a value with a version; use compare-and-set")
        self.key = key


class VersionMismatchError(BabelbusError):
    """Compare-and-set found another version than it was told."""

    def __init__(self, key: str, wanted: int, found: int) -> None:
        super().__init__(f"{key!r} has version {found}, not {wanted}")
        self.key, self.wanted, self.found = key, wanted, found


DELETIONS_AT_ONCE = 2_000
"""Keys that a testament deletes in one turn of the event loop: about 20 ms."""

Listener = Callable[[Sequence[Change], Commit], None]
Published = tuple[Promise, Callable[[], None]]
"""The promise of the topics that record the changes, and the call that shows other changes to live subscriptions."""
Publish = Callable[[Sequence[Change], Commit], Published]


class Testament(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes when an owner is gone: the keys of these patterns are deleted, then these values are set."""

    grave_goods: tuple[KeyPattern, ...] = ()
    last_will: tuple[tuple[str, msgspec.Raw], ...] = ()
    principal: str = ""
    """The principal that set it while the gate was on; its rights of then and of now count."""


_read_testament = msgspec.json.Decoder(Testament).decode


class State:
    """The tree. All calls come from the event loop; `commit` writes to the log and nothing else blocks.

    `listeners` hear of changes in the order in which they took effect, once the log has them; `publish` makes events
    of them for topics, in the turn of the event loop in which the log gets them, and for live subscriptions of others.
    """

    def __init__(
        self,
        state_log: StateLog,
        publish: Publish = lambda changes, commit: NOTHING_PUBLISHED,
        *,
        key_bytes_max: int = KEY_BYTES_MAX,
    ) -> None:
        self._log = state_log
        self.key_bytes_max = key_bytes_max
        """Longest key or pattern that clients may send; who takes requests checks it (`size_fault`)."""
        self._publish = publish
        self._values: dict[str, Entry] = {}
        self._names = Names(self._values)
        self._testaments: dict[str, bytes] = {}
        self._pending: list[Change] = []
        self._number = 0
        self._open: dict[int, Sequence[Change]] = {}
        """Commits that the log has not answered yet, in order."""
        self._untold: dict[int, int] = {}
        """Commits that are appended and not told, in order, and the offset from which on the log has each."""
        self.unheard: list[Unheard] | None = []
        """The changes that the log had from the `since` of `open` on; `None` if it did not have them all."""
        self._last = DONE
        self.rights_of: Callable[[str], Rights | None] = lambda principal: None
        """Returns the rights of the principal of a testament; `None` while the gate is off."""
        self.shows_keys: Callable[[str], bool] = lambda key: False
        """Returns whether the name or the value of a key shows keys of others: for whom some keys are not to be seen,
        it is not there. All keys below such a key are such keys."""
        self.away: frozenset[str] = frozenset()
        """Owners whose sessions go on at the next server, or have not begun here again: their testaments wait."""
        self.locks = Locks()
        self.watches = Watches()
        self.listeners: list[Listener] = []
        self.watches_children = False
        """Whether anybody wants `Kind.CHILDREN`, which costs a little for each new key."""

    def open(
        self,
        topic_of: Callable[[str], Topic | None] = lambda key: None,
        away: Iterable[str] = (),
        since: int | None = None,
    ) -> None:
        """Load what the log has, and execute the testaments of the clients that went with the last server.

        Clients that are `away` have sessions that go on here: see `call_back`. With `since`, the changes from this
        offset of the log on are kept in `unheard`, and all clients are away: sessions that go on hear of testaments.

        Topics that record a key, as `topic_of` tells, get the changes that a crash has kept from them.

        Raises:
            StorageError: the log cannot be read.
        """
        self.away = frozenset(away)
        self._load(since)
        if since is not None:
            self.away |= self._testaments.keys()
        missing = missing_keys(self._log.changed_last(), self.find, topic_of)
        if missing:
            log.info("state: publishing %d values that a crash has kept from their topics", len(missing))
            self._correct_topics(missing)
        left = self._left()
        self._execute_all(left)
        if left:
            log.info("state: executed the testaments of %d clients of the last run", len(left))

    def _load(self, since: int | None = None) -> None:
        loaded = self._log.load(since)
        self.unheard = loaded.unheard
        values = self._values
        transient = {key: entry for key, entry in values.items() if self._log.is_transient(key)}
        values.clear()
        values.update(loaded.values)
        values.update(transient)
        self._testaments = loaded.testaments
        self._names = Names(values)
        add = self._names.add
        for key in values:
            add(key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._values)

    def is_transient(self, key: str) -> bool:
        """Return whether a key, or a pattern, is one of those that are not logged."""
        return self._log.is_transient(key)

    @property
    def commit_number(self) -> int:
        """Number of the last commit: whoever begins to listen now wants what comes after it."""
        return self._number

    @property
    def told_offset(self) -> int:
        """The offset of the log before which every change is logged and told to the listeners."""
        end = min(self._log.end, self._log.next_offset)  # a failed flush may have cut the log
        return min(next(iter(self._untold.values())), end) if self._untold else end

    def may_see(self, key: str | None) -> bool:
        """Return whether a value may be seen: always; see `GuardedState`."""
        return True

    def check_watch(self, pattern: KeyPattern) -> None:
        """Return at once: everything may be seen; see `GuardedState`."""

    def find(self, key: str) -> bytes | None:
        """Return a value, `None` if the key has no value."""
        entry = self._values.get(key)
        return entry.value if isinstance(entry, Kept) else entry

    def find_entry(self, key: str) -> tuple[str, bytes, int] | None:
        """Return the entry of a key (version 0: a plain value), `None` if the key has no value."""
        entry = self._values.get(key)
        return None if entry is None else (key, *parts_of(entry))

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            NoSuchKeyError: the key has no value.
        """
        return self.get_version(key)[0]

    def get_version(self, key: str) -> tuple[bytes, int]:
        """Return a value and its version, 0 for one that has none.

        Raises:
            NoSuchKeyError: the key has no value.
        """
        entry = self._values.get(key)
        if entry is None:
            raise NoSuchKeyError(key)
        return parts_of(entry)

    def match(self, pattern: KeyPattern) -> list[tuple[str, bytes]]:
        """Return the keys and values that match a pattern, in no particular order; costs what it finds."""
        return [(key, value) for key, value, _ in self.entries(pattern)]

    def entries(self, pattern: KeyPattern) -> list[tuple[str, bytes, int]]:
        """Return key, value and version (0: plain) of all entries that match a pattern."""
        values = self._values
        return [(key, *parts_of(values[key])) for key in self._names.match(pattern)]

    def children(self, parent: str | None) -> list[str]:
        """Return the names of the direct children of a key; `None` is the root.

        Raises:
            NoSuchKeyError: there is no such node.
        """
        found = self._names.children([] if parent is None else parent.split(SEPARATOR))
        if found is None:
            raise NoSuchKeyError(parent or "")
        return found

    def all_children(self, parent: str | None) -> list[str]:
        """Return the names of the direct children of a key, also if it has none."""
        return self._names.children([] if parent is None else parent.split(SEPARATOR)) or []

    def child_count(self, key: str) -> int:
        """Return how many direct children a key has."""
        return self._names.child_count(key.split(SEPARATOR))

    def keys(self, pattern: KeyPattern) -> list[str]:
        """Return the keys that match a pattern."""
        return self._names.match(pattern)

    def may_list(self, key: str) -> bool:
        """Return whether something at or below a key may be seen: always; see `GuardedState`."""
        return True

    def sees_all(self, pattern: KeyPattern) -> bool:
        """Return whether every key of a pattern may be seen: always; see `GuardedState`."""
        return True

    def sees_below(self, parent: str | None) -> bool:
        """Return whether everything below a key may be seen: always; see `GuardedState`."""
        return True

    def testaments(self) -> dict[str, Testament]:
        """Return the testaments by their owners; a testament that cannot be read is left out."""
        testaments = {}
        for owner, text in self._testaments.items():
            with contextlib.suppress(msgspec.DecodeError):  # executing it is what says so
                testaments[owner] = _read_testament(text)
        return testaments

    def has_testament(self, owner: str) -> bool:
        """Return whether there is a testament of `owner`."""
        return owner in self._testaments

    def children_matching(self, pattern: KeyPattern) -> list[str]:
        """Return the names of the children of all nodes that the elements of a pattern mean, each once."""
        return self._names.children_matching(pattern)

    def watch(self, pattern: KeyPattern, receive: Receive, may_see: Callable[[str], bool] | None = None) -> Watch:
        """Call `receive` with the changes of a pattern from the next commit on; `entries` are the values up to then."""
        watch = Watch(pattern, receive, self._number, may_see)
        self.watches.add(watch)
        return watch

    def end_watch(self, watch: Watch) -> None:
        """End a watch, which may have ended."""
        self.watches.remove(watch)

    # -- changing ----------------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a plain value.

        Raises:
            VersionedError: the key holds a value with a version.
        """
        values = self._values
        before = values.get(key)
        if before is None:
            self._add(key)
        elif isinstance(before, Kept):
            raise VersionedError(key)
        values[key] = value
        self._pending.append((_SET, key, value, before, 0))

    def set_all(self, keys: Sequence[str], values: Sequence[bytes]) -> bool:
        """Set plain values; return `False` and set no value if a key holds a value with a version.

        Costs a third of `set` for each: only new keys, and keys that come twice, need steps of their own.
        """
        stored = self._values
        before = list(map(stored.get, keys))
        kinds = set(map(type, before))
        if Kept in kinds:
            return False
        if type(None) in kinds:
            add = self._add if self.watches_children else self._names.add
            for key, entry in zip(keys, before, strict=True):
                if entry is None:
                    add(key)
        if len(set(keys)) == len(keys):
            stored.update(zip(keys, values, strict=True))
        else:
            for number, (key, value) in enumerate(zip(keys, values, strict=True)):
                before[number] = stored.get(key)
                stored[key] = value
        self._pending += zip(repeat(_SET), keys, values, before, repeat(0))
        return True

    def put(self, key: str, value: bytes, version: int = 0, kind: Kind = Kind.SET) -> None:
        """Set a value whatever the key holds, plain for version 0: a last will, an import, a retained event."""
        before = self._values.get(key)
        if before is None:
            self._add(key)
        self._values[key] = Kept(value, version) if version else value
        self._pending.append((kind, key, value, before, version))

    def put_all(self, entries: Iterable[tuple[str, bytes, int]]) -> None:
        """Set values whatever their keys hold; see `put`."""
        for key, value, version in entries:
            self.put(key, value, version)

    def compare_and_set(self, key: str, value: bytes, version: int) -> int:
        """Set a value with the next version if the key has `version` (0: no or a plain value); return the new version.

        Raises:
            VersionMismatchError: the key has another version.
        """
        before = self._values.get(key)
        found = before.version if isinstance(before, Kept) else 0
        if version != found:
            raise VersionMismatchError(key, version, found)
        self.put(key, value, found + 1)
        return found + 1

    def delete(self, key: str, kind: Kind = Kind.DELETED) -> bytes:
        """Delete a value and return it; of kind `RETAINED` because of an event, which the listeners have received.

        Raises:
            NoSuchKeyError: the key has no value.
        """
        before = self._values.pop(key, None)
        if before is None:
            raise NoSuchKeyError(key)
        left = self._names.remove(key)
        self._note_children(key, left)
        value, _ = parts_of(before)
        self._pending.append((kind, key, value if kind == Kind.DELETED else b"", before, 0))
        return value

    def delete_matching(
        self, pattern: KeyPattern, granted: Callable[[str], bool] | None = None
    ) -> list[tuple[str, bytes]]:
        """Delete all values that match a pattern, if their keys are `granted`, and return them.

        Transient keys stay if the pattern begins with a wildcard.
        """
        keys = self._names.match(pattern)
        if not pattern.elements or pattern.elements[0] is None:
            keys = [key for key in keys if not self._log.is_transient(key)]
        if granted is not None:
            keys = [key for key in keys if granted(key)]
        return [(key, self.delete(key)) for key in keys]

    def note(self, key: str, value: bytes) -> None:
        """Publish a value to the listeners, in order with the changes; it is not stored."""
        self._pending.append((Kind.PUBLISHED, key, value, None, 0))

    def _add(self, key: str) -> None:
        self._note_children(key, self._names.add(key))

    def _note_children(self, key: str, depth: int) -> None:
        """Record that the names below the parents of a key have changed, from a depth on."""
        if self.watches_children:
            self._pending += _children(key, depth)

    # -- testaments --------------------------------------------------------------------------------------------------

    def set_testament(self, owner: str, testament: Testament, principal: str = "") -> None:
        """Keep the testament of `owner`, also over a restart of the server; an empty one takes it back."""
        before = self._testaments.get(owner)
        if testament == NO_TESTAMENT:
            if before is None:
                return
            del self._testaments[owner]
            text = b""
        else:
            text = msgspec.json.encode(msgspec.structs.replace(testament, principal=principal))
            # What was set last is executed last, as after a start from a compacted log, which has no more than that.
            self._testaments.pop(owner, None)
            self._testaments[owner] = text
        self._pending.append((Kind.TESTAMENT, owner, text, before, 0))

    def execute(self, owner: str) -> None:
        """Run the testament of `owner`: first the grave goods, then the last will, each in order.

        Transient keys, and keys that its principal may not change any more, are neither deleted nor set.
        """
        for _ in self._execute(owner):
            pass

    def _left(self) -> list[str]:
        return [owner for owner in self._testaments if owner not in self.away]

    def _execute_all(self, owners: Iterable[str]) -> Promise:
        for owner in owners:
            self.execute(owner)
        committed = self.commit("testament")
        committed.when_done(_note_not_executed)
        return committed

    async def hand_over(self, away: Iterable[str]) -> None:
        """Run the testaments of all owners but those that are `away`, and wait until what changed is told."""
        self.away = frozenset(away)
        await settled([self._execute_all(self._left())])

    def call_back(self, present: Collection[str]) -> None:
        """Run the testaments of the owners that were away and are not `present`."""
        missing, self.away = self.away - set(present), frozenset()
        self._execute_all(owner for owner in list(self._testaments) if owner in missing)

    def execute_in_turns(self, owner: str, source: str, then: Callable[[], None]) -> None:
        """Run the testament of `owner` as `execute` does, then call `then`, which commits.

        A testament whose patterns mean many keys, or look at many, takes many turns of the event loop.
        """
        rest = self._execute(owner)

        def turn() -> None:
            for _ in rest:
                committed = self.commit(source)
                committed.when_done(_note_not_executed)
                if committed.error is not None:
                    break  # its deletions were taken back: the testament must not end without them
                asyncio.get_running_loop().call_soon(turn)
                return
            then()

        turn()

    def _execute(self, owner: str) -> Iterator[None]:
        """Run a testament; yield wherever others may have a turn."""
        text = self._testaments.get(owner)
        if text is None:
            return
        try:
            testament = _read_testament(text)
        except msgspec.DecodeError as error:  # of another release: the rest of the state is not its matter
            log.error("state: a testament cannot be read: %s", error)
            testament = NO_TESTAMENT
        rights = self.rights_of(testament.principal)

        def granted(key: str) -> bool:
            return not self._log.is_transient(key) and (rights is None or rights.may(Action.WRITE_STATE, key))

        for _ in self._bury(testament.grave_goods, granted):
            yield
            if self._testaments.get(owner) is not text:
                return  # it was executed by `close`, or its owner is back
        for key, value in testament.last_will:
            if granted(key):
                self.put(key, bytes(value))
        self.set_testament(owner, NO_TESTAMENT)

    def _bury(self, goods: Sequence[KeyPattern], granted: Callable[[str], bool]) -> Iterator[None]:
        """Delete the keys of grave goods in the order of the patterns; yield wherever others may have a turn."""
        found: list[tuple[int, str]] = []
        yield from self._names.search(goods, found)
        found.sort(key=itemgetter(0))
        for count, (_, key) in enumerate(found):
            if count and not count % DELETIONS_AT_ONCE:
                yield
            if key in self._values and granted(key):
                self.delete(key)

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(self, source: str) -> Promise:
        """Append all changes since the last commit to the log, in one batch; `source` is their author (`ce_source`).

        The receipt is done when the log has them at its ack level, and so have the topics that record their keys. When
        the log refuses them none of them holds; when it loses them (a failed flush) what it still has holds; when a
        topic refuses its event the state has changed all the same.
        """
        changes = self._pending
        if not changes:
            return self._before
        self._pending = []
        self._number += 1
        offset = self._log.next_offset
        try:
            receipt: Promise | None = self._log.append(changes, source)
        except StorageError as error:
            self._take_back(changes)
            return Promise.refused(error)
        except UnicodeEncodeError as error:  # a subject that came as other bytes: no key of the state
            self._take_back(changes)
            return Promise.refused(InvalidKeyError(f"a key is no valid Unicode: {error}"))
        if self._log.lost_some:
            receipt = self._write_again() or receipt
        commit = Commit(self._number, source)
        self._untold[commit.number] = offset
        if receipt is None:
            receipt = self._before  # nothing to keep: told behind what was changed before
        self._last = receipt
        if self._log.wants_checkpoint:
            self._log.begin_checkpoint(self._values, self._testaments)
        recorded, show = self._publish(changes, commit)  # now: one flush of the disk for the log and the topics
        if receipt.done:
            self._tell(changes, commit)
            self._untold.pop(commit.number, None)
            show()
            return recorded
        whole = Promise()
        self._open[commit.number] = changes

        def logged(done: Promise) -> None:
            if done.error is None:
                self._open.pop(commit.number, None)
                self._tell(changes, commit)
                self._untold.pop(commit.number, None)
                show()
                recorded.when_done(lambda topics: whole.resolve(topics.error))
                return
            if commit.number in self._open:  # all that waited for the flush fails together: the log is read once
                self._load_again(commit, done.error)
            whole.resolve(done.error)

        receipt.when_done(logged)
        return whole

    def _write_again(self) -> Promise | None:
        """Append the stored changes that the log has lost and memory still has; return `None` if nothing is missing."""
        try:
            loaded = self._log.load()
            keys = {**loaded.values, **self._values}
            changes = [
                _change(key, None, self._values.get(key))
                for key in keys
                if loaded.values.get(key) != self._values.get(key) and not self._log.is_transient(key)
            ]
            for owner in {**loaded.testaments, **self._testaments}:
                text = self._testaments.get(owner, b"")
                if loaded.testaments.get(owner, b"") != text:
                    changes.append((Kind.TESTAMENT, owner, text, None, 0))
            log.error("state: a flush failed and the log lost records, writing %d changes again", len(changes))
            return self._log.append(changes, "recovered") if changes else None
        except StorageError as error:
            self._log.lost_some = True  # the next commit tries again
            log.error("state: changes that the log lost are not written again yet: %s", error)
            return None

    @property
    def _before(self) -> Promise:
        """Return the receipt of what was logged last, while it is open: what failed once is nobody else's matter."""
        return DONE if self._last.done else self._last

    def _load_again(self, commit: Commit, error: BabelbusError) -> None:
        """Load the state that the log still has, and call the listeners for the differences."""
        log.error("state: a flush failed, reading the log again: %s", error)
        told: dict[str, Entry | None] = {}
        for changes in self._open.values():
            for kind, key, _, before, _ in changes:
                if key is not None and kind in (Kind.SET, Kind.RETAINED, Kind.DELETED):
                    told.setdefault(key, before)
        self._open.clear()
        try:
            self._load()
        except StorageError as failure:
            log.error("state: the log cannot be read: %s", failure)
            return
        unheard: list[Change] = []
        self._correct_topics(told)
        # A watch may have begun with a value that is lost: its receiver hears what holds, also of what was so before.
        present = [_change(key, None, self._values.get(key)) for key in told]
        self.watches.hear(present, Commit(self._number + 1, commit.source))
        for key, before in told.items():
            now = self._values.get(key)
            if now == before:
                continue
            if self.watches_children:
                unheard += _children(key, 0)
            unheard.append(_change(key, before, now))
        if unheard:
            self._call_listeners(unheard, commit)
        self._untold.clear()  # if the log could not be read, what it has of these commits is told by nobody

    def _correct_topics(self, keys: Iterable[str]) -> None:
        """Publish the values that keys have to the topics that record them, which may have other ones by now."""
        changes = [_change(key, None, self._values.get(key)) for key in keys]
        receipt, _ = self._publish(changes, Commit(self._number, "recovered"))
        receipt.when_done(_note_not_corrected)

    def _tell(self, changes: Sequence[Change], commit: Commit) -> None:
        self.watches.hear(changes, commit)
        self._call_listeners(changes, commit)

    def _call_listeners(self, changes: Sequence[Change], commit: Commit) -> None:
        for listener in self.listeners:
            try:
                listener(changes, commit)
            except Exception:  # a listener's bug must not cost the client its answer
                log.exception("a listener of the state failed")

    def _take_back(self, changes: Sequence[Change]) -> None:
        values = self._values
        for kind, key, _, before, _ in reversed(changes):
            if key is None or kind in (Kind.PUBLISHED, Kind.CHILDREN):
                continue
            if kind == Kind.TESTAMENT:
                if isinstance(before, bytes):
                    self._testaments[key] = before
                else:
                    self._testaments.pop(key, None)
            elif before is None:
                values.pop(key, None)
                self._names.remove(key)
            else:
                values[key] = before
                self._names.add(key)

    async def close(self) -> None:
        """Run the testaments that are left, commit, and write a checkpoint so that the next start is fast."""
        self._execute_all(self._left())
        await self._log.close(self._values, self._testaments)


NO_TESTAMENT = Testament()
NOTHING_PUBLISHED: Published = (DONE, lambda: None)
_SET = Kind.SET


def _note_not_executed(receipt: Promise) -> None:
    if receipt.error is not None:
        log.warning("state: testaments wait for the next start: %s", receipt.error)


def _note_not_corrected(receipt: Promise) -> None:
    if receipt.error is not None:
        log.error("state: topics may have changes that the log has lost: %s", receipt.error)


def _change(key: str, before: Entry | None, now: Entry | None) -> Change:
    """Return the change of a key from one entry to another."""
    if now is None:
        return Kind.DELETED, key, b"" if before is None else parts_of(before)[0], before, 0
    value, version = parts_of(now)
    return Kind.SET, key, value, before, version


def _children(key: str, depth: int) -> list[Change]:
    """Return a change of the children for each parent of a key with `depth` elements or more."""
    elements = key.split(SEPARATOR)
    parents = [SEPARATOR.join(elements[:count]) if count else None for count in range(depth, len(elements))]
    return [(Kind.CHILDREN, parent, b"", None, 0) for parent in parents]
