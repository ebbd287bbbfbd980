"""The methods `state.*` of jebp/1.2 over the state of the core (docs/protocols/jebp.md).

Changes take effect in the order of the calls. All changes of one frame are one commit, and their calls are answered
when the log has it.
"""

import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import Action, Identity
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
    StateEditor,
    VersionedError,
    VersionMismatchError,
    editor_for,
)
from babelbus.metrics import Metrics, Traffic
from babelbus.protocols.jebp import state_messages as m
from babelbus.protocols.jebp.calls.call import Call, Calls, Family, Method, Stream
from babelbus.protocols.jebp.calls.errors import CODES, CallRefusedError
from babelbus.protocols.jebp.calls.state_streams import Lock, Pages, Turns, Watch, cut, key_of, pages_of
from babelbus.protocols.jebp.messages import PROTOCOL
from babelbus.protocols.jebp.staging_session import own_id
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
_encode = msgspec.msgpack.Encoder().encode
_NIL = _encode(None)

ReadValue = Callable[[bytes], bytes]


class StateMethods:
    """The methods of one server, and what its connections share: who waits for a lock, and whose a will is."""

    def __init__(self, state: State, clock: Clock, read_value: ReadValue, metrics: Metrics) -> None:
        self.clock = clock
        self.read_value = read_value
        self.locks: dict[str, Lock] = {}
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
        entries = [entry for entry in map(editor.find, asked.keys) if entry is not None]
        size_bytes = sum([len(value) for _, value, _ in entries])
        if size_bytes > call.body_bytes_max:  # a key may be named ten thousand times
            raise CallRefusedError("too_large", f"{size_bytes} bytes of values are over the frame limit")
        return entries

    def _match(self, call: Call, asked: m.MatchValues) -> Stream:
        connection = self._connection(call)

        def read(pages: Pages) -> None:
            entries = connection.editor.entries(asked.pattern)
            pages.start(pages_of(pages.granted(entries, Action.SUBSCRIBE, key_of)), len(entries))

        return Pages(call, connection.turns, read).enter()

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

        async def read(pages: Pages) -> None:
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
            pages.start(pages_of(pages.granted(entries, Action.READ, key_of)), len(entries))

        return Pages(call, connection.turns, lambda pages: call.run(read(pages))).enter()

    def _history(self, call: Call, asked: m.ReadHistory) -> Stream:
        connection = self._connection(call)
        if asked.count_max < 1:
            raise CallRefusedError("bad_argument", f"{asked.count_max} revisions: ask for 1 or more")

        async def read(pages: Pages) -> None:
            found, complete_from = await connection.editor.revisions(asked.key, asked.before, asked.count_max)
            told = [m.Revision(one.offset, one.timestamp, one.value, one.version, one.source) for one in found]
            granted = pages.granted(told, Action.READ, lambda _: asked.key)
            pages.start(map(_encode, cut(granted, lambda one: len(one.value or b"") + len(one.source))), complete_from)

        return Pages(call, connection.turns, lambda pages: call.run(read(pages))).enter()

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
        return Watch(call, connection.turns, lambda: connection.editor, asked)

    def _lock(self, call: Call, asked: m.LockKey) -> Stream:
        connection = self._connection(call)
        connection.editor.check_key(asked.key)
        owner = f"{call.principal.source}#{next(self.numbers)}"
        root = call.principal.root
        key = asked.key if root is None else root.absolute(asked.key)
        lock = Lock(call, self.locks, connection.state, owner, key)
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
        self._will = ""
        self.turns = Turns(methods.delivered, methods.dropped)
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

    def set_will(self, call: Call, asked: m.SetWill) -> Stream:
        """Keep a will, until this connection ends or the client sets it on another one."""
        _check_count([*asked.delete, *asked.values])
        owner = f"{PROTOCOL}/{own_id(call.principal, asked.client)}"
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
            state.execute_in_turns(
                owner, self._calls.principal.source, lambda: self.editor.commit().when_done(_note_failure)
            )


_CHANGING = Stream()
"""Stands for every call that waits for the log."""


def _note_failure(done: Promise) -> None:
    if done.error is not None:
        log.warning("jebp: the will of a client waits for the next start: %s", done.error)


def _check_count(items: Sequence[object]) -> None:
    """Check that one call does not hold up the others.

    Raises:
        CallRefusedError: it names too many keys.
    """
    if len(items) > m.KEYS_MAX:
        raise CallRefusedError("bad_argument", f"{len(items):,} keys in one call, {m.KEYS_MAX:,} are possible")
