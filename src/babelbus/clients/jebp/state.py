"""The state over a client's connection: values, their past, watches, locks and wills (docs/python-client-state.md).

await client.state.set("line1/recipe", {"speed": 3})
entry = await client.state.get("line1/recipe")
async for change in client.state.watch("line1/#"): ...
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any, cast

import msgspec

from babelbus.clients.jebp.calls import MINOR_MIN, Calls, Stream, encode_opening
from babelbus.clients.jebp.connection import Link, Nobody
from babelbus.clients.jebp.errors import (
    ConflictError,
    ConnectionLostError,
    GoneError,
    HistoryGoneError,
    NoSuchKeyError,
    RequestError,
    RequestTimeoutError,
    VersionConflictError,
)
from babelbus.clients.jebp.locks import Lock
from babelbus.clients.jebp.values import Change, Entry, Revision, Revisions, encode_value
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp import state_messages as m
from babelbus.protocols.jebp.messages import Data

log = logging.getLogger(__name__)

REVISIONS_MAX = 1_000
WATCH_BYTES_MAX = 16 * 2**20
"""Items that wait for the reader of a watch; beyond them the watch begins again when the reader has taken them."""
_pack = msgspec.msgpack.encode
_VALUE = msgspec.msgpack.Decoder(tuple[bytes, int] | None)
_ENTRIES = msgspec.msgpack.Decoder(list[m.Entry])
_NAMES: msgspec.msgpack.Decoder[list[str] | None] = msgspec.msgpack.Decoder(list[str] | None)
_GONE = msgspec.msgpack.Decoder(tuple[int, int | None])
_REVISIONS = msgspec.msgpack.Decoder(list[m.Revision])
_NUMBER = msgspec.msgpack.Decoder(int)
_WATCHED = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_CHANGES = msgspec.msgpack.Decoder(list[m.Change])
list_ = list  # `State.list` hides it
_Read = Callable[[str, object], Awaitable[tuple[list_[Data], Data]]]


class State:
    """The state of the server, as `client.state`.

    A lost connection: what only reads is asked again; a change raises `OutcomeUnknownError`, for it may have happened.
    Watches go on, see `watch`; a lock is lost, see `lock`; a will is set again.
    """

    def __init__(self, calls: Calls, *, reconnect: bool) -> None:
        self._calls = calls
        self._reconnect = reconnect
        self._client = os.urandom(8).hex()
        self._will: m.SetWill | None = None

    # -- reading -----------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry:
        """Return the entry of a key.

        Raises:
            NoSuchKeyError: the key has no value.
            NoRightsError, ClientError: see `Client`.
        """
        found = _VALUE.decode(await self._calls.call_body("state.get", (key,), True))
        if found is None:
            raise NoSuchKeyError(f"nothing is stored under {key!r}")
        return Entry(key, *found)

    async def find(self, key: str) -> Entry | None:
        """Return the entry of a key, `None` if the key has no value."""
        found = _VALUE.decode(await self._calls.call_body("state.get", (key,), True))
        return None if found is None else Entry(key, *found)

    async def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of the keys that have a value; a round trip for each 10,000 keys."""
        found: dict[str, Entry] = {}
        wanted = list_(keys)
        for at in range(0, len(wanted), m.KEYS_MAX):
            body = await self._calls.call_body("state.get_many", (wanted[at : at + m.KEYS_MAX],), True)
            found |= {one[0]: Entry(*one) for one in _ENTRIES.decode(body)}
        return found

    async def match(self, pattern: str) -> dict[str, Entry]:
        """Return the entries that match a pattern, all of one moment: `?` is one element, `#` at the end any number."""
        bodies, _ = await self._read("state.match", m.MatchValues(pattern))
        return {one[0]: Entry(*one) for body in bodies for one in _ENTRIES.decode(body)}

    async def list(self, parent: str | None = None) -> list_[str]:
        """Return the names of the children of a key, without a key those of the root.

        Raises:
            NoSuchKeyError: there is no such key.
        """
        names = _NAMES.decode(await self._calls.call_body("state.list", (parent,), True))
        if names is None:
            raise NoSuchKeyError(f"there is no key {parent!r} and no key below it")
        return names

    def as_of(self, *, time: datetime | int | None = None, offset: int | None = None) -> "Past":
        """Return the state as it was at a time (a number: milliseconds since 1970), or after a record of `$state`."""
        if (time is None) == (offset is None):
            raise LocalProtocolError("as of a time or as of an offset: name one of the two")
        return Past(self._read, offset, int(time.timestamp() * 1000) if isinstance(time, datetime) else time)

    async def history(self, key: str, *, before: int | None = None, limit: int = REVISIONS_MAX) -> Revisions:
        """Return the last stored changes of a key (below the offset `before`), oldest first.

        The server bounds them by 64 MiB of values too; ask again with `before` for older ones.
        """
        bodies, result = await self._read("state.history", m.ReadHistory(key, before, limit))
        revisions = [
            Revision(one.offset, one.timestamp, one.value, one.version, one.source)
            for body in bodies
            for one in _REVISIONS.decode(body)
        ]
        return Revisions(revisions, _NUMBER.decode(result))

    async def _read(self, method: str, parameters: object) -> tuple[list_[Data], Data]:
        """Return the items and the result of a stream that only reads, asked again if the connection is lost."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._calls.timeout_seconds
        while True:
            link = await self._calls.link(method, max(deadline - now(), 0))
            try:
                async with Stream(method, link, parameters) as stream:
                    return await stream.read_all(self._calls.timeout_seconds), stream.result or b""
            except (ConnectionLostError, RequestTimeoutError):
                if not self._reconnect or now() >= deadline:
                    raise

    # -- changing ----------------------------------------------------------------------------------------------------

    async def set(self, key: str, value: Any) -> None:
        """Set a plain value: whatever JSON can carry, or bytes (see `Entry.data`), or JSON text as `msgspec.Raw`.

        Raises:
            ConflictError: the key has a value with a version, which only `compare_and_set` changes.
            OutcomeUnknownError: the connection was lost before the answer.
        """
        await self._calls.call_body("state.set", (key, encode_value(value)), False)

    async def set_many(self, values: Mapping[str, Any]) -> None:
        """Set plain values, 10,000 at the most, all or none of them, with one write to the server's log; see `set`."""
        entries = [(key, encode_value(value)) for key, value in values.items()]
        await self._calls.call_body("state.set_many", (entries,), False)

    async def compare_and_set(self, key: str, value: Any, version: int) -> int:
        """Set a value if the key has this version (0: no value, or a plain one), and return the next version.

        Raises:
            VersionConflictError: it has another version: read again, decide again.
            OutcomeUnknownError: the connection was lost before the answer.
        """
        try:
            body = await self._calls.call_body("state.compare_and_set", (key, encode_value(value), version), False)
        except ConflictError as error:
            raise VersionConflictError(str(error), cast("int", error.details)) from error
        return _NUMBER.decode(body)

    async def delete(self, key: str) -> Entry | None:
        """Delete a value and return the entry as it was (version 0), `None` if there was none."""
        found = _VALUE.decode(await self._calls.call_body("state.delete", (key,), False))
        return None if found is None else Entry(key, *found)

    async def delete_match(self, pattern: str) -> int:
        """Delete the values that match a pattern, and return how many they were."""
        return _NUMBER.decode(await self._calls.call_body("state.delete_match", (pattern,), False))

    # -- watching ----------------------------------------------------------------------------------------------------

    async def watch(self, pattern: str, *, unique: bool = False, present: bool = True) -> AsyncGenerator[Change, None]:
        """Yield the present values of a key or pattern, then each change, in order.

        Args:
            pattern: a key, or `?` for one element and `#` at the end for any number.
            unique: leave out changes that set the value that the key had.
            present: begin with the present values (`Change.present`).

        A lost connection, and a reader that is much too slow, cost changes and no values: when the watch goes on, it
        yields the last change of each key that has another value than the watch told, and each key that is gone, with
        `Change.resync`. The watch keeps a number for each key for that.

        Raises:
            ConnectionLostError: the connection was lost, and the client does not reconnect.
            RequestTimeoutError: the server did not begin in time.
            NoRightsError: nothing of the pattern may be read.
        """
        async with aclosing(self.watch_batches(pattern, unique=unique, present=present)) as batches:
            async for batch in batches:
                for change in batch:
                    yield change

    async def watch_batches(
        self, pattern: str, *, unique: bool = False, present: bool = True
    ) -> AsyncGenerator[list_[Change], None]:
        """Yield changes as `watch` does, in lists as they came; the present values end with the first empty list."""
        told = _Told(present=present)
        while True:
            timeout_seconds = None if told.begun else self._calls.timeout_seconds
            link = await self._calls.link("state.watch", timeout_seconds)
            stream = _WatchStream("state.watch", link, m.WatchValues(pattern, unique))
            stream.expect_answer(self._calls.timeout_seconds)
            try:
                async for body in stream:
                    stream.waiting_bytes -= len(body)
                    changes = told.read(body)
                    if changes is not None:
                        yield changes
                if not stream.overrun:
                    raise ConnectionLostError(f"the server ended the watch of {pattern!r}")
            except (ConnectionLostError, RequestTimeoutError) as error:
                if not self._reconnect or (isinstance(error, RequestTimeoutError) and not told.begun):
                    raise
            finally:
                stream.close()
            told.interrupted()

    # -- locks and wills ---------------------------------------------------------------------------------------------

    def lock(self, key: str, *, timeout: float | None = None) -> Lock:
        """Return a lock to hold with `async with`: one holder at a time, in the order of asking, of all protocols.

            async with client.state.lock("line1/recipe", timeout=5):
                ...

        A lock protects no value: it holds back those that ask for it. It is released at the end of the block, and by
        the server when this connection ends. If the connection is lost inside the block, the block is cancelled and
        raises `LockLostError`: somebody else may have the lock.

        Args:
            key: the name, a key of the state; the right to set it is needed.
            timeout: seconds to wait for it; `None` is as long as it takes, 0 not at all.
        """
        return Lock(self._calls, key, timeout, reconnect=self._reconnect)

    async def will(self, *, delete: Iterable[str] = (), set: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        """Keep what the server does when this client is gone: delete what matches patterns, then set plain values.

        It happens once, whatever ended the connection: `close` too, and the end of the server. A new will replaces the
        old one; one without anything takes it back. The client sets it again after each reconnect; what the will of
        the lost connection has changed meanwhile stays changed.
        """
        values = [(key, encode_value(value)) for key, value in (set or {}).items()]
        will = m.SetWill(self._client, [*delete], values)
        before, self._will = self._will, will if will.delete or values else None
        try:
            await self._calls.call_body("state.will", will, True)
        except (LocalProtocolError, RequestError):
            self._will = before  # the server has not taken the new one
            raise

    def connected(self, link: Link) -> None:
        """Set the will again on a new connection, in front of all other calls."""
        if self._will is not None and link.minor >= MINOR_MIN:
            link.open_call(encode_opening("state.will", self._will), _WillAgain())


class Past:
    """The state as it was, see `State.as_of`. A question reads the server's log: about a second for a million records.

    Raises:
        HistoryGoneError: compaction has removed changes of that time; the error names the earliest that is left.
        BadArgumentError: the offset has not been written yet.
        NoRightsError: the past needs the right to `read`.
    """

    def __init__(self, read: _Read, offset: int | None, time_ms: int | None) -> None:
        self._read = read
        self._offset = offset
        self._time_ms = time_ms

    async def get(self, key: str) -> Entry:
        """Return the entry of a key. Raises: NoSuchKeyError."""
        found = await self.find(key)
        if found is None:
            raise NoSuchKeyError(f"nothing was stored under {key!r} then")
        return found

    async def find(self, key: str) -> Entry | None:
        """Return the entry of a key, `None` if it had no value."""
        return (await self._ask(key, None)).get(key)

    async def match(self, pattern: str) -> dict[str, Entry]:
        """Return the entries that matched a pattern; `#` is the whole tree."""
        return await self._ask(None, pattern)

    async def _ask(self, key: str | None, pattern: str | None) -> dict[str, Entry]:
        try:
            bodies, _ = await self._read("state.as_of", m.ReadPast(key, pattern, self._offset, self._time_ms))
        except GoneError as error:
            raise HistoryGoneError(str(error), *_GONE.decode(_pack(error.details))) from error
        return {one[0]: Entry(*one) for body in bodies for one in _ENTRIES.decode(body)}


class _Told:
    """The values that a watch has told, as a number for each key: an interruption costs no value."""

    def __init__(self, *, present: bool) -> None:
        self._present = present
        self._values: dict[str, int] = {}
        self._now: dict[str, int] | None = {}
        """The present values as far as they are known, while they come."""
        self.begun = False

    def interrupted(self) -> None:
        """Handle the end of a stream: the present values come again."""
        self._now = {}

    def read(self, body: Data) -> list[Change] | None:
        """Return the changes of an item, `None` if it tells none."""
        kind, content = _WATCHED.decode(body)
        if kind == m.CHANGES:
            return self._changed(_CHANGES.decode(content))
        if kind == m.RESYNC:
            self.interrupted()
            return None
        if self._now is None:
            raise RemoteProtocolError("the present values of a watch came unasked")
        again, now = self.begun, self._now
        changes = []
        for key, raw, version in _ENTRIES.decode(content):
            number = now[key] = hash((raw, version))
            if again and self._values.get(key) == number:
                continue
            changes.append(Change(key, raw, version, present=not again, resync=again))
        if kind == m.PRESENT_LAST:
            if again:
                changes += [Change(key, None, resync=True) for key in self._values if key not in now]
            self._values, self._now, self.begun = now, None, True
        if again:
            return changes or None
        return changes if self._present else None

    def _changed(self, found: list[m.Change]) -> list[Change]:
        values = self._values
        for one in found:
            if one.value is None:
                values.pop(one.key, None)
            else:
                values[one.key] = hash((one.value, one.version))
        return [Change(one.key, one.value, one.version, one.timestamp, one.source) for one in found]


class _WatchStream(Stream):
    """The stream of a watch; ends itself when its reader is so slow that too much waits."""

    waiting_bytes = 0
    overrun = False

    def item(self, body: Data) -> None:
        """Append an item, or end the stream behind it."""
        super().item(body)
        self.waiting_bytes += len(body)
        if self.waiting_bytes > WATCH_BYTES_MAX:
            self.overrun = True
            self.close()


class _WillAgain(Nobody):
    """The receiver of the answer to a will that was set again; if the connection is lost, the next one sets it."""

    def failed(self, code: str, message: str, details: object) -> None:
        log.warning("the will of this client is not set again: %s", message)
