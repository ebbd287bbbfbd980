"""The methods `state.*` of jebp/1.2 over the state of the core (docs/protocols/jebp.md).

Changes take effect in the order of the calls. All changes of one frame are one commit, and their calls are answered
when the log has it.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import Identity
from babelbus.core.receipt import Promise
from babelbus.core.state import (
    AsOf,
    Granted,
    GuardedState,
    HistoryGoneError,
    InvalidKeyError,
    InvalidPatternError,
    InvalidValueError,
    LockHeldError,
    NoSuchKeyError,
    ReadOnlyKeyError,
    State,
    StateChange,
    StateEditor,
    VersionedError,
    VersionMismatchError,
    editor_for,
)
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.metrics import Metrics, Traffic
from babelbus.protocols.jebp import state_messages as m
from babelbus.protocols.jebp.calls.call import Call, Calls, Family, Method, Stream
from babelbus.protocols.jebp.calls.errors import CODES, CallRefusedError
from babelbus.protocols.jebp.messages import PROTOCOL
from babelbus.storage.errors import OffsetOutOfRangeError

log = logging.getLogger(__name__)

CODES.update(
    {
        InvalidKeyError: "bad_argument",
        InvalidPatternError: "bad_argument",
        InvalidValueError: "bad_argument",
        NoSuchKeyError: "unknown_key",
        OffsetOutOfRangeError: "bad_argument",
        ReadOnlyKeyError: "refused",
        VersionedError: "conflict",
        LockHeldError: "locked",
    }
)
TURN_BYTES: Final = 8 * m.PAGE_BYTES
"""About the most that one stream sends before others have their turn."""
CHANGES_MAX: Final = 1_024
"""Changes that wait for a slow reader before only the last one of each key is kept."""
WAITING_BYTES_MAX: Final = 16 * 2**20
"""Changes that wait for the watches of one connection; beyond them a watch gets the present values again instead."""
CHANGE_BYTES: Final = 200
"""Weight of a change that waits, beside its key and value."""

_encode = msgspec.msgpack.Encoder().encode
_NIL = _encode(None)

ReadValue = Callable[[bytes], bytes]


class StateMethods:
    """The methods of one server, and what its connections share: who waits for a lock, and whose a will is."""

    def __init__(self, state: State, clock: Clock, read_value: ReadValue, metrics: Metrics) -> None:
        self.clock = clock
        self.read_value = read_value
        self.locks: dict[str, _Lock] = {}
        self.wills: dict[str, _Connection] = {}
        self.numbers = itertools.count(1)
        self.received: Traffic = metrics.live_received(PROTOCOL)
        self.delivered: Traffic = metrics.live_delivered(PROTOCOL)
        self.dropped = metrics.live_dropped_total.labels(PROTOCOL, "slow")
        state.locks.receivers.append(self._grant)

    @property
    def methods(self) -> dict[str, Method]:
        """The entries of the table of methods."""
        return {
            "state.get": Method(m.GetValue, self._get),
            "state.get_many": Method(m.GetValues, self._get_many),
            "state.match": Method(m.MatchValues, self._match),
            "state.list": Method(m.ListChildren, self._list),
            "state.as_of": Method(m.ReadPast, self._as_of),
            "state.history": Method(m.ReadHistory, self._history),
            "state.set": Method(m.SetValue, self._set),
            "state.set_many": Method(m.SetValues, self._set_many),
            "state.compare_and_set": Method(m.CompareAndSet, self._compare_and_set),
            "state.delete": Method(m.DeleteValue, self._delete),
            "state.delete_match": Method(m.DeleteMatching, self._delete_match),
            "state.watch": Method(m.WatchValues, self._watch),
            "state.lock": Method(m.LockKey, self._lock),
            "state.will": Method(m.SetWill, self._will),
        }

    def _connection(self, call: Call) -> "_Connection":
        return call.family(self, self._connect)

    def _connect(self, calls: Calls) -> "_Connection":
        return _Connection(self, calls)

    def _grant(self, granted: Granted) -> None:
        lock = self.locks.get(granted.owner) if isinstance(granted.owner, str) else None
        if lock is not None:
            lock.take()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _get(self, call: Call, asked: m.GetValue) -> object:
        entry = self._connection(call).editor.find(asked.key)
        return None if entry is None else entry[1:]

    def _get_many(self, call: Call, asked: m.GetValues) -> object:
        editor = self._connection(call).editor
        _check_count(asked.keys)
        found = map(editor.find, asked.keys)
        return [entry for entry in found if entry is not None]

    def _match(self, call: Call, asked: m.MatchValues) -> Stream:
        connection = self._connection(call)

        def read(pages: _Pages) -> None:
            entries = connection.editor.entries(asked.pattern)
            pages.start(_pages(entries), len(entries))

        return _Pages(call, connection, read).enter()

    def _list(self, call: Call, asked: m.ListChildren) -> object:
        try:
            return self._connection(call).editor.children(asked.parent)
        except NoSuchKeyError:
            return None

    def _as_of(self, call: Call, asked: m.ReadPast) -> Stream:
        connection = self._connection(call)
        if (asked.offset is None) == (asked.time_ms is None) or (asked.key is None) == (asked.pattern is None):
            raise CallRefusedError("bad_argument", "name a key or a pattern, and an offset or a time")
        moment = AsOf(asked.offset, asked.time_ms)

        async def read(pages: _Pages) -> None:
            editor = connection.editor
            try:
                if asked.pattern is not None:
                    entries = await editor.match(asked.pattern, moment)
                else:
                    entries = [await editor.get(asked.key or "", moment)]
            except NoSuchKeyError:
                entries = []
            except HistoryGoneError as error:
                raise CallRefusedError("gone", str(error), (error.offset, error.time_ms)) from error
            pages.start(_pages(entries), len(entries))

        return _Pages(call, connection, lambda pages: call.run(read(pages))).enter()

    def _history(self, call: Call, asked: m.ReadHistory) -> Stream:
        connection = self._connection(call)
        if asked.count_max < 1:
            raise CallRefusedError("bad_argument", f"{asked.count_max} revisions: ask for 1 or more")

        async def read(pages: _Pages) -> None:
            found, complete_from = await connection.editor.revisions(asked.key, asked.before, asked.count_max)
            told = [m.Revision(one.offset, one.timestamp, one.value, one.version, one.source) for one in found]
            pages.start(map(_encode, _cut(told, lambda one: len(one.value or b"") + len(one.source))), complete_from)

        return _Pages(call, connection, lambda pages: call.run(read(pages))).enter()

    # -- changing ----------------------------------------------------------------------------------------------------

    def _set(self, call: Call, asked: m.SetValue) -> Stream:
        connection = self._connection(call)
        connection.editor.set(asked.key, asked.value)
        return connection.changed(call, _NIL)

    def _set_many(self, call: Call, asked: m.SetValues) -> Stream:
        connection = self._connection(call)
        _check_count(asked.entries)
        connection.editor.set_all(asked.entries)
        return connection.changed(call, _NIL)

    def _compare_and_set(self, call: Call, asked: m.CompareAndSet) -> Stream:
        connection = self._connection(call)
        try:
            version = connection.editor.compare_and_set(asked.key, asked.value, asked.version)
        except VersionMismatchError as error:
            raise CallRefusedError("conflict", str(error), error.found) from error
        return connection.changed(call, _encode(version))

    def _delete(self, call: Call, asked: m.DeleteValue) -> Stream | None:
        connection = self._connection(call)
        try:
            _, value, version = connection.editor.delete(asked.key)
        except NoSuchKeyError:
            return None
        return connection.changed(call, _encode((value, version)))

    def _delete_match(self, call: Call, asked: m.DeleteMatching) -> Stream:
        connection = self._connection(call)
        return connection.changed(call, _encode(len(connection.editor.delete_matching(asked.pattern))))

    # -- what lasts as long as the call or the connection ------------------------------------------------------------

    def _watch(self, call: Call, asked: m.WatchValues) -> Stream:
        connection = self._connection(call)
        connection.commit()  # what was asked before is no news of the watch
        return _Watch(call, connection, asked)

    def _lock(self, call: Call, asked: m.LockKey) -> Stream:
        connection = self._connection(call)
        connection.editor.check_key(asked.key)
        owner = f"{call.principal.source}#{next(self.numbers)}"
        root = call.principal.root
        key = asked.key if root is None else root.absolute(asked.key)
        lock = _Lock(call, self.locks, connection.state, owner, key)
        lock.begin(asked.wait_ms)
        return lock

    def _will(self, call: Call, asked: m.SetWill) -> Stream:
        return self._connection(call).set_will(call, asked)


class _Connection(Family):
    """The state as one connection may see and change it, its changes of this frame, and its wills."""

    def __init__(self, methods: StateMethods, calls: Calls) -> None:
        self.methods = methods
        self._calls = calls
        self._principal: Identity | None = None
        self._waiting: list[tuple[Call, bytes]] = []
        self._turns: deque[_Pages] = deque()
        self._will = ""
        self.waiting_bytes = 0
        """Weight of the changes that wait for the watches."""
        self.state: State | GuardedState
        self._editor: StateEditor

    @property
    def editor(self) -> StateEditor:
        """The state for the client with the rights of the moment."""
        principal, broker = self._calls.principal, self._calls.broker
        if principal is not self._principal:
            self._principal = principal
            self.state = broker.state_for(principal)
            history, methods = broker.history_for(principal), self.methods
            self._editor = editor_for(principal, self.state, history, methods.clock, methods.read_value)
        return self._editor

    def changed(self, call: Call, result: bytes) -> Stream:
        """Answer a call with a result when the log has its change."""
        self._waiting.append((call, result))
        return _CHANGING

    def end_of_frame(self) -> None:
        """Append the changes of the frame to the log."""
        self.commit()

    def commit(self) -> None:
        """Append the changes to the log; their calls are answered when it has them."""
        waiting = self._waiting
        if not waiting:
            return
        self._waiting = []
        self.methods.received.inc(len(waiting), 0)

        def answer(done: Promise) -> None:
            if done.error is not None:
                for call, _ in waiting:
                    call.fail(done.error)
                return
            for call, result in waiting:
                call.end_encoded(result)

        self.editor.commit().when_done(answer)

    def enter(self, pages: "_Pages") -> None:
        """Open a stream of pages when it is its turn: one at a time, for each holds what it has read.

        Raises:
            BabelbusError: it is its turn, and it cannot be opened.
        """
        self._turns.append(pages)
        if len(self._turns) == 1:
            try:
                pages.open()
            except BabelbusError:
                self._turns.clear()
                raise

    def waits(self, pages: "_Pages") -> bool:
        """Return whether a stream has its turn or waits for it."""
        return pages in self._turns

    def leave(self, pages: "_Pages") -> None:
        """End the turn of a stream, or its wait for the turn."""
        turns = self._turns
        if pages not in turns:
            return
        is_first = turns[0] is pages
        turns.remove(pages)
        if is_first and turns:
            asyncio.get_running_loop().call_soon(self._open_next, turns[0])

    def _open_next(self, pages: "_Pages") -> None:
        if self._turns and self._turns[0] is pages:
            pages.open_or_fail()

    def set_will(self, call: Call, asked: m.SetWill) -> Stream:
        """Keep a will, until this connection ends or the client sets it on another one."""
        owner = f"{PROTOCOL}/{call.principal.name}/{asked.client}"
        if self._will not in ("", owner):
            raise CallRefusedError("bad_argument", "this connection has a will under another name; take it back first")
        self._will = owner if asked.delete or asked.values else ""
        self.editor.set_testament(owner, asked.delete, asked.values)
        if asked.delete or asked.values:
            self.methods.wills[owner] = self
        else:
            self.methods.wills.pop(owner, None)
        return self.changed(call, _NIL)

    def close(self) -> None:
        """Run the wills."""
        self.commit()
        wills, state = self.methods.wills, self._calls.broker.state
        own = [owner for owner, connection in wills.items() if connection is self]
        for owner in own:
            del wills[owner]
            state.execute(owner)
        if own:
            self.editor.commit().when_done(_note_failure)


class _Pages(Stream):
    """A stream of pages, sent as the client takes them; `read` calls `start` when it has them."""

    def __init__(self, call: Call, connection: _Connection, read: "Callable[[_Pages], object] | None" = None) -> None:
        self._call = call
        self._connection = connection
        self._read = read
        self._pages: Iterator[bytes] | None = None
        self._result: object = None
        self._over = False
        self._scheduled = False

    def enter(self) -> "_Pages":
        """Wait for the turn of this stream on its connection."""
        self._connection.enter(self)
        return self

    def open(self) -> None:
        """Read the pages."""
        if self._read is not None:
            self._read(self)

    def open_or_fail(self) -> None:
        """Read the pages, or end the call with the error."""
        try:
            self.open()
        except BabelbusError as error:
            self._call.fail(error)

    def start(self, pages: Iterable[bytes], result: object = None) -> None:
        """Send pages, then the end."""
        self._pages, self._result = iter(pages), result
        self._later()

    def resume(self) -> None:
        """Send on."""
        self._later()

    def _later(self) -> None:
        if not self._scheduled and not self._over:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self._over:
            return
        try:
            self._send()
        except LocalProtocolError as error:
            self._call.fail(CallRefusedError("too_large", str(error)))
        except BabelbusError as error:
            self._call.fail(error)

    def _send(self) -> None:
        if self._send_pages():
            self._call.end(self._result)

    def _send_pages(self) -> bool:
        """Send pages; return whether all of them are sent."""
        call, pages, size = self._call, self._pages, 0
        while pages is not None and not call.full:
            if size >= TURN_BYTES:
                self._later()
                return False
            page = next(pages, None)
            if page is None:
                return True
            size += len(page)
            call.send(page)
        return False

    def close(self, *, lost: bool) -> None:
        """Send nothing more."""
        self._over = True
        self._pages = None
        self._connection.leave(self)


class _Watch(_Pages):
    """The present entries of a pattern, then its changes: all of them, in order, as long as the client keeps up.

    For a client that does not, the last change of each key is kept; when these are too much too, it gets the present
    entries again.
    """

    def __init__(self, call: Call, connection: _Connection, asked: m.WatchValues) -> None:
        super().__init__(call, connection)
        self._asked = asked
        self._rights = call.principal.rights
        self._changes: list[StateChange] = []
        self._changes_max = CHANGES_MAX
        self._bytes = 0
        self._present = True
        self._again = False
        self._stop: Callable[[], None] | None = None
        self._quota = call.broker.quotas.take_for(call.principal, "subscriptions")
        try:
            self.enter()
        except BabelbusError:
            self._give_back()
            raise

    def _give_back(self) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.give("subscriptions")

    def open(self) -> None:
        """Begin to listen, and send the present entries."""
        entries, self._stop = self._connection.editor.watch(self._asked.pattern, self._hear)
        pages = _present(entries)
        self.start(itertools.chain((_encode((m.RESYNC, None)),), pages) if self._again else pages)

    def _hear(self, changes: Sequence[StateChange]) -> None:
        if self._asked.unique:
            changes = [change for change in changes if change.news]
        if not changes:
            return
        self._changes += changes
        self._weigh(self._bytes + sum(map(_weight_of, changes)))
        connection = self._connection
        if len(self._changes) >= self._changes_max or connection.waiting_bytes > WAITING_BYTES_MAX:
            last = {change.key: change for change in self._changes}
            connection.methods.dropped.inc(len(self._changes) - len(last))
            self._changes = list(last.values())
            self._changes_max = max(CHANGES_MAX, 2 * len(last))
            self._weigh(sum(map(_weight_of, self._changes)))
            if connection.waiting_bytes > WAITING_BYTES_MAX:
                self._start_again()
                return
        self._later()

    def _weigh(self, size: int) -> None:
        """Record the weight of what waits."""
        self._connection.waiting_bytes += size - self._bytes
        self._bytes = size

    def _start_again(self) -> None:
        """Drop what waits, and send the present entries again when the client takes them."""
        self._stop_listening()
        self._connection.methods.dropped.inc(len(self._changes))
        self._changes = []
        self._weigh(0)
        self._pages, self._present, self._again = None, True, True
        self._connection.leave(self)
        self._later()

    def _stop_listening(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _send(self) -> None:
        if self._present:
            if self._stop is None:
                if not self._connection.waits(self) and not self._call.full:
                    self.enter()
                return
            if not self._send_pages():
                return
            self._present, self._pages = False, None
            self._connection.leave(self)
        if self._changes and not self._call.full:
            changes, self._changes, self._changes_max = self._changes, [], CHANGES_MAX
            self._weigh(0)
            told = [m.Change(one.key, one.value, one.version, one.timestamp, one.source) for one in changes]
            for part in _cut(told, _size_of):
                item = _encode((m.CHANGES, part))
                self._connection.methods.delivered.inc(len(part), len(item))
                self._call.send(item)

    def access_changed(self) -> None:
        """Begin again with other rights; rights that only have other rows answer for themselves."""
        if self._call.principal.rights is not self._rights:
            self._rights = self._call.principal.rights
            self._start_again()

    def close(self, *, lost: bool) -> None:
        """Stop listening."""
        super().close(lost=lost)
        self._changes = []
        self._weigh(0)
        self._stop_listening()
        self._give_back()


class _Lock(Stream):
    """A lock, or the wait for it: the stream is the lock, and ends with it."""

    def __init__(
        self, call: Call, waiting: "dict[str, _Lock]", state: State | GuardedState, owner: str, key: str
    ) -> None:
        self._call = call
        self._waiting = waiting
        self._locks = state.locks
        self._owner = owner
        self._key = key
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wait_ms: int | None) -> None:
        """Lock the key, or wait this long for it."""
        if self._locks.acquire(self._key, self._owner, 0):
            self.take()
            return
        if wait_ms is not None and wait_ms <= 0:
            self._locks.drop(self._owner)
            raise LockHeldError(self._key)
        self._waiting[self._owner] = self
        if wait_ms is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._give_up)

    def take(self) -> None:
        """Answer the client that the lock is its own."""
        self._waiting.pop(self._owner, None)
        self._cancel_timer()
        self._call.send(_NIL)

    def _give_up(self) -> None:
        self._call.fail(LockHeldError(self._key))

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def close(self, *, lost: bool) -> None:
        """Release the lock, or end the wait."""
        self._cancel_timer()
        self._waiting.pop(self._owner, None)
        self._locks.drop(self._owner)


_CHANGING = Stream()
"""Stands for every call that waits for the log."""


def _note_failure(done: Promise) -> None:
    if done.error is not None:
        log.warning("jebp: the will of a client waits for the next start: %s", done.error)


def _cut(items: Sequence[Any], size_of: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Yield lists of items of about one page."""
    part: list[Any] = []
    size = 0
    for item in items:
        size += size_of(item) + 32
        part.append(item)
        if size >= m.PAGE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _check_count(items: Sequence[object]) -> None:
    """Check that one call does not hold up the others.

    Raises:
        CallRefusedError: it names too many keys.
    """
    if len(items) > m.KEYS_MAX:
        raise CallRefusedError("bad_argument", f"{len(items):,} keys in one call, {m.KEYS_MAX:,} are possible")


def _entry_size(entry: m.Entry) -> int:
    return len(entry[0]) + len(entry[1])


def _weight_of(change: StateChange) -> int:
    return _size_of(change) + CHANGE_BYTES


def _size_of(change: StateChange | m.Change) -> int:
    return len(change.key) + len(change.value or b"")


def _pages(entries: Sequence[m.Entry]) -> Iterator[bytes]:
    return map(_encode, _cut(entries, _entry_size))


def _present(entries: Sequence[m.Entry]) -> Iterator[bytes]:
    """Yield the items that tell the present entries; there is always a last one."""
    before: list[m.Entry] = []
    for part in _cut(entries, _entry_size):
        if before:
            yield _encode((m.PRESENT, before))
        before = part
    yield _encode((m.PRESENT_LAST, before))
