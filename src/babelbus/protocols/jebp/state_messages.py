"""Parameters, items and results of the methods `state.*` of jebp/1.2 (docs/protocols/jebp.md); both sides use them.

A value is JSON text in bytes. An entry is `(key, value, version)`; version 0 is a plain value.
"""

from typing import Final

import msgspec

Entry = tuple[str, bytes, int]
Setting = tuple[str, bytes]
"""Key and value of a change."""

PAGE_BYTES: Final = 64 * 1024
"""About the size of one item with entries, changes or revisions."""
KEYS_MAX: Final = 10_000
"""Most keys of `state.get_many` and `state.set_many`."""
PRESENT: Final = 0
PRESENT_LAST: Final = 1
CHANGES: Final = 2
RESYNC: Final = 3
"""Kinds of the items of a watch: a page of the present entries, the last page, changes, and that changes were left out:
the present entries follow again."""


class GetValue(msgspec.Struct, frozen=True, array_like=True):
    """`state.get`: the result is `(value, version)`, or nil."""

    key: str


class GetValues(msgspec.Struct, frozen=True, array_like=True):
    """`state.get_many`: the result is a list of entries, without the keys that have no value."""

    keys: list[str]


class MatchValues(msgspec.Struct, frozen=True, array_like=True):
    """`state.match`, a stream: pages of entries, all of one moment; the result is their number."""

    pattern: str


class ReadPast(msgspec.Struct, frozen=True, array_like=True):
    """`state.as_of`, a stream: pages of the entries that a key or a pattern had after a record, or up to a time (ms).

    Two of the four are nil. The result is the number of entries.
    """

    key: str | None
    pattern: str | None
    offset: int | None
    time_ms: int | None


class ReadHistory(msgspec.Struct, frozen=True, array_like=True):
    """`state.history`, a stream: pages of the last `count_max` revisions of a key below an offset, oldest first.

    The result is the offset from which on no revision is missing.
    """

    key: str
    before: int | None
    count_max: int


class SetValue(msgspec.Struct, frozen=True, array_like=True):
    """`state.set`: set a plain value; the result is nil."""

    key: str
    value: bytes


class SetValues(msgspec.Struct, frozen=True, array_like=True):
    """`state.set_many`: set plain values, all or none; the result is nil."""

    entries: list[Setting]


class CompareAndSet(msgspec.Struct, frozen=True, array_like=True):
    """`state.compare_and_set`: set a value if the key has `version`; the result is the next version."""

    key: str
    value: bytes
    version: int


class DeleteValue(msgspec.Struct, frozen=True, array_like=True):
    """`state.delete`: the result is `(value, 0)`, the deleted value, or nil if there was none."""

    key: str


class DeleteMatching(msgspec.Struct, frozen=True, array_like=True):
    """`state.delete_match`: the result is the number of deleted entries."""

    pattern: str


class ListChildren(msgspec.Struct, frozen=True, array_like=True):
    """`state.list`: the result is the names of the children of a key (nil: the root), nil if there is no such key."""

    parent: str | None


class WatchValues(msgspec.Struct, frozen=True, array_like=True):
    """`state.watch`, a stream of `(kind, entries or changes)`; with `unique` without changes that change no value."""

    pattern: str
    unique: bool = False


class LockKey(msgspec.Struct, frozen=True, array_like=True):
    """`state.lock`, a stream: one item, nil, when the lock is held; the stream is the lock, its end the release.

    Without the lock after `wait_ms` (nil: as long as it takes) the call ends with `locked`.
    """

    key: str
    wait_ms: int | None


class SetWill(msgspec.Struct, frozen=True, array_like=True):
    """`state.will`: what is deleted (patterns) and then set when the connection ends; nothing at all takes it back.

    `client` is a random name of the client: a will that it sets on a new connection replaces that of the old one.
    """

    client: str
    delete: list[str]
    values: list[Setting]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One change in an item of a watch; the value is nil if it was deleted."""

    key: str
    value: bytes | None
    version: int
    timestamp: int
    source: str


class Revision(msgspec.Struct, frozen=True, array_like=True):
    """One stored change in an item of `state.history`."""

    offset: int
    timestamp: int
    value: bytes | None
    version: int
    source: str
