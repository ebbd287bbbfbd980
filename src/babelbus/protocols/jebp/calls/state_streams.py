"""The streams of `state.*`: pages of entries, watches, and locks, which last as long as their call."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client import Counter

from babelbus.core.access import Action, may, refusal
from babelbus.core.state import GuardedState, LockHeldError, State, StateChange, StateEditor
from babelbus.errors import BabelbusError, LocalProtocolError
from babelbus.metrics import Traffic
from babelbus.protocols.jebp import state_messages as m
from babelbus.protocols.jebp.calls.call import Call, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError

TURN_BYTES: Final = 8 * m.PAGE_BYTES
"""About the most that one stream sends before others have their turn."""
CHANGES_MAX: Final = 1_024
"""Changes that wait for a slow reader before only the last one of each key is kept."""
WAITING_BYTES_MAX: Final = 16 * 2**20
"""Changes that wait for the watches of one connection; beyond them a watch gets the present values again instead."""
CHANGE_BYTES: Final = 200
"""Weight of a change that waits, beside its key and value."""

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_NIL = _encode(None)


class Turns:
    """The streams of one connection: one at a time sends its pages, and what waits for all watches is bounded."""

    def __init__(self, delivered: Traffic, dropped: Counter) -> None:
        self.delivered = delivered
        self.dropped = dropped
        self.waiting_bytes = 0
        """Weight of the changes that wait for the watches."""
        self._turns: deque[Pages] = deque()

    def enter(self, pages: "Pages") -> None:
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

    def waits(self, pages: "Pages") -> bool:
        """Return whether a stream has its turn or waits for it."""
        return pages in self._turns

    def leave(self, pages: "Pages") -> None:
        """End the turn of a stream, or its wait for the turn."""
        turns = self._turns
        if pages not in turns:
            return
        is_first = turns[0] is pages
        turns.remove(pages)
        if is_first and turns:
            asyncio.get_running_loop().call_soon(self._open_next, turns[0])

    def _open_next(self, pages: "Pages") -> None:
        if self._turns and self._turns[0] is pages:
            pages.open_or_fail()


class Pages(Stream):
    """A stream of pages, sent as the client takes them; `read` calls `start` when it has them."""

    def __init__(self, call: Call, turns: Turns, read: "Callable[[Pages], object] | None" = None) -> None:
        self._call = call
        self._turns = turns
        self._read = read
        self._pages: Iterator[bytes] | None = None
        self._result: object = None
        self._over = False
        self._scheduled = False
        self._access_changed = False
        """Whether the rights of the client have changed since the stream began."""

    def enter(self) -> "Pages":
        """Wait for the turn of this stream on its connection."""
        self._turns.enter(self)
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

    def granted(self, items: Iterable[T], action: Action, key_of: Callable[[T], str]) -> Iterator[T]:
        """Yield the items that were read, without those that the client may not have any more."""
        for item in items:
            if not self._access_changed or self._may(action, self._call.principal.absolute(key_of(item))):
                yield item

    def _may(self, action: Action, key: str) -> bool:
        principal = self._call.principal
        if action is Action.SUBSCRIBE:  # the state hides more than the rows do
            return self._call.broker.state_for(principal).may_see(key)
        return may(principal, action, key)

    def resume(self) -> None:
        """Send on."""
        self._later()

    def access_changed(self) -> None:
        """Send no more of what the client may not have any more."""
        self._access_changed = True

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
        self._turns.leave(self)


class Watch(Pages):
    """The present entries of a pattern, then its changes: all of them, in order, as long as the client keeps up.

    For a client that does not, the last change of each key is kept; when these are too much too, it gets the present
    entries again.
    """

    def __init__(self, call: Call, turns: Turns, editor_of: Callable[[], StateEditor], asked: m.WatchValues) -> None:
        super().__init__(call, turns)
        self._editor_of = editor_of
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
        entries, self._stop = self._editor_of().watch(self._asked.pattern, self._hear)
        pages = _present(self.granted(entries, Action.SUBSCRIBE, key_of))
        self.start(itertools.chain((_encode((m.RESYNC, None)),), pages) if self._again else pages)

    def _hear(self, changes: Sequence[StateChange]) -> None:
        if self._asked.unique:
            changes = [change for change in changes if change.news]
        if not changes:
            return
        self._changes += changes
        self._weigh(self._bytes + sum(map(_weight_of, changes)))
        turns = self._turns
        if len(self._changes) >= self._changes_max or turns.waiting_bytes > WAITING_BYTES_MAX:
            last = {change.key: change for change in self._changes}
            turns.dropped.inc(len(self._changes) - len(last))
            self._changes = list(last.values())
            self._changes_max = max(CHANGES_MAX, 2 * len(last))
            self._weigh(sum(map(_weight_of, self._changes)))
            if turns.waiting_bytes > WAITING_BYTES_MAX:
                self._start_again()
                return
        self._later()

    def _weigh(self, size: int) -> None:
        """Record the weight of what waits."""
        self._turns.waiting_bytes += size - self._bytes
        self._bytes = size

    def _start_again(self) -> None:
        """Drop what waits, and send the present entries again when the client takes them."""
        self._stop_listening()
        self._turns.dropped.inc(len(self._changes))
        self._changes = []
        self._weigh(0)
        self._pages, self._present, self._again = None, True, True
        self._turns.leave(self)
        self._later()

    def _stop_listening(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _send(self) -> None:
        if self._present:
            if self._stop is None:
                if not self._turns.waits(self) and not self._call.full:
                    self.enter()
                return
            if not self._send_pages():
                return
            self._present, self._pages = False, None
            self._turns.leave(self)
        if self._changes and not self._call.full:
            changes, self._changes, self._changes_max = self._changes, [], CHANGES_MAX
            self._weigh(0)
            told = [m.Change(one.key, one.value, one.version, one.timestamp, one.source) for one in changes]
            for part in cut(told, _size_of):
                item = _encode((m.CHANGES, part))
                self._turns.delivered.inc(len(part), len(item))
                self._call.send(item)

    def access_changed(self) -> None:
        """End if nothing of the pattern is granted any more; else send nothing that waits and is not granted."""
        before, self._rights = self._rights, self._call.principal.rights
        try:
            self._editor_of().check_watch(self._asked.pattern)
        except BabelbusError as error:
            self._call.fail(error)
            return
        if self._rights is not before:  # the server knows the client by another object: listen with that
            self._start_again()
            return
        super().access_changed()
        self._changes = list(self.granted(self._changes, Action.SUBSCRIBE, _key_of_change))
        self._weigh(sum(map(_weight_of, self._changes)))

    def close(self, *, lost: bool) -> None:
        """Stop listening."""
        super().close(lost=lost)
        self._changes = []
        self._weigh(0)
        self._stop_listening()
        self._give_back()


class Lock(Stream):
    """A lock, or the wait for it: the stream is the lock, and ends with it."""

    def __init__(
        self, call: Call, waiting: "dict[str, Lock]", state: State | GuardedState, owner: str, key: str
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

    def access_changed(self) -> None:
        """Release the lock, or end the wait, if the client may not lock the key any more."""
        principal = self._call.principal
        if not may(principal, Action.WRITE_STATE, self._key):
            self._call.fail(refusal(principal, Action.WRITE_STATE, self._key))

    def close(self, *, lost: bool) -> None:
        """Release the lock, or end the wait."""
        self._cancel_timer()
        self._waiting.pop(self._owner, None)
        self._locks.drop(self._owner)


def cut(items: Iterable[Any], size_of: Callable[[Any], int]) -> Iterator[list[Any]]:
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


def _entry_size(entry: m.Entry) -> int:
    return len(entry[0]) + len(entry[1])


def _weight_of(change: StateChange) -> int:
    return _size_of(change) + CHANGE_BYTES


def _size_of(change: StateChange | m.Change) -> int:
    return len(change.key) + len(change.value or b"")


def key_of(entry: m.Entry) -> str:
    """Return the key of an entry."""
    return entry[0]


def _key_of_change(change: StateChange) -> str:
    return change.key


def pages_of(entries: Iterable[m.Entry]) -> Iterator[bytes]:
    """Yield entries as items."""
    return map(_encode, cut(entries, _entry_size))


def _present(entries: Iterable[m.Entry]) -> Iterator[bytes]:
    """Yield the items that tell the present entries; there is always a last one."""
    before: list[m.Entry] = []
    for part in cut(entries, _entry_size):
        if before:
            yield _encode((m.PRESENT, before))
        before = part
    yield _encode((m.PRESENT_LAST, before))
